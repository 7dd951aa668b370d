"""What the generate_*.py scripts and `python -m utils.partition` share: options and printout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from utils.errors import InputError, Parser, guarded
from utils.model_utils import (
    DATASETS,
    RECIPES,
    Source,
    about_data_dir,
    dealt,
    is_folder,
    keep_split,
    make_split,
    partition_path,
    shown,
    split_path,
    undivided,
)
from utils.partition import Split, table
from utils.schemes import PARTITIONS, defaults, partition_of, spelled

OPTIONS = {  # argument of the scheme -> flag, type, help
    "users": ("--users", int, "number of users"),
    "labels_per_user": ("--labels", int, "labels per user"),
    "alpha": ("--alpha", float, "how much the users' models differ (a standard deviation)"),
    "beta": ("--beta", float, "how much the users' inputs differ (a standard deviation)"),
    "seed": ("--seed", int, "seed of this split, and of nothing else"),
}
MEANING = {  # argument of any scheme -> help
    "users": "number of users",
    "seed": "seed of this split, and of nothing else",
    "labels_per_user": "labels per user",
    "shards_per_user": "shards per user",
    "alpha": "of the Dirichlet distribution: small is uneven",
    "minimum": "samples that every user has at least",
    "sigma": "standard deviation of the sizes' logarithms",
    "noise": "level of the noisiest user, in standard deviations of the data",
    "rotation": "the circle's part over which the users' angles spread, in degrees",
    "percent": "how much is dealt at random",
    "pool": "all rows, or train: the official train part",
    "test": "share of each user's rows that is held out",
}


def main(dataset: str, kind: str, argv: Sequence[str] | None = None) -> int:
    """Make one split; returns the exit code: 2 after one line on stderr for bad input."""
    program = Path(sys.argv[0]).name
    return guarded(program, lambda: _make(dataset, kind, argv))


def partition(argv: Sequence[str] | None = None) -> int:
    """DATASET SCHEME [--key value ...]: what `--partition` does, and a table.

    Also DATASET SCHEME:key=value,..., as main.py has it.
    """
    return guarded("utils.partition", lambda: _partition(argv))


def _make(dataset: str, kind: str, argv: Sequence[str] | None) -> int:
    recipe = RECIPES[dataset, kind]
    parser = Parser(
        description=f"Split {dataset} among users: scheme {kind}.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default in recipe.arguments.items():
        flag, parse, text = OPTIONS[name]
        parser.add_argument(flag, dest=name, type=parse, default=default, help=text)
    _add_output(parser)
    arguments = vars(parser.parse_args(argv))
    output = arguments.pop("output", None)
    path = _path(output) or split_path(dataset, kind, arguments)
    source, split = make_split(dataset, recipe, arguments)
    _write(source, split, path)
    print(f"use it:  python main.py --dataset {dataset} --split {shown(path)}")
    return 0


def _partition(argv: Sequence[str] | None) -> int:
    parser = Parser(
        prog="python -m utils.partition",
        description="Divide a dataset among users, with a table and a picture.",
        epilog="SCHEME:key=value,... as in main.py's --partition is understood, too.",
        allow_abbrev=False,
    )
    parser.add_argument("dataset", help=f"{', '.join(DATASETS)}, a FILE.npz or a LEAF FOLDER")
    schemes = parser.add_subparsers(dest="scheme", required=True, metavar="SCHEME")
    for scheme, deal in PARTITIONS.items():
        text = deal.__doc__.splitlines()[0].replace("%", "%%")
        options = schemes.add_parser(
            scheme,
            help=text,
            description=text,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        for name, default in defaults(scheme).items():
            shown_as = f"{MEANING[name]} (default: {default})"
            options.add_argument(f"--{name}", metavar=name.upper(), help=shown_as)
        options.add_argument("--data_dir", help="where the dataset's files are")
        _add_output(options)
    words = list(sys.argv[1:] if argv is None else argv)
    words[1:2] = [part for word in words[1:2] for part in _flags(word)]
    given = vars(parser.parse_args(words))
    dataset, scheme = given.pop("dataset"), given.pop("scheme")
    data_dir, output = given.pop("data_dir", None), given.pop("output", None)
    chosen = partition_of(scheme, given)
    path = _path(output)
    if is_folder(dataset):
        dataset = str(Path(dataset).resolve())
    source = undivided(dataset, data_dir)
    path, split = path or partition_path(source, chosen), dealt(source, chosen)
    if line := about_data_dir(dataset, split, data_dir):
        print(f"notice: {line}", file=sys.stderr)
        data_dir = None
    _write(source, split, path)
    how = f"--partition {chosen}" if output is None else f"--split {shown(path)}"
    how += "" if data_dir is None else f" --data_dir {data_dir}"
    print(f"use it:  python main.py --dataset {dataset} {how}")
    return 0


def _flags(word: str) -> list[str]:
    """`shards:users=100` as `shards --users=100`; what names no scheme, as it is."""
    if word.partition(":")[0] not in PARTITIONS:
        return [word]
    scheme, given = spelled(word)
    return [scheme, *(f"--{key}={value}" for key, value in given.items())]


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", default=argparse.SUPPRESS, help="split file (.npz), else named by the arguments"
    )


def _path(output: str | None) -> Path | None:
    if output is not None and (Path(output).suffix != ".npz" or Path(output).is_dir()):
        raise InputError(f"output {output}: must name a file ending in .npz")
    return None if output is None else Path(output)


def _write(source: Source, split: Split, path: Path) -> None:
    picture = keep_split(source, split, path)
    print(table(split, source.y, source.classes))
    print(f"split:   {shown(path)} (hash {split.hash[:12]})")
    if picture is not None:
        print(f"picture: {shown(picture)}")
