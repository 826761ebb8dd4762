"""Collectives that only some replicas reach are errors, with the line that decides."""

import inspect
import linecache
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.cases import each_of
from helpers.lines import AXIS, SEVERAL, fails_with, ids, place
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js


def diverging(strategy, step, *args, **kwargs):
    """The error that a step raises; it is left in good order."""
    with pytest.raises(js.errors.DivergentCollectiveError) as caught:
        strategy.run(step, args, kwargs)
    assert not js.in_cross_replica_context() and not js.has_strategy()
    return caught.value


# Deadlock. Each case takes what decides, here called `p`, and this replica's `v`. With
# a `p` of 3 it reaches its collective; beside it stands what comes out then.


def either(p, v):
    return lax.cond(  # <- control
        p * 2 > 4,  # <- predicate
        lambda: lax.psum(v, AXIS),  # <- collective
        lambda: v,
    )


def in_switch(p, v):
    index = jnp.int32(p)  # <- predicate
    return lax.switch(  # <- control
        index,
        [
            lambda: v,
            lambda: v,
            lambda: v,
            lambda: replica().all_reduce("sum", v),  # <- collective
        ],
    )


def in_while_body(p, v):
    def more(carry):
        return carry[0] < p  # <- predicate

    def turn(carry):
        return carry[0] + 1, carry[1] + lax.psum(v, AXIS)  # <- collective

    return lax.while_loop(more, turn, (0.0, 0.0))[1]  # <- control


def in_while_condition(p, v):
    def more(done):
        total = lax.psum(v, AXIS)  # <- collective
        return done < jnp.minimum(total * 100, p)  # <- predicate

    return lax.while_loop(more, lambda done: done + 1, 0.0)  # <- control


def in_fori_loop(p, v):
    turns = jnp.int32(p)  # <- predicate

    def turn(i, total):
        return total + lax.psum(v, AXIS)  # <- collective

    return lax.fori_loop(0, turns, turn, 0.0)  # <- control


def in_jit(p, v):
    inner = jax.jit(either)
    return inner(3.0, v) - lax.psum(v, AXIS) + inner(p, v)  # traced once


def in_scan_in_remat_in_jit(p, v):
    inner = jax.checkpoint(
        lambda v: lax.scan(lambda c, _: (c + either(p, v), None), 0.0, length=3)[0]
    )
    return jax.jit(inner)(v)


def in_custom_vjp_forward(p, v):
    f = jax.custom_vjp(either)
    f.defvjp(lambda p, v: (either(p, v), None), lambda _, g: (0.0, g))
    value, grad = jax.value_and_grad(f, 1)(p, v)
    return value + 0 * grad


def in_custom_vjp_backward(p, v):
    @jax.custom_vjp
    def f(p, v):
        return v

    def backward(p, g):
        return 0.0, lax.cond(p > 2, lambda: lax.psum(g, AXIS), lambda: g)

    f.defvjp(lambda p, v: (v, p), backward)
    # What is in `backward` is put down by JAX to the line that calls `f`.
    return jax.grad(lambda v: f(p, v))(v)  # <- collective, control, predicate


def in_custom_jvp(p, v):
    f = jax.custom_jvp(lambda p, v: v)
    f.defjvp(lambda primals, tangents: (primals[1], either(primals[0], tangents[1])))
    return jax.jvp(f, (p, v), (0.0, v))[1]


def in_vmap_over_another_axis(p, v):
    def over_both(w):
        return lax.psum(either(p, w * v), "rows")

    return jax.vmap(over_both, axis_name="rows")(jnp.ones(3))[0]


def in_a_merge_function(p, v):
    def merged(strategy, v):
        return strategy.reduce("sum", v)  # <- collective

    return lax.cond(  # <- control
        p > 2,  # <- predicate
        lambda: replica().merge_call(merged, (v,)),
        lambda: v,
    )


def in_a_merge_call_without_collectives(p, v):
    def merged(strategy, v):
        return strategy.run(lambda v: v * 2.0, (v,))

    return lax.cond(  # <- control
        p > 2,  # <- predicate
        lambda: replica().merge_call(merged, (v,)),  # <- collective
        lambda: v,
    )


