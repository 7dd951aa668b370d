"""BatchNorm in every algorithm: statistics, `--bn local`, minibatches of one; float64."""

import copy
import itertools

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import main
from FLAlgorithms.servers import ALGORITHMS
from FLAlgorithms.servers.serverbase import WORK
from FLAlgorithms.trainmodel.classifier import BATCH_NORMS
from FLAlgorithms.trainmodel.models import build_model
from tests.test_models import NET, custom
from tests.toys import UNEQUAL, blobs, flat, run_main, watched
from utils.batches import batches_per_pass, cut
from utils.config import Config
from utils.errors import InputError

EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS)
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
B, N = 4, len(UNEQUAL)
RATE, MU, RHO = 0.05, 0.3, 0.6


def federation(algorithm, model="lenet", **options):
    """Seven unequal users, four of them sampled, one pass a round in file order."""
    defaults = {
        **{"batch_size": B, "numusers": 4, "num_global_iters": 2, "learning_rate": RATE, "K": 2},
        **{"local_unit": "epochs", "local_epochs": 1, "batches": "cyclic", "beta": 0.7},
        **{"personal_learning_rate": 0.03, "lamda": 3.0, "norm": "batch", "seed": 5},
    }
    config = Config(algorithm=algorithm, model=model, **(defaults | options)).resolved()
    data = blobs((1, 12, 12))
    net = build_model(model, (1, 12, 12), 4, config.initial_seed(0), norm=config.norm)
    return config.server_class(config, data, net.double())


def samples(data, part, user):
    rows = data.part(part, slice(user, user + 1))
    return data.x[rows], data.y[rows]


def own_names(model):
    """Of BatchNorm's parameters and statistics."""
    layers = [n for n, m in model.named_modules() if isinstance(m, BATCH_NORMS)]
    return [n for n in model.state_dict() if n.rpartition(".")[0] in layers]


def textbook(model, data, config, selected, local):
    """Plain modules and torch's own SGD, one user after the other; yields (model, own values)."""
    algorithm = config.algorithm
    c = [torch.zeros_like(p) for p in model.parameters()]
    c_i = {i: [torch.zeros_like(p) for p in c] for i in range(N)}
    start = {n: v.clone() for n, v in model.state_dict().items() if n in own_names(model)}
    own = {i: copy.deepcopy(start) for i in range(N)}
    yield copy.deepcopy(model), own
    for who in selected:
        trained, steps, a, moved = {}, {}, {}, []
        for i in who:
            y = trained[i] = copy.deepcopy(model)
            if local:
                y.load_state_dict(own[i], strict=False)
            x = [p.detach().clone() for p in y.parameters()]
            sgd = torch.optim.SGD(y.parameters(), RATE, momentum=config.momentum)
            inputs, labels = samples(data, "train", i)
            n = len(labels)
            edges = [*range(0, max(n - (n % B == 1), 1), B), n]
            steps[i], a[i], s = len(edges) - 1, 0.0, 0.0
            for left, right in itertools.pairwise(edges):
                sgd.zero_grad()
                F.cross_entropy(y.train()(inputs[left:right]), labels[left:right]).backward()
                for p, x_p, c_p, mine in zip(y.parameters(), x, c, c_i[i], strict=True):
                    p.grad += c_p - mine
                    if algorithm == "FedProx":
                        p.grad += MU * (p.detach() - x_p)
                sgd.step()
                s = config.momentum * s + 1
                a[i] += s
            if algorithm == "SCAFFOLD":
                moved.append([])
                for k, (p, x_p) in enumerate(zip(y.parameters(), x, strict=True)):
                    change = (x_p - p.detach()) / (steps[i] * RATE) - c[k]
                    c_i[i][k] = c_i[i][k] + change
                    moved[-1].append(change)
            own[i] = {n: v.clone() for n, v in y.state_dict().items() if n in start}
        c = [p + sum(change) / N for p, *change in zip(c, *moved, strict=True)] if moved else c
        size = {i: 1.0 if algorithm == "SCAFFOLD" else float(UNEQUAL[i]) for i in who}
        p = {i: size[i] / sum(size.values()) for i in who}
        last = max(who, key=lambda i: (steps[i], i))
        learnt = dict(model.named_parameters())
        new = {}
        for name, old in model.state_dict().items():
            values = {i: trained[i].state_dict()[name] for i in who}
            if not old.is_floating_point():
                new[name] = values[last]
            elif algorithm == "FedNova" and name in learnt:
                far = sum(p[i] * a[i] for i in who)
                new[name] = old - far * sum(p[i] * (old - values[i]) / a[i] for i in who)
            else:
                new[name] = sum(p[i] * values[i] for i in who)
        model.load_state_dict(new | (start if local else {}))
        yield copy.deepcopy(model), own


