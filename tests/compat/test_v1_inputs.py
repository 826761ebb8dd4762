"""Iterators, rows of arrays and outputs of several steps of TensorFlow 1."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.compat import v1


def mirrored(n=2):
    return v1.MirroredStrategy(jax.devices()[:n])


def central():
    return v1.experimental.CentralStorageStrategy(jax.devices()[:2], jax.devices()[5])


each_kind = pytest.mark.parametrize(
    "make, n", [(mirrored, 2), (central, 2), (v1.get_strategy, 1)]
)


def versions(strategy, value):
    """What each replica has, as lists."""
    results = strategy.experimental_local_results(value)
    return [np.asarray(result).tolist() for result in results]


def ranged(rows, size, **options):
    return js.batches(np.arange(rows), size, **options)


def parts(count, n):
    """`range(count)` in batches of 4, as the parts that `n` replicas have."""
    return [
        np.arange(start, start + 4).reshape(n, -1).tolist()
        for start in range(0, count, 4)
    ]


@each_kind
def test_each_call_takes_a_batch(make, n):
    strategy = make()
    iterator = strategy.make_dataset_iterator(ranged(8, 4))
    for wanted in parts(8, n):
        result = strategy.experimental_run(lambda x: 10 * x, iterator)
        assert versions(strategy, result) == (10 * np.array(wanted)).tolist()
    for _ in range(2):
        with pytest.raises(js.OutOfRangeError, match=r"The end of the data\."):
            strategy.experimental_run(lambda x: 10 * x, iterator)


def test_datasets_make_iterators():
    n = 2
    strategy = mirrored(n)
    made = [
        strategy.experimental_distribute_dataset(ranged(8, 4)),
        strategy.distribute_datasets_from_function(lambda _: ranged(8, 4)),
        strategy.experimental_distribute_datasets_from_function(lambda _: ranged(8, 4)),
    ]
    for dataset in made:
        assert isinstance(dataset, js.DistributedDataset)
        batches = [versions(strategy, batch) for batch in dataset]
        once = dataset.make_one_shot_iterator()
        assert [versions(strategy, batch) for batch in once] == batches
        with pytest.raises(js.OutOfRangeError):
            once.get_next()
        again = dataset.make_initializable_iterator()
        for _ in range(2):
            assert again.initializer == []
            assert [versions(strategy, batch) for batch in again] == batches
    assert [versions(strategy, batch) for batch in made[0]] == parts(8, n)


def test_modes_and_batches_that_are_refused():
    strategy = mirrored()
    options = js.InputOptions(remainder="error")
    iterator = strategy.make_dataset_iterator(ranged(5, 5), options)
    with pytest.raises(ValueError, match="Step 0 has 5 rows where 6 were wanted"):
        iterator.get_next()
    for mode in [js.InputReplicationMode.PER_REPLICA, "per worker"]:
        strategy = mirrored()
        with pytest.raises(ValueError, match="Input replication mode not supported"):
            strategy.make_input_fn_iterator(lambda _: range(4), mode)


def test_what_an_input_function_is_told():
    n = 4
    strategy = mirrored(n)
    told = []

    def input_fn(context):
        told.append(context)
        return range(5 * n)

    iterator = strategy.make_input_fn_iterator(
        input_fn, v1.InputReplicationMode.PER_WORKER
    )
    wanted = np.arange(5 * n).reshape(5, n).tolist()
    assert [versions(strategy, element) for element in iterator] == wanted
    with pytest.raises(js.OutOfRangeError):
        iterator.get_next()
    iterator.initialize()
    assert versions(strategy, iterator.get_next()) == wanted[0]
    assert told == [js.InputContext(1, 0, n)]  # called once
    assert told[0].get_per_replica_batch_size(8) == 8 // n


def test_what_input_functions_may_return():
    strategy = mirrored()

    def elements_of(returned):
        iterator = strategy.make_input_fn_iterator(lambda _: returned)
        return [versions(strategy, element) for element in iterator]

    wanted = [[[0, 1], [2, 3]]]
    rows = np.arange(4).reshape(2, 2)
    assert elements_of(list(rows)) == wanted

    def generator():
        yield from rows

    assert elements_of(generator) == wanted
    assert elements_of(lambda: iter(rows)) == wanted
    with pytest.raises(TypeError, match="The int given as a dataset is not a dataset"):
        strategy.make_input_fn_iterator(lambda _: 3)
    with pytest.raises(TypeError, match="`dataset_fn` is 3, which cannot be called"):
        strategy.make_input_fn_iterator(3)


def test_a_checkpoint_has_the_place_in_the_data(tmp_path):
    strategy = mirrored()
    iterator = strategy.make_dataset_iterator(ranged(12, 4))
    iterator.get_next()
    with js.checkpoint.CheckpointManager(tmp_path) as manager:
        manager.save(0, {"data": iterator})
        other = strategy.make_dataset_iterator(ranged(12, 4))
        assert manager.restore({"data": other})["data"] is other
    assert [versions(strategy, batch) for batch in other] == parts(12, 2)[1:]


# Rows of arrays as datasets, as TensorFlow 1 makes them.


def rows_of(numpy_input):
    return mirrored().experimental_make_numpy_dataset(numpy_input)


def listed(dataset):
    return [jax.tree.map(lambda x: np.asarray(x).tolist(), each) for each in dataset]


def test_rows():
    assert listed(rows_of(np.arange(4))) == [0, 1, 2, 3]
    pairs = rows_of((np.arange(3), np.arange(6.0).reshape(3, 2)))
    assert listed(pairs) == [(0, [0.0, 1.0]), (1, [2.0, 3.0]), (2, [4.0, 5.0])]
    named = rows_of({"x": np.arange(2), "y": np.ones((2, 1))})
    assert listed(named) == [{"x": 0, "y": [1.0]}, {"x": 1, "y": [1.0]}]
    assert listed(named) == listed(named)  # a new pass each time
    assert (len(pairs), bool(pairs), repr(pairs)) == (
        3,
        True,
        "NumpyDataset(3 elements)",
    )
    stacked = rows_of([np.arange(3), np.arange(3) + 10])
    assert listed(stacked) == [[0, 1, 2], [10, 11, 12]]
    in_tuple = rows_of(([1, 2], {"y": [np.zeros(1), np.ones(1)]}))
    assert listed(in_tuple) == [(1, {"y": [0.0]}), (2, {"y": [1.0]})]


def test_what_has_no_rows():
    for given, text in [
        (
            [np.arange(3), np.arange(2)],
            "A list in `numpy_input` is one array, but what this one holds differs in",
        ),
        ((np.ones(3), np.ones(2)), "The arrays of `numpy_input` have 2 and 3 rows."),
        ((), "`numpy_input` is (), which holds no array."),
        (np.float32(3), "`numpy_input` holds"),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            rows_of(given)


# What is measured with `tf.data`: the same elements in the same order.


def test_rows_without_end():
    for count in [None, -1]:
        dataset = rows_of(np.arange(3)).repeat(count).batch(4)
        found = iter(dataset)
        assert [next(found).tolist() for _ in range(2)] == [[0, 1, 2, 0], [1, 2, 0, 1]]
        assert dataset and repr(dataset) == "NumpyDataset(without end)"
        with pytest.raises(TypeError, match="repeated without end has no `len`"):
            len(dataset)


def test_shuffled_rows():
    dataset = rows_of(np.arange(20)).shuffle(20, seed=3)
    first, second = listed(dataset), listed(dataset)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20))
    again = rows_of(np.arange(20)).shuffle(20, seed=3)
    assert (listed(again), listed(again)) == (first, second)
    both = listed(rows_of(np.arange(20)).shuffle(20, seed=3).repeat(2))
    assert both == first + second


def test_arguments_without_meaning():
    for call, error, text in [
        (lambda d: d.batch(0), ValueError, "`batch_size` was 0; 1 or more was wanted"),
        (lambda d: d.batch("4"), TypeError, "`batch_size` was '4'; a whole number was"),
        (lambda d: d.repeat(-2), ValueError, "`count` was -2; -1 or more was wanted"),
        (lambda d: d.shard(2, 2), ValueError, "`index` is 2; it is to be less than 2"),
        (lambda d: d.shard(0, 0), ValueError, "`num_shards` was 0; 1 or more"),
        (lambda d: d.shuffle(9), ValueError, "`shuffle` was given no seed"),
        (lambda d: d.shuffle(9, -1), ValueError, "`seed` was -1; 0 or more"),
        (lambda d: list(d.batch(4).batch(2)), ValueError, "Batches of batches"),
    ]:
        with pytest.raises(error, match=re.escape(text)):
            call(rows_of(np.arange(6)))


# Outputs of several steps of TensorFlow 1, set on a context while they run.


def numbers(strategy, rows=16, size=4, dtype=int):
    return strategy.make_dataset_iterator(
        js.batches(np.arange(rows, dtype=dtype), size)
    )


def run_steps(strategy, fn, iterator, *args, **kwargs):
    extended = strategy.extended
    return extended.experimental_run_steps_on_iterator(fn, iterator, *args, **kwargs)


def setting_sums(strategy):
    """A function that sets the sum of an element, in three ways."""

    def fn(context, x):
        y = strategy.extended.call_for_each_replica(jnp.sum, (x,))
        context.set_last_step_output("sum", y, v1.ReduceOp.SUM)
        context.set_last_step_output("mean", y, "mean")
        context.set_last_step_output("raw", y)

    return fn


def outputs(strategy, context):
    found = context.last_step_outputs
    raw = versions(strategy, found["raw"])
    return float(found["sum"]), float(found["mean"]), raw


def test_one_step_by_default_and_those_before_the_end_are_taken():
    strategy = mirrored()
    iterator, taken = numbers(strategy, rows=8), []
    run_steps(strategy, lambda context, x: taken.append(1), iterator)
    with pytest.raises(js.OutOfRangeError):
        run_steps(strategy, lambda context, x: taken.append(2), iterator, 5)
    assert taken == [1, 2]


def set_in_step(context, x):
    context.set_last_step_output("loss", x.sum(), v1.ReduceOp.MEAN)
    context.set_last_step_output("total", {"sum": x.sum()}, "SUM")
    context.set_non_tensor_output("foo", "bar")
    return x.sum()


def by_argument(strategy, context, x):
    return strategy.extended.call_for_each_replica(set_in_step, args=(context, x))


def by_closure(strategy, context, x):
    return strategy.run(lambda x: set_in_step(context, x), (x,))


class Model:
    def __init__(self, context):
        self.context = context

    def step(self, x):
        return set_in_step(self.context, x)


def by_attribute(strategy, context, x):
    return strategy.run(Model(context).step, (x,))


WAYS = [by_argument, by_closure, by_attribute]


@each_kind
def test_outputs_of_a_step(make, n):
    strategy = make()
    results = []

    def fn(context, x):
        results.append(by_argument(strategy, context, x))

    context = run_steps(strategy, fn, numbers(strategy), 3)
    found = context.last_step_outputs
    assert float(found["loss"]) == 38 / n
    assert float(found["total"]["sum"]) == 38
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    assert context.non_tensor_outputs == {"foo": ("bar",)}
    assert float(strategy.reduce("sum", results[-1])) == 38  # what the step returns


@pytest.mark.parametrize("way", WAYS)
def test_ten_calls_compile_a_step_once(way, compilations):
    strategy = mirrored()
    iterator = numbers(strategy, rows=80)
    found = []

    def run_once():
        def fn(context, x):
            way(strategy, context, x)

        return run_steps(strategy, fn, iterator, 2).last_step_outputs["loss"]

    compilations()
    found.append(float(run_once()))
    assert compilations() >= 1
    found += [float(run_once()) for _ in range(9)]
    assert compilations() == 0
    assert found == [11 + 16 * i for i in range(10)]


def test_no_steps_leave_the_initial_values():
    strategy = mirrored()
    fn, iterator = setting_sums(strategy), numbers(strategy)
    context = run_steps(strategy, fn, iterator, 0, {"sum": 3.0})
    assert context.last_step_outputs == {"sum": 3.0}
    assert run_steps(strategy, fn, iterator, iterations=0).last_step_outputs == {}
    with pytest.raises(ValueError, match=r"`initial_loop_values` is \[3.0\]"):
        run_steps(strategy, fn, iterator, 0, [3.0])
    # As TensorFlow wants them: flat, in the order of sorted names.
    context = run_steps(strategy, fn, iterator, 1, [0.0, 0.0, 0.0])
    assert outputs(strategy, context) == (6, 3, [1, 5])


def step_fn(strategy, step):
    return lambda context, x: strategy.run(step, (context, x))


def by_grad(c, x):
    def loss(x):
        c.set_last_step_output("l", x.sum(), "mean")
        return x.sum()

    return jax.grad(loss)(x)


CONTEXT = js.errors.ContextError
NOT_REDUCED = (
    "The output 'l' was set in a replica context without saying how the replicas' "
    "values are reduced. Give `reduce_op=ReduceOp.MEAN`, or return the value"
)


def test_what_cannot_be_an_output():
    strategy = mirrored()
    for step, error, text in [
        (lambda c, x: c.set_last_step_output("l", x), ValueError, NOT_REDUCED),
        (
            by_grad,
            CONTEXT,
            "`ctx.set_last_step_output` was called inside a function th",
        ),
        (
            lambda c, x: jax.jit(lambda x: c.set_non_tensor_output("l", x.sum()))(x),
            CONTEXT,
            "`ctx.set_non_tensor_output` was called inside a function",
        ),
        (lambda c, x: c.last_step_outputs, CONTEXT, "`ctx.last_step_outputs` was read"),
        (lambda c, x: c.non_tensor_outputs, CONTEXT, "`ctx.non_tensor_outputs` was re"),
        (lambda c, x: c.set_last_step_output("l", x, "middle"), ValueError, "middle"),
    ]:
        check_refused(strategy, step_fn(strategy, step), error, text)
    for fn, error, text in [
        (
            lambda c, x: jax.jit(lambda x: c.set_last_step_output("l", x))(x.values[0]),
            CONTEXT,
            "`ctx.set_last_step_output` was called inside a function",
        ),
        (
            lambda c, x: c.set_last_step_output(3, x),
            TypeError,
            "The name of an output was 3; a text was wanted.",
        ),
    ]:
        check_refused(strategy, fn, error, text)


def check_refused(strategy, fn, error, text):
    with pytest.raises(error, match=re.escape(text)):
        run_steps(strategy, fn, numbers(strategy, dtype=np.float32))
    assert not v1.has_strategy()


def test_where_steps_cannot_be_run():
    strategy = mirrored()

    def step():
        run_steps(strategy, lambda c, x: None, numbers(strategy))

    with pytest.raises(js.errors.ContextError):
        strategy.run(step)
    with pytest.raises(TypeError, match="was given as the iterator, but has no"):
        run_steps(strategy, lambda c, x: None, [1, 2])
