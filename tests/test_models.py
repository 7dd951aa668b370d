"""The models: sizes, initial values, one step on every kind of data, models from a file."""

import hashlib
import itertools
import json
import re
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import main
from FLAlgorithms.trainmodel.classifier import batch_norms
from FLAlgorithms.trainmodel.custom import pinned
from FLAlgorithms.trainmodel.models import ALIASES, MODELS, build_model, usual_norm
from tests.test_engine import assert_same, run
from tests.toys import blobs, flat, run_main
from utils.config import Config, parse_value
from utils.errors import InputError
from utils.jobs import prepare
from utils.model_utils import Source
from utils.partition import Split

MNIST, CIFAR, PLAIN = (1, 28, 28), (3, 32, 32), (60,)
# Known from the papers' and the usual implementations for images of this size, ten classes.
COUNTS = [
    ("lenet", MNIST, 61_706),
    ("alexcifar", CIFAR, 1_756_426),
    ("vgg11", CIFAR, 9_750_922),
    ("vgg13", CIFAR, 9_935_434),
    ("vgg16", CIFAR, 15_245_130),
    ("vgg19", CIFAR, 20_554_826),
    ("resnet18", CIFAR, 11_173_962),
    ("resnet34", CIFAR, 21_282_122),
    ("resnet50", CIFAR, 23_520_842),
    ("resnet101", CIFAR, 42_512_970),
    ("resnet152", CIFAR, 58_156_618),
]
# Their step takes seconds; vgg11 and resnet18 are made of the same parts.
LARGE = {f"vgg{n}{bn}" for n in (13, 16, 19) for bn in ("", "_bn")}
LARGE |= {f"resnet{n}" for n in (34, 50, 101, 152)}


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "shape", "expected"), COUNTS)
def test_parameter_counts(name, shape, expected):
    assert count(build_model(name, shape, 10, 0)) == expected


@pytest.mark.parametrize("depth", [11, 13, 16, 19])
def test_vgg_is_made_of_3x3_convolutions(depth):
    plain, normed = (build_model(f"vgg{depth}{bn}", CIFAR, 10, 0) for bn in ("", "_bn"))
    convolutions = [m for m in plain.modules() if isinstance(m, nn.Conv2d)]
    linear = [m for m in plain.modules() if isinstance(m, nn.Linear)]
    assert len(convolutions) + len(linear) == depth
    assert {(m.kernel_size, m.padding, m.stride) for m in convolutions} == {
        ((3, 3), (1, 1), (1, 1))
    }
    assert [(m.in_features, m.out_features) for m in linear] == [(512, 512), (512, 512), (512, 10)]
    assert len(batch_norms(normed)) == len(convolutions)
    assert count(normed) - count(plain) == 2 * sum(m.out_channels for m in convolutions)


def test_resnets_keep_the_size_of_small_images_in_their_stem():
    model = build_model("resnet18", MNIST, 7, 0)
    stem = model.maxpool(model.relu(model.bn1(model.conv1(torch.zeros(2, *MNIST)))))
    assert stem.shape == (2, 64, 28, 28)
    assert model.eval()(torch.zeros(2, *MNIST)).shape == (2, 7)


@pytest.mark.parametrize("seed", [0, 7])
def test_initial_models_are_those_of_the_plain_layers(seed):
    """mclr, dnn, cnn: bitwise what torch's layers, made in order, draw after manual_seed."""
    layers = {
        ("mclr", MNIST): lambda: [nn.Linear(784, 10)],
        ("dnn", MNIST): lambda: [nn.Linear(784, 100), nn.Linear(100, 10)],
        ("dnn", PLAIN): lambda: [nn.Linear(60, 20), nn.Linear(20, 10)],
        ("cnn", MNIST): lambda: [
            *[nn.Conv2d(1, 16, 2), nn.Conv2d(16, 32, 2)],
            *[nn.Linear(18432, 128), nn.Linear(128, 10)],
        ],
        ("cnn", CIFAR): lambda: [
            *[nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)],
            *[nn.Linear(400, 120), nn.Linear(120, 100), nn.Linear(100, 10)],
        ],
    }
    for (name, shape), make in layers.items():
        before = torch.get_rng_state()
        model = build_model(name, shape, 10, seed)
        assert torch.equal(before, torch.get_rng_state())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            plain = nn.ModuleList(make())
        assert torch.equal(flat(model.parameters()), flat(plain.parameters()))


