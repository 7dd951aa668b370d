"""Anybody's data (.npz), torchvision's data sets, JPEG files, --data_dir."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

import main as program
import main_plot
from tests.test_data import idx, place, raw, stderr_line  # noqa: F401 (fixtures)
from utils import model_utils
from utils.errors import InputError
from utils.model_utils import dataset_name, default_normalize, read_data, read_npz, read_source
from utils.schemes import parse

RNG = np.random.RandomState(0)
X, Y = RNG.normal(size=(240, 5)).astype(np.float32), np.arange(240) % 4
TEST = {"x_test": X[:40] + 1, "y_test": Y[:40]}


def spoiled(values: np.ndarray, where: object, by: float = np.nan) -> np.ndarray:
    values = values.astype(float)
    values[where] = by
    return values


def saved(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.fixture
def mine(place: Path) -> Path:  # noqa: F811
    return saved(place / "my data.npz", x=X, y=Y, **TEST)


# ---- anybody's data ------------------------------------------------------------------------------


def test_an_npz_is_train_then_test(mine: Path) -> None:
    source = read_npz(mine)
    assert (source.name, source.classes, source.num_train) == ("my-data", 4, 240)
    assert np.array_equal(source.x, np.concatenate([X, TEST["x_test"]]))
    assert np.array_equal(source.y, np.concatenate([Y, TEST["y_test"]]))
    assert source.x.dtype == np.float32 and source.y.dtype == np.int64


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ((9, 6, 7), (1, 6, 7)),
        ((9, 3, 6, 7), (3, 6, 7)),
        ((9, 6, 7, 3), (3, 6, 7)),
        ((9, 1, 6, 1), (1, 6, 1)),
        ((9, 6, 7, 1), (1, 6, 7)),
        ((9, 6, 6, 2), (2, 6, 6)),
        ((9, 8, 6, 6), (8, 6, 6)),
        ((9, 2, 6, 5), (2, 6, 5)),
        ((9, 6), (6,)),
    ],
)
@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.float64, bool])
def test_shapes_of_an_npz(tmp_path: Path, given: tuple, shape: tuple, kind: type) -> None:
    x = (np.arange(np.prod(given)) % 200).reshape(given).astype(kind)
    source = read_npz(saved(tmp_path / "a.npz", x=x, y=np.arange(9.0)))
    assert source.shape == shape
    assert source.x.dtype == (np.uint8 if kind is np.uint8 else np.float32)
    last = given[1:] != shape and len(given) == 4
    assert np.array_equal(source.x.ravel(), (x.transpose(0, 3, 1, 2) if last else x).ravel())


def damaged(path: Path, change: str) -> None:
    content = path.read_bytes()
    spoiled = {
        "empty": b"",
        "cut": content[: len(content) // 2],
        "text": b"hello",
        "flipped": content[:400] + bytes([content[400] ^ 255]) + content[401:],
    }
    path.write_bytes(spoiled[change])


@pytest.mark.parametrize("change", ["empty", "cut", "text", "flipped"])
def test_a_damaged_npz_gives_one_line(mine: Path, change: str, capsys) -> None:
    damaged(mine, change)
    assert program.main(["--dataset", str(mine)]) == 2
    line = stderr_line(capsys.readouterr().err)
    assert f"dataset {mine}: not an .npz file, or damaged" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "array x is missing"),
        ({"y": None}, "array y is missing"),
        ({"y_test": None}, "array y_test is missing"),
        ({"xtest": X}, "array 'xtest' is none of x, y, x_test, y_test, user"),
        ({"x": X[:7]}, r"x has 7 samples, y the shape \(240,\): must agree"),
        ({"y": Y.reshape(-1, 1)}, r"x has 240 samples, y the shape \(240, 1\)"),
        ({"x": X[:, 0]}, r"x has shape \(240,\): must be"),
        ({"x": X.reshape(240, 1, 1, 1, 5)}, r"x has shape \(240, 1, 1, 1, 5\): must be"),
        ({"x": X[:0], "y": Y[:0]}, r"x has shape \(0, 5\): must be"),
        ({"x": spoiled(X, (17, 3))}, "x holds NaN or infinity in row 17, column 3$"),
        ({"x": spoiled(X, (4, 0), 1e300)}, "x holds NaN or infinity in row 4, column 0$"),
        ({"x_test": spoiled(X[:40], (2, 1))}, "x_test holds NaN or infinity in row 2, column 1$"),
        (
            {"x": spoiled(np.zeros((240, 4, 4, 3)), (9, 2, 3, 1), -np.inf)},
            r"x holds NaN or infinity in row 9, \(channel, y, x\) = \(1, 2, 3\)$",
        ),
        ({"x_test": X[:40, :4]}, r"samples of x_test have shape \(4,\), of x \(5,\)"),
        ({"x": X.astype(str)}, "x has type <U.*: must be numbers"),
        ({"x": X.astype(object)}, "holds pickled objects, or damaged"),
        ({"y": Y - 1}, r"y must hold whole numbers in 0\.\.9999: row 0 holds -1$"),
        ({"y": spoiled(Y, 7, 1.5)}, r"y must hold whole numbers in 0\.\.9999: row 7 holds 1.5$"),
        ({"y": spoiled(Y, 9)}, r"y must hold whole numbers in 0\.\.9999: row 9 holds nan$"),
        ({"y": Y.astype(str)}, "y has type <U.*: must be whole numbers"),
        ({"y": Y * 5000}, r"y must hold whole numbers in 0\.\.9999: row 2 holds 10000$"),
        ({"y_test": np.full(40, 10**12)}, r"y_test must hold .*: row 0 holds 1e\+12$"),
        ({"user": Y[:7]}, r"user has type int64 and shape \(7,\): must be"),
        ({"user": X[:, 0]}, "user has type float32"),
    ],
)
def test_wrong_arrays_give_one_line(tmp_path: Path, change: dict, message: str) -> None:
    arrays = {"x": X, "y": Y, **TEST} | change
    path = saved(tmp_path / "a.npz", **{k: v for k, v in arrays.items() if v is not None})
    with pytest.raises(InputError, match=f"^dataset {path}: {message}") as raised:
        read_npz(path)
    assert "\n" not in str(raised.value)


def test_a_missing_npz_or_a_folder_gives_one_line(tmp_path: Path, capsys) -> None:
    for path, reason in (("no.npz", "No such file"), ("folder.npz", "Is a directory")):
        (tmp_path / "folder.npz").mkdir(exist_ok=True)
        assert program.main(["--dataset", str(tmp_path / path)]) == 2
        assert f"dataset {tmp_path / path}: {reason}" in stderr_line(capsys.readouterr().err)
    assert program.main(["--dataset", "mnist"]) == 2
    assert "or a FOLDER of LEAF JSON; did you mean Mnist?" in stderr_line(capsys.readouterr().err)


def test_the_default_split_of_a_file_keeps_its_test_part_out(mine: Path) -> None:
    source, split = read_data(str(mine))
    assert split.manifest["scheme"] == "label_count"
    assert max(map(np.max, split.train + split.test)) < 240
    assert split.manifest["source"] == source.origin
    assert default_normalize(source, split) == "none"
    whose = saved(mine.with_name("whose.npz"), x=X, y=Y, user=np.repeat(["ann", "bo"], 120))
    source, split = read_data(str(whose))
    assert split.users == ("ann", "bo") and sorted(split.train[0])[-1] < 120
    assert sum(map(len, split.train + split.test)) == 240


def test_other_contents_are_another_split(mine: Path) -> None:
    first = read_data(str(mine))[1]
    path = next((mine.parent / "my-data" / "split").glob("*.npz"))
    assert read_data(str(mine), str(path))[1].hash == first.hash
    saved(mine, x=X + 1, y=Y, **TEST)
    assert read_data(str(mine))[1].hash != first.hash
    with pytest.raises(InputError, match=r"split .*: made for other contents of my-data than"):
        read_data(str(mine), str(path))
    other = saved(mine.with_name("other.npz"), x=X, y=Y)
    with pytest.raises(InputError, match="made for dataset my-data, not for other"):
        read_data(str(other), str(path))
    with pytest.raises(InputError, match="LEAF folders go with named datasets"):
        read_data(str(mine), str(mine.parent))


def test_names_of_files() -> None:
    assert dataset_name("a/b c:d.v2.npz") == "b-c-d.v2"
    assert dataset_name("Mnist") == "Mnist"


def test_a_file_is_trained_recorded_replayed_and_plotted(mine: Path, capsys, monkeypatch) -> None:
    out = mine.parent / "out"
    job = ["--num_global_iters", "2", "--gpu", "-1", "--results_dir", str(out)]
    monkeypatch.chdir(mine.parent)
    assert program.main(["--dataset", mine.name, *job]) == 0
    path = next(p for p in out.glob("my-data_mclr_pFedMe_0.005*_0.h5"))
    with h5py.File(path) as file:
        assert file["init/fc1.weight"].shape == (4, 5)
    monkeypatch.chdir(out)
    assert program.main(["--replay", str(path)]) == 0
    assert program.main(["--verify", str(path)]) == 0
    moved = saved(mine.parent / "deep.npz", x=X, y=Y, **TEST)
    moved = moved.rename(mine.parent / "out" / mine.name)
    assert program.main(["--dataset", str(moved), *job, "--resume"]) == 0
    assert "finished and kept: 1 repetition\n" in capsys.readouterr().err
    assert main_plot.main(["--results_dir", str(out), "--dataset", "my-data"]) == 0
    assert (out / "my-data_mclr.png").exists()


# ---- torchvision's -------------------------------------------------------------------------------


def test_data_dir_is_where_the_files_are(raw: Path, tmp_path: Path) -> None:  # noqa: F811
    for folder in ("plain", "layout/FashionMNIST/raw", "inner/raw"):
        elsewhere = tmp_path / folder
        elsewhere.mkdir(parents=True)
        for file in raw.iterdir():
            (elsewhere / file.name).write_bytes(file.read_bytes())
        home = str(tmp_path / folder.split("/")[0])
        source = read_source("FashionMnist", {}, home)
        assert source.name == "FashionMnist" and source.num_train == 6
        assert np.array_equal(source.x, read_source("Mnist", {}).x)
    split = read_data("FashionMnist", partition=parse("iid:users=2"), data_dir=home)[1]
    assert split.manifest["dataset"] == "FashionMnist"


def test_fashion_mnist_offline_names_its_files(place: Path, monkeypatch) -> None:  # noqa: F811
    from torchvision.datasets import utils

    def offline(url: str, root: str, filename: str, md5: str) -> None:
        assert "fashion-mnist" in url and md5 == "8d4fb7e6c68d591d4c3dfef9ec88bf0d"
        raise OSError("no network")

    monkeypatch.setattr(utils, "download_url", offline)
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte.gz is missing .*\(no network\)"):
        read_data("FashionMnist", data_dir=str(place))
    (place / "file").write_text("")
    # A typing error must not become a folder.
    for name in ("there", "file"):
        with pytest.raises(InputError, match=rf"data_dir .*{name}: no such folder"):
            read_data("FashionMnist", data_dir=str(place / name))
    assert not (place / "there").exists()


@pytest.mark.parametrize(
    ("dataset", "part", "first", "classes"),
    [
        ("EmnistLetters", "letters", 1, 26),
        ("EmnistBalanced", "balanced", 0, 47),
        ("EmnistByclass", "byclass", 0, 62),
        ("EmnistDigits", "digits", 0, 10),
    ],
)
def test_emnist_is_turned_upright_and_counted_from_0(
    place: Path,  # noqa: F811
    dataset: str,
    part: str,
    first: int,
    classes: int,
) -> None:
    """Read by torchvision's own class from files in its layout."""
    folder = place / "Emnist" / "EMNIST" / "raw"
    folder.mkdir(parents=True)
    images = np.arange(5 * 28 * 28).reshape(5, 28, 28) % 251
    labels = np.array([first, classes - 1 + first, first + 1, first + 2, first + 3])
    for name, rows in (("train", slice(0, 3)), ("test", slice(3, 5))):
        stem = folder / f"emnist-{part}-{name}"
        stem.with_name(f"{stem.name}-images-idx3-ubyte").write_bytes(idx(images[rows]))
        stem.with_name(f"{stem.name}-labels-idx1-ubyte").write_bytes(idx(labels[rows]))
    source = read_source(dataset, {})
    assert (source.name, source.num_train, source.classes) == (dataset, 3, classes)
    assert source.y.tolist() == [0, classes - 1, 1, 2, 3] and source.x.dtype == np.uint8
    assert np.array_equal(source.x[:, 0], images.transpose(0, 2, 1))
    labels[0] = classes + first
    (folder / f"emnist-{part}-train-labels-idx1-ubyte").write_bytes(idx(labels[:3]))
    with pytest.raises(InputError, match=f"EMNIST {part} has labels .*{classes}, not 0.."):
        read_source(dataset, {})


