"""Splits, data sets, normalisation, generator scripts."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data import generate
from utils import model_utils
from utils.errors import InputError
from utils.model_utils import (
    Source,
    default_normalize,
    features,
    read_data,
    read_source,
)
from utils.partition import Split, check, draw, table
from utils.schemes import Pool, divide, partition_of, published, synthetic, synthetic_sizes

ROOT = Path(__file__).resolve().parents[1]
PART = ("train", "test")


@pytest.fixture(scope="module")
def mnist() -> Source:
    return read_source("Mnist", {})


@pytest.fixture(scope="module")
def historical(mnist: Source) -> Split:
    return published(mnist.y)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder in place of the repository's."""
    monkeypatch.setattr(model_utils, "DATA", tmp_path)
    return tmp_path


def fake_labels(seed: int = 0) -> np.ndarray:
    """2000 labels, 120..280 of each class, mixed."""
    rng = np.random.RandomState(seed)
    sizes = [120, 280, 200, 150, 250, 190, 210, 160, 240, 200]
    return rng.permutation(np.repeat(np.arange(10), sizes)).astype(np.int64)


def label_count(labels, users=20, labels_per_user=2, seed=0) -> Split:
    return drawn("label_count", labels, users=users, labels_per_user=labels_per_user, seed=seed)


def iid(labels, users=20, seed=0) -> Split:
    return drawn("iid", labels, users=users, seed=seed)


def drawn(scheme: str, labels: np.ndarray, **given) -> Split:
    return divide(Pool("Mnist", labels), partition_of(scheme, given))


def tiny(shape: tuple[int, ...] = (1, 4, 4), name: str = "Mnist") -> Source:
    y = fake_labels()
    x = np.random.RandomState(1).randint(0, 256, (len(y), *shape)).astype(np.uint8)
    return Source(name, x, y, 10, 1500)


def parts_of(split: Split, user: int) -> dict[str, np.ndarray]:
    return {"train": split.train[user], "test": split.test[user]}


def stderr_line(text: str) -> str:
    assert text.count("\n") == 1 and text.split(": ")[1] == "error", text
    return text


# ---- the published split -------------------------------------------------------------------------


def test_published_split_has_the_verified_facts(mnist: Source, historical: Split) -> None:
    train, test = historical.train, historical.test
    assert sum(map(len, train)) == 52470 and sum(map(len, test)) == 17499
    assert min(map(len, train)) == 1165 and max(map(len, train)) == 3834
    wrong = {
        part: sum(
            int(
                (
                    historical.targets(mnist.y, u, part) != mnist.y[parts_of(historical, u)[part]]
                ).sum()
            )
            for u in range(20)
        )
        for part in PART
    }
    assert wrong == {"train": 15, "test": 4}
    assert len(np.unique(np.concatenate(train + test))) == 23536
    hits = []
    for user in range(20):
        others = np.concatenate([rows for other, rows in enumerate(train) if other != user])
        hits.append(np.isin(test[user], others))
    assert round(100 * np.mean([hit.mean() for hit in hits]), 1) == 90.7
    assert round(100 * np.concatenate(hits).mean(), 1) == 89.1


def test_published_overrides_are_kept_only_where_a_label_is_wrong(
    mnist: Source, historical: Split
) -> None:
    assert historical.labels
    for (user, part), given in historical.labels.items():
        rows = parts_of(historical, user)[part]
        assert len(given) == len(rows) and (given != mnist.y[rows]).any()
        assert set(given.tolist()) <= {user % 10, (user + 1) % 10}


def test_published_exists_for_mnist_alone() -> None:
    with pytest.raises(InputError, match=r"^split published: exists for Mnist only, not for Syn"):
        read_data("Synthetic", "published")


def test_published_initial_model_scores_the_exact_counts(mnist: Source, historical: Split) -> None:
    """torch.manual_seed(0), Linear(784, 10): 1402 of 17,499 test, 4244 of 52,470 train right."""
    import torch

    x = torch.from_numpy(features(mnist, historical, "published")).flatten(1)
    torch.manual_seed(0)
    with torch.no_grad():
        guess = torch.nn.Linear(784, 10)(x).argmax(1).numpy()
    right = {
        part: sum(
            int(
                (guess[parts_of(historical, u)[part]] == historical.targets(mnist.y, u, part)).sum()
            )
            for u in range(20)
        )
        for part in PART
    }
    assert right == {"train": 4244, "test": 1402}


# ---- drawn splits --------------------------------------------------------------------------------


@pytest.mark.parametrize("users", [1, 3, 7, 13, 20])
@pytest.mark.parametrize("per_user", [1, 2, 3, 10])
def test_label_count_uses_every_image_of_its_labels_once(users: int, per_user: int) -> None:
    labels = fake_labels()
    split = label_count(labels, users, per_user, seed=3)
    assert len(split.users) == len(split.train) == len(split.test) == users
    held = {(u + j) % 10 for u in range(users) for j in range(per_user)}
    omitted = sorted(set(range(10)) - held)
    assert split.manifest["omitted_labels"] == omitted
    printed = [line for line in table(split, labels).splitlines() if line.startswith("omitted")]
    assert printed == (
        [f"omitted labels (no user holds them): {' '.join(map(str, omitted))}"] if omitted else []
    )
    used = np.sort(np.concatenate(split.train + split.test))
    assert used.tolist() == np.flatnonzero(np.isin(labels, list(held))).tolist()
    for user in range(users):
        train, test = labels[split.train[user]], labels[split.test[user]]
        wanted = {(user + j) % 10 for j in range(per_user)}
        assert set(train) == wanted
        assert abs(len(test) - (len(train) + len(test)) / 4) < 1
        for label in wanted:
            mine = (train == label).sum() + (test == label).sum()
            assert abs((test == label).sum() - mine / 4) < 1
    if users > 10:
        sizes = [len(a) + len(b) for a, b in zip(split.train, split.test, strict=True)]
        assert max(sizes) > 1.3 * min(sizes)


