"""What authors of new algorithms rely on: helpers for blocks, and what tells them of mistakes."""

import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import main
from FLAlgorithms.optimizers.fedoptimizer import LocalSGD
from FLAlgorithms.servers import ALGORITHMS
from FLAlgorithms.servers.serveravg import FedAvg
from FLAlgorithms.servers.serverbase import Diverged, Refused
from FLAlgorithms.servers.serverpFedMe import pFedMe
from FLAlgorithms.users.useravg import UserAVG
from FLAlgorithms.users.userbase import User
from tests.test_engine import ALL, assert_repetitions_alone, assert_same, run
from tests.toys import blobs, federation, flat, run_main, suite_with, together
from utils.config import Config
from utils.errors import InputError
from utils.params import add_, assign_, clip_, clone, norm

EXAMPLES = Path(__file__).parent / "examples"


@pytest.fixture
def register(monkeypatch):
    """Make an algorithm of a User class: FedAvg's server, unless told otherwise."""

    def add(user_class: type[User], server: type = FedAvg, **attributes: object) -> str:
        name = user_class.__name__
        cls = type(name, (server,), {"user_class": user_class, **attributes})
        monkeypatch.setitem(ALGORITHMS, name, cls)
        return name

    return add


def assert_blocks_equal_the_reference(algorithm, model="dnn", **options):
    reference = run(algorithm, model, 0, **options)
    for block_size in (1, 3, ALL):
        assert_same(reference, run(algorithm, model, block_size, **options))
    lockstep = together(algorithm, model, (0, 2), block_size=3, **options)
    assert_repetitions_alone(algorithm, model, lockstep, **options)


class Steps(UserAVG):
    """FedAvg's user with a hook before each step."""

    def train(self) -> None:
        sgd = LocalSGD(self.params, self.config.learning_rate)
        for batch in self.local_steps():
            self.backward(batch)
            self.change()
            sgd.step(self.active)


class Clipped(Steps):
    def change(self) -> None:
        self.clip_gradients(0.5)


class ClippedTogether(Steps):
    def change(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, 0.5)


class Noisy(Steps):
    def change(self) -> None:
        add_([p.grad for p in self.params], self.noise(), 0.1)


# ---- per-user helpers


@pytest.mark.parametrize("block", [(), (3,), (2, 3)])
def test_norm_and_clipping_are_each_users_own(block):
    rng = torch.Generator().manual_seed(0)
    shapes = ((4, 2), (4,))
    params = [torch.randn(*block, *s, generator=rng, dtype=torch.float64) for s in shapes]
    before = clone(params)
    if block:
        params[0][..., 0, :, :], params[1][..., 0, :] = 0, 0  # nothing to clip, and no 0 / 0
        before = clone(params)
    lengths = norm(params, block)
    assert lengths.shape == block
    limit = float(lengths.max()) * 0.9
    clip_(params, limit, block)
    for place in np.ndindex(*block):
        mine = [p[place] for p in before]
        length = flat(mine).norm()
        torch.testing.assert_close(lengths[place], length, rtol=1e-14, atol=0)
        factor = min(1.0, limit / float(length)) if length else 1.0
        expected = [p * factor for p in mine]
        for p, e in zip(params, expected, strict=True):
            torch.testing.assert_close(p[place], e, rtol=1e-14, atol=0)


@pytest.mark.parametrize("model", ["mclr", "dnn", "cnn"])
def test_clipped_gradients_are_the_same_in_blocks(register, model):
    algorithm = register(Clipped)
    assert_blocks_equal_the_reference(algorithm, model, num_global_iters=1)
    moved = [run(a, model, 0, num_global_iters=1)[0] for a in (algorithm, "FedAvg")]
    assert not torch.equal(*(flat(server.params) for server in moved))


def test_the_engine_tests_say_that_torchs_own_clipping_mixes_users(register):
    with pytest.raises(AssertionError):
        assert_blocks_equal_the_reference(register(ClippedTogether))


