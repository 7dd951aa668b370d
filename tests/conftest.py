"""Fixtures of the whole suite; the toys themselves are in tests/toys.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

torch.set_num_threads(1)
SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def shared() -> Path:
    """The folder of reference material beside the repository; tests skip without it."""
    if not SHARED.is_dir():
        pytest.skip("the reference material (../shared) is not beside this checkout")
    return SHARED


@pytest.fixture
def leaf(tmp_path) -> Path:
    """A small LEAF folder: five users, four features, labels 0 to 9."""
    rng = np.random.default_rng(0)
    for part, n in (("train", 12), ("test", 5)):
        data = {}
        for user in range(5):
            y = rng.integers(0, 10, n + user)
            x = rng.normal(size=(n + user, 4)) + y[:, None] / 3
            data[f"user{user}"] = {"x": x.tolist(), "y": y.tolist()}
        sizes = [len(d["y"]) for d in data.values()]
        content = {"users": list(data), "num_samples": sizes, "user_data": data}
        folder = tmp_path / "leaf" / part
        folder.mkdir(parents=True)
        (folder / "all.json").write_text(json.dumps(content))
    return tmp_path / "leaf"
