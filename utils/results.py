"""Result files: one .h5 per repetition (and its `_p` file), written crash-safe, and averages."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import platform
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np
import torch

from FLAlgorithms.evaluation import Metrics
from FLAlgorithms.servers.serverbase import WORK, Server
from FLAlgorithms.trainmodel.custom import file_hash, is_custom, label
from utils.config import NOT_NUMBERS, Config
from utils.errors import InputError
from utils.files import atomic_h5, open_h5, replacing
from utils.measures import late_count, late_mean, over_users
from utils.model_utils import is_default
from utils.partition import PARTS, Split, group_name

if TYPE_CHECKING:
    from utils.progress import Watch

SCHEMA = 1
CODE_VERSION = "0.1.0"
CURVES = ("rs_glob_acc", "rs_train_acc", "rs_train_loss", "rs_test_loss")
# What the file name spells out; everything else that changes numbers goes into its hash.
IN_NAME = ("dataset", "model", "algorithm", "learning_rate", "beta", "lamda", "numusers")
IN_NAME += ("batch_size", "local_epochs")
PERSONAL_STEPS = ("K", "personal_learning_rate")


def number(value: float) -> str:
    """One spelling for every number: 1 and 1.0 give 1."""
    value = float(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e16 else repr(value)


def name_fields(config: Config) -> tuple[str, ...]:
    """The fields that the file name of this algorithm spells out."""
    return IN_NAME + (PERSONAL_STEPS if "K" in config.server_class.options else ())


def identity(config: Config, split: Split) -> dict[str, object]:
    """Every field that changes this algorithm's numbers and is not at its default.

    Only what differs from the default counts, so that a new option changes no old name; from the
    common default, so that an algorithm's own one does not, either.
    """
    default = config.common()
    found = {
        name: getattr(config, name)
        for name in config.options()
        if name not in NOT_NUMBERS and getattr(config, name) != getattr(default, name)
    }
    if is_custom(config.model):
        found |= {"model": label(config.model), "model_file": file_hash(config.model)}
    return found | ({} if is_default(config.dataset, split) else {"split": split.hash})


def file_name(config: Config, split: Split, personal: bool) -> str:
    """The name up to the repetition: <Dataset>_<model>_<Algorithm>[_p]_..., without `_<i>.h5`."""
    c = config
    parts = [c.dataset_name, label(c.model), c.algorithm + ("_p" if personal else "")]
    parts += [number(c.learning_rate), number(c.beta), number(c.lamda)]
    parts += [f"{c.numusers}u", f"{c.batch_size}b", str(c.local_epochs)]
    named = name_fields(config)
    if PERSONAL_STEPS[0] in named:
        parts += [str(c.K), number(c.personal_learning_rate)]
    rest = {k: v for k, v in identity(config, split).items() if k not in named}
    return "_".join([*parts, digest(rest)] if rest else parts)


def result_path(config: Config, split: Split, personal: bool, repetition: object) -> Path:
    """The result file of a repetition, or of the average (`avg`)."""
    return Path(config.results_dir) / f"{file_name(config, split, personal)}_{repetition}.h5"


def checkpoint_path(config: Config, split: Split, repetition: int) -> Path:
    """Where an unfinished repetition's checkpoint lies: beside the result file."""
    return result_path(config, split, False, repetition).with_suffix(".ckpt")


def digest(values: dict[str, object]) -> str:
    """A short hash of some options."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def check_writable(path: Path) -> None:
    """Try to write beside `path`, before any work is done for it."""
    try:
        with atomic_h5(path.with_name(f"{path.name}.try")):
            if path.is_dir():
                raise InputError(f"{path.name} is a folder")
    except InputError as error:
        raise InputError(f"--results_dir {path.parent}: {error}") from None
    # Another process on the same output may have removed it.
    path.with_name(f"{path.name}.try").unlink(missing_ok=True)


def check_contents(path: Path, split: Split) -> None:
    """InputError where there is a result on other contents of the same named dataset."""
    mine = split.manifest.get("contents")
    if mine is None or not path.exists():
        return
    found = None
    with suppress(InputError), open_h5(path) as file:  # a damaged one may be replaced
        found = json.loads(file.attrs["manifest"]).get("contents")
    if found not in (None, mine):
        raise InputError(
            f"{path}: holds a run on other contents of {split.manifest['dataset']} than there are"
            " now; give another --results_dir"
        )


def append(path: str, text: str) -> None:
    """Add text to the log file; InputError where that cannot be done."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"--log_file {path}: {error.strerror}") from None


