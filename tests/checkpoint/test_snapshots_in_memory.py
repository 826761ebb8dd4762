"""Snapshots in memory: taken, preferred to older checkpoints, and of this job only."""

import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy._src.checkpoint.memory import Snapshots
from jaxstrategy._src.processes.messages import Client, RefusedError, RemoteError
from jaxstrategy._src.processes.secret import Secret
from jaxstrategy.checkpoint import CheckpointManager, DamagedCheckpointWarning

FOLDER = "JAXSTRATEGY_MEMORY"  # the launcher makes it, for each job another


@pytest.fixture
def memory(tmp_path, monkeypatch):
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


def state_of(step):
    return {"w": jnp.arange(4.0) * step, "step": step}


def trained(directory, steps, **options):
    """Steps of which each is offered to a manager, which is then lost."""
    with CheckpointManager(directory, every=20, memory_every=5, **options) as manager:
        for step in range(1, steps + 1):
            manager.save(step, state_of(step), extra=f"after {step}")


def of(manager) -> js.checkpoint.Restored:
    """What was restored, which is something."""
    return manager.restored


def resumed(directory, **options):
    with CheckpointManager(directory, memory_every=5, **options) as manager:
        state, step = manager.restore_or_init(state_of(0))
    assert state["step"] == step
    np.testing.assert_array_equal(state["w"], np.arange(4.0) * step)
    return step, of(manager)


def test_the_later_of_snapshot_and_checkpoint_is_restored(memory, tmp_path):
    for steps, wanted, from_memory in [
        (4, 0, None),
        (17, 15, True),
        (23, 20, False),
        (39, 35, True),
    ]:
        directory = tmp_path / str(steps)
        trained(directory, steps)
        with CheckpointManager(directory, memory_every=5) as manager:
            assert manager.latest_step() == (wanted or None)
            assert manager.all_steps() == [20] * (steps >= 20)
        step, restored = resumed(directory)
        assert step == wanted
        if restored is None:
            assert from_memory is None
            continue
        assert restored.from_memory is from_memory
        assert restored.extra == f"after {wanted}"
    # Only the last one is kept.
    kept = [len(list(each.iterdir())) for each in memory.iterdir() if each.is_dir()]
    assert max(kept) == 1


def test_training_goes_on_from_a_snapshot_as_if_nothing_had_happened(memory, tmp_path):
    strategy = js.MirroredStrategy(js.simulate(8)[:2])

    @strategy.run
    def step(total, x):
        return 0.9 * total + js.get_replica_context().all_reduce("sum", x.sum())

    def train(directory, lost_at=None):
        found = []
        manager = CheckpointManager(directory, strategy, memory_every=3)
        rows = js.batches(np.arange(40.0, dtype=np.float32), 4, shuffle=1)
        loop = js.training.training_loop(
            strategy.experimental_distribute_dataset(rows),
            0.0,
            steps=17,
            checkpoint=manager,
            every=100,
            progress=False,
            strategy=strategy,
        )
        with loop:
            for done, batch in loop:
                if done == lost_at:
                    manager.wait()
                    raise InterruptedError
                loop.state = step(loop.state, batch)
                found.append((done, float(loop.state)))
        return found

    wanted = train(tmp_path / "whole")
    with pytest.raises(InterruptedError):
        train(tmp_path / "lost", lost_at=14)
    assert not (tmp_path / "lost").exists()
    assert train(tmp_path / "lost") == wanted[12:]


def test_a_snapshot_of_another_job_or_directory_is_not_restored(
    memory, tmp_path, monkeypatch
):
    trained(tmp_path / "one", 17)
    assert resumed(tmp_path / "two")[0] == 0
    (tmp_path / "next").mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path / "next"))
    assert resumed(tmp_path / "one")[0] == 0


def test_a_course_that_is_left_leaves_no_snapshot(memory, tmp_path):
    trained(tmp_path / "one", 39)
    with CheckpointManager(tmp_path / "one", memory_every=5) as manager:
        state = manager.restore(state_of(0), step=35)  # it is there by its step, too
        assert state["step"] == 35 and of(manager).from_memory
        manager.restore(state_of(0), step=20)
        assert manager.latest_step() == 20
        assert manager.snapshot(25, state_of(25))
    assert resumed(tmp_path / "one")[0] == 25


