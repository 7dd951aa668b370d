"""The users' data on the device, and which samples each local step sees.

A minibatch is a row of sample numbers; -1 pads short batches and weighs nothing. Plans depend on
(seed, repetition, round, user) and, for cyclic batches, on the user's cursor: never on who else
trains, in which order or in which block.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from utils.params import Params
from utils.partition import PARTS

OFFICIAL = "official"  # the dataset's own test rows, which are no user's
STREAMS = {"users": 0, "batches": 1, "adapt": 2, "dropout": 3}
STREAMS |= {"absent": 4, "stragglers": 5, "epochs": 6, "partial": 7, "noise": 8, "server noise": 9}


def generator(stream: str, *key: int) -> np.random.Generator:
    """An independent generator for each stream and key (seed, repetition, round, ...)."""
    return np.random.default_rng([STREAMS[stream], *key])


def cells(ids: np.ndarray) -> list[tuple[int, int]]:
    """(row of the repetition, user) of every place in a block, in order."""
    runs = np.arange(len(ids))[:, None] if ids.ndim == 2 else 0
    runs = np.broadcast_to(runs, ids.shape)
    return list(zip(runs.flatten().tolist(), ids.flatten().tolist(), strict=True))


class FederatedData:
    """All samples in two tensors: first every user's train part, then every user's test part.

    Where the global model is judged by the dataset's official test rows they follow, as a third
    part with one size.
    x: (M, *shape), y: (M,). A sample that two users hold is stored for each of them.
    """

    def __init__(self, x: Tensor, y: Tensor, sizes: dict[str, np.ndarray]) -> None:
        """`sizes[part]`: (N,) samples per user, in the order of the rows of x and y.

        `sizes["official"]`, (1,), only where there are such rows.
        """
        self.x, self.y = x.contiguous(), y.contiguous()
        parts = [p for p in (*PARTS, OFFICIAL) if p in sizes]
        self.sizes = {part: np.asarray(sizes[part], dtype=np.int64) for part in parts}
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([*self.sizes.values()]))])
        n = self.num_users = len(self.sizes["train"])
        self.starts = {
            "train": offsets[:n],
            "test": offsets[n : 2 * n],
            OFFICIAL: offsets[2 * n : -1],
        }
        if offsets[-1] != len(x) or len(x) != len(y):
            raise ValueError(f"{len(x)} inputs, {len(y)} labels, {offsets[-1]} samples of users")

    @property
    def judging(self) -> dict[str, str]:
        """Which parts give the global model's train and test metrics."""
        return {"train": "train", "test": OFFICIAL if OFFICIAL in self.sizes else "test"}

    @property
    def global_sizes(self) -> dict[str, np.ndarray]:
        """Samples behind the global model's metrics: of each user, or of all official test rows."""
        return {part: self.sizes[judge] for part, judge in self.judging.items()}

    def part(self, name: str, users: slice = slice(None)) -> slice:
        """The rows of consecutive users' train or test parts."""
        starts, sizes = self.starts[name][users], self.sizes[name][users]
        return slice(int(starts[0]), int(starts[-1] + sizes[-1]))