def test_gradients_that_are_not_there_are_not_clipped(register):
    class Inside(UserAVG):
        def train(self) -> None:
            self.clip_gradients(1.0)

    with pytest.raises(TypeError, match=r"Inside: clip_gradients\(\) needs all gradients"):
        federation(register(Inside)).run()


@pytest.mark.parametrize("model", ["dnn", "cnn"])
def test_noise_is_the_same_in_blocks(register, model):
    algorithm = register(Noisy)
    assert_blocks_equal_the_reference(algorithm, model, num_global_iters=2)
    usual, seed = (flat(run(algorithm, model, 0, seed=s)[0].params) for s in (5, 6))
    assert not torch.equal(usual, seed)


def test_noise_is_standard_normal_and_fresh(register):
    drawn = []

    class Drawing(Steps):
        def change(self) -> None:
            noise = self.noise()
            assert [n.shape for n in noise] == [p.shape for p in self.params]
            drawn.append(flat(noise))

    run(register(Drawing), "dnn", 3)
    values = torch.cat(drawn)
    assert len(torch.unique(values)) == len(values)
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.02


def test_a_server_has_keyed_noise_too(register):
    def round(self) -> None:
        FedAvg.round(self)
        for _ in range(2):
            add_(self.params, self.noise(), 0.1)

    algorithm = register(UserAVG, round=round)
    assert_blocks_equal_the_reference(algorithm)
    noise = []
    server = federation(algorithm, num_global_iters=0)
    for number in (0, 0, 1):
        server.round_number = number
        noise.append(flat(server.noise()))
    assert len(torch.unique(torch.cat(noise))) == 3 * len(noise[0])


# ---- work


class ByHand(UserAVG):
    """FedAvg's user that takes its gradients past `backward`."""

    def train(self) -> None:
        for batch in self.local_steps():
            with torch.no_grad():
                self.losses(batch)  # looked at, not differentiated
            found = torch.autograd.grad(self.losses(batch).sum(), self.params)
            add_(self.params, found, -self.config.learning_rate * self.active)


class OneByOne(UserAVG):
    def train(self) -> None:
        sgd = LocalSGD(self.params, self.config.learning_rate)
        for batch in self.local_steps():
            self.gradients()
            self.losses(batch).sum().backward()
            sgd.step(self.active)


@pytest.mark.parametrize("user_class", [ByHand, OneByOne])
@pytest.mark.parametrize("model", ["mclr", "cnn"])
def test_gradients_count_whoever_takes_them(register, user_class, model):
    options = {"local_unit": "epochs", "local_epochs": 2}
    usual = run("FedAvg", model, 0, **options)
    for block_size in (0, 3):
        assert_same(usual, run(register(user_class), model, block_size, **options))


@pytest.mark.parametrize("block_size", [0, 3])
@pytest.mark.parametrize("model", ["mclr", "cnn"])
def test_both_second_order_terms_count_their_two_passes(model, block_size):
    """Two gradients a step, and two more: a difference, or a gradient differentiated again."""
    options = {"num_global_iters": 1, "local_epochs": 3, "numusers": 3, "learning_rate": 0.001}
    counts = {}
    for hessian in ("fo", "hf", "exact"):
        server = federation("PerAvg", model, block_size=block_size, hessian=hessian, **options)
        server.run()
        counts[hessian] = int(server.work[0, 3])
    assert counts == {"fo": 3 * 3 * 2, "hf": 3 * 3 * 4, "exact": 3 * 3 * 4}


def test_gradients_of_an_evaluation_are_no_work(register):
    class Tuned(UserAVG):
        personal = ("finetuned",)

    algorithm = register(Tuned, personal_at="trained")
    work = []
    for every in (0, 1):
        server = federation(algorithm, eval_every=every, finetune_steps=4)
        server.run()
        work.append(server.work.tolist())
    assert work[0] == work[1]


