"""The goodput of a run with restarts, against sums made by hand."""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.profiling import Goodput, RunRecord


class Clock:
    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def record(path, clock, **options):
    return RunRecord(path, clock=clock, **{"every": 0.0, **options})


def steps(run, clock, numbers, seconds=2.0, first=2.0):
    for place, number in enumerate(numbers):
        clock.now += first if place == 0 else seconds
        run.done(number)


@pytest.mark.parametrize("every", [0.0, 5.0])
def test_each_second_of_a_run_is_of_one_kind(tmp_path, every):
    path, clock = tmp_path / "there" / "run.jsonl", Clock()
    run = record(path, clock, every=every)
    clock.now += 7.0  # starting
    run.begin(0)
    steps(run, clock, range(1, 6), first=12.0)  # compiling takes 10 of these
    with run.saving():
        clock.now += 1.5
    steps(run, clock, range(6, 9))  # lost: 5 is what was saved
    run.goodput()  # what is looked at is on the disk; then the process is killed

    clock.now += 30.0  # down
    run = record(path, clock, every=every)
    clock.now += 4.0  # starting
    run.begin(5)
    steps(run, clock, range(6, 11), first=6.0)  # compiling takes 4
    clock.now += 3.0  # whatever the program does after its loop
    run.close()
    run.close()
    found = run.goodput()
    assert found.attempts == 2 and found.steps == 10
    assert found.starting == 7.0 + 4.0
    assert found.compiling == 10.0 + 4.0
    assert found.saving == 1.5
    assert found.productive == 10 * 2.0
    assert found.lost == 3 * 2.0
    assert found.down == 30.0
    assert found.other == pytest.approx(3.0)
    assert found.total == clock.now - 1000.0
    assert found.share == 20.0 / found.total
    # The file alone says the same, to a program that only looks.
    assert RunRecord.read(path) == found


def test_steps_that_a_later_restart_takes_back_further_are_lost(tmp_path):
    """The third start restores an older checkpoint than the second one did."""
    path, clock = tmp_path / "run", Clock()
    for begin, end in ((0, 10), (8, 12), (4, 6)):
        run = record(path, clock)
        run.begin(begin)
        steps(run, clock, range(begin + 1, end + 1))
        found = run.goodput()
        run.close()
    assert found.steps == 6
    assert found.productive == 6 * 2.0  # 4 of the first start and 2 of the third
    assert found.lost == (6 + 4) * 2.0


def test_steps_that_an_earlier_start_had_not_made_are_not_lost_twice(tmp_path):
    """The last start goes on where the second one ended, beyond the first one's end."""
    path, clock = tmp_path / "run", Clock()
    for begin, end in ((0, 10), (2, 6), (6, 8)):
        run = record(path, clock)
        run.begin(begin)
        steps(run, clock, range(begin + 1, end + 1))
        found = run.goodput()
        run.close()
    assert found.steps == 8
    assert found.productive == (2 + 4 + 2) * 2.0
    assert found.lost == 8 * 2.0


def test_a_start_that_reached_no_step_loses_none(tmp_path):
    path, clock = tmp_path / "run", Clock()
    run = record(path, clock)
    run.begin(0)
    steps(run, clock, [1, 2])
    for _ in range(2):  # killed while it restores
        clock.now += 5.0
        run = record(path, clock)
        clock.now += 1.0
    clock.now += 1.0
    run = record(path, clock)
    run.begin(2)
    steps(run, clock, [3])
    found = run.goodput()
    assert (found.productive, found.lost, found.attempts) == (6.0, 0.0, 4)


def test_steps_are_told_together_but_the_first(tmp_path):
    path, clock = tmp_path / "run", Clock()
    run = record(path, clock, every=60.0)
    run.begin(0)
    for number in range(1, 1001):
        clock.now += 1.0
        run.done(number)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) < 25
    told = [line["after"] for line in lines if line["event"] == "steps"]
    assert told[0] == 1 and told[1] > 50
    assert run.goodput().productive == pytest.approx(1000.0)


def test_steps_saved_in_the_middle_of_a_line_are_not_lost(tmp_path):
    path, clock = tmp_path / "run", Clock()
    run = record(path, clock, every=1e9)
    run.begin(0)
    steps(run, clock, range(1, 12))  # one line of the first, one of ten
    run.goodput()
    run = record(path, clock)
    run.begin(6)
    found = run.goodput()
    assert found.productive == pytest.approx(12.0)
    assert found.lost == pytest.approx(10.0)


