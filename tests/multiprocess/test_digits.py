"""The digits are learned by several processes as by one, also after a restart."""

import functools
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import workers
from workers import digits

import jaxstrategy as js

SCRIPT = """
import json
import jax
from workers.digits import js, train
strategy = js.MultiWorkerMirroredStrategy()
print("found", json.dumps(train(strategy, steps=20)))
"""
DEADLINE = 120


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


@pytest.mark.parametrize(
    "count, devices",
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        (2, 2),
        pytest.param(4, 1, marks=pytest.mark.slow),
    ],
)
def test_the_loss_curve_is_that_of_one_process(count, devices, job):
    env = {"PYTHONPATH": workers.PATH, "JAX_NUM_CPU_DEVICES": str(devices)}
    with job(SCRIPT, count=count, seconds=60, env=env, started=False) as running:
        one = js.MirroredStrategy(js.simulate(8)[: count * devices])
        losses, right = digits.train(one, steps=20)
        assert running.wait(DEADLINE) == [0] * count
        outputs = [rank.output for rank in running.ranks]
    np.testing.assert_allclose(losses, by_hand(20), rtol=1e-5)
    for output in outputs:
        curve, found = json.loads(re.search("^found (.*)$", output, re.M)[1])
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
