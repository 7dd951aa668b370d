"""JPEG files in a folder or an archive, made one .npz (data/Cifar10/jpeg_to_npz.py)."""

from __future__ import annotations

import importlib
import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imsave
from PIL import Image

from tests.test_data import stderr_line
from utils.model_utils import read_npz

jpeg = importlib.import_module("data.Cifar10.jpeg_to_npz")

Write = Callable[[Path, Mapping[str, bytes]], Path]


def encoded(image: np.ndarray) -> bytes:
    imsave(file := io.BytesIO(), image, format="jpg", pil_kwargs={"quality": 100})
    return file.getvalue()


def of_mode(mode: str) -> bytes:
    Image.new(mode, (8, 8)).save(file := io.BytesIO(), "jpeg")
    return file.getvalue()


IMAGE = encoded(np.zeros((8, 8, 3), np.uint8))
LARGE = encoded(np.zeros((16, 16, 3), np.uint8))


def colours() -> dict[str, bytes]:
    """Two classes, flat colours: cats are red, dogs blue; files named against their order."""
    files = {}
    for part, count in (("train", 3), ("test", 2)):
        for label, channel in (("dog", 2), ("cat", 0)):
            for i in reversed(range(count)):
                image = np.zeros((8, 8, 3), np.uint8)
                image[..., channel] = 100 + 10 * i
                files[f"{part}/{label}/{i:04}.jpg"] = encoded(image)
    return files


def as_folder(place: Path, files: Mapping[str, bytes]) -> Path:
    """Names that end in / are empty folders."""
    source = place / "images"
    source.mkdir(parents=True)
    for name, content in files.items():
        path = source / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(content)
    return source


def as_archive(place: Path, files: Mapping[str, bytes], before: str = "") -> Path:
    place.mkdir(exist_ok=True)
    with tarfile.open(source := place / "images.tar.xz", "w:xz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(before + name)
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return source


@pytest.fixture(params=[as_folder, as_archive], ids=["folder", "archive"])
def write(request: pytest.FixtureRequest) -> Write:
    return request.param


def converted(source: Path) -> bytes:
    output = source.parent / "out.npz"
    assert jpeg.main([str(source), "--output", str(output)]) == 0
    return output.read_bytes()


def refusal(source: Path, capsys: pytest.CaptureFixture) -> str:
    """The line, after which nothing is written."""
    before = sorted(source.parent.rglob("*"))
    assert jpeg.main([str(source), "--output", str(source.parent / "new" / "out.npz")]) == 2
    assert sorted(source.parent.rglob("*")) == before
    told = capsys.readouterr()
    assert told.out == ""
    return stderr_line(told.err)


def test_jpeg_folder_and_archive_give_the_same_npz(tmp_path: Path, write: Write, capsys) -> None:
    source = write(tmp_path, colours() | {"README": b"not an image"})
    converted(source)
    told = capsys.readouterr()
    assert "x (6, 3, 8, 8)" in told.out and told.err == ""
    data = read_npz(tmp_path / "out.npz")
    assert data.y.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1] and data.num_train == 6
    means = data.x.mean((2, 3))
    assert abs(means[:3, 0] - [100, 110, 120]).max() < 3 and means[:3, 2].max() < 3
    assert abs(means[3:6, 2] - [100, 110, 120]).max() < 3
    assert abs(means[6:8, 0] - [100, 110]).max() < 3 and means[6:8, 2].max() < 3


