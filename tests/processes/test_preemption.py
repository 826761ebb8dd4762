"""Preemption in one process, and agreement on when to stop, processes being threads."""

import contextlib
import functools
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest
from helpers.cases import each_of
from helpers.threads import in_threads, until

import jaxstrategy as js
from jaxstrategy import ClusterError
from jaxstrategy._src.processes import agreement, store
from jaxstrategy.experimental import (
    PreemptionCheckpointHandler,
    PreemptionWatcher,
    TerminationConfig,
)

SECONDS = 60


class Room:
    """What boards of several threads share."""

    def __init__(self, n):
        self.n = n
        self.values, self.said = {}, {}
        self.changed = threading.Condition()


class ThreadsBoard:
    """The board of one of several processes that are threads."""

    def __init__(self, room, index):
        self.room, self.index = room, index

    def put(self, key, value):
        with self.room.changed:
            self.room.values[key] = value
            self.room.changed.notify_all()

    def get(self, key, timeout_seconds=None):
        with self.room.changed:
            if not self.room.changed.wait_for(
                lambda: key in self.room.values, timeout_seconds
            ):
                raise ClusterError("nobody")
            return self.room.values[key]

    def gather(self, key, value, timeout_seconds=None):
        with self.room.changed:
            said = self.room.said.setdefault(key, {})
            said[self.index] = value
            self.room.changed.notify_all()
            assert self.room.changed.wait_for(lambda: len(said) == self.room.n, SECONDS)
            return [said[i] for i in range(self.room.n)]


@each_of("n", [1, 4])
@each_of("style", ["run", "after"])
@each_of("seed", [0, 1])
def test_all_stop_after_the_same_step(n, style, seed):
    draw = random.Random(seed)
    announcing = {draw.randrange(n) for _ in range(1 + seed % 2)}
    room, ahead = Room(n), 2
    # A step ends when all processes have begun it; some may be begun before it ends.
    begun = [0] * n
    together = threading.Condition()
    done = [None] * n

    def step(index, number):
        with together:
            begun[index] = number + 1
            together.notify_all()
            if not together.wait_for(lambda: min(begun) > number - ahead, SECONDS):
                raise AssertionError(f"process {index} waits for ever in {number}")
        time.sleep(draw.random() * 0.002)

    def process(index):
        vote = agreement.StopAgreement(ThreadsBoard(room, index), "vote")
        for number in range(10_000):
            if number == 5 + index and index in announcing:
                ThreadsBoard(room, index).put("vote", "now")
            if style == "run":
                if vote.begin():
                    break
                step(index, number)
                if vote.is_time:
                    number += 1
                    break
            else:
                step(index, number)
                vote.catch_up(number + 1)
                if vote.begin():
                    number += 1
                    break
        done[index] = number
        vote.close()

    in_threads(*[functools.partial(process, i) for i in range(n)])
    assert len(set(done)) == 1 and 1 <= done[0] < 10_000


def test_a_vote_needs_an_announcement_and_all_processes():
    vote = agreement.StopAgreement(store.Store(), "vote")
    assert not any(vote.begin() for _ in range(100)) and not vote.is_time
    vote.close()

    class Left(ThreadsBoard):
        def gather(self, *_):
            raise ClusterError("process 1 has left")

    board = Left(Room(2), 0)
    vote = agreement.StopAgreement(board, "vote")
    board.put("vote", "now")
    with pytest.raises(ClusterError, match="process 1 has left"):
        while True:
            vote.begin()


def test_a_watcher_notices_signals_and_what_a_function_says():
    before = signal.getsignal(signal.SIGTERM)
    watcher = PreemptionWatcher()
    assert watcher.preemption_message is None and not watcher.wait(0)
    signal.raise_signal(signal.SIGTERM)
    assert watcher.preemption_message == "signal SIGTERM"
    watcher.block_until_worker_exit()
    watcher.close()
    watcher.close()
    assert signal.getsignal(signal.SIGTERM) is before
    answers = iter([False, True])
    watcher = PreemptionWatcher(lambda: next(answers))
    watcher.block_until_worker_exit()
    assert "returned True" in watcher.preemption_message
    watcher.close()

    def fails():
        raise OSError("no metadata server")

    watcher = PreemptionWatcher(fails)
    assert watcher.wait(SECONDS)
    with pytest.raises(OSError, match="no metadata server"):
        _ = watcher.preemption_message
    watcher.close()


def test_a_watcher_in_another_thread():
    raised = []

    def make():
        try:
            PreemptionWatcher()
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "only in the main thread" in raised[0]


def test_what_makes_no_sense_is_refused(tmp_path, two):
    for given, error, words in [
        ({"save_fn": 3}, TypeError, "`save_fn` was 3, which cannot be called"),
        ({"exit_fn": "x"}, TypeError, "`exit_fn` was 'x'"),
        ({"termination_watcher_fn": 1}, TypeError, "`termination_watcher_fn` was 1"),
        ({"grace_period": -1}, ValueError, "`grace_period` was -1; a number of s"),
    ]:
        with pytest.raises(error, match=words):
            TerminationConfig(**given)
    with pytest.raises(ValueError, match="without `checkpoint_dir`"):
        PreemptionCheckpointHandler(None, {"v": 1})
    with pytest.raises(TypeError, match="`cluster_resolver` was 3"):
        PreemptionCheckpointHandler(3, {}, tmp_path)
    with pytest.raises(TypeError, match="`termination_config` was 5"):
        PreemptionCheckpointHandler(None, {}, tmp_path, 5)
    manager = js.checkpoint.CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match="together with a CheckpointManager"):
        PreemptionCheckpointHandler(None, manager, tmp_path)
    dataset = two.experimental_distribute_dataset([np.ones(2)])
    with pytest.raises(TypeError, match="`dataset` was \\[1\\]; what `strategy"):
        js.training.training_loop([1], 0, steps=1)
    with pytest.raises(ValueError, match="`steps` was 0; 1 or more"):
        js.training.training_loop(dataset, 0, steps=0)
    with pytest.raises(ValueError, match="`every` was -1; 1 or more"):
        js.training.training_loop(dataset, 0, steps=1, every=-1)
    for name in ("steps", "every", "in_sync_every"):
        with pytest.raises(TypeError, match=f"`{name}` was 1.5; a whole number was"):
            js.training.training_loop(dataset, 0, **{"steps": 1, name: 1.5})


