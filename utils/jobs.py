"""From a Config to result files: data, device, repetitions, progress, averages, what is printed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from FLAlgorithms.servers.serverbase import Diverged, Refused, Server
from FLAlgorithms.trainmodel.classifier import Classifier, batch_norms, stackable
from FLAlgorithms.trainmodel.custom import is_custom, label, pinned
from FLAlgorithms.trainmodel.models import build_model, usual_norm
from FLAlgorithms.trainmodel.probe import check_custom, check_stacking, takes_single_samples
from utils.batches import OFFICIAL, PARTS, FederatedData
from utils.config import Config, notices, say
from utils.errors import InputError
from utils.grid import Grid, Run
from utils.model_utils import (
    Source,
    about_data_dir,
    about_scale,
    default_normalize,
    normalized,
    read_data,
    split_folders,
)
from utils.parallel import run_parallel
from utils.partition import MOST_LABELS, Split
from utils.progress import Interrupts, Progress, Show, Watch
from utils.results import (
    Recorder,
    append,
    average,
    check_contents,
    check_writable,
    checkpoint_path,
    result_path,
    status,
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
    first: Split  # of repetition 0: what the files are named after
    scaling: dict[str, np.ndarray]  # what `normalize` does: mean and factor

    def model(self, repetition: int) -> Classifier:
        """The repetition's initial model."""
        seed = self.config.initial_seed(repetition)
        model = _model(self.config, self.shape, self.classes, seed)
        return model.to(self.data.x.device, self.data.x.dtype)

    def server(self, repetition: int | list[int], **extra: object) -> Server:
        """A server ready to run one repetition, or several in lockstep."""
        one = isinstance(repetition, int)
        model = self.model(repetition) if one else [self.model(i) for i in repetition]
        return self.config.server_class(self.config, self.data, model, repetition, **extra)

    def recorder(self, repetition: int, progress: Watch | None) -> Recorder:
        """A recorder that writes where the configuration says."""
        facts = {"device": str(self.data.x.device), "normalize": self.normalize}
        facts |= {"scaling": self.scaling, "shape": self.shape, "classes": self.classes}
        return Recorder(self.config, self.split, repetition, facts, progress, self.first)


def read(config: Config, repetition: int = 0) -> tuple[Source, Split]:
    """The data and the split that a configuration names; of a repetition, where they differ."""
    folders = split_folders(config.dataset, config.split_dir, config.results_dir)
    later = repetition if config.shared_split == "no" else 0
    data = (config.dataset, config.split, config.drawn, config.data_dir)
    return read_data(*data, folders, later)


def settle(config: Config, source: Source, split: Split) -> Config:
    """The same job with everything spelled out that the options leave to the data."""
    config = config.resolved()
    # Asking for the usual features by name is the same configuration as not asking.
    if config.normalize == default_normalize(source, split):
        config = dataclasses.replace(config, normalize=None)
    users = int(sum(len(rows) > 0 for rows in split.train))
    if not users:
        raise InputError(f"--split {config.split}: no user has train samples")
    if config.numusers > users:
        say(f"notice: --numusers {config.numusers}: the split has {users} users; all take part")
        config = dataclasses.replace(config, numusers=users)
    if config.test_set == "global":
        _check_official(config, source, split)
    norm = None if config.norm == usual_norm(config.model) else config.norm
    return dataclasses.replace(config, model=pinned(config.model), norm=norm)


def prepare(config: Config, source: Source, split: Split, first: Split | None = None) -> Job:
    """Normalise, move to the device, set threads; `first`: repetition 0's split, if another."""
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.tf32
    config = settle(config, source, split)
    normalize = config.normalize or default_normalize(source, split)
    model = _model(config, source.shape, source.classes, config.seed)
    _check_model(model, config, source, split)
    x, scaling = normalized(source, split, normalize)
    data = federate(source, split, x, model.flat, config.test_set == "global")
    x = data.x.to(_device(config.gpu), getattr(torch, config.dtype))
    data = FederatedData(x, data.y.to(x.device), data.sizes)
    facts = {"normalize": normalize, "scaling": scaling, "first": first or split}
    return Job(config, source.shape, source.classes, split, data, **facts)


def _model(config: Config, shape: tuple[int, ...], classes: int, seed: int) -> Classifier:
    extra = {"norm": config.norm, "pretrained": config.pretrained}
    return build_model(config.model, shape, classes, seed, **extra)


def _check_model(model: Classifier, config: Config, source: Source, split: Split) -> None:
    """Refuse what would fail in the first round; the model is spent afterwards."""
    name, shape = config.model, (source.x[0].size,) if model.flat else source.shape
    model.to(getattr(torch, config.dtype))
    if is_custom(name):
        check_custom(model, name, shape, source.classes)
        if stackable(model) and (config.block_size not in (0, "auto") or config.lockstep == "yes"):
            check_stacking(model, name, shape)
    if not batch_norms(model):
        if config.bn == "local":
            raise InputError(f"--bn local: {label(name)} has no BatchNorm layers")
        return
    if config.test_set == "global" and config.server_class.user_class.bn(config) == "local":
        raise InputError(
            f"--test_set global: every user has its own BatchNorm in {label(name)} (Local, --bn "
            "local), so there is no one global model to judge; use --test_set user"
        )
    trains_on_test = config.adapt != "train" and "adapt" in config.options()
    parts = (split.train, split.test) if trains_on_test else (split.train,)
    single = [u for part in parts for u, r in zip(split.users, part, strict=True) if len(r) == 1]
    if (single or config.batch_size == 1) and not takes_single_samples(model, shape):
        what = f"--split {config.split}: user {single[0]} has" if single else "--batch_size 1:"
        raise InputError(
            f"{what} one sample, and BatchNorm in {label(name)} has no variance over it; "
            "use --norm group or another model"
        )


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


