"""Run a recorded configuration again: its split, initial model and selected users; compare.

Reads our own result files and the golden files, which say less: what they leave out means the
authors' semantics on Mnist with the published features.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
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
from utils.files import open_h5, partner
from utils.jobs import Job, prepare, read
from utils.model_utils import read_source
from utils.partition import Split, check, group_name
from utils.results import CURVES, SCHEMA, Recorder, check_writable

# The golden files' own names for some options.
RENAMED = {"rounds": "num_global_iters", "clients_per_round": "numusers"}
GOLDEN_MANIFEST = {"scheme": "golden", "dataset": "Mnist"}
GOLDEN = {"dataset": "Mnist", "semantics": "authors", "normalize": "published"}
OVERRIDES = ("num_global_iters", "results_dir", "gpu", "block_size", "threads", "eval_every")
OVERRIDES += ("data_dir",)
ACCURACIES = {"rs_glob_acc": "test", "rs_train_acc": "train"}
# Groups and arrays that files written before they were known lack.
ADDED = ("normalize", "users", "work")
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
    path: str  # of the main file
    curves: dict[str, np.ndarray]  # ours and the golden files' names
    rounds: dict[str, np.ndarray]  # "" and "_per": the round of each entry


def read_recording(path: str, given: dict[str, object]) -> Recording:
    """A result or golden file with the command line's overrides; raises InputError."""
    unread = sorted(set(given) - set(OVERRIDES))
    if unread:
        allowed = ", ".join(f"--{name}" for name in OVERRIDES)
        raise InputError(f"--{unread[0]}: with --replay only {allowed}")
    with open_h5(Path(path)) as file:
        if file.attrs.get("evaluates", "global") == "global":
            return _read(file, path, given)
        main_path = partner(file, Path(path))
    with open_h5(main_path) as file:
        if file.attrs["evaluates"] != "global":
            raise ValueError("its partner is no file of the global model")
        return _read(file, str(main_path), given)


def _read(file: h5py.File, path: str, given: dict[str, object]) -> Recording:
    repetition = file.attrs.get("repetition", 0)
    if repetition == "avg":
        raise ValueError("it is an average; name a repetition's file")
    values = {RENAMED.get(k, k): v for k, v in json.loads(file.attrs["config"]).items()}
    ours = "schema" in file.attrs
    if ours and file.attrs["schema"] != SCHEMA:
        raise ValueError(f"schema {file.attrs['schema']}, this code reads {SCHEMA}")
    manifest = json.loads(file.attrs["manifest"]) if ours else GOLDEN_MANIFEST
    values = values if ours else GOLDEN | values
    selected = _selected(file["selected_users"][()])
    repetition = int(repetition)
    texts = {k: str(v) for k, v in values.items() if k in FIELDS and v is not None}
    texts["save_models"] = "false"  # a replay compares what was evaluated
    parsed = {k: parse_value(k, v, f"{path}: {k}") for k, v in texts.items()}
    parsed |= {"repetition": None, "times": repetition + 1}
    asked = given.get("num_global_iters", 0)
    if asked > len(selected):
        raise InputError(f"--num_global_iters {asked}: {path} holds {len(selected)} rounds")
    parsed["num_global_iters"] = min(parsed["num_global_iters"], len(selected))
    after = {int(t): _tensors(group) for t, group in file.get("global_after_round", {}).items()}
    if "final" in file:
        after[len(selected)] = _tensors(file["final"])
    curves = _curves(file)
    rounds = dict.fromkeys(("", "_per"), np.arange(len(selected)))
    if ours:
        if missing := [name for name in CURVES if name not in curves]:
            raise ValueError(f"{missing[0]} is missing or no list of numbers")
        rounds[""] = file["round"][()]
        personal = partner(file, Path(path))
        if personal.exists():
            with open_h5(personal) as other:
                for name, values in _curves(other).items():
                    curves[f"{name}_per" if name.startswith("rs_") else name] = values
                rounds["_per"] = other["round"][()]
    for name, values in curves.items():
        if len(values) != len(rounds["_per" if "_per" in name or "test_acc" in name else ""]):
            raise ValueError(f"{name} has {len(values)} entries, not one per evaluated round")
    return Recording(
        config=Config(**parsed | given),
        split=_split(file, manifest),
        init=_tensors(file["init"]),
        after=after,
        selected=selected,
        repetition=repetition,
        path=path,
        curves=curves,
        rounds=rounds,
    )


