"""Random steps, written once for a replica under JAX and for all replicas in NumPy."""

import dataclasses
import functools
import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxstrategy as js

SIZE = 4
"""All values of a random step are matrices of so many rows and columns."""

GROUPS = {
    8: (None, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 7], [1, 6], [5, 2], [3, 4]]),
    4: (None, [[0, 1], [2, 3]], [[3, 0], [1, 2]]),
}
NUMPY = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max}


class OneReplica:
    """What a step does on a replica, in JAX."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def each(self, function, *values):
        number = js.get_replica_context().replica_id_in_sync_group
        return function(jnp, number, *values)

    def reduce(self, op, groups, value):
        return js.get_replica_context().all_reduce(op, value, groups=groups)

    def gather(self, axis, value):
        return js.get_replica_context().all_gather(value, axis)

    def repeat(self, turns, body, values):
        def turn(values, _):
            return body(self, list(values)), None

        return jax.lax.scan(turn, list(values), None, length=turns)[0]

    def branch(self, value, yes, no, values):
        positive = self.reduce("mean", None, value.sum()) > 0
        return jax.lax.cond(
            positive,
            functools.partial(yes, self),
            functools.partial(no, self),
            list(values),
        )

    def drawn(self, seed):
        key = js.get_replica_context().fold_in(jax.random.key(seed))
        return jax.random.bernoulli(key, 0.5, (SIZE, SIZE)).astype(jnp.float32)


class AllReplicas:
    """The same for all replicas, one after the other, in float64: arrays [N, ...]."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def each(self, function, *values):
        rows = range(self.replicas)
        return np.stack([function(np, i, *(v[i] for v in values)) for i in rows])

    def reduce(self, op, groups, value):
        result = np.empty_like(value)
        for group in groups or [list(range(self.replicas))]:
            result[group] = NUMPY[op](value[group], axis=0)
        return result

    def gather(self, axis, value):
        joined = np.concatenate(list(value), axis=axis)
        return np.stack([joined] * self.replicas)

    def repeat(self, turns, body, values):
        for _ in range(turns):
            values = body(self, list(values))
        return values

    def branch(self, value, yes, no, values):
        mean = value.sum((1, 2)).mean()
        assert abs(mean) > 1e-4, "rounding decides: take another seed"
        return (yes if mean > 0 else no)(self, list(values))

    def drawn(self, seed):
        keys = [
            jax.random.fold_in(jax.random.key(seed), i) for i in range(self.replicas)
        ]
        return np.stack(
            [
                np.asarray(jax.random.bernoulli(k, 0.5, (SIZE, SIZE)), float)
                for k in keys
            ]
        )


def local(draw: random.Random) -> Callable[..., np.ndarray | jax.Array]:
    """Work of each replica alone: two matrices and its number make a matrix."""
    shift = draw.randrange(SIZE)
    turn = draw.choice([1, 3])
    axis = draw.randrange(2)

    def scatter(xp, i, a, b):
        rows = (xp.arange(2) + i * turn + shift) % SIZE
        if xp is np:
            a = a.copy()
            np.add.at(a, rows, b[:2])
            return np.tanh(a)
        return jnp.tanh(a.at[rows].add(b[:2]))

    return draw.choice(
        [
            lambda xp, i, a, b: xp.tanh(a @ b),
            lambda xp, i, a, b: xp.tanh(a + b) * (i + 1) / 4,
            lambda xp, i, a, b: a + 0 * b + xp.tanh(b.sum(axis, keepdims=True)),
            lambda xp, i, a, b: (
                a[(xp.arange(SIZE) * turn + i + shift) % SIZE] * 0.5 + b
            ),
            lambda xp, i, a, b: xp.where(a > b, a, b.T),
            lambda xp, i, a, b: xp.tanh(xp.cumsum(a, axis)) - b,
            lambda xp, i, a, b: xp.sort(a, axis) - xp.max(b),
            lambda xp, i, a, b: xp.linalg.norm(a) / 8 + b,
            lambda xp, i, a, b: xp.einsum("ij,kj->ik", a, b) / SIZE,
            lambda xp, i, a, b: xp.concatenate([a[1:], b[:1]])[::-1],
            scatter,
        ]
    )


