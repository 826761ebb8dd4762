"""Which results are proved equal on all replicas: never wrong, compared bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import linen as nn
from helpers.cases import each_of
from helpers.replicas import replica
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from jax import lax
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import PartitionSpec

import jaxstrategy as js

AXIS = "replica"


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
    "psum of several": (lambda x, s: lax.psum((x, s), AXIS), [False, False]),
    "grouped psum": (
        lambda x, s: lax.psum(x, AXIS, axis_index_groups=[[0, 1], [2, 3]]), True),
    "grouped psum of the same": (
        lambda x, s: lax.psum(s, AXIS, axis_index_groups=[[0, 1], [2, 3]]), True),
    "ppermute": (lambda x, s: lax.ppermute(s, AXIS, [(0, 1)]), True),
    "all_to_all": (lambda x, s: lax.all_to_all(jnp.ones((4, 4)), AXIS, 0, 0), True),
    "psum_scatter": (lambda x, s: lax.psum_scatter(jnp.ones(4), AXIS), True),
    "jit": (lambda x, s: jax.jit(lambda a, b: (a, b + 1))(x, s), [True, False]),
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
        lambda x, s: lax.scan(lambda c, a: (same(c), a), x, None, length=2)[0], False),
    "scan that reduces later": (
        lambda x, s: lax.scan(lambda c, a: (same(c), c), x, None, length=2)[1], True),
    "scan without a turn": (
        lambda x, s: lax.scan(lambda c, a: (same(c), a), x, None, length=0)[0], True),
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
    "io_callback": (
        lambda x, s: io_callback(
            lambda a: a, jax.ShapeDtypeStruct((3,), jnp.float32), s), True),
    "callback in jit": (
        lambda x, s: jax.jit(lambda v: jax.pure_callback(
            lambda a: a, jax.ShapeDtypeStruct((3,), jnp.float32), v))(s), True),
    "buffer_callback": (
        lambda x, s: buffer_callback(
            copy_to, jax.ShapeDtypeStruct((3,), jnp.float32))(s), True),
    "printing": (lambda x, s: (jax.debug.callback(lambda v: None, x), s)[1], False),
    "one function, both levels": (
        lambda x, s: [TWICE(s), TWICE(x), TWICE(s)], [False, True, False]),
    "uninitialised": (lambda x, s: lax.empty((3,), jnp.float32) + s, True),
    "nothing uninitialised": (
        lambda x, s: jnp.concatenate([lax.empty((0,), jnp.float32), s]), False),
    "reshape": (lambda x, s: (x.reshape(3, 1), s.reshape(3, 1)), [True, False]),
    "device_put": (lambda x, s: jax.device_put((x, s)), [True, False]),
    "optimization_barrier": (
        lambda x, s: lax.optimization_barrier((x, s)), [True, False]),
    "composite": (
        lambda x, s: lax.composite(lambda a, b: (a + 1, b + 1), "test.ab")(x, s),
        [True, False]),
    "replica id in a composite": (
        lambda x, s: lax.composite(lambda a: a * lax.axis_index(AXIS), "test.a")(s),
        True),
    "custom_root": (lambda x, s: (root(x[0] + 1), root(s[0])), [True, False]),
    "searchsorted": (
        lambda x, s: (jnp.searchsorted(s, x), jnp.searchsorted(s, s)), [True, False]),
    "linear solve that reduces": (
        lambda x, s: jax.scipy.sparse.linalg.cg(
            lambda v: lax.pmean((1 + x) * v, AXIS), s, maxiter=2)[0], False),
    "linear solve by replica id": (
        lambda x, s: lax.custom_linear_solve(
            lambda v: v * (1 + lax.axis_index(AXIS)), s,
            lambda _, b: b / (1 + lax.axis_index(AXIS)), symmetric=True), True),
    "extremes": (lambda x, s: (s.max(), s.min(), x.max()), [False, False, True]),
    "reduction by several": (
        lambda x, s: [
            lax.reduce((v, v), (0.0, 0.0), lambda p, q: (p[0] + q[0], p[1] * q[1]), (0,)
        )[0] for v in (x, s)], [True, False]),
    "freed reference": (lambda x, s: read_and_free(jax.new_ref(s)), False),
    "uniform noise": (lambda x, s: lax.rng_uniform(0.0, 1.0, (3,)), True),
    "finite and equal": (
        lambda x, s: (jnp.isfinite(s) & (s == s) & (s != 0) & (s <= 1), x >= s),
        [False, True]),
    "a written reference": (lambda x, s: written(jax.new_ref(s), x, s), [False, True]),
    "a reference read before it varies": (
        lambda x, s: read_before_it_varies(jax.new_ref(s), x, s), True),
    "a reference written in a branch, and one read there": (
        lambda x, s: in_branches(jax.new_ref(s), jax.new_ref(s), x), [False, True]),
    "a reference written by a test that runs more often somewhere": (
        lambda x, s: in_a_test(jax.new_ref(0.0), x), True),
    "a reference that a loop only reads": (
        lambda x, s: read_in_a_test(jax.new_ref(s), x), False),
    "a value that goes through several references": (
        lambda x, s: handed_on([jax.new_ref(s) for _ in range(4)], x), True),
    "gradients by rules": (
        lambda x, s: [jax.grad(lambda v: jnp.sum(by_rules(v)))(v) for v in (x, s)],
        [True, False]),
    "rules": (lambda x, s: (by_rules(x), by_rules(s)), [True, False]),
    "named axis of its own": (
        lambda x, s: jax.vmap(lambda v: v + lax.axis_index(AXIS), axis_name=AXIS)(s),
        False),
}  # fmt: skip


def copy_to(context, out, value):
    np.asarray(out)[...] = np.asarray(value)


def written(ref, x, s):
    before = ref[...]
    ref[...] = s
    jax.ref.addupdate(ref, ..., x)
    return before, jax.freeze(ref)


def read_before_it_varies(ref, x, s):
    def turn(i, carry):
        seen = ref[...]
        ref[...] = x
        return seen

    return lax.fori_loop(0, 3, turn, s)


def in_branches(read, written, x):
    lax.cond(x[0] > 2, lambda: read[...], lambda: read[...] + written[...])
    lax.cond(x[0] > 2, lambda: written.__setitem__(..., 0 * x), lambda: None)
    return read[...], written[...]


def in_a_test(ref, x):
    def goes_on(turn):
        ref[...] += 1.0
        return turn < x[0]

    lax.while_loop(goes_on, lambda turn: turn + 1, 0.0)
    return ref[...]


def read_in_a_test(ref, x):
    lax.while_loop(lambda c: c < x[0], lambda c: c + jnp.abs(ref[...]).sum(), 0.0)
    return ref[...]


def handed_on(refs, x):
    def turn(i, carry):
        for here, there in zip(refs[1:], refs, strict=False):
            here[...], there[...] = there[...], x
        return carry

    lax.fori_loop(0, 5, turn, 0)
    return refs[-1][...]


@jax.custom_vjp
def squared(v):
    return v**2


squared.defvjp(lambda v: (v**2, v), lambda v, g: (2 * v * g,))


def by_rules(v):
    return squared(jax.nn.relu(v))


TWICE = jax.jit(lambda v: jnp.sin(v) * 2)


def root(value):
    return lax.custom_root(
        lambda y: y**2 - value,
        jnp.ones_like(value),
        lambda f, y: lax.fori_loop(0, 3, lambda _, y: y - f(y) / (2 * y), y),
        lambda g, y: y / g(1.0),
    )


def read_and_free(ref):
    value = ref[...]
    jax.free_ref(ref)
    return value


def test_each_kind_of_operation(four):
    x = four.per_replica([np.arange(3.0) + i for i in range(4)])
    s = jnp.array([1.0, 2.0, 3.0])

    def step(x, s):
        return {name: case(x, s) for name, (case, _) in CASES.items()}

    found = four.run(step, (x, s))
    for name, (_, expected) in CASES.items():
        expected = [expected] if isinstance(expected, bool) else expected
        assert varying(found[name]) == expected, name


def test_a_nested_shard_map_over_another_axis():
    strategy = js.MirroredStrategy(logical_axes={"core": 2})
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

    x = strategy.per_replica(list(np.arange(16, dtype=np.float32).reshape(4, 4)))
    found = strategy.run(step, (x, jnp.ones(4)))
    assert [isinstance(each, js.PerReplica) for each in found] == [True, False] * 2


# Precision: models and optimizers of Flax and Optax.


def differing(strategy, step, *args):
    """The results of a step that are not proved equal; nothing is run."""
    return [e.path for e in strategy.explain(step, args, compiled=False).per_replica]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        return x + nn.MultiHeadDotProductAttention(num_heads=2)(y, y), None


class Deep(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(8, 4)(jnp.abs(x[..., 0]).astype(jnp.int32) % 8)
        if self.kind == "scan":
            split = {"params": True}
            layers = nn.scan(Layer, {"params": 0}, split_rngs=split, length=2)
            return layers()(x, None)[0]
        layer = {"jit": nn.jit, "remat": nn.remat}[self.kind](Layer)
        return layer()(layer()(x)[0])[0]


OPTIMIZERS = {
    "scheduled adamw": optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
    "adafactor": optax.adafactor(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-3)),
    "d-adapted": optax.contrib.dadapt_adamw(1e-3),
    "in steps": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "if finite": optax.apply_if_finite(optax.sgd(1e-3), 5),
    "injected": optax.inject_hyperparams(optax.sgd)(1e-3, momentum=0.9),
    "line search": optax.lbfgs(),
    "schedule free": optax.contrib.schedule_free_adamw(1e-3),
}


@pytest.mark.slow
@each_of(
    ("net", "name"),
    [(Deep(kind), "adafactor") for kind in ("scan", "jit", "remat")]
    + [(nn.RNN(nn.LSTMCell(8)), "adafactor")]
    + [(nn.Dense(3), name) for name in OPTIMIZERS],
)
def test_no_part_of_the_state_varies_without_need(four, net, name):
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name])

    def step(params, state, batch):
        def mean_loss(params):
            return lax.pmean(jnp.mean(net.apply(params, batch) ** 2), AXIS)

        loss, grads = jax.value_and_grad(mean_loss)(params)
        grads = lax.pmean(grads, AXIS)
        updates, state = optimizer.update(
            grads, state, params, value=loss, grad=grads,
            value_fn=lambda params: optax.tree.norm(params),  # needs no reduction
        )  # fmt: skip
        return optax.apply_updates(params, updates), state, loss

    batch = jax.ShapeDtypeStruct((4, 2, 4), jnp.float32)
    params = jax.eval_shape(net.init, jax.random.key(0), batch)
    state = jax.eval_shape(optimizer.init, params)
    batches = js.PerReplica(jax.ShapeDtypeStruct((4, 4, 2, 4), jnp.float32))
    assert differing(four, step, params, state, batches) == []


# Time: what is called twice as often at each level would be gone through for ever.


def nested_scans(n):
    def step(x, s):
        def level(depth, carry):
            a, b = carry
            if depth == 0:
                return b, a + b
            return lax.scan(
                lambda c, _: (level(depth - 1, (jnp.sin(c[0]), c[1])), None),
                (a, b), None, length=2,
            )[0]  # fmt: skip

        return level(n, (x, s))

    return step


def doubled_calls(n):
    def step(x, s):
        def level(depth):
            if depth == 0:
                return jax.jit(jnp.sin)
            inner = level(depth - 1)
            return jax.jit(lambda v: inner(inner(v)))

        return lax.cond(x[0] > 0, level(n), jnp.cos, x)

    return step


@pytest.mark.slow
def test_the_work_grows_with_the_program_and_not_with_what_it_does(four):
    x = js.PerReplica(jax.ShapeDtypeStruct((4, 4), jnp.float32))
    s = jax.ShapeDtypeStruct((4,), jnp.float32)
    for deep in (nested_scans(20), doubled_calls(25)):
        assert differing(four, deep, x, s)


# Soundness: random programs. What is called mirrored must be equal on all replicas.

PAIRS = [[0, 1], [2, 3]]
SMOOTH = [
    lambda a, b: a + b,
    lambda a, b: jnp.sin(a)[::-1],
    lambda a, b: a * lax.axis_index(AXIS),
    lambda a, b: lax.psum(a, AXIS),
    lambda a, b: lax.pmean(b, AXIS),
    lambda a, b: lax.ppermute(a, AXIS, [(0, 2), (1, 0)]),
    lambda a, b: lax.ppermute(a, AXIS, [(0, 2), (1, 0), (2, 3), (3, 1)]),
    lambda a, b: lax.all_gather(a, AXIS).mean(0),
    lambda a, b: lax.all_gather(
        lax.psum_scatter(a, AXIS, tiled=True), AXIS, tiled=True
    ),
    lambda a, b: lax.psum_scatter(jnp.tile(a, (4, 1)), AXIS),
    lambda a, b: jnp.where(a > 0.3, b, b + 1.0),
    lambda a, b: jax.nn.relu(a) - jax.nn.silu(b),
    lambda a, b: lax.scan(lambda c, x: (c + b, c * x), a, a, reverse=True)[0],
]
PLAIN = [
    *SMOOTH,
    lambda a, b: lax.pmax(a, AXIS),
    lambda a, b: lax.pmin(a, AXIS, axis_index_groups=PAIRS),
    lambda a, b: lax.psum(a, AXIS, axis_index_groups=PAIRS),
    lambda a, b: lax.all_gather(a, AXIS, axis_index_groups=PAIRS).sum(0),
    lambda a, b: lax.all_to_all(a, AXIS, 0, 0, tiled=True),
    lambda a, b: jnp.sort(b)[jnp.argsort(a)],
    lambda a, b: lax.dynamic_update_slice(b, a[:1], (jnp.int32(a[0]),)),
    lambda a, b: jax.ops.segment_sum(a, jnp.int32(b) % 4, 4),
    lambda a, b: jax.random.normal(jax.random.fold_in(KEY, jnp.int32(a[0] * 9)), (4,)),
    lambda a, b: lax.associative_scan(jnp.add, a),
    lambda a, b: jax.grad(lambda v: jnp.sum(halved(v) * b))(a),
]
KEY = jax.random.PRNGKey(0)


@jax.custom_vjp
def halved(v):
    return v / 2


# The gradient is wrong on purpose, and reduced on the way.
halved.defvjp(lambda v: (v / 2, v), lambda v, g: (lax.pmean(v * g, AXIS),))


def called_twice(f, a, b):
    f = jax.jit(f)
    return f(a, b) + f(f(b, a), b)


def through_references(f, a, b):
    kept, last = jax.new_ref(a), jax.new_ref(b)

    @jax.jit
    def move(source, target, new):
        target[...] = source[...]
        source[...] = new

    def turn(i, carry):
        move(kept, last, f(carry, last[...]))
        return last[...]

    return lax.fori_loop(0, 3, turn, b) + kept[...]


def overwritten(f, a, b):
    ref = jax.new_ref(a)

    @jax.jit
    def replace(ref, new):
        ref[...] = new

    def turn(i, carry):
        seen = ref[...]
        replace(ref, f(carry, b))
        return seen

    replace(ref, b)
    out = lax.fori_loop(0, 2, turn, a)
    lax.cond(b[0] > 0.5, lambda: replace(ref, out), lambda: replace(ref, b))
    return ref[...]


def overwritten_in_part(f, a, b):
    ref = jax.new_ref(a)
    ref[...] = b
    ref[1:] = f(a, b)[1:]
    return ref[...]


def ruled(f, a, b):
    """A function whose derivative is `f`, where it is taken."""
    made = jax.custom_jvp(lambda x: jnp.sin(x))
    made.defjvp(lambda p, t: (jnp.sin(p[0]), f(t[0], p[0])))
    return made(a) + jax.jvp(made, (b,), (a,))[1]


def referred_in_branch(f, a, b):
    ref = jax.new_ref(b)

    def write():
        ref[...] = f(a, b)

    lax.cond(a[0] > 0.5, write, lambda: None)
    return ref[...]


def counted_in_test(f, a, b):
    ref = jax.new_ref(0.0)

    def goes_on(carry):
        ref[...] += 1.0
        return carry[1] < jnp.minimum(jnp.abs(a[0]), 2.0)

    out, _ = lax.while_loop(
        goes_on, lambda carry: (f(carry[0], b), carry[1] + 0.5), (a, 0.0)
    )
    return out + ref[...]


def differentiated(f, a, b):
    return jax.grad(lambda v: jnp.sum(f(v, b)))(a)


def along_an_axis(f, a, b):
    inner = jax.vmap(
        lambda v: lax.psum(f(v, a), "inner") + lax.axis_index("inner"),
        axis_name="inner",
    )
    return inner(jnp.stack([a, b])).sum(0)


HOLDING_SMOOTH = [
    differentiated,
    along_an_axis,
    lambda f, a, b: jax.checkpoint(f)(a, b),
    lambda f, a, b: jax.grad(lambda v: jnp.sum(jax.checkpoint(f)(v, b) ** 2))(a),
    lambda f, a, b: jax.jvp(f, (a, b), (b, a))[1],
]
HOLDING = [
    called_twice,
    through_references,
    overwritten,
    overwritten_in_part,
    ruled,
    referred_in_branch,
    counted_in_test,
    lambda f, a, b: lax.cond(b[0] > 0.3, f, lambda a, b: b * 2.0, a, b),
    lambda f, a, b: lax.switch(1, [f, lambda a, b: f(b, a), lambda a, b: a], a, b),
    lambda f, a, b: lax.scan(lambda c, x: (f(c, b), x + c), a, jnp.stack([a, b]))[
        1
    ].sum(0),
    lambda f, a, b: lax.fori_loop(0, jnp.int32(b[0]) % 3, lambda _, c: f(c, b), a),
    lambda f, a, b: lax.fori_loop(0, 3, lambda _, c: (c[1], f(c[0], a)), (b, b))[0],
]


def bodies(operations, holders=()):
    """Programs as trees: (operation or holder, which operands, body of a holder)."""
    place = st.integers(0, 9)
    line = st.tuples(st.sampled_from(operations), place, place, st.none())
    for holding, body in holders:
        line |= st.tuples(st.sampled_from(holding), place, place, body)
    return st.lists(line, min_size=1, max_size=4)


SMOOTH_BODIES = bodies(SMOOTH)
INNER = bodies(PLAIN, [(HOLDING_SMOOTH, SMOOTH_BODIES), (HOLDING, bodies(PLAIN))])
PROGRAMS = bodies(PLAIN, [(HOLDING_SMOOTH, SMOOTH_BODIES), (HOLDING, INNER)])


def interpreted(lines, x, s):
    known = [x, s]
    for operation, first, second, body in lines:
        a, b = known[first % len(known)], known[second % len(known)]
        if body is None:
            known.append(operation(a, b))
        else:
            f = functools.partial(_last, body)
            known.append(operation(f, a, b))
    return known


def _last(body, a, b):
    return interpreted(body, a, b)[-1]


@pytest.mark.filterwarnings("ignore::jaxstrategy.errors.DoubleReductionWarning")
@pytest.mark.filterwarnings("ignore::jaxstrategy.errors.RecompilationWarning")
def test_what_is_called_mirrored_is_equal_on_all_replicas(four):
    x = four.per_replica([np.linspace(0, 0.7, 4, np.float32) * i for i in range(4)])
    s = jnp.linspace(0.2, 0.8, 4)
    outcomes = []

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],  # compiling is not drawing
    )
    @given(PROGRAMS)
    def is_equal(lines):
        outcomes.append("refused")
        try:
            out = four.run(lambda x, s: interpreted(lines, x, s), (x, s))
        except js.errors.DivergentCollectiveError:
            assume(False)
        outcomes[-1] = "varying" if all(varying(out[2:])) else "mirrored"

    is_equal()
    assert outcomes.count("refused") < len(outcomes) / 3
    assert outcomes.count("mirrored") > len(outcomes) / 3
