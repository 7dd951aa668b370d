"""What every user does alike: receive, step through minibatches, take gradients.

A User is a block of users: `block` is () for one user on a plain module, (C,) for C users in
lockstep on a stacked one, (T, C) for C users in each of T repetitions. Its tensors are
(*block, *shape), its per-user numbers (*block,).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from FLAlgorithms.trainmodel.classifier import Dropout, own_values
from FLAlgorithms.trainmodel.models import Mlp
from FLAlgorithms.trainmodel.stacked import FixedInput, mlp_gradients
from utils.batches import Batch, Plan, Planner, cells, dropout_generator, normal
from utils.params import Params, add_, assign_, clip_, zeros_like

if TYPE_CHECKING:
    from utils.config import Config


class User:
    """A block of users; an algorithm adds `train()` and names what it keeps and sends.

    `state`: what survives rounds, {attribute: initial value}, "zeros" or "model".
    `acknowledged`: those of them that change only where the server got the report.
    `uploads`: the attributes the server may read. `personal`: names of its personalised models.
    """

    state: ClassVar[dict[str, str]] = {}
    acknowledged: ClassVar[tuple[str, ...]] = ()
    uploads: ClassVar[tuple[str, ...]] = ("params",)
    personal: ClassVar[tuple[str, ...]] = ()
    draws = 1

    def __init__(self, model: nn.Module, block: tuple, config: Config, planner: Planner) -> None:
        self.model, self.block, self.config, self.planner = model, block, config, planner
        self.params: list[Tensor] = list(model.parameters())
        one = getattr(model, "one", model)
        self.closed_form = bool(block) and isinstance(model, Mlp)
        self.dropouts = [m for m in one.modules() if isinstance(m, Dropout)]

    def receive(self, ids: np.ndarray, round_number: int, params: Params) -> None:
        """Become the users `ids` (shape `block`) in a round, with the global parameters."""
        self.ids, self.round_number = ids, round_number
        assign_(self.params, params)
        self.active: Tensor | float = 1.0
        # Of each user since then, shape `block`: local steps, their samples, gradients taken.
        self.num_steps = self.numbers(0)
        self.samples = np.zeros(self.block, dtype=np.int64)
        self.gradients_taken: Tensor | float = 0.0
        self._drawn: Counter[str] = Counter()  # calls by what they draw

    @classmethod
    def bn(cls, config: Config) -> str:
        """How BatchNorm is treated: who uploads nothing keeps it to itself."""
        return config.bn if cls.uploads else "local"

    @property
    def own(self) -> list[Tensor]:
        """What the model holds of the user alone; may be assigned."""
        return own_values(self.model, self.bn(self.config))

    @own.setter
    def own(self, values: Params) -> None:
        assign_(self.own, values)

    @property
    def buffers(self) -> list[Tensor]:
        """The model's statistics."""
        return list(self.model.buffers())

    def train(self) -> None:
        """The local work of one round: from the received parameters to what `uploads` names."""
        raise TypeError(f"{type(self).__name__} has no train()")

    def personalized(self) -> dict[str, Params]:
        """The personalised models by name, parameters (*block, *shape)."""
        return {}

    def local_steps(self) -> Iterator[Batch | list[Batch]]:
        """The round's minibatches: one Batch a step, or a list of `draws` fresh ones.

        Sets `active` for the step and adds to `num_steps`, shape `block`: local steps really taken.
        A second call gives as many steps with fresh minibatches.
        """
        call = self._call("steps")
        plan = self.planner.local(self.ids, self.round_number, self.draws, call)
        self.num_steps = self.num_steps + self.numbers(plan.steps)
        self.samples += plan.counts.sum((0, 1))
        self.model.train()
        for step in range(len(plan.rows)):
            self.active = plan.active_at(step)
            draws = range(self.draws)
            batches = [self._batch(plan, step, draw, call=call) for draw in draws]
            yield batches if self.draws > 1 else batches[0]
        self.active = 1.0

    def adaptation_steps(self, *parts: str) -> Iterator[Batch]:
        """One minibatch from each named part of the user's data; nobody without data is active."""
        self.model.train()
        call = self._call("adapt")
        plans = self.planner.adapt(self.ids, self.round_number, parts, call)
        for turn, plan in enumerate(plans):
            self.active = self.numbers(plan.steps)
            yield self._batch(plan, 0, 0, stage=1 + turn, call=call)
        self.active = 1.0

    def finetuning_steps(self, count: int) -> Iterator[Batch]:
        """`count` minibatches of the user's train data, apart from those of its local steps."""
        self.model.train()
        call = self._call("adapt")
        plan = self.planner.finetune(self.ids, self.round_number, count, call)
        for step in range(len(plan.rows)):
            self.active = plan.active_at(step)
            yield self._batch(plan, step, 0, stage=1, call=call)
        self.active = 1.0

    def _call(self, what: str) -> int:
        """How often this has been drawn since the model was received."""
        self._drawn[what] += 1
        return self._drawn[what] - 1

    def noise(self) -> list[Tensor]:
        """Standard normal tensors like `params`, fresh ones at every call.

        Those of a user depend on (seed, repetition, round, user, number of the call) alone.
        """
        call, seed, number = self._call("noise"), self.config.seed, self.round_number
        runs = self.planner.repetitions
        keys = [(seed, runs[run], number, user, call) for run, user in cells(self.ids)]
        return normal(self.params, "noise", keys)

    @torch.enable_grad()
    def backward(self, batch: Batch) -> None:
        """Leave each user's gradient of its mean minibatch loss in its row of every `.grad`."""
        if self.closed_form:
            self._count_gradient()
            mlp_gradients(self.model, batch.x, batch.y, batch.weight)
            return
        for p in self.params:
            p.grad = None
        self.losses(batch).sum().backward()

    def _count_gradient(self, *_: Tensor) -> None:
        self.gradients_taken = self.gradients_taken + self.active

    def clip_gradients(self, limit: float) -> None:
        """Shorten each user's gradient, as `backward` left it, to the L2 norm `limit`."""
        found = [p.grad for p in self.params]
        if any(g is None for g in found):
            raise TypeError(
                f"{type(self).__name__}: clip_gradients() needs all gradients, and some are not "
                "there: take them by backward(), and not within proximal_loop()"
            )
        clip_(found, limit, self.block)

    def proximal_loop(
        self, batch: Batch, solver: Optimizer, anchor: Params, count: int, restart: bool
    ) -> Iterator[int]:
        """`count` turns for steps of a ProximalSGD on one minibatch, from the anchor if `restart`.

        The caller takes the gradient and steps in each turn. Where the model's first layer sees
        the minibatch itself, its part is done on the minibatch's Gram matrix meanwhile.
        """
        if restart:
            assign_(self.params, anchor, self.active)
        if not self.closed_form:
            yield from range(count)
            return
        # The first layer's weight is the first parameter.
        away = None if restart else anchor[0]
        with torch.no_grad():
            fixed = FixedInput(self.model.layers[0], batch.x, away, solver, self.active)
        yield from range(count)
        with torch.no_grad():
            fixed.finish()

    def losses(self, batch: Batch) -> Tensor:
        """The weighted mean loss of each user's minibatch, shape `block`.

        Every pass back through it is counted as a gradient, whoever asks for it.
        """
        for layer, mask in zip(self.dropouts, batch.masks, strict=True):
            layer.mask = mask
        logits = self.model(batch.x)
        if logits.requires_grad:
            logits.register_hook(self._count_gradient)
        return (batch.weight * self.model.loss(logits, batch.y)).sum(-1)

    def gradients(self) -> list[Tensor]:
        """Take the gradients that `backward` left; the next `backward` makes new ones."""
        found = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        return found

    @torch.enable_grad()
    def full_gradient(self) -> list[Tensor]:
        """Gradient of f_i over all of each user's train data at the current parameters.

        It is no minibatch's, and counts as none.
        """
        plan = self.planner.full_pass(self.ids, 8 * self.config.batch_size)
        self.model.eval()
        self.gradients()
        total = zeros_like(self.params)
        for step in range(len(plan.rows)):
            batch = self._batch(plan, step, 0, masks=False)
            each = self.model.loss(self.model(batch.x), batch.y)
            (batch.weight * each).sum().backward()
            add_(total, self.gradients(), 1.0)
        return total

    def numbers(self, values: object) -> Tensor:
        """Per-user numbers as a tensor of shape `block` in the parameters' type and place."""
        like, values = self.params[0], np.broadcast_to(values, self.block)
        return torch.tensor(values, dtype=like.dtype, device=like.device)

    def _batch(
        self,
        plan: Plan,
        step: int,
        draw: int,
        stage: int = 0,
        masks: bool = True,
        call: int = 0,
    ) -> Batch:
        batch = plan.batch(self.planner.data, step, draw)
        if self.dropouts and masks:
            config = self.config
            rows, drawn = batch.y.shape[-1], []
            for (run, user), width in zip(cells(self.ids), plan.widths, strict=True):
                key = (config.seed, self.planner.repetitions[run], self.round_number, user)
                rng = dropout_generator(batch.x.device, *key, stage, step, draw, call=call)
                drawn.append([m.draw(width, rows, rng, batch.x) for m in self.dropouts])
            batch.masks = tuple(
                torch.stack(user_masks).reshape(*self.block, rows, *layer.shape)
                for layer, user_masks in zip(self.dropouts, zip(*drawn, strict=True), strict=True)
            )
        return batch
