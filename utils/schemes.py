"""Schemes: how the rows of a dataset are dealt to users; `PARTITIONS` names them all.

A scheme is a function over a Pool. Its keyword arguments are the user's, and their defaults tell
the types. Three more belong to every scheme: see COMMON.
"""

from __future__ import annotations

import difflib
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from utils.errors import InputError
from utils.partition import USER_NAME, Split

if TYPE_CHECKING:
    from utils.model_utils import Source

# Of every scheme: which rows are dealt (all, or the official train part), the share of each user's
# rows that is held out for testing. Unmentioned in manifests and file names at these values.
COMMON: dict[str, object] = {"pool": "all", "test": 0.25}
POOLS = ("all", "train")
FEDNOVA_ATTEMPTS = 300


@dataclass(frozen=True, eq=False)
class Pool:
    """What is dealt: the first rows of a dataset, by their labels.

    `user`: the owner of each of the first rows, where the data tell; `images`: (M, C, H, W);
    `num_train`: so many rows are the official train part (None: all).
    """

    dataset: str
    labels: np.ndarray
    classes: int = 10
    user: np.ndarray | None = None
    images: bool = False
    num_train: int | None = None

    @classmethod
    def of(cls, source: Source, pool: object = "all") -> Pool:
        """All rows of a dataset, or its official train part."""
        labels = source.y[: source.num_train if pool == "train" else None]
        images = source.x.ndim == 4
        return cls(source.name, labels, source.classes, source.user, images, source.num_train)


@dataclass(frozen=True)
class Deal:
    """Each user's rows, in the order along which every so-manieth is held out; the stream so far.

    `skew` ("noise", "angle": a number per user; "seed") goes into the split's source. `tested`:
    each user's rows for testing, where the data themselves keep them apart.
    """

    owned: Sequence[np.ndarray]
    rng: np.random.RandomState
    names: tuple[str, ...] = ()
    skew: dict | None = None
    tested: Sequence[np.ndarray] | None = None


# ---- schemes -------------------------------------------------------------------------------------
# RandomState, not Generator: NumPy promises that its streams never change, so hashes stay.


def iid(pool: Pool, *, users: int = 20, seed: int = 0) -> Deal:
    """Every label dealt out like cards: users differ by one sample at most, per label too."""
    rng = generator(seed, users)
    return Deal(_hands(pool, users, rng), rng)


def label_count(pool: Pool, *, users: int = 20, labels_per_user: int = 2, seed: int = 0) -> Deal:
    """User u holds labels (u + j) mod classes, j < labels_per_user, in random unequal parts."""
    rng = generator(seed, users)

    def cuts(total: int, count: int) -> np.ndarray:
        # Everyone gets one sample; the rest goes by weights that differ by up to a factor of 5.
        weight = np.cumsum(rng.uniform(0.4, 2.0, count))
        rest = np.rint(weight / weight[-1] * (total - count)).astype(np.int64)
        return rest + np.arange(1, count + 1)

    return Deal(_by_holders(pool, users, labels_per_user, rng, cuts), rng)


def round_robin(pool: Pool, *, users: int = 20, labels_per_user: int = 2, seed: int = 0) -> Deal:
    """Labels as in label_count, each cut into equal shares for those who hold it."""
    rng = generator(seed, users)

    def cuts(total: int, count: int) -> np.ndarray:
        return np.arange(1, count + 1) * total // count

    return Deal(_by_holders(pool, users, labels_per_user, rng, cuts), rng)


def shards(pool: Pool, *, users: int = 20, shards_per_user: int = 2, seed: int = 0) -> Deal:
    """Data sorted by label and cut into equal shards, of which each user gets some at random.

    McMahan et al., AISTATS 2017 (200 shards of 300 for 100 users).
    """
    rng = generator(seed, users)
    count = users * _within("shards_per_user", shards_per_user, 1, 10**6)
    _enough(pool, users, shards_per_user, f"shards_per_user {shards_per_user}")
    pieces = np.array_split(_by_label(pool, rng.permutation(len(pool.labels))), count)
    dealt = rng.permutation(count).reshape(users, shards_per_user)
    return Deal([np.concatenate([pieces[i] for i in sorted(mine)]) for mine in dealt], rng)


