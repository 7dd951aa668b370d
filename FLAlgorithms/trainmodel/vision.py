"""Convolutional networks of the FedAvg / FedNova / FedProx / SCAFFOLD experiments.

Each takes the shape (channels, height, width) of one image and the number of classes. `norm` is
what follows a convolution: "batch", "group" or "none"; its default is the architecture's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from FLAlgorithms.trainmodel.classifier import Classifier, Dropout, with_loss
from utils.errors import InputError


def _group_norm(channels: int) -> nn.Module:
    """Up to 32 groups of at least two channels each."""
    return nn.GroupNorm(math.gcd(32, channels // 2), channels)


def _no_norm(channels: int) -> nn.Module:
    return nn.Identity()


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": _group_norm,
    "none": _no_norm,
}


class Unfit(InputError):
    """The data are not for this model."""


def images(shape: Sequence[int], smallest: int = 1) -> tuple[int, int, int]:
    """(channels, height, width); raises Unfit for plain features and images too small."""
    if len(shape) != 3:
        raise Unfit(f"needs images, the data has {math.prod(shape)} plain features")
    channels, height, width = shape
    if min(height, width) < smallest:
        size = f"{smallest} x {smallest}"
        raise Unfit(f"needs images of at least {size}, the data has {height} x {width}")
    return channels, height, width


def _conv(before: int, after: int, kernel: int, padding: int, norm: str) -> list[nn.Module]:
    """Convolution, normalisation, ReLU."""
    layers = [nn.Conv2d(before, after, kernel, padding=padding), NORMS[norm](after)]
    return [m for m in layers if not isinstance(m, nn.Identity)] + [nn.ReLU()]


def _linear(*sizes: int) -> list[nn.Module]:
    """Linear layers with a ReLU between."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]


class Features(Classifier):
    """Convolutional layers, then a classifier on their flattened output."""

    def __init__(self, features: list[nn.Module], classifier: list[nn.Module]) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(*classifier)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class LeNet(Features):
    """LeNet-5 with ReLU and max-pooling; 28 x 28 images are padded to LeCun's 32 x 32."""

    def __init__(self, shape: Sequence[int], classes: int, norm: str = "none") -> None:
        channels, height, width = images(shape, 12)
        padding = 2 if min(height, width) < 32 else 0
        sides = [((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width)]
        super().__init__(
            [
                *_conv(channels, 6, 5, padding, norm),
                nn.MaxPool2d(2),
                *_conv(6, 16, 5, 0, norm),
                nn.MaxPool2d(2),
            ],
            _linear(16 * math.prod(sides), 120, 84, classes),
        )


class Cnn3(Features):
    """Three blocks of a 3x3 convolution (32, 64, 128 channels), ReLU and 2x2 max-pooling."""

    def __init__(self, shape: Sequence[int], classes: int, norm: str = "none") -> None:
        channels, height, width = images(shape, 8)
        features: list[nn.Module] = []
        for before, after in ((channels, 32), (32, 64), (64, 128)):
            features += [*_conv(before, after, 3, 1, norm), nn.MaxPool2d(2)]
        super().__init__(features, _linear(128 * (height // 8) * (width // 8), 256, classes))


class AlexCifarNet(Features):
    """Krizhevsky's small network for CIFAR-10, with local response normalisation."""

    def __init__(self, shape: Sequence[int], classes: int, norm: str = "none") -> None:
        channels, height, width = images(shape)

        def pool() -> nn.Module:
            return nn.MaxPool2d(3, stride=2, padding=1)

        def response() -> nn.Module:
            return nn.LocalResponseNorm(4, alpha=0.001 / 9, beta=0.75, k=1.0)

        # Each pooling leaves ceil(side / 2).
        features = 64 * -(-height // 4) * -(-width // 4)
        super().__init__(
            [
                *[*_conv(channels, 64, 5, 2, norm), pool(), response()],
                *[*_conv(64, 64, 5, 2, norm), response(), pool()],
            ],
            _linear(features, 384, 192, classes),
        )


# Convolutions per stage; a stage ends with a pooling. Simonyan, Zisserman, ICLR 2015, table 1.
STAGE_WIDTHS = (64, 128, 256, 512, 512)
VGG_STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


class VGG(Features):
    """VGG with 3x3 convolutions and the classifier 512-512-classes, dropout before its first two.

    Poolings keep a half pixel (`ceil_mode`), so that images of any size from 1 x 1 go through; at
    32 x 32 and below one pixel is left, larger images are averaged to one.
    """

    def __init__(
        self, shape: Sequence[int], classes: int, *, depth: int, norm: str = "none"
    ) -> None:
        channels, _, _ = images(shape)
        features: list[nn.Module] = []
        for width, count in zip(STAGE_WIDTHS, VGG_STAGES[depth], strict=True):
            for _ in range(count):
                features += _conv(channels, width, 3, 1, norm)
                channels = width
            features.append(nn.MaxPool2d(2, ceil_mode=True))
        first, relu, second, relu2, last = _linear(512, 512, 512, classes)
        super().__init__(
            [*features, nn.AdaptiveAvgPool2d(1)],
            [Dropout(0.5, (512,)), first, relu, Dropout(0.5, (512,)), second, relu2, last],
        )
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)


# Residual blocks per stage; from 50 layers on they are bottlenecks. He et al., CVPR 2016, table 1.
RESNET_STAGES = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


def resnet(
    shape: Sequence[int],
    classes: int,
    *,
    depth: int,
    norm: str = "batch",
    pretrained: bool = False,
) -> Classifier:
    """torchvision's ResNet with a 3x3 stem of stride 1 and no pooling behind it, for small images.

    `pretrained`: torchvision's ImageNet weights for all but the stem and the last layer.
    """
    # Importing torchvision takes 2 seconds, which other models need not wait for.
    from torchvision.models import get_model_weights
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    name = f"resnet{depth}"
    channels, _, _ = images(shape)
    if pretrained and norm != "batch":
        raise InputError(f"--pretrained: the weights of {name} need --norm batch, not {norm}")
    block = BasicBlock if depth < 50 else Bottleneck
    stages = list(RESNET_STAGES[depth])
    model = with_loss(ResNet)(block, stages, num_classes=classes, norm_layer=NORMS[norm])
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    if pretrained:
        try:
            weights = get_model_weights(name).DEFAULT.get_state_dict(check_hash=True)
        except (OSError, RuntimeError) as error:  # offline, or a damaged download
            raise InputError(f"--pretrained: no weights of {name} ({error})") from None
        rest = {n: w for n, w in weights.items() if not n.startswith(("conv1.", "fc."))}
        model.load_state_dict(rest, strict=False)
    return model
