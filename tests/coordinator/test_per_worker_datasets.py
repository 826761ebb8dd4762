"""Each worker reads datasets by itself: TensorFlow's cases, and lists as the oracle."""

import functools
import itertools
import threading

import jax
import numpy as np
import pytest
from helpers.clusters import until_each_has
from helpers.sources import FakeTfDataset

import jaxstrategy as js

index = js.coordinator.experimental_get_current_worker_index


def test_the_coordinator_calls_the_function_once_and_each_worker_once(three):
    calls = []

    def make():
        calls.append((index(), threading.current_thread().name))
        return range(1000)

    dataset = three.create_per_worker_dataset(make)
    assert [worker for worker, _ in calls] == [0]
    iterators = iter(dataset), iter(dataset)
    assert dataset.element_spec == jax.ShapeDtypeStruct((), np.int32)
    assert len(calls) == 1

    def both(first, second):
        return index(), next(first) + next(second)

    until_each_has(three, three.function(both), iterators)
    assert sorted(worker for worker, _ in calls) == [0, 0, 1, 2]
    assert sorted(name for _, name in calls[1:]) == [
        f"jaxstrategy worker {i}" for i in range(3)
    ]


def test_what_the_function_raises_comes_out_here(three):
    def make():
        raise made

    made = js.errors.ObjectError("odd")
    with pytest.raises(type(made)) as caught:
        three.create_per_worker_dataset(make)
    assert caught.value is made

    def make(x, y):
        return [x, y]

    with pytest.raises(TypeError, match=r"`make\(x, y\)`.*InputContext.*was wanted"):
        three.create_per_worker_dataset(make)


def test_what_is_no_dataset_or_empty_is_refused(three):
    """A ValueError as in TensorFlow, and a TypeError as of our other strategies."""
    for given in (3, "text", None, np.ones(3), int):
        for kind, made in ((ValueError, given), (TypeError, lambda: given)):  # noqa: B023
            with pytest.raises(kind, match="Unexpected dataset type!"):
                three.create_per_worker_dataset(made)
    with pytest.raises(TypeError, match=r"list_iterator can be read only once.*lambda"):
        three.create_per_worker_dataset(iter([1, 2]))
    inner = three.strategy.experimental_distribute_dataset(iter([np.ones(2)]))
    with pytest.raises(TypeError, match="DeferredDataset can be read only once"):
        three.create_per_worker_dataset(inner)
    mirrored = js.MirroredStrategy(js.simulate(8)[:2])
    dataset = mirrored.experimental_distribute_dataset([np.ones(2)])
    with pytest.raises(TypeError, match="distributed by another strategy"):
        three.create_per_worker_dataset(dataset)
    dataset = three.create_per_worker_dataset(lambda: [])
    with pytest.raises(ValueError, match="has no elements"):
        _ = dataset.element_spec


def test_variables_are_not_made_in_it(three):
    def make():
        js.Variable(1.0)
        return [1]

    with pytest.raises(ValueError, match="Creating variables in `dataset_fn` is not"):
        three.create_per_worker_dataset(make)

    def within():
        with three.strategy.scope():
            js.Variable(1.0)
        return [1]

    with pytest.raises(ValueError, match="Creating variables in `dataset_fn` is not"):
        three.create_per_worker_dataset(within)


def generator():
    yield from (np.float32(5), np.float32(6), np.float32(7))


SOURCES = {
    "a list": lambda: [5.0, 6.0, 7.0],
    "a function of a list": lambda: lambda: [5.0, 6.0, 7.0],
    "a generator function": lambda: generator,
    "a function of a generator function": lambda: lambda: generator,
    "js.batches": lambda: lambda: js.batches(np.array([5.0, 6.0, 7.0]), 1),
    "a partial": lambda: functools.partial(list, (5.0, 6.0, 7.0)),
}


def tensorflow():
    return lambda: FakeTfDataset([np.float32(x) for x in (5, 6, 7)])


def grain():
    grain = pytest.importorskip("grain")
    return lambda: grain.MapDataset.source([5.0, 6.0, 7.0]).to_iter_dataset()


def torch():
    data = pytest.importorskip("torch.utils.data")
    return lambda: data.DataLoader(np.float32([5, 6, 7]), batch_size=1)


SOURCES |= {"tf.data": tensorflow, "grain": grain, "torch": torch}