class Recorder:
    """Records one repetition and writes its files, now and then and at the end."""

    def __init__(
        self,
        config: Config,
        split: Split,
        repetition: int,
        facts: dict[str, object],
        progress: Watch | None = None,
        first: Split | None = None,
    ) -> None:
        """`config`: all switches resolved; `facts`: what the data and the machine made of it.

        That is `device` and `normalize` as really used, `scaling` (mean and factor: the model gets
        (x - mean) factor), `shape` of a raw sample, and `classes`. `first`: repetition 0's split,
        if another; all repetitions' files are named after it.
        """
        self.config, self.split, self.repetition = config, split, repetition
        first = first or split
        self.paths = {p: result_path(config, first, p, repetition) for p in (False, True)}
        self.checkpoint_path = checkpoint_path(config, first, repetition)
        self.identity = {name: getattr(config, name) for name in name_fields(config)}
        self.identity |= identity(config, first) | {"dataset": config.dataset_name}
        self.facts, self.progress = facts, progress
        self.started, self.clock = datetime.now(timezone.utc), time.monotonic()
        self.saved = -math.inf  # the first round is saved at once, to be looked at
        self.main: list[tuple[int, Metrics]] = []
        self.personal: list[tuple[int, dict[str, Metrics]]] = []
        self.selected: list[np.ndarray] = []
        self.work: list[np.ndarray] = []  # after each round, of all rounds so far
        self.server: Server | None = None
        self.init: dict[str, np.ndarray] = {}

    def attach(self, server: Server) -> None:
        """Watch a server that is about to run."""
        self.server, self.run = server, server.repetitions.index(self.repetition)
        server.observers[self.run] = self
        self.init = self._state()

    # ---- the Observer's side

    def evaluated(self, round_number: int, metrics: Metrics) -> None:
        """The global model after `round_number` rounds."""
        self.main.append((round_number, metrics))
        if self.progress:
            self.progress.evaluated(round_number, metrics)

    def personalized(self, round_number: int, models: dict[str, Metrics]) -> None:
        """The personalised models of a round."""
        self.personal.append((round_number, models))
        if self.progress:
            self.progress.personalized(models[self.config.primary])

    def round_done(self, round_number: int, selected: np.ndarray) -> None:
        """Keep who was selected; save now and then."""
        self.selected.append(selected)
        self.work.append(self.server.work[self.run].copy())
        if self.progress:
            self.progress.round_done(round_number)
        if self.config.log_file is not None:
            self._log(round_number, selected)
        if time.monotonic() - self.saved >= self.config.save_every:
            self.save("running")

    def _log(self, round_number: int, selected: np.ndarray) -> None:
        """One plain line per round; the accuracies are the latest that were measured."""
        c = self.config
        line = f"{datetime.now(timezone.utc).isoformat(timespec='seconds')} {c.algorithm} "
        line += f"{c.dataset_name} {label(c.model)} repetition={self.repetition} "
        line += f"round={round_number}"
        if self.main:
            t, m = self.main[-1]
            line += f" evaluated={t} test_accuracy={m.accuracy('test'):.6f}"
            line += f" train_loss={m.mean_loss('train'):.6f}"
        if self.personal:
            m = self.personal[-1][1][c.primary]
            line += f" personalised={m.accuracy('test'):.6f}"
        line += f" selected={','.join(map(str, selected))}\n"
        append(c.log_file, line)

    # ---- files

    def save(self, status: str) -> list[Path]:
        """Write the main file and, where there are personalised models, the `_p` file.

        What is not finished never replaces what is: it goes into NAME.h5.part beside it.
        """
        self.saved = time.monotonic()
        ended = status in ("finished", "diverged")
        # Stopped within a round, or before this recorder heard of it: the last checkpoint stays.
        if not ended and self.server.whole and len(self.selected) == self.server.round_number:
            self._save_checkpoint()
        parts = {p: path.with_name(path.name + ".part") for p, path in self.paths.items()}
        beside = status != "finished" and any(finished(path) for path in self.paths.values())
        written = self._write(parts if beside else self.paths, status)
        if not beside:
            for part in parts.values():
                part.unlink(missing_ok=True)
        if ended:  # only now: dying or a full disk before this line must not cost the run
            self.checkpoint_path.unlink(missing_ok=True)
        return written

    def _save_checkpoint(self) -> None:
        content = self._fitting() | {
            "server": self.server.checkpoint(self.run),
            "main": _pack([(r, {"": m}) for r, m in self.main]),
            "personal": _pack(self.personal),
            "selected": [torch.from_numpy(np.asarray(s)) for s in self.selected],
            "work": torch.from_numpy(_stacked(self.work)),
            "init": {n: torch.from_numpy(v) for n, v in self.init.items()},
        }
        with replacing(self.checkpoint_path) as beside:
            # torch tells of a full disk by a RuntimeError; Python's own write does not.
            torch.save(content, buffer := io.BytesIO())
            beside.write_bytes(buffer.getbuffer())

    def _fitting(self) -> dict[str, object]:
        """What a checkpoint must agree in with the job that goes on from it."""
        return {
            "schema": SCHEMA,
            "configuration": json.dumps(self.identity, sort_keys=True),
            "split": self.split.hash,
        }

    def load_checkpoint(self) -> dict | None:
        """The checkpoint of this repetition, if there is one; InputError if it does not fit."""
        path = self.checkpoint_path
        if not path.exists():
            return None
        with self._judging():
            with zipfile.ZipFile(path) as archive:  # torch.load skips the checksums
                if archive.testzip():
                    raise ValueError("a checksum is wrong")
            found = torch.load(path, map_location="cpu", weights_only=True)
            for key, value in self._fitting().items():
                if found[key] != value:
                    raise InputError(f"--resume: {path} has {key} {found[key]}, this job {value}")
            _demand_like(found["server"]["round"], 0)
            return found

    def restore(self, checkpoint: dict) -> None:
        """Put the server and the curves back to where the checkpoint was taken.

        InputError, before anything is changed, where the contents are not this job's.
        """
        server, data = checkpoint["server"], self.server.data
        names = self.server.personal_names(self.config)
        with self._judging():
            _demand_like(server, self.server.checkpoint(self.run))
            done = server["round"]
            main = _unpack(checkpoint["main"], [""], data.global_sizes)
            personal = _unpack(checkpoint["personal"], names, data.sizes)
            selected = [s.numpy() for s in checkpoint["selected"]]
            init = {n: v.numpy() for n, v in checkpoint["init"].items()}
            work = checkpoint["work"]
            _demand_like(work, torch.empty(done, len(WORK), dtype=torch.int64))
            _demand(0 <= done == len(selected) <= self.config.num_global_iters)
            _demand(all(np.isin(who, np.arange(data.num_users)).all() for who in selected))
            _demand(all(who.shape == np.unique(who).shape for who in selected))
            _demand_like(checkpoint["init"], {n: torch.from_numpy(v) for n, v in self.init.items()})
        self.server.restore(server, self.run)
        # What was evaluated before the next round is evaluated again.
        self.main = [(r, m[""]) for r, m in main if r < done]
        self.personal = [e for e in personal if e[0] < done]
        self.selected, self.init, self.work = selected, init, list(work.numpy())

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """Whatever is wrong with the checkpoint is one InputError."""
        try:
            yield
        except InputError:
            raise
        except Exception:  # the unpickler answers damaged bytes with errors of many kinds
            raise InputError(
                f"--resume: {self.checkpoint_path} is damaged or no checkpoint; "
                "delete it to start again"
            ) from None

    def _write(self, paths: dict[bool, Path], status: str) -> list[Path]:
        written = [paths[False]]
        with atomic_h5(written[0]) as file:
            self._attributes(file, status, "global", self.paths[True])
            # The official test rows, where they judge, are nobody's.
            users = len(self.split.users) if self.config.test_set == "user" else None
            _write_curves(file, self.main, users)
            width = max((len(s) for s in self.selected), default=0)
            rows = np.full((len(self.selected), width), -1, dtype=np.int32)
            for row, who in zip(rows, self.selected, strict=True):
                row[: len(who)] = who
            file["selected_users"] = rows
            self._write_work(file)
            _write_group(file, "init", self.init)
            _write_group(file, "final", self._state())
            _write_group(file, "normalize", self.facts["scaling"])
            for name in ("shape", "classes"):
                file["normalize"].attrs[name] = self.facts[name]
            write_split(file, self.split)
        primary = self.config.primary
        if primary:
            written.append(paths[True])
            with atomic_h5(written[1]) as file:
                self._attributes(file, status, primary, self.paths[False])
                entries = [(r, models[primary]) for r, models in self.personal]
                _write_curves(file, entries, len(self.split.users))
                _write_users(file, self.split)
                self._write_work(file)
                names = self.server.personal_names(self.config)
                for name in names if len(names) > 1 else ():
                    curve = [models[name].accuracy("test") for _, models in self.personal]
                    file[f"{name}_test_acc"] = np.array(curve, dtype=np.float64)
                if status == "finished" and self.config.save_models:
                    self._write_models(file)
        return written

    def _attributes(self, file: h5py.File, status: str, evaluates: str, partner: Path) -> None:
        config = self.config
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions["numpy"] = np.__version__
        if status == "running":  # who would go on writing it
            file.attrs.update({"host": platform.node(), "pid": os.getpid()})
        file.attrs.update(
            {
                "schema": SCHEMA,
                "config": json.dumps(
                    dataclasses.asdict(config) | {"normalize": self.facts["normalize"]}
                ),
                "identity": digest(self.identity),
                "options": json.dumps(config.options()),
                "class": type(self.server).__name__,
                "code_version": CODE_VERSION,
                "versions": json.dumps(versions),
                "dtype": config.dtype,
                "started": self.started.isoformat(timespec="seconds"),
                "wall_seconds": time.monotonic() - self.clock,
                "status": status,
                "data_hash": self.split.hash,
                "manifest": json.dumps(self.split.manifest),
                "evaluates": evaluates,
                "test_set": "user" if evaluates != "global" else config.test_set,
                "repetition": self.repetition,
                "partner": partner.name,
                "work": json.dumps(
                    dict(zip(WORK, self.server.work[self.run].tolist(), strict=True))
                ),
                "device": self.facts["device"],
            }
        )

    def _state(self) -> dict[str, np.ndarray]:
        state = self.server.state_dict(self.run)
        return {n: t.detach().cpu().numpy().copy() for n, t in state.items()}

    def _write_work(self, file: h5py.File) -> None:
        file["work"] = _stacked(self.work)
        file["work"].attrs["columns"] = json.dumps(WORK)

    def _write_models(self, file: h5py.File) -> None:
        for name, rows in self.server.personal_models(self.run).items():
            for user, value in zip(self.split.users, rows.cpu().numpy(), strict=True):
                file[f"personal/{group_name(user)}/{name}"] = value