def test_svhn_through_torchvision(place: Path, monkeypatch) -> None:  # noqa: F811
    from scipy.io import savemat
    from torchvision.datasets import SVHN

    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)
    monkeypatch.setattr(SVHN, "download", lambda self: None)
    (place / "Svhn").mkdir()
    for name, size in (("train", 4), ("test", 3)):
        x = np.zeros((32, 32, 3, size), np.uint8)
        x[5, 6, 1, 2] = 9
        file = place / "Svhn" / f"{name}_32x32.mat"
        savemat(file, {"X": x, "y": np.array([[10], [1], [9], [2]])[:size]})
    source = read_source("Svhn", {})
    assert source.y.tolist() == [0, 1, 9, 2, 0, 1, 9] and source.num_train == 4
    assert source.x[2, 1, 5, 6] == 9 == source.x[6, 1, 5, 6] and source.x.sum() == 18


@pytest.mark.parametrize(
    ("dataset", "known", "line"),
    [
        ("Cifar100", "CIFAR100", "CIFAR-100 is .* put cifar-100-python.tar.gz"),
        ("Svhn", "SVHN", "SVHN is .* put train_32x32.mat and test_32x32.mat"),
        ("EmnistLetters", "EMNIST", "EMNIST is .* put gzip.zip .*EMNIST/raw"),
    ],
)
def test_offline_says_what_to_put_where(
    place: Path,  # noqa: F811
    monkeypatch,
    dataset: str,
    known: str,
    line: str,
) -> None:
    import torchvision.datasets

    def offline(self) -> None:
        raise OSError("<urlopen error no network>")

    monkeypatch.setattr(getattr(torchvision.datasets, known), "download", offline)
    with pytest.raises(InputError, match=line) as raised:
        read_data(dataset)
    assert "\n" not in str(raised.value)
    assert " is missing or damaged and cannot be downloaded (<urlopen" in str(raised.value)


def test_cifar100_has_100_classes(place: Path, monkeypatch) -> None:  # noqa: F811
    import torchvision.datasets

    class Fake:
        filename = url = ""

        def __init__(self, root: str, train: bool, download: bool) -> None:
            size = 2000 if train else 500
            self.data = np.zeros((size, 32, 32, 3), np.uint8)
            self.targets = [i % 100 for i in range(size)]

    monkeypatch.setattr(torchvision.datasets, "CIFAR100", Fake)
    source, split = read_data("Cifar100")
    assert source.classes == 100 and source.num_train == 2000
    assert split.manifest["scheme"] == "dirichlet" and not split.manifest["omitted_labels"]


def test_every_dataset_has_its_facts() -> None:
    names = set(model_utils.DATASETS)
    assert names == set(model_utils.CLASSES) == set(model_utils.DEFAULTS)
    assert names - {"Synthetic"} == set(model_utils.SHAPES)
