"""What a newcomer does on the first day: a read-only clone, own names, splits of repetitions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import h5py
import numpy as np
import pytest

import main
import main_plot
from FLAlgorithms.servers.serverbase import WORK
from tests.test_data import place, stderr_line  # noqa: F401 (a fixture)
from tests.test_faults import LEAF, X, Y, inputs, leaf, run  # noqa: F401 (a fixture)
from utils import model_utils
from utils.config import Config
from utils.model_utils import dataset_name, read_data
from utils.replay import read_recording


def main_files(folder: Path) -> list[Path]:
    """The repetitions' files of the global model."""
    return [p for p in sorted(folder.glob("*_[0-9].h5")) if "_p_" not in p.name]


# ---- a clone that cannot be written --------------------------------------------------------------


@pytest.fixture
def read_only(inputs: Path, monkeypatch) -> Path:  # noqa: F811
    """The repository's data folder cannot be written (for root neither: a file is in its place)."""
    (inputs / "file").write_text("")
    monkeypatch.setattr(model_utils, "DATA", inputs / "file")
    return inputs


def test_splits_go_beside_the_results_where_data_cannot_be_written(read_only, capsys):
    assert run("--dataset", "plain.npz", "--results_dir", "out") == 0
    assert "split made: " in capsys.readouterr().err
    (split,) = (read_only / "out" / "splits" / "plain").glob("*.npz")
    assert split.with_suffix(".png").exists()
    assert run("--dataset", "plain.npz", "--results_dir", "out") == 0
    assert "split made" not in capsys.readouterr().err, "found there again"
    (path,) = main_files(read_only / "out")
    assert main.main(["--verify", str(path)]) == 0
    assert run("--dataset", "plain.npz", "--split", split.name, "--results_dir", "out") == 0


def test_split_dir_says_where_splits_are(inputs, capsys):  # noqa: F811
    words = ["--dataset", "plain.npz", "--partition", "iid:users=4"]
    assert run(*words, "--split_dir", "mine") == 0
    assert list((inputs / "mine" / "plain").glob("iid_users4_*.npz"))
    assert not (inputs / "plain").exists(), "not in the place of the data"
    assert run(*words, "--results_dir", "other") == 0
    (first,), (second,) = main_files(inputs / "results"), main_files(inputs / "other")
    assert first.name == second.name, "where splits lie changes no number"
    (inputs / "file").write_text("")
    capsys.readouterr()
    assert run("--dataset", "plain.npz", "--partition", "iid:users=5", "--split_dir", "file") == 2
    line = stderr_line(capsys.readouterr().err)
    assert "cannot write" in line and "--split_dir says where else splits may be kept" in line


# ---- names ---------------------------------------------------------------------------------------


def test_leaf_data_have_a_name_of_their_own(inputs, capsys):  # noqa: F811
    folder = leaf(inputs / "vehicle" / "data", train=LEAF, test=LEAF)
    assert dataset_name(str(folder)) == "vehicle" and dataset_name("/a/shake") == "shake"
    source, split = read_data(str(folder))
    old_source, old = read_data("Synthetic", str(folder))
    assert (source.name, source.classes, old_source.classes) == ("vehicle", 3, 10)
    assert split.hash == old.hash and np.array_equal(source.x, old_source.x)
    assert run("--dataset", str(folder), "--algorithm", "pFedMe") == 0
    assert "no user holds the labels" not in capsys.readouterr().err
    (path,) = main_files(inputs / "results")
    assert path.name.startswith("vehicle_mclr_pFedMe_")
    with h5py.File(path) as file:
        assert file["final/fc1.weight"].shape == (3, 8)
    assert main.main(["--verify", str(path)]) == main.main(["--replay", str(path)]) == 0
    assert run("--dataset", "Synthetic", "--split", str(folder)) == 0
    assert main_plot.main([]) == 0
    assert (inputs / "results" / "vehicle_mclr.png").exists()


def test_leaf_users_may_be_dealt_anew(inputs):  # noqa: F811
    folder = leaf(inputs / "vehicle", train=LEAF, test=LEAF)
    assert run("--dataset", str(folder), "--partition", "iid:users=4") == 0
    drawn = Config(partition="iid:users=4").drawn
    assert len(read_data(str(folder), partition=drawn)[1].users) == 4
    (folder / "train" / "d.json").write_text((folder / "train" / "d.json").read_text() + " ")
    assert run("--dataset", str(folder), "--partition", "iid:users=4") == 2


