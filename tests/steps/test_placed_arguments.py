"""Arguments that lie on several devices; datasets that are read while JAX traces."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxstrategy as js
from jaxstrategy.errors import ContextError, PlacementError


def placed(shape, spec, devices, axes=("data",), mesh_shape=None):
    """0, 1, 2, ... on a mesh of the user's own."""
    grid = np.asarray(devices).reshape(mesh_shape or (len(devices),))
    sharding = NamedSharding(Mesh(grid, axes), PartitionSpec(*spec))
    return jax.device_put(np.arange(np.prod(shape), dtype="f").reshape(shape), sharding)


# Shape, the specification, and the devices and mesh that divide it.
DIVIDED = {
    "rows": ((8, 2), ("data",), 4, None, "PerReplica(array.reshape(4, 2, 2))"),
    "an entry each": ((4, 2), ("data",), 4, None, "pass `PerReplica(array)`"),
    "in part": ((4, 2), ("data",), 4, (2, 2), "`[4, ...]`, entry i for replica i"),
    "more devices": ((8, 2), ("data",), 8, None, "`[4, ...]`, entry i for replica i"),
}


@each_of("shape, spec, count, mesh_shape, advice", DIVIDED.values())
def test_a_plain_array_that_a_mesh_divides_is_refused(
    four, shape, spec, count, mesh_shape, advice
):
    axes = ("data",) if mesh_shape is None else ("data", "model")
    x = placed(shape, spec, jax.devices()[:count], axes, mesh_shape)
    text = "`x` is a plain array that is split over the replicas' devices (its shape is"
    with pytest.raises(PlacementError, match=re.escape(text)) as caught:
        four.run(lambda x: x.sum(), (x,))
    assert advice in str(caught.value)
    with pytest.raises(PlacementError, match="strategy.mirror"):
        four.reduce("sum", {"x": x})


@each_of("is_jitted", (False, True))
def test_what_a_step_captures_is_refused_too(four, is_jitted):
    array = placed((4,), ("data",), four.devices)
    double = lambda: array * 2  # noqa: E731 (the message names the line)
    step = jax.jit(double) if is_jitted else double
    text = r"What `<lambda>` captures, float32\[4\], used at .*double = lambda: array"
    with pytest.raises(PlacementError, match=text):
        four.run(lambda: step())


def test_what_it_captures_along_with_what_it_uses_is_not(four):
    def made(state):
        return lambda: state["whole"] * 2

    state = {"split": placed((4,), ("data",), four.devices), "whole": jnp.ones(3)}
    for _ in range(2):
        np.testing.assert_array_equal(four.run(made(state)), [2, 2, 2])


def test_what_the_refusal_advises_works(four):
    x = placed((8, 2), ("data",), jax.devices()[:4])
    host = np.arange(16.0).reshape(8, 2)
    own = four.run(lambda x: x, (js.PerReplica(x.reshape(4, 2, 2)),))
    for i, version in enumerate(own.values):
        np.testing.assert_array_equal(version, host[2 * i : 2 * i + 2])
    total = four.run(lambda x: x.sum(), (four.mirror(x),))
    assert float(total) == host.sum()


def test_entries_of_ones_own_mesh_are_not_copied(four):
    x = placed((4, 2), ("data",), jax.devices()[:4])
    given = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
    wrapped = js.PerReplica(x)
    four.run(lambda x: x + 1, (wrapped,))
    kept = wrapped.stacked.addressable_shards
    assert [shard.data.unsafe_buffer_pointer() for shard in kept] == given


def test_what_lies_whole_on_other_devices_is_no_mistake(four):
    x = placed((8, 2), (), jax.devices()[:8])  # whole on each
    assert float(four.run(lambda x: x.sum(), (x,))) == 120.0
    elsewhere = placed((8, 2), ("data",), jax.devices()[4:])
    assert float(four.run(lambda x: x.sum(), (elsewhere,))) == 120.0
    one = js.MirroredStrategy(jax.devices()[:1])
    rows = placed((8, 2), ("data",), jax.devices())
    assert float(one.run(lambda x: x.sum(), (rows,))) == 120.0


def test_state_from_flax_replicate_is_told_from_a_batch(four):
    from flax import jax_utils

    state = {"w": jnp.ones((3, 2))}
    replicated = jax_utils.replicate(state, jax.devices()[:4])
    with pytest.raises(PlacementError, match="flax.jax_utils.unreplicate"):
        four.run(lambda state: state["w"].sum(), (replicated,))
    again = jax_utils.unreplicate(replicated)
    assert float(four.run(lambda state: state["w"].sum(), (again,))) == 6.0


READS = {
    "next": lambda dataset, iterator: next(iterator),
    "get_next": lambda dataset, iterator: iterator.get_next(),
    "for": lambda dataset, iterator: [batch for batch in dataset][0],
    "grouped": lambda dataset, iterator: next(
        iter(js.experimental.grouped(dataset, 2))
    ),
    "element_spec": lambda dataset, iterator: dataset.element_spec,
}
TRACERS = {
    "jit": lambda two, read: jax.jit(lambda x: (read(), x)[1])(1.0),
    "grad": lambda two, read: jax.grad(lambda x: (read(), x)[1])(1.0),
    "scan": lambda two, read: jax.lax.scan(
        lambda x, _: ((read(), x)[1], None), 1.0, length=3
    ),
    "run": lambda two, read: two.run(lambda x: (read(), x)[1], (1.0,)),
}


@each_of("read, ahead", zip(READS.values(), (0, 2, 0, 2, 0), strict=True))
def test_a_dataset_is_not_read_while_jax_traces(two, read, ahead):
    options = js.InputOptions(experimental_per_replica_buffer_size=ahead)
    dataset = two.experimental_distribute_dataset([np.arange(4)] * 3, options)
    with iter(dataset) as iterator:
        for trace in TRACERS.values():
            with pytest.raises(ContextError, match="was read inside a step, or inside"):
                trace(two, lambda: read(dataset, iterator))
        assert len(list(iterator)) == 3  # none is lost


def test_the_kind_of_its_batches_may_be_asked_when_it_is_known(two):
    dataset = two.experimental_distribute_dataset([np.arange(4)])
    known = dataset.element_spec
    assert jax.jit(lambda x: (dataset.element_spec, x)[1])(1.0) == 1.0
    assert dataset.element_spec is known


def test_a_batch_that_was_read_to_know_its_kind_is_not_given_while_jax_traces(two):
    with iter(two.experimental_distribute_dataset([np.arange(4)] * 3)) as iterator:
        spec = iterator.element_spec
        assert jax.tree.leaves(spec)[0].shape[-1] == 2
        with pytest.raises(ContextError, match="was read inside a step, or inside"):
            jax.jit(lambda x: (next(iterator), x)[1])(1.0)
        assert len(list(iterator)) == 3
