"""Result files: names, contents, averages, crash safety, replay of our own files."""

import hashlib
import json
import multiprocessing
import os
import platform
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import main
import main_plot
from FLAlgorithms.servers import ALGORITHMS
from tests.toys import run_main
from utils.config import Config
from utils.errors import InputError
from utils.files import BLOCK, atomic_h5, open_h5, replacing, seal
from utils.partition import Split
from utils.progress import Progress, Watch
from utils.results import Recorder, average, file_name, number, summary

DEFAULT = {
    "scheme": "label_count",
    "dataset": "Mnist",
    "arguments": {"users": 20, "labels_per_user": 2, "seed": 0},
}
SPLIT = Split(("a",), (np.arange(3),), (np.arange(3, 5),), DEFAULT)
OTHER = Split(("a",), (np.arange(4),), (np.arange(4, 5),), {"dataset": "Mnist"})
THIRD = Split(("a",), (np.arange(2),), (np.arange(4, 5),), {"dataset": "Mnist"})


def name(of_personal=False, rows=SPLIT, **options) -> str:
    return file_name(Config(**options).resolved(), rows, of_personal)


def options_of(algorithm: str) -> list[str]:
    return Config(algorithm=algorithm).options()


def read(path: Path) -> dict[str, np.ndarray]:
    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda n, v: found.__setitem__(n, v[()]) if isinstance(v, h5py.Dataset) else None
        )
    return found


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        np.array_equal(a[k], b[k], equal_nan=a[k].dtype.kind == "f") for k in a
    )


@contextmanager
def changed(path: Path):
    """A result file to alter; its checksum fits again afterwards."""
    with h5py.File(path, "r+") as file:
        yield file
    image = path.read_bytes()[BLOCK:]
    path.write_bytes(seal(hashlib.sha256(image).hexdigest()) + image)


def files(out: Path, pattern: str) -> list[Path]:
    return sorted(out.glob(pattern))


# ---- names


def test_names_are_the_original_ones_with_the_model():
    assert name() == "Mnist_mclr_pFedMe_0.005_1_15_5u_20b_20_5_0.1"
    assert name(True) == "Mnist_mclr_pFedMe_p_0.005_1_15_5u_20b_20_5_0.1"
    assert name(algorithm="FedAvg", model="dnn") == "Mnist_dnn_FedAvg_0.005_1_15_5u_20b_20"
    assert name(True, algorithm="PerAvg", beta=0.001).startswith("Mnist_mclr_PerAvg_p_0.005_0.001_")


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1"), (1.0, "1"), (0.005, "0.005"), (1e-5, "1e-05"), (15.5, "15.5"), (1e300, "1e+300")],
)
def test_one_spelling_for_every_number(value, text):
    assert number(value) == text
    assert number(np.float32(1)) == "1"


def test_different_configurations_never_share_a_file():
    changes = [
        *(
            {},
            {"seed": 1},
            {"num_global_iters": 20},
            {"semantics": "authors"},
            {"dtype": "float64"},
        ),
        *({"theta_start": "warm"}, {"personal": "local"}),
        *({"local_unit": "epochs"}, {"eval_every": 5}, {"normalize": "none"}),
        *({"participation": "sampled"}, {"weighting": "samples"}, {"inner_weight_decay": 0.001}),
    ]
    names = [name(**change) for change in changes]
    assert len(set(names)) == len(changes)
    assert names[1].startswith(f"{names[0]}_")
    assert len({name(rows=rows) for rows in (SPLIT, OTHER, THIRD)}) == 3
    assert name(split="by/its/path.npz") == name(), "the default split asked for by its file"
    nova = [name(algorithm="FedNova", **c) for c in ({}, {"mu": 0.1}, {"momentum": 0.1})]
    assert len(set(nova)) == 3


def test_what_changes_no_number_changes_no_name():
    usual = name()
    for change in (
        *({"gpu": -1}, {"threads": 2}, {"block_size": 3}, {"times": 4}, {"results_dir": "x"}),
        *({"save_every": 1.0}, {"times": 2, "repetition": 1}, {"save_models": True}),
        *({"mu": 0.3}, {"momentum": 0.5}),  # not read by pFedMe
    ):
        assert name(**change) == usual, change
    authors = {"inner_weight_decay": 0.001, "theta_start": "warm", "weighting": "samples"}
    authors |= {"personal": "local", "batches": "cyclic", "shared_init": "yes"}
    assert name(semantics="authors") == name(**authors)


# ---- contents


def test_contents_of_a_pfedme_job(leaf):
    code, out = run_main(leaf, "--times", "2", "--num_global_iters", "3", "--eval_every", "2")
    assert code == 0
    main_file, personal = (read(files(out, f"*pFedMe{p}_0.005*_0.h5")[0]) for p in ("", "_p"))
    assert main_file["round"].tolist() == [0, 2, 3]
    assert personal["round"].tolist() == [0, 2]
    assert main_file["selected_users"].shape == (3, 2)
    assert main_file["user_test_acc"].shape == (3, 5)
    for curve in ("rs_glob_acc", "rs_train_acc", "rs_train_loss", "rs_test_loss"):
        assert main_file[curve].shape == (3,)
        assert main_file[curve].dtype == np.float64
        assert personal[curve].shape == (2,)
    assert (personal["rs_glob_acc"] == personal["theta_test_acc"]).all()
    assert personal["local_test_acc"].shape == (2,)
    assert main_file["init/fc1.weight"].shape == main_file["final/fc1.weight"].shape == (10, 4)
    assert (main_file["init/fc1.weight"] != main_file["final/fc1.weight"]).any()
    sizes = [len(main_file[f"split/user{u}/test"]) for u in range(5)]
    weighted = (main_file["user_test_acc"] * sizes).sum(1) / sum(sizes)
    np.testing.assert_allclose(weighted, main_file["rs_glob_acc"], rtol=0, atol=1e-15)
    with h5py.File(files(out, "*pFedMe_p_*_0.h5")[0]) as file:
        attrs = dict(file.attrs)
        assert attrs["schema"] == 1
        assert attrs["status"] == "finished"
        assert attrs["class"] == "pFedMe"
        assert attrs["evaluates"] == "theta"
        config = json.loads(attrs["config"])
        assert config["theta_start"] == "cold"
        assert config["normalize"] == "none"
        assert {"python", "torch", "numpy"} == set(json.loads(attrs["versions"]))
        for key in ("code_version", "device", "dtype", "started", "wall_seconds", "data_hash"):
            assert key in attrs