def _pack(entries: Sequence[tuple[int, dict[str, Metrics]]]) -> dict[str, object]:
    """Metrics as tensors: per model and part, (entries, 2, N)."""
    names = entries[0][1] if entries else {}
    rows = {
        name: {
            part: torch.from_numpy(
                np.stack([[m[name].correct[part], m[name].loss[part]] for _, m in entries])
            )
            for part in PARTS
        }
        for name in names
    }
    return {"rounds": [r for r, _ in entries], "models": rows}


def _unpack(
    packed: dict, names: Iterable[str], sizes: dict[str, np.ndarray]
) -> list[tuple[int, dict[str, Metrics]]]:
    """What `_pack` packed: metrics of the models `names`; ValueError if they are not that."""
    rounds, models = packed["rounds"], packed["models"].items()
    _demand_like(rounds, [0] * len(rounds))
    _demand(packed["models"].keys() == (set(names) if rounds else set()))
    for _, rows in models:
        shapes = {part: (len(rounds), 2, len(sizes[part])) for part in PARTS}
        like = {part: torch.empty(shape, dtype=torch.float64) for part, shape in shapes.items()}
        _demand_like(rows, like, finite=False)
    return [
        (
            r,
            {
                name: Metrics(
                    correct={part: rows[part][i, 0].numpy() for part in PARTS},
                    loss={part: rows[part][i, 1].numpy() for part in PARTS},
                    sizes=sizes,
                )
                for name, rows in models
            },
        )
        for i, r in enumerate(rounds)
    ]