def test_a_torn_line_is_where_a_process_was_killed(tmp_path):
    path, clock = tmp_path / "run", Clock()
    run = record(path, clock)
    run.begin(0)
    steps(run, clock, [1, 2])
    with path.open("a") as file:
        file.write('{"event": "steps", "ti')
    for number in (2, 3):
        run = record(path, clock)
        run.begin(2)
        found = run.goodput()
        assert (found.productive, found.attempts) == (4.0, number)


@pytest.mark.parametrize(
    "text, line",
    [("hello\n", 1), ('{"event": "begin", "time": 1, "step": 2}\n', 1),
     ('{"event": "start", "time": 1}\n{"loss": 3}\n{"event": "end", "time": 2}\n', 2),
     ('{"event": "start", "time": 1}\nx\ny\n', 2)],
)  # fmt: skip
def test_another_file_is_no_record(tmp_path, text, line):
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"not the record of a run: line {line} is"):
        RunRecord(path)
    assert path.read_text() == text


def test_calls_in_a_wrong_order(tmp_path):
    run = record(tmp_path / "run", Clock())
    with pytest.raises(ValueError, match=r"`done\(1\)` was called before `begin`"):
        run.done(1)
    run.begin(3)
    with pytest.raises(ValueError, match=r"`done\(3\)` was called when 3 steps were"):
        run.done(3)
    run.close()


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    clock = Clock()
    with record(tmp_path / "run", clock) as run:
        run.begin(0)
        steps(run, clock, [1, 2])
        assert run.goodput().steps == 2
    assert not (tmp_path / "run").exists()


def test_no_time_at_all_is_no_goodput():
    assert Goodput.of([]).share == 0.0
    assert str(Goodput(0.0)) == "Goodput 0% of 0 ns: 0 steps, 0 starts"


def test_a_picture_has_all_parts(tmp_path):
    found = Goodput(100.0, productive=60.0, lost=25.0, down=10.0, attempts=2, steps=9)
    html = found._repr_html_()
    for shown in ("productive", "lost", "down", "other", "60 s", "Goodput 60% of 100"):
        assert shown in html
    assert "compiling" not in html
    assert "<svg" in html


# Loops.


def trained(strategy, folder, number, **options):
    data = strategy.experimental_distribute_dataset(js.batches(np.arange(8.0), 4))
    step = strategy.run(
        lambda total, x: total + js.get_replica_context().all_reduce("sum", x.sum())
    )
    loop = js.training_loop(
        data, 0.0, steps=number, checkpoint=folder / "saved", every=2, progress=False,
        strategy=strategy, **options,
    )  # fmt: skip
    with loop:
        for _, batch in loop:
            loop.state = step(loop.state, batch)
    return loop


def test_a_training_loop_records_itself(tmp_path):
    strategy = js.MirroredStrategy(jax.devices()[:2])
    path = tmp_path / "run.jsonl"
    trained(strategy, tmp_path, 3, record=path)
    trained(strategy, tmp_path, 5, record=RunRecord(path))
    events = [json.loads(line) for line in path.read_text().splitlines()]
    begun = [event["step"] for event in events if event["event"] == "begin"]
    assert begun == [0, 3]
    # After 2 and 3 steps, then after 4 and 5.
    assert sum(event["event"] == "save" for event in events) == 4
    assert events[-1]["event"] == "end"
    found = RunRecord.read(path)
    assert (found.steps, found.lost, found.attempts) == (5, 0.0, 2)
    assert 0 < found.share < 1 and found.saving > 0


def test_a_profile_reports_it(tmp_path):
    strategy = js.MirroredStrategy(jax.devices()[:2])
    with RunRecord(tmp_path / "run") as run:
        run.begin(0)
        with strategy.profile(strategy.run(lambda x: x + 1), record=run) as step:
            for number in range(3):
                step(np.float32(1))
                run.done(number + 1)
        report = step.report()
    assert report.goodput.steps == 3
    assert report.scalars()["goodput"] == report.goodput.share
    assert str(report.goodput) in str(report)
    assert "Goodput" in report._repr_html_()


KILLED = """
import os, signal, sys
from jaxstrategy.profiling import RunRecord
run = RunRecord(sys.argv[1], every=0.0)
run.begin(int(sys.argv[2]))
for step in range(int(sys.argv[2]), int(sys.argv[2]) + 4):
    run.done(step + 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_goes_on_in_its_record(tmp_path):
    path = tmp_path / "run"
    for restored in ("0", "2"):
        ended = subprocess.run(
            [sys.executable, "-c", KILLED, str(path), restored],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            timeout=200,
        )
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    found = RunRecord.read(path)
    assert (found.attempts, found.steps) == (2, 6)
    assert found.lost > 0 and found.down > 0
