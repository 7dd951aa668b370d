"""Curves, tables, CSV and figures from small result files that the tests write themselves."""

import colorsys
import csv
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

import main_plot
from utils import plot_utils as plots
from utils.files import is_alive, visible
from utils.grid import Published
from utils.partition import Split, literal
from utils.partition import draw as draw_split

ROOT = Path(main_plot.__file__).parent
CONFIG = {
    "dataset": "Mnist",
    "model": "mclr",
    "algorithm": "FedAvg",
    "learning_rate": 0.005,
    "beta": 1.0,
    "K": 5,
    "seed": 0,
    "num_global_iters": 3,
    "semantics": "paper",
    "weighting": "uniform",
    "times": 2,
}
SIGNATURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def write(path, accuracy, evaluates="global", repetition=0, status="finished", **changes):
    """A result file whose losses are 1 - accuracy; `changes` go into the config."""
    config = CONFIG | changes
    read = [key for key in config if key not in ("K", "beta") or config["algorithm"] == "pFedMe"]
    accuracy = np.asarray(accuracy, float)
    identity = f"{hash(json.dumps({key: config[key] for key in read if key != 'times'})):x}"
    with h5py.File(path, "w") as file:
        file["rs_glob_acc"] = accuracy
        file["rs_train_acc"] = accuracy
        file["rs_train_loss"] = 1 - accuracy
        file["round"] = np.arange(len(accuracy))
        file["user_test_acc"] = np.zeros((len(accuracy), 2))
        file.attrs.update(
            schema=1,
            config=json.dumps(config),
            options=json.dumps(read),
            evaluates=evaluates,
            repetition=repetition,
            identity=identity,
            status=status,
        )
    return path


def write_legacy(path, accuracy):
    with h5py.File(path, "w") as file:
        for name in ("rs_glob_acc", "rs_train_acc", "rs_train_loss"):
            file[name] = np.asarray(accuracy, float)
    return path


def curves(*paths, only=None, **wanted):
    return plots.make_curves(plots.select(plots.read_runs(paths), wanted, only))


def run(*arguments):
    return main_plot.main([str(argument) for argument in arguments])


def refusal(capsys, *arguments):
    """The one line on stderr of a refused call."""
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in printed.err
    return lines[0]


def hints(figure):
    """The lines above the legend."""
    return figure.legends[0].get_title().get_text()


def rows_of(curve, target=0.9):
    names = "algorithm,model,options,n,round,last,users,best,late,reached"
    return dict(zip(names.split(","), plots._row(curve, target), strict=True))


def test_mean_and_std_are_over_repetitions_with_n_minus_1(tmp_path):
    write(tmp_path / "a_0.h5", [0.1, 0.5, 0.7], repetition=0)
    write(tmp_path / "a_1.h5", [0.3, 0.8, 0.6], repetition=1)
    write(tmp_path / "a_2.h5", [0.2, 0.5, 0.8], repetition=2)
    (curve,) = curves(tmp_path)
    np.testing.assert_allclose(curve.mean("test_acc"), [0.2, 0.6, 0.7])
    # Deviations -.1 .1 0; -.1 .2 -.1; 0 -.1 .1: their squares over n - 1 = 2.
    np.testing.assert_allclose(curve.std("test_acc"), np.sqrt([0.01, 0.03, 0.01]))
    assert curve.repetitions == "3" and curve.label == "FedAvg, global (n=3)"


def test_table_values(tmp_path):
    """Repetitions .5 .9 .8 and .7 .7 1.0: last .8 1.0, best .9 1.0."""
    write(tmp_path / "a_0.h5", [0.5, 0.9, 0.8], repetition=0)
    write(tmp_path / "a_1.h5", [0.7, 0.7, 1.0], repetition=1)
    (curve,) = curves(tmp_path)
    row = rows_of(curve)
    assert row["last"] == "90.00 +- 14.14"  # 20 / sqrt(2)
    assert row["best"] == "95.00 +- 7.07"
    assert row["late"] == row["last"]
    assert (row["n"], row["round"], row["reached"]) == ("2", "2", "2")
    assert rows_of(curve, 0.75)["reached"] == "1"
    assert rows_of(curve, 0.91)["reached"] == "-"


@pytest.mark.parametrize(
    ("evaluations", "late"),
    # ..., .2, .1, 0 from the end: the means of the last one, two, nine and ten.
    [(1, "-"), (2, "0.00"), (19, "0.00"), (20, "0.05"), (99, "0.40"), (100, "0.45"), (801, "0.45")],
)
def test_the_late_mean_takes_a_tenth_at_most_ten_and_never_round_0(tmp_path, evaluations, late):
    (curve,) = curves(write(tmp_path / "a_0.h5", np.arange(evaluations)[::-1] / 1000))
    assert rows_of(curve)["late"] == late and curve.std("test_acc") is None


def test_round_0_is_told_by_its_number(tmp_path):
    path = write(tmp_path / "a_0.h5", [0.3])
    with h5py.File(path, "a") as file:
        file["round"][:] = [1]
    (curve,) = curves(path)
    assert rows_of(curve)["late"] == "30.00"