@pytest.mark.parametrize("bn", ["aggregate", "local"])
@pytest.mark.parametrize("algorithm", ["FedAvg", "FedProx", "FedNova", "SCAFFOLD"])
def test_against_plain_modules(algorithm, bn):
    """Parameters, statistics, every user's own values, curves of the global model."""
    if (algorithm, bn) == ("SCAFFOLD", "local"):
        with pytest.raises(InputError, match="--bn local: not for SCAFFOLD, only for FedAvg, Fed"):
            federation(algorithm, bn=bn)
        return
    options = {"FedProx": {"mu": MU}, "FedNova": {"momentum": RHO}, "FedAvg": {"momentum": RHO}}
    server = federation(algorithm, bn=bn, **options.get(algorithm, {}))
    model = copy.deepcopy(server.model)
    server, diary = watched(server)
    book = textbook(model, server.data, server.config, diary.selected, bn == "local")
    for t, (expected, own) in enumerate(book):
        for i in range(N):
            one = copy.deepcopy(expected)
            if bn == "local":
                one.load_state_dict(own[i], strict=False)
            for part in ("train", "test"):
                x, y = samples(server.data, part, i)
                loss = F.cross_entropy(one.eval()(x), y, reduction="sum").item()
                assert diary.main[t].loss[part][i] == pytest.approx(loss, rel=1e-10)
    found = server.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, **CLOSE)
    assert int(found["features.1.num_batches_tracked"]) == (0 if bn == "local" else 3 * t)
    for k, name in enumerate(own_names(expected) if bn == "local" else []):
        for i in range(N):
            torch.testing.assert_close(server.bank["own"][k][i], own[i][name], **CLOSE)
    trainable = [tuple(p.shape) for p in expected.parameters()]
    for rows in [server.c] if algorithm == "SCAFFOLD" else []:
        assert [tuple(p.shape) for p in rows] == trainable
        mean = [bank.mean(0) for bank in server.bank["c_i"]]
        torch.testing.assert_close(flat(mean), flat(rows), **CLOSE)
    for rows in [server.u] if algorithm == "FedNova" else []:
        assert [tuple(p.shape) for p in rows] == trainable


@pytest.mark.parametrize("participation", ["all", "sampled"])
def test_theta_is_evaluated_with_the_statistics_it_was_trained_with(participation):
    """Also for a user that is absent: both are what they were when it last took part."""
    options = {"num_global_iters": 3, "save_models": True, "participation": participation}
    server, diary = watched(federation("pFedMe", **options))
    kept = server.personal_models()
    learnt = [n for n, _ in server.model.named_parameters()]
    assert kept.keys() == dict(server.model.state_dict()).keys()
    for i in range(N):
        theta = dict(zip(learnt, [rows[i] for rows in server.bank["theta"]], strict=True))
        buffers = [n for n, _ in server.model.named_buffers()]
        theta |= dict(zip(buffers, [rows[i] for rows in server.bank["own"]], strict=True))
        for name, value in theta.items():
            assert torch.equal(kept[name][i], value)
        x, y = samples(server.data, "test", i)
        logits = functional_call(copy.deepcopy(server.model).eval(), theta, (x,))
        loss = F.cross_entropy(logits, y, reduction="sum").item()
        assert diary.personal[2]["theta"].loss["test"][i] == pytest.approx(loss, rel=1e-10)
    means = server.bank["own"][0]
    apart = len({tuple(row.tolist()) for row in means})
    assert apart == N if participation == "all" else 1 < apart <= N


