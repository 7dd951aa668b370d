"""Local solvers in the papers' letters: elementwise, in place, any block shape.

`active` is 1.0, or a tensor of shape `block` with 1 for users that still have local steps to do and
0 for finished ones, whose rows then do not move. Gradients are scratch: a step may overwrite them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from utils.params import Params, Scale, add_, factor, lerp_


def _unhooked(step: Callable) -> Callable:
    """Spare the profiler hook that torch wraps around every optimizer's step: 40 us a step."""
    step.hooked = True
    return step


class LocalSGD(Optimizer):
    """v <- rho v + g; y <- y - eta v. The buffer v starts at zero with the object: once a round."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.0, **more: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, **more})

    @_unhooked
    def step(self, active: Scale = 1.0) -> None:
        """One step on the gradients in `.grad`; a parameter without one stays."""
        for group in self.param_groups:
            y = [p for p in group["params"] if p.grad is not None]
            add_(y, self._direction(y, group["momentum"]), -group["lr"] * active)

    @torch.no_grad()
    def _direction(self, y: Params, rho: float) -> list[Tensor]:
        if not rho:
            return [p.grad for p in y]
        for p in y:
            v = self.state[p].setdefault("v", torch.zeros_like(p))
            v.mul_(rho).add_(p.grad)
        return [self.state[p]["v"] for p in y]


class ProximalSGD(LocalSGD):
    """v <- rho v + g; y <- y - eta (v + mu (y - anchor) + d y), the proximal term after the buffer.

    FedProx and FedNova: anchor x, strength mu. pFedMe's inner solver: anchor w_i, strength lambda,
    decay d.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        strength: float,
        momentum: float = 0.0,
        decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, momentum, strength=strength, decay=decay)

    @_unhooked
    def step(self, anchor: Params, active: Scale = 1.0) -> None:
        """One step towards lower loss and towards `anchor`."""
        for group in self.param_groups:
            pairs = zip(group["params"], anchor, strict=True)
            y, towards = zip(*[(p, a) for p, a in pairs if p.grad is not None], strict=True)
            eta = group["lr"] * active
            v = self._direction(y, group["momentum"])
            if group["decay"]:
                pairs = zip(v, y, strict=True)
                v = [a.add(p, alpha=factor(group["decay"], p)) for a, p in pairs]
            if group["strength"]:
                lerp_(y, towards, eta * group["strength"])
            add_(y, v, -eta)


class CorrectedSGD(LocalSGD):
    """y <- y - eta (g + correction), SCAFFOLD's step with correction = c - c_i."""

    @_unhooked
    def step(self, correction: Params, active: Scale = 1.0) -> None:
        """One corrected step."""
        for group in self.param_groups:
            y = group["params"]
            add_([p.grad for p in y], correction, 1.0)
            add_(y, [p.grad for p in y], -group["lr"] * active)
