"""kill -9, a full disk and two writers, on every write path (`pytest -m slow`, 3.5 minutes).

Children of a fork server, so that none imports torch anew, kill themselves at the n-th call of
something that writes, before it, after it or with a torn file, for n = 1, 2, ... until they
survive; others are killed by the clock.
"""

import contextlib
import errno
import faulthandler
import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import main
import main_plot
from data import generate
from tests.test_results import changed, files, read, same
from utils.partition import Split
from utils.results import CURVES, Recorder

resource = pytest.importorskip("resource", reason="needs POSIX limits")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL"),
]
ROUNDS = 3
PROGRAMS = {
    "main": main.main,
    "plot": main_plot.main,
    "generate": lambda words: generate.main("Synthetic", "synthetic", words),
}
POINTS = {
    "replace": (os, "replace"),
    "unlink": (Path, "unlink"),
    "create": (h5py.File, "__init__"),
    "write": (h5py.Group, "__setitem__"),
    "close": (h5py.File, "close"),
    "checkpoint": (torch, "save"),
}
PNG = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
# Imported at their first use, which takes longer than all the rest of a child.
LAZY = ("torch._dynamo", "matplotlib.backends.backend_agg")
KILLED = -9
FULL = "No space left on device"
kills = 0


# ---- the children


def sabotage(point: str, how: str, n: int) -> None:
    """Die at the n-th call of `point`: `before` it, `after` it, or with its file `torn` in half.

    `full`: no death, but from the n-th call on the disk is full; `limit`: really, at n bytes.
    """
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (n, n))
        return
    owner, name = POINTS[point]
    call, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*args, **options):
        number = next(calls)
        if how == "full" and number >= n:
            raise OSError(errno.ENOSPC, FULL)
        if number != n or how == "full":
            return call(*args, **options)
        if how == "after":
            with contextlib.suppress(OSError):  # most names to unlink are gone already
                call(*args, **options)
        if how == "torn":
            os.truncate(args[0], os.path.getsize(args[0]) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, wrapped)


def child(program: str, words: list[str], log: Path, plan: tuple | None, barrier) -> None:
    """Run a program; `log` gets its output, `log`.saves a byte for every save that was done."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    saves = os.open(f"{log}.saves", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    faulthandler.enable(out)
    torch.set_num_threads(1)
    save, replace = Recorder.save, os.replace

    def counted(self, status):
        written = save(self, status)
        os.write(saves, b".")
        return written

    def together(source, target):
        replace(source, target)
        if str(target).endswith(".try"):
            barrier.wait(30)

    Recorder.save = counted
    if barrier:
        os.replace = together
    if plan:
        sabotage(*plan)
    sys.exit(PROGRAMS[program](words))


@pytest.fixture(scope="module")
def context():
    """The fork server, with everything imported; prints how many were killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_kill", *LAZY])
    with pytest.MonkeyPatch.context() as patch:
        # Without it the server cannot import this module, and every child imports torch.
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
        forkserver.ensure_running()
    yield context
    print(f"\n{kills} processes were killed")


@pytest.fixture
def start(context, tmp_path):
    """start(program, words, plan): the exit code and the output; `delay`: killed after so long."""

    def begin(program, words, plan=None, log="log", barrier=None):
        arguments = (program, [str(w) for w in words], tmp_path / log, plan, barrier)
        process = context.Process(target=child, args=arguments)
        process.start()
        return process

    def start(program, words, plan=None, delay=None):
        global kills
        process = begin(program, words, plan)
        process.join(60 if delay is None else delay)
        if delay is None and process.is_alive():
            os.kill(process.pid, signal.SIGABRT)  # faulthandler tells where it hangs
        process.kill() if delay is not None else None
        process.join(60)
        kills += process.exitcode == KILLED
        return process.exitcode, (tmp_path / "log").read_text()

    start.begin = begin
    start.saves = lambda: (tmp_path / "log.saves").stat().st_size
    return start


# ---- what must hold after every death


