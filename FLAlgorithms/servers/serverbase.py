"""What every server does alike: rounds, sampling, blocks of users, evaluation, recording.

An algorithm adds `round()` and says which User it trains and which options it reads.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from FLAlgorithms.evaluation import Evaluator, Key, Metrics, Tally
from FLAlgorithms.trainmodel.classifier import (
    Classifier,
    batch_norms,
    copied,
    own_values,
    stackable,
)
from FLAlgorithms.trainmodel.stacked import count_parameters, stacked
from FLAlgorithms.users.userbase import User
from utils.batches import FederatedData, Planner, cells, generator, global_states, normal
from utils.errors import InputError
from utils.params import Params, WeightedMean, assign_, clone, per_user, zeros_like
from utils.partition import PARTS

if TYPE_CHECKING:
    from utils.config import Config


# What `--block_size auto` fills a block with. Measured on 2 cores, one thread, per user-step: MNIST
# dnn (79,510 parameters) 740 us alone, 338 in blocks of 5, 203 in blocks of 20; Synthetic mclr (610
# parameters) 346 alone, 25 in blocks of 20, 10 in blocks of 100. Models that are not made of linear
# layers run one user at a time.
BLOCK_PARAMETERS = 2_000_000
# What a block's step costs beside its users' arithmetic, in parameters: 127 us for one user of
# Synthetic mclr, 5 us for each one more.
STEP_OVERHEAD = 15_000
# What is counted per repetition: users selected, users trained, samples drawn, gradients taken (per
# user and minibatch), bytes that a real federation would have sent to and from the users, and the
# selected users whose reports arrived.
WORK = ("selected", "trained", "samples", "gradients", "bytes_down", "bytes_up", "reported")
# With unequal work the shapes of blocks change from round to round; so many are kept.
KEPT_BLOCKS = 8


class Diverged(Exception):
    """A loss or a parameter is no longer finite; the message names round, user and option."""


class Refused(InputError):
    """The algorithm's own code cannot be trusted with a run."""


class Observer(Protocol):
    """What a run tells as it goes; utils/results.py records it."""

    def evaluated(self, round_number: int, metrics: Metrics) -> None:
        """The global model after `round_number` rounds."""

    def personalized(self, round_number: int, models: dict[str, Metrics]) -> None:
        """The personalised models that belong to this round (0, 1, ...), by name."""

    def round_done(self, round_number: int, selected: np.ndarray) -> None:
        """A round has ended; `selected`: who was sampled."""


