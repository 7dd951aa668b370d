"""Exact values through the product's Server and User classes, float64.

Two clients f_i(w) = a_i/2 (w - b_i)^2, a = (1, 3), b = (0, 1), weights 1/2 each, start 0.3. The
minimum of F is sum a b / sum a = 0.75. K gradient steps of size eta contract client i to
b_i + (1 - eta a_i)^K (w - b_i), so that with q_i = 1 - (1 - eta a_i)^K

    FedAvg:  x+ = x + mean(q_i (b_i - x)),     limit = mean(q_i b_i) / mean(q_i)

In NumPy:  a, b = np.array([1, 3]), np.array([0, 1]);  q = 1 - (1 - .1 * a) ** 5
           .3 + (q * (b - .3)).mean() = 0.529749;  (q * b).mean() / q.mean() = 0.6701330712720712
"""

from itertools import chain

import numpy as np
import pytest
import torch

from FLAlgorithms.servers.serverbase import WORK
from tests.toys import Quartic, Slope, after, flat, limit, quadratics, watched
from utils.errors import InputError

ENGINES = pytest.mark.parametrize("block_size", [0, 1, 2])
EXACT = {"rel": 0, "abs": 1e-10}
A, B = np.array([1.0, 3.0]), np.array([0.0, 1.0])


def one_round(algorithm, **options):
    return after(quadratics(algorithm, num_global_iters=1, **options))


def local_models(server):
    """Every user's parameters after local training, before the server moves."""
    server.sample()
    return [r.params[0].item() for i in server.everyone for r in server.trained([i])]


# ---- FedAvg


@ENGINES
def test_fedavg_values(block_size):
    common = {"learning_rate": 0.1, "block_size": block_size}
    assert one_round("FedAvg", local_epochs=5, **common) == pytest.approx(0.529749, **EXACT)
    assert limit("FedAvg", local_epochs=5, **common) == pytest.approx(0.6701330712720712, **EXACT)
    assert limit("FedAvg", local_epochs=20, **common) == pytest.approx(0.5321626269181333, **EXACT)


@ENGINES
@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (5, 2)])
def test_fedavg_fixed_point_and_one_step(block_size, weights):
    """p_i = n_i / n; every sample of a user is the same, so a minibatch of one is a full batch."""
    p, K, eta = np.array(weights) / sum(weights), 7, 0.07
    q = 1 - (1 - eta * A) ** K
    common = {"sizes": weights, "learning_rate": eta, "block_size": block_size}
    found = limit("FedAvg", local_epochs=K, **common)
    assert found == pytest.approx((p * q * B).sum() / (p * q).sum(), **EXACT)
    step = one_round("FedAvg", local_epochs=1, **common)
    assert step == pytest.approx(0.3 - eta * (p * A * (0.3 - B)).sum(), **EXACT)


def test_server_learning_rate_scales_the_average_update():
    for algorithm in ("FedAvg", "FedProx", "FedNova", "SCAFFOLD"):
        full, half = (
            one_round(algorithm, learning_rate=0.1, local_epochs=5, server_learning_rate=s)
            for s in (1.0, 0.5)
        )
        assert half == pytest.approx((0.3 + full) / 2, **EXACT), algorithm


# ---- FedProx


@ENGINES
def test_fedprox_values(block_size):
    common = {"learning_rate": 0.1, "block_size": block_size}
    found = limit("FedProx", mu=0.5, local_epochs=5, **common)
    assert found == pytest.approx(0.6713815927925373, **EXACT)
    found = limit("FedProx", mu=1.0, local_epochs=20, **common)
    assert found == pytest.approx(0.6027710769566356, **EXACT)


@pytest.mark.parametrize("mu", [0.1, 1.0, 30.0])
def test_fedprox_first_step_is_plain_sgd_for_every_mu(mu):
    common = {"learning_rate": 0.1, "local_epochs": 1}
    assert one_round("FedProx", mu=mu, **common) == one_round("FedAvg", **common)


def test_fedprox_penalty_gradient_is_linear_not_normalised():
    """Two steps by hand: y1 = x - eta a (x - b); y2 = y1 - eta (a (y1 - b) + mu (y1 - x))."""
    eta, mu, x = 0.1, 2.0, 0.3
    y1 = x - eta * A * (x - B)
    y2 = y1 - eta * (A * (y1 - B) + mu * (y1 - x))
    found = one_round("FedProx", mu=mu, learning_rate=eta, local_epochs=2)
    assert found == pytest.approx(y2.mean(), **EXACT)


