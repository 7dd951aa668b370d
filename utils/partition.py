"""Splits: which rows of a dataset are whose, how they are drawn, stored, printed and pictured."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

import numpy as np

from utils.errors import InputError
from utils.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from utils.model_utils import Source

PARTS = ("train", "test")
# Result files use a user's name as an HDF5 group, see `group_name`.
USER_NAME = re.compile(r"(?!\.+$)[^\0\ud800-\udfff]+")
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


def group_name(user: str) -> str:
    """A user's name as the name of a group: as it is, unless it has a slash (quoted as in URLs)."""
    return quote(user, safe=" ") if "/" in user else user


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
        if len(set(map(group_name, self.users))) < len(set(self.users)):
            raise InputError("split: two users' names are the same once / is quoted")
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


def check(split: Split, source: Source, what: str = "split") -> None:
    """InputError unless `split` was made for `source`, and its rows and labels exist there."""
    made = {k: v for k, v in split.manifest.get("source", {}).items() if k != "skew"}
    contents = split.manifest.get("contents", source.contents)
    if made != source.origin or contents != source.contents:
        raise InputError(f"{what}: made for other contents of {source.name} than it has now")
    for part, rows in zip(PARTS, (split.train, split.test), strict=True):
        for name, row in zip(split.users, rows, strict=True):
            if len(row) and not 0 <= row.min() <= row.max() < len(source.y):
                bad = row.max() if row.min() >= 0 else row.min()
                raise InputError(
                    f"{what}: {part} row {bad} of user {name} is outside {source.name}'s"
                    f" 0..{len(source.y) - 1}"
                )
    for (user, part), labels in split.labels.items():
        name = split.users[user]
        if len(labels) != len({"train": split.train, "test": split.test}[part][user]):
            raise InputError(f"{what}: user {name} has {part} rows and labels of unlike number")
        if len(labels) and not 0 <= labels.min() <= labels.max() < source.classes:
            raise InputError(
                f"{what}: a {part} label of user {name} is outside 0..{source.classes - 1}"
            )


def write_atomic(path: str | Path, write: Callable[[BinaryIO], Any]) -> None:
    """Let `write` fill a file beside `path`, then rename it over `path`; makes the folder."""
    with replacing(Path(path)) as beside, beside.open("wb") as file:
        write(file)


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *arrays]).astype(np.int64)


def _demand(ok: bool | np.bool_, path: str | Path, message: str) -> None:
    if not ok:
        raise InputError(f"split {path}: {message}")


# ---- for the eye ---------------------------------------------------------------------------------


MOST_LABELS = 20  # in a line of the table, and with numbers in the picture


def skew_note(split: Split, user: str) -> str:
    """A user's noise level and angle, where the split gives it some (see schemes.feature)."""
    skew = split.manifest.get("source", {}).get("skew")
    if not skew:
        return ""
    index = split.users.index(user)
    return f"  noise {skew['noise'][index]:.3g}, {skew['angle'][index]:.3g} deg"


def table(split: Split, labels: np.ndarray, classes: int = 10, most: int = 100) -> str:
    """Train and test size and the labels held, a line per user; beyond `most` users abridged."""
    counts = split.counts(labels, classes)
    sizes = [(len(a), len(b)) for a, b in zip(split.train, split.test, strict=True)]
    width = max(5, *(len(name) for name in split.users))
    shown = len(sizes) if len(sizes) <= most else most // 2
    lines = [f"{'user':<{width}} {'train':>7} {'test':>7}  label:samples"]
    for name, (train, test), row in list(zip(split.users, sizes, counts, strict=True))[:shown]:
        labels_held = np.flatnonzero(row)
        held = " ".join(f"{label}:{row[label]}" for label in labels_held[:MOST_LABELS])
        held += f" ... {more} more" if (more := len(labels_held) - MOST_LABELS) > 0 else ""
        lines.append(f"{name:<{width}} {train:>7} {test:>7}  {held}{skew_note(split, name)}")
    if shown < len(sizes):
        lines.append(f"... {len(sizes) - shown} more users")
    for name, of in (("min", np.min), ("max", np.max), ("total", np.sum)):
        train, test = of(sizes, axis=0)
        lines.append(f"{name:<{width}} {train:>7} {test:>7}")
    omitted = np.flatnonzero(counts.sum(axis=0) == 0)
    if len(omitted):
        lines.append(f"omitted labels (no user holds them): {' '.join(map(str, omitted))}")
    return "\n".join(lines)


def literal(figure: Figure) -> None:
    """Make all text of a figure mean what it says: a user may be called `$_{$`."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)


def draw(split: Split, labels: np.ndarray, path: str | Path, classes: int = 10) -> None:
    """PNG: heat map of samples per user and label, with each user's sizes at the side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    counts = split.counts(labels, classes)
    train, test = (np.array([len(rows) for rows in part]) for part in (split.train, split.test))
    users, position = len(split.users), np.arange(len(split.users))
    legible = users <= 120
    numbered = legible and classes <= MOST_LABELS
    height = 2.2 + 0.2 * users if legible else 10
    figure = Figure(figsize=(10, max(height, 3)), layout="constrained")
    FigureCanvasAgg(figure)
    heat, bars = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))

    norm = PowerNorm(0.5, vmin=0, vmax=max(1, counts.max()))
    image = heat.imshow(counts, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")
    heat.set(xlabel="label", ylabel="user", title="samples per label (train + test)")
    if classes <= MOST_LABELS:
        heat.set_xticks(range(classes))
    if legible:
        heat.set_yticks(position, split.users, fontsize=7)
    if numbered:
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
            note = f" {train[user]} + {test[user]}{skew_note(split, split.users[user])}"
            bars.text(total[user], user, note, va="center", fontsize=7)
    else:  # thousands of single bars would take long
        bars.fill_betweenx(position, 0, train, step="mid", lw=0, color="tab:blue", label="train")
        bars.fill_betweenx(
            position, train, total, step="mid", lw=0, color="tab:orange", label="test"
        )
    room = (2.8 if skew_note(split, split.users[0]) else 1.45) if legible else 1.05
    bars.set_xlim(0, max(1, total.max()) * room)
    bars.set(xlabel="samples", title="size per user")
    bars.locator_params(axis="x", nbins=4)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower right", ncols=2)
    figure.suptitle(f"{split.manifest.get('dataset', 'split')}: {Path(path).stem}")
    literal(figure)
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=110))


if __name__ == "__main__":
    from data.generate import partition

    sys.exit(partition())