HIDDEN = {
    either: ("psum", "cond", lambda v: v.sum()),
    in_switch: ("all_reduce", "switch", lambda v: v.sum()),
    in_while_body: ("psum", "while_loop", lambda v: 3 * v.sum()),
    in_while_condition: ("psum", "while_loop", lambda v: 3.0),
    in_fori_loop: ("psum", "fori_loop", lambda v: 3 * v.sum()),
    in_jit: ("psum", "cond", lambda v: v.sum()),
    in_scan_in_remat_in_jit: ("psum", "cond", lambda v: 3 * v.sum()),
    in_custom_vjp_forward: ("psum", "cond", lambda v: v.sum()),
    in_custom_vjp_backward: ("psum", "cond", lambda v: float(len(v))),
    in_custom_jvp: ("psum", "cond", lambda v: v.sum()),
    in_vmap_over_another_axis: ("psum", "cond", lambda v: 3 * v.sum()),
    in_a_merge_function: ("reduce", "cond", lambda v: v.sum()),
    in_a_merge_call_without_collectives: ("merge_call", "cond", lambda v: 2 * v),
}


@SEVERAL
@each_of("case", HIDDEN)
def test_a_collective_that_only_some_replicas_reach_is_an_error(strategy, case):
    what, control, _ = HIDDEN[case]
    marked = case if "# <- collective" in inspect.getsource(case) else either

    def step(p, v):
        return case(p, v)

    error = diverging(strategy, step, ids(strategy), 2.0)
    message = str(error)
    assert re.match(
        rf"(Only s|S)ome replicas of `step` would reach the `{what}`", message
    )
    assert f"it is inside a `{control}` whose " in message
    assert f"\n  the `{what}`: {place(marked, 'collective')}\n" in message
    assert f"\n  the `{control}`: {place(marked, 'control')}\n" in message
    assert f" varies since: {place(marked, 'predicate')}\n" in message
    assert "\n    (from argument `p`, a PerReplica)\n" in message
    assert error.collective_line == place(marked, "collective")
    assert error.predicate_line == place(marked, "predicate")


@pytest.mark.slow
def test_the_same_code_runs_where_all_replicas_decide_alike(two):
    strategy = two

    def step(p, own, v):
        deciders = {
            "an argument": p,
            "a constant": jnp.float32(3),
            "reduced": replica().all_reduce("min", own) + 2,
            "gathered": lax.all_gather(own, AXIS)[0] + 2,
        }
        return {
            name: {case.__name__: case(decider, v) for case in HIDDEN}
            for name, decider in deciders.items()
        }

    out = strategy.run(step, (3.0, ids(strategy), ids(strategy)))
    v = np.arange(strategy.num_replicas_in_sync) + 1.0
    for case, (_, _, expected) in HIDDEN.items():
        for name in out:
            for i, one in enumerate(
                strategy.experimental_local_results(out[name][case.__name__])
            ):
                wanted = np.broadcast_to(expected(v), v.shape)[i]
                np.testing.assert_allclose(one, wanted, err_msg=case.__name__)


def test_each_error_advises_to_decide_alike(two):
    for case, words in [
        (
            either,
            "reduce('max', predicate)` is true if it is on any replica, 'min' if",
        ),
        (either, "Or move the `psum` out of the `cond`, and choose with `jnp.where`."),
        (
            in_switch,
            "Reduce the index, .*`get_replica_context().all_reduce('max', index)`",
        ),
        (in_while_body, "`get_replica_context().all_reduce('max', condition)` goes on"),
        (
            in_fori_loop,
            "Reduce the bounds, .*`get_replica_context().all_reduce('max', b",
        ),
    ]:
        pattern = re.escape(words).replace(r"\.\*", ".*")
        assert re.search(pattern, str(diverging(two, case, ids(two), 1.0)))


# Where a predicate began to vary.


def from_the_replica_id(batch):
    mine = replica().replica_id_in_sync_group  # <- predicate
    chosen = mine == 0
    return chosen, None


def from_many_lines_before(batch):
    def scaled(x):
        return x * 2  # <- predicate

    y = scaled(batch["x"])
    for _ in range(3):
        y = jnp.tanh(y)
    total = lax.psum(1.0, AXIS) + y
    return total > 1, "batch['x']"


def through_a_scan(batch):
    x = batch["x"] + 1  # <- predicate

    def turn(carry, _):
        return (carry[1], carry[1] + 1), None

    (first, _), _ = lax.scan(turn, (0.0, x), length=3)
    return first > 1, "batch['x']"


