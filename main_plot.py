"""Draw the curves in result files and print their table: `python main_plot.py --help`."""

import argparse
import sys
from itertools import groupby
from pathlib import Path

from utils.errors import InputError, Parser, guarded, starting

with starting("main_plot.py"):
    from utils import plot_utils as plots

FILTERS = ("dataset", "model", "algorithm")


def _parser(job: bool) -> Parser:
    """`job`: for `--config`, whose other words are options of main.py."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    if not job:
        add("paths", nargs="*", type=Path, metavar="FILE or FOLDER", help="default: --results_dir")
    for key in FILTERS:
        add(f"--{key}", action="append", help=f"only this {key}; may be given several times")
    add("--only", choices=("global", "personal"), help="only this kind of model")
    add(
        "--config",
        type=Path,
        metavar="FILE.yaml",
        help="the results of this job, beside what was published: figure, and the table as "
        "RESULTS_DIR/NAME.md and .csv; takes the options that main.py was given with it",
    )
    where = "the config's own, or results" if job else "the only FOLDER that is named, or results"
    add("--results_dir", type=Path, help=f"default: {where}")
    add(
        "--out",
        type=Path,
        help="figure, .png, .pdf or .svg (with several figures _DATASET_MODEL "
        "is inserted); default: RESULTS_DIR/DATASET_MODEL.png",
    )
    add(
        "--scale",
        choices=plots.SCALES,
        default="linear",
        help="of the figure's two axes; log: of the loss, and of the error 100 %% - accuracy",
    )
    add("--x", choices=plots.OVER, default="round", help="what the curves are drawn over")
    add("--csv", type=Path, help="write the curves there, one point a line")
    add("--target", type=float, default=0.9, help="accuracy for the last column (%(default)s)")
    return parser


def _place(args: argparse.Namespace, group: tuple[str, str], several: bool) -> Path:
    name = "_".join(filter(None, group))
    if args.out is None:
        return _home(args) / f"{name}.png"
    return args.out.with_stem(f"{args.out.stem}_{name}") if several else args.out


def _home(args: argparse.Namespace) -> Path:
    """Where results are looked for, and figures go, unless `--out` says."""
    folder = args.paths[0] if len(args.paths) == 1 and args.paths[0].is_dir() else Path("results")
    return args.results_dir or folder


def _run(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    job = any(word.split("=")[0] == "--config" for word in argv)
    args, rest = _parser(job).parse_known_args(argv)
    if rest and not job:
        raise InputError(f"{rest[0]}: unknown option; see --help")
    if args.out and args.out.suffix.lower() not in plots.FORMATS:
        raise InputError(f"--out {args.out}: the name must end in {', '.join(plots.FORMATS)}")
    if not 0 < args.target <= 1:
        raise InputError(f"--target {args.target:g}: must be a fraction above 0 and at most 1")
    if job:
        return _compare(args, rest)
    wanted = {key: getattr(args, key) for key in FILTERS if getattr(args, key)}
    runs = plots.select(plots.read_runs(args.paths or [_home(args)]), wanted, args.only)
    curves = plots.make_curves(runs)
    groups = {key: list(members) for key, members in groupby(curves, key=lambda c: c.group)}
    print(f"{plots.meaning(args.target)}\n")
    for group, members in groups.items():
        print(f"{' '.join(group).strip()}\n{plots.table(members, args.target)}\n")
    for group, members in groups.items():
        place = _place(args, group, len(groups) > 1)
        plots.save(plots.draw(members, scale=args.scale, x=args.x), place)
        print(f"figure: {place}")
    if args.csv:
        plots.write_csv(args.csv, curves)
        print(f"curves: {args.csv}")
    return 0


def _compare(args: argparse.Namespace, rest: list[str]) -> int:
    from utils import compare  # brings torch along, which plain plotting does without
    from utils.config import parse_command_line
    from utils.grid import read_grid

    options, _ = parse_command_line(rest)
    if args.results_dir:
        options |= {"results_dir": str(args.results_dir)}
    grid = read_grid(str(args.config), options)
    comparison = compare.read_grid_results(grid)
    home = Path(grid.runs[0].config.results_dir)
    stem = args.out.with_suffix("") if args.out else home / args.config.stem
    figure = args.out or stem.with_name(stem.name + ".png")
    how = (comparison.published, args.scale, args.x)
    drawn = plots.draw(comparison.curves, grid.title, *how)
    plots.save(drawn, figure)
    tables = compare.write(comparison, stem)
    print(tables[0].read_text(encoding="utf-8"))
    print(f"figure: {figure}\ntables: {', '.join(map(str, tables))}")
    if args.csv:
        plots.write_csv(args.csv, comparison.curves)
        print(f"curves: {args.csv}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 after one line about bad input."""
    return guarded("main_plot.py", lambda: _run(argv))


if __name__ == "__main__":
    sys.exit(main())
