"""The queue of scheduled functions alone: order, errors, cancellation, threads."""

import random
import threading

import pytest
from helpers.threads import until

import jaxstrategy as js
from jaxstrategy.coordinator._closure_queue import AbstractClosure, ClosureQueue


class Closure(AbstractClosure):
    """Remembers how it ended."""

    def __init__(self, name="f"):
        self.name, self.ends = name, []

    def succeed(self, results):
        self.ends.append(("results", results))

    def fail(self, error):
        self.ends.append(("error", error))


@pytest.fixture(params=[256 * 1024, 2], ids="limit {}".format)
def queue(request):
    """COO-17: with a limit of two, the same happens."""
    return ClosureQueue(request.param)


def in_thread(function, *args):
    """Call it in a thread; `result` says what it returned or raised."""

    def call():
        try:
            thread.result = function(*args)
        except BaseException as error:
            thread.result = error

    thread = threading.Thread(target=call, daemon=True)
    thread.result = None
    thread.start()
    return thread


def ended(thread):
    thread.join(20)
    assert not thread.is_alive(), "it still waits"
    return thread.result


def is_waiting(thread):
    """It has not returned, although there was time for it."""
    thread.join(0.05)
    return thread.is_alive()


def put(queue, *names):
    closures = [Closure(name) for name in names]
    for closure in closures:
        queue.put(closure)
    return closures


def test_first_in_first_out(queue):
    a, b = put(queue, "a", "b")
    assert queue.get() is a and queue.get() is b
    assert not queue.done()
    queue.mark_finished(a, 1)
    assert not queue.done()
    queue.mark_finished(b, 2)
    assert queue.done() and queue.wait()
    assert a.ends == [("results", 1)] and b.ends == [("results", 2)]


def test_what_was_put_back_comes_last_and_is_not_done(queue):
    a, b = put(queue, "a", "b")
    assert queue.get() is a
    queue.put_back(a)
    assert not queue.done() and a.ends == []
    assert queue.get() is b and queue.get() is a
    queue.mark_finished(b)
    queue.mark_finished(a)
    assert queue.done()


def test_what_is_put_back_needs_no_room():
    queue = ClosureQueue(1)
    (a,) = put(queue, "a")
    assert queue.get() is a
    put(queue, "b")
    queue.put_back(a)
    assert queue.queued == 2


def test_a_full_queue_lets_put_wait():
    queue = ClosureQueue(2)
    a, _ = put(queue, "a", "b")
    third = in_thread(queue.put, Closure("c"))
    assert is_waiting(third)
    assert queue.get() is a
    assert ended(third) is None and queue.queued == 2


def test_a_full_queue_lets_put_raise_what_failed_meanwhile():
    queue = ClosureQueue(1)
    (a,) = put(queue, "a")
    queue.get()
    put(queue, "b")
    third = in_thread(queue.put, Closure("c"))
    assert is_waiting(third)
    error = ValueError("no")
    queue.mark_failed(a, error)
    assert ended(third) is error and queue.queued == 0


def test_wait_returns_at_once_for_nothing_and_for_what_has_ended(queue):
    assert queue.wait() and queue.wait(0)
    (a,) = put(queue, "a")
    queue.get()
    queue.mark_finished(a)
    assert queue.wait() and queue.wait() and queue.done()


def test_wait_says_when_the_time_is_over(queue):
    (a,) = put(queue, "a")
    assert queue.wait(0.01) is False
    queue.get()
    assert queue.wait(0) is False
    queue.mark_finished(a)
    assert queue.wait(0) is True


def test_get_ends_after_its_time_and_when_the_queue_stops(queue):
    assert queue.get(timeout=0.01) is None
    waiting = in_thread(queue.get)
    assert is_waiting(waiting)
    queue.stop()
    assert ended(waiting) is None and queue.get() is None


def test_tagged_closures_go_to_their_tag_and_are_not_waited_for(queue):
    mine, (any_,) = Closure("mine"), put(queue, "any")
    queue.put(mine, tag=1)
    assert queue.get(tag=0) is any_
    assert queue.get(tag=0, timeout=0) is None and queue.get(timeout=0) is None
    queue.mark_finished(any_)
    assert queue.done() and queue.wait()
    assert queue.get(tag=1) is mine and queue.get(tag=1, timeout=0) is None


