"""What a `PerReplica` says to who uses it as if it were one array."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each

import jaxstrategy as js

READ, GO_THROUGH, COMPUTE = (
    r"For one number or array of all replicas use `strategy.reduce\('mean', value\)`",
    "For each replica's version use `strategy.experimental_local_results",
    r"Compute inside the step, or in one of its own, `strategy.run\(lambda x: ",
)
USES = {
    "float": (float, READ),
    "int": (int, READ),
    "bool": (bool, READ),
    "if": (lambda x: 1 if x else 2, READ),
    "np.asarray": (np.asarray, READ),
    "format": (lambda x: f"{x:.3f}", READ),
    "len": (len, GO_THROUGH),
    "iter": (list, GO_THROUGH),
    "index": (lambda x: x[0], GO_THROUGH),
    "in": (lambda x: 1.0 in x, GO_THROUGH),
    "add": (lambda x: x + 1, COMPUTE),
    "from the right": (lambda x: 1 + x, COMPUTE),
    "with an array": (lambda x: x - np.ones(3), COMPUTE),
    "from an array": (lambda x: jnp.ones(3) / x, COMPUTE),
    "negative": (lambda x: -x, COMPUTE),
    "less": (lambda x: x < 1, COMPUTE),
    "equal": (lambda x: x == 1.0, COMPUTE),
    "not equal": (lambda x: x != np.ones(3), COMPUTE),
    "jnp": (jnp.sin, COMPUTE),
}


def test_uses_as_one_array_say_what_to_do(two):
    for _, (use, advice) in each(USES):
        with pytest.raises(TypeError, match=f"as if it were one array.*{advice}"):
            use(two.per_replica([1.0, 2.0]))


NAMES = {
    "mean": r"Use `strategy.reduce\('mean', value\)` over the replicas",
    "max": r"Use `strategy.reduce\('max', value\)` over the replicas",
    "item": READ,
    "numpy": READ,
    "reshape": COMPUTE,
    "at": COMPUTE,
    "ndim": COMPUTE,
}


def test_methods_of_arrays_say_what_to_do(two):
    for name, advice in each(NAMES):
        x = two.per_replica([1.0, 2.0])
        words = (
            f"A PerReplica has no `{name}`: it holds one version per replica. {advice}"
        )
        with pytest.raises(AttributeError, match=words):
            getattr(x, name)
        assert not hasattr(x, name)


def test_other_names_are_missing_as_anywhere(two):
    with pytest.raises(AttributeError, match="'PerReplica' object has no attribute 'z"):
        _ = two.per_replica([1.0, 2.0]).zebra


def test_what_any_object_can_do_it_can(two):
    x, y = two.per_replica([1.0, 2.0]), two.per_replica([1.0, 2.0])
    assert x == x and x != y and x != "text" and x != None  # noqa: E711
    assert x in [y, x] and {x: 1}[x] == 1
    assert repr(x) == "PerReplica(float32[] on cpu:0, cpu:1)"
    assert f"{x}" == str(x) == "PerReplica(float32[] on cpu:0, cpu:1: 1.0, 2.0)"
    assert copy.copy(x).stacked is x.stacked
    assert jax.block_until_ready(x).values == (1, 2)


def test_donated_values_say_so(two):
    x = two.per_replica([1.0, 2.0])
    step = two.run(lambda x: x + 1, options=js.RunOptions(donate_argnums=0))
    step(x)
    for use in (
        lambda: x.values,
        lambda: x.local(0),
        lambda: two.experimental_local_results(x),
        lambda: two.experimental_local_results({"x": x}),
        lambda: two.reduce("sum", x),
        lambda: two.gather(x),
        lambda: two.per_replica(x),
        lambda: two.run(lambda x: x, (x,)),
    ):
        with pytest.raises(
            js.errors.DonatedValueError, match="donated to an earlier call"
        ):
            use()
    assert repr(x) == "PerReplica(float32[], donated to an earlier call)"
