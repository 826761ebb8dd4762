"""Datasets of `tf.data` as sources of batches."""

import numpy as np
import pytest
from helpers.sources import FakeTfDataset, assert_resumes, assert_same, cut, taken

from jaxstrategy.inputs.sources._choose import as_source

TF_PARTS = [{"x": np.arange(i, i + 3)} for i in range(4)]


def test_tf_data_is_read_by_its_protocol_and_resumes():
    source = as_source(FakeTfDataset(TF_PARTS))
    assert source.length == 4 and source.name == "the tf.data dataset"
    assert_same(taken(source.start()), TF_PARTS)
    assert_same(taken(source.start()), TF_PARTS)
    assert_resumes(lambda: FakeTfDataset(TF_PARTS), TF_PARTS)


@pytest.mark.parametrize("count", [-1, -2])
def test_tf_data_without_a_length(count):
    assert as_source(FakeTfDataset(TF_PARTS, count)).length is None


def test_tf_data_gives_the_batch_before_so_that_it_can_be_compared():
    one = as_source(FakeTfDataset(TF_PARTS)).start()
    assert_same([one.set_state({"batches": 2})], TF_PARTS[1:2])


def test_tf_data_with_text_resumes():
    parts = [np.array([b"a", b"b"], object), np.array([b"c"], object)]
    one = as_source(FakeTfDataset(parts)).start()
    next(one)
    other = as_source(FakeTfDataset([np.array(p.tolist(), object) for p in parts]))
    second = other.start()
    second.set_state(one.get_state())
    assert next(second).tolist() == [b"c"]


def test_tf_data_with_too_few_batches():
    with pytest.raises(
        ValueError, match="after batch 5, but the tf.data dataset has 4"
    ):
        as_source(FakeTfDataset(TF_PARTS)).start().set_state({"batches": 5})


def test_real_tf_data():
    tf = pytest.importorskip("tensorflow")
    data = {"x": np.arange(20.0).reshape(10, 2), "y": np.arange(10)}

    def make():
        return tf.data.Dataset.from_tensor_slices(data).batch(4)

    assert as_source(make()).length == 3
    assert as_source(make().repeat()).length is None
    assert_resumes(make, cut(data, 4))
