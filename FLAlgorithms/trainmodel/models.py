"""The models of the personalised experiments, and the registry of all."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from FLAlgorithms.trainmodel.classifier import Classifier, Dropout
from FLAlgorithms.trainmodel.custom import build, is_custom, label, load_class
from FLAlgorithms.trainmodel.vision import (
    RESNET_STAGES,
    VGG,
    VGG_STAGES,
    AlexCifarNet,
    Cnn3,
    LeNet,
    Unfit,
    images,
    resnet,
)
from utils.errors import InputError


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
    make, smallest = (CnnMnist, 5) if images(shape)[0] == 1 else (CnnCifar, 16)
    images(shape, smallest)
    return make(shape, classes)


MODELS: dict[str, Callable[..., Classifier]] = {
    "mclr": _mclr,
    "dnn": _dnn,
    "cnn": _cnn,
    "lenet": LeNet,
    "cnn3": Cnn3,
    "alexcifar": AlexCifarNet,
    **{f"vgg{n}": partial(VGG, depth=n) for n in VGG_STAGES},
    **{f"vgg{n}_bn": partial(VGG, depth=n, norm="batch") for n in VGG_STAGES},
    **{f"resnet{n}": partial(resnet, depth=n) for n in RESNET_STAGES},
}
# What the YAML files of the FedAvg / FedNova / FedProx / SCAFFOLD collection call them.
ALIASES = {
    "LeNet": "lenet",
    "CNN": "cnn3",
    "AlexCifarNet": "alexcifar",
    **{name.upper().replace("_BN", "_bn"): name for name in MODELS if name.startswith("vgg")},
    **{name.replace("resnet", "ResNet"): name for name in MODELS if name.startswith("resnet")},
}


def usual_norm(name: str) -> str:
    """What follows the convolutions of a model unless `--norm` says otherwise."""
    norm = _takes(name).get("norm")
    return "none" if norm is None else norm.default


def build_model(
    name: str,
    shape: Sequence[int],
    classes: int,
    seed: int,
    *,
    norm: str | None = None,
    pretrained: bool = False,
) -> Classifier:
    """The model with the initial parameters that torch's CPU generator gives for `seed`.

    Raises InputError where the model does not fit the data or takes no such option.
    """
    asked: dict[str, object] = {}
    if norm not in (None, usual_norm(name)):
        asked["norm"] = norm
    if pretrained:
        asked["pretrained"] = True
    for option, value in asked.items():
        if option not in _takes(name):
            able = [other for other in MODELS if option in _takes(other)]
            given = f"--{option}" if value is True else f"--{option} {value}"
            raise InputError(f"{given}: not for {label(name)}, only for {', '.join(able)}")
    make = partial(build, name) if is_custom(name) else MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return make(tuple(shape), classes, **asked)
        except Unfit as error:
            raise InputError(f"--model {label(name)}: {error}") from None


def _takes(name: str) -> dict[str, inspect.Parameter]:
    make = load_class(name) if is_custom(name) else MODELS[name]
    return dict(inspect.signature(make).parameters)