def test_a_tagged_closure_wakes_the_one_it_is_for(queue):
    threads = [in_thread(queue.get, tag) for tag in range(3)]
    assert all(is_waiting(thread) for thread in threads)
    mine = Closure()
    queue.put(mine, tag=2)
    assert ended(threads[2]) is mine
    assert is_waiting(threads[0]) and is_waiting(threads[1])
    queue.stop()
    assert [ended(thread) for thread in threads[:2]] == [None, None]


def test_a_tagged_closure_comes_before_the_others(queue):
    mine, (any_,) = Closure(), put(queue, "any")
    queue.put(mine, tag=1)
    assert queue.get(tag=1) is mine and queue.get(tag=1) is any_


def failing(queue, *others):
    """A queue in which the first of these has failed; all are in flight."""
    closures = put(queue, *("f", *others)[:2])
    for _ in closures:
        queue.get()
    error = ValueError("some error")
    queue.mark_failed(closures[0], error)
    return error, *closures


def test_wait_raises_the_very_error_once(queue):
    error, closure = failing(queue)
    with pytest.raises(ValueError, match="some error") as raised:
        queue.wait()
    assert raised.value is error and closure.ends == [("error", error)]
    assert queue.wait() and queue.done() and not queue.has_failed


def test_put_raises_the_error_and_queues_nothing(queue):
    error, _ = failing(queue)
    late = Closure()
    with pytest.raises(ValueError) as raised:
        queue.put(late)
    assert raised.value is error and queue.queued == 0 and late.ends == []
    put(queue, "next")
    assert queue.queued == 1


def test_done_raises_the_error(queue):
    failing(queue)
    with pytest.raises(ValueError):
        queue.done()
    assert queue.done()


@pytest.mark.parametrize("call", ["wait", "done", "put"])
def test_the_error_comes_when_nothing_runs_any_more(queue, call):
    error, _, other = failing(queue, "other")
    args = (Closure(),) if call == "put" else ()
    thread = in_thread(getattr(queue, call), *args)
    assert is_waiting(thread)
    queue.mark_finished(other, 5)
    assert ended(thread) is error
    (kind, cancelled), *more = other.ends
    assert kind == "error" and isinstance(cancelled, js.CancelledError) and not more
    assert cancelled.__cause__ is error


def test_time_may_be_over_before_nothing_runs_any_more(queue):
    error, _, other = failing(queue, "other")
    assert queue.wait(0.01) is False
    queue.mark_finished(other)
    with pytest.raises(ValueError) as raised:
        queue.wait(0)
    assert raised.value is error


def test_an_error_cancels_what_is_queued():
    queue = ClosureQueue()
    closures = put(queue, *"abcd")
    queue.get()
    queue.mark_failed(closures[0], ValueError("first"))
    assert queue.queued == 0
    for closure in closures[1:]:
        ((_, error),) = closure.ends
        assert isinstance(error, js.CancelledError)
        assert "another one had failed: ValueError: first" in str(error)
    with pytest.raises(ValueError):
        queue.wait()
    assert queue.get(timeout=0) is None


def test_what_is_put_back_after_an_error_is_cancelled(queue):
    error, _, other = failing(queue, "other")
    queue.put_back(other)
    ((_, cancelled),) = other.ends
    assert isinstance(cancelled, js.CancelledError) and queue.queued == 0
    with pytest.raises(ValueError):
        queue.wait()


def test_only_the_first_error_is_raised(queue):
    error, _, other = failing(queue, "other")
    second = KeyError("second")
    queue.mark_failed(other, second)
    assert other.ends == [("error", second)]
    with pytest.raises(ValueError) as raised:
        queue.wait()
    assert raised.value is error
    assert queue.wait() and queue.done()


def test_of_two_that_wait_one_raises_and_the_other_goes_on(queue):
    (a,) = put(queue, "a")
    queue.get()
    threads = [in_thread(queue.wait) for _ in range(2)]
    assert all(is_waiting(thread) for thread in threads)
    error = ValueError("no")
    queue.mark_failed(a, error)
    results = [ended(thread) for thread in threads]
    assert error in results and True in results


