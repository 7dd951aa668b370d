"""Schemes: what every one of them keeps to, what each is for, and how they are asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import main as program
from data import generate
from tests.test_data import place, small, stderr_line, tiny  # noqa: F401 (fixtures)
from utils import schemes
from utils.config import Config
from utils.errors import InputError
from utils.model_utils import Source, features, is_default, read_data
from utils.partition import Split, draw, table
from utils.schemes import PARTITIONS, Pool, divide, parse, partition_of

# 6000 rows, 380 to 824 of each label, mixed.
SIZES = [380, 428, 477, 526, 575, 624, 673, 722, 771, 824]
LABELS = np.random.RandomState(4).permutation(np.repeat(np.arange(10), SIZES))
WHOSE = np.random.RandomState(5).randint(0, 37, 6000)
POOL = Pool("Toy", LABELS, 10, WHOSE, images=True, num_train=4500)
SCHEMES = sorted(set(PARTITIONS) - {"user", "owner"})
# More users than ten of FedNova's samples each allow need more equal shares.
MILD = {"fednova": {"alpha": 100.0}}


def split_of(text: str, pool: Pool = POOL) -> Split:
    return divide(pool, parse(text))


def rows_of(split: Split) -> list[np.ndarray]:
    return [np.concatenate(parts) for parts in zip(split.train, split.test, strict=True)]


def keeps_the_law(split: Split, labels: np.ndarray) -> None:
    """Disjoint, all rows of the labels that occur, nobody empty, nobody without train data."""
    rows = np.concatenate(rows_of(split))
    held = np.isin(labels, labels[rows])
    assert np.sort(rows).tolist() == np.flatnonzero(held).tolist()
    assert min(map(len, split.train)) >= 1
    omitted = sorted(set(range(10)) - set(labels[rows].tolist()))
    assert split.manifest["omitted_labels"] == omitted


@pytest.mark.parametrize("users", [1, 3, 7, 10, 13, 20, 100, 500])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_deals_every_row_once(scheme: str, users: int, monkeypatch) -> None:
    monkeypatch.setattr(schemes, "FEDNOVA_ATTEMPTS", 20)
    given = {"users": users, **(MILD.get(scheme, {}) if users > 20 else {})}
    if scheme == "fednova" and users == 500:
        with pytest.raises(InputError, match="20 draws with users 500, alpha 100 all left some"):
            divide(POOL, partition_of(scheme, given))
        return
    split = divide(POOL, partition_of(scheme, given))
    assert len(split.users) == users
    keeps_the_law(split, LABELS)
    other = divide(POOL, partition_of(scheme, given | {"seed": 99}))
    assert divide(POOL, partition_of(scheme, given)).hash == split.hash != other.hash


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("users", [1, 7, 100, 500])
@pytest.mark.parametrize("scheme", ["dirichlet", "quantity"])
def test_every_alpha_ends_with_the_minimum_kept(scheme: str, users: int, alpha: float) -> None:
    for seed in range(3):
        split = split_of(f"{scheme}:users={users},alpha={alpha},seed={seed},minimum=11")
        keeps_the_law(split, LABELS)
        assert min(map(len, rows_of(split))) >= 11


# Drawn 2026-11-30; the same in every process, for ever.
PINNED = {
    "owner": "4db7b1d284bd5286",
    "iid": "387acd0be85f58f4",
    "label_count": "0506085f04ae8757",
    "round_robin": "99ad95d325db122c",
    "shards": "74dffbb67c74a0a9",
    "dirichlet": "1beea197a9b172e8",
    "fednova": "fa7291dbf3d793b0",
    "quantity": "f14fde70a6001c7a",
    "lognormal": "a987eae4c53082b4",
    "feature": "57fd30ca1d06f740",
    "similarity": "0d19fb0af007ce64",
    "user": "994a28a1c6da9bd8",
}


def test_shares_are_rounded_and_favour_nobody() -> None:
    tiny = np.full(5, 1e-12)
    sizes = schemes._sizes(np.concatenate([tiny, [0.3, 0.7], tiny]) / (1 + 1e-11), 1000)
    assert sizes.tolist() == [0] * 5 + [300, 700] + [0] * 5
    # With a small alpha nobody's place tells how many labels it holds.
    held = np.zeros(10)
    for seed in range(40):
        arguments = {"users": 10, "alpha": 0.02, "minimum": 1, "seed": seed}
        split = divide(POOL, partition_of("dirichlet", arguments))
        held += (split.counts(LABELS, 10) > 0).sum(1)
    assert abs(held[-1] - held[:-1].mean()) < 3 * held[:-1].std(ddof=1)


@pytest.mark.parametrize("scheme", PARTITIONS)
def test_hashes_never_change(scheme: str) -> None:
    assert divide(POOL, partition_of(scheme, {})).hash[:16] == PINNED[scheme]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_more_users_than_samples_are_refused(scheme: str) -> None:
    for users in (6001, 10**12):
        with pytest.raises(InputError) as raised:
            split_of(f"{scheme}:users={users}")
        line = f"users {users}: Toy has 6000 samples, so at most as many"
        assert str(raised.value) == line


@pytest.mark.parametrize("share", [0, 0.1, 0.25, 0.3, 0.9])
@pytest.mark.parametrize("scheme", ["iid", "label_count", "dirichlet", "user"])
def test_the_held_out_share_is_kept_per_user(scheme: str, share: float) -> None:
    split = split_of(f"{scheme}:test={share}")
    keeps_the_law(split, LABELS)
    for train, test in zip(split.train, split.test, strict=True):
        assert abs(len(test) - share * (len(train) + len(test))) < 1
    tiny_users = split_of(f"iid:users=2000,test={share}")
    assert min(map(len, tiny_users.train)) >= 1
    if share <= 0.3:
        assert abs(sum(map(len, tiny_users.test)) - share * 6000) < 200


def test_the_train_pool_leaves_the_official_test_rows_out() -> None:
    source = tiny()
    split = divide(Pool.of(source, "train"), parse("dirichlet:users=5,pool=train"))
    assert np.sort(np.concatenate(rows_of(split))).tolist() == list(range(1500))
    assert split.manifest["arguments"]["pool"] == "train"
    assert "pool" not in split_of("iid").manifest["arguments"]


# ---- what each is for ----------------------------------------------------------------------------


def test_fednova_has_its_16_sizes_from_class_sizes_alone() -> None:
    """spec/published.md: 50,000 rows of 10 classes, seed 2020, alpha 0.1."""
    split = split_of("fednova", Pool("Cifar10", np.repeat(np.arange(10), 5000)))
    sizes = "248 298 1077 1270 1600 1743 3271 3437 3713 3825 3867 4596 4750 4862 4923 6520"
    assert sorted(map(len, rows_of(split))) == [int(n) for n in sizes.split()]


def test_round_robin_cuts_labels_into_equal_shares() -> None:
    split = split_of("round_robin:users=100,labels_per_user=2")
    counts = split.counts(LABELS, 10)
    for user, row in enumerate(counts):
        assert set(np.flatnonzero(row)) == {user % 10, (user + 1) % 10}
    for column in counts.T:
        held = column[column > 0]
        assert len(held) == 20 and np.ptp(held) <= 1


def test_shards_are_equal_and_hold_few_labels() -> None:
    split = split_of("shards:users=30,shards_per_user=2")
    assert set(map(len, rows_of(split))) == {200}
    held = (split.counts(LABELS, 10) > 0).sum(1)
    assert held.max() <= 4 and 1.5 < held.mean() < 3
    assert len({tuple(row) for row in split.counts(LABELS, 10)}) > 20


def test_dirichlet_goes_from_one_owner_per_label_to_even() -> None:
    even = split_of("dirichlet:users=10,alpha=10000").counts(LABELS, 10)
    assert (abs(even / even.sum(0) - 0.1) < 0.01).all()
    odd = split_of("dirichlet:users=10,alpha=0.01").counts(LABELS, 10)
    assert np.median((odd / odd.sum(0)).max(0)) > 0.9


def test_dirichlet_shares_have_the_right_moments() -> None:
    """Mean 1/N and variance (N - 1) / (N^2 (N alpha + 1)) of a symmetric Dirichlet."""
    rng = np.random.RandomState(0)
    for alpha in (0.05, 0.5, 5.0):
        draws = np.array([schemes._dirichlet(rng, alpha, 4) for _ in range(4000)])
        assert abs(draws.sum(1) - 1).max() < 1e-12
        np.testing.assert_allclose(draws.mean(0), 0.25, atol=0.03)
        np.testing.assert_allclose(draws.var(0), 3 / (16 * (4 * alpha + 1)), rtol=0.1)


@pytest.mark.parametrize("scheme", ["quantity:alpha=0.5", "lognormal:sigma=1"])
def test_quantity_schemes_skew_sizes_and_not_labels(scheme: str) -> None:
    split = split_of(f"{scheme},users=10")
    sizes = np.array([*map(len, rows_of(split))])
    assert sizes.max() > 3 * np.median(sizes)
    shares = split.counts(LABELS, 10)[sizes > 300] / sizes[sizes > 300, None]
    assert abs(shares - np.bincount(LABELS) / 6000).max() < 0.05


def test_similarity_mixes_a_part_and_sorts_the_rest() -> None:
    for percent, labels in ((0, (1, 3)), (100, (10, 10))):
        counts = split_of(f"similarity:percent={percent},users=10").counts(LABELS, 10)
        held = (counts > 0).sum(1)
        assert labels[0] <= held.min() and held.max() <= labels[1]
        assert np.ptp(counts.sum(1)) <= 1
    some = split_of("similarity:percent=10,users=10")
    top = some.counts(LABELS, 10).max(1) / 600
    assert ((some.counts(LABELS, 10) > 0).sum(1) >= 9).all() and (top > 0.45).all()


def test_user_follows_the_column() -> None:
    split = split_of("user")
    assert split.users == tuple(map(str, range(37)))
    for name, rows in zip(split.users, rows_of(split), strict=True):
        assert (WHOSE[rows] == int(name)).all()
    named = Pool("Toy", LABELS[:4], 10, np.array(["b", "a", "b", "a"]))
    assert split_of("user", named).users == ("a", "b")
    partly = Pool("Toy", LABELS, 10, WHOSE[:100])
    assert sum(map(len, rows_of(split_of("user", partly)))) == 100
    with pytest.raises(InputError, match=r"user '\.\.': must be a text"):
        split_of("user", Pool("Toy", LABELS[:1], 10, np.array([".."])))
    with pytest.raises(InputError, match=r"^Toy has no user column"):
        split_of("user", Pool("Toy", LABELS))


def test_owner_keeps_the_official_test_rows_for_testing() -> None:
    split = split_of("owner")
    assert split.users == tuple(map(str, range(37)))
    for name, train, test in zip(split.users, split.train, split.test, strict=True):
        mine = np.flatnonzero(int(name) == WHOSE)
        assert np.sort(train).tolist() == mine[mine < 4500].tolist()
        assert np.sort(test).tolist() == mine[mine >= 4500].tolist()
        assert not (np.diff(train) > 0).all(), "shuffled"
    assert split_of("owner:seed=1").hash != split.hash
    for pool in (Pool("Toy", LABELS, 10, WHOSE[:4500], num_train=4500), Pool("Toy", LABELS, 10)):
        with pytest.raises(InputError, match=r"^Toy has no user column over x and x_test"):
            split_of("owner", pool)


# ---- feature skew --------------------------------------------------------------------------------


def images(size: int = 400) -> Source:
    rng = np.random.RandomState(2)
    return Source(
        "Mnist", rng.randint(0, 256, (size, 1, 6, 6)).astype(np.uint8), LABELS[:size], 10, size
    )


def test_feature_noise_grows_from_user_to_user_and_is_keyed() -> None:
    source = images(4000)
    split = divide(Pool.of(source), parse("feature:users=4,noise=0.8"))
    x = features(source, split, "none")
    unit = source.x[np.concatenate(split.train)].std()
    for user, rows in enumerate(rows_of(split)):
        away = (x[rows] - source.x[rows]) / unit
        assert abs(away.std() - 0.2 * (user + 1)) < 0.01 and abs(away.mean()) < 0.01
    assert np.array_equal(features(source, split, "none"), x)
    calm = divide(Pool.of(source), parse("feature:users=4,noise=0"))
    assert np.array_equal(features(source, calm, "none"), source.x.astype(np.float32))
    assert calm.hash != split.hash != divide(Pool.of(source), parse("iid:users=4")).hash
    again = features(source, split, "pixel")[np.concatenate(split.train)]
    assert abs(again.mean(0)).max() < 1e-5 and abs(again.std(0) - 1).max() < 1e-5


def test_feature_rotation_turns_each_users_images() -> None:
    source = images()
    split = divide(Pool.of(source), parse("feature:users=4,noise=0,rotation=360"))
    x = features(source, split, "none")
    angles = split.manifest["source"]["skew"]["angle"]
    assert sorted(angles) == [0, 90, 180, 270]
    for angle, rows in zip(angles, rows_of(split), strict=True):
        turned = np.rot90(source.x[rows], int(angle) // 90, (2, 3))
        np.testing.assert_allclose(x[rows], turned, atol=1e-2)
    assert f"{angles[0]:.3g} deg" in table(split, source.y).splitlines()[1]


def test_feature_rotation_needs_images() -> None:
    source = Source("Toy", np.zeros((400, 3), np.float32), LABELS[:400], 10, 400)
    with pytest.raises(InputError, match="rotation 90: Toy has vectors, not images"):
        divide(Pool.of(source), parse("feature:rotation=90"))


# ---- asking for one ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown scheme ''; it is one of iid, label_count"),
        ("dirichlt:users=3", "unknown scheme 'dirichlt'; did you mean dirichlet?"),
        ("Dirichlet", "unknown scheme 'Dirichlet'; did you mean dirichlet?"),
        ("dirichlet:alfa=3", "dirichlet has no argument 'alfa'; did you mean alpha?"),
        ("iid:alpha=3", "iid has no argument 'alpha'; it is one of users, seed, pool, test"),
        ("iid:", "'' is not key=value"),
        ("iid:users", "'users' is not key=value"),
        ("iid:users=3,users=4", "users is given twice"),
        ("iid:users=x", "users 'x': not a whole number"),
        ("iid:users=2.5", "users '2.5': not a whole number"),
        ("dirichlet:alpha=high", "alpha 'high': not a number"),
        ("iid:pool=test", "pool 'test': must be one of all, train"),
        ("iid:test=1", "test 1: must be a share >= 0 and < 1"),
        ("iid:test=nan", "test nan: must be a share >= 0 and < 1"),
    ],
)
def test_a_bad_partition_is_told_in_one_line(text: str, message: str, capsys) -> None:
    assert program.main(["--partition", text]) == 2
    assert message in stderr_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("iid:users=0", "users 0: must be 1 or more"),
        ("iid:seed=-1", "seed -1: must be in 0..4294967295"),
        ("dirichlet:alpha=0", "alpha 0: must be in 0.001..1e+06"),
        ("dirichlet:alpha=nan", "alpha nan: must be in"),
        ("dirichlet:minimum=0", "minimum 0: must be in 1..1e+09"),
        ("dirichlet:users=601", "users 601: with minimum 10 they need 6010 samples, Toy has 6000"),
        ("quantity:users=601", "users 601: with minimum 10 they need 6010 samples, Toy has 6000"),
        ("lognormal:sigma=51", "sigma 51: must be in 0..50"),
        ("fednova:users=601", "users 601: with minimum 10 they need 6010 samples"),
        ("shards:users=20,shards_per_user=301", "with shards_per_user 301 they need 6020 samples"),
        ("shards:shards_per_user=0", "shards_per_user 0: must be in 1..1e+06"),
        ("similarity:percent=101", "percent 101: must be in 0..100"),
        ("feature:noise=-1", "noise -1: must be in 0..1e+06"),
        ("feature:rotation=361", "rotation 361: must be in 0..360"),
        ("round_robin:labels_per_user=11", "labels per user 11: must be in 1..10"),
        ("round_robin:users=3000", "600 of them hold label 0, of which Toy has only 380 samples"),
    ],
)
def test_arguments_out_of_range_give_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        split_of(text)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_text_and_its_partition_go_both_ways() -> None:
    for text in ("iid:users=3,seed=0", "fednova:users=16,alpha=0.1,seed=2020,pool=train,test=0.0"):
        assert str(parse(text)) == text and parse(str(parse(text))) == parse(text)
    assert parse("iid", "train").arguments == {
        "users": 20,
        "seed": 0,
        "pool": "train",
        "test": 0.25,
    }
    assert parse("iid:pool=all", "train").arguments["pool"] == "all"
    assert parse("dirichlet:alpha=1").stem == "dirichlet_users20_alpha1.0_minimum10_seed0"


def test_partition_makes_the_split_once_and_says_so(small: Path, capsys) -> None:  # noqa: F811
    source, first = read_data("Mnist", partition=parse("dirichlet:users=5"))
    path = small / "Mnist" / "split" / "dirichlet_users5_alpha0.5_minimum10_seed0.npz"
    said = capsys.readouterr().err
    assert said.startswith(table(first, source.y)) and path.with_suffix(".png").exists()
    assert said.count("\n") == 5 + 5 and str(path) in said
    assert Split.load(path).hash == first.hash
    before = path.stat().st_mtime_ns
    assert read_data("Mnist", partition=parse("dirichlet:users=5"))[1].hash == first.hash
    assert capsys.readouterr().err == "" and path.stat().st_mtime_ns == before
    divide(Pool.of(source), parse("dirichlet:users=6")).save(path)
    with pytest.raises(InputError, match=r"'users': 6.*\(dirichlet\), expected .*delete it"):
        read_data("Mnist", partition=parse("dirichlet:users=5"))


def test_the_default_split_drawn_by_name_is_the_same_configuration(small: Path) -> None:  # noqa: F811
    asked = read_data("Mnist", partition=parse("label_count:users=20,labels_per_user=2"))[1]
    assert asked.hash == read_data("Mnist")[1].hash
    assert is_default("Mnist", asked)
    assert not is_default("Mnist", divide(Pool.of(tiny()), parse("round_robin")))
    assert not is_default("Nowhere", asked)


def test_partition_excludes_a_split_and_needs_a_test_part() -> None:
    with pytest.raises(InputError, match="it draws a split, so give no --split published"):
        Config(partition="iid", split="published")
    with pytest.raises(InputError, match="test=0 leaves nothing to evaluate on, unless with"):
        Config(partition="iid:test=0")
    assert Config(partition="iid:test=0", test_set="global").drawn.arguments["pool"] == "train"


def test_the_command_line_of_partitions(small: Path, capsys) -> None:  # noqa: F811
    assert generate.partition(["Mnist", "dirichlet", "--users", "5", "--alpha", "0.1"]) == 0
    printed = capsys.readouterr().out
    path = small / "Mnist" / "split" / "dirichlet_users5_alpha0.1_minimum10_seed0.npz"
    assert len(Split.load(path).users) == 5 and path.with_suffix(".png").exists()
    text = "dirichlet:users=5,alpha=0.1,minimum=10,seed=0"
    assert f"use it:  python main.py --dataset Mnist --partition {text}" in printed
    assert "f_00004 " in printed and str(path) in printed
    assert read_data("Mnist", partition=parse(text))[1].hash == Split.load(path).hash
    assert generate.partition(["Mnist", text]) == 0  # main.py's spelling: the same split
    assert capsys.readouterr().out == printed
    words = ["--output", str(small / "x.npz"), "--data_dir", str(small)]
    assert generate.partition(["Mnist", "iid", *words]) == 0
    assert f"--split {small / 'x.npz'} --data_dir {small}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: dataset, SCHEME"),
        (["Mnist", "dirichle"], "invalid choice: 'dirichle'"),
        (["Mnist", "dirichle:users=3"], "invalid choice: 'dirichle:users=3'"),
        (["Mnist", "iid:alpha=1"], "unrecognized arguments: --alpha=1"),
        (["Mnist", "iid:users=x"], "users 'x': not a whole number"),
        (["Mnist", "iid:"], "partition 'iid:': '' is not key=value"),
        (["Mnist", "iid:help"], "partition 'iid:help': 'help' is not key=value"),
        (["Mnist", "iid:users=2,users=3"], "users is given twice"),
        (["Mnst", "iid"], "dataset Mnst: must be one of Mnist, Synthetic"),
        (["Mnist", "iid", "--alpha", "1"], "unrecognized arguments: --alpha 1"),
        (["Mnist", "iid", "--users", "x"], "users 'x': not a whole number"),
        (["Mnist", "iid", "--users", "2001"], "users 2001: Mnist has 2000 samples"),
        (["Mnist", "iid", "--output", "x.txt"], "output x.txt: must name a file ending in .npz"),
        (["Mnist", "user"], "partition user:seed=0: Mnist has no user column"),
        (["Mnist", "owner"], "partition owner:seed=0: Mnist has no user column over x and x_test"),
        (["Mnist", "owner", "--test", "0.5"], "unrecognized arguments: --test 0.5"),
    ],
)
def test_the_command_line_refuses_in_one_line(small, words, message, capsys) -> None:  # noqa: F811
    assert generate.partition(words) == 2
    assert message in stderr_line(capsys.readouterr().err)
    assert list(small.iterdir()) == []


@pytest.mark.parametrize("classes", [10, 47, 100])
@pytest.mark.parametrize("users", [3, 200])
def test_tables_and_pictures_of_many_classes(classes: int, users: int, tmp_path: Path) -> None:
    labels = np.arange(6000) % classes
    split = split_of(f"iid:users={users}", Pool("Toy", labels, classes))
    draw(split, labels, tmp_path / "a.png", classes)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    line = table(split, labels, classes).splitlines()[1]
    held = min(classes, 6000 // users)
    assert line.count(":") == min(20, held)
    assert line.endswith(f"... {held - 20} more") == (held > 20)
