"""What a program does for a step besides computing it, and what that costs."""

import contextlib
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.profiled import each_call

import jaxstrategy as js
from jaxstrategy.tracing._live_arrays import are_looked_for
from jaxstrategy.tracing.stages._stage import Stage

PACKAGE = str(Path(js.__file__).parent)


@pytest.fixture
def two():
    return js.MirroredStrategy(jax.devices()[:2])


@contextlib.contextmanager
def calls():
    """Collects the functions of the package that are called in the block."""
    found = []

    def called(event, frame):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            found.append(f"{Path(file).stem}.{frame.f_code.co_qualname}")

    with each_call(called):
        yield found


def of_stages(found):
    names = {path.stem for path in Path(PACKAGE, "tracing", "stages").glob("_*.py")}
    return [name for name in found if name.partition(".")[0] in names]


def test_a_step_pays_for_no_stage_that_it_does_not_need(two):
    step = two.run(lambda x, y: {"sum": x + y})
    x = two.per_replica([1.0, 2.0])
    for _ in range(2):
        step(x, 1.0)
    y = two.mirror(1.0)
    step(x, y)
    with calls() as found:
        step(x, y)
    # With an old jaxlib it is looked where the arguments lie, and on simulated devices
    # steps in flight are counted.
    is_old = are_looked_for()
    allowed = {"_placement.Placement.is_right"} if is_old else set()
    assert {n for n in of_stages(found) if "_in_flight" not in n} == allowed
    most = 8 if is_old else 4
    assert len([name for name in found if "_in_flight" not in name]) <= most, found


def test_what_a_step_needs_is_what_is_called(two):
    def once(step, *args, again):
        step(*args)
        with calls() as found:
            step(*again)
        return {name.partition(".")[0] for name in of_stages(found)}

    w, x = two.mirror(1.0), two.per_replica([1.0, 2.0])
    donating = two.run(options=js.RunOptions(donate_argnums=0))(lambda w, x: w + 1)
    assert "_donation" in once(donating, w, x, again=(two.mirror(1.0), x))

    looking = two.run(options=js.RunOptions(check_finite=True))(lambda x: x + 1)
    assert "_finite" in once(looking, x, again=(x,))

    with two.scope():
        total = js.Variable(0.0)
    adding = two.run(
        lambda x: total.assign_add(js.get_replica_context().all_reduce("sum", x))
    )
    assert {"_variables", "_carried"} <= once(adding, x, again=(x,))
    np.testing.assert_allclose(total.value(), 6.0)


def test_a_stage_is_asked_in_the_order_of_a_call(two):
    from jaxstrategy.tracing import _shared_programs
    from jaxstrategy.tracing.stages import _stages

    seen = []

    class Watching(Stage):
        def __init__(self, step, options):
            self.step = step

        @contextlib.contextmanager
        def tracing(self, own):
            seen.append("tracing")
            yield

        def traced(self, step):
            seen.append("traced")

        def before(self, leaves):
            seen.append("before")

        def within(self, step, evaluate):
            def more(inputs):
                arrays, outputs = evaluate(inputs)
                return arrays, [jnp.float32(7), *outputs]

            return more

        def after(self, output):
            seen.append(float(output))

    kept = _stages._STAGES
    _stages._STAGES = (*kept, Watching)
    try:
        step = two.run(lambda x: x + 1)
        x = two.per_replica([1.0, 2.0])
        result = step(x)
        first, seen[:] = list(seen), []
        step(x)
    finally:
        _stages._STAGES = kept
    assert _shared_programs.stages_of is _stages.stages_of
    assert first[-3:] == ["traced", "before", 7.0] and first.count("traced") == 1
    assert seen == ["before", 7.0]
    np.testing.assert_allclose(result.stacked, [2, 3])


def test_a_stage_that_refuses_what_a_call_made_leaves_variables_alone(two):
    with two.scope():
        total = js.Variable(5.0)
    options = js.RunOptions(check_finite=True)
    step = two.run(options=options)(
        lambda x: total.assign_sub(
            js.get_replica_context().all_reduce("sum", jnp.log(x))
        )
    )
    with pytest.raises(js.NonFiniteError):
        step(two.per_replica([1.0, -1.0]))
    assert float(total) == 5.0


def test_threads_that_call_a_step_first_trace_it_once(two):
    traces = []

    @two.run
    def step(x):
        traces.append(x.shape)
        return x + 1

    args = [two.per_replica([float(i), 0.0]) for i in range(6)]
    results = [None] * len(args)
    together = threading.Barrier(len(args))

    def call(i):
        together.wait(60)
        results[i] = step(args[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(args))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert traces == [()]
    for i, result in enumerate(results):
        np.testing.assert_allclose(result.stacked, [i + 1, 1])


def test_an_error_after_a_new_shape_has_no_context_of_ours(two):
    @two.run
    def step(x):
        if x.shape == (3,):
            raise KeyError("mine")
        return x

    step(two.per_replica([np.zeros(2)] * 2))
    with pytest.raises(KeyError, match="mine") as caught:
        step(two.per_replica([np.zeros(3)] * 2))
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def test_objects_that_nobody_captured_cost_nothing(two):
    step = two.run(lambda x: x * 2)
    x = two.per_replica([1.0, 2.0])
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    two.run(lambda model, x: model(x), (model, two.per_replica([np.ones((1, 2))] * 2)))
    for _ in range(2):
        step(x)
    with calls() as found:
        step(x)
    assert not any("_constant_objects" in name for name in found), found


def own_calls(step, *args):
    """How many functions of Python and C a call makes, JAX's own included."""
    found = []
    with each_call(lambda event, frame: found.append(event)):
        step(*args)
    return len(found)


@pytest.mark.parametrize("kind", ["plain", "variables", "donating"])
def test_each_shape_is_called_by_the_short_way_through_jax(two, kind):
    # A call that has raised inside `jax.jit` once makes hundreds of calls ever after.
    options = js.RunOptions(donate_argnums=0) if kind == "donating" else None
    with two.scope():
        total = js.Variable(0.0)

    @two.run(options=options)
    def step(w, x):
        if kind == "variables":
            total.assign_add(js.get_replica_context().all_reduce("sum", x.sum()))
        return w + x.sum()

    def arguments(rows):
        return two.mirror(np.zeros(3)), two.per_replica([np.ones(rows)] * 2)

    for rows in (2, 3, 4):
        for _ in range(3):
            step(*arguments(rows))
    for rows in (4, 2, 3):
        assert own_calls(step, *arguments(rows)) < 60


def test_random_keys_come_in_other_shapes_too(two):
    step = two.run(lambda key, x: jax.random.normal(key, x.shape) + x)
    results = []
    for rows in (2, 3, 2, 4):
        x = two.per_replica([np.zeros(rows, np.float32)] * 2)
        key = two.mirror(jax.random.key(rows))
        results.append((rows, step(key, x)))
    for rows, result in results:
        expected = jax.random.normal(jax.random.key(rows), (rows,))
        np.testing.assert_allclose(result.stacked, [expected] * 2, rtol=1e-6)
