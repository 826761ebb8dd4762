"""What is known of each primitive: JAX's own by a table, others by their lowering.

Whatever is not known is not called mirrored, and does not hide a deadlock.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import jax.scipy.special
import jax.scipy.stats
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive, primitives
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

import jaxstrategy as js
from jaxstrategy.tracing.replication import _lowered, _pure, _rules
from jaxstrategy.tracing.replication._jaxprs import all_eqns
from jaxstrategy.tracing.replication._rules import analyse

AXIS = "replica"
F4 = jax.ShapeDtypeStruct((4,), jnp.float32)


def local(strategy):
    """Zeros on replica 0, ones on replica 1, and so on."""
    count = strategy.num_replicas_in_sync
    return strategy.per_replica([np.full(4, i, np.float32) for i in range(count)])


def is_mirrored(out):
    """Whether a result is called mirrored; if so, its copies are compared."""
    if isinstance(out, js.PerReplica):
        return False
    copies = [np.asarray(shard.data).tobytes() for shard in out.addressable_shards]
    assert len(set(copies)) == 1
    return True


def primitive(lowered, name="users_own"):
    """A primitive of a user's, of whose behaviour only the lowering knows."""
    made = Primitive(name)
    made.def_abstract_eval(lambda x: x)
    rule = mlir.lower_fun(lowered, multiple_results=False)
    mlir.register_lowering(made, rule)
    return made


# The table, beside what JAX registers.


def registered():
    found = (getattr(primitives, name) for name in dir(primitives))
    return {each.name for each in found if isinstance(each, Primitive)}


# It stands for a function that is gone before anything is lowered.
WITHOUT_RULE = {"custom_lin"}


def test_every_primitive_that_jax_lists_is_known():
    known = set(_rules._RULES) | _pure.PURE | WITHOUT_RULE
    assert registered() - known == set()
    assert not set(_rules._RULES) & _pure.PURE


def test_what_is_listed_as_jaxs_is_jaxs():
    newer = {"log2", "one_minus_square", "polynomial"}  # since JAX 0.12
    assert set(_pure._REGISTERED.split()) - newer <= registered()
    assert not set(_pure._OTHERS.split()) & registered()


KEY = jax.eval_shape(lambda: jax.random.key(0))
M, C = jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((4, 4), "c8")
I4, B4 = jax.ShapeDtypeStruct((4,), "int32"), jax.ShapeDtypeStruct((4,), "bool")
ONE = jax.ShapeDtypeStruct((), "float32")
GIVEN = [(F4,), (M,), (F4, F4), (I4,), (M, M), (KEY,), (KEY, F4), (F4, F4, F4)]
GIVEN += [(I4, I4), (C,), (B4,), (F4, ONE), (M, F4), (F4, I4), (KEY, I4)]
MODULES = [jnp, jnp.linalg, jnp.fft, lax, lax.linalg, jax.nn, jax.random]
MODULES += [jax.scipy.special, jax.scipy.linalg, jax.scipy.stats.norm]


def equations(modules):
    """All that the public functions of these modules are made of."""
    for module in modules:
        for name, function in inspect.getmembers(module, callable):
            if name.startswith("_") or inspect.isclass(function):
                continue
            for types in GIVEN:
                try:
                    made = jax.make_jaxpr(lambda *x, f=function: f(*x))(*types)
                except Exception:  # it takes something else
                    continue
                yield from all_eqns(made.jaxpr)
                break


def lowered_once(modules):
    """How each primitive in these modules is lowered, once."""
    (device,) = jax.devices()[:1]
    mesh = jax.sharding.Mesh([device], (AXIS,))
    found = {}
    for eqn in equations(modules):
        name = eqn.primitive.name
        if name in _pure.PURE and name not in found:
            found[name] = _lowered.lowered(eqn, mesh)
    return found


