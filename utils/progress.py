"""Progress for the user: what a run tells, and how it is shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from tqdm import tqdm

from FLAlgorithms.evaluation import Metrics
from utils.config import say
from utils.errors import on_interrupt

# show(rounds done, text)
Show = Callable[[int, str], None]


class Watch:
    """Turns what a run tells into a line of text: accuracies and loss."""

    def __init__(self, show: Show) -> None:
        self.show = show
        self.known: dict[str, str] = {}

    def evaluated(self, round_number: int, metrics: Metrics) -> None:
        """The global model's metrics."""
        self.known["test accuracy"] = f"{metrics.accuracy('test'):.4f}"
        self.known["train loss"] = f"{metrics.mean_loss('train'):.4f}"
        self._tell(round_number)

    def personalized(self, metrics: Metrics) -> None:
        """The metrics of the personalised models."""
        self.known["personalised"] = f"{metrics.accuracy('test'):.4f}"

    def round_done(self, round_number: int) -> None:
        """A round has ended."""
        self._tell(round_number)

    def _tell(self, round_number: int) -> None:
        self.show(round_number, ", ".join(f"{name} {value}" for name, value in self.known.items()))


class Interrupts(ExitStack):
    """Ctrl-C waits for the end of the round, so that nothing is torn; a second one does not."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def __enter__(self) -> Interrupts:
        self.enter_context(on_interrupt(self._ask))
        return super().__enter__()

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        say("interrupt: stopping at the end of this round (again: at once)")

    def pause(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.asked:
            raise KeyboardInterrupt


class Progress:
    """Round, accuracy, loss and time left: a bar on a terminal, now and then a line elsewhere."""

    EVERY = 10.0  # seconds between lines

    def __init__(self, label: str, total: int) -> None:
        """`total`: rounds of all that shares this display."""
        self.label, self.total = label, total
        self.started = self.told = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.total, desc=label, unit="round")
        self.done: dict[int, int] = {}
        self.before = 0  # rounds that were done when they were first heard of
        self.text = ""

    def show(self, task: int, name: str, round_number: int, text: str) -> None:
        """One of several tasks, whose `name` is shown unless empty, has done so many rounds."""
        if task not in self.done:
            self.before += max(round_number - 1, 0)
        self.done[task], self.text = round_number, f"{name}, {text}" if name else text
        done = sum(self.done.values())
        now = time.monotonic()
        if self.bar is not None:
            self.bar.set_postfix_str(self.text, refresh=False)
            self.bar.update(done - self.bar.n)
        elif now - self.told >= self.EVERY:
            self.told = now
            left = (now - self.started) / max(done - self.before, 1) * (self.total - done)
            self._tell(done, f"{left:.0f} s left")

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self.bar is not None:
            self.bar.set_postfix_str(self.text)
            self.bar.close()
        elif self.done:
            self._tell(sum(self.done.values()))

    def _tell(self, done: int, *more: str) -> None:
        # Where nothing is evaluated there is no text.
        parts = (f"{self.label}: round {done}/{self.total}", self.text, *more)
        say(", ".join(part for part in parts if part))
