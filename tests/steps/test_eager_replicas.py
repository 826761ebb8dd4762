"""Steps that run eagerly, each replica in a thread, compute what compiled ones do."""

import functools
import io
import pdb
import re
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.cases import each, each_of
from helpers.threads import in_threads

import jaxstrategy as js

pytestmark = pytest.mark.filterwarnings("ignore::jaxstrategy.errors.LateReplicaWarning")
DEVICES = js.simulate(8)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("replica ")]


def replica():
    return js.get_replica_context()


STRATEGIES = {
    "mirrored": lambda: js.MirroredStrategy(DEVICES[:3]),
    "shared devices": lambda: js.MirroredStrategy(DEVICES[:2], replicas_per_device=2),
    "several devices": lambda: js.MirroredStrategy(
        DEVICES[:4], logical_axes={"core": 2}
    ),
}


@pytest.fixture(params=STRATEGIES, scope="module")
def layout(request):
    return STRATEGIES[request.param]()


def rows(strategy):
    count = strategy.num_replicas_in_sync
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2)


def versions(value, strategy):
    return [np.asarray(each) for each in strategy.experimental_local_results(value)]


def test_a_merge_call_is_made_once_for_all(layout):
    x = rows(layout)
    calls = []

    def merge(strategy, x, word):
        calls.append(word)
        return strategy.reduce("sum", x, axis=None), x

    def step(x):
        total, own = replica().merge_call(merge, (x,), {"word": "once"})
        return total, own + 1

    with js.experimental.eager_replicas():
        total, own = layout.run(step, (js.PerReplica(x),))
    assert calls == ["once"]
    np.testing.assert_array_equal(total, x.sum(0))
    for version, row in zip(versions(own, layout), x, strict=True):
        np.testing.assert_array_equal(version, row + 1)


def both_ways(strategy, step, *args):
    compiled = strategy.run(step, args)
    with js.experimental.eager_replicas():
        return compiled, strategy.run(step, args)


NUMBERS = {
    "the mean of integers": lambda x: replica().all_reduce("mean", 3),
    "ids": lambda x: replica().all_reduce("sum", replica().replica_id_in_sync_group),
    "groups": lambda x: replica().all_reduce("sum", x, groups=[[0], [1]]),
    "the least": lambda x: jax.grad(lambda x: replica().all_reduce("min", x).sum())(x),
    "gathered": lambda x: jax.grad(
        lambda x: (replica().all_gather(x, 0) * jnp.arange(4.0)).sum()
    )(x),
    "forward": lambda x: jax.jvp(lambda x: replica().all_reduce("sum", x), (x,), (x,)),
    "second": lambda x: jax.grad(
        jax.grad(lambda a: replica().all_reduce("mean", (a * x[0]) ** 3))
    )(2.0),
    "mapped and gathered": lambda x: jax.vmap(
        lambda a: replica().all_gather(a[None], 0), out_axes=1
    )(x),
    "in a loop": lambda x: jax.lax.scan(
        lambda c, a: (c + replica().all_reduce("sum", a), c), 0.0, x
    ),
    "jitted": lambda x: jax.jit(lambda a: replica().all_reduce("sum", a))(x),
    "checkpointed": lambda x: jax.grad(
        jax.checkpoint(lambda x: replica().all_reduce("mean", x**2).sum())
    )(x),
    "rows": lambda x: (
        replica()
        .all_reduce(
            "sum",
            js.IndexedSlices(
                x[:, None], jnp.arange(2) + replica().replica_id_in_sync_group, (3, 1)
            ),
        )
        .to_dense()
    ),
    "a wide number": lambda x: (
        x.astype(jnp.bfloat16) * replica().all_reduce("sum", 2.0)
    ),
    "a callback": lambda x: jax.pure_callback(
        lambda a: 2 * np.asarray(a), jax.ShapeDtypeStruct((2,), jnp.float32), x
    ),
    "no array": lambda x: ("text", None, 3, x),
}


@pytest.mark.slow
def test_values_types_and_kinds_are_the_compiled_ones(two):
    def step(x):
        return {name: function(x) for name, function in NUMBERS.items()}

    def is_whole(node):
        return isinstance(node, js.PerReplica)

    x = two.per_replica([[1.0, 2.0], [5.0, 3.0]])
    compiled, eager = both_ways(two, step, x)
    found, structure = jax.tree.flatten_with_path(compiled, is_leaf=is_whole)
    others, other = jax.tree.flatten(eager, is_leaf=is_whole)
    assert structure == other
    for (path, have), want in zip(found, others, strict=True):
        assert type(have) is type(want), path
        if is_whole(have):
            have, want = have.stacked, want.stacked
        if isinstance(have, jax.Array):
            assert (have.shape, have.dtype) == (want.shape, want.dtype), path
            np.testing.assert_allclose(
                *(np.asarray(each, np.float32) for each in (have, want)),
                rtol=1e-6,
                err_msg=str(path),
            )
        else:
            assert have == want, path