def test_users_count_the_same_in_their_mean(tmp_path):
    """The last evaluation: .2 and .6 of two users, one without samples; then .4 and 1.0."""
    users = {"a_0.h5": [0.2, 0.6, np.nan], "a_1.h5": [0.4, 1.0, np.nan]}
    for i, (name, last) in enumerate(users.items()):
        with h5py.File(write(tmp_path / name, [0.1, 0.5], repetition=i), "a") as file:
            del file["user_test_acc"]
            file["user_test_acc"] = [[0.0, 0.0, np.nan], last]
    (curve,) = curves(tmp_path)
    assert rows_of(curve)["users"] == "55.00 +- 21.21"  # 40 and 70
    average = write(tmp_path / "b_avg.h5", [0.1, 0.5], repetition="avg", seed=1)
    with h5py.File(average, "a") as file:
        file["runs/rs_glob_acc"] = [[0.1, 0.5]] * 2
        file["runs/user_test_acc"] = [[[0, 0, np.nan], last] for last in users.values()]
    (curve,) = curves(average)
    assert rows_of(curve)["users"] == "55.00 +- 21.21"
    with h5py.File(average, "a") as file:
        del file["runs"], file["user_test_acc"]
        file["user_test_acc"] = [[0, 0, np.nan], [0.3, 0.8, np.nan]]
    assert rows_of(*curves(average))["users"] == "55.00"
    with h5py.File(tmp_path / "a_1.h5", "a") as file:
        del file["user_test_acc"]
    assert rows_of(*curves(tmp_path / "a_0.h5"))["users"] == "40.00"
    assert rows_of(*curves(tmp_path / "a_0.h5", tmp_path / "a_1.h5"))["users"] == "-"
    assert plots.table(curves(tmp_path), 0.9).splitlines()[0].count("mean over users") == 1


def test_rounds_come_from_the_file(tmp_path):
    path = write(tmp_path / "a_0.h5", [0.1, 0.5, 0.95])
    with h5py.File(path, "a") as file:
        file["round"][:] = [0, 10, 20]
    (curve,) = curves(path)
    assert rows_of(curve)["round"] == rows_of(curve)["reached"] == "20"


def test_global_and_personalised_are_two_curves_of_one_colour(tmp_path):
    write(tmp_path / "a_0.h5", [0.1, 0.2], algorithm="pFedMe")
    write(tmp_path / "a_p_0.h5", [0.3], "theta", algorithm="pFedMe")
    write(tmp_path / "b_p_0.h5", [0.3, 0.4], "local", algorithm="pFedMe", semantics="authors")
    write(tmp_path / "c_p_0.h5", [0.3, 0.4], "adapted", algorithm="PerAvg")
    found = curves(tmp_path)
    assert [curve.label for curve in found] == [
        "PerAvg, adapted, semantics=paper (n=1)",
        "pFedMe, local w_i, semantics=authors (n=1)",
        "pFedMe, global, semantics=paper (n=1)",
        "pFedMe, personalised theta, semantics=paper (n=1)",
    ]
    lines = plots.draw(found).axes[0].get_lines()
    assert lines[2].get_color() == lines[3].get_color() != lines[1].get_color()
    assert [line.get_linestyle() for line in lines] == ["-", "-", "--", "-"]
    assert [c.evaluates for c in curves(tmp_path, only="global")] == ["global"]
    assert len(curves(tmp_path, only="personal")) == 3


def test_labels_name_exactly_the_options_that_differ(tmp_path):
    # K is in FedAvg's config, but FedAvg does not read it; times never changes the numbers.
    write(tmp_path / "a_0.h5", [0.1], learning_rate=0.01, K=1, times=1)
    write(tmp_path / "b_0.h5", [0.1], learning_rate=0.1, K=2, times=9)
    write(tmp_path / "c_0.h5", [0.1], algorithm="pFedMe", beta=10, K=7)
    write(tmp_path / "d_0.h5", [0.1], algorithm="pFedMe", beta=2.0, K=7)
    write(tmp_path / "e_0.h5", [0.1], algorithm="SCAFFOLD", num_global_iters=1)
    options = [(curve.algorithm, curve.options) for curve in curves(tmp_path)]
    assert options == [
        ("FedAvg", "learning_rate=0.01"),
        ("FedAvg", "learning_rate=0.1"),
        ("pFedMe", "learning_rate=0.005, beta=2"),
        ("pFedMe", "learning_rate=0.005, beta=10"),
        ("SCAFFOLD", "learning_rate=0.005"),
    ]


def test_option_names_are_those_of_the_config():
    from utils.config import NOT_NUMBERS, SWITCHES

    assert set(SWITCHES) == plots.SWITCHES
    # These tell configurations apart in a label.
    assert NOT_NUMBERS - {"semantics", "split", "partition"} == plots.SETUP


def test_a_switch_is_named_unless_the_semantics_imply_it(tmp_path):
    write(tmp_path / "a_0.h5", [0.1])
    write(tmp_path / "b_0.h5", [0.1], semantics="authors", weighting="samples")
    assert [c.options for c in curves(tmp_path)] == ["semantics=authors", "semantics=paper"]
    write(tmp_path / "c_0.h5", [0.1], weighting="samples")
    assert [c.options for c in curves(tmp_path)] == [
        "semantics=authors, weighting=samples",
        "semantics=paper, weighting=samples",
        "semantics=paper, weighting=uniform",
    ]


