"""Elements for towers, and several steps over them, as in 2018."""

import re

import numpy as np
import pytest
from helpers.towers import mirrored, unwrapped

import jaxstrategy as js
from jaxstrategy.compat import contrib

SUM, MEAN = contrib.VariableAggregation.SUM, contrib.VariableAggregation.MEAN


def all_of(d, iterator):
    with d.scope():
        return [unwrapped(d, element) for element in iterator]


def test_one_element_for_each_tower():
    d = mirrored(2)
    for count, steps in [(10, 5), (5, 2), (1, 0)]:
        dataset = d.distribute_dataset(lambda count=count: range(count))
        assert isinstance(dataset, contrib.PerDeviceDataset)
        iterator = dataset.make_one_shot_iterator()
        assert all_of(d, iterator) == np.arange(2 * steps).reshape(steps, 2).tolist()
        for _ in range(2):
            with pytest.raises(js.OutOfRangeError):
                iterator.get_next()


def test_what_is_no_dataset():
    text = (
        "dataset_fn() must return a tf.data.Dataset when using a DistributionStrategy"
    )
    for returned in [3, None, {"x": np.ones(3)}, np.ones(3)]:
        with pytest.raises(ValueError, match=re.escape(text)):
            mirrored(2).distribute_dataset(lambda returned=returned: returned)


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


def test_aggregations_without_meaning():
    d = mirrored(2)
    for aggregation, text in [
        (
            contrib.VariableAggregation.NONE,
            "The output 'x' was set in a replica context without saying how the "
            "replicas' values are reduced. Give `aggregation=VariableAggregation.MEAN`",
        ),
        (contrib.VariableAggregation.ONLY_FIRST_REPLICA, "VariableAggregation.SUM` or"),
    ]:

        def step(context, x, aggregation=aggregation):
            context.set_last_step_output("x", x, aggregation)

        with d.scope(), pytest.raises(ValueError, match=re.escape(text)):
            d.run_steps_on_dataset(
                lambda context, x, step=step: d.call_for_each_tower(step, context, x),
                elements(d),
            )