def whole(out: Path) -> None:
    """Everything under a final name can be read to its end."""
    for path in out.iterdir():
        if path.suffix in (".h5", ".part") and ".h5" in path.suffixes:
            assert len(read(path)["rs_glob_acc"]) >= 0, path
        elif path.suffix == ".ckpt":
            assert torch.load(path, weights_only=True)["server"]["round"] > 0, path
        elif path.suffix == ".npz":
            assert Split.load(path).users, path
        elif path.suffix == ".png":
            content = path.read_bytes()
            assert content.startswith(PNG[0]) and content.endswith(PNG[1]), path
        elif path.suffix == ".csv":
            assert path.read_text().endswith("\n"), path
        else:
            assert path.suffix in (".tmp", ".part", ".try"), path


def kept(out: Path) -> int:
    """How many rounds need not be trained again."""
    done = [h5py.File(path).attrs["status"] == "finished" for path in files(out, "*_0.h5")]
    if len(done) == 2 and all(done):
        return ROUNDS
    saved = files(out, "*.ckpt")
    return torch.load(saved[0], weights_only=True)["server"]["round"] if saved else 0


def final(out: Path) -> dict[str, Path]:
    """The files under final names; what a killed process left beside them does not count."""
    return {p.name: p for p in out.iterdir() if p.suffix not in (".tmp", ".try")}


def equal(out: Path, reference: Path) -> None:
    """The same files, bitwise the same arrays, all finished."""
    a, b = final(out), final(reference)
    assert a.keys() == b.keys()
    for name in b:
        assert same(read(a[name]), read(b[name])), name
        with h5py.File(a[name]) as file:
            assert file.attrs["status"] == "finished", name


def job(leaf: Path, out: Path, *words: object) -> list[object]:
    usual = [
        "--dataset",
        "Synthetic",
        "--split",
        leaf,
        "--times",
        1,
        "--num_global_iters",
        ROUNDS,
        "--numusers",
        2,
    ]
    usual += ["--gpu", -1, "--save_every", 0, "--K", 2, "--local_epochs", 2, "--batch_size", 4]
    return [*usual, "--results_dir", out, *words]


@pytest.fixture
def reference(leaf, tmp_path, start):
    """The folder of the uninterrupted job."""
    code, text = start("main", job(leaf, tmp_path / "reference"))
    assert code == 0, text
    return tmp_path / "reference"


# ---- training


def every(step: int, seed: int):
    """1, 2, 3, ... or, where there are many calls, about every `step`-th of them."""
    rng = random.Random(seed)
    return itertools.accumulate(rng.randint(1, 2 * step - 1) for _ in itertools.count())


@pytest.mark.parametrize(
    ("point", "how", "step", "least"),
    [
        ("replace", "before", 1, 12),
        ("replace", "after", 1, 12),
        ("replace", "torn", 1, 12),
        ("unlink", "before", 1, 20),
        ("unlink", "after", 1, 20),
        ("create", "after", 2, 5),
        ("close", "after", 2, 5),
        ("write", "before", 15, 8),
        ("checkpoint", "before", 1, 3),
        ("checkpoint", "after", 1, 3),
    ],
)
def test_training_killed_at_each_step_goes_on(
    point, how, step, least, leaf, reference, start, tmp_path
):
    curves = {name: read(path) for name, path in final(reference).items()}
    for died, n in enumerate(every(step, seed=1)):  # noqa: B007 -- used below
        out = tmp_path / str(n)
        code, text = start("main", job(leaf, out), (point, how, n))
        if code == 0:
            break
        assert code == KILLED, text
        if out.exists():
            whole(out)
            assert kept(out) >= min(start.saves(), ROUNDS), f"{point} {n}: rounds were lost"
            for name, path in final(out).items():
                for curve in CURVES if name in curves else ():
                    found = read(path)[curve]
                    assert np.array_equal(found, curves[name][curve][: len(found)]), name
        code, text = start("main", job(leaf, out, "--resume"))
        assert code == 0, text
        equal(out, reference)
    assert died >= least


@pytest.mark.parametrize("how", ["before", "after", "torn"])
def test_finished_files_are_the_old_or_the_new_ones(how, leaf, reference, start, tmp_path):
    for died, n in enumerate(every(1, seed=2)):  # noqa: B007 -- used below
        out = tmp_path / str(n)
        out.mkdir()
        old = {}
        for name, path in final(reference).items():
            (out / name).write_bytes(path.read_bytes())
            with changed(out / name) as file:
                file["rs_glob_acc"][:] = 0
            old[name] = (out / name).read_bytes()
        code, text = start("main", job(leaf, out), ("replace", how, n))
        if code == 0:
            break
        assert code == KILLED, text
        whole(out)
        for name, content in old.items():
            new = same(read(out / name), read(reference / name))
            assert new or (out / name).read_bytes() == content
        assert start("main", job(leaf, out))[0] == 0
        equal(out, reference)
    assert died >= 12


