"""Properties of every algorithm: what evaluation may touch, who is averaged, extremes."""

import numpy as np
import pytest
import torch

from FLAlgorithms.servers import ALGORITHMS
from FLAlgorithms.servers.serverbase import Diverged
from FLAlgorithms.trainmodel.models import Classifier
from tests.toys import UNEQUAL, Diary, blobs, federation, flat, watched
from utils.config import Config
from utils.params import WeightedMean

EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS)
N = len(UNEQUAL)


def final(algorithm, model="mclr", **options):
    server, _ = watched(federation(algorithm, model, **options))
    return flat(server.params)


@EVERY
@pytest.mark.parametrize("model", ["mclr", "cnn"])
def test_evaluating_never_or_always_gives_the_same_model(algorithm, model):
    results = []
    for every in (0, 1, 2):
        torch.manual_seed(9)
        results.append(final(algorithm, model, eval_every=every))
        torch.manual_seed(9)
        before = torch.get_rng_state()
        final(algorithm, model, eval_every=every)
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@EVERY
def test_evaluation_moves_cursors_only_where_the_authors_did(algorithm):
    runs = [final(algorithm, semantics="authors2020", eval_every=every) for every in (0, 1)]
    assert torch.equal(*runs) == (algorithm != "PerAvg")


@EVERY
@pytest.mark.parametrize("block_size", [0, 3])
def test_the_global_curves_are_those_of_the_global_model(algorithm, block_size):
    """Every recorded round against a plain pass of w_t over all users' data."""
    server = federation(algorithm, num_global_iters=3, block_size=block_size)
    data, kept = server.data, {}

    class Keeper(Diary):
        def round_done(self, round_number, selected):
            kept[round_number] = flat(server.params).clone()

    kept[0] = flat(server.params).clone()
    server.observers = [told := Keeper()]
    server.run()
    assert list(told.main) == [0, 1, 2, 3]
    for t, metrics in told.main.items():
        weight, bias = kept[t][:24].reshape(4, 6), kept[t][24:]
        for part in ("train", "test"):
            rows = data.part(part)
            logits, y = data.x[rows] @ weight.T + bias, data.y[rows]
            assert metrics.correct[part].sum() == int((logits.argmax(1) == y).sum())
            loss = torch.nn.functional.cross_entropy(logits, y).item()
            assert metrics.mean_loss(part) == pytest.approx(loss, rel=1e-12)


@EVERY
def test_same_seed_same_numbers_other_seed_others(algorithm):
    a, b, c = (final(algorithm, seed=s) for s in (5, 5, 6))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@EVERY
def test_identical_client_models_average_to_themselves(algorithm):
    """No local movement (all steps zero): the server stays, whoever takes part."""
    zero = {"learning_rate": 0.0, "beta": 0.0, "personal_learning_rate": 0.0}
    if algorithm in ("FedNova", "SCAFFOLD"):
        zero["learning_rate"] = 1e-300
    server = federation(algorithm, numusers=3, **zero)
    start = flat(server.params).clone()
    server.run()
    torch.testing.assert_close(flat(server.params), start, rtol=0, atol=1e-15)


def test_fedprox_without_penalty_is_bitwise_fedavg():
    for block_size in (0, 3):
        options = {"block_size": block_size, "momentum": 0.5}
        assert torch.equal(final("FedProx", mu=0.0, **options), final("FedAvg", **options))


def test_fednova_with_equal_tau_is_fedavg():
    a, b = (final(name, momentum=0.9) for name in ("FedNova", "FedAvg"))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_scaffold_round_one_is_uniform_fedavg():
    a = final("SCAFFOLD", num_global_iters=1)
    b = final("FedAvg", num_global_iters=1, weighting="uniform")
    torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_scaffold_control_is_the_mean_of_all_users_controls(weighting, option):
    """After every round, under partial participation: c = sum p_i c_i over ALL users."""
    server = federation(
        "SCAFFOLD", num_global_iters=5, numusers=2, weighting=weighting, scaffold_option=option
    )
    n = torch.as_tensor(np.array(UNEQUAL), dtype=torch.float64)
    p = n / n.sum() if weighting == "samples" else torch.full((N,), 1 / N, dtype=torch.float64)
    seen = set()
    for _ in range(5):
        server.round()
        server.round_number += 1
        seen |= {*server.selected}
        for c, c_i in zip(server.c, server.bank["c_i"], strict=True):
            torch.testing.assert_close(c, torch.tensordot(p, c_i, dims=1), rtol=0, atol=1e-14)
    never = sorted({*range(N)} - seen)
    assert never or len(seen) == N
    for user in never:
        assert not server.bank["c_i"][0][user].any()
    assert any(server.bank["c_i"][0][user].any() for user in seen)