@pytest.mark.parametrize(
    "moved",
    [
        lambda name: f"cifar/{name}",
        lambda name: f"a.b/test/cifar/{name}",
        lambda name: f"{name.split('/')[0]}/{name}",
        lambda name: name.replace("test/", "inner/test/"),
        lambda name: name.replace("train/", "train/train/"),
        lambda name: name.replace(".jpg", ".JPEG"),
    ],
    ids=["in a folder", "in test", "doubled", "apart", "doubled train", "ending"],
)
def test_wherever_the_parts_lie_the_npz_is_the_same(
    tmp_path: Path, write: Write, moved: Callable[[str], str], capsys
) -> None:
    files = colours()
    plain = converted(write(tmp_path / "plain", files))
    others = {moved(name): content for name, content in files.items()}
    folders = {f"{parent}/": b"" for name in others for parent in list(Path(name).parents)[:-1]}
    assert converted(write(tmp_path / "moved", folders | others)) == plain
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("before", ["./", "../", "/"])
def test_names_in_an_archive_may_start_anyhow(tmp_path: Path, before: str, capsys) -> None:
    plain = converted(as_archive(tmp_path / "plain", colours()))
    files = {"./": b""} | colours()
    assert converted(as_archive(tmp_path / "anyhow", files, before)) == plain
    assert capsys.readouterr().err == ""


def test_a_class_may_be_named_like_a_part(tmp_path: Path, write: Write) -> None:
    def renamed(name: str) -> str:
        return name.replace("dog", "train").replace("cat", "test")

    files = {renamed(name): content for name, content in colours().items()}
    converted(write(tmp_path, files))
    assert read_npz(tmp_path / "out.npz").y.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_a_class_of_train_may_be_missing_in_test(tmp_path: Path, write: Write) -> None:
    files = {name: x for name, x in colours().items() if not name.startswith("test/cat")}
    converted(write(tmp_path, files))
    assert read_npz(tmp_path / "out.npz").y.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


def test_grey_images_get_three_equal_channels(tmp_path: Path, write: Write) -> None:
    converted(write(tmp_path, {"train/cat/0.jpg": of_mode("L"), "train/cat/1.jpg": IMAGE}))
    assert read_npz(tmp_path / "out.npz").x.shape == (2, 3, 8, 8)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no train/CLASS/NAME.jpg\n"),
        ({"train/cat/": b""}, "holds no train/CLASS/NAME.jpg\n"),
        ({"test/cat/0.jpg": IMAGE}, "holds no train/CLASS/NAME.jpg\n"),
        (
            {"train/cat/images/0.jpg": IMAGE, "train/dog/images/0.jpg": IMAGE},
            "NAME.jpg; left out as no CLASS/NAME.jpg: 2, the first train/cat/images/0.jpg\n",
        ),
        ({"train/cat/0.jpg": IMAGE, "train/cat/1.jpg": LARGE}, "holds images of 2 sizes\n"),
        ({"train/cat/0.jpg": b"hello"}, "error: train/cat/0.jpg: not a JPEG image"),
        (
            {"train/cat/0.jpg": IMAGE, "train/cat/1.jpg": of_mode("CMYK")},
            "error: train/cat/1.jpg: has 4 channels, not RGB or grey\n",
        ),
        (
            {"a/train/cat/0.jpg": IMAGE, "b/train/cat/0.jpg": IMAGE},
            ": a/train/cat/0.jpg, b/train/cat/0.jpg: must have different names\n",
        ),
    ],
)
def test_jpeg_files_that_do_not_fit(
    tmp_path: Path, write: Write, files: dict[str, bytes], message: str, capsys
) -> None:
    assert message in refusal(write(tmp_path, files), capsys)


def test_a_jpeg_source_that_is_missing_or_no_archive(tmp_path: Path, capsys) -> None:
    assert "missing: No such file" in refusal(tmp_path / "missing", capsys)
    (tmp_path / "text.tar").write_text("hello")
    message = "text.tar: not a tar archive, or damaged"
    assert message in refusal(tmp_path / "text.tar", capsys)


@pytest.mark.parametrize("channels", [2, 4, 5])
def test_images_are_rgb_or_grey(tmp_path: Path, monkeypatch, channels: int, capsys) -> None:
    """Whatever the decoder gives."""
    monkeypatch.setattr(jpeg, "imread", lambda file, format: np.zeros((8, 8, channels), np.uint8))
    line = refusal(as_folder(tmp_path, {"train/cat/0.jpg": b""}), capsys)
    assert line.endswith(f"train/cat/0.jpg: has {channels} channels, not RGB or grey\n")