def test_images_in_a_leaf_folder(inputs):  # noqa: F811
    data = {u: {"x": X[:4].reshape(4, 2, 4).tolist(), "y": Y[:4].tolist()} for u in "ab"}
    content = {"users": list(data), "num_samples": [4, 4], "user_data": data}
    for part in ("train", "test"):
        (inputs / "pictures" / part).mkdir(parents=True)
        (inputs / "pictures" / part / "d.json").write_text(json.dumps(content))
    assert read_data(str(inputs / "pictures"))[0].shape == (1, 2, 4)
    assert run("--dataset", "pictures", "--model", "mclr") == 0


@pytest.mark.parametrize("names", [("a/b", "c"), ("a/b", "a%2Fc"), ("/", "b")])
def test_users_may_have_slashes_in_their_names(inputs, names, capsys):  # noqa: F811
    np.savez("names.npz", x=X, y=Y, user=np.array(names)[np.arange(200) % 2])
    assert run("--dataset", "names.npz", "--algorithm", "pFedMe", "--save_models") == 0
    (path,) = main_files(inputs / "results")
    assert read_recording(str(path), {}).split.users == tuple(sorted(names))
    assert main.main(["--replay", str(path)]) == main.main(["--verify", str(path)]) == 0
    (personal,) = (inputs / "results").glob("*_p_*_0.h5")
    with h5py.File(personal) as file:
        assert file["users"].asstr()[()].tolist() == sorted(names)
        groups = {name.replace("/", "%2F") for name in names}
        assert set(file["personal"]) == set(h5py.File(path)["split"]) == groups
    (split,) = (inputs / "names" / "split").glob("*.npz")
    assert run("--dataset", "names.npz", "--split", str(split)) == 0
    data = {name: {"x": X[:9].tolist(), "y": Y[:9].tolist()} for name in names}
    content = {"users": list(data), "num_samples": [9, 9], "user_data": data}
    for part in ("train", "test"):
        (inputs / "leaf" / part).mkdir(parents=True)
        (inputs / "leaf" / part / "d.json").write_text(json.dumps(content))
    assert run("--dataset", "leaf") == 0


def test_names_that_would_collide_are_refused(inputs, capsys):  # noqa: F811
    np.savez("names.npz", x=X, y=Y, user=np.array(["a/b", "a%2Fb"])[np.arange(200) % 2])
    assert run("--dataset", "names.npz") == 2
    assert "two users' names are the same once / is quoted" in capsys.readouterr().err


# ---- a split for every repetition ----------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--dataset", "plain.npz", "--partition", "dirichlet:users=6,alpha=0.3,seed=4"],
        ["--dataset", "plain.npz"],
        ["--dataset", "Synthetic", "--eval_every", "0", "--num_global_iters", "0"],
    ],
)
def test_every_repetition_may_draw_its_own_split(inputs, words, capsys):  # noqa: F811
    repeated = [*words, "--algorithm", "pFedMe", "--times", "3", "--shared_split", "no"]
    assert run(*repeated, "--results_dir", "own") == 0
    files = main_files(inputs / "own")
    assert len(files) == 3 and len({path.name[:-5] for path in files}) == 1
    hashes, seeds = [], []
    for path in files:
        with h5py.File(path) as file:
            hashes.append(file.attrs["data_hash"])
            seeds.append(json.loads(file.attrs["manifest"])["arguments"]["seed"])
    assert len(set(hashes)) == 3 and np.diff(seeds).tolist() == [1, 1]
    if "Synthetic" not in words:
        assert all(main.main(["--verify", str(path)]) == 0 for path in files)
        assert list((inputs / "own").glob("*_avg.h5"))
        assert run(*repeated[:-4], "--results_dir", "one") == 0
        (alone,) = main_files(inputs / "one")
        assert alone.name != files[0].name
        one, first = (h5py.File(p)["final/fc1.weight"][()] for p in (alone, files[0]))
        assert (one == first).all(), "repetition 0 has the split that is shared otherwise"
        capsys.readouterr()
        assert run(*repeated, "--results_dir", "own", "--resume") == 0
        assert "finished and kept: 3 repetitions" in capsys.readouterr().err