def test_averages(leaf):
    _, out = run_main(leaf, "--times", "3")
    for kind in ("", "_p"):
        runs = [read(files(out, f"*pFedMe{kind}_0.005*_{i}.h5")[0]) for i in range(3)]
        average = read(files(out, f"*pFedMe{kind}_0.005*_avg.h5")[0])
        for curve in ("rs_glob_acc", "rs_train_loss", "user_test_acc"):
            stack = np.stack([r[curve] for r in runs])
            np.testing.assert_array_equal(average[f"runs/{curve}"], stack)
            np.testing.assert_allclose(average[curve], stack.mean(0), rtol=1e-15)
            np.testing.assert_allclose(average[f"{curve}_std"], stack.std(0, ddof=1), rtol=1e-15)
        assert (average["rs_train_loss_std"] > 0).all()


@pytest.mark.parametrize(
    ("evaluations", "count", "late"),
    [(1, 0, "-"), (2, 1, "0.00"), (20, 2, "5.00"), (100, 10, "45.00"), (300, 10, "45.00")],
)
def test_the_summary_s_means(evaluations, count, late, tmp_path):
    """The late mean leaves round 0 out; users without samples do not count in theirs."""
    paths = [tmp_path / f"a_{i}.h5" for i in range(2)]
    for path, last in zip(paths, (0.2, 0.6), strict=True):
        with h5py.File(path, "w") as file:
            file["rs_glob_acc"] = np.arange(evaluations)[::-1] / 10
            file["round"] = np.arange(evaluations)
            users = np.zeros((evaluations, 3))
            users[-1] = last, last + 0.2, np.nan
            file["user_test_acc"] = users
    head, one, _, both = summary(paths, "x")
    *_, heading, over, spread = (cell.strip() for cell in head.rstrip().split("  ") if cell.strip())
    assert (heading, over, spread) == (f"mean of last {count}", "mean over users", "std over users")
    assert one.split()[-3:] == [late, "30.00", "10.00"]
    assert "50.00 +- 28.28" in both  # 30 and 70
    with h5py.File(paths[0], "a") as file:
        del file["user_test_acc"]
    assert summary(paths[:1], "x")[1].split()[-2:] == ["-", "-"]


