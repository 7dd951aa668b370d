"""Random input: whatever is given or damaged, the answer is a value or one line, never a trace.

`FUZZ_TIMES=20 pytest tests/test_fuzz.py` tries twenty times as much.
"""

import contextlib
import gzip
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_results import StopAfter
from tests.toys import run_main
from utils import collection
from utils.config import FIELDS, FILES, Config, notices, parse_command_line
from utils.errors import guarded
from utils.grid import read_grid
from utils.jobs import Job, prepare
from utils.model_utils import _read_idx, read_data
from utils.partition import Split
from utils.plot_utils import read_run
from utils.replay import read_recording
from utils.results import finished

TIMES = int(os.environ.get("FUZZ_TIMES", "1"))
# A folder that all examples of a test share is meant.
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def cases(number: int) -> settings:
    return settings(
        max_examples=number * TIMES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=SHARED,
    )


def answered(work: Callable[[], object]) -> bool:
    """Whether `work` gave a value; else it refused in one line. All else fails the test."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = guarded("main.py", lambda: (work(), 0)[1])
    said = err.getvalue()
    if code == 0:
        return True
    assert code == 2
    assert said.startswith("main.py: error: ")
    assert said.endswith("\n")
    assert len(said.splitlines()) == 1
    return False


# ---- command line and YAML


# What a shell can pass: no NUL; bytes that are no UTF-8 arrive as these surrogates.
CHARS = st.characters(exclude_categories=["Cs"], exclude_characters="\0") | st.sampled_from(
    ["\udc80", "\udcff"]
)
NUMBERS = st.integers().map(str) | st.floats().map(repr) | st.sampled_from("1 0.5 2 -1 1e9".split())
SPELLED = sorted(
    {name for f in FIELDS.values() for name in getattr(f.metadata["parse"], "names", ())}
)
# Command lines may end in a Config only if most words are plausible.
VALUES = st.one_of(NUMBERS, NUMBERS, st.sampled_from(SPELLED), st.text(CHARS, max_size=8))
NAMES = st.sampled_from([*FIELDS, *FIELDS, "replay", "nosuch", "lr"])
FITTING = st.sampled_from(
    [
        (f"--{name}", text)
        for name, field in FIELDS.items()
        for text in [*getattr(field.metadata["parse"], "names", ("1", "0.5", "3"))]
    ]
)
PAIRS = (
    FITTING
    | FITTING
    | st.tuples(NAMES.map("--{}".format), VALUES)
    | st.tuples(NAMES, VALUES).map(lambda pair: (f"--{pair[0]}={pair[1]}",))
)
WORDS = st.one_of(
    st.lists(FITTING, max_size=5).map(lambda pairs: [w for pair in pairs for w in pair]),
    st.lists(PAIRS, max_size=5).map(lambda pairs: [w for pair in pairs for w in pair]),
    st.lists(st.text(CHARS, max_size=12).filter(lambda w: w not in ("-h", "--help")), max_size=4),
)


@given(words=WORDS)
@cases(1000)
def test_any_command_line(words):
    def read() -> None:
        values, recorded = parse_command_line(words)
        config = Config(**values)
        assert recorded.keys() <= FILES.keys()
        assert config.resolved().resolved() == config.resolved()
        assert all("\n" not in line for line in notices(config, values))

    answered(read)


@given(words=st.lists(st.text(CHARS, min_size=1, max_size=20), min_size=1, max_size=2))
@cases(50)
def test_any_name_of_a_file(words):
    for name in FILES:
        reader = {"replay": read_recording}.get(name, read_grid)
        for word in words:
            assert not answered(lambda reader=reader, word=word: reader(word, {}))


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6))
SECTIONS = [*collection.KEYS, *(key for keys in collection.KEYS.values() for key in keys)]
KEYS = st.sampled_from(sorted(FIELDS)) | st.sampled_from(SECTIONS) | st.text(max_size=6)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
# YAML's own signs, so that random text gets past the scanner.
SIGNS = st.lists(
    st.sampled_from([*"?:-[]{},&*!|>'\"%@`#~\\U0a1 \n\t", "beta", "K: 2\n"]), max_size=20
).map("".join)
DOCUMENTS = st.one_of(
    st.binary(max_size=40),
    SIGNS.map(str.encode),
    st.dictionaries(KEYS, SCALARS, max_size=4).map(lambda d: yaml.safe_dump(d).encode()),
    TREES.map(lambda tree: yaml.safe_dump(tree).encode()),
    st.dictionaries(
        st.sampled_from(["beta", "lamda", "mu"]), st.floats(0, 9).map(str), min_size=1
    ).map(lambda d: "\n".join(f"{k}: {v}" for k, v in d.items()).encode()),
)


@given(content=DOCUMENTS)
@cases(800)
def test_any_yaml(content, tmp_path):
    path = tmp_path / "options.yaml"
    path.write_bytes(content)
    answered(lambda: read_grid(str(path), {}))


@pytest.mark.parametrize(
    "content",
    ["{[a]: 1}", "? {a: b}\n: 2", "&a [*a]: 1", '"\\UFFFFFFFF": 1', 'beta: "\\U00110000"'],
)
def test_yaml_that_the_library_chokes_on(content, tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(content)
    assert not answered(lambda: read_grid(str(path), {}))


# ---- damaged files


@st.composite
def edits(draw) -> list[tuple[str, int, bytes]]:
    """One to three damages: a changed bit or bytes, an end, an insertion, a removal."""
    kind = st.sampled_from(["flip", "flip", "write", "cut", "insert", "remove"])
    # Half of them near the front, where the structure is.
    place = st.integers(0, 2**31) | st.integers(0, 2000)
    return draw(
        st.lists(st.tuples(kind, place, st.binary(min_size=1, max_size=9)), min_size=1, max_size=3)
    )


def damaged(content: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    found = bytearray(content)
    for kind, place, extra in changes:
        at, count = place % max(1, len(found)), len(extra)
        if kind == "flip" and found:
            found[at] ^= 1 << extra[0] % 8
        elif kind == "write":
            found[at : at + count] = extra
        elif kind == "cut":
            del found[at:]
        elif kind == "insert":
            found[at:at] = extra
        elif kind == "remove":
            del found[at : at + count]
    return bytes(found)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@given(changes=edits())
@cases(300)
def test_damaged_split(changes, tmp_path):
    path = tmp_path / "split.npz"
    names = ("a", "b", "ü")
    rows = tuple(np.arange(3 * i, 3 * i + 3) for i in range(3))
    manifest = {"dataset": "Mnist", "scheme": "test"}
    if not path.exists():
        split = Split(names, rows, rows, manifest, {(1, "train"): np.array([1, 2, 3])})
        split.save(path)
        path.with_suffix(".whole").write_bytes(path.read_bytes())
    path.write_bytes(damaged(path.with_suffix(".whole").read_bytes(), changes))

    def read() -> None:
        found = Split.load(path)
        # Only damage to what is not read (times, spare bytes of the archive) can pass.
        assert found.users == names
        assert all(np.array_equal(a, b) for a, b in zip(found.train, rows, strict=True))

    answered(read)


@given(changes=edits(), part=st.sampled_from(["train", "test"]))
@cases(300)
def test_damaged_leaf(changes, part, leaf):
    path = leaf / part / "all.json"
    whole = path.read_bytes()
    try:
        path.write_bytes(damaged(whole, changes))

        def read() -> None:
            source, split = read_data("Synthetic", str(leaf))
            assert np.isfinite(source.x).all()
            assert 0 <= source.y.min() <= source.y.max() <= 9
            rows = np.concatenate([*split.train, *split.test])
            assert sorted(rows) == list(range(len(source.y)))

        answered(read)
    finally:
        path.write_bytes(whole)


@given(content=TREES, part=st.sampled_from(["train", "test"]))
@cases(200)
def test_any_json_as_leaf(content, part, leaf):
    path = leaf / part / "all.json"
    whole = path.read_bytes()
    try:
        path.write_text(json.dumps({"users": ["a"], "num_samples": [1], "user_data": content}))
        answered(lambda: read_data("Synthetic", str(leaf)))
        path.write_text(json.dumps({**json.loads(whole), "num_samples": content}))
        answered(lambda: read_data("Synthetic", str(leaf)))
    finally:
        path.write_bytes(whole)


@pytest.fixture
def results(leaf, capsys) -> Iterator[list[Path]]:
    """The main file and the `_p` file of a short run."""
    assert run_main(leaf, "--eval_every", "1")[0] == 0
    yield sorted(leaf.parent.glob("results/*_0.h5"))


@given(changes=edits(), which=st.integers(0, 1))
@cases(150)
def test_damaged_result(changes, which, results):
    path = results[which]
    whole = path.read_bytes()
    try:
        content = damaged(whole, changes)
        path.write_bytes(content)
        # The checksum lets no damage pass.
        assert answered(lambda: read_recording(str(path), {})) == (content == whole)
        assert answered(lambda: read_run(path)) == (content == whole)
        assert finished(path) == (content == whole)
    finally:
        path.write_bytes(whole)


@pytest.fixture
def job(leaf) -> Job:
    """A short job, one round of it done: its checkpoint and result files are there."""
    words = {"dataset": "Synthetic", "split": str(leaf), "results_dir": str(leaf.parent / "out")}
    config = Config(**words, gpu=-1, num_global_iters=2, local_epochs=2, numusers=2, save_every=0)
    job = prepare(config, *read_data("Synthetic", str(leaf)))
    recorder, server = job.recorder(0, None), job.server(0)
    server.pause = StopAfter(1).pause
    recorder.attach(server)
    with pytest.raises(KeyboardInterrupt):
        server.run()
    recorder.save("interrupted")
    return job


def resume(job: Job) -> dict[str, object]:
    """What `--resume` does up to the first round; what the server then has."""
    recorder, server = job.recorder(0, None), job.server(0)
    recorder.attach(server)
    found = recorder.load_checkpoint()
    assert found is not None
    recorder.restore(found)
    return server.checkpoint()


@given(changes=edits())
@cases(150)
def test_damaged_checkpoint(changes, job):
    path = job.recorder(0, None).checkpoint_path
    whole = path.read_bytes()
    kept = resume(job)
    assert kept["round"] == 1

    def read() -> None:
        # Its checksums let only damage to what is not read pass.
        found = resume(job)
        assert found["round"] == 1
        assert all(map(torch.equal, found["tensors"], kept["tensors"]))

    try:
        path.write_bytes(damaged(whole, changes))
        answered(read)
    finally:
        path.write_bytes(whole)


@given(changes=edits())
@cases(200)
def test_damaged_idx(changes, tmp_path):
    pixels = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
    head = bytes([0, 0, 8, 3]) + np.array(pixels.shape, ">u4").tobytes()
    path = tmp_path / "images.gz"
    path.write_bytes(damaged(gzip.compress(head + pixels.tobytes(), mtime=0), changes))

    def read() -> None:
        # gzip carries a checksum: what passes is whole.
        assert np.array_equal(_read_idx(path, pixels.shape)[0], pixels)

    answered(read)


@given(changes=edits())
@cases(150)
def test_damaged_idx_in_a_whole_archive(changes, tmp_path):
    head = bytes([0, 0, 8, 1, 0, 0, 0, 6])
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(damaged(head + bytes(6), changes), mtime=0))
    answered(lambda: _read_idx(path, (6,)))


# ---- pickles


@pytest.mark.parametrize("pack", ["plain", "torch", "torch_old", "npy", "npz"])
@pytest.mark.parametrize("target", ["split", "checkpoint", "leaf", "result", "yaml", "idx"])
def test_no_file_executes(target, pack, job, leaf, tmp_path):
    marker = tmp_path / "executed"
    bomb = Bomb(marker)
    path = tmp_path / "bomb"
    with path.open("wb") as file:
        if pack == "plain":
            pickle.dump(bomb, file)
        elif pack == "npy":
            np.save(file, np.array([bomb], dtype=object))
        elif pack == "npz":
            names = ("head", "sizes", "rows", "overrides", "labels")
            np.savez(file, **dict.fromkeys(names, np.array([bomb], dtype=object)))
        else:
            torch.save({"schema": bomb}, file, _use_new_zipfile_serialization=pack == "torch")
    content = path.read_bytes()
    checkpoint = job.recorder(0, None).checkpoint_path

    def offer(place: Path, read: Callable[[], object]) -> None:
        place.write_bytes(content)
        assert not answered(read)
        assert not marker.exists()

    if target == "split":
        offer(path, lambda: read_data("Mnist", str(path)))
    elif target == "checkpoint":
        offer(checkpoint, lambda: resume(job))
    elif target == "leaf":
        offer(leaf / "train" / "all.json", lambda: read_data("Synthetic", str(leaf)))
    elif target == "result":
        offer(path, lambda: read_recording(str(path), {}))
        offer(path, lambda: read_run(path))
    elif target == "yaml":
        offer(path, lambda: read_grid(str(path), {}))
    else:
        offer(path, lambda: _read_idx(path, (6,)))


def test_the_bomb_is_live(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()
