"""Splits: which rows of a dataset are whose, how they are drawn, stored, printed and pictured."""

from __future__ import annotations

import hashlib
import json
import random
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from utils.errors import InputError
from utils.files import replacing

if TYPE_CHECKING:
    from utils.model_utils import Source

PARTS = ("train", "test")
# What np.load and the checks after it raise on files that are empty, cut, altered or another kind.
DAMAGE = (
    AttributeError,
    EOFError,
    KeyError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers (int64) per user and part; `labels` holds only those unlike the dataset's.

    `manifest` is JSON-able; its "source" tells which data the rows number where the name of the
    dataset alone does not (generator arguments, checksums of files); "hash" is filled in.
    """

    users: tuple[str, ...]
    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    manifest: dict
    labels: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "manifest", {**self.manifest, "hash": self.hash})

    @property
    def hash(self) -> str:
        """sha256 (hex) over users, source, sizes, rows and label overrides."""
        source = self.manifest.get("source", {})
        digest = hashlib.sha256(json.dumps([self.users, source], sort_keys=True).encode())
        for array in self._flat():
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    def targets(self, labels: np.ndarray, user: int, part: str) -> np.ndarray:
        """The labels of one user's part, given those of the whole dataset."""
        rows = {"train": self.train, "test": self.test}[part][user]
        return self.labels.get((user, part), labels[rows])

    def counts(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Samples per user and label, train and test together: (users, classes)."""
        return np.stack(
            [
                sum(np.bincount(self.targets(labels, u, part), minlength=classes) for part in PARTS)
                for u in range(len(self.users))
            ]
        )

    def _flat(self) -> tuple[np.ndarray, ...]:
        """Sizes (2, users), all rows, which (user, part) are overridden (k, 2), those labels."""
        sizes = np.array([[len(rows) for rows in part] for part in (self.train, self.test)])
        keys = sorted((user, PARTS.index(part)) for user, part in self.labels)
        overrides = [self.labels[user, PARTS[part]] for user, part in keys]
        return (
            sizes.astype(np.int64).reshape(2, -1),
            _concatenate(self.train + self.test),
            np.array(keys, dtype=np.int64).reshape(-1, 2),
            _concatenate(overrides),
        )

    def save(self, path: str | Path) -> None:
        """Write a .npz, atomically."""
        arrays = dict(zip(("sizes", "rows", "overrides", "labels"), self._flat(), strict=True))
        head = np.array(json.dumps({"users": self.users, "manifest": self.manifest}))
        write_atomic(path, lambda file: np.savez_compressed(file, head=head, **arrays))

    @classmethod
    def load(cls, path: str | Path) -> Split:
        """Read what `save` wrote; InputError for anything else."""
        try:
            with np.load(path, allow_pickle=False) as file:
                head = json.loads(str(file["head"]))
                flat = [file[name] for name in ("sizes", "rows", "overrides", "labels")]
            users, manifest = tuple(head["users"]), dict(head["manifest"])
            if not all(isinstance(user, str) for user in [*users, *manifest]):
                raise TypeError
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise InputError(f"split {path}: {error.strerror}") from None
        except DAMAGE:
            raise InputError(f"split {path}: not a split file, or damaged") from None

        sizes, rows, keys, labels = flat
        count = len(users)
        _demand(all(a.dtype == np.int64 for a in flat), path, "numbers must be int64")
        _demand(count > 0 and len(set(users)) == count, path, "users must be one or more, unique")
        _demand(sizes.shape == (2, count), path, "sizes do not fit the users")
        _demand(rows.ndim == labels.ndim == 1, path, "rows and labels must be flat")
        _demand((sizes >= 0).all() and sizes.sum() == len(rows), path, "sizes do not fit the rows")
        _demand((rows >= 0).all() and (labels >= 0).all(), path, "negative row or label")
        _demand(keys.ndim == 2 and keys.shape[1] == 2, path, "wrong list of labels")
        _demand(((keys >= 0) & (keys < [count, 2])).all(), path, "labels of an unknown user")
        lengths = sizes[keys[:, 1], keys[:, 0]]
        _demand(lengths.sum() == len(labels), path, "labels do not fit the rows")

        blocks = np.split(rows, np.cumsum(sizes.ravel())[:-1])
        overrides = np.split(labels, np.cumsum(lengths)[:-1]) if len(keys) else []
        names = [(int(user), PARTS[part]) for user, part in keys]
        split = cls(
            users,
            tuple(blocks[:count]),
            tuple(blocks[count:]),
            manifest,
            dict(zip(names, overrides, strict=True)),
        )
        _demand(manifest.get("hash") == split.hash, path, "contents do not match the hash in it")
        return split


def check(split: Split, source: Source) -> None:
    """InputError unless every row and label of `split` exists in `source`."""
    for part, rows in zip(PARTS, (split.train, split.test), strict=True):
        for name, row in zip(split.users, rows, strict=True):
            if len(row) and not 0 <= row.min() <= row.max() < len(source.y):
                raise InputError(
                    f"split: {part} row {row.max() if row.min() >= 0 else row.min()} of user {name}"
                    f" is outside {source.name}'s 0..{len(source.y) - 1}"
                )
    for (user, part), labels in split.labels.items():
        name = split.users[user]
        if len(labels) != len({"train": split.train, "test": split.test}[part][user]):
            raise InputError(f"split: user {name} has {part} rows and labels of unlike number")
        if len(labels) and not 0 <= labels.min() <= labels.max() < source.classes:
            raise InputError(
                f"split: a {part} label of user {name} is outside 0..{source.classes - 1}"
            )


def write_atomic(path: str | Path, write: Callable[[BinaryIO], Any]) -> None:
    """Let `write` fill a file beside `path`, then rename it over `path`; makes the folder."""
    with replacing(Path(path)) as beside, beside.open("wb") as file:
        write(file)


# ---- schemes -------------------------------------------------------------------------------------
# RandomState, not Generator: NumPy promises that its streams never change, so hashes stay.


def label_count(
    labels: np.ndarray,
    users: int = 20,
    labels_per_user: int = 2,
    seed: int = 0,
    *,
    dataset: str = "Mnist",
    classes: int = 10,
) -> Split:
    """User u holds labels (u + j) mod classes, j < labels_per_user, in random unequal parts.

    Every row of the labels that occur is used exactly once.
    """
    rng = generator(seed, users)
    if not 1 <= labels_per_user <= classes:
        raise InputError(f"labels per user {labels_per_user}: must be in 1..{classes}")
    holders: list[list[int]] = [[] for _ in range(classes)]
    for user in range(users):
        for j in range(labels_per_user):
            holders[(user + j) % classes].append(user)
    owned: list[list[np.ndarray]] = [[] for _ in range(users)]
    for label, who in enumerate(holders):
        if not who:
            continue
        rows = rng.permutation(np.flatnonzero(labels == label))
        if len(rows) < len(who):
            raise InputError(
                f"users {users}: {len(who)} of them hold label {label}, of which {dataset} has only"
                f" {len(rows)} samples; choose fewer users or labels per user"
            )
        # Everyone gets one sample; the rest goes by weights that differ by up to a factor of 5.
        weight = np.cumsum(rng.uniform(0.4, 2.0, len(who)))
        rest = np.rint(weight / weight[-1] * (len(rows) - len(who))).astype(np.int64)
        cuts = rest + np.arange(1, len(who) + 1)
        for user, block in zip(who, np.split(rows, cuts[:-1]), strict=True):
            owned[user].append(block)
    omitted = [label for label, who in enumerate(holders) if not who]
    manifest = {
        "scheme": "label_count",
        "dataset": dataset,
        "arguments": {"users": users, "labels_per_user": labels_per_user, "seed": seed},
        "omitted_labels": omitted,
    }
    return _stratified(owned, manifest, rng)


def iid(
    labels: np.ndarray,
    users: int = 20,
    seed: int = 0,
    *,
    dataset: str = "Mnist",
    classes: int = 10,
) -> Split:
    """Every label dealt out like cards: users differ by one sample at most, per label too."""
    rng = generator(seed, users)
    if users > len(labels):
        raise InputError(f"users {users}: {dataset} has {len(labels)} samples, so at most as many")
    deck = np.concatenate([rng.permutation(np.flatnonzero(labels == c)) for c in range(classes)])
    hands = (deck[user::users] for user in range(users))
    # A hand is sorted by label already: cutting it where the label changes gives the strata.
    owned = [np.split(hand, np.flatnonzero(np.diff(labels[hand])) + 1) for hand in hands]
    manifest = {
        "scheme": "iid",
        "dataset": dataset,
        "arguments": {"users": users, "seed": seed},
        "omitted_labels": [],
    }
    return _stratified(owned, manifest, rng)


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


def _stratified(
    owned: Sequence[Sequence[np.ndarray]], manifest: dict, rng: np.random.RandomState
) -> Split:
    """75/25 of each user's rows, given per label; both parts shuffled.

    Every fourth row, counted on from label to label, is for testing: the parts are within one of
    75/25 per label and per user, and with a random start also on average over tiny users.
    """
    train, test = [], []
    for blocks in owned:
        rows = np.concatenate(blocks)
        chosen = (np.arange(len(rows)) + rng.randint(4)) % 4 == 3
        if len(rows) == 1:
            chosen[:] = False  # a single sample is for training
        train.append(rng.permutation(rows[~chosen]))
        test.append(rng.permutation(rows[chosen]))
    return Split(_names(len(owned)), tuple(train), tuple(test), manifest)


def generator(seed: int, users: int) -> np.random.RandomState:
    """The stream of a split with this seed; InputError for a bad seed or number of users."""
    if users < 1:
        raise InputError(f"users {users}: must be 1 or more")
    if not 0 <= seed < 2**32:
        raise InputError(f"seed {seed}: must be in 0..{2**32 - 1}")
    return np.random.RandomState(seed)


def _names(users: int) -> tuple[str, ...]:
    return tuple(f"f_{user:05d}" for user in range(users))


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *arrays]).astype(np.int64)


def _demand(ok: bool | np.bool_, path: str | Path, message: str) -> None:
    if not ok:
        raise InputError(f"split {path}: {message}")


# ---- for the eye ---------------------------------------------------------------------------------


def table(split: Split, labels: np.ndarray, classes: int = 10, most: int = 100) -> str:
    """Train and test size and the labels held, a line per user; beyond `most` users abridged."""
    counts = split.counts(labels, classes)
    sizes = [(len(a), len(b)) for a, b in zip(split.train, split.test, strict=True)]
    width = max(5, *(len(name) for name in split.users))
    shown = len(sizes) if len(sizes) <= most else most // 2
    lines = [f"{'user':<{width}} {'train':>7} {'test':>7}  label:samples"]
    for name, (train, test), row in list(zip(split.users, sizes, counts, strict=True))[:shown]:
        held = " ".join(f"{label}:{row[label]}" for label in np.flatnonzero(row))
        lines.append(f"{name:<{width}} {train:>7} {test:>7}  {held}")
    if shown < len(sizes):
        lines.append(f"... {len(sizes) - shown} more users")
    for name, of in (("min", np.min), ("max", np.max), ("total", np.sum)):
        train, test = of(sizes, axis=0)
        lines.append(f"{name:<{width}} {train:>7} {test:>7}")
    omitted = np.flatnonzero(counts.sum(axis=0) == 0)
    if len(omitted):
        lines.append(f"omitted labels (no user holds them): {' '.join(map(str, omitted))}")
    return "\n".join(lines)


def draw(split: Split, labels: np.ndarray, path: str | Path, classes: int = 10) -> None:
    """PNG: heat map of samples per user and label, with each user's sizes at the side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    counts = split.counts(labels, classes)
    train, test = (np.array([len(rows) for rows in part]) for part in (split.train, split.test))
    users, position = len(split.users), np.arange(len(split.users))
    legible = users <= 120
    figure = Figure(figsize=(10, 2.2 + 0.2 * users if legible else 10), layout="constrained")
    FigureCanvasAgg(figure)
    heat, bars = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))

    norm = PowerNorm(0.5, vmin=0, vmax=max(1, counts.max()))
    image = heat.imshow(counts, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")
    heat.set(xlabel="label", ylabel="user", title="samples per label (train + test)")
    heat.set_xticks(range(classes))
    if legible:
        heat.set_yticks(position, split.users, fontsize=7)
        for user, label in zip(*np.nonzero(counts), strict=True):
            dark = norm(counts[user, label]) > 0.6
            heat.text(
                label,
                user,
                str(counts[user, label]),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )
    else:
        figure.colorbar(image, ax=heat, location="left", label="samples")
    total = train + test
    if legible:
        bars.barh(position, train, color="tab:blue", label="train")
        bars.barh(position, test, left=train, color="tab:orange", label="test")
        for user in position:
            note = f" {train[user]} + {test[user]}"
            bars.text(total[user], user, note, va="center", fontsize=7)
    else:  # thousands of single bars would take long
        bars.fill_betweenx(position, 0, train, step="mid", lw=0, color="tab:blue", label="train")
        bars.fill_betweenx(
            position, train, total, step="mid", lw=0, color="tab:orange", label="test"
        )
    bars.set_xlim(0, max(1, total.max()) * (1.45 if legible else 1.05))
    bars.set(xlabel="samples", title="size per user")
    bars.locator_params(axis="x", nbins=4)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower right", ncols=2)
    figure.suptitle(f"{split.manifest.get('dataset', 'split')}: {Path(path).stem}")
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=110))