def test_training_starts_from_the_global_statistics():
    """pFedMe with K = 1 and plr = 1 / lamda is FedAvg, its statistics included, in every round."""
    options = {"num_global_iters": 3, "weighting": "uniform", "beta": 1.0, "K": 1}
    options |= {"lamda": 4.0, "personal_learning_rate": 0.25}
    one, other = (watched(federation(a, **options))[0] for a in ("pFedMe", "FedAvg"))
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], **CLOSE)


def test_the_adapted_model_has_the_statistics_of_its_adaptation():
    server = federation("PerAvg", num_global_iters=1)
    start = copy.deepcopy(server.model)
    server, diary = watched(server)
    for i in range(N):
        one = copy.deepcopy(start).train()
        (plan,) = server.planner.adapt(np.array(i), 0, ("train",))
        batch = plan.batch(server.data, 0, 0)
        F.cross_entropy(one(batch.x), batch.y).backward()
        with torch.no_grad():
            for p in one.parameters():
                p -= RATE * p.grad
        x, y = samples(server.data, "test", i)
        loss = F.cross_entropy(one.eval()(x), y, reduction="sum").item()
        assert diary.personal[0]["adapted"].loss["test"][i] == pytest.approx(loss, rel=1e-10)


WAYS = [(a, "aggregate") for a in ALGORITHMS] + [("FedAvg", "local"), ("FedNova", "local")]


def everything(server):
    state = [*server.params, *server.buffers, *(t for bank in server.bank.values() for t in bank)]
    return flat([t.double() for t in state])


@pytest.mark.parametrize(("algorithm", "bn"), WAYS)
def test_evaluation_moves_no_statistics(algorithm, bn):
    never, always = (
        everything(watched(federation(algorithm, bn=bn, batches="shuffled", eval_every=e))[0])
        for e in (0, 1)
    )
    assert torch.equal(never, always)


@pytest.mark.parametrize(("algorithm", "bn"), WAYS)
def test_going_on_from_a_checkpoint(algorithm, bn):
    whole = watched(federation(algorithm, bn=bn))[0]
    first = federation(algorithm, bn=bn)
    first.run_rounds(1)
    second = federation(algorithm, bn=bn)
    second.restore(first.checkpoint())
    second.run()
    assert torch.equal(everything(second), everything(whole))


def test_the_statistics_are_counted_among_the_bytes():
    """They travel with the model; under `--bn local` nothing of the layers does."""
    down, up = {}, {}
    for bn in ("aggregate", "local"):
        server = watched(federation("FedAvg", bn=bn, num_global_iters=1))[0]
        down[bn], up[bn] = (server.work[0, WORK.index(f"bytes_{w}")] / 4 for w in ("down", "up"))
    params = sum(p.numel() for p in server.params) * 8
    affine = 2 * (6 + 16) * 8
    statistics = affine + 2 * 8  # and two counters
    assert down == up == {"aggregate": params + statistics, "local": params - affine}


def test_norm_and_bn_have_an_effect():
    options = {"num_global_iters": 1}
    found = [
        flat(watched(federation("FedAvg", **options, **extra))[0].params)
        for extra in ({}, {"bn": "local"}, {"norm": "group"}, {"norm": "none"})
    ]
    assert len({tuple(f.tolist()) for f in found}) == 4


# ---- minibatches of one sample


