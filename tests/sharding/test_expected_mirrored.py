"""Results that should be equal on all replicas and may differ are errors."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.lines import AXIS, SEVERAL, fails_with, forgets, ids, place
from jax import lax

import jaxstrategy as js


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


@each_of(
    "expected",
    [
        False,
        (None, False),
        ({"params": {"w": None}, "loss": True}, False),
        lambda path, leaf: "loss" in jax.tree_util.keystr(path),
    ],
)
def test_what_is_not_expected_may_differ(two, expected):
    options = js.RunOptions(expect_mirrored=expected)
    new, grad = two.run(forgets, (1.0, ids(two)), options=options)
    assert isinstance(grad, js.PerReplica) and new["loss"] == 2.5


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


def test_the_function_is_given_each_array_with_its_path_and_type(two):
    seen = {}

    def expected(path, leaf):
        seen[jax.tree_util.keystr(path)] = leaf.shape, leaf.dtype.name
        return False

    def step(x):
        return {"rows": x, "n": jnp.int32(3), "name": "text"}, (None, x.sum())

    x = two.per_replica([np.ones((3, 2))] * 2)
    two.run(step, (x,), options=js.RunOptions(expect_mirrored=expected))
    # Only what may differ is asked about.
    assert seen == {"[0]['rows']": ((3, 2), "float32"), "[1][1]": ((), "float32")}


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
