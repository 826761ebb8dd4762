"""Donated arguments, and arguments that lie elsewhere or are of another strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.replicas import ids, replica, versions

import jaxstrategy as js

# Donation.


def test_donated_state_is_updated_in_place(four):
    @four.run(options=js.RunOptions(donate_argnums=0))
    def step(state, x):
        return {"w": state["w"] + replica().all_reduce("sum", x)}

    state = four.mirror({"w": jnp.zeros(4)})
    first = state["w"]
    for _ in range(3):
        state = step(state, 1.0)
    assert first.is_deleted()
    np.testing.assert_array_equal(state["w"], [12.0] * 4)


def check_that_using_a_donated_value_again_names_the_argument(four, later):
    options = js.RunOptions(donate_argnums=0)

    def step(state, batch):
        return jax.tree.map(lambda a: a + batch, state)

    def look(batch, *, params):
        return params["net"][0]

    state = four.mirror({"net": [jnp.zeros(4)]})
    four.run(step, (state, 1.0), options=options)
    with pytest.raises(
        js.errors.DonatedValueError, match="donated to an earlier call"
    ) as info:
        if later == "same step":
            four.run(step, (state, 1.0), options=options)
        else:
            four.run(look, (1.0,), {"params": state})
    name = "state" if later == "same step" else "params"
    assert f"`{name}['net'][0]`" in str(info.value)


def test_using_a_donated_value_again_names_the_argument(four):
    for later in ("same step", "another step"):
        check_that_using_a_donated_value_again_names_the_argument(four, later)


def test_one_array_in_two_donated_places_is_refused(four):
    for strategy in (four, js.MirroredStrategy(jax.devices()[:1])):
        check_that_one_array_in_two_donated_places_is_refused(strategy)


def check_that_one_array_in_two_donated_places_is_refused(strategy):
    """At the first call, and where calls before have donated what is in one place."""

    @strategy.run(options=js.RunOptions(donate_argnums=0))
    def step(state, other):
        return {key: value + other for key, value in state.items()}

    def fresh():
        return strategy.mirror(jnp.zeros(3) + 0)

    x, other = fresh(), fresh()
    for _ in range(2):
        for state, read, words in (
            (
                {"a": x, "b": x},
                other,
                r"`state\['a'\]` and `state\['b'\]` are one array",
            ),
            ({"a": x, "b": other}, x, r"`state\['a'\]` and `other`"),
        ):
            with pytest.raises(js.errors.DonatedValueError, match=words) as info:
                step(state, read)
            assert info.value.__cause__ is None and info.value.__suppress_context__
        state = {"a": fresh(), "b": fresh()}
        for _ in range(4):
            state = step(state, x)
        assert state["b"].shape == (3,)
    assert not x.is_deleted() and not other.is_deleted()
    taken = dict(state)
    step(state, x)
    with pytest.raises(
        js.errors.DonatedValueError, match=r"`state\['a'\]` was donated"
    ):
        step(taken, x)


def test_some_arguments_are_donated_and_others_stay(four):
    options = js.RunOptions(donate_argnums=(0, 2))

    def step(state, batch, count):
        total = replica().all_reduce("sum", batch["x"])
        return {"w": state["w"] + total}, batch["rate"] * total, count + 1

    rate, count = four.mirror((jnp.ones(3), jnp.zeros(()) + 0))
    state = {"w": four.mirror(jnp.zeros(3) + 0)}
    for number in range(1, 4):
        given = state["w"], count
        state, _, count = four.run(
            step, (state, {"x": ids(four), "rate": rate}, count), options=options
        )
        assert all(array.is_deleted() for array in given)
        np.testing.assert_array_equal(state["w"], [6.0 * number] * 3)
    assert count == 3 and not rate.is_deleted()


def test_donating_a_mirrored_copy_leaves_the_original(strategy):
    original = jax.device_put(jnp.ones(3), jax.devices()[0])
    state = strategy.mirror({"a": original, "b": original})
    options = js.RunOptions(donate_argnums=0)
    strategy.run(lambda s: jax.tree.map(jnp.sin, s), (state,), options=options)
    assert state["a"].is_deleted() and original.tolist() == [1, 1, 1]


def test_zeros_keep_their_sign_and_numbers_their_type(two):
    def step(x):
        return 1.0 / x, x

    for _ in range(2):
        assert two.run(step, (0.0,))[0] == np.inf
        assert two.run(step, (-0.0,))[0] == -np.inf
        assert two.run(step, (1,))[1].dtype == jnp.int32
        assert two.run(step, (1.0,))[1].dtype == jnp.float32
        assert np.isnan(two.run(step, (float("nan"),))[1])


def test_tools_for_finding_errors_work(two):
    x = two.per_replica([1.0, 2.0])

    def step(x):
        return x, replica().all_reduce("sum", x), "text"

    with jax.disable_jit():
        assert two.run(step, (x,))[1] == 3.0
    with jax.checking_leaks():
        assert two.run(step, (x,))[1] == 3.0
    shapes = jax.eval_shape(lambda v: two.run(step, (v,))[:2], x)
    assert shapes[0].shape == () and shapes[1].shape == ()
    compiled = jax.jit(lambda v: two.run(step, (v,))[1]).lower(x).compile()
    assert compiled(x) == 3.0


def test_donated_argument_numbers_are_checked(two):
    with pytest.raises(ValueError, match="names argument 2, but `args` has 1"):
        two.run(lambda a: a, (1.0,), options=js.RunOptions(donate_argnums=2))
    with pytest.raises(ValueError, match="cannot be negative"):
        js.RunOptions(donate_argnums=-1)
    with pytest.raises(TypeError, match="an argument position or a sequence"):
        js.RunOptions(donate_argnums="state")
    assert js.RunOptions(donate_argnums=[1, 0, 1]).donate_argnums == (0, 1)


# Values of another strategy, and values in the wrong form.


def test_a_per_replica_of_another_number_of_replicas(two, four):
    for value in (ids(two), js.PerReplica(np.zeros((8, 3)))):
        with pytest.raises(
            js.errors.PlacementError, match="`x` is a PerReplica for .* repl"
        ):
            four.run(lambda x: x, (value,))
    with pytest.raises(js.errors.PlacementError, match="`x` is a PerReplica of shape"):
        four.run(lambda x: x, (js.PerReplica(np.float32(1.0)),))


def check_that_a_per_replica_of_another_strategy(four, devices):
    other = js.MirroredStrategy(jax.devices()[devices])
    assert other.num_replicas_in_sync == 4

    def step(x):
        return x

    for _ in range(2):  # also when the step has been run with a right one
        with pytest.raises(
            js.errors.PlacementError, match="`x` is a PerReplica of another"
        ):
            four.run(step, (ids(other),))
        four.run(step, (ids(four),))


def test_a_per_replica_of_another_strategy(four):
    for devices in (slice(4, 8), slice(3, None, -1)):
        check_that_a_per_replica_of_another_strategy(four, devices)


def test_a_plain_array_split_over_the_replicas_is_refused(four):
    x = ids(four).stacked

    def step(x):
        return x

    for _ in range(2):  # also when the step has been run with a right one
        with pytest.raises(
            js.errors.PlacementError, match=r"pass `PerReplica\(array\)`"
        ):
            four.run(step, (x,))
        np.testing.assert_array_equal(four.run(step, (four.mirror(x),)), [0, 1, 2, 3])
        assert versions(four.run(step, (js.PerReplica(x),))) == [0, 1, 2, 3]


def test_a_per_replica_captured_by_the_step_is_refused(four):
    x = ids(four)
    for step in (
        lambda: x + 1,
        lambda: jnp.sin(x),
        lambda: replica().all_reduce("sum", x),
        lambda: replica().all_gather(x, 0),
        lambda: replica().merge_call(lambda s, v: v, (x,)),
        lambda: replica().merge_call(lambda s: s.reduce("sum", x)),
        lambda: replica().merge_call(lambda s: s.run(lambda v: v, (x,))),
        lambda: {"a": x},
    ):
        with pytest.raises(TypeError, match="ass it as an argument"):
            four.run(step)


def test_unhashable_static_arguments_are_refused(two):
    with pytest.raises(TypeError, match=r"`config` is \{1\}, a set.*must be hashable"):
        two.run(lambda x, config: x, (1.0, {1}))
    with pytest.raises(TypeError, match=r"`names` is array\(.*must be hashable"):
        two.run(lambda names: 1.0, (np.array(["a", "b"]),))
