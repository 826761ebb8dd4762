"""Datasets of `tf.data` as sources of batches."""

import numpy as np
import pytest
from helpers.cases import each_of
from helpers.sources import (
    FakeTfDataset,
    Source,
    assert_resumes,
    assert_same,
    cut,
    taken,
)

TF_PARTS = [{"x": np.arange(i, i + 3)} for i in range(4)]


def test_tf_data_is_read_by_its_protocol_and_resumes():
    source = Source(FakeTfDataset(TF_PARTS))
    assert source.length == 4 and source.name == "the tf.data dataset"
    assert_same(taken(source.start()), TF_PARTS)
    assert_same(taken(source.start()), TF_PARTS)
    assert_resumes(lambda: FakeTfDataset(TF_PARTS), TF_PARTS)


@each_of("count", [-1, -2])
def test_tf_data_without_a_length(count):
    assert Source(FakeTfDataset(TF_PARTS, count)).length is None


def test_tf_data_with_too_few_batches():
    with pytest.raises(ValueError, match="after batch 5, but the tf.data dataset has"):
        Source(FakeTfDataset(TF_PARTS)).start().set_state({"batches": 5})


def test_real_tf_data():
    tf = pytest.importorskip("tensorflow")
    data = {"x": np.arange(20.0).reshape(10, 2), "y": np.arange(10)}

    def make():
        return tf.data.Dataset.from_tensor_slices(data).batch(4)

    assert Source(make()).length == 3
    assert Source(make().repeat()).length is None
    assert_resumes(make, cut(data, 4))
