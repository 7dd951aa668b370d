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
from collections.abc import Iterable, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np
import torch

from FLAlgorithms.evaluation import Metrics
from FLAlgorithms.servers.serverbase import WORK, Server
from utils.config import NOT_NUMBERS, Config
from utils.errors import InputError
from utils.model_utils import is_default
from utils.partition import PARTS, Split

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

    Only what differs from the default counts, so that a new option changes no old name.
    """
    default = Config(algorithm=config.algorithm).resolved()
    found = {
        name: getattr(config, name)
        for name in config.options()
        if name not in NOT_NUMBERS and getattr(config, name) != getattr(default, name)
    }
    return found | ({} if is_default(config.dataset, split) else {"split": split.hash})


def file_name(config: Config, split: Split, personal: bool) -> str:
    """The name up to the repetition: <Dataset>_<model>_<Algorithm>[_p]_..., without `_<i>.h5`."""
    c = config
    parts = [c.dataset_name, c.model, c.algorithm + ("_p" if personal else "")]
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


def digest(values: dict[str, object]) -> str:
    """A short hash of some options."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


@contextmanager
def atomic_h5(path: Path):
    """An .h5 file to write; it appears under `path`, whole, when the block ends without error."""
    # In memory first: HDF5 tells of a full disk by RuntimeErrors, and only when it closes.
    with replacing(path) as beside:
        with h5py.File(beside, "w", driver="core", backing_store=False) as file:
            yield file
            file.flush()
            image = file.id.get_file_image()
        beside.write_bytes(image)