def test_proximal_term_is_added_after_the_momentum_buffer():
    """v <- rho v + g; y <- y - eta (v + mu (y - x)), three steps by hand."""
    eta, mu, rho, x = 0.1, 2.0, 0.9, 0.3
    y, v = np.full(2, x), np.zeros(2)
    for _ in range(3):
        v = rho * v + A * (y - B)
        y = y - eta * (v + mu * (y - x))
    found = one_round("FedProx", mu=mu, momentum=rho, learning_rate=eta, local_epochs=3)
    assert found == pytest.approx(y.mean(), **EXACT)


# ---- FedNova

TAU28 = {"sizes": (2, 8), "local_unit": "epochs", "local_epochs": 1, "weighting": "uniform"}


@ENGINES
@pytest.mark.parametrize(
    ("rho", "mu", "normaliser"),
    [(0.9, 0.0, 23.046721), (0.0, 0.5, 6.033254078125), (0.9, 0.5, 20.725269484375), (0, 0, 7)],
)
def test_universal_optimiser(block_size, rho, mu, normaliser):
    """With a constant gradient 1, -Delta_i / eta = |a_i| and d_i = 1; alpha = eta mu = 0.05.

    In NumPy: s = a = 0; for _ in range(7): s = rho * s + 1; a = (1 - .05) * a + s
    """
    options = {"learning_rate": 0.1, "momentum": rho, "mu": mu, "local_epochs": 7}
    server = quadratics("FedNova", model=Slope, a=(1, 1), block_size=block_size, **options)
    server.sample()
    for report in server.trained(server.everyone):
        (user,) = server._users.values()
        moved = (0.3 - user.params[0].detach()) / 0.1
        assert moved.flatten().tolist() == pytest.approx([normaliser] * moved.numel(), **EXACT)
        assert report.d[0].flatten().tolist() == pytest.approx([1.0] * moved.numel(), **EXACT)
        expected = 7 if mu else normaliser
        assert report.tau.flatten().tolist() == pytest.approx([expected] * moved.numel(), **EXACT)


@ENGINES
def test_fednova_values(block_size):
    common = TAU28 | {"block_size": block_size}
    found = one_round("FedNova", learning_rate=0.01, **common)
    assert found == pytest.approx(0.339843640123004, **EXACT)
    found = one_round("FedNova", learning_rate=0.01, momentum=0.9, **common)
    assert found == pytest.approx(0.41565845737562535, **EXACT)


@pytest.mark.parametrize(
    ("eta", "nova", "avg"),
    [
        (0.1, 0.5535588383222673, 0.8322076512622192),
        (0.01, 0.7309507745078395, 0.9157338961436059),
        (0.001, 0.7481218313717204, 0.9223644287041164),
    ],
)
def test_fednova_and_fedavg_limits_with_unequal_tau(eta, nova, avg):
    assert limit("FedNova", learning_rate=eta, **TAU28) == pytest.approx(nova, **EXACT)
    assert limit("FedAvg", learning_rate=eta, **TAU28) == pytest.approx(avg, **EXACT)


def test_fednova_bias_vanishes_linearly_in_eta():
    bias = [0.75 - limit("FedNova", learning_rate=eta, **TAU28) for eta in (2e-3, 1e-3, 5e-4)]
    assert bias[0] / bias[1] == pytest.approx(2, rel=0.02)
    assert bias[1] / bias[2] == pytest.approx(2, rel=0.01)


def test_fednova_with_equal_tau_is_fedavg_but_not_fedprox():
    common = {"learning_rate": 0.1, "local_epochs": 5}
    nova, avg = (one_round(n, momentum=0.9, **common) for n in ("FedNova", "FedAvg"))
    assert nova == pytest.approx(avg, **EXACT)
    nova, prox = (one_round(n, mu=0.5, **common) for n in ("FedNova", "FedProx"))
    assert nova == pytest.approx(0.531591681735486, **EXACT)
    assert prox == pytest.approx(0.5095618125, **EXACT)


def test_fednova_unequal_tau_differs_from_fedavg():
    nova, avg = (one_round(n, learning_rate=0.01, **TAU28) for n in ("FedNova", "FedAvg"))
    assert abs(nova - avg) > 1e-3