@pytest.mark.parametrize("size", [1, 2, 3, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B + 2])
@pytest.mark.parametrize("batch", [1, 2, B, 100])
@pytest.mark.parametrize("seed", [None, 1])
def test_a_last_sample_joins_the_minibatch_before(size, batch, seed):
    batch = min(batch, size)
    per_pass = int(batches_per_pass(size, batch, merge=True))
    rng = None if seed is None else np.random.default_rng(seed)
    at = cut(size, batch, 3 * per_pass, rng=rng, merge=True)
    lengths = (at >= 0).sum(1)
    assert (lengths.min() > 1) == (size > 1 and batch > 1)
    assert lengths.max() <= batch + 1
    for turn in np.split(at, 3):
        assert sorted(turn[turn >= 0]) == list(range(size))
        assert (np.diff((turn >= 0).astype(int), axis=1) <= 0).all(), "padding comes last"
    if size % batch != 1:
        rng = None if seed is None else np.random.default_rng(seed)
        assert (at == cut(size, batch, 3 * per_pass, rng=rng)).all()


def test_merging_is_for_batchnorm_alone():
    for norm, expected in (("batch", [2, 1, 1, 3, 1, 1, 2]), ("group", [3, 1, 1, 3, 2, 1, 2])):
        server = federation("FedAvg", norm=norm)
        assert server.planner.num_steps(np.arange(N), 0).tolist() == expected
        assert server.block_size == 0
    assert federation("FedAvg", norm="group", block_size=3).block_size == 3
    assert federation("FedAvg", block_size=3).block_size == 0


FLAT = NET.replace("(self.layer", "(self.norm").replace("(x)", "(self.norm(x))").replace(
    "classes)\n\n", "classes)\n        self.norm = nn.BatchNorm1d(shape[0])\n\n"
)  # fmt: skip


@EVERY
def test_one_value_per_channel(algorithm, leaf, capsys):
    """Users of 12 to 16 samples, minibatches of 13: one of 14; of one sample: refused."""
    words = ["--algorithm", algorithm, "--model", custom(leaf, FLAT), "--adapt", "test_test"]
    words += ["--local_unit", "epochs", "--local_epochs", "1", "--numusers", "5"]
    assert run_main(leaf, *words, "--batch_size", "13", "--learning_rate", "0.01")[0] == 0
    capsys.readouterr()
    assert run_main(leaf, *words, "--batch_size", "1")[0] == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--batch_size 1: one sample, and BatchNorm in Net has no variance over it" in said


def test_bn_local_without_batchnorm_is_refused(leaf, capsys):
    assert run_main(leaf, "--algorithm", "FedAvg", "--bn", "local")[0] == 2
    assert "--bn local: mclr has no BatchNorm layers" in capsys.readouterr().err


@pytest.mark.parametrize("way", [("FedAvg", "aggregate"), ("FedAvg", "local"), ("pFedMe", "")])
def test_files_are_verified_and_replayed(way, leaf):
    algorithm, bn = way
    words = ["--algorithm", algorithm, "--model", custom(leaf, FLAT), "--learning_rate", "0.01"]
    words += ["--bn", bn] if bn else ["--save_models"]
    code, out = run_main(leaf, *words, "--times", "2", "--lockstep", "yes")
    assert code == 0
    for path in sorted(out.glob(f"Synthetic_Net_{algorithm}_0*_1.h5")):
        assert main.main(["--verify", str(path)]) == 0
        assert main.main(["--replay", str(path), "--gpu", "-1"]) == 0
        with h5py.File(path) as file:
            moved = not np.array_equal(
                file["init/norm.running_mean"], file["final/norm.running_mean"]
            )
            assert moved == (bn != "local")
    for path in out.glob("Synthetic_Net_pFedMe_p_*_1.h5"):
        with h5py.File(path) as file:
            users = file["personal"].values()
            assert len({tuple(user["norm.running_mean"][()]) for user in users}) == 5
            assert {user["norm.num_batches_tracked"].dtype.kind for user in users} == {"i"}
