"""What every server does alike: rounds, sampling, blocks of users, evaluation, recording.

An algorithm adds `round()` and says which User it trains and which options it reads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from FLAlgorithms.evaluation import Metrics, Tally, measure_all
from FLAlgorithms.trainmodel.models import Classifier
from FLAlgorithms.trainmodel.stacked import stacked
from FLAlgorithms.users.userbase import User
from utils.batches import FederatedData, Planner, generator
from utils.params import WeightedMean, assign_, clone, zeros_like

if TYPE_CHECKING:
    from utils.config import Config


# What `--block_size auto` fills a block with. Measured on 2 cores, one thread, per user-step: MNIST
# dnn (79,510 parameters) 740 us alone, 338 in blocks of 5, 203 in blocks of 20; Synthetic mclr (610
# parameters) 346 alone, 25 in blocks of 20, 10 in blocks of 100. Models that are not made of linear
# layers run one user at a time.
BLOCK_PARAMETERS = 2_000_000


class Diverged(Exception):
    """A loss or a parameter is no longer finite; the message names round, user and option."""


class Observer(Protocol):
    """What a run tells as it goes; utils/results.py records it."""

    def evaluated(self, round_number: int, metrics: Metrics) -> None:
        """The global model after `round_number` rounds."""

    def personalized(self, round_number: int, models: dict[str, Metrics]) -> None:
        """The personalised models that belong to this round (0, 1, ...), by name."""

    def round_done(self, round_number: int, selected: np.ndarray) -> None:
        """A round has ended; `selected`: who was aggregated."""


class Server:
    """Owns the global model, the users' persistent state and the users themselves.

    `options`: the Config fields the algorithm reads beyond the common ones. `overrides`: its own
    defaults of the semantics' switches. `personal_at`: when personalised models are evaluated,
    "start" (adapted from w_t before training) or "trained" (as they come out of local training).
    `step_options`: what to look at when a run diverges, the likeliest first.
    """

    user_class: ClassVar[type[User]]
    options: ClassVar[tuple[str, ...]] = ()
    overrides: ClassVar[dict[str, dict[str, object]]] = {}
    personal_at: ClassVar[str] = ""
    step_options: ClassVar[tuple[str, ...]] = ("learning_rate",)

    def __init__(
        self,
        config: Config,
        data: FederatedData,
        model: Classifier,
        repetition: int = 0,
        observer: Observer | None = None,
        selected: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`selected[t]` fixes who is sampled in round t (replay)."""
        self.config, self.data, self.model = config, data, model
        self.repetition, self.observer, self.scripted = repetition, observer, selected
        self.planner = Planner(config, data, repetition)
        self.params = [p.detach() for p in model.parameters()]
        self.buffers = list(model.buffers())
        self.everyone = np.arange(data.num_users)
        self.round_number = 0
        self.block_size = _block_size(config, model, data.num_users)
        self._users: dict[tuple, User] = {}
        self._kept: list[Tensor] = []
        self.bank = {name: self._bank(kind) for name, kind in self.user_class.state.items()}
        self.setup()

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise InputError where the options contradict the algorithm."""

    @classmethod
    def warnings(cls, config: Config) -> list[str]:
        """One line for every option value known to be dangerous."""
        return []

    def setup(self) -> None:
        """Create the server's own state."""

    def round(self) -> None:
        """One communication round, as in the paper's box."""
        raise TypeError(f"{type(self).__name__} has no round()")

    # ---- what algorithms call

    def sample(self) -> np.ndarray:
        """This round's users: `numusers` of those with train data, uniformly, sorted."""
        if self.scripted is not None:
            chosen = np.asarray(self.scripted[self.round_number])
            self.selected = np.sort(chosen[chosen >= 0])
            return self.selected
        able = self.everyone[self.data.sizes["train"] > 0]
        rng = generator("users", self.config.seed, self.repetition, self.round_number)
        size = min(self.config.numusers, len(able))
        self.selected = np.sort(rng.choice(able, size, replace=False))
        return self.selected

    def trained(self, ids: Sequence[int], **payload: object) -> Iterator[SimpleNamespace]:
        """Train the users `ids` from the global model and yield what they upload, block by block.

        Each report has `ids`, `weight` (shape `block`; 0 outside this round's sample) and the
        attributes that the User class names in `uploads`; it is good until the next one, whose
        users reuse the tensors. `payload` goes to `train()`.
        """
        tally = self._tally() if self.personal_at == "trained" else None
        buffers = WeightedMean()
        for user in self._blocks(ids):
            user.train(**payload)
            self._check_finite(user)
            for name, bank in self.bank.items():
                for rows, value in zip(bank, getattr(user, name), strict=True):
                    rows[self._rows(user)] = value.detach()
            if tally:
                self._tally_personal(tally, user)
            if self.personal_at == "trained" and self._keeping():
                self._keep_personal(user)
            weight = self._weight(user)
            if self.buffers and weight.sum() > 0:
                buffers.add(weight, [b.to(self.params[0]) for b in user.model.buffers()])
            uploads = {name: getattr(user, name) for name in user.uploads}
            yield SimpleNamespace(ids=user.ids, weight=weight, **uploads)
        if self.personal_at == "trained" and (tally or self._keeping()):
            for user in self._blocks(sorted({*self.everyone} - {*ids})):
                if tally:
                    self._tally_personal(tally, user)
                if self._keeping():
                    self._keep_personal(user)
        if tally:
            self._hand_over(tally)
        if buffers.weight is not None:
            _merge_buffers(self.buffers, buffers.value(self.buffers))

    @property
    def total_weight(self) -> float:
        """Sum of the weights of ALL users, sampled or not."""
        return float(self._weights(self.everyone).sum())

    def zeros(self) -> list[Tensor]:
        """Zeros like the global parameters."""
        return zeros_like(self.params)

    # ---- the run

    def run(self) -> None:
        """All rounds; raises Diverged as soon as a loss or a parameter is not finite."""
        rounds = self.config.num_global_iters
        while self.round_number < rounds:
            self._evaluate_global()
            if self.personal_at == "start" and self._due():
                tally = self._tally()
                for user in self._blocks(self.everyone):
                    self._tally_personal(tally, user)
                self._hand_over(tally)
            self.round()
            for p in self.params:
                if not torch.isfinite(p).all():
                    self._diverged("the global model is no longer finite")
            self.round_number += 1
            if self.observer:
                self.observer.round_done(self.round_number, self.selected)
        self._evaluate_global()

    def personal_models(self) -> dict[str, Tensor]:
        """The users' primary personalised models at the end, (N, *shape) by parameter name.

        Needs `--save_models` and a finished run; empty where the algorithm has none.
        """
        if self.personal_at == "start":
            for user in self._blocks(self.everyone):
                self._keep_personal(user)
        names = (name for name, _ in self.model.named_parameters())
        return dict(zip(names, self._kept, strict=True)) if self._kept else {}

    # ---- inside

    def _blocks(self, ids: Sequence[int]) -> Iterator[User]:
        """User objects that have received the global model; users of like work share a block."""
        ids = sorted((int(i) for i in ids), key=lambda i: (self.planner.num_steps(i), i))
        size = self.block_size or 1
        for start in range(0, len(ids), size):
            group = ids[start : start + size]
            block = (len(group),) if self.block_size else ()
            if block not in self._users:
                model = stacked(self.model, *block) if block else copy.deepcopy(self.model)
                self._users[block] = self.user_class(model, block, self.config, self.planner)
            user = self._users[block]
            user.receive(group, self.round_number, self.params)
            assign_(list(user.model.buffers()), self.buffers)
            for name, bank in self.bank.items():
                setattr(user, name, [rows[self._rows(user)].clone() for rows in bank])
            yield user

    def _rows(self, user: User) -> list[int] | int:
        return user.ids if user.block else user.ids[0]

    def _weights(self, ids: Sequence[int]) -> np.ndarray:
        sizes = self.data.sizes["train"][np.asarray(ids, dtype=np.int64)]
        return sizes.astype(float) if self.config.weighting == "samples" else np.ones(len(sizes))

    def _weight(self, user: User) -> Tensor:
        return user.numbers(self._weights(user.ids) * np.isin(user.ids, self.selected))

    def _bank(self, kind: str) -> list[Tensor]:
        start = {"zeros": self.zeros, "model": lambda: clone(self.params)}[kind]()
        return [p.expand(len(self.everyone), *p.shape).clone() for p in start]

    def _due(self, last: bool = False) -> bool:
        every = self.config.eval_every
        final = self.config.num_global_iters - (0 if last else 1)
        return bool(every) and (self.round_number % every == 0 or self.round_number == final)

    def _evaluate_global(self) -> None:
        if self._due(last=True):
            metrics = measure_all(self.model, self.params, self.data)
            if self.observer:
                self.observer.evaluated(self.round_number, metrics)
            bad = np.flatnonzero(~np.isfinite(metrics.loss["train"]))
            if len(bad):
                self._diverged(f"the global model's train loss of user {bad[0]} is not finite")

    def _tally(self) -> dict[str, Tally] | None:
        if not self._due():
            return None
        # The model beside the primary one is compared by its test accuracy alone.
        return {
            name: Tally(self.data) if name == self.config.primary else Tally(self.data, ("test",))
            for name in self.user_class.personal
        }

    def _tally_personal(self, tally: dict[str, Tally], user: User) -> None:
        for name, params in user.personalized().items():
            tally[name].add(self.model, params, user.ids, user.block)

    def _keeping(self) -> bool:
        return self.config.save_models and self.round_number == self.config.num_global_iters - 1

    def _keep_personal(self, user: User) -> None:
        if not self._kept:
            self._kept = [p.new_empty(len(self.everyone), *p.shape) for p in self.params]
        for rows, value in zip(self._kept, user.personalized()[self.config.primary], strict=True):
            rows[self._rows(user)] = value.detach()

    def _hand_over(self, tally: dict[str, Tally]) -> None:
        models = {name: one.metrics() for name, one in tally.items()}
        if self.observer:
            self.observer.personalized(self.round_number, models)

    def _check_finite(self, user: User) -> None:
        bad = ~torch.isfinite(torch.as_tensor(user.loss_sum)).reshape(-1).cpu().numpy()
        if bad.any():
            who = ", ".join(str(user.ids[i]) for i in np.flatnonzero(bad)[:5])
            self._diverged(f"the training loss of user {who} is not finite")

    def _diverged(self, what: str) -> None:
        values = {name: getattr(self.config, name) for name in self.step_options}
        default = type(self.config)()
        raised = [n for n, v in values.items() if v > (getattr(default, n) or 0)]
        look = ", ".join(f"--{n} (now {values[n]:g})" for n in raised or self.step_options[:1])
        raise Diverged(f"diverged in round {self.round_number}: {what}; look at {look}")


def _block_size(config: Config, model: Classifier, num_users: int) -> int:
    """0 for the reference engine, else users per block."""
    if any(True for _ in model.buffers()):
        return 0
    size = config.block_size
    if size == "auto":
        parameters = sum(p.numel() for p in model.parameters())
        size = max(1, min(100, BLOCK_PARAMETERS // parameters)) if model.lockstep else 0
    return min(size, num_users)


def _merge_buffers(buffers: list[Tensor], mean: list[Tensor]) -> None:
    for buffer, value in zip(buffers, mean, strict=True):
        buffer.copy_(value if buffer.is_floating_point() else value.round())
