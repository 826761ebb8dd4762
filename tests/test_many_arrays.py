"""Trees of very many arrays: worked on in parts, or announced."""

import jax
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.executors._compiled import CompiledExecutor
from jaxstrategy.strategies import _many_leaves
from jaxstrategy.tracing import _many


@pytest.fixture
def strategy():
    return js.MirroredStrategy(jax.devices()[:2])


def test_a_large_tree_is_reduced_in_parts(strategy, monkeypatch):
    monkeypatch.setattr(_many_leaves, "_AT_ONCE", 3)
    rows = {f"x{k}": np.arange(2.0, dtype=np.float32) + k for k in range(8)}
    tree = {name: strategy.per_replica(list(row)) for name, row in rows.items()}
    tree = {"part": tree, "same": 3.0, "none": None}
    sizes = []
    across = CompiledExecutor.across

    def noted(self, function, value):
        sizes.append(
            len(
                jax.tree.leaves(
                    value, is_leaf=lambda leaf: isinstance(leaf, js.PerReplica)
                )
            )
        )
        return across(self, function, value)

    monkeypatch.setattr(CompiledExecutor, "across", noted)
    total = strategy.reduce("sum", tree)
    assert float(total["same"]) == 6.0 and total["none"] is None
    for name, row in rows.items():
        np.testing.assert_allclose(total["part"][name], row.sum())
    assert len(sizes) == 3


def test_an_error_names_the_leaf_by_its_place_in_the_whole_tree(strategy, monkeypatch):
    monkeypatch.setattr(_many_leaves, "_AT_ONCE", 2)
    tree = {f"x{k}": jax.numpy.ones(2) for k in range(5)}
    tree["x3"].delete()
    with pytest.raises(js.DonatedValueError, match="x3"):
        strategy.reduce("sum", tree)


def test_a_step_of_many_arrays_is_announced_once(strategy, monkeypatch, capfd):
    monkeypatch.setattr(_many, "_MANY", 4)
    monkeypatch.setattr(_many, "_told", set())
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