@pytest.mark.parametrize("block_size", [0, 3])
def test_backward_takes_gradients_within_no_grad(register, block_size):
    class Careful(UserAVG):
        @torch.no_grad()
        def train(self) -> None:
            super().train()
            self.full_gradient()

    for model in ("dnn", "cnn"):
        usual = run("FedAvg", model, block_size)
        assert_same(usual, run(register(Careful), model, block_size))


# ---- minibatches of a second call


def received(server, ids=(1, 2, 4)):
    server.sample()
    (user,) = server._blocks(np.array(ids)) if server.block_size else []
    return user


@pytest.mark.parametrize("batches", ["shuffled", "cyclic"])
def test_a_second_call_draws_fresh_minibatches(batches):
    user = received(federation("FedAvg", batches=batches, block_size=ALL, batch_size=2), (2, 3, 6))
    first, second = ([b.x.clone() for b in user.local_steps()] for _ in range(2))
    assert len(first) == len(second) == 3
    assert not torch.equal(torch.cat(first), torch.cat(second))
    assert user.num_steps.tolist() == [6, 6, 6]
    assert user.samples.tolist() == [12, 12, 12]
    assert user.active == 1.0
    again = received(federation("FedAvg", batches=batches, block_size=ALL, batch_size=2), (2, 3, 6))
    plan = again.planner.local(again.ids, 0, 1)
    for step, x in enumerate(first):
        assert torch.equal(plan.batch(again.planner.data, step, 0).x, x)


