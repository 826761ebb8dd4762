"""Pushes to a parameter server: whole or not at all, and once for each function."""

import threading

import numpy as np
import pytest
from helpers.threads import in_threads, until
from helpers.updates import exported
from hypothesis import given
from hypothesis import strategies as st

from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation
from jaxstrategy.parameter_servers.store._number_ranges import NumberRanges
from jaxstrategy.parameter_servers.store._store import Store

ONE = np.ones((), np.int32)


def operation(name, *operands, variables=(0,), program=""):
    return ServerOperation(name, variables, tuple(operands), program)


def counter(value=0):
    found = Store()
    found.create(0, np.full((), value, np.int32))
    return found


def count_of(found):
    return int(found.read([Read(0)])[0])


def test_a_function_pushes_once():
    found = counter()
    add = [operation("add", ONE)]
    assert found.push(add, CallNumber(7))
    assert not found.push(add, CallNumber(7, worker=3))
    assert found.push(add, CallNumber(8))
    assert found.push(add) and found.push(add)
    assert count_of(found) == 4


def test_only_functions_that_may_come_again_are_remembered():
    found = counter()
    add = [operation("add", ONE)]
    for function in range(0, 2000, 2):
        assert found.push(add, CallNumber(function, finished=max(0, function - 10)))
        assert len(found._functions._pushed) <= 6
    assert not found.push(add, CallNumber(3, finished=0))
    assert not found.push(add, CallNumber(1998))
    assert count_of(found) == 1000


def test_functions_that_end_while_one_goes_on_take_no_memory():
    found = counter()
    add = [operation("add", ONE)]
    for function in range(1, 1000):  # number 0 goes on
        assert found.push(add, CallNumber(function))
    assert len(found._functions._pushed) == 1
    assert not any(found.push(add, CallNumber(n)) for n in (1, 500, 999))
    assert found.push(add, CallNumber(0))
    assert count_of(found) == 1000


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=40))
def test_ranges_are_sets(steps):
    ranges, numbers = NumberRanges(), set()
    for is_added, number in steps:
        if is_added:
            ranges.add(number)
            numbers.add(number)
        else:
            ranges.drop_below(number)
            numbers = {each for each in numbers if each >= number}
        assert numbers == {each for each in range(-1, 23) if each in ranges}
        assert len(ranges) == sum(each - 1 not in numbers for each in numbers)


def test_a_bad_push_may_be_made_again():
    found = counter()
    with pytest.raises(ValueError, match="takes int32"):
        found.push([operation("add", np.ones(2, np.int32))], CallNumber(1))
    assert found.push([operation("add", ONE)], CallNumber(1))
    assert count_of(found) == 1


def test_what_a_lost_worker_pushes_does_not_count():
    found = counter()
    add = [operation("add", ONE)]
    found.fence(worker=2, incarnation=1)
    assert not found.push(add, CallNumber(1, worker=2, incarnation=0))
    assert found.push(add, CallNumber(1, worker=2, incarnation=1))
    assert found.push(add, CallNumber(2, worker=1, incarnation=0))
    found.fence(worker=2, incarnation=0)  # an old message does not open it again
    assert not found.push(add, CallNumber(3, worker=2, incarnation=0))
    assert count_of(found) == 2


def test_a_retry_waits_for_what_is_being_pushed():
    found = counter()
    add, call = [operation("add", ONE)], CallNumber(1, worker=4)
    results = []
    with found._variables[0].lock:
        first = threading.Thread(target=lambda: results.append(found.push(add, call)))
        first.start()
        until(lambda: found._functions._pushing)
        retry = call._replace(worker=5)
        second = threading.Thread(target=lambda: results.append(found.push(add, retry)))
        second.start()
        fence = threading.Thread(target=lambda: found.fence(4, 1))
        fence.start()
        until(lambda: found._functions._incarnations)
        assert not results and fence.is_alive()
    for thread in (first, second, fence):
        thread.join(20)
        assert not thread.is_alive()
    assert sorted(results) == [False, True]
    assert count_of(found) == 1


