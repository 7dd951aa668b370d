"""Run a recorded configuration again: its split, initial model and selected users; compare.

Reads our own result files and the golden files, which say less: what they leave out means the
authors' semantics on Mnist with the published features.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch

from FLAlgorithms.evaluation import Metrics
from FLAlgorithms.servers.serverbase import Diverged
from utils.config import FIELDS, Config, parse_value, say
from utils.errors import InputError
from utils.jobs import Job, prepare
from utils.model_utils import read_source
from utils.partition import Split, check
from utils.results import Recorder

# The golden files' own names for some options.
RENAMED = {"rounds": "num_global_iters", "clients_per_round": "numusers"}
GOLDEN = {"dataset": "Mnist", "semantics": "authors", "normalize": "published"}
OVERRIDES = ("num_global_iters", "results_dir", "gpu", "block_size", "threads", "eval_every")
ACCURACIES = {"rs_glob_acc": "test", "rs_train_acc": "train"}
EARLY = 5  # rounds after which rounding has not grown yet
LOSSES = {"rs_train_loss": "train", "rs_test_loss": "test"}


@dataclass(frozen=True)
class Bounds:
    """How far a float32 replay may be off; rounding grows in pFedMe's many small steps."""

    parameters: float = 2e-5
    early: float = 2e-5  # after rounds 1 and 5
    loss: float = 1e-4  # relative
    samples: int = 2


BOUNDS = {"pFedMe": Bounds(parameters=5e-3, early=1e-6, loss=1e-3)}


@dataclass
class Recording:
    """What a file recorded; `after[t]`: global parameters after t rounds."""

    config: Config
    split: Split
    init: dict[str, np.ndarray]
    after: dict[int, dict[str, np.ndarray]]
    selected: np.ndarray
    repetition: int
    curves: dict[str, np.ndarray]  # ours and the golden files' names
    rounds: dict[str, np.ndarray]  # "" and "_per": the round of each entry


def read_recording(path: str, given: dict[str, object]) -> Recording:
    """A result or golden file with the command line's overrides; raises InputError."""
    try:
        with h5py.File(path) as file:
            return _read(file, path, given)
    except OSError as error:
        reason = "no such file" if not Path(path).exists() else "not a readable .h5 file"
        raise InputError(f"--replay {path}: {reason}") from error
    except KeyError as error:
        raise InputError(f"--replay {path}: not a recorded run, it lacks {error}") from None


def _read(file: h5py.File, path: str, given: dict[str, object]) -> Recording:
    if file.attrs.get("evaluates", "global") != "global":
        partner = Path(path).with_name(file.attrs["partner"])
        return read_recording(str(partner), given)
    ours = "schema" in file.attrs
    values = {RENAMED.get(k, k): v for k, v in json.loads(file.attrs["config"]).items()}
    recorded_rounds = len(file["selected_users"])
    manifest = {"scheme": "golden", "dataset": "Mnist"}
    if ours:
        manifest = json.loads(file.attrs["manifest"])
    else:
        values = GOLDEN | values
    texts = {k: str(v) for k, v in values.items() if k in FIELDS and v is not None}
    parsed = {k: parse_value(k, v, f"--replay {path}: {k}") for k, v in texts.items()}
    repetition = int(file.attrs.get("repetition", 0))
    parsed |= {"repetition": None, "times": repetition + 1}
    unread = set(given) - set(OVERRIDES)
    if unread:
        raise InputError(
            f"--{sorted(unread)[0]}: with --replay only {', '.join('--' + o for o in OVERRIDES)}"
        )
    parsed |= given
    if parsed["num_global_iters"] > recorded_rounds:
        if "num_global_iters" in given:
            raise InputError(
                f"--num_global_iters {given['num_global_iters']}: {path} holds "
                f"{recorded_rounds} rounds"
            )
        parsed["num_global_iters"] = recorded_rounds
    after = {
        int(t): {n: v[()] for n, v in group.items()}
        for t, group in file.get("global_after_round", {}).items()
    }
    if "final" in file:
        after[recorded_rounds] = {n: v[()] for n, v in file["final"].items()}
    curves, rounds = (
        _curves(file),
        {"": np.arange(recorded_rounds), "_per": np.arange(recorded_rounds)},
    )
    if ours:
        rounds[""] = file["round"][()]
        partner = Path(path).with_name(file.attrs["partner"])
        if partner.exists():
            with h5py.File(partner) as other:
                curves |= {f"{n}_per": v for n, v in _curves(other).items() if n.startswith("rs_")}
                curves |= {n: v for n, v in _curves(other).items() if not n.startswith("rs_")}
                rounds["_per"] = other["round"][()]
    return Recording(
        config=Config(**parsed),
        split=_split(file, manifest),
        init={n: v[()] for n, v in file["init"].items()},
        after=after,
        selected=file["selected_users"][()],
        repetition=repetition,
        curves=curves,
        rounds=rounds,
    )


def _curves(file: h5py.File) -> dict[str, np.ndarray]:
    return {
        n: v[()]
        for n, v in file.items()
        if isinstance(v, h5py.Dataset) and (n.startswith("rs_") or n.endswith("_test_acc"))
        if v.ndim == 1
    }


