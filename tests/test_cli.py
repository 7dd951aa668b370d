"""main.py from the outside: every algorithm, published commands, bad input, adding an algorithm."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

import main
import main_plot
from FLAlgorithms.servers import ALGORITHMS
from tests.toys import federation, flat, run_main, suite_with, watched
from utils.config import FIELDS, NOT_NUMBERS, Config, notices, parse_command_line
from utils.errors import InputError
from utils.grid import read_grid

ROOT = Path(main.__file__).parent
PUBLISHED = [
    "--algorithm pFedMe --learning_rate 0.005 --personal_learning_rate 0.1 --beta 1 --lamda 15",
    "--algorithm PerAvg --learning_rate 0.005 --beta 0.001",
    "--algorithm FedAvg --learning_rate 0.005",
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_runs_and_is_drawn(algorithm, leaf, capsys):
    code, out = run_main(leaf, "--algorithm", algorithm, "--times", "2")
    assert code == 0
    names = sorted(path.name for path in out.glob("*.h5"))
    kinds = ["", "_p"] if Config(algorithm=algorithm).primary else [""]
    assert len(names) == 3 * len(kinds)
    for kind in kinds:
        start = f"Synthetic_mclr_{algorithm}{kind}_0.005_"
        ends = [n.rsplit("_", 1)[1] for n in names if n.startswith(start)]
        assert ends == ["0.h5", "1.h5", "avg.h5"]
    said = capsys.readouterr().out
    assert "best on test" in said
    trained = 5 if algorithm in ("pFedMe", "Local") else 2
    assert f"  per round: 2 selected, {trained} trained, " in said
    figure = leaf.parent / "figure.png"
    assert main_plot.main([str(out), "--out", str(figure)]) == 0
    assert figure.stat().st_size > 10_000
    assert algorithm in capsys.readouterr().out


@pytest.mark.parametrize("semantics", ["paper", "authors", "authors2020"])
def test_published_commands_run_verbatim(semantics, leaf, capsys):
    common = "--batch_size 20 --num_global_iters 2 --local_epochs 20 --numusers 2 --times 2"
    for words in PUBLISHED:
        command = f"--model mclr {common} --optimizer SGD {words} --semantics {semantics}"
        code, out = run_main(leaf, *command.split())
        assert code == 0
    assert "notice: " not in capsys.readouterr().err.replace("--gpu", "")
    assert len(list(out.glob("*_avg.h5"))) == 5


def test_defaults_are_the_headline():
    c = Config()
    assert (c.algorithm, c.dataset, c.model, c.learning_rate) == ("pFedMe", "Mnist", "mclr", 0.005)
    assert (c.personal_learning_rate, c.beta, c.lamda, c.K) == (0.1, 1, 15, 5)
    assert (c.num_global_iters, c.local_epochs, c.batch_size) == (800, 20, 20)
    assert (c.numusers, c.times, c.semantics) == (5, 1, "paper")


BAD = [
    (
        "--algorithm FedAvgg",
        "--algorithm 'FedAvgg': not one of pFedMe, PerAvg, .*did you mean FedAvg",
    ),
    ("--dataset mnist", "--dataset 'mnist': not one of .*did you mean Mnist"),
    ("--model resnet", "--model 'resnet': not one of mclr, dnn, cnn"),
    ("--lamda -1", "--lamda '-1': not a number >= 0"),
    ("--lamda nan", "--lamda 'nan': not a number >= 0"),
    ("--learning_rate 1e999", "--learning_rate '1e999': not a number >= 0"),
    ("--batch_size 2.5", "--batch_size '2.5': not a whole number >= 1"),
    ("--batch_size 0", "--batch_size '0': not a whole number >= 1"),
    ("--times 0", "--times '0': not a whole number >= 1"),
    ("--numusers none", "--numusers 'none': not a whole number >= 1"),
    ("--momentum 1", "--momentum '1': not a number >= 0 and <= 0.999999"),
    ("--hf_delta 0", "--hf_delta '0': not a number > 0"),
    ("--seed -1", "--seed '-1': not a whole number >= 0"),
    ("--stragglers 1.5", "--stragglers '1.5': not a number >= 0 and <= 1"),
    ("--user_dropout -1", "--user_dropout '-1': not a number >= 0 and <= 1"),
    ("--local_epochs_range 5 2", "--local_epochs_range '5 2': not two whole numbers LO HI with 1"),
    ("--local_epochs_range 0 2", "--local_epochs_range '0 2': not two whole numbers"),
    ("--local_epochs_range 2", "--local_epochs_range: expected 2 arguments"),
    ("--scaffold_option 3", "--scaffold_option '3': not one of 1, 2"),
    ("--block_size some", "--block_size 'some': not auto or a whole number >= 0"),
    ("--gpu -2", "--gpu '-2': not a whole number >= -1"),
    ("--shared_init maybe", "--shared_init 'maybe': not one of yes, no"),
    ("--learning_rte 3", "--learning_rte: unknown option; did you mean --learning_rate"),
    ("--learn 3", "--learn: unknown option"),
    ("--num_rounds 3", "--num_rounds: unknown option; did you mean --num_global_iters.$"),
    ("--lr 3", "--lr: unknown option; did you mean --learning_rate.$"),
    (
        "--weight_decay 0.1",
        "did you mean --inner_weight_decay .weight decay of the inner steps; pFedMe.*$",
    ),
    ("--gpu cpu", "--gpu 'cpu': not a whole number >= -1 .*; did you mean -1 .cpu..$"),
    ("--gpu cuda:1", "--gpu 'cuda:1': not a whole number .*; did you mean 1 .cuda:1..$"),
    ("--gpu cuda", "--gpu 'cuda': not a whole number .*; did you mean 0 .cuda..$"),
    ("--gpu tpu", "--gpu 'tpu': not a whole number >= -1 and <= 1000000$"),
    ("--dataset FEMNIST", "did you mean EmnistByclass .with --split FOLDER for LEAF..$"),
    ("--dataset femnist", "did you mean EmnistByclass .with --split FOLDER for LEAF..$"),
    ("--dataset EMNIST", "did you mean EmnistLetters or .* or EmnistDigits.$"),
    ("--dataset cifar", "did you mean Cifar10.$"),
    ("--dataset CIFAR10", "did you mean Cifar10.$"),
    ("--dataset fashion-mnist", "did you mean FashionMnist.$"),
    ("--beta", "--beta: expected one argument"),
    ("--replay=", "--replay: the file name is empty"),
    ("--verify {leaf}/none.h5", "none.h5: no such file"),
    ("--config=", "--config: the file name is empty"),
    ("--times 1000000000000", "--times '1000000000000': not a whole number >= 1 and <= 1000000"),
    ("--threads 100000", "--threads '100000': not a whole number"),
    ("stray", "unrecognized arguments: stray"),
    ("--repetition 2 --times 2", "--repetition 2: --times 2 has repetitions 0 to 1"),
    ("--algorithm SCAFFOLD --momentum .9", "--momentum 0.9: SCAFFOLD"),
    ("--algorithm SCAFFOLD --learning_rate 0", "--learning_rate 0: SCAFFOLD divides by it"),
    ("--algorithm FedNova --learning_rate 0", "--learning_rate 0: FedNova divides by it"),
    (
        "--algorithm PerAvg --hessian exact --semantics authors2020 --dataset Synthetic "
        "--split {leaf}",
        "--hessian exact: the two_step update",
    ),
    ("--model cnn --dataset Synthetic --split {leaf}", "--model cnn: needs images"),
    ("--split {leaf}/nothing.npz", "nothing.npz"),
    ("--dataset Synthetic --split published", "published: exists for Mnist only"),
    ("--dataset Synthetic --split {leaf} --normalize channel", "channel"),
    ("--config {leaf}/none.yaml", "none.yaml: No such file"),
    ("--config {leaf}", "--config .*leaf: "),
    ("--replay {leaf}/none.h5", "none.h5: no such file"),
    ("--replay {leaf}/train/all.json", "all.json: damaged, or no result file"),
    ("--dataset Synthetic --split {leaf} --results_dir {leaf}/train/all.json", "--results_dir"),
    ("--dataset Synthetic --split {leaf} --log_file {leaf}", "--log_file .*leaf: Is a directory"),
    ("--replay {leaf}", "leaf: damaged, or no result file of main.py .not a file"),
    ("--verify {leaf}", "leaf: damaged, or no result file of main.py .not a file"),
    ("--dataset Synthetic --split {leaf}/train/all.json", "all.json: not a split file"),
    ("--dataset Synthetic --split {leaf}/train", "0 files train/.*json, expected one"),
    ("--dataset Mnist --split {leaf}", "samples of shape .4,., Mnist has"),
    ("--lamda=", "--lamda '': not a number >= 0"),
    ("--resume yes", "unrecognized arguments: yes"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(words, message, leaf, capsys):
    words = words.format(leaf=leaf).split()
    assert main.main([*words, "--num_global_iters", "1"]) == 2
    captured = capsys.readouterr()
    (line,) = [x for x in captured.err.splitlines() if not x.startswith("notice:")][-1:]
    assert line.startswith("main.py: error: ")
    assert re.search(message, line), line
    assert "Traceback" not in captured.err
    assert not list(leaf.parent.rglob("*.h5"))


YAML = [
    (
        "algorithm: FedAvg\nlearning_rte: 1",
        "unknown key 'learning_rte'; did you mean learning_rate",
    ),
    ("lr: 0.1", "unknown key 'lr'; did you mean learning_rate.$"),
    ("rounds: 3", "unknown key 'rounds'; did you mean num_global_iters.$"),
    ("num_rounds: 3", "unknown key 'num_rounds'; did you mean num_global_iters.$"),
    ("clients: 3", "unknown key 'clients'; did you mean numusers.$"),
    ("epochs: 3", "unknown key 'epochs'; did you mean local_epochs.$"),
    ("lambda: 3", "unknown key 'lambda'; did you mean lamda .*pFedMe"),
    ("runs: [{lr: 0.1}]", "run 1: unknown key 'lr'; did you mean learning_rate.$"),
    (
        "{partition: dirichlet:users=5,alpha=0.1}",
        "unknown key 'alpha=0.1'; a partition between braces or brackets needs quotes: .SCHEME:",
    ),
    ("runs: [{partition: iid:users=5,test=0}]", "unknown key 'test=0'; a partition .* quotes"),
    (
        "partition: [dirichlet:users=5, alpha=0.1]",
        "partition needs a single value; a partition between braces or brackets needs quotes",
    ),
    ("partition: {dirichlet: 5}", "partition needs a single value; .* needs quotes"),
    (
        "runs: [{partition: [dirichlet:users=5,alpha=0.1]}]",
        "unknown scheme 'alpha=0.1'; where YAML has brackets, SCHEME:key=value,... needs quotes",
    ),
    ("batch_size: many", "batch_size 'many': not a whole number >= 1"),
    ("batch_size: [1, 2]", "batch_size needs a single value"),
    ("batch_size:", "batch_size needs a single value"),
    ("local_epochs_range: [1, 2, 3]", "local_epochs_range '1 2 3': not two whole numbers"),
    ("local_epochs_range: 2", "local_epochs_range '2': not two whole numbers"),
    ("local_epochs_range: [1, [2]]", "local_epochs_range needs a single value"),
    ("- a\n- b", "must hold lines `option: value`"),
    ("a: b: c", "not valid YAML .line 1"),
    ("", "must hold lines"),
    ("!!python/object/apply:os.getcwd []", "must hold lines"),
    ("seed: 1\nseed: 2", "seed is given twice"),
    ("seed: 2001-99-99", "seed '2001-99-99': not a whole number"),
    ("seed: !!int foo", "seed 'foo': not a whole number"),
    ("batch_size: 1:30", "batch_size '1:30': not a whole number"),
    ("mu: null", "mu needs a single value"),
    ("a: " + "[" * 5000, "not valid YAML"),
    ('results_dir: "a\\0b"', "results_dir .*: not a name or path"),
]


@pytest.mark.parametrize(("text", "message"), YAML)
def test_bad_yaml(text, message, tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert main.main(["--config", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_yaml_that_is_no_text(tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xff\xfe\x00batch")
    assert main.main(["--config", str(path)]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_yaml_fills_the_config_and_the_command_line_wins(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "algorithm: FedProx\nmu: 1e-2\nlamda: 2.5\nsave_models: true\nshared_init: yes\n"
        "block_size: auto\ntimes: 3\nseed: 010\n"
    )
    (run,) = read_grid(str(path), {"times": 7}).runs
    expected = {
        **{"algorithm": "FedProx", "mu": 0.01, "lamda": 2.5, "save_models": True},
        **{"shared_init": "yes", "block_size": "auto", "times": 7, "seed": 10},
    }
    assert run.config == Config(**expected)
    assert set(run.given) == set(expected)


@pytest.mark.parametrize("text", ["[2, 5]", "2 5", "[2,5]", "2, 5", "\n  - 2\n  - 5"])
def test_a_range_is_two_values_or_a_list(text, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(f"local_epochs_range: {text}")
    expected = {"local_epochs_range": (2, 5)}
    (run,) = read_grid(str(path), {}).runs
    assert run.config.local_epochs_range == (2, 5)
    assert parse_command_line(["--local_epochs_range", "2", "5"])[0] == expected
    path.write_text("title: t\nruns: [{local_epochs_range: [2, 5]}]")
    assert read_grid(str(path), {}).runs[0].config == run.config


def test_help_groups_options_by_reader(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "read by FedProx, FedNova:" in text
    assert "common options:" in text
    assert all(f"--{name}" in text for name in FIELDS)


def test_unread_options_are_named_in_one_notice():
    config = Config(algorithm="FedAvg", lamda=3, K=2)
    assert notices(config, ["algorithm", "lamda", "K", "momentum"]) == [
        "FedAvg does not read --lamda, --K"
    ]
    assert notices(Config(), ["lamda", "K", "beta"]) == []
    assert notices(Config(algorithm="FedNova"), ["save_models"]) == [
        "FedNova does not read --save_models"
    ]
    assert notices(Config(algorithm="FedAvg", save_models=True), []) == [
        "--save_models has no effect without --finetune_steps"
    ]
    assert notices(Config(algorithm="Local"), ["numusers"]) == ["Local does not read --numusers"]
    assert notices(Config(algorithm="FedProx"), [])[0].startswith("--mu 0")
    assert notices(Config(algorithm="FedProx", stragglers=0.2), []) == []
    assert notices(Config(algorithm="FedAvg", stragglers=0.1), []) == [
        "--stragglers 0.1 of --numusers 5: nobody"
    ]
    assert notices(Config(algorithm="FedAvg", user_dropout=1.0), []) == [
        "--user_dropout 1: nobody ever reports; the global model stays as it is"
    ]
    assert notices(Config(algorithm="Local", user_dropout=1.0), []) == []
    assert notices(Config(local_epochs_range=(2, 5)), ["local_epochs"]) == [
        "--local_epochs has no effect with --local_epochs_range"
    ]
    assert notices(Config(algorithm="PerAvg"), [])[0].startswith("--beta 1 is its step")
    assert notices(Config(algorithm="PerAvg", beta=0.1, hf_delta=0.5), []) == [
        "--hf_delta 0.5 has no effect without --hessian hf"
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"learning_rate": 0.07}, "--learning_rate 0.07 times --lamda 15 is 1.05 > 1"),
        ({"personal_learning_rate": 0.14}, "--personal_learning_rate 0.14 .* is 2.1 > 2"),
        ({"personal_learning_rate": 0.13}, None),
        ({"inner_weight_decay": 6.0}, r"decay 6\) is 2.1 > 2"),
    ],
)
def test_known_bounds_are_warned_of(options, expected):
    found = notices(Config(**options), [])
    assert len(found) == (expected is not None)
    assert expected is None or re.search(expected, found[0])


# Another value for every option that may change numbers; what is missing here fails the test.
OTHER = {
    **{"dataset": None, "model": "dnn", "algorithm": None, "split": None, "normalize": None},
    **{"batch_size": 3, "learning_rate": 0.01, "num_global_iters": 3, "local_epochs": 2},
    **{"local_unit": "epochs", "numusers": 2, "seed": 6, "weighting": None, "batches": "cyclic"},
    **{"shared_init": None, "beta": 0.5, "lamda": 4.0, "K": 3, "personal_learning_rate": 0.02},
    **{"inner_weight_decay": 0.5, "theta_start": "warm", "personal": None, "hessian": "exact"},
    **{"participation": "sampled", "hf_delta": None, "peravg_update": "two_step", "mu": 0.5},
    **{"adapt": None, "momentum": 0.5, "server_momentum": 0.5, "server_learning_rate": 0.5},
    **{"stragglers": 0.7, "local_epochs_range": (1, 2), "user_dropout": 0.5},
    **{"finetune_steps": None, "scaffold_option": 1, "eval_every": None, "dtype": None},
    **{"tf32": None, "norm": None, "pretrained": None, "bn": None, "test_set": None},
    "shared_split": None,
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_option_has_an_effect_or_a_notice(algorithm):
    assert set(OTHER) == set(FIELDS) - NOT_NUMBERS | {"split"}
    server, _ = watched(federation(algorithm))
    usual = flat([*server.params, *(t for bank in server.bank.values() for t in bank)])
    config = server.config
    for name, value in OTHER.items():
        if value is None:
            continue
        try:
            other, _ = watched(federation(algorithm, **{name: value}))
        except InputError:
            assert (algorithm, name) == ("SCAFFOLD", "momentum")
            continue
        found = flat([*other.params, *(t for bank in other.bank.values() for t in bank)])
        same = found.shape == usual.shape and bool((found == usual).all())
        assert same == (name not in config.options()), name


def test_options_with_an_effect_of_their_own():
    """Those that the table above leaves out, where they act."""
    base = {"num_global_iters": 2}

    def final(algorithm, **extra):
        return flat(watched(federation(algorithm, **base, **extra))[0].params)

    uniform, samples = (final("FedAvg", weighting=w) for w in ("uniform", "samples"))
    assert not (uniform == samples).all()
    near, far = (final("PerAvg", hessian="hf", hf_delta=d) for d in (1e-3, 2.0))
    assert not (near == far).all()
    config = Config(shared_init="no", seed=3)
    assert [config.initial_seed(i) for i in range(2)] == [3, 4]
    config = dataclasses.replace(config, shared_init="yes")
    assert [config.initial_seed(i) for i in range(2)] == [3, 3]
    train, test = (
        watched(federation("PerAvg", adapt=a))[1].personal[1]["adapted"].loss["test"]
        for a in ("train", "test_test")
    )
    assert (train != test).any()
    assert federation("pFedMe").config.primary == "theta"
    assert federation("pFedMe", personal="local").config.primary == "local"


def test_semantics_set_the_switches_and_single_ones_win():
    paper = {a: Config(algorithm=a).resolved().weighting for a in ALGORITHMS}
    assert paper == {
        **{"pFedMe": "uniform", "PerAvg": "uniform", "SCAFFOLD": "uniform"},
        **dict.fromkeys(("FedAvg", "FedProx", "FedNova", "Local"), "samples"),
    }
    authors = {a: Config(algorithm=a, semantics="authors").resolved() for a in ALGORITHMS}
    assert {a for a, c in authors.items() if c.weighting == "uniform"} == {"SCAFFOLD"}
    c = authors["pFedMe"]
    assert (c.inner_weight_decay, c.theta_start, c.personal) == (0.001, "warm", "local")
    assert (c.batches, c.shared_init, c.adapt, c.peravg_update) == (
        *("cyclic", "yes", "test_test"),
        "restore",
    )
    c = Config(semantics="authors2020", batches="shuffled").resolved()
    assert (c.peravg_update, c.adapt, c.batches) == ("two_step", "test_train", "shuffled")


def test_main_runs_as_a_script_and_exits_with_2(leaf):
    words = ["--dataset", "Synthetic", "--split", str(leaf), "--num_global_iters", "1"]
    script = [sys.executable, str(ROOT / "main.py"), *words, "--results_dir", "out"]
    done = subprocess.run(script, cwd=leaf, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (leaf / "out").is_dir()
    done = subprocess.run([*script, "--mu", "x"], cwd=leaf, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "main.py: error: --mu 'x': not a number >= 0\n"


def arrays_of(path: Path) -> dict[str, bytes]:
    found = {}

    def keep(name, value):
        if isinstance(value, h5py.Dataset) and value.dtype.kind != "O":
            found[name] = value[()].tobytes()

    with h5py.File(path) as file:
        file.visititems(keep)
    assert "rs_glob_acc" in found
    return found


def test_processes_and_hash_seeds_change_no_array(leaf):
    """The same command in two processes with other hash seeds: bitwise the same arrays."""
    words = ["--dataset", "Synthetic", "--split", str(leaf), "--num_global_iters", "3"]
    found = []
    for seed in ("1", "2"):
        script = [sys.executable, str(ROOT / "main.py"), *words, "--results_dir", f"out{seed}"]
        env = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run(script, cwd=leaf, env=env, check=True, capture_output=True)
        found.append({p.name: arrays_of(p) for p in sorted((leaf / f"out{seed}").glob("*.h5"))})
    assert len(found[0]) == 4
    assert found[0] == found[1]


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent otherwise on Windows")
@pytest.mark.parametrize("program", ["main.py", "main_plot.py"])
def test_ctrl_c_while_modules_are_imported_is_one_line(program, tmp_path):
    """Also where the imported module catches everything; ignored where Ctrl-C is to be ignored."""
    (tmp_path / "numpy.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except BaseException:\n    pass\nraise ImportError('went on')\n"
    )
    (tmp_path / "torch.py").write_text("import numpy")
    script = [sys.executable, str(ROOT / program)]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, f"{program}: interrupted\n")
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run(script, env=env, capture_output=True, text=True, check=False)
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert "went on" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise on Windows")
def test_a_reader_that_goes_away_is_no_error(leaf):
    """As in `main_plot.py | head -1`."""
    _, out = run_main(leaf)
    read, write = os.pipe()
    os.close(read)
    script = [sys.executable, str(ROOT / "main_plot.py"), str(out), "--out", str(leaf / "x.png")]
    done = subprocess.run(script, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line(leaf):
    _, out = run_main(leaf)
    script = [sys.executable, str(ROOT / "main_plot.py"), str(out), "--out", str(leaf / "x.png")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(script, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
    assert done.stderr == b"main_plot.py: error: [Errno 28] No space left on device\n"


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent otherwise on Windows")
@pytest.mark.parametrize(("times", "jobs", "lockstep"), [(1, 1, "no"), (2, 2, "no"), (2, 1, "yes")])
def test_ctrl_c_keeps_what_was_measured(times, jobs, lockstep, leaf):
    words = ["--dataset", "Synthetic", "--split", str(leaf), "--num_global_iters", "1000000"]
    words += ["--numusers", "2", "--save_every", "0", "--results_dir", "out"]
    words += ["--times", str(times), "--jobs", str(jobs), "--lockstep", lockstep]
    script = [sys.executable, str(ROOT / "main.py"), *words]
    out = leaf / "out"
    run = subprocess.Popen(
        script, cwd=leaf, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        while len(list(out.glob("*_p_*_[01].h5"))) < times:
            assert run.poll() is None, run.stderr.read()
        os.killpg(run.pid, signal.SIGINT)
        _, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130, err
    assert b"Traceback" not in err
    assert b"--resume goes on from here" in err
    assert len(list(out.glob("*.ckpt"))) == times
    paths = list(out.glob("*.h5"))
    assert len(paths) == 2 * times
    assert len(list(out.iterdir())) == 3 * times
    for path in paths:
        with h5py.File(path) as file:
            assert file.attrs["status"] == "interrupted"
            assert len(file["rs_glob_acc"]) >= 1


def test_a_toy_algorithm_is_two_files_and_one_line(leaf, tmp_path):
    """The examples of the README and of docs/ALGORITHMS.md, as they stand there."""
    texts = (ROOT / "README.md", ROOT / "docs" / "ALGORITHMS.md")
    readme = "\n".join(path.read_text(encoding="utf-8") for path in texts)
    blocks = re.findall(r"```python\n# (FLAlgorithms/\S+)\n(.*?)```", readme, re.S)
    lines = re.findall(r'^ {4}"(\w+)": \1,  # the new line$', readme, re.M)
    assert [Path(name).parent.name for name, _ in blocks] == ["users", "servers"] * len(lines)
    script = suite_with(tmp_path / "suite", dict(blocks))
    for algorithm in lines:
        words = ["--algorithm", algorithm, "--dataset", "Synthetic", "--split", str(leaf)]
        words += ["--num_global_iters", "2", "--numusers", "2"]
        words += ["--results_dir", str(tmp_path / "r")]
        command = [sys.executable, str(script), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (path,) = (tmp_path / "r").glob(f"Synthetic_mclr_{algorithm}_[0-9]*_0.h5")
        with h5py.File(path) as file:
            assert file.attrs["class"] == algorithm
            assert len(file["rs_glob_acc"]) == 3


def test_the_headline_file_spells_out_the_defaults():
    (run,) = read_grid(str(ROOT / "config" / "headline.yaml"), {}).runs
    assert len(run.given) > 10
    assert run.config == Config()
