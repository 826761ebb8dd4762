"""A parameter server in another process is the same as one here."""

import threading

import ml_dtypes
import numpy as np
import pytest
from helpers.peers import PlainServer, remote

from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation


@pytest.fixture
def plain():
    return PlainServer()


@pytest.fixture
def server(plain):
    with remote(plain) as found:
        yield found


@pytest.mark.parametrize("dtype", [np.float32, np.int8, bool, ml_dtypes.bfloat16])
def test_a_value_comes_back(server, dtype):
    value = (np.arange(6).reshape(2, 3) % 2).astype(dtype)
    server.create(1, value)
    (found,) = server.read([Read(1)])
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, value)


def test_variables_and_rows_come_in_their_order(server):
    table = np.arange(40.0).reshape(10, 4)
    server.create(1, np.float32(5))
    server.create(2, table, is_table=True)
    rows = np.array([7, 0, 7], np.int32)
    whole, some, again = server.read([Read(1), Read(2, rows), Read(2)])
    assert whole.shape == () and whole == 5
    np.testing.assert_array_equal(some, table[[7, 0, 7]])
    np.testing.assert_array_equal(again, table)


def test_a_table_is_made_known_as_one(plain, server):
    server.create(1, np.zeros(2))
    server.create(2, np.zeros((2, 2)), is_table=True)
    assert plain.tables == {2}


def test_operations_are_pushed_in_order_and_whole(plain, server):
    server.create(1, np.zeros(3))
    server.create(2, np.zeros((4, 2)))
    number = CallNumber(9, 4, 2, 1)
    rows = np.array([3, 3])
    counts = server.push(
        [
            ServerOperation("set", (1,), (np.ones(3),)),
            ServerOperation("scatter_add", (2,), (rows, np.ones((2, 2)))),
            ServerOperation("add", (1,), (np.array([1.0, 2, 3]),)),
        ],
        number,
    )
    assert counts is True
    np.testing.assert_array_equal(plain.values[1], [2, 3, 4])
    np.testing.assert_array_equal(plain.values[2], [[0, 0]] * 3 + [[2, 2]])
    assert plain.calls == [number] and type(plain.calls[0]) is CallNumber


def test_a_second_push_of_a_call_says_that_it_does_not_count(server):
    server.create(1, np.zeros(()))
    operation = ServerOperation("add", (1,), (np.ones(()),))
    answers = [server.push([operation], CallNumber(1)) for _ in range(2)]
    assert answers == [True, False]
    assert server.read([Read(1)])[0] == 1


def test_updates_name_their_program(plain, server):
    seen = []
    plain.change = seen.append
    server.push([ServerOperation("update", (4, 5), (np.ones(2), np.zeros(1)), "adam")])
    (found,) = seen
    assert (found.name, found.variables, found.program) == ("update", (4, 5), "adam")
    assert [each.shape for each in found.operands] == [(2,), (1,)]
    assert plain.calls == [None]


def test_programs_fences_and_versions_arrive(plain, server):
    server.define("key", b"\0program" * 30000)
    server.fence(3, 2)
    assert plain.programs == {"key": b"\0program" * 30000}
    assert plain.fences == [(3, 2)]
    assert server.versions([1, 2, 3]) == [0, 0, 0]
    server.push([])
    assert server.versions(range(2)) == [1, 1]


def test_dropped_variables_are_gone(plain, server):
    for number in range(3):
        server.create(number, np.zeros(1))
    server.drop([0, 2, 17])
    assert list(plain.values) == [1]


def test_what_the_server_raises_is_raised_here(server):
    server.create(1, np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"\(3,\) is another shape") as caught:
        server.push([ServerOperation("set", (1,), (np.zeros(3),))])
    (note,) = caught.value.__notes__
    assert "Traceback of Parameter server 0" in note and "in change" in note
    with pytest.raises(IndexError, match="index 5 is out of bounds"):
        server.read([Read(1, np.array([5]))])
    assert server.read([Read(1)])[0].shape == (2, 2)  # it goes on


def test_an_array_that_no_server_can_keep_is_refused_here(server):
    with pytest.raises(TypeError, match="array of dtype object came"):
        server.create(1, np.array([None, "x"]))
    server.create(1, np.zeros(2))
    assert server.read([Read(1)])[0].shape == (2,)


def test_threads_do_not_wait_for_each_other(plain):
    inside = threading.Barrier(4)

    def versions(numbers):
        inside.wait(60)
        return [0]

    plain.versions = versions
    with remote(plain) as server:
        threads = [
            threading.Thread(target=server.versions, args=([1],)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert server.versions([1]) == [0]  # all four are asked at once, or none ends
        for thread in threads:
            thread.join()


def test_many_threads_get_their_own_answers(server):
    sizes = [1, 700, 40_000]
    for number in range(6):
        server.create(number, np.full(sizes[number % 3], number, np.float32))
    wrong = []

    def read(own):
        for turn in range(60):
            number = (own + turn) % 6
            (found,) = server.read([Read(number)])
            if found.size != sizes[number % 3] or (found != number).any():
                wrong.append((own, number))

    threads = [threading.Thread(target=read, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_adds_of_many_threads_are_all_counted(server):
    server.create(1, np.zeros(3, np.int64))
    operation = ServerOperation("add", (1,), (np.ones(3, np.int64),))

    def add():
        for _ in range(50):
            server.push([operation])

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(server.read([Read(1)])[0], [200] * 3)
