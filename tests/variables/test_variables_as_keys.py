"""Steps that capture dicts whose keys are variables, as optimizers keep their slots."""

import types

import numpy as np
from helpers.cases import each_of

import jaxstrategy as js

KEYS = {
    "variable": lambda v: v,
    "tuple": lambda v: (v, "slot"),
    "reference": lambda v: v.ref(),
}


@each_of("key_of", KEYS.values())
@each_of("is_view", [False, True])
def test_a_step_may_capture_them(two, key_of, is_view):
    with two.scope():
        v, slot = js.Variable(1.0, aggregation="sum"), js.Variable(2.0)
    slots = {key_of(v): slot}
    slots = types.MappingProxyType(slots) if is_view else slots

    def step(x):
        v.assign_add(slots[key_of(v)] * x)

    for expected in (1 + 2 * 2 * 3, 1 + 2 * 2 * 2 * 3):
        two.run(step, (np.float32(3),))
        assert float(v) == expected


@each_of("key_of", KEYS.values())
def test_a_step_may_make_them(two, key_of):
    with two.scope():
        v = js.Variable(1.0)
    slots = {}

    def step():
        if not slots:
            slots[key_of(v)] = js.Variable(2.0)
        return slots[key_of(v)].assign_add(1.0)

    assert [float(two.run(step)) for _ in range(2)] == [3, 4]


def test_a_call_does_not_read_them(two, monkeypatch):
    with two.scope():
        v = js.Variable(1.0)
    slots = {v: 2.0}
    step = two.step(lambda x: x * slots[v])
    step(np.float32(1))

    def read(self):
        raise AssertionError("it was read")

    monkeypatch.setattr(js.Variable, "__repr__", read)
    assert float(step(np.float32(3))) == 6
