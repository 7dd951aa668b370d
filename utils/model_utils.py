"""Data sets and the splits over them: reading, making the default split, normalising."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils.errors import InputError
from utils.partition import (
    Split,
    check,
    generator,
    iid,
    label_count,
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
    the official train part (all of them where there is none).
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    classes: int
    num_train: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, as the models get it."""
        return self.x.shape[1:]


def read_data(dataset: str, split: str = "default") -> tuple[Source, Split]:
    """The dataset and its split: "default", "published", a .npz file or a folder of LEAF JSON."""
    _choose(dataset, DATASETS, "dataset")
    if split == "published":
        if dataset != "Mnist":
            raise InputError(f"split published: exists for Mnist only, not for {dataset}")
        source = read_source(dataset, {})
        return source, published(source.y)
    if split == "default":
        return _default(dataset)
    homes = (Path(), ROOT, DATA / dataset / "split")
    path = next((p for p in (home / split for home in homes) if p.exists()), None)
    if path is None:
        there = ", ".join(sorted(p.stem for p in (DATA / dataset / "split").glob("*.npz")))
        raise InputError(
            f"split {split}: no such file or folder; beside default and published there are, in "
            f"data/{dataset}/split: {there or 'none, see data/' + dataset}"
        )
    if path.is_dir():
        return _read_leaf(dataset, path)
    loaded = Split.load(path)
    made_for = loaded.manifest.get("dataset")
    if made_for != dataset:
        raise InputError(f"split {split}: made for dataset {made_for}, not for {dataset}")
    source = read_source(dataset, loaded.manifest)
    check(loaded, source)
    return source, loaded


def read_source(dataset: str, manifest: dict) -> Source:
    """The samples that the rows of a split with this manifest number."""
    _choose(dataset, DATASETS, "dataset")
    if manifest.get("scheme") == "leaf":
        folder = manifest.get("folder")
        if not isinstance(folder, str) or "\0" in folder:
            raise InputError(f"split of scheme leaf: its manifest has the folder {folder!r}")
        source, split = _read_leaf(dataset, Path(folder))
        if split.manifest["source"] != manifest.get("source"):
            raise InputError(f"split {folder}: its files have changed since")
        return source
    return DATASETS[dataset](manifest)


# ---- the datasets --------------------------------------------------------------------------------

MNIST_FILES = {  # in the order of the rows: images and labels, train part first
    "train-images-idx3-ubyte.gz": (60000, 28, 28),
    "train-labels-idx1-ubyte.gz": (60000,),
    "t10k-images-idx3-ubyte.gz": (10000, 28, 28),
    "t10k-labels-idx1-ubyte.gz": (10000,),
}


def _mnist(manifest: dict) -> Source:
    folder = DATA / "Mnist" / "raw"
    missing = [name for name in MNIST_FILES if not (folder / name).exists()]
    if missing:
        _fetch_mnist(folder, missing)
    arrays = [_read_idx(folder / name, shape) for name, shape in MNIST_FILES.items()]
    x = np.concatenate(arrays[0::2])[:, np.newaxis]
    y = np.concatenate(arrays[1::2]).astype(np.int64)
    if y.max() > 9:
        raise InputError(f"{shown(folder)}: label {y.max()} is outside 0..9")
    return Source("Mnist", x, y, 10, len(arrays[0]))


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """A gzipped IDX file of bytes: 0, 0, type 8, dimensions; each size (4 bytes); the values."""
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
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _fetch_mnist(folder: Path, missing: list[str]) -> None:
    """Fill gaps by torchvision's downloader, which knows the mirrors and checksums."""
    from torchvision.datasets import MNIST
    from torchvision.datasets.utils import download_url

    sums = dict(MNIST.resources)
    folder.mkdir(parents=True, exist_ok=True)
    for name in missing:
        print(f"{shown(folder / name)} is missing: downloading it", file=sys.stderr)
        for mirror in MNIST.mirrors:
            # Beside the target, renamed when whole: an interrupted download leaves nothing.
            with tempfile.TemporaryDirectory(dir=folder, suffix=".part") as place:
                try:
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


