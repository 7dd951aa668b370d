"""YAML jobs: one run of flat keys = option names, or many.

Many runs are `title` (default: the file's name), `defaults` (options of all runs) and `runs`, a
list of options; a list inside a run is swept, several lists give every combination. `published`
inside a run holds what it is compared with, by evaluated model: `best: [mean, std]` and
`curve: {round: accuracy}`, in percent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from FLAlgorithms.servers import ALGORITHMS
from utils import collection
from utils.config import (
    FIELDS,
    Config,
    is_pair,
    parse_value,
    read_yaml,
    say,
    yaml_items,
    yaml_option,
)
from utils.errors import InputError


@dataclass(frozen=True)
class Published:
    """What a paper or its code reports of one evaluated model, in percent."""

    best: tuple[float, float] | None = None  # mean and std over repetitions, best round on test
    curve: Mapping[int, float] = field(default_factory=dict)  # test accuracy by round


@dataclass(frozen=True)
class Run:
    """A configuration, the options that were asked for in it, and what it is compared with."""

    config: Config
    given: tuple[str, ...] = ()
    published: Mapping[str, Published] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """Runs that belong together; `title` is empty for a single one."""

    title: str
    runs: tuple[Run, ...]
    path: str = ""


def read_grid(path: str | None, over: Mapping[str, object]) -> Grid:
    """The runs of a YAML file, or of none; the options `over`, a command line's, win."""
    if path is None:
        return Grid("", (_run(over),))
    where = f"--config {path}"
    node = read_yaml(path)
    if "runs" not in (key.value for key, _ in node.value):
        return Grid("", (_run(_single(node, where) | over),), path)
    top = yaml_items(node, ("title", "defaults", "runs"), where)
    title = _title(top["title"], where) if "title" in top else Path(path).stem
    defaults = _options(top["defaults"], f"{where}: defaults") if "defaults" in top else {}
    if not isinstance(top["runs"], yaml.SequenceNode) or not top["runs"].value:
        raise InputError(f"{where}: runs must be a list of one or more")
    runs: dict[Config, Run] = {}  # an option on the command line may make runs of a sweep equal
    for number, one in enumerate(top["runs"].value, 1):
        for run in _swept(one, f"{where}: run {number}", defaults, over):
            runs.setdefault(run.config, run)
    return Grid(title, tuple(runs.values()), path)


def _title(node: yaml.Node, where: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or not node.value.strip():
        raise InputError(f"{where}: title must be a line of text")
    return node.value.strip()


def _run(values: Mapping[str, object]) -> Run:
    return Run(Config(**values), tuple(values))


def _single(node: yaml.MappingNode, where: str) -> dict[str, object]:
    """Flat keys; the sections of the baseline collection's files are translated."""
    sections = [pair for pair in node.value if pair[0].value in [*collection.KEYS]]
    rest = [pair for pair in node.value if pair not in sections]
    translated = collection.translate(sections, where, say) if sections else {}
    own = _options(yaml.MappingNode(node.tag, rest, flow_style=node.flow_style), where)
    if twice := own.keys() & translated.keys():
        raise InputError(f"{where}: {min(twice)} is given twice")
    return own | {
        name: parse_value(name, text, f"{where}: {key}") for name, (text, key) in translated.items()
    }


def _options(node: yaml.Node, where: str) -> dict[str, object]:
    items = yaml_items(node, FIELDS, where)
    return {key: yaml_option(key, value, where) for key, value in items.items()}


def _swept(node: yaml.Node, where: str, defaults: dict, over: Mapping[str, object]) -> list[Run]:
    items = yaml_items(node, (*FIELDS, "published"), where)
    known = items.pop("published", None)
    published = _published(known, f"{where}: published") if known is not None else {}
    choices = {}
    for key, value in items.items():
        swept = isinstance(value, yaml.SequenceNode) and not is_pair(key, value)
        several = value.value if swept else [value]
        if not several:
            raise InputError(f"{where}: {key} has an empty list")
        choices[key] = [yaml_option(key, one, where) for one in several]
    given = (*choices, *over)
    return [
        Run(Config(**(defaults | dict(zip(choices, chosen, strict=True)) | over)), given, published)
        for chosen in itertools.product(*choices.values())
    ]


def _published(node: yaml.Node, where: str) -> dict[str, Published]:
    personal = (name for cls in ALGORITHMS.values() for name in cls.user_class.personal)
    models = tuple(dict.fromkeys(("global", *personal)))
    found = {}
    for model, told in yaml_items(node, models, where).items():
        here = f"{where}: {model}"
        told = yaml_items(told, ("best", "curve"), here)
        best, curve = told.get("best"), told.get("curve")
        found[model] = Published(
            best=_percents(best, f"{here}: best") if best is not None else None,
            curve=_curve(curve, f"{here}: curve") if curve is not None else {},
        )
    return found


def _percents(node: yaml.Node, where: str) -> tuple[float, float]:
    if not isinstance(node, yaml.SequenceNode) or len(node.value) != 2:
        raise InputError(f"{where}: must be [mean, std] in percent")
    mean, std = (_percent(one, where) for one in node.value)
    return mean, std


def _curve(node: yaml.Node, where: str) -> dict[int, float]:
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{where}: must be {{round: accuracy, ...}}")
    points = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or not key.value.isdecimal():
            raise InputError(f"{where}: {key.value!r} is not a round")
        points[int(key.value)] = _percent(value, where)
    return points


def _percent(node: yaml.Node, where: str) -> float:
    text: str | Sequence = node.value
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value <= 100:
        raise InputError(f"{where}: {text!r} is not a number from 0 to 100")
    return value
