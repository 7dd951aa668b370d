"""Measure the suite against the textbook implementation of the same jobs, interleaved, medians.

    python benchmarks/run.py [--quick] [--out results/benchmark.md]

One round of every contestant in turn, several times: the suite (one and two threads), its reference
engine (one user at a time), the textbook (one and two threads). A round is evaluation, local
training, aggregation; "training" and "evaluation" are measured inside it. The limit is the rate of
a large square matrix product measured in the same run; a job's share of it is the time of the
multiply-adds that the algorithm as written needs (all K gradient steps) over the training time.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.textbook import TEXTBOOK, Textbook  # noqa: E402
from FLAlgorithms.servers.serverbase import Server  # noqa: E402
from utils.config import Config  # noqa: E402
from utils.jobs import Job, prepare  # noqa: E402
from utils.model_utils import read_data  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Bench:
    """A job: options, the target ratio to the textbook, gradients per local step."""

    name: str
    options: dict
    target: float | None = None
    gradients: int = 1


EPOCHS = {"local_unit": "epochs", "local_epochs": 1, "numusers": 100}
SYNTHETIC = {"dataset": "Synthetic", "numusers": 10}
BENCHES = [
    Bench("pFedMe mclr, MNIST", {"algorithm": "pFedMe"}, 15, 5),
    Bench("FedAvg mclr, MNIST", {"algorithm": "FedAvg"}, 15),
    Bench("Per-FedAvg mclr, MNIST", {"algorithm": "PerAvg", "beta": 0.001}, 15, 2),
    Bench("pFedMe dnn, MNIST", {"algorithm": "pFedMe", "model": "dnn"}, 5, 5),
    Bench(
        "pFedMe mclr, Synthetic 100 users",
        {"algorithm": "pFedMe", "lamda": 20.0, "personal_learning_rate": 0.01, **SYNTHETIC},
        20,
        5,
    ),
    Bench("SCAFFOLD mclr, Synthetic 100 users", {"algorithm": "SCAFFOLD", **SYNTHETIC}, 20),
    Bench(
        "FedNova mclr, Synthetic, one pass, all of 100 unequal users",
        {"algorithm": "FedNova", **SYNTHETIC, **EPOCHS},
        10,
    ),
]


class Suite:
    """The suite's server, a round at a time, with the seconds of its parts."""

    def __init__(self, job: Job) -> None:
        self.server: Server = job.server(0, observer=mock.Mock())
        self.seconds = {"training": 0.0, "evaluation": 0.0}

    def run_round(self) -> None:
        """One round, evaluated."""
        with self._timed(self.server.user_class, "train", "training"):
            with self._timed(type(self.server.evaluator), "sums", "evaluation"):
                self.server.run_rounds(1)

    @contextmanager
    def _timed(self, owner: type, name: str, what: str) -> Iterator[None]:
        original = getattr(owner, name)

        def measured(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[what] += time.perf_counter() - start

        with mock.patch.object(owner, name, measured):
            yield


def textbook(job: Job) -> Textbook:
    """The same job for the textbook."""
    data = job.data
    parts = []
    for user in range(data.num_users):
        one = slice(user, user + 1)
        rows = [data.part(part, one) for part in ("train", "test")]
        parts.append(tuple(list(zip(data.x[r], data.y[r], strict=True)) for r in rows))
    return TEXTBOOK[job.config.algorithm](job.config, job.model(0), parts)


def measure(bench: Bench, repeats: int, read: Callable) -> dict[str, float]:
    """Median seconds per round of every contestant, interleaved."""
    config = Config(gpu=-1, **bench.options)
    job = prepare(config, *read(config.dataset))
    reference = prepare(dataclasses.replace(config, block_size=0), *read(config.dataset))
    suites = {"suite": (Suite(job), 1), "suite, 2 threads": (Suite(job), 2)}
    suites["reference engine"] = (Suite(reference), 1)
    book = textbook(job)
    seconds: dict[str, list[float]] = {}
    for turn in range(repeats + 1):  # the first one warms up
        gemm = _gemm_seconds()
        taken: dict[str, float] = {"gemm": gemm}
        for name, (suite, threads) in suites.items():
            torch.set_num_threads(threads)
            suite.seconds = dict.fromkeys(suite.seconds, 0.0)
            start = time.perf_counter()
            suite.run_round()
            taken[name] = time.perf_counter() - start
            taken |= {f"{name}: {k}": v for k, v in suite.seconds.items()}
        selected = suites["suite"][0].server.selected.tolist()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            start = time.perf_counter()
            book.run_round(selected)
            taken[f"textbook, {threads}"] = time.perf_counter() - start
        torch.set_num_threads(1)
        for name, value in taken.items() if turn else ():
            seconds.setdefault(name, []).append(value)
    found = {name: median(values) for name, values in seconds.items()}
    found["textbook"] = min(found["textbook, 1"], found["textbook, 2"])
    server = suites["suite"][0].server
    trained = server.everyone if bench.options["algorithm"] == "pFedMe" else server.selected
    steps = int(server.planner.num_steps(trained, server.round_number).sum()) * bench.gradients
    found["user-steps"] = steps
    found["flops"] = steps * _flops_per_gradient(server, trained)
    return found


def _flops_per_gradient(server: Server, users) -> float:
    """2 * multiply-adds of a forward pass and the weights' and hidden inputs' gradients."""
    sizes = server.data.sizes["train"][users]
    passes = server.planner.num_steps(users, server.round_number)
    real = server.config.batch_size
    if server.config.local_unit == "epochs":
        real = sizes.sum() / passes.sum()
    weights = [p for p in server.model.parameters() if p.dim() == 2]
    products = sum((2 if i == 0 else 3) * p.numel() for i, p in enumerate(weights))
    return 2.0 * float(real) * products


SQUARE = 2048


def _gemm_seconds() -> float:
    torch.set_num_threads(1)
    a = torch.ones(SQUARE, SQUARE)
    start = time.perf_counter()
    torch.mm(a, a)
    return time.perf_counter() - start


def jobs_ratio(options: list[str], rounds: tuple[int, int], textbook_round: float) -> float:
    """Ten repetitions with `--jobs 2` against ten textbook runs: seconds per round, start-up apart.

    Two job lengths; their difference is the time of the rounds between.
    """
    seconds = []
    for count in rounds:
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, str(ROOT / "main.py"), "--gpu", "-1", "--jobs", "2"]
            command += ["--times", "10", "--num_global_iters", str(count), "--results_dir", out]
            start = time.perf_counter()
            subprocess.run([*command, *options], check=True, capture_output=True)
            seconds.append(time.perf_counter() - start)
    return 10 * textbook_round / ((seconds[1] - seconds[0]) / (rounds[1] - rounds[0]))


