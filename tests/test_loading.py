"""What the model gets of raw samples: notices of it, what files say of it, models out of files."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import main
from tests.test_data import place  # noqa: F401 (fixture)
from tests.test_results import changed
from utils.errors import InputError
from utils.loading import load_model
from utils.model_utils import DEFAULTS, Source, about_scale, features, read_npz, read_source
from utils.partition import Split

RNG = np.random.default_rng(0)
Y = np.arange(240) % 4
IMAGES = RNG.integers(0, 60, (240, 2, 6, 6), dtype=np.uint8) + 40 * Y[:, None, None, None].astype(
    np.uint8
)
IMAGES[:, 0, 0, 0] = 7  # constant: its factor is 0
VECTORS = RNG.normal(3, 5, (240, 8)) + Y[:, None]  # float64, as np.savez keeps it

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * (shape[1] - 2) * (shape[2] - 2), classes)

    def forward(self, x):
        return self.out(self.norm(self.conv(x)).relu().flatten(1))
"""


@pytest.fixture
def run(place: Path, capsys):  # noqa: F811
    """A short job on raw arrays; its main file and what was said."""

    def job(x: np.ndarray, *words: str) -> tuple[Path, str]:
        np.savez(place / "mine.npz", x=x, y=Y)
        base = [*("--dataset", str(place / "mine.npz"), "--results_dir", str(place / "out"))]
        base += ["--gpu", "-1", "--num_global_iters", "3", "--local_epochs", "9"]
        base += ["--learning_rate", "0.02"]
        base += ["--partition", "dirichlet:users=4,minimum=5", "--algorithm", "FedAvg"]
        assert main.main([*base, *words]) == 0
        found = {*(place / "out").glob("*_0.h5")} - {*(place / "out").glob("*_p_*")}
        return max(found, key=lambda path: path.stat().st_mtime_ns), capsys.readouterr().err

    return job


def hits(model: torch.nn.Module, file: h5py.File, user: str, x: np.ndarray) -> tuple[int, int]:
    rows = file[f"split/{user}/test"][()]
    right = model(x[rows]).argmax(1).numpy() == Y[rows]
    return int(right.sum()), len(rows)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (IMAGES, ["--model", "mclr"]),
        (IMAGES, ["--model", "dnn", "--normalize", "pixel", "--dtype", "float64"]),
        (IMAGES, ["--model", "NET", "--normalize", "none"]),
        (IMAGES[:, 0], ["--model", "cnn"]),
        (IMAGES, ["--model", "NET"]),
        (VECTORS, ["--model", "dnn"]),
        (VECTORS, ["--model", "dnn", "--normalize", "pixel"]),
    ],
)
def test_a_loaded_model_has_the_recorded_accuracy_on_raw_samples(x, words, run, tmp_path):
    (tmp_path / "net.py").write_text(NET)
    words = [word.replace("NET", f"{tmp_path / 'net.py'}:Net") for word in words]
    path, _ = run(x, *words)
    model = load_model(path)
    assert not model.training
    raw = x[:, None] if x.ndim == 3 else x
    assert len(model(raw).argmax(1).unique()) > 1
    with h5py.File(path) as file:
        counts = np.array([hits(model, file, user, raw) for user in file["split"]])
        assert counts[:, 0].sum() / counts[:, 1].sum() == file["rs_glob_acc"][-1]


def test_a_user_s_own_model(run):
    path, _ = run(IMAGES, "--algorithm", "pFedMe", "--save_models", "--learning_rate", "0.01")
    with h5py.File(path) as file:
        personal = path.with_name(file.attrs["partner"])
        users = file["users"].asstr()[()]
        with h5py.File(personal) as other:
            last = dict(zip(users, other["user_test_acc"][-1], strict=True))
        for named in (path, personal):
            found = {u: np.divide(*hits(load_model(named, u), file, u, IMAGES)) for u in users}
            assert found == last
    one, another = (load_model(path, user).state_dict() for user in users[:2])
    assert not torch.equal(one["model.fc1.weight"], another["model.fc1.weight"])
    assert torch.equal(one["mean"], another["mean"])


@pytest.mark.parametrize("x", [IMAGES, VECTORS])
@pytest.mark.parametrize("normalize", ["pixel", "channel", "none", None])
def test_mean_and_factor_of_a_file_make_the_features(x, normalize, run):
    if normalize == "channel" and x.ndim == 2:
        pytest.skip("vectors have no channels")
    path, _ = run(x, *([] if normalize is None else ["--normalize", normalize]))
    with h5py.File(path) as file:
        mean, factor = (file[f"normalize/{name}"][()] for name in ("mean", "factor"))
        users = file["users"].asstr()[()]
        rows = {p: tuple(file[f"split/{u}/{p}"][()] for u in users) for p in ("train", "test")}
        assert file["normalize"].attrs["classes"] == 4
        assert tuple(file["normalize"].attrs["shape"]) == x.shape[1:]
    assert mean.dtype == factor.dtype == np.float64
    source = read_npz(path.parents[1] / "mine.npz")
    asked = normalize or ("none" if x.ndim == 2 else "channel")
    expected = features(source, Split(tuple(users), rows["train"], rows["test"], {}), asked)
    assert np.array_equal(((source.x - mean) * factor).astype(np.float32), expected)
    if asked == "pixel" and x.ndim == 4:
        assert factor[0, 0, 0] == 0