def _tensors(group: h5py.Group) -> dict[str, np.ndarray]:
    found = {name: value[()] for name, value in group.items()}
    if bad := [name for name, value in found.items() if value.dtype.kind not in "fiu"]:
        raise ValueError(f"{group.name}/{bad[0]} holds no numbers")
    return found


def _selected(rows: np.ndarray) -> np.ndarray:
    """(T, S) user numbers, -1 pads; nobody twice in a round."""
    if rows.ndim != 2 or rows.dtype.kind != "i":
        raise ValueError("selected_users must be whole numbers, a row per round")
    if any(len(set(row)) != len(row) for row in ([u for u in r if u >= 0] for r in rows)):
        raise ValueError("selected_users names a user twice in a round")
    return rows


def _validate(recording: Recording, job: Job) -> None:
    """The selected users exist and have train data; the parameters are the model's."""
    able = np.flatnonzero(job.data.sizes["train"])
    strange = sorted(set(recording.selected[recording.selected >= 0]) - set(able))
    if strange:
        raise InputError(f"--replay: selected_users names {strange[0]}, no user with train data")
    shapes = {n: tuple(v.shape) for n, v in job.model(0).state_dict().items()}
    for what, values in (("init", recording.init), *recording.after.items()):
        if {n: v.shape for n, v in values.items()} != shapes:
            raise InputError(
                f"--replay: the recorded parameters ({what}) are not those of "
                f"--model {job.config.model}"
            )


def _curves(file: h5py.File) -> dict[str, np.ndarray]:
    return {
        n: v[()]
        for n, v in file.items()
        if isinstance(v, h5py.Dataset) and (n.startswith("rs_") or n.endswith("_test_acc"))
        if v.ndim == 1 and v.dtype.kind == "f"
    }


def _split(file: h5py.File, manifest: dict) -> Split:
    group = file["split"]
    # Our files keep the users' order; in a golden file user i is the i-th sorted name.
    users = tuple(file["users"].asstr()[()].tolist()) if "users" in file else tuple(sorted(group))
    if len(set(users)) != len(users):
        raise ValueError("users names one twice")
    of_user = [group[group_name(user)] for user in users]
    parts = {p: tuple(_whole(rows[p]) for rows in of_user) for p in ("train", "test")}
    labels = {
        (i, p): _whole(rows[f"{p}_label"])
        for i, rows in enumerate(of_user)
        for p in ("train", "test")
        if f"{p}_label" in rows
    }
    return Split(users, parts["train"], parts["test"], manifest, labels)


def _whole(values: h5py.Dataset) -> np.ndarray:
    """A list of whole numbers as int64."""
    if values.ndim != 1 or (values.dtype.kind not in "iu" and len(values)):
        raise ValueError(f"{values.name} must be a list of whole numbers")
    return values[()].astype(np.int64)


class _Observer:
    """Keeps the metrics of every round and the parameters after the recorded ones."""

    def __init__(self, job: Job, recording: Recording, also: Recorder | None) -> None:
        self.server = job.server(recording.repetition, selected=recording.selected.tolist())
        state = {n: torch.as_tensor(v) for n, v in recording.init.items()}
        self.server.model.load_state_dict(state)
        self.also = also
        if also:
            also.attach(self.server)
        self.server.observers = [self]
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
            state = self.server.state_dict()
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
    config = recording.config
    source = read_source(config.dataset, recording.split.manifest, config.data_dir)
    check(recording.split, source)
    job = prepare(config, source, recording.split)
    _validate(recording, job)
    recorder = None
    if "results_dir" in given:
        recorder = job.recorder(recording.repetition, None)
        check_writable(recorder.paths[True])
    observer = _Observer(job, recording, recorder)
    status = "interrupted"
    try:
        observer.server.run()
        status = "finished"
    except Diverged as stop:
        status = "diverged"
        say(f"main.py: error: {stop}")
        return 1
    finally:
        if recorder:
            recorder.save(status)
    bounds = BOUNDS.get(job.config.algorithm, Bounds())
    lines = [*_parameters(recording, observer, bounds), *_curves_of(recording, observer, bounds)]
    if not lines:
        raise InputError(f"--replay {path}: nothing to compare with these options")
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
        difference = float(np.max([_largest(mine[n] - v) for n, v in theirs.items()]))
        bound = bounds.early if t <= EARLY else bounds.parameters
        yield Line(f"parameters after round {t}", difference, bound, "absolute")


