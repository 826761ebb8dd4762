"""What `python -m jaxstrategy.compat.port` makes of programs, and what it says."""

import textwrap

import pytest
from helpers.porting import Generation, NoPythonError, ported
from hypothesis import example, given, settings, strategies as st


def text_of(program):
    return textwrap.dedent(program).lstrip("\n")


def becomes(before, after):
    """Checks what a program becomes, and that it stays so."""
    done = ported(text_of(before))
    assert done.text == text_of(after)
    compile(done.text, "ported.py", "exec")
    assert ported(done.text).text == done.text
    return done


def told(done, decide=True):
    """The names in findings with the places, as text."""
    return {
        f"{name} {place}"
        for finding in done.findings
        if finding.decide is decide
        for name, places in finding.names
        for place in places
    }


def texts(done, decide=True):
    return " | ".join(f.text for f in done.findings if f.decide is decide)


# Lines of one import each, what uses it, and both afterwards.
IMPORTS = {
    "module": (
        "from tensorflow import distribute\ns = distribute.get_strategy()",
        "import jaxstrategy as js\ns = js.get_strategy()",
    ),
    "name": (
        "from tensorflow.distribute import ReduceOp, get_strategy as g\ng(ReduceOp)",
        "from jaxstrategy import ReduceOp, get_strategy as g\ng(ReduceOp)",
    ),
    "TensorFlow's own modules": (
        "from tensorflow.python.distribute import mirrored_strategy, reduce_util\n"
        "s = mirrored_strategy.MirroredStrategy()\no = reduce_util.ReduceOp.SUM",
        "import jaxstrategy as js\ns = js.MirroredStrategy()\no = js.ReduceOp.SUM",
    ),
    "contrib": (
        "from tensorflow.contrib import distribute\ndistribute.get_tower_context()",
        "from jaxstrategy.compat import contrib as distribute\n"
        "distribute.get_tower_context()",
    ),
    "towers": (
        "import tensorflow as tf\n"
        "from tensorflow.python.training import distribute as l\n"
        "l.increment_var(tf.Variable(1.0))\n"
        "d = tf.contrib.distribute.get_tower_context().tower_id\n"
        "x = tf.VariableAggregation.MEAN",
        "import jaxstrategy as js\n"
        "from jaxstrategy.compat import contrib as distribute\n"
        "distribute.increment_var(js.Variable(1.0))\n"
        "d = distribute.get_tower_context().tower_id\n"
        "x = js.VariableAggregation.MEAN",
    ),
    "contrib of TensorFlow 1.13": (
        "import tensorflow as tf\n"
        "s = tf.contrib.distribute.CollectiveAllReduceStrategy()\n"
        "s.experimental_run_v2(print)",
        "from jaxstrategy.compat import v1 as distribute\n"
        "s = distribute.experimental.MultiWorkerMirroredStrategy()\n"
        "s.run(print)",
    ),
    "one of two": (
        "try:\n    import tensorflow.compat.v1 as tf\nexcept ImportError:\n"
        "    import tensorflow as tf\ns = tf.distribute.get_strategy()\n"
        "s.experimental_run(print)",
        "from jaxstrategy.compat import v1 as distribute\ntry:\n    pass\n"
        "except ImportError:\n    pass\ns = distribute.get_strategy()\n"
        "s.experimental_run(print)",
    ),
    "in a function": (
        "def f():\n    import tensorflow as tf\n"
        "    return tf.distribute.get_strategy()",
        "import jaxstrategy as js\ndef f():\n    return js.get_strategy()",
    ),
    "in a function of nothing else": (
        "import os\ndef f():\n    import tensorflow as tf\n"
        "    from tensorflow import distribute as d\n    def g(x=d.ReduceOp.SUM): 1",
        "import os\nimport jaxstrategy as js\ndef f():\n    import tensorflow as tf\n"
        "    def g(x=js.ReduceOp.SUM): 1",
    ),
    "beside others": (
        "import os, tensorflow as tf, sys\nx = tf.distribute.ReduceOp.SUM",
        "import jaxstrategy as js\nimport os, sys\nx = js.ReduceOp.SUM",
    ),
    "name and a decision": (
        "from tensorflow import Variable, function\nv = Variable(1)\nfunction(v)",
        "import jaxstrategy as js\nfrom tensorflow import function\n"
        "v = js.Variable(1)\nfunction(v)",
    ),
}


