"""Minibatch plans: degenerate sizes, coverage, cursors, independence of company."""

import numpy as np
import pytest
import torch

from tests.toys import blobs, federation
from utils.batches import Planner, cut

B = 4
SIZES = [0, 1, B - 1, B, B + 1, 2 * B - 1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rng", [None, 1])
def test_a_pass_sees_every_sample_once(size, rng):
    per_pass = -(-size // B)
    at = cut(size, B, 2 * per_pass, rng=None if rng is None else np.random.default_rng(rng))
    for one in (at[:per_pass], at[per_pass:]):
        assert sorted(one[one >= 0]) == list(range(size))
        real = (one >= 0).sum(1)
        assert (real[:-1] == B).all()
        if size:
            assert real[-1] == (size % B or B)


def test_cyclic_goes_on_where_it_was():
    whole = cut(7, 3, 8)
    assert (np.concatenate([cut(7, 3, 5), cut(7, 3, 3, start=5)]) == whole).all()
    assert whole[2].tolist() == [6, -1, -1]
    assert whole[3].tolist() == [0, 1, 2]


def test_passes_have_orders_of_their_own():
    at = cut(30, 30, 3, rng=np.random.default_rng(0))
    assert len({tuple(row) for row in at}) == 3


@pytest.mark.parametrize("unit", ["steps", "epochs"])
@pytest.mark.parametrize("batches", ["shuffled", "cyclic"])
def test_plans_of_all_sizes_in_one_block(unit, batches):
    data = blobs(train=SIZES)
    config = federation("FedAvg", local_unit=unit, batches=batches).config
    planner = Planner(config, data, [0])
    plan = planner.local(np.arange(6), 3, draws=1)
    tau = {"steps": [3 * (n > 0) for n in SIZES], "epochs": [3 * -(-n // B) for n in SIZES]}
    assert plan.steps.tolist() == tau[unit]
    weight = plan.weight.sum(-1)[:, 0]
    active = torch.as_tensor(np.arange(len(plan.rows))[:, None] < plan.steps)
    torch.testing.assert_close(weight, active.double())
    for user in range(6):
        rows = plan.rows[:, 0, user][plan.weight[:, 0, user] > 0]
        start = data.starts["train"][user]
        assert ((rows >= start) & (rows < start + SIZES[user])).all()


def test_plans_do_not_depend_on_company_or_order():
    data = blobs()
    config = federation("FedAvg", batches="shuffled").config
    together = Planner(config, data, [2]).local(np.array([0, 3, 5]), 7, 1)
    alone = Planner(config, data, [2]).local(np.array(5), 7, 1)
    for step in range(3):
        count = alone.counts[step, 0]
        assert (together.rows[step, 0, 2, :count] == alone.rows[step, 0, :count]).all()
    other = [
        Planner(config, data, [rep]).local(np.array(5), t, 1).rows for rep, t in ((2, 8), (1, 7))
    ]
    assert all(not torch.equal(alone.rows, rows) for rows in other)


def test_cursors_survive_rounds_and_absence():
    data = blobs(train=(10, 10))
    planner = Planner(federation("FedAvg", batches="cyclic").config, data, [0])
    first = planner.local(np.array(0), 0, 1)
    later = planner.local(np.array(0), 5, 1)
    assert first.rows[0, 0].tolist() == [0, 1, 2, 3]
    assert first.rows[2, 0, :2].tolist() == [8, 9]
    assert later.rows[0, 0].tolist() == [0, 1, 2, 3]
    assert planner.cursors["train"].tolist() == [[0, 0]]
    planner.config = federation("FedAvg", batches="cyclic", local_epochs=2).config
    planner.local(np.array(0), 6, 1)
    assert planner.local(np.array(0), 9, 1).rows[0, 0, :2].tolist() == [8, 9]


def test_full_pass_weighs_every_sample_alike():
    data = blobs(train=SIZES)
    plan = Planner(federation("SCAFFOLD").config, data, [0]).full_pass(np.arange(6), chunk=B)
    for user, size in enumerate(SIZES):
        used = plan.weight[:, 0, user] > 0
        assert int(used.sum()) == size
        assert sorted(plan.rows[:, 0, user][used] - data.starts["train"][user]) == list(range(size))
        torch.testing.assert_close(
            plan.weight[:, 0, user][used], torch.full((size,), 1 / max(size, 1)).double()
        )


def test_a_batch_size_above_all_sizes_costs_nothing():
    data = blobs(train=SIZES)
    planner = Planner(federation("FedAvg", batch_size=10**9).config, data, [0])
    plan = planner.local(np.arange(6), 0, 1)
    assert plan.rows.shape[-1] == max(SIZES)
    assert plan.widths == [max(1, n) for n in SIZES]
    assert planner.full_pass(np.arange(6), 10**9).rows.shape[-1] == max(SIZES)


def test_adapting_twice_on_test_data_takes_the_next_minibatch():
    data = blobs(train=(5,))
    data.sizes["test"][0] = 2
    planner = Planner(federation("PerAvg", batch_size=1).config, data, [0])
    first, second = planner.adapt(np.array(0), 4, ("test", "test"))
    assert {int(first.rows), int(second.rows)} == {int(data.starts["test"][0]) + i for i in (0, 1)}
    first, second = planner.adapt(np.array(0), 4, ("test", "train"))
    assert int(second.rows) < int(data.starts["test"][0]) <= int(first.rows)


def test_the_three_streams_differ():
    data = blobs()
    config = federation("PerAvg").config
    planner = Planner(config, data, [0])
    local = planner.local(np.array(3), 0, 1).rows[0, 0]
    (adapt,) = planner.adapt(np.array(3), 0, ("train",))
    assert not torch.equal(local, adapt.rows[0, 0])
    assert torch.equal(adapt.rows, planner.adapt(np.array(3), 0, ("train",))[0].rows)