def test_what_is_listed_as_pure_is_lowered_to_what_is():
    found = lowered_once([jnp.linalg])
    assert len(found) >= 25
    assert [name for name, what in found.items() if not what.is_pure] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_functions_of_jax_consist_of_what_is_known():
    names = {eqn.primitive.name for eqn in equations(MODULES)}
    known = set(_rules._RULES) | _pure.PURE
    assert names - known == set()
    assert len(names) > 100
    found = lowered_once(MODULES)
    del found["create_token"]  # nothing but a program takes or returns a token
    assert [name for name, what in found.items() if not what.is_pure] == []


# Primitives of a user's.


def own_place(x):
    return x + lax.axis_index(AXIS)


def scattered(x):
    return x + lax.psum_scatter(x, AXIS, tiled=True)


def from_host(x):
    return jax.pure_callback(lambda value: value, x, x)


def noise(x):
    return x + lax.rng_uniform(0.0, 1.0, (4,))


def moved(x):
    return lax.ppermute(x, AXIS, [(0, 1)])


@pytest.mark.parametrize("lowered", [own_place, scattered, from_host, noise, moved])
def test_a_primitive_that_looks_around_is_not_mirrored(four, lowered):
    bind = primitive(lowered).bind
    assert not is_mirrored(four.run(lambda s: bind(s), (jnp.ones(4),)))


@pytest.mark.parametrize("name", ["sin", "psum", "sort"])
def test_the_name_of_jaxs_own_does_not_make_a_primitive_jaxs(four, name):
    bind = primitive(own_place, name).bind
    assert not is_mirrored(four.run(lambda s: bind(s), (jnp.ones(4),)))


def arithmetic(x):
    return jnp.sort(jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(4)).sum(0))


def looping(x):
    return lax.fori_loop(0, 3, lambda i, c: jnp.where(c > i, c * 2, c), x)


def keyed(x):
    return x + jax.random.normal(jax.random.key(3), (4,))


@pytest.mark.parametrize("lowered", [arithmetic, looping, keyed])
def test_a_primitive_that_only_computes_is_as_its_operands_are(four, lowered):
    bind = primitive(lowered).bind
    assert is_mirrored(four.run(lambda s: bind(s), (jnp.ones(4),)))
    assert not is_mirrored(four.run(lambda x: bind(x), (local(four),)))


def test_what_cannot_be_lowered_is_not_mirrored():
    opaque = Primitive("opaque")
    opaque.def_abstract_eval(lambda x: x)
    mesh = js.MirroredStrategy(jax.devices()[:4]).mesh
    jaxpr = jax.make_jaxpr(opaque.bind)(F4).jaxpr
    for known in (mesh, None):
        (state,) = analyse(jaxpr, [False], AXIS, 4, mesh=known).outputs
        assert state.varies


def test_a_module_with_a_line_that_is_not_understood_is_not_pure():
    text = jax.jit(jnp.sin).lower(F4).as_text()
    assert _lowered.scanned(text).is_pure
    for line in ("  %9 = other.dialect %0 : tensor<4xf32>", "  a new syntax", "  }{ x"):
        assert not _lowered.scanned(f"{text}\n{line}\n").is_pure
    call = "  %9 = stablehlo.custom_call @users_kernel(%0) : () -> tensor<4xf32>"
    assert not _lowered.scanned(f"{text}\n{call}\n").is_pure


# Declarations.


def test_a_declared_primitive_is_as_its_operands_are(four):
    declared = primitive(from_host)
    step = lambda s: declared.bind(s)  # noqa: E731
    assert not is_mirrored(four.run(step, (jnp.ones(4),)))
    assert js.experimental.declare_pure(declared) is declared
    assert is_mirrored(four.run(lambda s: declared.bind(s), (jnp.ones(4),)))
    assert not is_mirrored(four.run(lambda x: declared.bind(x), (local(four),)))


@js.experimental.declare_pure
def looked_up(x):
    """A sine."""
    return jax.pure_callback(np.sin, x, x, vmap_method="sequential")