def test_aliases_are_other_spellings_of_models():
    assert set(ALIASES.values()) == set(MODELS) - {"mclr", "dnn", "cnn"}
    assert {n.lower() for n in ALIASES} - set(MODELS) == {"cnn", "alexcifarnet"} - set(MODELS)
    assert (ALIASES["VGG16_bn"], ALIASES["ResNet18"], ALIASES["CNN"]) == (
        *("vgg16_bn", "resnet18"),
        "cnn3",
    )


@pytest.mark.parametrize("name", ["lenet", "cnn3", "alexcifar", "vgg11", "vgg11_bn", "resnet18"])
def test_norms(name):
    """Every convolution is followed by the kind that was asked for, or by default the name's."""
    kinds = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm}
    built = {norm: build_model(name, CIFAR, 10, 0, norm=norm) for norm in (*kinds, "none")}
    for norm, model in built.items():
        of_kind = {k: [m for m in model.modules() if isinstance(m, t)] for k, t in kinds.items()}
        convolutions = sum(isinstance(m, nn.Conv2d) for m in model.modules())
        for kind, layers in of_kind.items():
            assert len(layers) == (convolutions if kind == norm else 0)
        assert all(m.num_channels >= 2 * m.num_groups for m in of_kind["group"])
    usual = build_model(name, CIFAR, 10, 0)
    assert usual_norm(name) == ("batch" if name in ("vgg11_bn", "resnet18") else "none")
    assert count(usual) == count(built[usual_norm(name)])


def test_what_a_model_does_not_take_is_refused():
    for options, message in (
        ({"norm": "batch"}, "--norm batch: not for cnn, only for lenet, cnn3, "),
        ({"pretrained": True}, "--pretrained: not for cnn, only for resnet18, resnet34"),
    ):
        with pytest.raises(InputError, match=message):
            build_model("cnn", MNIST, 10, 0, **options)
    with pytest.raises(InputError, match="--pretrained: the weights of resnet18 need --norm batch"):
        build_model("resnet18", CIFAR, 10, 0, norm="group", pretrained=True)
    for name, smallest in (("lenet", 12), ("cnn3", 8), ("cnn", 16)):
        with pytest.raises(
            InputError, match=f"--model {name}: needs images of at least {smallest}"
        ):
            build_model(name, (3, smallest - 1, 40), 10, 0)
        assert build_model(name, (3, smallest, smallest), 10, 0)


def weights_of(name, monkeypatch):
    """torchvision's weights: made up here, the machine may be offline."""
    from torchvision import models

    torch.manual_seed(3)
    state = models.get_model(name).state_dict()
    monkeypatch.setattr(
        type(models.get_model_weights(name).DEFAULT), "get_state_dict", lambda self, **_: state
    )
    return state


def test_pretrained_fills_all_but_the_stem_and_the_last_layer(monkeypatch):
    state = weights_of("resnet18", monkeypatch)
    fresh = build_model("resnet18", CIFAR, 10, 0).state_dict()
    model = build_model("resnet18", CIFAR, 10, 0, pretrained=True).state_dict()
    for name, value in model.items():
        other = fresh if name.startswith(("conv1.", "fc.")) else state
        assert torch.equal(value, other[name])
    assert not torch.equal(model["layer1.0.conv1.weight"], fresh["layer1.0.conv1.weight"])


def test_pretrained_offline_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def unreachable(*_, **__):
        raise OSError("<urlopen error no network>")

    monkeypatch.setattr("torch.hub.urlopen", unreachable)
    with pytest.raises(InputError, match=r"--pretrained: no weights of resnet18 .*no network"):
        build_model("resnet18", CIFAR, 10, 0, pretrained=True)