def test_an_error_for_ever_is_raised_each_time(queue):
    (a,) = put(queue, "a")
    mine = Closure()
    queue.put(mine, tag=1)
    error = js.ParameterServerLost("gone")
    queue.cancel(error, for_ever=True)
    for call in (queue.wait, queue.done, lambda: queue.put(Closure()), queue.wait):
        with pytest.raises(js.ParameterServerLost) as raised:
            call()
        assert raised.value is error
    ((_, cancelled),) = a.ends
    assert isinstance(cancelled, js.CancelledError) and cancelled.__cause__ is error
    late = Closure()
    queue.put(late, tag=1)
    for closure in (mine, late):
        ((_, aborted),) = closure.ends
        assert isinstance(aborted, js.ClosureAbortedError)
        assert aborted.original_exception is error


def test_a_users_error_comes_before_one_for_ever(queue):
    error, _, other = failing(queue, "other")
    lost = js.ParameterServerLost("gone")
    queue.cancel(lost, for_ever=True)
    queue.mark_failed(other, lost)
    with pytest.raises(ValueError):
        queue.wait()
    with pytest.raises(js.ParameterServerLost):
        queue.wait()


def test_a_stopped_queue_cancels_all_and_takes_nothing(queue):
    (a,) = put(queue, "a")
    mine = Closure()
    queue.put(mine, tag=1)
    waiting = in_thread(queue.wait)
    assert is_waiting(waiting)
    queue.stop()
    assert "coordinator is closed" in str(ended(waiting))
    for closure in (a, mine):
        ((_, error),) = closure.ends
        assert isinstance(error, js.CancelledError) and "is closed" in str(error)
    for call in (queue.wait, queue.done, lambda: queue.put(Closure())):
        with pytest.raises(RuntimeError, match="coordinator is closed"):
            call()


def test_what_runs_may_end_after_the_queue_has_stopped(queue):
    a, b = put(queue, "a", "b")
    queue.get(), queue.get()
    queue.stop()
    queue.mark_finished(a, 3)
    queue.put_back(b)
    assert a.ends == [("results", 3)]
    ((_, error),) = b.ends
    assert isinstance(error, js.CancelledError)


def test_each_closure_is_done_once_although_one_is_put_back():
    queue = ClosureQueue()
    closures = put(queue, *"ABCDE")
    put_back = threading.Event()

    def process():
        while (closure := queue.get()) is not None:
            if closure.name == "B" and not put_back.is_set():
                put_back.set()
                queue.put_back(closure)
            else:
                queue.mark_finished(closure, closure.name)

    threads = [in_thread(process) for _ in range(2)]
    assert queue.wait(20)
    queue.stop()
    assert [ended(thread) for thread in threads] == [None, None]
    assert put_back.is_set()
    assert [c.ends for c in closures] == [[("results", name)] for name in "ABCDE"]


def test_many_threads_leave_a_consistent_queue():
    queue = ClosureQueue(100)
    made, taken = [], []

    def act(seed):
        chance = random.Random(seed)
        for _ in range(20):
            closure = Closure()
            made.append(closure)
            queue.put(closure)
            got = queue.get()
            while chance.random() < 0.5:
                queue.put_back(got)
                got = queue.get()
            taken.append(got)
            queue.mark_finished(got)

    threads = [in_thread(act, seed) for seed in range(10)]
    assert [ended(thread) for thread in threads] == [None] * 10
    assert queue.wait(20) and queue.done() and queue.running == ()
    assert len(made) == 200 and {id(c) for c in made} == {id(c) for c in taken}
    assert all(closure.ends == [("results", None)] for closure in made)


def test_what_ends_while_others_begin_to_wait_leaves_nobody_waiting():
    queue = ClosureQueue()

    def process():
        while (closure := queue.get()) is not None:
            queue.mark_finished(closure)

    worker = in_thread(process)
    for _ in range(200):
        queue.put(Closure())
        assert queue.wait(20)
    queue.stop()
    until(lambda: not worker.is_alive())
