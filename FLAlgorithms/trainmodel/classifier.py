"""What all models share: the loss of a classifier, keyed dropout, and which layers keep statistics.

A model is built from the shape of one input and the number of classes, and says with `lockstep`
whether its forward pass is made of Linear layers and elementwise functions alone; such a model
runs on stacked parameters unchanged (see stacked.py).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


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


def with_loss(kind: type[nn.Module]) -> type[Classifier]:
    """The class itself, or one of the same name that takes the rest from Classifier."""
    return kind if issubclass(kind, Classifier) else type(kind.__name__, (kind, Classifier), {})


def copied(model: nn.Module) -> nn.Module:
    """A model of its own with the same values.

    Tensors that layers keep beside their parameters are results of the last pass (the weight of
    torch's older weight_norm), which copy.deepcopy refuses with their graph: it goes without.
    """
    kept = (v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor))
    return copy.deepcopy(model, {id(v): v.detach().clone() for v in kept if not v.is_leaf})


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The layers whose output depends on the whole minibatch."""
    return [m for m in model.modules() if isinstance(m, BATCH_NORMS)]


def stackable(model: nn.Module) -> bool:
    """Whether copies may train side by side: no buffers, nothing that padded rows would change.

    Buffers could carry the block axis through vmap; measured on a CPU (one thread, per user-step,
    10 or 20 users, batches of 20 and 64) that takes 1.2 to 1.9 times as long as one at a time.
    """
    return not batch_norms(model) and next(model.buffers(), None) is None


def own_values(model: nn.Module, bn: str) -> list[Tensor]:
    """What a user does not share: BatchNorm parameters and statistics if `bn` is local.

    Else what differs between users beside the parameters: all buffers.
    """
    if bn == "aggregate":
        return list(model.buffers())
    return [t.detach() for m in batch_norms(model) for t in (*m.parameters(), *m.buffers())]