def through_jit_and_remat(batch):
    @jax.jit
    @jax.checkpoint
    def inner(x):
        return jnp.sin(x)  # <- predicate

    return inner(batch["x"]) > 0, "batch['x']"


ORIGINS = [
    from_the_replica_id, from_many_lines_before, through_a_scan, through_jit_and_remat,
]  # fmt: skip


@each_of("origin", ORIGINS)
def test_the_line_where_the_predicate_began_to_vary_is_named(two, origin):
    argument = None

    def step(batch):
        nonlocal argument
        predicate, argument = origin(batch)
        return lax.cond(predicate, lambda: lax.pmax(1.0, AXIS), lambda: 1.0)

    error = diverging(two, step, {"x": ids(two)})
    assert error.predicate_line == place(origin, "predicate")
    assert f"its predicate varies since: {error.predicate_line}\n" in str(error)
    from_argument = f"    (from argument `{argument}`, a PerReplica)\n"
    assert (from_argument in str(error)) == (argument is not None)


def test_a_collective_over_another_axis_may_be_left_out(two):
    def step(x):
        def either(row):
            return lax.cond(x > 1, lambda: lax.psum(row, "rows"), lambda: row)

        return jax.vmap(either, axis_name="rows")(jnp.arange(3.0))

    out = two.run(step, (ids(two),))
    np.testing.assert_array_equal(out.local(0), [0, 1, 2])
    np.testing.assert_array_equal(out.local(1), [3, 3, 3])


def test_what_all_replicas_reach_is_fine(two):
    def step(x):
        chosen = jnp.where(x > 1, lax.psum(x, AXIS), 0.0)
        # A vmapped `cond` computes both branches.
        batched = jax.vmap(
            lambda v: lax.cond(v > 1, lambda: lax.psum(v, AXIS), lambda: v)
        )(x * jnp.ones(2))
        branch = lax.cond(x > 1, lambda: x * 2, lambda: x)
        return chosen, batched, lax.psum(branch, AXIS)

    chosen, batched, total = two.run(step, (ids(two),))
    assert [float(v) for v in chosen.values] == [0, 3]
    np.testing.assert_array_equal(batched.stacked, [[1, 1], [3, 3]])
    assert total == 5


# A collective of a group needs its members to decide alike, and nobody else.

PAIRS = [[0, 1], [2, 3]]
VALUES = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def index():
    return lax.axis_index(AXIS)


def paired(x):
    return lax.psum(x, AXIS, axis_index_groups=PAIRS)


def pair_sums(values):
    return np.repeat(values.reshape(2, 2).sum(1), 2)


def until_large(values):
    while (small := pair_sums(values) < 50).any():
        values = np.where(small, pair_sums(values + 1), values)
    return values


LEGAL = {
    "by the sum of the pair": (
        lambda x: lax.cond(paired(x) > 5, lambda: paired(2 * x), lambda: -x),
        [-1, -2, 14, 14]),
    "by the replica's id": (
        lambda x: lax.cond(index() < 2, lambda: paired(x), lambda: -x),
        [3, 3, -3, -4]),
    "by the id of the context": (
        lambda x: lax.cond(
            2 * js.get_replica_context().replica_id_in_sync_group - 1 < 3,
            lambda: paired(x), lambda: -x),
        [3, 3, -3, -4]),
    "by another id": (
        lambda x: lax.cond(
            index() != 0,
            lambda: lax.pmax(x, AXIS, axis_index_groups=[[0], [1, 2, 3]]),
            lambda: -x),
        [-1, 4, 4, 4]),
    "in each branch another": (
        lambda x: lax.cond(
            2 <= index(), lambda: paired(x), lambda: paired(paired(x))),
        [6, 6, 7, 7]),
    "a gathering": (
        lambda x: lax.cond(
            index() >= 2,
            lambda: lax.all_gather(x, AXIS, axis_index_groups=PAIRS)[0],
            lambda: x),
        [1, 2, 3, 3]),
    "parts of a sum": (
        lambda x: lax.cond(
            index() < 2,
            lambda: lax.psum_scatter(
                jnp.stack([x, 10 * x]), AXIS, axis_index_groups=PAIRS),
            lambda: x),
        [3, 30, 3, 4]),
    "within nested branches": (
        lambda x: lax.cond(
            index() < 2,
            lambda: jax.jit(
                lambda v: lax.cond(paired(v) > 2, paired, lambda w: w, v))(x),
            lambda: x),
        [3, 3, 3, 4]),
    "turns of a loop": (
        lambda x: lax.while_loop(
            lambda v: paired(v) < 50, lambda v: paired(v + 1), x),
        until_large(VALUES)),
    "an id that is no less than 0": (
        lambda x: lax.cond(index() >= 0, lambda: lax.psum(x, AXIS), lambda: x),
        [10] * 4),
    "an id that is no more than all": (
        lambda x: lax.cond(index() > 3, lambda: x, lambda: lax.psum(x, AXIS)),
        [10] * 4),
}  # fmt: skip


