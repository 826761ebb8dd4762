"""`extended.update` as optimizers use it: reduced gradients, copies of other variables.

Keras-style optimizers reduce, step across with `merge_call`, and update each variable
there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.replicas import ids
from helpers.variables import copies, variable

import jaxstrategy as js

KINDS = {
    "mirrored": lambda: js.MirroredStrategy(jax.devices()[:4]),
    "central": lambda: js.experimental.CentralStorageStrategy(
        ["CPU:2", "CPU:1"], "CPU:5"
    ),
}


@pytest.fixture(params=KINDS)
def strategy(request):
    return KINDS[request.param]()


def merged(fn, *args):
    return js.get_replica_context().merge_call(fn, args)


class Momentum:
    """An optimizer in the style of Keras; its slots are variables, too."""

    def __init__(self, strategy, variables, rate=0.1, momentum=0.5):
        self.variables, self.rate, self.momentum = variables, rate, momentum
        with strategy.scope():
            self.slots = [js.Variable(jnp.zeros(v.shape)) for v in variables]
            self.steps = js.Variable(0, aggregation="only_first_replica")

    def apply_gradients(self, grads):
        context = js.get_replica_context()
        grads = context.all_reduce("sum", grads)
        return context.merge_call(self.apply, args=(grads,))

    def apply(self, strategy, grads):
        for v, slot, g in zip(self.variables, self.slots, grads, strict=True):
            strategy.extended.update(v, self.update, args=(slot, g))
        return strategy.extended.update(self.steps, lambda n: n.assign_add(1))

    def update(self, v, slot, g):
        slot.assign(self.momentum * slot + g)
        v.assign_sub(self.rate * slot)


@pytest.mark.slow
def test_an_optimizer_in_the_style_of_keras_is_numpys(strategy):
    draw = np.random.default_rng(0)
    n = strategy.num_replicas_in_sync
    x, y = draw.normal(size=(n, 4, 3)), draw.normal(size=(n, 4))
    w, b = np.float32([1.0, 2.0, 3.0]), np.float32(0.5)
    variables = [variable(strategy, w), variable(strategy, b)]
    optimizer = Momentum(strategy, variables)

    @strategy.run
    def step(x, y):
        def loss():
            return ((x @ variables[0].value() + variables[1] - y) ** 2).mean() / n

        return optimizer.apply_gradients(js.grad(loss, variables)())

    slots = [np.zeros(3), 0.0]
    for _ in range(3):
        step(strategy.per_replica(x), strategy.per_replica(y))
        wrong = x @ w + b - y
        grads = 2 * (wrong[..., None] * x).mean((0, 1)), 2 * wrong.mean()
        slots = [0.5 * slot + g for slot, g in zip(slots, grads, strict=True)]
        w, b = w - 0.1 * slots[0], b - 0.1 * slots[1]
    np.testing.assert_allclose(variables[0], w, rtol=1e-4)
    np.testing.assert_allclose(variables[1], b, rtol=1e-4)
    assert optimizer.steps == 3
    strategy.assert_in_sync([v.distributed() for v in variables])


def test_a_gradient_that_was_not_reduced_is_refused_with_its_line(two):
    v = variable(two, 1.0, name="v")

    def apply(strategy, g):
        strategy.extended.update(v, lambda v, g: v.assign_sub(g), args=(g,))

    def step(x):
        g = js.grad(lambda: v * x, v)()
        merged(apply, g)

    words = r"'v' is mirrored, but `step` assigns it a value that may differ[\s\S]*"
    words += r"since: .*test_updates_in_merge_calls.py:\d+: .*\n *\(from argument `x`"
    with pytest.raises(js.errors.NotMirroredError, match=words) as raised:
        two.run(step, (ids(two),))
    assert raised.value.path == "v" and __file__ in raised.value.line
    with pytest.raises(ValueError, match=words):
        two.run(step, kwargs={"x": ids(two)})
    assert copies(two, v) == [1, 1]


def test_values_in_any_form_come_through_merge_calls(two):
    v, w = variable(two, jnp.zeros(3)), variable(two, 0.0)
    rows = js.IndexedSlices(jnp.ones(1), jnp.array([1]))

    def apply(strategy, tree, rows, total):
        update = strategy.extended.update
        update(v, lambda v, r: v.assign_add(r), args=(rows,))
        update(v, lambda v, tree: v.assign_add(tree["a"][0]), kwargs={"tree": tree})
        update(w, lambda w: w.assign(total))  # captured
        w.assign_add(total)  # a cross-replica assignment

    def step(x):
        total = js.get_replica_context().all_reduce("sum", x)
        merged(apply, {"a": [jnp.full(3, total)]}, rows, total)

    two.run(step, (ids(two, 1.0),))
    assert v.numpy().tolist() == [3, 4, 3] and w == 6.0


@pytest.mark.slow
def test_on_read_copies_take_each_replicas_version(strategy):
    o = variable(strategy, 1.0, "on_read", "none")
    n = strategy.num_replicas_in_sync
    result = strategy.extended.update(
        o, lambda o, x, by: o.assign_add(x[0] * by), args=([ids(strategy)],),
        kwargs={"by": 2.0},
    )  # fmt: skip
    wanted = [2.0 * i + 1 for i in range(n)]
    assert copies(strategy, o) == wanted == copies(strategy, result)

    def apply(strategy, x):
        strategy.extended.update(o, lambda o, x: o.assign(x), args=(x,))

    strategy.run(lambda x: merged(apply, x), (ids(strategy),))
    assert copies(strategy, o) == list(range(n))


def test_an_update_that_reads_an_on_read_variable_sees_the_component(strategy):
    v, o = variable(strategy, 0.0), variable(strategy, 3.0, "on_read", "sum")
    calls = []

    def copy(v):
        v.assign_add(1.0)  # undone, where it starts again
        calls.append(1)
        return v.assign_add(o)

    # The copies are equal, but that cannot be known: what differs is known later.
    with pytest.raises(ValueError, match="is mirrored, but `copy` assigns it a"):
        strategy.extended.update(v, copy)
    assert v == 0.0
    assert 1 <= len(calls) <= 2
    seen = strategy.extended.update(v, lambda v: v + o, group=False)
    assert seen == (3.0,) * len(v.devices)
    one = js.OneDeviceStrategy("CPU:0")  # of one replica nothing differs
    w, o = variable(one, 1.0), variable(one, 3.0, "on_read", "sum")
    one.extended.update(w, lambda w: w.assign_add(o))
    assert w == 4.0


def test_an_error_after_a_component_was_read_is_the_functions(two):
    v, o = variable(two, 1.0), variable(two, 0.0, "on_read", "sum")

    def fail(v):
        v.assign(2.0)
        try:
            o.value()
        except Exception:
            raise AssertionError("no error of ours") from None
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        two.extended.update(v, fail)
    assert v == 1.0
