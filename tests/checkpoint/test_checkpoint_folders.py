"""What else may lie in a folder of checkpoints: other names, links, foreign records."""

import errno
import itertools
import json
import os
import shutil
import zlib
from pathlib import Path

import pytest
from helpers.cases import each_of
from helpers.states import is_state_of, state_of

from jaxstrategy.checkpoint import (
    CheckpointError,
    CheckpointManager,
    DamagedCheckpointWarning,
)

RECORD = "jaxstrategy.json"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with CheckpointManager(folder, keep=None) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    return folder


@pytest.fixture
def folder(two, tmp_path):
    return shutil.copytree(two, tmp_path / "checkpoints")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


FOREIGN = ["007", "00000005", "٣", "+4", "4 ", "1_0", "-3", "4.0", "²", "0x5", "４"]


def test_names_that_no_step_has_are_left_alone(folder, tmp_path):
    makers = Path.mkdir, Path.touch, lambda path: path.symlink_to(tmp_path)
    for name, make in zip(FOREIGN, itertools.cycle(makers), strict=False):
        make(folder / name)
    with CheckpointManager(folder, keep=2) as manager:
        assert manager.all_steps() == [1, 2] and manager.latest_step() == 2
        manager.save(6, state_of(6))
        manager.wait()
        assert manager.all_steps() == [2, 6]
        assert manager.restore_or_init(state_of(0))[1] == 6
    assert names(folder) == sorted([*FOREIGN, "2", "6"])


def test_what_only_ends_like_unfinished_is_left_alone(folder):
    kept = ["notes.deleted", "007.orbax-checkpoint-tmp", "x.orbax-checkpoint-tmp-1"]
    gone = ["3.deleted", "3.0a1b2c3d.deleted", "3.orbax-checkpoint-tmp-0a1b2c3d"]
    for name in [*kept, *gone, "4.orbax-checkpoint-tmp"]:
        (folder / name).mkdir()
    with CheckpointManager(folder) as manager:
        manager.save(5, state_of(5))
    assert names(folder) == sorted([*kept, "1", "2", "5"])


def moved_away(folder, step, where):
    (folder / str(step)).rename(where)
    (folder / str(step)).symlink_to(where)


def test_a_checkpoint_behind_a_link_is_used_and_never_deleted(folder, tmp_path):
    moved_away(folder, 2, tmp_path / "archive")
    with CheckpointManager(folder, keep=1) as manager:
        assert manager.all_steps() == [1, 2]
        assert is_state_of(manager.restore(state_of(0)), 2)
        manager.save(3, state_of(3))
        manager.wait()
        assert names(folder) == ["3"]
    assert (tmp_path / "archive" / RECORD).is_file()
    shutil.copytree(tmp_path / "archive", folder / "2")
    with CheckpointManager(folder) as manager:
        assert is_state_of(manager.restore(state_of(0), 2), 2)


@each_of("name, target", [("7", "folder"), ("7", "itself"), ("7.deleted", "file"),
                          ("7.orbax-checkpoint-tmp", "nothing")])  # fmt: skip
def test_links_never_stop_later_saves(two, tmp_path, name, target):
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    away = tmp_path / "away"
    if target == "folder":
        away.mkdir()
        (away / "precious").write_text("kept")
    elif target == "file":
        away.write_text("kept")
    (folder / name).symlink_to(folder / name if target == "itself" else away)
    with CheckpointManager(folder) as manager:
        assert manager.latest_step() == 2
        for step in (8, 9):
            manager.save(step, state_of(step))
        manager.wait()
        assert manager.all_steps() == [2, 8, 9]
    assert names(folder) == ["2", *["7.damaged"] * (name == "7"), "8", "9"]
    if target == "folder":
        assert (away / "precious").read_text() == "kept"
    elif target == "file":
        assert away.read_text() == "kept"


@each_of("put", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path)])
def test_a_record_that_is_no_file_is_damage(two, tmp_path, put):
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    (folder / "2" / RECORD).unlink()
    put(folder / "2" / RECORD)
    check_set_aside(folder, "its `jaxstrategy.json` is cut or overwritten")


def check_set_aside(folder, reason):
    """Checkpoint 2 cannot be used, and nothing else is wrong."""
    with CheckpointManager(folder) as manager:
        assert manager.all_steps() == [1] and manager.latest_step() == 1
        with pytest.raises(CheckpointError, match=f"2 in .* is damaged: {reason}"):
            manager.restore(state_of(0), 2)
        with pytest.raises(CheckpointError, match=f"2 in .* is damaged: {reason}"):
            manager.record(2)
        with pytest.warns(DamagedCheckpointWarning, match=reason):
            assert is_state_of(manager.restore(state_of(0)), 1)
        manager.save(2, state_of(2))
        manager.wait()
        assert manager.all_steps() == [1, 2]
        assert is_state_of(manager.restore(state_of(0)), 2)
    assert "2.damaged" in names(folder)


