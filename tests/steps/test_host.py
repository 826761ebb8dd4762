"""`to_host`: what was on devices, as NumPy arrays."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js


def test_every_kind_of_leaf(two):
    with two.scope():
        w = js.Variable([1.0, 2.0])
        seen = js.Variable(3, synchronization="on_read", aggregation="sum")
        own = js.Variable(5, synchronization="on_read")
    two.run(lambda: seen.assign_add(1))
    same, word = np.ones(3), "relu"
    tree = {
        "mirrored": two.mirror(np.float32([1.5, 2.5])),
        "per replica": two.per_replica(np.arange(6).reshape(2, 3)),
        "single": jnp.ones((2, 2)),
        "variables": (w, seen, own),
        "numpy": same,
        "number": 4,
        "word": word,
        "none": None,
        "key": two.mirror(jax.random.key(7)),
    }
    have = js.to_host(tree)
    assert have["numpy"] is same and have["word"] is word
    assert have["number"] == 4 and have["none"] is None
    want = {
        "mirrored": np.float32([1.5, 2.5]),
        "per replica": np.arange(6).reshape(2, 3),
        "single": np.ones((2, 2)),
        "variables": (np.float32([1, 2]), 2 * (3 + 1), np.array([5, 5])),
        "key": np.array([0, 7], np.uint32),
    }
    for name, value in want.items():
        jax.tree.map(np.testing.assert_array_equal, have[name], value)
        assert {type(leaf) for leaf in jax.tree.leaves(have[name])} == {np.ndarray}


def test_structure_and_dtypes_are_kept(two):
    state = types.SimpleNamespace  # not a pytree: a leaf like any other
    tree = (two.mirror([jnp.ones(2, jnp.bfloat16)]), {"s": state})
    (have,), rest = js.to_host(tree)
    assert have.dtype == jnp.bfloat16 and rest == {"s": state}


def test_inside_a_step_it_is_refused(two):
    message = r"`to_host` was called on `tree\['x'\]` while a function is traced"
    with pytest.raises(js.errors.TracedValueError, match=message):
        two.run(lambda x: js.to_host({"x": x}), (1.0,))


def test_donated_arrays_are_refused(two):
    state = two.mirror({"w": np.ones(4, np.float32)})
    step = two.run(options=js.RunOptions(donate_argnums=0))(lambda s: {"w": s["w"] + 1})
    new = step(state)
    message = r"`tree\['w'\]` was donated to a step, so its memory is gone"
    with pytest.raises(js.errors.DonatedValueError, match=message):
        js.to_host(state)
    np.testing.assert_array_equal(js.to_host(new)["w"], np.full(4, 2.0))
