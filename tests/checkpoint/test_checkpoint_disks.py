"""Checkpoints on disks that fail for a moment, and with clocks and writers that err."""

import contextlib
import errno
import gc
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.cases import each_of
from helpers.states import full_disk, is_state_of, state_of

from jaxstrategy.checkpoint import CheckpointError, CheckpointManager

# What the library asks the disk by: its module, and the function in it.
CALLS = {
    "names": (os, "listdir"),
    "make": (os, "mkdir"),
    "look": (os.path, "lexists"),  # before it renames
    "rename": (os, "rename"),
    "remove": (shutil, "rmtree"),
    "size": (os, "stat"),
    "text": (os, "open"),
}


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Puts a disk under the library of which the first attempts fail.

    A failure is the number of an error; as a negative one it comes although all was
    done. It may be a function, which is called before, too.
    """

    def put(name, failures):
        module, function = CALLS[name]
        real, left = getattr(module, function), list(failures)

        def failing(path, *args, **options):
            callers = [sys._getframe(1), sys._getframe(2)]  # `pathlib` between
            is_ours = any("jaxstrategy" in f.f_globals["__name__"] for f in callers)
            if not (left and is_ours and str(path).startswith(str(tmp_path))):
                return real(path, *args, **options)
            number = left.pop(0)
            if callable(number):
                number()
                return real(path, *args, **options)
            if number < 0:
                real(path, *args, **options)
            raise OSError(abs(number), os.strerror(abs(number)), str(path))

        monkeypatch.setattr(module, function, failing)
        return left

    return put


@pytest.mark.parametrize("operation", CALLS)
def test_what_fails_once_is_done_again(tmp_path, disk, operation):
    numbers = [errno.EIO, errno.EBUSY]
    with CheckpointManager(tmp_path, keep=1) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        left = disk(operation, numbers)
        manager.save(2, state_of(2))
        manager.wait()
        assert manager.all_steps() == [2]
        assert is_state_of(manager.restore(state_of(0)), 2)
    assert left == [] and [path.name for path in tmp_path.iterdir()] == ["2"]


def test_a_rename_whose_answer_is_lost_was_done(tmp_path, disk):
    left = disk("rename", [-errno.ETIMEDOUT, -errno.EIO, -errno.ENOENT])
    with CheckpointManager(tmp_path, keep=1) as manager:
        for step in (1, 2):  # three renames: two get their names, one is deleted
            manager.save(step, state_of(step))
        manager.wait()
        assert manager.all_steps() == [2]
    assert left == []


def test_what_fails_for_long_is_told(tmp_path, disk):
    disk("rename", [errno.EIO] * 4)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
        with pytest.raises(CheckpointError, match="1 could not be written .*Input/out"):
            manager.wait()
        assert manager.all_steps() == []
        manager.save(1, state_of(1))
        manager.wait()
        assert manager.all_steps() == [1]


@each_of("number", [errno.ENOSPC, errno.EACCES])
def test_what_will_not_pass_is_told_at_once(tmp_path, disk, number):
    with CheckpointManager(tmp_path / str(number)) as manager:
        left = disk("make", [number, number])
        with pytest.raises(CheckpointError, match=f"1 could .*{os.strerror(number)}"):
            manager.save(1, state_of(1))
    assert left == [number]


def test_clocks_that_go_backwards_change_nothing(tmp_path, monkeypatch):
    now = [2e9]

    def earlier():
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", earlier)
    monkeypatch.setattr(time, "time_ns", lambda: int(earlier() * 1e9))
    with CheckpointManager(tmp_path, keep=2) as manager:
        for step in range(1, 6):
            manager.save(step, state_of(step))
            manager.wait()
            os.utime(tmp_path / str(step), (1e9 - step, 1e9 - step))
        assert manager.all_steps() == [4, 5] and manager.latest_step() == 5
    with CheckpointManager(tmp_path) as manager:
        state, step = manager.restore_or_init(state_of(0))
        assert step == 5 and is_state_of(state, 5)


def save_theirs(folder, step):
    """Another training saves to the same folder."""
    with CheckpointManager(folder) as manager:
        manager.save(step, {**state_of(step), "step": -step})


def test_the_slower_of_two_writers_of_a_step_is_told(tmp_path, disk):
    disk("look", [lambda: save_theirs(tmp_path, 5)])
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, state_of(5))
        with pytest.raises(CheckpointError, match="5 could .*another training save to"):
            manager.wait()
        assert manager.all_steps() == [5]
        with pytest.raises(ValueError, match="has checkpoint 5 already, of another"):
            manager.save(5, state_of(5))
        assert manager.restore(state_of(0))["step"] == -5


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_told(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        read = ocp.PyTreeCheckpointHandler.restore

        def deleted(self, folder, **options):
            shutil.rmtree(folder)
            return read(self, folder, **options)

        monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", deleted)
        with pytest.raises(CheckpointError, match="1 in .* could not be read: .* Did"):
            manager.restore(state_of(0))


def fail_to_save(folder):
    """Saves that fail for several reasons, at several times; prints what is left."""
    large = np.random.default_rng(0).random(5000)
    mkdir = os.mkdir

    def refuse(path, *args, **kwargs):
        if str(path).startswith(folder):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return mkdir(path, *args, **kwargs)

    with CheckpointManager(folder) as manager:
        for step in range(4):
            os.mkdir = refuse if step % 2 else mkdir
            with contextlib.suppress(CheckpointError), full_disk(5_000):
                manager.save(step, {"w": large, "number": 1})
                manager.wait()
                print(f"{step} was saved")
            gc.collect()
    os.mkdir = mkdir
    gc.collect()
    print([each.name for each in threading.enumerate() if not each.daemon])


@pytest.mark.slow
def test_failed_saves_leave_neither_coroutines_nor_threads(tmp_path):
    told = subprocess.run(
        [sys.executable, "-W", "error", __file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # `helpers`
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout == "['MainThread']\n"
    for word in ("never awaited", "Exception ignored", "Task was destroyed"):
        assert word not in told.stderr


if __name__ == "__main__":
    fail_to_save(sys.argv[1])
