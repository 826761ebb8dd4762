"""What each of several processes is given, without processes."""

import copy
import itertools
import json
import threading

import hypothesis.strategies as st
import numpy as np
from helpers.cases import each_of
from helpers.inputs import SECONDS, ranged
from hypothesis import given, settings

import jaxstrategy as js
from jaxstrategy._src.inputs.batches import ReplicaRange, Steps
from jaxstrategy._src.inputs.library_sources import as_source
from jaxstrategy._src.processes.agreement import Agreement


class Meeting:
    """Where threads that stand for processes say something, turn by turn."""

    def __init__(self, count):
        self.said = {}
        self.count = count
        self.left = False
        self.changed = threading.Condition()

    def exchange(self, turn, index, said):
        with self.changed:
            replies = self.said.setdefault(turn, [None] * self.count)
            replies[index] = (json.loads(json.dumps(said)),)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: all(replies) or self.left, SECONDS)
            if not all(replies):
                raise EOFError("another process has left")
        return [each[0] for each in replies]

    def leave(self):
        with self.changed:
            self.left = True
            self.changed.notify_all()


class Talk(Agreement):
    def __init__(self, meeting, index):
        super().__init__("input")
        self._meeting, self._index, self._turn = meeting, index, 0

    def exchange(self, said):
        self._turn += 1
        return self._meeting.exchange(self._turn, self._index, said)