def test_equal_options_on_different_data_are_told_apart_by_identity(tmp_path):
    for name, identity in (("a_0.h5", "abcdef12"), ("b_0.h5", "12abcdef")):
        with h5py.File(write(tmp_path / name, [0.1]), "a") as file:
            file.attrs["identity"] = identity
    assert [curve.options for curve in curves(tmp_path)] == ["#12abcd", "#abcdef"]


def test_one_figure_per_dataset_and_model(tmp_path, capsys):
    write(tmp_path / "a_0.h5", [0.1, 0.4])
    write(tmp_path / "b_0.h5", [0.1, 0.4, 0.5], algorithm="pFedMe", num_global_iters=2)
    write(tmp_path / "c_0.h5", [0.1, 0.4], model="dnn")
    assert run("--results_dir", tmp_path) == 0
    printed = capsys.readouterr().out
    for name in ("Mnist_mclr.png", "Mnist_dnn.png"):
        assert f"figure: {tmp_path / name}" in printed
        assert (tmp_path / name).read_bytes().startswith(SIGNATURES[".png"])
    assert printed.count("std with n-1") == 1 and "rounds to 90 %" in printed
    assert run(tmp_path, "--out", tmp_path / "new" / "x.svg") == 0
    written = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert written == ["x_Mnist_dnn.svg", "x_Mnist_mclr.svg"]


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_out_formats(tmp_path, suffix):
    path = write(tmp_path / "a_0.h5", [0.1, 0.4])
    out = tmp_path / f"figure{suffix}"
    assert run(path, "--out", out) == 0
    assert out.read_bytes().startswith(SIGNATURES[suffix])
    assert sorted(tmp_path.iterdir()) == [path, out]


def test_filters(tmp_path, capsys):
    write(tmp_path / "a_0.h5", [0.1])
    write(tmp_path / "b_0.h5", [0.1], algorithm="pFedMe")
    write(tmp_path / "c_0.h5", [0.1], model="dnn")
    write(tmp_path / "d_0.h5", [0.1], dataset="Synthetic", algorithm="PerAvg")
    assert len(curves(tmp_path, dataset=["Mnist"])) == 3
    assert [c.group for c in curves(tmp_path, model=["dnn"])] == [("Mnist", "dnn")]
    assert len(curves(tmp_path, algorithm=["pFedMe", "PerAvg"])) == 2
    line = refusal(capsys, tmp_path, "--algorithm", "SCAFFOLD")
    assert "SCAFFOLD" in line and "FedAvg, PerAvg, pFedMe" in line
    # What an earlier filter left over is what there is.
    line = refusal(capsys, tmp_path, "--dataset", "Synthetic", "--model", "dnn")
    assert "--model dnn" in line and line.endswith("mclr")
    assert "--only personal" in refusal(capsys, tmp_path, "--only", "personal")


def test_legacy_files(tmp_path):
    """By file name, as their own group, or in the only other figure when named themselves."""
    (tmp_path / "old").mkdir()
    name = "Mnist_pFedMe{}_0.005_1_15_5u_20b_20_5_0.1_avg.h5"
    one = write_legacy(tmp_path / "old" / name.format(""), [0.1, 0.3])
    two = write_legacy(tmp_path / "old" / name.format("_p"), [0.8, 0.95])
    new = write(tmp_path / "a_0.h5", [0.1])
    dnn = write(tmp_path / "b_0.h5", [0.1], model="dnn")
    found = curves(tmp_path / "old")
    assert [curve.label for curve in found] == [
        f"{one.stem}, global (average)",
        f"{two.stem}, personalised (average)",
    ]
    assert {curve.group for curve in found} == {("legacy", "")}
    assert rows_of(found[1])["reached"] == "1" and rows_of(found[1])["last"] == "95.00"
    assert [c.group for c in curves(one, new)] == [("Mnist", "mclr")] * 2
    assert {c.group for c in curves(tmp_path / "old", new)} == {("legacy", ""), ("Mnist", "mclr")}
    assert ("legacy", "") in {c.group for c in curves(one, new, dnn)}
    assert [c.group for c in curves(one, new, dnn, model=["dnn"])] == [("Mnist", "dnn")] * 2


def test_unequal_lengths_are_averaged_over_the_common_rounds(tmp_path, capsys):
    write(tmp_path / "a_0.h5", [0.1, 0.2, 0.3, 0.4], status="interrupted")
    write(tmp_path / "a_1.h5", [0.3, 0.4], repetition=1, status="diverged")
    (curve,) = curves(tmp_path)
    np.testing.assert_allclose(curve.mean("test_acc"), [0.2, 0.3])
    assert curve.label == "FedAvg, global (n=2, diverged or interrupted at rounds 1 to 3)"
    assert capsys.readouterr().err.count("notice:") == 1


def test_an_unfinished_repetition_stays_out_of_the_mean_and_is_drawn_marked(tmp_path, capsys):
    write(tmp_path / "a_0.h5", [0.1, 0.2, 0.3])
    write(tmp_path / "a_1.h5", [0.3, 0.4, 0.5], repetition=1)
    write(tmp_path / "a_2.h5", [0.9, np.nan], repetition=2, status="diverged")
    mean, diverged = curves(tmp_path)
    np.testing.assert_allclose(mean.mean("test_acc"), [0.2, 0.3, 0.4])
    assert diverged.label == "FedAvg, global (n=1, diverged at round 1)"
    assert rows_of(diverged)["best"] == "90.00" and not capsys.readouterr().err
    figure = plots.draw([mean, diverged])
    lines = figure.axes[0].get_lines()
    assert lines[0].get_color() == lines[1].get_color()
    # A band and the ring: on the last number, not on the NaN after it.
    _, ring = figure.axes[0].collections
    assert ring.get_offsets().tolist() == [[0, 90]]
    assert "ring at the end: not finished" in hints(figure)
    assert "ring" not in hints(plots.draw([mean]))


