"""Local steps and outer optimizers in several processes: the oracle is NumPy."""

import json
import re

import numpy as np
import pytest
import workers
from workers import rounds

SCRIPT = "from workers.rounds import main\nmain({folder!r})\n"


def by_hand(n, momentum):
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
def test_rounds_of_processes_are_those_of_workers_alone(job, tmp_path):
    script = SCRIPT.format(folder=str(tmp_path / "checkpoints"))
    env = {"PYTHONPATH": workers.PATH, "JAX_NUM_CPU_DEVICES": "2"}
    with job(script, count=2, seconds=60, env=env, started=False) as running:
        assert running.wait(150) == [0, 0]
        outputs = [rank.output for rank in running.ranks]
    for output in outputs:
        found = json.loads(re.search("found ({.*})$", output, re.M)[1])
        np.testing.assert_allclose(found["averaged"], by_hand(4, 0.0), rtol=1e-5)
        np.testing.assert_allclose(found["outer"], by_hand(4, 0.9), rtol=1e-5)
