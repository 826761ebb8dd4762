"""A Keras model learns in two processes as in one, with uneven batches."""

import json
import re

import jax
import numpy as np
import pytest
import workers
from workers import keras_models

# Keras' arrays take no `copy`, for which NumPy 2 asks (Keras 3.15).
pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")
DEADLINE = 150
SCRIPT = """
import json
import jaxstrategy as js
from workers import keras_models
strategy = js.MultiWorkerMirroredStrategy()
print("found", json.dumps(keras_models.train(strategy)))
"""
UNLIKE = """
import os
import jaxstrategy as js
from workers import keras_models
import numpy as np
strategy = js.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras_models.compiled()
np.random.seed(int(os.environ["JAXSTRATEGY_PROCESS_ID"]))
try:
    keras_models.fit(model)
except ValueError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_two_processes_train_as_one_device_does(job):
    env = {"PYTHONPATH": workers.PATH, "JAX_NUM_CPU_DEVICES": "2"}
    with job(SCRIPT, count=2, seconds=60, env=env, started=False) as running:
        with jax.numpy_rank_promotion("allow"):  # Keras adds a bias to a matrix.
            want = keras_models.train(None)
        assert running.wait(DEADLINE) == [0, 0]
        outputs = [rank.output for rank in running.ranks]
    for output in outputs:
        have = json.loads(re.search("^found (.*)$", output, re.M)[1])
        assert set(have) == set(want)
        for name in want:
            np.testing.assert_allclose(have[name], want[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_processes_that_would_shuffle_otherwise_are_refused(job):
    env = {"PYTHONPATH": workers.PATH, "JAX_NUM_CPU_DEVICES": "1"}
    with job(UNLIKE, count=2, seconds=60, env=env, started=False) as running:
        assert running.wait(DEADLINE) == [0, 0]
        outputs = [rank.output for rank in running.ranks]
    for output in outputs:
        assert re.search("refused: `fit` was called by processes whose", output)