@pytest.mark.parametrize("name", ["images/0.JPEG", "bird/0.jpg", "Cat/0.jpg"])
def test_a_class_that_train_lacks_is_refused(
    tmp_path: Path, write: Write, name: str, capsys
) -> None:
    folder = f"test/{name.split('/')[0]}"
    line = refusal(write(tmp_path, colours() | {f"test/{name}": IMAGE}), capsys)
    assert line.endswith(f": {folder}: is no class of train, which has cat, dog\n")


@pytest.mark.parametrize("before", ["", "cifar/"])
@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("name", ["0.png", "images/0.jpg", "", "images/"])
def test_a_class_without_jpeg_is_refused(
    tmp_path: Path, write: Write, before: str, part: str, name: str, capsys
) -> None:
    """Also when the whole of test has none."""
    files = {"train/bird/0.jpg": IMAGE, "train/cat/0.jpg": IMAGE, f"{part}/dog/{name}": b""}
    source = write(tmp_path, {f"{before}{file}": content for file, content in files.items()})
    line = refusal(source, capsys)
    assert line.endswith(f": {before}{part}/dog: a class without NAME.jpg or NAME.jpeg\n")


@pytest.mark.parametrize("name", ["train/train/deep/0.jpg", "train/train/deep/x/0.jpg"])
def test_a_class_named_train_is_no_part(tmp_path: Path, write: Write, name: str, capsys) -> None:
    line = refusal(write(tmp_path, colours() | {name: IMAGE}), capsys)
    assert line.endswith(": train/train: a class without NAME.jpg or NAME.jpeg\n")


@pytest.mark.parametrize(
    "names",
    [
        ["train/dog/0.png"],
        ["val/dog/0.jpg", "val/cat/0.jpg"],
        ["train/cat/images/0.jpg", "train/dog/1.gif", "test/cat/list.txt"],
        ["train/0.jpg", "test/0.jpg"],
        ["train/cat/train/deep/0.jpg"],
    ],
)
def test_files_left_out_are_told_of(tmp_path: Path, write: Write, names: list[str], capsys) -> None:
    plain = converted(write(tmp_path / "plain", colours()))
    assert capsys.readouterr().err == ""
    source = write(tmp_path / "more", colours() | dict.fromkeys(names, IMAGE))
    assert converted(source) == plain
    told = f"left out as no CLASS/NAME.jpg: {len(names)}, the first {min(names)}"
    assert capsys.readouterr().err == f"notice: {source}: {told}\n"


def test_links_in_an_archive_are_told_of(tmp_path: Path, capsys) -> None:
    with tarfile.open(tmp_path / "links.tar", "w") as archive:
        for name, target in (("train/cat/0.jpg", ""), ("train/cat/1.jpg", "train/cat/0.jpg")):
            member = tarfile.TarInfo(name)
            member.type = tarfile.LNKTYPE if target else tarfile.REGTYPE
            member.linkname, member.size = target, 0 if target else len(IMAGE)
            archive.addfile(member, io.BytesIO(IMAGE))
    converted(tmp_path / "links.tar")
    assert capsys.readouterr().err.endswith(": 1, the first train/cat/1.jpg\n")


@pytest.mark.parametrize(
    "name",
    [
        "train/.ipynb_checkpoints/x.jpg",
        "test/.ipynb_checkpoints/x.jpg",
        "train/.empty/",
        "train/cat/._0000.jpg",
        "train/cat/.ipynb_checkpoints/x.jpg",
        "train/.DS_Store",
        "._train",
        ".git/train/bird/0.jpg",
        "__MACOSX/train/cat/x.jpg",
        "train/__MACOSX/x.jpg",
    ],
)
def test_hidden_files_are_passed_over(tmp_path: Path, write: Write, name: str, capsys) -> None:
    plain = converted(write(tmp_path / "plain", colours()))
    content = b"" if name.endswith("/") else b"no image"
    assert converted(write(tmp_path / ".hid.den", {name: content} | colours())) == plain
    assert capsys.readouterr().err == ""
