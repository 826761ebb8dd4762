"""Who comes late to the steps is named, with how much."""

import pytest
from harness import Member, late as found_late

ZERO, ONE = Member(0, "a", 10), Member(1, "b", 11)


def rows(delay, steps=100, period=0.1, every=64):
    """Of a process that comes so much late to each step."""
    return [[k, k // every, k % every * period + delay(k)] for k in range(steps)]


def test_the_slowest_is_named_with_median_and_tail():
    told = {ZERO: rows(lambda k: 0.0), ONE: rows(lambda k: 0.09 if k < 10 else 0.03)}
    found = found_late.stragglers(told)
    assert found.steps == 100 and found.step_seconds == pytest.approx(0.1)
    zero, one = found.processes
    assert (zero.median, zero.tail) == (0, 0)
    assert one.median == pytest.approx(0.03) and one.tail == pytest.approx(0.09)
    assert found.slowest == one
    assert found.verdict == (
        "process 1 (host b, pid 11) is late: it comes 30.0 ms after the first to a "
        "step (95 %: 90.0 ms), 30% of a step"
    )
    assert "process 0 (host a, pid 10): median 0.0 ms, 95 % 0.0 ms" in str(found)


def test_who_is_late_by_little_or_not_seen_is_not_named():
    found = found_late.stragglers({ZERO: rows(lambda k: 0), ONE: rows(lambda k: 0.005)})
    assert found.slowest is None
    assert found.verdict == "no process is late, in 100 steps"
    told = {ZERO: rows(lambda k: 0)[50:], ONE: rows(lambda k: 0.05, steps=55)}
    found = found_late.stragglers(told)
    assert found.steps == 5 and found.slowest is None
    assert found.verdict == "only 5 steps were seen, too few to tell who is late"
    told[ONE] = told[ONE][:51]
    assert found_late.stragglers(told).verdict.startswith("only 1 step was seen")


def compared(delay, steps=20, period=0.1):
    """The same where each step is compared, and times begin anew: the first ones."""
    return [[k, k, period + delay] for k in range(1, steps + 1)]


def test_a_step_takes_as_long_where_each_is_compared():
    found = found_late.stragglers({ZERO: compared(0), ONE: compared(0.001)})
    assert found.step_seconds == pytest.approx(0.101)
    assert found.verdict == "no process is late, in 20 steps"
    found = found_late.stragglers({ZERO: compared(0), ONE: compared(0.1)})
    assert found.verdict.endswith(" 100.0 ms), 50% of a step")
