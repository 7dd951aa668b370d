"""What the generate_*.py scripts share: options, the printout, the files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.errors import InputError, Parser, guarded
from utils.model_utils import RECIPES, make_split, shown, split_path
from utils.partition import draw, table

OPTIONS = {  # argument of the scheme -> flag, type, help
    "users": ("--users", int, "number of users"),
    "labels_per_user": ("--labels", int, "labels per user"),
    "alpha": ("--alpha", float, "how much the users' models differ (a standard deviation)"),
    "beta": ("--beta", float, "how much the users' inputs differ (a standard deviation)"),
    "seed": ("--seed", int, "seed of this split, and of nothing else"),
}


def main(dataset: str, kind: str, argv: Sequence[str] | None = None) -> int:
    """Make one split; returns the exit code: 2 after one line on stderr for bad input."""
    program = Path(sys.argv[0]).name
    return guarded(program, lambda: _make(dataset, kind, argv))


def _make(dataset: str, kind: str, argv: Sequence[str] | None) -> int:
    defaults = RECIPES[dataset, kind].arguments
    parser = Parser(
        description=f"Split {dataset} among users: scheme {kind}.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default in defaults.items():
        flag, parse, text = OPTIONS[name]
        parser.add_argument(flag, dest=name, type=parse, default=default, help=text)
    parser.add_argument(
        "--output", default=argparse.SUPPRESS, help="split file (.npz), else named by the arguments"
    )
    arguments = vars(parser.parse_args(argv))
    output = arguments.pop("output", None)
    path = split_path(dataset, kind, arguments) if output is None else Path(output)
    if path.suffix != ".npz" or path.is_dir():
        raise InputError(f"output {output}: must name a file ending in .npz")
    source, split = make_split(dataset, kind, arguments)
    split.save(path)
    draw(split, source.y, path.with_suffix(".png"), source.classes)
    print(table(split, source.y, source.classes))
    print(f"split:   {shown(path)} (hash {split.hash[:12]})")
    print(f"picture: {shown(path.with_suffix('.png'))}")
    print(f"use it:  python main.py --dataset {dataset} --split {shown(path)}")
    return 0
