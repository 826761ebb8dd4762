"""A coordinator ends with its last reference, and with it all that it has started."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from helpers.fake_workers import Gate, coordinator, push
from helpers.threads import Started, until

import jaxstrategy as js

Activity = js.coordinator.WorkerActivity


@pytest.fixture(autouse=True)
def threads():
    """Those of coordinators of the test."""
    found = Started("jaxstrategy worker")
    yield found
    gc.collect()
    until(lambda: not found())


def schedule(coordinated, fn, *args):
    return coordinated.schedule(coordinated.function(fn), args)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_deleting_it_ends_its_threads_and_workers(busy, threads):
    coordinated, gate = coordinator(4), Gate()
    lives = coordinated.backend.lives
    until(lambda: len(lives) == 4)
    assert len(threads()) == 4
    if busy:
        values = [schedule(coordinated, gate) for _ in range(6)]
        gate.wait_until_entered(4)
    gone = weakref.ref(coordinated)
    del coordinated
    gc.collect()
    assert gone() is None
    until(lambda: not threads(), 5)
    until(lambda: all(life.dead.is_set() for life in lives))
    if busy:
        for value in values:
            with pytest.raises(js.CancelledError, match="The coordinator is closed"):
                value.fetch()


def test_an_error_that_somebody_keeps_does_not_keep_it(threads):
    coordinated = coordinator(1)

    def f():
        raise ValueError("kept")

    bad = schedule(coordinated, f)
    with pytest.raises(ValueError):
        bad.fetch()
    gone = weakref.ref(coordinated)
    del coordinated
    gc.collect()
    assert gone() is None
    until(lambda: not threads(), 5)
    with pytest.raises(ValueError, match="kept"):
        bad.fetch()


def test_close_cancels_what_is_queued_and_ends_what_runs(threads):
    coordinated, gate = coordinator(1), Gate()
    values = [schedule(coordinated, gate) for _ in range(3)]
    gate.wait_until_entered()
    waiting = threading.Thread(target=join_quietly, args=(coordinated,))
    waiting.start()
    coordinated.close()
    waiting.join(20)
    assert not waiting.is_alive() and not threads()
    for value in values:
        with pytest.raises(js.CancelledError):
            value.fetch()
    for call in (
        coordinated.join,
        coordinated.done,
        lambda: schedule(coordinated, gate),
    ):
        with pytest.raises(RuntimeError, match="closed: it runs no functions any more"):
            call()
    assert [state.activity for state in coordinated.workers] == [Activity.CLOSED]
    coordinated.close()


def join_quietly(coordinated):
    with pytest.raises(RuntimeError, match="is closed"):
        coordinated.join()


def test_a_block_waits_for_what_was_scheduled_and_closes(threads):
    with coordinator(2) as coordinated:
        values = [schedule(coordinated, lambda: push(1)) for _ in range(10)]
    assert coordinated.backend.servers[0].total == 10 and not threads()
    assert all(value.fetch() for value in values)


def test_a_block_that_raises_closes_at_once(threads):
    gate = Gate()
    with pytest.raises(KeyError, match="mine"):
        with coordinator(1) as coordinated:
            value = schedule(coordinated, gate)
            gate.wait_until_entered()
            raise KeyError("mine")
    assert not threads()
    with pytest.raises(js.CancelledError):
        value.fetch()


def test_a_block_raises_the_error_of_a_function(threads):
    def f():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        with coordinator(1) as coordinated:
            schedule(coordinated, f)
    assert not threads()


def test_it_ends_while_a_worker_is_starting(threads):
    coordinated = coordinator(1)
    until(lambda: len(coordinated.backend.lives) == 1)
    gate = coordinated.backend.gates[0] = threading.Event()
    coordinated.backend.kill(0)
    until(lambda: coordinated.workers[0].activity is Activity.LOST)
    closing = threading.Thread(target=coordinated.close)
    closing.start()
    until(lambda: coordinated._scheduler._queue.is_stopped)
    gate.set()
    closing.join(20)
    until(lambda: not threads())
    assert all(life.dead.is_set() for life in coordinated.backend.lives)


def test_join_may_be_interrupted_from_the_keyboard():
    with coordinator(1) as coordinated:
        gate = Gate()
        value = schedule(coordinated, gate, np.int32(3))
        gate.wait_until_entered()
        scheduler = coordinated._scheduler
        usual = scheduler._queue._ended.wait_for

        def interrupted(claim, timeout):
            raise KeyboardInterrupt

        scheduler._queue._ended.wait_for = interrupted
        with pytest.raises(KeyboardInterrupt):
            coordinated.join()
        scheduler._queue._ended.wait_for = usual
        gate.open.set()
        coordinated.join()
        assert value.fetch() == 3 and schedule(coordinated, lambda: 4).fetch() == 4


PROGRAM = """
import sys, threading
sys.path.insert(0, {tests!r})
from helpers.fake_workers import Gate, coordinator
coordinated = coordinator(3)
gate = Gate()
values = [coordinated.schedule(coordinated.function(gate)) for _ in range(5)]
gate.wait_until_entered(3)
import atexit
@atexit.register  # called last but for what was registered before
def nothing(): print("exits")
print("end", flush=True)
"""


@pytest.mark.parametrize(
    "ending",
    [
        "",
        pytest.param("raise KeyError('mine')", marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", marks=pytest.mark.slow),
    ],
)
def test_a_program_ends_although_functions_run(ending):
    code = PROGRAM.format(tests=str(Path(__file__).parents[1])) + ending
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.split() == ["end", "exits"]
    assert ran.returncode == {"": 0, "sys.exit(3)": 3}.get(ending, 1)
    assert ran.stderr.count("Traceback") == ("KeyError" in ending), ran.stderr