def _demand_like(found: object, model: object, finite: bool = True) -> None:
    """ValueError unless both have the same structure, types and shapes, and `found` no NaN."""
    _demand(type(found) is type(model))
    if isinstance(model, dict):
        _demand(found.keys() == model.keys())
        for key in model:
            _demand_like(found[key], model[key], finite)
    elif isinstance(model, list):
        for mine, like in zip(found, model, strict=True):
            _demand_like(mine, like, finite)
    elif isinstance(model, torch.Tensor):
        _demand(found.shape == model.shape and found.dtype == model.dtype)
        _demand(not finite or bool(torch.isfinite(found).all()))


def _demand(ok: bool | np.bool_) -> None:
    if not ok:
        raise ValueError


def _write_group(file: h5py.File, group: str, values: dict[str, np.ndarray]) -> None:
    for name, value in values.items():
        file[f"{group}/{name}"] = value


def _write_curves(
    file: h5py.File, entries: Sequence[tuple[int, Metrics]], num_users: int | None
) -> None:
    curves = {name: [] for name in CURVES}
    for _, m in entries:
        values = (
            m.accuracy("test"),
            m.accuracy("train"),
            m.mean_loss("train"),
            m.mean_loss("test"),
        )
        for name, value in zip(CURVES, values, strict=True):
            curves[name].append(value)
    for name, values in curves.items():
        file[name] = np.array(values, dtype=np.float64)
    file["round"] = np.array([r for r, _ in entries], dtype=np.int64)
    if num_users is not None:
        users = [m.user_accuracy("test") for _, m in entries]
        file["user_test_acc"] = np.array(users, dtype=np.float64).reshape(-1, num_users)


