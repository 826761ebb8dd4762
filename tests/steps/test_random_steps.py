"""Random small steps, on any layout and eagerly, give the numbers of plain NumPy."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import chosen, each_of
from helpers.inputs import ranged, real
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js

ROWS = 8
STATE = js.StateSharding("state", min_bytes=0)
LAYOUTS = {
    "one replica of several devices": {"logical_axes": {"core": 8}},
    "mirrored": {"devices": jax.devices()[:4]},
    "inner axes": {"logical_axes": {"core": 2}},
    "shared": {"devices": jax.devices()[:2], "replicas_per_device": 2},
    "divided": {"devices": jax.devices()[:4], "sharding": STATE},
    "divided, inner axes": {"logical_axes": {"core": 2}, "sharding": STATE},
    "divided, shared": {
        "devices": jax.devices()[:2], "replicas_per_device": 2, "sharding": STATE,
    },
    "central": {"devices": jax.devices()[:4], "parameter_device": "CPU:5"},
    "central, inner axes": {
        "logical_axes": {"core": 2}, "parameter_device": "CPU:7",
    },
    "central, shared": {
        "devices": jax.devices()[:2], "replicas_per_device": 2,
        "parameter_device": "CPU:7",
    },
}  # fmt: skip
AGGREGATIONS = {"sum": "sum", "mean": "mean", "first": "only_first_replica"}


def made(layout):
    options = LAYOUTS[layout]
    if "central" not in layout:
        return js.MirroredStrategy(**options)
    devices = options.get("devices", jax.devices())
    more = {name: value for name, value in options.items() if name != "devices"}
    return js.experimental.CentralStorageStrategy(devices, **more)


class Ours:
    """The operations, of one replica in a step."""

    def __init__(self, strategy):
        def variable(**kind):
            return js.Variable(np.zeros(ROWS, np.float32), **kind)

        with strategy.scope():
            self.variables = {
                name: variable(aggregation=how) for name, how in AGGREGATIONS.items()
            }
            self.equal = variable()
            self.own = variable(synchronization="on_read", aggregation="sum")

    def reduced(self, op, x):
        return replica().all_reduce(op, x)

    def in_groups(self, x):
        n = replica().num_replicas_in_sync
        groups = np.arange(n).reshape(min(n, 2), -1).T.tolist()
        return replica().all_reduce("sum", x, groups=groups)

    def last(self, x):
        return replica().all_gather(x[None], 0)[-1]

    def merged(self, x):
        return replica().merge_call(lambda strategy, x: strategy.reduce("sum", x), (x,))

    def numbered(self, x):
        return x + replica().replica_id_in_sync_group

    def drawn(self, x):
        return x + jax.random.uniform(replica().fold_in(jax.random.key(0)), (ROWS,))

    def slope(self, x):
        return jax.grad(lambda x: (self.reduced("mean", x) ** 2).sum())(x)

    def chosen(self, x, yes, no):
        return lax.cond(self.reduced("max", x)[0] > 0.1, yes, no)

    def repeated(self, turn, x):
        return lax.scan(lambda x, _: (turn(x), None), x, length=3)[0]

    def called(self, function, x):
        return jax.jit(function)(x)

    def mapped(self, function, x):
        return jax.vmap(function)(jnp.stack([x, -x])).sum(0)

    def assign(self, name, method, x):
        return getattr(self.variables[name], method)(x)

    def count(self, x):
        self.equal.assign_add(self.reduced("mean", x))
        lax.cond(x[0] > 0.1, lambda: self.own.assign_add(x), lambda: self.own.value())
        return self.equal.value() + self.own.value()

    sin, where = staticmethod(jnp.sin), staticmethod(jnp.where)

    def held(self):
        values = *self.variables.values(), self.equal, self.own
        return [value.numpy() for value in values]


class Plain:
    """The same of all replicas at once, by NumPy."""

    def __init__(self, n):
        self.n, self.own = n, np.zeros((n, ROWS))
        self.variables = {name: np.zeros(ROWS) for name in [*AGGREGATIONS, "equal"]}

    def on_all(self, x):
        return np.broadcast_to(x, (self.n, ROWS))

    def reduced(self, op, x):
        return self.on_all(getattr(np, op)(x, axis=0))

    def in_groups(self, x):
        size = min(self.n, 2)
        return np.tile(x.reshape(size, -1, ROWS).sum(0), (size, 1))

    def last(self, x):
        return self.on_all(x[-1])

    def merged(self, x):
        return self.on_all(x.sum(0))

    def numbered(self, x):
        return x + np.arange(self.n)[:, None]

    def drawn(self, x):
        keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(self.n)]
        return x + np.stack([jax.random.uniform(key, (ROWS,)) for key in keys])

    def slope(self, x):
        return self.on_all(2 * x.mean(0))

    def chosen(self, x, yes, no):
        return yes() if x.max(0)[0] > 0.1 else no()

    def repeated(self, turn, x):
        return turn(turn(turn(x)))

    def called(self, function, x):
        return function(x)

    def mapped(self, function, x):
        return function(x) + function(-x)

    def assign(self, name, method, x):
        given = {"sum": x.sum(0), "mean": x.mean(0), "first": x[0]}[name]
        old = self.variables[name]
        new = {"assign": given, "assign_add": old + given, "assign_sub": old - given}
        self.variables[name] = new[method]
        return self.on_all(new[method])

    def count(self, x):
        self.variables["equal"] = self.variables["equal"] + x.mean(0)
        self.own = np.where(x[:, :1] > 0.1, self.own + x, self.own)
        return self.variables["equal"] + self.own

    sin, where = staticmethod(np.sin), staticmethod(np.where)

    def held(self):
        return [*self.variables.values(), self.own.sum(0)]


SIMPLE = {
    "arithmetic": lambda on, a, b: on.sin(a - b) + a[..., ::-1],
    "where": lambda on, a, b: on.where(a > 0.1, a, b / 2),
    "sum": lambda on, a, b: on.reduced("sum", a),
    "mean": lambda on, a, b: on.reduced("mean", b) + a,
    "max": lambda on, a, b: on.reduced("max", a),
    "min": lambda on, a, b: on.reduced("min", b),
    "groups": lambda on, a, b: on.in_groups(on.numbered(a)),
    "gather": lambda on, a, b: on.last(a) - b,
    "merge_call": lambda on, a, b: on.merged(a),
    "id": lambda on, a, b: on.numbered(a),
    "key": lambda on, a, b: on.drawn(b),
    "gradient": lambda on, a, b: on.slope(a) + b,
    "count": lambda on, a, b: on.count(a),
} | {
    f"{method} {name}": functools.partial(
        lambda on, a, b, name, method: on.assign(name, method, on.sin(a)),
        name=name, method=method,
    )
    for name in AGGREGATIONS for method in ("assign", "assign_add", "assign_sub")
}  # fmt: skip
HOLDERS = {
    "scan": lambda on, f, a, b: on.repeated(lambda c: on.sin(f(on, c, b)), a),
    "cond": lambda on, f, a, b: on.chosen(a, lambda: f(on, a, b) + a, lambda: a + b),
    "vmap": lambda on, f, a, b: on.mapped(lambda a: f(on, a, b), a),
    "jit": lambda on, f, a, b: on.called(lambda a: f(on, a, b) * a, a),
}


def program(seed):
    """Each operation by itself, and some in each holder, on random operands."""
    draw = np.random.default_rng(seed)
    lines = [(None, name) for name in SIMPLE]
    for holder in HOLDERS:
        # What `jax.vmap` maps cannot be assigned.
        names = "sum gather" if holder == "vmap" else "count merge_call"
        lines += [(holder, name) for name in ["id", *names.split()]]
    draw.shuffle(lines)
    return [(*line, *draw.integers(0, 99, 2)) for line in lines]


def run(on, lines, x, s, total):
    """All values of a program that begins with `x`, `s`, the same on all, and rows."""
    known = [x, s, x + total]
    for holder, name, first, second in lines:
        a, b = known[first % len(known)], known[second % len(known)]
        function = SIMPLE[name]
        value = HOLDERS[holder](on, function, a, b) if holder else function(on, a, b)
        known.append(on.sin(value / 2))
    return known


@pytest.mark.filterwarnings("ignore::jaxstrategy.errors.DoubleReductionWarning")
@pytest.mark.filterwarnings("ignore::jaxstrategy.errors.LateReplicaWarning")
@pytest.mark.parametrize(
    "layout",
    chosen(LAYOUTS, "mirrored", "divided, shared", "divided, inner axes"),
)
@each_of("is_eager", [False, True])
def test_random_steps_give_numpys_numbers(is_eager, layout):
    if is_eager and ("divided" in layout or "central" in layout):
        return
    eagerly = js.experimental.eager_replicas
    strategy, seed = made(layout), [*LAYOUTS].index(layout)
    n = strategy.num_replicas_in_sync
    x = np.random.default_rng(seed).normal(size=(2, n, ROWS)).astype(np.float32)
    ours, plain, lines = Ours(strategy), Plain(n), program(seed)

    @strategy.step
    def step(x, s, batch):
        return run(ours, lines, x, s, js.masked_sum(batch))

    s = np.linspace(-1, 1, ROWS, dtype=np.float32)
    batches = strategy.experimental_distribute_dataset(ranged(3 * n + 1, 2 * n))
    for rows, batch in zip(x, batches, strict=True):
        total = np.array([[sum(each)] for each in real(batch)])
        with eagerly() if is_eager else contextlib.nullcontext():
            found = step(strategy.per_replica(rows), strategy.mirror(s), batch)
        wanted = run(plain, lines, rows, plain.on_all(s), total)
        for line, have, want in zip([0, 0, 0, *lines], found, wanted, strict=True):
            have = np.stack(strategy.experimental_local_results(have))
            np.testing.assert_allclose(have, want, rtol=1e-3, atol=3e-4, err_msg=line)
        for have, want in zip(ours.held(), plain.held(), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-3, atol=1e-3)
