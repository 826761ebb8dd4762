"""Agreement between processes, without a watchdog and without JAX."""

import contextlib

import numpy as np
import pytest

from jaxstrategy import ClusterError
from jaxstrategy.cluster.agreement._agreement import LoneAgreement, ProcessAgreement
from jaxstrategy.cluster.agreement._operation import Operation
from jaxstrategy.cluster.agreement._operation_agreement import OperationAgreement


class Watch:
    """Notes what it is told, in place of a watchdog."""

    def __init__(self):
        self.told = []

    @contextlib.contextmanager
    def waiting(self, what, busy=None):
        self.told.append(f"waits for {what}")
        yield
        self.told.append("waits no more")

    @contextlib.contextmanager
    def reading(self, what):
        self.told.append(f"reads {what}")
        yield

    def step_started(self, what, where=None, busy=None):
        self.told.append(f"begins {what}")

    def step_dispatched(self):
        self.told.append("has begun")


def in_all(pool, calls):
    """What each call gives, or the error that it raises."""

    def result(call):
        try:
            return call()
        except ClusterError as error:
            return str(error)

    return list(pool.map(result, calls))


@pytest.fixture
def operations(boards):
    return [OperationAgreement(board, Watch()) for board in boards(3)]


def test_one_process_agrees_with_itself():
    alone = LoneAgreement()
    assert alone.topic is None and alone.exchange({"a": 1}) == [{"a": 1}]
    with alone.waiting("nobody"), alone.reading("nothing"):
        pass


def test_all_hear_what_each_says(boards, pool):
    agreements = [ProcessAgreement(board, Watch(), "input 0") for board in boards(3)]
    for turn in range(3):
        calls = [
            lambda k=k, one=one, turn=turn: one.exchange([k, turn])
            for k, one in enumerate(agreements)
        ]
        assert in_all(pool, calls) == [[[k, turn] for k in range(3)]] * 3


def test_topics_do_not_mix(boards, pool):
    made = boards(2)
    topics = [("a", "b"), ("b", "a")]  # each process in an order of its own
    agreements = [
        ProcessAgreement(board, Watch(), topic)
        for board, own in zip(made, topics, strict=True)
        for topic in own
    ]
    calls = [lambda one=one: one.exchange(one.topic) for one in agreements]
    assert in_all(pool, calls) == [[topic] * 2 for own in topics for topic in own]


def test_who_does_not_come_is_named(boards):
    board = boards(2)[0]
    with pytest.raises(ClusterError, match="Waited 0.1 s in 'late' for process 1"):
        ProcessAgreement(board, Watch(), "late").exchange(1, 0.1)


def test_a_watch_is_told_of_waits(boards):
    watch = Watch()
    agreement = ProcessAgreement(boards(1)[0], watch, "input 0")
    with agreement.reading("batch 0"), agreement.waiting("batch 1"):
        pass
    assert watch.told == ["reads batch 0", "waits for batch 1", "waits no more"]


def test_the_same_operation(operations, pool):
    calls = [
        lambda k=k, one=one: one.agree("save checkpoint 3", k)
        for k, one in enumerate(operations)
    ]
    assert in_all(pool, calls) == [[0, 1, 2]] * 3
    assert operations[0]._watch.told == ["waits for save checkpoint 3", "waits no more"]


def test_another_operation_is_told_to_all(operations, pool):
    names = ["save checkpoint 3", "save checkpoint 3", "restore checkpoint 3"]
    calls = [
        lambda one=one, name=name: one.agree(name)
        for one, name in zip(operations, names, strict=True)
    ]
    (text,) = set(in_all(pool, calls))
    assert text.startswith("The processes are about to do different things together:\n")
    assert "\n  process 0: `save checkpoint 3` (" in text
    assert "\n  process 2: `restore checkpoint 3` (" in text
    assert text.endswith("All processes must do the same, in the same order.")
    # Each ends by this error, and takes none of the others' ends for its reason.
    assert [one._board.common_error for one in operations] == [text] * 3


def test_all_count_steps_anew_after_a_refusal(operations, pool):
    """Only some of them may have counted what was refused."""

    class Counter:
        count = 7

        def start_over(self):
            self.count = 0

    counters = [Counter() for _ in operations]
    for one, counter in zip(operations, counters, strict=True):
        one.on_refusal(counter.start_over)
    del counters[2], counter  # a strategy that is gone is not asked
    in_all(pool, [lambda one=one: one.agree("mirror a value") for one in operations])
    assert [each.count for each in counters] == [7, 7]
    calls = [
        lambda one=one, name=name: one.agree(name)
        for one, name in zip(operations, ["step", "mirror", "step"], strict=True)
    ]
    in_all(pool, calls)
    assert [each.count for each in counters] == [0, 0]


@pytest.mark.parametrize(
    ("others", "told"),
    [
        (
            [np.ones(3, np.float32)],
            "array 0 of its arguments: float32[2]\n  process 2: float32[3]",
        ),
        (
            [np.ones(2, np.int32)],
            "array 0 of its arguments: float32[2]\n  process 2: int32[2]",
        ),
        ([], "with 1 arrays\n  process 2: the same with 0"),
    ],
    ids=["shape", "dtype", "number"],
)
def test_other_arrays_are_told_to_all(operations, pool, others, told):
    def exchanging(one, *arrays):
        with one.exchanging("one value", *arrays):
            raise AssertionError("it has begun")

    same = np.ones(2, np.float32)
    given = [[same], [same], others]
    calls = [
        lambda one=one, arrays=arrays: exchanging(one, *arrays)
        for one, arrays in zip(operations, given, strict=True)
    ]
    (text,) = set(in_all(pool, calls))
    assert "process 0: `one value` (" in text and told in text
    assert operations[0]._watch.told == ["begins one value", "has begun"]


def program(name="step", code="00", values=("11",), captured=("f32[2]",)):
    return {"name": name, "prints": [code, *values], "captured": list(captured)}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ([program(code="01")], "The code differs, or a number in it."),
        ([program(values=["12"])], "What it captures differs:\n  f32[2]"),
        ([], "One of them has made none."),
        ([program(), program()], "One of them has made none."),
        (
            [program(values=["12"], captured=["f32[2], argument `w`"])],
            "What it captures differs:\n  f32[2]",
        ),
    ],
    ids=["code", "captured", "none", "one more", "said by the first"],
)
def test_other_programs_are_told_to_all(operations, pool, other, told):
    made = [[program()], other, [program()]]
    calls = [
        lambda one=one, made=made: one.compare(Operation("s", "f.py:1", (), made), "")
        for one, made in zip(operations, made, strict=True)
    ]
    (text,) = set(in_all(pool, calls))
    assert text.startswith("Processes 0 and 1 have made different programs of `step`")
    assert told in text


def test_programs_come_before_operations(operations, pool):
    """Who steps differently and has another program hears of the program."""
    made = [Operation("s", "f.py:1"), Operation("t", "f.py:1")]
    made += [Operation("s", "f.py:1", (), [program()])]
    calls = [
        lambda one=one, operation=operation: one.compare(operation, "advice")
        for one, operation in zip(operations, made, strict=True)
    ]
    (text,) = set(in_all(pool, calls))
    assert text.startswith("Processes 0 and 2 have made different programs of `step`")
