"""Tasks in several processes, one thread each unless told otherwise, with one display."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from utils.config import say
from utils.errors import InputError, on_interrupt
from utils.progress import Show

if TYPE_CHECKING:
    from utils.jobs import Task

SECONDS_BETWEEN_NEWS = 0.2


def run_parallel(tasks: Sequence[Task], shows: Sequence[Show]) -> int:
    """Tasks taken one by one by `--jobs` processes; 0, or 1 if one diverged or was lost.

    Spawned processes read the data themselves and write their own result files, so that the
    numbers are those of one process. Ctrl-C reaches them through `stop`, between two rounds.
    """
    context = multiprocessing.get_context("spawn")
    todo, news, stop = context.Queue(), context.Queue(), context.Event()
    size = min(len(tasks), max(task.config.jobs for task in tasks))
    for numbered in [*enumerate(tasks), *[None] * size]:
        todo.put(numbered)
    workers = [
        context.Process(target=_work, args=(todo, news, stop), daemon=True) for _ in range(size)
    ]
    heard = Heard(shows)
    # Spawned processes inherit what is ignored, so that Ctrl-C does not reach their imports.
    with on_interrupt(signal.SIG_IGN):
        for worker in workers:
            worker.start()
    try:
        while any(worker.is_alive() for worker in workers):
            heard.listen(news)
    except KeyboardInterrupt:
        stop.set()
        while any(worker.is_alive() for worker in workers):
            heard.listen(news)
        raise
    finally:
        stop.set()
        heard.listen(news)
        todo.cancel_join_thread()
    for worker in workers:
        worker.join()
    if lost := [worker.exitcode for worker in workers if worker.exitcode]:
        heard.codes.append(1)
        say(f"{len(lost)} of {size} processes ended with {', '.join(map(str, lost))}")
    if heard.errors:
        raise InputError(heard.errors[0])
    return max(heard.codes)


class Heard:
    """What the processes have told."""

    def __init__(self, shows: Sequence[Show]) -> None:
        self.shows = shows
        self.codes: list[int] = []
        self.errors: list[str] = []

    def listen(self, news: multiprocessing.Queue) -> None:
        """Take all news there is; wait a little for the first."""
        take = {"show": self._show, "code": self.codes.append, "error": self.errors.append}
        wait = SECONDS_BETWEEN_NEWS
        while True:
            try:
                what, *rest = news.get(timeout=wait)
            except queue.Empty:
                return
            take[what](*rest)
            wait = 0.0

    def _show(self, number: int, round_number: int, text: str) -> None:
        self.shows[number](round_number, text)


def _work(todo: multiprocessing.Queue, news: multiprocessing.Queue, stop: object) -> None:
    """One process: tasks, one after the other."""
    from utils.jobs import Loader, run_repetitions  # here, since jobs imports this module

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loader, told = Loader(), {}

    def pause() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    def show(number: int, rounds: int, round_number: int, text: str) -> None:
        now = time.monotonic()
        if round_number == rounds or now - told.get(number, 0.0) >= SECONDS_BETWEEN_NEWS:
            told[number] = now
            news.put(("show", number, round_number, text))

    try:
        while (numbered := todo.get()) is not None:
            pause()
            number, task = numbered
            job = loader.job(task.config, task.repetitions[0])
            tell = partial(show, number, task.config.num_global_iters)
            news.put(("code", run_repetitions(job, task.repetitions, tell, pause)))
    except KeyboardInterrupt:
        news.put(("code", 130))
    except InputError as error:
        news.put(("error", str(error)))
