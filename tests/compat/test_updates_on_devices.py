"""`extended.update_on`: changes on devices, of no variable of its own."""

import jax
import pytest
from helpers.variables import copies, variable

import jaxstrategy as js
from jaxstrategy.compat import contrib

KINDS = {
    "one": lambda: js.OneDeviceStrategy("CPU:1"),
    "mirrored": lambda: js.MirroredStrategy(["CPU:0", "CPU:1"]),
    "central": lambda: js.experimental.CentralStorageStrategy(
        ["CPU:2", "CPU:1"], "CPU:5"
    ),
    "shared": lambda: js.MirroredStrategy(["CPU:0", "CPU:1"], replicas_per_device=2),
    "wide": lambda: js.MirroredStrategy(jax.devices()[:4], logical_axes={"core": 2}),
    "divided": lambda: js.MirroredStrategy(
        ["CPU:0", "CPU:1"], sharding=js.StateSharding("state", 1)
    ),
}


@pytest.fixture
def strategy(request):
    return KINDS[request.param]()


def everywhere(strategy):
    return strategy.extended.parameter_devices


def updated():
    return contrib.get_update_device()


def seen():
    return (
        js.in_cross_replica_context(),
        js.get_replica_context(),
        js.get_strategy(),
        js.has_strategy(),
    )


HOW = ("outside", "in scope", "in merge_call")


def called(strategy, how, fn):
    """What `fn(strategy)` returns in such a context."""
    if how == "in merge_call":
        return strategy.run(lambda: js.get_replica_context().merge_call(fn))
    if how == "in scope":
        with strategy.scope():
            return fn(strategy)
    return fn(strategy)


@pytest.mark.parametrize(
    ("strategy", "how"),
    [*((kind, "outside") for kind in KINDS), *(("mirrored", how) for how in HOW[1:])],
    indirect=["strategy"],
)
def test_a_captured_variable_changes_once_on_each_copy(strategy, how):
    v, w = variable(strategy, 0.5), variable(strategy, 5.0)

    def change(x, w, by=0.0):
        w.assign_add(1.0)
        return v.assign_add(x + by)

    result = called(
        strategy,
        how,
        lambda s: s.extended.update_on(everywhere(s), change, (0.75, w), {"by": 0.25}),
    )
    assert result == 1.5 and isinstance(result, js.Mirrored)
    assert copies(strategy, v) == [1.5] * len(v.devices)
    assert copies(strategy, w) == [6.0] * len(v.devices)


@pytest.mark.parametrize("how", HOW)
def test_an_error_leaves_the_contexts_as_they_were(two, how):
    strategy = two
    v = variable(strategy)

    def fail():
        raise KeyError("mine")

    def nested():
        with pytest.raises(KeyError, match="mine"):
            strategy.extended.update(v, lambda v: fail())
        assert updated() == tuple(dict.fromkeys(everywhere(strategy)))
        fail()

    def attempt(s):
        before = seen(), updated()
        with pytest.raises(KeyError, match="mine"):
            s.extended.update_on(v, nested)
        assert (seen(), updated()) == before
        s.extended.update_on(v, lambda: v.assign(3.0))

    called(strategy, how, attempt)
    assert updated() is None and not js.has_strategy()
    assert v.value() == 3.0


def test_variables_of_servers_are_changed_once():
    strategy = js.ParameterServerStrategy(workers=1, backend="threads")
    v = variable(strategy, 1.0)

    def change(s, x):
        result = s.extended.update_on(v, lambda x: v.assign_add(x), (x,))
        return result, s.extended.copy_to(v, "CPU:0")

    assert change(strategy, 2.0) == (3.0, 3.0)

    coordinator = js.coordinator.ClusterCoordinator(strategy)

    @coordinator.function
    def scheduled(x):
        return change(strategy, x)

    done = coordinator.schedule(scheduled, (4.0,))
    assert done.fetch() == (7.0, 7.0)
    assert v.value() == 7.0
    strategy.close()