def test_fednova_server_momentum():
    """u <- gamma u + tau_eff sum p d; x <- x - eta u: with Delta(x) of a FedAvg round."""
    x, u, q = 0.3, 0.0, 1 - (1 - 0.1 * A) ** 5
    for _ in range(3):
        u = 0.5 * u - (q * (B - x)).mean()
        x = x + -u
    options = {"learning_rate": 0.1, "local_epochs": 5, "server_momentum": 0.5}
    found = after(quadratics("FedNova", num_global_iters=3, **options))
    assert found == pytest.approx(x, **EXACT)


# ---- SCAFFOLD


@ENGINES
@pytest.mark.parametrize(
    ("option", "rounds"),
    [
        (2, [0.529749, 0.66350218512, 0.7224156179591676]),
        (1, [0.529749, 0.69620820072, 0.7441564374690816]),
    ],
)
def test_scaffold_values(block_size, option, rounds):
    options = {"learning_rate": 0.1, "local_epochs": 5, "block_size": block_size}
    for t, value in enumerate(rounds, 1):
        server = quadratics("SCAFFOLD", num_global_iters=t, scaffold_option=option, **options)
        assert after(server) == pytest.approx(value, **EXACT)
    server = quadratics("SCAFFOLD", num_global_iters=120, scaffold_option=option, **options)
    assert after(server) == pytest.approx(0.75, **EXACT)
    assert flat(server.bank["c_i"]).tolist() == pytest.approx([0.75, -0.75], **EXACT)


@pytest.mark.parametrize("block_size", [0, 2])
def test_scaffold_divides_by_the_steps_really_taken(block_size):
    # One pass is 2 and 8 steps of gradient 1: every control is 1, whatever a user's steps.
    options = {"local_unit": "epochs", "local_epochs": 1, "num_global_iters": 1}
    options |= {"learning_rate": 0.1, "block_size": block_size, "scaffold_option": 2}
    server = quadratics("SCAFFOLD", model=Slope, a=(1, 1), sizes=(2, 8), **options)
    server.run()
    assert server.c[0].item() == pytest.approx(1, **EXACT)


def test_scaffold_control_is_the_average_of_the_gradients_used():
    """Option II: c_i+ = (1/K) sum of g(y_k), the y_k of the corrected path (round 2, c_i != 0)."""
    server = quadratics("SCAFFOLD", learning_rate=0.1, local_epochs=4, num_global_iters=1)
    x = after(server)
    c, c_i = server.c[0].item(), server.bank["c_i"][0][:, 0].numpy().copy()
    y, gradients = np.full(2, x), []
    for _ in range(4):
        gradients.append(A * (y - B))
        y = y - 0.1 * (gradients[-1] - c_i + c)
    server.round()
    assert server.bank["c_i"][0][:, 0].tolist() == pytest.approx(
        np.mean(gradients, axis=0), **EXACT
    )


def test_scaffold_round_one_is_uniform_fedavg():
    common = {"learning_rate": 0.1, "local_epochs": 5, "sizes": (1, 4)}
    scaffold = one_round("SCAFFOLD", **common)
    assert scaffold == pytest.approx(one_round("FedAvg", weighting="uniform", **common), **EXACT)
    assert abs(scaffold - one_round("FedAvg", **common)) > 1e-3


@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_with_one_step_is_large_batch_sgd(option):
    """K = 1, everybody: the corrections cancel in the mean, x <- x - eta mean g(x), every round."""
    x = 0.3
    for _ in range(4):
        x -= 0.1 * (A * (x - B)).mean()
    options = {"learning_rate": 0.1, "local_epochs": 1, "scaffold_option": option}
    found = after(quadratics("SCAFFOLD", num_global_iters=4, **options))
    assert found == pytest.approx(x, **EXACT)


def test_scaffold_refuses_momentum():
    with pytest.raises(InputError, match=r"--momentum 0.9: SCAFFOLD"):
        quadratics("SCAFFOLD", momentum=0.9)


# ---- users who train alone, and fine-tuning


def test_local_values():
    """own_i = b_i + (1 - eta a_i)^(R T) (w_0 - b_i); nobody moves the global model."""
    server = quadratics("Local", learning_rate=0.1, local_epochs=5, num_global_iters=3)
    assert after(server) == 0.3
    expected = [b + (1 - 0.1 * a) ** 15 * (0.3 - b) for a, b in ((1, 0), (3, 1))]
    assert flat(server.bank["alone"]).tolist() == pytest.approx(expected, **EXACT)
    assert not server.work[0, WORK.index("bytes_down") :].any()


