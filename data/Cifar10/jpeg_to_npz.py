"""CIFAR-10 (or any images) kept as JPEG files, as one .npz for `--dataset FILE.npz`.

`python data/Cifar10/jpeg_to_npz.py cifar10.tar.xz --output data/Cifar10/cifar10.npz` reads a folder
or a tar archive that holds train/CLASS/NAME.jpg and, if there is one, test/CLASS/NAME.jpg. Labels
number the classes of train in alphabetical order, which is CIFAR-10's own. Other files are left out
and told of; hidden ones are passed over.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from matplotlib.image import imread

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.errors import InputError, Parser, guarded
from utils.partition import PARTS, write_atomic

ENDINGS = (".jpg", ".jpeg")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 after one line on stderr for bad input."""
    return guarded(Path(__file__).name, lambda: _convert(argv))


def _convert(argv: Sequence[str] | None) -> int:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("source", help="tar archive or folder")
    parser.add_argument("--output", required=True, help="the .npz file to write")
    given = parser.parse_args(argv)
    source, output = Path(given.source), Path(given.output)
    if output.suffix != ".npz" or output.is_dir():
        raise InputError(f"output {output}: must name a file ending in .npz")
    images: dict[PurePosixPath, np.ndarray] = {}
    files: set[PurePosixPath] = set()
    folders: set[PurePosixPath] = set()
    try:
        for path, is_folder, read in _visible(source):
            folders.update(path.parents)
            (folders if is_folder else files).add(path)
            if read and path.parent.parent.name in PARTS and path.suffix.lower() in ENDINGS:
                images[path] = _decoded(path, read())
    except OSError as error:
        raise InputError(f"{source}: {error.strerror or error}") from None
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{source}: not a tar archive, or damaged ({error})") from None
    parts = _part_folders(images)
    taken = {path: image for path, image in images.items() if path.parent.parent in parts}
    left_out = _left_out(parts, files - set(taken))
    if not any(path.parent.parent.name == "train" for path in taken):
        raise InputError(f"{source}: holds no train/CLASS/NAME.jpg{left_out and f'; {left_out}'}")
    _check_classes(source, parts, folders, taken)
    arrays = _arrays(source, taken)
    write_atomic(output, lambda file: np.savez(file, **arrays))
    if left_out:
        print(f"notice: {source}: {left_out}", file=sys.stderr)
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    print(f"{output}: {shapes}\nuse it:  python main.py --dataset {output} --model cnn")
    return 0


# Where, whether it is a folder, and what reads it (None: a folder, a link in an archive, ...).
Entry = tuple[PurePosixPath, bool, Callable[[], bytes] | None]


def _folder(source: Path) -> Iterator[Entry]:
    for path in sorted(source.rglob("*")):
        read = path.read_bytes if path.is_file() else None
        yield PurePosixPath(path.relative_to(source).as_posix()), path.is_dir(), read


def _archive(source: Path) -> Iterator[Entry]:
    with tarfile.open(source, "r|*") as archive:
        for member in archive:
            read = archive.extractfile(member).read if member.isfile() else None
            yield PurePosixPath(member.name), member.isdir(), read


def _visible(source: Path) -> Iterator[Entry]:
    """All that is in the source but what systems and editors hide there."""
    for entry in _folder(source) if source.is_dir() else _archive(source):
        names = set(entry[0].parts) - {".."}
        if not any(name.startswith(".") or name == "__MACOSX" for name in names):
            yield entry


def _part_folders(images: Collection[PurePosixPath]) -> set[PurePosixPath]:
    """The folders train and test, wherever they lie; also the one that holds no image.

    A class, too, may be named train: of folders in one another the outermost with images counts.
    """
    holding = {path.parent.parent for path in images}
    outermost = {folder for folder in holding if holding.isdisjoint(folder.parents)}
    above = {parent for folder in outermost for parent in folder.parents}
    return {folder.with_name(part) for folder in outermost for part in PARTS} - above


def _left_out(parts: set[PurePosixPath], files: set[PurePosixPath]) -> str:
    """How many files are not taken; README and the like beside the parts are not meant to be."""
    beside = {parent for folder in parts for parent in folder.parents}
    left = sorted(file for file in files if file.parent not in beside)
    return f"left out as no CLASS/NAME.jpg: {len(left)}, the first {left[0]}" if left else ""


def _check_classes(
    source: Path,
    parts: set[PurePosixPath],
    folders: set[PurePosixPath],
    images: Collection[PurePosixPath],
) -> None:
    """Each class has images, and those of test are classes of train."""
    classes = {folder for folder in folders if folder.parent in parts}
    for folder in sorted(classes - {path.parent for path in images}):
        raise InputError(f"{source}: {folder}: a class without NAME.jpg or NAME.jpeg")
    known = {folder.name for folder in classes if folder.parent.name == "train"}
    for folder in sorted(classes):
        if folder.name not in known:
            names = ", ".join(sorted(known))
            raise InputError(f"{source}: {folder}: is no class of train, which has {names}")


def _decoded(path: PurePosixPath, content: bytes) -> np.ndarray:
    """(3, height, width); grey images get three equal channels."""
    try:
        image = imread(io.BytesIO(content), format="jpg")
    except (OSError, SyntaxError, ValueError):
        raise InputError(f"{path}: not a JPEG image, or damaged") from None
    image = image.reshape(*image.shape[:2], -1)
    if image.shape[2] not in (1, 3):
        raise InputError(f"{path}: has {image.shape[2]} channels, not RGB or grey")
    return np.broadcast_to(image, (*image.shape[:2], 3)).transpose(2, 0, 1)


def _arrays(source: Path, images: dict[PurePosixPath, np.ndarray]) -> dict[str, np.ndarray]:
    """x, y and, where there are test images, x_test, y_test; in the order of class and file."""
    shapes = {image.shape for image in images.values()}
    if len(shapes) != 1:
        raise InputError(f"{source}: holds images of {len(shapes)} sizes")
    places: dict[tuple[str, str, str], PurePosixPath] = {}
    for path in sorted(images):
        key = (path.parent.parent.name, path.parent.name, path.name)
        if places.setdefault(key, path) != path:
            raise InputError(f"{source}: {places[key]}, {path}: must have different names")
    labels = {name: i for i, name in enumerate(sorted({label for _, label, _ in places}))}
    arrays = {}
    for part, ending in (("train", ""), ("test", "_test")):
        keys = sorted(key for key in places if key[0] == part)
        if keys:
            arrays[f"x{ending}"] = np.stack([images[places[key]] for key in keys])
            arrays[f"y{ending}"] = np.array([labels[label] for _, label, _ in keys])
    return arrays


if __name__ == "__main__":
    sys.exit(main())