def job(name, shape, sizes=(2, 2), **options):
    """A job with two rows of noise per user for training and one for testing."""
    rng = np.random.default_rng(0)
    edges = np.cumsum([0, *sizes])
    train = tuple(np.arange(a, b) for a, b in itertools.pairwise(edges))
    test = tuple(np.arange(1) + edges[-1] + i for i in range(len(sizes)))
    total = edges[-1] + len(sizes)
    x, y = rng.normal(size=(total, *shape)).astype(np.float32), rng.integers(0, 10, total)
    users = tuple(f"u{i}" for i in range(len(sizes)))
    options = {"numusers": len(sizes), "batch_size": 2, "local_epochs": 1} | options
    options = {"algorithm": "FedAvg", "num_global_iters": 1, "eval_every": 0, "gpu": -1} | options
    source = Source("noise", x, y, 10, edges[-1])
    return prepare(Config(model=name, **options), source, Split(users, train, test, {}, {}))


def trained_once(name, shape, **options):
    server = job(name, shape, **options).server(0)
    before, generator = flat(server.params).clone(), torch.get_rng_state()
    server.run()
    assert torch.isfinite(flat(server.params)).all()
    assert not torch.equal(flat(server.params), before)
    assert torch.equal(generator, torch.get_rng_state())
    return server


PAIRS = [
    pytest.param(name, shape, marks=[pytest.mark.slow] if name in LARGE and shape != PLAIN else [])
    for name in MODELS
    for shape in (MNIST, CIFAR, PLAIN)
]


@pytest.mark.parametrize(("name", "shape"), PAIRS)
def test_every_model_trains_one_step_on_every_shape_or_is_refused(name, shape):
    if shape == PLAIN and name not in ("mclr", "dnn"):
        with pytest.raises(InputError, match=f"--model {name}: needs images, the data has 60"):
            job(name, shape)
    else:
        trained_once(name, shape)


@pytest.mark.parametrize("name", ["lenet", "cnn3", "alexcifar"])
def test_new_models_on_both_engines(name):
    """Vmap over stacked parameters against one user at a time, a round of pFedMe."""
    data = blobs((2, 12, 12), train=(3, 5, 2))
    options = {"data": data, "num_global_iters": 1, "local_epochs": 2, "eval_every": 0}
    assert_same(run("pFedMe", name, 0, **options), run("pFedMe", name, 3, **options))


def test_dropout_of_vgg_is_keyed():
    """The same masks, whatever has been drawn from torch's generator; about half are zero."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        server = trained_once("vgg11", (1, 4, 4))
        (user,) = server._users.values()
        found.append((flat(server.params), user.dropouts[0].mask))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert 0.4 < (found[0][1] == 0).float().mean() < 0.6


# ---- models from a file

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(shape[0], classes)

    def forward(self, x):
        return self.layer(x)


class Wide(Net):
    pass
"""


def custom(folder, text=NET, name="net.py", kind="Net"):
    (folder / name).write_text(text)
    return f"{folder / name}:{kind}"


def test_a_model_from_a_file_trains_as_the_same_one_of_ours(leaf):
    """A plain module gets its loss from us; `mclr` differs in the layer's name alone."""
    code, out = run_main(leaf, "--algorithm", "FedAvg", "--model", custom(leaf))
    assert code == 0
    run_main(leaf, "--algorithm", "FedAvg", "--block_size", "0")
    (theirs,) = out.glob("Synthetic_Net_FedAvg_*_0.h5")
    (ours,) = out.glob("Synthetic_mclr_FedAvg_*_0.h5")
    with h5py.File(theirs) as a, h5py.File(ours) as b:
        assert np.array_equal(a["final"]["layer.weight"], b["final"]["fc1.weight"])
        assert np.array_equal(a["rs_train_loss"], b["rs_train_loss"])
    assert main.main(["--verify", str(theirs)]) == 0