def test_second_calls_of_the_other_steps_are_fresh_too():
    data = blobs(train=(20,) * 3)
    user = received(federation("PerAvg", data=data, block_size=3), (0, 1, 2))
    draws = [
        *(torch.cat([b.x.clone() for b in user.adaptation_steps("train")]) for _ in range(2)),
        *(torch.cat([b.x.clone() for b in user.finetuning_steps(1)]) for _ in range(2)),
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


def test_dropout_masks_of_a_second_call_are_fresh():
    user = received(federation("FedAvg", "cnn", block_size=ALL, batch_size=50), (2, 3, 6))
    first, second = ([b.masks[0].clone() for b in user.local_steps()] for _ in range(2))
    assert all(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_work_adds_up_over_calls(register):
    class Twice(UserAVG):
        def train(self) -> None:
            super().train()
            super().train()

    algorithm = register(Twice)
    options = {"local_unit": "epochs", "local_epochs": 1}
    assert_blocks_equal_the_reference(algorithm, **options)
    once, twice = (run(a, "dnn", 3, **options)[0].work[0].tolist() for a in ("FedAvg", algorithm))
    assert twice == [2 * n if i in (2, 3) else n for i, n in enumerate(once)]


# ---- randomness without a key


@pytest.mark.parametrize(
    ("library", "draw"),
    [
        ("torch", lambda: torch.randn(3)),
        ("numpy", lambda: np.random.normal()),
        ("random", random.random),
    ],
)
@pytest.mark.parametrize("block_size", [0, 3])
def test_the_libraries_own_generators_are_refused(register, library, draw, block_size):
    class Drawing(Steps):
        def change(self) -> None:
            draw()

    name = register(Drawing)
    told = rf"{name}: Drawing or Drawing draws from {library}'s global .*; use self\.noise\(\)$"
    with pytest.raises(Refused, match=told):
        federation(name, block_size=block_size).run()


def test_drawing_is_told_in_one_line(register, leaf, capsys):
    class Drawing(UserAVG):
        def train(self) -> None:
            add_(self.params, [torch.randn_like(p) for p in self.params], 0.1)
            super().train()

    code, out = run_main(leaf, "--algorithm", register(Drawing))
    error = capsys.readouterr().err
    assert code == 2
    assert error.splitlines()[-1].startswith("main.py: error: --algorithm Drawing: ")
    assert "interrupted" not in error
    assert list(out.glob("*")) == []


# ---- options of an algorithm's own


@pytest.fixture(scope="module")
def ditto(tmp_path_factory) -> Path:
    """main.py of a suite that has Ditto, too."""
    files = {
        f"FLAlgorithms/{folder}/{name}": (EXAMPLES / name).read_text()
        for folder, name in (("users", "userditto.py"), ("servers", "serverditto.py"))
    }
    return suite_with(tmp_path_factory.mktemp("ditto"), files)


def call(script: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=script.parent, capture_output=True, text=True, check=False)


def test_a_second_algorithm_is_found_by_the_engine_tests(ditto):
    """Ditto on both engines, by the line that the README gives."""
    done = call(
        ditto,
        "-m",
        "pytest",
        "tests/test_engine.py",
        "-q",
        "-k",
        "Ditto and not cnn and not authors",
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert " passed" in done.stdout


def test_an_option_of_its_own_is_like_any_other(ditto, leaf, tmp_path):
    base = ["--dataset", "Synthetic", "--split", str(leaf), "--gpu", "-1", "--numusers", "2"]
    base += ["--num_global_iters", "2", "--local_epochs", "2", "--results_dir", str(tmp_path / "r")]
    yaml = tmp_path / "job.yaml"
    yaml.write_text("ditto_lamda: 0.5\nalgorithm: Ditto\n")
    done = call(ditto, "main.py", *base, "--config", str(yaml))
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "r").glob("Synthetic_mclr_Ditto_0.01_*_0.h5")
    with h5py.File(path) as file:
        config = json.loads(file.attrs["config"])
        assert "ditto_lamda" in json.loads(file.attrs["options"])
    assert (config["ditto_lamda"], config["learning_rate"]) == (0.5, 0.01)
    wrong = [
        (["--algorithm", "FedAvg", "--ditto_lamda", "1"], "FedAvg does not read --ditto_lamda"),
        (["--algorithm", "Ditto", "--ditto_lamda", "-1"], "--ditto_lamda '-1': not a number >= 0"),
        (["--algorithm", "Ditto", "--ditto_lambda", "1"], "did you mean --ditto_lamda?"),
        (["--algorithm", "Ditto", "--ditto_lamda", "1e30"], "the personalised model v of user"),
        (["--algorithm", "Ditto", "--ditto_lamda", "1e30"], "look at --ditto_lamda (now 1e+30)"),
    ]
    commands = [["--verify", str(path), "--gpu", "-1"], *([*base, *words] for words, _ in wrong)]
    done = call(ditto, "-c", SEVERAL, json.dumps([*commands, ["--help"]]))
    assert f"{path}: every array is bitwise the same\ncode 0\n" in done.stdout
    codes = [line for line in done.stdout.splitlines() if line.startswith("code")]
    assert codes == [f"code {code}" for code in (0, 0, 2, 2, 1, 1)]
    assert all(told in done.stderr for _, told in wrong)
    assert "read by Ditto:" in done.stdout
    assert "(default: 0.005; Ditto: 0.01)" in " ".join(done.stdout.split())


SEVERAL = """
import json, sys, main
for words in json.loads(sys.argv[1]):
    print("code", main.main(words))
"""


NAMES = """
from tests.test_results import name
print(name(algorithm="Ditto"), name(True, algorithm="Ditto"))
print(name(algorithm="Ditto", ditto_lamda=0.5))
print(name(algorithm="Ditto", learning_rate=0.005), name(algorithm="FedAvg"), name())
print(name(algorithm="FedAvg", ditto_lamda=0.5), name(algorithm="FedProx", mu=0.5))
"""


def test_names_with_an_option_of_its_own(ditto):
    done = call(ditto, "-c", NAMES)
    assert done.returncode == 0, done.stderr
    own, with_option, rest, unread = (line.split() for line in done.stdout.splitlines())
    assert own == ["Mnist_mclr_Ditto_0.01_1_15_5u_20b_20", "Mnist_mclr_Ditto_p_0.01_1_15_5u_20b_20"]
    assert with_option[0].startswith(f"{own[0]}_")
    assert rest == [
        "Mnist_mclr_Ditto_0.005_1_15_5u_20b_20",
        "Mnist_mclr_FedAvg_0.005_1_15_5u_20b_20",
        "Mnist_mclr_pFedMe_0.005_1_15_5u_20b_20_5_0.1",
    ]
    assert unread == [
        "Mnist_mclr_FedAvg_0.005_1_15_5u_20b_20",
        "Mnist_mclr_FedProx_0.005_1_15_5u_20b_20_273c41f8",
    ]


def test_own_defaults_hold_unless_the_option_is_given(register):
    algorithm = register(UserAVG, defaults={"momentum": 0.9, "weighting": "uniform"})
    config = Config(algorithm=algorithm).resolved()
    assert (config.momentum, config.weighting) == (0.9, "uniform")
    given = Config(algorithm=algorithm, momentum=0.0, weighting="samples").resolved()
    assert (given.momentum, given.weighting) == (0.0, "samples")
    assert (config.common().momentum, config.common().weighting) == (0.0, "samples")


@pytest.mark.parametrize(
    ("defaults", "told"),
    [
        ({"momentum": 2.0}, "Config: momentum 2.0: not a number"),
        ({"moment": 0.5}, "Config: moment: unknown option; did you mean momentum"),
    ],
)
def test_own_defaults_are_checked(register, defaults, told):
    with pytest.raises(InputError, match=told):
        Config(algorithm=register(UserAVG, defaults=defaults))


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ({"algorithm": "pFedMe"}, "pFedMe_0.005_1_15_5u_20b_20_5_0.1"),
        (
            {"algorithm": "pFedMe", "theta_start": "warm"},
            "pFedMe_0.005_1_15_5u_20b_20_5_0.1_a118a98f",
        ),
        (
            {"algorithm": "PerAvg", "semantics": "authors2020"},
            "PerAvg_0.005_1_15_5u_20b_20_ae7ef4a9",
        ),
        ({"algorithm": "PerAvg", "hessian": "exact"}, "PerAvg_0.005_1_15_5u_20b_20_39bc0edb"),
        ({"algorithm": "FedAvg", "momentum": 0.5}, "FedAvg_0.005_1_15_5u_20b_20_92774424"),
        ({"algorithm": "FedNova", "server_momentum": 0.5}, "FedNova_0.005_1_15_5u_20b_20_8c6a0918"),
        (
            {"algorithm": "FedNova", "local_epochs_range": (1, 2)},
            "FedNova_0.005_1_15_5u_20b_20_bc20327e",
        ),
        ({"algorithm": "SCAFFOLD", "scaffold_option": 1}, "SCAFFOLD_0.005_1_15_5u_20b_20_e35768ee"),
        ({"algorithm": "Local", "seed": 6}, "Local_0.005_1_15_5u_20b_20_a99b6943"),
    ],
)
def test_names_of_known_configurations(options, ending):
    from tests.test_results import name

    assert name(**options) == f"Mnist_mclr_{ending}"