def test_imports():
    for before, after in IMPORTS.values():
        becomes(before + "\n", after + "\n")


def test_names_that_are_taken_are_not_taken_twice():
    becomes(
        """
        import tensorflow as tf
        def f(js, distribute):
            return tf.distribute.get_strategy()
        def g(jnp: "np.array"):
            return tf.square(jnp)
        """,
        """
        import jax.numpy as jax_numpy
        import jaxstrategy
        def f(js, distribute):
            return jaxstrategy.get_strategy()
        def g(jnp: "np.array"):
            return jax_numpy.square(jnp)
        """,
    )


def test_annotations_that_are_strings():
    becomes(
        """
        import tensorflow as tf
        def f(s: "tf.distribute.Strategy", é: 'list[tf.Variable]') -> "tf.Tensor": ...
        """,
        """
        import jax
        import jaxstrategy as js
        def f(s: "js.Strategy", é: 'list[js.Variable]') -> "jax.Array": ...
        """,
    )


def test_functions_of_arrays_where_they_mean_the_same():
    becomes(
        """
        import tensorflow as tf
        from tensorflow import nest
        def f(x, y):
            a = tf.reduce_mean(tf.square(x, name="sq"), axis=0, keepdims=True)
            b = tf.concat([a, tf.zeros([2, 3], tf.float32)], axis=-1)
            c = tf.transpose(tf.cast(b, dtype=tf.dtypes.int32), perm=[1, 0])
            return nest.map_structure(tf.abs, (c, tf.where(x > 0, x, y)))
        """,
        """
        import jax
        import jax.numpy as jnp
        def f(x, y):
            a = jnp.mean(jnp.square(x), axis=0, keepdims=True)
            b = jnp.concatenate([a, jnp.zeros([2, 3], jnp.float32)], axis=-1)
            c = jnp.transpose(jnp.astype(b, jnp.int32), axes=[1, 0])
            return jax.tree.map(jnp.abs, (c, jnp.where(x > 0, x, y)))
        """,
    )


def test_calls_that_mean_something_else_are_left_to_a_person():
    for call in [
        "tf.reduce_sum(x, keep_dims=True)",
        "tf.reduce_sum([x, x])",
        "tf.matmul(x, y, transpose_b=True)",
        "tf.cast(dtype=t, x=x)",
        "tf.argmax(x)",
        "tf.where(x)",
        "tf.constant('text')",
        "tf.square(*x)",
        "tf.Variable(x, validate_shape=False)",
        "tf.nn.compute_average_loss(x, None, 3)",
        "tf.nest.map_structure(lambda x: strategy.reduce('SUM', x), y)",
        "tf.nest.flatten(strategy.run(f))",
    ]:
        program = f"import tensorflow as tf\n{call}\n"
        done = ported(program)
        assert done.text == program
        (finding,) = done.findings
        assert finding.decide and "not in this form" in finding.text


def test_what_cannot_be_told_is_left_as_it_is():
    program = "import tensorflow as tf\nx = dtype == tf.float16\n"
    done = ported(program)
    assert done.text == program
    assert told(done) == {"tf.float16 2:14"}
    assert "`jnp.float16` where it is about arrays of JAX" in texts(done)
    program = "import tensorflow as tf\nx = (tf  # why\n  .distribute.ReduceOp)\n"
    done = ported(program)
    assert done.text == program and told(done) == {"tf.distribute.ReduceOp 2:6"}
    program = "from tensorflow.distribute import *\n"
    done = ported(program)
    assert done.text == program and "hides which of them" in texts(done)
    assert ported("print 'a'").text == "print 'a'"


def test_code_of_datasets_stays_tensorflow():
    program = text_of("""
        import tensorflow as tf

        def scale(x):
            return clipped(tf.cast(x, tf.float32))

        def clipped(x):
            return tf.minimum(x, 1.0)

        data = tf.data.Dataset.from_tensors(tf.constant([1])).map(scale)
        data = data.map(lambda x: tf.square(x)).filter(lambda x: tf.reduce_all(x > 0))
        made = tf.data.Dataset.from_generator(gen, output_types=(tf.int32, tf.float32))
        """)
    done = ported(program)
    assert done.text == program
    assert told(done) == set()