class Server:
    """Owns the global model, the users' persistent state and the users themselves.

    Everything global has shape (*lead, *shape): `lead` is () for one repetition and (T,) for T of
    them in lockstep, each in a row of its own. Ids are (*lead, number of users).

    `options`: the Config fields the algorithm reads beyond the common ones, `unread`: common ones
    that it does not read. `new_options`: those that it adds, {name: utils.options.option(...)}.
    `defaults`: its own defaults of any options, `overrides`: of the semantics' switches.
    `personal_at`: when personalised models are evaluated, "start" (adapted from w_t before
    training) or "trained" (as they come out of local training).
    `drops_stragglers`: who could not do all its work does not report; else partial work counts.
    `step_options`: what to look at when a run diverges, the likeliest first. `state`: attributes of
    the server, lists of global tensors, that survive rounds.
    """

    user_class: ClassVar[type[User]]
    options: ClassVar[tuple[str, ...]] = ()
    unread: ClassVar[tuple[str, ...]] = ()
    new_options: ClassVar[dict[str, Field]] = {}
    defaults: ClassVar[dict[str, object]] = {}
    overrides: ClassVar[dict[str, dict[str, object]]] = {}
    personal_at: str = ""
    drops_stragglers: ClassVar[bool] = False
    step_options: ClassVar[tuple[str, ...]] = ("learning_rate",)
    state: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        config: Config,
        data: FederatedData,
        model: Classifier | Sequence[Classifier],
        repetition: int | Sequence[int] = 0,
        observer: Observer | Sequence[Observer] | None = None,
        selected: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """One repetition with its model and observer, or sequences of them for lockstep.

        `selected[t]` fixes who is sampled in round t (replay of one repetition).
        """
        together = not isinstance(repetition, int)
        models = list(model) if together else [model]
        self.config, self.data, self.model, self.scripted = config, data, models[0], selected
        self.repetitions = list(repetition) if together else [repetition]
        several = isinstance(observer, Sequence)
        self.observers = list(observer) if several else [observer] * len(models)
        self.lead = (len(models),) if together else ()
        if not self.personal_names(config):
            self.personal_at = ""
        self.planner = Planner(config, data, self.repetitions, merge=bool(batch_norms(self.model)))
        own = [[p.detach() for p in m.parameters()] for m in models]
        self.params = [torch.stack(same) for same in zip(*own, strict=True)] if together else own[0]
        self.buffers = list(self.model.buffers())
        # Under `--bn local` no round moves these, and every user has its own.
        bn = self.user_class.bn(config)
        self.private = own_values(self.model, bn) if bn == "local" else []
        self.everyone = np.broadcast_to(np.arange(data.num_users), (*self.lead, data.num_users))
        self.round_number = 0
        self._noises = 0  # drawn in this round
        self.whole = True  # False within a round, when a checkpoint would be torn
        self.pause: Callable[[], None] = lambda: None  # called between rounds; may raise
        self.work = np.zeros((len(models), len(WORK)), dtype=np.int64)
        self.failed: dict[int, str] = {}  # row of a repetition that diverged: what happened
        size = _block_size(config, self.model, data.num_users, len(models))
        self.block_size = max(size, 1) if together else size
        self._step_overhead = STEP_OVERHEAD / (len(models) * count_parameters(self.model))
        self.evaluator = Evaluator(self.model, data)
        self._users: dict[tuple, User] = {}
        self._kept: list[Tensor] = []
        place = "cpu" if config.state_device == "cpu" else self.params[0].device
        states = self.user_class.state.items()
        self.bank = {name: [p.to(place) for p in self._bank(kind)] for name, kind in states}
        # A personalised model that outlives its round needs the statistics it was trained with.
        kept = self.private or (self.buffers if self.personal_at == "trained" else [])
        if kept:
            self.bank["own"] = [t.to(place) for t in self._for_everyone(kept)]
        self.setup()

    @classmethod
    def reads(cls) -> tuple[str, ...]:
        """The options that not every algorithm reads, and this one does."""
        return (*cls.options, *cls.new_options)

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise InputError where the options contradict the algorithm."""

    @classmethod
    def warnings(cls, config: Config) -> list[str]:
        """One line for every option value known to be dangerous."""
        return []

    @classmethod
    def personal_names(cls, config: Config) -> tuple[str, ...]:
        """Names of the personalised models that a run with these options evaluates."""
        return cls.user_class.personal

    def setup(self) -> None:
        """Create the server's own state."""

    def round(self) -> None:
        """One communication round, as in the paper's box."""
        raise TypeError(f"{type(self).__name__} has no round()")

    # ---- what algorithms call

    def sample(self) -> np.ndarray:
        """This round's users: `numusers` of those with train data, uniformly, sorted."""
        self.selected = self._sampled()
        reports = self.planner.turnout(self.selected, self.round_number)
        if self.drops_stragglers:
            reports &= ~self.planner.slow
        self.reports = reports.reshape(self.everyone.shape)
        silent = ~self.reports.any(-1)
        self._stay = (silent, clone(self._global_state())) if silent.any() else None
        return self.selected

    def _sampled(self) -> np.ndarray:
        if self.scripted is not None:
            chosen = np.asarray(self.scripted[self.round_number])
            return np.sort(chosen[chosen >= 0])
        able = np.flatnonzero(self.data.sizes["train"])
        size = min(self.config.numusers, len(able))
        drawn = []
        for repetition in self.repetitions:
            rng = generator("users", self.config.seed, repetition, self.round_number)
            drawn.append(np.sort(rng.choice(able, size, replace=False)))
        return np.stack(drawn).reshape(*self.lead, size)

    def trained(self, ids: Sequence, **payload: Params) -> Iterator[SimpleNamespace]:
        """Train the users `ids` from the global model and yield what they upload, block by block.

        Each report has `ids`, `weight` (shape `block`; 0 for who does not report) and the
        attributes that the User class names in `uploads`; it is good until the next one, whose
        users reuse the tensors. `payload`, global parameters, goes to `train()`.
        """
        ids = np.asarray(ids)
        after = self.personal_at == "trained"
        tally = self._tally() if after else None
        buffers, last = WeightedMean(), []
        for user in self._blocks(ids):
            if not self.private:
                assign_(user.buffers, self.buffers)
            with torch.enable_grad():
                user.train(**{name: self._spread(params) for name, params in payload.items()})
            state = {name: getattr(user, name) for name in user.state}
            self._check_finite(user, {"": user.params} | state)
            for name in self.bank:
                self._store(user, name)
            uploads = {name: getattr(user, name) for name in user.uploads}
            self._count(user, payload, uploads)  # before the evaluation takes gradients, too
            self._look_at(user, tally, after)
            weight = self._weight(user)
            if self.buffers and weight.sum() > 0:
                buffers.add(weight, [b.to(self.params[0]) for b in user.buffers])
                last = clone(user.buffers)
            yield SimpleNamespace(ids=user.ids, weight=weight, **uploads)
        if after and (tally or self._keeping()):
            for user in self._blocks(self._others(ids)):
                self._look_at(user, tally, after)
        if tally:
            self._hand_over(tally)
        # Integers (batches counted) cannot be averaged: those of the user with the most steps.
        mean = buffers.value(self.buffers) if last else []
        for buffer, average, value in zip(self.buffers, mean, last, strict=bool(last)):
            buffer.copy_(average if buffer.is_floating_point() else value)

    @property
    def total_weight(self) -> float:
        """Sum of the weights of ALL users, sampled or not."""
        return float(self._weights(np.arange(self.data.num_users)).sum())

    def zeros(self) -> list[Tensor]:
        """Zeros like the global parameters."""
        return zeros_like(self.params)

    def noise(self) -> list[Tensor]:
        """Standard normal tensors like the global parameters, fresh ones at every call.

        Those of a repetition depend on (seed, repetition, round, number of the call) alone.
        """
        self._noises += 1
        key = (self.round_number, self._noises)
        keys = [(self.config.seed, repetition, *key) for repetition in self.repetitions]
        return normal(self.params, "server noise", keys)

    # ---- the run

    def run(self) -> None:
        """All rounds; raises Diverged as soon as no repetition is finite any more."""
        self.run_rounds(self.config.num_global_iters - self.round_number)
        self._evaluate_global()
        if self.config.save_models and self.personal_at == "start":
            cursors = copy.deepcopy(self.planner.cursors)  # what is kept changes no run
            for user in self._blocks(self.everyone):
                self._keep_personal(user, _personal_models(user))
            self.planner.cursors = cursors

    def run_rounds(self, count: int) -> None:
        """`count` rounds, each evaluated as it is due."""
        for _ in range(count):
            self.whole, self._noises = False, 0
            before = self._global_states()
            if not self.personal_at:
                self._evaluate_global()
            if self.personal_at == "start" and (tally := self._tally()):
                for user in self._blocks(self.everyone):
                    self._look_at(user, tally, keep=False)
                self._hand_over(tally)
            private = clone(self.private)
            self.round()
            self._check_keyed(before)
            assign_(self.private, private)
            if self._stay:  # not even the server's momentum moves a round without reports
                silent, before = self._stay
                active = torch.as_tensor(silent, device=self.params[0].device)
                assign_(self._global_state(), before, active)
            self.planner.slow.fill(False)
            kept = [torch.isfinite(p).flatten(len(self.lead)).all(-1) for p in self.params]
            for run in np.flatnonzero(~torch.stack(kept).all(0).reshape(-1).cpu().numpy()):
                self._diverged(int(run), "the global model is no longer finite")
            self.round_number += 1
            self.work[:, 0] += self.selected.shape[-1]
            self.whole = True
            selected = self.selected.reshape(len(self.repetitions), -1)
            for run, observer in self._watching():
                observer.round_done(self.round_number, selected[run])
            self.pause()

    def _check_keyed(self, before: dict[str, object]) -> None:
        """Refused if a generator drew that no seed of the run reaches."""
        after = self._global_states()
        if drew := [library for library, state in before.items() if state != after[library]]:
            raise Refused(
                f"--algorithm {self.config.algorithm}: {self.user_class.__name__} or "
                f"{type(self).__name__} draws from {drew[0]}'s global generator, so that its "
                "numbers depend on blocks and cannot be repeated; use self.noise()"
            )

    def _global_states(self) -> dict[str, object]:
        """Beside the main thread, others may draw at any time."""
        main = threading.current_thread() is threading.main_thread()
        return global_states(self.params[0].device) if main else {}

    def checkpoint(self, run: int = 0) -> dict[str, object]:
        """All that later rounds of a repetition depend on; randomness is keyed, none is kept."""
        return {
            "round": self.round_number,
            "work": torch.from_numpy(self.work[run].copy()),
            "cursors": {
                p: torch.from_numpy(c[run].copy()) for p, c in self.planner.cursors.items()
            },
            "tensors": [t.cpu().clone() for t in self._stateful(run)],
        }

    def restore(self, checkpoint: dict[str, object], run: int = 0) -> None:
        """Go on where `checkpoint` was taken, at the end of a round."""
        self.round_number = checkpoint["round"]
        self.work[run] = checkpoint["work"].numpy()
        for part, cursors in checkpoint["cursors"].items():
            self.planner.cursors[part][run] = cursors.numpy()
        for mine, saved in zip(self._stateful(run), checkpoint["tensors"], strict=True):
            mine.copy_(saved)

    def _stateful(self, run: int) -> list[Tensor]:
        """Views of a repetition's parameters, buffers, users' and server's state."""
        state = [*self._global_state(), *(p for bank in self.bank.values() for p in bank)]
        return [*([p[run] for p in state] if self.lead else state), *self.buffers]

    def _global_state(self) -> list[Tensor]:
        """The parameters and the server's own state, (*lead, *shape)."""
        return [*self.params, *(p for name in self.state for p in getattr(self, name))]

    def state_dict(self, run: int = 0) -> dict[str, Tensor]:
        """The global model of a repetition: parameters and buffers by name."""
        names = (name for name, _ in self.model.named_parameters())
        own = dict(zip(names, self._of(run), strict=True))
        return own | dict(self.model.named_buffers())

    def personal_models(self, run: int = 0) -> dict[str, Tensor]:
        """The users' primary personalised models at the end, (N, *shape) by name.

        Needs `--save_models` and a finished run; empty where the algorithm has none.
        """
        names = self.evaluator.names
        kept = [k[run] for k in self._kept] if self.lead else self._kept
        return dict(zip(names, kept, strict=True)) if kept else {}

    # ---- inside

    def _of(self, run: int) -> list[Tensor]:
        return [p[run] for p in self.params] if self.lead else self.params

    def _spread(self, params: Params) -> list[Tensor]:
        """Global parameters so that they broadcast over a block: (*lead, 1, *shape)."""
        return [p.unsqueeze(1) for p in params] if self.lead else list(params)

    def _blocks(self, ids: np.ndarray) -> Iterator[User]:
        """User objects that have received the global model; users of like work share a block."""
        steps = self.planner.num_steps(ids, self.round_number)
        by_work = np.lexsort((ids, steps), axis=-1)
        ids = np.take_along_axis(ids, by_work, axis=-1)
        longest = np.sort(steps, axis=-1).reshape(len(self.repetitions), -1).max(0)
        for start, stop in cut_blocks(longest, self.block_size or 1, self._step_overhead):
            group = ids[..., start:stop] if self.block_size else ids[..., start]
            block = group.shape
            user = self._users_of(block)
            user.receive(group, self.round_number, self._spread(self.params))
            assign_(user.buffers, self.buffers)
            for name, bank in self.bank.items():
                mine = [rows[self._rows(user)] for rows in bank]
                setattr(user, name, [rows.to(self.params[0].device, copy=True) for rows in mine])
            yield user

    def _users_of(self, block: tuple) -> User:
        """The block object of this shape; the last few shapes are kept."""
        if block not in self._users:
            if len(self._users) == KEPT_BLOCKS:
                self._users.pop(next(iter(self._users)))
            model = stacked(self.model, block) if block else copied(self.model)
            self._users[block] = self.user_class(model, block, self.config, self.planner)
        return self._users[block]

    def _store(self, user: User, name: str) -> None:
        """Put the block's persistent state back into the users' rows."""
        at, heard = self._rows(user), self._reported(user)
        for rows, value in zip(self.bank[name], getattr(user, name), strict=True):
            value = value.detach().to(rows.device)
            if name in user.acknowledged and not heard.all():
                arrived = per_user(torch.as_tensor(heard, device=rows.device), value)
                value = torch.where(arrived, value, rows[at])
            rows[at] = value

    def _rows(self, user: User) -> object:
        """Where the block's users are in a (*lead, N, ...) tensor."""
        if not self.lead:
            return user.ids.tolist()
        return torch.arange(*self.lead).unsqueeze(1), torch.from_numpy(user.ids)

    def _others(self, ids: np.ndarray) -> np.ndarray:
        """The users that are not among `ids`, (*lead, the rest)."""
        left = np.ones(self.everyone.shape, dtype=bool)
        np.put_along_axis(left, ids, False, axis=-1)
        return self.everyone[left].reshape(*self.lead, -1)

    def _weights(self, ids: np.ndarray) -> np.ndarray:
        sizes = self.data.sizes["train"][ids]
        return sizes.astype(float) if self.config.weighting == "samples" else np.ones(sizes.shape)

    def _weight(self, user: User) -> Tensor:
        return user.numbers(self._weights(user.ids) * self._reported(user))

    def _reported(self, user: User) -> np.ndarray:
        """Which of the block's users are sampled and report this round, shape `block`."""
        ids = user.ids.reshape(*self.lead, -1)
        return np.take_along_axis(self.reports, ids, axis=-1).reshape(user.block)

    def _count(self, user: User, payload: dict[str, Params], uploads: dict[str, object]) -> None:
        """Add a block's work to the totals; what a real federation would have sent included."""
        runs = len(self.repetitions)
        users = user.ids.size // runs
        # Who has nothing to report is sent nothing either.
        reported = bool(uploads) * self._reported(user).reshape(runs, -1).sum(-1)
        samples = user.samples.reshape(runs, -1).sum(-1)
        taken = torch.as_tensor(user.gradients_taken, dtype=torch.float64).expand(user.block)
        gradients = taken.reshape(runs, -1).sum(-1).cpu().numpy()
        extra = _bytes(self.buffers) - _bytes(self.private)
        sent = [p for ps in (self.params, *payload.values()) for p in ps]
        down = bool(uploads) * (_bytes(sent) // runs + extra)
        received = [t for ps in uploads.values() for t in ([ps] if isinstance(ps, Tensor) else ps)]
        up = _bytes(received) // max(user.ids.size, 1) + extra
        self.work += np.stack(
            [
                np.zeros_like(samples),
                np.full_like(samples, users),
                samples,
                gradients.astype(np.int64),
                np.full_like(samples, users * down),
                reported * up,
                reported,
            ],
            axis=-1,
        )

    def _bank(self, kind: str) -> list[Tensor]:
        start = {"zeros": self.zeros, "model": lambda: self.params}[kind]()
        return self._for_everyone(start)

    def _for_everyone(self, start: Params) -> list[Tensor]:
        """Copies for every user, (*lead, N, *shape)."""
        n, lead = self.data.num_users, len(self.lead)
        return [p.unsqueeze(lead).expand(*self.lead, n, *p.shape[lead:]).clone() for p in start]

    # ---- evaluation

    def _watching(self) -> list[tuple[int, Observer]]:
        """Rows and observers of the repetitions that go on."""
        there = enumerate(self.observers)
        return [(run, o) for run, o in there if o is not None and run not in self.failed]

    def _due(self, last: bool = False) -> bool:
        every = self.config.eval_every
        final = self.config.num_global_iters - (0 if last else 1)
        return bool(every) and (self.round_number % every == 0 or self.round_number == final)

    def _globals(self) -> dict[Key, Params]:
        return {(run, ""): [*self._of(run), *self.buffers] for run in range(len(self.repetitions))}

    def _evaluate_global(self) -> None:
        if self._due(last=True):
            tally = Tally(self.evaluator)
            if self.private:
                for user in self._blocks(self.everyone):
                    tally.add(int(user.ids), {(0, ""): [*user.params, *user.buffers]})
            else:
                tally.add_everybody(self._globals())
            self._hand_over(tally)

    def _tally(self) -> Tally | None:
        if not self._due():
            return None
        tally = Tally(self.evaluator)
        if self.data.judging["test"] != "test" and self._due(last=True):
            tally.add_everybody(self._globals(), ("test",))  # by no user's turn
        return tally

    def _look_at(self, user: User, tally: Tally | None, keep: bool) -> None:
        """Evaluate the block's personalised models, and w_t in the same pass; keep the last."""
        keep = keep and self._keeping()
        if not (tally or keep):
            return
        found = _personal_models(user)
        shared = self._globals() if self._due(last=True) else {}
        of_user: dict[int, dict[Key, Params]] = {}
        for place, (run, i) in zip(np.ndindex(*user.block), cells(user.ids), strict=True):
            mine = {(run, name): [p[place] for p in params] for name, params in found.items()}
            of_user.setdefault(i, {}).update(mine)
            if (run, "") in shared:
                of_user[i][run, ""] = shared[run, ""]
        if tally:
            # The model beside the primary one is compared by its test accuracy alone.
            beside = [n for n in found if n != self.config.primary]
            for i, models in of_user.items():
                tally.add(i, models, beside)
        if keep:
            self._keep_personal(user, found)

    def _keeping(self) -> bool:
        return self.config.save_models and self.round_number == self.config.num_global_iters - 1

    def _keep_personal(self, user: User, found: dict[str, Params]) -> None:
        self._check_finite(user, found)
        if not self._kept:
            self._kept = self._for_everyone([*self.zeros(), *self.buffers])
        for rows, value in zip(self._kept, found[self.config.primary], strict=True):
            rows[self._rows(user)] = value.detach()

    def _hand_over(self, tally: Tally) -> None:
        of_run: dict[int, dict[str, Metrics]] = {}
        for (run, name), metrics in tally.metrics().items():
            of_run.setdefault(run, {})[name] = metrics
        for run, observer in self._watching():
            models = dict(of_run[run])
            if "" in models:
                observer.evaluated(self.round_number, models.pop(""))
            if models:
                observer.personalized(self.round_number, models)
        for run, models in of_run.items():
            for name, metrics in models.items():
                what = f"the personalised model {name}" if name else "the global model"
                # Official test rows, which may judge the global model, are no user's.
                for part in PARTS if name else ("train",):
                    for i in np.flatnonzero(~np.isfinite(metrics.loss[part]))[:1]:
                        self._diverged(run, f"{what}'s {part} loss of user {i} is not finite")

    # ---- divergence

    def _check_finite(self, user: User, found: dict[str, Params]) -> None:
        """Of a block: the trained parameters, called "", or what is personal, by name."""
        sums = []
        for params in found.values():
            floats = [p.detach() for p in params if p.is_floating_point()]
            sums.append(torch.stack([p.flatten(len(user.block)).sum(-1) for p in floats]).sum(0))
        bad = ~torch.isfinite(torch.stack(sums)).reshape(len(found), -1).cpu().numpy()
        for name, lost in zip(found, bad, strict=True):
            # A loss that is not finite leaves a gradient, and so a model, that is not.
            what = f"the personalised model {name}" if name in user.personal else name
            for place in np.flatnonzero(lost):
                run, i = cells(user.ids)[place]
                self._diverged(run, f"{what or 'the training loss'} of user {i} is not finite")

    def _diverged(self, run: int, what: str) -> None:
        """Note it; the other repetitions in lockstep go on."""
        values = {name: getattr(self.config, name) for name in self.step_options}
        default = type(self.config)(algorithm=self.config.algorithm)
        raised = [n for n, v in values.items() if v > (getattr(default, n) or 0)]
        look = ", ".join(f"--{n} (now {values[n]:g})" for n in raised or self.step_options[:1])
        message = f"diverged in round {self.round_number}: {what}; look at {look}"
        self.failed.setdefault(run, message)
        if len(self.failed) == len(self.repetitions):
            raise Diverged(message)


def cut_blocks(steps: np.ndarray, size: int, overhead: float) -> list[tuple[int, int]]:
    """Cut users, sorted by their local steps, into blocks [start, stop) of at most `size`.

    A block costs (its longest user's steps) * (overhead + its users), in user-steps; the cheapest
    cut is found by dynamic programming, so that few users wait for a long one.
    """
    n = len(steps)
    if not n or steps[0] == steps[-1]:
        return [(start, min(start + size, n)) for start in range(0, n, size)]
    cost, first = np.zeros(n + 1), np.zeros(n + 1, dtype=int)
    for stop in range(1, n + 1):
        starts = np.arange(max(0, stop - size), stop)
        total = cost[starts] + steps[stop - 1] * (overhead + stop - starts)
        first[stop] = starts[total.argmin()]
        cost[stop] = total.min()
    cuts = [n]
    while cuts[-1]:
        cuts.append(int(first[cuts[-1]]))
    return list(itertools.pairwise(cuts[::-1]))


def _block_size(config: Config, model: Classifier, num_users: int, runs: int) -> int:
    """0 for the reference engine, else users per block and repetition."""
    if not stackable(model):
        return 0
    size = config.block_size
    if size == "auto":
        room = BLOCK_PARAMETERS // (runs * count_parameters(model))
        size = max(1, min(100, room)) if model.lockstep else 0
    return min(size, num_users)


def _personal_models(user: User) -> dict[str, Params]:
    """Parameters and then buffers, by name; the statistics are the user's own."""
    with torch.enable_grad():
        found = user.personalized()
    return {name: [*params, *user.buffers] for name, params in found.items()}


def _bytes(tensors: Params) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