@dataclass
class Batch:
    """x: (*block, batch, *shape), y and weight: (*block, batch); a user's weights sum to 1.

    `masks`: one per dropout layer; they belong to the minibatch, so that several gradients on the
    same minibatch are gradients of one function.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    masks: tuple[Tensor, ...] = ()


@dataclass
class Plan:
    """The minibatches of a block: rows (steps, draws, *block, batch) into the data, -1 pads."""

    rows: Tensor
    weight: Tensor
    steps: np.ndarray  # shape `block`: steps of each user
    widths: list[int]  # of each user: rows of its own widest minibatch
    counts: np.ndarray  # (steps, draws, *block): real samples of each minibatch
    active: Tensor  # (steps, *block): 1 while a user still has steps to do
    buffers: dict[int, Tensor] = field(default_factory=dict)  # x of each draw, reused every step

    def batch(self, data: FederatedData, step: int, draw: int) -> Batch:
        """Gather one minibatch, good until the next step; one user alone gets it unpadded."""
        rows, weight = self.rows[step, draw], self.weight[step, draw]
        if rows.dim() == 1:
            count = int(self.counts[step, draw])
            rows, weight = rows[:count], weight[:count]
        flat = rows.flatten()
        into = self.buffers.get(draw)
        if into is None or len(into) != len(flat):
            into = self.buffers[draw] = data.x.new_empty((len(flat), *data.x.shape[1:]))
        torch.index_select(data.x, 0, flat, out=into)
        x = into.view(*rows.shape, *data.x.shape[1:])
        return Batch(x, data.y.index_select(0, flat).view(rows.shape), weight)

    def active_at(self, step: int) -> float | Tensor:
        """1.0 while every user of the block still has work, else a tensor of shape `block`."""
        return 1.0 if step < self.steps.min() else self.active[step]


def batches_per_pass(size: np.ndarray | int, batch: int, merge: bool = False) -> np.ndarray:
    """Minibatches of one pass; `merge`: a single last sample joins the minibatch before it."""
    return np.maximum(size // batch + (size % batch > merge), np.minimum(size, 1))


def cut(
    size: int,
    batch: int,
    count: int,
    start: int = 0,
    rng: np.random.Generator | None = None,
    merge: bool = False,
) -> np.ndarray:
    """Minibatches number start .. start + count - 1 of endless passes over `size` samples.

    Returns positions (count, widest), -1 pads shorter minibatches. With `rng` every pass has an
    order of its own, without it file order. `merge`: see `batches_per_pass`.
    """
    if not size or not count:
        return np.full((count, batch), -1)
    per_pass = int(batches_per_pass(size, batch, merge))
    number, last = start + np.arange(count), size - (per_pass - 1) * batch
    turn, inside = number % per_pass, np.arange(max(batch, last))
    at = turn[:, None] * batch + inside
    real = inside < np.where(turn == per_pass - 1, last, batch)[:, None]
    if rng is not None:
        order = np.stack([rng.permutation(size) for _ in range(-(-count // per_pass))])
        at = order[(number // per_pass)[:, None], np.minimum(at, size - 1)]
    return np.where(real, at, -1)


class Planner:
    """Draws every user's work and minibatches; keeps cyclic ones' cursors, (runs, N) per part.

    `ids` has shape `block`: (), (C,), or (T, C) where row t belongs to the t-th of `repetitions`.
    `merge`: no minibatch of one sample at the end of a pass (BatchNorm has no variance there).
    """

    def __init__(
        self, config, data: FederatedData, repetitions: Sequence[int], merge: bool = False
    ) -> None:
        self.config, self.data, self.repetitions, self.merge = config, data, repetitions, merge
        self.cyclic = config.batches == "cyclic"
        shape = (len(repetitions), data.num_users)
        self.cursors = {part: np.zeros(shape, dtype=np.int64) for part in PARTS}
        self.slow = np.zeros(shape, dtype=bool)  # this round's stragglers

    def turnout(self, selected: np.ndarray, round_number: int) -> np.ndarray:
        """Draw a round's stragglers among the sampled users, and who of them reports: (runs, N)."""
        config, reports = self.config, np.zeros_like(self.slow)
        self.slow = np.zeros_like(self.slow)
        rows = selected.reshape(len(self.repetitions), -1)
        for run, (repetition, users) in enumerate(zip(self.repetitions, rows, strict=True)):
            key = (config.seed, repetition, round_number)
            count = round(config.stragglers * len(users))
            late = generator("stragglers", *key).choice(users, count, replace=False)
            self.slow[run, late] = True
            there = generator("absent", *key).random(self.data.num_users) >= config.user_dropout
            reports[run, users] = there[users]
        return reports

    def epochs(self, ids: np.ndarray, round_number: int) -> np.ndarray | int:
        """Local work of a round: R, or drawn for each user; a straggler does 1 to all of it.

        A round's draws are for all N users, so that they do not depend on who trains.
        """
        config = self.config
        if config.local_epochs_range is None and not self.slow.any():
            return config.local_epochs
        low, high = config.local_epochs_range or (config.local_epochs, config.local_epochs)
        rows = []
        for late, repetition in zip(self.slow, self.repetitions, strict=True):
            key = (config.seed, repetition, round_number)
            whole = generator("epochs", *key).integers(low, high, len(late), endpoint=True)
            part = generator("partial", *key).integers(1, whole, endpoint=True)
            rows.append(np.where(late, part, whole))
        return np.take_along_axis(np.stack(rows), ids, -1) if ids.ndim == 2 else rows[0][ids]

    def num_steps(self, ids: np.ndarray, round_number: int) -> np.ndarray:
        """Local steps of a round, shaped like `ids`; none without train data.

        A user's epochs, or as many passes over its minibatches.
        """
        sizes = self.data.sizes["train"][ids]
        passes = self.config.local_unit == "epochs"
        per_pass = batches_per_pass(sizes, self.config.batch_size, self.merge)
        return self.epochs(ids, round_number) * (per_pass if passes else np.minimum(sizes, 1))

    # `call`: how often the block has drawn from the same stream since it received the model; the
    # first call's key does without it.

    def local(self, ids: np.ndarray, round_number: int, draws: int, call: int = 0) -> Plan:
        """The local steps of a block's users; moves their cursors."""
        plans, steps = [], np.ravel(self.num_steps(ids, round_number)).tolist()
        for (run, user), count in zip(cells(ids), steps, strict=True):
            at = self._draw("batches", run, user, round_number, "train", count * draws, call)
            plans.append(at.reshape(-1, draws, at.shape[-1]))
        return self._assemble(plans, ids.shape)

    def adapt(
        self, ids: np.ndarray, round_number: int, parts: tuple[str, ...], call: int = 0
    ) -> list[Plan]:
        """One minibatch of each named part, in turn; "train" alone never touches a cursor."""
        stream = "batches" if self.cyclic and parts != ("train",) else "adapt"
        plans = []
        for turn, part in enumerate(parts):
            drawn = []
            for run, user in cells(ids):
                # The next minibatch of the same order where a part comes a second time.
                before = 0 if self.cyclic else parts[:turn].count(part)
                count = (before + 1) * min(1, int(self.data.sizes[part][user]))
                at = self._draw(stream, run, user, round_number, part, count, call)
                drawn.append(at[before:, None])
            plans.append(self._assemble(drawn, ids.shape, steps=1))
        return plans

    def finetune(self, ids: np.ndarray, round_number: int, count: int, call: int = 0) -> Plan:
        """`count` minibatches of train data in fresh permutations; never touches a cursor."""
        drawn = []
        for run, user in cells(ids):
            steps = count * min(1, int(self.data.sizes["train"][user]))
            at = self._draw("adapt", run, user, round_number, "train", steps, call)
            drawn.append(at[:, None])
        return self._assemble(drawn, ids.shape)

    def full_pass(self, ids: np.ndarray, chunk: int) -> Plan:
        """All train samples once, in file order, every sample weighing 1 / n_i."""
        sizes = self.data.sizes["train"][ids]
        rows = []
        for _, user in cells(ids):
            size = int(self.data.sizes["train"][user])
            at = cut(size, max(1, min(chunk, size)), -(-size // chunk))
            rows.append(self._rows(user, "train", at)[:, None])
        plan = self._assemble(rows, ids.shape)
        n = torch.as_tensor(np.maximum(sizes, 1), device=plan.weight.device)
        plan.weight = (plan.weight > 0) / n.to(plan.weight.dtype).unsqueeze(-1)
        return plan

    def _draw(
        self, stream: str, run: int, user: int, round_number: int, part: str, count: int, call: int
    ) -> np.ndarray:
        size = int(self.data.sizes[part][user])
        batch = max(1, min(self.config.batch_size, size))
        if stream == "batches" and self.cyclic:
            start = self.cursors[part][run, user]
            at = cut(size, batch, count, start, merge=self.merge)
            per_pass = int(batches_per_pass(size, batch, self.merge))
            self.cursors[part][run, user] = (start + count) % max(1, per_pass)
        else:
            seed, repetition = self.config.seed, self.repetitions[run]
            key = (seed, repetition, round_number, user, PARTS.index(part), *_later(call))
            at = cut(size, batch, count, rng=generator(stream, *key), merge=self.merge)
        return self._rows(user, part, at)

    def _rows(self, user: int, part: str, at: np.ndarray) -> np.ndarray:
        return np.where(at >= 0, at + self.data.starts[part][user], -1)

    def _assemble(self, plans: list[np.ndarray], block: tuple, steps: int | None = None) -> Plan:
        taken = np.array([len(p) for p in plans])
        steps = taken.max() if steps is None else steps
        widths = [p.shape[-1] for p in plans]
        padded = [
            np.pad(p, ((0, steps - len(p)), (0, 0), (0, max(widths) - w)), constant_values=-1)
            for p, w in zip(plans, widths, strict=True)
        ]
        rows = np.stack(padded, axis=2)
        rows = rows.reshape(*rows.shape[:2], *block, rows.shape[-1])
        real = rows >= 0
        counts = real.sum(-1)
        active = np.arange(steps)[:, None] < taken
        x = self.data.x
        weight = real / np.maximum(counts, 1)[..., None]
        return Plan(
            rows=torch.as_tensor(np.maximum(rows, 0), device=x.device),
            weight=torch.as_tensor(weight, dtype=x.dtype, device=x.device),
            steps=taken.reshape(block),
            widths=widths,
            counts=counts,
            active=torch.as_tensor(active.reshape(steps, *block), dtype=x.dtype, device=x.device),
        )


def _later(call: int) -> tuple[int, ...]:
    return (call,) if call else ()


def torch_generator(stream: str, device: torch.device | str, *key: int) -> torch.Generator:
    """torch's own generator for each stream and key, on `device`."""
    seed = int(np.random.SeedSequence([STREAMS[stream], *key]).generate_state(1, np.uint64)[0])
    return torch.Generator(device).manual_seed(seed >> 1)


def dropout_generator(device: torch.device, *key: int, call: int) -> torch.Generator:
    """For the dropout masks of one user's minibatch."""
    return torch_generator("dropout", device, *key, *_later(call))


def normal(like: Params, stream: str, keys: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Standard normal tensors like `like`, whose leading axes hold one part for each key.

    A part is drawn on the CPU from its key alone, so that the device and the company do not matter.
    """
    parts = []
    for key in keys:
        rng = torch_generator(stream, "cpu", *key)
        shapes = [(p.numel() // len(keys), p.dtype) for p in like]
        parts.append([torch.randn(n, generator=rng, dtype=kind) for n, kind in shapes])
    together = (torch.stack(same) for same in zip(*parts, strict=True))
    return [t.reshape(p.shape).to(p.device) for t, p in zip(together, like, strict=True)]


def global_states(device: torch.device) -> dict[str, object]:
    """The state of every generator that no key of ours reaches, by library; to be compared."""
    kind, words, *rest = np.random.get_state()
    states = {"torch": torch.get_rng_state().numpy().tobytes(), "random": random.getstate()}
    states["numpy"] = (kind, words.tobytes(), *rest)
    if device.type == "cuda":
        states["torch.cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states


def chunks(rows: slice, size: int) -> Iterator[slice]:
    """Cut consecutive rows into pieces of at most `size`."""
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))