@pytest.mark.parametrize(
    "line", ["from tensorflow import keras", "import tensorflow.keras as keras"]
)
def test_a_keras_that_nothing_uses_needs_no_backend(line):
    program = f"import tensorflow as tf\n{line}\ns = tf.distribute.MirroredStrategy()\n"
    assert "KERAS_BACKEND" not in ported(program).text
    assert "KERAS_BACKEND" in ported(f"{program}keras.layers.Dense(3)\n").text


def test_keras_becomes_keras_3_on_jax():
    done = becomes(
        """
        import numpy as np
        import tensorflow as tf
        from tensorflow.keras import layers
        from tensorflow.keras.optimizers import Adam as A
        from tensorflow.keras.losses import Reduction

        s = tf.distribute.MirroredStrategy()

        class Net(tf.keras.Model):
            def call(self, x: "tf.keras.Input"):
                return tf.nn.relu(layers.Dense(3, dtype=tf.float32)(x))

        with s.scope():
            net = Net()
            net.compile(A(), tf.losses.MeanSquaredError(reduction=Reduction.NONE))
            scale = tf.keras.layers.experimental.preprocessing.Rescaling(2.0)
            legacy = tf.keras.optimizers.legacy.SGD()
        mean = tf.metrics.Mean()
        mean.reset_states()
        """,
        """
        import numpy as np
        import os

        os.environ["KERAS_BACKEND"] = "jax"

        import jax
        import jax.numpy as jnp
        import jaxstrategy as js
        import keras
        from keras import layers
        from keras.optimizers import Adam as A

        s = js.MirroredStrategy()

        class Net(keras.Model):
            def call(self, x: "keras.Input"):
                return jax.nn.relu(layers.Dense(3, dtype=jnp.float32)(x))

        with s.scope():
            net = Net()
            net.compile(A(), keras.losses.MeanSquaredError(reduction="none"))
            scale = keras.layers.Rescaling(2.0)
            legacy = keras.optimizers.SGD()
        mean = keras.metrics.Mean()
        mean.reset_state()
        """,
    )
    assert told(done) == set()
    assert "work as they are" in texts(done, decide=False)
    before = "import os\nimport tensorflow.keras as K\nK.Model()\n"
    backend = 'import os\n\nos.environ["KERAS_BACKEND"] = "jax"\n\nimport keras\n'
    assert ported(before).text == f"{backend}keras.Model()\n"


def test_a_tape_is_told_in_the_programs_own_names():
    program = text_of("""
        import tensorflow as tf
        s = tf.distribute.get_strategy()
        net, adam = tf.keras.Sequential(), tf.keras.optimizers.Adam()
        @tf.function
        def step(images):
            with tf.GradientTape() as t:
                guess = net(images, training=True)
                total = tf.reduce_mean(guess)
            weights = net.trainable_variables
            grads = t.gradient(total, weights)
            adam.apply_gradients(zip(grads, weights))
        """)
    said = texts(ported(program))
    for part in (
        "guess, others = js.keras.stateless_call(net, trainable, others, images, "
        "training=True)",
        "return total, others",
        "(total, others), grads = jax.value_and_grad(loss_of, has_aux=True)",
        "grads = js.get_replica_context().all_reduce('sum', grads)",
        "trainable, slots = adam.stateless_apply(slots, grads, trainable)",
    ):
        assert f"`{part}" in said
    # Without a model of Keras, or one that is found, the advice is general.
    for other in (
        program.replace("net.trainable_variables", "variables"),
        program.replace(" as t:", ":"),
        program.replace("tf.keras.Sequential(), tf.keras.optimizers.Adam()", "a, b"),
    ):
        assert "`jax.value_and_grad` of a loss function" in texts(ported(other))


