"""A thread that works ahead, and that always ends."""

import _thread
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import jax
import numpy as np
import pytest
from helpers.threads import INPUT, SECONDS, Started, until

import jaxstrategy as js
from jaxstrategy.inputs._ahead import Ahead


@pytest.fixture(autouse=True)
def threads():
    found = Started(INPUT)
    yield found
    gc.collect()
    until(lambda: not found())


class Counting:
    """Makes 0, 1, 2, ... up to `end`; `made` says how many."""

    def __init__(self, end=1000, error=StopIteration):
        self.made, self.end, self.error = 0, end, error

    def __call__(self):
        if self.made == self.end:
            raise self.error
        self.made += 1
        return self.made - 1


def settled(make):
    """How many were made when no more are."""
    seen = -1
    while seen != make.made:
        seen = make.made
        time.sleep(0.05)
    return seen


def test_no_thread_before_the_first_is_asked_for(threads):
    make = Counting()
    ahead = Ahead(make, 2)
    assert not threads() and make.made == 0
    assert next(ahead) == 0
    assert len(threads()) == 1
    ahead.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_results_come_in_order_and_few_are_made_ahead(depth):
    make = Counting(20)
    most = 0
    for taken, result in enumerate(Ahead(make, depth)):
        assert result == taken
        most = max(most, make.made - taken)
    assert taken == 19
    assert most <= depth + 1


@pytest.mark.parametrize("depth", [1, 3])
def test_so_many_are_made_ahead(depth):
    make = Counting()
    ahead = Ahead(make, depth)
    next(ahead)
    until(lambda: make.made == depth + 1)
    assert settled(make) == depth + 1
    ahead.close()


def test_it_ends_with_the_results(threads):
    ahead = Ahead(Counting(3), 2)
    assert list(ahead) == [0, 1, 2]
    assert not threads()
    assert list(ahead) == []


def test_an_error_comes_after_what_was_made_before_and_again_and_again(threads):
    ahead = Ahead(Counting(3, KeyError("broken")), 10)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    for _ in range(3):
        with pytest.raises(KeyError, match="broken"):
            next(ahead)
    assert not threads()


def test_it_ends_when_closed(threads):
    ahead = Ahead(Counting(), 2)
    next(ahead)
    ahead.close()
    assert not threads()
    assert list(ahead) == []
    ahead.close()


def test_closing_before_the_beginning():
    make = Counting()
    ahead = Ahead(make, 2)
    ahead.close()
    assert list(ahead) == [] and make.made == 0


def test_closing_lets_go_of_what_was_made():
    made = []

    def make():
        made.append(weakref.ref(array := np.ones(3)))
        return array

    ahead = Ahead(make, 3)
    next(ahead)
    until(lambda: len(made) == 4)
    ahead.close()
    gc.collect()
    assert [each() for each in made] == [None] * 4


def test_it_ends_when_it_is_forgotten(threads):
    ahead = Ahead(Counting(), 2)
    next(ahead)
    del ahead
    gc.collect()
    until(lambda: not threads())


def test_it_ends_when_it_is_forgotten_in_a_circle(threads):
    ahead = Ahead(Counting(), 2)
    ahead.self = ahead
    next(ahead)
    del ahead
    assert threads()
    gc.collect()
    until(lambda: not threads())


def test_the_collector_may_end_it_from_its_own_thread(threads):
    """What is made there may be what starts the collector."""

    def make():
        gc.collect()
        return 1

    for _ in range(5):
        ahead = Ahead(make, 2)
        ahead.self = ahead
        next(ahead)
        del ahead
        until(lambda: not threads())


def test_closing_from_another_thread_wakes_who_waits():
    begun, release = threading.Event(), threading.Event()

    def make():
        begun.set()
        release.wait(SECONDS)
        raise StopIteration

    ahead = Ahead(make, 2)
    results = []
    waiting = threading.Thread(target=lambda: results.extend(ahead), daemon=True)
    waiting.start()
    assert begun.wait(SECONDS)
    threading.Timer(0.05, release.set).start()
    ahead.close()
    waiting.join(SECONDS)
    assert not waiting.is_alive() and results == []


