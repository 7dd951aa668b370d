"""Inputs of public reports that once gave wrong numbers, tracebacks or silence."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import main
import main_plot
from data import generate
from FLAlgorithms.evaluation import Evaluator
from FLAlgorithms.trainmodel.models import build_model
from tests.test_data import idx, place, stderr_line  # noqa: F401 (a fixture)
from tests.toys import blobs
from utils import model_utils
from utils.errors import InputError
from utils.model_utils import MNIST_FILES, SHA256, dataset_name, read_data, read_source
from utils.partition import Split
from utils.schemes import parse

RNG = np.random.default_rng(0)
Y = RNG.integers(0, 3, 200)
X = (RNG.normal(size=(200, 8)) + Y[:, None]).astype(np.float32)
USER = np.arange(200) % 10

NETS = """
import io
import threading
import torch
from torch import nn


class Twin(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.out = nn.Linear(shape[0], classes)

    def forward(self, x):
        return self.out(self.first(x))

    def first(self, x):
        return nn.functional.elu(x)


class Elu(Twin):
    def first(self, x):
        return nn.functional.elu(x, inplace=True)


class HalfTwin(Twin):
    def first(self, x):
        return x * 0.5


class Half(Twin):
    def first(self, x):
        return x.mul_(0.5)


class MeanTwin(Twin):
    def first(self, x):
        return x - x.mean(-1, keepdim=True)


class Mean(Twin):
    def first(self, x):
        x -= x.mean(-1, keepdim=True)
        return x


class ColumnTwin(Twin):
    def first(self, x):
        return torch.cat([x[..., :1] * 0, x[..., 1:]], -1)


class Column(Twin):
    def first(self, x):
        x[..., 0] = 0
        return x


class MaskTwin(Twin):
    def first(self, x):
        return x.masked_fill(x > 1, 0)


class Mask(Twin):
    def first(self, x):
        return x.masked_fill_(x > 1, 0)


class Norm(nn.Module):
    norm = staticmethod(nn.utils.weight_norm)

    def __init__(self, shape, classes):
        super().__init__()
        self.out = self.norm(nn.Linear(shape[0], classes))

    def forward(self, x):
        return self.out(x)


class NewNorm(Norm):
    norm = staticmethod(nn.utils.parametrizations.weight_norm)


class Lock(Twin):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.lock = threading.Lock()


class File(Twin):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.file = open(__file__)


class Rows(Twin):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.rows = (i for i in range(3))
"""


@pytest.fixture
def inputs(place: Path, monkeypatch) -> Path:  # noqa: F811
    """A working folder with data and models of one's own."""
    np.savez(place / "plain.npz", x=X, y=Y, user=USER)
    (place / "nets.py").write_text(NETS)
    monkeypatch.chdir(place)
    return place


def run(*words: str) -> int:
    """Three short rounds of FedAvg, or as `words` say."""
    short = ["--algorithm", "FedAvg", "--num_global_iters", "3", "--local_epochs", "2"]
    return main.main([*short, "--learning_rate", "0.05", "--numusers", "3", "--gpu", "-1", *words])


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """All curves and final parameters of the results in a folder, by the end of their names."""
    found = {}
    for path in sorted(folder.glob("*_0.h5")):
        kind = "_p" if "_p_" in path.name else ""
        with h5py.File(path) as file:
            for name in ("rs_glob_acc", "rs_train_loss", "rs_test_loss", "user_test_acc"):
                found[f"{name}{kind}"] = file[name][()]
            found |= {f"{name}{kind}": v[()] for name, v in file.get("final", {}).items()}
    return found


# ---- F1: evaluation lets a model spoil the data --------------------------------------------------


@pytest.mark.parametrize("block_size", [0, 3])
@pytest.mark.parametrize("algorithm", ["FedAvg", "pFedMe", "PerAvg", "SCAFFOLD", "Local"])
def test_a_model_that_writes_into_its_argument_is_as_its_twin(inputs, algorithm, block_size):
    words = ["--dataset", "plain.npz", "--algorithm", algorithm, "--block_size", str(block_size)]
    words += ["--scaffold_option", "1"] if algorithm == "SCAFFOLD" else []
    for name in ("Elu", "Twin"):
        assert run(*words, "--model", f"nets.py:{name}", "--results_dir", name) == 0
    mine, twin = arrays(inputs / "Elu"), arrays(inputs / "Twin")
    assert mine.keys() == twin.keys() and len(mine) >= 6
    assert all(np.array_equal(mine[name], twin[name], equal_nan=True) for name in mine)


@pytest.mark.parametrize("name", ["Half", "Mean", "Column", "Mask"])
def test_every_way_to_write_into_the_argument(inputs, name):
    for kind in (name, f"{name}Twin"):
        words = ["--dataset", "plain.npz", "--algorithm", "pFedMe", "--model", f"nets.py:{kind}"]
        assert run(*words, "--results_dir", kind) == 0
    mine, twin = arrays(inputs / name), arrays(inputs / f"{name}Twin")
    assert all(np.array_equal(mine[n], twin[n], equal_nan=True) for n in twin)


def test_evaluating_thrice_gives_one_number_and_leaves_everything(inputs):
    counting = """
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return super().forward(x)

    def loss(self, logits, y):
        found = super().loss(logits, y)
        y.zero_()
        return found


from FLAlgorithms.trainmodel.classifier import Classifier


class Loss(Counting, Classifier):
    loss = Counting.loss
"""
    (inputs / "nets.py").write_text(f"{NETS}\n\nclass Counting(Elu):\n{counting}")
    data = blobs((8,))
    x, y = data.x.clone(), data.y.clone()
    model = build_model(f"{inputs / 'nets.py'}:Loss", (8,), 4, 0).double()
    values = [*model.parameters(), *model.buffers()]
    before = [v.clone() for v in values]
    evaluator = Evaluator(model, data)
    found = [evaluator.sums([values], "train") for _ in range(3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.equal(data.x, x) and torch.equal(data.y, y)
    assert all(map(torch.equal, values, before))


# ---- F2, F3: data and splits are known by their contents -----------------------------------------


def idx_folder(folder: Path, shift: int = 0, pixel: int = 0) -> Path:
    """MNIST's four files, tiny; `shift` turns the labels, `pixel` changes the images."""
    folder.mkdir(parents=True)
    for name, shape in MNIST_FILES.items():
        count = 600 if "train" in name else 200
        if len(shape) == 1:
            values = (np.arange(count) + shift) % 10
        else:
            values = np.random.RandomState(count).randint(0, 255, (count, 28, 28)) + pixel
        (folder / name).write_bytes(gzip.compress(idx(values)))
    return folder


@pytest.fixture
def official(place: Path, monkeypatch) -> Path:  # noqa: F811
    """Tiny MNIST and Fashion-MNIST that pass for the official ones; Mnist lies in its place."""
    folders = {
        "Mnist": idx_folder(place / "Mnist" / "raw"),
        "FashionMnist": idx_folder(place / "fashion", shift=3, pixel=7),
    }
    sizes = {n: (600 if "train" in n else 200, *s[1:]) for n, s in MNIST_FILES.items()}
    monkeypatch.setattr(model_utils, "MNIST_FILES", sizes)
    for name, folder in folders.items():
        contents = (gzip.decompress((folder / file).read_bytes()) for file in sizes)
        monkeypatch.setitem(SHA256, name, tuple(hashlib.sha256(c).hexdigest() for c in contents))
    monkeypatch.chdir(place)
    return place


def test_a_set_under_another_ones_name_is_refused(official, capsys):
    words = ["--dataset", "FashionMnist", "--data_dir", str(official / "Mnist" / "raw")]
    assert run(*words) == 2
    line = stderr_line(capsys.readouterr().err)
    assert "train-images-idx3-ubyte.gz: is Mnist's, where FashionMnist's should be" in line
    assert not (official / "FashionMnist").exists() and not (official / "results").exists()
    assert run(*words[:2], "--data_dir", str(official / "fashion")) == 0


@pytest.mark.parametrize(("shift", "pixel"), [(1, 0), (0, 1)])
def test_changed_files_are_refused_wherever_they_lie(official, shift, pixel, capsys):
    assert run("--dataset", "Mnist") == 0
    capsys.readouterr()
    (result,) = (official / "results").glob("*_0.h5")
    before = result.read_bytes()
    other = idx_folder(official / "other", shift, pixel)
    file = "train-labels-idx1-ubyte.gz" if shift else "train-images-idx3-ubyte.gz"
    message = f"{file}: is changed (sha256 "
    assert run("--dataset", "Mnist", "--data_dir", str(other)) == 2
    assert message in stderr_line(capsys.readouterr().err)
    shutil.copytree(other, official / "Mnist" / "raw", dirs_exist_ok=True)
    assert run("--dataset", "Mnist") == 2
    assert message in stderr_line(capsys.readouterr().err)
    assert result.read_bytes() == before


def emnist(folder: Path, shift: int = 0) -> Path:
    """EMNIST's digits in torchvision's layout, tiny: its checksum is not known file by file."""
    raw = folder / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 600), ("test", 200)):
        images = np.random.RandomState(count).randint(0, 255, (count, 28, 28))
        stem = f"emnist-digits-{name}"
        (raw / f"{stem}-images-idx3-ubyte").write_bytes(idx(images))
        labels = (np.arange(count) + shift) % 10
        (raw / f"{stem}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


def test_other_contents_of_a_named_set_do_not_share_splits_or_results(
    place,  # noqa: F811
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(place)
    words = ["--dataset", "EmnistDigits", "--model", "mclr", "--data_dir"]
    first, second = str(emnist(place / "one")), str(emnist(place / "two", shift=1))
    assert run(*words, first) == 0
    capsys.readouterr()
    (result,) = (place / "results").glob("*_0.h5")
    before = result.read_bytes()
    split = place / "EmnistDigits" / "split" / "niid_20users_2labels_seed0.npz"
    assert run(*words, second) == 2
    line = stderr_line(capsys.readouterr().err)
    assert f"split {split}: made for other contents of EmnistDigits than it has now" in line
    assert run(*words, second, "--split", str(split)) == 2
    assert "made for other contents" in stderr_line(capsys.readouterr().err)
    split.unlink()
    assert run(*words, second) == 2
    assert "holds a run on other contents of EmnistDigits" in capsys.readouterr().err
    assert result.read_bytes() == before
    assert run(*words, second, "--results_dir", "elsewhere") == 0
    split.unlink()
    assert run(*words, first) == 0
    assert run(*words, first, "--resume") == 0


def test_a_split_file_from_before_contents_were_recorded(official, capsys):
    """It is used where it is what its name says, and refused where it was drawn from others."""
    path = official / "Mnist" / "split" / "niid_20users_2labels_seed0.npz"
    split = read_data("Mnist")[1]
    old = {k: v for k, v in split.manifest.items() if k != "contents"}
    Split(split.users, split.train, split.test, old).save(path)
    assert read_data("Mnist")[1].hash == split.hash
    turned = tuple(np.roll(rows, 1) for rows in split.train)
    Split(split.users, turned, split.test, old).save(path)
    with pytest.raises(InputError, match="not what label_count gives for these contents of Mnist"):
        read_data("Mnist")
    iid = read_data("Mnist", partition=parse("iid:users=3"))[1]
    assert (
        iid.manifest["contents"] == split.manifest["contents"] == read_source("Mnist", {}).contents
    )


def test_a_split_of_a_file_is_not_one_of_the_named_set(official, capsys):
    source = read_source("Mnist", {})
    np.savez(official / "Mnist.npz", x=source.x[:300], y=source.y[:300])
    assert run("--dataset", "Mnist.npz") == 0
    (split,) = (official / "Mnist" / "split").glob("label_count_*.npz")
    capsys.readouterr()
    assert run("--dataset", "Mnist", "--split", str(split)) == 2
    line = stderr_line(capsys.readouterr().err)
    assert f"split {split}: made for other contents of Mnist than it has now" in line
    assert run("--dataset", "Mnist") == 0
    named = official / "Mnist" / "split" / "niid_20users_2labels_seed0.npz"
    capsys.readouterr()
    assert run("--dataset", "Mnist.npz", "--split", str(named)) == 2
    assert "made for other contents of Mnist" in stderr_line(capsys.readouterr().err)


# ---- F5, F9, F10: LEAF ---------------------------------------------------------------------------


def leaf(folder: Path, **parts: dict[str, int]) -> Path:
    """A LEAF folder of vectors with three labels; `parts`: {part: {user: samples}}."""
    for part, sizes in parts.items():
        data = {u: {"x": X[:n].tolist(), "y": Y[:n].tolist()} for u, n in sizes.items()}
        content = {"users": list(data), "num_samples": list(sizes.values()), "user_data": data}
        (folder / part).mkdir(parents=True)
        (folder / part / "d.json").write_text(json.dumps(content))
    return folder


LEAF = {"a": 20, "b": 20, "c": 20}


def test_hidden_files_are_no_data(inputs):
    folder = leaf(inputs / "leaf", train=LEAF, test=LEAF)
    first = read_data("Synthetic", str(folder))[1]
    for part in ("train", "test"):
        (folder / part / "._d.json").write_bytes(b"\0\5\26\7")
        (folder / part / ".DS_Store").write_bytes(b"\0")
    assert read_data("Synthetic", str(folder))[1].hash == first.hash


@pytest.mark.parametrize(
    ("train", "test", "users"),
    [
        (LEAF | {"empty": 0}, LEAF | {"empty": 0}, 4),
        (LEAF | {"empty": 0}, LEAF, 4),
        (LEAF, LEAF | {"empty": 0}, 3),
        (LEAF | {"empty": 4}, LEAF | {"empty": 0}, 4),
    ],
)
@pytest.mark.parametrize("algorithm", ["FedAvg", "pFedMe", "PerAvg", "SCAFFOLD"])
def test_leaf_users_without_samples(inputs, train, test, users, algorithm, capsys):
    folder = leaf(inputs / "leaf", train=train, test=test)
    words = ["--split", str(folder), "--dataset", "Synthetic", "--algorithm", algorithm]
    assert run(*words) == 0
    assert "no user holds the labels 3 4 5 6 7 8 9" in capsys.readouterr().err
    found = arrays(inputs / "results")
    assert found["user_test_acc"].shape[1] == users
    assert np.isnan(found["user_test_acc"][-1]).sum() == (users == 4)
    assert np.isfinite(found["rs_glob_acc"]).all()


@pytest.mark.parametrize("algorithm", ["FedAvg", "pFedMe", "PerAvg", "Local"])
@pytest.mark.parametrize("model", ["mclr", "bn.py:Net"])
def test_users_with_test_samples_alone_are_judged_by_the_global_model(
    inputs, algorithm, model, capsys
):
    (inputs / "bn.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__(nn.BatchNorm1d(shape[0]), nn.Linear(shape[0], classes))\n"
    )
    folder = leaf(inputs / "leaf", train=LEAF, test=LEAF | {"seen": 20, "unseen": 20})
    words = ["--split", str(folder), "--dataset", "Synthetic", "--algorithm", algorithm]
    assert run(*words, "--model", model, "--numusers", "9") == 0
    assert (
        "2 users have test samples but no train samples: never sampled" in capsys.readouterr().err
    )
    found = arrays(inputs / "results")
    assert np.isfinite(found["user_test_acc"]).all()
    paths = (inputs / "results").glob("*_0.h5")
    with h5py.File(next(path for path in paths if "_p_" not in path.name)) as file:
        assert file["users"].asstr()[3:].tolist() == ["seen", "unseen"]
        assert file["selected_users"][()].max() == 2
    if algorithm != "Local":
        # The same rows, the same model: what the global model gets is what a stranger gets.
        assert (found["user_test_acc"][:, 0] == found["user_test_acc"][:, 4]).all()
    if algorithm in ("pFedMe", "PerAvg"):
        same = (
            found["user_test_acc_p"][:, 4]
            - found["user_test_acc"][: len(found["rs_glob_acc_p"]), 4]
        )
        assert np.abs(same).max() == 0, "a personalised model that nothing was added to"


# ---- F6: text that is drawn ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["$_{$", "b$c$", r"\$x\$", "a_b^c"])
def test_names_are_drawn_as_they_are(inputs, name, monkeypatch, capsys):
    drawn = []
    from matplotlib.text import Text

    def watch(self, renderer, *rest, **more):
        drawn.append(self._preprocess_math(self.get_text()))
        return layout(self, renderer, *rest, **more)

    layout = Text.draw
    monkeypatch.setattr(Text, "draw", watch)
    users = np.array([name, *"bcdefghij"])[USER]
    np.savez("names.npz", x=X, y=Y, user=users)
    assert run("--dataset", "names.npz") == 0
    assert "cannot be drawn" not in capsys.readouterr().err
    (picture,) = (inputs / "names" / "split").glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (name, False) in drawn and not any(math for _, math in drawn)


@pytest.mark.parametrize("title", ["$_{$", "b$c$"])
def test_a_title_is_drawn_as_it_is(inputs, title):
    options = "{dataset: plain.npz, algorithm: FedAvg, num_global_iters: 1, gpu: -1}"
    text = f'title: "{title}"\ndefaults: {options}\nruns:\n  - learning_rate: [0.01]\n'
    Path("t.yaml").write_text(text)
    assert main.main(["--config", "t.yaml"]) == 0
    assert main_plot.main(["--config", "t.yaml"]) == 0
    assert (inputs / "results" / "t.png").exists()
    assert main_plot.main([]) == 0


def test_a_picture_that_fails_ends_no_run(inputs, monkeypatch, capsys):
    def fails(*_, **__):
        raise ValueError("no\nfont")

    monkeypatch.setattr(model_utils, "draw", fails)
    assert run("--dataset", "plain.npz") == 0
    said = capsys.readouterr().err
    assert "notice: " in said and ".png cannot be drawn (no font)" in said
    assert "split made: " in said and ", picture" not in said
    assert generate.partition(["plain.npz", "iid"]) == 0
    assert "picture:" not in capsys.readouterr().out


# ---- F7: models that cannot be copied ------------------------------------------------------------


@pytest.mark.parametrize("block_size", [0, 3])
@pytest.mark.parametrize("algorithm", ["FedAvg", "pFedMe", "PerAvg", "Local"])
def test_the_older_weight_norm_is_the_newer_one(inputs, algorithm, block_size):
    words = ["--dataset", "plain.npz", "--algorithm", algorithm, "--block_size", str(block_size)]
    for name in ("Norm", "NewNorm"):
        options = ["--model", f"nets.py:{name}", "--results_dir", name, "--dtype", "float64"]
        assert run(*words, *options) == 0
    old, new = arrays(inputs / "Norm"), arrays(inputs / "NewNorm")
    assert {"rs_train_loss", "rs_glob_acc", "user_test_acc", "out.bias"} <= old.keys()
    for name in ("rs_train_loss", "rs_glob_acc", "user_test_acc", "out.bias"):
        np.testing.assert_allclose(old[name], new[name], rtol=1e-12)


@pytest.mark.parametrize("algorithm", ["FedAvg", "pFedMe"])
@pytest.mark.parametrize("name", ["Lock", "File", "Rows"])
def test_what_cannot_be_copied_is_refused_in_one_line(inputs, name, algorithm, capsys):
    assert run("--dataset", "plain.npz", "--model", "mclr") == 0  # makes the split
    capsys.readouterr()
    words = ["--dataset", "plain.npz", "--algorithm", algorithm, "--model", f"nets.py:{name}"]
    assert run(*words, "--results_dir", "out") == 2
    line = stderr_line(capsys.readouterr().err)
    assert f"--model {name}: cannot be copied, so users cannot train on copies of it (" in line
    assert not list(inputs.glob("out/*"))


# ---- F8: owners of test rows ---------------------------------------------------------------------


def test_owners_of_test_rows_test_on_them(inputs, capsys):
    whose = np.r_[USER[:150], 5 + USER[150:]]  # 5..14: five of them are seen nowhere else
    test = {"x_test": X[150:], "y_test": Y[150:]}
    np.savez("own.npz", x=X[:150], y=Y[:150], **test, user=whose)
    assert run("--dataset", "own.npz") == 0
    said = capsys.readouterr().err
    assert "5 users have test samples but no train samples" in said and "unused" not in said
    _, split = read_data(str(inputs / "own.npz"))
    assert split.manifest["scheme"] == "owner" and len(split.users) == 15
    for name, train, rows in zip(split.users, split.train, split.test, strict=True):
        own = np.flatnonzero(whose == int(name))
        assert np.sort(train).tolist() == own[own < 150].tolist()
        assert np.sort(rows).tolist() == own[own >= 150].tolist()
    found = arrays(inputs / "results")
    assert found["user_test_acc"].shape[1] == 15
    assert run("--dataset", "own.npz", "--test_set", "global") == 0
    np.savez("own.npz", x=X[:150], y=Y[:150], **test, user=whose[:170])
    assert run("--dataset", "own.npz") == 2
    assert "user has type int64 and shape (170,): must be" in capsys.readouterr().err


@pytest.mark.parametrize("user", [None, USER[:150]])
def test_test_rows_that_nobody_reads_are_told(inputs, user, capsys):
    whose = {} if user is None else {"user": user}
    np.savez("part.npz", x=X[:150], y=Y[:150], x_test=X[150:], y_test=Y[150:], **whose)
    words = ["--dataset", "part.npz", "--partition", "iid:users=4,pool=train"]
    told = "50 official test rows are unused; --test_set global reads them"
    assert run(*words[:2]) == 0 and told in capsys.readouterr().err
    assert run(*words) == 0 and told in capsys.readouterr().err
    assert run(*words, "--test_set", "global") == 0 and told not in capsys.readouterr().err
    assert run(*words[:3], "iid:users=4") == 0 and told not in capsys.readouterr().err


# ---- F11, F12 ------------------------------------------------------------------------------------


def test_paths_of_the_other_system(inputs, capsys):
    windows = r"C:\Users\someone\data\plain.npz"
    assert dataset_name(windows) == dataset_name(r"\\server\share\plain.npz") == "plain"
    assert dataset_name("C:/data/plain.npz") == "plain"
    assert dataset_name("/home/someone/plain.npz") == dataset_name("plain.npz") == "plain"
    assert run("--dataset", "plain.npz") == 0
    (path,) = (inputs / "results").glob("*_0.h5")
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["config"]) | {"dataset": windows}
        file.attrs["config"] = json.dumps(config)
    raw = path.read_bytes()
    path.write_bytes(raw[512:])  # read on trust, as a file from elsewhere without a checksum
    assert main_plot.main([]) == 0
    assert (inputs / "results" / "plain_mclr.png").exists()
    capsys.readouterr()
    assert main.main(["--replay", str(path)]) == 2
    assert f"dataset {windows}: No such file" in stderr_line(capsys.readouterr().err)


def test_a_data_dir_that_nothing_is_read_from_is_told(inputs, capsys):
    folder = leaf(inputs / "leaf", train=LEAF, test=LEAF)
    for words in (
        ["--dataset", "plain.npz"],
        ["--dataset", "Synthetic", "--split", str(folder)],
    ):
        assert run(*words, "--data_dir", "nowhere") == 0
        name = Path(words[1]).stem
        told = f"notice: --data_dir has no effect: {name} is not read from there\n"
        assert told in capsys.readouterr().err
        assert run(*words) == 0 and "--data_dir" not in capsys.readouterr().err


def test_partitions_of_files_and_folders_by_hand(inputs, capsys):
    folder = leaf(inputs / "vehicle", train=LEAF, test=LEAF)
    for dataset in ("plain.npz", "vehicle"):
        assert generate.partition([dataset, "iid", "--users", "4", "--data_dir", "nowhere"]) == 0
        printed, said = capsys.readouterr()
        name = Path(dataset).stem
        assert f"notice: --data_dir has no effect: {name} is not read from there\n" in said
        assert " --data_dir" not in printed.splitlines()[-1]
    assert f"main.py --dataset {folder} --partition iid:users=4" in printed


def test_a_partition_says_its_name_once(inputs, capsys):
    np.savez("names.npz", x=X, y=Y, user=np.array(["..", *"bcdefghij"])[USER])
    for words in (["--dataset", "names.npz"], ["--dataset", "names.npz", "--partition", "fednova"]):
        assert run(*words) == 2
        assert stderr_line(capsys.readouterr().err).count("partition") == 1
