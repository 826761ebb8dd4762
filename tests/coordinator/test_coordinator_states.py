"""What a coordinator says of itself: timeouts, states, metrics, the live table."""

import io
import re

import numpy as np
import pytest
from helpers.fake_workers import Gate, coordinator, here
from helpers.threads import until
from rich.console import Console
from rich.live import Live

import jaxstrategy as js
from jaxstrategy.coordinator._durations import Durations, Stopwatch

Activity = js.coordinator.WorkerActivity


def schedule(coordinated, fn, *args):
    return coordinated.schedule(coordinated.function(fn), args)


def test_a_join_that_takes_too_long_says_what_runs_where():
    with coordinator(2) as coordinated:
        gate = Gate()
        for _ in range(5):
            schedule(coordinated, gate)
        gate.wait_until_entered(2)
        with pytest.raises(TimeoutError) as raised:
            coordinated.join(timeout=0.01)
        first, *lines = str(raised.value).splitlines()
        assert first == (
            "Functions have not ended after 0.01 seconds: 2 run, 3 are queued."
        )
        assert [re.sub(r"for [\d.]+ \w+", "for T", line) for line in lines] == [
            "  worker 0: running, `gate` for T",
            "  worker 1: running, `gate` for T",
        ]
        gate.open.set()
        coordinated.join(timeout=20)


def test_the_states_of_workers():
    with coordinator(2) as coordinated:
        until(lambda: len(coordinated.backend.lives) == 2)
        gate = Gate()
        schedule(coordinated, gate)
        gate.wait_until_entered()
        states = coordinated.workers
        (busy,) = [state for state in states if state.activity is Activity.RUNNING]
        (idle,) = [state for state in states if state.activity is Activity.IDLE]
        assert busy.function == "gate" and busy.seconds > 0
        assert idle.function is None and idle.functions == 0
        assert re.fullmatch(rf"worker {busy.index}: running, `gate` for .*", str(busy))
        html = states._repr_html_()
        assert html.count("</tr>") == 3 and "gate for" in html
        assert str(states).count("\n") == 1
        gate.open.set()
        coordinated.join()
        assert sum(state.functions for state in coordinated.workers) == 1
        assert "0 queued, 0 running" in repr(coordinated)


def test_the_last_error_of_a_worker_is_among_its_state():
    with coordinator(1) as coordinated:

        def f():
            raise ValueError("<no>\nmore")

        schedule(coordinated, f)
        with pytest.raises(ValueError):
            coordinated.join()
        (state,) = coordinated.workers
        assert state.error == "ValueError: <no>\nmore"
        assert state.row()[-1] == "ValueError: <no>"
        assert str(state) == "worker 0: idle; last error: ValueError: <no>"
        assert "ValueError: &lt;no&gt;" in coordinated.workers._repr_html_()


def test_metrics_count_what_has_happened():
    """CCO-57, COO-36"""
    with coordinator(2) as coordinated:
        gate = Gate()
        f = coordinated.function(gate)
        values = [coordinated.schedule(f) for _ in range(4)]
        gate.wait_until_entered(2)
        metrics = coordinated.metrics
        assert metrics.queued_closures == 2 and metrics.inflight_closures == 2
        assert metrics.closure_execution == Durations()
        gate.open.set()
        coordinated.join()
        values[0].fetch(), values[0].get(), values[1].get()
        coordinated.schedule(coordinated.function(lambda: 1))
        coordinated.join()
        metrics = coordinated.metrics
        assert metrics.queued_closures == metrics.inflight_closures == 0
        assert metrics.function_tracing == Durations(2, 0.25, 0.25, 0.5)
        times = metrics.closure_execution
        assert times.count == 5 and 0 < times.min <= times.mean <= times.max
        assert times.max <= times.sum
        assert metrics.remote_value_fetch.count == 2


def test_durations_are_added_up():
    watch = Stopwatch()
    for seconds in (2.0, 0.5, 1.0):
        watch.add(seconds)
    found = watch.durations
    assert (found.count, found.min, found.max, found.sum) == (3, 0.5, 2.0, 3.5)
    assert found.mean == pytest.approx(3.5 / 3)
    assert Durations().mean == 0.0


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=120)


def test_the_live_table_shows_the_workers():
    with coordinator(2) as coordinated:
        gate, console = Gate(), terminal()
        with coordinated.progress("train", console=console):
            for _ in range(5):
                schedule(coordinated, gate)
            gate.wait_until_entered(2)
            written = lambda: console.file.getvalue()  # noqa: E731
            until(lambda: "gate for" in written())
            gate.open.set()
            coordinated.join()
        last = written().rpartition("train: ")[2]
        assert last.startswith("5 finished, 0 queued, 0 running")
        assert "functions/s" in last and "idle" in last
        for word in ("worker", "state", "starts", "functions", "last error"):
            assert word in last


def test_the_live_table_draws_nothing_where_nobody_looks():
    with coordinator(1) as coordinated:
        console = Console(file=io.StringIO())
        with coordinated.progress(console=console) as table:
            schedule(coordinated, lambda: 1)
            coordinated.join()
        assert console.file.getvalue() == ""
        assert str(table).startswith("1 finished, 0 queued, 0 running")


def test_the_live_table_needs_no_rich(monkeypatch):
    with coordinator(1) as coordinated:
        monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
        with coordinated.progress():
            assert schedule(coordinated, lambda: np.int32(3)).fetch() == 3


def test_the_live_table_stands_back_for_another(monkeypatch):
    from rich.errors import LiveError

    def start(self, refresh=False):
        raise LiveError("Only one live display may be active at once")

    monkeypatch.setattr(Live, "start", start)
    with coordinator(1) as coordinated:
        with coordinated.progress(console=terminal()):
            assert schedule(coordinated, lambda: np.int32(3)).fetch() == 3


def test_a_block_with_a_live_table_raises_what_its_code_raises():
    with coordinator(1) as coordinated:
        console = terminal()
        with pytest.raises(KeyError, match="mine"):
            with coordinated.progress(console=console):
                raise KeyError("mine")
        with coordinated.progress(console=console):  # the first one has ended
            pass


def test_fakes_know_where_they_are():
    with coordinator(2) as coordinated:
        value = schedule(coordinated, lambda: np.int32(here.worker.index))
        assert value.fetch() in (0, 1)
