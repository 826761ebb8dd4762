"""All changes of server variables do on workers what they do in NumPy."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.coordinator import Threads

START = {
    "scalar": np.float32(1),
    "vector": np.arange(4, dtype=np.float32),
    "half": np.arange(4, dtype=jnp.bfloat16),
    "number": np.int32(2),
    "flag": np.bool_(False),
    "table": np.arange(24, dtype=np.float32).reshape(8, 3) % 5,
    "shards": np.arange(27, dtype=np.float32).reshape(9, 3) % 7 - 2,
}
"""What the variables hold at first; "shards" is divided over servers."""

SCATTER = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_max": np.maximum.at,
    "scatter_min": np.minimum.at,
    "scatter_mul": np.multiply.at,
}


class Plain:
    """The meaning of the statements, on arrays of NumPy."""

    xp = np

    def __init__(self):
        self.state = {k: np.array(v) for k, v in START.items()}

    def read(self, name):
        return self.state[name]

    def rows(self, name, ids):
        return self.state[name][np.array(ids)]

    def gradient(self, table, ids, factor):
        return factor * len(ids) * 3

    def each_row(self, table, ids):
        return self.rows(table, ids).sum(1)

    def change(self, name, word, value):
        old = self.state[name]
        value = np.asarray(value).astype(old.dtype)
        if word == "assign_add":
            value = old + value
        elif word == "assign_sub":
            value = old - value
        self.state[name] = np.array(np.broadcast_to(value, old.shape))

    def part(self, name, index, word, value):
        new = self.state[name].copy()
        value = np.asarray(value, new.dtype)
        if word == "assign":
            new[index] = value
        else:
            new[index] += value if word == "assign_add" else -value
        self.state[name] = new

    def update(self, name, fn, value):
        self.state[name] = np.asarray(fn(self.state[name], value), START[name].dtype)

    def scatter(self, name, word, ids, values):
        new = self.state[name].copy()
        if word == "scatter_update":
            new[ids] = values
        else:
            SCATTER[word](new, np.array(ids), values)
        self.state[name] = new

    def block(self, kind, number, bodies, result):
        if kind == "if":
            return bodies[0](result) if number > 0 else bodies[1](result)
        if kind == "switch":
            return bodies[int(number) % 3](result)
        for _ in range(2 if kind in ("fori", "scan", "while") else 1):
            result = bodies[0](result)
        return result


class OnWorkers(Plain):
    """The same on variables of parameter servers, in a scheduled function."""

    xp = jnp

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.state = {k: js.Variable(v, name=k) for k, v in START.items()}

    def read(self, name):
        return self.state[name].value()

    def rows(self, name, ids):
        return js.experimental.embedding_lookup(self.state[name], jnp.array(ids))

    def gradient(self, table, ids, factor):
        def loss():
            return (factor * self.rows(table, ids)).sum()

        return js.grad(loss, self.state[table])().values.sum()

    def each_row(self, table, ids):
        return jax.vmap(lambda i: self.rows(table, i).sum())(jnp.array(ids))

    def change(self, name, word, value):
        like = START[name]
        value = jnp.broadcast_to(jnp.asarray(value), like.shape).astype(like.dtype)
        getattr(self.state[name], word)(value)

    def part(self, name, index, word, value):
        getattr(self.state[name][index], word)(value)

    def update(self, name, fn, value):
        self.state[name].update(fn, value)

    def scatter(self, name, word, ids, values):
        slices = js.IndexedSlices(values, jnp.array(ids), START[name].shape)
        getattr(self.state[name], word)(slices)

    def block(self, kind, number, bodies, result):
        body = bodies[0]
        match kind:
            case "if":
                return jax.lax.cond(number > 0, *bodies[:2], result)
            case "switch":
                return jax.lax.switch(number.astype(jnp.int32) % 3, bodies, result)
            case "fori":
                return jax.lax.fori_loop(0, 2, lambda _, r: body(r), result)
            case "scan":
                return jax.lax.scan(lambda r, _: (body(r), None), result, length=2)[0]
            case "while":
                return jax.lax.while_loop(
                    lambda c: c[0] < 2, lambda c: (c[0] + 1, body(c[1])), (0, result)
                )[1]
            case "jit":
                return jax.jit(body)(result)
            case "checkpoint":
                return jax.checkpoint(body)(result)
        return self.strategy.reduce("mean", self.strategy.run(body, (result,)))


# Programs: of a whole number, in float32, they make another one.


def small(on, value):
    return on.xp.clip(value, -8, 8)


def rows(on, x, count):
    """Values for so many rows."""
    values = x + on.xp.arange(count, dtype=np.float32)[:, None]
    return on.xp.broadcast_to(values, (count, 3))


def everything_read(on):
    parts = on.read("scalar"), on.read("vector").sum(), on.rows("shards", [8, 0]).sum()
    more = (on.read(name).astype(np.float32) for name in ("number", "flag"))
    last = on.read("half")[2].astype(np.float32), on.read("table")[1, 1]
    return sum((*parts, *more, *last)) + on.each_row("shards", [3, 4]).max()


def in_a_row(on, x):
    x = small(on, on.rows("table", [5, 1]).sum() - 4 + x)
    several = x + on.xp.arange(4, dtype=np.float32) % 3
    on.change("vector", "assign_add", several)
    on.change("half", "assign_sub", several)
    on.change("number", "assign", on.read("vector").sum())
    on.change("flag", "assign", x > 0)
    on.change("table", "assign_sub", x)
    on.part("vector", slice(1, 3), "assign_sub", x)
    on.part("vector", slice(0, 2), "assign", everything_read(on))
    for table, ids in ("shards", [0, 8, 4, 4]), ("table", [2, 7, 2]):
        for word in SCATTER:
            value = on.xp.clip(x, -1, 1) if word == "scatter_mul" else x
            on.scatter(table, word, ids, rows(on, value, len(ids)))
        on.scatter(table, "scatter_update", [2, 7], rows(on, x, 2))
        on.part(table, 3, "assign_add", x)
        on.part(table, 6, "assign", x)
    for name in ("scalar", "vector", "table"):
        on.update(name, lambda old, v: small(on, 2 * old + v), x)
    return everything_read(on) + on.gradient("table", [1, 1, 2], x)


def in_blocks(on, x):
    def adding(r):
        on.change("scalar", "assign_add", r)
        on.change("half", "assign_sub", 1.0)
        on.part("vector", slice(0, 2), "assign_add", r)
        on.scatter("table", "scatter_sub", [1, 6, 1], rows(on, r, 3))
        on.scatter("shards", "scatter_add", [8, 2], rows(on, r, 2))
        return small(on, 2 * r + everything_read(on))

    def assigning(r):
        on.change("scalar", "assign", r)
        on.change("flag", "assign", r > 0)
        return r - 1

    def choosing(r):
        return on.block("if", r, [adding, lambda r: -r], r)

    for kind in ("if", "switch"):
        x = on.block(kind, x, [adding, assigning, choosing], x)
    for kind in ("fori", "scan", "while", "jit", "checkpoint", "run"):
        body = choosing if kind in ("scan", "run") else adding
        x = small(on, on.block(kind, x, [body], x))
    return x + everything_read(on)


def in_three_shards(shape, dtype):
    if not shape:
        return []
    return [3 if shape[0] == 9 else 1, *(1 for _ in shape[1:])]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "program"), [(1, in_a_row), (2, in_blocks)])
def test_statements_do_on_workers_what_they_do_in_numpy(devices, program):
    strategy = js.ParameterServerStrategy(
        backend=Threads(1, 2, devices), variable_partitioner=in_three_shards
    )
    on, plain = OnWorkers(strategy), Plain()
    with js.coordinator.ClusterCoordinator(strategy) as coordinator:
        function = coordinator.function(lambda x: program(on, x))
        for x in np.float32([1, -2]):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", js.errors.WholeTableWarning)
                found = coordinator.schedule(function, (x,)).fetch()
            assert float(found) == float(program(plain, x))
            for name in START:
                np.testing.assert_array_equal(on.state[name].value(), plain.state[name])
