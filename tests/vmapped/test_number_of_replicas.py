"""`num_replicas`: as many replicas on any number of devices, with the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of

import jaxstrategy as js

DETERMINISTIC = js.experimental.CommunicationOptions(deterministic=True)


def mirrored(devices, replicas, **options):
    return js.MirroredStrategy(
        jax.devices()[:devices], num_replicas=replicas, **options
    )


def in_pairs(rows):
    """A sum in the order that is promised."""
    rows = list(rows)
    while len(rows) > 1:
        pairs = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)]
        rows = pairs + rows[len(rows) // 2 * 2 :]
    return rows[0]


@each_of("replicas, counts", [(8, (1, 2, 8)), (6, (2, 3)), (1, (1,))])
def test_a_deterministic_sum_has_the_same_bits_on_any_devices(replicas, counts):
    numbers = np.random.default_rng(0).normal(size=(replicas, 37)).astype(np.float32)
    numbers *= 10.0 ** np.arange(replicas, dtype=np.float32)[:, None]
    wanted, means = in_pairs(numbers), []
    for devices in counts:
        strategy = mirrored(devices, replicas, communication_options=DETERMINISTIC)

        @strategy.run
        def step(x):
            context = js.get_replica_context()
            return context.all_reduce("sum", x), context.all_reduce("mean", x)

        total, mean = step(strategy.per_replica(list(numbers)))
        np.testing.assert_array_equal(total, wanted)
        means.append(np.asarray(mean))
        plain = mirrored(devices, replicas)
        x = plain.per_replica(list(numbers))
        one = plain.extended.reduce_to("sum", x, x, DETERMINISTIC)
        np.testing.assert_array_equal(one, wanted)
        other = plain.reduce("max", x, options=DETERMINISTIC)
        np.testing.assert_array_equal(other, numbers.max(0))
    np.testing.assert_allclose(means[0], wanted / replicas, rtol=2e-7)
    assert all(np.array_equal(mean, means[0]) for mean in means)


def perceptron(state, x, y, context):
    key = context.fold_in(jax.random.key(3))
    kept = jax.random.bernoulli(key, 0.8, (len(x), 16))
    hidden = jnp.tanh(x @ state["w"]) * kept
    return js.masked_mean((hidden @ state["v"] - y) ** 2)


def recurrent(state, x, y, context):
    def turn(hidden, column):
        hidden = jnp.tanh(hidden @ state["w"][:, :6] + column[:, None])
        return hidden - context.all_reduce("mean", hidden.mean()), hidden.sum(1)

    _, sums = jax.lax.scan(turn, x, x.T)
    return js.masked_mean((sums.sum(0) - y) ** 2) + (state["v"] ** 2).sum()


def trained(strategy, loss, several=False):
    random = np.random.default_rng(0)
    x = random.normal(size=(48, 6)).astype(np.float32)
    y = np.sin(x).sum(1)
    weights = random.normal(size=(6, 16)).astype(np.float32)
    optimizer = optax.adam(0.01)
    params = {"w": weights, "v": weights[0]}
    state = strategy.mirror((params, optimizer.init(params)))

    @strategy.run
    def step(state, batch):
        params, moments = state
        context = js.get_replica_context()

        def own_loss(params):
            return loss(params, *batch, context)

        value, gradients = jax.value_and_grad(own_loss)(params)
        value, gradients = context.all_reduce("mean", (value, gradients))
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    batches = js.batches((x, y), 24, shuffle=1)
    dataset = strategy.experimental_distribute_dataset(batches)
    losses = []
    for _ in range(4):
        if several:
            (group,) = js.experimental.grouped(dataset, 2)
            state, values = strategy.several(step)(state, group)
            losses += values.tolist()
            continue
        for batch in dataset:
            state, value = step(state, batch)
            losses.append(float(value))
    return losses, jax.device_get(state)


DIVIDED = js.StateSharding("optimizer", min_bytes=0)


@pytest.mark.slow
@each_of(
    "loss, several, sharding",
    [(recurrent, True, None), (perceptron, False, DIVIDED)],
)
def test_a_deterministic_training_has_the_same_bits_on_any_shared_devices(
    loss, several, sharding
):
    options = {"communication_options": DETERMINISTIC, "sharding": sharding}
    (losses, state), (others, other) = (
        trained(mirrored(n, 6, **options), loss, several) for n in (3, 1)
    )
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert others == losses
    jax.tree.map(np.testing.assert_array_equal, other, state)


def test_devices_that_cannot_have_as_many_stay_idle():
    with pytest.warns(RuntimeWarning, match="was 6: cpu:6, cpu:7 stay idle, .* 6 of 8"):
        strategy = js.MirroredStrategy(num_replicas=6)
    assert strategy.num_replicas_in_sync == 6
    with pytest.warns(RuntimeWarning, match="was 4: cpu:2 stays idle"):
        assert mirrored(3, 4).num_replicas_in_sync == 4
    inner = mirrored(8, 4, logical_axes={"core": 2})
    assert inner.num_replicas_in_sync == 4


def test_what_does_not_fit():
    with pytest.raises(TypeError, match="`num_replicas` was 'many'; a whole number"):
        js.MirroredStrategy(num_replicas="many")
    with pytest.raises(ValueError, match="`num_replicas` was 0; 1 or more was wanted"):
        js.MirroredStrategy(num_replicas=0)
    with pytest.raises(ValueError, match="and `replicas_per_device` 2: .* one of the"):
        js.MirroredStrategy(num_replicas=8, replicas_per_device=2)
    with pytest.raises(ValueError, match="was 8, of 2 devices each .* 8 devices: repl"):
        js.MirroredStrategy(num_replicas=8, logical_axes={"core": 2})


@each_of(
    "given, told",
    [
        ({"implementation": "ring"}, "`implementation` <Comm.*RING.*>"),
        ({"compression": "int8"}, "`compression` 'int8'"),
        ({"overlap": True}, "`overlap` True"),
    ],
)
def test_what_has_an_order_of_its_own_is_not_deterministic(given, told):
    with pytest.raises(ValueError, match=f"`deterministic` was True and {told}, which"):
        js.experimental.CommunicationOptions(deterministic=True, **given)
    with pytest.raises(TypeError, match="`deterministic` was 1; a bool was wanted"):
        js.experimental.CommunicationOptions(deterministic=1)