# ---- personalised models that are not finite


class Apart(UserAVG):
    """FedAvg's user beside which a model of its own goes on from where it was."""

    state = {"v": "model"}
    personal = ("v",)

    def train(self) -> None:
        super().train()
        add_(self.v, self.params, 0.1)

    def personalized(self):
        return {"v": self.v}


APART = {"finetune_steps": 1, "numusers": ALL, "num_global_iters": 3}


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("block_size", [0, 3])
def test_a_personalised_model_that_is_not_finite_has_diverged(register, every, block_size):
    """The global one is; also where nothing is evaluated, in the last round, too."""
    algorithm = register(Apart, personal_at="trained", step_options=("momentum",))
    options = APART | {"momentum": 0.5, "eval_every": every, "block_size": block_size}
    told = "model v of user 2 is not finite; look at --momentum (now 0.5)"
    for round_number in (0, 2):
        server = federation(algorithm, **options)
        server.run_rounds(round_number)
        for v in server.bank["v"]:
            v[2] = torch.nan
        with pytest.raises(Diverged) as stop:
            server.run()
        assert str(stop.value) == f"diverged in round {round_number}: the personalised {told}"
        assert torch.isfinite(flat(server.params)).all()


def test_a_personalised_loss_that_is_not_finite_has_diverged():
    """theta is finite, what its layers make of the data is not."""
    steps = {"learning_rate": 0.0, "personal_learning_rate": 1e200, "K": 1}
    told = r"round 0: .* model theta's train loss of user \d is not finite; .*--personal_learning_r"
    with pytest.raises(Diverged, match=told):
        federation("pFedMe", "dnn", block_size=3, **steps).run()


