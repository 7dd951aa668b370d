"""Train one configuration: `python main.py --help` lists the options."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from utils.errors import guarded, starting

with starting("main.py"):
    from utils.config import Config, parse_command_line
    from utils.jobs import run_job
    from utils.replay import replay, verify


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 diverged, or a replay that differs, 2 bad input, 130 Ctrl-C."""
    return guarded("main.py", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    values, files = parse_command_line(argv)
    for name, again in {"replay": replay, "verify": verify}.items():
        if name in files:
            return again(files[name], values)
    return run_job(Config(**values), values)


if __name__ == "__main__":
    sys.exit(main())