def _stacked(work: Sequence[np.ndarray]) -> np.ndarray:
    """(T, columns) int64."""
    return np.array(work, dtype=np.int64).reshape(-1, len(WORK))


def _write_users(file: h5py.File, split: Split) -> None:
    file["users"] = np.array(split.users, dtype=h5py.string_dtype())


def write_split(file: h5py.File, split: Split) -> None:
    """`users` in their order; split/USER/train, test; labels only where they differ."""
    _write_users(file, split)
    for index, user in enumerate(split.users):
        group = f"split/{group_name(user)}"
        for part in ("train", "test"):
            rows = getattr(split, part)[index]
            file[f"{group}/{part}"] = np.asarray(rows, dtype=np.int32)
            if (index, part) in split.labels:
                file[f"{group}/{part}_label"] = split.labels[index, part].astype(np.int32)


def status(path: Path) -> str:
    """How the run in a file ended, "" without a file; InputError unless its curves are there."""
    if not path.exists():
        return ""
    with open_h5(path) as file:
        # Where the official test rows judge, users have no accuracy of their own.
        users = {"user_test_acc": 2} if "user_test_acc" in file else {}
        for name, dims in (dict.fromkeys(CURVES, 1) | users).items():
            values, rounds = file[name], len(file["round"])
            if values.ndim != dims or values.dtype.kind != "f" or len(values) != rounds:
                raise ValueError(f"{name} has not one entry per evaluated round")
        return str(file.attrs["status"])