@pytest.mark.parametrize("way", [[], ["--lockstep", "yes"], ["--jobs", 2]])
@pytest.mark.parametrize("algorithm", ["pFedMe", "SCAFFOLD"])
def test_killed_by_the_clock_again_and_again(algorithm, way, leaf, start, tmp_path):
    rng = random.Random(3)
    words = ["--algorithm", algorithm, "--times", 2, "--num_global_iters", 12, *way]
    begun = time.monotonic()
    code, text = start("main", job(leaf, tmp_path / "reference", *words))
    assert code == 0, text
    longest = time.monotonic() - begun
    # With --jobs the orphans of a killed parent may still be writing while the next one starts.
    for n in range(3):
        out = tmp_path / str(n)
        for delay in (longest * rng.random() for _ in range(3)):
            code, text = start("main", job(leaf, out, *words, "--resume"), delay=delay)
            assert code in (0, KILLED), text
            if out.exists():
                whole(out)
        code, text = start("main", job(leaf, out, *words, "--resume"))
        assert code == 0, text
        whole(out)
        for path in files(tmp_path / "reference", "*.h5"):
            assert same(read(out / path.name), read(path)), path.name


# ---- splits and figures


@pytest.mark.parametrize(("point", "how"), [("replace", h) for h in ("before", "after", "torn")])
def test_split_and_picture_are_the_old_or_the_new_ones(point, how, start, tmp_path):
    words = ["--users", 3, "--output"]
    assert start("generate", [*words, tmp_path / "new" / "s.npz"])[0] == 0
    assert start("generate", [*words, tmp_path / "old" / "s.npz", "--seed", 1])[0] == 0
    died = old_or_new(start, "generate", [*words, "s.npz"], (point, how), tmp_path)
    assert died == 2


@pytest.mark.parametrize("how", ["before", "after", "torn"])
def test_figure_and_table_are_the_old_or_the_new_ones(how, reference, start, tmp_path):
    words = [reference, "--out", "f.png", "--csv", "c.csv"]
    for folder, more in (("new", []), ("old", ["--only", "global"])):
        assert start("plot", inside(tmp_path / folder, [*words, *more]))[0] == 0
    assert old_or_new(start, "plot", words, ("replace", how), tmp_path) == 2


def inside(folder: Path, words: list) -> list:
    """The words, with the names of files put into the folder."""
    return [folder / w if str(w).endswith((".npz", ".png", ".csv")) else w for w in words]


def old_or_new(start, program, words, plan, place: Path) -> int:
    """Kill at every step, then by the clock, over place/old or nothing; how often at steps."""
    rng = random.Random(4)
    new = {p.name: p.read_bytes() for p in (place / "new").iterdir()}
    plans = itertools.chain([rng.uniform(0, 0.8) for _ in range(6)], every(1, 5))
    stepped = 0
    for turn, n in enumerate(plans):
        out = place / str(turn)
        old = {}
        if turn % 3:
            out.mkdir()
            old = {p.name: p.read_bytes() for p in (place / "old").iterdir()}
            for name, content in old.items():
                (out / name).write_bytes(content)
        clock = isinstance(n, float)
        code, text = start(
            program, inside(out, words), None if clock else (*plan, n), n if clock else None
        )
        assert code in (0, KILLED), text
        if out.exists():
            whole(out)
            there = {p.name: p.read_bytes() for p in out.iterdir() if p.name in new}
            assert there.keys() >= old.keys()
            assert all(content in (old.get(k), new[k]) for k, content in there.items())
        again, text = start(program, inside(out, words))
        assert again == 0, text
        assert {k: (out / k).read_bytes() for k in new} == new
        if not clock:
            if code == 0:
                return stepped
            stepped += 1
    raise AssertionError


# ---- a full disk


def one_line(text: str) -> str:
    assert "Traceback" not in text, text
    (line,) = [line for line in text.splitlines() if "error" in line]
    return line