@contextmanager
def replacing(path: Path):
    """A name to write to; it becomes `path` when the block ends without error."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        os.replace(beside, path)
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise InputError(
            f"--results_dir {path.parent}: cannot write {path.name} ({reason})"
        ) from None
    finally:
        with suppress(OSError):
            beside.unlink()


def check_writable(path: Path) -> None:
    """Try to write beside `path`, before any work is done for it."""
    with atomic_h5(path.with_name(f"{path.name}.try")):
        if path.is_dir():
            raise InputError(f"--results_dir {path.parent}: {path.name} is a folder")
    # Another process on the same output may have removed it.
    path.with_name(f"{path.name}.try").unlink(missing_ok=True)


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
    ) -> None:
        """`config`: all switches resolved; `facts`: `device` and `normalize` as really used."""
        self.config, self.split, self.repetition = config, split, repetition
        self.paths = {p: result_path(config, split, p, repetition) for p in (False, True)}
        self.identity = {name: getattr(config, name) for name in name_fields(config)}
        self.identity |= identity(config, split) | {"dataset": config.dataset_name}
        self.facts, self.progress = facts, progress
        self.started, self.clock = datetime.now(timezone.utc), time.monotonic()
        self.saved = -math.inf  # the first round is saved at once, to be looked at
        self.main: list[tuple[int, Metrics]] = []
        self.personal: list[tuple[int, dict[str, Metrics]]] = []
        self.selected: list[np.ndarray] = []
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
        line += f"{c.dataset_name} {c.model} repetition={self.repetition} round={round_number}"
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
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load skips the checksums
                if archive.testzip():
                    raise ValueError("a checksum is wrong")
            found = torch.load(path, map_location="cpu", weights_only=True)
            for key, value in self._fitting().items():
                if found[key] != value:
                    raise InputError(f"--resume: {path} has {key} {found[key]}, this job {value}")
            missing = {"server", "main", "personal", "selected", "init"} - found.keys()
            if missing:
                raise KeyError(missing)
            return found
        except InputError:
            raise
        except Exception:  # the unpickler answers damaged bytes with errors of many kinds
            raise InputError(
                f"--resume: {path} is damaged or no checkpoint; delete it to start again"
            ) from None

    def restore(self, checkpoint: dict) -> None:
        """Put the server and the curves back to where the checkpoint was taken."""
        self.server.restore(checkpoint["server"], self.run)
        data = self.server.data
        # What was evaluated before the next round is evaluated again.
        done = self.server.round_number
        main = [(r, m[""]) for r, m in _unpack(checkpoint["main"], data.global_sizes)]
        self.main = [(r, m) for r, m in main if r < done]
        self.personal = [e for e in _unpack(checkpoint["personal"], data.sizes) if e[0] < done]
        self.selected = [s.numpy() for s in checkpoint["selected"]]
        self.init = {n: v.numpy() for n, v in checkpoint["init"].items()}

    @property
    def checkpoint_path(self) -> Path:
        """Beside the result file."""
        return self.paths[False].with_suffix(".ckpt")

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
            _write_group(file, "init", self.init)
            _write_group(file, "final", self._state())
            write_split(file, self.split)
        primary = self.config.primary
        if primary:
            written.append(paths[True])
            with atomic_h5(written[1]) as file:
                self._attributes(file, status, primary, self.paths[False])
                entries = [(r, models[primary]) for r, models in self.personal]
                _write_curves(file, entries, len(self.split.users))
                names = self.server.user_class.personal
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

    def _write_models(self, file: h5py.File) -> None:
        for name, rows in self.server.personal_models(self.run).items():
            for user, value in zip(self.split.users, rows.cpu().numpy(), strict=True):
                file[f"personal/{user}/{name}"] = value


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


def _unpack(packed: dict, sizes: dict[str, np.ndarray]) -> list[tuple[int, dict[str, Metrics]]]:
    models = packed["models"].items()
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
        for i, r in enumerate(packed["rounds"])
    ]


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


def write_split(file: h5py.File, split: Split) -> None:
    """`users` in their order; split/USER/train, test; labels only where they differ."""
    file["users"] = np.array(split.users, dtype=h5py.string_dtype())
    for index, user in enumerate(split.users):
        for part in ("train", "test"):
            rows = getattr(split, part)[index]
            file[f"split/{user}/{part}"] = np.asarray(rows, dtype=np.int32)
            if (index, part) in split.labels:
                file[f"split/{user}/{part}_label"] = split.labels[index, part].astype(np.int32)


def finished(path: Path) -> bool:
    """Whether the file holds a whole run."""
    try:
        with h5py.File(path) as file:
            return file.attrs.get("status") == "finished"
    except OSError:
        return False


def average(paths: Sequence[Path], target: Path) -> None:
    """Element-wise mean over finished repetitions, `*_std` (n-1), and `runs/*` stacked."""
    stacks: dict[str, list[np.ndarray]] = {}
    for path in paths:
        with h5py.File(path) as file:
            for name, values in file.items():
                if isinstance(values, h5py.Dataset) and values.dtype.kind == "f":
                    stacks.setdefault(name, []).append(values[()])
    with atomic_h5(target) as out, h5py.File(paths[0]) as first:
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
    with h5py.File(path) as file:
        work = json.loads(file.attrs["work"])
        rounds = max(len(file["selected_users"]), 1)
    counts = [
        f"{work[k] / rounds:,.0f} {k}" for k in ("selected", "trained", "samples", "gradients")
    ]
    sent = [f"{work[k] / rounds / 1e6:,.2f} MB {k[6:]}" for k in ("bytes_down", "bytes_up")]
    whole = [f"{work[k] / 1e6:,.1f} MB {k[6:]}" for k in ("bytes_down", "bytes_up")]
    return (
        f"  per round: {', '.join([*counts, *sent])}; in all: {work['gradients']:,} gradients, "
        f"{', '.join(whole)}"
    )


def _cell(text: str) -> str:
    return "-" if "nan" in text else text


def summary(paths: Iterable[Path], label: str) -> list[str]:
    """Lines of a table, per repetition: last, best on test, mean of the last 10 evaluations.

    And the spread: standard deviation (n) of the users' last accuracies.
    """
    rows = []
    for path in paths:
        with h5py.File(path) as file:
            acc = file["rs_glob_acc"][()] * 100
            users = file["user_test_acc"][-1:] * 100 if "user_test_acc" in file else np.nan
        if len(acc):
            spread = np.nanstd(users) if np.isfinite(users).any() else np.nan
            rows.append((path, (acc[-1], acc.max(), acc[-10:].mean(), spread)))
    if not rows:
        return []
    heads = ("last", "best on test", "mean of last 10", "std over users")
    lines = [f"{label:<46}" + "".join(f" {head:>15}" for head in heads)]
    for path, values in rows:
        name = f"  repetition {path.stem.rsplit('_', 1)[1]}"
        cells = [_cell(f"{value:.2f}") for value in values]
        lines.append(f"{name:<46}" + "".join(f" {cell:>15}" for cell in cells))
    if len(rows) > 1:
        table = np.array([values for _, values in rows])
        cells = [
            _cell(f"{m:.2f} +- {s:.2f}") for m, s in zip(table.mean(0), std(table), strict=True)
        ]
        name = "  mean +- std over repetitions (n-1)"
        lines.append(f"{name:<46}" + "".join(f" {cell:>15}" for cell in cells))
    return lines