def test_an_unfinished_curve_is_global_or_personalised_like_others(tmp_path):
    for status in ("finished", "interrupted", "diverged"):
        about = {"algorithm": "pFedMe", "status": status, "repetition": status}
        write(tmp_path / f"a_{status}.h5", [0.1, 0.2], **about)
        write(tmp_path / f"a_p_{status}.h5", [0.3, 0.4], "theta", **about)
    found = curves(tmp_path)
    lines = plots.draw(found).axes[0].get_lines()
    expected = ["--" if curve.evaluates == "global" else "-" for curve in found]
    assert [line.get_linestyle() for line in lines] == expected
    assert set(expected) == {"--", "-"} and len(expected) == 4


def test_a_run_that_nobody_goes_on_with_is_stopped(tmp_path):
    """By the process where it was here, else by the silence; the file keeps its word."""
    path = write(tmp_path / "a_0.h5", [0.1, 0.2], status="running", save_every=30)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()

    def shown(age=0.0, **attributes):
        with h5py.File(path, "a") as file:
            for name in ("host", "pid", "wall_seconds"):
                file.attrs.pop(name, None)
            file.attrs.update(attributes)
        os.utime(path, (time.time() - age,) * 2)
        with h5py.File(path) as file:
            assert file.attrs["status"] == "running"
        (curve,) = curves(path)
        return curve.note.split()[0]

    here = platform.node()
    assert shown(host=here, pid=os.getpid()) == "running"
    assert shown(host=here, pid=dead.pid) == "stopped"
    # The host is another one, or it is an older file: silent for longer than it ran.
    for host in ({"host": f"not-{here}", "pid": dead.pid}, {}):
        assert shown(**host) == "running"
        assert shown(7000, **host, wall_seconds=3600.0) == "running"
        assert shown(9000, **host, wall_seconds=3600.0) == "stopped"
        assert shown(9000, **host) == "stopped"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells the start")
def test_a_process_that_got_the_id_later_is_another_one(tmp_path):
    path = write(tmp_path / "a_0.h5", [0.1, 0.2], status="running")
    with h5py.File(path, "a") as file:
        file.attrs.update(host=platform.node(), pid=os.getpid())
    os.utime(path, (1e9, 1e9))  # saved long before this process began
    assert curves(path)[0].note == "stopped at round 1"
    assert is_alive(str(os.getpid()), time.time()) is True
    assert is_alive(str(os.getpid()), 1e9) is False
    assert is_alive("x") is None


def test_a_curve_that_a_panel_lacks_is_named(tmp_path):
    write(tmp_path / "a_0.h5", [0.2, 0.3, 0.4])
    with h5py.File(write(tmp_path / "b_0.h5", [0.2] * 3, algorithm="FedNova"), "a") as file:
        del file["rs_train_loss"]
    write(tmp_path / "c_0.h5", [np.nan] * 3, algorithm="FedProx")
    write(tmp_path / "d_0.h5", [-1e30] * 3, algorithm="PerAvg")
    write(tmp_path / "e_0.h5", [0.2, -1e30, -np.inf], algorithm="SCAFFOLD", status="diverged")
    write(tmp_path / "f_0.h5", [0.5, 0.6, 0.7], algorithm="pFedMe")
    for path in tmp_path.iterdir():  # the losses explode, the accuracies do not
        with h5py.File(path, "a") as file:
            file["rs_glob_acc"][:] = np.clip(file["rs_glob_acc"][:], 0.1, 1)
    told = hints(plots.draw(curves(tmp_path))).splitlines()
    assert told[1:] == [
        "not in the accuracy panel, no finite value: FedProx, global (n=1)",
        "not in the loss panel, no train loss in the file: FedNova, global (n=1)",
        "not in the loss panel, no finite value: FedProx, global (n=1)",
        "not in the loss panel, outside of its axis: PerAvg, global (n=1)",
        "leaves the loss panel: SCAFFOLD, global (n=1, diverged at round 2)",
    ]
    # A small loss does not make the usual one of a global model an explosion.
    write(tmp_path / "a_0.h5", [0.999, 0.9999])
    write(tmp_path / "b_0.h5", [-1.3, 0.1], learning_rate=0.1)
    assert "panel" not in hints(plots.draw(curves(tmp_path / "a_0.h5", tmp_path / "b_0.h5")))
    # No loss at all has no logarithm.
    write(tmp_path / "a_0.h5", [1.0, 1.0])
    write(tmp_path / "b_0.h5", [0.9, 0.95], learning_rate=0.1)
    both = curves(tmp_path / "a_0.h5", tmp_path / "b_0.h5")
    assert "panel" not in hints(plots.draw(both))
    assert hints(plots.draw(both, scale="log")).splitlines()[1:] == [
        "not in the loss panel, outside of its axis: FedAvg, global, learning_rate=0.005 (n=1)"
    ]