def instruction(draw: random.Random, replicas: int, depth: int = 0):
    """One change of the list of values: a function of where it is done, and of them."""
    into, first, second = (draw.randrange(3) for _ in range(3))
    op = draw.choice(["sum", "mean", "min", "max"])
    groups = draw.choice(GROUPS[replicas])
    function, part, axis = local(draw), draw.randrange(replicas), draw.randrange(2)
    seed, turns = draw.randrange(100), draw.randrange(1, 4)
    kinds = ["local"] * 4 + ["reduce"] * 3 + ["gather", "drawn", "many"]
    kind = draw.choice(kinds + (["repeat", "branch"] * 2 if depth < 2 else []))
    inner = [
        steps(draw, replicas, draw.randrange(1, 4), depth + 1)
        for _ in range(2 if kind in ("repeat", "branch") else 0)
    ]

    def made(on, values):
        if kind == "local":
            return on.each(function, values[first], values[second])
        if kind == "reduce":
            less = on.each(lambda xp, i, a: xp.tanh(a) / 2, values[first])
            return on.reduce(op, groups, less)
        if kind == "gather":
            joined = on.gather(axis, values[first])
            at = (slice(SIZE * part, SIZE * (part + 1)), slice(None))
            return on.each(lambda xp, i, a: a[at if axis == 0 else at[::-1]], joined)
        if kind == "drawn":
            return on.each(lambda xp, i, a, b: a * b, on.drawn(seed), values[first])
        one = on.reduce("mean", None, on.each(lambda xp, i, a: a[0], values[first]))
        two = on.reduce(op, groups, on.each(lambda xp, i, a: a[:, :1], values[second]))
        return on.each(lambda xp, i, a, b: xp.tanh(a[None] + b), one, two)

    def change(on, values):
        if kind == "repeat":
            return on.repeat(turns, inner[0], values)
        if kind == "branch":
            return on.branch(values[first], inner[0], inner[1], values)
        values = list(values)
        values[into] = made(on, values)
        return values

    return change


def steps(draw: random.Random, replicas: int, length: int, depth: int = 0):
    changes = [instruction(draw, replicas, depth) for _ in range(length)]

    def all_of_them(on, values):
        for change in changes:
            values = [
                on.each(lambda xp, i, a: xp.tanh(a), v) if depth == 0 else v
                for v in change(on, values)
            ]
        return values

    return all_of_them


@dataclasses.dataclass(frozen=True)
class RandomStep:
    """State and rows in, state and values out, by the number of a program."""

    seed: int
    replicas: int

    @functools.cached_property
    def body(self):
        return steps(random.Random(self.seed), self.replicas, 6)

    def drawn(self, *shape, of=0):
        draw = np.random.default_rng((self.seed, of))
        return draw.normal(size=shape).astype(np.float32)

    @property
    def state(self):
        return self.drawn(SIZE, SIZE, of=1)

    @property
    def captured(self):
        return self.drawn(SIZE, SIZE, of=2)

    @property
    def rows(self):
        return self.drawn(self.replicas, SIZE, SIZE, of=3)

    def __call__(self, on, state, rows, captured):
        values = self.body(on, [state, rows, captured])
        new = on.reduce("mean", None, on.each(lambda xp, i, a: xp.tanh(a), values[0]))
        return on.each(lambda xp, i, a, b: a / 2 + b, state, new), values

    def in_numpy(self, calls):
        """What `calls` calls return: the last state, values, and two variables."""
        on, n = AllReplicas(self.replicas), self.replicas
        state, captured = (
            np.stack([a.astype(float)] * n) for a in (self.state, self.captured)
        )
        mirrored, each = np.zeros((SIZE, SIZE)), np.zeros((n, SIZE, SIZE))
        for _ in range(calls):
            state, values = self(on, state, self.rows.astype(float), captured)
            mirrored += values[1].mean(0)
            each += values[2]
        return state[0], values, mirrored, each.sum(0), each

    def under(self, strategy, calls, donate=False):
        """The same of a strategy, and how often it traced the step."""
        traces = []
        captured, on = strategy.mirror(self.captured), OneReplica(self.replicas)
        with strategy.scope():
            mirrored = js.Variable(
                np.zeros((SIZE, SIZE), np.float32), aggregation="mean"
            )
            each = js.Variable(
                np.zeros((SIZE, SIZE), np.float32),
                synchronization="on_read",
                aggregation="sum",
            )

        def step(state, rows):
            traces.append(0)
            state, values = self(on, state, rows, captured)
            mirrored.assign_add(values[1])
            each.assign_add(values[2])
            return state, values

        options = js.RunOptions(
            donate_argnums=0 if donate else (), expect_mirrored=False
        )
        step = strategy.step(step, options=options)
        state = strategy.init(lambda: jnp.asarray(self.state))
        for _ in range(calls):
            state, values = step(state, strategy.per_replica(list(self.rows)))
        copies = [
            np.stack(strategy.experimental_local_results(v)) for v in (*values, each)
        ]
        return (
            np.asarray(state),
            copies[:-1],
            np.asarray(mirrored),
            np.asarray(each),
            copies[-1],
        ), len(traces)
