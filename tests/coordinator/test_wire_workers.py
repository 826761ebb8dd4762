"""A worker in another process is the same as one here."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from helpers.peers import PlainWorker, remote_worker

import jaxstrategy as js
from jaxstrategy.parameter_servers._element_changed import ElementChanged
from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation
from jaxstrategy.parameter_servers._shipped_program import (
    Call,
    Input,
    ShippedProgram,
)

# What the fields mean is nothing to the wire.
FIELDS = [field.name for field in dataclasses.fields(ShippedProgram)]
PROGRAM = ShippedProgram(
    **{name: (name, Input("element", 0, 1, 2), None) for name in FIELDS}
    | {"key": "k1", "main": b"\0main" * 20_000}
)


@pytest.fixture
def plain():
    return PlainWorker()


@pytest.fixture
def worker(plain):
    with remote_worker(plain) as found:
        yield found


def call(program, *arguments, iterators=()):
    return Call(CallNumber(7, 2, 3, 1), program, arguments, iterators)


def test_a_program_arrives_as_it_is(plain, worker):
    worker.define(PROGRAM)
    assert plain.programs == {"k1": PROGRAM}
    assert type(plain.programs["k1"].inputs[1]) is Input


def test_results_come_back(plain, worker):
    arguments = np.arange(3.0), np.float32(2).reshape(()), np.zeros((0, 4), np.int8)
    found = worker.call(call("echo", *arguments))
    for each, expected in zip(found, arguments, strict=True):
        assert each.dtype == expected.dtype
        np.testing.assert_array_equal(each, expected, strict=True)
    assert plain.calls[0].number == CallNumber(7, 2, 3, 1)
    assert type(plain.calls[0].number) is CallNumber


def test_a_call_may_have_no_number(plain, worker):
    worker.call(Call(None, "echo", ()))
    assert plain.calls[0].number is None


def test_all_fields_of_what_travels_in_parts_are_known():
    """Who adds one of them sends it, too: `_remote_worker`, `_remote_server`."""
    names = [field.name for field in dataclasses.fields(Call)]
    assert names == "number program arguments iterators".split()
    names = [field.name for field in dataclasses.fields(ServerOperation)]
    assert names == "name variables operands program".split()
    assert Read._fields == ("variable", "rows")


def test_resources_are_built_there_of_each_other(plain, worker):
    large = np.arange(100_000)  # a part of the function, which it refers to
    worker.build(1, lambda index: [large, index])
    worker.build(2, lambda index, first: iter(first), uses=[1])
    (found,) = worker.call(call("next", iterators=(2,)))
    np.testing.assert_array_equal(found, large)
    assert worker.call(call("next", iterators=(2,))) == [3]
    worker.release([1, 5])
    assert list(plain.resources) == [2]


def test_own_variables_are_read(worker):
    worker.build(4, lambda index: np.full(2, index))
    np.testing.assert_array_equal(worker.own(4), [3, 3])


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a", "bc"]),
        np.array([None, 1], object),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    ],
    ids=["text", "objects", "records"],
)
def test_results_without_a_raw_form_come_back(worker, value):
    worker.build(1, lambda index: iter([value, value]))
    (found,) = worker.call(call("next", iterators=(1,)))
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)


def test_the_end_of_the_data_is_the_end_here(worker):
    with pytest.raises(js.OutOfRangeError, match="no more") as caught:
        worker.call(call("end"))
    assert "Traceback of Worker 3" in caught.value.__notes__[0]


def test_another_type_of_element_arrives(plain, worker):
    found = "*", (((5,), "int32"),)

    def build(index):
        raise ElementChanged(2, found)

    with pytest.raises(ElementChanged) as caught:
        worker.build(1, build)
    assert (caught.value.iterator, caught.value.found) == (2, found)


class Odd(Exception):
    """Its arguments are others than those that it is made of."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class WithLock(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


@dataclasses.dataclass
class Record(Exception):
    first: int
    second: str


def raising(make):
    def build(index):
        raise make()

    return build


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeyError("x"),
        lambda: Odd(code=5),
        lambda: Record(1, "two"),
        lambda: UnicodeDecodeError("utf8", b"x", 0, 1, "bad"),
        lambda: OSError(2, "No such file", "data"),
        lambda: js.ClosureInputError(ValueError("inner")),
        lambda: jax.errors.JaxRuntimeError("INTERNAL: of XLA"),
        lambda: ExceptionGroup("two", [ValueError(1), KeyError(2)]),
    ],
    ids="key odd record unicode os closure xla group".split(),
)
def test_exceptions_are_the_same_here(worker, make):
    expected = make()
    with pytest.raises(type(expected)) as caught:
        worker.build(1, raising(make))
    assert type(caught.value) is type(expected)
    assert str(caught.value) == str(expected)
    assert repr(caught.value.args) == repr(expected.args)
    if isinstance(expected, Odd):
        assert caught.value.code == 5


def test_an_exception_that_cannot_travel_is_named(worker):
    with pytest.raises(RuntimeError, match="WithLock: it broke") as caught:
        worker.build(1, raising(lambda: WithLock("it broke")))
    assert "raise make()" in caught.value.__notes__[0]


def test_the_end_of_the_program_ends_only_the_function(worker):
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        worker.build(1, raising(lambda: SystemExit(3)))
    worker.release([1])


def test_causes_stand_in_the_note(worker):
    def build(index):
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError("the effect") from error

    with pytest.raises(ValueError, match="the effect") as caught:
        worker.build(1, build)
    assert "the cause" in caught.value.__notes__[0]


def test_a_function_that_cannot_be_sent_changes_nothing(worker):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        worker.build(1, lambda index: lock)
    worker.release([1])


def test_a_message_that_is_too_large_changes_nothing(plain, monkeypatch):
    with remote_worker(plain) as worker:
        worker.release([])
        monkeypatch.setattr("jaxstrategy.parameter_servers.wire._frame.LARGEST_HEAD", 9)
        with pytest.raises(ValueError, match="the largest may have 9"):
            worker.build(1, lambda index: 1)
        monkeypatch.undo()
        worker.release([])


def test_kill_ends_a_call_that_waits(plain):
    ended = []
    with remote_worker(plain, lambda: ended.append(True)) as worker:
        caught = []

        def run():
            with pytest.raises(js.WorkerLost, match="Worker 3 is lost") as error:
                worker.call(call("wait"))
            caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert plain.began.wait(60)
        worker.kill()
        thread.join(60)
        assert caught and ended == [True]
        plain.go_on.set()
        with pytest.raises(js.WorkerLost, match="it was ended here"):
            worker.release([1])


def test_without_cloudpickle_the_extra_is_named(worker, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    with pytest.raises(js.MissingExtraError, match=r"jaxstrategy\[coordinator\]"):
        worker.build(1, lambda index: 1)
    worker.define(PROGRAM)  # needs none
    with pytest.raises(js.OutOfRangeError):
        worker.call(call("end"))