def test_a_model_beside_the_chosen_one_has_no_loss_to_miss(tmp_path):
    with h5py.File(write(tmp_path / "a_p_0.h5", [0.2], "theta", algorithm="pFedMe"), "a") as file:
        file["theta_test_acc"] = file["local_test_acc"] = [0.2]
    found = plots.with_beside(curves(tmp_path))
    told = hints(plots.draw(found))
    assert "accuracy only" in told and "not in" not in told
    assert [rows_of(curve)["users"] for curve in found] == ["0.00", "-"]


def test_published_values_are_inside(tmp_path):
    (curve,) = curves(write(tmp_path / "a_0.h5", [0.4, 0.5]))
    for scale in plots.SCALES:
        low, high = (
            plots.draw([curve], "", {curve.key: Published((90, 1), {1: 20})}, scale)
            .axes[0]
            .get_ylim()
        )
        assert low < 20 and 90 < high


def test_several_algorithms_have_a_hue_each(tmp_path):
    for algorithm in ("FedAvg", "PerAvg", "pFedMe"):
        for i, rate in enumerate((0.01, 0.02, 0.04)):
            about = {"algorithm": algorithm, "learning_rate": rate}
            write(tmp_path / f"{algorithm}{i}_0.h5", [0.1, 0.2], **about)
            write(tmp_path / f"{algorithm}{i}_p_0.h5", [0.3, 0.4], "theta", **about)
    write(tmp_path / "s_0.h5", [0.1], algorithm="SCAFFOLD")
    found = curves(tmp_path)
    lines = plots.draw(found).axes[0].get_lines()
    hues, looks = {}, {}
    for curve, line in zip(found, lines, strict=True):
        hue = colorsys.rgb_to_hls(*to_rgb(line.get_color()))[0]
        hues.setdefault(curve.algorithm, []).append(hue)
        looks.setdefault(curve.identity, set()).add((line.get_color(), line.get_marker()))
    for values in hues.values():
        assert np.ptp(values) < 0.01
    centres = sorted(values[0] for values in hues.values())
    assert len(hues) == 4 and min(np.diff(centres)) > 0.05
    # Colours and markers tell all configurations apart, and one configuration has one look.
    assert all(len(look) == 1 for look in looks.values())
    assert len(set.union(*looks.values())) == len(looks) == 10
    (scaffold,) = hues["SCAFFOLD"]
    assert scaffold == colorsys.rgb_to_hls(*to_rgb(plots.COLOURS[3]))[0]


def test_configurations_of_one_algorithm_have_a_colour_each(tmp_path):
    for i in range(3):
        write(tmp_path / f"a{i}_0.h5", [0.1, 0.2], learning_rate=(i + 1) / 100)
    lines = plots.draw(curves(tmp_path)).axes[0].get_lines()
    assert [line.get_color() for line in lines] == [*plots.COLOURS[:3]]


def test_who_uploads_nothing_has_no_global_model_to_show(tmp_path, capsys):
    from FLAlgorithms.servers import ALGORITHMS

    silent = {name for name, server in ALGORITHMS.items() if not server.user_class.uploads}
    assert silent == plots.UNTRAINED
    alone = write(tmp_path / "a_0.h5", [0.1, 0.1], algorithm="Local")
    assert "only initial models there" in refusal(capsys, alone)
    write(tmp_path / "a_p_0.h5", [0.8, 0.9], "alone", algorithm="Local")
    write(tmp_path / "b_0.h5", [0.8, 0.9])
    assert [c.label for c in curves(tmp_path)] == [
        "FedAvg, global (n=1)",
        "Local, trained alone (n=1)",
    ]
    assert run(tmp_path) == 0
    assert "Local      trained alone" in capsys.readouterr().out


def test_hidden_files_are_no_results(tmp_path, capsys):
    write(tmp_path / "a_0.h5", [0.1])
    write(tmp_path / ".b_0.h5", [0.1], algorithm="pFedMe")
    (tmp_path / "._a_0.h5").write_bytes(b"what a Mac leaves")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert visible(tmp_path, "*") == [tmp_path / "a_0.h5"]
    assert [curve.algorithm for curve in curves(tmp_path)] == ["FedAvg"]
    assert capsys.readouterr().err == ""
    assert len(curves(tmp_path / ".b_0.h5")) == 1, "but one that is named is read"


@pytest.mark.parametrize("text", ["$_{$", "b$c$", r"\$x$"])
def test_dollars_are_drawn_as_they_are(tmp_path, text):
    config = {"model": text, "algorithm": text, "split": text}
    write(tmp_path / "a_0.h5", [0.1, 0.3], **config)
    write(tmp_path / "b_0.h5", [0.1, 0.3], **config | {"split": f"{text}{text}"})
    figure = plots.draw(curves(tmp_path), title=text)
    plots.save(figure, tmp_path / "x.svg")
    shown = [part for part in figure.findobj(Text) if "$" in part.get_text()]
    assert len(shown) == 3
    assert not any(part.get_parse_math() for part in shown)
    assert run(tmp_path, "--out", tmp_path / "y.png") == 0