def test_a_personalised_model_of_no_state_is_judged_where_it_is_evaluated():
    lost = {"finetune_steps": 3, "num_global_iters": 1, "local_epochs": 1}

    def server(**options):
        server = federation("FedAvg", "dnn", **lost, **options)
        tune = server.user_class.personalized

        class Lost(server.user_class):
            def personalized(self):
                found = tune(self)
                assign_(found["finetuned"], [p * float("nan") for p in self.params])
                return found

        server.user_class = Lost
        return server

    told = "personalised model finetuned's train loss of user 0 is not finite; .*--learning_rate"
    with pytest.raises(Diverged, match=told):
        server().run()
    server(eval_every=0).run()  # nobody has seen it
    with pytest.raises(Diverged, match="the personalised model finetuned of user 0 is not finite"):
        server(eval_every=0, save_models=True).run()


def test_a_lost_test_loss_is_told_of_the_model_beside_the_primary_one(monkeypatch):
    server = federation("pFedMe", num_global_iters=1)
    sums = server.evaluator.sums

    def with_hole(models, part, users=slice(None)):
        found = sums(models, part, users)
        if part == "test" and users.start == 4:
            found[:, 1, 1] = torch.inf  # of theta, local and w_t
        return found

    monkeypatch.setattr(server.evaluator, "sums", with_hole)
    with pytest.raises(Diverged, match="model local's test loss of user 4 is not finite"):
        server.run()


def test_only_the_repetition_whose_personalised_model_is_lost_ends(register):
    algorithm = register(Apart, personal_at="trained")
    lockstep = together(algorithm, "dnn", block_size=3, **APART)
    for v in lockstep.bank["v"]:
        v[1, 2] = torch.nan
    lockstep.run()
    assert list(lockstep.failed) == [1]
    assert "the personalised model v of user 2 is not finite" in lockstep.failed[1]
    assert [len(observer.main) for observer in lockstep.observers] == [4, 0, 4]


def test_a_global_loss_that_is_not_finite_is_told_where_somebody_listens():
    """The parameters are finite, their product with the data is not."""
    lockstep = together("FedAvg", block_size=3, num_global_iters=1)
    lockstep.data.x[:] = 1e200
    for p in lockstep.params:
        p[:] = 1e200
    with pytest.raises(Diverged, match="the global model's train loss of user 0 is not finite"):
        lockstep.run()


def test_a_lost_personalised_model_is_exit_code_1(leaf, capsys):
    words = ["--learning_rate", "0", "--personal_learning_rate", "1e30", "--K", "1"]
    code, out = run_main(leaf, *words, "--model", "dnn", "--eval_every", "5")
    assert code == 1
    error = capsys.readouterr().err
    assert "diverged in round 0: the personalised model theta's train loss of user" in error
    assert "--personal_learning_rate (now 1e+30)" in error
    for path in out.glob("*.h5"):
        with h5py.File(path) as file:
            assert file.attrs["status"] == "diverged"


