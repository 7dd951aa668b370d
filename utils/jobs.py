"""From a Config to result files: data, device, repetitions, progress, averages, what is printed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from FLAlgorithms.servers.serverbase import Diverged, Server
from FLAlgorithms.trainmodel.models import Classifier, build_model
from utils.batches import OFFICIAL, PARTS, FederatedData
from utils.config import Config, notices, say
from utils.errors import InputError
from utils.model_utils import Source, default_normalize, features, read_data
from utils.parallel import run_parallel
from utils.partition import Split
from utils.progress import Interrupts, Progress, Show, Watch
from utils.results import (
    Recorder,
    append,
    average,
    check_writable,
    finished,
    result_path,
    summary,
    totals,
)


@dataclass(frozen=True)
class Job:
    """A configuration with its data on the device; `config` has every switch spelled out."""

    config: Config
    shape: tuple[int, ...]  # of one sample, as the models get it
    classes: int
    split: Split
    data: FederatedData
    normalize: str

    def model(self, repetition: int) -> Classifier:
        """The repetition's initial model."""
        model = build_model(
            self.config.model,
            self.shape,
            self.classes,
            self.config.initial_seed(repetition),
        )
        return model.to(self.data.x.device, self.data.x.dtype)

    def server(self, repetition: int | list[int], **extra: object) -> Server:
        """A server ready to run one repetition, or several in lockstep."""
        one = isinstance(repetition, int)
        model = self.model(repetition) if one else [self.model(i) for i in repetition]
        return self.config.server_class(self.config, self.data, model, repetition, **extra)

    def is_finished(self, repetition: int) -> bool:
        """Whether the repetition's files hold whole runs."""
        kinds = [False, True] if self.config.primary else [False]
        return all(finished(self.path(personal, repetition)) for personal in kinds)

    @property
    def lockstep(self) -> bool:
        """Whether the repetitions train side by side in one block."""
        several = len(self.config.repetitions) > 1 and not list(self.model(0).buffers())
        on_gpu = self.data.x.device.type == "cuda"
        return several and {"yes": True, "no": False, "auto": on_gpu}[self.config.lockstep]

    def label(self, repetitions: list[int]) -> str:
        """How progress and messages call some repetitions."""
        c = self.config
        which = "-".join(str(r) for r in dict.fromkeys((repetitions[0], repetitions[-1])))
        return f"{c.algorithm} {c.dataset_name} {c.model} [{which}]"

    def recorder(self, repetition: int, progress: Watch | None) -> Recorder:
        """A recorder that writes where the configuration says."""
        facts = {"device": str(self.data.x.device), "normalize": self.normalize}
        return Recorder(self.config, self.split, repetition, facts, progress)

    def path(self, personal: bool, repetition: object) -> Path:
        """The result file of a repetition, or of the average (`avg`)."""
        return result_path(self.config, self.split, personal, repetition)


def read(config: Config) -> tuple[Source, Split]:
    """The data and the split that a configuration names."""
    return read_data(config.dataset, config.split, config.drawn, config.data_dir)


def prepare(config: Config, source: Source, split: Split) -> Job:
    """Normalise, move to the device, set threads."""
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.tf32
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
    if config.test_set == "global":
        _check_official(config, source, split)
    flat = build_model(config.model, source.shape, source.classes, config.seed).flat
    x = features(source, split, normalize)
    data = federate(source, split, x, flat, config.test_set == "global")
    x = data.x.to(_device(config.gpu), getattr(torch, config.dtype))
    data = FederatedData(x, data.y.to(x.device), data.sizes)
    return Job(config, source.shape, source.classes, split, data, normalize)


def _check_official(config: Config, source: Source, split: Split) -> None:
    """InputError where the official test rows cannot judge, or something would lack test data."""
    if source.num_train == len(source.y):
        raise InputError(f"--test_set global: {source.name} has no official test part")
    if any((rows >= source.num_train).any() for rows in split.train):
        raise InputError(
            "--test_set global: the split's train parts hold rows of the official test part; give "
            "a --partition SCHEME:pool=train"
        )
    if config.primary and not any(len(rows) for rows in split.test):
        raise InputError(
            f"--test_set global: {config.algorithm}'s personalised models are evaluated on the "
            "users' own test parts, and the split has none; give a --partition with test > 0"
        )


def federate(
    source: Source, split: Split, x: np.ndarray, flat: bool = False, official: bool = False
) -> FederatedData:
    """The users' samples, in the split's order, as tensors; `flat`: every sample a vector.

    `official`: the dataset's own test rows follow them.
    """
    users = range(len(split.users))
    rows = {"train": split.train, "test": split.test}
    order = np.concatenate([rows[part][u] for part in PARTS for u in users])
    y = np.concatenate([split.targets(source.y, u, part) for part in PARTS for u in users])
    sizes = {part: np.array([len(r) for r in rows[part]]) for part in PARTS}
    if official:
        extra = np.arange(source.num_train, len(source.y))
        order, y = np.concatenate([order, extra]), np.concatenate([y, source.y[extra]])
        sizes[OFFICIAL] = np.array([len(extra)])
    shape = (len(x), -1) if flat else x.shape
    return FederatedData(
        torch.from_numpy(x.reshape(shape)[order]),
        torch.from_numpy(y.astype(np.int64)),
        sizes,
    )


