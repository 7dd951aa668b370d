"""Train one configuration: `python main.py --help` lists the options."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from utils.config import Config, parse_command_line
from utils.errors import guarded
from utils.jobs import run_job
from utils.replay import replay


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 diverged or replay outside its bounds, 2 bad input, 130 Ctrl-C."""
    return guarded("main.py", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    values, recorded = parse_command_line(argv)
    return run_job(Config(**values), values) if recorded is None else replay(recorded, values)


if __name__ == "__main__":
    sys.exit(main())