def _cifar10(manifest: dict) -> Source:
    from torchvision.datasets import CIFAR10

    folder = DATA / "Cifar10"
    try:
        parts = [CIFAR10(str(folder), train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError, EOFError) as error:
        raise InputError(
            f"CIFAR-10 is missing and cannot be downloaded ({_line(error)}); put"
            f" {CIFAR10.filename} (from {CIFAR10.url}) into {shown(folder)}"
        ) from None
    x = np.concatenate([part.data for part in parts]).transpose(0, 3, 1, 2)
    y = np.concatenate([part.targets for part in parts]).astype(np.int64)
    return Source("Cifar10", np.ascontiguousarray(x), y, 10, len(parts[0].data))


def _synthetic(manifest: dict) -> Source:
    """Synthetic(alpha, beta); the draws and their order are those of the original generator."""
    features, classes = 60, 10
    try:
        given = manifest["source"]
        users, seed = int(given["users"]), int(given["seed"])
        alpha, beta = float(given["alpha"]), float(given["beta"])
    except (KeyError, TypeError, ValueError):
        raise InputError("Synthetic: the split's manifest lacks users, alpha, beta, seed") from None
    for name, value, low, high in (
        ("alpha", alpha, 0, 1e6),
        ("beta", beta, 0, 1e6),
    ):
        if not low <= value <= high:
            raise InputError(f"{name} {value}: must be in {low:g}..{high:g}")
    rng = generator(seed, users)
    sizes = synthetic_sizes(rng, users)
    mean_w = rng.normal(0, alpha, users)
    center = rng.normal(0, beta, users)
    mean_x = np.stack([rng.normal(center[user], 1, features) for user in range(users)])
    covariance = np.diag(np.arange(1, features + 1) ** -1.2)
    x = np.empty((sizes.sum(), features), np.float32)
    y = np.empty(len(x), np.int64)
    end = 0
    for user, size in enumerate(sizes):
        start, end = end, end + size
        weight = rng.normal(mean_w[user], 1, (features, classes))
        bias = rng.normal(mean_w[user], 1, classes)
        drawn = rng.multivariate_normal(mean_x[user], covariance, size)
        x[start:end] = drawn
        y[start:end] = np.argmax(drawn @ weight + bias, axis=1)
    return Source("Synthetic", x, y, classes, len(y))


DATASETS: dict[str, Callable[[dict], Source]] = {
    "Mnist": _mnist,
    "Synthetic": _synthetic,
    "Cifar10": _cifar10,
}

# ---- splits made here ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How to make a split: a scheme, its default arguments, the file's name."""

    scheme: Callable[..., Split]
    name: str
    arguments: dict


RECIPES = {
    ("Mnist", "niid"): Recipe(
        label_count,
        "niid_{users}users_{labels_per_user}labels_seed{seed}",
        {"users": 20, "labels_per_user": 2, "seed": 0},
    ),
    ("Mnist", "iid"): Recipe(iid, "iid_{users}users_seed{seed}", {"users": 20, "seed": 0}),
    ("Synthetic", "synthetic"): Recipe(
        synthetic,
        "synthetic_{alpha}_{beta}_{users}users_seed{seed}",
        {"users": 100, "alpha": 0.5, "beta": 0.5, "seed": 0},
    ),
    ("Cifar10", "niid"): Recipe(
        label_count,
        "niid_{users}users_{labels_per_user}labels_seed{seed}",
        {"users": 20, "labels_per_user": 3, "seed": 0},
    ),
}
DEFAULTS = {"Mnist": "niid", "Synthetic": "synthetic", "Cifar10": "niid"}


def split_path(dataset: str, kind: str, arguments: dict) -> Path:
    """Where the split with these arguments belongs."""
    name = RECIPES[dataset, kind].name.format(**arguments)
    return DATA / dataset / "split" / f"{name}.npz"


def make_split(dataset: str, kind: str, arguments: dict) -> tuple[Source, Split]:
    """Draw a split by recipe, with the samples it is over."""
    source = read_source(dataset, {"source": arguments})
    of = {} if dataset == "Synthetic" else {"dataset": dataset, "classes": source.classes}
    return source, RECIPES[dataset, kind].scheme(source.y, **arguments, **of)


def is_default(dataset: str, split: Split) -> bool:
    """Whether this is what `--split default` means, however it was asked for."""
    arguments = RECIPES[dataset, DEFAULTS[dataset]].arguments
    manifest = split.manifest
    return (manifest.get("dataset"), manifest.get("arguments")) == (dataset, arguments)


def _default(dataset: str) -> tuple[Source, Split]:
    kind = DEFAULTS[dataset]
    arguments = RECIPES[dataset, kind].arguments
    path = split_path(dataset, kind, arguments)
    if not path.exists():
        print(f"{shown(path)} is missing: making this split now", file=sys.stderr)
        source, split = make_split(dataset, kind, arguments)
        split.save(path)
        return source, split
    split = Split.load(path)
    if not is_default(dataset, split):
        raise InputError(
            f"split {shown(path)}: made for {split.manifest.get('dataset')} with "
            f"{split.manifest.get('arguments')}, the default is {arguments};"
            " delete it, and it is made anew"
        )
    source = read_source(dataset, split.manifest)
    check(split, source)
    return source, split


# ---- LEAF-style JSON -----------------------------------------------------------------------------

GROUP_NAME = re.compile(r"(?!\.+$)[^/\0\ud800-\udfff]+")
SHAPES = {"Mnist": (1, 28, 28), "Cifar10": (3, 32, 32)}


def _read_leaf(dataset: str, folder: Path) -> tuple[Source, Split]:
    """Folder with one train/*.json and one test/*.json; rows: all train samples, then all test."""
    contents, sums = {}, {}
    for part in ("train", "test"):
        files = sorted((folder / part).glob("*.json"))
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
    for name in test:
        if name not in train or not len(train[name][1]):
            raise InputError(f"split {folder}: user {name} has test samples but no train samples")
    blocks = [(*train[name], name, "train") for name in train]
    blocks += [(*test[name], name, "test") for name in train if name in test]
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
    manifest = {
        "scheme": "leaf",
        "dataset": dataset,
        "arguments": {},
        "folder": str(folder.resolve()),  # a replay may start elsewhere
        "source": sums,  # so that the split's hash covers the samples
    }
    split = Split(
        tuple(train),
        tuple(rows[name, "train"] for name in train),
        tuple(rows.get((name, "test"), nothing) for name in train),
        manifest,
    )
    return Source(dataset, x, y, 10, len(y)), split


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
        # Result files use the name as an HDF5 group.
        if not isinstance(name, str) or not GROUP_NAME.fullmatch(name) or name in users:
            raise InputError(f"user {name!r}: must be a unique text without / that is not .")
        entry = data.get(name)
        if not isinstance(entry, dict) or not {"x", "y"} <= entry.keys():
            raise InputError(f"user {name}: user_data lacks it, or its x or y")
        x = _numbers(entry["x"], np.float32, f"user {name}: x")
        y = _numbers(entry["y"], np.float64, f"user {name}: y")
        if len(x) != len(y) or len(y) != size:
            raise InputError(f"user {name}: {len(x)} x, {len(y)} y, num_samples {size}: must agree")
        if y.ndim != 1 or (y != np.floor(y)).any() or (y < 0).any() or (y > 9).any():
            raise InputError(f"user {name}: y must be whole numbers in 0..9")
        users[name] = (_shaped(x, dataset, name), y.astype(np.int64))
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
        array = array.astype(dtype)
    if not np.isfinite(array).all():
        raise InputError(f"{what} holds NaN or infinity")
    return array


def _shaped(x: np.ndarray, dataset: str, name: str) -> np.ndarray:
    """Images as (n, channels, height, width), given so, without the channel, or flat."""
    shape = SHAPES.get(dataset)
    if not len(x):
        return x
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
    """All samples as float32 (M, *shape), x -> (x - mean) / scale computed in float64.

    "pixel", "channel": mean and std over the users' train rows only, a row counted as often as it
    is held; "published": (std + 0.001) over all samples, test included.
    """
    _choose(normalize, NORMALIZE, "normalize")
    if normalize == "none":
        return source.x.astype(np.float32, copy=False)
    mean, factor = NORMALIZE[normalize](source, split)
    out = np.empty(source.x.shape, np.float32)
    for rows in _chunks(np.arange(len(out)), source.x):
        part = slice(rows[0], rows[-1] + 1)
        np.multiply(source.x[part] - mean, factor, out=out[part], casting="same_kind")
    return out


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
