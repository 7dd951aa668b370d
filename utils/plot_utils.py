"""Result files to curves, tables, CSV and figures; imports no torch and needs no display."""

import colorsys
import csv
import json
import platform
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    Locator,
    LogLocator,
    MaxNLocator,
    NullLocator,
    StrMethodFormatter,
)

from utils.errors import InputError
from utils.files import is_alive, open_h5, replacing, visible
from utils.measures import late_mean, over_users
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
# Their users upload nothing, so that their global model is the initial one.
UNTRAINED = {"Local"}
# Said elsewhere in the figure and the table.
APART = {"dataset", "model", "algorithm", "num_global_iters"}
# These change no numbers.
SETUP = {"times", "repetition", "optimizer", "gpu", "block_size", "threads", "results_dir"}
SETUP |= {
    "data_dir",
    "split_dir",
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
SPLIT_SEED = re.compile(r"\bseed=(\d+)")
MARKERS = ("", "s", "^", "v", "D", "P")
SCALES = ("linear", "log")
# What the curves may be drawn over: the columns of a file's `work` that are summed, and a title.
OVER = {
    "round": ((), "round"),
    "gradients": (("gradients",), "gradients so far"),
    "bytes": (("bytes_down", "bytes_up"), "bytes sent so far, down and up"),
}
# From this ratio of largest to smallest on, a log scale has its own kind of ticks; a loss that
# exceeds the usual one by it may leave the panel.
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
    users: np.ndarray | None  # as a value: test accuracies averaged over users
    work: dict[str, np.ndarray]  # per evaluation, of all rounds so far; empty in older files
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
    users: np.ndarray | None = None  # each repetition's last test accuracy averaged over users
    work: Mapping[str, np.ndarray] = field(default_factory=dict)  # mean over repetitions
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
        for file in visible(path, "*.h5"):
            try:
                run = read_run(file)
            except InputError as error:
                notice(f"left out: {error}")
                continue
            runs.setdefault(file.resolve(), replace(run, guest=False))
    where = ", ".join(map(str, paths))
    if not runs:
        raise InputError(
            f"{where}: no readable .h5 result there; run main.py first, or name others"
        )
    kept = trained(list(runs.values()))
    if not kept:
        raise InputError(
            f"{where}: only initial models there, since nobody uploads anything; name the _p files"
        )
    return kept


def read_run(path: Path) -> Run:
    """The curves and attributes of one file; a file without attributes is a legacy one."""
    with open_h5(path) as file:
        schema = file.attrs.get("schema", 0)
        if schema not in (0, 1):
            raise InputError(f"{path}: schema {schema} is unknown; this version reads 1")
        about = _described(file.attrs, path) if schema else _legacy(path)
        json.dumps(about, ensure_ascii=False).encode()  # raises on text that cannot be drawn
        rows = dict(file.get("runs", {}))
        values = {
            name: np.atleast_2d(np.asarray((rows if key in rows else file)[key], float))
            for key, name in QUANTITIES.items()
            if key in file
        }
        users = _over_users((rows if "user_test_acc" in rows else file).get("user_test_acc"))
        length = values["test_acc"].shape[1]
        rounds = np.asarray(file["round"] if "round" in file else range(length), int)
        work = _work(file["work"], rounds) if "work" in file else {}
    if not length:
        raise InputError(f"{path}: holds no evaluations")
    every = [*values.values(), *([] if users is None else [users])]
    if any(v.shape[1:] != rounds.shape for v in every):
        raise InputError(f"{path}: damaged, its curves and rounds differ in length")
    about |= {"users": users, "work": work}
    return Run(path, rounds=rounds, values=values, stacked=bool(rows), **about)


def _work(table: h5py.Dataset, rounds: np.ndarray) -> dict[str, np.ndarray]:
    """By column, what had been done when each of `rounds` rounds were over."""
    done = np.concatenate([np.zeros((1, table.shape[1]), np.int64), table[()]])
    return dict(zip(json.loads(table.attrs["columns"]), done[rounds].T, strict=True))


def _over_users(accuracy: h5py.Dataset | None) -> np.ndarray | None:
    """(repetitions, evaluations), of the accuracies of the users of one or several."""
    return None if accuracy is None else np.atleast_2d(over_users(np.asarray(accuracy, float)))


def _described(attrs: h5py.AttributeManager, path: Path) -> dict:
    config = json.loads(attrs["config"])
    if not all(isinstance(config[key], str) for key in ("dataset", "model", "algorithm")):
        raise TypeError(config)
    # FILE.py:Class@HASH goes by its class; trainmodel.custom.label would bring torch along.
    model = config["model"].rpartition(":")[2].partition("@")[0]
    dataset, manifest = dataset_name(config["dataset"]), json.loads(attrs.get("manifest", "{}"))
    if dataset == "Synthetic" and manifest.get("scheme") == "leaf":
        # Read under that name since any vectors are; they are other data.
        dataset = dataset_name(f"{manifest['folder']}/")
    return {
        "config": config | {"dataset": dataset, "model": model},
        "options": tuple(json.loads(attrs["options"])),
        **{key: str(attrs[key]) for key in ("evaluates", "identity", "repetition")},
        "status": _status(attrs, path, float(config.get("save_every", 0))),
    }


def _status(attrs: h5py.AttributeManager, path: Path, save_every: float) -> str:
    """The status in the file, but "stopped" instead of "running" where nobody goes on with it."""
    status, saved = str(attrs["status"]), path.stat().st_mtime
    if status != "running":
        return status
    here = attrs.get("host") == platform.node()
    alive = is_alive(str(attrs.get("pid")), saved) if here else None
    if alive is None:
        # All that can be known is its silence. No round takes longer than the run so far, and
        # clocks may differ.
        patience = 2 * (save_every + float(attrs.get("wall_seconds", 0))) + 600
        alive = time.time() - saved < patience
    return status if alive else "stopped"


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


def trained(runs: list[Run]) -> list[Run]:
    """All but the global models of methods whose users upload nothing."""
    return [r for r in runs if r.evaluates != "global" or r.config["algorithm"] not in UNTRAINED]


# ---- averaging ----


def make_curves(runs: list[Run]) -> list[Curve]:
    """One curve per configuration and evaluated model; unfinished repetitions make their own."""
    runs = _adopt_guests(_over_seeds(_without_averages(runs)))
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
                found.append(replace(curve, evaluates=name, values=values, users=None, beside=True))
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


def _over_seeds(runs: list[Run]) -> list[Run]:
    """The runs, those that differ in their seeds alone (or their splits' seeds) as one's own.

    Then they have one identity, and are averaged like repetitions.
    """
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for run in runs:
        found.setdefault(_seedless(run), {})[run.identity] = _seeds(run)
    merged = []
    for run in runs:
        seeds = found[_seedless(run)]
        # Equal seeds: they differ in their data, which no option tells.
        if len(seeds) > 1 and len(set(seeds.values())) == len(seeds):
            own, drawn = (", ".join(sorted(set(s))) for s in zip(*seeds.values(), strict=True))
            config = run.config | {"seed": own}
            if drawn:
                config["partition"] = SPLIT_SEED.sub(f"seed={drawn}", str(config["partition"]))
            run = replace(run, identity=min(seeds), config=config)
        merged.append(run)
    return merged


def _seeds(run: Run) -> tuple[str, str]:
    drawn = SPLIT_SEED.search(str(run.config.get("partition")))
    return _show(run.config.get("seed")), drawn[1] if drawn else ""


def _seedless(run: Run) -> str:
    rest = {k: v for k, v in run.config.items() if k not in SETUP | {"seed", "partition"}}
    drawn = SPLIT_SEED.sub("seed", str(run.config.get("partition")))
    # Legacy files tell nothing of their seeds.
    return json.dumps([rest, drawn, run.identity if run.guest else ""], sort_keys=True)


def over(curves: list[Curve], what: str) -> list[Curve]:
    """The curves over something else than rounds; InputError where a file does not tell it."""
    columns, _ = OVER[what]
    if lacking := [c.label for c in curves if not set(columns) <= c.work.keys()]:
        raise InputError(
            f"--x {what}: the files of {lacking[0]} do not have it by round (averages, files of "
            "earlier versions); run main.py again"
        )
    if not columns:
        return curves
    return [replace(c, rounds=sum(c.work[name] for name in columns)) for c in curves]


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
        users=_users_at(runs, rounds[-1]),
        work={
            name: np.mean([r.work[name][np.isin(r.rounds, rounds)] for r in runs], axis=0)
            for name in first.work
            if all(name in run.work for run in runs)
        },
    )
    if any(len(run.rounds) != len(rounds) for run in runs):
        notice(f"{curve.label}: unequal lengths, averaged over the {len(rounds)} common rounds")
    return curve