def test_label_count_gives_each_holder_at_least_one_sample() -> None:
    labels = np.repeat(np.arange(10), 12)
    split = label_count(labels, users=60, labels_per_user=2)
    assert min(map(len, split.train)) >= 1
    assert (split.counts(labels, 10) > 0).sum(axis=1).tolist() == [2] * 60
    one = label_count(labels, users=120, labels_per_user=1)
    assert [len(rows) for rows in one.train] == [1] * 120
    assert [len(rows) for rows in one.test] == [0] * 120


@pytest.mark.parametrize("users", [1, 3, 7, 13, 20, 2000])
def test_iid_is_even_and_covers_everything(users: int) -> None:
    labels = fake_labels()
    split = iid(labels, users, seed=1)
    assert np.sort(np.concatenate(split.train + split.test)).tolist() == list(range(2000))
    assert min(map(len, split.train)) >= 1
    counts = split.counts(labels, 10)
    assert np.ptp(counts.sum(axis=1)) <= 1 and np.ptp(counts, axis=0).max() <= 1
    for user in range(users):
        size = len(split.train[user]) + len(split.test[user])
        assert abs(len(split.test[user]) - size / 4) < 1
        share = np.bincount(labels[split.test[user]], minlength=10)
        assert (abs(share - counts[user] / 4) < 1).all()


def test_tiny_users_still_test_on_a_quarter_and_on_every_label() -> None:
    """500 users with 4 samples: always the same position would test the same few labels."""
    labels = fake_labels()
    split = iid(labels, 500)
    assert [len(rows) for rows in split.test] == [1] * 500
    share = np.bincount(labels[np.concatenate(split.test)], minlength=10) / 500
    assert (abs(share - np.bincount(labels) / 2000) < 0.06).all()


@pytest.mark.parametrize("scheme", [label_count, iid])
def test_rows_are_shuffled_within_a_user(scheme) -> None:
    labels = fake_labels()
    split = scheme(labels, 5)
    for part in (*split.train, *split.test):
        assert (np.diff(part) < 0).any()
        assert (np.diff(labels[part]) < 0).any()


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda y: label_count(y, users=0), "users 0: must be 1 or more"),
        (lambda y: label_count(y, labels_per_user=0), "labels per user 0: must be in 1..10"),
        (lambda y: label_count(y, labels_per_user=11), "labels per user 11: must be in 1..10"),
        (lambda y: label_count(y, seed=-1), "seed -1: must be in 0..4294967295"),
        (
            lambda y: label_count(y, users=700, labels_per_user=2),
            "users 700: 140 of them hold label 0, of which Mnist has only 120 samples; choose fewer"
            " users or labels per user",
        ),
        (lambda y: iid(y, users=2001), "users 2001: Mnist has 2000 samples, so at most as many"),
        (lambda y: iid(y, users=-3), "users -3: must be 1 or more"),
        (lambda y: iid(y, seed=2**32), "seed 4294967296: must be in 0..4294967295"),
        (lambda y: synthetic(y, users=0), "users 0: must be 1 or more"),
    ],
)
def test_bad_arguments_of_a_scheme_give_one_line(call, line: str) -> None:
    with pytest.raises(InputError) as raised:
        call(fake_labels())
    assert str(raised.value) == line


# ---- seeds and hashes ----------------------------------------------------------------------------

HASHES = """
import numpy as np, random
from tests.test_data import iid, label_count
from utils.schemes import synthetic, synthetic_sizes
y = np.arange(3000) * 7 % 10
n = synthetic_sizes(np.random.RandomState(5), 8).sum()
print(label_count(y, 13, 3, 5).hash, iid(y, 13, 5).hash, synthetic(np.zeros(n), 8, seed=5).hash)
"""


def hashes(environment: dict[str, str]) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", HASHES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.split()


def test_the_hash_is_the_same_in_every_process_and_another_for_another_seed() -> None:
    np.random.seed(9)
    random.seed(9)
    y = np.arange(3000) * 7 % 10
    sizes = synthetic_sizes(np.random.RandomState(5), 8)
    here = [
        label_count(y, 13, 3, 5).hash,
        iid(y, 13, 5).hash,
        synthetic(np.zeros(sizes.sum()), 8, seed=5).hash,
    ]
    assert hashes({"PYTHONHASHSEED": "1"}) == here
    assert hashes({"PYTHONHASHSEED": "77"}) == here
    assert label_count(y, 13, 3, 6).hash != here[0] and iid(y, 13, 6).hash != here[1]


def test_drawing_leaves_the_global_random_state_alone(mnist: Source) -> None:
    np.random.seed(3)
    random.seed(3)
    expected = np.random.RandomState(3).rand(), random.Random(3).random()
    label_count(fake_labels())
    iid(fake_labels())
    published(mnist.y)
    read_source("Synthetic", {"source": {"users": 2, "alpha": 1, "beta": 1, "seed": 0}})
    assert (np.random.rand(), random.random()) == expected


def test_the_hash_sees_everything_that_changes_the_data() -> None:
    rows = tuple(np.arange(i, i + 4) for i in (0, 4))
    base = Split(("a", "b"), rows, rows, {"dataset": "Mnist"})
    others = [
        Split(("a", "c"), rows, rows, {}),
        Split(("a", "b"), (rows[0][::-1], rows[1]), rows, {}),
        Split(("a", "b"), (np.arange(5), np.arange(5, 8)), rows, {}),
        Split(("a", "b"), rows, (rows[0], rows[1][:3]), {}),
        Split(("a", "b"), rows, rows, {}, {(0, "train"): np.zeros(4, np.int64)}),
        Split(("a", "b"), rows, rows, {}, {(0, "test"): np.zeros(4, np.int64)}),
        Split(("a", "b"), rows, rows, {"source": {"alpha": 0.5}}),
        Split(("a", "b"), rows, rows, {"source": {"alpha": 1.0}}),
    ]
    assert len({base.hash, *(split.hash for split in others)}) == 1 + len(others)
    assert Split(base.users, rows, rows, {"scheme": "of another name"}).hash == base.hash
    assert base.manifest["hash"] == base.hash


