"""Functions of arrays that the porting tool renames give TensorFlow's numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.porting import ported, tables

ORACLE = Path(__file__).parents[1] / "oracle" / "array_functions.json"
CALLS = json.loads(ORACLE.read_text())["calls"]
F = np.array([[1.5, -2.25, 0.5], [3.0, -0.75, 2.5]], np.float32)
GIVEN = {
    "f": F,
    "p": np.abs(F),
    "i": np.array([[3, -2, 5], [7, 0, 1]], np.int32),
    "b": np.array([[True, False, True], [True, True, True]]),
}


@pytest.mark.slow
def test_calls_give_what_tensorflow_gives():
    lines = [f"r{n} = {each['call']}" for n, each in enumerate(CALLS)]
    done = ported("\n".join(["import tensorflow as tf", *lines]))
    assert "tf." not in done.text
    names = dict(GIVEN)
    exec(done.text, names)
    for n, each in enumerate(CALLS):
        result = np.asarray(names[f"r{n}"])
        assert (str(result.dtype), list(result.shape)) == (
            each["dtype"],
            each["shape"],
        ), each["call"]
        np.testing.assert_allclose(
            result.astype(np.float64).ravel(),
            each["value"],
            rtol=2e-5,
            atol=1e-6,
            err_msg=each["call"],
        )


# Their results have another type, which their rows say; or they are TensorFlow 1's.
NOT_RECORDED = {"tf.log", "tf.argmax", "tf.nest.map_structure", "tf.nest.flatten"}


def test_each_function_is_recorded():
    for row in [r for r in tables.ARRAYS if r.pattern]:
        public = row.old.replace("tf.math.", "tf.")
        called = {
            each["call"].partition("(")[0].replace("tf.math.", "tf.") for each in CALLS
        }
        assert public in called | NOT_RECORDED
