"""What processes know of each other."""

import os
import signal

import pytest
from harness import STATUS, Store, until

from jaxstrategy import ClusterError


def waiting(zero, key):
    """How many calls wait in a gather, as process 0 knows."""
    return len(zero._server._pending.get(key, []))


def departures(board):
    told = []
    board.on_departure(lambda departure: told.append(str(departure)))
    return told


def test_what_one_puts_all_get(boards):
    for board in (made := boards(3)):
        made[1].put(f"key {board.index}", {"a": [1, None, "x"]})
        assert board.get(f"key {board.index}") == {"a": [1, None, "x"]}


def test_a_value_that_nobody_puts(boards):
    with pytest.raises(ClusterError, match="Nobody has put 'key' .* within 0.1 s"):
        boards(2)[1].get("key", 0.1)


def test_gathers_of_one_key_meet_in_order(boards, pool):
    """The threads of a process may be several calls ahead of another process."""
    zero, one = boards(2)
    calls = []
    for turn in range(5):
        until(lambda turn=turn: waiting(zero, "key") == turn)
        calls.append(pool.submit(zero.gather, "key", turn))
    wanted = [[turn, 10 * turn] for turn in range(5)]
    assert [one.gather("key", 10 * turn) for turn in range(5)] == wanted
    assert [call.result(10) for call in calls] == wanted


def test_gather_names_who_does_not_come(boards, pool):
    made = boards(4)
    calls = [pool.submit(made[k].gather, "epoch", k, 0.3) for k in (0, 2)]
    for call in calls:
        with pytest.raises(ClusterError, match="Waited 0.3 s in 'epoch' for") as error:
            call.result(10)
        assert "process 1 (host host1" in str(error.value)
        assert "process 3 (host host3" in str(error.value)
    # What timed out is forgotten: the next call is a fresh one for all.
    again = pool.map(lambda board: board.gather("epoch", board.index), made)
    assert list(again) == [[0, 1, 2, 3]] * 4


def test_who_compiles_is_waited_for(boards, pool):
    zero, one = boards(2, timeout_seconds=0.3)
    one.status = lambda: STATUS | {"busy": "compiles"}
    until(lambda: zero.states()[1].busy)
    asked, states = [], zero.states
    zero.states = lambda: asked.append(None) or states()
    patient = pool.submit(zero.gather, "key", 1)
    until(lambda: len(asked) > 2)  # each time that its time was over
    assert not patient.done()
    with pytest.raises(ClusterError, match="Waited 0.2 s in 'short'"):
        zero.gather("short", 1, 0.2)  # a time of its own is kept
    one.gather("key", 2)
    assert patient.result(10) == [1, 2]
    late = pool.submit(zero.gather, "key", 1)
    one.status = lambda: STATUS
    with pytest.raises(ClusterError, match="Waited 0.3 s in 'key' for process 1"):
        late.result(10)


def test_what_is_not_json_is_refused(boards):
    zero, _ = boards(2)
    with pytest.raises(TypeError, match="not JSON serializable"):
        zero.put("key", object())
    zero.put("key", 1)
    assert zero.get("key") == 1


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_has_finished_is_not_waited_for(boards, leaver):
    made = boards(2)
    other = made[1 - leaver]
    told = departures(other)
    made[leaver].leave()
    wanted = f"process {leaver} (host host{leaver}, pid 10{leaver}) has finished"
    with pytest.raises(ClusterError) as error:
        other.gather("key", 1, 10)
    assert wanted in str(error.value)
    until(lambda: f"{wanted} already" in told)
    with pytest.raises(ClusterError, match="has finished already"):
        other.get("other key", 10)


def test_when_all_have_left_everyone_knows(boards):
    made = boards(3)
    for board in made:
        assert not board.wait_for_all_left(0)
        board.leave()
    assert all(board.wait_for_all_left(10) for board in made)