def dirichlet(
    pool: Pool, *, users: int = 20, alpha: float = 0.5, minimum: int = 10, seed: int = 0
) -> Deal:
    """Every label shared out by a draw of Dirichlet(alpha); the poorest are filled to a minimum.

    Hsu et al., arXiv:1909.06335. What is missing to `minimum` is taken from the richest.
    """
    rng = generator(seed, users)
    _enough(pool, users, _within("minimum", minimum, 1, 10**9), f"minimum {minimum}")
    counts, rows = [], []
    for label in range(pool.classes):
        rows.append(rng.permutation(np.flatnonzero(pool.labels == label)))
        counts.append(_sizes(_dirichlet(rng, alpha, users), len(rows[-1])))
    return Deal(_deal(rows, _filled(np.stack(counts), minimum)), rng)


def fednova(pool: Pool, *, users: int = 16, alpha: float = 0.1, seed: int = 2020) -> Deal:
    """FedNova's own: Dirichlet by label, users with their share already get no more.

    Wang et al., NeurIPS 2020; drawn anew until the smallest user has 10 samples.
    """
    rng = generator(seed, users)
    _within("alpha", alpha, 1e-3, 1e6)
    labels, minimum = pool.labels, 10
    _enough(pool, users, minimum, f"minimum {minimum}")
    rows = [np.flatnonzero(labels == label) for label in range(pool.classes)]
    for _ in range(FEDNOVA_ATTEMPTS):
        counts = np.zeros((pool.classes, users), np.int64)
        drawn = [mine.copy() for mine in rows]
        for label, mine in enumerate(drawn):
            rng.shuffle(mine)
            share = rng.dirichlet(np.repeat(alpha, users))
            share = np.where(counts.sum(0) < len(labels) / users, share, 0.0)
            if not share.sum() > 0:
                break
            ends = (np.cumsum(share / share.sum()) * len(mine)).astype(np.int64)
            counts[label] = np.diff(np.concatenate([[0], ends[:-1], [len(mine)]]))
        else:
            if counts.sum(0).min() >= minimum:
                return Deal(_deal(drawn, counts), rng)
    raise InputError(
        f"{FEDNOVA_ATTEMPTS} draws with users {users}, alpha {alpha:g} all left"
        f" some user fewer than {minimum} samples; raise alpha, or use dirichlet"
    )


def quantity(
    pool: Pool, *, users: int = 20, alpha: float = 0.5, minimum: int = 10, seed: int = 0
) -> Deal:
    """Sizes by a draw of Dirichlet(alpha) over the users; labels mixed."""
    rng = generator(seed, users)
    return _of_sizes(pool, rng, _dirichlet(rng, alpha, users), minimum)


def lognormal(
    pool: Pool, *, users: int = 20, sigma: float = 1.0, minimum: int = 10, seed: int = 0
) -> Deal:
    """Sizes in proportion to exp(sigma * N(0, 1)): few large users, many small; labels mixed."""
    rng = generator(seed, users)
    share = np.exp(_within("sigma", sigma, 0, 50) * rng.standard_normal(users))
    return _of_sizes(pool, rng, share / share.sum(), minimum)


def feature(
    pool: Pool, *, users: int = 20, noise: float = 1.0, rotation: float = 0.0, seed: int = 0
) -> Deal:
    """Dealt as by iid; every user has a noise level and an angle of its own.

    User u's inputs get N(0, s^2), s = noise * (u + 1) / users in standard deviations of the data
    (Li et al., arXiv:2102.02079), and its images are turned by one of the angles
    rotation * v / users degrees, v = 0 .. users - 1 in random order.
    """
    rng = generator(seed, users)
    noise = _within("noise", noise, 0, 1e6)
    if _within("rotation", rotation, 0, 360) and not pool.images:
        raise InputError(f"rotation {rotation:g}: {pool.dataset} has vectors, not images")
    owned = _hands(pool, users, rng)
    angles = rotation * rng.permutation(users) / users
    levels = noise * np.arange(1, users + 1) / users
    skew = {"noise": levels.tolist(), "angle": angles.tolist(), "seed": seed}
    return Deal(owned, rng, skew=skew)


