"""Names that programs of TensorFlow 2.0 to 2.4 use; steps of the default strategy."""

import numpy as np
import pytest

import jaxstrategy as js


def test_the_older_multi_worker_strategy():
    for name in ["AUTO", "RING", "NCCL"]:
        communication = js.experimental.CollectiveCommunication[name]
        assert communication is js.experimental.CommunicationImplementation(name)
        alone = js.cluster_resolver.SimpleClusterResolver({})
        strategy = js.experimental.MultiWorkerMirroredStrategy(communication, alone)
        assert isinstance(strategy, js.MultiWorkerMirroredStrategy)
        x = strategy.per_replica(np.arange(8.0))
        assert strategy.reduce("sum", x) == 28


def test_the_older_multi_worker_strategy_refuses_what_there_is_not():
    with pytest.raises(ValueError, match="`implementation` was 'MPI'"):
        js.experimental.MultiWorkerMirroredStrategy("MPI")


def test_all_gather_takes_options(two):
    options = js.experimental.CommunicationOptions(implementation="RING")

    def step(x):
        return js.get_replica_context().all_gather(x, 0, options)

    x = two.per_replica([[1.0], [2.0]])
    np.testing.assert_array_equal(two.run(step, (x,)), [1.0, 2.0])
    with pytest.raises(TypeError, match="CommunicationOptions"):
        two.run(lambda x: js.get_replica_context().all_gather(x, 0, "RING"), (x,))


# The default strategy.


def test_a_step_of_the_default_strategy_is_one():
    def double(x, plus=0):
        return 2 * x + plus

    step = js.get_strategy().run(double)
    assert step.function is double and step.__name__ == "double"
    assert step(3) == 6 and step(3, plus=1) == 7
    assert repr(step) == (
        f"<{double.__qualname__} replicated by DefaultStrategy(1 replica)>"
    )