def test_weights_are_over_those_who_report():
    """One full-batch step: x+ = x - eta sum_S p_i grad f_i with p over the sample alone."""
    for weighting in ("samples", "uniform"):
        server = federation(
            "FedAvg", num_global_iters=1, batch_size=50, local_epochs=1, weighting=weighting
        )
        start = flat(server.params).clone()
        users = {}
        chosen = server.sample()
        for i in chosen:
            (report,) = ((r.ids, flat(r.params)) for r in server.trained([i]))
            users[i] = report[1]
        n = np.array(UNEQUAL)[chosen] if weighting == "samples" else np.ones(3)
        expected = sum(w * users[i] for w, i in zip(n / n.sum(), chosen, strict=True))
        server.round()
        assert not torch.equal(flat(server.params), start)
        torch.testing.assert_close(flat(server.params), expected, rtol=0, atol=1e-14)


@EVERY
def test_a_round_without_reports_leaves_the_model(algorithm):
    server = federation(algorithm, num_global_iters=1)
    server.scripted = [[-1, -1]]
    start = flat(server.params).clone()
    server.run()
    assert torch.equal(flat(server.params), start)


def test_nobody_reports_and_the_mean_is_the_default():
    mean = WeightedMean()
    default = [torch.tensor([1.0, 2.0])]
    assert torch.equal(mean.value(default)[0], default[0])
    mean.add(torch.zeros(3), [torch.ones(3, 2)])
    assert torch.equal(mean.value(default)[0], default[0])


def test_weighted_mean_keeps_leading_repetitions_apart():
    """Shape (T, C): sums run over C alone; a repetition without weight keeps its default."""
    weight = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    values = torch.tensor([[[1.0], [5.0]], [[7.0], [9.0]]])
    mean = WeightedMean()
    mean.add(weight, [values])
    mean.add(weight, [values])
    assert mean.value([torch.tensor([[0.0], [-1.0]])])[0].tolist() == [[4.0], [-1.0]]


def test_everybody_trains_in_pfedme_and_only_the_sample_counts():
    server = federation("pFedMe", num_global_iters=1)
    start = [p.clone() for p in server.bank["theta"]]
    server.run()
    moved = (server.bank["theta"][0] != start[0]).flatten(1).any(1)
    assert moved.all()
    server = federation("pFedMe", num_global_iters=1, participation="sampled")
    server.run()
    moved = (server.bank["theta"][0] != start[0]).flatten(1).any(1)
    assert moved.nonzero().flatten().tolist() == server.selected.tolist()


def test_theta_differs_from_the_local_model_and_is_what_is_evaluated():
    server, diary = watched(federation("pFedMe", num_global_iters=3))
    for models in diary.personal.values():
        assert set(models) == {"theta", "local"}
        assert models["theta"].loss["test"].tolist() != models["local"].loss["test"].tolist()
        assert set(models["theta"].sizes) == {"train", "test"}
    (user,) = server._users.values()
    assert not {p.data_ptr() for p in user.params} & {t.data_ptr() for t in server.bank["theta"]}


def test_adaptation_ignores_the_test_labels():
    """Permuting test labels must not change the adapted weights."""
    data, other = blobs(), blobs()
    first = int(data.starts["test"][0])
    other.y[first:] = (other.y[first:] + 1) % 4
    adapted = []
    for one in (data, other):
        server = federation("PerAvg", data=one, block_size=3)
        adapted.append([flat(u.personalized()["adapted"]) for u in server._blocks(np.arange(N))])
    for a, b in zip(*adapted, strict=True):
        assert torch.equal(a, b)


@EVERY
@pytest.mark.parametrize("block_size", [0, 3])
def test_users_without_data_are_never_sampled_and_change_nothing(algorithm, block_size):
    """A user without train samples never moves; c and the averages stay finite."""
    data = blobs(train=(3, 0, 5, 1, 0))
    server, diary = watched(
        federation(algorithm, data=data, numusers=5, num_global_iters=3, block_size=block_size)
    )
    assert torch.isfinite(flat(server.params)).all()
    assert {i for row in diary.selected for i in row} == {0, 2, 3}
    if algorithm == "SCAFFOLD":
        c_i = server.bank["c_i"][0]
        assert not c_i[[1, 4]].any()
        torch.testing.assert_close(server.c[0], c_i.mean(0), rtol=0, atol=1e-14)


