"""Result files to curves, tables, CSV and figures; imports no torch and needs no display."""

import csv
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from utils.errors import InputError
from utils.files import open_h5, replacing
from utils.model_utils import dataset_name
from utils.partition import literal

if TYPE_CHECKING:
    from utils.grid import Published

FORMATS = (".png", ".pdf", ".svg")
QUANTITIES = {
    "rs_glob_acc": "test_acc",
    "rs_train_acc": "train_acc",
    "rs_train_loss": "train_loss",
    "rs_test_loss": "test_loss",
    "theta_test_acc": "theta_test_acc",
    "local_test_acc": "local_test_acc",
}
EVALUATED = {"theta": "personalised theta", "local": "local w_i", "alone": "trained alone"}
EVALUATED["finetuned"] = "fine-tuned"
# `--semantics` sets these; where they follow from it, naming it says enough. Importing them from
# utils.config would bring torch along.
SWITCHES = {"inner_weight_decay", "theta_start", "weighting", "personal", "batches"}
SWITCHES |= {"peravg_update", "adapt", "shared_init"}
# Said elsewhere in the figure and the table.
APART = {"dataset", "model", "algorithm", "num_global_iters"}
# These change no numbers.
SETUP = {"times", "repetition", "optimizer", "gpu", "block_size", "threads", "results_dir"}
SETUP |= {
    "data_dir",
    "save_every",
    "save_models",
    "jobs",
    "lockstep",
    "state_device",
    "resume",
    "log_file",
}
# Okabe and Ito's colours without yellow, which is too faint for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("", "s", "^", "v", "D", "P")
# From this ratio of largest to smallest on, a panel gets a log scale.
WIDE = 10


@dataclass(frozen=True)
class Run:
    """One result file; `values` are (repetitions, evaluations), one row unless `stacked`."""

    path: Path
    config: dict
    options: tuple[str, ...]
    evaluates: str
    identity: str
    repetition: str
    status: str
    rounds: np.ndarray
    values: dict[str, np.ndarray]
    stacked: bool
    # A legacy file that was named by itself; it joins the only other figure.
    guest: bool = False

    @property
    def group(self) -> tuple[str, str]:
        return self.config["dataset"], self.config["model"]


Key = tuple[str, str]  # a configuration's identity, and the evaluated model


@dataclass(frozen=True)
class Curve:
    """The repetitions of one configuration and one evaluated model."""

    group: tuple[str, str]
    algorithm: str
    evaluates: str
    identity: str
    options: str
    repetitions: str
    note: str
    rounds: np.ndarray
    values: dict[str, np.ndarray]
    beside: bool = False  # not the configuration's own choice of a personalised model

    @property
    def key(self) -> Key:
        return self.identity, self.evaluates

    @property
    def label(self) -> str:
        parts = (self.algorithm, evaluated(self), self.options)
        count = "average" if self.repetitions == "avg" else f"n={self.repetitions}"
        remarks = (count, self.note)
        return f"{', '.join(filter(None, parts))} ({', '.join(filter(None, remarks))})"

    def mean(self, quantity: str) -> np.ndarray:
        return self.values[quantity].mean(axis=0)

    def std(self, quantity: str) -> np.ndarray | None:
        """Over repetitions, n-1; None for a single one."""
        rows = self.values[quantity]
        with np.errstate(invalid="ignore"):
            return rows.std(axis=0, ddof=1) if len(rows) > 1 else None


def notice(text: str) -> None:
    """One line that is no error and no result."""
    print(f"notice: {text}", file=sys.stderr)


# ---- reading ----


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """All results among files and folders; a bad file is an error if named, else a notice."""
    runs: dict[Path, Run] = {}
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: no such file or folder; run main.py first, or name others")
        if not path.is_dir():
            runs[path.resolve()] = read_run(path)
            continue
        for file in sorted(path.glob("*.h5")):
            try:
                run = read_run(file)
            except InputError as error:
                notice(f"left out: {error}")
                continue
            runs.setdefault(file.resolve(), replace(run, guest=False))
    if not runs:
        where = ", ".join(map(str, paths))
        raise InputError(
            f"{where}: no readable .h5 result there; run main.py first, or name others"
        )
    return list(runs.values())


