"""Checkpoints when something breaks: files, disks, processes."""

import errno
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from helpers.cases import each_of
from helpers.states import full_disk
from helpers.threads import Started

import jaxstrategy as js
from jaxstrategy.checkpoint import (
    CheckpointError,
    CheckpointManager,
    DamagedCheckpointWarning,
)

DEADLINE = 200  # seconds
RECORD = "jaxstrategy.json"


def state_of(step):
    """Something else at each step, that cannot be compressed."""
    draw = np.random.default_rng(step).random((300, 300), np.float32)
    return {"w": jnp.asarray(draw), "step": step}


def is_state_of(state, step):
    return state["step"] == step and np.array_equal(state["w"], state_of(step)["w"])


def save_all(folder, steps):
    with CheckpointManager(folder, keep=None) as manager:
        for step in steps:
            manager.save(step, state_of(step))


def largest(folder):
    files = [file for file in folder.rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


def cut(folder):
    file = largest(folder)
    os.truncate(file, file.stat().st_size // 2)


def flip(folder):
    file = largest(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(content)


def lose(folder):
    largest(folder).unlink()


def lose_record(folder):
    (folder / RECORD).unlink()


def change_record(folder):
    told = json.loads((folder / RECORD).read_text())
    told["content"]["leaves"]["step"]["value"] = 4
    (folder / RECORD).write_text(json.dumps(told))


def rename(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "1", folder)


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def replace_by_file(folder):
    shutil.rmtree(folder)
    folder.write_text("")


DAMAGES = {
    cut: "3: its file `.*` has .* bytes instead of",
    flip: "3: its file `.*` has another checksum than when it was written",
    lose: "3: its file `.*` is missing",
    lose_record: "3: it has no `jaxstrategy.json`: it was not written to its end",
    change_record: "3: its `jaxstrategy.json` has another checksum",
    rename: "3: it is the checkpoint of step 1, renamed",
    replace_by_file: "3: its `jaxstrategy.json` is cut or overwritten",
}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    save_all(folder, [1, 2, 3])
    return folder


@each_of("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_used(damage, three, tmp_path, capfd):
    folder = tmp_path / "copy"
    shutil.copytree(three, folder)
    damage(folder / "3")
    with CheckpointManager(folder, keep=None) as manager:
        variable = js.Variable(5)
        like = {"w": jnp.zeros((300, 300)), "step": variable}
        with pytest.raises(CheckpointError, match="Checkpoint 3 in .* is damaged: "):
            manager.restore(like, 3)
        assert variable.numpy() == 5
        capfd.readouterr()
        told = rf"Checkpoint 2 in .*, because later ones are damaged. {DAMAGES[damage]}"
        with pytest.warns(DamagedCheckpointWarning, match=told) as caught:
            state, step = manager.restore_or_init({"w": like["w"], "step": 0})
        assert caught[0].filename == __file__
        assert step == 2 and is_state_of(state, 2)
        assert list(manager.restored.damaged) == [3]
        assert capfd.readouterr() == ("", "")
        # It does not stand in the way, and is not thrown away.
        assert manager.save(3, state_of(3))
        manager.wait()
        assert manager.all_steps() == [1, 2, 3]
        assert is_state_of(manager.restore(state), 3)
        assert (folder / "3.damaged").exists()


def test_damaged_checkpoints_are_never_counted(three, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(three, folder)
    (folder / "7").mkdir()
    (folder / "notes").mkdir()
    (folder / "9.orbax-checkpoint-tmp").mkdir()
    (folder / "8.deleted").mkdir()
    cut(folder / "2")
    with CheckpointManager(folder, keep=2) as manager:
        assert manager.all_steps() == [1, 3] and manager.latest_step() == 3
        manager.save(4, state_of(4))
        manager.wait()
        assert manager.all_steps() == [3, 4]
        empty(folder / "4")
        manager.save(5, state_of(5))
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["2.damaged", "3", "4.damaged", "5", "7.damaged", "notes"]


def test_the_same_step_may_be_damaged_twice(three, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(three, folder)
    for _ in range(2):
        lose_record(folder / "3")
        with CheckpointManager(folder) as manager:
            manager.save(3, state_of(3))
    assert (folder / "3.damaged").exists() and (folder / "3.damaged-again").exists()


def test_if_all_are_damaged_training_does_not_begin_anew(tmp_path):
    save_all(tmp_path, [1, 2])
    cut(tmp_path / "1")
    lose(tmp_path / "2")
    with CheckpointManager(tmp_path) as manager:
        told = "All checkpoints in .* are damaged. 2: its file .* 1: its file .* Delete"
        with pytest.raises(CheckpointError, match=told):
            manager.restore_or_init(lambda: state_of(0))
        with pytest.raises(CheckpointError, match="Checkpoint 2 in .* is damaged: its"):
            manager.record(2)


def test_a_later_format_is_an_error_and_left_alone(tmp_path):
    save_all(tmp_path, [1, 2])
    told = json.loads((tmp_path / "2" / RECORD).read_text())
    (tmp_path / "2" / RECORD).write_text(json.dumps({**told, "version": 99}))
    with CheckpointManager(tmp_path) as manager:
        for use in (
            lambda: manager.restore(state_of(0)),
            lambda: manager.save(3, state_of(3)),
            manager.latest_step,
        ):
            with pytest.raises(CheckpointError, match="Checkpoint 2 has format 99, of"):
                use()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@each_of("how", ["save", "wait", "close", "at once"])
def test_a_full_disk_is_told_and_harms_no_earlier_checkpoint(tmp_path, how):
    manager = CheckpointManager(tmp_path, asynchronous=how != "at once", keep=1)
    manager.save(1, state_of(1))
    manager.wait()
    told = r"Checkpoint 2 could not be written to .*File too large[\s\S]*Earlier check"
    with full_disk(50_000):
        if how == "at once":
            with pytest.raises(CheckpointError, match=told):
                manager.save(2, state_of(2))
        else:
            assert manager.save(2, state_of(2))
            with pytest.raises(CheckpointError, match=told):
                manager.save(3, {"w": 0}) if how == "save" else getattr(manager, how)()
    if how != "close":
        assert manager.all_steps() == [1]
        assert is_state_of(manager.restore(state_of(0)), 1)
        assert manager.save(2, state_of(2))
        manager.close()
    with CheckpointManager(tmp_path) as manager:
        last = 1 if how == "close" else 2
        assert is_state_of(manager.restore(state_of(0)), last)


def test_a_read_only_folder_is_told_and_can_be_restored_from(tmp_path, monkeypatch):
    save_all(tmp_path, [1])
    mkdir, threads = os.mkdir, Started()

    def refuse(path, *args, **kwargs):
        if str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", refuse)
    manager = CheckpointManager(tmp_path)
    assert manager.restore_or_init(lambda: state_of(0))[1] == 1
    for _ in range(2):
        with pytest.raises(CheckpointError, match="Checkpoint 2 .*Read-only file sys"):
            manager.save(2, state_of(2))
    # Orbax's threads waited for the folder that could not be made.
    assert not [each for each in threads() if "serialize" in each.name]
    manager.close()
    with CheckpointManager(tmp_path) as manager:
        assert is_state_of(manager.restore(state_of(0)), 1)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with CheckpointManager(tmp_path / "file" / "checkpoints") as manager:
        with pytest.raises(CheckpointError, match="Checkpoint 1 .*Not a directory"):
            manager.save(1, {"a": 1})


def test_what_cannot_be_deleted_is_told(tmp_path, monkeypatch):
    save_all(tmp_path, [1])

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    with CheckpointManager(tmp_path, keep=1) as manager:
        monkeypatch.setattr(shutil, "rmtree", refuse)
        manager.save(2, state_of(2))
        with pytest.raises(CheckpointError, match="2 is written, but an older one cou"):
            manager.wait()
        monkeypatch.undo()
        assert is_state_of(manager.restore(state_of(0)), 2)


# Killed processes. One process imports everything, and forks those that are killed.


def forked(work):
    """Runs `work(tell)` in a new process; returns its id and what it tells, by line."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(DEADLINE)
            os.close(out)
            with open(into, "w", buffering=1) as pipe:
                work(lambda said: print(said, file=pipe))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(into)
    return pid, open(out)


def killed(work, is_time, delay=0.0):
    """Kills a new process some seconds after it said something; all that it said."""
    pid, lines = forked(work)
    said = []
    with lines:
        for line in lines:
            said.append(json.loads(line))
            if is_time(said[-1]):
                time.sleep(delay)
                os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"it was not killed: {status}"
    return said


def finished(work):
    pid, lines = forked(work)
    with lines:
        lines.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, status


def save_for_ever(folder):
    def work(tell):
        with CheckpointManager(folder, keep=2) as manager:
            for step in range(1, 10**6):
                manager.save(step, state_of(step))
                tell(step)

    return work


def kill_savers(root):
    """Several savers, killed at random moments; prints what each had begun to save."""
    draw = random.Random(0)
    for number in range(10):
        work = save_for_ever(root / str(number))
        last = 1 + number % 4
        said = killed(work, lambda step, n=last: step == n, draw.uniform(0, 0.15))
        print(json.dumps(said[-1]))


def run_script(*args):
    done = subprocess.run(
        [sys.executable, __file__, *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # `helpers`
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_killed_writer_leaves_a_checkpoint(tmp_path):
    begun = [int(line) for line in run_script("kill_savers", tmp_path).split()]
    assert len(begun) == 10
    unfinished = 0
    for number, last in enumerate(begun):
        folder = tmp_path / str(number)
        unfinished += any("tmp" in path.name for path in folder.iterdir())
        with CheckpointManager(folder, keep=2) as manager:
            state, step = manager.restore_or_init(lambda: state_of(0))
            assert step >= last - 1, f"killed while {last} was saved, and found {step}"
            assert step == 0 or is_state_of(state, step)
            assert manager.save(step + 1, state_of(step + 1))
        names = [path.name for path in folder.iterdir()]
        assert all(name.isdecimal() for name in names) and len(names) <= 2
    assert unfinished > 1, "most were killed between checkpoints"


ROWS = 8
STEPS = 40


def data():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(44, 6)).astype(np.float32)
    return {"x": x, "y": x[:, :2] * 2, "id": np.arange(44)}


class Linen(nn.Module):
    rate: float

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        x = nn.Dropout(self.rate, deterministic=False)(jnp.tanh(x))
        return nn.Dense(2)(x)


def reduced(tree):
    return js.get_replica_context().all_reduce("mean", tree)


def linen_training(strategy, rate):
    """A state, a step on it, and what of it is to be compared."""
    model = Linen(rate)
    params = model.init(
        {"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.ones((1, 6))
    )
    train = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(0.01)
    )
    with strategy.scope():
        total = js.Variable(0.0, aggregation="mean")
    state = {"train": strategy.mirror(train), "key": jax.random.key(7), "total": total}

    @strategy.run
    def step(train, key, batch):
        own, following = jax.random.split(key)
        own = js.get_replica_context().fold_in(own)

        def loss(params):
            out = model.apply(params, batch["x"], rngs={"dropout": own})
            return js.masked_mean(((out - batch["y"]) ** 2).mean(-1))

        value, grads = jax.value_and_grad(loss)(train.params)
        total.assign_add(value)
        return train.apply_gradients(grads=reduced(grads)), following

    def advance(state, batch):
        train, key = step(state["train"], state["key"], batch)
        return {**state, "train": train, "key": key}

    return state, advance


def training(folder, replicas, rate, result=None):
    """Trains up to the last step, from the last checkpoint in `folder`."""

    def work(tell):
        sharding = js.StateSharding(min_bytes=0)
        strategy = js.MirroredStrategy(jax.devices()[:replicas], sharding=sharding)
        state, advance = linen_training(strategy, rate)
        source = js.batches(data(), ROWS, shuffle=3, epochs=None, drop_remainder=True)
        batches = iter(strategy.experimental_distribute_dataset(source))
        seen = np.full((STEPS, ROWS), -1)
        state = {"training": state, "batches": batches, "seen": seen}
        with CheckpointManager(folder, strategy, every=4) as manager:
            state, start = manager.restore_or_init(state)
            for step in range(start, STEPS):
                batch = next(batches)
                ids = batch.pop("id")
                state["seen"][step] = np.asarray(ids.stacked).reshape(-1)
                state["training"] = advance(state["training"], batch)
                manager.save(step + 1, state)
                tell(step + 1)
        batches.close()
        if result is not None:
            leaves = jax.tree.leaves({k: state[k] for k in ("training", "seen")})
            np.savez(result, *map(on_host, leaves))

    return work


def on_host(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def train_and_kill(root):
    """Training to its end; killed twice and resumed."""
    finished(training(root / "whole", 4, 0.5, root / "whole.npz"))
    for at in (20, 31):
        work = training(root / "killed", 4, 0.5)
        killed(work, lambda step, at=at: step == at, 0.005)
    finished(training(root / "killed", 4, 0.5, root / "killed.npz"))


def train_with_fewer(root):
    """Training without dropout, to its end; and killed, then resumed by fewer."""
    finished(training(root / "whole", 4, 0.0, root / "whole.npz"))
    killed(training(root / "fewer", 4, 0.0), lambda step: step == 21)
    finished(training(root / "fewer", 2, 0.0, root / "fewer.npz"))


def arrays_in(file):
    with np.load(file) as loaded:
        return [loaded[f"arr_{i}"] for i in range(len(loaded.files))]


@pytest.mark.slow
def test_killed_training_resumes_bit_by_bit(tmp_path):
    run_script("train_and_kill", tmp_path)
    whole = arrays_in(tmp_path / "whole.npz")
    seen = next(array for array in whole if array.shape == (STEPS, ROWS))
    assert all(len(set(row)) == ROWS for row in seen.tolist())
    assert seen[:5].tolist() != np.arange(40).reshape(5, ROWS).tolist()
    resumed = arrays_in(tmp_path / "killed.npz")
    for ours, theirs in zip(whole, resumed, strict=True):
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()


@pytest.mark.slow
def test_killed_training_resumes_with_fewer_replicas_within_rounding(tmp_path):
    run_script("train_with_fewer", tmp_path)
    whole, fewer = (arrays_in(tmp_path / f"{name}.npz") for name in ("whole", "fewer"))
    for ours, theirs in zip(whole, fewer, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", f"{sys.argv[2]}/programs")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    globals()[sys.argv[1]](pathlib.Path(sys.argv[2]), *sys.argv[3:])