def test_members_that_decide_alike_meet(four):
    def step(x):
        return {name: each(x) for name, (each, _) in LEGAL.items()}

    found = four.run(step, (four.per_replica(list(VALUES)),))
    for name, (_, expected) in LEGAL.items():
        copies = four.experimental_local_results(found[name])
        np.testing.assert_array_equal(np.stack(copies), expected, name)


ALONE = {
    "by its own value": lambda x: lax.cond(x > 2, paired, lambda v: v, x),
    "by an id inside of a pair": (
        lambda x: lax.cond(index() < 1, paired, lambda v: v, x)),
    "by the sum of other pairs": lambda x: lax.cond(
        lax.psum(x, AXIS, axis_index_groups=[[0, 2], [1, 3]]) > 5,
        paired, lambda v: v, x),
    "all, by the sum of the pair": lambda x: lax.cond(
        paired(x) > 5, lambda v: lax.psum(v, AXIS), lambda v: v, x),
    "all, by the replica's id": lambda x: lax.cond(
        index() < 2, lambda v: lax.psum(v, AXIS), lambda v: v, x),
    "sent on, by the replica's id": lambda x: lax.cond(
        index() < 2,
        lambda v: lax.ppermute(v, AXIS, [(0, 1), (1, 0), (2, 3), (3, 2)]),
        lambda v: v, x),
    "in a branch that not all of the pair reach": lambda x: lax.cond(
        x > 2, lambda v: lax.cond(index() < 2, paired, lambda w: w, v),
        lambda v: v, x),
    "as often as its own value says": lambda x: lax.while_loop(
        lambda v: v < 9, lambda v: paired(v) + index(), x),
    "whose result nobody needs": lambda x: lax.cond(
        x > 2, lambda v: (lax.psum(v, AXIS), v)[1], lambda v: v, x),
}  # fmt: skip


@each_of("name", ALONE)
def test_members_that_may_decide_otherwise_are_refused(four, name):
    # JAX promises nowhere to leave out a collective whose result nobody needs.
    with pytest.raises(
        js.errors.DivergentCollectiveError, match=r"differ between replicas"
    ):
        four.run(ALONE[name], (four.per_replica(list(VALUES)),))


# Each collective of JAX: what the proof and `explain` say of it is what happens.

N = 4
X = np.arange(N * N, dtype=np.float32).reshape(N, N) ** 2
RING = [(i, (i + 1) % N) for i in range(N)]

# Of each JAX's primitive, what it is to a `Topology`, and what NumPy says. `pbroadcast`
# has no lowering on CPUs, `ragged_all_to_all` none that is a collective.
USES = {
    "all_reduce": (
        lambda x: replica().all_reduce("sum", x), "psum", "all_reduce", X.sum(0)),
    "psum": (lambda x: lax.psum(x, AXIS), "psum", "all_reduce", X.sum(0)),
    "pmean": (lambda x: lax.pmean(x, AXIS), "psum", "all_reduce", X.mean(0)),
    "pmax": (lambda x: lax.pmax(x, AXIS), "pmax", "all_reduce", X.max(0)),
    "pmin": (lambda x: lax.pmin(x, AXIS), "pmin", "all_reduce", X.min(0)),
    "all_gather": (lambda x: lax.all_gather(x, AXIS), "all_gather", "all_gather", X),
    "ppermute": (
        lambda x: lax.ppermute(x, AXIS, RING), "ppermute", "permute", np.roll(X, 1, 0)),
    "pshuffle": (
        lambda x: lax.pshuffle(x, AXIS, [1, 2, 3, 0]), "ppermute", "permute",
        X[[1, 2, 3, 0]]),
    "all_to_all": (
        lambda x: lax.all_to_all(x, AXIS, 0, 0), "all_to_all", "all_to_all", X.T),
    "pswapaxes": (
        lambda x: lax.pswapaxes(x, AXIS, 0), "all_to_all", "all_to_all", X.T),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, AXIS), "reduce_scatter", "reduce_scatter",
        X.sum(0)),
}  # fmt: skip
SAME = {"all_reduce", "psum", "pmean", "pmax", "pmin", "all_gather"}