def finished(path: Path) -> bool:
    """Whether the file holds a whole run."""
    with suppress(InputError):
        return status(path) == "finished"
    return False


def average(paths: Sequence[Path], target: Path) -> None:
    """Element-wise mean over finished repetitions, `*_std` (n-1), and `runs/*` stacked."""
    stacks: dict[str, list[np.ndarray]] = {}
    for path in paths:
        with open_h5(path) as file:
            for name, values in file.items():
                if isinstance(values, h5py.Dataset) and values.dtype.kind == "f":
                    runs = stacks.setdefault(name, [])
                    if runs and runs[0].shape != values.shape:
                        raise ValueError(f"{name} differs in shape from {paths[0].name}")
                    runs.append(values[()])
    with atomic_h5(target) as out, open_h5(paths[0]) as first:
        out.attrs.update(dict(first.attrs) | {"repetition": "avg", "repetitions": len(paths)})
        out["round"] = first["round"][()]
        for name, runs in stacks.items():
            runs = np.stack(runs)
            out[name] = runs.mean(0)
            out[f"{name}_std"] = std(runs)
            out[f"runs/{name}"] = runs


def std(runs: np.ndarray) -> np.ndarray:
    """Standard deviation over the first axis, n-1; zero for one run."""
    return runs.std(0, ddof=1) if len(runs) > 1 else np.zeros(runs.shape[1:])


def totals(path: Path) -> str:
    """What a finished repetition did, per round and in all, in a line."""
    with open_h5(path) as file:
        work = json.loads(file.attrs["work"])
        # Files from before users could fail to report do not count reports.
        work.setdefault("reported", work["selected"])
        rounds = max(len(file["selected_users"]), 1)
        names = ("selected", "trained", "reported", "samples", "gradients")
        counts = [f"{work[k] / rounds:,.1f}".removesuffix(".0") + f" {k}" for k in names]
        sent = [f"{work[k] / rounds / 1e6:,.2f} MB {k[6:]}" for k in ("bytes_down", "bytes_up")]
        whole = [f"{work[k] / 1e6:,.1f} MB {k[6:]}" for k in ("bytes_down", "bytes_up")]
        return (
            f"  per round: {', '.join([*counts, *sent])}; in all: {work['gradients']:,} gradients, "
            f"{', '.join(whole)}"
        )


def _cell(text: str) -> str:
    return "-" if "nan" in text else text


def summary(paths: Iterable[Path], label: str) -> list[str]:
    """Lines of a table, per repetition: last, best on test, mean of the last tenth of evaluations.

    And the users' last accuracies: their mean, and their standard deviation (n).
    """
    rows, late = [], set()
    for path in paths:
        with open_h5(path) as file:
            acc, rounds = file["rs_glob_acc"][()] * 100, file["round"][()]
            users = file["user_test_acc"][-1:] * 100 if "user_test_acc" in file else np.nan
        if len(acc):
            some = np.isfinite(users).any()
            each = (over_users(users[-1]), np.nanstd(users)) if some else (np.nan, np.nan)
            rows.append((path, (acc[-1], acc.max(), late_mean(acc, rounds), *each)))
            late.add(late_count(rounds))
    if not rows:
        return []
    count = " or ".join(map(str, sorted(late)))
    heads = ("last", "best on test", f"mean of last {count}", "mean over users", "std over users")
    lines = [f"{label:<46}" + "".join(f" {head:>16}" for head in heads)]
    for path, values in rows:
        name = f"  repetition {path.stem.rsplit('_', 1)[1]}"
        cells = [_cell(f"{value:.2f}") for value in values]
        lines.append(f"{name:<46}" + "".join(f" {cell:>16}" for cell in cells))
    if len(rows) > 1:
        table = np.array([values for _, values in rows])
        cells = [
            _cell(f"{m:.2f} +- {s:.2f}") for m, s in zip(table.mean(0), std(table), strict=True)
        ]
        name = "  mean +- std over repetitions (n-1)"
        lines.append(f"{name:<46}" + "".join(f" {cell:>16}" for cell in cells))
    return lines