def _split(file: h5py.File, manifest: dict) -> Split:
    group = file["split"]
    # Our files keep the users' order; in a golden file user i is the i-th sorted name.
    users = tuple(file["users"].asstr()[()]) if "users" in file else tuple(sorted(group))
    parts = {p: tuple(group[u][p][()].astype(np.int64) for u in users) for p in ("train", "test")}
    labels = {
        (i, p): group[u][f"{p}_label"][()].astype(np.int64)
        for i, u in enumerate(users)
        for p in ("train", "test")
        if f"{p}_label" in group[u]
    }
    return Split(users, parts["train"], parts["test"], manifest, labels)


class _Observer:
    """Keeps the metrics of every round and the parameters after the recorded ones."""

    def __init__(self, job: Job, recording: Recording, also: Recorder | None) -> None:
        self.server = job.server(recording.repetition, selected=recording.selected.tolist())
        state = {n: torch.as_tensor(v) for n, v in recording.init.items()}
        self.server.model.load_state_dict(state)
        self.also = also
        if also:
            also.attach(self.server)
        self.server.observer = self
        self.wanted = recording.after
        self.metrics: dict[str, dict[int, Metrics]] = {}
        self.after: dict[int, dict[str, np.ndarray]] = {}

    def evaluated(self, round_number: int, metrics: Metrics) -> None:
        self.metrics.setdefault("", {})[round_number] = metrics
        if self.also:
            self.also.evaluated(round_number, metrics)

    def personalized(self, round_number: int, models: dict[str, Metrics]) -> None:
        for name, metrics in models.items():
            self.metrics.setdefault(name, {})[round_number] = metrics
        if self.also:
            self.also.personalized(round_number, models)

    def round_done(self, round_number: int, selected: np.ndarray) -> None:
        if round_number in self.wanted:
            state = self.server.model.state_dict()
            self.after[round_number] = {n: v.cpu().numpy().copy() for n, v in state.items()}
        if self.also:
            self.also.round_done(round_number, selected)


@dataclass(frozen=True)
class Line:
    """One row of the report."""

    what: str
    difference: float
    bound: float
    unit: str

    @property
    def inside(self) -> bool:
        """Whether the difference is a number within its bound."""
        return self.difference <= self.bound


def replay(path: str, given: dict[str, object]) -> int:
    """Print the largest differences; 0 within the bounds, 1 outside."""
    recording = read_recording(path, given)
    source = read_source(recording.config.dataset, recording.split.manifest)
    check(recording.split, source)
    job = prepare(recording.config, source, recording.split)
    recorder = job.recorder(recording.repetition, None) if "results_dir" in given else None
    observer = _Observer(job, recording, recorder)
    try:
        observer.server.run()
    except Diverged as stop:
        say(f"main.py: error: {stop}")
        return 1
    if recorder:
        recorder.close("finished")
    bounds = BOUNDS.get(job.config.algorithm, Bounds())
    lines = [*_parameters(recording, observer, bounds), *_curves_of(recording, observer, bounds)]
    print(f"replay of {path}: {job.config.algorithm}, {job.config.num_global_iters} rounds")
    print(f"{'':<34} {'largest difference':>18} {'bound':>8}")
    for line in lines:
        mark = "" if line.inside else "  OUTSIDE"
        print(f"{line.what:<34} {line.difference:18.3g} {line.bound:8g} {line.unit}{mark}")
    inside = all(line.inside for line in lines)
    print("within the bounds" if inside else "OUTSIDE the bounds")
    return 0 if inside else 1


def _parameters(recording: Recording, observer: _Observer, bounds: Bounds) -> Iterator[Line]:
    for t, mine in sorted(observer.after.items()):
        theirs = recording.after[t]
        difference = max(float(np.abs(mine[n] - v).max()) for n, v in theirs.items())
        bound = bounds.early if t <= EARLY else bounds.parameters
        yield Line(f"parameters after round {t}", difference, bound, "absolute")


def _curves_of(recording: Recording, observer: _Observer, bounds: Bounds) -> Iterator[Line]:
    for name, values in sorted(recording.curves.items()):
        base, personal = name.removesuffix("_per"), name.endswith("_per")
        model = base.removesuffix("_test_acc") if base.endswith("_test_acc") else ""
        metrics = observer.metrics.get(observer.server.primary if personal else model, {})
        rounds = recording.rounds["_per" if personal or model else ""]
        pairs = [(v, metrics[t]) for t, v in zip(rounds, values, strict=True) if t in metrics]
        if not pairs:
            continue
        if base in LOSSES:
            off = [abs(m.mean_loss(LOSSES[base]) - v) / abs(v) for v, m in pairs]
            yield Line(name, max(off), bounds.loss, "relative")
        else:
            part = ACCURACIES.get(base, "test")
            off = [abs(m.accuracy(part) - v) * m.sizes[part].sum() for v, m in pairs]
            yield Line(name, round(max(off), 6), bounds.samples, "samples")