def test_what_a_person_must_decide_is_told_with_its_places():
    done = ported(
        text_of("""
        import tensorflow as tf
        from tensorflow.keras import layers
        strategy = tf.distribute.MirroredStrategy()
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                tf.print(x)
        layers.Dense(3)
        tf.keras.backend.sum(3)
        tf.data.Dataset.range(3)
        strategy.run(step)
        """)
    )
    assert told(done) == {
        "tf.keras.layers 2:30",
        "tf.function 4:2",
        "tf.GradientTape 6:10",
        "tf.print 7:9",
        "tf.keras.layers.Dense 8:1",
        "tf.keras.backend.sum 9:1",
    }
    assert {"tf.data.Dataset.range 10:1", "strategy.run 11:1"} <= told(done, False)
    lines = [f.line("a.py") for f in done.findings if f.decide]
    assert any(
        line.startswith(
            "a.py:2:30: decide: tf.keras.layers, tf.keras.layers.Dense (8:1): "
            "becomes `keras`, on the JAX backend, once the program uses only names"
        )
        for line in lines
    )
    assert any("tf.keras.backend.sum: Keras 3 has no such name" in e for e in lines)


def test_the_generation_can_be_said():
    program = "import tensorflow as tf\ns = tf.distribute.get_strategy()\n"
    done = ported(program, Generation.TF1)
    assert done.generation is Generation.TF1
    assert "distribute.get_strategy()" in done.text
    assert "compat import v1 as distribute" in done.text
    done = ported(program.replace("distribute.get", "contrib.distribute.get"))
    assert done.generation is Generation.CONTRIB


def test_ends_of_lines_stay():
    for end in ["\n", "\r\n"]:
        before = end.join(
            ["import tensorflow as tf", "x = tf.distribute.ReduceOp.SUM", ""]
        )
        after = end.join(["import jaxstrategy as js", "x = js.ReduceOp.SUM", ""])
        assert ported(before).text == after


def test_what_is_no_python_3():
    for program, said in [
        ("import tensorflow\nprint 'a'\n", "line 2 is Python 2. Rewrite the file"),
        ("import tensorflow\ntry: pass\nexcept E, e: pass\n", "is Python 2"),
        ("import tensorflow\nx = = 1\n", "line 2 is no Python"),
    ]:
        with pytest.raises(NoPythonError, match=said):
            ported(program)


LINES = st.lists(
    st.sampled_from(
        """\
import tensorflow as tf
import tensorflow.compat.v1 as tf
from tensorflow import distribute
from tensorflow.distribute import ReduceOp, MirroredStrategy as M
from tensorflow.keras import layers, optimizers
import numpy as np, tensorflow.contrib.distribute
import jaxstrategy as js
s = tf.distribute.MirroredStrategy()
d = tf.contrib.distribute.OneDeviceStrategy("CPU:0")
with s.scope(): v = tf.Variable(1., name="v")
x = tf.reduce_sum(tf.square(tf.constant([1., 2.]), name="y"), axis=0)
def f(distribute, x: "tf.distribute.Strategy"): return tf.cast(x, tf.float32)
r = s.run(f, args=(tf.zeros([2], dtype=tf.int32),)); t = tf.float64
o = distribute.ReduceOp.SUM, ReduceOp.MEAN, M
class L(tf.keras.Model): y = tf.nn.relu(tf.abs(1.))
data = tf.data.Dataset.range(3).map(lambda i: tf.cast(i, tf.int32)).map(f)
s.experimental_run_v2(lambda: tf.distribute.get_replica_context().merge_call(f))
layers.Dense(optimizers.Adam())  # comment
if True:\n    import tensorflow as tf; y = tf.distribute.get_strategy
js = 3; jnp = 4""".replace("\\n", "\n").split("\n")
    ),
    max_size=9,
)


@settings(max_examples=20, deadline=None, derandomize=True)
@example(
    [
        "import tensorflow as tf",
        "import tensorflow.compat.v1 as tf",
        'def f(distribute, x: "tf.distribute.Strategy"): return x',
    ]
)
@given(LINES)
def test_any_program_becomes_a_program_that_stays(lines):
    program = "\n".join(lines) + "\n"
    try:
        compile(program, "before.py", "exec")
    except SyntaxError:
        return
    once = ported(program)
    compile(once.text, "after.py", "exec")
    again = ported(once.text)
    assert again.text == once.text
    names = {name.split(" ")[0] for name in told(once)}
    assert {name.split(" ")[0] for name in told(again)} <= names
    assert once.text != program or again.findings == once.findings