def test_shapes_may_depend_on_data(two):
    x = two.per_replica([[1.0, -1.0, 2.0], [-1.0, -2.0, 3.0]])

    def step(x):
        kept = x[x > 0]
        return kept, replica().all_reduce("sum", kept.sum()), f"{len(kept)} rows"

    with js.experimental.eager_replicas():
        kept, total, words = two.run(step, (x,))
    assert isinstance(kept, js.experimental.Versions)
    assert [each.tolist() for each in kept] == [[1.0, 2.0], [3.0]]
    assert two.experimental_local_results(kept) == kept.values
    assert kept.local(1).tolist() == kept[1].tolist() == [3.0] and len(kept) == 2
    assert float(total) == 6
    assert words.values == ("2 rows", "1 rows")
    with pytest.raises(IndexError, match="Replica 2 was asked of a value of which"):
        words.local(2)


def test_what_differed_once_is_a_per_replica_from_then_on(two):
    def step(x):
        return x + 1

    equal, other = two.per_replica([1.0, 1.0]), two.per_replica([1.0, 2.0])
    with js.experimental.eager_replicas():
        assert float(two.run(step, (equal,))) == 2  # equal, so it is one array
        assert two.run(step, (other,)).local(1) == 3
        assert two.run(step, (equal,)).local(1) == 2
    with js.experimental.eager_replicas():
        assert isinstance(two.run(step, (equal,)), jax.Array)
        assert isinstance(two.run(lambda x: x, (equal,)), js.PerReplica)


@pytest.mark.slow
def test_several_steps_are_a_loop_in_python(two):
    seen = []

    @two.run
    def step(total, batch):
        seen.append(float(batch[0]))
        mean = replica().all_reduce("mean", batch.sum())
        return total + mean, mean

    many, local = two.several(step), two.local_steps(step)
    batches = tuple(two.per_replica([[1.0], [k]]) for k in (2.0, 4.0))
    with js.experimental.eager_replicas():
        total, means = many(0.0, batches)
        assert seen == [1.0, 2.0, 1.0, 4.0]
        state, parts = local(0.0, batches)
    assert float(total) == 1.5 + 2.5
    np.testing.assert_array_equal(means, [1.5, 2.5])
    assert float(state) == (2 + 6) / 2
    np.testing.assert_array_equal(parts, [1.5, 2.5])


def test_a_batch_in_parts_is_worked_on_part_by_part(two):
    seen = []

    def of_part(rows):
        seen.append(rows.tolist())
        return rows.sum(), rows.max()

    def step(x):
        return two.accumulate(2, has_aux=True)(of_part)(x)

    x = two.per_replica([[1.0, 2.0], [3.0, 4.0]])
    with js.experimental.eager_replicas():
        mean, most = two.run(step, (x,))
    assert seen == [[1.0], [2.0], [3.0], [4.0]]
    assert [float(each) for each in mean.values] == [1.5, 3.5]
    assert most.local(1).tolist() == [3.0, 4.0]


# State that eager replicas change: variables, objects, what merge calls commit.


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

    def step(x, w, model):
        leaves, structure = jax.tree.flatten({"of w": [2 * w], "name": slice(0, 1)})
        double = jax.tree.unflatten(structure, leaves)

        def scaled(x, by=w):
            return x * double["of w"][0] * by * model.scale[...][0]

        def merge(strategy, x):
            assert jax.tree.structure(double) == structure
            return scaled(strategy.reduce("sum", x))

        total = replica().merge_call(merge, (x,))
        return total, double["of w"][0] + x  # as before on this replica

    x = two.per_replica([1.0, 2.0])
    differ = {
        "x": lambda x: lambda s: s.reduce("sum", x),
        "n": lambda x: (lambda n: lambda s: n)(float(x)),
        "args[0]": lambda x: functools.partial(lambda n, s: n, float(x)),
        "model": lambda x: (lambda model: lambda s: model.total[...])(counter()),
    }
    with js.experimental.eager_replicas():
        total, own = two.run(step, (x, w, nnx.LayerNorm(1, rngs=nnx.Rngs(0))))
        assert float(total) == 24 and [float(each) for each in own.values] == [5, 6]
        for name, merge_fn in differ.items():
            text = re.escape(f"refers to `{name}`, which differs between")
            with pytest.raises(ValueError, match=text):
                two.run(lambda x, of=merge_fn: replica().merge_call(of(x)), (x,))
        with pytest.raises(ValueError, match="with different functions for `merge_f"):
            two.run(lambda: replica().merge_call((len, sum)[number()]))
        with pytest.raises(ValueError, match="with different functions for `args.0.`"):
            two.run(lambda: replica().merge_call(print, ((int, str)[number()],)))


