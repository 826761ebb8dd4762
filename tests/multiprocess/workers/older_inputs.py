"""Iterators of TensorFlow 1 and 2018 in several processes: what each was given."""

import json

import jax
import numpy as np

from jaxstrategy.compat import contrib, v1


def main():
    s = v1.experimental.MultiWorkerMirroredStrategy()
    own, count = jax.process_index(), jax.process_count()
    told = {}

    def versions(value):
        local = s.experimental_local_results(value)
        return [np.asarray(part).tolist() for part in local]

    def input_fn(context):
        assert context.num_input_pipelines == count
        assert context.input_pipeline_id == own
        rows = s.experimental_make_numpy_dataset(np.arange(22))
        return rows.shard(context.num_input_pipelines, context.input_pipeline_id)

    # Each process reads its shard.
    iterator = s.make_input_fn_iterator(input_fn)
    told["elements"] = [versions(element) for element in iterator]
    iterator.initialize()
    told["again"] = versions(iterator.get_next())

    # One process has fewer elements than another one: its last group is not full.
    iterator = s.make_input_fn_iterator(lambda _: range(4 + own))
    told["uneven"] = [versions(element) for element in iterator]

    # All read the same global batches.
    rows = s.experimental_make_numpy_dataset(np.arange(16)).shuffle(16, seed=1)
    iterator = s.make_dataset_iterator(rows.batch(8))
    told["global"] = [versions(batch) for batch in iterator]

    def step(context, x):
        context.set_last_step_output("sum", x, v1.ReduceOp.SUM)
        context.set_non_tensor_output("foo", "bar")

    def fn(context, x):
        s.extended.call_for_each_replica(step, args=(context, x))

    iterator = s.make_input_fn_iterator(input_fn)
    run = s.extended.experimental_run_steps_on_iterator
    told["sums"] = [
        float(run(fn, iterator, iterations=2).last_step_outputs["sum"])
        for _ in range(2)
    ]

    older = contrib.DistributionStrategy.over(s.core)
    dataset = older.distribute_dataset(lambda: [100 * own + i for i in range(5)])
    with older.scope():
        context = older.run_steps_on_dataset(
            lambda context, x: older.call_for_each_tower(
                lambda x: context.set_last_step_output("sum", x, "sum"), x
            ),
            dataset.make_one_shot_iterator(),
            iterations=2,
        )
    told["towers"] = float(context.last_step_outputs["sum"])
    told["once"] = _second_pass(s)
    print("told", json.dumps(told))


def _second_pass(s):
    iterator = s.make_dataset_iterator(np.arange(8) for _ in range(2))
    iterator.get_next()
    try:
        iterator.initialize()
    except TypeError as error:
        return str(error)
    return None
