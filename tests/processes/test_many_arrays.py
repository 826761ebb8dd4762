"""Trees of very many arrays: worked on in parts, or announced."""

import jax
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy._src.strategies import cross_replica
from jaxstrategy._src.tracing import program


@pytest.fixture
def strategy():
    return js.MirroredStrategy(jax.devices()[:2])


def wide_tree(strategy, count, shapes):
    """A tree of versions, and what they are as NumPy arrays."""
    draw = np.random.default_rng(0)
    n = strategy.num_replicas_in_sync
    rows = {
        f"x{k}": draw.normal(size=(n, *shapes[k % len(shapes)])).astype(
            np.float16 if k % 7 == 3 else np.float32
        )
        for k in range(count)
    }
    return {name: strategy.per_replica(list(row)) for name, row in rows.items()}, rows


@pytest.mark.slow
def test_wide_trees_are_reduced_gathered_and_read_by_few_programs(
    strategy, compilations
):
    """Three times the leaves need no further programs, each of which is small."""
    found = {}
    for count in (300, 900):
        tree, rows = wide_tree(strategy, count, [(3,), (2, 2)])
        jax.block_until_ready(tree)
        compilations()
        total = strategy.reduce("sum", tree)
        assert compilations() <= 2 * 2
        np.testing.assert_allclose(total["x8"], rows["x8"].sum(0), 1e-5)
        compilations()
        joined = strategy.gather(tree)
        gathers = compilations()
        first, second = strategy.experimental_local_results(tree)
        found[count] = gathers, compilations()
        for name, row in rows.items():
            np.testing.assert_array_equal(joined[name], np.concatenate(row))
            np.testing.assert_array_equal(first[name], row[0])
            np.testing.assert_array_equal(second[name], row[1])
    assert max(found[900]) <= 2, found
    assert min(found[300]) >= 1, found


def test_an_error_names_the_leaf_by_its_place_in_the_whole_tree(strategy, monkeypatch):
    monkeypatch.setattr(cross_replica, "_AT_ONCE", 2)
    tree = {f"x{k}": jax.numpy.ones(2) for k in range(5)}
    tree["x3"].delete()
    with pytest.raises(js.errors.DonatedValueError, match="x3"):
        strategy.reduce("sum", tree)


def test_a_step_of_many_arrays_is_announced_once(strategy, monkeypatch, capfd):
    monkeypatch.setattr(program, "_MANY", 4)
    monkeypatch.setattr(program, "_announced", set())
    alive = js.Variable(0.0)  # which no step here uses

    def many_steps(xs):
        return [x + 1 for x in xs]

    strategy.run(many_steps, ([np.float32(k) for k in range(4)],))
    strategy.run(many_steps, ([np.ones(2, np.float32) for k in range(4)],))
    told = capfd.readouterr().err
    assert told.count("`many_steps` takes or returns 4 arrays and is being") == 1
    assert float(alive) == 0.0
    strategy.run(lambda x: x, (np.float32(1),))
    assert "jaxstrategy:" not in capfd.readouterr().err