def peak_memory() -> str:
    """Peak memory of a short headline run in a process of its own, MB."""
    try:
        import resource
    except ImportError:
        return "unknown here"
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(ROOT / "main.py"), "--num_global_iters", "2"]
        subprocess.run([*command, "--results_dir", out], check=True, capture_output=True)
    return f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MB"


def convolutions(repeats: int) -> list[str]:
    """Local training of the two cnn in blocks against one user at a time."""
    rows = []
    for name, shape in (("cnn (MNIST)", (1, 28, 28)), ("cnn (CIFAR-10)", (3, 32, 32))):
        servers = {size: _cnn_server(shape, size) for size in (0, 2, 4)}
        auto = _cnn_server(shape, "auto").block_size
        taken: dict[int, list[float]] = {size: [] for size in servers}
        for _ in range(repeats + 1):
            for size, server in servers.items():
                start = time.perf_counter()
                server.round()
                taken[size].append(time.perf_counter() - start)
        cells = [f"{1000 * median(v[1:]) / 8:.0f}" for v in taken.values()]
        rows.append(f"| {name} | {' | '.join(cells)} | {auto or 'one at a time'} |")
    return rows


def _cnn_server(shape: tuple[int, ...], size: int | str) -> Server:
    from FLAlgorithms.trainmodel.models import build_model
    from utils.batches import FederatedData

    sizes = {"train": [20] * 4, "test": [0] * 4}
    data = FederatedData(torch.randn(80, *shape), torch.randint(0, 10, (80,)), sizes)
    options = {"algorithm": "FedAvg", "numusers": 4, "local_epochs": 2, "block_size": size}
    config = Config(model="cnn", **options).resolved()
    return config.server_class(config, data, build_model("cnn", shape, 10, 0))


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """The main table, Markdown."""
    lines = [
        "| job | textbook s/round | suite s/round (training, evaluation, rest) | ratio | target "
        "| ratio with 2 threads | reference engine s/round | user-steps/s: suite, reference "
        "| share of the limit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for bench in BENCHES:
        if bench.name not in found:
            continue
        f = found[bench.name]
        train, evaluation = f["suite: training"], f["suite: evaluation"]
        rest = f["suite"] - train - evaluation
        limit = f["flops"] / (2 * SQUARE**3 / f["gemm"])
        lines.append(
            f"| {bench.name} | {f['textbook']:.3f} | {f['suite']:.3f} ({train:.3f}, "
            f"{evaluation:.3f}, {rest:.3f}) | **{f['textbook'] / f['suite']:.1f}** "
            f"| {bench.target} | {f['textbook'] / f['suite, 2 threads']:.1f} "
            f"| {f['reference engine']:.3f} | {f['user-steps'] / train:,.0f}, "
            f"{f['user-steps'] / f['reference engine: training']:,.0f} "
            f"| {100 * limit / train:.0f} % |"
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    """Print the tables and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repeats, under 3 minutes")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark.md"))
    parser.add_argument("--only", default="", help="only jobs whose name holds this text")
    args = parser.parse_args(argv)
    repeats = 2 if args.quick else 7
    sources: dict[str, tuple] = {}

    def read(dataset: str) -> tuple:
        if dataset not in sources:
            sources[dataset] = read_data(dataset)
        return sources[dataset]

    found = {}
    for bench in BENCHES:
        if args.only in bench.name:
            print(f"measuring {bench.name} ...", file=sys.stderr, flush=True)
            found[bench.name] = measure(bench, repeats, read)
    lines = table(found)
    rounds = (3, 13) if args.quick else (5, 45)
    lines += ["", "| ten repetitions against ten textbook runs | ratio | target |"]
    lines += ["|---|---|---|"]
    for name, model, target in (("mclr", "mclr", 25), ("dnn", "dnn", 8)):
        book = found.get(f"pFedMe {name}, MNIST")
        if book and not (args.quick and model == "dnn"):
            for extra in ([], ["--lockstep", "yes"]):
                ratio = jobs_ratio(["--model", model, *extra], rounds, book["textbook"])
                how = " ".join(["--jobs 2", *extra])
                lines.append(f"| pFedMe {name}, MNIST, `{how}` | **{ratio:.1f}** | {target} |")
    if not args.only:
        lines += ["", "| local training, ms per user-step, users per block: | 0 | 2 | 4 | auto |"]
        lines += ["|---|---|---|---|---|", *convolutions(2 if args.quick else 5)]
    gemm = median([f["gemm"] for f in found.values()])
    lines += [
        "",
        f"`python benchmarks/run.py{' --quick' if args.quick else ''}`, "
        f"{datetime.date.today()}, {_cpu()}, torch {torch.__version__}; limit: "
        f"{2 * SQUARE**3 / gemm / 1e9:.0f} GFLOP/s (square product of {SQUARE}, one thread); "
        f"peak memory of a headline run {peak_memory()}.",
    ]
    text = "\n".join(lines)
    print(text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text + "\n", encoding="utf-8")
    return 0


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    import os

    return f"{name}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