def similarity(pool: Pool, *, users: int = 20, percent: float = 10.0, seed: int = 0) -> Deal:
    """A part of the data dealt at random, the rest in the order of its labels; equal sizes.

    Karimireddy et al., ICML 2020 (percent 0, 10, 100).
    """
    rng = generator(seed, users)
    rows = rng.permutation(len(pool.labels))
    cut = round(_within("percent", percent, 0, 100) / 100 * len(rows))
    mixed, rest = rows[:cut], _by_label(pool, rows[cut:])
    # Whoever gets the larger pieces of one gets the smaller ones of the other.
    pairs = zip(np.array_split(mixed, users)[::-1], np.array_split(rest, users), strict=True)
    return Deal([_by_label(pool, np.concatenate(pair)) for pair in pairs], rng)


def user(pool: Pool, *, seed: int = 0) -> Deal:
    """Everybody has what the data's `user` column gives; `seed` is that of the test rows."""
    names, rows = _rows_by_owner(pool)
    return Deal(rows, generator(seed, len(names)), names)


def owner(pool: Pool, *, seed: int = 0) -> Deal:
    """Everybody trains on its rows of x and is tested on its rows of x_test, by the `user` column.

    `seed` is that of the rows' order. Who owns rows of x_test alone never trains.
    """
    count = len(pool.labels)
    if pool.user is None or len(pool.user) < count or pool.num_train in (None, count):
        raise InputError(f"{pool.dataset} has no user column over x and x_test")
    names, owned = _rows_by_owner(pool)
    official = [mine >= pool.num_train for mine in owned]
    return Deal(
        [mine[~test] for mine, test in zip(owned, official, strict=True)],
        generator(seed, len(names)),
        names,
        tested=[mine[test] for mine, test in zip(owned, official, strict=True)],
    )


PARTITIONS: dict[str, Callable[..., Deal]] = {
    "iid": iid,
    "label_count": label_count,
    "round_robin": round_robin,
    "shards": shards,
    "dirichlet": dirichlet,
    "fednova": fednova,
    "quantity": quantity,
    "lognormal": lognormal,
    "feature": feature,
    "similarity": similarity,
    "user": user,
    "owner": owner,
}
# Which rows are for testing is the data's own choice: COMMON does not apply.
WITHOUT_COMMON = ("owner",)


# ---- splits that bring or fix their data ------------------------------------------------------


