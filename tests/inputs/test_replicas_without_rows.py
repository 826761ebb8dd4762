"""Steps in which a replica would have no row are left out, with `"drop_empty"`."""

import re

import pytest
from helpers.cases import each_of
from helpers.inputs import each_way, ranged, real
from helpers.replicas import mirrored

import jaxstrategy as js

DROP_EMPTY = js.InputOptions(remainder="drop_empty")


def elements(n, source, options=DROP_EMPTY):
    dataset = mirrored(n).distribute_datasets_from_function(lambda _: source, options)
    return [real(element) for element in dataset]


@each_of(
    "n, count, wanted",
    [
        (2, 4, [[0, 1], [2, 3]]),
        (2, 5, [[0, 1], [2, 3]]),
        (4, 10, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, 1, []),
    ],
)
def test_a_last_group_of_scalars_that_is_not_full(n, count, wanted):
    assert elements(n, range(count)) == wanted


def test_a_batch_with_too_few_rows_is_filled_up():
    wanted = [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert elements(2, ranged(7, 2)) == wanted
    assert elements(2, ranged(9, 2)) == wanted[:1] + [[[4, 5], [6, 7]]]


@each_way
def test_global_batches(options):
    options = js.InputOptions(
        remainder="drop_empty",
        experimental_per_replica_buffer_size=options.experimental_per_replica_buffer_size,
        experimental_fetch_to_device=options.experimental_fetch_to_device,
    )
    dataset = mirrored(2).experimental_distribute_dataset(ranged(15, 4), options)
    wanted = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]], [[12, 13], [14]]]
    assert [real(batch) for batch in dataset] == wanted
    dataset = mirrored(2).experimental_distribute_dataset(ranged(9, 4), options)
    assert [real(batch) for batch in dataset] == wanted[:2]
    with pytest.raises(TypeError, match="How many steps js.batches has is not known"):
        len(dataset)


def test_each_global_batch_would_be_left_out():
    dataset = mirrored(4).experimental_distribute_dataset(ranged(12, 3), DROP_EMPTY)
    text = (
        "The first batch has 3 rows, which 4 replicas cannot share equally, so that "
        '`remainder="drop_empty"` would leave out each batch. Use a global batch size '
        "divisible by 4."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        next(iter(dataset))