def _users_at(runs: list[Run], round_number: int) -> np.ndarray | None:
    if any(run.users is None for run in runs):
        return None
    return np.concatenate([run.users[:, run.rounds == round_number][:, 0] for run in runs])


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
        "mean over users: of the last evaluation, where each user counts the same (elsewhere "
        "each sample);\n"
        "best on test: each repetition's best; last tenth: mean of the last tenth of its "
        "evaluations, 1 to 10 of them, without round 0;\n"
        f"rounds to {100 * target:g} %: first evaluated round in which the mean curve is there."
    )


def table(curves: list[Curve], target: float) -> str:
    """One row per curve."""
    head = ("algorithm", "evaluated model", "options that differ", "n", "last round")
    head += ("last", "mean over users", "best on test", "last tenth")
    head += (f"rounds to {100 * target:g} %",)
    rows = [head, *(_row(curve, target) for curve in curves)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _row(curve: Curve, target: float) -> tuple[str, ...]:
    accuracy = 100 * curve.values["test_acc"]
    last, best = last_and_best(curve)
    users = None if curve.users is None else 100 * curve.users
    late = late_mean(accuracy, curve.rounds) if curve.rounds.any() else None
    reached = np.flatnonzero(curve.mean("test_acc") >= target)
    return (
        curve.algorithm,
        evaluated(curve),
        curve.options or "-",
        curve.repetitions,
        curve.note or str(curve.rounds[-1]),
        *map(_mean_std, (last, users, best, late)),
        str(curve.rounds[reached[0]]) if len(reached) else "-",
    )


def last_and_best(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Each repetition's last test accuracy and its best one, in percent."""
    accuracy = 100 * curve.values["test_acc"]
    # fmax, because a diverged run may end in NaN.
    return accuracy[:, -1], np.fmax.reduce(accuracy, axis=1)


def _mean_std(figures: np.ndarray | None) -> str:
    if figures is None:
        return "-"
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
    curves: list[Curve],
    title: str = "",
    published: Mapping[Key, "Published"] | None = None,
    scale: str = "linear",
    x: str = "round",
) -> Figure:
    """Test accuracy and train loss over the rounds (or `x`, see OVER), the legend below.

    `published`: values to mark in the accuracy panel. `scale`: of the loss and, if log, of the
    error 100 % - accuracy.
    """
    curves = over(curves, x)
    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    looks = _looks(curves)
    published = published if published and x == "round" else {}
    told = {c.key: published[c.key] for c in curves if c.key in published}
    covers = [sum(_coincide(c, later) for later in curves[i + 1 :]) for i, c in enumerate(curves)]
    handles = []
    for curve, above in zip(curves, covers, strict=True):
        style = _style(curve, looks[curve.identity], above)
        handles += _plot(left, curve, "test_acc", 100, style)
        _plot(right, curve, "train_loss", 1, style)
        if curve.key in told:
            _mark(left, told[curve.key], style["color"], curve.rounds[-1])
    left.set_ylabel("test accuracy (%)")
    right.set_ylabel("train loss")
    marked = [_marked(told[c.key], c.rounds[-1]) for c in curves if c.key in told]
    _fit_accuracy(left, [*(curve.mean("test_acc") for curve in curves), *marked], scale)
    losses = [curve.mean("train_loss") for curve in curves if "train_loss" in curve.values]
    _fit_loss(right, losses, scale)
    for axes in (left, right):
        axes.set_xlabel(OVER[x][1])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title or " ".join(filter(None, curves[0].group)))
    hints = {
        "dashed: global model": any(curve.evaluates == "global" for curve in curves),
        "dash-dotted: model beside the chosen one, accuracy only": any(c.beside for c in curves),
        "x and bar at the end: published curve and best on test": bool(told),
        "wide: another curve lies on it": any(covers),
        "ring at the end: not finished": any(curve.note for curve in curves),
        "band: +-1 std over the repetitions": any(len(c.values["test_acc"]) > 1 for c in curves),
    }
    lines = [
        "; ".join(hint for hint, applies in hints.items() if applies),
        *_absent(left, curves, "test_acc", 100, "accuracy"),
        *_absent(right, [c for c in curves if not c.beside], "train_loss", 1, "loss"),
    ]
    # About what fits into the width.
    text = "\n".join(textwrap.fill(line, 140) for line in lines)
    columns = 2 if max(len(curve.label) for curve in curves) <= 66 else 1
    rows = -(-len(curves) // columns) + text.count("\n")
    figure.set_size_inches(10, 4.1 + 0.2 * rows)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        fontsize="small",
        title=text,
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


def _looks(curves: list[Curve]) -> dict[str, tuple[str, str]]:
    """Colour and marker per identity.

    Where there are several algorithms each has its hue, and lightness and markers tell its
    configurations apart; the configurations of a single one have a hue each.
    """
    methods: dict[str, str] = {}
    for curve in curves:
        methods.setdefault(curve.identity, curve.algorithm)
    families: dict[str, list[str]] = {}
    for identity, method in methods.items():
        families.setdefault(method, []).append(identity)
    if len(families) == 1:
        families = {identity: [identity] for identity in methods}
    looks = {}
    for i, members in enumerate(families.values()):
        shades = _shades(COLOURS[i % len(COLOURS)], len(members))
        for j, (identity, shade) in enumerate(zip(members, shades, strict=True)):
            looks[identity] = shade, MARKERS[(i // len(COLOURS) + j) % len(MARKERS)]
    return looks


def _shades(colour: str, count: int) -> list[str]:
    """A colour, or several of its hue from dark to light, none too faint for a line on white."""
    if count == 1:
        return [colour]
    hue, lightness, saturation = colorsys.rgb_to_hls(*to_rgb(colour))
    darkest = min(max(lightness - 0.14, 0), 0.4)
    levels = np.linspace(darkest, darkest + 0.28, count)
    return [to_hex(colorsys.hls_to_rgb(hue, level, saturation)) for level in levels]


def _style(curve: Curve, look: tuple[str, str], covers: int) -> dict:
    colour, marker = look
    return {
        "color": colour,
        "linestyle": "--" if curve.evaluates == "global" else "-." if curve.beside else "-",
        "marker": marker or ("o" if len(curve.rounds) == 1 else ""),
        "markevery": max(1, len(curve.rounds) // 10),
        "markersize": 5,
        "linewidth": (0.9 if curve.beside else 1.4) + 1.2 * covers,
        "alpha": 0.7 if curve.beside else 1.0,
        "label": curve.label,
    }


def _plot(axes: Axes, curve: Curve, quantity: str, unit: float, style: dict) -> list[Line2D]:
    if quantity not in curve.values:
        return []
    mean, std = unit * curve.mean(quantity), curve.std(quantity)
    if std is not None:
        band = (mean - unit * std, mean + unit * std)
        axes.fill_between(curve.rounds, *band, color=style["color"], alpha=0.18, linewidth=0)
    if curve.note:
        end = np.flatnonzero(np.isfinite(mean))[-1:]
        ring = {"s": 60, "facecolors": "none", "edgecolors": style["color"], "zorder": 3}
        axes.scatter(curve.rounds[end], mean[end], **ring)
    return axes.plot(curve.rounds, mean, **style)


def _mark(axes: Axes, told: "Published", colour: str, last: int) -> None:
    if told.curve:
        points = [point for point in sorted(told.curve.items()) if point[0] <= last]
        axes.plot(*zip(*points, strict=True), "x", color="black", markersize=6, zorder=3)
    if told.best:
        axes.errorbar(1.02 * last, *told.best, fmt="_", color=colour, markersize=14, capsize=3)


def _marked(told: "Published", last: int) -> np.ndarray:
    """The accuracies that `_mark` draws, as fractions."""
    points = [accuracy for t, accuracy in told.curve.items() if t <= last]
    return np.array([*points, *(told.best or ())[:1]]) / 100


def _fit_accuracy(axes: Axes, means: list[np.ndarray], scale: str) -> None:
    """All curves inside; the first percent of a long one's evaluations may be below."""
    errors = 100 - 100 * _finite([mean[len(mean) // 100 :] for mean in means])
    if not errors.size:
        return
    least = min(errors[errors > 0], default=np.inf) / 1.2
    if scale == "linear" or not np.isfinite(least):
        margin = 0.05 * np.ptp(errors) + 0.1
        axes.set_ylim(100 - errors.max() - margin, 100 - errors.min() + margin)
        return

    def forward(accuracy: np.ndarray) -> np.ndarray:
        # No error at all has no logarithm; it is drawn on the upper edge.
        return -np.log10(np.maximum(100 - accuracy, least))

    axes.set_yscale("function", functions=(forward, lambda level: 100 - 10**-level))
    axes.set_ylim(100 - min(100, 1.1 * errors.max()), 100 - least)
    steps = [10.0**power * step for power in range(-3, 2) for step in (2, 3, 5, 7, 10)]
    wide = FixedLocator([100 - error for error in steps if error >= least])
    _log_ticks(axes, wide, errors.max() / least)
    axes.set_ylabel("test accuracy (%), log scale of the error")


def _fit_loss(axes: Axes, means: list[np.ndarray], scale: str) -> None:
    """Exploding curves may leave the panel, the others stay."""
    peaks = sorted(_finite([mean]).max() for mean in means if np.isfinite(mean).any())
    if not peaks:
        return
    # Guessing among n classes has log(n), so that a small one says nothing about the others.
    usual = max(peaks[(len(peaks) - 1) // 2], 1)
    high = max(peak for peak in peaks if peak <= WIDE * usual)
    losses = _finite(means)
    losses = losses[losses <= high]
    if scale == "log" and (losses > 0).any():
        low = losses[losses > 0].min()
        axes.set_yscale("log")
        axes.set_ylim(low / 1.2, high * 1.2)
        _log_ticks(axes, LogLocator(subs=(1, 2, 5)), high / low)
    elif high < peaks[-1]:
        margin = 0.05 * np.ptp(losses) + 0.01 * abs(high)
        axes.set_ylim(losses.min() - margin, high + margin)


def _log_ticks(axes: Axes, wide: Locator, ratio: float) -> None:
    axes.yaxis.set_major_locator(wide if ratio > WIDE else MaxNLocator(6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _absent(
    axes: Axes, curves: list[Curve], quantity: str, unit: float, panel: str
) -> Iterator[str]:
    """Lines that name the curves that a panel does not show, or not to their end."""
    reasons = {
        f"not in the {panel} panel, no {quantity.replace('_', ' ')} in the file": [],
        f"not in the {panel} panel, no finite value": [],
        f"not in the {panel} panel, outside of its axis": [],
        f"leaves the {panel} panel": [],
    }
    nothing, infinite, outside, leaves = reasons.values()
    scaled = axes.yaxis.get_transform().transform
    low, high = scaled(np.array(axes.get_ylim()))
    edge = 1e-9 * (high - low)  # what lies on it is inside
    for curve in curves:
        if quantity not in curve.values:
            nothing.append(curve.label)
            continue
        mean = unit * curve.mean(quantity)
        with np.errstate(invalid="ignore"):
            points = scaled(mean)
        inside = np.isfinite(mean) & (low - edge <= points) & (points <= high + edge)
        # See _fit_accuracy.
        late = slice(len(mean) // 100, None)
        if not np.isfinite(mean).any():
            infinite.append(curve.label)
        elif not inside.any():
            outside.append(curve.label)
        elif (~inside & ~np.isnan(mean))[late].any():
            leaves.append(curve.label)
    return (f"{reason}: {'; '.join(labels)}" for reason, labels in reasons.items() if labels)


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
