"""Which results are proved equal on all replicas: exact where it matters, never wrong.

Every result that the analysis calls mirrored is compared on the devices, bit by bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxstrategy as js
from jaxstrategy.tracing.replication._rules import analyse

AXIS = "replica"


def replica():
    return js.get_replica_context()


def same(x):
    """What all replicas hold: a mirrored value."""
    return replica().all_reduce("sum", x)


def varying(out):
    """Whether each leaf of a result varies; the mirrored ones are checked to agree."""
    leaves = jax.tree.leaves(out, is_leaf=lambda leaf: isinstance(leaf, js.PerReplica))
    for leaf in leaves:
        if not isinstance(leaf, js.PerReplica):
            copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            for copy in copies[1:]:
                assert copy.tobytes() == copies[0].tobytes()
    return [isinstance(leaf, js.PerReplica) for leaf in leaves]


CASES = {
    "same argument": (lambda x, s: s, False),
    "own argument": (lambda x, s: x, True),
    "constant": (lambda x, s: jnp.ones(3), False),
    "arithmetic": (lambda x, s: (x + s, s * 2), [True, False]),
    "unused varying": (lambda x, s: (x, s)[1] + 1, False),
    "replica id": (lambda x, s: replica().replica_id_in_sync_group, True),
    "psum": (lambda x, s: lax.psum(x, AXIS), False),
    "psum of several": (lambda x, s: lax.psum((x, s), AXIS), [False, False]),
    "pmean": (lambda x, s: lax.pmean(x, AXIS), False),
    "pmin": (lambda x, s: lax.pmin(x, AXIS), False),
    "pmax": (lambda x, s: lax.pmax(x, AXIS), False),
    "all_gather": (lambda x, s: lax.all_gather(x, AXIS), False),
    "grouped psum": (
        lambda x, s: lax.psum(x, AXIS, axis_index_groups=[[0, 1], [2, 3]]), True),
    "grouped psum of the same": (
        lambda x, s: lax.psum(s, AXIS, axis_index_groups=[[0, 1], [2, 3]]), True),
    "ppermute": (lambda x, s: lax.ppermute(s, AXIS, [(0, 1)]), True),
    "all_to_all": (lambda x, s: lax.all_to_all(jnp.ones((4, 4)), AXIS, 0, 0), True),
    "psum_scatter": (lambda x, s: lax.psum_scatter(jnp.ones(4), AXIS), True),
    "jit": (lambda x, s: jax.jit(lambda a, b: (a, b + 1))(x, s), [True, False]),
    "psum in jit": (lambda x, s: jax.jit(same)(x), False),
    "checkpoint": (
        lambda x, s: (jax.checkpoint(jnp.sin)(x), jax.checkpoint(jnp.sin)(s)),
        [True, False]),
    "cond, same": (lambda x, s: lax.cond(s[0] > 0, lambda: s, lambda: s + 1), False),
    "cond, own result": (lambda x, s: lax.cond(s[0] > 0, lambda: s, lambda: x), True),
    "cond, own predicate": (
        lambda x, s: lax.cond(x[0] > 1, lambda: s, lambda: s + 1), True),
    "switch": (lambda x, s: lax.switch(1, [lambda: s, lambda: x, lambda: s]), True),
    "select": (lambda x, s: jnp.where(x > 1, s, s + 1), True),
    "fori": (lambda x, s: lax.fori_loop(0, 3, lambda _, c: c + s, s), False),
    "fori, own": (lambda x, s: lax.fori_loop(0, 3, lambda _, c: c + x, s), True),
    "while": (
        lambda x, s: lax.while_loop(lambda c: c[0] < 9, lambda c: c + s, s), False),
    "while, own stop": (
        lambda x, s: lax.while_loop(lambda c: c[0] < x[0], lambda c: c + 1, s), True),
    "while, late": (  # the second carry varies from the third turn on
        lambda x, s: lax.fori_loop(
            0, 4, lambda _, c: (c[1], c[2], c[3], x), (s, s, s, s)),
        [True, True, True, True]),
    "scan": (
        lambda x, s: lax.scan(lambda c, a: (c + a, (a, c)), s, jnp.stack([s, s])),
        [False, False, False]),
    "scan, own xs": (
        lambda x, s: lax.scan(lambda c, a: (c, (a, c)), s, jnp.stack([x, x])),
        [False, True, False]),
    "scan, own carry": (
        lambda x, s: lax.scan(lambda c, a: (c + a, (a, c)), x, jnp.stack([s, s])),
        [True, False, True]),
    "scan, own constant": (
        lambda x, s: lax.scan(lambda c, a: (c + x, a), s, jnp.stack([s, s])),
        [True, False]),
    "scan that reduces": (
        lambda x, s: lax.scan(lambda c, a: (same(c), a), x, None, length=2)[0], True),
    "map": (lambda x, s: (lax.map(jnp.sin, x), lax.map(jnp.sin, s)), [True, False]),
    "random": (
        lambda x, s: (
            jax.random.normal(jax.random.key(0), (2,)),
            jax.random.normal(replica().fold_in(jax.random.key(0)), (2,))),
        [False, True]),
    "linear solve": (
        lambda x, s: (
            jnp.linalg.solve(jnp.diag(s), s), jnp.linalg.solve(jnp.diag(x + s), s)),
        [False, True]),
    "sort and gather": (
        lambda x, s: (jnp.sort(s)[::-1], s[jnp.argsort(x)]), [False, True]),
    "callback": (
        lambda x, s: jax.pure_callback(
            lambda a: a, jax.ShapeDtypeStruct((3,), jnp.float32), s), True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_operation(four, name):
    step, expected = CASES[name]
    x = four.per_replica([np.arange(3.0) + i for i in range(4)])
    s = jnp.array([1.0, 2.0, 3.0])
    expected = [expected] if isinstance(expected, bool) else expected
    assert varying(four.run(lambda x, s: step(x, s), (x, s))) == expected


def test_custom_derivative_rules_are_entered(four):
    @jax.custom_vjp
    def vjp(x, s):
        return x * 2, s * 2

    vjp.defvjp(lambda x, s: (vjp(x, s), None), lambda _, g: g)

    @jax.custom_jvp
    def jvp(x, s):
        return x * 2, s * 2

    jvp.defjvp(lambda p, t: (jvp(*p), jvp(*t)))

    def step(x):
        s = same(x)
        grad = jax.grad(lambda x, s: sum(vjp(x, s)), (0, 1))(x, s)
        return vjp(x, s), jvp(x, s), grad

    out = varying(four.run(step, (four.per_replica([1.0, 2.0, 3.0, 4.0]),)))
    assert out == [True, False, True, False, False, False]


def test_references(four):
    def step(x):
        s = same(x)
        untouched, written, added, in_loop, freed = (jax.new_ref(s) for _ in range(5))
        before = written[...]
        written[...] = x
        added[...] += s

        def turn(i, carry):
            in_loop[...] += x
            return carry

        lax.fori_loop(0, 2, turn, 0)
        swapped = freed[...]
        freed[...] = x
        return {
            "a untouched": untouched[...],
            "b before": before,
            "c written": written[...],
            "d added": added[...],
            "e in a loop": in_loop[...],
            "f swapped": swapped,
            "g frozen": jax.freeze(freed),
        }

    out = varying(four.run(step, (four.per_replica([1.0, 2.0, 3.0, 4.0]),)))
    assert out == [False, False, True, False, True, False, True]


def test_a_reference_read_before_it_varies_in_the_next_turn(four):
    def step(x):
        ref = jax.new_ref(same(x))

        def turn(i, carry):
            seen = ref[...]
            ref[...] = x
            return seen

        return lax.fori_loop(0, 3, turn, same(x))

    assert varying(four.run(step, (four.per_replica([1.0, 2.0, 3.0, 4.0]),))) == [True]


def test_a_reference_written_in_a_branch_that_differs(four):
    def step(x):
        ref = jax.new_ref(same(x))
        lax.cond(x > 2, lambda: ref.__setitem__(..., 0.0), lambda: None)
        return ref[...]

    assert varying(four.run(step, (four.per_replica([1.0, 2.0, 3.0, 4.0]),))) == [True]


def test_a_nested_shard_map_over_another_axis():
    mesh = jax.make_mesh((4, 2), (AXIS, "core"), axis_types=(AxisType.Auto,) * 2)
    P = PartitionSpec

    def step(x, s):
        inner = functools.partial(
            jax.shard_map,
            in_specs=P("core"),
            out_specs=P("core"),
            axis_names={"core"},
            check_vma=False,
        )
        own_core = inner(lambda v: v + lax.axis_index("core"))
        total = inner(lambda v: jnp.tile(lax.psum(v, "core"), 2))
        return own_core(x), own_core(s), total(x), total(s)

    outer = jax.shard_map(
        step, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={AXIS}, check_vma=False
    )
    (eqn,) = jax.make_jaxpr(outer)(jnp.ones(4), jnp.ones(4)).jaxpr.eqns
    found = analyse(eqn.params["jaxpr"], [True, False], AXIS, 4).outputs
    assert [state.varies for state in found] == [True, False, True, False]


def test_vmap_over_another_axis_inside(four):
    def step(x):
        s = same(x)
        total = jax.vmap(lambda v: lax.psum(v, "inner"), axis_name="inner")
        both = jax.vmap(lambda v: lax.psum(v, ("inner", AXIS)), axis_name="inner")
        return total(x), total(s), both(x)

    x = four.per_replica([np.arange(3.0) + i for i in range(4)])
    assert varying(four.run(step, (x,))) == [True, False, False]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        x = nn.BatchNorm(use_running_average=not train, axis_name=AXIS)(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        x = x.reshape(x.shape[0], -1, 4)
        x = nn.MultiHeadDotProductAttention(num_heads=2)(x, x)
        x = nn.RNN(nn.LSTMCell(4))(x)
        return nn.Dense(3)(x.mean(axis=1))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        optax.MultiSteps(optax.adafactor(1e-2), 2).gradient_transformation(),
    ],
    ids=["clipped adam", "adafactor in steps"],
)
def test_the_state_of_a_real_model_is_mirrored(two, optimizer):
    net = Net()
    images = np.random.default_rng(0).normal(size=(4, 4, 4, 1)).astype(np.float32)

    def build(key):
        variables = net.init(key, jnp.zeros((1, 4, 4, 1)), train=False)
        return variables, optimizer.init(variables["params"])

    def loss(params, stats, batch, key):
        logits, updated = net.apply(
            {"params": params, "batch_stats": stats},
            batch, train=True, rngs={"dropout": key}, mutable=["batch_stats"],
        )  # fmt: skip
        labels = jnp.zeros(len(batch), jnp.int32)
        per_example = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return per_example.mean(), updated["batch_stats"]

    @two.run
    def step(variables, optimizer_state, batch, key):
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(
            variables["params"], variables["batch_stats"], batch, replica().fold_in(key)
        )
        grads = replica().all_reduce("mean", grads)
        updates, optimizer_state = optimizer.update(
            grads, optimizer_state, variables["params"]
        )
        params = optax.apply_updates(variables["params"], updates)
        return {"params": params, "batch_stats": stats}, optimizer_state, value

    variables, state = two.init(build, jax.random.key(0))
    (batch,) = two.experimental_distribute_dataset([images])
    for _ in range(2):
        variables, state, value = step(variables, state, batch, jax.random.key(1))
    assert not any(varying((variables, state)))
    assert isinstance(value, js.PerReplica)


# Soundness: random programs. What is called mirrored must be equal on all replicas.

UNARY = [
    lambda v: v * 2.0,
    jnp.sin,
    lambda v: lax.psum(v, AXIS),
    lambda v: lax.pmax(v, AXIS),
    lambda v: lax.psum(v, AXIS, axis_index_groups=[[0, 1], [2, 3]]),
    lambda v: lax.ppermute(v, AXIS, [(i, (i + 1) % 4) for i in range(4)]),
    lambda v: lax.ppermute(v, AXIS, [(0, 2)]),
    lambda v: lax.all_gather(v, AXIS).mean(0),
    lambda v: lax.psum_scatter(jnp.tile(v, (4, 1)), AXIS),
    lambda v: jax.jit(jnp.cos)(v),
    jax.checkpoint(lambda v: jnp.tanh(v) + 1.0),
]
BINARY = [
    lambda a, b: a + b,
    lambda a, b: jnp.where(a > 0.3, b, b + 1.0),
    lambda a, b: lax.cond(a[0] > 0.3, lambda: b, lambda: b * 2.0),
    lambda a, b: lax.scan(lambda c, x: (c + b, c), a, None, length=2)[0],
    lambda a, b: lax.scan(lambda c, x: (c, x * 2.0), b, jnp.stack([a, a]))[1][1],
    lambda a, b: lax.fori_loop(0, 2, lambda i, c: (c[1], a), (b, b))[0],
    lambda a, b: lax.while_loop(
        lambda c: c[1] < jnp.abs(a[0]), lambda c: (c[0] + 1.0, c[1] + 0.5), (b, 0.0)
    )[0],
]


@st.composite
def programs(draw):
    steps = draw(st.lists(st.tuples(
        st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 99),
        st.integers(0, 99)), min_size=2, max_size=7))  # fmt: skip
    return tuple(steps)


def build(steps):
    def step(x, s):
        known = [x, s]
        for operation, first, second in steps:
            a, b = known[first % len(known)], known[second % len(known)]
            if operation < len(UNARY):
                known.append(UNARY[operation](a))
            else:
                known.append(BINARY[operation - len(UNARY)](a, b))
        return known[2:]

    return step


@pytest.mark.filterwarnings("ignore::jaxstrategy.DoubleReductionWarning")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(programs())
def test_what_is_called_mirrored_is_equal_on_all_replicas(steps):
    strategy = js.MirroredStrategy(jax.devices()[:4])
    x = strategy.per_replica([np.array([0.1, 0.7]) * (i + 1) for i in range(4)])
    varying(strategy.run(build(steps), (x, jnp.array([0.2, 0.4]))))
