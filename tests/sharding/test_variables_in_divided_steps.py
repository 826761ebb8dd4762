"""Steps over variables of which each replica keeps a part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js

COUNT = 4
START = {
    "w": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8),
    "u": np.linspace(1, -1, 64, dtype=np.float32).reshape(8, 8),
    "b": np.zeros(3, np.float32),
}
X = np.sin(np.arange(COUNT * 3 * 8, dtype=np.float32)).reshape(COUNT, 3, 8)


def strategies():
    devices = jax.devices()[:COUNT]
    sharded = js.StateSharding("state", min_bytes=0)
    return {
        "by strategy": js.MirroredStrategy(devices, sharding=sharded),
        "by variable": js.MirroredStrategy(devices),
    }


@pytest.fixture(scope="module", params=["by strategy", "by variable"])
def case(request):
    strategy = strategies()[request.param]
    options = {} if request.param == "by strategy" else {"sharding": 0}
    return strategy, options


@pytest.fixture(scope="module")
def strategy():
    return strategies()["by strategy"]


# Divided by their strategy, and by themselves.
BOTH = {
    "scan": (strategies()["by strategy"], {}),
    "jit": (strategies()["by variable"], {"sharding": 0}),
}


def made(strategy, value, name="v", **options):
    with strategy.scope():
        return js.Variable(value, name=name, **options)


def lies_at(variable):
    array = variable.cell[...]
    parts = array.sharding.shard_shape(array.shape)
    return [i for i, n in enumerate(array.shape) if parts[i] < n]


def batches(strategy):
    return strategy.per_replica(list(X))


def loss_of(w, u, b, x):
    y = jnp.tanh(x @ w) @ u
    return (y**2).mean() + (b**2).sum() + y[:, :3].sum() * 0.1 + (y[:, :3] @ b).mean()


def trained_on_host(steps, rate=0.1):
    """The variables after some steps of momentum, by the mean of all gradients."""
    state = {name: value.copy() for name, value in START.items()}
    momentum = {name: np.zeros_like(value) for name, value in START.items()}
    losses = []
    for _ in range(steps):
        each = [
            jax.value_and_grad(loss_of, argnums=(0, 1, 2))(*state.values(), x)
            for x in X
        ]
        losses.append(np.mean([loss for loss, _ in each]))
        for i, name in enumerate(state):
            gradient = np.mean([grads[i] for _, grads in each], axis=0)
            momentum[name] = 0.9 * momentum[name] + gradient
            state[name] = state[name] - rate * momentum[name]
    return state, losses


class Momentum:
    """An optimizer of variables, and the model that it trains."""

    def __init__(self, strategy, options):
        def variables(values):
            return {
                name: made(strategy, value, name, **(options if value.ndim > 1 else {}))
                for name, value in values.items()
            }

        self.parameters = variables(START)
        self.momentum = variables({n: np.zeros_like(v) for n, v in START.items()})

    def step(self, x):
        p = self.parameters
        function = functools.partial(self.loss, x)
        loss, grads = js.value_and_grad(function, p)()
        loss, grads = js.get_replica_context().all_reduce("mean", (loss, grads))
        for name, grad in grads.items():
            m = self.momentum[name]
            m.assign(0.9 * m + grad)
            p[name].assign_sub(0.1 * m.value())
        return loss

    def loss(self, x):
        return loss_of(*(each.value() for each in self.parameters.values()), x)

    @property
    def variables(self):
        return [*self.parameters.values(), *self.momentum.values()]


@pytest.mark.slow
def test_an_optimizer_of_variables_gives_the_numbers_of_whole_ones(case):
    strategy, options = case
    model, x = Momentum(strategy, options), batches(strategy)
    wanted, losses = trained_on_host(3)
    found = [strategy.run(model.step, (x,)) for _ in range(3)]
    np.testing.assert_allclose(np.asarray(found), losses, rtol=1e-5)
    for name, variable in model.parameters.items():
        np.testing.assert_allclose(variable.numpy(), wanted[name], rtol=2e-5, atol=1e-6)
    for variable in model.variables:
        assert lies_at(variable) == ([0] if variable.ndim > 1 else [])
        assert variable.value().sharding == variable.sharding


def test_one_program_takes_a_part_of_each_variable(case, compilations):
    strategy, options = case
    model, x = Momentum(strategy, options), batches(strategy)
    strategy.run(model.step, (x,))
    compilations()
    for _ in range(2):
        strategy.run(model.step, (x,))
    assert compilations() == 0
    memory = strategy.explain(model.step, (x,)).memory
    batch, whole, part = 3 * 8 * 4, 2 * 3 * 4, 4 * 64 * 4 // COUNT
    assert memory.arguments == batch + whole + part
    assert memory.donated == whole + part
    assert memory.results < memory.donated + 100  # the loss, and what holds results


def in_scan(v):
    def body(carry, _):
        v.assign_add(jnp.ones(v.shape))
        return carry + v.value().sum(), None

    return jax.lax.scan(body, 0.0, None, length=3)[0]


def of_a_part(v):
    v[1:3].assign(jnp.zeros((2, 8)))
    v[:, 0].assign_add(jnp.ones(8))
    return v.value().sum()


def of_rows(v):
    v.scatter_add(js.IndexedSlices(jnp.ones((2, 8)), jnp.array([1, 1])))
    return v.value().sum()


def in_merge_call(v):
    def merge(strategy, x):
        x = strategy.extended.reduce_to("sum", x, v)
        strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(x,))

    js.get_replica_context().merge_call(merge, (jnp.ones(v.shape),))
    return v.value().sum()


def by_hand(v):
    """What each use makes of an array, and what it returns."""
    scanned = [v + i for i in (1, 2, 3)]
    part = v.copy()
    part[1:3] = 0
    part[:, 0] += 1
    rows = v.copy()
    rows[1] += 2
    return {
        in_scan: (v + 3, sum(each.sum() for each in scanned)),
        of_a_part: (part, part.sum()),
        of_rows: (rows, rows.sum()),
        in_merge_call: (v + COUNT, (v + COUNT).sum()),
    }


@each_of("use", by_hand(START["w"]))
def test_every_use_is_right_and_leaves_it_divided(strategy, use):
    variable = made(strategy, START["w"])
    wanted = START["w"]
    for _ in range(2):
        wanted, total = by_hand(wanted)[use]
        returned = strategy.run(use, (variable,))
        np.testing.assert_allclose(returned, total, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-6, atol=1e-6)
        assert lies_at(variable) == [0]
        assert variable.value().sharding == variable.sharding


@each_of("use", [in_scan, of_a_part])
@each_of("around", ["jit", "scan"])
def test_steps_in_functions_that_jax_traces(use, around):
    strategy, options = BOTH[around]
    variable = made(strategy, START["w"], **options)
    expected, wanted = [], START["w"]
    for _ in range(2):
        wanted, total = by_hand(wanted)[use]
        expected.append(total)

    def step():
        return strategy.run(use, (variable,))

    if around == "jit":
        jitted = jax.jit(step)
        returned = [jitted(), jitted()]
    else:
        scan = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, step()), 0, None, 2)[1])
        returned = scan()
    np.testing.assert_allclose(np.asarray(returned), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-6, atol=1e-6)
    assert lies_at(variable) == [0]
    strategy.run(use, (variable,))  # by reference, from now on
    np.testing.assert_allclose(variable.numpy(), by_hand(wanted)[use][0], rtol=1e-6)
    assert lies_at(variable) == [0]


def filled(variable, x):
    variable.assign(jnp.full(variable.shape, x))


def test_what_differs_between_replicas_is_refused(strategy):
    variable = made(strategy, START["w"])
    x = strategy.per_replica([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(js.errors.NotMirroredVariableError, match="'v'"):
        strategy.run(filled, (variable, x))
    np.testing.assert_array_equal(variable.numpy(), START["w"])
    assert lies_at(variable) == [0]


def test_what_a_check_refuses_leaves_the_variables_as_they_were(strategy):
    variable = made(strategy, START["w"])
    options = js.RunOptions(check_finite=True)

    def step(x):
        variable.assign(variable.value() / x)

    for _ in range(2):
        with pytest.raises(js.NonFiniteError):
            strategy.run(step, (0.0,), options=options)
        np.testing.assert_array_equal(variable.numpy(), START["w"])
        assert lies_at(variable) == [0]
    strategy.run(step, (2.0,), options=options)
    np.testing.assert_array_equal(variable.numpy(), START["w"] / 2)
    assert lies_at(variable) == [0]


def test_several_steps_in_one_call(case):
    strategy, options = case
    variable = made(strategy, START["w"], **options)
    factors = [1.0, 2.0, 3.0]

    def step(x):
        variable.assign_add(js.get_replica_context().all_reduce("sum", x) * variable)
        return variable.value().sum()

    batches = tuple(strategy.per_replica([x / 8] * COUNT) for x in factors)
    for _ in range(2):
        strategy.several(step)(batches)
    wanted = START["w"] * np.prod([(1 + x / 2) ** 2 for x in factors])
    np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-5)
    assert lies_at(variable) == [0]