def _device(gpu: int) -> torch.device:
    if gpu < 0:
        return torch.device("cpu")
    if gpu < torch.cuda.device_count():
        return torch.device("cuda", gpu)
    say(f"notice: --gpu {gpu}: no such CUDA device; running on the CPU")
    return torch.device("cpu")


def run_job(config: Config, given: Iterable[str]) -> int:
    """All repetitions of a job; 0, or 1 if one diverged, or 130 after Ctrl-C."""
    for line in notices(config, given):
        say(f"notice: {line}")
    if "gpu" not in given and not torch.cuda.is_available():
        config = dataclasses.replace(config, gpu=-1)
    job = prepare(config, *read(config))
    check_writable(job.path(True, "avg"))
    if config.log_file is not None:
        append(config.log_file, "")
    started = time.monotonic()
    try:
        code = _run_all(job)
    except KeyboardInterrupt:
        say("interrupted; the same command with --resume goes on from here")
        return 130
    report(job, time.monotonic() - started)
    return code


def _run_all(job: Job) -> int:
    config = job.config
    repetitions = [r for r in config.repetitions if not (config.resume and job.is_finished(r))]
    for done in set(config.repetitions) - set(repetitions):
        # Left by a process that died between its last file and this.
        job.recorder(done, None).checkpoint_path.unlink(missing_ok=True)
    if len(repetitions) < len(config.repetitions):
        say(f"{len(config.repetitions) - len(repetitions)} finished repetitions are kept")
    if not repetitions:
        return 0
    hands = min(config.jobs, len(repetitions)) if job.lockstep else len(repetitions)
    groups = [repetitions[i::hands] for i in range(hands)]
    if config.jobs > 1 and hands > 1:
        return run_parallel(job, groups)
    code = 0
    with Interrupts() as interrupts:
        for group in groups:
            progress = Progress(job.label(group), config.num_global_iters)
            try:
                code = max(code, run_repetitions(job, group, progress.show, interrupts.pause))
            finally:
                progress.close()
    return code


def run_repetitions(job: Job, repetitions: list[int], show: Show, pause: Callable[[], None]) -> int:
    """Some repetitions in lockstep, or one; 0, or 1 if one diverged.

    Whatever ends them, what was measured is written. With `--resume` they go on from their
    checkpoints; repetitions in lockstep whose checkpoints differ in their round go on one by one.
    """
    together = len(repetitions) > 1
    watch = Watch(lambda done, text: show(repetitions[0], done, text))
    recorders = [job.recorder(r, watch if r == repetitions[0] else None) for r in repetitions]
    saved = [recorder.load_checkpoint() for recorder in recorders] if job.config.resume else []
    if len({checkpoint["server"]["round"] if checkpoint else 0 for checkpoint in saved}) > 1:
        return max(run_repetitions(job, [r], show, pause) for r in repetitions)
    server = job.server(repetitions if together else repetitions[0])
    server.pause = pause
    for recorder in recorders:
        recorder.attach(server)
    for recorder, checkpoint in zip(recorders, saved, strict=False):
        if checkpoint:
            recorder.restore(checkpoint)
            done = server.round_number
            say(f"{job.label([recorder.repetition])}: resumed after round {done}")
    status = "interrupted"
    try:
        server.run()
        status = "finished"
    except Diverged:
        status = "diverged"
    finally:
        for run, recorder in enumerate(recorders):
            ended = "diverged" if run in server.failed else status
            written = recorder.save(ended)
            if ended != "finished":
                why = server.failed.get(run, ended)
                files = ", ".join(map(str, written))
                say(f"{job.label([recorder.repetition])}: {why}; what was measured is in {files}")
    return int(bool(server.failed))


def report(job: Job, seconds: float) -> None:
    """Average what is finished and print where everything is, with the tables."""
    config = job.config
    printed = []
    for personal in [False, True] if config.primary else [False]:
        wanted = [job.path(personal, i) for i in range(config.times)]
        done = [path for path in wanted if finished(path)]
        what = f"personalised ({config.primary})" if personal else "global model"
        printed += summary(done, f"{config.algorithm}, {what}, test accuracy %")
        if len(done) == len(wanted):
            average(done, job.path(personal, "avg"))
            done = [*done, job.path(personal, "avg")]
        printed += [f"  {path}" for path in done]
        if done and not personal:
            printed.append(totals(done[0]))
    plot = "python main_plot.py"
    if config.results_dir != Config.results_dir:
        plot += f" --results_dir {config.results_dir}"
    print("\n".join([*printed, f"{seconds:.1f} s; figure and table: {plot}"]))
