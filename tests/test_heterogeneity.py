"""Stragglers, drawn amounts of work and users that do not report: who is hit, and what it does."""

import dataclasses
import json

import h5py
import numpy as np
import pytest
import torch

import main
from FLAlgorithms.servers import ALGORITHMS
from tests.test_closed_forms import EXACT, A, B
from tests.test_engine import ALL, assert_repetitions_alone, assert_same, run
from tests.test_results import StopAfter, changed, files, read, same
from tests.toys import UNEQUAL, after, federation, flat, quadratics, run_main, together, watched
from utils.batches import Planner

EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS)
BLOCKS = pytest.mark.parametrize("block_size", [0, 1, 2])
MIXED = {"stragglers": 0.7, "local_epochs_range": (1, 4), "user_dropout": 0.4, "numusers": 4}


def planner(repetitions=(0,), **options) -> Planner:
    server = federation("FedProx", **options)
    return Planner(server.config, server.data, repetitions)


def script(server, *work):
    """Fix how much every user does each round."""
    server.planner.epochs = lambda ids, round_number: np.array(work)[ids]
    return server


# ---- who is hit


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 1.0])
def test_so_many_of_the_sampled_users_straggle(share):
    sampled = np.array([0, 2, 3, 5, 6])
    hit = set()
    for t in range(40):
        p = planner(stragglers=share)
        assert p.turnout(sampled, t)[0].nonzero()[0].tolist() == sampled.tolist()
        (slow,) = p.slow
        assert slow.sum() == round(share * 5)
        assert set(slow.nonzero()[0]) <= set(sampled)
        hit.add(tuple(slow))
    assert (len(hit) > 1) == (0 < round(share * 5) < 5)


def test_amounts_of_work_reach_both_ends_and_no_further():
    """Drawn ranges, stragglers of a fixed amount, and stragglers of a drawn one."""
    everyone = np.arange(ALL)
    drawn = {"range": set(), "part": set(), "both": set()}
    for t in range(60):
        drawn["range"] |= {*planner(local_epochs_range=(2, 5)).epochs(everyone, t)}
        p = planner(stragglers=1.0, local_epochs=4)
        p.turnout(everyone, t)
        drawn["part"] |= {*p.epochs(everyone, t)}
        p = planner(stragglers=0.5, local_epochs_range=(2, 5))
        whole = p.epochs(everyone, t)
        p.turnout(everyone, t)
        (slow,) = p.slow
        part = p.epochs(everyone, t)
        assert (part[~slow] == whole[~slow]).all()
        assert ((part[slow] >= 1) & (part[slow] <= whole[slow])).all()
        drawn["both"] |= {*(whole[slow] - part[slow])}
    assert drawn == {"range": {2, 3, 4, 5}, "part": {1, 2, 3, 4}, "both": {0, 1, 2, 3, 4}}


def test_stragglers_do_every_part_of_their_work_alike():
    """1 to 4 with probability 1/4 each: 2,800 draws, five standard deviations."""
    counts = np.zeros(5)
    for t in range(400):
        p = planner(stragglers=1.0, local_epochs=4)
        p.turnout(np.arange(ALL), t)
        counts += np.bincount(p.epochs(np.arange(ALL), t), minlength=5)
    assert counts[0] == 0
    assert abs(counts[1:] - 700).max() < 5 * np.sqrt(2800 * 3 / 16)


