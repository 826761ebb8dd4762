"""Functions that take a strategy take its faces of older generations, too."""

import contextvars
import gc

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxstrategy as js
from jaxstrategy.compat import contrib, v1


@pytest.fixture
def face():
    return v1.MirroredStrategy(["CPU:0", "CPU:1"])


def set_strategy(face, folder):
    js.experimental_set_strategy(face)
    try:
        assert js.get_strategy() is face.core
        assert v1.get_strategy().core is face.core
    finally:
        js.experimental_set_strategy(None)


def replica_context(face, folder):
    assert js.ReplicaContext(face).strategy is face.core
    of_2018 = contrib.MirroredStrategy(["CPU:0", "CPU:1"])
    assert js.ReplicaContext(of_2018).strategy is of_2018.core


def manager(face, folder):
    with js.checkpoint.CheckpointManager(folder, face) as manager:
        manager.save(1, {"w": jnp.arange(3.0)})
    with js.checkpoint.CheckpointManager(folder, face) as manager:
        state, step = manager.restore_or_init({"w": jnp.zeros(3)})
    assert step == 1 and isinstance(state["w"], js.Mirrored)
    assert state["w"].devices() == set(face.core.devices)


def coordinator(face, folder):
    core = js.ParameterServerStrategy(workers=1, backend="threads")
    face = v1.Strategy.over(core)
    assert js.coordinator.ClusterCoordinator(face).strategy is core
    assert js.coordinator.ClusterCoordinator(core).strategy is core
    core.close()
    with pytest.raises(ValueError, match="was given compat.*Only a `ParameterServer"):
        js.coordinator.ClusterCoordinator(
            v1.MirroredStrategy(["CPU:0"])  # of a core that has no workers
        )


def keras_distribution(face, folder):
    distribution = js.keras.distribution(face)
    assert distribution is js.keras.distribution(face.core)
    assert distribution.num_model_replicas == face.core.num_replicas_in_sync


CASES = {
    "experimental_set_strategy": set_strategy,
    "ReplicaContext": replica_context,
    "checkpoint.CheckpointManager": manager,
    "coordinator.ClusterCoordinator": coordinator,
    "keras.distribution": keras_distribution,
}


@pytest.mark.parametrize("name", CASES)
def test_a_face_means_its_strategy(face, name, tmp_path):
    CASES[name](face, tmp_path)


def test_what_is_no_strategy_is_refused(tmp_path):
    for call in [
        lambda: js.ReplicaContext(3.0),
        lambda: js.optax.own_copies({}, strategy=3.0),
        lambda: js.keras.distribution(3.0),
        lambda: js.optax.check_chain(optax.sgd(0.1), np.ones(2), strategy=3.0),
        lambda: js.checkpoint.CheckpointManager(tmp_path, 3.0),
        lambda: js.experimental.PreemptionCheckpointHandler(
            None, {}, str(tmp_path), strategy=3.0
        ),
    ]:
        with pytest.raises(TypeError, match="`strategy` was 3.0; a strategy was wante"):
            call()


@pytest.mark.parametrize("generation", [v1, contrib])
def test_scopes_are_entered_again_and_last_though_nobody_holds_them(generation):
    strategy = generation.MirroredStrategy(["CPU:0", "CPU:1"])
    scope = strategy.scope()
    for _ in range(2):
        with scope as entered:
            assert entered is strategy
            assert js.get_strategy() is strategy.core
    assert not js.has_strategy()

    def entered_in_a_cell_of_a_notebook():
        strategy.scope().__enter__()
        gc.collect()
        return js.get_strategy() is strategy.core

    assert contextvars.copy_context().run(entered_in_a_cell_of_a_notebook)
