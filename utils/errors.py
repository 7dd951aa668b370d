"""What a user sees of bad input: one line on stderr, exit code 2."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn


class InputError(Exception):
    """Bad input, told in one line: what, its value, and the valid choices or range."""


class Parser(argparse.ArgumentParser):
    """Reports bad options like any other bad input."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise InputError(message)


@contextmanager
def starting(program: str) -> Iterator[None]:
    """While modules are imported, Ctrl-C ends the program in one line, whatever they catch."""

    def stop(*_: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler  # else it is ignored (nohup, --jobs)
    if ours:
        signal.signal(signal.SIGINT, stop)
    yield
    if ours:
        signal.signal(signal.SIGINT, before)


def guarded(program: str, work: Callable[[], int]) -> int:
    """The exit code of `work`; 2 and one line after bad input, 130 after Ctrl-C.

    141, as of any program in a pipe, where nobody reads the output any more.
    """
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes once more when it ends.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 141
    except (InputError, OSError) as error:
        line = " ".join(str(error).split()).encode(errors="backslashreplace").decode()
        print(f"{program}: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