def test_a_partial_merge_function_has_the_arrays_of_all(two):
    def merge(strategy, x, rows, w):
        return strategy.reduce("sum", {"x": x, "rows": rows["of"]}), w * 2, rows["of"]

    def step(x, w):
        first = slice(0, 1)
        rows = {"of": x[first]}
        given = functools.partial(
            lambda *args, rows, w: merge(*args, rows, w[first]), rows=rows, w=2 * w
        )
        return replica().merge_call(given, (x,)), rows["of"]

    x = two.per_replica([np.array([1.0, 2.0]), np.array([3.0, 4.0])])
    args = x, two.mirror(np.array([1.0, 5.0]))
    compiled = two.run(step, args)
    with js.experimental.eager_replicas():
        eager = two.run(step, args)
        with pytest.raises(
            ValueError, match=r"refers to `y\[1\]`, which differs between"
        ):
            two.run(
                lambda x, w: replica().merge_call(
                    functools.partial(lambda s, y: y, y=(x, w if number() else x))
                ),
                args,
            )
        with pytest.raises(ValueError, match="`merge_fn` of other shapes or dtypes"):
            two.run(
                lambda x: replica().merge_call(
                    functools.partial(lambda s, y: y, y=x[number() :])
                ),
                args[:1],
            )
    jax.tree.map(np.testing.assert_array_equal, eager, compiled)


def test_a_merge_function_that_changes_one_replicas_own_list_is_told(two):
    def step(x, seen):
        def merge(strategy, x):
            seen.append("it")
            return strategy.reduce("sum", x)

        return replica().merge_call(merge, (x,))

    x, shared = two.per_replica([1.0, 2.0]), []
    with js.experimental.eager_replicas():
        assert float(two.run(lambda x: step(x, shared), (x,))) == 3 and shared == ["it"]
        with pytest.raises(ValueError, match="changes `seen[^`]*`, of which each repl"):
            two.run(lambda x: step(x, []), (x,))


# Operations of eager replicas are compiled once for all calls, and keep nothing.


def all_reduced(x):
    return js.get_replica_context().all_reduce("sum", x)


def test_a_second_call_compiles_nothing(two, compilations):
    with two.scope():
        w = js.Variable(2.0)

    def step(x):
        grad = js.grad(lambda: jnp.sum((w * x - 1.0) ** 2), w)()
        w.assign_sub(0.1 * all_reduced(grad))
        return jnp.tanh(x) * w

    x = two.per_replica(np.float32([[1.0, 2.0], [3.0, 4.0]]))
    with js.experimental.eager_replicas():
        two.run(step, (x,))
        first = float(w)
        compilations()
        two.run(step, (x,))
        assert compilations() == 0
    # A plain loop: the derivative is 2 * sum((w x - 1) x) of all rows.
    rows, expected = np.arange(1.0, 5.0), 2.0
    for found in (first, float(w)):
        expected -= 0.1 * 2 * np.sum((expected * rows - 1.0) * rows)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@each_of("on_each_device", (1, 2))
