"""The examples of the pages of `tf.distribute`, its TensorFlow 1.x and 2018 forms.

The code is ours, in the style of its time and with the names of TensorFlow; the porting
tool changes the imports, and what it writes is run. Datasets are lists where the pages
have `tf.data`.
"""

import textwrap

import numpy as np
from helpers.cases import each_of
from helpers.porting import ported

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


def test_variables_beside_another_and_updates_with_them():
    names = ran(
        f"""
        import tensorflow as tf

        strategy = tf.distribute.MirroredStrategy({DEVICES})
        with strategy.scope():
            var1 = tf.Variable(1.0)
            with strategy.extended.colocate_vars_with(var1):
                var2 = tf.Variable(2.0)
                var3 = tf.Variable(3.0)
            strategy.extended.update(
                var1, lambda v, a, b: v.assign_add(a * b), args=(var2, var3))
        devices = var1.devices, var2.devices, var3.devices
        copies = strategy.experimental_local_results(var1)
        """
    )
    assert numbers(names["copies"]) == [7.0, 7.0]
    first, second, third = names["devices"]
    assert first == second == third


# MirroredStrategy, TensorFlow 1.13.


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


# DistributionStrategy and TowerContext, 2018.


@each_of("towers, loss, trained", [(2, "mean", 12.6), (4, "sum", 86.8)])
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


def test_towers_that_merge():
    names = ran(
        """
        import tensorflow as tf

        d = tf.contrib.distribute.MirroredStrategy(num_gpus=2)

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
    assert numbers(names["values"]) == [10, 11]
