"""The block engine's model: copies of a module side by side, parameters (*block, *shape).

`stacked(module, block)` maps inputs (*block, batch, ...) to outputs (*block, batch, ...). Copies do
not interact: the gradient of the sum of their losses holds each one's own gradient in its own row.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Optimizer

from FLAlgorithms.trainmodel.models import Classifier, Dropout
from utils.params import Scale


class StackedLinear(nn.Module):
    """y = x W^T + b for many layers at once; W stays (*block, out, in): its gradient is contiguous.

    Inputs are (*block, batch, in), or (batch, in) where all layers see the same ones.
    """

    def __init__(self, linear: nn.Linear, block: tuple) -> None:
        super().__init__()
        self.block = block
        self.weight = _stack(linear.weight, block)
        self.bias = None if linear.bias is None else _stack(linear.bias, block)
        self.product: Tensor | None = None  # x W^T, while FixedInput knows it

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias
        if self.product is not None:
            return (self.product if bias is None else self.product + bias.unsqueeze(-1)).mT
        if x.dim() == 2:
            out = F.linear(x, self.weight.flatten(0, -2), None if bias is None else bias.flatten())
            return out.unflatten(1, (*self.block, -1)).movedim(0, -2)
        weight, x = self.weight.flatten(0, -3), x.flatten(0, -3).mT
        if bias is None:
            out = torch.bmm(weight, x)
        else:
            out = torch.baddbmm(bias.flatten(0, -2).unsqueeze(2), weight, x)
        return out.mT.unflatten(0, self.block)


class FixedInput:
    """Proximal steps of a first layer on ONE minibatch X, through its Gram matrix: exact.

    theta <- keep theta + pull anchor - eta g, with keep = 1 - eta (lambda + d), pull = eta lambda
    and the layer's gradient g = D^T X, D that of its output, gives after k steps

        W_k = m W_0 + s anchor - A^T X,   m <- keep m,  s <- keep s + pull,  A <- keep A + eta D

    so that the output X W_k^T needs X only through X W_0^T, X anchor^T and X X^T.
    """

    def __init__(
        self,
        layer: StackedLinear,
        x: Tensor,
        anchor: Tensor | None,
        solver: Optimizer,
        active: Scale,
    ) -> None:
        """`solver`: a ProximalSGD without momentum; x (*block, batch, in).

        `anchor` None: the layer's weight is at the anchor now.
        """
        (group,) = solver.param_groups
        eta = group["lr"] * active
        if isinstance(eta, Tensor):
            eta = eta.reshape(-1, 1, 1)
        self.eta, self.pull = eta, eta * group["strength"]
        self.keep = 1 - self.pull - eta * group["decay"]
        self.layer, self.x = layer, x.flatten(0, -3)
        self.weight = layer.weight.detach().flatten(0, -3)
        self.anchor = None if anchor is None else anchor.flatten(0, -3)
        self.start = torch.bmm(self.weight, self.x.mT)
        self.end = self.start if anchor is None else torch.bmm(self.anchor, self.x.mT)
        self.gram = torch.bmm(self.x, self.x.mT)
        self.a = torch.zeros_like(self.start)  # A^T, (copies, out, batch)
        self.m, self.s = 1.0, 0.0

    @torch.no_grad()
    def show(self) -> None:
        """Give the layer its output for the current step, as a leaf of the graph."""
        known = self.start * (self.m + self.s)
        if self.anchor is not None:
            known = self.start * self.m + self.end * self.s
        self.leaf = known.baddbmm_(self.a, self.gram, alpha=-1).requires_grad_()
        with torch.enable_grad():
            self.layer.product = self.leaf.unflatten(0, self.layer.block)

    @torch.no_grad()
    def move(self) -> None:
        """Take the step that the output's gradient asks for."""
        self.a.mul_(self.keep).add_(self.leaf.grad * self.eta)
        self.m, self.s = self.keep * self.m, self.keep * self.s + self.pull

    @torch.no_grad()
    def finish(self) -> None:
        """Write the layer's weight."""
        self.layer.product = None
        if self.anchor is None:
            self.weight.mul_(self.m + self.s)
        else:
            self.weight.mul_(self.m).add_(self.anchor * self.s)
        self.weight.baddbmm_(self.a, self.x, alpha=-1)


class VmapModel(nn.Module):
    """Any module without buffers, by `torch.func.vmap` over its stacked parameters."""

    def __init__(self, module: Classifier, block: tuple) -> None:
        super().__init__()
        object.__setattr__(self, "one", copy.deepcopy(module))  # not a child: no parameters of ours
        self.block = block
        self.names = [name for name, _ in module.named_parameters()]
        self.stack = nn.ParameterList(_stack(p, block) for p in module.parameters())
        self.loss = self.one.loss
        self.dropouts = [m for m in self.one.modules() if isinstance(m, Dropout)]

    def train(self, mode: bool = True) -> VmapModel:
        self.one.train(mode)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        masks = tuple(d.mask for d in self.dropouts) if self.training else ()

        def one_copy(params: tuple[Tensor, ...], x: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
            for layer, mask in zip(self.dropouts, masks, strict=False):
                layer.mask = mask
            return functional_call(self.one, dict(zip(self.names, params, strict=True)), (x,))

        last = len(self.block) - 1
        stack = tuple(p.flatten(0, last) for p in self.stack)
        rows = tuple(mask.flatten(0, last) for mask in masks)
        out = vmap(one_copy)(stack, x.flatten(0, last), rows)
        for layer, mask in zip(self.dropouts, masks, strict=False):
            layer.mask = mask
        return out.unflatten(0, self.block)


def stacked(module: Classifier, block: tuple) -> nn.Module:
    """Copies of `module` that train in lockstep, parameters in the module's own order."""
    if not module.lockstep:
        return VmapModel(module, block)
    copies = copy.deepcopy(module)
    for name, child in list(copies.named_modules()):
        if isinstance(child, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            setattr(copies.get_submodule(parent), leaf, StackedLinear(child, block))
    return copies


def count_parameters(module: nn.Module) -> int:
    """How many numbers one copy trains."""
    return sum(math.prod(p.shape) for p in module.parameters())


def _stack(p: Tensor, block: tuple) -> nn.Parameter:
    return nn.Parameter(p.detach().expand(*block, *p.shape).clone())
