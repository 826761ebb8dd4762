"""State that eager replicas change: variables, objects, what merge calls commit."""

import jax.numpy as jnp
import pytest
from flax import nnx
from helpers.cases import each_of

import jaxstrategy as js

# A replica is late when the machine is busy, whatever it does.
pytestmark = pytest.mark.filterwarnings("ignore::jaxstrategy.errors.LateReplicaWarning")


def replica():
    return js.get_replica_context()


def test_copies_that_differ_are_told_with_what_they_hold(two):
    with two.scope():
        w, v = js.Variable(1.0, name="w"), js.Variable(1.0, name="v")

    def step(x):
        v.assign(3.0)
        w.assign(x)

    with (
        js.experimental.eager_replicas(),
        pytest.raises(js.errors.NotMirroredVariableError) as caught,
    ):
        two.run(step, (two.per_replica([4.0, 5.0]),))
    text = str(caught.value)
    assert "Variable 'w' is mirrored, but `step` assigned it values that differ" in text
    assert "  replica 0: 4.0\n  replica 1: 5.0\n" in text
    assert caught.value.path == "w"
    assert caught.value.line.endswith(": w.assign(x)") and caught.value.line in text
    assert float(w) == 1 and float(v) == 1  # nothing is kept


def test_a_merge_call_finds_and_leaves_what_was_assigned(two):
    with two.scope():
        w = js.Variable(1.0)
        own = js.Variable(0.0, synchronization="on_read", aggregation="sum")
    seen = []

    def merge(strategy, x):
        seen.append((float(w), float(own)))
        strategy.extended.update(w, lambda w, x: w.assign_add(x), (10.0,))
        return strategy.reduce("sum", x)

    def step(x):
        w.assign(2.0)
        own.assign(x)
        total = replica().merge_call(merge, (x,))
        seen.append(float(w))
        w.assign_add(1.0)
        return total, w.value()

    with js.experimental.eager_replicas():
        total, now = two.run(step, (two.per_replica([1.0, 2.0]),))
    assert seen == [(2.0, 3.0), 12.0, 12.0]
    assert (float(total), float(now), float(w)) == (3, 13, 13)


def test_a_step_may_make_a_variable_once(two):
    made = []

    def step(x):
        if not made:
            made.append(js.Variable(1.0, aggregation="sum"))
        made[0].assign_add(x)
        return made[0].value()

    x = two.per_replica([1.0, 2.0])
    with js.experimental.eager_replicas():
        assert float(two.run(step, (x,))) == 4
        assert float(two.run(step, (x,))) == 7
    assert float(two.run(step, (x,))) == 10

    with (
        js.experimental.eager_replicas(),
        pytest.raises(ValueError, match="was made inside a step"),
    ):
        two.run(lambda: js.Variable(1.0).assign_add(1.0) and None)


def counter():
    class Counter(nnx.Module):
        def __init__(self):
            self.total = nnx.Variable(jnp.zeros(()))
            self.rngs = nnx.Rngs(0)
            self.calls = 0

    return Counter()


@pytest.mark.slow
@each_of("is_captured", (False, True))
def test_objects_are_changed_in_place(two, is_captured):
    model = counter()

    def count(model, x):
        model.total[...] += replica().all_reduce("sum", x)
        model.calls += 1
        return model.total[...] + x

    x = two.per_replica([1.0, 2.0])
    step = (lambda x: count(model, x)) if is_captured else count
    args = (x,) if is_captured else (model, x)
    with js.experimental.eager_replicas():
        found = two.run(step, args)
        assert [float(each) for each in found.values] == [4, 5]
        assert float(model.total[...]) == 3 and model.calls == 1
        two.run(step, args)
    two.run(step, args)
    assert float(model.total[...]) == 9


def test_objects_that_differ_are_an_error(two):
    model = counter()

    def step(model, x):
        model.total[...] += x

    with (
        js.experimental.eager_replicas(),
        pytest.raises(js.errors.NotMirroredError) as caught,
    ):
        two.run(step, (model, two.per_replica([1.0, 2.0])))
    text = str(caught.value)
    assert "`step` leaves `model.total` different on each replica." in text
    assert "  replica 0: 1.0\n  replica 1: 2.0\n" in text
    assert float(model.total[...]) == 0


def test_results_that_are_expected_to_be_mirrored(two):
    options = js.RunOptions(expect_mirrored=(True, False))

    def step(x):
        return {"w": x}, x

    with js.experimental.eager_replicas():
        two.run(step, (two.mirror(1.0),), options=options)
        with pytest.raises(js.errors.NotMirroredError) as caught:
            two.run(step, (two.per_replica([1.0, 2.0]),), options=options)
    assert str(caught.value).startswith(
        "`step(...)[0]['w']` was expected to be mirrored, but the replicas differ.\n"
        "  replica 0: 1.0\n  replica 1: 2.0\n"
    )


def test_structures_that_differ_are_told(two):
    def step():
        is_first = replica().replica_id_in_sync_group == 0
        return (1,) if is_first else [1]

    with js.experimental.eager_replicas(), pytest.raises(ValueError) as caught:
        two.run(step)
    assert "`step` returned pytrees of different structures: " in str(caught.value)
    assert " on replica 0, and " in str(caught.value)


def test_a_nan_is_told_where_it_arises(two):
    options = js.RunOptions(check_finite=True)
    x = two.per_replica([1.0, -1.0])
    with js.experimental.eager_replicas(), pytest.raises(js.NonFiniteError) as caught:
        two.run(lambda x: jnp.log(x), (x,), options=options)
    assert "made a NaN in `eager_replicas()`" in str(caught.value)
    assert "jnp.log(x)" in caught.value.line
    assert "Replica 1 of `<lambda>` raised this" in caught.value.__notes__[0]


def test_a_merge_function_may_refer_to_what_is_equal(two):
    w = two.mirror(2.0)

    def step(x, w):
        double = 2 * w

        def merge(strategy, x):
            return strategy.reduce("sum", x) * double

        return replica().merge_call(merge, (x,))

    x = two.per_replica([1.0, 2.0])
    with js.experimental.eager_replicas():
        assert float(two.run(step, (x, w))) == 12
        with pytest.raises(ValueError, match="refers to `x`, which differs between"):
            two.run(lambda x: replica().merge_call(lambda s: s.reduce("sum", x)), (x,))