def test_the_picture_of_a_split_draws_dollars(tmp_path, monkeypatch):
    figures, save = [], Figure.savefig

    def spy(self, *args, **extra):
        figures.append(self)
        save(self, *args, **extra)

    monkeypatch.setattr(Figure, "savefig", spy)
    rows = tuple(np.arange(2 * user, 2 * user + 1) for user in range(2))
    split = Split(("$_{$", "b$c$"), rows, rows, {"dataset": "$_{$"})
    draw_split(split, np.zeros(4, int), tmp_path / "$_{$.png")
    shown = [part for part in figures[0].findobj(Text) if "$" in part.get_text()]
    assert {part.get_text() for part in shown} == {"$_{$", "b$c$", "$_{$: $_{$"}
    assert not any(part.get_parse_math() for part in shown)


def test_ticks_that_are_made_late_are_literal(tmp_path):
    figure = Figure()
    axes = figure.subplots()
    axes.set_yticks(range(30), [f"$_{{$ {i}" for i in range(30)])
    literal(figure)
    figure.savefig(tmp_path / "x.png")
    assert all(not label.get_parse_math() for label in axes.get_yticklabels())
    assert axes.get_yticklabels()[29].get_text() == "$_{$ 29"


def test_averages_are_read_only_where_there_is_no_run_file(tmp_path):
    average = write(tmp_path / "a_avg.h5", [0.5, 0.6], repetition="avg")
    (curve,) = curves(average)
    assert curve.label == "FedAvg, global (average)" and curve.std("test_acc") is None
    with h5py.File(average, "a") as file:
        file["runs/rs_glob_acc"] = [[0.4, 0.5], [0.6, 0.7]]
        file["runs/rs_train_loss"] = [[2.0, 1.0], [4.0, 2.0]]
        file["runs/rs_train_acc"] = [[0.4, 0.5], [0.6, 0.7]]
    (curve,) = curves(average)
    assert curve.repetitions == "2"
    np.testing.assert_allclose(curve.mean("train_loss"), [3, 1.5])
    with h5py.File(average, "a") as file:
        for name in list(file["runs"]):
            rows = file["runs"].pop(name)[:1]
            file[f"runs/{name}"] = rows
    assert curves(average)[0].repetitions == "1"
    write(tmp_path / "a_0.h5", [0.1, 0.2])
    (curve,) = curves(tmp_path)
    np.testing.assert_allclose(curve.mean("test_acc"), [0.1, 0.2])


def test_a_repetition_counts_once(tmp_path, capsys):
    path = write(tmp_path / "a_0.h5", [0.1])
    assert curves(tmp_path, tmp_path / ".." / tmp_path.name / path.name)[0].repetitions == "1"
    assert not capsys.readouterr().err
    (tmp_path / "copy").mkdir()
    copy = write(tmp_path / "copy" / "a_0.h5", [0.1])
    assert curves(path, copy)[0].repetitions == "1"
    assert "same repetition" in capsys.readouterr().err


