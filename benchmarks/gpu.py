"""Check and time the suite on a CUDA device: `python benchmarks/gpu.py [--gpu 0] [--quick]`.

1. Engine equality in float64: blocks and repetitions in lockstep on the device against one user at
   a time. 2. The recorded runs in tests/golden/ replayed on the device. 3. Seconds of the headline,
   one repetition and ten in lockstep. `--gpu -1` runs the same on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import main as program  # noqa: E402
from FLAlgorithms.servers import ALGORITHMS  # noqa: E402
from FLAlgorithms.servers.serverbase import Server  # noqa: E402
from FLAlgorithms.trainmodel.models import build_model  # noqa: E402
from utils.batches import FederatedData  # noqa: E402
from utils.config import Config  # noqa: E402
from utils.jobs import prepare  # noqa: E402
from utils.model_utils import read_data  # noqa: E402

SHAPES = {"mclr": (6,), "dnn": (6,), "cnn": (1, 7, 7)}
SIZES = [9, 1, 4, 12, 5, 3, 8]
BOUND = 1e-11


def server(config: Config, device: torch.device, repetition: int | list[int]) -> Server:
    """A small float64 federation on the device."""
    rng = torch.Generator().manual_seed(1)
    shape = SHAPES[config.model]
    total = 2 * sum(SIZES)
    x = torch.randn(total, *shape, generator=rng, dtype=torch.float64)
    y = torch.randint(0, 4, (total,), generator=rng)
    data = FederatedData(x.to(device), y.to(device), {"train": SIZES, "test": SIZES})
    runs = [repetition] if isinstance(repetition, int) else repetition
    models = [build_model(config.model, shape, 4, config.initial_seed(i)) for i in runs]
    models = [m.to(device, torch.float64) for m in models]
    return config.server_class(
        config, data, models[0] if isinstance(repetition, int) else models, repetition
    )


def equality(device: torch.device) -> list[tuple[str, float]]:
    """Largest parameter difference of two repetitions in lockstep to each alone, per algorithm."""
    rows = []
    for algorithm in ALGORITHMS:
        for model in SHAPES:
            worst = 0.0
            for semantics in ("paper", "authors"):
                config = Config(
                    algorithm=algorithm, model=model, semantics=semantics, batch_size=4,
                    numusers=3, num_global_iters=3, local_epochs=1, local_unit="epochs", K=3,
                    learning_rate=0.02, beta=0.5, lamda=3.0, personal_learning_rate=0.03,
                    eval_every=1, block_size=3,
                ).resolved()  # fmt: skip
                together = server(config, device, [0, 1])
                together.run()
                alone = dataclasses.replace(config, block_size=0)
                for run in (0, 1):
                    one = server(alone, device, run)
                    one.run()
                    for name, value in one.state_dict().items():
                        difference = (together.state_dict(run)[name] - value).abs().max()
                        worst = max(worst, float(difference))
            rows.append((f"{algorithm} {model}", worst))
    return rows


def golden(gpu: int) -> list[tuple[str, bool, str]]:
    """Every recorded run on the device: name, within the bounds, what was printed."""
    rows = []
    for path in sorted((ROOT / "tests" / "golden").glob("*.h5")):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = program.main(["--replay", str(path), "--gpu", str(gpu)])
        rows.append((path.name, code == 0, out.getvalue()))
    return rows


def headline(gpu: int, repetitions: int, rounds: int) -> float:
    """Seconds of the headline's rounds, evaluation every round, data already on the device."""
    config = Config(gpu=gpu, times=repetitions, num_global_iters=rounds)
    job = prepare(config, *read_data("Mnist"))
    runs = 0 if repetitions == 1 else list(range(repetitions))
    job.server(runs).run_rounds(2)
    fresh = job.server(runs)
    start = time.perf_counter()
    fresh.run()
    if job.data.x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    """Print the tables; 1 if an equality or a replay is out of its bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", type=int, default=0, help="CUDA device; -1: CPU")
    parser.add_argument("--quick", action="store_true", help="5 rounds of the headline, not 800")
    args = parser.parse_args(argv)
    device = torch.device("cpu" if args.gpu < 0 else f"cuda:{args.gpu}")
    name = "CPU" if args.gpu < 0 else torch.cuda.get_device_name(device)
    print(f"{name}, torch {torch.__version__}")
    rows = equality(device)
    for what, worst in rows:
        mark = "" if worst <= BOUND else "  OUTSIDE"
        print(f"lockstep against alone, float64: {what:<16} {worst:10.2e}{mark}")
    replays = golden(args.gpu)
    for what, inside, text in replays:
        print(f"replay {what:<24} {'within the bounds' if inside else text}")
    rounds = 5 if args.quick else 800
    for repetitions in (1, 10):
        seconds = headline(args.gpu, repetitions, rounds)
        print(
            f"headline, {repetitions} repetition(s) side by side, {rounds} rounds: {seconds:.1f} s"
        )
    good = all(worst <= BOUND for _, worst in rows) and all(inside for _, inside, _ in replays)
    print("all within the bounds" if good else "OUTSIDE the bounds")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