def test_a_declared_function_is_as_its_operands_are(four):
    assert (looked_up.__name__, looked_up.__doc__) == ("looked_up", "A sine.")
    out = four.run(lambda s: looked_up(s), (jnp.ones(4),))
    np.testing.assert_array_equal(out, np.sin(np.ones(4, np.float32)))
    assert is_mirrored(out)
    assert not is_mirrored(four.run(lambda x: looked_up(x), (local(four),)))
    assert is_mirrored(four.run(lambda s: jax.vmap(looked_up)(s), (jnp.ones(4),)))


def test_a_derivative_of_a_declared_function_is_declared_too(four):
    @js.experimental.declare_pure
    @jax.custom_vjp
    def sine(x):
        return jax.pure_callback(np.sin, x, x)

    sine_of = sine.__wrapped__
    sine_of.defvjp(
        lambda x: (sine_of(x), x), lambda x, g: (g * jax.pure_callback(np.cos, x, x),)
    )
    out = four.run(lambda s: jax.grad(lambda v: sine(v).sum())(s), (jnp.ones(4),))
    np.testing.assert_allclose(out, np.cos(np.ones(4)), rtol=1e-6)
    assert is_mirrored(out)


def test_a_declaration_does_not_hide_a_deadlock(four):
    @js.experimental.declare_pure
    def total(x):
        return lax.cond(x[0] > 1, lambda: lax.psum(x, AXIS), lambda: x)

    assert is_mirrored(four.run(lambda s: total(s), (jnp.ones(4),)))
    with pytest.raises(js.DivergentCollectiveError, match="reach the `psum`"):
        four.run(lambda x: total(x), (local(four),))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (primitives.sin_p, ValueError, "`sin` is one of JAX's own primitives"),
        (3, TypeError, "was given 3, a int. Give it a `jax.extend.core.Primitive`"),
    ],
)
def test_what_cannot_be_declared(given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        js.experimental.declare_pure(given)


# Exported functions.


@pytest.mark.parametrize(("function", "expected"), [(jnp.sin, True), (noise, False)])
def test_an_exported_function_is_looked_into(four, function, expected):
    call = export.export(jax.jit(function))(F4).call
    assert is_mirrored(four.run(lambda s: call(s), (jnp.ones(4),))) == expected
    assert not is_mirrored(four.run(lambda x: call(x), (local(four),)))


# Deadlocks inside.


def either(x):
    return lax.cond(x.sum() > 4, lambda: lax.psum(x, AXIS), lambda: x)


def in_linear_call(x):
    linear_call = jax.custom_derivatives.linear_call
    return linear_call(
        lambda r, v: lax.cond(r.sum() > 4, lambda: lax.psum(v, AXIS), lambda: v),
        lambda r, t: t, x, 2 * x,
    )  # fmt: skip


def in_run_state(x):
    def body(ref):
        ref[...] = either(ref[...])

    return pl.run_state(body)(x)


@pytest.mark.parametrize("step", [in_linear_call, in_run_state])
def test_a_collective_in_a_hidden_branch_is_refused(four, step):
    with pytest.raises(js.DivergentCollectiveError, match="inside a `cond` whose pred"):
        four.run(lambda x: step(x), (local(four),))
    assert is_mirrored(four.run(lambda s: step(s), (jnp.ones(4),)))


def test_a_collective_in_a_branch_of_a_lowering_is_refused(four):
    bind = primitive(either).bind
    with pytest.raises(js.DivergentCollectiveError) as caught:
        four.run(lambda x: bind(x), (local(four),))
    message = str(caught.value)
    assert "would reach the `collective in users_own`" in message
    assert "inside a `users_own` whose input may differ between replicas" in message
    assert "Reduce its input, so that all replicas do the same" in message
    assert "(from argument `x`, a PerReplica)" in message
    four.run(lambda s: bind(s), (jnp.ones(4),))


def test_a_collective_of_a_lowering_in_a_branch_is_refused(four):
    total = primitive(lambda x: lax.psum(x, AXIS)).bind
    four.run(lambda x: total(x), (local(four),))
    with pytest.raises(js.DivergentCollectiveError, match="inside a `cond`"):
        four.run(lambda x: lax.cond(x[0] > 1, total, lambda x: x, x), (local(four),))


@pytest.mark.parametrize("is_lowered", [True, False])
def test_a_jaxpr_in_a_parameter_is_looked_into(four, is_lowered):
    """Even that of a primitive of which it is not known what it becomes."""
    holding = Primitive("holding")
    holding.def_abstract_eval(lambda x, *, branch: x)

    def lowered(x, *, branch):
        inner = jax.extend.core.jaxpr_as_fun(branch)
        return lax.cond(x.sum() > 4, lambda: inner(x)[0], lambda: x)

    if is_lowered:
        rule = mlir.lower_fun(lowered, multiple_results=False)
        mlir.register_lowering(holding, rule)

    def step(x):
        total = jax.make_jaxpr(
            lambda v: lax.psum(v, AXIS), axis_env=[(AXIS, 4)]
        )(x)  # fmt: skip
        return holding.bind(x, branch=total)

    with pytest.raises(
        js.DivergentCollectiveError, match="inside a `holding` whose input"
    ):
        four.run(lambda x: step(x), (local(four),))


# Memory that nobody may have written to.


def kernel(s):
    def write_half(given, out):
        out[:2] = given[:2]

    return pl.pallas_call(write_half, out_shape=F4, interpret=True)(s)


def test_results_that_a_kernel_may_not_have_written_are_not_mirrored(four):
    assert not is_mirrored(four.run(lambda s: kernel(s), (jnp.ones(4),)))


def test_empty_memory_is_not_mirrored():
    def empty():
        float32 = jnp.dtype("float32")
        space = jax.typeof(jnp.ones(())).memory_space
        return primitives.empty2_p.bind(dtype=float32, memory_space=space)

    (state,) = analyse(jax.make_jaxpr(empty)().jaxpr, [], AXIS, 4).outputs
    assert state.varies


# The same primitive with other operands.


def test_equal_primitives_of_other_operands(four):
    def step(s):
        found = s > 1
        return (
            jnp.nonzero(found, size=3)[0],
            jnp.nonzero(found, size=3, fill_value=7)[0],
            jnp.nonzero(found[:2], size=3, fill_value=7)[0],
            jnp.argwhere(found, size=3, fill_value=9),
        )

    plain, filled, short, wheres = four.run(step, (jnp.array([1.0, 2.0, 0.0, 3.0]),))
    np.testing.assert_array_equal(plain, [1, 3, 0])
    np.testing.assert_array_equal(filled, [1, 3, 7])
    np.testing.assert_array_equal(short, [1, 7, 7])
    np.testing.assert_array_equal(wheres, [[1], [3], [9]])


# Sums in groups.

OF_THREE = [[0, 1, 2], [3, 4, 5]]
ACROSS = [[0, 3], [1, 4], [2, 5]]


def grouped(dtype, first, second):
    """Whether a sum in groups and one across them is proved the same, by device."""
    mesh = js.MirroredStrategy(jax.devices()[:6]).mesh

    def step(x):
        part = lax.psum(x, AXIS, axis_index_groups=first)
        return lax.psum(part, AXIS, axis_index_groups=second)

    split = PartitionSpec(AXIS)
    on_all = jax.shard_map(
        step, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False
    )
    (eqn,) = jax.make_jaxpr(on_all)(jax.ShapeDtypeStruct((6,), dtype)).jaxpr.eqns
    found = [
        analyse(eqn.params["jaxpr"], [True], AXIS, 6, mesh=known).outputs[0].varies
        for known in (mesh, None)
    ]
    return ["varies" if each else "same" for each in found]


def test_groups_of_three_may_add_in_another_order_unless_on_cpus():
    assert grouped("float32", OF_THREE, ACROSS) == ["same", "same"]
    assert grouped("float32", ACROSS, OF_THREE) == ["same", "varies"]
    assert grouped("int32", ACROSS, OF_THREE) == ["same", "same"]