def test_each_worker_reads_all_of_it_from_the_start(one):
    step = one.function(lambda iterator: next(iterator))
    for name, source in SOURCES.items():
        try:
            dataset = one.create_per_worker_dataset(source())
        except pytest.skip.Exception:  # its library is not installed
            continue
        iterator = iter(dataset)
        found = [one.schedule(step, (iterator,)) for _ in range(3)]
        assert np.ravel(one.fetch(found)).tolist() == [5, 6, 7], name
        again = one.schedule(step, (iter(dataset),))
        assert np.ravel(again.fetch()).tolist() == [5], name
    for element, text in (
        ("text", "is not an array of numbers"),
        (2**40, "int32 holds"),
    ):
        dataset = one.create_per_worker_dataset(lambda: [{"x": element}])  # noqa: B023
        with pytest.raises((TypeError, ValueError), match=text):
            _ = dataset.element_spec


def test_structures_and_dtypes_arrive_as_they_are(one):
    element = {"x": (np.arange(3, dtype=np.int8), 2.5), "y": [np.uint8(4), None]}
    dataset = one.create_per_worker_dataset(lambda: [element])
    step = one.function(lambda iterator: iterator.get_next())
    found = one.schedule(step, (iter(dataset),)).fetch()
    assert jax.tree.structure(found) == jax.tree.structure(element)
    assert [str(x.dtype) for x in jax.tree.leaves(found)] == [
        "int8",
        "float32",
        "uint8",
    ]
    np.testing.assert_array_equal(found["x"][0], [0, 1, 2])
    spec = dataset.element_spec
    assert spec["x"][0] == jax.ShapeDtypeStruct((3,), np.int8) and spec["y"][1] is None


def test_arrays_that_the_source_uses_again_are_copied(one):
    def make():
        memory = np.zeros(1000, np.float32)
        for i in range(6):
            memory[:] = i
            yield memory

    iterator = iter(one.create_per_worker_dataset(make))
    step = one.function(lambda iterator: next(iterator)[0])
    found = one.fetch([one.schedule(step, (iterator,)) for _ in range(6)])
    assert found == [0, 1, 2, 3, 4, 5]


def test_the_same_iterator_twice_is_one(one):
    iterator = iter(one.create_per_worker_dataset(lambda: [7, 8, 9]))
    step = one.function(lambda pair, again: (next(pair[0]), next(again)))
    assert one.schedule(step, ([iterator, 1],), {"again": iterator}).fetch() == (7, 8)


def test_the_end_is_an_error_of_that_function(one):
    with one.strategy.scope():
        total = js.Variable(0)
    iterator = iter(one.create_per_worker_dataset(lambda: range(2)))

    @one.function
    def add(iterator):
        total.assign_add(1)
        return next(iterator)

    for _ in range(3):
        value = one.schedule(add, (iterator,))
    with pytest.raises(js.OutOfRangeError, match=r"`add` took an element.*no more"):
        one.join()
    with pytest.raises(js.OutOfRangeError):
        value.fetch()
    one.join()
    assert total.value() == 2


def test_optional_elements_say_whether_there_is_one(three):
    iterator = iter(three.create_per_worker_dataset(lambda: range(1, 3)))

    @three.function
    def take(iterator):
        found = iterator.get_next_as_optional()
        return index(), (found.has_value(), found.get_value())

    found = until_each_has(three, take, (iterator,))
    three.join()
    for own in found.values():
        expected = [(True, 1), (True, 2), *[(False, 0)] * len(own)]
        assert own == expected[: len(own)]


def test_a_released_source_is_closed(one):
    closed = threading.Event()

    def make():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    iterator = iter(one.create_per_worker_dataset(lambda: make))
    step = one.function(lambda iterator: next(iterator))
    one.schedule(step, (iterator,)).fetch()
    closed.clear()  # the coordinator has read and closed its own
    del iterator
    assert closed.wait(20)


def test_the_iterator_has_one_entry_for_each_worker_and_none_here(three):
    iterator = iter(three.create_per_worker_dataset(lambda: [1]))
    assert isinstance(iterator, js.coordinator.PerWorkerValue) and len(iterator) == 3
    assert iterator.element_spec == jax.ShapeDtypeStruct((), np.int32)
    assert repr(iterator) == "<PerWorkerIterator on 3 workers>"
    calls = (lambda: next(iterator), iterator.get_next, iterator.get_next_as_optional)
    for call in (*calls, lambda: iterator.values, lambda: list(iterator)):
        with pytest.raises(NotImplementedError, match="elements are on the workers"):
            call()