def test_users_fail_to_report_as_often_as_asked():
    """2,800 draws of probability 0.3, five standard deviations; nobody outside the sample."""
    reports = [planner(user_dropout=0.3).turnout(np.arange(ALL), t)[0] for t in range(400)]
    assert abs(np.sum(reports) - 0.7 * 2800) < 5 * np.sqrt(2800 * 0.21)
    assert not planner(user_dropout=0.3).turnout(np.array([1, 4]), 0)[0][[0, 2, 3, 5, 6]].any()


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_work_is_steps_or_passes_and_none_without_data(unit):
    p = planner(local_epochs_range=(2, 5), local_unit=unit)
    p.data.sizes["train"][3] = 0
    epochs, everyone = p.epochs(np.arange(ALL), 1), np.arange(ALL)
    batches = {"steps": [1] * ALL, "epochs": [-(-n // 4) for n in UNEQUAL]}[unit]
    expected = epochs * np.array(batches)
    expected[3] = 0
    assert (p.num_steps(everyone, 1) == expected).all()
    assert p.local(everyone, 1, draws=1).steps.tolist() == expected.tolist()


def test_draws_do_not_depend_on_company_and_differ_between_rounds_and_repetitions():
    options = {"stragglers": 0.5, "local_epochs_range": (1, 1000), "user_dropout": 0.5}
    sampled = np.array([[0, 2, 3, 5], [1, 2, 4, 6]])
    both = planner((4, 9), **options)
    reports = both.turnout(sampled, 3)
    work = both.num_steps(np.tile(np.arange(ALL), (2, 1)), 3)
    for row, repetition in enumerate((4, 9)):
        one = planner((repetition,), **options)
        assert (one.turnout(sampled[row], 3)[0] == reports[row]).all()
        assert (one.slow[0] == both.slow[row]).all()
        assert (one.num_steps(np.arange(ALL), 3) == work[row]).all()
        assert int(one.num_steps(np.array(5), 3)) == work[row, 5]
    one.slow.fill(False)
    others = [
        planner((9,), **options).epochs(np.arange(ALL), 4),
        planner((9,), seed=6, **options).epochs(np.arange(ALL), 3),
        planner((4,), **options).epochs(np.arange(ALL), 3),
    ]
    assert all((one.epochs(np.arange(ALL), 3) != other).any() for other in others)


def test_the_same_users_are_hit_whatever_the_algorithm():
    """Sample, stragglers, work of all users; who reports, but for FedAvg's stragglers."""
    told = {}
    for algorithm in ALGORITHMS:
        server = federation(algorithm, **MIXED)
        told[algorithm] = []
        for server.round_number in range(6):
            selected = server.sample().tolist()
            slow = server.planner.slow[0]
            work = server.planner.num_steps(server.everyone, server.round_number).tolist()
            if algorithm == "FedAvg":
                assert not (server.reports & slow).any()
            reported = (server.reports & ~slow).tolist()
            told[algorithm].append((selected, slow.tolist(), work, reported))
    assert all(rounds == told["FedProx"] for rounds in told.values())
    assert len({str(r) for r in told["FedProx"]}) == 6


# ---- what it does


def mean_of(y, x, a, b, mu, k, eta):
    """`k` steps of gradient a (y - b) + mu (y - x): contraction towards the proximal point."""
    m = (a * b + mu * x) / (a + mu)
    return m + (1 - eta * (a + mu)) ** k * (y - m)


@BLOCKS
def test_fedprox_keeps_partial_work(block_size):
    """G1, users that take 2 and 5 of 5 steps; then drawn ones, read back from the plan."""
    common = {"mu": 0.5, "learning_rate": 0.1, "num_global_iters": 1, "block_size": block_size}
    server = script(quadratics("FedProx", local_epochs=5, stragglers=0.5, **common), 2, 5)
    expected = mean_of(0.3, 0.3, A, B, 0.5, np.array([2, 5]), 0.1).mean()
    assert after(server) == pytest.approx(expected, **EXACT)
    server = quadratics("FedProx", local_epochs=9, stragglers=1.0, seed=3, **common)
    server.sample()
    k = server.planner.num_steps(server.everyone, 0)
    assert k.min() < 9
    expected = mean_of(0.3, 0.3, A, B, 0.5, k, 0.1).mean()
    assert after(server) == pytest.approx(expected, **EXACT)


@BLOCKS
def test_fedavg_drops_stragglers(block_size):
    """One of the two straggles: the other's five steps alone; both: the model stays."""
    common = {"learning_rate": 0.1, "num_global_iters": 1, "block_size": block_size}
    server = quadratics("FedAvg", local_epochs=5, stragglers=0.5, **common)
    server.sample()
    ((keeps,),) = (~server.planner.slow).nonzero()[1:]
    expected = mean_of(0.3, 0.3, A, B, 0.0, 5, 0.1)[keeps]
    assert after(server) == pytest.approx(expected, **EXACT)
    assert after(quadratics("FedAvg", local_epochs=5, stragglers=1.0, **common)) == 0.3


def test_fedprox_without_penalty_is_fedavg_until_users_straggle():
    def final(algorithm, **options):
        return flat(watched(federation(algorithm, num_global_iters=4, **options))[0].params)

    calm = {"local_epochs_range": (1, 4), "user_dropout": 0.4, "momentum": 0.5}
    assert torch.equal(final("FedProx", **calm), final("FedAvg", **calm))
    assert not torch.equal(*(final(a, stragglers=0.7, **calm) for a in ("FedProx", "FedAvg")))


@BLOCKS
def test_fednova_divides_by_the_steps_really_taken(block_size):
    """tau = (2, 8) of 8 steps: the spec's values for unequal tau, SGD and momentum .9."""
    common = {"learning_rate": 0.01, "local_epochs": 8, "num_global_iters": 1, "stragglers": 0.5}
    for momentum, value in ((0.0, 0.339843640123004), (0.9, 0.41565845737562535)):
        server = quadratics("FedNova", momentum=momentum, block_size=block_size, **common)
        assert after(script(server, 2, 8)) == pytest.approx(value, **EXACT)


@BLOCKS
def test_fednova_with_drawn_work(block_size):
    """x+ = x - mean(tau) mean(a (x - b) (1 - (1 - eta a)^tau) / (a tau)), tau as drawn."""
    options = {"learning_rate": 0.1, "local_epochs_range": (1, 20), "seed": 2}
    server = quadratics("FedNova", num_global_iters=1, block_size=block_size, **options)
    tau = server.planner.num_steps(server.everyone, 0)
    assert tau[0] != tau[1]
    moved = 0.3 - mean_of(0.3, 0.3, A, B, 0.0, tau, 0.1)
    assert after(server) == pytest.approx(0.3 - tau.mean() * (moved / tau).mean(), **EXACT)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_weights_are_over_those_who_reported(weighting):
    server = federation("FedAvg", user_dropout=0.5, numusers=5, weighting=weighting, seed=1)
    chosen = server.sample()
    there = [i for i in chosen if server.reports[i]]
    assert 0 < len(there) < 5
    models = {int(r.ids): flat(r.params) for r in server.trained(chosen)}
    n = np.array(UNEQUAL)[there] if weighting == "samples" else np.ones(len(there))
    expected = sum(w * models[i] for w, i in zip(n / n.sum(), there, strict=True))
    server.round()
    torch.testing.assert_close(flat(server.params), expected, rtol=0, atol=1e-14)


@EVERY
@pytest.mark.parametrize("block_size", [0, 3])
def test_nobody_reports_and_everything_global_stays(algorithm, block_size):
    """Bitwise, the server's momentum and controls included, after a round that moved them."""
    options = {"server_momentum": 0.5, "block_size": block_size, "num_global_iters": 3}
    server = federation(algorithm, **options)
    server.run_rounds(1)
    before = flat(server._global_state()).clone()
    controls = [t.clone() for t in server.bank.get("c_i", [])]
    server.planner.config = dataclasses.replace(server.config, user_dropout=1.0)
    server.run_rounds(2)
    assert torch.equal(flat(server._global_state()), before)
    assert all(torch.equal(a, b) for a, b in zip(server.bank.get("c_i", []), controls, strict=True))
    assert server.work[0, 0] == 9
    assert server.work[0, -1] == (0 if algorithm == "Local" else 3)


def test_a_silent_repetition_does_not_hold_up_the_others():
    """In lockstep, where one repetition has no report in a round and others have some."""
    options = {"user_dropout": 0.6, "server_momentum": 0.9, "num_global_iters": 6, "numusers": 2}
    lockstep, silent = together("FedNova", block_size=3, **options), set()
    sample = lockstep.sample

    def watch():
        chosen = sample()
        silent.add(tuple(lockstep.reports.any(-1)))
        return chosen

    lockstep.sample = watch
    assert_repetitions_alone("FedNova", "mclr", lockstep, **options)
    assert any(0 < sum(row) < 3 for row in silent)


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("block_size", [0, 3])
def test_scaffold_controls_stay_the_mean_of_all_users(weighting, option, block_size):
    """After every round c = sum p_i c_i over ALL users; who does not report keeps its c_i."""
    options = MIXED | {"weighting": weighting, "scaffold_option": option}
    server = federation("SCAFFOLD", num_global_iters=8, block_size=block_size, **options)
    n = torch.as_tensor(np.array(UNEQUAL), dtype=torch.float64)
    p = n / n.sum() if weighting == "samples" else torch.full((ALL,), 1 / ALL, dtype=torch.float64)
    absent = 0
    for _ in range(8):
        before = server.bank["c_i"][0].clone()
        server.run_rounds(1)
        moved = (server.bank["c_i"][0] != before).flatten(1).any(1).numpy()
        assert (moved == server.reports).all()
        absent += len(server.selected) - moved.sum()
        for c, c_i in zip(server.c, server.bank["c_i"], strict=True):
            torch.testing.assert_close(c, torch.tensordot(p, c_i, dims=1), rtol=0, atol=1e-13)
    assert absent


def test_pfedme_users_keep_what_they_learned_though_they_do_not_report():
    for participation in ("all", "sampled"):
        server = federation(
            "pFedMe", user_dropout=1.0, num_global_iters=1, participation=participation
        )
        before = server.bank["theta"][0].clone()
        server.run()
        moved = (server.bank["theta"][0] != before).flatten(1).any(1)
        trained = range(ALL) if participation == "all" else server.selected
        assert moved.nonzero().flatten().tolist() == list(trained)


# ---- engines


@pytest.mark.parametrize("unit", ["steps", "epochs"])
@EVERY
def test_engines_agree(algorithm, unit):
    """Blocks and lockstep against the reference engine, all three options together."""
    options = MIXED | {"local_unit": unit, "num_global_iters": 3, "semantics": "authors"}
    reference = run(algorithm, "dnn", 0, **options)
    for block_size in (1, 3, ALL):
        assert_same(reference, run(algorithm, "dnn", block_size, **options))
    lockstep = together(algorithm, "dnn", (0, 2), block_size=3, **options)
    assert_repetitions_alone(algorithm, "dnn", lockstep, **options)


def test_blocks_of_an_evaluation_do_not_know_the_last_rounds_stragglers():
    """A run that goes on from a checkpoint does not know them either."""
    options = MIXED | {"block_size": 2, "stragglers": 1.0, "num_global_iters": 2}
    server, other = (federation("PerAvg", **options) for _ in range(2))
    server.run_rounds(1)
    assert server.reports.any()
    other.restore(server.checkpoint())
    blocks = [[u.ids.tolist() for u in s._blocks(s.everyone)] for s in (server, other)]
    assert blocks[0] == blocks[1]


@EVERY
def test_evaluating_changes_nothing(algorithm):
    options = MIXED | {"num_global_iters": 3, "block_size": 3}
    finals = [flat(run(algorithm, "mclr", eval_every=e, **options)[0].params) for e in (0, 1)]
    assert torch.equal(*finals)


# ---- results

WORDS = ["--stragglers", "0.5", "--local_epochs_range", "1", "3", "--user_dropout", "0.3"]
WORDS += ["--numusers", "4", "--num_global_iters", "6"]


@pytest.mark.parametrize("way", [["--block_size", "0"], [], ["--lockstep", "yes"]])
@EVERY
def test_stopped_resumed_and_replayed_is_bitwise_the_same(
    algorithm, way, leaf, tmp_path, monkeypatch, capsys
):
    words = ["--algorithm", algorithm, "--times", "2", "--eval_every", "2", *WORDS, *way]
    _, out = run_main(leaf, *words)
    words += ["--results_dir", str(tmp_path / "again")]
    with monkeypatch.context() as patch:
        patch.setattr("utils.jobs.Interrupts", lambda: StopAfter(3))
        assert run_main(leaf, *words)[0] == 130
    assert run_main(leaf, *words, "--resume")[0] == 0
    names = [path.name for path in files(out, "*.h5")]
    assert names == [path.name for path in files(tmp_path / "again", "*.h5")]
    for name in names:
        assert same(read(out / name), read(tmp_path / "again" / name)), name
    path = str(next(path for path in files(out, "*_1.h5") if f"{algorithm}_0" in path.name))
    if way == []:
        assert main.main(["--verify", path, "--gpu", "-1"]) == 0
    capsys.readouterr()
    assert main.main(["--replay", path, "--gpu", "-1"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "parameters after" in x)
    assert way == ["--lockstep", "yes"] or float(line.split()[4]) == 0


@EVERY
def test_selected_trained_and_reported_users_are_counted(algorithm, leaf, capsys):
    _, out = run_main(leaf, "--algorithm", algorithm, *WORDS)
    printed = capsys.readouterr().out
    path = next(path for path in files(out, "*_0.h5") if f"{algorithm}_0" in path.name)
    with h5py.File(path) as file:
        work = json.loads(file.attrs["work"])
        assert json.loads(file.attrs["config"])["local_epochs_range"] == [1, 3]
        assert file["selected_users"].shape == (6, 4)
    assert work["selected"] == 24
    assert work["trained"] == (30 if algorithm in ("pFedMe", "Local") else 24)
    reports = work["reported"]
    assert reports == 0 if algorithm == "Local" else 0 < reports < 24 - 4 * (algorithm == "FedAvg")
    numbers = 50 * {"SCAFFOLD": 2}.get(algorithm, 1) + (algorithm == "FedNova")
    assert work["bytes_up"] == 4 * numbers * work["reported"]
    each = f"{work['reported'] / 6:.1f}".removesuffix(".0")
    assert f"4 selected, {work['trained'] // 6} trained, {each} reported" in printed


def test_results_from_before_reports_were_counted_are_kept(leaf, capsys):
    """Finished files that --resume keeps."""
    _, out = run_main(leaf)
    assert "2 selected, 5 trained, 2 reported" in capsys.readouterr().out
    for path in files(out, "*_0.h5"):
        with changed(path) as file:
            work = json.loads(file.attrs["work"])
            assert work.pop("reported") == work["selected"] == 4
            file.attrs["work"] = json.dumps(work)
    assert run_main(leaf, "--resume")[0] == 0
    assert "2 selected, 5 trained, 2 reported" in capsys.readouterr().out
