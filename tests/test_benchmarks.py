"""The benchmarks measure the same job: the textbook computes the suite's numbers."""

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.run import BENCHES
from benchmarks.textbook import TEXTBOOK
from FLAlgorithms.servers import ALGORITHMS
from tests.toys import blobs, federation, flat, watched


@pytest.mark.parametrize("unit", ["steps", "epochs"])
@pytest.mark.parametrize("algorithm", TEXTBOOK)
def test_the_textbook_computes_the_same(algorithm, unit):
    """Cyclic minibatches, everybody's weights as there, three rounds, float64."""
    data = blobs(train=(9, 4, 12, 5))
    weighting = TEXTBOOK[algorithm].weighting
    options = {"batches": "cyclic", "weighting": weighting, "local_unit": unit, "numusers": 2}
    server = federation(algorithm, data=data, num_global_iters=3, beta=1.0, **options)
    model = server.model
    parts = []
    for user in range(4):
        rows = [data.part(part, slice(user, user + 1)) for part in ("train", "test")]
        parts.append(tuple(list(zip(data.x[r], data.y[r], strict=True)) for r in rows))
    book = TEXTBOOK[algorithm](server.config, model, parts)
    server, diary = watched(server)
    for selected in diary.selected:
        book.run_round(selected.tolist())
    torch.testing.assert_close(
        flat(server.params), flat(book.model.parameters()), rtol=1e-12, atol=1e-12
    )


def test_every_benchmark_names_a_textbook():
    assert {bench.options["algorithm"] for bench in BENCHES} <= set(TEXTBOOK)


def test_the_gpu_checks_run_on_the_cpu():
    rows = gpu.equality(torch.device("cpu"))
    assert len(rows) == 3 * len(ALGORITHMS)
    assert all(np.isfinite(worst) and worst <= gpu.BOUND for _, worst in rows)
