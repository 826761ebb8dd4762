"""Checkpoints on disks that fail for a moment, and with clocks and writers that err.

The disk is stood in for by another that fails as network file systems do.
"""

import contextlib
import errno
import gc
import os
import resource
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers.states import is_state_of, state_of

from jaxstrategy.checkpoint import (
    CheckpointError,
    CheckpointManager,
)
from jaxstrategy.checkpoint.folders import _files
from jaxstrategy.checkpoint.folders._files import (
    AbstractFiles,
    LocalFiles,
    PatientFiles,
)
from jaxstrategy.checkpoint.folders._folder import Folder


class FailingFiles(AbstractFiles):
    """Those of the disk here; of some operations the first attempts fail.

    Args:
      failures: for an operation, what each of its first calls does; None is right. A
        number is the error; as a negative one it comes although all was done.
    """

    def __init__(self, failures):
        self._files = LocalFiles()
        self._failures = {name: list(each) for name, each in failures.items()}
        self.calls = []

    def _do(self, name, *args):
        self.calls.append(name)
        left = self._failures.get(name)
        number = left.pop(0) if left else None
        if number is None or number < 0:
            result = getattr(self._files, name)(*args)
        if number is not None:
            raise OSError(abs(number), os.strerror(abs(number)), str(args[0]))
        return result

    def names(self, folder):
        return self._do("names", folder)

    def make(self, folder):
        return self._do("make", folder)

    def rename(self, old, new):
        return self._do("rename", old, new)

    def remove(self, path):
        return self._do("remove", path)

    def size(self, path):
        return self._do("size", path)

    def text(self, path):
        return self._do("text", path)

    def version(self, path):
        return self._do("version", path)


@pytest.fixture
def disk(monkeypatch):
    """Puts a failing disk under all managers that are made from then on."""

    def put(**failures):
        failing, pauses = FailingFiles(failures), []
        patient = PatientFiles(failing, pauses.append)
        monkeypatch.setattr(_files, "files_of", lambda path: patient)
        return failing, pauses

    return put


OPERATIONS = ["names", "make", "rename", "remove", "size", "text", "version"]
PASSING = [errno.EIO, errno.ESTALE, errno.EBUSY, errno.ETIMEDOUT]


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_fails_once_is_done_again(tmp_path, disk, operation, number):
    _, pauses = disk(**{operation: [number]})
    with CheckpointManager(tmp_path, keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        manager.wait()
        assert manager.all_steps() == [2]
        assert is_state_of(manager.restore(state_of(0)), 2)
    assert pauses == [0.05]
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_a_rename_whose_answer_is_lost_was_done(tmp_path, disk):
    failing, pauses = disk(rename=[-errno.ETIMEDOUT, -errno.EIO, -errno.ENOENT])
    with CheckpointManager(tmp_path, keep=1) as manager:
        for step in (1, 2):  # three renames: two get their names, one is deleted
            manager.save(step, state_of(step))
        manager.wait()
        assert manager.all_steps() == [2]
    assert failing.calls.count("rename") == 3 and pauses == []


def test_a_rename_that_another_folder_prevents_was_not_done(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    files = PatientFiles(LocalFiles(), pytest.fail)
    with pytest.raises(FileExistsError):
        files.rename(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "old").exists()
    with pytest.raises(FileNotFoundError):
        files.rename(tmp_path / "none", tmp_path / "other")


def test_what_fails_for_long_is_told(tmp_path, disk):
    _, pauses = disk(rename=[errno.EIO] * 4)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
        with pytest.raises(CheckpointError, match="1 could not be written .*Input/out"):
            manager.wait()
        assert pauses == [0.05, 0.2, 1.0] and manager.all_steps() == []
        manager.save(1, state_of(1))
        manager.wait()
        assert manager.all_steps() == [1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_what_will_not_pass_is_told_at_once(tmp_path, disk, number):
    _, pauses = disk(make=[number])
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match=f"1 could .*{os.strerror(number)}"):
            manager.save(1, state_of(1))
    assert pauses == []


# Clocks.


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


# Two writers.


def test_two_writers_do_not_write_into_each_others_files(tmp_path):
    ours, theirs = Folder(tmp_path), Folder(tmp_path)
    first = ours.begin(5, set())
    second = theirs.begin(5, set())
    assert first != second
    (tmp_path / second / "content").write_text("theirs")
    theirs.finish(second)
    with pytest.raises(FileNotFoundError):
        ours.finish(first)
    third = ours.begin(7, set())
    (tmp_path / "7").mkdir()  # even an empty one is not replaced
    with pytest.raises(FileExistsError):
        ours.finish(third)


class Overtaking(AbstractFiles):
    """Those of the disk here; before the first rename something else is done.

    Args:
      meanwhile: it.
    """

    def __init__(self, meanwhile):
        self._files = LocalFiles()
        self._meanwhile = [meanwhile]

    def rename(self, old, new):
        if self._meanwhile:
            self._meanwhile.pop()()
        self._files.rename(old, new)

    def names(self, folder):
        return self._files.names(folder)

    def make(self, folder):
        self._files.make(folder)

    def remove(self, path):
        self._files.remove(path)

    def size(self, path):
        return self._files.size(path)

    def text(self, path):
        return self._files.text(path)

    def version(self, path):
        return self._files.version(path)


def under(monkeypatch, meanwhile):
    patient = PatientFiles(Overtaking(meanwhile), pytest.fail)
    monkeypatch.setattr(_files, "files_of", lambda path: patient)


def save_theirs(folder, step):
    """Another training saves to the same folder."""
    with CheckpointManager(folder) as manager:
        manager.save(step, {**state_of(step), "step": -step})


def test_the_slower_of_two_writers_of_a_step_is_told(tmp_path, monkeypatch):
    under(monkeypatch, lambda: save_theirs(tmp_path, 5))
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, state_of(5))
        with pytest.raises(CheckpointError, match="5 could .*another training save to"):
            manager.wait()
        assert manager.all_steps() == [5]
        with pytest.raises(ValueError, match="has checkpoint 5 already, of another"):
            manager.save(5, state_of(5))
        assert manager.restore(state_of(0))["step"] == -5


def test_a_writer_whose_folder_another_deletes_is_told(tmp_path, monkeypatch):
    under(monkeypatch, lambda: save_theirs(tmp_path, 6))
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, state_of(5))
        with pytest.raises(CheckpointError, match="was deleted. Does another training"):
            manager.wait()
        assert manager.all_steps() == [6]


def test_two_writers_may_delete_the_same_checkpoint(tmp_path):
    with CheckpointManager(tmp_path, keep=None) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    ours, theirs = Folder(tmp_path), Folder(tmp_path)
    ours.delete(1)
    theirs.delete(1)
    assert ours.named() == [2]


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_told(tmp_path, monkeypatch):
    from jaxstrategy.checkpoint.backends._orbax_backend import OrbaxBackend

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        read = OrbaxBackend.read

        def deleted(self, folder, readings):
            shutil.rmtree(folder)
            return read(self, folder, readings)

        monkeypatch.setattr(OrbaxBackend, "read", deleted)
        with pytest.raises(
            CheckpointError, match="1 in .* could not be read: .* Did an"
        ):
            manager.restore(state_of(0))


# What a failed save leaves.


@contextlib.contextmanager
def full_disk():
    """No file can become larger than 5 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
            with contextlib.suppress(CheckpointError), full_disk():
                manager.save(step, {"w": large, "number": 1})
                manager.wait()
                print(f"{step} was saved")
            gc.collect()
    os.mkdir = mkdir
    gc.collect()
    print([each.name for each in threading.enumerate() if not each.daemon])


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