def in_processes(
    count, local, make, remainder="pad", resumed=None, most=None, meeting=None,
    after=lambda index, step: None,
):  # fmt: skip
    """What each process feeds: its steps, or what it raised."""
    meeting = meeting or Meeting(count)
    found = [None] * count

    def process(index):
        replicas = ReplicaRange(count * local, index * local, local)
        steps = Steps(*make(index), replicas, Talk(meeting, index), remainder)
        fed = []
        try:
            if resumed is not None:
                steps.set_state(json.loads(json.dumps(resumed[index])))
            for step in itertools.islice(steps, most):
                fed.append(step)
                after(index, len(fed))
            found[index] = fed
        except (ValueError, EOFError) as error:
            meeting.leave()
            found[index] = error

    workers = [
        threading.Thread(target=process, args=(i,), daemon=True) for i in range(count)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
        assert not worker.is_alive(), "a process hangs"
    return found


def of_global(batches):
    # Each process has a source of its own.
    return lambda index: ([as_source(copy.copy(batches)).start()], True)


def of_pipelines(lists):
    return lambda index: ([as_source(lists[index]).start()], False)


def rows_of(step, index, local):
    """The real rows of a process's replicas."""
    own = step.counts[index * local : (index + 1) * local]
    (array,) = step.arrays
    each = step.counts[0] if len(step.counts) == 1 else step.each  # as it is
    assert array.shape[:2] == (local, each)
    return [part[:count].tolist() for part, count in zip(array, own, strict=True)]


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 50),
    size=st.integers(1, 20),
    count=st.integers(1, 4),
    local=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_each_process_has_its_own_rows_of_global_batches(
    rows, size, count, local, shuffle
):
    shuffled = 5 if shuffle else None
    batches = list(js.batches(np.arange(rows), size, shuffle=shuffled))
    for source in (js.batches(np.arange(rows), size, shuffle=shuffled), batches):
        found = in_processes(count, local, of_global(source))
        assert {len(each) for each in found} == {len(batches)}
        for step, batch in enumerate(batches):
            parts = [rows_of(found[p][step], p, local) for p in range(count)]
            flat = [row for process in parts for part in process for row in part]
            assert flat == batch.tolist()
            counts = {each[step].counts for each in found}
            assert len(counts) == 1 and sum(counts.pop()) == len(batch)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.integers(2, 17), min_size=1, max_size=4),
    local=st.integers(1, 3),
    size=st.integers(1, 2),
)
def test_processes_with_uneven_pipelines_end_together(lengths, local, size):
    lists = [
        [np.arange(i, min(i + size, n)) + 100 * p for i in range(0, n, size)]
        for p, n in enumerate(lengths)
    ]
    found = in_processes(len(lists), local, of_pipelines(lists))
    steps = max(-(-len(each) // local) for each in lists)
    assert [len(each) for each in found] == [steps] * len(lists)
    for p, batches in enumerate(lists):
        parts = [part for step in found[p] for part in rows_of(step, p, local)]
        wanted = [batch.tolist() for batch in batches]
        assert parts == wanted + [[]] * (steps * local - len(wanted))
    for step in range(steps):
        assert len({each[step].counts for each in found}) == 1


def test_what_is_in_memory_is_agreed_about_once_and_ends_together():
    lists = [
        [np.arange(n) for n in [4] * 40 + [1] + [4] * length] for length in (9, 0, 5)
    ]
    meeting = Meeting(3)
    found = in_processes(3, 2, of_pipelines(lists), meeting=meeting)
    for p, batches in enumerate(lists):
        parts = [part for step in found[p] for part in rows_of(step, p, 2)]
        wanted = [batch.tolist() for batch in batches]
        assert parts == wanted + [[]] * (50 - len(wanted))
    assert len(meeting.said) <= 9  # 25 steps, and the end

    batches = js.batches(np.arange(99), 8, shuffle=1, epochs=4)
    meeting = Meeting(2)
    found = in_processes(2, 2, of_global(batches), meeting=meeting)
    for step, batch in enumerate(batches):
        rows = [
            row
            for p in range(2)
            for part in rows_of(found[p][step], p, 2)
            for row in part
        ]
        assert rows == batch.tolist()
    assert len(found[0]) == 52 and len(meeting.said) <= 3

    # Of a generator nothing is known ahead, and little is said.
    meeting = Meeting(2)
    in_processes(2, 2, of_global(lambda: iter(list(batches))), meeting=meeting)
    assert len(meeting.said) == 53
    assert sum(len(str(replies)) for replies in meeting.said.values()) < 53 * 40


def test_a_list_that_is_changed_while_it_is_read():
    lists = [[np.arange(4)] * 3, [np.arange(4)] * 3]

    def change(index, steps):
        if index == 0 and steps == 2:
            lists[0][2] = np.arange(1)

    found = in_processes(2, 1, of_pipelines(lists), after=change)
    text = "Step 2 has (1,) rows, where the other processes count on (4,) of the repl"
    assert text in str(found[0])


def test_processes_with_different_sizes():
    lists = [list(ranged(8, 2)), list(ranged(9, 3))]
    found = in_processes(2, 2, of_pipelines(lists))
    assert [[rows_of(step, p, 2) for step in found[p]] for p in range(2)] == [
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], []]],
    ]
    assert {step.each for process in found for step in process} == {3}
    states = [process[0].state for process in found]
    states[0] = {**states[0], "rows": 2}
    text = "The replicas' batches have different sizes: 2 in process 0, 3 in process 1"
    errors = in_processes(2, 2, of_pipelines(lists), resumed=states)
    assert all(text in str(error) for error in errors)


def test_a_process_without_batches():
    found = in_processes(2, 1, of_pipelines([list(ranged(4, 2)), []]))
    text = "The input pipeline of this process has no batches, but another one's has."
    assert text in str(found[1])
    found = in_processes(2, 1, of_pipelines([[], []]))
    assert all("The dataset has no batches" in str(error) for error in found)


@each_of("used", [1, 2, 3, 4])
def test_processes_resume_even_after_their_own_end(used):
    lists = [list(ranged(4, 2)), list(ranged(10, 2))]
    begun = in_processes(2, 1, of_pipelines(lists), most=used)
    states = [each[-1].state for each in begun]
    rest = in_processes(2, 1, of_pipelines(lists), resumed=states)
    whole = in_processes(2, 1, of_pipelines(lists))
    assert [len(each) for each in rest] == [5 - used] * 2
    for p in range(2):
        assert [rows_of(step, p, 1) for step in rest[p]] == [
            rows_of(step, p, 1) for step in whole[p][used:]
        ]
