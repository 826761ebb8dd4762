"""The examples of the pages of `tf.distribute`, its TensorFlow 1.x and 2018 forms.

One test an example. The code is ours, in the style of its time and with the names of
TensorFlow; the porting tool changes the imports, and what it writes is run. Datasets
are lists where the pages have `tf.data`.
"""

import textwrap

import numpy as np
import pytest

from jaxstrategy.compat.port._rewriting import ported

DEVICES = 'devices=["CPU:0", "CPU:1"]'


def ran(program, **given):
    """What a program has defined after it was ported, which left nothing to decide."""
    done = ported(textwrap.dedent(program))
    assert "tensorflow" not in done.text
    assert not [finding for finding in done.findings if finding.decide]
    names = dict(given)
    exec(compile(done.text, "example.py", "exec"), names)
    return names


def numbers(values):
    return [np.asarray(value).tolist() for value in values]


# StrategyExtended, TensorFlow 2.

TF2 = {
    "mirrored": (f"tf.distribute.MirroredStrategy({DEVICES})", [2.0, 2.0]),
    "central": (
        "tf.distribute.experimental.CentralStorageStrategy"
        "(compute_devices=['CPU:1', 'CPU:2'], parameter_device='CPU:0')",
        [2.0],
    ),
    "one": ("tf.distribute.OneDeviceStrategy('CPU:0')", [1.0]),
}


@pytest.mark.parametrize("strategy, copies", TF2.values(), ids=list(TF2))
@pytest.mark.parametrize(
    "reduced",
    [
        "reduce_to(tf.distribute.ReduceOp.SUM, value, destinations=var)",
        "batch_reduce_to(tf.distribute.ReduceOp.SUM, [(value, var)])[0]",
    ],
    ids=["reduce_to", "batch_reduce_to"],
)
def test_a_sum_is_assigned_in_a_merge_function(strategy, copies, reduced):
    names = ran(
        f"""
        import tensorflow as tf

        strategy = {strategy}
        with strategy.scope():
            var = tf.Variable(0.0)

        def merge_fn(strategy, value, var):
            reduced = strategy.extended.{reduced}
            strategy.extended.update(var, lambda v, x: v.assign(x), args=(reduced,))

        def step_fn(var):
            context = tf.distribute.get_replica_context()
            context.merge_call(merge_fn, args=(tf.constant(1.0), var))

        strategy.run(step_fn, args=(var,))
        copies = strategy.experimental_local_results(var)
        """
    )
    assert numbers(names["copies"]) == copies


# The module page and its glossary.


# MirroredStrategy, TensorFlow 1.13.


def test_an_input_function_and_one_call_for_each_replica():
    names = ran(
        f"""
        import tensorflow.compat.v1 as tf

        strategy = tf.distribute.MirroredStrategy({DEVICES})
        told = []

        def input_fn(context):
            told.append((
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.get_per_replica_batch_size(8)))
            rows = [np.array([[1.0]], np.float32)] * 2
            return rows[context.input_pipeline_id :: context.num_input_pipelines]

        with strategy.scope():
            iterator = strategy.make_input_fn_iterator(input_fn)
            iterator.initialize()
            results = strategy.extended.call_for_each_replica(
                lambda x: x * 2.0, args=(iterator.get_next(),))
            values = strategy.experimental_local_results(results)
            try:
                iterator.get_next()
                ended = False
            except tf.errors.OutOfRangeError:
                ended = True
        """,
        np=np,
    )
    assert names["told"] == [(1, 0, 4)]
    assert numbers(names["values"]) == [[[2.0]], [[2.0]]]
    assert names["ended"] is True


# DistributionStrategy and TowerContext, 2018.


@pytest.mark.parametrize("made", ["one_shot", "initializable"])
def test_a_dataset_whose_elements_go_to_one_tower_each(made):
    names = ran(
        f"""
        import tensorflow as tf

        distribution = tf.contrib.distribute.MirroredStrategy({DEVICES})

        def dataset_fn():
            return list(np.arange(4.0, dtype=np.float32))

        with distribution.scope():
            dataset = distribution.distribute_dataset(dataset_fn)
            iterator = dataset.make_{made}_iterator()
            iterator.initializer
            results = [
                distribution.call_for_each_tower(lambda x: 10 * x, iterator.get_next())
                for _ in range(2)]
            done = distribution.group(distribution.unwrap(results[1]))
            values = [distribution.unwrap(each) for each in results]
        """,
        np=np,
    )
    assert [numbers(each) for each in names["values"]] == [[0.0, 10.0], [20.0, 30.0]]
    assert names["done"] is None


