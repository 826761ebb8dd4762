"""State that goes into a step mirrored, and results that are expected to be so."""

import dataclasses
import inspect
import re
import warnings
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.cases import each_of
from helpers.lines import AXIS, SEVERAL, fails_with, forgets, ids, place
from jax import lax

import jaxstrategy as js


def line(fn, marker="# <-"):
    """`file:line` of the line of `fn` with `marker`."""
    lines, start = inspect.getsourcelines(fn)
    (found,) = (i for i, text in enumerate(lines) if marker in text)
    return f"{__file__}:{start + found}"


def told(call, *args):
    """The texts of the warnings that a call gives, and what it returns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = call(*args)
    assert {each.category for each in caught} <= {js.errors.NotMirroredWarning}
    return [str(each.message) for each in caught], returned


PARAMS = {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)}


def rows(strategy):
    n = strategy.num_replicas_in_sync
    return strategy.per_replica(np.arange(n * 4.0, dtype="f").reshape(n, 2, 2))


def local_loss(params, x):
    return ((x @ params["w"] + params["b"][None]) ** 2).mean()


def sgd(params, x):
    grads = jax.grad(local_loss)(params, x)  # <-
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def reduced(tree):
    return js.get_replica_context().all_reduce("mean", tree)


def test_a_forgotten_reduction_of_parameters_names_them_and_the_line(two):
    texts, after = told(two.run, sgd, (PARAMS, rows(two)))
    (text,) = texts
    assert isinstance(after["w"], js.PerReplica)
    assert text.startswith(
        "`sgd` was given `params['b']` equal on all replicas, and returns "
        "`sgd(...)['b']`, what takes its place, different on each.\n"
    )
    assert "`sgd(...)['w']`" in text and "all_reduce('mean', ...)" in text
    assert re.search(r"varies since: .*\n    \(from argument `x`, a PerReplica\)", text)


def test_the_warning_stands_at_the_line_where_it_began_to_vary(two):
    def step(params, x):
        wrong = x.mean()  # <-
        return jax.tree.map(lambda p: p - wrong, params)

    with pytest.warns(js.errors.NotMirroredWarning) as caught:
        two.run(step, (PARAMS, rows(two)))
    assert f"{caught[0].filename}:{caught[0].lineno}" == line(step)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=False)(x))


def test_statistics_of_batchnorm_by_themselves_are_state_too(two):
    net = Net()
    variables = net.init(jax.random.key(0), np.ones((1, 2), np.float32))

    def step(params, stats, x):
        def loss(params):
            both = {"params": params, "batch_stats": stats}
            y, new = net.apply(both, x, mutable=["batch_stats"])
            return (y**2).mean(), new["batch_stats"]

        grads, new = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - g, params, reduced(grads)), new

    args = (variables["params"], variables["batch_stats"], rows(two))
    (text,), (params, _) = told(two.run, step, args)
    assert "`stats['BatchNorm_0']['mean']`" in text and "flax.linen.BatchNorm" in text
    assert "metrics of Keras: what `jaxstrategy.keras` has" in text
    assert not any(isinstance(leaf, js.PerReplica) for leaf in jax.tree.leaves(params))


class Pair(NamedTuple):
    w: Any
    m: Any


KINDS = {
    "list of layers": [(np.ones((2, 2), "f"), np.ones(2, "f"))] * 2,
    "tuple of unlike arrays": (np.ones((2, 2), "f"), np.ones(2, "f")),
    "named tuple": Pair(np.ones(2, "f"), np.ones(2, "f")),
    "dict of one scalar": {"w": np.float32(1)},
    "frozen dict": flax.core.freeze({"w": np.float32(1)}),
    "dict of a list": {"layers": [np.ones(2, "f"), np.ones(2, "f")]},
}


PLACES = ["alone", "first of two", "in a dict", "by keyword"]
STATES = [*KINDS.values()]


@each_of(("state", "place"), zip(STATES, PLACES + PLACES[:2], strict=True), anew=True)
def test_state_of_any_kind_is_known_wherever_it_is_returned(two, state, place):
    def step(state, x):
        new = jax.tree.map(lambda s: s * 0.9 + x.mean() * 0.1, state)
        results = {"first of two": (new, x), "in a dict": {"state": new}}
        return results.get(place, new)

    args = (
        ((), {"state": state, "x": rows(two)})
        if place == "by keyword"
        else ((state, rows(two)),)
    )
    texts, _ = told(two.run, step, *args)
    assert len(texts) == 1


@each_of(
    "inside",
    [
        lambda new, old: jax.jit(lambda: old - new)(),
        lambda new, old: lax.cond(new > 1e9, lambda: old, lambda: old - new),
        lambda new, old: lax.scan(lambda c, _: (c - new, None), old, length=2)[0],
        lambda new, old: lax.fori_loop(0, 2, lambda _, c: c - new, old),
        lambda new, old: jnp.where(new > 0, old - new, old),
        lambda new, old: jax.checkpoint(lambda o: o - new)(old),
        lambda new, old: jnp.clip(old - new, -1, 1),
    ],
    anew=True,
)
def test_an_update_is_known_inside_calls_branches_and_loops(two, inside):
    def step(state, x):
        return jax.tree.map(lambda s: inside(x.mean(), s), state)

    texts, _ = told(two.run, step, ({"w": np.float32(1)}, rows(two)))
    assert len(texts) == 1


MEANT = {
    "gradients to be reduced outside": (jax.grad(local_loss), PARAMS),
    "gradients with weight decay in the loss": (
        jax.grad(lambda p, x: local_loss(p, x) + sum((v**2).sum() for v in p.values())),
        PARAMS,
    ),
    "accumulated gradients": (
        lambda p, x: lax.scan(
            lambda g, r: (jax.tree.map(jnp.add, g, jax.grad(local_loss)(p, r)), None),
            jax.tree.map(jnp.zeros_like, p),
            x[:, None],
        )[0],
        PARAMS,
    ),
    "a loss": (local_loss, PARAMS),
    "a prediction of the shape of a parameter": (lambda s, x: s * x, np.ones((2, 2))),
    "a sum with a number": (lambda s, x: s + x.mean(), 1.0),
    "a pair of scaled values": (
        lambda s, x: (x.mean() * s[0], x.sum() * s[1]),
        (1.0, 2.0),
    ),
    "metrics": (
        lambda s, x: {"loss": x.mean(), "largest": x.max()},
        {"loss": 0.0, "largest": 0.0},
    ),
    "other shapes": (lambda s, x: {"w": s["w"] + x.mean(), "b": x}, PARAMS),
    "all of several numbers": (lambda s, x: (s, s * x.mean()), 1.0),
}


@each_of("step, state", MEANT.values(), anew=True)
def test_results_that_are_meant_to_differ_give_no_warning(two, step, state):
    assert told(two.run, step, (state, rows(two)))[0] == []


@each_of("first", [True, False], anew=True)
def test_state_of_each_replica_beside_a_common_one_stays_so(two, first):
    """As each replica's parameters that are drawn towards those of all."""

    def step(own, common, x):
        if not first:
            own, common = common, own
        own = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, sgd(own, x), common)
        middle = reduced(own)
        return (own, middle) if first else (middle, own)

    own = two.per_replica(jax.tree.map(lambda p: np.stack([p, 2 * p]), PARAMS))
    both = (own, PARAMS) if first else (PARAMS, own)
    assert told(two.run, step, (*both, rows(two)))[0] == []
    # The common one is still looked at.
    texts, _ = told(
        two.run, lambda own, common, x: (own, sgd(common, x)), (own, PARAMS, rows(two))
    )
    assert len(texts) == 1 and "was given `common['b']` equal" in texts[0]