def test_one_of_many_retries_counts():
    found = counter()
    pushed = []

    def pushing(worker):
        for function in range(50):
            call = CallNumber(function, finished=max(0, function - 60), worker=worker)
            pushed.append(found.push([operation("add", ONE)], call))

    in_threads(*[lambda w=w: pushing(w) for w in range(4)])
    assert sum(pushed) == count_of(found) == 50


def test_what_failed_half_way_is_not_made_again(monkeypatch):
    found = counter()
    found.create(1, np.zeros((3, 2), np.float32))
    scatter = operation(
        "scatter_add", np.array([1]), np.ones((1, 2), np.float32), variables=(1,)
    )

    def broken():
        raise MemoryError("no room")

    monkeypatch.setattr(found._variables[1], "on_device", broken)
    with pytest.raises(MemoryError, match="no room"):
        found.push([operation("add", ONE), scatter], CallNumber(1))
    assert not found.push([operation("add", ONE), scatter], CallNumber(1))
    assert count_of(found) == 1


def test_bad_operations_leave_all_as_it_was():
    found = counter()
    found.create(1, np.zeros((3, 2), np.float32), is_table=True)
    good = operation("add", ONE)
    rows = np.array([0, 3])
    bad = operation("scatter_add", rows, np.ones((2, 2), np.float32), variables=(1,))
    with pytest.raises(IndexError, match=r"Row 3 is not in \[0, 3\)"):
        found.push([good, bad])
    assert count_of(found) == 0
    assert not found.read([Read(1)])[0].any()
    assert found.versions([0, 1]) == [0, 0]


def test_counts_of_threads_are_exact():
    found = Store()
    found.create(0, np.zeros(1000, np.float32))
    found.create(1, np.zeros((10, 3), np.float32), is_table=True)
    add = operation("add", np.ones(1000, np.float32))
    rows = np.array([1, 1, 4])
    scatter = operation(
        "scatter_add", rows, np.ones((3, 3), np.float32), variables=(1,)
    )

    def pushing(times):
        for _ in range(times):
            found.push([add, scatter])

    in_threads(*[lambda n=n: pushing(n) for n in (67, 67, 66)])
    dense, table = found.read([Read(0), Read(1)])
    assert (dense == 200).all()
    wanted = np.zeros((10, 3))
    wanted[[1, 4]] = [[400] * 3, [200] * 3]
    np.testing.assert_array_equal(table, wanted)
    assert found.versions([0, 1]) == [200, 200]


@pytest.mark.parametrize("is_table", [False, True], ids=["host", "device"])
def test_no_read_is_torn(is_table):
    found = Store()
    found.create(0, np.zeros((500, 40), np.float32), is_table)
    add = operation("add", np.ones((500, 40), np.float32))
    done = threading.Event()
    kept = []

    def pushing():
        for _ in range(150):
            found.push([add])
        done.set()

    def reading():
        while not done.is_set():
            (value,) = found.read([Read(0)])
            first = value[0, 0]
            assert (value == first).all()
            kept.append((value[::100], first))
            (rows,) = found.read([Read(0, np.array([0, 250, 499]))])
            assert (rows == rows[0, 0]).all()

    in_threads(pushing, reading, reading)
    assert all((value == first).all() for value, first in kept)
    assert (found.read([Read(0)])[0] == 150).all()


def test_updates_of_several_variables_do_not_wait_for_each_other():
    found = Store()
    for number in range(3):
        found.create(number, np.zeros(4, np.float32))
    kind = ((4,), np.float32)
    found.define("move", exported(lambda a, b, x: (a - x, b + x), kind, kind, kind))
    ones = np.ones(4, np.float32)

    def moving(variables):
        for _ in range(50):
            found.push([operation("update", ones, variables=variables, program="move")])

    in_threads(*[lambda v=v: moving(v) for v in ((0, 1), (1, 0), (1, 2), (2, 0))])
    values = [float(value[0]) for value in found.read([Read(n) for n in range(3)])]
    # (0, 1) and (1, 0) cancel; then 50 go from 1 to 2, and 50 from 2 to 0.
    assert values == [50, -50, 0]
    assert found.versions([0, 1, 2]) == [150, 150, 100]
