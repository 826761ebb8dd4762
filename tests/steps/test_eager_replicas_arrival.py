"""Eager replicas that do not arrive together are told with their lines; none hangs."""

import io
import pdb
import re
import signal
import threading

import jax
import jax.numpy as jnp
import pytest
from helpers.cases import each
from helpers.threads import in_threads

import jaxstrategy as js

DEVICES = js.simulate(8)
# A replica is late when the machine is busy, whatever it does.
pytestmark = pytest.mark.filterwarnings("ignore::jaxstrategy.errors.LateReplicaWarning")


@pytest.fixture(scope="module")
def three():
    return js.MirroredStrategy(DEVICES[:3])


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("replica ")]


def replica():
    return js.get_replica_context()


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
    here = r"all_reduce\('sum'\) of float32\[\]: \S+arrival.py:\d+: return rep.*# here"
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
