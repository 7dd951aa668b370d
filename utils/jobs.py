"""From a Config to result files: data, device, repetitions, progress, averages, what is printed."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from FLAlgorithms.evaluation import Metrics
from FLAlgorithms.servers.serverbase import Diverged, Server
from FLAlgorithms.trainmodel.models import Classifier, build_model
from utils.batches import PARTS, FederatedData
from utils.config import Config, notices, say
from utils.errors import InputError
from utils.model_utils import Source, default_normalize, features, read_data
from utils.partition import Split
from utils.results import Recorder, average, check_writable, finished, result_path, summary


@dataclass(frozen=True)
class Job:
    """A configuration with its data on the device; `config` has every switch spelled out."""

    config: Config
    source: Source
    split: Split
    data: FederatedData
    normalize: str

    def model(self, repetition: int) -> Classifier:
        """The repetition's initial model."""
        model = build_model(
            self.config.model,
            self.source.shape,
            self.source.classes,
            self.config.initial_seed(repetition),
        )
        return model.to(self.data.x.device, self.data.x.dtype)

    def server(self, repetition: int, **extra: object) -> Server:
        """A server ready to run."""
        model = self.model(repetition)
        return self.config.server_class(self.config, self.data, model, repetition, **extra)

    def recorder(self, repetition: int, progress: Progress | None) -> Recorder:
        """A recorder that writes where the configuration says."""
        facts = {"device": str(self.data.x.device), "normalize": self.normalize}
        return Recorder(self.config, self.split, repetition, facts, progress)

    def path(self, personal: bool, repetition: object) -> Path:
        """The result file of a repetition, or of the average (`avg`)."""
        return result_path(self.config, self.split, personal, repetition)


def prepare(config: Config, source: Source, split: Split) -> Job:
    """Normalise, move to the device, set threads."""
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.allow_tf32 = False
    config = config.resolved()
    usual = default_normalize(source, split)
    normalize = config.normalize or usual
    # Asking for the usual features by name is the same configuration as not asking.
    config = dataclasses.replace(config, normalize=None if normalize == usual else normalize)
    users = int(sum(len(rows) > 0 for rows in split.train))
    if not users:
        raise InputError(f"--split {config.split}: no user has train samples")
    if config.numusers > users:
        say(f"notice: --numusers {config.numusers}: the split has {users} users; all take part")
        config = dataclasses.replace(config, numusers=users)
    flat = build_model(config.model, source.shape, source.classes, config.seed).flat
    data = federate(source, split, features(source, split, normalize), flat)
    x = data.x.to(_device(config.gpu), getattr(torch, config.dtype))
    data = FederatedData(x, data.y.to(x.device), data.sizes)
    return Job(config, source, split, data, normalize)


def federate(source: Source, split: Split, x: np.ndarray, flat: bool = False) -> FederatedData:
    """The users' samples, in the split's order, as tensors; `flat`: every sample a vector."""
    users = range(len(split.users))
    rows = {"train": split.train, "test": split.test}
    order = np.concatenate([rows[part][u] for part in PARTS for u in users])
    y = np.concatenate([split.targets(source.y, u, part) for part in PARTS for u in users])
    shape = (len(x), -1) if flat else x.shape
    return FederatedData(
        torch.from_numpy(x.reshape(shape)[order]),
        torch.from_numpy(y.astype(np.int64)),
        {part: np.array([len(r) for r in rows[part]]) for part in PARTS},
    )


def _device(gpu: int) -> torch.device:
    if gpu < 0:
        return torch.device("cpu")
    if gpu < torch.cuda.device_count():
        return torch.device("cuda", gpu)
    say(f"notice: --gpu {gpu}: no such CUDA device; running on the CPU")
    return torch.device("cpu")


class Progress:
    """Round, accuracy, loss and time left: a bar on a terminal, now and then a line elsewhere."""

    EVERY = 10.0  # seconds between lines

    def __init__(self, label: str, rounds: int) -> None:
        self.label, self.rounds = label, rounds
        self.started = self.told = time.monotonic()
        self.bar = tqdm(total=rounds, desc=label, unit="round") if sys.stderr.isatty() else None
        self.shown: dict[str, str] = {}

    def evaluated(self, round_number: int, metrics: Metrics) -> None:
        """The global model's metrics; on a terminal they show with the next round."""
        self.shown["test accuracy"] = f"{metrics.accuracy('test'):.4f}"
        self.shown["train loss"] = f"{metrics.mean_loss('train'):.4f}"
        if self.bar is None:
            self._line(round_number)

    def personalized(self, metrics: Metrics) -> None:
        """The metrics of the personalised models."""
        self.shown["personalised"] = f"{metrics.accuracy('test'):.4f}"

    def round_done(self, round_number: int) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.set_postfix_str(self._text(), refresh=False)
            self.bar.update(round_number - self.bar.n)

    def _line(self, round_number: int) -> None:
        now = time.monotonic()
        if now - self.told < self.EVERY and round_number < self.rounds:
            return
        self.told = now
        left = (now - self.started) / max(round_number, 1) * (self.rounds - round_number)
        say(f"{self.label}: round {round_number}/{self.rounds}, {self._text()}, {left:.0f} s left")

    def _text(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.shown.items())

    def close(self) -> None:
        """Leave the last state of the bar on the terminal."""
        if self.bar is not None:
            self.bar.set_postfix_str(self._text())
            self.bar.close()


def run_job(config: Config, given: Iterable[str]) -> int:
    """All repetitions of a job; 0, or 1 if one diverged, or 130 after Ctrl-C."""
    for line in notices(config, given):
        say(f"notice: {line}")
    job = prepare(config, *read_data(config.dataset, config.split))
    check_writable(job.path(True, "avg"))
    code, started = 0, time.monotonic()
    for repetition in config.repetitions:
        try:
            code = max(code, run_repetition(job, repetition))
        except KeyboardInterrupt:
            say(
                f"interrupted; finished repetitions are kept, run this one again "
                f"with --repetition {repetition}"
            )
            return 130
    report(job, time.monotonic() - started)
    return code


def run_repetition(job: Job, repetition: int) -> int:
    """One repetition; 0, or 1 if it diverged. Whatever ends it, what was measured is written."""
    config = job.config
    label = f"{config.algorithm} {config.dataset} {config.model} [{repetition}]"
    progress = Progress(label, config.num_global_iters)
    recorder = job.recorder(repetition, progress)
    server = job.server(repetition)
    recorder.attach(server)
    status, code = "interrupted", 0
    try:
        server.run()
        status = "finished"
    except Diverged as stop:
        status, code = "diverged", 1
        say(f"{label}: {stop}")
    finally:
        progress.close()
        written = recorder.save(status)
        if status != "finished":
            say(f"{status}: what was measured is in {', '.join(map(str, written))}")
    return code


def report(job: Job, seconds: float) -> None:
    """Average what is finished and print where everything is, with the tables."""
    config = job.config
    for personal in [False, True] if config.primary else [False]:
        wanted = [job.path(personal, i) for i in range(config.times)]
        done = [path for path in wanted if finished(path)]
        shown = list(done)
        if len(done) == len(wanted):
            shown.append(job.path(personal, "avg"))
            average(done, shown[-1])
        what = f"personalised ({config.primary})" if personal else "global model"
        for line in summary(done, f"{config.algorithm}, {what}, test accuracy %"):
            print(line)
        for path in shown:
            print(f"  {path}")
    print(f"{seconds:.1f} s; figure and table: python main_plot.py")
