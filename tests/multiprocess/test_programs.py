"""Programs in two processes of two devices each give what they give in one.

They run one after the other in one job, which starts once.
"""

import functools
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
import workers
from harness import job as started_job
from workers import digits, rounds
from workers.divided_variables import WHOLE, trained, variables

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

DEADLINE = 600
pytestmark = pytest.mark.timeout(2 * DEADLINE)  # the first test waits for all
COUNT, OWN = 2, 2
PROGRAMS = {
    "test_processes_that_do_different_things_are_told": "mismatches",
    "test_other_checkpoints_are_told_before_anything_is_written": (
        "different_checkpoints"
    ),
    "test_each_process_reads_its_own_rows": "feeding",
    "test_each_process_reads_its_shard": "older_inputs",
    "test_the_loss_curve_is_that_of_one_process": "digits",
    "test_replicas_of_two_processes_run_eagerly": "eager",
    "test_values_are_copied_and_variables_changed_on_all_processes": "placed_copies",
    "test_rounds_of_processes_are_those_of_workers_alone": "rounds",
    "test_variables_are_made_changed_trained_and_saved": "divided_variables",
}


@pytest.fixture(scope="module")
def plain():
    return js.MirroredStrategy(jax.devices()[:4])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def said(request, folder, plain):
    """What each process printed in a program, by its name: those of selected tests."""
    items = request.session.items
    here = [each for each in items if getattr(each, "module", 0) is request.module]
    tests = {each.originalname for each in here}
    names = [name for test, name in PROGRAMS.items() if test in tests]
    if "divided_variables" in names:
        with CheckpointManager(folder / "one", plain) as manager:
            manager.save(1, {"w": plain.mirror(WHOLE)})
    script = f"from workers.together import main\nmain({names!r})\n"
    env = workers.environment(OWN)
    with started_job(folder, script, COUNT, 60, env, started=False) as running:
        assert running.wait(DEADLINE) == [0, 0]
    outputs = [re.split("^=== (.*)\n", r.output, flags=re.M) for r in running.ranks]
    return {
        name: [each[each.index(name) + 1] for each in outputs]
        for name in names
        if all(name in each for each in outputs)
    }


def told(outputs, word):
    """What each has printed as JSON behind a word."""
    return [json.loads(re.search(f"^{word} (.*)$", o, re.M)[1]) for o in outputs]


# What differs


_STEP = r"`\S+ at mismatches.py:\d+` \(\S+mismatches.py:\d+\)"
_VALUE = r"`one value for all replicas` \(\S+mismatches.py:\d+: [^)]*"
WANTED = {
    "shapes": rf"process 0: {_STEP}, array 0 of its arguments: float32\[4, 2\]"
    r"\n  process 1: float32\[4, 3\]\nEach process must call `run` with",
    "functions": r"process 0: `total at .*process 1: `mean at ",
    "numbers": r"array 1 of its arguments: float 1.0\n  process 1: float 2.0",
    "arrays": r"array 1 of its arguments: float32\[1\] of bits \w+\n  process 1: ",
    "how many": rf"process 0: {_STEP} with 1 arrays\n  process 1: the same with 2",
    "mirrored": rf"process 0: {_VALUE}.*: float32\[3\]\n  process 1: float32\[4\]\n"
    "All processes must make, change and read together",
    "a step and a value": rf"process 0: {_VALUE}.*process 1: `total at ",
    "to_host": r"process 0: `to_host`.*float32\[4, 2\]\n  process 1: float32\[4\]",
    "assigning": rf"process 0: {_VALUE}.*: float32\[2\]\n  process 1: float32\[\]",
    "captured": "Processes 0 and 1 have made different programs of `scaled`, and were",
    "reading": "process 0: `the value of variable 'seen'`.*process 1: `to_host`",
}


@pytest.mark.slow
def test_processes_that_do_different_things_are_told(said):
    zero, one = told(said["mismatches"], "told")
    assert zero.keys() == one.keys() == WANTED.keys()
    for name, pattern in WANTED.items():
        assert re.search(pattern, zero[name], re.S), (name, zero[name])
        assert re.search(pattern, one[name], re.S), (name, one[name])


DIFFERENT = {
    "save and step": r"process 0: `save checkpoint 2 in `.*process 1: `train_step at",
    "save another step": r"save checkpoint 2 in .*process 1: `save checkpoint 3 in",
    "save another folder": r"saved0`` .*process 1: `save checkpoint 2 in `.*saved1``",
    "save and restore": r"process 0: `save checkpoint 2 in .*process 1: `restore in",
    "save other leaves": r"different states in save checkpoint 2 in .*: process 0 has "
    r"`t` \(a Python int\), process 1 has `v` \(float32\[2,3\]\)",
}


@pytest.mark.slow
def test_other_checkpoints_are_told_before_anything_is_written(said):
    for texts, found in told(said["different_checkpoints"], "told"):
        assert texts.keys() == DIFFERENT.keys() and found == ["saved/1"]
        for name, pattern in DIFFERENT.items():
            assert re.search(pattern, texts[name], re.S), (name, texts[name])