def test_splits_of_repetitions_in_two_processes(inputs):  # noqa: F811
    words = ["--dataset", "plain.npz", "--times", "2", "--shared_split", "no"]
    assert run(*words) == 0
    assert run(*words, "--results_dir", "jobs", "--jobs", "2", "--lockstep", "yes") == 0
    for path in main_files(inputs / "results"):
        a, b = h5py.File(path), h5py.File(inputs / "jobs" / path.name)
        assert np.array_equal(a["final/fc1.weight"], b["final/fc1.weight"])


@pytest.mark.parametrize("words", [["--split", "published"], ["--dataset", "leaf"]])
def test_a_given_split_is_shared(inputs, words, capsys):  # noqa: F811
    leaf(inputs / "leaf", train=LEAF, test=LEAF)
    assert run(*words, "--times", "2", "--shared_split", "no") == 2
    line = stderr_line(capsys.readouterr().err)
    assert "--shared_split no: " in line and "is given, not drawn for a repetition" in line


# ---- what files hold -----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["FedAvg", "pFedMe", "SCAFFOLD"])
def test_work_is_stored_after_every_round(inputs, algorithm):  # noqa: F811
    words = ["--dataset", "plain.npz", "--algorithm", algorithm, "--stragglers", "0.5"]
    words += ["--num_global_iters", "4", "--user_dropout", "0.3"]
    assert run(*words) == 0
    (path,) = main_files(inputs / "results")
    with h5py.File(path) as file:
        work, total = file["work"][()], json.loads(file.attrs["work"])
        assert json.loads(file["work"].attrs["columns"]) == list(WORK)
        assert work.shape == (4, len(WORK)) and work.dtype == np.int64
        assert (np.diff(work, axis=0, prepend=0) >= 0).all() and work[:, 0].tolist() == [
            3,
            6,
            9,
            12,
        ]
        assert work[-1].tolist() == [total[name] for name in WORK]
    short = ["--num_global_iters", "2", "--user_dropout", "0.3", "--results_dir", "short"]
    assert run(*words[:-4], *short) == 0
    (short,) = main_files(inputs / "short")
    with h5py.File(short) as file:
        assert np.array_equal(file["work"][()], work[:2])


def test_work_survives_a_resumed_run(inputs, monkeypatch):  # noqa: F811
    from utils.progress import Interrupts

    words = ["--dataset", "plain.npz", "--num_global_iters", "5"]
    assert run(*words, "--results_dir", "whole") == 0
    calls = []
    monkeypatch.setattr(
        Interrupts,
        "pause",
        lambda self: calls.append(1) or (len(calls) == 3 and self._raise()),
    )

    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Interrupts, "_raise", stop, raising=False)
    assert run(*words) == 130
    assert run(*words, "--resume") == 0
    (a,), (b,) = main_files(inputs / "whole"), main_files(inputs / "results")
    assert np.array_equal(h5py.File(a)["work"][()], h5py.File(b)["work"][()])


def test_files_from_before_still_verify(inputs):  # noqa: F811
    """`users` of a _p file and `work` by round are newer than files that lack them."""
    assert run("--dataset", "plain.npz", "--algorithm", "pFedMe") == 0
    (path,) = main_files(inputs / "results")
    (personal,) = (inputs / "results").glob("*_p_*_0.h5")
    for file, name in ((path, "work"), (personal, "users")):
        raw = file.read_bytes()[512:]
        file.write_bytes(raw)
        with h5py.File(file, "r+") as old:
            del old[name]
    assert main.main(["--verify", str(path)]) == 0
    with h5py.File(path, "r+") as old:
        del old["rs_train_loss"]
    assert main.main(["--verify", str(path)]) in (1, 2)


def test_splits_know_their_successors():
    partition = Config(partition="dirichlet:users=6,alpha=0.3,seed=4").drawn
    assert str(partition.after(2)) == str(partition).replace("seed=4", "seed=6")
    assert dataclasses.asdict(partition.after(0)) == dataclasses.asdict(partition)
