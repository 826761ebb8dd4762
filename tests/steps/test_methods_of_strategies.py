"""Every public method of a strategy, by itself and in functions that JAX traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js

NAMES = """
    accumulate assert_in_sync cluster_resolver compile compression_state devices
    distribute_datasets_from_function experimental_distribute_dataset
    experimental_distribute_datasets_from_function
    experimental_distribute_values_from_function experimental_local_results explain
    extended gather init load_compiled local_steps measure_links mesh mirror
    num_replicas_in_sync per_replica profile reduce run scope several step
""".split()
EXTENDED = """
    batch_reduce_to colocate_vars_with copy_to experimental_between_graph
    experimental_logical_device experimental_require_static_shapes
    experimental_should_init parameter_devices reduce_to should_checkpoint
    should_save_summary update update_on value_container variable_created_in_scope
    worker_devices
""".split()
PROPERTIES = """
    cluster_resolver devices extended mesh num_replicas_in_sync
    experimental_between_graph experimental_require_static_shapes
    experimental_should_init parameter_devices should_checkpoint should_save_summary
    worker_devices
""".split()


def public(of):
    return [name for name in dir(of) if not name.startswith("_")]


@pytest.fixture(scope="module")
def strategy(two):
    return two


def test_a_strategy_shows_its_methods_and_no_parts(strategy):
    assert public(strategy) == public(js.get_strategy()) == NAMES
    assert public(strategy.extended) == EXTENDED


def double(x):
    return 2.0 * x


def inside(block, function):
    with block:
        return function()


def calls(s):
    """For each method a function of one number, linear in it."""
    values = s.per_replica([1.0, 2.0])
    with s.scope():
        v = js.Variable(1.0, name="v")
        o = js.Variable(0.0, name="o", synchronization="on_read", aggregation="sum")
    step, ahead = s.step(double), s.compile(double, (np.float32(1.0),))
    every = s.experimental_distribute_values_from_function
    options = js.experimental.CommunicationOptions(compression="int8")

    def batches(method, given):
        return lambda x: list(getattr(s, method)(given(x)))

    def pairs(a, b):
        return a + b, b

    yield from {
        "accumulate": lambda x: s.accumulate(1)(jnp.sum)(x[None]),
        "assert_in_sync": lambda x: s.assert_in_sync(x),
        "compile": lambda x: ahead(x),
        "compression_state": lambda x: (
            s.compression_state({"w": jnp.stack([x] * 9)}, options).errors
        ),
        "distribute_datasets_from_function": batches(
            "distribute_datasets_from_function", lambda x: lambda _: [np.ones(4)]
        ),
        "experimental_distribute_dataset": batches(
            "experimental_distribute_dataset", lambda x: [np.ones(4)]
        ),
        "experimental_distribute_datasets_from_function": batches(
            "experimental_distribute_datasets_from_function",
            lambda x: lambda _: [jnp.stack([x] * 4)],
        ),
        "experimental_distribute_values_from_function": lambda x: every(
            lambda context: x * context.replica_id_in_sync_group
        ),
        "constants of replicas": lambda x: every(
            lambda context: float(context.replica_id_in_sync_group)
        ),
        "experimental_local_results": lambda x: s.experimental_local_results(x),
        "local results of values": lambda x: [
            x * each for each in s.experimental_local_results(values)
        ],
        "explain": lambda x: (s.explain(double, (x,)), x)[1],
        "gather": lambda x: s.gather(x[None]),
        "init": lambda x: s.init(double, x),
        "load_compiled": lambda x: s.load_compiled("/none", double, (x,)),
        "local_steps": lambda x: s.local_steps(pairs)(x, (x, x)),
        "measure_links": lambda x: 0.0 * s.measure_links().bandwidth,
        "mirror": lambda x: s.mirror({"x": x, "name": "net"})["x"],
        "mirrored constants": lambda x: s.mirror(2.0, replica=1) + x,
        "per_replica": lambda x: s.per_replica([x, 2.0 * x]),
        "constants per replica": lambda x: s.per_replica([1.0, np.ones(())]),
        "versions in one array": lambda x: s.per_replica(jnp.stack([x, 3.0 * x])),
        "reduced versions": lambda x: s.reduce("sum", s.per_replica([x, 2.0 * x])),
        "profile": lambda x: s.profile(step)(x),
        "reduce": lambda x: s.reduce("sum", x),
        "reduced values": lambda x: s.reduce("mean", values) * x,
        "run": lambda x: s.run(double, (x,)),
        "run with values": lambda x: s.reduce("sum", s.run(jnp.multiply, (x, values))),
        "scope": lambda x: inside(s.scope(), lambda: s.reduce("mean", x)),
        "several": lambda x: s.several(pairs)(x, (x, x)),
        "step": lambda x: step(x),
        "batch_reduce_to": lambda x: s.extended.batch_reduce_to(
            "sum", [(x, v), (values, "CPU:1")]
        )[0],
        "colocate_vars_with": lambda x: inside(
            s.scope(), lambda: inside(s.extended.colocate_vars_with(v), lambda: x)
        ),
        "copy_to": lambda x: s.extended.copy_to(x, "CPU:1"),
        "experimental_logical_device": lambda x: inside(
            s.extended.experimental_logical_device(0), lambda: x
        ),
        "reduce_to": lambda x: s.extended.reduce_to("sum", x, "CPU:1"),
        "value_container": lambda x: s.extended.value_container(x),
        "variable_created_in_scope": lambda x: (
            x * s.extended.variable_created_in_scope(v)
        ),
        "update": lambda x: s.extended.update(v, lambda v, a: v.assign(a), (x,)),
        "update of copies": lambda x: s.extended.update(
            o, lambda o, a: o.assign(a), (x,)
        ),
        "update_on": lambda x: s.extended.update_on("CPU:1", v.assign, (x,)),
    }.items()


# What cannot be done while JAX traces, by what is said then.
REFUSED = {
    "assert_in_sync": (js.errors.TracedValueError, "cannot look at `tree` while JAX"),
    "compile": (js.errors.CompiledStepError, "cannot be part of a function that JAX"),
    "load_compiled": (FileNotFoundError, "/none"),
} | {
    name: (js.errors.ContextError, "A dataset was read inside")
    for name in NAMES
    if "distribute_dataset" in name
}
UNDER_JIT = {
    "measure_links": (js.errors.TracedValueError, "`strategy.measure_links` was")
}
CHANGED = (js.errors.ContextError, "Variable '.' was changed under `jax.vmap`")
UNDER_VMAP = dict.fromkeys(("update", "update of copies", "update_on"), CHANGED)
NOT_DIFFERENTIATED = ("update", "update of copies", "update_on")  # constants to it


def total(tree):
    leaves = jax.tree.leaves(tree)
    return sum((jnp.sum(leaf) for leaf in leaves), start=jnp.float32(0.0))


@pytest.mark.slow
def test_each_method_in_functions_that_jax_traces(strategy):
    one, xs = jnp.float32(1.0), jnp.float32([1.0, 2.0, 4.0])
    covered = set(PROPERTIES)
    for name, call in calls(strategy):
        covered.add(name)

        def function(x, call=call):
            return total(call(x))

        ways = {
            # The function is traced once, as under `jax.jit`.
            "scan": (lambda: jax.lax.map(function, xs), xs, UNDER_JIT),
            "vmap": (lambda: jax.vmap(function)(xs), xs, UNDER_VMAP),
            "grad": (lambda: jax.grad(function)(one), None, {}),
        }
        if name not in REFUSED:
            start = function(one)
            slope = function(2.0 * one) - start
        for way, (traced, of, refused) in ways.items():
            refused = REFUSED | refused
            if name in refused:
                error, match = refused[name]
                with pytest.raises(error, match=match):
                    print(f"{name} under {way}:", traced())
                continue
            if of is not None:
                want = start + (of - one) * slope
            else:
                want = 0.0 if name in NOT_DIFFERENTIATED else slope
            np.testing.assert_allclose(traced(), want, err_msg=f"{name} under {way}")
    assert covered >= {*NAMES, *EXTENDED}