def crafted(folder, change):
    """A record that is not ours, with a checksum that is right."""
    path = folder / "2" / RECORD
    content = json.loads(path.read_text())["content"]
    change(content)
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    path.write_text(json.dumps({"version": 1, "crc32": checksum, "content": content}))


CHANGES = {
    "nothing": lambda content: content.clear(),
    "more": lambda content: content.update(more=1),
    "a file without a size": lambda content: content["files"].update(a=5),
}


@each_of("change", CHANGES.values())
def test_a_record_that_is_not_ours_is_damage(two, tmp_path, change):
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    crafted(folder, change)
    check_set_aside(folder, "its `jaxstrategy.json` was not written by jaxstrategy")


@each_of(
    "text",
    [
        "[" * 100_000,
        '{"version": 1, "crc32": 0, "content": ' + "[" * 100_000,
        '{"version": [], "crc32": 0, "content": {}}',
        '{"version": 1, "crc32": {}, "content": {}}',
        '{"version": 1, "crc32": 0, "content": [[[], 1]]}',
        "",
    ],
)
def test_text_that_is_no_record_is_damage(two, tmp_path, text):
    folder = shutil.copytree(two, tmp_path / "checkpoints")
    (folder / "2" / RECORD).write_text(text)
    with CheckpointManager(folder) as manager:
        assert manager.all_steps() == [1]
        manager.save(3, state_of(3))
        manager.wait()
        assert manager.all_steps() == [1, 3]


def test_what_a_disk_does_not_give_is_not_set_aside(folder, monkeypatch):
    real = os.open

    def refuse(path, *args, **kwargs):
        if str(path).endswith(f"2/{RECORD}"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    with CheckpointManager(folder) as manager:
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(CheckpointError, match="2 in .*cannot be read.*Permission"):
            manager.restore(state_of(0), 2)
        manager.save(3, state_of(3))
        manager.wait()
        monkeypatch.undo()
        assert manager.all_steps() == [1, 2, 3]


def test_keys_of_extra_that_are_numbers_do_not_damage_a_checkpoint(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1), extra={9: "a", 10: "b"})
        manager.wait()
        manager.save(2, state_of(2), extra={9: "a", "b": "c", None: 1})
        manager.wait()
        assert manager.all_steps() == [1, 2]
        assert manager.record(1).extra == {"9": "a", "10": "b"}


@each_of("step", [-1, 2**63, 10**5000, 1.5, "3", None, [3]])
def test_steps_that_are_none_are_refused(tmp_path, step):
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match="`step` was .*; a number from 0 to 92233"):
            manager.save(step, state_of(0))
        assert manager.save(2**63 - 1, state_of(0))


def test_looking_for_checkpoints_reads_little(tmp_path, monkeypatch):
    many = 50
    with CheckpointManager(tmp_path, keep=None) as manager:
        manager.save(0, state_of(0))
    for step in range(1, many):
        shutil.copytree(tmp_path / "0", tmp_path / str(step))
        content = json.loads((tmp_path / "0" / RECORD).read_text())["content"]
        content["step"] = step
        checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        told = {"version": 1, "crc32": checksum, "content": content}
        (tmp_path / str(step) / RECORD).write_text(json.dumps(told))
    files = len(content["files"])
    done = []

    def counted(name):
        real = getattr(os, name)

        def count(path, *args, **kwargs):
            if str(path).startswith(str(tmp_path)):
                done.append(name)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, name, count)

    with CheckpointManager(tmp_path, keep=None) as manager:
        for name in ("stat", "lstat", "open", "listdir", "scandir"):
            counted(name)
        assert manager.latest_step() == many - 1
        assert done.count("listdir") == 1 and len(done) <= files + 4
        done.clear()
        assert manager.latest_step() == many - 1
        assert "open" not in done, "a record that has not changed is not read again"
        done.clear()
        assert manager.all_steps() == list(range(many))
        assert len(done) <= 1 + many * (files + 2)
        done.clear()
        read = []
        monkeypatch.setattr(json, "loads", read.append)
        assert manager.all_steps() == list(range(many)) and not read
        assert len(done) <= 1 + many * (files + 1)


def test_a_checkpoint_that_changes_between_two_looks_is_seen(folder):
    with CheckpointManager(folder) as manager:
        assert manager.all_steps() == [1, 2]
        largest = max(
            (path for path in (folder / "1").rglob("*") if path.is_file()),
            key=lambda path: path.stat().st_size,
        )
        os.truncate(largest, 1)
        assert manager.all_steps() == [2]
        crafted(folder, lambda content: content.update(step=1))
        assert manager.all_steps() == []