@pytest.mark.parametrize("dead", [0, 2])
def test_a_death_is_known_to_all_at_once(boards, pool, dead):
    made = boards(3)
    others = [board for board in made if board.index != dead]
    told = [departures(board) for board in others]
    calls = [pool.submit(board.gather, "key", 1, 20) for board in others]
    calls += [pool.submit(board.get, "never", 20) for board in others]
    until(lambda: waiting(made[0], "key") == 2)
    until(lambda: waiting(made[0], "never") == 2)
    hang_up(made[dead])
    wanted = f"process {dead} (host host{dead}, pid 10{dead}) has died"
    for call in calls:
        with pytest.raises(ClusterError) as error:
            call.result(10)
        assert wanted in str(error.value)
    until(lambda: all(told))
    assert all(text.startswith(wanted) for texts in told for text in texts)
    assert all(board.wait_for_departure(10).member.index == dead for board in others)
    late = departures(others[0])  # who asks later hears of it too
    assert late[0].startswith(wanted)
    with pytest.raises(ClusterError, match="has died"):
        others[0].gather("another key", 1, 10)
    with pytest.raises(ClusterError, match="has died"):
        others[0].get("another key", 10)


def hang_up(board):
    """As the kernel does for a process that dies."""
    board._is_closed = True  # this end keeps quiet
    board._group.close()


def test_a_failure_is_told_in_its_own_words(boards):
    zero, one, two = boards(3)
    told = departures(zero), departures(two)
    one.fail("ValueError: bad batch")
    until(lambda: all(told))
    wanted = "process 1 (host host1, pid 101) failed: ValueError: bad batch"
    assert told == ([wanted], [wanted])


def test_states_say_where_all_are(boards):
    zero, one = boards(2)
    one.status = lambda: STATUS | {"step": 7}
    until(lambda: zero.states()[1].status)
    for board in (zero, one):
        states = board.states()
        assert [state.member.index for state in states] == [0, 1]
        assert states[1].status == STATUS | {"step": 7} and states[1].end is None
        assert states[1].silent_seconds < 5
    one.leave(STATUS | {"step": 9})
    until(lambda: 1 in zero.departures)
    assert zero.states()[1].end == "left"
    assert zero.departures[1].status == STATUS | {"step": 9}


def test_who_does_not_answer_counts_as_dead(meet):
    meeting, stopped = meet({"index": 0, "count": 2}, {"index": 1, "count": 2})
    zero = Store(meeting, silence_seconds=2.5)
    told = departures(zero)
    until(lambda: zero.states()[1].silent_seconds > 1)
    until(lambda: told)
    assert told[0].startswith("process 1 (host host1, pid 101) has not answered for")
    with pytest.raises(ClusterError, match="it is stopped, or its host is"):
        zero.gather("key", 1, 10)
    stopped.close()
    zero.fail("over")


def test_a_child_of_a_dead_process_does_not_hide_its_death(job):
    """A forked child holds copies of its parent's connections."""
    script = """
    import os, sys, time
    from jaxstrategy._src.processes import rendezvous, store
    RANK = int(os.environ["JAXSTRATEGY_PROCESS_ID"])
    address = os.environ["JAXSTRATEGY_COORDINATOR"]
    board = store.Store(rendezvous.meet(RANK, 2, address, 30))
    os.register_at_fork(after_in_child=board.close_in_forked_child)
    if RANK == 1:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        board.put("child", child)
        time.sleep(60)
    print("child", board.get("child"), flush=True)
    print(board.wait_for_departure(40), flush=True)
    os._exit(0)
    """
    with job(script, started=False) as running:
        running.wait_for("child ", ranks=[0])
        running.signal(1, signal.SIGKILL)
        assert running.wait(10, 0) == [0]
        child, told = running.ranks[0].output.splitlines()[:2]
        assert told.startswith("process 1 (") and "has died" in told
        os.kill(int(child.split()[1]), signal.SIGKILL)
