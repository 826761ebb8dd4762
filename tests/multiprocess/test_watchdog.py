"""A step without progress, or a process that ends, ends the job with the reason."""

import threading

import jax.numpy as jnp
import pytest
from harness import (
    STATUS,
    ExitCode,
    Member,
    ProcessState,
    Store,
    Watchdog,
    until,
    watchdog as _watchdog,
)

# A loop that says when it is under way, and goes on until something ends it.
LOOP = """
for step in range(100_000):
    out = total(RANK)
    if step % 5 == 0:
        float(out)
    if step == 20:
        print("going")
    time.sleep(0.005)
"""


class Ends:
    """What the watchdog would have ended the process with."""

    def __init__(self, board):
        self.calls = []
        self.came = threading.Event()
        self._looked = 0
        look = board.look_at_process_0

        def counted():
            self._looked += 1
            look()

        board.look_at_process_0 = counted  # the watchdog calls it whenever it looks

    def looks(self, count):
        """Waits until the watchdog has looked so often: each eighth of its time."""
        wanted = self._looked + count
        until(lambda: self._looked >= wanted)

    def __call__(self, code, text, before):
        self.calls.append((code, text))
        self.came.set()


class Token:
    """A result that is computed when the test says so."""

    def __init__(self):
        self.done = threading.Event()
        self.is_waited_for = threading.Event()

    def block_until_ready(self):
        self.is_waited_for.set()
        self.done.wait(20)


@pytest.fixture
def watched():
    made = []

    def of(seconds, **options):
        board = Store()
        ends = Ends(board)
        watchdog = Watchdog(board, seconds, end=ends, **options)
        watchdog.start()
        made.append(watchdog)
        return watchdog, ends

    yield of
    for watchdog in made:
        watchdog.stop()


def test_a_call_or_a_result_that_does_not_come_is_reported(watched):
    watchdog, ends = watched(0.3)
    watchdog.step_started("train_step", "train.py:30: strategy.run(train_step)")
    assert ends.came.wait(10)
    code, text = ends.calls[0]
    assert code == ExitCode.WATCHDOG == 75
    assert "step 1, train_step at train.py:30: strategy.run(train_step)" in text
    assert "MainThread, the innermost call last:" in text
    assert "assert ends.came.wait(10)" in text  # the line that waits
    assert "jaxstrategy-" not in text
    last = text.rstrip().rsplit("\n", 1)[-1]
    assert last.startswith("jaxstrategy: process 0 waited") and "in step 1" in last
    watchdog, ends = watched(0.3)
    token = Token()
    watchdog.step_started("train_step")
    watchdog.step_dispatched(token)
    assert ends.came.wait(10)
    assert "in step 1" in ends.calls[0][1]
    token.done.set()


def test_steps_that_are_computed_are_not_reported(watched):
    array = jnp.ones(3) + 1
    watchdog, ends = watched(0.5)
    for _ in range(5):
        watchdog.step_started("train_step")
        watchdog.step_dispatched(array)
    ends.looks(12)
    assert not ends.calls and watchdog.pending is None
    assert watchdog.told() == "step 5, train_step"


def test_a_queue_of_results_that_goes_on_is_progress(watched):
    watchdog, ends = watched(1.5)
    tokens = [Token() for _ in range(10)]
    for token in tokens:
        watchdog.step_started("train_step")
        watchdog.step_dispatched(token)
    for token in tokens:
        assert token.is_waited_for.wait(10)
        ends.looks(2)  # all of them take longer than one may
        token.done.set()
    assert not ends.calls


@pytest.mark.slow
def test_progress_gives_the_step_its_whole_time_again(watched):
    watchdog, ends = watched(1.2)
    watchdog.step_started("evaluate")
    for _ in range(8):
        ends.looks(3)
        watchdog.step_progress()
    assert not ends.calls
    assert ends.came.wait(10)


def test_a_call_that_compiles_has_longer(watched):
    watchdog, ends = watched(0.2, busy_seconds=2.5)
    watchdog.step_started("train_step", busy="compiles")
    ends.looks(12)
    assert not ends.calls and watchdog.status()["busy"]
    assert ends.came.wait(10)


def test_others_are_waited_for_while_they_compile(boards, capfd):
    zero, one = boards(2)
    ends = Ends(zero)
    watchdog = Watchdog(zero, 0.3, end=ends)
    compiles = dict(state(1, step=1, busy="compiles").status)
    one.status = lambda: compiles
    until_status(zero)
    watchdog.start()
    watchdog.step_started("train_step")
    ends.looks(24)
    assert not ends.calls
    said = capfd.readouterr().err
    assert said.count("process 1 (host host1, pid 101), which compiles") == 1
    compiles["busy"] = None
    assert ends.came.wait(10)
    watchdog.stop()


def until_status(board):
    until(lambda: board.states()[1].status)


