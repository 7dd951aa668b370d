"""The block engine against the reference engine, float64: the same numbers to 1e-12."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
from torch.func import functional_call

from FLAlgorithms.servers import ALGORITHMS
from FLAlgorithms.servers.serverbase import cut_blocks
from FLAlgorithms.trainmodel.stacked import stacked
from tests.toys import SHAPES, UNEQUAL, blobs, federation, flat, together, watched
from utils.batches import FederatedData

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
ALL = len(UNEQUAL)


def run(algorithm, model, block_size, **options):
    server, diary = watched(federation(algorithm, model, block_size=block_size, **options))
    return server, diary


def assert_same(one, other):
    """Global parameters, every user's state, every recorded metric and the work done."""
    (a, told_a), (b, told_b) = one, other
    torch.testing.assert_close(flat(a.params), flat(b.params), **CLOSE)
    for name in a.bank:
        torch.testing.assert_close(flat(a.bank[name]), flat(b.bank[name]), **CLOSE)
    assert_same_curves(told_a, told_b)
    assert a.work.tolist() == b.work.tolist()
    for part in a.planner.cursors:
        assert (a.planner.cursors[part] == b.planner.cursors[part]).all()


def assert_same_curves(told_a, told_b):
    assert told_a.main.keys() == told_b.main.keys()
    for t, metrics in told_a.main.items():
        assert_same_metrics(metrics, told_b.main[t])
    assert told_a.personal.keys() == told_b.personal.keys()
    for t, models in told_a.personal.items():
        for name, metrics in models.items():
            assert_same_metrics(metrics, told_b.personal[t][name])


def assert_same_metrics(a, b):
    for part in a.sizes:
        np.testing.assert_allclose(a.loss[part], b.loss[part], rtol=0, atol=1e-11)
        assert (a.correct[part] == b.correct[part]).all()


@pytest.mark.parametrize("semantics", ["paper", "authors"])
@pytest.mark.parametrize("unit", [{"local_epochs": 3}, {"local_unit": "epochs", "local_epochs": 1}])
@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_blocks_equal_the_reference(algorithm, model, unit, semantics):
    options = unit | {"semantics": semantics}
    reference = run(algorithm, model, 0, **options)
    start = federation(algorithm, model, **options)
    kept = [[*s.params, *itertools.chain(*s.bank.values())] for s in (reference[0], start)]
    assert not torch.equal(*map(flat, kept))
    for block_size in (1, 3, ALL):
        assert_same(reference, run(algorithm, model, block_size, **options))


def assert_repetitions_alone(algorithm, model, lockstep, **options):
    """Every repetition of a lockstep run equals its run alone on the reference engine."""
    lockstep.run()
    for row, repetition in enumerate(lockstep.repetitions):
        alone, diary = run(algorithm, model, 0, repetition=repetition, **options)
        told = lockstep.observers[row]
        torch.testing.assert_close(flat(lockstep._of(row)), flat(alone.params), **CLOSE)
        for name, bank in lockstep.bank.items():
            torch.testing.assert_close(flat(t[row] for t in bank), flat(alone.bank[name]), **CLOSE)
        assert [s.tolist() for s in told.selected] == [s.tolist() for s in diary.selected]
        assert_same_curves(told, diary)
        assert lockstep.work[row].tolist() == alone.work[0].tolist()
        for part, cursors in lockstep.planner.cursors.items():
            assert (cursors[row] == alone.planner.cursors[part][0]).all()


@pytest.mark.parametrize("semantics", ["paper", "authors"])
@pytest.mark.parametrize("unit", [{"local_epochs": 3}, {"local_unit": "epochs", "local_epochs": 1}])
@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lockstep_repetitions_equal_runs_alone(algorithm, model, unit, semantics):
    options = unit | {"semantics": semantics}
    size = ALL if model == "cnn" else 3
    lockstep = together(algorithm, model, (0, 2), block_size=size, **options)
    assert_repetitions_alone(algorithm, model, lockstep, **options)