# ---- files ---------------------------------------------------------------------------------------


def same(a: Split, b: Split) -> bool:
    return (
        a.users == b.users
        and a.manifest == b.manifest
        and all(
            np.array_equal(p, q) for p, q in zip(a.train + a.test, b.train + b.test, strict=True)
        )
        and a.labels.keys() == b.labels.keys()
        and all(np.array_equal(a.labels[key], b.labels[key]) for key in a.labels)
    )


def test_a_split_survives_the_file(historical: Split, tmp_path: Path) -> None:
    for split in (historical, label_count(fake_labels(), 7), iid(fake_labels(), 1500)):
        path = tmp_path / "new folder" / "split.npz"
        split.save(path)
        loaded = Split.load(path)
        assert same(split, loaded) and loaded.hash == split.hash
        assert {rows.dtype for rows in loaded.train + loaded.test} == {np.dtype(np.int64)}
        assert os.listdir(path.parent) == ["split.npz"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "split.npz"
    old = label_count(fake_labels(), 3)
    old.save(path)

    def broken(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for target, name in ((os, "replace"), (np, "savez_compressed")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, broken)
            with pytest.raises(InputError, match=r"^cannot write .*split.npz: No space left"):
                label_count(fake_labels(), 4).save(path)
        assert os.listdir(tmp_path) == ["split.npz"]
        assert same(Split.load(path), old)


def saved(path: Path, **changes: object) -> None:
    """A split file whose arrays, or users and manifest, are replaced."""
    labels = fake_labels()
    split = label_count(labels, 3, seed=0)
    split = Split(
        split.users,
        split.train,
        split.test,
        split.manifest,
        {(1, "test"): labels[split.test[1]].copy()},
    )
    split.save(path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    head = json.loads(str(arrays["head"]))
    for key in ("users", "manifest"):
        head[key] = changes.pop(key, head[key])
    arrays["head"] = np.array(json.dumps(head))
    for name, change in changes.items():
        arrays[name] = change(arrays[name])
    np.savez(path, **arrays)


def negative(rows: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(rows)) == 5, -1, rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": lambda a: a.astype(np.float64)}, "numbers must be int64"),
        ({"rows": lambda a: a.astype(np.int32)}, "numbers must be int64"),
        ({"rows": negative}, "negative row or label"),
        ({"rows": lambda a: a[:-1]}, "sizes do not fit the rows"),
        ({"rows": lambda a: a[:, None]}, "rows and labels must be flat"),
        ({"rows": lambda a: a[::-1]}, "contents do not match the hash in it"),
        ({"labels": lambda a: (a + 1) % 10}, "contents do not match the hash in it"),
        ({"labels": lambda a: a[1:]}, "labels do not fit the rows"),
        ({"overrides": lambda a: a + 7}, "labels of an unknown user"),
        ({"overrides": lambda a: a.ravel()}, "wrong list of labels"),
        ({"sizes": lambda a: a[:, 1:]}, "sizes do not fit the users"),
        ({"users": ["a", "b", "c"]}, "contents do not match the hash in it"),
        ({"users": ["a", "a", "c"]}, "users must be one or more, unique"),
        ({"users": []}, "users must be one or more, unique"),
        ({"users": [1, 2, 3]}, "not a split file, or damaged"),
        ({"manifest": 5}, "not a split file, or damaged"),
        ({"manifest": {"dataset": "Mnist"}}, "contents do not match the hash in it"),
    ],
)
def test_a_damaged_split_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    path = tmp_path / "bad.npz"
    saved(path)
    Split.load(path)
    saved(path, **changes)
    with pytest.raises(InputError) as raised:
        Split.load(path)
    assert str(raised.value) == f"split {path}: {message}"


def test_other_files_are_refused_as_splits(tmp_path: Path) -> None:
    good = tmp_path / "good.npz"
    saved(good)
    content = good.read_bytes()
    for name, data in {
        "empty": b"",
        "text": b"hello, world",
        "cut": content[:-40],
        "half": content[: len(content) // 2],
        "pickle": b"\x80\x04K\x01.",
    }.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"^split .*{name}: not a split file, or damaged$"):
            Split.load(path)
    np.savez(tmp_path / "other.npz", a=np.arange(3))
    np.save(tmp_path / "array.npy", np.arange(3))
    for name in ("other.npz", "array.npy"):
        with pytest.raises(InputError, match="not a split file, or damaged"):
            Split.load(tmp_path / name)
    with pytest.raises(InputError, match=r"^split .*none.npz: No such file"):
        Split.load(tmp_path / "none.npz")
    with pytest.raises(InputError, match=r"^split "):
        Split.load(tmp_path)


def test_rows_and_labels_beyond_the_dataset_are_refused() -> None:
    source = tiny()
    inside, beyond = np.array([0, 1999]), np.array([0, 2000])
    check(Split(("a",), (inside,), (inside,), {}), source)
    with pytest.raises(
        InputError, match=r"^split: test row 2000 of user a is outside Mnist's 0..19"
    ):
        check(Split(("a",), (inside,), (beyond,), {}), source)
    with pytest.raises(InputError, match=r"^split: train row -4 of user a is outside"):
        check(Split(("a",), (np.array([-4, 2]),), (inside,), {}), source)
    with pytest.raises(InputError, match=r"^split: a train label of user a is outside 0..9"):
        check(Split(("a",), (inside,), (inside,), {}, {(0, "train"): np.array([3, 10])}), source)
    with pytest.raises(InputError, match=r"^split: user a has test rows and labels of unlike numb"):
        check(Split(("a",), (inside,), (inside,), {}, {(0, "test"): np.array([3])}), source)


# ---- table and picture ---------------------------------------------------------------------------


def test_the_table_names_sizes_and_labels() -> None:
    labels = fake_labels()
    split = label_count(labels, 3, 2)
    lines = table(split, labels).splitlines()
    held = split.counts(labels, 10)[2]
    assert lines[3].split() == [
        "f_00002",
        str(len(split.train[2])),
        str(len(split.test[2])),
        f"2:{held[2]}",
        f"3:{held[3]}",
    ]
    total = [line.split()[1:] for line in lines if line.startswith("total")]
    assert total == [[str(sum(map(len, part))) for part in (split.train, split.test)]]
    many = table(iid(labels, 1000), labels).splitlines()
    assert "... 950 more users" in many and len(many) < 60


@pytest.mark.parametrize("users", [1, 20, 300])
def test_the_picture_is_a_png(users: int, tmp_path: Path) -> None:
    labels = fake_labels()
    path = tmp_path / "picture.png"
    draw(iid(labels, users), labels, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 5000
    assert os.listdir(tmp_path) == ["picture.png"]


# ---- normalisation -------------------------------------------------------------------------------


def test_default_split_of_mnist_is_normalised_by_its_train_part(
    mnist: Source, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """68 pixels are constant over the train rows of the default split."""
    monkeypatch.setitem(model_utils.DATASETS, "Mnist", lambda manifest, home: mnist)
    source, split = read_data("Mnist")
    assert "split made: " in capsys.readouterr().err
    train = np.concatenate(split.train)
    assert (len(train), sum(map(len, split.test))) == (52498, 17502)
    assert default_normalize(source, split) == "pixel"
    x = features(source, split, "pixel").reshape(len(source.y), -1)
    assert x.dtype == np.float32
    raw = source.x.reshape(len(source.y), -1)[train]
    constant = raw.min(axis=0) == raw.max(axis=0)
    assert constant.sum() == 68
    assert (x[:, constant] == 0).all()
    kept = x[train][:, ~constant]
    assert abs(kept.mean(axis=0, dtype=np.float64)).max() < 1e-6
    assert abs(kept.std(axis=0, dtype=np.float64) - 1).max() < 1e-6


@pytest.mark.parametrize(
    ("normalize", "shape"), [("pixel", (1, 4, 4)), ("pixel", (6,)), ("channel", (3, 4, 4))]
)
def test_statistics_come_from_train_rows_only(normalize: str, shape: tuple[int, ...]) -> None:
    source = tiny(shape)
    split = label_count(source.y, 5, 2)
    before = features(source, split, normalize)
    train, test = np.concatenate(split.train), np.concatenate(split.test)
    axes = (0, 2, 3) if normalize == "channel" else 0
    seen = before[train].astype(np.float64)
    assert abs(seen.mean(axis=axes)).max() < 1e-6 and abs(seen.std(axis=axes) - 1).max() < 1e-6
    changed = source.x.copy()
    changed[np.setdiff1d(np.arange(len(changed)), train)] = 255
    after = features(Source("Mnist", changed, source.y, 10, 1500), split, normalize)
    assert np.array_equal(before[train], after[train])
    assert not np.array_equal(before[test], after[test])


@pytest.mark.parametrize("normalize", ["pixel", "channel", "published"])
def test_features_match_numpy_in_float64(normalize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows held twice count twice; awkward chunk sizes; a float feature that is constant."""
    monkeypatch.setattr(model_utils, "_chunks", lambda rows, x: np.array_split(rows, 5))
    source = tiny((2, 3, 3), "Cifar10")
    x = source.x.astype(np.float32) / 7 + 1000
    x[:, 1, 2, 2] = 0.1
    source = Source("Cifar10", x, source.y, 10, 1500)
    rows = np.array([5, 5, 9, 700, 1999, 3])
    split = Split(("a", "b"), (rows[:2], rows[2:]), (rows[:1], rows[:1]), {})
    wide = x.astype(np.float64)
    over = wide if normalize == "published" else wide[rows]
    axes = (0, 2, 3) if normalize == "channel" else 0
    mean, std = over.mean(axis=axes, keepdims=True), over.std(axis=axes, keepdims=True)
    if normalize == "pixel":
        std[0, 1, 2, 2] = np.inf
    if normalize == "published":
        std += 0.001
    expected = (wide - mean) / std
    np.testing.assert_allclose(features(source, split, normalize), expected, rtol=1e-6, atol=1e-6)
    if normalize == "pixel":
        assert (features(source, split, normalize)[:, 1, 2, 2] == 0).all()


def test_normalisations_by_name() -> None:
    gray, colour, vector = tiny(), tiny((3, 2, 2)), tiny((6,), "Synthetic")
    split = label_count(gray.y, 2)
    assert np.array_equal(features(gray, split, "none"), gray.x.astype(np.float32))
    names = [default_normalize(source, split) for source in (gray, colour, vector)]
    assert names == ["pixel", "channel", "none"]
    for scheme, name in (("published", "published"), ("leaf", "none")):
        marked = Split(split.users, split.train, split.test, {"scheme": scheme})
        assert default_normalize(gray, marked) == name
    with pytest.raises(InputError, match=r"^normalize channel: Synthetic has vectors"):
        features(vector, split, "channel")
    with pytest.raises(InputError, match=r"^normalize zscore: must be one of pixel, channel, none"):
        features(gray, split, "zscore")
    nothing = np.zeros(0, np.int64)
    with pytest.raises(InputError, match="no train samples"):
        features(gray, Split(("a",), (nothing,), (nothing,), {}), "pixel")


# ---- Synthetic -----------------------------------------------------------------------------------


def test_synthetic_default_has_the_known_sizes(place: Path) -> None:
    source, split = read_data("Synthetic")
    sizes = [len(a) + len(b) for a, b in zip(split.train, split.test, strict=True)]
    assert (len(sizes), min(sizes), max(sizes), sum(sizes)) == (100, 250, 25810, 205795)
    assert source.shape == (60,) and source.x.dtype == np.float32 and source.num_train == 205795
    assert default_normalize(source, split) == "none"
    start = 0
    for user, size in enumerate(sizes):
        rows = np.concatenate([split.train[user], split.test[user]])
        assert np.sort(rows).tolist() == list(range(start, start + size))
        assert len(split.train[user]) == int(0.9 * size)
        assert (np.diff(split.train[user]) < 0).any()
        start += size


def test_synthetic_draws_in_the_original_order() -> None:
    """Written out anew from spec/published.md, in float64, on its own stream."""
    alpha, beta, users = 0.3, 0.7, 4
    rng = np.random.RandomState(11)
    sizes = (rng.lognormal(4, 2, users).astype(int) + 50) * 5
    means = rng.normal(0, alpha, users)
    centers = rng.normal(0, beta, users)
    inputs = [rng.normal(center, 1, 60) for center in centers]
    x, y = [], []
    for user in range(users):
        weight = rng.normal(means[user], 1, (60, 10))
        bias = rng.normal(means[user], 1, 10)
        x.append(
            rng.multivariate_normal(inputs[user], np.diag(np.arange(1, 61) ** -1.2), sizes[user])
        )
        y.append((x[-1] @ weight + bias).argmax(axis=1))
    given = {"users": users, "alpha": alpha, "beta": beta, "seed": 11}
    source = read_source("Synthetic", {"source": given})
    assert np.array_equal(source.x, np.concatenate(x).astype(np.float32))
    assert np.array_equal(source.y, np.concatenate(y))
    again = read_source("Synthetic", synthetic(source.y, **given).manifest)
    assert np.array_equal(source.x, again.x)
    other = read_source("Synthetic", {"source": {**given, "alpha": 0.4}})
    assert synthetic(other.y, **{**given, "alpha": 0.4}).hash != synthetic(source.y, **given).hash


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"alpha": -1}, r"alpha -1.0: must be in 0..1e\+06"),
        ({"beta": float("nan")}, r"beta nan: must be in 0..1e\+06"),
        ({"users": 0}, "users 0: must be 1 or more"),
        ({"seed": -1}, r"seed -1: must be in 0..4294967295"),
        ({"beta": None}, "Synthetic: the split's manifest lacks users, alpha, beta, seed"),
    ],
)
def test_synthetic_arguments_are_checked(change: dict, line: str) -> None:
    given = {"users": 3, "alpha": 0.5, "beta": 0.5, "seed": 0, **change}
    with pytest.raises(InputError, match=f"^{line}$"):
        read_source("Synthetic", {"source": given})


# ---- read_data -----------------------------------------------------------------------------------


@pytest.fixture
def small(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Mnist and Cifar10 with 2000 samples, in an empty data folder."""
    monkeypatch.setitem(model_utils.DATASETS, "Mnist", lambda manifest, home: tiny())
    monkeypatch.setitem(
        model_utils.DATASETS, "Cifar10", lambda manifest, home: tiny((3, 4, 4), "Cifar10")
    )
    return place


def test_the_default_split_is_made_once(small: Path, capsys: pytest.CaptureFixture) -> None:
    source, first = read_data("Mnist")
    notice = capsys.readouterr().err
    path = small / "Mnist" / "split" / "niid_20users_2labels_seed0.npz"
    assert notice.endswith(f"split made: {path}, picture {path.stem}.png\n")
    assert notice.startswith(f"{table(first, source.y)}\n") and path.with_suffix(".png").exists()
    assert same(Split.load(path), first)
    assert same(read_data("Mnist")[1], first) and capsys.readouterr().err == ""
    assert same(first, label_count(source.y, 20, 2, 0))
    label_count(source.y, 7).save(path)
    with pytest.raises(InputError, match=r"made for Mnist with \{'users': 7.*delete it"):
        read_data("Mnist")


def test_a_split_file_is_read_and_must_fit(small: Path) -> None:
    path = small / "mine.npz"
    label_count(tiny().y, 7).save(path)
    assert len(read_data("Mnist", str(path))[1].users) == 7
    with pytest.raises(InputError, match=r"^split .*: made for dataset Mnist, not for Cifar10$"):
        read_data("Cifar10", str(path))
    label_count(np.tile(tiny().y, 2), 7).save(path)
    with pytest.raises(InputError, match=r"is outside Mnist's 0..1999$"):
        read_data("Mnist", str(path))
    with pytest.raises(InputError, match=r"^dataset mnist: must be one of Mnist, Synthetic, Cifar"):
        read_data("mnist")
    with pytest.raises(InputError, match=r"^split no/such.npz: no such file"):
        read_data("Mnist", "no/such.npz")


# ---- MNIST files ---------------------------------------------------------------------------------


def idx(values: np.ndarray, kind: int = 8) -> bytes:
    head = bytes([0, 0, kind, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    return head + values.astype(np.uint8).tobytes()


@pytest.fixture
def raw(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A valid MNIST of 6 + 4 images of 3 x 2 pixels."""
    shapes = ((6, 3, 2), (6,), (4, 3, 2), (4,))
    files = dict(zip(model_utils.MNIST_FILES, shapes, strict=True))
    monkeypatch.setattr(model_utils, "MNIST_FILES", files)
    folder = place / "Mnist" / "raw"
    folder.mkdir(parents=True)
    contents = [idx(np.arange(np.prod(shape)).reshape(shape) % 10) for shape in files.values()]
    for name, content in zip(files, contents, strict=True):
        (folder / name).write_bytes(gzip.compress(content))
    sums = tuple(hashlib.sha256(content).hexdigest() for content in contents)
    monkeypatch.setattr(model_utils, "SHA256", {"Mnist": sums, "FashionMnist": sums})
    return folder


def test_mnist_rows_are_train_then_test(raw: Path) -> None:
    source = read_source("Mnist", {})
    assert source.x.shape == (10, 1, 3, 2) and source.x.dtype == np.uint8
    assert source.y.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3] and source.y.dtype == np.int64
    assert source.num_train == 6 and source.classes == 10 and source.shape == (1, 3, 2)
    assert source.x[1].ravel().tolist() == [6, 7, 8, 9, 0, 1]
    assert source.x[6].ravel().tolist() == [0, 1, 2, 3, 4, 5]


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IMAGES, b"", "not an IDX file of bytes with 3 dimensions"),
        (IMAGES, gzip.compress(idx(np.zeros((6, 3, 2))))[:-9], "truncated or not a gzip file"),
        (IMAGES, idx(np.zeros((6, 3, 2))), "truncated or not a gzip file"),
        (IMAGES, gzip.compress(idx(np.zeros(6))), "not an IDX file of bytes with 3 dimensions"),
        (IMAGES, gzip.compress(idx(np.zeros((6, 3, 2)), 13)), "not an IDX file of bytes"),
        (IMAGES, gzip.compress(idx(np.zeros((5, 3, 2)))), "holds .5, 3, 2. values, expected"),
        (IMAGES, gzip.compress(idx(np.zeros((6, 3, 2)))[:-1]), "35 values, expected 36"),
        (LABELS, gzip.compress(idx(np.zeros(4)) + b"x"), "5 values, expected 4"),
        (
            LABELS,
            gzip.compress(idx(np.full(4, 9))),
            r"changed \(sha256 .*, where Mnist's should be",
        ),
        (IMAGES, gzip.compress(idx(np.ones((6, 3, 2)))), r"changed \(sha256 .*; data of your own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_mnist_file_gives_one_line(
    raw: Path, name: str, content: bytes, message: str
) -> None:
    (raw / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        read_source("Mnist", {})
    assert "\n" not in str(raised.value) and "raw" in str(raised.value)


def test_a_missing_mnist_file_is_fetched_or_named(
    raw: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from torchvision.datasets import utils

    content = (raw / LABELS).read_bytes()
    (raw / LABELS).unlink()

    def offline(url: str, root: str, filename: str, md5: str) -> None:
        (Path(root) / filename).write_bytes(content[:5])
        raise OSError("no\nnetwork")

    monkeypatch.setattr(utils, "download_url", offline)
    with pytest.raises(InputError) as raised:
        read_source("Mnist", {})
    assert str(raised.value) == (
        f"{LABELS} is missing and cannot be downloaded (no network); put that file into {raw}"
    )
    assert sorted(os.listdir(raw)) == sorted(set(model_utils.MNIST_FILES) - {LABELS})

    def online(url: str, root: str, filename: str, md5: str) -> None:
        assert url.endswith(LABELS) and filename == LABELS and len(md5) == 32
        (Path(root) / filename).write_bytes(content)

    monkeypatch.setattr(utils, "download_url", online)
    assert len(read_source("Mnist", {}).y) == 10
    assert sorted(os.listdir(raw)) == sorted(model_utils.MNIST_FILES)
    assert capsys.readouterr().err.count("is missing: downloading it") == 2


# ---- CIFAR-10 ------------------------------------------------------------------------------------


def test_cifar10_offline_says_what_to_put_where(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import CIFAR10

    def offline(self: CIFAR10) -> None:
        raise OSError("<urlopen error no network>")

    monkeypatch.setattr(CIFAR10, "download", offline)
    with pytest.raises(InputError) as raised:
        read_data("Cifar10")
    assert str(raised.value) == (
        "CIFAR-10 is missing or damaged and cannot be downloaded (<urlopen error no network>); put"
        f" {CIFAR10.filename} (from {CIFAR10.url}) into {place / 'Cifar10'}"
    )


def test_cifar10_images_are_channels_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets

    class Fake:
        filename = url = ""

        def __init__(self, root: str, train: bool, download: bool) -> None:
            assert Path(root) == place / "Cifar10" and download
            size = 50 if train else 10
            self.data = np.zeros((size, 32, 32, 3), np.uint8)
            self.data[..., 2] = 7 if train else 9
            self.data[:, 5, 6, 0] = 3
            self.targets = [i % 10 for i in range(size)]

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Fake)
    source = read_source("Cifar10", {})
    assert source.x.shape == (60, 3, 32, 32) and source.num_train == 50
    assert source.x[49, :, 5, 6].tolist() == [3, 0, 7]
    assert source.x[50, :, 5, 6].tolist() == [3, 0, 9]
    assert source.x[50, :, 6, 5].tolist() == [0, 0, 9]
    assert source.y[48:52].tolist() == [8, 9, 0, 1]


def test_cifar10_generator(small: Path, capsys: pytest.CaptureFixture) -> None:
    assert generate.main("Cifar10", "niid", []) == 0
    printed = capsys.readouterr().out
    path = small / "Cifar10" / "split" / "niid_20users_3labels_seed0.npz"
    assert f"python main.py --dataset Cifar10 --split {path}" in printed
    assert path.with_suffix(".png").exists()
    source, split = read_data("Cifar10")
    assert same(split, Split.load(path))
    assert ((split.counts(source.y, 10) > 0).sum(axis=1) == 3).all()
    assert np.sort(np.concatenate(split.train + split.test)).tolist() == list(range(2000))


# ---- LEAF-style JSON -----------------------------------------------------------------------------


def leaf(folder: Path, train: object, test: object) -> Path:
    for part, content in (("train", train), ("test", test)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / part / f"all_data_{part}.json").write_text(text)
    return folder


def users_of(**data: tuple[list, list]) -> dict:
    return {
        "users": list(data),
        "num_samples": [len(y) for _, y in data.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in data.items()},
    }


def test_leaf_rows_are_all_train_then_all_test(tmp_path: Path) -> None:
    train = users_of(b=([[1, 2], [3, 4]], [0, 9]), a=([[5, 6.5]], [3.0]), c=([[7, 8]], [2]))
    test = users_of(a=([[9, 9]], [4]), b=([[10, 0]], [5]))
    folder = leaf(tmp_path, train, test)
    source, split = read_data("Synthetic", str(folder))
    assert split.users == ("b", "a", "c")
    assert [rows.tolist() for rows in split.train] == [[0, 1], [2], [3]]
    assert [rows.tolist() for rows in split.test] == [[4], [5], []]
    assert source.x.tolist() == [[1, 2], [3, 4], [5, 6.5], [7, 8], [10, 0], [9, 9]]
    assert source.y.tolist() == [0, 9, 3, 2, 5, 4]
    assert source.x.dtype == np.float32 and source.y.dtype == np.int64
    assert (source.classes, source.num_train, source.shape) == (10, 6, (2,))
    assert default_normalize(source, split) == "none"
    assert features(source, split, "pixel").shape == (6, 2)
    assert np.array_equal(read_source("Synthetic", split.manifest).x, source.x)
    train["user_data"]["c"]["x"] = [[7, 9]]
    leaf(tmp_path, train, test)
    assert read_data("Synthetic", str(folder))[1].hash != split.hash
    with pytest.raises(InputError, match="its files have changed since"):
        read_source("Synthetic", split.manifest)


@pytest.mark.parametrize(
    ("dataset", "given", "shape"),
    [
        ("Mnist", (784,), (1, 28, 28)),
        ("Mnist", (28, 28), (1, 28, 28)),
        ("Mnist", (1, 28, 28), (1, 28, 28)),
        ("Cifar10", (3072,), (3, 32, 32)),
        ("Cifar10", (3, 32, 32), (3, 32, 32)),
    ],
)
def test_leaf_images_get_the_shape_of_the_dataset(
    tmp_path: Path, dataset: str, given: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    x = np.arange(np.prod(given)).reshape(given)
    content = users_of(a=([x.tolist()], [1]))
    source, _ = read_data(dataset, str(leaf(tmp_path, content, content)))
    assert source.x.shape == (2, *shape)
    assert np.array_equal(source.x[0].ravel(), x.ravel())
    bad = np.where(np.arange(x.size).reshape(given) == 30, np.inf, x)
    content = users_of(a=([x.tolist(), bad.tolist()], [1, 2]))
    where = "row 1, (channel, y, x) = " + str(tuple(map(int, np.unravel_index(30, shape))))
    with pytest.raises(InputError, match=re.escape(f"user a: x holds NaN or infinity in {where}")):
        read_data(dataset, str(leaf(tmp_path, content, content)))


GOOD = users_of(a=([[1, 2], [3, 4]], [0, 1]))


def changed(**changes: object) -> dict:
    return {**GOOD, **changes}


def data(x: object, y: object, size: int = 2) -> dict:
    return {"users": ["a"], "num_samples": [size], "user_data": {"a": {"x": x, "y": y}}}


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("{", r"all_data_train.json: not JSON \("),
        ("", r"all_data_train.json: not JSON \("),
        ([1], "must be an object with users, num_samples, user_data"),
        ({"users": ["a"], "num_samples": [1]}, "user_data is missing or not a dict"),
        ({"users": ["a"], "user_data": {}}, "num_samples is missing or not a list"),
        ({"user_data": {}, "num_samples": [1]}, "users is missing or not a list"),
        (changed(users=[], num_samples=[]), "0 users and 0 num_samples"),
        (changed(num_samples=[2, 2]), "1 users and 2 num_samples"),
        (changed(users=["b"]), "user b: user_data lacks it, or its x or y"),
        (changed(user_data={"a": {"x": [[1, 2]]}}), "user a: user_data lacks it, or its x or y"),
        (changed(users=["a", "a"], num_samples=[2, 2]), "user 'a': must be a unique text"),
        (changed(users=[".."]), "user '..': must be a unique text"),
        (changed(users=[3]), "user 3: must be a unique text"),
        (changed(num_samples=[3]), "user a: 2 x, 2 y, num_samples 3: must agree"),
        (data([[1, 2], [3, 4]], [0]), "user a: 2 x, 1 y, num_samples 2: must agree"),
        (data([[1, 2], [3]], [0, 1]), "user a: x is ragged"),
        (data([[1, 2], [3, "4"]], [0, 1]), "user a: x must hold numbers only"),
        (data([[1, 2], [3, None]], [0, 1]), "user a: x must hold numbers only"),
        (
            data([[1, 2], [3, float("nan")]], [0, 1]),
            "user a: x holds NaN or infinity in row 1, column 1$",
        ),
        (data([[1, 2], [3, 1e300]], [0, 1]), "user a: x holds NaN or infinity in row 1, column 1$"),
        (data({"0": 1}, [0, 1]), "user a: x must be a list"),
        (data([1, 2], [0, 1]), "user a: x must be vectors"),
        (data([[1, 2], [3, 4]], [0, 0.5]), r"user a: y must be whole .*: row 1 holds 0\.5$"),
        (data([[1, 2], [3, 4]], [0, 10**4]), r"user a: y .* in 0\.\.9999: row 1 holds 10000$"),
        (data([[1, 2], [3, 4]], [0, -1]), r"user a: y must be whole .*: row 1 holds -1$"),
        (data([[1, 2], [3, 4]], [[0], [1]]), "user a: y must be whole numbers in 0..9"),
        (data([[1, 2], [3, 4]], [float("nan"), 1]), "user a: y must be .*: row 0 holds nan$"),
        (data([[1, 2], [3, 4]], ["0", "1"]), "user a: y must hold numbers only"),
        (data([[1, 2, 3], [3, 4, 5]], [0, 1]), "samples of 2 different shapes, expected one"),
    ],
)
def test_malformed_leaf_gives_one_line(tmp_path: Path, train: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        read_data("Synthetic", str(leaf(tmp_path, train, GOOD)))
    assert str(raised.value).startswith(f"split {tmp_path}") and "\n" not in str(raised.value)


def test_leaf_needs_one_file_each_and_images_of_the_right_size(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"user a: samples of shape \(2,\), Mnist has \(1, 28, 28\)"
    ):
        read_data("Mnist", str(leaf(tmp_path, GOOD, GOOD)))
    (tmp_path / "train" / "second.json").write_text("{}")
    with pytest.raises(InputError, match=r"2 files train/\*.json, expected one$"):
        read_data("Mnist", str(tmp_path))
    with pytest.raises(InputError, match=r"0 files train/\*.json, expected one$"):
        read_data("Mnist", str(tmp_path / "test"))


# ---- scripts -------------------------------------------------------------------------------------


def script(name: str, *options: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, name, *options], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_scripts_run_from_the_root_and_from_their_own_folder(tmp_path: Path) -> None:
    first, second = tmp_path / "first.npz", tmp_path / "second.npz"
    options = ("--users", "3", "--labels", "2", "--seed", "4", "--output")
    ran = [
        script("data/Mnist/generate_niid_20users.py", *options, str(first)),
        script("generate_niid_20users.py", *options, str(second), cwd=ROOT / "data" / "Mnist"),
    ]
    for path, result in zip((first, second), ran, strict=True):
        assert (result.returncode, result.stderr) == (0, "")
        assert f"python main.py --dataset Mnist --split {path.resolve()}" in result.stdout
        assert "omitted labels (no user holds them): 4 5 6 7 8 9" in result.stdout
        assert path.with_suffix(".png").exists()
    assert Split.load(first).hash == Split.load(second).hash
    assert len(read_data("Mnist", str(first))[1].users) == 3


@pytest.mark.parametrize(
    "name",
    [
        "Mnist/generate_niid_20users.py",
        "Mnist/generate_iid_20users.py",
        "Synthetic/generate_synthetic_05_05.py",
        "Cifar10/generate_niid_users_cifar.py",
    ],
)
def test_every_script_refuses_a_bad_option_in_one_line(name: str, tmp_path: Path) -> None:
    result = script(f"data/{name}", "--user", "3", "--output", str(tmp_path / "x.npz"))
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        stderr_line(result.stderr)
        == f"{Path(name).name}: error: unrecognized arguments: --user 3\n"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("niid", ["--users", "x"], "argument --users: invalid int value: 'x'"),
        ("niid", ["--users", "0"], "users 0: must be 1 or more"),
        ("niid", ["--labels", "11"], "labels per user 11: must be in 1..10"),
        ("niid", ["--seed", "-1"], "seed -1: must be in 0..4294967295"),
        ("niid", ["--users", "2000", "--labels", "3"], "users 2000: 600 of them hold label 0"),
        ("iid", ["--labels", "2"], "unrecognized arguments: --labels 2"),
        ("iid", ["--users", "2001"], "users 2001: Mnist has 2000 samples"),
        ("iid", ["--output", "split.txt"], "output split.txt: must name a file ending in .npz"),
        ("iid", ["--output", "{0}/folder.npz"], "folder.npz: must name a file ending in .npz"),
        ("iid", ["--output", "{0}/file/x.npz"], "cannot write {0}/file/x.npz: "),
    ],
)
def test_bad_options_leave_nothing_behind(
    small: Path, capsys: pytest.CaptureFixture, kind: str, options: list[str], message: str
) -> None:
    (small / "folder.npz").mkdir()
    (small / "file").write_text("")
    before = sorted(small.rglob("*"))
    options = [option.format(small) for option in options]
    assert generate.main("Mnist", kind, options) == 2
    printed = capsys.readouterr()
    assert message.format(small) in stderr_line(printed.err) and printed.out == ""
    assert sorted(small.rglob("*")) == before


def test_parameters_are_in_the_file_name_and_defaults_give_the_default_split(
    small: Path, capsys: pytest.CaptureFixture
) -> None:
    for dataset, kind, options, name in (
        ("Mnist", "niid", [], "niid_20users_2labels_seed0"),
        ("Mnist", "niid", ["--labels", "3", "--users", "7"], "niid_7users_3labels_seed0"),
        ("Mnist", "iid", ["--seed", "2"], "iid_20users_seed2"),
        ("Synthetic", "synthetic", ["--users", "3"], "synthetic_0.5_0.5_3users_seed0"),
        (
            "Synthetic",
            "synthetic",
            ["--alpha", "1", "--users", "2"],
            "synthetic_1.0_0.5_2users_seed0",
        ),
    ):
        assert generate.main(dataset, kind, options) == 0
        assert (small / dataset / "split" / f"{name}.npz").exists()
        assert (small / dataset / "split" / f"{name}.png").exists()
    made = (small / "Mnist" / "split" / "niid_20users_2labels_seed0.npz").read_bytes()
    capsys.readouterr()
    read_data("Mnist")
    assert capsys.readouterr().err == ""
    (small / "Mnist" / "split" / "niid_20users_2labels_seed0.npz").unlink()
    read_data("Mnist")
    assert (small / "Mnist" / "split" / "niid_20users_2labels_seed0.npz").read_bytes() == made
    three = read_data(
        "Synthetic", str(small / "Synthetic/split/synthetic_0.5_0.5_3users_seed0.npz")
    )
    assert len(three[1].users) == 3