@pytest.fixture
def interrupts():
    """Ctrl-C interrupts: not so in a process that was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_wait_leaves_it_usable(interrupts):
    release = threading.Event()

    def make():
        release.wait(SECONDS)
        return 1

    ahead = Ahead(make, 1)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(ahead)
    release.set()
    assert [next(ahead), next(ahead)] == [1, 1]
    ahead.close()


# Whole iterators.


def endless():
    while True:
        yield np.ones(4, np.float32)


def test_an_iterator_ends_its_thread_when_forgotten(two, threads):
    iterator = iter(two.experimental_distribute_dataset(endless))
    next(iterator)
    assert len(threads()) == 1
    found = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert found() is None
    until(lambda: not threads())


def test_leaving_a_loop_ends_the_thread(two, threads):
    for batch in two.experimental_distribute_dataset(endless):
        assert batch.shape == (2,)
        break
    gc.collect()
    until(lambda: not threads())


def test_a_block_ends_the_thread_and_closes_the_source(two, threads):
    closed = []

    def source():
        try:
            yield from endless()
        finally:
            closed.append(True)

    with iter(two.experimental_distribute_dataset(source)) as iterator:
        next(iterator)
        assert threads()
    assert not threads() and closed == [True]


def test_an_interrupted_loop_can_go_on(two, interrupts):
    """As when the cell of a notebook is interrupted."""

    def count():
        for i in range(1000):
            yield np.full(2, i)

    iterator = iter(two.experimental_distribute_dataset(count))
    seen = []
    with pytest.raises(KeyboardInterrupt):
        for batch in iterator:
            seen.append(batch.local(0).item())
            if len(seen) == 3:
                _thread.interrupt_main()
    last = seen[-1]
    assert next(iterator).local(0) == last + 1
    iterator.close()


PROGRAMS = {
    "blocked": "threading.Event().wait()",
    "slow": "time.sleep(0.001)",
    "fast": "pass",
}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, id=name, marks=[pytest.mark.slow] * (name == "slow"))
        for name, body in PROGRAMS.items()
    ],
)
def test_the_program_ends_whatever_the_source_does(tmp_path, body):
    program = f"""
    import threading, time
    import numpy as np
    import jaxstrategy as js

    def source():
        yield np.ones(4, np.float32)
        while True:
            {body}
            yield np.ones(4, np.float32)

    strategy = js.MirroredStrategy(js.simulate(2))
    iterator = iter(strategy.experimental_distribute_dataset(source))
    print(next(iterator).shape)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        env={"JAX_PLATFORMS": "cpu", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "(2,)\n", "")


def test_devices_of_batches_read_ahead(two):
    iterator = iter(two.experimental_distribute_dataset(endless))
    batch = next(iterator)
    assert [v.devices() for v in batch.values] == [{d} for d in jax.devices()[:2]]
    iterator.close()
    assert isinstance(batch, js.PerReplica)


@pytest.mark.parametrize("shuffle", [None, 0])
def test_arrays_in_memory_are_copied_when_asked_for(threads, shuffle):
    """On devices of the host: a thread would only take the cores from the steps."""
    strategy = js.MirroredStrategy(js.simulate(8)[:2])
    array = np.arange(12.0, dtype=np.float32)
    options = js.InputOptions(experimental_per_replica_buffer_size=2)
    source = js.batches(array, 4, shuffle=shuffle)
    dataset = strategy.experimental_distribute_dataset(source, options)
    given = [np.concatenate(batch.values) for batch in dataset]
    iterator = iter(dataset)
    first = next(iterator)
    kept = np.concatenate(first.values)
    assert not threads()
    array[:] = -1.0  # what was given stays as it is, what was not is as it is now
    np.testing.assert_array_equal(np.concatenate(first.values), kept)
    np.testing.assert_array_equal(np.concatenate(next(iterator).values), -np.ones(4))
    assert sorted(np.concatenate(given)) == list(range(12))


def test_other_sources_are_read_ahead(threads):
    strategy = js.MirroredStrategy(js.simulate(8)[:2])
    array = np.arange(12.0, dtype=np.float32)
    dataset = strategy.experimental_distribute_dataset(list(array.reshape(3, 4)))
    iterator = iter(dataset)
    next(iterator)
    assert len(threads()) == 1
    iterator.close()
