"""A grid's results beside what was published: a table with verdicts, and the curves.

`NAME.md` and `NAME.csv` hold the table, `NAME_curves.csv` the mean test accuracy by round.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from utils.errors import InputError
from utils.files import replacing
from utils.grid import Grid, Published
from utils.jobs import Loader, is_whole, settle
from utils.plot_utils import (
    Curve,
    Key,
    evaluated,
    last_and_best,
    make_curves,
    read_run,
    trained,
    with_beside,
)
from utils.results import result_path, std

COMPARING = {"published", "published_std", "difference", "verdict"}
ROUNDS = (0, 1, 10, 50, 100, 200, 400, 600)  # and the last


@dataclass(frozen=True)
class Comparison:
    """A grid's finished repetitions as curves, and what was published of each."""

    grid: Grid
    curves: Sequence[Curve]
    published: Mapping[Key, Published]
    unfinished: str = ""  # a sentence, where repetitions are missing


def read_grid_results(grid: Grid) -> Comparison:
    """What is finished of a grid; raises InputError where nothing is."""
    runs, published, missing, loader = [], {}, [], Loader()
    for run in grid.runs:
        source, split = loader.data(run.config)
        config = settle(run.config, source, split)
        kinds = [False, True] if config.primary else [False]
        for i in config.repetitions:
            paths = [result_path(config, split, personal, i) for personal in kinds]
            found = [read_run(path) for path in paths if is_whole(path)]
            missing += paths[:1] * (len(found) < len(paths))
            runs += trained(found)
            for one in found:
                published |= {(one.identity, m): told for m, told in run.published.items()}
    if not runs:
        raise InputError(f"--config {grid.path}: no finished results; run main.py with it first")
    count = sum(len(run.config.repetitions) for run in grid.runs)
    told = [f"Not finished: {len(missing)} of {count} repetitions, first {p.name}" for p in missing]
    return Comparison(grid, with_beside(make_curves(runs)), published, *told[:1])


@dataclass(frozen=True)
class Row:
    """Test accuracies in percent, over repetitions; std with n-1, None for a single one."""

    algorithm: str
    evaluates: str
    options: str
    repetitions: str
    best: float
    best_std: float | None
    last: float
    last_std: float | None
    published: float | None
    published_std: float | None
    mean_over_users: float | None = None  # of the last evaluation
    mean_over_users_std: float | None = None

    @property
    def difference(self) -> float | None:
        """Ours minus the published value, best on test as the papers report it."""
        return None if self.published is None else self.best - self.published

    @property
    def verdict(self) -> str:
        """Whether the difference is within two combined standard deviations.

        A single repetition is taken to scatter as the published ones do.
        """
        if self.published is None:
            return "not published"
        own = self.published_std if self.best_std is None else self.best_std
        limit = 2 * math.hypot(own, self.published_std)
        return "within 2 std" if abs(self.difference) <= limit else "outside"


def rows(comparison: Comparison) -> list[Row]:
    """A row per curve, in the figure's order."""
    made = []
    for curve in comparison.curves:
        told = comparison.published.get(curve.key)
        last, best = last_and_best(curve)
        ours = [figure for v in (best, last) for figure in _mean_spread(v)]
        theirs = told.best if told and told.best else (None, None)
        users = (None, None) if curve.users is None else _mean_spread(100 * curve.users)
        about = (curve.algorithm, evaluated(curve), curve.options, curve.repetitions)
        made.append(Row(*about, *ours, *theirs, *users))
    return made


def _mean_spread(values: np.ndarray) -> tuple[float, float | None]:
    return float(values.mean()), _spread(values)


def _compared(made: Sequence[Row]) -> bool:
    """Whether anything was published of a grid; a sweep of one's own needs no verdicts."""
    return any(row.published is not None for row in made)


def _spread(values: np.ndarray) -> float | None:
    return float(std(values)) if len(values) > 1 else None


