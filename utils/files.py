"""Files that are whole or not there: atomic writing, and result files (.h5) with a checksum."""

from __future__ import annotations

import glob
import hashlib
import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath

import h5py

from utils.errors import InputError

# The user block that HDF5 allows before its own first byte; it holds the checksum of the rest.
BLOCK = 512
HDF5 = b"\x89HDF\r\n\x1a\n"
CLOCK = 60  # seconds by which a clock may have been set since


def visible(folder: Path, pattern: str) -> list[Path]:
    """What a folder holds, sorted; hidden names (._NAME of a Mac's archive) are no data."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def is_foreign(path: str) -> bool:
    """Whether this is a whole path of the other kind of system, which names nothing here."""
    windows, posix = PureWindowsPath(path).is_absolute(), PurePosixPath(path).is_absolute()
    return posix if os.name == "nt" else windows and not posix


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to; it becomes `path` when the block ends without error."""
    text = str(path)
    if not path.name or "\0" in text or text != text.encode(errors="replace").decode():
        raise InputError(f"{path}: not a file name")
    # With the host, since a process of another machine on the same disk may be alive.
    start = f"{path.name}.{platform.node()}."
    beside = path.with_name(f"{start}{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{glob.escape(start)}*.tmp"):
            if is_alive(left.name[len(start) : -len(".tmp")]) is False:
                left.unlink(missing_ok=True)
        yield beside
        os.replace(beside, path)
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise InputError(f"cannot write {path}: {reason}") from None
    finally:
        with suppress(OSError):
            beside.unlink()


def is_alive(process: str, before: float = math.inf) -> bool | None:
    """Whether a process of this machine has that id; None where that cannot be told.

    `before`: it must have started by then (seconds since 1970), since ids are given again.
    """
    if not process.isdecimal() or os.name == "nt":  # there, asking by a signal would kill
        return None
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        pass
    with suppress(OSError, ValueError, IndexError):  # only Linux tells more
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/stat").read_text().partition("btime ")[2].split()[0]
        started = int(boot) + int(numbers[18]) / os.sysconf("SC_CLK_TCK")
        return state not in "ZX" and started < before + CLOCK
    return True


@contextmanager
def atomic_h5(path: Path) -> Iterator[h5py.File]:
    """An .h5 file to write; it appears under `path`, whole, when the block ends without error."""
    # In memory first: HDF5 tells of a full disk by RuntimeErrors, and only when it closes.
    with replacing(path) as beside:
        with h5py.File(beside, "w", driver="core", backing_store=False) as file:
            yield file
            file.flush()
            image = file.id.get_file_image()
        with beside.open("wb") as out:
            out.write(seal(hashlib.sha256(image).hexdigest()))
            out.write(image)


def seal(digest: str) -> bytes:
    """The block before an HDF5 file whose bytes have this sha256 (hex)."""
    return f"sha256 of all bytes from {BLOCK} on: {digest}\n".encode().ljust(BLOCK, b"\0")


@contextmanager
def open_h5(path: Path) -> Iterator[h5py.File]:
    """A result file to read; whatever is wrong with it, also in the block, is an InputError.

    Files without a checksum (older ones, other programs') are read on trust.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("not a file")
        # Before HDF5 sees a byte, since some damage makes the library itself run for ever.
        with path.open("rb") as raw:
            head, digest = raw.read(BLOCK), hashlib.sha256()
            while piece := raw.read(2**20):
                digest.update(piece)
        if not head.startswith(HDF5) and head != seal(digest.hexdigest()):
            raise ValueError("its checksum does not fit")
        with h5py.File(path) as file:
            yield file
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:  # h5py answers damaged bytes with errors of many kinds
        why = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: damaged, or no result file of main.py ({why})") from None


def partner(file: h5py.File, path: Path) -> Path:
    """The `_p` file of a main file and the other way round; `path`: of the open one."""
    suffix = ".part" if path.suffix == ".part" else ""
    return path.with_name(str(file.attrs["partner"]) + suffix)