@EVERY
def test_users_without_test_data_and_single_users(algorithm):
    data = blobs(train=(6,))
    server, diary = watched(federation(algorithm, data=data, numusers=1))
    assert np.isfinite(diary.main[2].accuracy("test"))
    assert torch.isfinite(flat(server.params)).all()


class WithBuffers(Classifier):
    """A model with float and integer buffers that training moves (BatchNorm statistics)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)
        self.fc1 = torch.nn.Linear(6, 4)

    def forward(self, x):
        return self.fc1(self.norm(x))


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a != "Local"])
def test_float_buffers_are_averaged_and_integer_ones_copied(algorithm):
    config = Config(
        algorithm=algorithm, batch_size=4, numusers=2, num_global_iters=1, local_epochs=3,
        learning_rate=0.01, K=1,
    ).resolved()  # fmt: skip
    data = blobs(train=(8, 12))
    torch.manual_seed(0)
    server = config.server_class(config, data, WithBuffers().double())
    assert server.block_size == 0
    norm = server.model.norm
    server.sample()
    weights, means = [], []
    for i in (0, 1):
        for report in server.trained([i], **({"c": server.c} if algorithm == "SCAFFOLD" else {})):
            weights.append(float(report.weight))
            means.append(server._users[()].model.norm.running_mean.clone())
        norm.reset_running_stats()
    server.run()
    mean = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    torch.testing.assert_close(norm.running_mean, mean, rtol=0, atol=1e-12)
    steps = {"PerAvg": 6}.get(algorithm, 3)
    assert norm.num_batches_tracked.item() == steps
    assert norm.num_batches_tracked.dtype == torch.int64


@EVERY
def test_divergence_names_round_user_and_option(algorithm):
    steps = {"learning_rate": 1e200, "personal_learning_rate": 1e200, "lamda": 0.0, "beta": 1e200}
    with pytest.raises(Diverged, match=r"diverged in round \d.*(user|global).*look at --\w+ \(now"):
        federation(algorithm, "dnn", num_global_iters=6, **steps).run()


def test_selection_is_the_same_for_every_algorithm():
    selections = []
    for algorithm in ALGORITHMS:
        _, diary = watched(federation(algorithm, num_global_iters=4))
        selections.append(np.array(diary.selected).tolist())
    assert all(s == selections[0] for s in selections)
    assert len({tuple(row) for row in selections[0]}) > 1


def test_momentum_does_not_leak_between_users_or_rounds():
    """Two identical users trained one after the other end at the same place."""
    data = blobs(train=(6, 6), seed=1)
    data.x[6:12], data.y[6:12] = data.x[:6], data.y[:6]
    server = federation("FedAvg", data=data, momentum=0.9, batches="cyclic", numusers=2)
    server.sample()
    a, b = (flat(r.params).clone() for i in (0, 1) for r in server.trained([i]))
    assert torch.equal(a, b)


@EVERY
def test_state_kept_elsewhere_changes_nothing(algorithm):
    usual = federation(algorithm, block_size=3)
    apart = federation(algorithm, block_size=3, state_device="cpu")
    usual.run()
    apart.run()
    assert torch.equal(flat(usual.params), flat(apart.params))
    assert all(p.device.type == "cpu" for bank in apart.bank.values() for p in bank)


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a not in ("pFedMe", "Local")])
def test_a_round_touches_the_sampled_users_alone(algorithm, monkeypatch):
    """Two thousand users, five sampled: minibatches are drawn for five."""
    data = blobs(train=[3] * 2000)
    server = federation(algorithm, data=data, numusers=5, eval_every=0, block_size=5)
    drawn = []
    draw = server.planner._draw
    monkeypatch.setattr(
        server.planner,
        "_draw",
        lambda stream, run, user, *a: drawn.append(user) or draw(stream, run, user, *a),
    )
    server.round()
    assert sorted(drawn) == server.selected.tolist()
    for bank in server.bank.values():
        moved = torch.stack([p.flatten(1).ne(0).any(1) for p in bank]).any(0)
        assert moved.nonzero().flatten().tolist() == server.selected.tolist()
