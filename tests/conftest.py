"""Fixtures of the whole suite; the toys themselves are in tests/toys.py."""

from pathlib import Path

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