EXPECTED = {
    "False": False,
    "a prefix": {"w": False, "b": False},
    "a function": lambda path, leaf: False,
}


@each_of("expected", EXPECTED.values(), anew=True)
def test_saying_what_is_expected_turns_it_off(two, expected):
    options = js.RunOptions(expect_mirrored=expected)
    texts, params = told(two.run, sgd, (PARAMS, rows(two)), None, options)
    assert texts == []
    assert told(two.run, sgd, (params, rows(two)), None, options)[0] == []


def test_one_step_function_warns_once(two):
    x = rows(two)
    wide = two.per_replica(np.ones((2, 4, 2), np.float32))
    texts = [told(two.run, sgd_once, (PARAMS, each))[0] for each in (x, x, wide)]
    assert list(map(len, texts)) == [1, 0, 0]


def sgd_once(params, x):
    return sgd(params, x)


def test_going_on_with_it_is_told_too(two):
    @two.run
    def step(params, x):
        return sgd(params, x), x.mean()

    texts, (params, _) = told(step, PARAMS, rows(two))
    assert len(texts) == 1
    (text,), (params, _) = told(step, params, rows(two))
    assert text.startswith(
        "`params['b']`, an argument of `step`, was equal on all replicas at an "
        "earlier call and differs between them now: it is `step(...)[0]['b']`, which "
        "that call returned.\n  it varies since: "
    )
    assert "Each replica goes on with its own." in text
    assert "`RunOptions(expect_mirrored=False)`" in text
    assert told(step, params, rows(two))[0] == []


@each_of("w", [0.5, np.float32(0.5), np.ones((2, 2), np.float32)], anew=True)
def test_a_bare_array_is_told_of_when_it_comes_back(two, w):
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: ((w * x - 1) ** 2).mean())(w)
        return w - 0.1 * grad, loss

    texts, (w, _) = told(two.run, step, (w, rows(two)))
    assert texts == []

    def again():
        two.run(step, (w, rows(two)))  # <-

    with pytest.warns(js.errors.NotMirroredWarning, match="`w`, an argument") as caught:
        again()
    assert f"{caught[0].filename}:{caught[0].lineno}" == line(again)


def test_a_result_may_come_back_where_there_always_was_one_of_each(two):
    def add(total, x):
        return total + x.mean()

    total = two.per_replica([0.0, 0.0])
    for _ in range(2):
        texts, total = told(two.run, add, (total, rows(two)))
        assert texts == []


