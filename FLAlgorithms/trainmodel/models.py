"""The models: plain modules that return logits; each class carries its loss.

A model is built from the shape of one input and the number of classes, and says with `lockstep`
whether its forward pass is made of Linear layers and elementwise functions alone; such a model
runs on stacked parameters unchanged (see stacked.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.errors import InputError


class Classifier(nn.Module):
    """Cross-entropy and hits for logits (..., classes) and labels (...)."""

    lockstep = False
    flat = False  # takes vectors: the data are flattened once, when read

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of every sample, shape of y."""
        # Over the second last axis: 20 users' softmax takes 10 us that way on a CPU, else 80 us.
        log_p = logits.mT.log_softmax(-2)
        return -log_p.gather(-2, y.unsqueeze(-2)).squeeze(-2)

    def correct(self, logits: Tensor, y: Tensor) -> Tensor:
        """1 where the largest logit is the label's, else 0, shape of y."""
        return logits.argmax(-1) == y


class Mlp(Classifier):
    """Linear layers fc1, fc2, ... with a ReLU between: mclr has one, dnn two."""

    lockstep = flat = True

    def __init__(self, *sizes: int) -> None:
        """`sizes`: features, hidden widths, classes."""
        super().__init__()
        for i, (before, after) in enumerate(itertools.pairwise(sizes), 1):
            setattr(self, f"fc{i}", nn.Linear(before, after))

    @property
    def layers(self) -> list[nn.Module]:
        """The linear layers in order."""
        return list(self._modules.values())

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = layer(x).relu_()
        return last(x)


class Dropout(nn.Module):
    """Dropout whose mask belongs to the minibatch: it is set from outside before the pass.

    A user's mask then depends on (seed, repetition, round, user, step) alone, not on who else
    trains beside it.
    """

    def __init__(self, p: float, shape: Sequence[int]) -> None:
        super().__init__()
        self.p, self.shape = p, tuple(shape)
        self.mask: Tensor | None = None

    def draw(self, width: int, rows: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """A mask (rows, *shape): 0 with probability p, else 1 / (1 - p).

        `width` rows are drawn, whatever the minibatch holds of them, so that padding and short
        minibatches change no mask.
        """
        u = torch.rand((width, *self.shape), generator=generator, device=like.device)
        mask = like.new_zeros((rows, *self.shape))
        mask[:width] = (u[:rows] >= self.p).to(like.dtype) / (1 - self.p)
        return mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask if self.training else x


class CnnMnist(Classifier):
    """Two 2x2 convolutions with dropout for one-channel images."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 16, 2)
        self.pool1 = nn.MaxPool2d(2, stride=1)
        self.dropout1 = Dropout(0.25, (16, height - 2, width - 2))
        self.conv2 = nn.Conv2d(16, 32, 2)
        self.pool2 = nn.MaxPool2d(2, stride=1)
        features = 32 * (height - 4) * (width - 4)
        self.dropout2 = Dropout(0.5, (features,))
        self.fc1 = nn.Linear(features, 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout1(self.pool1(F.relu(self.conv1(x))))
        x = self.pool2(F.relu(self.conv2(x))).flatten(1)
        return self.fc2(F.relu(self.fc1(self.dropout2(x))))


class CnnCifar(Classifier):
    """Two 5x5 convolutions and three linear layers for colour images."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        side = [((s - 4) // 2 - 4) // 2 for s in (height, width)]
        self.fc1 = nn.Linear(16 * side[0] * side[1], 120)
        self.fc2 = nn.Linear(120, 100)
        self.fc3 = nn.Linear(100, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def _mclr(shape: Sequence[int], classes: int) -> Classifier:
    return Mlp(math.prod(shape), classes)


def _dnn(shape: Sequence[int], classes: int) -> Classifier:
    return Mlp(math.prod(shape), 100 if len(shape) == 3 else 20, classes)


def _cnn(shape: Sequence[int], classes: int) -> Classifier:
    if len(shape) != 3:
        raise InputError(f"--model cnn: needs images, the data has {shape[0]} plain features")
    if shape[0] == 1:
        return CnnMnist(shape, classes)
    return CnnCifar(shape, classes)


MODELS: dict[str, Callable[[Sequence[int], int], Classifier]] = {
    "mclr": _mclr,
    "dnn": _dnn,
    "cnn": _cnn,
}


def build_model(name: str, shape: Sequence[int], classes: int, seed: int) -> Classifier:
    """The model with the initial parameters that torch's CPU generator gives for `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](shape, classes)
