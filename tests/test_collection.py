"""The baseline collection's YAML files: what they mean here, and what is refused."""

import re
from pathlib import Path

import pytest
import yaml

import main
from FLAlgorithms.servers import ALGORITHMS
from utils.collection import KEYS, translate
from utils.config import notices
from utils.errors import InputError
from utils.grid import read_grid

FILE = Path(main.__file__).parent / "config" / "collection.yaml"
WHOLE = FILE.read_text(encoding="utf-8")


def translated(text: str) -> tuple[dict[str, str], list[str]]:
    """The options' texts and the notices."""
    told: list[str] = []
    sections = yaml.compose(text, Loader=yaml.BaseLoader).value
    found = translate(sections, "--config job.yaml", told.append)
    return {option: text for option, (text, _) in found.items()}, told


def test_the_example_is_translated_with_its_meaning():
    found, told = translated(WHOLE)
    assert found.pop("model") == "lenet"
    assert found == {
        **{"numusers": "100", "seed": "1", "dataset": "Mnist", "num_global_iters": "10"},
        "partition": "round_robin:users=100,labels_per_user=2,seed=1,pool=train,test=0",
        **{"results_dir": "results", "algorithm": "FedAvg", "learning_rate": "0.01"},
        **{"batch_size": "64", "local_epochs": "3", "momentum": "0.9"},
        **{"local_unit": "epochs", "test_set": "global"},
    }
    assert told == [
        "notice: --config job.yaml: num_worker has no effect; there is no loader to feed"
    ]


def test_minus_one_class_is_iid():
    found, _ = translated(WHOLE.replace("num_local_class: 2", "num_local_class: -1"))
    assert found["partition"] == "iid:users=100,seed=1,pool=train,test=0"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("MNIST", "Mnist"), ("CIFAR10", "Cifar10"), ("Cifar-10", "Cifar10"), ("x.npz", "x.npz")],
)
def test_names_of_data_sets(theirs, ours):
    assert translated(WHOLE.replace("MNIST", theirs))[0]["dataset"] == ours


def test_mu_is_a_client_s_key_too():
    assert translated(WHOLE + "  mu: 0.1\n")[0]["mu"] == "0.1"


@pytest.mark.parametrize("key", ["num_worker", "momentum", "res_root", "mu"])
def test_keys_that_may_be_missing(key):
    found, told = translated(re.sub(f" *{key}:.*\n", "", WHOLE))
    option = {**KEYS["system"], **KEYS["client"]}.get(key, ("",))[0]
    assert option not in found
    assert len(told) == (key != "num_worker")


BAD = [
    (("num_client: 100", "num_clients: 100"), "unknown key 'num_clients' in system; did you mean "),
    (("  lr:", "  rate:"), "unknown key 'rate' in client; there are fed_algo, lr, batch_size"),
    (("num_worker: 0", "num_client: 3"), "unknown key 'num_client' in client"),
    (("num_worker: 0", "lr: 3"), "lr is given twice"),
    (("lr: 0.01", "lr:"), "lr needs a single value"),
    (("lr: 0.01", "lr: [0.1, 0.2]"), "lr needs a single value"),
    (("lr: 0.01", "? [lr]\n  : 3"), "unknown key 'a list or mapping' in client"),
    (("  lr: 0.01\n", ""), "client lacks lr"),
    (("  num_client: 100\n", ""), "system lacks num_client"),
    (("num_local_class: 2", "num_local_class: two"), "num_local_class 'two': not -1 .all classes"),
    (("num_local_class: 2", "num_local_class: 0"), "num_local_class '0': not -1"),
    (("num_local_class: 2", "num_local_class: 2,pool=all"), "num_local_class '2,pool=all': not -1"),
    (("dataset: MNIST", "dataset: EMNIST"), "dataset 'EMNIST': not one of EmnistLetters, Emn"),
    (("client:\n", "client: 3\nsystem:\n"), "client must hold lines `key: value`"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_files_are_one_line(change, message, tmp_path, capsys):
    assert change[0] in WHOLE
    path = tmp_path / "job.yaml"
    path.write_text(WHOLE.replace(*change))
    assert main.main(["--config", str(path)]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("notice:")]
    assert line.startswith(f"main.py: error: --config {path}: ")
    assert re.search(message, line), line


def test_half_a_file_is_refused(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(WHOLE[: WHOLE.index("\nclient:")])
    assert main.main(["--config", str(path)]) == 2
    assert "client lacks fed_algo" in capsys.readouterr().err


def test_the_command_line_wins_and_own_keys_stand_beside(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(WHOLE + "mu: 0.1\n")
    (run,) = read_grid(str(path), {"algorithm": "FedProx", "seed": 9}).runs
    c = run.config
    assert (c.mu, c.algorithm, c.seed) == (0.1, "FedProx", 9)
    assert (c.local_epochs, c.local_unit, c.momentum) == (3, "epochs", 0.9)
    assert (c.model, c.test_set, c.numusers) == ("lenet", "global", 100)
    assert notices(c, run.given) == []
    assert capsys.readouterr().err.count("notice:") == 1
    path.write_text(WHOLE + "numusers: 10\n")
    with pytest.raises(InputError, match="numusers is given twice"):
        read_grid(str(path), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("lr: 0.01", "lr: fast"), "lr 'fast': not a number >= 0"),
        (("num_client: 100", "num_client: 100,pool=all"), "num_client '100,pool=all': not a whole"),
        (("model: LeNet", "model: LeNett"), "model 'LeNett': not one of "),
        (("fed_algo: FedAvg", "fed_algo: FedAvgg"), "fed_algo 'FedAvgg': .*did you mean FedAvg"),
        (("fed_algo: FedAvg", "fed_algo: SCAFFOLD"), "--momentum 0.9: SCAFFOLD's local solver"),
    ],
)
def test_bad_values_name_the_key_of_the_file(change, message, tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(WHOLE.replace(*change))
    assert main.main(["--config", str(path)]) == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_is_accepted_without_momentum(algorithm):
    (run,) = read_grid(str(FILE), {"algorithm": algorithm, "momentum": 0.0}).runs
    assert run.config.algorithm == algorithm