def test_several_steps_in_one_call_are_told_of(two):
    many = two.several(sgd)
    texts, _ = told(many, PARAMS, (rows(two), rows(two)))
    assert len(texts) == 1 and "`params['b']` equal on all replicas" in texts[0]


# Results that should be equal on all replicas and may differ are errors.


def about_params(path, leaf):
    assert isinstance(leaf, jax.ShapeDtypeStruct) and leaf.shape == ()
    return "params" in jax.tree_util.keystr(path)


@SEVERAL
@each_of(
    "expected",
    [True, (True, None), ({"params": {"w": True}, "loss": None}, False), about_params],
)
def test_a_result_that_may_differ_is_named_with_the_line(strategy, expected):
    error = fails_with(strategy, expected)
    began = place(forgets, "began")
    assert error.path == "forgets(...)[0]['params']['w']" and error.line == began
    message = str(error)
    assert message.startswith(
        "`forgets(...)[0]['params']['w']` was expected to be mirrored, but may differ "
        f"between replicas.\n  it varies since: {began}\n"
        "    (from argument `x`, a PerReplica)\n"
        "Something it is computed from was not reduced: use "
        "`get_replica_context().all_reduce('mean', ...)` on the way"
    )


def test_all_results_that_differ_are_told(two):
    error = fails_with(two, True)
    assert error.__notes__[0] == "The same holds for `forgets(...)[1]`."
    error = fails_with(two, True, lambda x: [x] * 6, (ids(two),))
    assert error.__notes__[0] == (
        "The same holds for `<lambda>(...)[1]`, `<lambda>(...)[2]`, "
        "`<lambda>(...)[3]` and 2 more."
    )


@each_of(
    "expected, shown",
    [
        ([True, False], "[True, False]"),
        ((True, {"grad": True}), "(True, {'grad': True})"),
        ({}, "{}"),
    ],
)
def test_a_prefix_that_does_not_fit_is_an_error(two, expected, shown):
    message = (
        f"`expect_mirrored` is {shown}, which does not fit what the step returns: "
        "`forgets(...)` is ({'loss': *, 'params': {'w': *}}, *). Give True or False "
        "for all of it, or for each part, in containers like its own."
    )
    options = js.RunOptions(expect_mirrored=expected)
    with pytest.raises(ValueError, match=re.escape(message)):
        two.run(forgets, (1.0, ids(two)), options=options)
    assert not js.in_cross_replica_context()


@each_of(
    "expected, entry",
    [
        (1, "1"),
        ({"params": "mirrored"}, "'mirrored'"),
        ((True, [False, 0]), "0"),
        ((True, len), "<built-in function len>"),
    ],
)
def test_a_wrong_type_of_expectation_is_an_error(expected, entry):
    message = (
        f"`expect_mirrored` was {expected!r}, with {entry} where True or False was"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        js.RunOptions(expect_mirrored=expected)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A pytree that can be called, and compares by identity."""

    w: object
    b: object

    def __call__(self, x):
        return self.w * x + self.b


def test_a_model_that_can_be_called_is_a_pytree_all_the_same(two):
    def step(x):
        return Model(w=x, b=lax.psum(x, AXIS))

    options = js.RunOptions(expect_mirrored=Model(False, True))
    assert isinstance(two.run(step, (ids(two),), options=options).w, js.PerReplica)
    error = fails_with(two, Model(True, True), step, (ids(two),))
    assert error.path == "step(...).w"


def test_equal_options_are_equal_and_share_a_program(two, compilations):
    def step(w, x):
        return {"w": w - lax.pmean(x, AXIS)}, x

    def options(w=True):
        return js.RunOptions(donate_argnums=(), expect_mirrored=({"w": w}, False))

    assert options() == options() and hash(options()) == hash(options())
    assert options() != options(False) != js.RunOptions()
    assert js.RunOptions(expect_mirrored=[True]) != js.RunOptions(
        expect_mirrored=(True,)
    )
    assert js.RunOptions(expect_mirrored=Model(True, False)) == js.RunOptions(
        expect_mirrored=Model(True, False)
    )
    assert js.RunOptions(expect_mirrored=len) == js.RunOptions(expect_mirrored=len)
    assert js.RunOptions(expect_mirrored=len) != js.RunOptions(expect_mirrored=sum)
    x = ids(two)
    two.run(step, (1.0, x), options=options())
    compilations()
    for w in (2.0, 3.0):
        two.run(step, (w, x), options=options())
    assert compilations() == 0


def test_what_is_donated_is_kept_if_the_promise_is_broken(two):
    options = js.RunOptions(donate_argnums=0, expect_mirrored=True)
    state = two.mirror(jnp.ones(3))
    with pytest.raises(js.errors.NotMirroredError, match=r"\n    \(from argument `x`,"):
        two.run(lambda state, x: state - x, (state, ids(two)), options=options)
    np.testing.assert_array_equal(state, np.ones(3))
    new = two.run(
        lambda state, x: state - lax.psum(x, AXIS), (state, ids(two)), options=options
    )
    np.testing.assert_array_equal(new, np.full(3, -2.0))
    assert state.is_deleted()