def test_the_file_s_code_is_part_of_the_configuration(leaf):
    words = ["--algorithm", "FedAvg", "--model"]
    _, out = run_main(leaf, *words, custom(leaf))
    (first,) = out.glob("*_Net_*_0.h5")
    laid_out = NET.replace("(shape[0], classes)", "(\n            shape[0],\n classes,)")
    for same in (NET + "# a remark\n", NET.replace("\n\n", "\n\n\n"), laid_out):
        run_main(leaf, *words, custom(leaf, same))
        assert [*out.glob("*_Net_*_0.h5")] == [first], "remarks and layout"
    (leaf / "elsewhere").mkdir()
    run_main(leaf, *words, custom(leaf / "elsewhere"))
    assert [*out.glob("*_Net_*_0.h5")] == [first], "the same text in another folder"
    run_main(leaf, *words, custom(leaf, NET.replace("self.layer(x)", "2 * self.layer(x)")))
    assert len(list(out.glob("*_Net_*_0.h5"))) == 2, "other code"
    run_main(leaf, *words, custom(leaf, NET.replace("self.layer(x)", "0 * self.layer(x)")))
    assert len(list(out.glob("*_Net_*_0.h5"))) == 3, "another constant"
    run_main(leaf, *words, custom(leaf, kind="Wide"))
    assert len(list(out.glob("*_Wide_*_0.h5"))) == 1


def test_files_that_recorded_the_hash_of_the_bytes_are_still_run_again(leaf, capsys, monkeypatch):
    name = custom(leaf, text := NET + "# as it was then\n")
    old = f"{name}@{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    words = ["--algorithm", "FedAvg", "--model", old]
    _, out = run_main(leaf, *words)
    (path,) = out.glob("*_Net_*_0.h5")
    with h5py.File(path) as file:
        assert json.loads(file.attrs["config"])["model"] == old
    forget(monkeypatch)
    assert main.main(["--verify", str(path)]) == 0
    assert main.main(["--replay", str(path)]) == 0
    run_main(leaf, *words, "--resume")
    assert "finished and kept: 1 repetition" in capsys.readouterr().err
    custom(leaf, text + "# and a remark\n")
    forget(monkeypatch)
    assert main.main(["--verify", str(path)]) == 2
    assert re.search(r"net.py: has changed .hash \w{8}, recorded \w{8}", capsys.readouterr().err)


def test_the_hash_of_the_code_is_the_same_in_every_version(tmp_path):
    """Written down here, and so checked by whichever version runs the tests."""
    text = NET.replace("pass", "tags: tuple[str, ...] = (f'{1:>3}', b'a', None, 1.5)  # remark")
    assert pinned(custom(tmp_path, text)).endswith("net.py:Net@eef182aa")


def test_a_file_s_whole_path_is_recorded(leaf, tmp_path, monkeypatch):
    custom(leaf)
    monkeypatch.chdir(leaf)
    _, out = run_main(leaf, "--algorithm", "FedAvg", "--model", "net.py:Net")
    (path,) = out.glob("Synthetic_Net_*_0.h5")
    with h5py.File(path) as file:
        assert json.loads(file.attrs["config"])["model"].startswith(f"{leaf / 'net.py'}:Net@")
    monkeypatch.chdir(tmp_path)
    forget(monkeypatch)
    assert main.main(["--replay", str(path)]) == 0
    assert Config(model="net.py:Net").model == f"{tmp_path / 'net.py'}:Net"
    foreign = r"C:\work\net.py:Net@01234567"
    assert parse_value("model", foreign, "model") == Config(model=foreign).model == foreign


