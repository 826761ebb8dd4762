"""Nested steps that capture an object: of its attributes those count that they can use.

TensorFlow's and Keras' style is a class whose `train_step` defines the step. The oracle
is plain Python.
"""

import queue
import types

import numpy as np
import optax
import pytest
from flax import nnx
from helpers.cases import each_of

import jaxstrategy as js

CALLS = 4
TRACES = queue.SimpleQueue()


@pytest.fixture(autouse=True)
def no_traces():
    while TRACES.qsize():
        TRACES.get()


class Config:
    def __init__(self, scale):
        self.scale = scale
        self.unused = 0


class Trainer:
    seen = 0

    def __init__(self, strategy):
        self.strategy = strategy
        self.model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.01), wrt=nnx.Param)
        self.config = Config(2.0)
        self.count = 0
        self.history = []

    def loss_of(self, model, x):
        return (model(x) ** 2).mean() * self.config.scale

    def train_step(self, inputs):
        def step_fn(x):
            TRACES.put(1)
            loss, grads = nnx.value_and_grad(self.loss_of)(self.model, x)
            mean = js.get_replica_context().all_reduce
            self.optimizer.update(self.model, mean("mean", grads))
            return mean("mean", loss)

        loss = self.strategy.run(step_fn, args=(inputs,))
        self.count += 1
        self.config.unused += 1
        type(self).seen += 1
        self.history.append(float(loss))
        return loss


def test_a_trainer_is_compiled_once_for_each_value_it_uses(two):
    scales = [2.0, 2.0, 3.0, 2.0]
    trainer = Trainer(two)
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
    for i, scale in enumerate(scales):
        x = np.arange(8, dtype=np.float32).reshape(2, 2, 2) / 8 + i

        def loss_of(model, x, scale=scale):
            return (model(x) ** 2).mean() * scale

        trainer.config.scale = scale
        have = trainer.train_step(two.per_replica(list(x)))
        want, grads = nnx.value_and_grad(loss_of)(model, x.reshape(4, 2))
        optimizer.update(model, grads)
        np.testing.assert_allclose(have, want, rtol=1e-4)
    assert TRACES.qsize() == len(set(scales)) and trainer.count == len(scales)
    np.testing.assert_allclose(trainer.model.kernel[...], model.kernel[...], rtol=1e-4)


# An attribute that is used in whatever way is never stale.


class Box:
    def __init__(self, k):
        self.k = k

    @property
    def doubled(self):
        return self.k * 2

    def method(self, x):
        return x * self.k


def read(box):
    return box.k


def through_an_attribute(box):
    holding = types.SimpleNamespace(box=box)
    return lambda x: x * vars(holding.box)["k"]


def through_a_container(box):
    boxes = [box]
    return lambda x: x * read(boxes[0])


def through_a_match(box):
    def step(x):
        match box:
            case Box(k=k):
                return x * k

    return step


WAYS = [
    through_an_attribute,
    through_a_container,
    through_a_match,
    lambda box: lambda x: x * box.__dict__["k"],
    lambda box: lambda x: x * getattr(box, "".join(["k"])),
    lambda box: lambda x: box.method(x),
    lambda box: lambda x: x * box.doubled / 2,
]


@pytest.mark.slow
@each_of("way", WAYS)
def test_what_is_used_is_never_stale(two, way):
    box = Box(2)
    for k in (2, 3, 2, 4):
        box.k = k
        assert float(two.run(way(box), (5.0,))) == 5 * k


class Slots:
    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k


class Computed:
    def __init__(self, k):
        self.hidden = k

    def __getattr__(self, name):
        return self.__dict__["hidden"]


@each_of("make", [Slots, Computed])
def test_objects_of_all_kinds_are_never_stale(two, make):
    for k in (2, 3, 2):
        value = make(k)
        assert float(two.run(lambda x: x * value.k, (5.0,))) == 5 * k  # noqa: B023


def test_an_attribute_that_is_added_or_taken_away_is_noticed(two):
    class Settings:
        k = 2

    settings = Settings()

    def nested():
        return lambda x: x * settings.k

    assert float(two.run(nested(), (5.0,))) == 10
    settings.k = 3
    assert float(two.run(nested(), (5.0,))) == 15
    del settings.k
    assert float(two.run(nested(), (5.0,))) == 10
    Settings.k = 4
    assert float(two.run(nested(), (5.0,))) == 20


def test_what_is_not_used_compiles_nothing(two):
    box = Box(2)

    def nested():
        def step(x):
            TRACES.put(1)
            return x * box.k

        return step

    for i in range(CALLS):
        box.count, box.other = [i], Box(i)
        assert float(two.run(nested(), (5.0,))) == 10
    assert TRACES.qsize() == 1
