"""Small federations through the product's own Server and User classes, float64."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import main
from FLAlgorithms.servers.serverbase import Server
from FLAlgorithms.trainmodel.models import Classifier, build_model
from utils.batches import FederatedData
from utils.config import Config


class Quadratic(Classifier):
    """One parameter w; a sample (a, b) has the loss a/2 (w - b)^2."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :1].sqrt() * (self.w - x[..., 1:])

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return logits.squeeze(-1) ** 2 / 2


class Slope(Quadratic):
    """A constant gradient of 1 for every sample."""

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return logits.squeeze(-1)


class Quartic(Quadratic):
    """Loss (a (w - b)^2)^2 / 4: smooth, and its Hessian is not constant."""

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return logits.squeeze(-1) ** 4 / 4


def quadratics(
    algorithm: str,
    start: float = 0.3,
    *,
    sizes=(1, 1),
    a=(1, 3),
    b=(0, 1),
    model=Quadratic,
    **options,
) -> Server:
    """Users i with `sizes[i]` equal samples (a_i, b_i), minibatches of one, everybody sampled."""
    x = np.concatenate([[(ai, bi)] * n for ai, bi, n in zip(a, b, sizes, strict=True)])
    x = torch.as_tensor(x, dtype=torch.float64)
    sizes = {"train": np.array(sizes), "test": np.array(sizes)}
    data = FederatedData(torch.cat([x, x]), torch.zeros(2 * len(x), dtype=torch.int64), sizes)
    chosen = {"batch_size": 1, "numusers": len(a), "eval_every": 0, "block_size": 0} | options
    config = Config(algorithm=algorithm, **chosen).resolved()
    return config.server_class(config, data, model(start))


def after(server: Server) -> float:
    """The global w when the run has ended."""
    server.run()
    return server.model.w.item()


def limit(algorithm: str, **options) -> float:
    """The fixed point of one round, which is affine on quadratics: x -> m x + c."""
    c, both = (after(quadratics(algorithm, s, num_global_iters=1, **options)) for s in (0.0, 1.0))
    return c / (1 - (both - c))


UNEQUAL = (9, 1, 4, 12, 5, 3, 8)
SHAPES = {"mclr": (6,), "dnn": (6,), "cnn": (1, 7, 7)}


def blobs(shape=(6,), train=UNEQUAL, classes: int = 4, seed: int = 0) -> FederatedData:
    """Random samples; user i has train[i] of them for training and 2 + i % 3 for testing."""
    rng = np.random.default_rng(seed)
    sizes = {"train": np.array(train), "test": np.array([2 + i % 3 for i in range(len(train))])}
    total = int(sizes["train"].sum() + sizes["test"].sum())
    y = rng.integers(0, classes, total)
    x = rng.normal(size=(total, *shape)) + y.reshape(-1, *(1,) * len(shape)) / 2
    return FederatedData(torch.as_tensor(x), torch.as_tensor(y), sizes)


def federation(
    algorithm: str,
    model: str = "mclr",
    *,
    data: FederatedData | None = None,
    repetition=0,
    **options,
) -> Server:
    """A short run of a real model on blobs."""
    defaults = {
        **{"batch_size": 4, "numusers": 3, "num_global_iters": 2, "local_epochs": 3, "K": 2},
        **{"learning_rate": 0.05, "personal_learning_rate": 0.03, "beta": 0.7, "lamda": 3.0},
        **{"block_size": 0, "seed": 5},
    }
    config = Config(algorithm=algorithm, model=model, **(defaults | options)).resolved()
    data = blobs(SHAPES[model]) if data is None else data
    net = build_model(model, tuple(data.x.shape[1:]), 4, config.initial_seed(repetition))
    return config.server_class(config, data, net.double(), repetition)


def together(algorithm: str, model: str = "mclr", repetitions=(0, 1, 2), **options) -> Server:
    """The same as `federation`, several repetitions in lockstep."""
    one = federation(algorithm, model, **options)
    shape = tuple(one.data.x.shape[1:])
    models = [
        build_model(model, shape, 4, one.config.initial_seed(i)).double() for i in repetitions
    ]
    diaries = [Diary() for _ in repetitions]
    return type(one)(one.config, one.data, models, list(repetitions), diaries)


class Diary:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.main, self.personal, self.selected = {}, {}, []

    def evaluated(self, round_number, metrics) -> None:
        self.main[round_number] = metrics

    def personalized(self, round_number, models) -> None:
        self.personal[round_number] = models

    def round_done(self, round_number, selected) -> None:
        self.selected.append(selected)


def watched(server: Server) -> tuple[Server, Diary]:
    """Run to the end; the server and what it told."""
    server.observers = [diary := Diary()]
    server.run()
    return server, diary


def flat(params) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in params])


def suite_with(home: Path, files: dict[str, str]) -> Path:
    """A copy of the suite with an algorithm more for each server file among `files`; its main.py.

    `files`: text by path. An algorithm is called as its class.
    """
    root = Path(__file__).parents[1]
    for folder in ("FLAlgorithms", "utils", "tests"):
        ignore = shutil.ignore_patterns("__pycache__", "golden")
        shutil.copytree(root / folder, home / folder, ignore=ignore)
    registry = home / "FLAlgorithms/servers/__init__.py"
    known = registry.read_text()
    for name, text in files.items():
        (home / name).write_text(text)
        if found := re.search(r"^class (\w+)\(Server\)", text, re.M):
            known = f"from FLAlgorithms.servers.{Path(name).stem} import {found[1]}\n{known}"
            known = known.replace('    "pFedMe"', f'    "{found[1]}": {found[1]},\n    "pFedMe"')
    registry.write_text(known)
    for program in root.glob("*.py"):
        shutil.copy(program, home)
    return home / "main.py"


def run_main(leaf: Path, *words: str) -> tuple[int, Path]:
    """A short job on the LEAF folder; exit code and results folder."""
    out = leaf.parent / "results"
    base = [
        "--dataset",
        "Synthetic",
        "--split",
        str(leaf),
        "--results_dir",
        str(out),
        "--gpu",
        "-1",
    ]
    small = ["--num_global_iters", "2", "--local_epochs", "3", "--numusers", "2"]
    return main.main([*base, *small, *words]), out