@pytest.mark.parametrize("towers", [2, 4])
def test_towers_that_merge(towers):
    names = ran(
        f"""
        import tensorflow as tf

        d = tf.contrib.distribute.MirroredStrategy(num_gpus={towers})

        def merge_fn(distribution, x):
            return sum(distribution.unwrap(x))

        def fn(three):
            context = tf.contrib.distribute.get_tower_context()
            v = three + context.tower_id
            return context.merge_call(merge_fn, v) + v

        with d.scope():
            values = d.unwrap(d.call_for_each_tower(fn, 3))
        """
    )
    assert numbers(names["values"]) == {2: [10, 11], 4: [21, 22, 23, 24]}[towers]


# Whole programs, of which a person has changed what the tool listed.


def test_a_training_program_of_tensorflow_1():
    """w is fitted to x w = 1 by SUMmed gradients: .2, .36, .488 on two replicas.

    The sessions are gone, and `tf.gradients` has become `jax.grad`.
    """
    names = ran(
        f"""
        import jax
        import tensorflow.compat.v1 as tf

        strategy = tf.distribute.MirroredStrategy({DEVICES})
        rate = 0.05

        def input_fn(context):
            return [np.float32([[1.0]])] * 6

        with strategy.scope(), tf.variable_scope("model", reuse=tf.AUTO_REUSE):
            iterator = strategy.make_input_fn_iterator(input_fn)
            iterator.initialize()

            def step(x):
                w = tf.get_variable("w", initializer=0.0)
                loss = lambda value: tf.reduce_mean(tf.square(value * x - 1.0))
                gradient = jax.grad(loss)(w.read_value())

                def apply(strategy, gradient):
                    extended = strategy.extended
                    total = extended.reduce_to(
                        tf.distribute.ReduceOp.SUM, gradient, destinations=w)
                    extended.update(
                        w, lambda w, g: w.assign_sub(rate * g), args=(total,))

                tf.distribute.get_replica_context().merge_call(apply, args=(gradient,))
                return w

            weights = []
            for _ in range(3):
                w = strategy.experimental_run(step, iterator)
                weights.append(strategy.extended.read_var(w))
        """,
        np=np,
    )
    np.testing.assert_allclose(names["weights"], [0.2, 0.36, 0.488], rtol=1e-6)


@pytest.mark.parametrize(
    "towers, loss, trained",
    [
        (1, "mean", 12.6),
        (2, "mean", 12.6),
        (4, "mean", 12.6),
        (1, "sum", 23.2),
        (2, "sum", 44.4),
        (4, "sum", 86.8),
    ],
)
def test_a_training_program_of_2018(towers, loss, trained):
    """Numbers of TensorFlow 1.12, whose optimizers divided mean losses by the towers.

    The optimizer has become a line that does so.
    """
    divisor = "d.num_towers" if loss == "mean" else "1"
    names = ran(
        f"""
        import jax
        import tensorflow as tf

        d = tf.contrib.distribute.MirroredStrategy(num_gpus={towers})

        def dataset_fn():
            return [(np.float32([5, 7]), np.float32([15, 18]))] * d.num_towers

        def model_fn(rows):
            x, y = rows
            w = tf.get_variable("w", initializer=2.0)

            def loss(w):
                return tf.reduce_{loss}(tf.square(w * x - y))

            return w, jax.grad(loss)(w.read_value())

        with d.scope():
            iterator = d.distribute_dataset(dataset_fn).make_one_shot_iterator()
            w, gradient = d.call_for_each_tower(model_fn, iterator.get_next())
            total = d.reduce(tf.VariableAggregation.SUM, gradient, w)
            d.update(w, lambda w, g: w.assign_sub(0.2 * g / {divisor}), total)
            value = d.read_var(w)
        """,
        np=np,
    )
    np.testing.assert_allclose(names["value"], trained, rtol=1e-6)
