"""Accuracy and loss of one model over users' data; touches no model, buffer or random state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from FLAlgorithms.trainmodel.models import Classifier
from utils.batches import PARTS, FederatedData, chunks
from utils.params import Params

# Rows of one forward pass, measured: vectors like large products, images need small activations.
FLAT_CHUNK, IMAGE_CHUNK = 8192, 512


@dataclass(frozen=True)
class Metrics:
    """Per user and part: how many samples are right, and the summed task loss, (N,) float64."""

    correct: dict[str, np.ndarray]
    loss: dict[str, np.ndarray]
    sizes: dict[str, np.ndarray]

    def accuracy(self, part: str) -> float:
        """Share of right samples over all users (sample-weighted); nan without samples."""
        return _ratio(self.correct[part].sum(), self.sizes[part].sum())

    def mean_loss(self, part: str) -> float:
        """Mean task loss over all users' samples."""
        return _ratio(self.loss[part].sum(), self.sizes[part].sum())

    def user_accuracy(self, part: str) -> np.ndarray:
        """(N,) accuracy of every user on its own data; nan without samples."""
        sizes = self.sizes[part]
        return np.divide(
            self.correct[part], sizes, out=np.full(len(sizes), np.nan), where=sizes > 0
        )


def _ratio(a: float, b: float) -> float:
    return float(a / b) if b else float("nan")


@torch.no_grad()
def measure(
    model: Classifier, params: Params, data: FederatedData, part: str, users: slice = slice(None)
) -> Tensor:
    """Sums over the part of each of some consecutive users: (users, 2) right samples, task loss.

    Sums are float64; `params` (*shape) replace the model's own for the pass.
    """
    training = model.training
    model.eval()
    named = dict(zip((n for n, _ in model.named_parameters()), params, strict=True))
    rows = data.part(part, users)
    each = torch.empty((rows.stop - rows.start, 2), dtype=torch.float64, device=data.x.device)
    for piece in chunks(rows, FLAT_CHUNK if data.x.dim() == 2 else IMAGE_CHUNK):
        logits, y = functional_call(model, named, (data.x[piece],)), data.y[piece]
        out = each[piece.start - rows.start : piece.stop - rows.start]
        out[:, 0] = model.correct(logits, y)
        out[:, 1] = model.loss(logits, y)
    model.train(training)
    sizes = data.sizes[part][users]
    if len(sizes) == 1:
        return each.sum(0, keepdim=True)
    lengths = torch.as_tensor(sizes, device=each.device)
    return torch.segment_reduce(each, "sum", lengths=lengths, unsafe=True, initial=0.0)


class Tally:
    """Collects the sums of users' own models, block by block, and hands them over once."""

    def __init__(self, data: FederatedData, parts: tuple[str, ...] = PARTS) -> None:
        self.data, self.parts, self.found = data, parts, []

    def add(self, model: Classifier, params: Params, ids: list[int], block: tuple) -> None:
        """Measure each user's model (row of (*block, *shape) parameters) on its own data."""
        for row, user in enumerate(ids):
            mine = [p[row] for p in params] if block else params
            one = slice(user, user + 1)
            for part in self.parts:
                self.found.append((user, part, measure(model, mine, self.data, part, one)))

    def metrics(self) -> Metrics:
        """All sums; the device is waited for here, once."""
        sums = {part: np.zeros((self.data.num_users, 2)) for part in self.parts}
        if self.found:
            values = torch.cat([v for _, _, v in self.found]).cpu().numpy()
            for (user, part, _), value in zip(self.found, values, strict=True):
                sums[part][user] = value
        return to_metrics(sums, self.data)


def to_metrics(sums: dict[str, np.ndarray], data: FederatedData) -> Metrics:
    """Per part sums (N, 2) as Metrics."""
    return Metrics(
        correct={p: s[:, 0] for p, s in sums.items()},
        loss={p: s[:, 1] for p, s in sums.items()},
        sizes={p: data.sizes[p] for p in sums},
    )


def measure_all(model: Classifier, params: Params, data: FederatedData) -> Metrics:
    """One model over every user's train and test part."""
    sums = {part: measure(model, params, data, part).cpu().numpy() for part in PARTS}
    return to_metrics(sums, data)