def markdown(comparison: Comparison) -> str:
    """Title, the table with verdicts, and the test accuracies along the curves."""
    grid = comparison.grid
    made = rows(comparison)
    compared = _compared(made)
    head = ("method", "evaluated model", "options", "n", "best on test", "last", "mean over users")
    head += ("published best", "difference", "verdict") * compared
    table = [
        (
            *(row.algorithm, row.evaluates, row.options or "-", row.repetitions),
            *(_pm(row.best, row.best_std), _pm(row.last, row.last_std)),
            _pm(row.mean_over_users, row.mean_over_users_std),
            *_against_published(row) * compared,
        )
        for row in made
    ]
    about = "Test accuracy in percent, mean +- std over n repetitions (n-1); mean over users: of "
    about += "the last evaluation, where each user counts the same (elsewhere each sample)"
    if compared:
        about += "; difference: ours minus published, best round on test; within 2 std: of both "
        about += "deviations combined"
    along = "mean over the repetitions"
    if any(told.curve for told in comparison.published.values()):
        along += "; after the arrow the published value"
    parts = [
        f"# {grid.title or Path(grid.path).stem}",
        f"`python main.py --config {grid.path}`, then `python main_plot.py --config {grid.path}`",
        f"{about}.",
        _table(head, table),
        f"Along the curves ({along}):",
        _table(*_along(comparison)),
    ]
    if comparison.unfinished:
        parts.append(comparison.unfinished)
    return "\n\n".join(parts) + "\n"


def _against_published(row: Row) -> tuple[str, str, str]:
    difference = "-" if row.difference is None else f"{row.difference:+.2f}"
    return _pm(row.published, row.published_std), difference, row.verdict


def _along(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    curves, published = comparison.curves, comparison.published
    last = max(int(curve.rounds[-1]) for curve in curves)
    # A personalised curve ends one round before the global one.
    shown = [*(t for t in ROUNDS if t < last - 1), last - 1, last]
    lines = []
    for curve in curves:
        mean = _by_round(curve)
        known = published[curve.key].curve if curve.key in published else {}
        cells = []
        for t in shown:
            ours = f"{100 * mean[t]:.2f}" if t in mean else "-"
            cells.append(f"{ours} -> {known[t]:.2f}" if t in known else ours)
        name = ", ".join(filter(None, (curve.algorithm, curve.options)))
        lines.append((name, evaluated(curve), *cells))
    return ("method", "evaluated model", *(f"round {t}" for t in shown)), lines


def _by_round(curve: Curve) -> dict[int, float]:
    """Mean test accuracy, a fraction."""
    return dict(zip(curve.rounds.tolist(), curve.mean("test_acc").tolist(), strict=True))


def _pm(mean: float | None, std: float | None) -> str:
    if mean is None:
        return "-"
    return f"{mean:.2f}" if std is None else f"{mean:.2f} +- {std:.2f}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    marked = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in marked)


def write(comparison: Comparison, stem: Path) -> list[Path]:
    """Write STEM.md, STEM.csv and STEM_curves.csv; returns them."""
    paths = [stem.with_name(stem.name + end) for end in (".md", ".csv", "_curves.csv")]
    with replacing(paths[0]) as part:
        part.write_text(markdown(comparison), encoding="utf-8")
    made = rows(comparison)
    names = [*(field.name for field in fields(Row)), "difference", "verdict"]
    if not _compared(made):
        names = [name for name in names if name not in COMPARING]
    with replacing(paths[1]) as part, open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in made:
            values = [getattr(row, name) for name in names]
            writer.writerow([f"{v:.4f}" if isinstance(v, float) else v for v in values])
    with replacing(paths[2]) as part, open(part, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["round", *(curve.label for curve in comparison.curves)])
        means = [_by_round(curve) for curve in comparison.curves]
        for t in sorted(set().union(*means)):
            writer.writerow([t, *(f"{mean[t]:.5f}" if t in mean else "" for mean in means)])
    return paths