# ---- Config from Python


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": -3}, "Config: batch_size -3: not a whole number >= 1"),
        ({"batch_size": "20"}, "Config: batch_size '20': not a whole number >= 1"),
        ({"batch_size": 5.0}, "Config: batch_size 5.0: not a whole number"),
        ({"batch_size": True}, "Config: batch_size True: not a whole number"),
        ({"dataset": "mnist"}, "Config: dataset 'mnist': not one of .*; did you mean Mnist"),
        ({"learning_rate": float("nan")}, "Config: learning_rate nan: not a number >= 0"),
        ({"learning_rate": "0.1"}, "Config: learning_rate '0.1': not a number >= 0"),
        ({"learning_rate": None}, "Config: learning_rate None: not a number >= 0"),
        ({"learning_rate": 10**400}, "Config: learning_rate 1000*: not a number >= 0"),
        ({"save_models": 1}, "Config: save_models 1: not true or false"),
        ({"save_models": "true"}, "Config: save_models 'true': not true or false"),
        ({"scaffold_option": "1"}, "Config: scaffold_option '1': not one of 1, 2"),
        ({"local_epochs_range": (5, 2)}, r"Config: local_epochs_range \(5, 2\): not two whole"),
        ({"local_epochs_range": [2, 5]}, r"Config: local_epochs_range \[2, 5\]: not two whole"),
        ({"block_size": "20"}, "Config: block_size '20': not auto or a whole number"),
        ({"algorithm": "fedavg"}, "Config: algorithm 'fedavg': not one of .*did you mean FedAvg"),
        ({"log_file": 3}, "Config: log_file 3: not a name or path"),
        ({"learning_rat": 0.1}, "Config: learning_rat: unknown option; did you mean learning_rate"),
    ],
)
def test_python_is_refused_what_the_command_line_is(options, told):
    with pytest.raises(InputError, match=told) as error:
        Config(**options)
    assert "\n" not in str(error.value)


def test_what_python_may_say():
    config = Config(
        **{"lamda": 3, "numusers": np.int64(7), "learning_rate": np.float64(0.1), "beta": 0.5},
        **{"results_dir": Path("r"), "block_size": 20, "local_epochs_range": (2, 5)},
        **{"data_dir": "relative", "log_file": None, "tf32": True},
    )
    found = (config.lamda, config.numusers, config.learning_rate, config.results_dir)
    assert found == (3.0, 7, 0.1, "r")
    assert [type(v) for v in found] == [float, int, float, str]
    assert config.data_dir == str(Path("relative").resolve())
    assert (config.block_size, config.local_epochs_range, config.tf32) == (20, (2, 5), True)
    assert Config(algorithm="pFedMe") == Config()
    assert pFedMe.defaults == {}


def test_a_job_runs_in_a_thread_beside_the_main_one(leaf):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run_main(leaf, "--times", "2")[0]))
    thread.start()
    thread.join()
    assert codes == [0]


@pytest.mark.slow  # three processes that import torch; the thread itself is tested above
def test_processes_are_started_from_a_thread(leaf, tmp_path):
    """Also the import of main.py."""
    words = ["--dataset", "Synthetic", "--split", str(leaf), "--num_global_iters", "1"]
    words += ["--local_epochs", "1", "--numusers", "2", "--gpu", "-1", "--times", "2"]
    words += ["--results_dir", str(tmp_path / "r"), "--jobs", "2"]
    text = f"""
import threading

codes = []


def job():
    import main

    codes.append(main.main({words}))


if __name__ == "__main__":
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    raise SystemExit(codes[0])
"""
    (tmp_path / "job.py").write_text(text)
    env = {"PYTHONPATH": str(Path(main.__file__).parent)}
    command = [sys.executable, str(tmp_path / "job.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(list((tmp_path / "r").glob("*_[01].h5"))) == 4