def test_what_functions_cannot_do_with_iterators_is_said(three):
    dataset, kept = three.create_per_worker_dataset(lambda: [1]), []
    iterator = iter(dataset)
    jitted = r"with `@coordinator\.function` instead of `@jax\.jit`"
    python = r"(?s)`<lambda>` asked.*jax.lax.cond"
    for wrong, error, text in [
        (lambda it: 1 if index() == 0 else 2, js.errors.TracedValueError, python),
        (jax.jit(lambda it: next(it)), TypeError, jitted),
        (lambda it: next(iter(dataset)), RuntimeError, "`iter` of a per-worker datas"),
        (lambda it: sum(x for x in it), TypeError, r"with `for`: how many.*for _ in r"),
        (
            lambda it: three.create_per_worker_dataset(lambda: [1]),
            RuntimeError,
            "`create_per_worker_dataset` was called by",
        ),
    ]:
        is_plain = not isinstance(wrong, jax.stages.Wrapped)
        fn = three.function(wrong) if is_plain else wrong
        with pytest.raises(error, match=text):
            three.schedule(fn, (iterator if is_plain else [1.0, iterator],))
    three.join()
    three.schedule(three.function(lambda it: kept.append(it)), (iterator,)).fetch()
    run, strategy = three.strategy.run, three.strategy
    for call, error, text in [
        (lambda: next(kept[0]), js.errors.ContextError, "outside of the function"),
        (
            lambda: run(lambda it: next(it), (iterator,)),
            js.errors.ContextError,
            "given <PerWorkerIterator on 3 w",
        ),
        (index, RuntimeError, "code that no worker runs"),
        (lambda: run(index), RuntimeError, "no worker runs"),
    ]:
        with pytest.raises(error, match=text):
            call()
    with strategy.scope(), pytest.raises(RuntimeError, match="no worker runs"):
        index()


def test_the_index_is_traced_once_for_all_workers(three):
    traces = []

    @three.function
    def step():
        traces.append(1)
        inside = three.strategy.run(lambda: 10 * index())
        return index(), (index(), inside)

    found = until_each_has(three, step)
    assert len(traces) == 1
    for worker, own in found.items():
        for inner, inside in own:
            assert inner == worker and inner.dtype == np.int32 and inner.shape == ()
            assert inside == 10 * worker


def fails_on_workers(error):
    calls = itertools.count()

    def make():
        if next(calls):
            raise error
        return [1, 2]

    return make


def test_a_dataset_that_fails_hurts_only_who_uses_it(three):
    error = KeyError("broken")
    iterator = iter(three.create_per_worker_dataset(fails_on_workers(error)))
    plain = three.function(lambda: np.float32(1))
    value = three.schedule(plain)
    three.join()
    assert three.done() and value.fetch() == 1
    step = three.function(lambda iterator: next(iterator))
    broken = three.schedule(step, (iterator,))
    with pytest.raises(js.errors.ClosureInputError) as caught:
        three.join()
    assert caught.value.original_exception is error
    with pytest.raises(js.errors.ClosureInputError):
        broken.fetch()
    three.schedule(plain)
    three.join()


def test_an_error_while_reading_is_an_error_of_the_function(one):
    def make():
        yield 1
        yield 2
        raise KeyError("bad record")

    iterator = iter(one.create_per_worker_dataset(make))
    step = one.function(lambda iterator: next(iterator))
    assert one.fetch([one.schedule(step, (iterator,)) for _ in range(2)]) == [1, 2]
    for _ in range(2):
        one.schedule(step, (iterator,))
        with pytest.raises(KeyError, match="bad record"):
            one.join()


def test_workers_do_not_share_what_the_coordinator_has_begun(three):
    begun = iter(range(1, 10))
    iterator = iter(three.create_per_worker_dataset(lambda: begun))
    step = three.function(lambda iterator: next(iterator))
    three.schedule(step, (iterator,))
    with pytest.raises(
        js.errors.ClosureInputError, match="an iterator that the coordinator"
    ):
        three.join()
