"""What a user sees of bad input: one line on stderr, exit code 2."""

import argparse
import os
import signal
import sys
import threading
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
def on_interrupt(handler: Callable | int) -> Iterator[None]:
    """Ctrl-C meets `handler` meanwhile; only the main thread hears of it, and may set this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def starting(program: str) -> Iterator[None]:
    """While modules are imported, Ctrl-C ends the program in one line, whatever they catch."""

    def stop(*_: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(130)

    # Else it is ignored (nohup, --jobs).
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with on_interrupt(stop):
            yield
    else:
        yield


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
