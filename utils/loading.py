"""Models out of result files, ready for samples as their data set holds them.

model = load_model("results/Mnist_mclr_pFedMe_0.005_1_15_5u_20b_20_5_0.1_0.h5")
predicted = model(x).argmax(1)
"""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from FLAlgorithms.trainmodel.classifier import Classifier, batch_norms
from FLAlgorithms.trainmodel.models import build_model
from utils.config import Config
from utils.errors import InputError
from utils.files import open_h5, partner
from utils.partition import group_name


class Loaded(nn.Module):
    """A trained model that takes raw samples (n, *shape) and gives logits (n, classes)."""

    def __init__(self, model: Classifier, shape: tuple[int, ...], scaling: h5py.Group) -> None:
        super().__init__()
        self.model, self.shape = model, shape
        for name in ("mean", "factor"):
            self.register_buffer(name, torch.as_tensor(scaling[name][()]))

    def forward(self, x: Tensor | np.ndarray) -> Tensor:
        """Normalised as in the run: in float64, rounded to float32."""
        x = torch.as_tensor(x, device=self.mean.device)
        if tuple(x.shape[1:]) != self.shape:
            raise InputError(f"samples of shape {tuple(x.shape[1:])}, the model's are {self.shape}")
        # A file's numbers become float32 when they are read.
        x = ((x.float().double() - self.mean) * self.factor).float()
        x = x.to(next(self.model.parameters()).dtype)
        return self.model(x.flatten(1) if self.model.flat else x)


def load_model(path: str | Path, user: str | None = None) -> Loaded:
    """The global model of a repetition's file, or a user's personalised one (`--save_models`).

    Either of the run's two files may be named. The model is on the CPU, in eval mode, with the
    numbers of the last round. Raises InputError for files that hold no such model. Samples of a
    `feature` partition are taken as their users see them: turned and noisy.
    """
    path = Path(path)
    with open_h5(path) as file:
        if file.attrs.get("repetition") == "avg":
            raise InputError(f"{path}: it is an average; name a repetition's file")
        other = partner(file, path)
        main, personal = (path, other) if file.attrs["evaluates"] == "global" else (other, path)
    with open_h5(main) as file:
        if "normalize" not in file:
            raise InputError(f"{main}: does not say how its data were normalised; run it again")
        config, about = json.loads(file.attrs["config"]), file["normalize"]
        shape = tuple(about.attrs["shape"].tolist())
        classes = int(about.attrs["classes"])
        model = build_model(config["model"], shape, classes, 0, norm=config["norm"])
        model.to(getattr(torch, config["dtype"]))
        options = Config(algorithm=config["algorithm"], bn=config["bn"])
        bn = options.server_class.user_class.bn(options)
        if user is None and bn == "local" and batch_norms(model):
            raise InputError(f"{main}: every user has its own BatchNorm, so there is no one model")
        state = {name: torch.as_tensor(value[()]) for name, value in file["final"].items()}
        model.load_state_dict(state)
        loaded = Loaded(model, shape, about).eval()
    if user is not None:
        _personalise(model, personal, user)
    return loaded


def _personalise(model: Classifier, path: Path, user: str) -> None:
    """Put in what a user has of its own; tied weights and buffers go by one name, as recorded."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    with open_h5(path) as file, torch.no_grad():
        if "personal" not in file:
            raise InputError(f"{path}: holds no personalised models; --save_models keeps them")
        if group_name(user) not in file["personal"]:
            few = ", ".join(list(file["personal"])[:3])
            raise InputError(f"{path}: no user {user!r}; there are {few}, ...")
        for name, value in file[f"personal/{group_name(user)}"].items():
            named[name].copy_(torch.as_tensor(value[()]))
