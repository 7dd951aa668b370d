"""Replays of recorded runs by other code, and the published split's exact counts, float32."""

from pathlib import Path

import h5py
import numpy as np
import pytest

import main
from utils.config import Config
from utils.jobs import prepare
from utils.model_utils import read_data

HERE = Path(__file__).parent / "golden"
TRIMMED = sorted(path.name for path in HERE.glob("*.h5"))
ALL = ["fedavg_dnn.h5", "perfedavg_dnn.h5", "pfedme_dnn.h5", *TRIMMED]


def test_there_are_six_trimmed_files():
    assert len(TRIMMED) == 6


@pytest.mark.parametrize("name", TRIMMED)
def test_trimmed_golden_run(name, capsys):
    assert main.main(["--replay", str(HERE / name), "--gpu", "-1"]) == 0
    assert "parameters after round 5" in capsys.readouterr().out


@pytest.mark.parametrize("name", ALL)
def test_full_golden_run(name, shared, capsys):
    assert main.main(["--replay", str(shared / "golden" / name), "--gpu", "-1"]) == 0
    out = capsys.readouterr().out
    assert "rs_train_loss" in out
    assert "within the bounds" in out


@pytest.mark.parametrize("block_size", ["0", "7"])
def test_golden_run_on_other_engines(block_size, capsys):
    command = ["--replay", str(HERE / "pfedme_mclr.h5"), "--num_global_iters", "1"]
    assert main.main([*command, "--gpu", "-1", "--block_size", block_size]) == 0
    assert "parameters after round 1" in capsys.readouterr().out


def test_replay_outside_the_bounds_exits_with_1(tmp_path, capsys):
    path = tmp_path / "changed.h5"
    path.write_bytes((HERE / "fedavg_mclr.h5").read_bytes())
    with h5py.File(path, "r+") as file:
        file["global_after_round/5/fc1.bias"][3] += 1e-4
    assert main.main(["--replay", str(path), "--gpu", "-1"]) == 1
    assert "OUTSIDE" in capsys.readouterr().out


def test_exact_counts_on_the_published_split():
    """Round 0 of pFedMe with the authors' semantics, to the sample."""
    source, split = read_data("Mnist", "published")
    config = Config(
        split="published", semantics="authors", num_global_iters=1, gpu=-1, algorithm="pFedMe"
    )
    job = prepare(config, source, split)
    assert job.normalize == "published"
    server = job.server(0)
    told = {}

    class Observer:
        def evaluated(self, t, metrics):
            told[t] = metrics

        def personalized(self, t, models):
            told.update(models)

        def round_done(self, t, selected):
            told["selected"] = selected

    server.observers = [Observer()]
    server.run()
    assert told[0].correct["test"].sum() == 1402
    assert told[0].correct["train"].sum() == 4244
    assert told[0].sizes["test"].sum() == 17499
    assert told[0].sizes["train"].sum() == 52470
    assert told[0].mean_loss("train") == pytest.approx(2.5127767, abs=1e-6)
    assert told["local"].correct["test"].sum() == 15656
    assert told["local"].correct["train"].sum() == 47130
    assert told["local"].mean_loss("train") == pytest.approx(0.80475, abs=1e-5)
    assert abs(told["theta"].correct["test"].sum() - 8565) <= 2
    assert server.config.primary == "local"
    assert len(np.unique(told["selected"])) == 5