def synthetic(
    labels: np.ndarray, users: int = 100, alpha: float = 0.5, beta: float = 0.5, seed: int = 0
) -> Split:
    """90/10 of each user's block of Synthetic(alpha, beta), whose rows lie user after user."""
    sizes = synthetic_sizes(generator(seed, users), users)
    if sizes.sum() != len(labels):
        raise InputError(f"Synthetic: {len(labels)} labels given, the sizes add to {sizes.sum()}")
    # A second stream: the data's own is used up by drawing the data.
    rng = np.random.RandomState([seed, 1])
    blocks = np.split(np.arange(len(labels)), np.cumsum(sizes)[:-1])
    shuffled = [np.split(rng.permutation(block), [len(block) * 9 // 10]) for block in blocks]
    arguments = {"users": users, "alpha": alpha, "beta": beta, "seed": seed}
    manifest = {
        "scheme": "synthetic",
        "dataset": "Synthetic",
        "arguments": arguments,
        "omitted_labels": [],
        "source": arguments,
    }
    train, test = zip(*shuffled, strict=True)
    return Split(_names(users), train, test, manifest)


def synthetic_sizes(rng: np.random.RandomState, users: int) -> np.ndarray:
    """Samples per user, (int(lognormal(4, 2)) + 50) * 5: the first draw of the generator."""
    return (rng.lognormal(4, 2, users).astype(np.int64) + 50) * 5


def published(labels: np.ndarray) -> Split:
    """The historical MNIST split behind the pFedMe curves, slips included; not for new results.

    Images are shared between users, so test images occur in other users' train parts, and 19
    samples carry a wrong label.
    """
    users, per_user, classes = 20, 2, 10
    rng, shuffler = np.random.RandomState(1), random.Random(1)
    pools = [np.flatnonzero(labels == label) for label in range(classes)]
    chunks = np.zeros((4, classes), dtype=np.int64)
    for label, pool in enumerate(pools):
        left = len(pool)
        for i in range(3):
            chunks[i, label] = rng.randint(left // 5, left // 2, dtype=np.int64)
            left -= chunks[i, label]
        chunks[3, label] = left
    sizes = iter(chunks.ravel())
    # The first image of class 4 is skipped from the outset, that of another class on second use.
    start = [int(label == 4) for label in range(classes)]
    train, test, overrides = [], [], {}
    for user in range(users):
        rows: list[int] = []
        given: list[int] = []
        for label in ((user + j) % classes for j in range(per_user)):
            size = next(sizes)
            if start[label] + size < len(pools[label]):
                rows += pools[label][start[label] : size].tolist()
                given += [label] * size
                start[label] = 1
        # Fewer rows than labels, so that the labels slip where the two classes meet.
        pairs = list(zip(rows, given, strict=False))
        shuffler.shuffle(pairs)
        both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        cut = int(0.75 * len(both))
        for part, name, piece in ((train, "train", both[:cut]), (test, "test", both[cut:])):
            part.append(piece[:, 0].copy())
            if (labels[piece[:, 0]] != piece[:, 1]).any():
                overrides[user, name] = piece[:, 1].copy()
    manifest = {
        "scheme": "published",
        "dataset": "Mnist",
        "arguments": {"users": users, "labels_per_user": per_user, "seed": 1},
        "omitted_labels": [],
    }
    return Split(_names(users), tuple(train), tuple(test), manifest, overrides)


# ---- what schemes share --------------------------------------------------------------------------


def generator(seed: int, users: int) -> np.random.RandomState:
    """The stream of a split with this seed; InputError for a bad seed or number of users."""
    if users < 1:
        raise InputError(f"users {users}: must be 1 or more")
    if not 0 <= seed < 2**32:
        raise InputError(f"seed {seed}: must be in 0..{2**32 - 1}")
    return np.random.RandomState(seed)


def _within(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise InputError(f"{name} {value:g}: must be in {low:g}..{high:g}")
    return value


def _enough(pool: Pool, users: int, each: int, why: str) -> None:
    if users * each > len(pool.labels):
        raise InputError(
            f"users {users}: with {why} they need {users * each} samples, {pool.dataset} has"
            f" {len(pool.labels)}"
        )


def _by_label(pool: Pool, rows: np.ndarray) -> np.ndarray:
    return rows[np.argsort(pool.labels[rows], kind="stable")]


def _rows_by_owner(pool: Pool) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """The owners' names, sorted, and which rows are theirs, sorted by label."""
    if pool.user is None:
        raise InputError(f"{pool.dataset} has no user column")
    names, whose = np.unique(pool.user[: len(pool.labels)], return_inverse=True)
    names = tuple(map(str, names.tolist()))
    for name in names:
        if not USER_NAME.fullmatch(name):
            raise InputError(f"user {name!r}: must be a text that is no .")
    mine = np.split(np.argsort(whose, kind="stable"), np.cumsum(np.bincount(whose))[:-1])
    return names, [_by_label(pool, rows) for rows in mine]


def _hands(pool: Pool, users: int, rng: np.random.RandomState) -> list[np.ndarray]:
    labels = range(pool.classes)
    deck = np.concatenate([rng.permutation(np.flatnonzero(pool.labels == c)) for c in labels])
    return [deck[hand::users] for hand in range(users)]


def _by_holders(
    pool: Pool,
    users: int,
    labels_per_user: int,
    rng: np.random.RandomState,
    cuts: Callable[[int, int], np.ndarray],
) -> list[np.ndarray]:
    """User u holds labels (u + j) mod classes; `cuts(rows, holders)` ends their pieces."""
    classes = pool.classes
    if not 1 <= labels_per_user <= classes:
        raise InputError(f"labels per user {labels_per_user}: must be in 1..{classes}")
    holders: list[list[int]] = [[] for _ in range(classes)]
    for holder in range(users):
        for j in range(labels_per_user):
            holders[(holder + j) % classes].append(holder)
    owned: list[list[np.ndarray]] = [[] for _ in range(users)]
    for label, who in enumerate(holders):
        if not who:
            continue
        rows = rng.permutation(np.flatnonzero(pool.labels == label))
        if len(rows) < len(who):
            raise InputError(
                f"users {users}: {len(who)} of them hold label {label}, of which {pool.dataset} has"
                f" only {len(rows)} samples; choose fewer users or labels per user"
            )
        for holder, block in zip(who, np.split(rows, cuts(len(rows), len(who))[:-1]), strict=True):
            owned[holder].append(block)
    return [np.concatenate(blocks) for blocks in owned]


def _dirichlet(rng: np.random.RandomState, alpha: float, users: int) -> np.ndarray:
    """Shares (users,) of a Dirichlet(alpha), by logarithms: a small alpha underflows else.

    If G ~ Gamma(alpha + 1) and U is uniform, G U^(1 / alpha) ~ Gamma(alpha).
    """
    _within("alpha", alpha, 1e-3, 1e6)
    log = np.log(rng.standard_gamma(alpha + 1, users)) + np.log1p(-rng.uniform(size=users)) / alpha
    share = np.exp(log - log.max())
    return share / share.sum()


def _sizes(share: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers that add to `total`, within one of share * total."""
    # Rounded, not cut off: that would give the last user what all the others lose.
    ends = np.rint(np.cumsum(share) * total).astype(np.int64)
    ends[-1] = total
    return np.diff(np.minimum(ends, total), prepend=0)


def _filled(counts: np.ndarray, minimum: int) -> np.ndarray:
    """`counts` (labels, users) with everybody at `minimum`: the richest user's commonest label."""
    counts, sizes = counts.copy(), counts.sum(0)
    for poor in np.flatnonzero(sizes < minimum):
        while (missing := minimum - sizes[poor]) > 0:
            rich = sizes.argmax()
            label = counts[:, rich].argmax()
            given = min(missing, counts[label, rich], sizes[rich] - minimum)
            counts[label, [rich, poor]] += [-given, given]
            sizes[[rich, poor]] += [-given, given]
    return counts


def _deal(rows: Sequence[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
    """Each user's rows, label after label: counts (labels, users) cut the rows of each label."""
    blocks = [
        np.split(mine, np.cumsum(count)[:-1]) for mine, count in zip(rows, counts, strict=True)
    ]
    return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]


def _of_sizes(pool: Pool, rng: np.random.RandomState, share: np.ndarray, minimum: int) -> Deal:
    _enough(pool, len(share), _within("minimum", minimum, 1, 10**9), f"minimum {minimum}")
    rows = rng.permutation(len(pool.labels))
    counts = _filled(_sizes(share, len(rows))[np.newaxis], minimum)
    return Deal([_by_label(pool, mine) for mine in _deal([rows], counts)], rng)


# ---- from a text or arguments to a split ---------------------------------------------------------


@dataclass(frozen=True)
class Partition:
    """A scheme with all its arguments, the common ones included."""

    scheme: str
    arguments: dict[str, object]

    @property
    def named(self) -> dict[str, object]:
        """The arguments that manifests, texts and file names mention."""
        return {k: v for k, v in self.arguments.items() if k not in COMMON or v != COMMON[k]}

    @property
    def pool(self) -> str:
        """Which rows are dealt."""
        return self.arguments.get("pool", COMMON["pool"])

    @property
    def test(self) -> float:
        """The share of each user's rows that is held out."""
        return self.arguments.get("test", COMMON["test"])

    def after(self, later: int) -> Partition:
        """The same with a seed that is `later` higher."""
        return Partition(self.scheme, self.arguments | {"seed": self.arguments["seed"] + later})

    @property
    def stem(self) -> str:
        """Name of the split's file."""
        return "_".join([self.scheme, *(f"{key}{value}" for key, value in self.named.items())])

    def __str__(self) -> str:
        return f"{self.scheme}:" + ",".join(f"{key}={value}" for key, value in self.named.items())


def defaults(scheme: str) -> dict[str, object]:
    """The arguments of a scheme with their defaults, the common ones last."""
    parameters = inspect.signature(PARTITIONS[scheme]).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return own if scheme in WITHOUT_COMMON else own | COMMON


def parse(text: str, pool: str = "all") -> Partition:
    """SCHEME[:key=value,...]; `pool` is the default of that argument."""
    scheme, given = spelled(text)
    try:
        return partition_of(scheme, given, pool)
    except InputError as error:
        raise InputError(f"partition {text!r}: {error}") from None


def spelled(text: str) -> tuple[str, dict[str, str]]:
    """The scheme of SCHEME[:key=value,...], and its arguments still as texts."""
    scheme, colon, rest = text.partition(":")
    if scheme not in PARTITIONS:
        # A list in YAML tears SCHEME:key=value,key=value at its commas.
        torn = "; where YAML has brackets, SCHEME:key=value,... needs quotes"
        hint = torn if "=" in scheme else _near(scheme, PARTITIONS)
        raise InputError(f"partition {text!r}: unknown scheme {scheme!r}{hint}")
    given: dict[str, str] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"partition {text!r}: {item!r} is not key=value")
        if key in given:
            raise InputError(f"partition {text!r}: {key} is given twice")
        given[key] = value
    return scheme, given


def partition_of(scheme: str, given: dict[str, str], pool: str = "all") -> Partition:
    """The scheme with some of its arguments given as texts."""
    partition = Partition(scheme, arguments := defaults(scheme))
    if "pool" in arguments:
        arguments["pool"] = pool
    for key, value in given.items():
        if key not in arguments:
            raise InputError(f"{scheme} has no argument {key!r}{_near(key, arguments)}")
        kind = type(arguments[key])
        try:
            arguments[key] = kind(value)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise InputError(f"{key} {value!r}: not {what}") from None
    if partition.pool not in POOLS:
        raise InputError(f"pool {partition.pool!r}: must be one of {', '.join(POOLS)}")
    if not 0 <= partition.test < 1:
        raise InputError(f"test {partition.test:g}: must be a share >= 0 and < 1")
    return partition


def _near(name: str, names: Sequence[str] | dict) -> str:
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; it is one of {', '.join(names)}"


def divide(pool: Pool, partition: Partition, origin: dict | None = None) -> Split:
    """The split that a partition draws; `origin`: which data these are (see Split)."""
    own = {k: v for k, v in partition.arguments.items() if k not in COMMON}
    users, count = own.get("users", 1), len(pool.labels)
    if users > count:
        raise InputError(f"users {users}: {pool.dataset} has {count} samples, so at most as many")
    deal = PARTITIONS[partition.scheme](pool, **own)
    dealt = np.concatenate([*deal.owned, *(deal.tested or ())])
    held = np.bincount(pool.labels[dealt], minlength=pool.classes)
    manifest = {
        "scheme": partition.scheme,
        "dataset": pool.dataset,
        "arguments": partition.named,
        "omitted_labels": np.flatnonzero(held == 0).tolist(),
    }
    source = (origin or {}) | ({"skew": deal.skew} if deal.skew else {})
    if deal.tested is None:
        train, test = _held_out(deal.owned, partition.test, deal.rng)
    else:
        train, test = (tuple(map(deal.rng.permutation, part)) for part in (deal.owned, deal.tested))
    names = deal.names or _names(len(deal.owned))
    return Split(names, train, test, manifest | ({"source": source} if source else {}))


def _held_out(
    owned: Sequence[np.ndarray], share: float, rng: np.random.RandomState
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """A share of each user's rows for testing; both parts shuffled, training never empty.

    With a share of 1/4 every fourth row, counted on from label to label, is for testing: the parts
    are within one of 75/25 per label and per user, and with a random start also on average over
    tiny users.
    """
    part = Fraction(share).limit_denominator(1000)
    train, test = [], []
    for rows in owned:
        start = rng.randint(part.denominator)
        at = (np.arange(len(rows)) + start) * part.numerator % part.denominator
        chosen = at >= part.denominator - part.numerator
        if chosen.all():
            chosen[:1] = False
        train.append(rng.permutation(rows[~chosen]))
        test.append(rng.permutation(rows[chosen]))
    return tuple(train), tuple(test)


def _names(users: int) -> tuple[str, ...]:
    return tuple(f"f_{number:05d}" for number in range(users))
