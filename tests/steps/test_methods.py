"""Methods as steps, whose object is changed between the calls; the oracle is Python."""

import gc
import queue
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js


class Trainer:
    def __init__(self):
        self.rate, self.weight, self.count = 1.0, jnp.float32(2.0), 0
        self.traces = queue.SimpleQueue()  # a list would be something it captures

    def step(self, x):
        self.traces.put(1)
        return x * self.weight + self.scaled(x)

    def scaled(self, x):
        return [x * self.doubled for _ in range(1)][0]

    @property
    def doubled(self):
        return 2 * self.rate


def changes():
    yield lambda trainer: None
    yield lambda trainer: setattr(trainer, "weight", jnp.float32(3.0))
    yield lambda trainer: setattr(trainer, "weight", np.float32(4.0))
    yield lambda trainer: setattr(trainer, "rate", 5.0)


def test_a_method_sees_what_its_object_has_now_and_what_changes_is_told(two):
    trainer = Trainer()
    told = r"compiled for the 3rd time.*`captured self\.weight` changed"
    with pytest.warns(js.errors.RecompilationWarning, match=told):
        for change in changes():
            change(trainer)
            got = two.run(trainer.step, (10.0,))
            assert got == 10 * float(trainer.weight) + 10 * 2 * trainer.rate


def test_attributes_that_a_method_does_not_read_compile_nothing(two):
    trainer = Trainer()
    for _ in range(4):
        two.run(trainer.step, (1.0,))
        trainer.count += 1
    assert trainer.traces.qsize() == 1


def test_an_object_that_refers_to_itself_is_not_kept(two):
    class Model:
        itself: Any = None
        rate = 0.0

        def step(self, x):
            return self.itself.rate * x

    model = Model()
    model.itself, model.rate = model, 2.0
    assert two.run(model.step, (1.0,)) == 2.0
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_callable_object_whose_attribute_has_changed_is_not_stale(two):
    class Scaled:
        def __init__(self):
            self.rate = 2.0

        def __call__(self, x):
            return x * self.rate

    scaled = Scaled()
    step = two.run(scaled)
    assert float(step(3.0)) == 6
    scaled.rate = 5.0
    assert float(step(3.0)) == 15
