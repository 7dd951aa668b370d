"""The block engine's model: copies of a module side by side, parameters (*block, *shape).

`stacked(module, block)` maps inputs (*block, batch, ...) to outputs (*block, batch, ...). Copies do
not interact: the gradient of the sum of their losses holds each one's own gradient in its own row.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Optimizer

from FLAlgorithms.trainmodel.classifier import Classifier, Dropout, copied
from FLAlgorithms.trainmodel.models import Mlp
from utils.params import Scale


class StackedLinear(nn.Module):
    """y = x W^T + b for many layers at once; W stays (*block, out, in): its gradient is contiguous.

    Inputs are (*block, batch, in), or (batch, in) where all layers see the same ones. Inside a
    training step all copies lie along one axis: inputs (copies, batch, in), outputs
    (copies, out, batch).
    """

    def __init__(self, linear: nn.Linear, block: tuple) -> None:
        super().__init__()
        self.block = block
        self.weight = _stack(linear.weight, block)
        self.bias = None if linear.bias is None else _stack(linear.bias, block)
        self.fixed: FixedInput | None = None  # stands in for the weight during its steps

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            bias = None if self.bias is None else self.bias.flatten()
            out = F.linear(x, self.weight.flatten(0, -2), bias)
            return out.unflatten(1, (*self.block, -1)).movedim(0, -2)
        return self.outputs(x.flatten(0, -3)).mT.unflatten(0, self.block)

    def outputs(self, x: Tensor) -> Tensor:
        """(copies, batch, in) -> (copies, out, batch)."""
        bias = None if self.bias is None else self.bias.flatten(0, -2).unsqueeze(2)
        if self.fixed is not None:
            product = self.fixed.product()
            return product if bias is None else product.add_(bias)
        if bias is None:
            return torch.bmm(self.weight.flatten(0, -3), x.mT)
        return torch.baddbmm(bias, self.weight.flatten(0, -3), x.mT)

    def take(self, d: Tensor, x: Tensor) -> None:
        """Leave the gradients that follow from the output's, d (copies, out, batch), in `.grad`."""
        if self.bias is not None:
            torch.sum(d, -1, out=_gradient(self.bias).flatten(0, -2))
        if self.fixed is not None:
            self.fixed.move(d)
        else:
            torch.bmm(d, x, out=_gradient(self.weight).flatten(0, -3))


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
        layer.fixed, layer.weight.grad = self, None

    def product(self) -> Tensor:
        """X W_k^T, transposed: (copies, out, batch)."""
        if self.anchor is None:
            known = self.start * (self.m + self.s)
        else:
            known = self.start * self.m + self.end * self.s
        return known.baddbmm_(self.a, self.gram, alpha=-1)

    def move(self, d: Tensor) -> None:
        """Take the step that the output's gradient asks for."""
        self.a.mul_(self.keep).add_(d * self.eta)
        self.m, self.s = self.keep * self.m, self.keep * self.s + self.pull

    def finish(self) -> None:
        """Write the layer's weight."""
        self.layer.fixed = None
        if self.anchor is None:
            self.weight.mul_(self.m + self.s)
        else:
            self.weight.mul_(self.m).add_(self.anchor * self.s)
        self.weight.baddbmm_(self.a, self.x, alpha=-1)


@torch.no_grad()
def mlp_gradients(model: Mlp, x: Tensor, y: Tensor, weight: Tensor) -> None:
    """The gradient of the copies' weighted cross-entropy in closed form, into `.grad`.

    x (*block, batch, in), y and weight (*block, batch). The output's gradient is
    (softmax - onehot) weight, and d_in = (W^T d_out) where the ReLU was open. About a third of
    autograd's time per step for 20 users of MNIST mclr on a CPU.
    """
    layers = model.layers
    inputs = [x.flatten(0, -3)]
    for layer in layers[:-1]:
        inputs.append(layer.outputs(inputs[-1]).relu_().mT)
    weight = weight.flatten(0, -2).unsqueeze(1)
    d = layers[-1].outputs(inputs[-1]).softmax(1).mul_(weight)
    d.scatter_add_(1, y.flatten(0, -2).unsqueeze(1), -weight)
    for i in reversed(range(len(layers))):
        layers[i].take(d, inputs[i])
        if i:
            d = torch.bmm(layers[i].weight.flatten(0, -3).mT, d).mul_(inputs[i].mT > 0)


def _gradient(p: Tensor) -> Tensor:
    """The tensor of a parameter's gradient, made once and written again and again."""
    if p.grad is None:
        p.grad = torch.empty_like(p)
    return p.grad


class VmapModel(nn.Module):
    """Any module without buffers, by `torch.func.vmap` over its stacked parameters."""

    def __init__(self, module: Classifier, block: tuple) -> None:
        super().__init__()
        object.__setattr__(self, "one", copied(module))  # not a child: no parameters of ours
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
    copies = copied(module)
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
