"""A step without progress, or a process that ends, ends the job with the reason."""

import threading

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


def test_a_call_that_does_not_return_is_reported(watched):
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


def test_a_call_that_compiles_has_longer(watched):
    watchdog, ends = watched(0.2, busy_seconds=2.5)
    watchdog.step_started("train_step", busy="compiles")
    ends.looks(12)
    assert not ends.calls and watchdog.status()["busy"]
    assert ends.came.wait(10)


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
    index, step=3, pending=None, busy=None, end=None, silent=0.0, text="", reads=()
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


@pytest.mark.parametrize("who", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_an_exception_ends_the_job_with_its_words_last(job, who):
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


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "sys.exit(3)"])
def test_who_leaves_the_loop_early_is_named(job, end):
    script = f"""
    for step in range(20 if RANK == 0 else 5):
        float(total(RANK))
    {end}
    """
    with job(script) as running:
        assert running.wait(30) == [75, 76]
        for rank in running.ranks:
            assert "process 1 (host" in rank.last_line
            assert "has finished already, after step 5" in rank.last_line
