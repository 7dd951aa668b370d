"""Progress for the user: what a run tells, and how it is shown."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from FLAlgorithms.evaluation import Metrics
from utils.config import say

# show(repetition, rounds done, text)
Show = Callable[[int, int, str], None]


class Watch:
    """Turns what a run tells into a line of text: accuracies and loss."""

    def __init__(self, show: Callable[[int, str], None]) -> None:
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


class Interrupts:
    """Ctrl-C waits for the end of the round, so that nothing is torn; a second one does not."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupts:
        self.before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

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

    def __init__(self, label: str, rounds: int, repetitions: int = 1) -> None:
        """`rounds` per repetition; repetitions that run side by side in processes share a bar."""
        self.label, self.total = label, rounds * repetitions
        self.started = self.told = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.total, desc=label, unit="round")
        self.done: dict[int, int] = {}
        self.text = ""

    def show(self, repetition: int, round_number: int, text: str) -> None:
        """A repetition has done so many rounds."""
        self.done[repetition], self.text = round_number, text
        done = sum(self.done.values())
        now = time.monotonic()
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(done - self.bar.n)
        elif now - self.told >= self.EVERY:
            self.told = now
            left = (now - self.started) / max(done, 1) * (self.total - done)
            say(f"{self.label}: round {done}/{self.total}, {text}, {left:.0f} s left")

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self.bar is not None:
            self.bar.set_postfix_str(self.text)
            self.bar.close()
        elif self.done:
            say(f"{self.label}: round {sum(self.done.values())}/{self.total}, {self.text}")
