"""Train one configuration: `python main.py --help` lists the options."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from utils.errors import InputError, guarded, starting

with starting("main.py"):
    from utils.config import parse_command_line
    from utils.grid import read_grid
    from utils.jobs import run_grid
    from utils.replay import replay, verify


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 diverged, or a replay that differs, 2 bad input, 130 Ctrl-C."""
    return guarded("main.py", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    values, files = parse_command_line(argv)
    for name, again in {"replay": replay, "verify": verify}.items():
        if name in files:
            if len(files) > 1:
                raise InputError(f"--{name}: not together with --{min(files.keys() - {name})}")
            return again(files[name], values)
    return run_grid(read_grid(files.get("config"), values))


if __name__ == "__main__":
    sys.exit(main())
