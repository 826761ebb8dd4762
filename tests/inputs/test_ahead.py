"""A thread that works ahead, and that always ends."""

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
from helpers.cases import each_of
from helpers.threads import INPUT, SECONDS, Started, until

import jaxstrategy as js


@pytest.fixture(autouse=True)
def threads():
    found = Started(INPUT)
    yield found
    gc.collect()
    until(lambda: not found())


class Counting:
    """A source of 0, 1, 2, ... up to `end`; `made` says how many were read."""

    def __init__(self, end=1000):
        self.made, self.end = 0, end

    def __call__(self):
        while self.made < self.end:
            self.made += 1
            yield np.full(2, self.made - 1)


def ahead(source, depth=2, to_devices=True):
    options = js.InputOptions(
        experimental_per_replica_buffer_size=depth,
        experimental_fetch_to_device=to_devices,
    )
    strategy = js.MirroredStrategy(jax.devices()[:2])
    return iter(strategy.experimental_distribute_dataset(source, options))


def number(batch):
    return batch.local(0).item()


@each_of("depth, to_devices", [(1, True), (2, False), (5, True)])
def test_so_many_are_read_ahead_and_come_in_order(threads, depth, to_devices):
    source = Counting(20)
    iterator = ahead(source, depth, to_devices)
    assert not threads() and source.made == 0
    assert number(next(iterator)) == 0
    assert len(threads()) == 1
    until(lambda: source.made == depth + 1)
    time.sleep(0.05)
    for wanted, batch in enumerate(iterator, 1):
        assert number(batch) == wanted
        assert source.made <= wanted + depth + 1
    assert wanted == 19 and not threads()
    assert list(iterator) == []


def test_reading_may_begin_before_the_first_is_asked_for(threads):
    source = Counting()
    iterator = ahead(source)
    iterator.close()
    assert list(iterator) == [] and source.made == 0
    iterator = ahead(source)
    iterator.start_prefetch()
    until(lambda: source.made == 2)
    iterator.close()
    assert not threads() and list(iterator) == []
    iterator.close()


def test_closing_lets_go_of_what_was_read():
    made = []

    def source():
        while True:
            array = np.ones(4)
            made.append(weakref.ref(array))
            yield array
            del array

    iterator = ahead(source, 3, False)
    next(iterator)
    until(lambda: len(made) == 4)
    iterator.close()
    gc.collect()
    assert [each() for each in made] == [None] * 4


@each_of("in_a_circle", [False, True])
def test_it_ends_when_it_is_forgotten(threads, in_a_circle):
    iterator = ahead(Counting())
    if in_a_circle:
        iterator.self = iterator
    next(iterator)
    del iterator
    gc.collect()
    until(lambda: not threads())


def test_the_collector_may_end_it_from_its_own_thread(threads):
    """What is read there may be what starts the collector."""

    def source():
        yield np.ones(2)
        while True:
            left.wait(SECONDS)
            gc.collect()
            yield np.ones(2)

    for _ in range(5):
        left = threading.Event()
        iterator = ahead(source)
        iterator.self = iterator
        next(iterator)
        del iterator
        left.set()
        until(lambda: not threads())


def test_closing_from_another_thread_wakes_who_waits():
    begun, release = threading.Event(), threading.Event()

    def source():
        begun.set()
        release.wait(SECONDS)
        yield from ()

    iterator = ahead(source)
    results = []
    waiting = threading.Thread(target=lambda: results.extend(iterator), daemon=True)
    waiting.start()
    assert begun.wait(SECONDS)
    threading.Timer(0.05, release.set).start()
    iterator.close()
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

    def source():
        release.wait(SECONDS)
        yield np.ones(2)
        yield np.ones(2)

    iterator = ahead(source, 1)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    release.set()
    assert len(list(iterator)) == 2


def endless():
    while True:
        yield np.ones(4, np.float32)


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


@pytest.mark.slow
@each_of("body", ["threading.Event().wait()", "pass"])
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


@each_of("shuffle", [None, 0])
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
