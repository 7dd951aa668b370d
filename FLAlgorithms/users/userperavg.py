"""Per-FedAvg's user. Paper and differences: servers/serverperavg.py."""

from __future__ import annotations

import torch
from torch import Tensor

from FLAlgorithms.optimizers.fedoptimizer import LocalSGD
from FLAlgorithms.users.userbase import User
from utils.batches import Batch
from utils.params import Params, add_, assign_, clone, combine

# Which minibatches the personalised model adapts to, with the step size of each step.
ADAPT = {
    "train": (("train", "learning_rate"),),
    "test_test": (("test", "learning_rate"), ("test", "beta")),
    "test_train": (("test", "learning_rate"), ("train", "beta")),
}


class UserPerAvg(User):
    """MAML steps: w <- w - beta (I - alpha H(w; D'')) g(w - alpha g(w; D); D')."""

    personal = ("adapted",)

    @property
    def draws(self) -> int:
        return 2 if self.config.hessian == "fo" else 3

    def train(self) -> None:
        alpha, beta = self.config.learning_rate, self.config.beta
        inner, outer = LocalSGD(self.params, alpha), LocalSGD(self.params, beta)
        for d, d1, *d2 in self.local_steps():
            w = clone(self.params)
            self.backward(d)
            inner.step(self.active)  # w~ = w - alpha g(w; D)
            self.backward(d1)  # v = g(w~; D')
            if self.config.peravg_update == "restore":
                assign_(self.params, w)
            if d2:
                v = self.gradients()
                h = HESSIAN[self.config.hessian](self, v, *d2)
                for p, g in zip(self.params, combine(v, h, 1.0), strict=True):
                    p.grad = g
            outer.step(self.active)  # w <- w - beta (I - alpha H(w; D'')) v

    def hf(self, v: Params, batch: Batch) -> list[Tensor]:
        """alpha H v by a central difference of gradients: O(delta^2)."""
        w, delta, ends = clone(self.params), self.config.hf_delta, []
        for sign in (1, -1):
            assign_(self.params, w)
            add_(self.params, v, sign * delta)
            self.backward(batch)
            ends.append(self.gradients())
        assign_(self.params, w)
        return combine(*ends, self.config.learning_rate / (2 * delta))

    def exact(self, v: Params, batch: Batch) -> list[Tensor]:
        """alpha H v by differentiating the gradient once more."""
        first = torch.autograd.grad(self.losses(batch).sum(), self.params, create_graph=True)
        hv = torch.autograd.grad(first, self.params, v, materialize_grads=True)
        return [h * self.config.learning_rate for h in hv]

    def personalized(self) -> dict[str, Params]:
        """One alpha-step from the received model on train data (or as `--adapt` says)."""
        steps = ADAPT[self.config.adapt]
        batches = self.adaptation_steps(*(part for part, _ in steps))
        for batch, (_, rate) in zip(batches, steps, strict=True):
            self.backward(batch)
            LocalSGD(self.params, getattr(self.config, rate)).step(self.active)
        return {"adapted": self.params}


HESSIAN = {"hf": UserPerAvg.hf, "exact": UserPerAvg.exact}
