"""Elements for towers, and several steps over them, as in 2018.

Expected values are those of TensorFlow's tests of its time, or follow from these.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.inputs import real
from helpers.towers import STRATEGIES, in_default, mirrored, unwrapped

import jaxstrategy as js
from jaxstrategy.compat import contrib, v1

SUM, MEAN = contrib.VariableAggregation.SUM, contrib.VariableAggregation.MEAN
each_strategy = pytest.mark.parametrize("name", STRATEGIES)


def all_of(d, iterator):
    with d.scope():
        return [unwrapped(d, element) for element in iterator]


# Elements.


@pytest.mark.parametrize("count, steps", [(10, 5), (5, 2), (1, 0)])
def test_one_element_for_each_tower(count, steps):
    d = mirrored(2)
    dataset = d.distribute_dataset(lambda: range(count))
    assert isinstance(dataset, contrib.PerDeviceDataset)
    iterator = dataset.make_one_shot_iterator()
    assert all_of(d, iterator) == np.arange(2 * steps).reshape(steps, 2).tolist()
    for _ in range(2):
        with pytest.raises(js.OutOfRangeError):
            iterator.get_next()


@each_strategy
def test_elements_are_not_divided(name):
    d = STRATEGIES[name]()
    n = d.num_towers
    rows = np.arange(8 * n).reshape(2, n, 4)
    dataset = d.distribute_dataset(lambda: [*rows.reshape(-1, 4)])
    assert all_of(d, dataset) == rows.tolist()
    one = d.distribute_dataset(lambda: [np.array([[1.0]])] * n)
    assert all_of(d, one) == [[[[1.0]]] * n]


def test_an_element_with_fewer_rows_is_kept():
    d = mirrored(2)
    dataset = d.distribute_dataset(lambda: js.batches(np.arange(7), 2))
    assert [real(element) for element in dataset] == [[[0, 1], [2, 3]], [[4, 5], [6]]]


def test_an_iterator_begins_again():
    d = mirrored(2)
    calls = []

    def dataset_fn():
        calls.append(1)
        return range(4)

    iterator = d.distribute_dataset(dataset_fn).make_initializable_iterator()
    assert iterator.initializer == []  # before the first element
    assert all_of(d, iterator) == [[0, 1], [2, 3]]
    assert iterator.initializer == []
    with d.scope():
        assert unwrapped(d, iterator.get_next()) == [0, 1]
    assert iterator.initialize() == []
    assert all_of(d, iterator) == [[0, 1], [2, 3]]
    assert calls == [1]


def test_each_iterator_is_a_pass_of_its_own():
    d = mirrored(2)
    dataset = d.distribute_dataset(lambda: range(4))
    first, second = (dataset.make_one_shot_iterator() for _ in range(2))
    with d.scope():
        found = [unwrapped(d, each.get_next()) for each in (first, second, first)]
    assert found == [[0, 1], [0, 1], [2, 3]]


def test_data_that_can_be_read_only_once():
    d = mirrored(2)
    dataset = d.distribute_dataset(lambda: iter(range(4)))
    assert len(list(dataset)) == 2
    text = "Only one pass can read the range_iterator, and one did. To read it more"
    with pytest.raises(TypeError, match=text):
        dataset.make_one_shot_iterator().get_next()


@pytest.mark.parametrize("make", ["one_shot", "initializable"])
def test_the_example_of_the_documentation(make):
    d = mirrored(2)
    with d.scope():
        distributed = d.distribute_dataset(lambda: range(4))
        if make == "one_shot":
            iterator = distributed.make_one_shot_iterator()
        else:
            iterator = distributed.make_initializable_iterator()
            iterator.initializer  # noqa: B018
        for wanted in ([0, 10], [20, 30]):
            result = d.call_for_each_tower(lambda x: 10 * x, iterator.get_next())
            assert unwrapped(d, result) == wanted
            assert d.group(result) is None


def test_the_default_strategy():
    iterator = (
        contrib.get_distribution_strategy()
        .distribute_dataset(lambda: range(2))
        .make_one_shot_iterator()
    )

    def merge_fn(d):
        result = d.call_for_each_tower(lambda x: 10 * x, iterator.get_next())
        return d.unwrap(result)

    assert [in_default(merge_fn) for _ in range(2)] == [[0], [10]]


@pytest.mark.parametrize("prefetch", [None, True, False])
@pytest.mark.parametrize("kind", ["mirrored", "one"])
def test_reading_ahead_changes_no_element(kind, prefetch):
    asked = []

    def dataset_fn():
        def read():
            for i in range(40):
                asked.append(i)
                yield i

        return read

    if kind == "one":
        d = contrib.OneDeviceStrategy("CPU:1", prefetch_on_device=prefetch)
    else:
        devices = jax.devices()[:2]
        d = contrib.MirroredStrategy(devices, prefetch_on_device=prefetch)
    n = d.num_towers
    with d.scope(), d.distribute_dataset(dataset_fn).make_one_shot_iterator() as it:
        assert unwrapped(d, it.get_next()) == list(range(n))
        if prefetch is False:
            assert asked == list(range(n))
        assert unwrapped(d, it.get_next()) == list(range(n, 2 * n))


@pytest.mark.parametrize("returned", [3, None, {"x": np.ones(3)}, np.ones(3)])
def test_what_is_no_dataset(returned):
    text = (
        "dataset_fn() must return a tf.data.Dataset when using a DistributionStrategy"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        mirrored(2).distribute_dataset(lambda: returned)


def test_a_dataset_instead_of_a_function():
    text = "`distribute_dataset` was given [1, 2]; a function without arguments was"
    with pytest.raises(TypeError, match=re.escape(text)):
        mirrored(2).distribute_dataset([1, 2])


def test_a_function_that_fails_says_so_itself():
    def dataset_fn():
        raise TypeError("the user's own")

    with pytest.raises(TypeError, match="the user's own"):
        mirrored(2).distribute_dataset(dataset_fn)


# Steps.


def elements(d, dataset_fn=lambda: range(1000)):
    return d.distribute_dataset(dataset_fn).make_one_shot_iterator()


@pytest.mark.parametrize("in_tower", [False, True])
def test_outputs_of_the_last_step(in_tower):
    d = mirrored(2)

    def in_each(context, x):
        context.set_last_step_output("sum", x, aggregation=SUM)
        context.set_last_step_output("mean", x, aggregation=MEAN)
        return x

    def fn(context, x):
        if in_tower:
            x = d.call_for_each_tower(in_each, context, x)
        else:
            in_each(context, x)
        context.set_last_step_output("none", x)

    with d.scope():
        context = d.run_steps_on_dataset(fn, elements(d), iterations=3)
        found = context.last_step_outputs
        assert (float(found["sum"]), float(found["mean"])) == (9, 4.5)
        assert unwrapped(d, found["none"]) == [4, 5]
    assert isinstance(context, contrib.MultiStepContext) and context.run_op is None


@each_strategy
def test_a_tuple_is_unpacked(name):
    d = STRATEGIES[name]()
    seen = []

    def fn(context, x, y):
        seen.append((unwrapped(d, x)[0], unwrapped(d, y)[0]))

    def pairs():
        return [(np.full(1, i), np.full(1, -i)) for i in range(8)]

    with d.scope():
        d.run_steps_on_dataset(fn, elements(d, lambda: pairs()), 2)
    n = d.num_towers
    assert seen == [([0], [0]), ([n], [-n])]


def test_a_dict_is_one_argument():
    d = mirrored(2)
    seen = []
    with d.scope():
        d.run_steps_on_dataset(
            lambda context, element: seen.append(sorted(element)),
            elements(d, lambda: [{"x": 1, "y": 2}] * 2),
        )
    assert seen == [["x", "y"]]


def test_other_outputs_are_lists():
    d = mirrored(2)

    def step(context, x):
        context.set_non_tensor_output("foo", "bar")

    def fn(context, x):
        d.call_for_each_tower(step, context, x)
        context.set_non_tensor_output("k", "v")

    with d.scope():
        found = d.run_steps_on_dataset(fn, elements(d)).non_tensor_outputs
    assert found == {"foo": ["bar"], "k": "v"}


def test_ten_calls_trace_a_step_once():
    d = mirrored(2)
    iterator, traces, found = elements(d), [], []

    def count():
        traces.append(1)

    def step(context, x):
        count()
        context.set_last_step_output("x", x, aggregation=SUM)

    with d.scope(), jax.checking_leaks():
        for _ in range(10):
            context = d.run_steps_on_dataset(
                lambda context, x: d.call_for_each_tower(step, context, x), iterator
            )
            found.append(int(context.last_step_outputs["x"]))
    assert found == [1 + 4 * i for i in range(10)]
    assert len(traces) == 1


def test_steps_of_the_default_strategy():
    iterator = elements(contrib.get_distribution_strategy())

    def step(context, x):
        context.set_last_step_output("x", 2 * x, aggregation=MEAN)
        context.set_non_tensor_output("foo", "bar")

    def merge_fn(d):
        return d.run_steps_on_dataset(
            lambda context, x: d.call_for_each_tower(step, context, x), iterator, 3
        )

    context = in_default(merge_fn)
    assert context.last_step_outputs == {"x": 4}
    assert context.non_tensor_outputs == {"foo": ["bar"]}


@pytest.mark.parametrize(
    "aggregation, text",
    [
        (contrib.VariableAggregation.NONE,
         "The output 'x' was set in a replica context without saying how the replicas' "
         "values are reduced. Give `aggregation=VariableAggregation.MEAN`"),
        (contrib.VariableAggregation.ONLY_FIRST_REPLICA, "VariableAggregation.SUM` or"),
    ],
)  # fmt: skip
def test_aggregations_without_meaning(aggregation, text):
    d = mirrored(2)

    def step(context, x):
        context.set_last_step_output("x", x, aggregation)

    with d.scope(), pytest.raises(ValueError, match=re.escape(text)):
        d.run_steps_on_dataset(
            lambda context, x: d.call_for_each_tower(step, context, x), elements(d)
        )


def test_outside_of_the_scope():
    d = mirrored(2)
    text = 'Need to be inside "with distribution_strategy.scope()"'
    with pytest.raises(RuntimeError, match=re.escape(text)):
        d.run_steps_on_dataset(lambda context, x: None, elements(d))


def test_generations_may_be_mixed():
    d = mirrored(2)
    newer = v1.Strategy.over(d.core)
    iterator = newer.make_dataset_iterator(js.batches(np.arange(8.0), 4))

    def step(context, x):
        context.set_last_step_output("sum", jnp.sum(x), aggregation=SUM)

    with d.scope():
        context = d.run_steps_on_dataset(
            lambda context, x: newer.run(step, (context, x)), iterator, 2
        )
    assert float(context.last_step_outputs["sum"]) == 22