def test_who_has_finished_earlier_is_not_waited_for_long(boards, monkeypatch):
    monkeypatch.setattr(_watchdog, "_LEFT_SECONDS", 0.2)
    zero, one = boards(2)
    ends = Ends(zero)
    watchdog = Watchdog(zero, 60, end=ends)
    one.leave(STATUS | {"step": 1})
    watchdog.start()
    watchdog.step_started("train_step")
    ends.looks(2)
    assert not ends.calls  # the other has begun step 1, too
    watchdog.step_dispatched()
    watchdog.step_started("train_step")
    assert ends.came.wait(10)
    last = ends.calls[0][1].rstrip().rsplit("\n", 1)[-1]
    assert "process 1 (host host1, pid 101) has finished already, after step 1" in last
    assert "All processes must run the same steps" in last
    watchdog.stop()


def state(
    index, step=3, pending=None, busy=None, end=None, silent=0, text="", reads=()
):
    status = {
        "step": step,
        "what": f"step {step}, f at a.py:1",
        "pending": pending,
        "seconds": 2.5,
        "busy": busy,
        "writes": None,
        "arrivals": [],
        "reads": reads,
    }
    status = status if step is not None else None
    return ProcessState(Member(index, "h", 10 + index), status, end, silent, text)


def test_the_suspicion_names_the_culprit():
    for other, text in [
        (state(1, end="left"), "process 1 (host h, pid 11) has finished already."),
        (state(1, end="failed", text="E: x"), "process 1 (host h, pid 11) failed: E: "),
        (state(1, silent=9.5), "(host h, pid 11) has not answered for 9.5 s. It is s"),
        (state(1, step=2), "process 1 (host h, pid 11) has not begun this step."),
        (state(1, step=3), "all processes answer and have begun this step."),
        (state(1, step=None), "all processes answer and have begun this step."),
    ]:
        states = [state(0, pending="step 3"), other, state(2, step=5)]
        assert text in _watchdog.suspicion(states, 0, "step 3", 10.0, 3)
    for other, text in [
        (state(1), "process 1 (host h, pid 11) has not come to saving. process 1"),
        (state(1, pending="saving"), "all processes answer and have come to saving"),
        (state(1, pending="saving", reads=[["batch 3", 2.0]]), "have come to saving"),
        (
            state(1, pending="saving", reads=[["batch 3", 6.0]]),
            "the input pipeline of process 1 (host h, pid 11) has not delivered batch 3"
            " for 6.0 s",
        ),
    ]:
        states = [state(0, pending="saving"), other]
        assert text in _watchdog.suspicion(states, 0, "saving", 10.0, None)


def test_each_process_is_described():
    for process, text in [
        (state(1, end="died", silent=9.5), "has died: killed, out of memory"),
        (state(1, step=None), "had not said how far it is"),
        (state(1, pending="step 3", busy="compiles"), "compiles, for 2.5 s; last: st"),
        (
            state(1, pending="step 2"),
            "had been in step 2 for 2.5 s; last begun: step 3",
        ),
        (
            state(1, reads=[["batch 4", 2.0], ["batch 5", 0.1]]),
            "waited for nothing; last: step 3, f at a.py:1; its input pipeline has not "
            "delivered batch 4 for 2.0 s",
        ),
        (
            state(1, silent=9.5),
            "has not answered for 9.5 s; before, it waited for noth",
        ),
    ]:
        assert f"process 1 (host h, pid 11) {text}" in _watchdog.described(process)


def test_a_killed_process_ends_the_others_by_name(job):
    with job(LOOP, count=3, env={"JAX_NUM_CPU_DEVICES": "2"}) as running:
        running.wait_for("going")
        running.signal(1, 9)
        assert running.wait(20) == [76, -9, 76]
        for rank in (running.ranks[k] for k in (0, 2)):
            assert f"process {rank.index} (last begun: step 2" in rank.output
            assert rank.last_line.startswith("jaxstrategy: process 1 (host ")
            assert f"pid {running.ranks[1].process.pid}) has died" in rank.last_line


@pytest.mark.slow
def test_the_death_of_process_0_ends_the_others_by_name(job):
    with job(LOOP) as running:
        running.wait_for("going")
        running.signal(0, 9)
        assert running.wait(20) == [-9, 76]
        # Some thread of JAX's may put in a word.
        assert "jaxstrategy: process 0 (host " in running.ranks[1].output
        assert "has died: killed, out of memory" in running.ranks[1].output


def test_an_exception_ends_the_job_with_its_words_last(job, who=1):
    script = f"""
    for step in range(100_000):
        float(total(RANK))
        if step == 5 and RANK == {who}:
            raise ValueError("bad batch")
    """
    with job(script) as running:
        codes = running.wait(20)
        assert codes[who] == 1 and codes[1 - who] == 76
        failing, other = running.ranks[who], running.ranks[1 - who]
        assert "\nValueError: bad batch\n" in failing.output
        assert (
            failing.last_line == f"jaxstrategy: process {who} ends, and with it the job"
        )
        assert f"process {who} (host" in other.last_line
        assert "failed: ValueError: bad batch (" in other.last_line
        assert f"script{who}.py:" in other.last_line  # where it was raised
