"""What can be known of a model before the first round: refuse in one line instead of crashing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from FLAlgorithms.trainmodel.classifier import Classifier, Dropout, batch_norms, copied
from FLAlgorithms.trainmodel.custom import label, told
from FLAlgorithms.trainmodel.stacked import stacked
from utils.errors import InputError


def check_custom(model: Classifier, name: str, shape: Sequence[int], classes: int) -> None:
    """Try a model of the user's own on two samples of zeros; the model is spent afterwards.

    Raises InputError where it fails, gives no logits, draws from torch's own generator, cannot be
    copied, has parameters that get no gradient or no size yet, or one layer under two names.
    """
    like, short = next(model.parameters(), None), label(name)
    if like is None:
        raise InputError(f"--model {short}: has no parameters")
    for parameter, p in model.named_parameters():
        if is_lazy(p):
            raise InputError(f"--model {short}: its parameter {parameter} has no size yet (lazy)")
    seen: dict[nn.Module, str] = {}
    for place, layer in model.named_modules(remove_duplicate=False):
        first = seen.setdefault(layer, place)
        # torch's functional_call, which evaluates, gives such a layer the wrong tensors back.
        if first != place and [*layer.parameters(), *layer.buffers()]:
            raise InputError(
                f"--model {short}: {place} and {first} are one layer; make two, and tie their "
                f"weights if they are to be the same ({place}.weight = {first}.weight)"
            )
    x, rng = like.new_zeros((2, *shape)), torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, Dropout):
            layer.mask = layer.draw(2, 2, rng, like)
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        model.eval()(x)
        logits = model.train()(x)
        drew = not torch.equal(before, torch.get_rng_state())
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, classes):
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InputError(
            f"--model {short}: gives {found} for 2 samples, expected logits (2, {classes})"
        )
    try:
        copied(model)
    except Exception as error:  # locks, files, graphs: every kind of object refuses in its own way
        raise InputError(
            f"--model {short}: cannot be copied, so users cannot train on copies of it ({error})"
        ) from error
    if drew:
        raise InputError(
            f"--model {short}: draws random numbers when it runs; the Dropout(p, shape) of "
            "FLAlgorithms.trainmodel.classifier has repeatable masks"
        )
    with told(name, "in its backward pass"):
        model.loss(logits, torch.zeros(2, dtype=torch.int64)).sum().backward()
    for parameter, p in model.named_parameters():
        if p.grad is None:
            raise InputError(f"--model {short}: its parameter {parameter} gets no gradient")


def check_stacking(model: Classifier, name: str, shape: Sequence[int]) -> None:
    """Try two copies of a custom model side by side; raises InputError."""
    x = next(model.parameters()).new_zeros((2, 2, *shape))
    try:
        stacked(model, (2,)).eval()(x)
    except Exception as error:  # torch's transforms refuse in many ways
        raise InputError(
            f"--model {label(name)}: its copies do not run side by side, "
            f"use --block_size 0 and --lockstep no ({error})"
        ) from error


def takes_single_samples(model: Classifier, shape: Sequence[int]) -> bool:
    """Whether its BatchNorm layers can train on a minibatch of one sample."""
    model.eval()
    for layer in batch_norms(model):
        layer.train()
    try:
        model(next(model.parameters()).new_zeros((1, *shape)))
    except (ValueError, InputError):  # torch's own, or told by a custom model
        return False
    return True