def read_run(path: Path) -> Run:
    """The curves and attributes of one file; a file without attributes is a legacy one."""
    with open_h5(path) as file:
        schema = file.attrs.get("schema", 0)
        if schema not in (0, 1):
            raise InputError(f"{path}: schema {schema} is unknown; this version reads 1")
        about = _described(file.attrs) if schema else _legacy(path)
        json.dumps(about, ensure_ascii=False).encode()  # raises on text that cannot be drawn
        rows = dict(file.get("runs", {}))
        values = {
            name: np.atleast_2d(np.asarray((rows if key in rows else file)[key], float))
            for key, name in QUANTITIES.items()
            if key in file
        }
        length = values["test_acc"].shape[1]
        rounds = np.asarray(file["round"] if "round" in file else range(length), int)
    if not length:
        raise InputError(f"{path}: holds no evaluations")
    if any(v.shape[1:] != rounds.shape for v in values.values()):
        raise InputError(f"{path}: damaged, its curves and rounds differ in length")
    return Run(path=path, rounds=rounds, values=values, stacked=bool(rows), **about)


def _described(attrs: h5py.AttributeManager) -> dict:
    config = json.loads(attrs["config"])
    if not all(isinstance(config[key], str) for key in ("dataset", "model", "algorithm")):
        raise TypeError(config)
    # FILE.py:Class@HASH goes by its class; trainmodel.custom.label would bring torch along.
    model = config["model"].rpartition(":")[2].partition("@")[0]
    return {
        "config": config | {"dataset": dataset_name(config["dataset"]), "model": model},
        "options": tuple(json.loads(attrs["options"])),
        **{key: str(attrs[key]) for key in ("evaluates", "identity", "repetition", "status")},
    }


def _legacy(path: Path) -> dict:
    # Nothing but the name tells what such a file holds; `_p_` marks the personalised model.
    name = path.stem
    config = {"dataset": "legacy", "model": "", "algorithm": name, "folder": path.parent.name}
    return {
        "config": config,
        "options": (),
        "evaluates": "personalised" if "_p_" in name else "global",
        "identity": str(path.parent / name.replace("_p_", "_")),
        "repetition": "avg" if name.endswith("_avg") else "0",
        "status": "finished",
        "guest": True,
    }


def select(runs: list[Run], wanted: dict[str, list[str]], only: str | None) -> list[Run]:
    """The runs with the wanted config values; legacy files that were named themselves stay."""
    for key, names in wanted.items():
        there = sorted({run.config[key] for run in runs} - {""})
        if missing := [name for name in names if name not in there]:
            raise InputError(f"--{key} {missing[0]}: no such results; there are {', '.join(there)}")
        runs = [run for run in runs if run.guest or run.config[key] in names]
    kept = [run for run in runs if only in (None, _kind(run.evaluates))]
    if not kept:
        raise InputError(f"--only {only}: no such results; there are only the others")
    return kept


def _kind(evaluates: str) -> str:
    return "global" if evaluates == "global" else "personal"


# ---- averaging ----


def make_curves(runs: list[Run]) -> list[Curve]:
    """One curve per configuration and evaluated model; unfinished repetitions make their own."""
    runs = _adopt_guests(_without_averages(runs))
    options = _describe(runs)
    sets: dict[tuple, list[Run]] = {}
    for run in runs:
        sets.setdefault((run.identity, run.evaluates, run.status == "finished"), []).append(run)
    curves = [_average(members, options[members[0].identity]) for members in sets.values()]
    return sorted(curves, key=_order)


def with_beside(curves: list[Curve]) -> list[Curve]:
    """The same curves, and after each those of the models its file holds beside the chosen one."""
    found = []
    for curve in curves:
        found.append(curve)
        for name in ("theta", "local"):
            if name != curve.evaluates and f"{name}_test_acc" in curve.values:
                values = {"test_acc": curve.values[f"{name}_test_acc"]}
                found.append(replace(curve, evaluates=name, values=values, beside=True))
    return found


def evaluated(curve: Curve) -> str:
    """How the legend calls the evaluated model."""
    return EVALUATED.get(curve.evaluates, curve.evaluates)


def _order(curve: Curve) -> tuple:
    # Odd places hold the numbers, so that batch_size=5 comes before batch_size=20.
    parts = re.split(r"(\d+(?:\.\d+)?)", curve.options)
    natural = [float(part) if i % 2 else part for i, part in enumerate(parts)]
    model = (_kind(curve.evaluates), curve.evaluates)
    return curve.group, curve.algorithm.lower(), natural, model, curve.note