def _curves_of(recording: Recording, observer: _Observer, bounds: Bounds) -> Iterator[Line]:
    for name, values in sorted(recording.curves.items()):
        base, personal = name.removesuffix("_per"), name.endswith("_per")
        model = base.removesuffix("_test_acc") if base.endswith("_test_acc") else ""
        metrics = observer.metrics.get(observer.server.config.primary if personal else model, {})
        rounds = recording.rounds["_per" if personal or model else ""]
        pairs = [(v, metrics[t]) for t, v in zip(rounds, values, strict=True) if t in metrics]
        if not pairs:
            continue
        if base in LOSSES:
            off = [_apart(m.mean_loss(LOSSES[base]), v, 1 / abs(v or 1)) for v, m in pairs]
            yield Line(name, _largest(off), bounds.loss, "relative")
        else:
            part = ACCURACIES.get(base, "test")
            off = [_apart(m.accuracy(part), v, m.sizes[part].sum()) for v, m in pairs]
            yield Line(name, round(_largest(off), 6), bounds.samples, "samples")


def _apart(a: float, b: float, scale: float) -> float:
    """scale |a - b|; 0 where both are equal or missing (no samples), nan where one is."""
    return 0.0 if a == b or (np.isnan(a) and np.isnan(b)) else abs(a - b) * scale


def _largest(values: object) -> float:
    """The largest magnitude; nan if any value is nan, which no bound contains."""
    return float(np.max(np.abs(values), initial=0.0))


def verify(path: str, given: dict[str, object]) -> int:
    """Start the recorded repetition anew and compare all arrays bitwise; 0 if they are the same.

    Unlike a replay nothing is taken from the file but the configuration: split, initial model and
    sampling are made again. Bitwise equality is promised on the same machine and CPU engine.
    """
    recording = read_recording(path, given)
    config = dataclasses.replace(recording.config, num_global_iters=len(recording.selected))
    first = read(config)[1] if config.shared_split == "no" else None
    job = prepare(config, *read(config, recording.repetition), first)
    with tempfile.TemporaryDirectory() as folder:
        job = dataclasses.replace(job, config=dataclasses.replace(job.config, results_dir=folder))
        recorder = job.recorder(recording.repetition, None)
        recorder.attach(job.server(recording.repetition))
        try:
            recorder.server.run()
        except Diverged as stop:
            say(f"main.py: {stop}")
        written = recorder.save("finished")
        originals = [Path(recording.path)]
        if len(written) > 1:
            with open_h5(Path(recording.path)) as file:
                originals.append(partner(file, Path(recording.path)))
        differing = [
            line
            for new, old in zip(written, originals, strict=True)
            for line in _differences(old, new)
        ]
    print("\n".join(differing) or f"{path}: every array is bitwise the same")
    return int(bool(differing))


def _differences(old: Path, new: Path) -> list[str]:
    """A line for every array that is not the same in both files."""
    found: list[dict[str, np.ndarray]] = []
    for path in (old, new):
        arrays: dict[str, np.ndarray] = {}
        with open_h5(path) as file:
            file.visititems(
                lambda n, v, into=arrays: (
                    into.update({n: v[()]})
                    if isinstance(v, h5py.Dataset) and not n.startswith("personal/")
                    else None
                )
            )
        found.append(arrays)
    a, b = found
    lacking = set(ADDED) - {name.split("/")[0] for name in a}
    lines = [
        f"{old.name}: {name} is in one of the two only"
        for name in sorted(a.keys() ^ b.keys())
        if name.split("/")[0] not in lacking
    ]
    for name in sorted(a.keys() & b.keys()):
        floats = a[name].dtype.kind == "f"
        if not np.array_equal(a[name], b[name], equal_nan=floats):
            how = ""
            if floats and a[name].shape == b[name].shape and np.isfinite(a[name]).all():
                how = f", by at most {np.abs(a[name] - b[name]).max():.3g}"
            lines.append(f"{old.name}: {name} differs{how}")
    return lines