def test_finetuned_values():
    """n steps of each user from the global model: its loss a/2 ((1 - eta a)^n (w - b))^2."""
    common = {"learning_rate": 0.1, "local_epochs": 5, "num_global_iters": 2, "eval_every": 1}
    server, diary = watched(quadratics("FedAvg", finetune_steps=3, **common))
    plain, silent = watched(quadratics("FedAvg", **common))
    assert torch.equal(flat(server.params), flat(plain.params))
    assert not silent.personal
    for t, w in enumerate((0.3, 0.529749)):
        expected = [a / 2 * ((1 - 0.1 * a) ** 3 * (w - b)) ** 2 for a, b in ((1, 0), (3, 1))]
        assert diary.personal[t]["finetuned"].loss["test"] == pytest.approx(expected, **EXACT)
        assert (diary.main[t].loss["test"] == silent.main[t].loss["test"]).all()


# ---- Per-FedAvg

PER = {"learning_rate": 0.1, "beta": 0.05}


@ENGINES
@pytest.mark.parametrize(
    ("hessian", "tau", "value"),
    [
        ("fo", 1, 0.7),
        ("exact", 1, 0.6447368421052633),
        ("fo", 10, 0.6449283634983993),
        ("exact", 10, 0.611916260846024),
        ("hf", 10, 0.611916260846024),
    ],
)
def test_perfedavg_limits(block_size, hessian, tau, value):
    found = limit("PerAvg", hessian=hessian, local_epochs=tau, block_size=block_size, **PER)
    assert found == pytest.approx(value, **EXACT)


@ENGINES
@pytest.mark.parametrize(
    ("hessian", "value"), [("fo", (0.2865, 0.3735)), ("exact", (0.28785, 0.35145))]
)
def test_perfedavg_single_step(block_size, hessian, value):
    """w~ = .3 - .1 a (.3 - b); v = a (w~ - b); w = .3 - .05 (1 - .1 a) v (exact) or .05 v (fo)."""
    options = {"hessian": hessian, "local_epochs": 1, "block_size": block_size}
    server = quadratics("PerAvg", **PER, **options)
    found = local_models(server)
    assert found == pytest.approx(value, **EXACT)
    adapted = [
        u.personalized()["adapted"][0].flatten().tolist() for u in server._blocks(server.everyone)
    ]
    assert list(chain(*adapted)) == pytest.approx([0.27, 0.51], **EXACT)


def test_perfedavg_beta_zero_changes_nothing():
    server = quadratics("PerAvg", learning_rate=0.1, beta=0.0, local_epochs=3, num_global_iters=2)
    assert after(server) == 0.3


def test_perfedavg_alpha_zero_is_fedavg_with_step_beta():
    found = one_round("PerAvg", learning_rate=0.0, beta=0.05, local_epochs=4)
    plain = one_round("FedAvg", learning_rate=0.05, local_epochs=4)
    assert found == pytest.approx(plain, **EXACT)


@pytest.mark.parametrize("delta", [1e-3, 0.5, 10.0])
def test_hf_is_exact_on_quadratics_for_any_delta(delta):
    options = {"local_epochs": 3, **PER}
    hf = one_round("PerAvg", hessian="hf", hf_delta=delta, **options)
    assert hf == pytest.approx(one_round("PerAvg", hessian="exact", **options), **EXACT)


def test_hf_error_is_second_order_in_delta_on_smooth_losses():
    options = {"local_epochs": 1, "model": Quartic, **PER}
    exact = one_round("PerAvg", hessian="exact", **options)
    e1, e2 = (
        abs(one_round("PerAvg", hessian="hf", hf_delta=d, **options) - exact) for d in (0.2, 0.1)
    )
    assert e1 / e2 == pytest.approx(4, rel=1e-3)


def test_two_step_update_is_two_plain_steps():
    """w1 = w - alpha a (w - b); w2 = w1 - beta a (w1 - b)."""
    w1 = 0.3 - 0.1 * A * (0.3 - B)
    w2 = w1 - 0.05 * A * (w1 - B)
    found = one_round("PerAvg", peravg_update="two_step", local_epochs=1, **PER)
    assert found == pytest.approx(w2.mean(), **EXACT)


