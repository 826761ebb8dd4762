"""`explain` says how state lies, why, and what a step gathers and scatters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from helpers.lines import marked
from helpers.replicas import replica
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

N = 8
F4 = np.dtype("f4")


def strategy(shard="state", min_bytes=0, **more):
    sharding = js.StateSharding(shard, min_bytes=min_bytes, **more)
    return js.MirroredStrategy(js.simulate(N), sharding=sharding)


def shapes(**arrays):
    return {name: jax.ShapeDtypeStruct(shape, F4) for name, shape in arrays.items()}


def rows(*shape):
    return js.PerReplica(jax.ShapeDtypeStruct((N, *shape), F4))


def explain(own, step, *args):
    return own.explain(step, args, compiled=False)


def told(found):
    """The collectives, in order."""
    return [(c.operation, c.nbytes, c.times, c.cause) for c in found.collectives]


# Sixteen numbers, as in the arithmetic of the other tests.


def step_of_vector(state, x):
    w, trace = state
    grad = jax.grad(lambda w: (w * x).sum())(w)  # <- gradient
    grad = replica().all_reduce("mean", grad)  # <- sum
    trace = 0.9 * trace + grad
    return w - 0.1 * trace, trace  # <- results


VECTOR = jax.ShapeDtypeStruct((16,), F4)


def test_whole_parameters_are_scattered_into_and_gathered_from():
    own = strategy("optimizer")
    found = explain(own, step_of_vector, (VECTOR, VECTOR), rows(16))
    assert told(found) == [
        ("reduce_scatter", 64, 1, "sharding"),
        ("all_gather", 8, 1, "compiler"),
    ]
    scatter, gather = found.collectives
    assert scatter.line == marked(step_of_vector, "sum")
    assert scatter.why == "each replica needs its part of the sum only"
    assert gather.line == marked(step_of_vector, "results")
    assert gather.array == "step_of_vector(...)[0]"
    assert gather.why == "a whole result that is computed in parts"
    # Together they send what an all-reduce around a ring would.
    links = js.profiling.Topology(bandwidth=1e9, latency=0, replicas=N)
    assert found.communication_time(links, "ring") == links.ring("all_reduce", 64)
    sharding = found.sharding
    assert (sharding.gathered_bytes, sharding.scattered_bytes) == (64, 64)
    assert (sharding.state_bytes, sharding.replicated_bytes) == (64 + 8, 128)


def test_divided_parameters_are_gathered_before_the_forward_pass():
    found = explain(strategy(), step_of_vector, (VECTOR, VECTOR), rows(16))
    # Nothing reads the parameters here but the update.
    assert told(found) == [("reduce_scatter", 64, 1, "sharding")]

    def step(w, x):
        grad = jax.grad(lambda w: ((w * x) ** 2).sum())(w)  # <- forward
        return w - replica().all_reduce("mean", grad)

    found = explain(strategy(), step, VECTOR, rows(16))
    assert told(found) == [
        ("all_gather", 8, 1, "sharding"),
        ("reduce_scatter", 64, 1, "sharding"),
    ]
    gather = found.collectives[0]
    assert (gather.array, gather.line) == ("w", marked(step, "forward"))
    assert gather.why == "whole from its first use on"
    assert found.communicated_bytes == 8 + 64


def leaves(found):
    return {leaf.path: (leaf.dimension, leaf.reason) for leaf in found.sharding.leaves}


def test_every_argument_is_divided_or_has_a_reason():
    def step(state, scale, key):
        del key
        return jax.tree.map(lambda x: x * scale, state)

    own = strategy(min_bytes=100)
    state = shapes(odd=(10, 3), wide=(3, 16), even=(16, 16), small=(8,))
    found = explain(own, step, state, jnp.float32(2), jax.random.key(0))
    assert leaves(found) == {
        "state['odd']": (None, "no dimension of (10, 3) divides by 8"),
        "state['wide']": (1, ""),
        "state['even']": (0, ""),
        "state['small']": (None, "32 B, below `min_bytes` (100 B)"),
        "scale": (None, "4 B, below `min_bytes` (100 B)"),
        "key": (None, "random keys stay whole"),
    }
    even = next(leaf for leaf in found.sharding.divided if "even" in leaf.path)
    assert (even.shape, even.dtype) == ((16, 16), "float32")
    assert (even.nbytes, even.device_bytes) == (1024, 128)
    assert len(found.sharding.whole) == 4
    results = {leaf.path: leaf.dimension for leaf in found.sharding.results}
    assert results == {
        "step(...)['odd']": None,
        "step(...)['wide']": 1,
        "step(...)['even']": 0,
        "step(...)['small']": None,
    }


def test_parameters_that_the_replicas_read_stay_whole_under_optimizer():
    own = strategy("optimizer")
    found = explain(own, training, *training_arguments(optax.adam(0.1)))
    reason = "each replica's own computation reads it"
    for path, (dimension, why) in leaves(found).items():
        if path.endswith("count"):
            continue
        is_moment = ".mu" in path or ".nu" in path
        assert (dimension is None, why) == (not is_moment, "" if is_moment else reason)


def test_an_argument_that_was_given_whole_and_is_not_replaced_stays_whole():
    own = strategy()
    table = jax.sharding.NamedSharding(own.mesh, jax.P())
    given = jax.device_put(np.ones(16, np.float32), table)
    found = own.explain(lambda w, x: (w * x).sum(), (given, rows(16)), compiled=False)
    reason = "it was given whole, and no result replaces it"
    assert leaves(found) == {"w": (None, reason)}


def test_one_replica_divides_nothing():
    one = js.MirroredStrategy(js.simulate(N)[:1], sharding=js.StateSharding())
    found = explain(one, lambda w: w * 2, VECTOR)
    assert leaves(found) == {"w": (None, "there is one replica")}
    assert found.sharding.state_bytes == found.sharding.replicated_bytes == 64


def test_replicas_of_several_devices_divide_state_unless_a_step_names_devices():
    asked = js.StateSharding(min_bytes=0)
    own = js.MirroredStrategy(js.simulate(N), logical_axes={"core": 2}, sharding=asked)

    def step(w):
        axes = {"core"}
        return jax.shard_map(
            lambda w: w * 2, in_specs=P("core"), out_specs=P("core"), axis_names=axes
        )(w)

    reason = "the step says what each device of a replica does, in a `shard_map`"
    assert leaves(explain(own, step, VECTOR)) == {"w": (None, reason)}
    assert leaves(explain(own, lambda w: w * 2, VECTOR)) == {"w": (0, "")}


def whole_sums(found):
    return [
        (each.shape, each.reason, each.reader) for each in found.sharding.whole_sums
    ]


def in_a_loop(w, x):
    def body(w, x):
        return w - replica().all_reduce("mean", w * x), None  # <- sum

    return lax.scan(body, w, jnp.stack([x] * 5))[0]


def computed_with(w, x):
    grad = replica().all_reduce("mean", x)
    return w - grad, (grad * x).sum()  # <- reader


def by_a_ring(w, x):
    options = js.experimental.CommunicationOptions(implementation="RING")
    return w - replica().all_reduce("mean", x, options)


@each_of(
    "step, reason",
    [
        (in_a_loop, "it is summed inside a loop"),
        (computed_with, "the replicas compute with it"),
        (lambda w, x: replica().all_reduce("sum", x), "it is returned as it is"),
        (by_a_ring, "it is made by a scatter and a gather, as options asked for"),
    ],
)
def test_sums_that_every_replica_gets_all_of(step, reason):
    found = explain(strategy(), step, VECTOR, rows(16))
    reader = marked(step, "reader") if step is computed_with else None
    assert whole_sums(found) == [((16,), reason, reader)]
    if step is in_a_loop:
        assert found.sharding.whole_sums[0].line == marked(step, "sum")
        gathered = ("all_gather", 8, 1, "sharding")
        assert told(found) == [gathered, ("psum", 64, 5, "step")]


def test_sums_that_go_together_or_do_not_divide():
    def step(state, x):
        grads = replica().all_reduce("mean", jax.tree.map(lambda w: w * x.sum(), state))
        return jax.tree.map(jnp.subtract, state, grads)

    found = explain(strategy(), step, shapes(a=(10, 3), b=(7,)), rows(2))
    reason = "arrays were joined to be summed at once"
    assert whole_sums(found) == [((37,), reason, None)]
    # Of such a length that they could be divided; that would be in vain.
    found = explain(strategy(), step, shapes(a=(10, 3), b=(10,)), rows(2))
    assert whole_sums(found) == [((40,), reason, None)]
    assert told(found) == [("psum", 160, 1, "step")]
    found = explain(strategy(), step, shapes(a=(10, 3)), rows(2))
    reason = "no dimension of (10, 3) divides by 8"
    assert whole_sums(found) == [((10, 3), reason, None)]


def layered(params, x):
    def body(x, w):
        return jnp.tanh(x @ w), None

    y, _ = lax.scan(body, x, params["w"])  # <- loop
    return (y**2).mean()


def test_layers_are_gathered_and_scattered_in_the_turns_of_their_loop():
    def step(params, x):
        grads = jax.grad(layered)(params, x)
        grads = replica().all_reduce("mean", grads)  # <- sum
        return jax.tree.map(jnp.subtract, params, grads)

    found = explain(strategy(), step, shapes(w=(3, 16, 16)), rows(2, 16))
    layer = 16 * 16 * 4
    assert told(found) == [
        ("all_gather", layer // N, 3, "sharding"),
        ("all_gather", layer // N, 3, "sharding"),
        ("reduce_scatter", layer, 3, "sharding"),
    ]
    forward, _, scatter = found.collectives
    assert (forward.array, forward.loops) == ("params['w']", (3,))
    assert forward.line == marked(layered, "loop")
    assert forward.why == "in the turns of the loop over its layers"
    assert scatter.line == marked(step, "sum")
    assert found.sharding.gathered_bytes == 2 * 3 * layer
    assert found.sharding.scattered_bytes == 3 * layer


def test_a_parameter_that_is_used_outside_of_its_loop():
    def step(params, x):
        penalty = (params["w"] ** 2 * x[0, 0]).sum()  # <- outside
        return layered(params, x) + penalty

    found = explain(strategy(), step, shapes(w=(3, 16, 16)), rows(2, 16))
    assert told(found) == [
        ("all_gather", 3 * 128, 1, "sharding"),
        ("all_gather", 128, 3, "sharding"),
    ]
    outside = found.collectives[0]
    assert outside.line == marked(step, "outside")
    assert outside.why == "whole, as it is used outside of the loop over its layers too"


def training(state, x):
    params, slots, update = state[0], state[1], state[2].update
    grads = jax.grad(lambda p: (jnp.tanh(x @ p["w"] + p["b"][None]) ** 2).mean())(
        params
    )
    grads = replica().all_reduce("mean", grads)
    updates, slots = update(grads, slots, params)
    return optax.apply_updates(params, updates), slots


def training_arguments(optimizer):
    params = shapes(w=(16, 16), b=(16,))
    return (params, jax.eval_shape(optimizer.init, params), optimizer), rows(2, 16)


def test_operations_that_only_xla_decides_about_are_told():
    optimizer = optax.contrib.muon(0.1)
    found = explain(strategy(), training, *training_arguments(optimizer))
    operations = {each.operation: each.count for each in found.sharding.undecided}
    assert operations == {"scan": 1}  # of matrix products
    assert "may exchange more: XLA chooses" in str(found)


def test_what_cuts_joins_or_orders_other_dimensions_keeps_the_parts():
    operations = [
        lambda g: g[:, 4:],
        lambda g: jax.lax.dynamic_slice(g, (0, jnp.int32(g.sum())), (16, 3)),
        lambda g: jnp.pad(g, ((0, 0), (1, 2))),
        lambda g: jnp.split(g, 2, axis=1)[1],
        lambda g: jnp.concatenate([g, jnp.ones_like(g)], axis=1),
        lambda g: jnp.sort(g, axis=1),
        lambda g: g[:, ::-1],
        lambda g: jnp.cumsum(g, axis=1) + jax.lax.cummax(g, axis=1),
    ]

    def step(w, x):
        grad = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        grad = replica().all_reduce("mean", grad)
        return w - grad, [operation(grad).sum(0) for operation in operations]

    own = strategy()
    args = jax.ShapeDtypeStruct((16, 8), F4), rows(2, 16)
    found = own.explain(step, args)
    assert found.sharding.undecided == ()

    def summed(collectives):
        return sum(c.nbytes for c in collectives if c.operation == "all_reduce")

    assert summed(found.collectives) > 8 * len(operations)
    # XLA does the same, and sums several at once.
    compiled = [c for c in found.compiled_collectives if c.operation == "all-reduce"]
    assert sum(c.nbytes for c in compiled) == summed(found.collectives)


def test_the_report():
    own = strategy()
    found = own.explain(training, training_arguments(optax.adam(0.1)))
    sharding, text = found.sharding, str(found)
    assert sharding.state_bytes == 3 * (1024 + 64) // N + 4
    assert f"state on a device            {sharding.state_bytes} B\n" in text
    assert "  if nothing were divided    3.19 KiB\n" in text
    assert "gathered in a step           1.06 KiB\n" in text
    assert "scattered in a step          1.06 KiB\n" in text
    assert "memory of a device, at most" in text
    assert "state[0]['w']        float32[16,16]  128 B        dimension 0\n" in text
    assert "no dimension of () divides by 8" in text
    html = found._repr_html_()
    assert "Divided arguments and variables: 6 arrays" in html
    assert "each replica needs its part of the sum only" in html
    # XLA agrees on what lies on a device between steps, but for the batch.
    batch = 2 * 16 * 4
    assert found.memory.arguments == sharding.state_bytes + batch


def test_a_lookup_in_a_divided_table_tells_what_it_sends():
    def step(table, ids):
        return js.sharded.lookup(table, ids).sum()  # <- lookup

    table = jax.ShapeDtypeStruct((64, 4), F4)
    ids = js.PerReplica(jax.ShapeDtypeStruct((N, 3), np.dtype("i4")))
    found = explain(strategy(), step, table, ids)
    assert {each.array for each in found.collectives} == {"table"}
    assert {each.line for each in found.collectives} == {marked(step, "lookup")}
    assert "all_to_all" in {each.operation for each in found.collectives}
    assert found.sharding.gathered_bytes < 64 * 4 * 4


def test_variables_that_are_divided_by_themselves():
    own = js.MirroredStrategy(js.simulate(N))
    with own.scope():
        w = js.Variable(np.ones(16, np.float32), name="w", sharding=0)

    def step(x):
        grad = jax.grad(lambda v: ((v * x) ** 2).sum())(w.value())
        w.assign_sub(replica().all_reduce("mean", grad))

    found = explain(own, step, rows(16))
    assert leaves(found) == {"variable 'w'": (0, "")}
    assert found.sharding.shard is None
    assert told(found) == [
        ("all_gather", 8, 1, "sharding"),
        ("reduce_scatter", 64, 1, "sharding"),
    ]
    assert found.collectives[0].array == "variable 'w'"
    assert "Sharded state: variables over 8 replicas" in str(found)


# `strategy.explain`: how state lies on the devices of each replica.

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


def rows_placed(strategy):
    n = strategy.num_replicas_in_sync
    return strategy.per_replica(np.ones((n, 3, 16), np.float32))


def bytes_of(leaves):
    return {leaf.path.split("'")[1]: leaf.device_bytes for leaf in leaves}


def test_state_lies_over_the_devices_of_each_replica(cores):
    found = cores.explain(step, (state_of(cores), rows_placed(cores))).sharding
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
    report = str(cores.explain(step, (state_of(cores), rows_placed(cores))))
    assert "State, whole on each of 4 replicas\n  what  " in report
    assert "\n  state on a device" in report
    assert "dimension 1 over core in each replica" in report
    assert "gathered in a step" not in report


def test_state_is_divided_over_replicas_and_their_devices():
    state = js.StateSharding("state", min_bytes=128)
    strategy = js.MirroredStrategy(logical_axes={"core": 2}, sharding=state)
    found = strategy.explain(
        step, (state_of(strategy), rows_placed(strategy)), compiled=False
    )
    assert bytes_of(found.sharding.leaves) == {"w": 2048 // 8, "v": 2048 // 8, "b": 64}
    assert {leaf.dimension for leaf in found.sharding.leaves} == {0, 1, None}
    assert "dimension 0; dimension 1 over core in each replica" in str(found)
    columns = NamedSharding(strategy.mesh, P("core"))
    v = jax.device_put(np.ones((16, 3), np.float32), columns)
    (leaf,) = strategy.explain(lambda v: 2 * v, (v,), compiled=False).sharding.leaves
    assert leaf.reason == "the devices of each replica divide it"


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
