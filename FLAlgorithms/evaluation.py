"""Accuracy and loss of one model over users' data; touches no model, buffer or random state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from FLAlgorithms.trainmodel.classifier import Classifier
from FLAlgorithms.trainmodel.stacked import stacked
from utils.batches import FederatedData, chunks
from utils.params import Params, clone
from utils.partition import PARTS

Key = tuple[int, str]

# Rows of one forward pass, measured: vectors like large products, images need small activations.
FLAT_CHUNK, IMAGE_CHUNK = 8192, 64


@dataclass(frozen=True)
class Metrics:
    """Per user and part: how many samples are right, and the summed task loss, (N,) float64.

    A global model that is judged by the official test rows has one entry for its test part.
    """

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


class Evaluator:
    """Measures models on users' data, several in one pass.

    A model is the list of its parameters (*shape), followed by its buffers.
    """

    def __init__(self, model: Classifier, data: FederatedData) -> None:
        self.model, self.data = model, data
        self.names = [n for n, _ in (*model.named_parameters(), *model.named_buffers())]
        self._stacks: dict[int, nn.Module] = {}

    @torch.no_grad()
    def sums(self, models: Sequence[Params], part: str, users: slice = slice(None)) -> Tensor:
        """Per user and model, right samples and summed task loss: (users, models, 2) float64."""
        data = self.data
        forwards = self._forwards(models)
        rows = data.part(part, users)
        shape = (rows.stop - rows.start, len(models), 2)
        each = torch.empty(shape, dtype=torch.float64, device=data.x.device)
        for piece in chunks(rows, FLAT_CHUNK if data.x.dim() == 2 else IMAGE_CHUNK):
            x, y = data.x[piece], data.y[piece]
            out = each[piece.start - rows.start : piece.stop - rows.start]
            first = 0
            for forward, count in forwards:
                logits = forward(x).unflatten(0, (-1, len(y)))
                labels = y.expand(count, -1)
                out[:, first : first + count, 0] = self.model.correct(logits, labels).mT
                out[:, first : first + count, 1] = self.model.loss(logits, labels).mT
                first += count
        sizes = data.sizes[part][users]
        if len(sizes) == 1:
            return each.sum(0, keepdim=True)
        lengths = torch.as_tensor(sizes, device=each.device)
        return torch.segment_reduce(each, "sum", lengths=lengths, unsafe=True, initial=0.0)

    def _forwards(self, models: Sequence[Params]) -> list[tuple[Callable[[Tensor], Tensor], int]]:
        """Functions x -> (models * batch, ...), and how many models each stands for."""
        model = self.model
        if model.lockstep and len(models) > 1:
            count = len(models)
            if count not in self._stacks:
                self._stacks[count] = stacked(model, (count,)).eval()
            together = [torch.stack(list(same)) for same in zip(*models, strict=True)]
            named = dict(zip(self.names, together, strict=True))
            module = self._stacks[count]
            return [(lambda x: functional_call(module, named, (x,)).flatten(0, 1), count)]
        # Copies, since a model of the user's own may write into its buffers whatever the mode.
        named = (dict(zip(self.names, clone(p), strict=True)) for p in models)
        return [(partial(self._alone, own), 1) for own in named]

    def _alone(self, named: dict[str, Tensor], x: Tensor) -> Tensor:
        training = self.model.training
        out = functional_call(self.model.eval(), named, (x,))
        self.model.train(training)
        return out


class Tally:
    """Collects the sums of many models, user by user, and hands them over once.

    A model is known by a key, (repetition's row, name).
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.found: list[tuple[int, str, list[Key], Tensor]] = []

    def add(self, user: int, models: dict[Key, Params], test_only: Sequence[str] = ()) -> None:
        """Measure models on one user's data; those called `test_only` not on the train part.

        The global model, called "", not on the test part where the official rows judge it.
        """
        one = slice(user, user + 1)
        judged = self.evaluator.data.judging["test"] != "test"
        for part, without in zip(PARTS, (test_only, [""] if judged else []), strict=True):
            wanted = {k: m for k, m in models.items() if k[1] not in without}
            if wanted:
                sums = self.evaluator.sums(list(wanted.values()), part, one)
                self.found.append((user, part, list(wanted), sums[0]))

    def add_everybody(self, models: dict[Key, Params], parts: Sequence[str] = PARTS) -> None:
        """Measure global models on everybody's data, or on the official test rows."""
        for part in parts:
            sums = self.evaluator.sums(list(models.values()), self.evaluator.data.judging[part])
            self.found.append((slice(None), part, list(models), sums.movedim(1, 0).contiguous()))

    def metrics(self) -> dict[Key, Metrics]:
        """All sums by model; the device is waited for here, once."""
        data = self.evaluator.data
        keys = dict.fromkeys(key for _, _, keys, _ in self.found for key in keys)
        sizes = {key: data.sizes if key[1] else data.global_sizes for key in keys}
        sums = {k: {part: np.zeros((len(s[part]), 2)) for part in PARTS} for k, s in sizes.items()}
        values = torch.cat([v.reshape(-1) for *_, v in self.found]).cpu().numpy()
        start = 0
        for users, part, keys, value in self.found:
            here = values[start : start + value.numel()].reshape(value.shape)
            start += value.numel()
            for key, row in zip(keys, here, strict=True):
                sums[key][part][users] = row
        return {
            key: Metrics(
                correct={p: s[:, 0] for p, s in parts.items()},
                loss={p: s[:, 1] for p, s in parts.items()},
                sizes=sizes[key],
            )
            for key, parts in sums.items()
        }