@pytest.mark.parametrize(
    ("adapt", "steps"),
    [("train", [0.1]), ("test_test", [0.1, 0.05]), ("test_train", [0.1, 0.05])],
)
def test_adaptation_steps(adapt, steps):
    w = np.full(2, 0.3)
    for step in steps:
        w = w - step * A * (w - B)
    server = quadratics("PerAvg", adapt=adapt, **PER)
    (user,) = list(server._blocks(np.array([1])))
    assert user.personalized()["adapted"][0].item() == pytest.approx(w[1], **EXACT)


# ---- pFedMe

ME = {"lamda": 2.0, "learning_rate": 0.05, "personal_learning_rate": 0.1, "K": 5, "beta": 1.0}


@ENGINES
@pytest.mark.parametrize(
    ("R", "options", "value"),
    [
        (1, {}, 0.6770056839358902),
        (20, {}, 0.6187224460657306),
        (20, {"theta_start": "warm"}, 0.5941010312488805),
        (20, {"theta_start": "warm", "inner_weight_decay": 0.001}, 0.5938010099278913),
    ],
)
def test_pfedme_limits(block_size, R, options, value):
    found = limit("pFedMe", local_epochs=R, block_size=block_size, **ME, **options)
    assert found == pytest.approx(value, **EXACT)


@ENGINES
def test_pfedme_exact_prox(block_size):
    """K large solves the prox: theta_i = (a b + lambda w) / (a + lambda).

    w = np.full(2, .3); for _ in range(20): th = (a * b + 2 * w) / (a + 2); w = w - .1 * (w - th)
    """
    options = ME | {"K": 80, "local_epochs": 20, "block_size": block_size}
    server = quadratics("pFedMe", **options)
    found = local_models(server)
    assert found == pytest.approx((0.15228464607706882, 0.7969256312079768), **EXACT)
    theta = server.bank["theta"][0][:, 0].tolist()
    assert theta == pytest.approx((0.10502389384625437, 0.9135853749821177), **EXACT)


def test_pfedme_beta():
    """beta 0 freezes the server, beta 2 gives 2 avg - w, nothing is clamped."""
    values = {}
    for beta in (0.0, 1.0, 2.0, 4.0):
        values[beta] = one_round("pFedMe", local_epochs=3, **ME | {"beta": beta})
    assert values[0.0] == 0.3
    assert values[2.0] == pytest.approx(2 * values[1.0] - 0.3, **EXACT)
    assert values[4.0] == pytest.approx(4 * values[1.0] - 3 * 0.3, **EXACT)


def test_pfedme_with_one_full_inner_step_is_fedavg():
    """K = 1, plr = 1/lambda, cold: theta = w - g/lambda, so w <- w - eta g."""
    options = {"K": 1, "lamda": 4.0, "personal_learning_rate": 0.25, "learning_rate": 0.05}
    found = one_round("pFedMe", local_epochs=6, beta=1.0, **options)
    plain = one_round("FedAvg", local_epochs=6, learning_rate=0.05)
    assert found == pytest.approx(plain, **EXACT)


def test_pfedme_fractional_lambda():
    low, mid, high = (limit("pFedMe", local_epochs=2, **ME | {"lamda": v}) for v in (2, 2.5, 3))
    assert low != mid != high


def test_logged_loss_is_the_task_loss_without_penalty():
    """The recorded train loss of w_t: mean of a/2 (w - b)^2, for algorithms with a penalty too."""
    for algorithm in ("FedProx", "FedNova", "pFedMe"):
        server, diary = watched(
            quadratics(algorithm, mu=5.0, lamda=5.0, num_global_iters=1, eval_every=1)
        )
        for t, w in ((0, 0.3), (1, server.model.w.item())):
            expected = (A / 2 * (w - B) ** 2).mean()
            assert diary.main[t].mean_loss("train") == pytest.approx(expected, **EXACT), algorithm


def test_pfedme_theta_has_storage_of_its_own():
    server = quadratics("pFedMe", local_epochs=2, num_global_iters=1, **ME)
    server.run()
    (user,) = server._users.values()
    places = {p.data_ptr() for p in user.params}
    assert not places & {t.data_ptr() for t in user.theta}
    theta = server.bank["theta"][0].clone()
    assert not torch.equal(theta[1], user.params[0])
    with torch.no_grad():
        user.params[0].fill_(7.0)
    assert torch.equal(server.bank["theta"][0], theta)