def _without_averages(runs: list[Run]) -> list[Run]:
    kept: dict[tuple, Run] = {}
    for run in runs:
        key = (run.identity, run.evaluates, run.repetition)
        if key in kept:
            notice(f"left out: {run.path}, the same repetition as {kept[key].path}")
        kept.setdefault(key, run)
    single = {key[:2] for key in kept if key[2] != "avg"}
    return [run for key, run in kept.items() if key[2] != "avg" or key[:2] not in single]


def _adopt_guests(runs: list[Run]) -> list[Run]:
    groups = {run.group for run in runs if not run.guest}
    if len(groups) != 1:
        return runs
    dataset, model = groups.pop()
    home = {"dataset": dataset, "model": model}
    return [replace(r, config={**r.config, **home}) if r.guest else r for r in runs]


def _average(runs: list[Run], options: str) -> Curve:
    first = runs[0]
    rounds = reduce(np.intersect1d, [run.rounds for run in runs])
    names = [name for name in first.values if all(name in run.values for run in runs)]
    values = {
        name: np.concatenate([r.values[name][:, np.isin(r.rounds, rounds)] for r in runs])
        for name in names
    }
    ends = sorted({int(run.rounds[-1]) for run in runs})
    states = sorted({run.status for run in runs} - {"finished"})
    at = f"round {ends[0]}" if len(ends) == 1 else f"rounds {ends[0]} to {ends[-1]}"
    count = len(values["test_acc"])
    mean_only = first.repetition == "avg" and not first.stacked
    curve = Curve(
        group=first.group,
        algorithm=first.config["algorithm"],
        evaluates=first.evaluates,
        identity=first.identity,
        options=options,
        repetitions="avg" if mean_only else str(count),
        note=f"{' or '.join(states)} at {at}" if states else "",
        rounds=rounds,
        values=values,
    )
    if any(len(run.rounds) != len(rounds) for run in runs):
        notice(f"{curve.label}: unequal lengths, averaged over the {len(rounds)} common rounds")
    return curve


def _describe(runs: list[Run]) -> dict[str, str]:
    """Per identity, the options that tell it from the other curves of its figure.

    Options that all algorithms read are compared over the whole figure, the others among the
    configurations of one algorithm.
    """
    labels = {}
    for _, members in groupby(sorted(runs, key=lambda r: r.group), key=lambda r: r.group):
        figure = list(members)
        everywhere = [o for o in figure[0].options if all(o in r.options for r in figure)]
        shared = _differing([r.config for r in figure], set(everywhere) - SWITCHES - APART)
        # Which data judge is told even where it is the same everywhere.
        official = {"test_set"} if any(r.config.get("test_set") == "global" for r in figure) else ()
        shared = [option for option in everywhere if option in shared or option in official]
        by_algorithm: dict[str, dict[str, Run]] = {}
        for run in figure:
            by_algorithm.setdefault(run.config["algorithm"], {})[run.identity] = run
        for same in by_algorithm.values():
            labels.update(_tell_apart(same, shared))
    return labels


def _tell_apart(runs: dict[str, Run], shared: list[str]) -> dict[str, str]:
    read = dict.fromkeys(option for run in runs.values() for option in run.options)
    every = dict.fromkeys(option for run in runs.values() for option in run.config)
    for keys in (read, every):
        own = _differing([run.config for run in runs.values()], keys)
        names = list(dict.fromkeys([*shared, *own]))
        labels = {
            identity: ", ".join(f"{name}={_show(run.config.get(name))}" for name in names)
            for identity, run in runs.items()
        }
        if len(set(labels.values())) == len(runs):
            return labels
    # The same options on other data: only the identity is left to tell them apart.
    return {identity: f"{label} #{identity[:6]}".strip() for identity, label in labels.items()}


def _differing(configs: list[dict], keys: Iterable[str]) -> list[str]:
    def values(key: str, among: list[dict]) -> set[str]:
        return {_show(config.get(key)) for config in among}

    names = [key for key in keys if key not in SETUP and len(values(key, configs)) > 1]
    if "semantics" not in names:
        return names
    presets = [
        [c for c in configs if _show(c.get("semantics")) == s] for s in values("semantics", configs)
    ]
    return [
        key
        for key in names
        if key not in SWITCHES or any(len(values(key, preset)) > 1 for preset in presets)
    ]