# Input


def expected(count, own):
    """What each process, with so many replicas, is given, by a plain loop."""
    n = count * own
    each = 8 // n
    batches = [np.arange(start, min(start + 8, 22.0)) for start in (0, 8, 16)]

    def of(rank, batches):
        mine = range(rank * own, (rank + 1) * own)
        return [
            [batch[i * each : (i + 1) * each].tolist() for i in mine]
            for batch in batches
        ]

    def alone(rank):
        data = 100.0 * rank + np.arange(8.0 + 5 * rank)
        parts = [data[i : i + 2].tolist() for i in range(0, len(data), 2)]
        most = max(-(-len(range(8 + 5 * k)) // (2 * own)) for k in range(count))
        parts += [[]] * (most * own - len(parts))
        return [parts[i : i + own] for i in range(0, len(parts), own)]

    sums = [
        [sum(map(sum, sum(step, []))), sum(map(len, sum(step, [])))]
        for step in zip(*map(alone, range(count)), strict=True)
    ]
    return [
        {
            "rows": of(rank, batches),
            "sums": [[float(batch.sum()), len(batch)] for batch in batches],
            "dropped": of(rank, batches[:2]),
            "uneven": alone(rank),
            "uneven sums": sums,
            "after": [[28.0, 8]],
            "optional": [True, of(rank, batches[:1])],
        }
        for rank in range(count)
    ]


def check_rows(found_by, count, replicas):
    """All is as a plain loop has it."""
    for found, wanted in zip(found_by, expected(count, replicas), strict=True):
        for name, value in wanted.items():
            assert found[name] == value, name
        # What is left after the first batch: of two epochs, and of what is uneven.
        for name, left in {
            "resumed": 2 * 32 // 8 - 1,
            "resumed alone": len(wanted["uneven"]) - 1,
        }.items():
            whole, again = found[name]
            assert again == whole and len(whole) == left
        n = count * replicas
        assert found["spec"] == f"PerReplica(float32[{8 // n}] x {n})"
    for own, found in enumerate(found_by):  # the first batches differ in size
        seen = [row for step in found["sizes"] for rows in step for row in rows]
        assert seen == list(np.arange(8.0 * (1 + own)))
    # Each epoch has each row once, in an order that the processes agree on.
    for epoch in (slice(0, 2), slice(2, 4)):
        seen = [row for f in found_by for step in f["shuffled"][epoch] for row in step]
        assert sorted(sum(seen, [])) == list(np.arange(16.0))


def test_each_process_reads_its_own_rows(said):
    check_rows(told(said["feeding"], "told"), COUNT, OWN)


# Processes, replicas of each, devices of each, and how the replicas lie on them.
@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas, devices, layout",
    [
        (2, 4, {"logical_axes": {"core": 2}}),
        (4, 1, {"replicas_per_device": 4}),
    ],
    ids=str,
)
def test_each_process_reads_its_own_rows_in_other_layouts(
    replicas, devices, layout, job
):
    script = "from workers.together import main\nmain(['feeding'])"
    env = workers.environment(devices, **layout)
    with job(script, count=2, seconds=40, env=env, started=False) as running:
        assert running.wait(DEADLINE) == [0, 0]
        check_rows(told([r.output for r in running.ranks], "told"), 2, replicas)


def test_each_process_reads_its_shard(said):
    """Iterators of TensorFlow 1 and 2018."""
    found_by = told(said["older_inputs"], "told")
    rows = [np.arange(22)[rank::COUNT] for rank in range(COUNT)]
    # Of 11 elements each, the last has no fellow.
    elements = [shard[:10].reshape(5, OWN) for shard in rows]
    for rank, found in enumerate(found_by):
        assert found["elements"] == elements[rank].tolist()
        assert found["again"] == elements[rank][0].tolist()
        assert found["uneven"] == [[0, 1], [2, 3]]
        totals = np.sum(elements, axis=(0, 2))
        assert found["sums"] == totals[[1, 3]].tolist()
        assert found["towers"] == 2 + 3 + 102 + 103
        assert found["once"].startswith("Only one pass can read the generator")
    for batch in range(2):
        seen = [
            row for found in found_by for part in found["global"][batch] for row in part
        ]
        assert len(set(seen)) == 8
    everything = [found["global"] for found in found_by]
    assert sorted(np.ravel(everything).tolist()) == list(range(16))


# Training


@functools.cache
def by_hand(steps):
    """The loss curve of a plain NumPy loop over the same batches."""
    data = digits.digits()
    params = {k: np.asarray(v, np.float64) for k, v in digits.create().items()}
    losses = []
    for batch in js.batches(data, digits.ROWS, shuffle=3, epochs=10):
        x, y = batch["x"].astype(np.float64), batch["y"]
        hidden = np.tanh(x @ params["w1"])
        scores = hidden @ params["w2"]
        scores -= scores.max(-1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        losses.append(-logs[np.arange(len(y)), y].sum() / digits.ROWS)
        wrong = (np.exp(logs) - np.eye(10)[y]) / digits.ROWS
        back = (wrong @ params["w2"].T) * (1 - hidden**2)
        params["w2"] -= 0.5 * hidden.T @ wrong
        params["w1"] -= 0.5 * x.T @ back
        if len(losses) == steps:
            return losses


def test_the_loss_curve_is_that_of_one_process(said, plain):
    check_digits(said["digits"], plain)


@pytest.mark.slow
def test_the_loss_curve_of_four_processes_is_that_of_one(job, plain):
    script = "from workers.together import main\nmain(['digits'])"
    env = workers.environment(1)
    with job(script, count=4, seconds=60, env=env, started=False) as running:
        assert running.wait(DEADLINE) == [0] * 4
        check_digits([rank.output for rank in running.ranks], plain)


def check_digits(outputs, plain):
    losses, right = digits.train(plain, steps=20)
    np.testing.assert_allclose(losses, by_hand(20), rtol=1e-5)
    for curve, found in told(outputs, "found"):
        np.testing.assert_allclose(curve, losses, rtol=1e-5)
        assert found["all"] == 1797  # also with a last batch of 5 rows
        assert abs(found["right"] - right["right"]) <= 1 and found["right"] > 1300


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, then, options",
    [(2, 2, ["--max-restarts", "1"]),
     (4, 3, ["--max-restarts", "1", "--min-processes", "3"])],
    ids=["again-2", "from-4-to-3"],
)  # fmt: skip
def test_a_job_goes_on_where_it_was_saved(first, then, options, tmp_path):
    command = [sys.executable, "-m", "jaxstrategy.launch", "-n", str(first)]
    command += ["--devices-per-process", "1", *options, digits.__file__]
    done = subprocess.run(
        [*command, str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**workers.ENVIRONMENT, "PYTHONPATH": workers.PATH},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 failed with signal SIGKILL" in done.stderr
    assert f"starting {then} processes again: attempt 1" in done.stderr
    told = re.findall(r"attempt (\d) of (\d): (\d+) ([\d.]+)", done.stdout)
    curve = {int(step): (int(n), float(loss)) for _, n, step, loss in told}
    assert [n for n, _ in map(curve.get, range(12))] == [first] * 6 + [then] * 6
    np.testing.assert_allclose(
        [loss for _, loss in map(curve.get, range(12))], by_hand(12), rtol=1e-5
    )


def rounds_by_hand(n, momentum):
    """The parameters after each round, by a loop over workers."""
    w, speed, found = rounds.START.astype(float), np.zeros((n, 3)), []
    own = np.tile(w, (n, 1))
    for number, each in enumerate(rounds.rows(n), 1):
        for r, x in enumerate(each.astype(float)):
            grad = 2 * x.T @ (x @ own[r] - x.sum(-1)) / len(x)
            speed[r] = momentum * speed[r] + grad
            own[r] -= rounds.RATE * speed[r]
        if number % rounds.EVERY == 0:
            own[:] = own.mean(0)
            found.append(own[0].tolist())
    return found


@pytest.mark.slow
def test_rounds_of_processes_are_those_of_workers_alone(said):
    for found in told(said["rounds"], "found"):
        np.testing.assert_allclose(found["averaged"], rounds_by_hand(4, 0.0), rtol=1e-5)
        np.testing.assert_allclose(found["outer"], rounds_by_hand(4, 0.9), rtol=1e-5)


# Variables and values


@pytest.mark.slow
def test_values_are_copied_and_variables_changed_on_all_processes(said):
    assert all("all is well" in output for output in said["placed_copies"])


@pytest.mark.slow
def test_variables_are_made_changed_trained_and_saved(said, folder, plain):
    """Variables of which each device of several processes keeps a part."""
    assert all("all is well" in output for output in said["divided_variables"])
    with plain.scope():
        both = variables()
    wanted = trained(plain, both).numpy()
    with CheckpointManager(folder / "saved", plain) as manager:
        manager.restore({"w": both[1]})
    np.testing.assert_allclose(both[1].numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_replicas_of_two_processes_run_eagerly(said):
    own = [[1.0, 2.0], [3.0, 14.0]]
    seen_by, found_by = told(said["eager"], "seen"), told(said["eager"], "found")
    for seen, found, mine in zip(seen_by, found_by, own, strict=True):
        assert seen == [*mine, 20.0]
        assert found["taken"] == [20.0, 5.0, mine, 20.0]
        kind, text = found["drifts"]
        assert kind == "NotMirroredVariableError"
        assert "replica 3: " in text and "of another process" in text
        kind, text = found["other"]
        assert kind == "ClusterError"
        assert "all_reduce('mean') of float32[2] in `other`" in text
        assert "all_reduce('sum') of float32[2] in `other`" in text
        kind, text = found["ended"]
        assert kind == "ClusterError"
        assert "the end of the step in `ended`" in text
        assert "all_reduce('sum') of float32[] in `ended`" in text
