"""CIFAR-10 (or any images) kept as JPEG files, as one .npz for `--dataset FILE.npz`.

`python data/Cifar10/jpeg_to_npz.py cifar10.tar.xz --output data/Cifar10/cifar10.npz` reads a folder
or a tar archive that holds train/CLASS/NAME.jpg and, if there is one, test/CLASS/NAME.jpg. Labels
number the classes in alphabetical order, which is CIFAR-10's own.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from matplotlib.image import imread

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.errors import InputError, Parser, guarded
from utils.partition import write_atomic

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
    images: dict[tuple[str, str, str], np.ndarray] = {}
    try:
        for name, content in _folder(source) if source.is_dir() else _archive(source):
            key = _key(name)
            if key:
                images[key] = _decoded(name, content)
    except OSError as error:
        raise InputError(f"{source}: {error.strerror or error}") from None
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{source}: not a tar archive, or damaged ({error})") from None
    arrays = _arrays(source, images)
    write_atomic(output, lambda file: np.savez(file, **arrays))
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    print(f"{output}: {shapes}\nuse it:  python main.py --dataset {output} --model cnn")
    return 0


def _folder(source: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(source.rglob("*")):
        if path.is_file():
            yield path.relative_to(source).as_posix(), path.read_bytes()


def _archive(source: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(source, "r|*") as archive:
        for member in archive:
            if member.isfile():
                yield member.name, archive.extractfile(member).read()


def _key(name: str) -> tuple[str, str, str] | None:
    """(part, class, file) of an image, whatever folders the parts lie in."""
    *_, part, label, file = ("", "", *PurePosixPath(name).parts)
    known = part in ("train", "test") and file.lower().endswith(ENDINGS)
    return (part, label, file) if known else None


def _decoded(name: str, content: bytes) -> np.ndarray:
    """(3, height, width); grey images get three equal channels."""
    try:
        image = imread(io.BytesIO(content), format="jpg")
    except (OSError, SyntaxError, ValueError):
        raise InputError(f"{name}: not a JPEG image, or damaged") from None
    return np.broadcast_to(
        image[..., np.newaxis] if image.ndim == 2 else image, (*image.shape[:2], 3)
    ).transpose(2, 0, 1)


def _arrays(source: Path, images: dict[tuple[str, str, str], np.ndarray]) -> dict[str, np.ndarray]:
    """x, y and, where there are test images, x_test, y_test; in the order of class and file."""
    shapes = {image.shape for image in images.values()}
    if len(shapes) != 1:
        what = f"images of {len(shapes)} sizes" if shapes else "no train/CLASS/NAME.jpg"
        raise InputError(f"{source}: holds {what}")
    labels = {name: i for i, name in enumerate(sorted({label for _, label, _ in images}))}
    arrays = {}
    for part, ending in (("train", ""), ("test", "_test")):
        keys = sorted(key for key in images if key[0] == part)
        if keys:
            arrays[f"x{ending}"] = np.stack([images[key] for key in keys])
            arrays[f"y{ending}"] = np.array([labels[label] for _, label, _ in keys])
    if "x" not in arrays:
        raise InputError(f"{source}: holds no train/CLASS/NAME.jpg")
    return arrays


if __name__ == "__main__":
    sys.exit(main())
