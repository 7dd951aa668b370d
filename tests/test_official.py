"""`--test_set global`: the global model is judged by the dataset's official test rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import main as program
import main_plot
from FLAlgorithms.servers import ALGORITHMS
from FLAlgorithms.servers.serverbase import Server
from tests.test_data import place, small  # noqa: F401 (fixtures)
from tests.toys import UNEQUAL, blobs, federation, together, watched
from utils.batches import FederatedData
from utils.model_utils import read_data

RNG = np.random.RandomState(1)
Y = np.arange(300) % 4
X = (RNG.normal(size=(300, 5)) + Y[:, None] / 2).astype(np.float32)
OFFICIAL = {"x_test": X[:70] + 0.1, "y_test": (Y[:70] + (RNG.rand(70) < 0.3)) % 4}
Y_TEST = OFFICIAL["y_test"]
JOB = "--gpu -1 --numusers 2 --num_global_iters 3 --local_epochs 4 --K 2".split()
PARTITION = ["--partition", "dirichlet:users=4"]
IMAGES = ["--dataset", "images.npz", "--partition", "iid:users=3"]


@pytest.fixture
def job(place: Path):  # noqa: F811
    """Runs a short job on a file with 300 train and 70 test samples; its main and `_p` file."""
    file = place / "toy.npz"
    np.savez(file, x=X, y=Y, **OFFICIAL)

    def run(algorithm: str, *words: str, out: str = "out") -> list[Path]:
        base = ["--dataset", str(file), "--algorithm", algorithm, *JOB, *PARTITION]
        before = set((place / out).glob("*_0.h5"))
        if code := program.main([*base, "--results_dir", str(place / out), *words]):
            raise SystemExit(code)
        return sorted(set((place / out).glob("*_0.h5")) - before, key=lambda p: "_p_" in p.name)

    return run


def arrays(path: Path) -> dict[str, np.ndarray]:
    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda n, v: found.update({n: v[()]}) if isinstance(v, h5py.Dataset) else None
        )
    return found


def judged(state: dict[str, np.ndarray]) -> tuple[float, float]:
    """Accuracy and mean cross-entropy of a linear model on the official test rows, float64."""
    logits = OFFICIAL["x_test"].astype(float) @ state["weight"].T.astype(float) + state["bias"]
    peak = logits.max(1)
    each = peak + np.log(np.exp(logits - peak[:, None]).sum(1)) - logits[range(70), Y_TEST]
    return (logits.argmax(1) == Y_TEST).mean(), each.mean()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_global_model_is_judged_by_all_official_rows(job, algorithm: str) -> None:
    path = job(algorithm, "--test_set", "global")[0]
    found = arrays(path)
    for name, entry in (("init", 0), ("final", -1)):
        state = {key: found[f"{name}/fc1.{key}"] for key in ("weight", "bias")}
        accuracy, loss = judged(state)
        assert abs(found["rs_glob_acc"][entry] - accuracy) < 1e-12
        assert abs(found["rs_test_loss"][entry] - loss) < 1e-6
    assert len(found["rs_glob_acc"]) == 4 and np.isfinite(found["rs_glob_acc"]).all()
    assert "user_test_acc" not in found
    with h5py.File(path) as file:
        assert file.attrs["test_set"] == "global"
        assert json.loads(file.attrs["config"])["test_set"] == "global"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_else_changes(job, algorithm: str) -> None:
    """The same split, judged by users: training and train curves bitwise, `_p` up to rounding.

    There a model measured beside w_t shares its product, and alone it does not.
    """
    pool = ["--partition", "dirichlet:users=4,pool=train"]
    official = job(algorithm, "--test_set", "global", *pool)
    by_users = job(algorithm, *pool)
    assert official[0].name != by_users[0].name
    for one, other in zip(official, by_users, strict=True):
        a, b = arrays(one), arrays(other)
        main = "_p_" not in one.name
        own = {"rs_glob_acc", "rs_test_loss", "user_test_acc"} if main else set()
        same = a.keys() - own
        assert same == b.keys() - own
        loose = 1e-6 if not main else 0
        assert all(np.allclose(a[n], b[n], loose, 0) for n in same if a[n].dtype.kind == "f")
        assert all(np.array_equal(a[n], b[n]) for n in same if "loss" not in n)
        if main:
            assert not np.array_equal(a["rs_glob_acc"], b["rs_glob_acc"])
        with h5py.File(other) as file:
            assert file.attrs["test_set"] == "user"


@pytest.mark.parametrize("algorithm", ["FedAvg", "pFedMe", "PerAvg"])
def test_resumed_averaged_replayed_verified_and_plotted(job, algorithm: str, capsys) -> None:
    words = ["--test_set", "global", "--times", "2", "--eval_every", "2"]
    path = job(algorithm, *words)[0]
    average = path.with_name(path.name.replace("_0.h5", "_avg.h5"))
    assert arrays(average)["runs/rs_glob_acc"].shape == (2, 3)
    assert "nan" not in capsys.readouterr().out
    assert program.main(["--verify", str(path)]) == 0
    assert program.main(["--replay", str(path)]) == 0
    assert "rs_glob_acc" in capsys.readouterr().out
    assert main_plot.main(["--results_dir", str(path.parent)]) == 0


def test_a_stopped_run_goes_on_bitwise(job, place: Path, monkeypatch) -> None:  # noqa: F811
    whole = arrays(job("PerAvg", "--test_set", "global")[0])
    rounds = Server.run_rounds

    def stopped(self: Server, count: int) -> None:
        rounds(self, 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "run_rounds", stopped)
    with pytest.raises(SystemExit):
        job("PerAvg", "--test_set", "global", out="stopped")
    monkeypatch.setattr(Server, "run_rounds", rounds)
    job("PerAvg", "--test_set", "global", "--resume", out="stopped")
    path = next(p for p in (place / "stopped").glob("*_0.h5") if "_p_" not in p.name)
    again = arrays(path)
    assert again.keys() == whole.keys()
    assert all(np.array_equal(whole[n], v) for n, v in again.items())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("model", ["mclr", "cnn"])
def test_engines_and_lockstep_agree(algorithm: str, model: str) -> None:
    base = blobs((6,) if model == "mclr" else (1, 7, 7))
    extra = torch.randn(11, *base.x.shape[1:], dtype=base.x.dtype)
    data = FederatedData(
        torch.cat([base.x, extra]),
        torch.cat([base.y, torch.arange(11) % 4]),
        base.sizes | {"official": np.array([11])},
    )
    options = {"data": data, "eval_every": 1}
    _, alone = watched(federation(algorithm, model, **options))
    _, block = watched(federation(algorithm, model, block_size=3, **options))
    rows = together(algorithm, model, repetitions=(0, 1), block_size=3, **options)
    rows.run()
    for t, m in alone.main.items():
        assert m.sizes["test"].tolist() == [11] and m.sizes["train"].tolist() == list(UNEQUAL)
        for other in (block.main[t], rows.observers[0].main[t]):
            assert other.correct["test"].shape == (1,)
            assert other.accuracy("test") == m.accuracy("test")
            assert abs(other.mean_loss("test") - m.mean_loss("test")) < 1e-10
    for t, models in alone.personal.items():
        for name, m in models.items():
            assert m.sizes["test"].tolist() == base.sizes["test"].tolist()
            assert abs(block.personal[t][name].loss["test"] - m.loss["test"]).max() < 1e-9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "iid:pool=all"], "train parts hold rows of the official test part; give"),
        (["--dataset", "Synthetic"], "Synthetic has no official test part"),
        (
            [*"--algorithm FedAvg --bn local --model lenet --norm batch".split(), *IMAGES],
            "--test_set global: every user has its own BatchNorm in lenet",
        ),
        (
            [*"--algorithm Local --model lenet --norm batch".split(), *IMAGES],
            "--test_set global: every user has its own BatchNorm in lenet",
        ),
        (["--partition", "iid:test=0"], "pFedMe's personalised models are evaluated on"),
        (["--test_set", "globl"], "--test_set 'globl': not one of user, global; did you mean glob"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    job,
    place,  # noqa: F811
    words,
    message,
    monkeypatch,
    capsys,
) -> None:
    monkeypatch.chdir(place)
    base = ["--dataset", str(place / "toy.npz"), "--test_set", "global", "--gpu", "-1"]
    images = RNG.randint(0, 256, (60, 12, 12)).astype(np.uint8)
    np.savez("images.npz", x=images, y=Y[:60], x_test=images, y_test=Y[:60])
    out = ["--results_dir", str(place / "none")]
    assert program.main([*base, *out, *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1] and not any("error" in line for line in lines[:-1])
    assert not (place / "none").exists()


def test_nothing_held_out_is_fine_without_personalised_models(job) -> None:
    path = job("FedAvg", "--test_set", "global", "--partition", "iid:users=4,test=0")[0]
    found = arrays(path)
    assert np.isfinite(found["rs_glob_acc"]).all() and np.isfinite(found["rs_test_loss"]).all()
    assert sum(len(found[f"split/f_{u:05d}/train"]) for u in range(4)) == 300


def test_a_named_dataset_keeps_its_official_rows_apart_by_itself(small, capsys) -> None:  # noqa: F811
    """`--test_set global` without a partition: the default one, of the official train part."""
    words = "--dataset Mnist --algorithm FedAvg --test_set global --num_global_iters 1".split()
    out = small / "out"
    assert program.main([*words, "--numusers", "2", "--results_dir", str(out)]) == 0
    told = capsys.readouterr()
    assert "FedAvg, global model, official test accuracy %" in told.out
    assert re.search(r"notice: \d+ rows are held out for the users' own test parts", told.err)
    assert main_plot.main([str(out)]) == 0
    assert "test_set=global" in capsys.readouterr().out
    found = arrays(next(out.glob("*_0.h5")))
    rows = [v for k, v in found.items() if k.endswith(("/train", "/test"))]
    source, _ = read_data("Mnist")
    assert sum(map(len, rows)) == source.num_train > np.concatenate(rows).max()
    # With a personalised model the held out rows are read.
    words[3] = "pFedMe"
    assert program.main([*words, "--numusers", "2", "--results_dir", str(out)]) == 0
    told = capsys.readouterr()
    assert "held out" not in told.err
    assert "personalised (theta), test accuracy %" in told.out


def test_labels_that_nobody_holds_are_told(job, capsys) -> None:
    one = ["--partition", "label_count:users=2,labels_per_user=1"]
    job("FedAvg", *one)
    assert "notice: no user holds the labels 2 3\n" in capsys.readouterr().err
    job("FedAvg", *one, "--test_set", "global")
    assert "labels 2 3, but the official test rows have them\n" in capsys.readouterr().err


def test_one_user_alone_is_not_taken_for_the_official_rows(job) -> None:
    path = job("FedAvg", "--test_set", "global", "--partition", "iid:users=1")[0]
    assert "user_test_acc" not in arrays(path)
