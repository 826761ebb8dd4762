"""`strategy.explain`: how state lies on the devices of each replica."""

import jax
import numpy as np
import pytest
from helpers.replicas import replica
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

SPECS = {"w": P(None, "core"), "v": P("core"), "b": P()}
SHAPES = {"w": (16, 32), "v": (32, 16), "b": (1, 16)}
WHOLE = {"w": 2048, "v": 2048, "b": 64}
HALVES = {"w": 1024, "v": 1024, "b": 64}


@pytest.fixture(scope="module")
def cores():
    """4 replicas of 2 devices each."""
    return js.MirroredStrategy(logical_axes={"core": 2})


def state_of(strategy, specs=SPECS):
    return {
        name: jax.device_put(
            np.ones(SHAPES[name], np.float32), NamedSharding(strategy.mesh, spec)
        )
        for name, spec in specs.items()
    }


def step(state, x):
    def loss(state):
        return (((x @ state["w"]) @ state["v"] + state["b"]) ** 2).sum()

    grads = replica().all_reduce("mean", jax.grad(loss)(state))
    return jax.tree.map(lambda w, g: w - g, state, grads)


def rows(strategy):
    n = strategy.num_replicas_in_sync
    return strategy.per_replica(np.ones((n, 3, 16), np.float32))


def bytes_of(leaves):
    return {leaf.path.split("'")[1]: leaf.device_bytes for leaf in leaves}


def test_state_lies_over_the_devices_of_each_replica(cores):
    found = cores.explain(step, (state_of(cores), rows(cores))).sharding
    assert bytes_of(found.leaves) == HALVES
    # What takes the place of an argument lies as that does.
    assert bytes_of(found.results) == HALVES
    assert found.state_bytes == sum(HALVES.values())
    assert found.replicated_bytes == sum(WHOLE.values())
    inner = {leaf.path: leaf.inner for leaf in found.leaves}
    assert inner == {
        "state['w']": P(None, ("core",)),
        "state['v']": P(("core",)),
        "state['b']": P(),
    }
    assert {leaf.reason for leaf in found.leaves} == {"the strategy has no `sharding`"}


def test_the_report_says_how_state_lies(cores):
    report = str(cores.explain(step, (state_of(cores), rows(cores))))
    assert "State, whole on each of 4 replicas\n  what  " in report
    assert "\n  state on a device" in report
    assert "dimension 1 over core in each replica" in report
    assert "gathered in a step" not in report


def test_state_is_divided_over_replicas_and_their_devices():
    state = js.StateSharding("state", min_bytes=128)
    strategy = js.MirroredStrategy(logical_axes={"core": 2}, sharding=state)
    found = strategy.explain(step, (state_of(strategy), rows(strategy)), compiled=False)
    assert bytes_of(found.sharding.leaves) == {"w": 2048 // 8, "v": 2048 // 8, "b": 64}
    assert {leaf.dimension for leaf in found.sharding.leaves} == {0, 1, None}
    assert "dimension 0; dimension 1 over core in each replica" in str(found)
    columns = NamedSharding(strategy.mesh, P("core"))
    v = jax.device_put(np.ones((16, 3), np.float32), columns)
    (leaf,) = strategy.explain(lambda v: 2 * v, (v,), compiled=False).sharding.leaves
    assert leaf.reason == "the devices of each replica divide it"


def test_variables_lie_over_the_devices_of_each_replica(cores):
    with cores.scope():
        v = js.Variable(np.ones((4, 6), np.float32), name="v", sharding=P("core"))
    found = cores.explain(lambda: v.assign_add(1.0 + v), compiled=False)
    (leaf,) = found.sharding.leaves
    assert (leaf.path, leaf.nbytes, leaf.device_bytes) == ("variable 'v'", 96, 48)


def test_types_say_where_arrays_would_lie(cores):
    types = {
        name: jax.ShapeDtypeStruct(
            SHAPES[name], np.float32, sharding=NamedSharding(cores.mesh, spec)
        )
        for name, spec in SPECS.items()
    }
    batch = js.PerReplica(jax.ShapeDtypeStruct((4, 3, 16), np.float32))
    found = cores.explain(step, (types, batch))
    assert bytes_of(found.sharding.leaves) == HALVES
    assert bytes_of(found.sharding.results) == HALVES
    assert found.memory.arguments == sum(HALVES.values()) + 3 * 16 * 4
    assert {each.kind for each in found.inner_collectives} == {"all_reduce"}


def test_replicas_that_share_one_device_share_what_is_equal():
    strategy = js.MirroredStrategy(
        jax.devices()[:1],
        replicas_per_device=8,
        sharding=js.StateSharding("state", min_bytes=0),
    )
    state = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    found = strategy.explain(step, (state, rows(strategy)), compiled=False).sharding
    assert bytes_of(found.leaves) == WHOLE
    assert {leaf.reason for leaf in found.leaves} == {"all replicas share one device"}