@pytest.mark.parametrize("way", [[]])  # workers of --jobs are not sabotaged, see below
@pytest.mark.parametrize("point", ["replace", "write"])
def test_a_full_disk_is_one_line_and_keeps_what_there_was(point, way, leaf, start, tmp_path):
    assert start("main", job(leaf, tmp_path / "reference", *way))[0] == 0
    for n in every({"write": 30}.get(point, 2), seed=6):
        out = tmp_path / f"{point}{n}"
        code, text = start("main", job(leaf, out, *way), (point, "full", n))
        if code == 0:
            break
        assert code == 2, text
        assert FULL in one_line(text)
        whole(out)
        assert not files(out, "*.tmp")
        if not way:
            assert kept(out) >= min(start.saves(), ROUNDS), f"{point} {n}: rounds were lost"
        code, text = start("main", job(leaf, out, *way, "--resume"))
        assert code == 0, text
        equal(out, tmp_path / "reference")


@pytest.mark.parametrize("way", [[], ["--times", 2, "--jobs", 2]])
def test_writes_that_really_fail_are_one_line(way, leaf, start, tmp_path):
    """The system refuses files beyond a size, somewhere inside HDF5, torch or NumPy."""
    assert start("main", job(leaf, tmp_path / "reference", *way))[0] == 0
    failed = 0
    for size in (5000, 9000, 15000, 40000):
        out = tmp_path / str(size)
        code, text = start("main", job(leaf, out, *way), (None, "limit", size))
        assert code in (0, 2), text
        if code == 2:
            failed += 1
            assert "cannot write" in one_line(text)
        whole(out)
        assert not files(out, "*.tmp")
        code, text = start("main", job(leaf, out, *way, "--resume"))
        assert code == 0, text
        equal(out, tmp_path / "reference")
    assert failed >= 2


@pytest.mark.parametrize("size", [5000, 6000])  # the log must fit
def test_splits_and_figures_that_cannot_be_written(size, reference, start, tmp_path):
    plot = [reference, "--out", tmp_path / "f.png", "--csv", tmp_path / "c.csv"]
    for program, words in (
        ("generate", ["--users", 3, "--output", tmp_path / "s.npz"]),
        ("plot", plot),
    ):
        before = set(tmp_path.iterdir())
        code, text = start(program, words, (None, "limit", size))
        assert code == 2, text
        assert "written" in one_line(text) or "cannot write" in text
        left = set(tmp_path.iterdir()) - before
        assert all(path.suffix == ".npz" for path in left)
        for path in left:
            assert Split.load(path).users


# ---- two at a time


@pytest.mark.parametrize("turn", range(6))
def test_two_processes_on_one_output_are_both_safe(turn, leaf, reference, context, start, tmp_path):
    out = tmp_path / "both"
    barrier = context.Barrier(2) if turn < 2 else None
    resume = ["--resume"] * (turn % 2)
    pair = [
        start.begin("main", job(leaf, out, *resume), log=f"log{i}", barrier=barrier)
        for i in range(2)
    ]
    for process in pair:
        while process.is_alive():
            whole_now(out)
            process.join(0.01)
    texts = [(tmp_path / f"log{i}").read_text() for i in range(2)]
    assert [process.exitcode for process in pair] == [0, 0], texts
    equal(out, reference)
    assert not files(out, "*.tmp")


def whole_now(out: Path) -> None:
    """Like `whole`, while files come and go."""
    for path in files(out, "*.h5"):
        assert len(read(path)["rs_glob_acc"]) >= 0


@pytest.mark.parametrize("turn", range(4))
def test_two_figures_at_a_time_are_both_safe(turn, reference, start, tmp_path):
    words = [reference, "--out", tmp_path / "f.png", "--csv", tmp_path / "c.csv"]
    pair = [start.begin("plot", words, log=f"log{i}") for i in range(2)]
    for process in pair:
        process.join(60)
    texts = [(tmp_path / f"log{i}").read_text() for i in range(2)]
    assert [process.exitcode for process in pair] == [0, 0], texts
    content = (tmp_path / "f.png").read_bytes()
    assert content.startswith(PNG[0]) and content.endswith(PNG[1])
    assert not files(tmp_path, "*.tmp")
