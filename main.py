"""Train one configuration: `python main.py --help` lists the options."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from utils.config import Config, parse_command_line, say
from utils.errors import InputError
from utils.jobs import run_job
from utils.replay import replay


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 diverged or replay outside its bounds, 2 bad input, 130 Ctrl-C."""
    try:
        values, recorded = parse_command_line(sys.argv[1:] if argv is None else argv)
        return replay(recorded, values) if recorded else run_job(Config(**values), values)
    except InputError as error:
        say(f"main.py: error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
