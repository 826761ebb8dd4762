"""Random functions of server variables, once for a worker and once in plain NumPy."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np

import jaxstrategy as js

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

WORDS = ("assign", "assign_add", "assign_sub")
TABLES = ("table", "shards")
BLOCKS = ("if", "switch", "fori", "scan", "while", "jit", "checkpoint", "run")
_SCATTER = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_max": np.maximum.at,
    "scatter_min": np.minimum.at,
    "scatter_mul": np.multiply.at,
}


def random_expression(draw, depth=2):
    """What makes a small whole number of the variables: a tuple."""
    kinds = ["constant", "argument", "scalar", "sum", "item", "rows", "number"]
    kinds += ["flag", "half", "result", "gradient", "each row", "whole"]
    kind = draw.choice(kinds + ["plus", "times"] * (depth > 0))
    if kind in ("plus", "times"):
        below = [random_expression(draw, depth - 1) for _ in range(2)]
        return (kind, *below)
    table, ids = draw.choice(TABLES), random_ids(draw)
    return (kind, draw.randrange(4), table, ids)


def random_ids(draw):
    return [draw.randrange(8) for _ in range(draw.choice([1, 2, 3]))]


def random_statements(draw, depth=2, count=None, in_block=False):
    """A list of changes of variables, and of blocks of them."""
    made = []
    for _ in range(count or draw.choice([1, 2, 3])):
        e = random_expression(draw)
        if depth and draw.random() < 0.35:
            kind = draw.choice(BLOCKS[:-1] if in_block or depth < 2 else BLOCKS)
            inner = in_block or kind not in ("jit", "run")
            bodies = [random_statements(draw, depth - 1, None, inner) for _ in "abc"]
            made.append((kind, e, draw.choice([0, 1, 2, 3]), bodies))
            continue
        word = draw.choice(WORDS)
        table = draw.choice(TABLES)
        if in_block:
            added = draw.choice(["scatter_add", "scatter_sub"])
            made.append(
                draw.choice(
                    [
                        ("change", draw.choice([*START]), word, e),
                        ("part", draw.randrange(3), draw.choice(WORDS[1:]), e),
                        ("rows", table, added, random_ids(draw), e),
                        ("result", e),
                    ]
                )
            )
            if made[-1][1] == "flag":
                made[-1] = ("change", "flag", "assign", e)
            continue
        made.append(
            draw.choice(
                [
                    ("change", draw.choice(["scalar", "vector", "half"]), word, e),
                    ("change", "number", word, e),
                    ("change", draw.choice(TABLES), word, e),
                    ("change", "flag", "assign", e),
                    ("part", draw.randrange(3), word, e),
                    ("row part", table, draw.randrange(8), word, e),
                    ("update", draw.choice(["scalar", "vector", "table"]), e),
                    ("rows", table, draw.choice([*_SCATTER]), random_ids(draw), e),
                    ("set rows", table, sorted(set(random_ids(draw))), e),
                    ("rows", table, draw.choice([*_SCATTER]), random_ids(draw), e),
                    ("result", e),
                ]
            )
        )
    return made


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
            _SCATTER[word](new, np.array(ids), values)
        self.state[name] = new

    def block(self, kind, number, turns, bodies, result):
        if kind == "if":
            return bodies[0](result) if number > 0 else bodies[1](result)
        if kind == "switch":
            return bodies[int(number) % 3](result)
        if kind in ("fori", "scan", "while"):
            for _ in range(turns):
                result = bodies[0](result)
            return result
        return bodies[0](result)


class OnWorkers(Plain):
    """The same on variables of parameter servers, in a scheduled function."""

    xp = jnp

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.state = {k: js.Variable(v, name=k) for k, v in START.items()}

    def begin(self):
        for name, value in START.items():
            self.state[name].assign(value)

    def read(self, name):
        return self.state[name].value()

    def rows(self, name, ids):
        return js.experimental.embedding_lookup(self.state[name], jnp.array(ids))

    def gradient(self, table, ids, factor):
        def loss():
            return (factor * self.rows(table, ids)).sum()

        found = js.grad(loss, self.state[table])()
        return found.values.sum()

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

    def block(self, kind, number, turns, bodies, result):
        if kind == "if":
            return jax.lax.cond(number > 0, *bodies[:2], result)
        if kind == "switch":
            return jax.lax.switch(number.astype(jnp.int32) % 3, bodies, result)
        if kind == "fori":
            return jax.lax.fori_loop(0, turns, lambda _, r: bodies[0](r), result)
        if kind == "scan":
            step = lambda r, _: (bodies[0](r), None)  # noqa: E731
            return jax.lax.scan(step, result, None, length=turns)[0]
        if kind == "while":
            end = lambda c: c[0] < turns  # noqa: E731
            turn = lambda c: (c[0] + 1, bodies[0](c[1]))  # noqa: E731
            return jax.lax.while_loop(end, turn, (0, result))[1]
        if kind == "jit":
            return jax.jit(bodies[0])(result)
        if kind == "checkpoint":
            return jax.checkpoint(bodies[0])(result)
        return self.strategy.reduce("mean", self.strategy.run(bodies[0], (result,)))


def number_of(on, e, argument, result):
    """The value of an expression: a whole float32 from -8 to 8."""
    return on.xp.clip(_number_of(on, e, argument, result), -8, 8)


def _number_of(on, e, argument, result):
    kind = e[0]
    if kind in ("plus", "times"):
        a, b = (number_of(on, each, argument, result) for each in e[1:])
        return a + b if kind == "plus" else a * b
    _, i, table, ids = e
    match kind:
        case "constant":
            return on.xp.float32(i - 1)
        case "argument":
            return argument
        case "scalar":
            return on.read("scalar")
        case "sum":
            return on.read("vector").sum()
        case "item":
            return on.read("vector")[i]
        case "rows":
            return on.rows(table, ids).sum() - 4
        case "number" | "flag":
            return on.read(kind).astype(np.float32)
        case "half":
            return on.read(kind)[i].astype(np.float32)
        case "result":
            return result
        case "gradient":
            return on.gradient(table, ids, on.xp.float32(i - 1))
        case "each row":
            return on.each_row(table, ids).max()
        case "whole":
            return on.read(table)[i, 1]
    raise AssertionError(kind)


def run(on, statements, argument, result):
    """Carries out statements; returns a number that depends on what was read."""
    for statement in statements:
        if statement[0] in BLOCKS:
            kind, e, turns, bodies = statement
            number = number_of(on, e, argument, result)
            result = on.block(
                kind,
                number,
                turns,
                [functools.partial(run, on, body, argument) for body in bodies],
                result,
            )
            continue
        x = number_of(on, statement[-1], argument, result)
        match statement:
            case "change", name, word, _:
                shape = START[name].shape
                more = on.xp.arange(shape[-1] if shape else 1, dtype=np.float32) % 3
                value = x + more if shape else x
                if name == "flag":
                    value = x > 0
                on.change(name, word, value)
            case "part", i, word, _:
                on.part("vector", slice(i, i + 2), word, x)
            case "row part", table, row, word, _:
                on.part(table, row, word, x)
            case "update", name, _:
                on.update(name, lambda old, v: on.xp.clip(2 * old + v, -8, 8), x)
            case "rows", table, word, ids, _:
                x = on.xp.clip(x, -1, 1) if word == "scatter_mul" else x
                values = x + on.xp.arange(len(ids), dtype=np.float32)[:, None]
                on.scatter(table, word, ids, on.xp.broadcast_to(values, (len(ids), 3)))
            case "set rows", table, ids, _:
                values = x + on.xp.arange(len(ids), dtype=np.float32)[:, None]
                values = on.xp.broadcast_to(values, (len(ids), 3))
                on.scatter(table, "scatter_update", ids, values)
            case "result", _:
                result = on.xp.clip(2 * result + x, -64, 64)
    return result


def random_function(seed):
    draw = random.Random(seed)
    return random_statements(draw, 2, draw.choice([2, 4, 6]))
