"""Lists of tensors (*block, *shape): elementwise helpers, and the one place where users meet.

`block` is () for one user and (C,) for C users in lockstep. A scale `t` is a number or a tensor of
shape `block`, one number per user.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Params = Sequence[Tensor]
Scale = float | Tensor


def per_user(v: Tensor, like: Tensor) -> Tensor:
    """Reshape numbers of shape `block` so that they broadcast over a parameter (*block, *shape)."""
    return v.reshape(v.shape + (1,) * (like.dim() - v.dim()))


def factor(t: float, like: Tensor) -> float:
    """A number as a type holds it: infinite beyond its range, where torch would raise."""
    return t if abs(t) <= torch.finfo(like.dtype).max else math.copysign(math.inf, t)


def clone(params: Iterable[Tensor]) -> list[Tensor]:
    """Copies with storage of their own, outside the graph."""
    return [p.detach().clone() for p in params]


def zeros_like(params: Iterable[Tensor]) -> list[Tensor]:
    """Zeros of the same shapes."""
    return [torch.zeros_like(p, requires_grad=False) for p in params]


@torch.no_grad()
def assign_(dst: Params, src: Params, active: Scale = 1.0) -> None:
    """dst <- src, in the rows where `active` is 1; src may lack the block axes (a broadcast)."""
    for d, s in zip(dst, src, strict=True):
        if isinstance(active, Tensor):
            torch.where(per_user(active, d) > 0, s, d, out=d)
        else:
            d.copy_(s)


@torch.no_grad()
def add_(dst: Params, src: Params, t: Scale) -> None:
    """dst <- dst + t src."""
    for d, s in zip(dst, src, strict=True):
        if isinstance(t, Tensor):
            d.addcmul_(s, per_user(t, d))
        else:
            d.add_(s, alpha=factor(t, d))


@torch.no_grad()
def scale_(dst: Params, t: float) -> None:
    """dst <- t dst."""
    for d in dst:
        d.mul_(t)


@torch.no_grad()
def lerp_(dst: Params, src: Params, t: Scale) -> None:
    """dst <- dst + t (src - dst); exactly src at t = 1, exactly dst at t = 0; t may exceed 1."""
    for d, s in zip(dst, src, strict=True):
        d.lerp_(s, per_user(t, d) if isinstance(t, Tensor) else factor(t, d))


@torch.no_grad()
def combine(a: Params, b: Params, scale: Scale = 1.0) -> list[Tensor]:
    """scale (a - b)."""
    if isinstance(scale, Tensor):
        return [(x - y) * per_user(scale, y) for x, y in zip(a, b, strict=True)]
    return [(x - y) * scale for x, y in zip(a, b, strict=True)]


@torch.no_grad()
def norm(params: Params, block: tuple) -> Tensor:
    """Each user's L2 norm over all the tensors, shape `block`."""
    squares = [p.detach().square().flatten(len(block)).sum(-1) for p in params]
    return torch.stack(squares).sum(0).sqrt()


@torch.no_grad()
def clip_(params: Params, limit: float, block: tuple) -> None:
    """Shorten each user's tensors to the L2 norm `limit`, all by one factor, where it is longer."""
    length = norm(params, block)
    shrink = torch.where(length > limit, limit / length, 1.0)
    for p in params:
        p.mul_(per_user(shrink, p))


class WeightedMean:
    """sum_i weight_i p_i / sum_i weight_i over users that arrive one block at a time.

    Sums run over the last block axis only: (*repetitions, C, *shape) -> (*repetitions, *shape).
    """

    def __init__(self) -> None:
        self.total: list[Tensor] = []
        self.weight: Tensor | None = None

    @torch.no_grad()
    def add(self, weight: Tensor, params: Params) -> None:
        """Add a block: weights of shape `block`, parameters (*block, *shape)."""
        parts = [_weighted_sum(weight, p) for p in params]
        weight = weight.sum(-1) if weight.dim() else weight
        if self.weight is None:
            self.total, self.weight = parts, weight
        else:
            self.total = [t.add_(p) for t, p in zip(self.total, parts, strict=True)]
            self.weight = self.weight + weight

    def sum(self, like: Params) -> list[Tensor]:
        """The weighted sum; zeros like `like` where nothing was added."""
        return self.total or zeros_like(like)

    @torch.no_grad()
    def value(self, default: Params) -> list[Tensor]:
        """The mean; `default` where nothing was added or the total weight is zero."""
        if self.weight is None:
            return clone(default)
        some = self.weight > 0
        safe = torch.where(some, self.weight, 1.0)
        return [
            torch.where(per_user(some, t), t / per_user(safe, t), d)
            for t, d in zip(self.total, default, strict=True)
        ]


def _weighted_sum(weight: Tensor, p: Tensor) -> Tensor:
    if not weight.dim():
        return weight * p.detach()
    flat = p.detach().reshape(*weight.shape, -1)
    total = (weight.unsqueeze(-2) @ flat).squeeze(-2)
    return total.reshape(weight.shape[:-1] + p.shape[weight.dim() :])
