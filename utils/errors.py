"""What a user sees of bad input: one line on stderr, exit code 2."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


class InputError(Exception):
    """Bad input, told in one line: what, its value, and the valid choices or range."""


class Parser(argparse.ArgumentParser):
    """Reports bad options like any other bad input."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise InputError(message)


def guarded(program: str, work: Callable[[], int]) -> int:
    """The exit code of `work`; 2 and one line after bad input, 130 after Ctrl-C."""
    try:
        return work()
    except InputError as error:
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
