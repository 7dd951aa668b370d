"""Data sets and the splits over them: reading, making the default split, normalising."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import os
import re
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath, PureWindowsPath

import numpy as np

from utils.errors import InputError
from utils.files import is_foreign, visible
from utils.partition import USER_NAME, Split, check, draw, table
from utils.schemes import (
    PARTITIONS,
    Partition,
    Pool,
    divide,
    generator,
    partition_of,
    published,
    synthetic,
    synthetic_sizes,
)

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"


@dataclass(frozen=True, eq=False)
class Source:
    """All samples of a dataset: x (M, *shape) uint8 or float32, raw; y (M,) int64.

    Images are (M, channels, height, width), vectors (M, features). The first `num_train` rows are
    the official train part (all of them where there is none). `user`: the owner of each of the
    first rows, where the data tell. `origin`: which data these are, where the name does not tell
    ("source" in a split's manifest). `contents`: sha256 (hex) of a named dataset as it was read.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    classes: int
    num_train: int
    user: np.ndarray | None = None
    origin: dict = field(default_factory=dict)
    contents: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, as the models get it."""
        return self.x.shape[1:]


def read_data(
    dataset: str,
    split: str = "default",
    partition: Partition | None = None,
    data_dir: str | None = None,
    folders: Sequence[Path] = (),
    later: int = 0,
) -> tuple[Source, Split]:
    """The dataset and its split: "default", "published", a .npz file or a folder of LEAF JSON.

    `partition` draws a split, unless its file is there already, in place of the default one.
    `folders`: where splits are kept, in the first of them that can be written. `later`: added to
    the seed of a split that is drawn.
    """
    _choose_dataset(dataset)
    name = dataset_name(dataset)
    folders = folders or split_folders(dataset)
    if is_folder(dataset) and partition is None and split == "default":
        return _read_leaf(dataset, Path(dataset))
    if partition is not None:
        partition = partition.after(later)
        return _partitioned(undivided(dataset, data_dir), partition, folders)
    if split == "published":
        if dataset != "Mnist":
            raise InputError(f"split published: exists for Mnist only, not for {name}")
        source = read_source(dataset, {}, data_dir)
        return source, stamped(published(source.y), source)
    if split == "default":
        return _default(dataset, data_dir, folders, later)
    path = next(
        (p for p in (home / split for home in (Path(), ROOT, *folders)) if p.exists()), None
    )
    if path is None:
        there = ", ".join(p.stem for folder in folders for p in visible(folder, "*.npz"))
        raise InputError(
            f"split {split}: no such file or folder; beside default and published there are, in "
            f"{' and '.join(map(shown, folders))}: {there or 'none, see data/' + name}"
        )
    if path.is_dir():
        return _read_leaf(dataset, path)
    loaded = Split.load(path)
    made_for = loaded.manifest.get("dataset")
    if made_for != name:
        raise InputError(f"split {split}: made for dataset {made_for}, not for {name}")
    source = read_source(dataset, loaded.manifest, data_dir)
    check(loaded, source, f"split {split}")
    return source, stamped(loaded, source)


def read_source(dataset: str, manifest: dict, data_dir: str | None = None) -> Source:
    """The samples that the rows of a split with this manifest number."""
    _choose_dataset(dataset)
    if manifest.get("scheme") == "leaf":
        folder = manifest.get("folder")
        if not isinstance(folder, str) or "\0" in folder:
            raise InputError(f"split of scheme leaf: its manifest has the folder {folder!r}")
        source, split = _read_leaf(dataset, Path(folder))
        if split.manifest["source"] != manifest.get("source"):
            raise InputError(f"split {folder}: its files have changed since")
        return source
    if is_file(dataset):
        return read_npz(Path(dataset))
    if is_folder(dataset):
        return _read_leaf(dataset, Path(dataset))[0]
    home = DATA / HOMES.get(dataset, dataset) if data_dir is None else Path(data_dir)
    if data_dir is not None and not home.is_dir():
        raise InputError(f"data_dir {data_dir}: no such folder")
    return DATASETS[dataset](manifest, home)


# ---- the datasets --------------------------------------------------------------------------------

SHAPES = {
    "Mnist": (1, 28, 28),
    "FashionMnist": (1, 28, 28),
    "EmnistLetters": (1, 28, 28),
    "EmnistBalanced": (1, 28, 28),
    "EmnistByclass": (1, 28, 28),
    "EmnistDigits": (1, 28, 28),
    "Svhn": (3, 32, 32),
    "Cifar10": (3, 32, 32),
    "Cifar100": (3, 32, 32),
}
CLASSES = dict.fromkeys(SHAPES, 10) | {"Synthetic": 10, "Cifar100": 100}
CLASSES |= {"EmnistLetters": 26, "EmnistBalanced": 47, "EmnistByclass": 62}
HOMES = {name: "Emnist" for name in SHAPES if name.startswith("Emnist")}
MOST_CLASSES = 10_000  # where the data alone tell: a label beyond is taken for a mistake

MNIST_FILES = {  # in the order of the rows: images and labels, train part first
    "train-images-idx3-ubyte.gz": (60000, 28, 28),
    "train-labels-idx1-ubyte.gz": (60000,),
    "t10k-images-idx3-ubyte.gz": (10000, 28, 28),
    "t10k-labels-idx1-ubyte.gz": (10000,),
}
# sha256 of what is inside these files, in their order; torchvision knows one way to compress them.
SHA256 = {
    "Mnist": (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    "FashionMnist": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}


def _mnist(name: str, original: str, manifest: dict, home: Path) -> Source:
    """MNIST or a set of its format; `original`: torchvision's class, which knows where it is."""
    folders = (home / "raw", home, home / original / "raw")
    there = (f for f in folders if any((f / file).exists() for file in MNIST_FILES))
    folder = next(there, folders[0])
    missing = [file for file in MNIST_FILES if not (folder / file).exists()]
    if missing:
        _fetch_idx(original, folder, missing)
    arrays, sums = [], SHA256[name]
    for (file, shape), expected in zip(MNIST_FILES.items(), sums, strict=True):
        values, found = _read_idx(folder / file, shape)
        if found != expected:
            whose = [f"{other}'s" for other, known in SHA256.items() if found in known]
            what = [*whose, f"changed (sha256 {found[:8]}, not {expected[:8]})"][0]
            raise InputError(
                f"{shown(folder / file)}: is {what}, where {name}'s should be; data of your own"
                " are a FILE.npz"
            )
        arrays.append(values)
    x = np.concatenate(arrays[0::2])[:, np.newaxis]
    y = np.concatenate(arrays[1::2]).astype(np.int64)
    contents = hashlib.sha256("".join(sums).encode()).hexdigest()
    return Source(name, x, y, CLASSES[name], len(arrays[0]), contents=contents)


def _read_idx(path: Path, shape: tuple[int, ...]) -> tuple[np.ndarray, str]:
    """A gzipped IDX file of bytes: 0, 0, type 8, dimensions; each size (4 bytes); the values.

    Returns the values and the sha256 (hex) of all that.
    """
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{shown(path)}: truncated or not a gzip file ({error})") from None
    start = 4 + 4 * len(shape)
    if len(content) < start or content[:4] != bytes([0, 0, 8, len(shape)]):
        raise InputError(f"{shown(path)}: not an IDX file of bytes with {len(shape)} dimensions")
    sizes = tuple(np.frombuffer(content[4:start], ">u4").tolist())
    if sizes != shape:
        raise InputError(f"{shown(path)}: holds {sizes} values, expected {shape}")
    if len(content) - start != math.prod(shape):
        raise InputError(
            f"{shown(path)}: {len(content) - start} values, expected {math.prod(shape)}"
        )
    values = np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    return values, hashlib.sha256(content).hexdigest()


def _fetch_idx(original: str, folder: Path, missing: list[str]) -> None:
    """Fill gaps by torchvision's downloader, which knows the mirrors and checksums."""
    import torchvision.datasets
    from torchvision.datasets.utils import download_url

    known = getattr(torchvision.datasets, original)
    sums = dict(known.resources)
    for name in missing:
        print(f"{shown(folder / name)} is missing: downloading it", file=sys.stderr)
        for mirror in known.mirrors:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                # Beside the target, renamed when whole: an interrupted download leaves nothing.
                with tempfile.TemporaryDirectory(dir=folder, suffix=".part") as place:
                    download_url(mirror + name, place, name, sums[name])
                    os.replace(Path(place) / name, folder / name)
                    break
            except (OSError, RuntimeError) as error:
                reason = error
        else:
            raise InputError(
                f"{name} is missing and cannot be downloaded ({_line(reason)}); put that file"
                f" into {shown(folder)}"
            )


def _fetched(label: str, files: str, folder: Path, parts: Callable[[], list]) -> list:
    """Train and test part by one of torchvision's classes; `files`: what to put where else."""
    try:
        return parts()
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise InputError(
            f"{label} is missing or damaged and cannot be downloaded ({_line(error)}); put {files}"
            f" into {shown(folder)}"
        ) from None


def _cifar(name: str, label: str, original: str, manifest: dict, home: Path) -> Source:
    import torchvision.datasets

    known = getattr(torchvision.datasets, original)
    files = f"{known.filename} (from {known.url})"
    parts = _fetched(
        label,
        files,
        home,
        lambda: [known(str(home), train=t, download=True) for t in (True, False)],
    )
    x = np.concatenate([part.data for part in parts]).transpose(0, 3, 1, 2)
    y = np.concatenate([part.targets for part in parts]).astype(np.int64)
    return _read(name, x, y, len(parts[0].data))


def _svhn(manifest: dict, home: Path) -> Source:
    from torchvision.datasets import SVHN

    files = " and ".join(f"{SVHN.split_list[part][1]}" for part in ("train", "test"))
    files += f" (from {os.path.dirname(SVHN.split_list['train'][0])})"
    parts = _fetched(
        "SVHN", files, home, lambda: [SVHN(home, split=s, download=True) for s in ("train", "test")]
    )
    x = np.concatenate([part.data for part in parts])
    y = np.concatenate([part.labels for part in parts]).astype(np.int64)
    return _read("Svhn", x, y, len(parts[0].data))


def _emnist(name: str, part: str, manifest: dict, home: Path) -> Source:
    from torchvision.datasets import EMNIST

    parts = _fetched(
        "EMNIST",
        f"gzip.zip (from {EMNIST.url})",
        home / "EMNIST" / "raw",
        lambda: [EMNIST(home, split=part, train=t, download=True) for t in (True, False)],
    )
    # The files hold every image transposed.
    x = np.concatenate([p.data.numpy() for p in parts]).transpose(0, 2, 1)[:, np.newaxis]
    y = np.concatenate([p.targets.numpy() for p in parts]).astype(np.int64)
    if part == "letters":
        y -= 1  # counted from 1 in the files
    # torchvision knows the checksum of the archive only, and reads whatever files lie there.
    if (y.min(), y.max()) != (0, CLASSES[name] - 1):
        raise InputError(
            f"{shown(home)}: EMNIST {part} has labels {y.min()}..{y.max()}, not 0.."
            f"{CLASSES[name] - 1}; another part's files, or damaged"
        )
    return _read(name, x, y, len(parts[0].data))


def _read(name: str, x: np.ndarray, y: np.ndarray, num_train: int) -> Source:
    """A named dataset with the checksum of what was read."""
    x = np.ascontiguousarray(x)
    return Source(name, x, y, CLASSES[name], num_train, contents=_checksum(x, y, num_train))


def _checksum(x: np.ndarray, y: np.ndarray, num_train: int, *more: np.ndarray) -> str:
    digest = hashlib.sha256(json.dumps([num_train, x.shape, str(x.dtype)]).encode())
    for array in (x, y, *more):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _synthetic(manifest: dict, home: Path) -> Source:
    """Synthetic(alpha, beta); the draws and their order are those of the original generator."""
    features, classes = 60, CLASSES["Synthetic"]
    try:
        given = manifest["source"]
        users, seed = int(given["users"]), int(given["seed"])
        alpha, beta = float(given["alpha"]), float(given["beta"])
    except (KeyError, TypeError, ValueError):
        raise InputError("Synthetic: the split's manifest lacks users, alpha, beta, seed") from None
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not 0 <= value <= 1e6:
            raise InputError(f"{name} {value}: must be in 0..1e+06")
    rng = generator(seed, users)
    sizes = synthetic_sizes(rng, users)
    mean_w = rng.normal(0, alpha, users)
    center = rng.normal(0, beta, users)
    mean_x = np.stack([rng.normal(center[user], 1, features) for user in range(users)])
    # What multivariate_normal makes of the covariance diag(j^-1.2), taken apart once.
    _, variances, axes = np.linalg.svd(np.diag(np.arange(1, features + 1) ** -1.2))
    scale = np.sqrt(variances) * np.diag(axes)
    x = np.empty((sizes.sum(), features), np.float32)
    y = np.empty(len(x), np.int64)
    end = 0
    for user, size in enumerate(sizes):
        start, end = end, end + size
        weight = rng.normal(mean_w[user], 1, (features, classes))
        bias = rng.normal(mean_w[user], 1, classes)
        drawn = rng.standard_normal((size, features))
        drawn *= scale
        drawn += mean_x[user]
        x[start:end] = drawn
        y[start:end] = np.argmax(drawn @ weight + bias, axis=1)
    origin = {"users": users, "alpha": alpha, "beta": beta, "seed": seed}
    return Source("Synthetic", x, y, classes, len(y), origin=origin)


DATASETS: dict[str, Callable[[dict, Path], Source]] = {
    "Mnist": partial(_mnist, "Mnist", "MNIST"),
    "Synthetic": _synthetic,
    "Cifar10": partial(_cifar, "Cifar10", "CIFAR-10", "CIFAR10"),
    "FashionMnist": partial(_mnist, "FashionMnist", "FashionMNIST"),
    "EmnistLetters": partial(_emnist, "EmnistLetters", "letters"),
    "EmnistBalanced": partial(_emnist, "EmnistBalanced", "balanced"),
    "EmnistByclass": partial(_emnist, "EmnistByclass", "byclass"),
    "EmnistDigits": partial(_emnist, "EmnistDigits", "digits"),
    "Svhn": _svhn,
    "Cifar100": partial(_cifar, "Cifar100", "CIFAR-100", "CIFAR100"),
}

# ---- anybody's data ------------------------------------------------------------------------------

ARRAYS = ("x", "y", "x_test", "y_test", "user")
CHANNELS = (1, 3, 4)  # of images whose channels come last


def is_file(dataset: str) -> bool:
    """Whether a dataset is named by a file of arrays."""
    return dataset.endswith(".npz")


def is_folder(dataset: str) -> bool:
    """Whether a dataset is named by a folder of LEAF JSON."""
    if is_file(dataset) or dataset in DATASETS:
        return False
    return "/" in dataset or "\\" in dataset or Path(dataset).is_dir()


def dataset_name(dataset: str) -> str:
    """How results and folders call a dataset: its name, its folder's or its file's stem."""
    if not (is_file(dataset) or is_folder(dataset)):
        return dataset
    # A recorded path may come from the other kind of system.
    path = PureWindowsPath(dataset) if is_foreign(dataset) else Path(dataset)
    name = path.stem if is_file(dataset) else leaf_name(path)
    return re.sub(r"[^\w.-]", "-", name)


def leaf_name(folder: PurePath) -> str:
    """What a folder of LEAF JSON is called: LEAF's own lie in NAME/data."""
    return folder.parent.name if folder.name == "data" else folder.name


def about_data_dir(dataset: str, split: Split, data_dir: str | None) -> str:
    """That `data_dir` is not read, where a file, a LEAF folder or nothing holds the samples."""
    named = not (is_file(dataset) or is_folder(dataset) or dataset == "Synthetic")
    if data_dir is None or (named and split.manifest.get("scheme") != "leaf"):
        return ""
    return f"--data_dir has no effect: {dataset_name(dataset)} is not read from there"


def _choose_dataset(dataset: str) -> None:
    if not (is_file(dataset) or is_folder(dataset)):
        _choose(dataset, DATASETS, "dataset")


def read_npz(path: Path) -> Source:
    """Arrays x and y, optionally x_test and y_test (rows after x's) and user (each row's owner)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            unknown = sorted(set(file.files) - set(ARRAYS))
            if unknown:
                raise InputError(f"array {unknown[0]!r} is none of {', '.join(ARRAYS)}")
            arrays = {name: file[name] for name in file.files}
        return _source_of(dataset_name(str(path)), arrays)
    except InputError as error:
        raise InputError(f"dataset {path}: {error}") from None
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise InputError(f"dataset {path}: {error.strerror}") from None
    except ValueError as error:
        why = "holds pickled objects" if "Object arrays" in str(error) else "not an .npz file"
        raise InputError(f"dataset {path}: {why}, or damaged") from None
    except (AttributeError, EOFError, OSError, zipfile.BadZipFile, zlib.error, KeyError, TypeError):
        raise InputError(f"dataset {path}: not an .npz file, or damaged") from None
    except (MemoryError, RuntimeError, NotImplementedError, OverflowError) as error:
        raise InputError(f"dataset {path}: cannot be read ({_line(error)})") from None


def _source_of(name: str, arrays: dict[str, np.ndarray]) -> Source:
    for part in ("", "_test") if {"x_test", "y_test"} & arrays.keys() else ("",):
        for key in (f"x{part}", f"y{part}"):
            if key not in arrays:
                raise InputError(f"array {key} is missing")
        x, y = arrays[f"x{part}"], arrays[f"y{part}"]
        arrays[f"x{part}"] = x = _images(x, f"x{part}")
        if y.shape != x.shape[:1] or not len(y):
            raise InputError(
                f"x{part} has {len(x)} samples, y{part} the shape {y.shape}: must agree"
            )
        arrays[f"y{part}"] = _whole(y, f"y{part}")
    x, y = arrays["x"], arrays["y"]
    if "x_test" in arrays:
        if arrays["x_test"].shape[1:] != x.shape[1:]:
            raise InputError(
                f"samples of x_test have shape {arrays['x_test'].shape[1:]}, of x {x.shape[1:]}"
            )
        kind = np.result_type(x, arrays["x_test"])
        x = np.concatenate([x.astype(kind), arrays["x_test"].astype(kind)])
        y = np.concatenate([y, arrays["y_test"]])
    num_train, whose = len(arrays["x"]), arrays.get("user")
    if whose is not None and (
        whose.shape not in ((num_train,), (len(y),)) or whose.dtype.kind not in "iuU"
    ):
        raise InputError(
            f"user has type {whose.dtype} and shape {whose.shape}: must be a whole number or a text"
            f" per row of x ({num_train})"
        )
    origin = {"sha256": _checksum(x, y, num_train, *([] if whose is None else [whose]))}
    return Source(name, x, y, int(y.max()) + 1, num_train, whose, origin)


def _images(x: np.ndarray, what: str) -> np.ndarray:
    """Vectors (M, n), or images (M, C, H, W) made of that, (M, H, W, C) or (M, H, W)."""
    if x.dtype.kind not in "buif":
        raise InputError(f"{what} has type {x.dtype}: must be numbers")
    if x.ndim not in (2, 3, 4) or not x.size:
        raise InputError(
            f"{what} has shape {x.shape}: must be (samples, features), (samples, height, width) or"
            " images with channels"
        )
    if x.ndim == 3:
        x = x[:, np.newaxis]
    elif x.ndim == 4 and _channels_last(*x.shape[1:]):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        _demand_finite(x, what)
    return np.ascontiguousarray(x)


def _channels_last(first: int, second: int, third: int) -> bool:
    return (third in CHANNELS and first not in CHANNELS) or third < first == second


def _whole(y: np.ndarray, what: str) -> np.ndarray:
    if y.dtype.kind not in "buif":
        raise InputError(f"{what} has type {y.dtype}: must be whole numbers")
    _demand_labels(y, MOST_CLASSES, f"{what} must hold whole numbers in 0..{MOST_CLASSES - 1}")
    return y.astype(np.int64)


def _demand_finite(x: np.ndarray, what: str) -> None:
    """InputError, naming the first bad number of the samples x (n, *shape) unless all are finite.

    Rows and places count from 0.
    """
    fine = np.isfinite(x)
    if fine.all():
        return
    row, *place = map(int, np.unravel_index(np.argmin(fine), x.shape))
    named = f"(channel, y, x) = {tuple(place)}" if len(place) == 3 else f"column {place[0]}"
    raise InputError(f"{what} holds NaN or infinity in row {row}, {named}")


def _demand_labels(y: np.ndarray, limit: int, message: str) -> None:
    """InputError with the first row of y that holds no whole number from 0 to below `limit`."""
    # NaN fails the first comparison.
    fine = (y >= 0) & (y < limit) & (y == np.floor(y))
    if not fine.all():
        row = int(np.argmin(fine))
        raise InputError(f"{message}: row {row} holds {y[row]:g}")


# ---- splits made here ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How to make a split: a scheme, its default arguments, the file's name."""

    scheme: str
    name: str
    arguments: dict


def _label_count(labels_per_user: int) -> Recipe:
    name = "niid_{users}users_{labels_per_user}labels_seed{seed}"
    arguments = {"users": 20, "labels_per_user": labels_per_user, "seed": 0}
    return Recipe("label_count", name, arguments)


# With many classes, 20 users of a few labels each would leave most labels out.
_DIRICHLET = Recipe(
    "dirichlet",
    "dirichlet_{users}users_alpha{alpha}_minimum{minimum}_seed{seed}",
    {"users": 20, "alpha": 0.1, "minimum": 10, "seed": 0},
)
RECIPES = {
    ("Mnist", "niid"): _label_count(2),
    ("Mnist", "iid"): Recipe("iid", "iid_{users}users_seed{seed}", {"users": 20, "seed": 0}),
    ("Synthetic", "synthetic"): Recipe(
        "synthetic",
        "synthetic_{alpha}_{beta}_{users}users_seed{seed}",
        {"users": 100, "alpha": 0.5, "beta": 0.5, "seed": 0},
    ),
    ("Cifar10", "niid"): _label_count(3),
    ("FashionMnist", "niid"): _label_count(2),
    ("EmnistDigits", "niid"): _label_count(2),
    ("Svhn", "niid"): _label_count(2),
    ("EmnistLetters", "dirichlet"): _DIRICHLET,
    ("EmnistBalanced", "dirichlet"): _DIRICHLET,
    ("EmnistByclass", "dirichlet"): _DIRICHLET,
    ("Cifar100", "dirichlet"): _DIRICHLET,
}
# The first of each dataset.
DEFAULTS = {dataset: RECIPES[dataset, kind] for dataset, kind in reversed(RECIPES)}


def default_partition(dataset: str, pool: str) -> Partition | None:
    """What `--split default` draws, from all rows or the official train part, as a partition.

    None where the data have no official test part, or a file's own columns decide.
    """
    recipe = DEFAULTS.get(dataset)
    if recipe is None or recipe.scheme not in PARTITIONS:
        return None
    return partition_of(recipe.scheme, recipe.arguments, pool)


def split_path(dataset: str, kind: str, arguments: dict) -> Path:
    """Where the split with these arguments belongs."""
    name = RECIPES[dataset, kind].name.format(**arguments)
    return DATA / dataset / "split" / f"{name}.npz"


def partition_path(source: Source, partition: Partition, folder: Path | None = None) -> Path:
    """Where the split that a partition of these data gives belongs."""
    content = source.origin.get("sha256", "")[:8]
    name = "_".join([partition.stem, *([content] if content else [])])
    return (folder or DATA / source.name / "split") / f"{name}.npz"


def split_folders(
    dataset: str, split_dir: str | None = None, results_dir: str | None = None
) -> tuple[Path, ...]:
    """Where a dataset's splits are kept: in `split_dir`, or with the data, else the results."""
    name = dataset_name(dataset)
    if split_dir is not None:
        return (Path(split_dir) / name,)
    beside = () if results_dir is None else (Path(results_dir) / "splits" / name,)
    return (DATA / name / "split", *beside)


def make_split(dataset: str, recipe: Recipe, arguments: dict) -> tuple[Source, Split]:
    """Draw a split by recipe, with the samples it is over."""
    source = read_source(dataset, {"source": arguments})
    return source, split_by(recipe, source, arguments)


def split_by(recipe: Recipe, source: Source, arguments: dict) -> Split:
    """The split that a recipe gives with these arguments."""
    if recipe.scheme == "synthetic":
        return synthetic(source.y, **arguments)
    split = divide(Pool.of(source), partition_of(recipe.scheme, arguments), source.origin)
    return stamped(split, source)


def dealt(source: Source, partition: Partition) -> Split:
    """The split that a partition of these data gives."""
    try:
        split = divide(Pool.of(source, partition.pool), partition, source.origin)
    except InputError as error:
        raise InputError(f"partition {partition}: {error}") from None
    return stamped(split, source)


def stamped(split: Split, source: Source) -> Split:
    """The split with the checksum of the named dataset that it goes with in its manifest."""
    if not source.contents:
        return split
    return dataclasses.replace(split, manifest=split.manifest | {"contents": source.contents})


def is_default(dataset: str, split: Split) -> bool:
    """Whether this is what `--split default` means, however it was asked for."""
    recipe, manifest = DEFAULTS.get(dataset), split.manifest
    found = [manifest.get(key) for key in ("scheme", "dataset", "arguments")]
    return recipe is not None and found == [recipe.scheme, dataset, recipe.arguments]


def undivided(dataset: str, data_dir: str | None = None) -> Source:
    """The samples of a dataset that no split chooses among (Synthetic: the default's)."""
    default = DEFAULTS[dataset].arguments if dataset == "Synthetic" else None
    return read_source(dataset, {"source": default} if default else {}, data_dir)


def _partitioned(
    source: Source, partition: Partition, folders: Sequence[Path]
) -> tuple[Source, Split]:
    paths = [partition_path(source, partition, folder) for folder in folders]
    draw_anew = partial(dealt, source, partition)
    return source, _kept(paths, source, partition.scheme, partition.named, draw_anew)


def _keep_new(source: Source, split: Split, paths: Sequence[Path]) -> None:
    """Keep a split at the first place that can be written, and say what it is."""
    for path in paths:
        try:
            picture = keep_split(source, split, path)
            break
        except InputError as error:
            reason = error
    else:
        raise InputError(f"{reason}; --split_dir says where else splits may be kept")
    print(table(split, source.y, source.classes, most=20), file=sys.stderr)
    beside = f", picture {picture.name}" if picture else ""
    print(f"split made: {shown(path)}{beside}", file=sys.stderr)


def _kept(
    paths: Sequence[Path],
    source: Source,
    scheme: str,
    arguments: dict,
    draw_anew: Callable[[], Split],
) -> Split:
    """The split in a file that is named after how it was drawn; without the file it is drawn.

    Raises InputError where the file is not what it is named after.
    """
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        split = draw_anew()
        _keep_new(source, split, paths)
        return split
    split = Split.load(path)
    made = tuple(split.manifest.get(key) for key in ("dataset", "scheme", "arguments"))
    if made != (source.name, scheme, arguments):
        raise InputError(
            f"split {shown(path)}: made for {made[0]} with {made[2]} ({made[1]}), expected"
            f" {arguments} ({scheme}); delete it, and it is made anew"
        )
    check(split, source, f"split {shown(path)}")
    # Files from before contents were recorded: what they were drawn from shows when drawn again.
    known = not source.contents or "contents" in split.manifest
    if not known and draw_anew().hash != split.hash:
        raise InputError(
            f"split {shown(path)}: not what {scheme} gives for these contents of {source.name};"
            " delete it, and it is made anew"
        )
    return stamped(split, source)


def keep_split(source: Source, split: Split, path: Path) -> Path | None:
    """Save a split with its picture beside it; returns the picture, None if it cannot be drawn."""
    split.save(path)
    picture = path.with_suffix(".png")
    try:
        draw(split, source.y, picture, source.classes)
    except InputError:
        raise  # the disk is full
    except Exception as error:  # nothing depends on the picture, whatever a drawing library meets
        print(f"notice: {shown(picture)} cannot be drawn ({_line(error)})", file=sys.stderr)
        return None
    return picture


def _default(
    dataset: str, data_dir: str | None, folders: Sequence[Path], later: int
) -> tuple[Source, Split]:
    if is_file(dataset):
        source = read_npz(Path(dataset))
        # Who brings a test part means it to be kept apart.
        pool = "train" if source.num_train < len(source.y) else "all"
        scheme = "label_count"
        if source.user is not None:
            owned = pool == "train" and len(source.user) == len(source.y)
            scheme = "owner" if owned else "user"
        return _partitioned(source, partition_of(scheme, {}, pool).after(later), folders)
    recipe = DEFAULTS[dataset]
    arguments = recipe.arguments | {"seed": recipe.arguments["seed"] + later}
    paths = [folder / f"{recipe.name.format(**arguments)}.npz" for folder in folders]
    source = read_source(dataset, {"source": arguments}, data_dir)
    draw_anew = partial(split_by, recipe, source, arguments)
    return source, _kept(paths, source, recipe.scheme, arguments, draw_anew)


# ---- LEAF-style JSON -----------------------------------------------------------------------------


def _read_leaf(dataset: str, folder: Path) -> tuple[Source, Split]:
    """Folder with one train/*.json and one test/*.json; rows: all train samples, then all test."""
    if is_file(dataset):
        raise InputError(f"split {folder}: LEAF folders go with named datasets, not with {dataset}")
    contents, sums = {}, {}
    for part in ("train", "test"):
        files = visible(folder / part, "*.json")
        if len(files) != 1:
            raise InputError(f"split {folder}: {len(files)} files {part}/*.json, expected one")
        try:
            raw = files[0].read_bytes()
            contents[part] = _leaf_users(json.loads(raw), dataset)
        except OSError as error:
            raise InputError(f"split {files[0]}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"split {files[0]}: not JSON ({_line(error)})") from None
        except InputError as error:
            raise InputError(f"split {files[0]}: {error}") from None
        sums[part] = hashlib.sha256(raw).hexdigest()
    train, test = contents["train"], contents["test"]
    # Who has test samples alone never trains, and is judged by the global model.
    names = [*train, *(name for name in test if name not in train and len(test[name][1]))]
    blocks = [(*train[name], name, "train") for name in train]
    blocks += [(*test[name], name, "test") for name in names if name in test]
    shapes = sorted({x.shape[1:] for x, y, *_ in blocks if len(y)})
    if len(shapes) != 1:
        raise InputError(f"split {folder}: samples of {len(shapes)} different shapes, expected one")
    x = np.concatenate([x for x, y, *_ in blocks if len(y)])
    y = np.concatenate([y for _, y, *_ in blocks])
    ends = np.cumsum([len(y) for _, y, *_ in blocks])
    rows = {
        (name, part): np.arange(end - len(labels), end, dtype=np.int64)
        for (_, labels, name, part), end in zip(blocks, ends, strict=True)
    }
    nothing = np.zeros(0, np.int64)
    # Images have their dataset's classes; vectors are Synthetic's or of any other number.
    classes = max(CLASSES.get(dataset, 1), int(y.max()) + 1)
    held = np.bincount(y, minlength=classes)
    manifest = {
        "scheme": "leaf",
        "dataset": dataset_name(dataset),
        "arguments": {},
        "folder": str(folder.resolve()),  # a replay may start elsewhere
        "source": sums,  # so that the split's hash covers the samples
        "omitted_labels": np.flatnonzero(held == 0).tolist(),
    }
    split = Split(
        tuple(names),
        tuple(rows.get((name, "train"), nothing) for name in names),
        tuple(rows.get((name, "test"), nothing) for name in names),
        manifest,
    )
    return Source(dataset_name(dataset), x, y, classes, len(y), origin=sums), split


def _leaf_users(content: object, dataset: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{user: (x (n, *shape) float32, y (n,) int64)}, in the file's order of users."""
    if not isinstance(content, dict):
        raise InputError("must be an object with users, num_samples, user_data")
    for key, kind in (("users", list), ("num_samples", list), ("user_data", dict)):
        if not isinstance(content.get(key), kind):
            raise InputError(f"{key} is missing or not a {kind.__name__}")
    names, sizes, data = content["users"], content["num_samples"], content["user_data"]
    if not names or len(names) != len(sizes):
        raise InputError(f"{len(names)} users and {len(sizes)} num_samples, expected as many, >= 1")
    users = {}
    for name, size in zip(names, sizes, strict=True):
        if not isinstance(name, str) or not USER_NAME.fullmatch(name) or name in users:
            raise InputError(f"user {name!r}: must be a unique text that is not .")
        entry = data.get(name)
        if not isinstance(entry, dict) or not {"x", "y"} <= entry.keys():
            raise InputError(f"user {name}: user_data lacks it, or its x or y")
        x = _numbers(entry["x"], np.float32, f"user {name}: x")
        y = _numbers(entry["y"], np.float64, f"user {name}: y")
        if len(x) != len(y) or len(y) != size:
            raise InputError(f"user {name}: {len(x)} x, {len(y)} y, num_samples {size}: must agree")
        x = _shaped(x, dataset, name)
        _demand_finite(x, f"user {name}: x")
        most = CLASSES[dataset] if dataset in SHAPES else MOST_CLASSES
        wrong = f"user {name}: y must be whole numbers in 0..{most - 1}"
        if y.ndim != 1:
            raise InputError(wrong)
        _demand_labels(y, most, wrong)
        users[name] = (x, y.astype(np.int64))
    return users


def _numbers(values: object, dtype: type, what: str) -> np.ndarray:
    if not isinstance(values, list):
        raise InputError(f"{what} must be a list")
    try:
        array = np.asarray(values)
    except ValueError:
        raise InputError(f"{what} is ragged: its samples differ in length") from None
    if array.dtype.kind not in "iuf":
        raise InputError(f"{what} must hold numbers only")
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _shaped(x: np.ndarray, dataset: str, name: str) -> np.ndarray:
    """Images as (n, channels, height, width), given so, without the channel, or flat."""
    shape = SHAPES.get(dataset)
    if not len(x):
        return x
    if is_folder(dataset):
        return _images(x, f"user {name}: x")
    if shape is None:
        if x.ndim != 2:
            raise InputError(f"user {name}: x must be vectors")
        return x
    if x.shape[1:] not in (shape, (math.prod(shape),), shape[shape[0] == 1 :]):
        raise InputError(
            f"user {name}: samples of shape {x.shape[1:]}, {dataset} has {shape}"
            f" or {math.prod(shape)} numbers"
        )
    return x.reshape(len(x), *shape)


# ---- normalising ---------------------------------------------------------------------------------


def default_normalize(source: Source, split: Split) -> str:
    """The normalisation that is meant where none is asked for."""
    scheme = split.manifest.get("scheme")
    if scheme == "published":
        return "published"
    if scheme == "leaf" or source.x.ndim != 4:
        return "none"
    return "pixel" if source.shape[0] == 1 else "channel"


def _pixel(source: Source, split: Split) -> tuple[np.ndarray, np.ndarray]:
    mean, variance = _moments(source.x, np.concatenate(split.train))
    std = np.sqrt(variance)
    # A constant pixel tells nothing: 0 in the train part, and in the test part as well.
    return mean, np.divide(1, std, out=np.zeros_like(std), where=std > 0)


def _channel(source: Source, split: Split) -> tuple[np.ndarray, np.ndarray]:
    if source.x.ndim != 4:
        raise InputError(
            f"normalize channel: {source.name} has vectors of {source.shape}, not images"
        )
    mean, variance = _moments(source.x, np.concatenate(split.train))
    inside = mean.mean(axis=(1, 2), keepdims=True)
    std = np.sqrt((variance + (mean - inside) ** 2).mean(axis=(1, 2), keepdims=True))
    return inside, np.divide(1, std, out=np.zeros_like(std), where=std > 0)


def _published(source: Source, split: Split) -> tuple[np.ndarray, np.ndarray]:
    mean, variance = _moments(source.x, np.arange(len(source.x)))
    return mean, 1 / (np.sqrt(variance) + 0.001)


def _none(source: Source, split: Split) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(()), np.ones(())


# name -> (mean, 1 / scale), float64, to be broadcast against one sample
NORMALIZE: dict[str, Callable[[Source, Split], tuple[np.ndarray, np.ndarray]]] = {
    "pixel": _pixel,
    "channel": _channel,
    "none": _none,
    "published": _published,
}


def features(source: Source, split: Split, normalize: str) -> np.ndarray:
    """All samples as float32 (M, *shape), see `normalized`."""
    return normalized(source, split, normalize)[0]


def normalized(
    source: Source, split: Split, normalize: str
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """All samples as float32 (M, *shape): (x - mean) factor, computed in float64; mean and factor.

    "pixel", "channel": mean and 1 / std over the users' train rows only, a row counted as often as
    it is held; "published": 1 / (std + 0.001) over all samples, test included. What is constant
    has the factor 0.
    """
    _choose(normalize, NORMALIZE, "normalize")
    source = _skewed(source, split)
    mean, factor = NORMALIZE[normalize](source, split)
    scaling = {"mean": mean, "factor": factor}
    if normalize == "none":  # the same without a copy
        return source.x.astype(np.float32, copy=False), scaling
    out = np.empty(source.x.shape, np.float32)
    for rows in _chunks(np.arange(len(out)), source.x):
        part = slice(rows[0], rows[-1] + 1)
        np.multiply(source.x[part] - mean, factor, out=out[part], casting="same_kind")
    return out, scaling


# A feature beyond has a root mean square far from that of standardised data, 1, or of 0..1.
MOST_SCALE = 5
MOST_RATIO = 100  # between the largest feature and the median one
LOOKED_AT = 10_000  # train rows


def about_scale(source: Source, split: Split) -> str:
    """What is unusual about vectors or LEAF data that go in as they are; empty if nothing is."""
    rows = np.concatenate(split.train)
    if not len(rows) or default_normalize(source, split) != "none":
        return ""
    mean, variance = _moments(source.x, rows[:: -(-len(rows) // LOOKED_AT)])
    scale = np.sqrt(mean**2 + variance)
    largest, median = scale.max(), np.median(scale[scale > 0]) if scale.any() else 0
    # Standardised features have 1, those in 0..1 less, however unequal they are.
    if largest > MOST_SCALE or (largest > 1.5 and largest > MOST_RATIO * median):
        return (
            "the features go in as they are, and they are large or unequal (root mean square"
            f" {largest:.3g} of the largest, {median:.3g} of the median one); --normalize pixel"
            " gives each the mean 0 and the variance 1"
        )
    return ""


def _skewed(source: Source, split: Split) -> Source:
    """The samples as their users see them, where the split gives users an angle and a noise level.

    Noise is keyed by the split's seed and the user; its unit is the standard deviation of all
    train features. Everybody's rows must be its own.
    """
    skew = split.manifest.get("source", {}).get("skew")
    if not skew:
        return source
    mean, variance = _moments(source.x, np.concatenate(split.train))
    unit = np.sqrt((variance + (mean - mean.mean()) ** 2).mean())
    x = source.x.astype(np.float32)
    for user, parts in enumerate(zip(split.train, split.test, strict=True)):
        rows = np.concatenate(parts)
        if skew["angle"][user]:
            x[rows] = _turned(x[rows], skew["angle"][user])
        level = skew["noise"][user] * unit
        if level:
            rng = np.random.RandomState([skew["seed"], user])
            x[rows] += (level * rng.standard_normal(x[rows].shape)).astype(np.float32)
    return dataclasses.replace(source, x=x)


def _turned(x: np.ndarray, degrees: float) -> np.ndarray:
    """Images (n, C, H, W) turned about their middle, bilinear, zero where nothing was."""
    import torch
    from torch.nn.functional import affine_grid, grid_sample

    height, width = x.shape[2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = torch.tensor([[[cos, -sin * height / width, 0], [sin * width / height, cos, 0]]])
    grid = affine_grid(turn.expand(len(x), 2, 3).float(), list(x.shape), align_corners=False)
    return grid_sample(torch.from_numpy(x), grid, align_corners=False).numpy()


def _moments(x: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance (1/n) over the rows, in float64, shaped like one sample."""
    if not len(rows):
        raise InputError("normalize: the users have no train samples to take statistics from")
    # Relative to one sample, so that a constant feature has a variance of exactly zero and one
    # pass loses nothing: for bytes every sum below is an exact integer.
    origin = x[rows[0]].astype(np.float64)
    first, second = np.zeros(origin.size), np.zeros(origin.size)
    for chunk in _chunks(rows, x):
        away = (x[chunk] - origin).reshape(len(chunk), -1)
        first += away.sum(axis=0)
        second += np.einsum("ij,ij->j", away, away)
    first, second = first / len(rows), second / len(rows)
    variance = np.maximum(second - first**2, 0)
    return origin + first.reshape(origin.shape), variance.reshape(origin.shape)


def _chunks(rows: np.ndarray, x: np.ndarray) -> list[np.ndarray]:
    """Pieces of `rows` whose float64 copies take about 2 MB, which stays in the cache."""
    size = max(1, 2**18 // math.prod(x.shape[1:]))
    return [rows[i : i + size] for i in range(0, len(rows), size)]


# ---- messages ------------------------------------------------------------------------------------


def shown(path: Path) -> str:
    """`path` as seen from the repository, if it lies inside."""
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def _choose(name: str, choices: dict, what: str) -> None:
    if name not in choices:
        raise InputError(f"{what} {name}: must be one of {', '.join(choices)}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