class Loader:
    """Data and jobs, kept for the next run that wants the same ones."""

    def __init__(self) -> None:
        self._data: tuple[tuple, tuple[Source, Split]] | None = None
        self._job: tuple[tuple, Job] | None = None

    def data(self, config: Config, repetition: int = 0) -> tuple[Source, Split]:
        """The configuration's data set and split; of a repetition, where they differ."""
        key = (config.dataset, config.split, config.partition, config.test_set, config.data_dir)
        key += (config.split_dir, config.results_dir, config.shared_split == "no" and repetition)
        if self._data is None or self._data[0] != key:
            self._data = None  # two of them need not fit into memory
            self._data = (key, read(config, repetition))
        return self._data[1]

    def job(self, config: Config, repetition: int) -> Job:
        """The configuration with a repetition's data on the device."""
        key = (config, config.shared_split == "no" and repetition)
        if self._job is None or self._job[0] != key:
            self._job = None
            first = self.data(config)[1] if key[1] else None
            self._job = (key, prepare(config, *self.data(config, repetition), first))
        return self._job[1]


@dataclass(frozen=True)
class Task:
    """Repetitions of a settled configuration that run side by side, or a single one."""

    config: Config
    repetitions: list[int]


@dataclass(frozen=True)
class Plan:
    """A settled configuration, its split, and what is still to be done."""

    config: Config
    split: Split
    tasks: list[Task]

    @classmethod
    def of(cls, run: Run, resume: bool, loader: Loader) -> Plan:
        """Check all that can be checked before the first round; says what the user should know."""
        config = dataclasses.replace(run.config, resume=resume or run.config.resume)
        for line in notices(config, run.given):
            say(f"notice: {line}")
        known = "gpu" in run.given or torch.cuda.is_available()
        if not known or _device(config.gpu).type == "cpu":
            config = dataclasses.replace(config, gpu=-1)
        source, split = loader.data(config)
        config = settle(config, source, split)
        model = _model(config, source.shape, source.classes, config.seed)
        _check_model(model, config, source, split)
        for line in _about_split(config, source, split):
            say(f"notice: {line}")
        if "normalize" not in run.given and (line := about_scale(source, split)):
            say(f"notice: {line}")
        check_writable(result_path(config, split, True, "avg"))
        for repetition in config.repetitions:
            check_contents(result_path(config, split, False, repetition), split)
        if config.log_file is not None:
            append(config.log_file, "")
        missing = []
        for repetition in config.repetitions:
            if config.resume and _is_finished(config, split, repetition):
                # Left by a process that died between its last file and this.
                checkpoint_path(config, split, repetition).unlink(missing_ok=True)
            else:
                missing.append(repetition)
        hands = len(missing)
        if _lockstep(config, model):
            hands = min(config.jobs, hands)
        return cls(config, split, [Task(config, missing[i::hands]) for i in range(hands)])

    @property
    def kept(self) -> int:
        """How many repetitions were found finished."""
        return len(self.config.repetitions) - sum(len(task.repetitions) for task in self.tasks)


def _about_split(config: Config, source: Source, split: Split) -> list[str]:
    """What the user may not expect of the split."""
    found, omitted = [], split.manifest.get("omitted_labels", [])
    if omitted:
        more = f" and {len(omitted) - MOST_LABELS} more" if len(omitted) > MOST_LABELS else ""
        judged = ", but the official test rows have them" if config.test_set == "global" else ""
        names = " ".join(map(str, omitted[:MOST_LABELS]))
        found.append(f"no user holds the labels {names}{more}{judged}")
    if line := about_data_dir(config.dataset, split, config.data_dir):
        found.append(line)
    held = sum(map(len, split.test))
    unseen = sum(
        len(test) > 0 and not len(train)
        for train, test in zip(split.train, split.test, strict=True)
    )
    if unseen:
        found.append(
            f"{unseen} user{'s have' if unseen > 1 else ' has'} test samples but no train samples:"
            " never sampled, judged by the global model"
        )
    rows = [*split.train, *split.test]
    official = len(source.y) - source.num_train
    users_judge = official > 0 and config.test_set == "user"
    if users_judge and all((own < source.num_train).all() for own in rows):
        found.append(f"{official} official test rows are unused; --test_set global reads them")
    if config.test_set == "user" and not held:
        found.append("no user has test samples, so there is no test accuracy")
    if config.test_set == "global" and held and not config.primary:
        found.append(f"{held} rows are held out for the users' own test parts, which nobody reads")
    return found


