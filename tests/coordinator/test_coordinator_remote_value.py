"""What a scheduled function will return: when it is there, in which form; errors."""

import threading

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxstrategy.coordinator._remote_value import RemoteValue, RemoteValueStatus


def ready(structure, seen=None):
    value = RemoteValue("f", seen)
    value.set_results(lambda: structure)
    return value


def test_fetch_gives_numpy_in_the_structure_and_leaves_the_rest():
    arrays = {"w": np.ones((2, 3)), "n": np.array(3, np.int32), "none": None}
    structure = (arrays, [np.array(2.5, np.float32), "text", b"bytes", True], ())
    fetched = ready(structure).fetch()
    first, (number, text, blob, flag), empty = fetched
    np.testing.assert_array_equal(first["w"], np.ones((2, 3)))
    assert type(first["n"]) is np.int32 and first["n"] == 3 and first["none"] is None
    assert type(number) is np.float32 and number == 2.5
    assert (text, blob, flag, empty) == ("text", b"bytes", True, ())


def test_get_gives_the_same_arrays_of_jax_each_time():
    value = ready({"w": np.arange(3, dtype=np.float32), "s": "text", "none": None})
    got = value.get()
    assert isinstance(got["w"], jax.Array) and got["w"].dtype == np.float32
    np.testing.assert_array_equal(got["w"], [0, 1, 2])
    assert got["s"] == "text" and got["none"] is None
    assert value.get() is got


def test_a_scalar_of_any_dtype_keeps_it():
    value = ready(np.array(1.5, ml_dtypes.bfloat16))
    assert value.fetch().dtype == ml_dtypes.bfloat16
    assert value.get().dtype == ml_dtypes.bfloat16 and value.get() == 1.5


def test_what_was_fetched_cannot_be_changed_under_others():
    value = ready(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="read-only"):
        value.fetch()[0] = 1
    np.testing.assert_array_equal(value.get(), [0, 0])


def test_nothing_is_something_that_a_function_may_return():
    value = ready(None)
    assert value.fetch() is None and value.get() is None
    assert value.status is RemoteValueStatus.READY


def test_the_status_follows_the_function():
    value = RemoteValue("train.<locals>.step")
    assert value.status is RemoteValueStatus.NOT_READY
    assert repr(value) == "<RemoteValue of train.<locals>.step: NOT_READY>"
    value.set_results(lambda: np.zeros(()))
    assert value.status is RemoteValueStatus.READY
    value.set_error(ValueError("too late"))
    assert value.status is RemoteValueStatus.READY and value.fetch() == 0


def test_an_error_stays_the_same_object_for_ever():
    value, error = RemoteValue("f"), ValueError("no")
    value.set_error(error)
    assert value.status is RemoteValueStatus.ABORTED
    depths = set()
    for call in (value.fetch, value.get, value.fetch, value.fetch):
        with pytest.raises(ValueError, match="no") as raised:
            call()
        assert raised.value is error
        depths.add(len(raised.traceback))
    assert max(depths) <= 3  # the traceback of one object does not grow
    value.set_results(lambda: 1)
    assert value.status is RemoteValueStatus.ABORTED


@pytest.mark.parametrize("call", ["fetch", "get"])
def test_who_asks_early_waits_for_its_own_function_only(call):
    value, other, found = RemoteValue("f"), RemoteValue("g"), []
    thread = threading.Thread(target=lambda: found.append(getattr(value, call)()))
    thread.start()
    other.set_results(lambda: np.zeros(()))
    thread.join(0.05)
    assert thread.is_alive() and not found
    value.set_results(lambda: np.array([4]))
    thread.join(20)
    np.testing.assert_array_equal(found, [[4]])


def test_results_are_built_once_and_when_they_are_asked_for():
    calls, seconds = [], []
    value = RemoteValue("f", seconds.append)
    value.set_results(lambda: calls.append(1) or np.ones(2))
    assert not calls and not seconds
    value.fetch(), value.get(), value.fetch()
    assert calls == [1] and len(seconds) == 1 and seconds[0] >= 0
