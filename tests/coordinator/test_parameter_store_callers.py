"""Callers of a parameter server: what they have told JAX, or no JAX at all."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.updates import exported

from jaxstrategy.parameter_servers._operations import Read, ServerOperation
from jaxstrategy.parameter_servers.store._store import Store

KIND = ((4, 2), np.float32)
ONES = np.ones(*KIND)


def operation(name, *operands, variables=(0,), program=""):
    return ServerOperation(name, variables, tuple(operands), program)


def all_operations(first=1.0):
    """What a table and an updated variable hold after one operation of each sort."""
    found = Store()
    found.create(0, ONES, is_table=True)
    found.create(1, ONES)
    found.define("add", exported(lambda a, x: a + x, KIND, KIND))
    rows = np.array([1, 1])
    found.push(
        [
            operation("add", ONES * first),
            operation("scatter_add", rows, ONES[:2]),
            operation("scatter_div", rows, ONES[:2]),
            operation("update", ONES, variables=(1,), program="add"),
        ]
    )
    table, updated, row = found.read([Read(0), Read(1), Read(0, np.array([1]))])
    assert all(type(value) is np.ndarray for value in (table, updated, row))
    np.testing.assert_array_equal(updated, 2 * ONES)
    np.testing.assert_array_equal(row, table[1:2])
    return table


def test_while_a_function_is_traced():
    def step(x):
        return x * all_operations()[1, 0]

    assert jax.jit(step)(1.0) == 4
    assert jax.grad(step)(1.0) == 4
    assert (jax.vmap(step)(jnp.ones(2)) == 4).all()


@pytest.mark.parametrize(
    "choice",
    [
        lambda: jax.disable_jit(),
        lambda: jax.enable_x64(True),
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.default_device(jax.devices()[3]),
        lambda: jax.checking_leaks(),
        lambda: jax.debug_infs(True),
    ],
    ids=["no-jit", "x64", "guard", "strict", "device", "leaks", "infs"],
)
def test_whatever_jax_was_told(choice):
    with choice():
        table = all_operations()
    np.testing.assert_array_equal(table, [[2, 2], [4, 4], [2, 2], [2, 2]])


def test_a_nan_is_kept_and_no_error():
    # JAX would raise when the table's memory has been given away.
    with jax.debug_nans(True):
        assert np.isnan(all_operations(np.nan)).all()


def test_64_bits_are_kept():
    big = np.array([[2**40, 1], [3, 2**50]])
    found = Store()
    found.create(0, big, is_table=True)
    assert not jax.config.jax_enable_x64
    found.push([operation("add", big)])
    found.push([operation("scatter_sub", np.array([0]), big[:1])])
    (value,) = found.read([Read(0)])
    assert value.dtype == np.int64
    np.testing.assert_array_equal(value, [[2**40, 1], [6, 2**51]])


def test_servers_without_tables_need_no_jax():
    code = """
import sys, types
import numpy as np

package = types.ModuleType("jaxstrategy")  # whose `__init__` imports JAX
package.__path__ = [sys.argv[1]]
sys.modules["jaxstrategy"] = package
from jaxstrategy.parameter_servers._operations import Read, ServerOperation
from jaxstrategy.parameter_servers.store._store import Store

found = Store()
found.create(0, np.ones(3, np.float32))
found.push([ServerOperation("add", (0,), (np.ones(3, np.float32),))])
assert (found.read([Read(0)])[0] == 2).all()
assert "jax" not in sys.modules and "jaxlib" not in sys.modules
"""
    import jaxstrategy

    subprocess.run([sys.executable, "-c", code, jaxstrategy.__path__[0]], check=True)


def test_a_job_whose_jax_has_no_cpu(monkeypatch):
    def none(backend):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", none)
    found = Store()
    found.create(0, ONES)
    with pytest.raises(RuntimeError, match="on a CPU, which JAX_PLATFORMS=cpu leaves"):
        found.create(1, ONES, is_table=True)