def _is_finished(config: Config, split: Split, repetition: int) -> bool:
    """Whether the repetition's files hold whole runs."""
    kinds = [False, True] if config.primary else [False]
    return all(is_whole(result_path(config, split, personal, repetition)) for personal in kinds)


def is_whole(path: Path) -> bool:
    """Whether the file holds a whole run; a damaged one is named and left out."""
    try:
        return status(path) == "finished"
    except InputError as error:
        say(f"notice: left out: {error}")
        return False


def _lockstep(config: Config, model: Classifier) -> bool:
    """Whether the repetitions train side by side in one block."""
    several = len(config.repetitions) > 1 and stackable(model) and config.shared_split == "yes"
    auto = config.gpu >= 0 and not is_custom(config.model)
    return several and {"yes": True, "no": False, "auto": auto}[config.lockstep]


def name_of(config: Config, repetitions: Sequence[int]) -> str:
    """How progress and messages call some repetitions."""
    which = "-".join(str(r) for r in dict.fromkeys((min(repetitions), max(repetitions))))
    return f"{config.algorithm} {config.dataset_name} {label(config.model)} [{which}]"


def run_grid(grid: Grid) -> int:
    """All runs; 0, or 1 if a repetition diverged, or 130 after Ctrl-C.

    Of many runs those that are finished are kept, and those that were interrupted go on.
    """
    many, loader = bool(grid.title), Loader()
    plans = [Plan.of(run, many, loader) for run in grid.runs]
    tasks = [task for plan in plans for task in plan.tasks]
    if kept := sum(plan.kept for plan in plans):
        say(f"finished and kept: {kept} repetition{'s' * (kept > 1)}")
    started = time.monotonic()
    try:
        code = _run_tasks(tasks, grid.title, loader) if tasks else 0
    except KeyboardInterrupt:
        say(f"interrupted; the same command{'' if many else ' with --resume'} goes on from here")
        return 130
    printed = [line for plan in plans for line in conclude(plan)]
    plot = "python main_plot.py" + (f" --config {grid.path}" if many else "")
    results_dir = plans[0].config.results_dir
    if results_dir != Config.results_dir:
        plot += f" --results_dir {results_dir}"
    seconds = time.monotonic() - started
    print("\n".join([*([] if many else printed), f"{seconds:.1f} s; figure and table: {plot}"]))
    return code


def _run_tasks(tasks: Sequence[Task], title: str, loader: Loader) -> int:
    everybody = [r for task in tasks for r in task.repetitions]
    progress = Progress(
        title or name_of(tasks[0].config, everybody),
        sum(task.config.num_global_iters for task in tasks),
    )
    shows = [
        partial(progress.show, number, name_of(task.config, task.repetitions) if title else "")
        for number, task in enumerate(tasks)
    ]
    try:
        if len(tasks) > 1 and max(task.config.jobs for task in tasks) > 1:
            return run_parallel(tasks, shows)
        code = 0
        with Interrupts() as interrupts:
            for task, show in zip(tasks, shows, strict=True):
                job = loader.job(task.config, task.repetitions[0])
                code = max(code, run_repetitions(job, task.repetitions, show, interrupts.pause))
        return code
    finally:
        progress.close()


def run_repetitions(job: Job, repetitions: list[int], show: Show, pause: Callable[[], None]) -> int:
    """Some repetitions in lockstep, or one; 0, or 1 if one diverged.

    Whatever ends them, what was measured is written. With `--resume` they go on from their
    checkpoints; repetitions in lockstep whose checkpoints differ in their round go on one by one.
    """
    together = len(repetitions) > 1
    watch = Watch(show)
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
            say(f"{name_of(job.config, [recorder.repetition])}: resumed after round {done}")
    end = "interrupted"
    try:
        server.run()
        end = "finished"
    except Diverged:
        end = "diverged"
    except Refused:
        recorders = []  # nothing that was measured counts
        raise
    finally:
        for run, recorder in enumerate(recorders):
            ended = "diverged" if run in server.failed else end
            written = recorder.save(ended)
            if ended != "finished":
                why = server.failed.get(run, ended)
                name, files = name_of(job.config, [recorder.repetition]), map(str, written)
                say(f"{name}: {why}; what was measured is in {', '.join(files)}")
    return int(bool(server.failed))


def conclude(plan: Plan) -> list[str]:
    """Average what is finished; the lines that say where everything is, with the tables."""
    config, printed = plan.config, []
    for personal in [False, True] if config.primary else [False]:
        path = partial(result_path, config, plan.split, personal)
        done = [path(i) for i in range(config.times) if is_whole(path(i))]
        what = f"personalised ({config.primary})" if personal else "global model"
        whose = "official " if config.test_set == "global" and not personal else ""
        printed += summary(done, f"{config.algorithm}, {what}, {whose}test accuracy %")
        work = [totals(done[0])] if done and not personal else []
        if len(done) == config.times:
            average(done, path("avg"))
            done = [*done, path("avg")]
        printed += [*(f"  {file}" for file in done), *work]
    return printed
