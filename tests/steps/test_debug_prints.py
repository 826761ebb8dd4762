"""`jax.debug.print` in a step says which replica printed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxstrategy as js

DIVIDED = js.StateSharding("state", min_bytes=0)
STRATEGIES = {
    "mirrored": lambda: js.MirroredStrategy(jax.devices()[:4]),
    "shared": lambda: js.MirroredStrategy(jax.devices()[:2], replicas_per_device=2),
    "one inner axis": lambda: js.MirroredStrategy(logical_axes={"a": 2}),
    "two inner axes, divided": lambda: js.MirroredStrategy(
        logical_axes={"a": 2, "b": 2}, sharding=DIVIDED
    ),
    "none": js.get_strategy,
}


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture(scope="module", params=["mirrored", "shared"])
def few(request):
    return STRATEGIES[request.param]()


@pytest.fixture(scope="module")
def four():
    return STRATEGIES["mirrored"]()


@pytest.fixture
def printed(capsys):
    """What was printed since: its lines, sorted."""

    def lines():
        jax.effects_barrier()
        return sorted(capsys.readouterr().out.splitlines())

    lines()
    return lines


def numbered(strategy, text):
    """The lines of all replicas; `text` is of the number of one."""
    count = strategy.num_replicas_in_sync
    if count == 1:
        return [text(0)]
    return sorted(f"replica {i}: {text(i)}" for i in range(count))


def test_each_line_of_any_text_says_which_replica(four, printed):
    def step(x):
        jax.debug.print("a {}\n\n{{b}} {c}", 2.5, c=x * jnp.eye(2))
        jax.debug.print("here\n")
        jax.debug.print("{} {b}", "text", b=None)
        jax.debug.print("", skip_format_check=True)
        jax.debug.print("follows", 1, skip_format_check=True)

    four.run(step, (ids(four),))
    texts = ("a 2.5", "", "{{b}} [[{i}. 0.]", " [0. {i}.]]")
    texts += ("here", "text None", "", "follows 1")
    wanted = [f"replica {i}: {text.format(i=i)}" for i in range(4) for text in texts]
    # JAX ends each text with a line break.
    assert printed() == sorted([*wanted, *[""] * 4])


@pytest.mark.slow
def test_what_a_step_holds_prints_so_too(strategy, printed):
    def square(x):
        jax.debug.print("square {}", x)
        return x * x

    def step(x):
        lax.cond(x > 0, lambda: jax.debug.print("cond {}", x), lambda: None)

        def turn(c):
            jax.debug.print("while {} {}", x, c)
            return c + 1

        lax.while_loop(lambda c: c < x, turn, 0)
        lax.scan(lambda c, k: (square(c) + k, None), x, jnp.ones(1))
        jax.jit(jax.checkpoint(square))(x)
        jax.vmap(lambda k: jax.debug.print("vmap {}", k))(x[None])

    strategy.run(step, (ids(strategy),))
    found = printed()
    count = strategy.num_replicas_in_sync
    label = "replica {}: ".format if count > 1 else lambda i: ""
    wanted = [f"{label(i)}cond {i}.0" for i in range(1, count)]
    wanted += [f"{label(i)}while {i}.0 {c}" for i in range(count) for c in range(i)]
    wanted += [f"{label(i)}square {i}.0" for i in range(count)] * 2
    wanted += [f"{label(i)}vmap {i}.0" for i in range(count)]
    assert found == sorted(wanted)


def test_derivatives_and_their_rules_print_so(few, printed):
    @jax.custom_vjp
    def twice(x):
        return 2 * x

    def forward(x):
        jax.debug.print("forward {}", x)
        return twice(x), x

    def backward(x, g):
        jax.debug.print("backward {} {}", x, g)
        return (2 * g,)

    twice.defvjp(forward, backward)
    results = few.run(lambda x: jax.grad(twice)(x) + x, (ids(few),))
    backwards = numbered(few, lambda i: f"backward {i}.0 1.0")
    assert printed() == sorted([*backwards, *numbered(few, lambda i: f"forward {i}.0")])
    found = few.experimental_local_results(results)
    assert list(map(float, found)) == [i + 2 for i in range(len(found))]


def merged(strategy, total):
    """What a `merge_fn` prints once, at any depth, and what it has replicas do."""
    jax.debug.print("merged {}", total)
    jax.jit(lambda t: jax.debug.print("inner {}", t))(total)
    lax.cond(total > 0, lambda: jax.debug.print("branch {}", total), lambda: None)

    def again(t):
        jax.jit(lambda: jax.debug.print("again {}", t))()

    strategy.run(again, (total,))


@pytest.mark.slow
def test_code_of_all_replicas_prints_once(strategy, printed):
    with strategy.scope():
        v = js.Variable(jnp.zeros(8))

    def update(v, t):
        jax.debug.print("update {}", t)
        v.assign(v + t)

    def merge(strategy, x):
        total = strategy.reduce("sum", x) + 1
        merged(strategy, total)
        strategy.extended.update(v, update, args=(total,))
        return total

    strategy.run(
        lambda x: js.get_replica_context().merge_call(merge, (x,)) * v[0],
        (ids(strategy),),
    )
    n = strategy.num_replicas_in_sync
    total = float(1 + n * (n - 1) / 2)
    wanted = [f"{each} {total}" for each in ("merged", "inner", "branch")]
    wanted += numbered(strategy, lambda _: f"again {total}")
    wanted += numbered(strategy, lambda _: f"update {total}")
    assert printed() == sorted(wanted)
    np.testing.assert_array_equal(v, np.full(8, total))


@each_of("loop", ("several", "local_steps"))
def test_several_steps_in_one_call_print_so(few, printed, loop):
    def step(w, x):
        jax.debug.print("x {}", x)
        return w + js.get_replica_context().all_reduce("mean", x)

    getattr(few, loop)(step)(0.0, (ids(few), ids(few, 1.0)))
    both = numbered(few, lambda i: f"x {i}.0") + numbered(few, lambda i: f"x {i + 1}.0")
    assert printed() == sorted(both)


def test_errors_of_formats_are_those_of_jax(four, capsys):
    with pytest.raises(ValueError, match="Unused positional arguments"):
        four.run(lambda x: jax.debug.print("x", x), (ids(four),))

    def step(x):
        jax.debug.print("{:d}", x, skip_format_check=True)

    # On one device: of others the errors would come later.
    one = js.MirroredStrategy(jax.devices()[:1], replicas_per_device=2)
    with pytest.raises(Exception, match="Unknown format code 'd'"):
        one.run(step, (ids(one),))
        jax.effects_barrier()
    capsys.readouterr()


def test_ordered_prints_on_one_device(printed, capsys):
    strategy = js.MirroredStrategy(jax.devices()[:1], replicas_per_device=3)

    def step(x):
        jax.debug.print("a {}", x, ordered=True)
        jax.debug.print("b {}", x, ordered=True)

    strategy.run(step, (ids(strategy),))
    jax.effects_barrier()
    wanted = [f"replica {i}: {name} {i}.0" for name in "ab" for i in range(3)]
    assert capsys.readouterr().out.splitlines() == wanted


@each_of("name", ("print", "callback"))
def test_ordered_prints_on_several_devices_are_refused(four, name):
    def step(x):
        if name == "print":
            jax.debug.print("x {}", x, ordered=True)
        else:
            jax.debug.callback(print, x, ordered=True)

    message = (
        r"`step` prints with `ordered=True` on 4 devices, .*\n  "
        rf"the `jax\.debug\.{name}`: .*test_debug_prints\.py:\d+: .*\n"
        r"Leave `ordered=True` out: each line says which replica"
    )
    with pytest.raises(ValueError, match=message):
        four.run(step, (ids(four),))


def test_prints_of_values_that_lie_over_inner_axes(printed):
    strategy = STRATEGIES["one inner axis"]()

    def step(x):
        x = lax.with_sharding_constraint(x, P("a"))
        jax.debug.print("{}", x)
        return x + 1

    x = js.PerReplica(np.arange(16.0, dtype=np.float32).reshape(4, 4))
    strategy.run(step, (x,))
    rows = np.arange(16.0).reshape(4, 4)
    assert printed() == numbered(strategy, lambda i: str(rows[i]))
