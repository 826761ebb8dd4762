"""What is no array comes back from `run`, `merge_call` and `update` as itself."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each, each_of
from helpers.variables import variable

import jaxstrategy as js


@dataclasses.dataclass
class Config:
    rate: float
    inner: object = None


class Slotted:
    __slots__ = ("empty", "held")

    def __init__(self, held):
        self.held = held


@each_of(
    "where, kind",
    zip(["run", "merge_call", "update", "again"], ["auto", "on_read"] * 2, strict=True),
)
def test_a_variable_comes_back_as_itself(two, kind, where):
    v = variable(two, 1.0, kind, aggregation="sum")

    def give(*_):
        return v, {"v": [v, None]}

    def step(x):
        if where == "merge_call":
            return js.get_replica_context().merge_call(give, (x,))
        return give()

    if where == "update":
        returned = two.extended.update(v, give)
    else:
        compiled = two.run(step) if where == "again" else None
        x = two.per_replica(np.float32([1, 2]))
        returned = compiled(x) if compiled else two.run(step, (x,))
        if compiled:
            assert compiled(x)[0] is v
    assert returned[0] is v and returned[1]["v"][0] is v


def test_an_ordinary_variable_and_an_argument_come_back(two):
    v, w = js.Variable(1.0), variable(two, 2.0)
    assert two.run(lambda w: (v, w), (w,)) == (v, w)
    assert js.get_strategy().run(lambda: v) is v


def test_a_step_keeps_no_variable_alive_that_it_returned(two):
    model = {"v": variable(two, 1.0)}

    @two.run
    def step(x):
        return model["v"], x

    first = weakref.ref(model["v"])
    assert step(1.0)[0] is model["v"]
    model["v"] = variable(two, 2.0)
    gc.collect()
    assert first() is None
    assert step(1.0)[0] is model["v"]  # the new one


def test_objects_come_back_as_they_are(two):
    objects = [
        Config(0.1),
        Slotted("text"),
        {1, 2},
        frozenset("ab"),
        object(),
        np.dtype("int8"),
        Config,
        len,
        functools.partial(max, 3),
        (lambda x: x).__get__(3),
        jax.sharding.PartitionSpec("a"),
        two,
    ]

    def step(x):
        return tuple(objects), {"x": x, "objects": objects}

    for strategy in (two, js.MirroredStrategy(jax.devices()[:1])):
        out, more = strategy.run(step, (1.0,))
        assert all(a is b for a, b in zip(out, objects, strict=True))
        assert more["x"] == 1.0 and more["objects"][0] is objects[0]

    def merge(strategy, x):
        return objects[0], x

    def merged(x):
        return js.get_replica_context().merge_call(merge, (x,))

    assert two.run(merged, (1.0,))[0] is objects[0]
    assert two.extended.update(variable(two, 1.0), lambda v: objects[0]) is objects[0]
    on_read = variable(two, 1.0, "on_read", aggregation="sum")
    assert two.extended.update(on_read, lambda v: objects[1]) is objects[1]


def test_an_object_of_arrays_that_were_there_before_comes_back(two):
    config = Config(0.1, [np.ones(3), jnp.ones(3)])
    assert two.run(lambda: config) is config


HIDING = {
    "attribute": (lambda x: Config(x), r"\.rate"),
    "deep": (lambda x: Config(1.0, [Config(2.0, {"k": (x,)})]), r"\['k'\]\[0\]"),
    "slot": (lambda x: Slotted([x]), r"\.held\[0\]"),
    "function": (lambda x: lambda: x, r"captured as 'x'"),
    "default": (lambda x: lambda y=x: y, r"__defaults__\[0\]"),
    "partial": (lambda x: functools.partial(max, x), r"\.args\[0\]"),
    "method": (lambda x: Config(x).__eq__, r"__self__\.rate"),
}


def test_an_object_that_hides_an_array_of_the_step_is_refused(two):
    for how in each(list(HIDING)):
        make, path = HIDING[how]

        def step(x, make=make):
            return {"a": make(x)}

        words = (
            r"`step\(...\)\['a'\]` is .*holds an array of the step as `step.*" + path
        )
        with pytest.raises(TypeError, match=words):
            two.run(step, (1.0,))