def test_a_helper_that_stays_compiled_knows_its_replica(on_each_device):
    two = js.MirroredStrategy(
        jax.devices()[: 2 // on_each_device], replicas_per_device=on_each_device
    )
    helper = jax.jit(lambda x: x + js.get_replica_context().replica_id_in_sync_group)
    with js.experimental.eager_replicas(disable_jit=False):
        for start in (1.0, 5.0):
            found = two.run(lambda x: all_reduced(helper(x)), (np.float32(start),))
            assert found == 2 * start + 1


@each_of("traced, disable_jit", ((jax.checkpoint, True), (jax.jit, False)))
def test_what_would_be_kept_for_later_calls_is_refused(two, traced, disable_jit):
    with two.scope():
        v = js.Variable(3.0, name="v")
    helper = traced(lambda x: v * x)
    given = traced(lambda v, x: v * x)
    with js.experimental.eager_replicas(disable_jit=disable_jit):
        with pytest.raises(js.errors.ContextError, match="'v' was used.*would keep it"):
            two.run(lambda: helper(2.0))
        for value in (3.0, 4.0):
            v.assign(value)
            assert two.run(lambda: given(v.value(), 2.0)) == 2 * value


def test_masks_would_be_kept_for_later_calls(two):
    helper = jax.checkpoint(js.masked_sum)
    batches = two.experimental_distribute_dataset(js.batches(np.arange(3.0), 4))
    with js.experimental.eager_replicas():
        for batch in batches:
            with pytest.raises(js.errors.ContextError, match="mask of a batch was use"):
                two.run(lambda x: all_reduced(helper(x)), (batch,))
            assert two.run(lambda x: all_reduced(js.masked_sum(x)), (batch,)) == 3.0


# Eager replicas that do not arrive together are told with their lines; none hangs.


@pytest.fixture(scope="module")
def three():
    return js.MirroredStrategy(DEVICES[:3])


def number():
    return int(replica().replica_id_in_sync_group)


def eagerly(strategy, step, *args, kind=js.errors.DivergentCollectiveError):
    """The error of a step, which must come in time."""
    caught = []

    def run():
        with js.experimental.eager_replicas(), pytest.raises(kind) as error:
            strategy.run(step, args)
        caught.append(error.value)

    in_threads(run)
    return caught[0]


def test_a_replica_that_returns_makes_no_other_wait(three):
    def step():
        if number() == 1:
            return 0.0
        return replica().all_reduce("sum", 1.0)  # here

    error = eagerly(three, step)
    text = str(error)
    assert "The replicas of `step` do not meet at the same collective" in text
    here = r"all_reduce\('sum'\) of float32\[\]: \S+replicas.py:\d+: return rep.*# here"
    assert re.search(f"replica 0 waits at {here}\n  replica 1 has returned", text)
    assert re.search(f"replica 2 waits at {here}\n", text)
    assert "# here" in error.collective_line


def test_merge_calls_of_some_replicas_only(three):
    # LEG1-29: TensorFlow's "different number of merge_call() calls".
    def step():
        if number() == 0:
            replica().merge_call(lambda strategy: None)

    error = eagerly(three, step, kind=RuntimeError)
    assert "have a different number of merge_call() calls" in str(error)
    assert "replica 0 waits at merge_call: " in str(error)
    assert "replica 2 has returned, without any" in str(error)


def test_different_collectives_are_told_with_what_each_gives(three):
    def step():
        if number() == 0:
            return replica().all_reduce("sum", jnp.ones(2))
        if number() == 1:
            return replica().all_reduce("mean", jnp.ones(3))
        return replica().all_gather(jnp.ones(2, jnp.int32), 0)

    text = str(eagerly(three, step))
    assert re.search(r"replica 0 waits at all_reduce\('sum'\) of float32\[2\]: ", text)
    assert re.search(r"replica 1 waits at all_reduce\('mean'\) of float32\[3\]: ", text)
    assert re.search(r"replica 2 waits at all_gather\(axis=0\) of int32\[2\]: ", text)


DIFFERENT = {
    "shapes": lambda: replica().all_reduce("sum", jnp.ones(1 + number())),
    "dtypes": lambda: replica().all_reduce(
        "sum", jnp.ones(1, "float32" if number() else "int32")
    ),
    "structures": lambda: replica().all_reduce(
        "sum", [jnp.ones(1)] * (1 + (number() == 0))
    ),
    "groups": lambda: replica().all_reduce(
        "sum", 1.0, groups=[[0, 1, 2]] if number() else None
    ),
    "gradients": lambda: jax.grad(
        lambda x: x if number() == 1 else replica().all_reduce("sum", x)
    )(1.0),
}


def test_whatever_differs_is_told(three):
    for _, step in each(DIFFERENT):
        assert "All replicas must call the same collectives" in str(
            eagerly(three, step)
        )


def test_errors_come_out_as_they_are_and_say_whose(three):
    ended = []

    def step():
        try:
            if number() == 1:
                raise KeyError("mine")
            return replica().all_reduce("sum", 1.0)
        except Exception:
            ended.append("caught")
            raise
        finally:
            ended.append(number())

    error = eagerly(three, step, kind=KeyError)
    assert error.args == ("mine",)
    (note,) = error.__notes__
    assert note.startswith("Replica 1 of `step` raised this, in `eager_replicas()`. ")
    assert re.search(r"Replica 0 waits at all_reduce\('sum'\) of float32\[\]: ", note)
    # Replica 0 is ended where it waits, by nothing that `except Exception` takes.
    assert ended == ["caught", 1, 0]


def test_an_interrupt_ends_all(three):
    def step():
        if number() == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            while True:
                pass
        return replica().all_reduce("sum", 1.0)

    with js.experimental.eager_replicas(), pytest.raises(KeyboardInterrupt):
        three.run(step)


@pytest.mark.slow
def test_a_replica_that_runs_on_is_told_with_its_line(three):
    def step():
        end = time.monotonic() + 60
        while number() == 1 and not caught and time.monotonic() < end:
            time.sleep(0.1)  # here
        return replica().all_reduce("sum", 1.0)

    with (
        js.experimental.eager_replicas(),
        pytest.warns(js.errors.LateReplicaWarning) as caught,
    ):
        assert float(three.run(step)) == 3
    text = str(caught[0].message)
    assert text.startswith("Replica 1 of `step` has run for 10 s and has not come to a")
    assert re.search(r"It is at\n  .*\nReplica 0 waits at all_reduce\('sum'\) of", text)


def test_a_debugger_shows_one_replica_at_a_time(three):
    out = io.StringIO()

    def step(x):
        commands = io.StringIO("p 'has', float(x)\ncontinue\n")
        pdb.Pdb(stdin=commands, stdout=out, nosigint=True).set_trace()
        return replica().all_reduce("sum", x)

    with js.experimental.eager_replicas():
        total = three.run(step, (three.per_replica([1.0, 2.0, 3.0]),))
    assert float(total) == 6
    found = re.findall(r"\('has', ([\d.]+)\)", out.getvalue())
    assert found == ["1.0", "2.0", "3.0"], out.getvalue()


def test_axes_by_hand_and_assignments_of_what_is_mapped_are_refused(three):
    error = eagerly(three, lambda: jax.lax.psum(jnp.ones(1), "replica"), kind=NameError)
    assert "Use `get_replica_context().all_reduce('sum', x)`" in str(error)
    with three.scope():
        v = js.Variable(0.0, name="v")

    def step(x):
        jax.vmap(lambda a: v.assign(a))(x)

    x = three.per_replica([[1.0, 2.0]] * 3)
    error = eagerly(three, step, x, kind=ValueError)
    assert "Variable 'v' was assigned, in `eager_replicas()`, a value" in str(error)


def test_code_that_jax_traces_is_refused(three):
    x = three.per_replica([1.0, 2.0, 3.0])
    step = three.run(lambda x: replica().all_reduce("sum", x))
    with js.experimental.eager_replicas():
        with pytest.raises(js.errors.ContextError, match="by code that JAX traces"):
            jax.jit(step)(x)
    step = lambda x: jax.jit(lambda x: replica().all_reduce("sum", x))(x)  # noqa: E731
    with js.experimental.eager_replicas(disable_jit=False):
        with pytest.raises(js.errors.ContextError, match="in a function that JAX comp"):
            three.run(step, (x,))


def test_merge_calls_of_what_is_differentiated_are_refused(three):
    def step(x):
        return jax.grad(lambda x: replica().merge_call(lambda s, x: x, (x,)))(x)

    error = eagerly(
        three, step, three.per_replica([1.0, 2.0, 3.0]), kind=js.errors.ContextError
    )
    assert "`args[0]` that JAX traces" in str(error)


def test_workers_of_parameter_servers_run_nothing_eagerly():
    strategy = js.ParameterServerStrategy(workers=1, backend="threads")
    try:
        with (
            js.experimental.eager_replicas(),
            pytest.raises(js.errors.ContextError, match="by a worker of"),
        ):
            strategy.run(lambda: 1.0)
        coordinator = js.coordinator.ClusterCoordinator(strategy)
        with (
            js.experimental.eager_replicas(),
            pytest.raises(js.errors.ContextError, match="by a worker of"),
        ):
            coordinator.schedule(coordinator.function(lambda: 1.0))
    finally:
        strategy.close()


def test_odd_arguments_are_refused():
    with pytest.raises(TypeError, match="`disable_jit` was 3; True or False was want"):
        with js.experimental.eager_replicas(disable_jit=3):
            pass
    with pytest.raises(TypeError, match="`Versions` was given 1 and 2; a sequence of"):
        js.experimental.Versions(1, 2)
    with pytest.raises(ValueError, match="was given 1 values for 2 replicas; one for"):
        js.experimental.Versions([1], [0, 1])