def spoil(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def test_of_a_damaged_snapshot_or_checkpoint_the_other_is_restored(memory, tmp_path):
    trained(tmp_path / "one", 39)
    (snapshot,) = memory.glob("*/35-*")
    spoil(snapshot)
    with pytest.warns(DamagedCheckpointWarning, match="another checksum"):
        step, restored = resumed(tmp_path / "one")
    assert step == 20 and not restored.from_memory
    trained(tmp_path / "two", 27)
    spoil(tmp_path / "two" / "20")
    step, restored = resumed(tmp_path / "two")
    assert step == 25 and restored.from_memory
    with CheckpointManager(tmp_path / "three") as manager:
        for step in 10, 30:
            manager.save(step, state_of(step))
    spoil(tmp_path / "three" / "30")
    with CheckpointManager(tmp_path / "three", memory_every=5) as manager:
        manager.snapshot(25, state_of(25))
        with pytest.warns(DamagedCheckpointWarning, match="of step 25 .* 30: its"):
            state = manager.restore(state_of(0))
        assert state["step"] == 25


def test_nothing_is_said_to_be_restored_that_is_not(memory, tmp_path):
    large = {"w": np.ones(5000)}  # most bytes of the snapshot are the array's
    with CheckpointManager(tmp_path, memory_every=5) as manager:
        for step in 10, 30:
            manager.save(step, large)
        manager.snapshot(25, large)
        manager.wait()
        spoil(tmp_path / "30")
        for snapshot in memory.glob("*/*"):
            spoil(snapshot)
        with pytest.warns(DamagedCheckpointWarning) as told:
            manager.restore(large)
        assert manager.restored.step == 10
    (snapshot, checkpoint) = (str(each.message) for each in told)
    assert "25 in memory is damaged" in snapshot
    assert re.search("Checkpoint 10 .* is restored, because .* 30: its", checkpoint)


@pytest.mark.parametrize("at", [8, 10, 20, 28, 46])
def test_a_wrong_bit_in_the_index_of_a_snapshot_is_no_more_than_damage(
    memory, tmp_path, at
):
    trained(tmp_path / "one", 39)
    (file,) = memory.glob("*/35-*/0-all")
    data = bytearray(file.read_bytes())
    data[data.index(b"PK\1\2") + at] ^= 1  # at 8: whether it is encrypted
    file.write_bytes(data)
    with pytest.warns(DamagedCheckpointWarning, match="another checksum"):
        assert resumed(tmp_path / "one")[0] == 20


def test_without_memory_there_are_checkpoints_and_a_warning(
    memory, tmp_path, monkeypatch
):
    monkeypatch.setenv(FOLDER, os.devnull)  # no folder can be made there
    with CheckpointManager(tmp_path / "one", memory_every=5) as manager:
        with pytest.warns(RuntimeWarning, match="no snapshots in memory any more"):
            manager.save(5, state_of(5))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.save(10, state_of(10))
    monkeypatch.delenv(FOLDER)
    with pytest.warns(RuntimeWarning, match="`memory_every` has no effect"):
        step, restored = resumed(tmp_path / "one")
    assert step == 10 and not restored.from_memory
    with pytest.raises(ValueError, match="`memory_every` was 0; at least 1"):
        CheckpointManager(pathlib.Path(tmp_path), memory_every=0)


def test_a_folder_in_memory_that_others_delete_costs_snapshots_only(memory, tmp_path):
    with CheckpointManager(tmp_path / "one", every=2, memory_every=1) as manager:
        for step in 1, 2, 3:
            manager.save(step, state_of(step))
        manager.wait()
        shutil.rmtree(memory)  # as systemd does when the user logs out
        with pytest.warns(RuntimeWarning, match="no snapshots in memory any more"):
            assert manager.latest_step() == 2
        assert manager.restore(state_of(0))["step"] == 2


@pytest.mark.parametrize("fault", ["gone", "full"])
def test_training_needs_no_memory_for_its_count_of_steps(
    memory, tmp_path, monkeypatch, fault
):
    if fault == "gone":
        memory.rmdir()
    else:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
    strategy = js.MirroredStrategy(js.simulate(8)[:2])
    loop = js.training.training_loop(
        strategy.experimental_distribute_dataset(js.batches(np.arange(8.0), 4)),
        0.0,
        steps=3,
        checkpoint=tmp_path / "one",
        progress=False,
        strategy=strategy,
    )
    with loop:
        assert [done for done, _ in loop] == [0, 1, 2]


def test_another_host_of_the_job_is_sent_files_of_snapshots_only(
    memory, tmp_path, monkeypatch
):
    monkeypatch.setenv("JAXSTRATEGY_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("JAXSTRATEGY_CLUSTER_SECRET", "0123456789abcdef")
    trained(tmp_path / "one", 5)
    (file,) = memory.glob("*/5-*/0-all")
    (memory / "secret").write_text("other")
    kept = Snapshots(str(tmp_path / "one"), str(memory))
    kept._hosts = ["one", "two"]  # which they tell each other in a job
    address, own = kept._prepare(), Secret.of_environment()
    with pytest.raises(RefusedError, match="has another secret"):
        Client(address, Secret("another random word"), timeout_seconds=5)
    name = f"{file.parent.name}/{file.name}"
    with contextlib.closing(Client(address, own)) as client:

        def sent(*asked):
            (data,) = client.request(json.dumps(asked).encode(), timeout_seconds=5)
            return bytes(data)

        assert sent(name, 3, 1 << 40) == file.read_bytes()[3:]
        for path in (
            "../secret",
            f"{name}/../../../secret",
            str(file),
            "",
            5,
            name[:9],
        ):
            with pytest.raises(RemoteError):
                sent(path, 0, 5)
        for asked in [name], [name, -1, 5], [name, 0, "5"], {}, "nonsense":
            with pytest.raises(RemoteError):
                sent(*asked)
    kept.close()
