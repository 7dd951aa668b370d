"""CIFAR-10 (or any images) kept as JPEG files, as one .npz for `--dataset FILE.npz`.

`python data/Cifar10/jpeg_to_npz.py cifar10.tar.xz --output data/Cifar10/cifar10.npz` reads a folder
or a tar archive that holds train/CLASS/NAME.jpg and, if there is one, test/CLASS/NAME.jpg. Labels
number the classes in alphabetical order, which is CIFAR-10's own. Hidden names are left out in
silence, other files with a notice; a class without images, or in test alone, is refused.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from matplotlib.image import imread

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.errors import InputError, Parser, guarded
from utils.partition import PARTS, write_atomic

ENDINGS = (".jpg", ".jpeg")
Key = tuple[str, str, str]  # part, class, file
Entry = tuple[PurePosixPath, Callable[[], bytes] | None]  # a file and how to read it, or a folder


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
    images: dict[Key, np.ndarray] = {}
    classes: set[tuple[str, str]] = set()
    left: list[str] = []
    try:
        for path, read in _folder(source) if source.is_dir() else _archive(source):
            classes |= _classes(path, read is not None)
            if read is None:
                continue
            if key := _key(path):
                images[key] = _decoded(str(path), read())
            else:
                left.append(str(path))
    except OSError as error:
        raise InputError(f"{source}: {error.strerror or error}") from None
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{source}: not a tar archive, or damaged ({error})") from None
    _check(source, images, classes)
    arrays = _arrays(images)
    if left:
        what = f"{len(left)} file{'s' * (len(left) > 1)}, no train|test/CLASS/NAME.jpg"
        print(f"notice: left out: {what}; the first: {left[0]}", file=sys.stderr)
    write_atomic(output, lambda file: np.savez(file, **arrays))
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    print(f"{output}: {shapes}\nuse it:  python main.py --dataset {output} --model cnn")
    return 0


def _folder(source: Path) -> Iterator[Entry]:
    for path in sorted(source.rglob("*")):
        name = PurePosixPath(path.relative_to(source).as_posix())
        if not _hidden(name):
            yield name, path.read_bytes if path.is_file() else None


def _archive(source: Path) -> Iterator[Entry]:
    with tarfile.open(source, "r|*") as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            if not _hidden(name) and (member.isfile() or member.isdir()):
                yield name, archive.extractfile(member).read if member.isfile() else None


def _hidden(name: PurePosixPath) -> bool:
    """What systems and editors leave behind: .ipynb_checkpoints, ._NAME of a Mac."""
    return any(part.startswith(".") for part in name.parts)


def _key(name: PurePosixPath) -> Key | None:
    """(part, class, file) of an image, whatever folders the parts lie in."""
    *_, part, label, file = ("", "", *name.parts)
    known = part in PARTS and file.lower().endswith(ENDINGS)
    return (part, label, file) if known else None


def _classes(name: PurePosixPath, is_file: bool) -> set[tuple[str, str]]:
    """(part, class) that a path means, if it names or lies in the folder of one."""
    if key := is_file and _key(name):
        return {key[:2]}
    folders = name.parts[:-1] if is_file else name.parts
    found = [i for i, folder in enumerate(folders[:-1]) if folder in PARTS]
    # data/train/train/CLASS: the last one holds the classes.
    return {(folders[i], folders[i + 1]) for i in found[-1:] if folders[i + 1] not in PARTS}


def _check(source: Path, images: dict[Key, np.ndarray], classes: set[tuple[str, str]]) -> None:
    """InputError unless there are train images, in every class some, and no class in test alone."""
    shapes = {image.shape for image in images.values()}
    held = {key[:2] for key in images}
    trained = {label for part, label in held if part == "train"}
    if not trained:
        raise InputError(f"{source}: holds no train/CLASS/NAME.jpg")
    for part, label in sorted(classes - held):
        raise InputError(f"{source}: {part}/{label} holds no NAME.jpg")
    for label in sorted({label for _, label in held} - trained):
        names = ", ".join(sorted(trained)[:10]) + ", ..." * (len(trained) > 10)
        raise InputError(f"{source}: test/{label} is no class of train, which has {names}")
    if len(shapes) > 1:
        raise InputError(f"{source}: holds images of {len(shapes)} sizes")


def _decoded(name: str, content: bytes) -> np.ndarray:
    """(3, height, width); grey images get three equal channels."""
    try:
        image = imread(io.BytesIO(content), format="jpg")
    except (OSError, SyntaxError, ValueError):
        raise InputError(f"{name}: not a JPEG image, or damaged") from None
    if image.ndim == 3 and image.shape[2] != 3:
        raise InputError(f"{name}: has {image.shape[2]} channels, not RGB or grey")
    return np.broadcast_to(
        image[..., np.newaxis] if image.ndim == 2 else image, (*image.shape[:2], 3)
    ).transpose(2, 0, 1)


def _arrays(images: dict[Key, np.ndarray]) -> dict[str, np.ndarray]:
    """x, y and, where there are test images, x_test, y_test; in the order of class and file."""
    labels = {name: i for i, name in enumerate(sorted({label for _, label, _ in images}))}
    arrays = {}
    for part, ending in zip(PARTS, ("", "_test"), strict=True):
        keys = sorted(key for key in images if key[0] == part)
        if keys:
            arrays[f"x{ending}"] = np.stack([images[key] for key in keys])
            arrays[f"y{ending}"] = np.array([labels[label] for _, label, _ in keys])
    return arrays


if __name__ == "__main__":
    sys.exit(main())