def _show(value: object) -> str:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.12g}" if plain else str(value)


# ---- table and CSV ----


def meaning(target: float) -> str:
    """What the columns of the tables hold."""
    return (
        "Test accuracy in %: mean +- std over n repetitions (std with n-1).\n"
        "best on test: each repetition's best; last 10: mean of its last 10 evaluations;\n"
        f"rounds to {100 * target:g} %: first evaluated round in which the mean curve is there."
    )


def table(curves: list[Curve], target: float) -> str:
    """One row per curve."""
    head = ("algorithm", "evaluated model", "options that differ", "n", "last round")
    head += ("last", "best on test", "last 10", f"rounds to {100 * target:g} %")
    rows = [head, *(_row(curve, target) for curve in curves)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _row(curve: Curve, target: float) -> tuple[str, ...]:
    accuracy = 100 * curve.values["test_acc"]
    figures = (*last_and_best(curve), accuracy[:, -10:].mean(axis=1))
    reached = np.flatnonzero(curve.mean("test_acc") >= target)
    return (
        curve.algorithm,
        evaluated(curve),
        curve.options or "-",
        curve.repetitions,
        curve.note or str(curve.rounds[-1]),
        *map(_mean_std, figures),
        str(curve.rounds[reached[0]]) if len(reached) else "-",
    )


def last_and_best(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Each repetition's last test accuracy and its best one, in percent."""
    accuracy = 100 * curve.values["test_acc"]
    # fmax, because a diverged run may end in NaN.
    return accuracy[:, -1], np.fmax.reduce(accuracy, axis=1)


def _mean_std(figures: np.ndarray) -> str:
    spread = f" +- {figures.std(ddof=1):.2f}" if len(figures) > 1 else ""
    return f"{figures.mean():.2f}{spread}"


def write_csv(path: Path, curves: list[Curve]) -> None:
    """All curves in long form; accuracies as fractions, std empty for a single repetition."""
    head = "dataset,model,algorithm,evaluates,label,round,quantity,mean,std,n"
    with replacing(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head.split(","))
        for curve in curves:
            about = (*curve.group, curve.algorithm, curve.evaluates, curve.label)
            for name in curve.values:
                std = curve.std(name)
                spreads = [""] * len(curve.rounds) if std is None else std.tolist()
                points = zip(curve.rounds, curve.mean(name).tolist(), spreads, strict=True)
                for t, mean, spread in points:
                    writer.writerow((*about, t, name, mean, spread, curve.repetitions))


# ---- figure ----


def draw(
    curves: list[Curve], title: str = "", published: Mapping[Key, "Published"] | None = None
) -> Figure:
    """Test accuracy and train loss over the rounds, the legend below.

    `published`: values to mark in the accuracy panel.
    """
    columns = 2 if max(len(curve.label) for curve in curves) <= 66 else 1
    legend_rows = -(-len(curves) // columns)
    figure = Figure(figsize=(10, 4.1 + 0.2 * legend_rows), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    identities = list(dict.fromkeys(curve.identity for curve in curves))
    covers = [sum(_coincide(c, later) for later in curves[i + 1 :]) for i, c in enumerate(curves)]
    for curve, above in zip(curves, covers, strict=True):
        style = _style(curve, identities.index(curve.identity), above)
        _plot(left, curve, "test_acc", 100, style)
        _plot(right, curve, "train_loss", 1, style)
        if published and curve.key in published:
            _mark(left, published[curve.key], style["color"], curve.rounds[-1])
    left.set_ylabel("test accuracy (%)")
    right.set_ylabel("train loss")
    _fit_accuracy(left, [curve.mean("test_acc") for curve in curves])
    _fit_loss(right, [curve.mean("train_loss") for curve in curves if "train_loss" in curve.values])
    for axes in (left, right):
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title or " ".join(filter(None, curves[0].group)))
    hints = {
        "dashed: global model": any(curve.evaluates == "global" for curve in curves),
        "dash-dotted: model beside the chosen one": any(curve.beside for curve in curves),
        "x and bar at the end: published curve and best on test": bool(published),
        "wide: another curve lies on it": any(covers),
        "dotted: not finished": any(curve.note for curve in curves),
        "band: +-1 std over the repetitions": any(len(c.values["test_acc"]) > 1 for c in curves),
    }
    figure.legend(
        handles=[h for h in left.get_lines() if not h.get_label().startswith("_")],
        loc="outside lower center",
        ncols=columns,
        fontsize="small",
        title="; ".join(hint for hint, applies in hints.items() if applies),
        title_fontsize="small",
        handlelength=3,
        frameon=False,
    )
    return figure


def _coincide(one: Curve, other: Curve) -> bool:
    """Whether one line would hide the other: 0.1 points apart at most, on average over rounds."""
    if one.evaluates != other.evaluates or not np.array_equal(one.rounds, other.rounds):
        return False
    return np.abs(one.mean("test_acc") - other.mean("test_acc")).mean() <= 0.001


def _style(curve: Curve, index: int, covers: int) -> dict:
    shape = MARKERS[index // len(COLOURS) % len(MARKERS)]
    dash = "--" if curve.evaluates == "global" else "-." if curve.beside else "-"
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": ":" if curve.note else dash,
        "marker": shape or ("o" if len(curve.rounds) == 1 else ""),
        "markevery": max(1, len(curve.rounds) // 10),
        "markersize": 5,
        "linewidth": (0.9 if curve.beside else 1.4) + 1.2 * covers,
        "alpha": 0.7 if curve.beside else 1.0,
        "label": curve.label,
    }


def _plot(axes: Axes, curve: Curve, quantity: str, unit: float, style: dict) -> None:
    if quantity not in curve.values:
        return
    mean, std = unit * curve.mean(quantity), curve.std(quantity)
    axes.plot(curve.rounds, mean, **style)
    if std is not None:
        band = (mean - unit * std, mean + unit * std)
        axes.fill_between(curve.rounds, *band, color=style["color"], alpha=0.18, linewidth=0)


def _mark(axes: Axes, told: "Published", colour: str, last: int) -> None:
    if told.curve:
        points = [point for point in sorted(told.curve.items()) if point[0] <= last]
        axes.plot(*zip(*points, strict=True), "x", color="black", markersize=6, zorder=3)
    if told.best:
        axes.errorbar(1.02 * last, *told.best, fmt="_", color=colour, markersize=14, capsize=3)


def _fit_accuracy(axes: Axes, means: list[np.ndarray]) -> None:
    """Log scale of the error where a linear axis would press the upper curves together.

    The first percent of a long curve's evaluations may leave the panel below.
    """
    errors = 100 - 100 * _finite([mean[len(mean) // 100 :] for mean in means])
    least = min(errors[errors > 0], default=np.inf) / 1.2
    if not np.isfinite(least):
        return
    if errors.max() <= WIDE * least:
        margin = 0.05 * np.ptp(errors) + 0.1
        axes.set_ylim(100 - errors.max() - margin, 100 - errors.min() + margin)
        return

    def forward(accuracy: np.ndarray) -> np.ndarray:
        # No error at all has no logarithm; it is drawn on the upper edge.
        return -np.log10(np.maximum(100 - accuracy, least))

    axes.set_yscale("function", functions=(forward, lambda level: 100 - 10**-level))
    axes.set_ylim(100 - min(100, 1.1 * errors.max()), 100 - least)
    steps = [10.0**power * step for power in range(-3, 2) for step in (2, 3, 5, 7, 10)]
    axes.yaxis.set_major_locator(FixedLocator([100 - e for e in steps if e >= least]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_ylabel("test accuracy (%), log scale of the error")


def _fit_loss(axes: Axes, means: list[np.ndarray]) -> None:
    """Log scale for a wide range; one exploding curve may leave the panel, the others stay."""
    losses = _finite(means)
    low = min(losses[losses > 0], default=np.inf)
    peaks = sorted(max(_finite([mean]), default=0) for mean in means)
    high = min(peaks[-1], 10 * peaks[(len(peaks) - 1) // 2]) if peaks else 0
    if high > WIDE * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.2, high * 1.2)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _finite(curves: Iterable[np.ndarray]) -> np.ndarray:
    points = np.concatenate([np.empty(0), *curves])
    return points[np.isfinite(points)]


def save(figure: Figure, path: Path) -> None:
    """Write the figure under its name only once it is complete."""
    # Without dates, the same curves give the same file.
    dates = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    suffix = path.suffix.lower()
    literal(figure)
    with replacing(path) as part:
        figure.savefig(part, format=suffix[1:], dpi=150, metadata=dates.get(suffix))
