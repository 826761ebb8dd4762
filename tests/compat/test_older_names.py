"""Names that programs of TensorFlow 2.0 to 2.4 use; steps of the default strategy."""

import jax
import numpy as np
import pytest
from flax import nnx

import jaxstrategy as js


def test_the_older_name_of_datasets_from_a_function(two):
    def dataset_fn(context):
        return js.batches(np.arange(8), context.get_per_replica_batch_size(4))

    dataset = two.experimental_distribute_datasets_from_function(dataset_fn)
    found = [
        np.stack(two.experimental_local_results(batch)).tolist() for batch in dataset
    ]
    assert found == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize("name", ["AUTO", "RING", "NCCL"])
def test_the_older_multi_worker_strategy(name):
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


def test_a_lone_multi_worker_strategy_has_an_empty_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.warns(RuntimeWarning, match="This process trains alone: "):
        resolver = js.MultiWorkerMirroredStrategy().cluster_resolver
    assert resolver.task_type is None and resolver.task_id is None
    assert resolver.cluster_spec().as_dict() == {} and resolver.master() == ""


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


def test_a_step_of_the_default_strategy_can_be_a_method():
    class Doubler:
        @js.get_strategy().run
        def double(self, x):
            return 2 * x

    assert Doubler().double(3) == 6


def test_bound_objects_of_the_default_strategy():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    @js.get_strategy().run
    def step(model, x):
        model.bias[...] += 1
        return model(x)

    x = np.ones((3, 2), np.float32)
    step.bind(model)(x)
    np.testing.assert_array_equal(model.bias[...], [1.0])
    np.testing.assert_allclose(
        step.bind(model)(x), x @ np.asarray(model.kernel[...]) + 2, rtol=1e-6
    )
    with pytest.raises(TypeError, match="`bind` was given no module"):
        step.bind(jax.numpy.ones(2))