def test_csv(tmp_path):
    write(tmp_path / "a_0.h5", [0.25, 0.5])
    write(tmp_path / "a_1.h5", [0.75, 0.5], repetition=1)
    write(tmp_path / "b_0.h5", [0.125], algorithm="SCAFFOLD")
    out = tmp_path / "curves.csv"
    assert run("--results_dir", tmp_path, "--csv", out) == 0
    with open(out, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    head = "dataset,model,algorithm,evaluates,label,round,quantity,mean,std,n"
    assert ",".join(rows[0]) == head
    assert len(rows) == 3 * 2 + 3 * 1
    *about, mean, std, n = rows[0].values()
    assert about == ["Mnist", "mclr", "FedAvg", "global", "FedAvg, global (n=2)", "0", "test_acc"]
    assert (float(mean), float(std), n) == (0.5, pytest.approx(0.125**0.5), "2")
    last = rows[-1]
    assert (last["algorithm"], last["quantity"], last["mean"]) == (
        "SCAFFOLD",
        "train_loss",
        "0.875",
    )
    assert (last["std"], last["n"]) == ("", "1")


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["a_0.h5", "--out", "x.bmp"], "--out x.bmp: the name must end in .png, .pdf, .svg"),
        (["a_0.h5", "--target", "90"], "--target 90: must be a fraction"),
        (["a_0.h5", "--target", "nan"], "--target nan"),
        (["a_0.h5", "--target", "x"], "argument --target: invalid float value: 'x'"),
        (["a_0.h5", "--algo", "FedAvg"], "--algo: unknown option"),
        (["a_0.h5", "--scale", "auto"], "argument --scale: invalid choice: 'auto'"),
        (["a_0.h5", "--out", "a_0.h5/x.png"], "cannot write a_0.h5/x.png: "),
        (["a_0.h5", "--out", "folder.png"], "cannot write folder.png: Is a directory"),
        (["a_0.h5", "--csv", "folder.png"], "cannot write folder.png: Is a directory"),
        (["missing"], "missing: no such file or folder"),
        (["missing.h5"], "missing.h5: no such file or folder"),
        (["--results_dir", "missing"], "missing: no such file or folder"),
        (["folder.png"], "folder.png: no readable .h5 result"),
        (["cut.h5"], "cut.h5: damaged"),
        (["text.h5"], "text.h5: damaged"),
        (["other.h5"], "other.h5: damaged, or no result"),
        (["lacking.h5"], "lacking.h5: damaged, or no result"),
        (["empty.h5"], "empty.h5: holds no evaluations"),
        (["uneven.h5"], "uneven.h5: damaged, its curves and rounds differ"),
        (["bytes.h5"], "bytes.h5: damaged, or no result"),
        (["surrogate.h5"], "surrogate.h5: damaged, or no result"),
        (["words.h5"], "words.h5: damaged, or no result"),
        (["a_0.h5", "--out", "\udcff.png"], "not a file name"),
        (["/dev/zero"], "/dev/zero: damaged, or no result file of main.py (not a file)"),
        (["future.h5"], "future.h5: schema 2 is unknown"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path, capsys, monkeypatch, arguments, expected
):
    monkeypatch.chdir(tmp_path)
    whole = write(Path("a_0.h5"), np.linspace(0, 1, 500)).read_bytes()
    with h5py.File(write(Path("bytes.h5"), [0.1]), "a") as file:
        file.attrs["status"] = b"\xff"
    write(Path("surrogate.h5"), [0.1], algorithm="\udcff")
    with h5py.File(write(Path("words.h5"), [0.1]), "a") as file:
        del file["rs_glob_acc"]
        file["rs_glob_acc"] = [b"a"]
    Path("folder.png").mkdir()
    Path("cut.h5").write_bytes(whole[: len(whole) // 2])
    Path("text.h5").write_text("no HDF5")
    write(Path("empty.h5"), [])
    with h5py.File("other.h5", "w") as file:
        file["x"] = [1, 2]
    with h5py.File(write(Path("lacking.h5"), [0.1]), "a") as file:
        del file.attrs["identity"]
    with h5py.File(write(Path("uneven.h5"), [0.1, 0.2]), "a") as file:
        del file["round"]
        file["round"] = [0]
    with h5py.File(write(Path("future.h5"), [0.1]), "a") as file:
        file.attrs["schema"] = 2
    before = sorted(tmp_path.rglob("*"))
    # A figure may have been finished before the CSV turns out not to be writable.
    out = [] if "--out" in arguments else ["--out", "fine.png"]
    assert expected in refusal(capsys, *arguments, *out)
    assert set(tmp_path.rglob("*")) - set(before) <= {tmp_path / "fine.png"}


def test_a_bad_file_in_a_folder_is_left_out_with_a_notice(tmp_path, capsys):
    write(tmp_path / "a_0.h5", [0.1])
    (tmp_path / "b_0.h5").write_bytes(b"half")
    (tmp_path / "c_0.h5.part").write_bytes(b"being written")
    assert run(tmp_path, "--out", tmp_path / "x.png") == 0
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("notice: left out:") and "b_0.h5" in errors[0]


def test_axes_keep_the_scale_that_is_asked_for(tmp_path):
    """Linear unless asked otherwise, and nothing outside in either; one exploding curve may."""
    path = tmp_path / "a_0.h5"
    for values in ([0.3, 0.5], [0.01, 0.9, 0.99, 1.0], [1 - 1e-6, 0.0, 0.5]):
        accuracy, loss = plots.draw(curves(write(path, values))).axes
        assert (accuracy.get_yscale(), loss.get_yscale()) == ("linear", "linear")
        assert (accuracy.get_ylabel(), loss.get_ylabel()) == ("test accuracy (%)", "train loss")
        assert accuracy.get_xlabel() == loss.get_xlabel() == "round"
        assert accuracy.get_ylim()[0] < 100 * min(values) < 100 * max(values)
        assert 100 * max(values) < accuracy.get_ylim()[1]
        assert loss.get_ylim()[0] < 1 - max(values) < 1 - min(values) < loss.get_ylim()[1]
    write(path, [0.01, 0.9, 0.99, 1.0])
    accuracy, loss = plots.draw(curves(path), scale="log").axes
    low, high = accuracy.get_ylim()
    assert low <= 1 and 99 < high < 100 and "log scale" in accuracy.get_ylabel()
    assert loss.get_yscale() == "log" and loss.get_ylim()[0] < 0.01 and loss.get_ylim()[1] > 0.99
    # Also where the range is narrow, and there are ticks.
    figure = plots.draw(curves(write(path, [0.3, 0.31, 0.32])), scale="log")
    plots.save(figure, tmp_path / "narrow.png")
    assert [axes.get_yscale() for axes in figure.axes] == ["function", "log"]
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert sum(low < tick < high for tick in axes.get_yticks()) > 2
    # The first percent of a long curve may leave the accuracy panel, nothing later does.
    rise = np.where(np.arange(800) < 8, 0.1, np.linspace(0.8, 0.9, 800))
    assert 70 < plots.draw(curves(write(path, rise))).axes[0].get_ylim()[0] < 80
    rise[8] = 0.2
    assert plots.draw(curves(write(path, rise))).axes[0].get_ylim()[0] < 20
    # Losses 1 - accuracy: up to 1e30 and then infinite.
    exploded = write(
        tmp_path / "b_0.h5", [0.2, -1e30, -np.inf], status="diverged", learning_rate=0.1
    )
    write(path, [0.2, 0.3, 0.4])
    for scale in plots.SCALES:
        figure = plots.draw(curves(path, exploded), scale=scale)
        low, high = figure.axes[1].get_ylim()
        assert low < 0.6 and 0.8 < high < 1
        assert "leaves the loss panel: FedAvg, global, learning_rate=0.1" in hints(figure)
        plots.save(figure, tmp_path / "both.png")
        low, high = plots.draw(curves(exploded), scale=scale).axes[1].get_ylim()
        assert low < 0.8 and 1e30 < high < np.inf


def test_the_scale_is_an_option(tmp_path, monkeypatch):
    write(tmp_path / "a_0.h5", [0.1, 0.5])
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure.axes))
    for words in ([], ["--scale", "linear"], ["--scale", "log"]):
        assert run(tmp_path, *words) == 0
    scales = [[axes.get_yscale() for axes in both] for both in drawn]
    assert scales == [["linear"] * 2, ["linear"] * 2, ["function", "log"]]