def test_what_cannot_be_loaded_is_told_in_one_line(run, tmp_path):
    path, _ = run(IMAGES, "--times", "2")
    model = load_model(path)
    with pytest.raises(InputError, match=r"samples of shape \(72,\), the model's are \(2, 6, 6\)"):
        model(IMAGES.reshape(240, 72))
    average = next(path.parent.glob("*_avg.h5"))
    (tmp_path / "text.h5").write_text("hello")
    for file, user, message in (
        (average, None, "it is an average; name a repetition's file"),
        (tmp_path / "none.h5", None, "none.h5: no such file"),
        (tmp_path / "text.h5", None, "text.h5: damaged, or no result file"),
        (path, "0", "no such file"),
    ):
        with pytest.raises(InputError, match=message):
            load_model(file, user)
    with changed(path) as file:
        del file["normalize"]
    with pytest.raises(InputError, match="does not say how its data were normalised; run it again"):
        load_model(path)
    path, _ = run(IMAGES, "--algorithm", "pFedMe")
    with pytest.raises(InputError, match="holds no personalised models; --save_models keeps them"):
        load_model(path, "0")
    path, _ = run(IMAGES, "--algorithm", "pFedMe", "--beta", "0.5", "--save_models")
    with pytest.raises(InputError, match="no user 'nobody'; there are "):
        load_model(path, "nobody")
    (tmp_path / "net.py").write_text(NET)
    path, _ = run(IMAGES, "--model", f"{tmp_path / 'net.py'}:Net", "--bn", "local")
    with pytest.raises(InputError, match="every user has its own BatchNorm"):
        load_model(path)


def test_verify_tolerates_what_older_files_lack_and_nothing_else(run, capsys):
    path, _ = run(IMAGES)
    with changed(path) as file:
        mean = file["normalize/mean"][()]
        del file["normalize/mean"]
    assert main.main(["--verify", str(path)]) == 1
    assert "normalize/mean is in one of the two only" in capsys.readouterr().out
    with changed(path) as file:
        del file["normalize"]
    assert main.main(["--verify", str(path)]) == 0
    with changed(path) as file:
        file["normalize/more"] = mean
        del file["user_test_acc"]
    assert main.main(["--verify", str(path)]) == 1
    said = capsys.readouterr().out
    assert "normalize/more is in one of the two only" in said
    assert "user_test_acc is in one of the two only" in said


# ---- features that go in as they are


def wide(**scales: object) -> np.ndarray:
    x = RNG.normal(size=(240, 12))
    for feature, scale in scales.items():
        x[:, int(feature[1:])] *= scale
    return x


NOTICED = {
    "pixels 0..16": RNG.integers(0, 17, (240, 64)),
    "pixels 0..255": RNG.integers(0, 256, (240, 64)) * (np.arange(64) % 3 > 0),
    "one large": wide(f3=50),
    "unequal": wide(f3=3) * np.where(np.arange(12) == 3, 1, 1e-3),
    "far away": wide() + 1000,
}
UNNOTICED = {
    "standardised": wide(),
    "0..1": RNG.random((240, 64)),
    "0..1, unequal": RNG.random((240, 64)) * 0.1 ** (np.arange(64) / 8),
    "rare ones": RNG.random((240, 64)) < 0.01,
    "constant": np.ones((240, 3)),
    "zero": np.zeros((240, 3)),
}


def whole(x: np.ndarray) -> tuple[Source, Split]:
    source = Source("mine", x.astype(np.float32), Y, 4, len(x))
    return source, Split(("a",), (np.arange(200),), (np.arange(200, 240),), {})


@pytest.mark.parametrize("kind", NOTICED)
def test_large_or_unequal_vectors_are_noticed(kind):
    assert "--normalize pixel" in about_scale(*whole(NOTICED[kind]))


@pytest.mark.parametrize("kind", UNNOTICED)
def test_usual_vectors_are_not_noticed(kind):
    assert about_scale(*whole(UNNOTICED[kind])) == ""


def test_synthetic_data_are_not_noticed():
    source = read_source("Synthetic", {"source": DEFAULTS["Synthetic"].arguments})
    rows = np.arange(len(source.y))
    assert about_scale(source, Split(("a",), (rows,), (rows[:0],), {})) == ""


def test_the_notice_is_for_who_chose_no_normalisation(run):
    large, notice = NOTICED["pixels 0..16"], "notice: the features go in as they are"
    assert notice in run(large)[1]
    for words in (["--normalize", "pixel"], ["--normalize", "none"]):
        assert notice not in run(large, *words)[1]
    assert notice not in run(large.reshape(240, 8, 8))[1], "images are normalised anyway"
    assert notice not in run(wide())[1]
