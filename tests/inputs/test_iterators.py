"""Distributed datasets and iterators, and the thread that works ahead of them."""

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.inputs import AT_ONCE, each_way, ranged, real, ways
from helpers.replicas import mirrored
from helpers.threads import INPUT, SECONDS, Started, until

import jaxstrategy as js


@each_way
@each_of("n", [1, 8])
def test_a_source_may_overwrite_its_arrays(n, options):
    strategy = mirrored(n)

    def source():
        x = np.zeros((16, 4), np.float32)
        for i in range(8):
            x[:] = i
            yield {"x": x, "rest": x[: 16 if i % 3 else 16]}
        x[:] = -1

    batches = list(strategy.experimental_distribute_dataset(source, options))
    for i, batch in enumerate(batches):
        for value in (batch["x"], batch["rest"]):
            assert (np.asarray(value if n == 1 else value.stacked) == i).all()
    assert len(batches) == 8


@each_of("start", [0, 16, 32, 60])
@each_of("columns", [1, 16])
def test_wherever_an_array_begins_it_may_be_overwritten(four, start, columns):
    """A device of the host may share memory that begins where it should."""
    memory = np.zeros(8 * 4 * columns + 128, np.uint8)
    start += -memory.ctypes.data % 64
    x = memory[start : start + 8 * 4 * columns].view(np.float32).reshape(8, columns)
    (batch,) = four.experimental_distribute_dataset([x], AT_ONCE)
    x[:] = -1
    assert not np.asarray(batch.stacked).any()


@each_of("array", [np.array, jnp.array])
@each_of("n", [1, 2])
def test_the_arrays_of_a_source_are_left_alone(n, array):
    """Also by steps that overwrite their arguments."""
    strategy = mirrored(n)
    x = array([0, 1, 2, 3])
    step = strategy.run(lambda b: b + 1, options=js.RunOptions(donate_argnums=0))
    functions = {"experimental_distribute_dataset": [x]}
    functions["distribute_datasets_from_function"] = lambda _: [x] * n
    for name, source in functions.items():
        (batch,) = getattr(strategy, name)(source)
        step(batch)
        assert (batch if n == 1 else batch.stacked).is_deleted()
        assert x.tolist() == [0, 1, 2, 3]


def test_get_next_and_as_optional(two):
    iterator = iter(two.experimental_distribute_dataset([np.arange(2)]))
    assert real(iterator.get_next()) == [[0], [1]]
    for _ in range(2):
        with pytest.raises(js.OutOfRangeError, match="The end of the data. Use `for "):
            iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)
    assert issubclass(js.OutOfRangeError, StopIteration)
    iterator = iter(two.experimental_distribute_dataset([np.arange(2)]))
    first, second = (iterator.get_next_as_optional() for _ in range(2))
    assert first.has_value() and real(first.get_value()) == [[0], [1]]
    assert repr(first) == "Optional(PerReplica(int32[1] on cpu:0, cpu:1))"
    assert not second.has_value() and repr(second) == "Optional.empty()"
    with pytest.raises(ValueError, match="The optional has no value: the data has end"):
        second.get_value()


def test_a_dataset_can_be_iterated_again_and_a_generator_once(two):
    dataset = two.experimental_distribute_dataset([np.arange(2)] * 3)
    assert [len(list(dataset)), len(list(dataset))] == [3, 3]
    iterator = iter(dataset)
    assert iter(iterator) is iterator
    once = two.experimental_distribute_dataset(np.arange(2) for _ in range(3))
    assert len(list(once)) == 3
    with pytest.raises(TypeError, match="Only one pass can read the generator, and on"):
        iter(once)


def test_lengths_and_reduce(two):
    of = two.experimental_distribute_dataset
    assert len(of([np.arange(2)] * 3)) == 3
    assert repr(of([np.arange(2)] * 3)) == "DistributedDataset(the list, 3 steps)"
    assert repr(of([np.arange(2)])) == "DistributedDataset(the list, 1 step)"
    assert repr(of(iter([]))) == "DistributedDataset(the list_iterator)"
    assert len(of(ranged(10, 4))) == 3
    text = "How many steps the generator has is not known. Count them, or give a sour"
    with pytest.raises(TypeError, match=text):
        len(of(np.arange(2) for _ in range(3)))
    dataset = two.experimental_distribute_dataset(ranged(7, 4))
    rows = dataset.reduce([], lambda all, batch: all + sum(real(batch), []))
    assert rows == list(range(7))


@pytest.mark.slow
@each_of("of", ["dataset", "iterator"])
@each_way
def test_element_spec(two, options, of):
    read = []

    def source():
        for i in range(3):
            read.append(i)
            yield {"x": np.full((5, 2), i, np.float32)}

    dataset = two.experimental_distribute_dataset(source, options)
    each = dataset if of == "dataset" else iter(dataset)
    spec = each.element_spec
    assert (spec["x"].shape, spec["x"].dtype) == ((3, 2), np.float32)
    assert isinstance(spec["x"], js.PerReplica)
    assert each.element_spec is spec
    if of == "dataset" and options == AT_ONCE:
        explained = two.explain(lambda batch: js.masked_sum(batch["x"]), (spec,))
        assert isinstance(explained, js.profiling.Explanation)
    assert [batch["x"].local(0)[0, 0].item() for batch in each] == [0, 1, 2]
    assert read == [0, 1, 2]


@each_way
def test_element_spec_of_an_iterator_that_gave_nothing(two, options):
    text = (
        "The iterator has ended without a batch, so that what its batches are like is "
        "not known. Ask before it is closed, or ask the dataset: "
        "`dataset.element_spec`."
    )
    dataset = two.experimental_distribute_dataset(ranged(6, 4), options)
    closed, last, resumed = iter(dataset), iter(dataset), iter(dataset)
    closed.close()
    list(last)
    resumed.set_state(last.get_state())
    for iterator in (closed, resumed):
        with pytest.raises(ValueError, match=re.escape(text)):
            iterator.element_spec  # noqa: B018 (it raises)


def test_a_closed_iterator_has_ended(two):
    closed = []

    def source():
        try:
            for i in range(9):
                yield np.full(2, i)
        finally:
            closed.append(True)

    for options in ways():
        with iter(two.experimental_distribute_dataset(source, options)) as iterator:
            next(iterator)
        assert list(iterator) == []
        iterator.close()
        with pytest.raises(js.OutOfRangeError):
            iterator.get_next()
    assert closed == [True] * 6


def test_an_iterator_says_how_many_steps_it_has_given(two):
    dataset = two.experimental_distribute_dataset(js.batches(np.arange(6), 2))
    iterator = iter(dataset)
    assert repr(iterator) == "DistributedIterator(0 steps given)"
    before = iterator.get_state()
    assert iterator.element_spec is not None  # reads one, and gives none
    assert iterator.get_state() == before
    assert repr(iterator) == "DistributedIterator(0 steps given)"
    next(iterator)
    assert repr(iterator) == str(iterator) == "DistributedIterator(1 step given)"
    next(iterator)
    state = iterator.get_state()
    iterator.close()
    assert repr(iterator) == "DistributedIterator(2 steps given, closed)"
    again = iter(dataset)
    again.set_state(state)
    assert repr(again) == "DistributedIterator(2 steps given)"
    again.close()


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


def test_an_interrupted_wait_leaves_it_usable():
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