def forget(monkeypatch):
    """As in another process, which has not read the file yet."""
    for name in [n for n in sys.modules if n.startswith("net_")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_changed_file_is_not_taken_for_the_recorded_one(leaf, capsys, monkeypatch):
    _, out = run_main(leaf, "--algorithm", "FedAvg", "--model", custom(leaf))
    (first,) = out.glob("*_Net_*_0.h5")
    custom(leaf, NET.replace("self.layer(x)", "2 * self.layer(x)"))
    assert main.main(["--verify", str(first)]) == 0, "this process still has the recorded text"
    forget(monkeypatch)
    assert main.main(["--verify", str(first)]) == 2
    assert "net.py: has changed (hash" in capsys.readouterr().err


def test_drawing_a_custom_model(leaf, tmp_path, monkeypatch):
    import main_plot

    _, out = run_main(leaf, "--algorithm", "FedAvg", "--model", custom(leaf))
    monkeypatch.chdir(tmp_path)
    assert main_plot.main(["--results_dir", str(out), "--model", "Net"]) == 0
    assert (out / "leaf_Net.png").exists() or (tmp_path / "leaf_Net.png").exists()


def test_the_example_of_the_readme(tmp_path):
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n(# net\.py.*?)```", readme, re.DOTALL)
    trained_once(custom(tmp_path, text), MNIST)


FAULTS = [
    ("Nett", NET, "net.py: has no class Nett; there are Net, Wide"),
    ("torch", NET, "net.py: has no torch.nn.Module class torch; there are Net, Wide"),
    ("Net", "class Net: pass", "net.py: has no torch.nn.Module class Net"),
    ("Net", "def", "Net: SyntaxError when the file is read: invalid syntax"),
    ("Net", "1 / 0", "Net: ZeroDivisionError when the file is read: division by zero"),
    ("Net", "raise SystemExit(3)", "Net: SystemExit when the file is read: 3"),
    ("Net", NET.replace("shape, classes", "width"), "net.py: Net must take (shape, classes)"),
    ("Net", NET.replace("shape[0]", "shape[7]"), "Net: IndexError when it is built: tuple index"),
    ("Net", NET.replace("shape[0]", "9"), "Net: RuntimeError in its forward pass: mat1 and mat2"),
    ("Net", NET.replace("(x)", "(x).sum(1)"), "Net: gives (2,) for 2 samples, expected logits (2,"),
    ("Net", NET.replace("self.layer(x)", "None"), "Net: gives NoneType for 2 samples"),
    ("Net", NET.replace("self.layer(x)", "self.layer(x).detach()"), "in its backward pass"),
    ("Net", NET.replace("(x)", "(nn.functional.dropout(x))"), "Net: draws random numbers"),
    (
        "Net",
        NET.replace("classes)\n\n", "classes)\n        self.w = nn.Parameter(torch.ones(1))\n\n"),
        "Net: its parameter w gets no gradient",
    ),
    ("Net", NET.replace("self.layer = ", "layer = "), "Net: has no parameters"),
    (
        "Net",
        NET.replace("nn.Linear(shape[0], ", "nn.LazyLinear("),
        "Net: its parameter layer.weight has no size yet (lazy)",
    ),
    (
        "Net",
        NET.replace("classes)\n\n", "classes)\n        self.again = self.layer\n\n"),
        "Net: again and layer are one layer; make two, and tie their weights",
    ),
]


@pytest.mark.parametrize(("kind", "text", "message"), FAULTS)
def test_faults_of_a_file_are_told_in_one_line(kind, text, message, leaf, capsys):
    code, out = run_main(leaf, "--algorithm", "FedAvg", "--model", custom(leaf, text, kind=kind))
    said = capsys.readouterr().err
    assert code == 2
    assert message in said
    assert len(said.splitlines()) == 1
    assert not list(out.glob("*")) if out.exists() else True


def test_a_model_that_fails_later_keeps_what_was_measured(leaf, capsys):
    """Evaluated once, it raises in training."""
    text = NET.replace(
        "return", "assert not self.training or len(x) < 4, 'too long'\n        return"
    )
    code, out = run_main(leaf, "--algorithm", "FedAvg", "--model", custom(leaf, text))
    assert code == 2
    assert capsys.readouterr().err.endswith(
        "main.py: error: --model Net: AssertionError in its forward pass: too long\n"
    )
    (path,) = out.glob("*_Net_*_0.h5")
    with h5py.File(path) as file:
        assert file.attrs["status"] == "interrupted"
        assert len(file["rs_glob_acc"]) == 1


def test_a_missing_file_and_a_model_that_does_not_stack(leaf, capsys):
    assert run_main(leaf, "--algorithm", "FedAvg", "--model", "nosuch.py:Net")[0] == 2
    assert f"--model {Path('nosuch.py').resolve()}: No such file" in capsys.readouterr().err
    name = custom(leaf, NET.replace("self.layer(x)", "self.layer(x) * float(x.sum().item() > -1)"))
    assert run_main(leaf, "--algorithm", "FedAvg", "--model", name)[0] == 0
    capsys.readouterr()
    assert run_main(leaf, "--algorithm", "FedAvg", "--model", name, "--block_size", "2")[0] == 2
    assert "Net: its copies do not run side by side, use --block_size 0" in capsys.readouterr().err