@pytest.mark.parametrize("block_size", [0, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_is_repeated_bitwise(algorithm, block_size):
    """Whatever has been drawn from the libraries' own generators before."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        runs.append(run(algorithm, "cnn", block_size, num_global_iters=1))
    (one, _), (other, _) = runs
    assert torch.equal(flat(one.params), flat(other.params))
    for name in one.bank:
        assert torch.equal(flat(one.bank[name]), flat(other.bank[name]))


@pytest.mark.parametrize("block_size", [0, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_are_taken_whatever_the_round_asks_for(algorithm, block_size, monkeypatch):
    """A server only calculates, so that its author may switch gradients off."""
    usual = run(algorithm, "dnn", block_size)
    cls = ALGORITHMS[algorithm]
    monkeypatch.setattr(cls, "round", torch.no_grad()(cls.round))
    assert_same(usual, run(algorithm, "dnn", block_size))


def test_lockstep_users_one_at_a_time():
    """`--block_size 0` asks for the reference engine, which knows no repetitions side by side."""
    lockstep = together("pFedMe", "dnn", (0, 2), block_size=0)
    assert_repetitions_alone("pFedMe", "dnn", lockstep)


VARIANTS = [
    ("PerAvg", {"hessian": "exact"}),
    ("PerAvg", {"hessian": "hf"}),
    ("PerAvg", {"semantics": "authors2020"}),
    ("FedNova", {"momentum": 0.9, "mu": 0.3, "server_momentum": 0.5}),
    ("FedProx", {"momentum": 0.9, "mu": 0.3}),
    ("FedAvg", {"finetune_steps": 2, "momentum": 0.5}),
    ("FedAvg", {"momentum": 0.9, "weighting": "uniform", "server_learning_rate": 0.5}),
    ("SCAFFOLD", {"scaffold_option": 1}),
    ("SCAFFOLD", {"weighting": "samples"}),
    ("pFedMe", {"participation": "sampled"}),
    ("pFedMe", {"theta_start": "warm", "inner_weight_decay": 0.1, "personal": "local"}),
]


@pytest.mark.parametrize(("algorithm", "options"), VARIANTS)
def test_switches_on_both_engines(algorithm, options):
    options = options | {"local_unit": "epochs", "local_epochs": 1}
    reference = run(algorithm, "dnn", 0, **options)
    for block_size in (3, ALL):
        assert_same(reference, run(algorithm, "dnn", block_size, **options))
    lockstep = together(algorithm, "dnn", block_size=3, save_models=True, **options)
    assert_repetitions_alone(algorithm, "dnn", lockstep, **options)


def test_saved_personal_models_of_lockstep_repetitions():
    for options in ({}, {"personal": "local"}, {"participation": "sampled"}):
        lockstep = together("pFedMe", block_size=3, save_models=True, **options)
        lockstep.run()
        for row in range(3):
            alone, _ = run("pFedMe", "mclr", 0, repetition=row, save_models=True, **options)
            for name, rows in alone.personal_models().items():
                torch.testing.assert_close(lockstep.personal_models(row)[name], rows, **CLOSE)


def test_a_diverged_repetition_does_not_disturb_the_others():
    lockstep = together("FedAvg", "dnn", block_size=3, num_global_iters=4)
    lockstep.params[0][1] = 1e200
    lockstep.run()
    assert list(lockstep.failed) == [1]
    assert "not finite" in lockstep.failed[1]
    for row in (0, 2):
        alone, _ = run("FedAvg", "dnn", 0, repetition=row, num_global_iters=4)
        torch.testing.assert_close(flat(lockstep._of(row)), flat(alone.params), **CLOSE)
        assert len(lockstep.observers[row].main) == 5
    assert len(lockstep.observers[1].main) <= 1


@pytest.mark.parametrize("block", [(), (3,), (2, 3)])
@pytest.mark.parametrize("model", SHAPES)
def test_stacked_models_equal_the_plain_one(model, block):
    """Outputs and gradients of every copy, on inputs of its own and on shared ones."""
    one = federation("FedAvg", model).model.eval()
    copies = stacked(one, block).eval() if block else one
    with torch.no_grad():
        for p in copies.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    torch.manual_seed(1)
    x = torch.randn(*block, 5, *SHAPES[model], dtype=torch.float64)
    y = torch.randint(0, 4, (*block, 5))
    loss = copies.loss(copies(x), y)
    loss.sum().backward()
    names = [name for name, _ in one.named_parameters()]
    for place in np.ndindex(*block):
        params = [p[place].detach().clone().requires_grad_() for p in copies.parameters()]
        out = functional_call(one, dict(zip(names, params, strict=True)), (x[place],))
        plain = torch.nn.functional.cross_entropy(out, y[place], reduction="none")
        torch.testing.assert_close(loss[place], plain, **CLOSE)
        for p, g in zip(copies.parameters(), torch.autograd.grad(plain.sum(), params), strict=True):
            torch.testing.assert_close(p.grad[place], g, **CLOSE)
        if block and one.lockstep:
            shared = copies(x[place])[place]
            torch.testing.assert_close(shared, out, **CLOSE)


def test_second_order_with_dropout_and_convolutions():
    options = {"hessian": "exact", "num_global_iters": 1}
    assert_same(run("PerAvg", "cnn", 0, **options), run("PerAvg", "cnn", 3, **options))


def test_colour_cnn_on_both_engines():
    options = {"data": blobs((3, 16, 16)), "num_global_iters": 1}
    assert_same(run("pFedMe", "cnn", 0, **options), run("pFedMe", "cnn", 3, **options))


def test_dropout_masks_change_the_result_and_are_keyed_by_user():
    """Another seed gives other masks; the same user in another company gets the same ones."""
    server = federation("FedAvg", "cnn", num_global_iters=1, eval_every=0)
    server.sample()
    alone = {i: _train(server, [i])[0] for i in (1, 4, 6)}
    together = federation("FedAvg", "cnn", num_global_iters=1, eval_every=0, block_size=3)
    together.sample()
    for i, params in zip((1, 4, 6), _train(together, [1, 4, 6]), strict=True):
        torch.testing.assert_close(alone[i], params, **CLOSE)
    layer = server._users[()].dropouts[0]
    assert (layer.mask == 0).any()
    kept = layer.mask[layer.mask > 0]
    assert torch.allclose(kept, torch.full_like(kept, 1 / 0.75))


def _train(server, ids):
    found = {}
    for report in server.trained(ids):
        rows = [report.params] if not server.block_size else zip(*report.params, strict=True)
        found |= {i: flat(row) for i, row in zip(np.atleast_1d(report.ids), rows, strict=True)}
    return [found[i] for i in ids]


def test_order_of_users_is_irrelevant():
    """The same users stored in another order, everybody sampled, minibatches in file order."""
    data = blobs()
    order = np.random.default_rng(3).permutation(ALL)
    rows = [
        np.arange(data.starts[part][i], data.starts[part][i] + data.sizes[part][i])
        for part in ("train", "test")
        for i in order
    ]
    rows = torch.as_tensor(np.concatenate(rows))
    sizes = {part: data.sizes[part][order] for part in ("train", "test")}
    shuffled = FederatedData(data.x[rows], data.y[rows], sizes)
    for algorithm in ALGORITHMS:
        options = {"numusers": ALL, "batches": "cyclic", "block_size": 3}
        a, _ = run(algorithm, "mclr", data=data, **options)
        b, _ = run(algorithm, "mclr", data=shuffled, **options)
        torch.testing.assert_close(flat(a.params), flat(b.params), rtol=0, atol=1e-13)


def test_a_finished_user_does_not_move():
    """User 1 has one sample, so one step; its theta is the one after that step."""
    options = {"local_unit": "epochs", "local_epochs": 1, "num_global_iters": 1}
    for start in ("cold", "warm"):
        alone, _ = run("pFedMe", "mclr", 0, theta_start=start, **options)
        block, _ = run("pFedMe", "mclr", ALL, theta_start=start, **options)
        for a, b in zip(alone.bank["theta"], block.bank["theta"], strict=True):
            torch.testing.assert_close(a[1], b[1], **CLOSE)


def test_frozen_config():
    config = federation("FedAvg").config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mu = 1.0


def test_blocks_are_cut_where_it_is_cheapest():
    """Against all cuts of seven users; equal work is cut into full blocks."""
    assert cut_blocks(np.full(7, 5), 3, 10.0) == [(0, 3), (3, 6), (6, 7)]
    assert cut_blocks(np.zeros(0, dtype=int), 3, 1.0) == []
    steps = np.array([1, 2, 2, 3, 40, 41, 300])

    def cost(cuts, overhead):
        return sum(steps[b - 1] * (overhead + b - a) for a, b in cuts)

    for size in (1, 2, 4, 7):
        for overhead in (0.0, 1.0, 30.0, 1e6):
            found = cut_blocks(steps, size, overhead)
            assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])]
            assert found[-1][1] == 7
            assert all(0 < b - a <= size for a, b in found)
            best = min(
                cost(cuts, overhead)
                for k in range(7)
                for inner in itertools.combinations(range(1, 7), k)
                for cuts in [list(itertools.pairwise([0, *inner, 7]))]
                if all(b - a <= size for a, b in cuts)
            )
            assert cost(found, overhead) == best