def test_a_training_loop_shows_its_steps_and_leaves_no_thread(two, capsys, monkeypatch):
    before = threading.enumerate()
    dataset = two.experimental_distribute_dataset([np.ones(2)] * 3)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with js.training.training_loop(dataset, 0, steps=3) as loop:
        for _ in loop:
            time.sleep(0.6)  # tqdm shows nothing in the first second
    assert "3/3" in capsys.readouterr().err
    assert set(threading.enumerate()) <= set(before)


class Notice:
    """A watcher function that says yes from some moment on."""

    def __init__(self):
        self.given = threading.Event()

    def __call__(self):
        return self.given.is_set()


class Ended(Exception):
    """Instead of the end of the process."""


def end():
    raise Ended


def counting(strategy):
    with strategy.scope():
        count = js.Variable(0.0, aggregation="sum")

    def step():
        count.assign_add(1.0)

    return count, step


def until_noticed(handler):
    """Waits until the processes have agreed on when to stop."""
    until(lambda: handler._agreement._stop is not None)


def test_tensorflows_ten_steps(tmp_path, two):
    """A notice during step 4 of 10: four steps are saved, the rest follows later."""
    notice = Notice()
    config = TerminationConfig(notice, exit_fn=end)

    def trained(notice_after):
        count, step = counting(two)
        handler = PreemptionCheckpointHandler(None, {"count": count}, tmp_path, config)
        start = handler.total_run_calls
        with contextlib.suppress(Ended):
            for number in range(start, 10):
                if number == notice_after:
                    notice.given.set()
                    until_noticed(handler)
                handler.run(two.run, step)
        handler.close()
        return start, handler.total_run_calls, float(count.value())

    assert trained(notice_after=3) == (0, 3, 6.0)
    notice.given.clear()
    assert trained(notice_after=None) == (3, 10, 20.0)


def test_steps_in_a_scope_count(tmp_path, two):
    count, step = counting(two)
    notice, ended = Notice(), []
    config = TerminationConfig(notice, exit_fn=lambda: ended.append(True))
    handler = PreemptionCheckpointHandler(
        None, {"count": count}, tmp_path, config, strategy=two
    )
    replicated = two.run(options=js.RunOptions())(lambda x: step())
    with handler.watch_preemption_scope():
        for number in range(10):
            if number == 4:
                notice.given.set()
                until_noticed(handler)
            replicated(1.0)
    assert ended == [True] and handler.total_run_calls == 10
    manager = js.checkpoint.CheckpointManager(tmp_path)
    assert manager.all_steps() == [4]


def test_a_step_that_raises_counts_too(tmp_path, two):
    """Or processes of which one catches an error would save at different steps."""
    notice, ended = Notice(), []
    config = TerminationConfig(notice, exit_fn=lambda: ended.append(True))
    handler = PreemptionCheckpointHandler(
        None, {"x": js.Variable(0.0)}, tmp_path, config, strategy=two
    )

    def bad():
        raise KeyError("mine")

    with handler.watch_preemption_scope():
        for act in (lambda: two.run(bad), lambda: handler.run(bad)):
            with pytest.raises(KeyError, match="mine"):
                act()
    assert handler.total_run_calls == 2
    notice.given.set()
    until_noticed(handler)
    handler.run(lambda: None)
    assert ended == [True]
    assert js.checkpoint.CheckpointManager(tmp_path).all_steps() == [2]


def test_a_grace_period_is_used(tmp_path, two):
    count, step = counting(two)
    notice = Notice()
    config = TerminationConfig(notice, exit_fn=end, grace_period=1.0)
    handler = PreemptionCheckpointHandler(None, {"count": count}, tmp_path, config)
    notice.given.set()
    until_noticed(handler)
    deadline = time.monotonic() + SECONDS
    with pytest.raises(Ended):
        while time.monotonic() < deadline:
            handler.run(two.run, step)
            time.sleep(0.05)
    steps = js.checkpoint.CheckpointManager(tmp_path).all_steps()
    assert len(steps) == 2 and steps[1] == handler.total_run_calls > steps[0]


def test_a_function_that_saves(two):
    saved = []
    config = TerminationConfig(
        Notice(), exit_fn=lambda: None, save_fn=lambda *args: saved.append(args)
    )
    config.termination_watcher_fn.given.set()
    handler = PreemptionCheckpointHandler(None, None, termination_config=config)
    until_noticed(handler)
    for _ in range(5):
        handler.save_checkpoint_if_preempted("here")
    assert saved == [("here",)] and handler.total_run_calls == 5
    handler.close()