def test_results_are_numpys_and_mirrored_where_all_replicas_get_the_same(four):
    x = four.per_replica(list(X))
    found = four.run(lambda x: {name: use(x) for name, (use, *_) in USES.items()}, (x,))
    for name, (*_, wanted) in USES.items():
        is_mirrored = not isinstance(found[name], js.PerReplica)
        assert is_mirrored is (name in SAME), name
        value = found[name] if is_mirrored else found[name].stacked
        np.testing.assert_allclose(value, wanted, err_msg=name)


def test_messages_call_a_collective_as_the_user_does(four):
    x = four.per_replica([np.full(N, float(i), np.float32) for i in range(N)])
    for name, (use, *_) in USES.items():

        def step(x, use=use):
            return lax.cond(x[0] > 1, use, use, x)

        with pytest.raises(js.errors.DivergentCollectiveError, match=f"`{name}`"):
            four.run(step, (x,))


# The line of the user's code that an operation is put down to.


def began(strategy, step, *args):
    """Where the only result of a step began to vary."""
    return fails_with(strategy, True, step, args).line


@jax.jit
def called_twice(x):
    doubled = x * 2  # <- inside
    return doubled


def test_a_line_inside_a_jitted_function_whoever_calls_it(two):
    def step(x):
        first = called_twice(1.0)
        return first + called_twice(x)

    called_twice(jnp.float32(1))
    assert began(two, step, ids(two)) == place(called_twice, "inside")
    assert began(two, lambda x: called_twice(x), ids(two)) == place(
        called_twice, "inside"
    )


def test_the_users_line_that_calls_into_numpy_is_not_an_earlier_ones(two):
    def earlier(x):
        return jnp.clip(x, 0, 9), jnp.linalg.norm(x[None]), jnp.median(x[None])

    def clips(x):
        return jnp.clip(x, 0, 9)  # <- here

    def norms(x):
        return jnp.linalg.norm(x[None] * 1.0)  # <- here

    two.run(earlier, (ids(two),))  # JAX keeps what it traced in there
    assert began(two, clips, ids(two)) == place(clips, "here")
    assert began(two, norms, ids(two)) == place(norms, "here")


def defined_in(filename, source):
    names = {"lax": lax, "jnp": jnp}
    exec(compile(source, filename, "exec"), names)
    return names["step"]


def test_lines_of_a_notebooks_cell(two, monkeypatch):
    source = "def step(x):\n    y = x * 2\n    return y + 1\n"
    name = "<ipython-input-1>"
    entry = (len(source), None, source.splitlines(keepends=True), name)
    monkeypatch.setitem(linecache.cache, name, entry)
    line = began(two, defined_in(name, source), ids(two))
    assert line == "<ipython-input-1>:2: y = x * 2"


def test_a_file_that_is_gone_gives_the_number_of_the_line(two, tmp_path):
    gone = str(tmp_path / "gone.py")
    step = defined_in(gone, "def step(x):\n    return x * 2\n")
    assert began(two, step, ids(two)) == f"{gone}:2"


def test_code_made_on_the_fly_is_put_down_to_the_line_that_calls_it(two):
    generated = defined_in("<string>", "def step(x):\n    return x * 2\n")

    def step(x):
        return generated(x)  # <- here

    assert began(two, step, ids(two)) == place(step, "here")
    assert began(two, generated, ids(two)) == "<string>:2"  # there is no better


def test_a_line_in_a_library_is_put_down_to_the_users_that_calls_it(two):
    net = nn.Dense(2)
    params = net.init(jax.random.key(0), jnp.ones(3))

    def step(params, x):
        return net.apply(params, x * jnp.ones(3))

    def of_params(params, x):
        return net.apply(x, jnp.ones(3))  # <- here

    x = two.per_replica([1.0, 2.0])
    stacked = two.per_replica([params, params])
    assert began(two, of_params, params, stacked) == place(of_params, "here")
    assert began(two, step, params, x).endswith("net.apply(params, x * jnp.ones(3))")