def test_only_a_running_file_says_who_writes_it(leaf, monkeypatch):
    saved = []
    write = Recorder._write

    def spy(self, paths, status):
        written = write(self, paths, status)
        for path in written:
            with h5py.File(path) as file:
                saved.append((status, file.attrs.get("host"), file.attrs.get("pid")))
        return written

    monkeypatch.setattr(Recorder, "_write", spy)
    assert run_main(leaf, "--save_every", "0")[0] == 0
    assert set(saved) == {
        ("running", platform.node(), os.getpid()),
        ("finished", None, None),
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("semantics", ["paper", "authors"])
def test_a_repetition_alone_is_the_one_of_a_job(algorithm, semantics, leaf, tmp_path):
    words = ["--algorithm", algorithm, "--semantics", semantics, "--times", "3"]
    _, out = run_main(leaf, *words)
    run_main(leaf, *words, "--repetition", "2", "--results_dir", str(tmp_path / "one"))
    again = files(Path(tmp_path / "one"), "*.h5")
    assert again
    for path in again:
        assert path.name.endswith("_2.h5")
        assert same(read(path), read(out / path.name))
    first, last = (read(files(out, f"*{algorithm}_0.005*_{i}.h5")[0]) for i in (0, 2))
    assert same_init(first, last) == (semantics == "authors")
    moved = not np.array_equal(first["final/fc1.weight"], last["final/fc1.weight"])
    assert moved or (algorithm == "Local" and semantics == "authors")


def same_init(a, b):
    return np.array_equal(a["init/fc1.weight"], b["init/fc1.weight"])


def test_repetitions_run_one_by_one_are_averaged_when_complete(leaf):
    _, out = run_main(leaf, "--times", "2", "--repetition", "1")
    assert not files(out, "*_avg.h5")
    run_main(leaf, "--times", "2", "--repetition", "0")
    assert len(files(out, "*_avg.h5")) == 2


def test_the_same_command_gives_the_same_arrays(leaf, tmp_path):
    _, out = run_main(leaf)
    run_main(leaf, "--results_dir", str(tmp_path / "again"))
    for path in files(out, "*.h5"):
        assert same(read(path), read(tmp_path / "again" / path.name))


# ---- what is not finished


class Stop(Watch):
    """Ctrl-C at the end of the first round."""

    def round_done(self, round_number):
        raise KeyboardInterrupt


def test_an_interrupted_run_is_kept_but_replaces_no_finished_one(leaf, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("utils.jobs.Watch", Stop)
        code, out = run_main(leaf)
    assert code == 130
    (path,) = files(out, "*pFedMe_0.005*_0.h5")
    with h5py.File(path) as file:
        assert file.attrs["status"] == "interrupted"
        assert len(file["rs_glob_acc"]) == 1
    assert "--resume goes on from here" in capsys.readouterr().err
    run_main(leaf)
    finished = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("utils.jobs.Watch", Stop)
        run_main(leaf)
    assert path.read_bytes() == finished
    kept = files(out, "*.part")
    assert len(kept) == 2
    assert len(files(out, "*.ckpt")) == 1
    assert str(kept[0]) in capsys.readouterr().err
    run_main(leaf)
    assert not files(out, "*.part")
    assert not files(out, "*.ckpt")


def test_a_diverged_run_keeps_its_curve(leaf, capsys):
    words = ["--algorithm", "FedAvg", "--model", "dnn", "--learning_rate", "1e30"]
    code, out = run_main(leaf, *words, "--num_global_iters", "9")
    assert code == 1
    err = capsys.readouterr().err
    assert "look at --learning_rate (now 1e+30)" in err
    (path,) = files(out, "*.h5")
    with h5py.File(path) as file:
        assert file.attrs["status"] == "diverged"
        assert len(file["rs_glob_acc"]) >= 1
    assert not files(out, "*_avg.h5")


def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    with atomic_h5(path) as file:
        file["x"] = 1
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(InputError, match=r"cannot write .*a.h5: No space left on device"):
            with atomic_h5(path) as file:
                file["x"] = 2
    with pytest.raises(RuntimeError), atomic_h5(path) as file:
        file["x"] = 3
        raise RuntimeError
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.h5"]


# ---- replay and saved models


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("semantics", ["paper", "authors2020"])
def test_replay_of_our_own_files(algorithm, semantics, leaf, capsys, tmp_path):
    words = ["--algorithm", algorithm, "--semantics", semantics, "--times", "2", "--mu", "0.1"]
    words += ["--repetition", "1"]
    _, out = run_main(leaf, *words)
    for path in files(out, "*.h5"):
        assert main.main(["--replay", str(path), "--gpu", "-1"]) == 0
        text = capsys.readouterr().out
        assert "rs_test_loss" in text
        assert ("rs_train_loss_per" in text) == bool(Config(algorithm=algorithm).primary)
        for line in text.splitlines():
            if "absolute" in line or "samples" in line:
                assert float(line.split()[-3]) == 0, line
    command = ["--replay", str(path), "--gpu", "-1", "--results_dir", str(tmp_path / "again")]
    assert main.main(command) == 0
    for path in files(out, "*.h5"):
        assert same(read(path), read(tmp_path / "again" / path.name))


def test_replay_refuses_what_it_would_ignore(leaf, capsys):
    _, out = run_main(leaf)
    (path,) = files(out, "*pFedMe_0.005*_0.h5")
    assert main.main(["--replay", str(path), "--beta", "2"]) == 2
    assert "--beta: with --replay only" in capsys.readouterr().err
    assert main.main(["--replay", str(path), "--num_global_iters", "9"]) == 2
    assert "holds 2 rounds" in capsys.readouterr().err
    with changed(path) as file:
        del file["split"]
    assert main.main(["--replay", str(path)]) == 2
    assert "damaged, or no result file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("pFedMe", []), ("pFedMe", ["--personal", "local"]), ("PerAvg", [])],
)
def test_saved_personal_models_are_the_evaluated_ones(algorithm, options, leaf):
    """Loaded as the README shows, they score what the file says of the last round."""
    words = ["--algorithm", algorithm, "--save_models", *options]
    _, out = run_main(leaf, *words)
    (path,) = files(out, f"*{algorithm}_p_*_0.h5")
    content = json.loads((leaf / "test" / "all.json").read_text())
    hits = []
    with h5py.File(path) as file:
        users = list(file["personal"])
        for user in users:
            model = torch.nn.Linear(4, 10)
            state = {n.removeprefix("fc1."): v[()] for n, v in file[f"personal/{user}"].items()}
            model.load_state_dict({n: torch.as_tensor(v) for n, v in state.items()})
            data = content["user_data"][user]
            x, y = torch.tensor(data["x"]), torch.tensor(data["y"])
            hits.append((model(x).argmax(1) == y).double().mean().item())
        last = file["user_test_acc"][-1]
    assert users == [f"user{i}" for i in range(5)]
    if algorithm == "pFedMe":
        assert hits == pytest.approx(last)
    else:
        assert len({*hits}) > 1


def test_progress_lines_name_round_accuracy_loss_and_time(capsys, monkeypatch):
    class Metrics:
        def accuracy(self, part):
            return 0.5

        def mean_loss(self, part):
            return 1.25

    monkeypatch.setattr(Progress, "EVERY", 0.0)
    progress = Progress("job", 10)
    watch = Watch(lambda done, text: progress.show(0, "", done, text))
    watch.personalized(Metrics())
    watch.evaluated(5, Metrics())
    line = capsys.readouterr().err
    assert line.startswith(
        "job: round 5/10, personalised 0.5000, test accuracy 0.5000, train loss "
    )
    assert line.endswith(" s left\n")
    progress.close()
    assert capsys.readouterr().err.startswith("job: round 5/10, ")


# ---- several repetitions: processes and lockstep


@pytest.mark.parametrize("algorithm", ["pFedMe", "SCAFFOLD"])
def test_two_processes_give_bitwise_the_files_of_one(algorithm, leaf, tmp_path):
    words = ["--algorithm", algorithm, "--times", "3", "--semantics", "authors"]
    code, out = run_main(leaf, *words)
    again = tmp_path / "two"
    assert (code, run_main(leaf, *words, "--jobs", "2", "--results_dir", str(again))[0]) == (0, 0)
    names = [path.name for path in files(out, "*.h5")]
    assert names == [path.name for path in files(again, "*.h5")]
    for name in names:
        assert same(read(out / name), read(again / name))


def test_lockstep_files_are_those_of_runs_alone(leaf, tmp_path):
    words = ["--times", "3", "--dtype", "float64", "--save_models"]
    _, out = run_main(leaf, *words)
    _, _ = run_main(leaf, *words, "--lockstep", "yes", "--results_dir", str(tmp_path / "l"))
    names = [path.name for path in files(out, "*.h5")]
    assert names == [path.name for path in files(tmp_path / "l", "*.h5")]
    for name in names:
        a, b = read(out / name), read(tmp_path / "l" / name)
        assert a.keys() == b.keys()
        for key, value in a.items():
            if value.dtype.kind == "f":
                np.testing.assert_allclose(b[key], value, rtol=1e-11, atol=1e-11)
            else:
                np.testing.assert_array_equal(b[key], value)


def test_a_diverged_repetition_loses_no_other(leaf, monkeypatch, capsys):
    """In lockstep: repetition 1 starts at infinity, 0 and 2 finish."""
    from utils.jobs import Job

    model = Job.model

    def broken(self, repetition):
        net = model(self, repetition)
        if repetition == 1:
            net.fc1.weight.data.fill_(float("inf"))
        return net

    monkeypatch.setattr(Job, "model", broken)
    code, out = run_main(leaf, "--times", "3", "--lockstep", "yes")
    assert code == 1
    assert "[1]: diverged in round 0" in capsys.readouterr().err
    status = {}
    for path in files(out, "*pFedMe_0.005*_?.h5"):
        with h5py.File(path) as file:
            status[path.stem[-1]] = (file.attrs["status"], len(file["rs_glob_acc"]))
    assert status["0"] == status["2"] == ("finished", 3)
    assert status["1"][0] == "diverged"
    assert not files(out, "*_avg.h5")


# ---- runs with little or nothing in them


@pytest.mark.parametrize("algorithm", ["pFedMe", "PerAvg", "FedAvg"])
@pytest.mark.parametrize("words", [["--eval_every", "0"], ["--num_global_iters", "0"]])
def test_runs_without_evaluations_are_kept(algorithm, words, leaf):
    code, out = run_main(leaf, "--algorithm", algorithm, *words)
    assert code == 0
    for path in files(out, "*_0.h5"):
        content = read(path)
        entries = len(content["rs_glob_acc"])
        assert entries == (words[0] == "--num_global_iters" and "_p_" not in path.name)
        assert content["user_test_acc"].shape == (entries, 5)


def test_divergence_in_the_first_round_is_kept(leaf, capsys):
    code, out = run_main(leaf, "--model", "dnn", "--personal_learning_rate", "1e30")
    assert code == 1
    assert "look at --personal_learning_rate (now 1e+30)" in capsys.readouterr().err
    assert len(files(out, "*_0.h5")) == 2


@pytest.mark.parametrize(
    ("words", "looked_at"),
    [
        (["--algorithm", "FedProx", "--mu", "1e30"], "--mu (now 1e+30)"),
        (["--beta", "1e38"], "--beta (now 1e+38)"),
        (["--algorithm", "FedNova", "--server_learning_rate", "1e38"], "--server_learning_rate"),
    ],
)
def test_the_suspicious_option_is_named(words, looked_at, leaf, capsys):
    code, _ = run_main(leaf, "--model", "dnn", "--num_global_iters", "20", *words)
    assert code == 1
    assert looked_at in capsys.readouterr().err


STEPS = ("learning_rate", "beta", "lamda", "personal_learning_rate", "inner_weight_decay", "mu")
STEPS += ("server_learning_rate",)


@pytest.mark.parametrize("way", [["--block_size", "0"], [], ["--lockstep", "yes"]])
@pytest.mark.parametrize(
    ("algorithm", "option"), [(a, o) for a in ALGORITHMS for o in STEPS if o in options_of(a)]
)
def test_any_step_that_is_far_too_large_ends_as_diverged(algorithm, option, way, leaf, capsys):
    """1e30, and beyond what float32 holds."""
    words = ["--algorithm", algorithm, "--model", "dnn", "--num_global_iters", "20", *way]
    for value in ("1e30", "1e308"):
        code, out = run_main(leaf, *words, f"--{option}", value, "--times", "2")
        err = capsys.readouterr().err
        assert code == 1, (value, err)
        assert err.count("diverged in round ") == 2
        # The weight decay is named beforehand, by the known bound.
        named = f"decay {float(value):g}) is" if "decay" in option else f"look at --{option} (now "
        assert named in err
        for path in files(out, "*.h5"):
            with h5py.File(path) as file:
                assert file.attrs["status"] == "diverged"
                assert np.isfinite(file["rs_glob_acc"][()]).all()
            path.unlink()


def test_ctrl_c_before_the_first_round_is_130(leaf, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("utils.jobs.normalized", stop)
    code, _ = run_main(leaf)
    assert code == 130
    assert capsys.readouterr().err.startswith("interrupted; ")


# ---- replay of damaged files: one line, exit code 2


def damage(path: Path, what: str) -> None:
    with changed(path) as file:
        attrs = file.attrs
        changes = {
            "config text": lambda: attrs.__setitem__("config", "nothing"),
            "config list": lambda: attrs.__setitem__("config", "[1]"),
            "config number": lambda: attrs.__setitem__("config", 3),
            "manifest": lambda: attrs.__setitem__("manifest", "nothing"),
            "schema": lambda: attrs.__setitem__("schema", 2),
            "repetition": lambda: attrs.__setitem__("repetition", "avg"),
            "evaluates": lambda: attrs.__setitem__("evaluates", "theta"),
            "no init": lambda: file.__delitem__("init"),
            "init shape": lambda: put(file, "init/fc1.bias", np.zeros(3, np.float32)),
            "init name": lambda: put(file, "init/fc9.bias", np.zeros(10, np.float32)),
            "curve length": lambda: put(file, "rs_glob_acc", np.zeros(1)),
            "selected user": lambda: put(file, "selected_users", np.array([[0, 99], [1, 2]])),
            "selected twice": lambda: put(file, "selected_users", np.array([[1, 1], [1, 2]])),
            "selected shape": lambda: put(file, "selected_users", np.arange(4)),
            "selected floats": lambda: put(file, "selected_users", np.ones((2, 2))),
            "split rows": lambda: put(file, "split/user0/train", np.array([10**6])),
            "users": lambda: put(file, "users", np.arange(5)),
            "curve gone": lambda: file.__delitem__("rs_test_loss"),
            "curve text": lambda: put(file, "rs_glob_acc", np.array([b"a", b"b", b"c"])),
            "curve group": lambda: put(file, "rs_glob_acc/x", 1),
            "curve scalar": lambda: put(file, "rs_glob_acc", 0.5),
            "init text": lambda: put(file, "init/fc1.bias", np.array([b"a"] * 10)),
            "final text": lambda: put(file, "final/fc1.bias", np.array([b"a"] * 10)),
            "final number": lambda: put(file, "final", 3),
            "no folder": lambda: attrs.__setitem__("manifest", '{"scheme": "leaf"}'),
            "other folder": lambda: attrs.__setitem__(
                "manifest", '{"scheme": "leaf", "folder": 3, "source": {}}'
            ),
            "split nan": lambda: put(file, "split/user0/train", np.array([np.nan])),
            "split negative": lambda: put(file, "split/user0/train", np.array([-1])),
            "label outside": lambda: put(file, "split/user0/train_label", np.array([10] * 12)),
            "label missing": lambda: put(file, "split/user0/train_label", np.array([1])),
            "no train data": lambda: [
                put(file, f"split/user{u}/train", np.zeros(0, int)) for u in range(5)
            ],
            "user without train data": lambda: put(file, "split/user1/train", np.zeros(0, int)),
            "user twice": lambda: put(file, "users", ["user0"] * 5),
        }
        changes[what]()


def put(file, name, value):
    top = name.split("/")[0]
    for old in (name, top):
        if old in file and (old == name or isinstance(file[old], h5py.Dataset)):
            del file[old]
    file[name] = value


@pytest.mark.parametrize(
    "what",
    [
        *("config text", "config list", "config number", "manifest", "schema", "repetition"),
        *("evaluates", "no init", "init shape", "init name", "curve length", "selected user"),
        *("selected twice", "selected shape", "selected floats", "split rows", "users"),
        *("curve gone", "curve text", "curve group", "curve scalar", "init text", "final text"),
        *("final number", "no folder", "other folder", "split nan", "split negative"),
        *("label outside", "label missing", "no train data", "user without train data"),
        *("user twice",),
    ],
)
def test_replay_of_a_damaged_file_is_one_line(what, leaf, capsys):
    _, out = run_main(leaf)
    (path,) = files(out, "*pFedMe_0.005*_0.h5")
    damage(path, what)
    capsys.readouterr()
    assert main.main(["--replay", str(path), "--gpu", "-1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("main.py: error: "), line


def test_replay_does_not_overlook_nan(leaf, capsys):
    _, out = run_main(leaf)
    (path,) = files(out, "*pFedMe_0.005*_0.h5")
    with changed(path) as file:
        file["rs_glob_acc"][1:] = np.nan
    assert main.main(["--replay", str(path), "--gpu", "-1"]) == 1
    assert "OUTSIDE" in capsys.readouterr().out
    command = ["--replay", str(path), "--num_global_iters", "1", "--eval_every", "0"]
    assert main.main([*command, "--gpu", "-1"]) == 2
    assert "nothing to compare" in capsys.readouterr().err


def test_replay_without_test_samples(leaf, capsys):
    content = {"users": [], "num_samples": [], "user_data": {}}
    train = json.loads((leaf / "train" / "all.json").read_text())
    content |= {"users": train["users"], "num_samples": [0] * 5}
    content["user_data"] = {user: {"x": [], "y": []} for user in train["users"]}
    (leaf / "test" / "all.json").write_text(json.dumps(content))
    code, out = run_main(leaf)
    assert code == 0
    assert "notice: no user has test samples" in capsys.readouterr().err
    (path,) = files(out, "*pFedMe_0.005*_0.h5")
    assert main.main(["--replay", str(path), "--gpu", "-1"]) == 0


# ---- checkpoints


class StopAfter:
    """Stands in for Ctrl-C: stops at the end of a given round, once."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.left = -1

    def pause(self):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


WAYS = [["--block_size", "0"], [], ["--lockstep", "yes"]]


@pytest.mark.parametrize("semantics", ["paper", "authors", "authors2020"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stopped_and_resumed_is_bitwise_the_same(
    algorithm, way, semantics, leaf, tmp_path, monkeypatch, capsys
):
    words = ["--algorithm", algorithm, "--semantics", semantics, "--num_global_iters", "6"]
    words += ["--momentum", "0" if algorithm == "SCAFFOLD" else "0.5", "--times", "2", *way]
    words += ["--server_momentum", "0.5", "--mu", "0.1", "--save_models", "--eval_every", "2"]
    _, out = run_main(leaf, *words)
    again = tmp_path / "again"
    words += ["--results_dir", str(again)]
    with monkeypatch.context() as patch:
        patch.setattr("utils.jobs.Interrupts", lambda: StopAfter(3))
        assert run_main(leaf, *words)[0] == 130
    assert files(again, "*.ckpt")
    capsys.readouterr()
    assert run_main(leaf, *words, "--resume")[0] == 0
    assert "resumed after round 3" in capsys.readouterr().err
    assert not files(again, "*.ckpt")
    names = [path.name for path in files(out, "*.h5")]
    assert names == [path.name for path in files(again, "*.h5")]
    for name in names:
        assert same(read(out / name), read(again / name)), name


def test_resume_keeps_what_is_finished(leaf, capsys):
    _, out = run_main(leaf, "--times", "3")
    before = {path: path.stat().st_mtime_ns for path in files(out, "*_[01].h5")}
    for path in files(out, "*_2.h5"):
        path.unlink()
    assert run_main(leaf, "--times", "3", "--resume")[0] == 0
    assert "finished and kept: 2 repetitions\n" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in files(out, "*_[01].h5")}
    assert len(files(out, "*_2.h5")) == 2
    assert run_main(leaf, "--times", "3", "--resume")[0] == 0
    assert "finished and kept: 3 repetitions\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(schema=9), "has schema 9, this job 1"),
        (lambda c: c.update(split="other"), "has split other, this job "),
        (lambda c: c.update(configuration="{}"), "has configuration {}, this job "),
        (lambda c: c.pop("split"), "damaged or no checkpoint"),
        (None, "damaged or no checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, message, leaf, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("utils.jobs.Interrupts", lambda: StopAfter(1))
        _, out = run_main(leaf)
    (path,) = files(out, "*.ckpt")
    if change is None:
        path.write_bytes(path.read_bytes()[:200])
    else:
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)
    capsys.readouterr()
    assert run_main(leaf, "--resume")[0] == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def alter(*keys):
    """Replaces what a checkpoint holds under `keys` by change(it)."""

    def apply(content, change):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = change(content[keys[-1]])

    return apply


WRONG = [
    (alter("server"), lambda _: 3),
    (alter("server", "round"), lambda _: "1"),
    (alter("server", "round"), lambda _: [1]),
    (alter("server", "round"), lambda _: 2),
    (alter("server", "round"), lambda _: -1),
    (alter("server", "work"), lambda t: t[1:]),
    (alter("server", "work"), lambda t: t.tolist()),
    (alter("server", "cursors"), lambda _: {}),
    (alter("server", "cursors", "train"), lambda t: t[1:]),
    (alter("server", "cursors", "train"), lambda t: t.double()),
    (alter("server", "tensors"), lambda ts: ts[1:]),
    (alter("server", "tensors", 0), lambda t: t[:, 1:].clone()),
    (alter("server", "tensors", 0), lambda t: t.double()),
    (alter("server", "tensors", 1), lambda t: t / 0),
    (alter("server"), lambda s: {k: v for k, v in s.items() if k != "work"}),
    (alter("main"), lambda _: []),
    (alter("main", "rounds"), lambda r: [str(t) for t in r]),
    (alter("main", "rounds"), lambda r: r[1:]),
    (alter("main", "models"), lambda _: {}),
    (alter("main", "models", "", "test"), lambda t: t[..., 1:]),
    (alter("personal", "models"), lambda m: {"theta": m["theta"]}),
    (alter("personal", "models", "local"), lambda m: {"test": m["test"]}),
    (alter("selected"), lambda s: s * 2),
    (alter("selected", 0), lambda t: t + 4),
    (alter("selected", 0), lambda t: t * 0),
    (alter("selected", 0), lambda t: t.tolist()),
    (alter("init"), lambda _: {}),
    (alter("init", "fc1.bias"), lambda t: t[1:]),
]


def test_a_checkpoint_with_wrong_contents_changes_nothing(leaf, monkeypatch, capsys):
    """Whole for torch and of this job, but its values are not."""
    with monkeypatch.context() as patch:
        patch.setattr("utils.jobs.Interrupts", lambda: StopAfter(1))
        _, out = run_main(leaf)
    (path,) = files(out, "*.ckpt")
    whole = path.read_bytes()
    for case, (apply, change) in enumerate(WRONG):
        path.write_bytes(whole)
        apply(content := torch.load(path, weights_only=True), change)
        torch.save(content, path)
        before = {p: p.read_bytes() for p in out.iterdir()}
        capsys.readouterr()
        assert run_main(leaf, "--resume")[0] == 2, case
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("main.py: error: --resume: ") and str(path) in line, line
        assert line.endswith("is damaged or no checkpoint; delete it to start again"), line
        assert {p: p.read_bytes() for p in out.iterdir()} == before, case
    path.unlink()
    path.mkdir()
    assert run_main(leaf, "--resume")[0] == 2
    assert capsys.readouterr().err.endswith("delete it to start again\n")
    path.rmdir()
    path.write_bytes(whole)
    assert run_main(leaf, "--resume")[0] == 0


# ---- checksums


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


def refused(capsys, *words: object) -> str:
    """The one line of a refused command of main.py, or of main_plot.py for a single file."""
    capsys.readouterr()
    program = main_plot.main if len(words) == 1 else main.main
    assert program([str(word) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_changed_bit_is_seen_by_every_reader(leaf, capsys):
    _, out = run_main(leaf, "--times", "2")
    path, other = files(out, "*pFedMe_0.005*_[01].h5")
    whole = path.read_bytes()
    # Everywhere: the checksum's own block, the first bytes, the arrays, the attributes.
    for place in [0, 7, 300, BLOCK - 1, BLOCK, *range(BLOCK + 8, len(whole), 997), -1]:
        flip(path, place)
        with pytest.raises(InputError, match="damaged"), open_h5(path):
            pass
        path.write_bytes(whole)
    for content in (whole[:-1], whole + b"0", whole[: len(whole) // 2], whole[:100], b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match="damaged"), open_h5(path):
            pass
    path.write_bytes(whole)
    flip(path, len(whole) // 2)
    expected = f"{path}: damaged, or no result file of main.py (its checksum does not fit)"
    assert refused(capsys, path) == f"main_plot.py: error: {expected}"
    for words in (["--replay", path], ["--verify", path]):
        assert refused(capsys, *words, "--gpu", "-1") == f"main.py: error: {expected}"
    with pytest.raises(InputError, match="checksum"):
        average([other, path], out / "x.h5")
    assert not (out / "x.h5").exists()
    # The partner of a whole `_p` file.
    (personal,) = files(out, "*pFedMe_p_*_0.h5")
    assert refused(capsys, "--replay", personal, "--gpu", "-1") == f"main.py: error: {expected}"


def test_a_damaged_finished_file_costs_no_other(leaf, capsys):
    """A job beside it is whole and says so; --resume runs what is damaged again."""
    words = ["--times", "2", "--num_global_iters", "3"]
    _, out = run_main(leaf, *words)
    kept = {path.name: read(path) for path in files(out, "*.h5")}
    for path in [*files(out, "*_1.h5"), *files(out, "*_avg.h5")]:
        path.unlink()
    (path,) = files(out, "*pFedMe_0.005*_0.h5")
    flip(path, BLOCK + 5000)
    capsys.readouterr()
    assert run_main(leaf, *words, "--repetition", "1")[0] == 0
    said = capsys.readouterr()
    notices = [line for line in said.err.splitlines() if line.startswith("notice: left out: ")]
    assert len(notices) == 1 and str(path) in notices[0]
    for one in files(out, "*_1.h5"):
        assert same(read(one), kept[one.name])
        assert f"  {one}" in said.out.splitlines()
    assert [p.name for p in files(out, "*_avg.h5")] == [
        n for n in kept if n.endswith("_avg.h5") and "_p_" in n
    ]
    assert run_main(leaf, *words, "--resume")[0] == 0
    assert f"notice: left out: {path}: damaged" in capsys.readouterr().err
    assert {p.name: read(p).keys() for p in files(out, "*.h5")} == {
        name: content.keys() for name, content in kept.items()
    }
    for one in files(out, "*.h5"):
        assert same(read(one), kept[one.name])


def test_files_without_a_checksum_are_read_on_trust(leaf, capsys):
    """As they were written before there were any."""
    _, out = run_main(leaf, "--times", "2")
    for path in files(out, "*.h5"):
        path.write_bytes(path.read_bytes()[BLOCK:])
    assert run_main(leaf, "--times", "2", "--resume")[0] == 0
    assert "finished and kept: 2 repetitions\n" in capsys.readouterr().err
    (path,) = files(out, "*pFedMe_p_*_1.h5")
    for word in ("--replay", "--verify"):
        assert main.main([word, str(path), "--gpu", "-1"]) == 0
    assert main_plot.main([str(out), "--out", str(out / "x.png")]) == 0


def test_curves_of_other_lengths_are_no_average(tmp_path):
    paths = [tmp_path / f"{i}.h5" for i in range(2)]
    for length, path in enumerate(paths, 3):
        with atomic_h5(path) as file:
            file["rs_glob_acc"] = np.zeros(length)
    with pytest.raises(InputError, match=r"1.h5: .*rs_glob_acc differs in shape from 0.h5"):
        average(paths, tmp_path / "avg.h5")
    assert not (tmp_path / "avg.h5").exists()


@pytest.mark.skipif(os.name == "nt", reason="processes are not looked up on Windows")
def test_what_a_dead_process_left_is_removed(tmp_path):
    """And nothing of one that lives, of another machine, or of another name."""
    dead = multiprocessing.Process(target=int)
    dead.start()
    dead.join()
    host, name = platform.node(), "a[1].h5"
    gone = tmp_path / f"{name}.{host}.{dead.pid}.tmp"
    stays = [
        f"{name}.{host}.{os.getppid()}.tmp",
        f"{name}.other{host}.{dead.pid}.tmp",
        f"{name}.{host}.x.tmp",
        f"b{name}.{host}.{dead.pid}.tmp",
        f"{name}.part",
    ]
    for path in (gone, *(tmp_path / stay for stay in stays)):
        path.write_text("")
    with replacing(tmp_path / name) as beside:
        beside.write_text("new")
    assert {path.name for path in tmp_path.iterdir()} == {name, *stays}


# ---- work, log, verify


@pytest.mark.parametrize("block_size", ["0", "3"])
@pytest.mark.parametrize(
    ("algorithm", "words", "per_step", "draws", "down", "up"),
    [
        ("FedAvg", [], 1, 1, 1, 1),
        ("FedProx", ["--mu", "0.1"], 1, 1, 1, 1),
        ("FedNova", [], 1, 1, 1, 1),
        ("SCAFFOLD", [], 1, 1, 2, 2),
        ("PerAvg", [], 2, 2, 1, 1),
        ("PerAvg", ["--hessian", "hf"], 4, 3, 1, 1),
        ("pFedMe", ["--K", "4"], 4, 1, 1, 1),
    ],
)
def test_the_work_of_a_run_is_counted(
    algorithm, words, per_step, draws, down, up, block_size, leaf
):
    """Two rounds of three steps, two of five users (12 to 16 samples, batch 20); 50 parameters."""
    words = ["--algorithm", algorithm, *words, "--block_size", block_size]
    code, out = run_main(leaf, *words)
    assert code == 0
    content = read(files(out, f"*{algorithm}_0.005*_0.h5")[0])
    with h5py.File(files(out, f"*{algorithm}_0.005*_0.h5")[0]) as file:
        work = json.loads(file.attrs["work"])
    selected = content["selected_users"]
    trained = [list(range(5))] * 2 if algorithm == "pFedMe" else selected.tolist()
    users = sum(map(len, trained))
    assert work["selected"] == 4
    assert work["trained"] == users
    assert work["samples"] == sum(3 * draws * (12 + user) for row in trained for user in row)
    assert work["gradients"] == users * 3 * per_step
    assert work["bytes_down"] == users * 50 * 4 * down
    extra = 4 * 4 if algorithm == "FedNova" else 0  # its normaliser, a number per report
    assert work["bytes_up"] == 4 * 50 * 4 * up + extra


def test_unequal_work_is_counted_for_each_user(leaf):
    words = ["--algorithm", "FedAvg", "--local_unit", "epochs", "--batch_size", "4"]
    found = []
    for block_size in ("0", "5"):
        _, out = run_main(leaf, *words, "--numusers", "5", "--block_size", block_size)
        with h5py.File(files(out, "*_0.h5")[0]) as file:
            found.append(json.loads(file.attrs["work"]))
    assert found[0] == found[1]
    assert found[0]["gradients"] == 2 * 3 * sum(-(-n // 4) for n in range(12, 17))
    assert found[0]["samples"] == 2 * 3 * sum(range(12, 17))


def test_the_log_has_a_line_per_round(leaf, tmp_path, capsys):
    log = tmp_path / "log.txt"
    words = ["--log_file", str(log), "--times", "2", "--num_global_iters", "3"]
    _, out = run_main(leaf, *words)
    lines = log.read_text().splitlines()
    assert len(lines) == 6
    assert "pFedMe Synthetic mclr repetition=1 round=3 evaluated=2 test_accuracy=0." in lines[-1]
    content = read(files(out, "*pFedMe_0.005*_1.h5")[0])
    assert f"test_accuracy={content['rs_glob_acc'][2]:.6f}" in lines[-1]
    assert f"selected={','.join(map(str, content['selected_users'][2]))}" in lines[-1]
    assert run_main(leaf, "--log_file", str(leaf))[0] == 2
    assert "--log_file" in capsys.readouterr().err
    assert run_main(leaf, "--log_file", str(leaf / "none" / "log.txt"))[0] == 2
    assert "log.txt: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_verify_runs_a_file_again(algorithm, leaf, capsys):
    words = ["--algorithm", algorithm, "--times", "2", "--semantics", "authors2020"]
    _, out = run_main(leaf, *words, "--save_models")
    for path in files(out, "*_1.h5"):
        assert main.main(["--verify", str(path), "--gpu", "-1"]) == 0
        assert "every array is bitwise the same" in capsys.readouterr().out
    (path,) = files(out, f"*{algorithm}_0.005*_1.h5")
    with changed(path) as file:
        file["rs_train_loss"][1] += 1e-9
    assert main.main(["--verify", str(path), "--gpu", "-1"]) == 1
    assert "rs_train_loss differs, by at most 1e-09" in capsys.readouterr().out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("algorithm", ["pFedMe", "SCAFFOLD", "PerAvg"])
def test_stopped_within_a_round_and_resumed_is_the_same(
    algorithm, way, leaf, tmp_path, monkeypatch
):
    """A second Ctrl-C or a lack of memory tears the round, never the checkpoint."""
    words = ["--algorithm", algorithm, "--semantics", "authors", "--num_global_iters", "6"]
    words += ["--times", "2", "--save_every", "0", "--batch_size", "4", *way]
    _, out = run_main(leaf, *words)
    words += ["--results_dir", str(tmp_path / "again")]
    user, calls = ALGORITHMS[algorithm].user_class, []
    train = user.train

    def torn(self, **payload):
        train(self, **payload)
        calls.append(self.round_number)
        if self.round_number == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(user, "train", torn)
        assert run_main(leaf, *words)[0] == 130
    assert calls[-1] == 3
    assert run_main(leaf, *words, "--resume")[0] == 0
    names = [path.name for path in files(out, "*.h5")]
    assert names == [path.name for path in files(tmp_path / "again", "*.h5")]
    for name in names:
        assert same(read(out / name), read(tmp_path / "again" / name)), name
