"""Repetitions in several processes, one thread each unless told otherwise, with one display."""

from __future__ import annotations

import dataclasses
import multiprocessing
import queue
import signal
import time
from itertools import chain
from typing import TYPE_CHECKING

from utils.config import Config, say
from utils.errors import InputError
from utils.progress import Progress

if TYPE_CHECKING:
    from utils.jobs import Job

SECONDS_BETWEEN_NEWS = 0.2


def run_parallel(job: Job, groups: list[list[int]]) -> int:
    """Groups of repetitions dealt to `--jobs` processes; 0, or 1 if one diverged or was lost.

    Spawned processes read the data themselves and write their own result files, so that the
    numbers are those of one process. Ctrl-C reaches them through `stop`, between two rounds.
    """
    config, context = job.config, multiprocessing.get_context("spawn")
    news, stop = context.Queue(), context.Event()
    device = job.data.x.device
    quiet = dataclasses.replace(config, gpu=-1 if device.type == "cpu" else device.index)
    hands = [groups[i :: config.jobs] for i in range(min(config.jobs, len(groups)))]
    arguments = [(quiet, hand, news, stop) for hand in hands]
    workers = [context.Process(target=_work, args=a, daemon=True) for a in arguments]
    progress = Progress(job.label(sorted(chain(*groups))), config.num_global_iters, len(groups))
    codes: list[int] = []
    errors: list[str] = []
    for worker in workers:
        worker.start()
    try:
        while any(worker.is_alive() for worker in workers):
            _listen(news, progress, codes, errors)
    except KeyboardInterrupt:
        stop.set()
        while any(worker.is_alive() for worker in workers):
            _listen(news, progress, codes, errors)
        raise
    finally:
        stop.set()
        _listen(news, progress, codes, errors)
        progress.close()
    for worker, hand in zip(workers, hands, strict=True):
        worker.join()
        if worker.exitcode:
            say(f"repetitions {[*chain(*hand)]}: their process ended with {worker.exitcode}")
            codes.append(1)
    if errors:
        raise InputError(errors[0])
    return max(codes)


def _listen(
    news: multiprocessing.Queue, progress: Progress, codes: list[int], errors: list[str]
) -> None:
    """Take all news there is; wait a little for the first."""
    wait = SECONDS_BETWEEN_NEWS
    while True:
        try:
            what, *rest = news.get(timeout=wait)
        except queue.Empty:
            return
        {"show": progress.show, "code": codes.append, "error": errors.append}[what](*rest)
        wait = 0.0


def _work(config: Config, hand: list[list[int]], news: multiprocessing.Queue, stop: object) -> None:
    """One process: its groups of repetitions, one after the other."""
    from utils.jobs import prepare, read, run_repetitions  # here, since jobs imports this module

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = prepare(config, *read(config))
    told = dict.fromkeys(config.repetitions, 0.0)

    def pause() -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    def show(repetition: int, round_number: int, text: str) -> None:
        now = time.monotonic()
        last = round_number == config.num_global_iters
        if last or now - told[repetition] >= SECONDS_BETWEEN_NEWS:
            told[repetition] = now
            news.put(("show", repetition, round_number, text))

    try:
        for group in hand:
            news.put(("code", run_repetitions(job, group, show, pause)))
    except KeyboardInterrupt:
        news.put(("code", 130))
    except InputError as error:
        news.put(("error", str(error)))
