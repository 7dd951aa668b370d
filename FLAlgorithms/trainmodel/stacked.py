"""The block engine's model: C copies of a module side by side, parameters (C, *shape).

`stacked(module, C)` maps inputs (C, batch, ...) to outputs (C, batch, ...). Users do not interact:
the gradient of the sum of the users' losses holds each user's own gradient in its own row.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from FLAlgorithms.trainmodel.models import Classifier, Dropout


class StackedLinear(nn.Module):
    """y = x W^T + b for C layers at once; W stays (C, out, in), so its gradient is contiguous."""

    def __init__(self, linear: nn.Linear, size: int) -> None:
        super().__init__()
        self.weight = _stack(linear.weight, size)
        self.bias = None if linear.bias is None else _stack(linear.bias, size)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.bmm(self.weight, x.transpose(1, 2)).transpose(1, 2)
        return torch.baddbmm(self.bias.unsqueeze(2), self.weight, x.transpose(1, 2)).transpose(1, 2)


class VmapModel(nn.Module):
    """Any module without buffers, by `torch.func.vmap` over its stacked parameters."""

    def __init__(self, module: Classifier, size: int) -> None:
        super().__init__()
        object.__setattr__(self, "one", copy.deepcopy(module))  # not a child: no parameters of ours
        self.names = [name for name, _ in module.named_parameters()]
        self.stack = nn.ParameterList(_stack(p, size) for p in module.parameters())
        self.loss = self.one.loss
        self.dropouts = [m for m in self.one.modules() if isinstance(m, Dropout)]

    def train(self, mode: bool = True) -> VmapModel:
        self.one.train(mode)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        masks = tuple(d.mask for d in self.dropouts) if self.training else ()

        def one_user(params: tuple[Tensor, ...], x: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
            for layer, mask in zip(self.dropouts, masks, strict=False):
                layer.mask = mask
            return functional_call(self.one, dict(zip(self.names, params, strict=True)), (x,))

        out = vmap(one_user)(tuple(self.stack), x, masks)
        for layer, mask in zip(self.dropouts, masks, strict=False):
            layer.mask = mask
        return out


def stacked(module: Classifier, size: int) -> nn.Module:
    """`size` copies of `module` that train in lockstep, parameters in the module's own order."""
    if not module.lockstep:
        return VmapModel(module, size)
    copies = copy.deepcopy(module)
    for name, child in list(copies.named_modules()):
        if isinstance(child, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            setattr(copies.get_submodule(parent), leaf, StackedLinear(child, size))
    return copies


def _stack(p: Tensor, size: int) -> nn.Parameter:
    return nn.Parameter(p.detach().expand(size, *p.shape).clone())