def test_drawing_one_point_and_many_curves(tmp_path):
    for beta in range(16):
        write(tmp_path / f"a{beta}_0.h5", [0.1], beta=beta, algorithm="pFedMe")
    lines = plots.draw(curves(tmp_path)).axes[0].get_lines()
    assert all(line.get_marker() for line in lines)
    assert len({(line.get_color(), line.get_marker()) for line in lines}) > 14


def test_a_curve_under_another_is_wide(tmp_path):
    path = [0.1, 0.5, 0.8]
    write(tmp_path / "a_0.h5", path)
    write(tmp_path / "b_0.h5", [0.1, 0.5, 0.802], algorithm="FedNova")  # 0.07 points on average
    write(tmp_path / "c_0.h5", path, algorithm="FedProx")
    write(tmp_path / "d_0.h5", [0.1, 0.5, 0.806], algorithm="SCAFFOLD")
    write(tmp_path / "e_0.h5", [*path, 0.8], algorithm="pFedMe")
    write(tmp_path / "f_0.h5", path, "adapted", algorithm="PerAvg")
    figure = plots.draw(curves(tmp_path))
    widths = {line.get_label().split(",")[0]: line.get_linewidth() for line in figure.axes[0].lines}
    under = {name: (width - 1.4) / 1.2 for name, width in widths.items()}
    expected = {"FedAvg": 2, "FedNova": 1, "FedProx": 0, "SCAFFOLD": 0, "pFedMe": 0, "PerAvg": 0}
    assert under == pytest.approx(expected)
    assert "wide: another curve lies on it" in hints(figure)
    apart = plots.draw(curves(tmp_path / "a_0.h5", tmp_path / "d_0.h5"))
    assert "wide" not in hints(apart)


def test_script_needs_neither_torch_nor_display(tmp_path):
    write(tmp_path / "a_0.h5", [0.1, 0.2])
    code = (
        "import sys, main_plot; code = main_plot.main(sys.argv[1:]);"
        "assert not {'torch', 'matplotlib.pyplot'} & sys.modules.keys(); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "--results_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "Mnist_mclr.png").exists()


def test_an_empty_csv_name_is_one_line(tmp_path, capsys):
    write(tmp_path / "a_0.h5", [0.1, 0.5])
    assert main_plot.main([str(tmp_path), "--csv", "", "--out", str(tmp_path / "x.png")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not a file name" in line


def test_swept_seeds_are_averaged(tmp_path):
    """Of the run, of the split, or of both; but not runs on other data with the same seed."""
    names = iter(range(100))

    def several(folder, *configs):
        (tmp_path / folder).mkdir()
        for accuracy, config in enumerate(configs, 1):
            write(tmp_path / folder / f"{next(names)}_0.h5", [0.1, accuracy / 10], **config)
        return curves(tmp_path / folder)

    (one,) = several("run", {"seed": 0}, {"seed": 1}, {"seed": 2})
    assert one.repetitions == "3" and one.mean("test_acc")[1] == pytest.approx(0.2)
    assert one.options == "" and one.std("test_acc")[1] == pytest.approx(0.1)
    split = "dirichlet:users=9,alpha={},seed={}"
    (one,) = several("split", *({"partition": split.format(0.1, s)} for s in (3, 4)))
    assert one.repetitions == "2"
    both = [{"partition": split.format(a, s), "seed": s} for a in (0.1, 0.5) for s in (3, 4)]
    found = several("both", *both)
    assert [c.repetitions for c in found] == ["2", "2"]
    assert [c.options for c in found] == [
        f"partition={split.format(a, '3, 4')}" for a in (0.1, 0.5)
    ]
    assert [float(c.mean("test_acc")[1]) for c in found] == pytest.approx([0.15, 0.35])
    several("data", {"seed": 0}, {"seed": 1})
    for path in (tmp_path / "data").iterdir():
        with h5py.File(path, "r+") as file:
            file.attrs["config"] = json.dumps(json.loads(file.attrs["config"]) | {"seed": 0})
    assert len(curves(tmp_path / "data")) == 2


def test_curves_over_work_are_those_of_the_file(tmp_path):
    path = write(tmp_path / "a_0.h5", [0.1, 0.5, 0.7])
    with pytest.raises(plots.InputError, match="--x bytes: the files of FedAvg"):
        plots.draw(curves(path), x="bytes")
    with h5py.File(path, "r+") as file:
        file["work"] = np.array([[5, 100, 7], [9, 300, 8]])
        file["work"].attrs["columns"] = json.dumps(["gradients", "bytes_down", "bytes_up"])
    for x, expected in (("round", [0, 1, 2]), ("gradients", [0, 5, 9]), ("bytes", [0, 107, 308])):
        left, right = plots.draw(curves(path), x=x).axes
        for axes in (left, right):
            assert axes.get_lines()[0].get_xdata().tolist() == expected
        assert left.get_xlabel().startswith(x)
