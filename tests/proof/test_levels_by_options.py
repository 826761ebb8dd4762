"""Sums in two levels, chosen by `CommunicationOptions`."""

import jax
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.reductions import OPS, assert_same_bits, on, ordered, reduced, stacked

import jaxstrategy as js
from jaxstrategy.experimental import CommunicationOptions

LEVELS = CommunicationOptions(implementation="hierarchical")
ACROSS = CommunicationOptions(implementation="hierarchical", groups=[[0, 2], [1, 3]])


def levels(found):
    """What of each kind goes where: the kind, the size of its groups, and bytes."""
    return [(each.kind, each.group, each.nbytes) for each in found.collectives]


@pytest.mark.slow
@each_of("op", OPS)
@each_of("options", [LEVELS, ACROSS], anew=True)
def test_results_are_numpys(four, op, options):
    tree = ordered(stacked(4))
    del tree["small"]  # whose sum wraps, and mean does not
    have = reduced(four, op, four.per_replica(tree), options)
    want = jax.tree.map(lambda x: getattr(np, op)(np.float64(x), axis=0), tree)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 0.02, 1e-5), have, want)


def test_they_are_those_of_the_cross_device_operations(four):
    tree = stacked(4)
    ops = js.HierarchicalCopyAllReduce(groups=[[0, 2], [1, 3]])
    other = on(4, ops)
    have = reduced(four, "sum", four.per_replica(tree), ACROSS)
    want = reduced(other, "sum", other.per_replica(tree))
    assert_same_bits(have, want)
    of_strategy = reduced(on(4, options=ACROSS), "sum", four.per_replica(tree))
    assert_same_bits(of_strategy, want)


def test_one_part_of_each_array_goes_between_the_groups(four):
    x = four.per_replica(np.ones((4, 64, 64), np.float32))

    def step(x):
        return js.get_replica_context().all_reduce("mean", x, LEVELS)

    found = four.explain(step, (x,), compiled=False)
    whole = 4 * 64 * 64
    assert levels(found) == [
        ("reduce_scatter", 2, whole),
        ("all_reduce", 2, whole // 2),
        ("all_gather", 2, whole // 2),
    ]
    (line,) = {each.line for each in found.collectives}
    assert line.file == __file__


@each_of("other", ["ring", "nccl"])
def test_options_of_a_call_go_before_those_of_the_strategy(other):
    strategy = on(4, options=LEVELS)
    options = CommunicationOptions(implementation=other)
    x = strategy.per_replica(np.ones((4, 64), np.float32))

    def step(x):
        return js.get_replica_context().all_reduce("mean", x, options)

    kinds = [kind for kind, group, _ in levels(strategy.explain(step, (x,)))]
    assert kinds == (["all_reduce"] if other == "nccl" else RING_KINDS)


RING_KINDS = ["reduce_scatter", "all_gather"]


def test_wrong_groups_are_refused(four):
    message = "`groups` was .*; groups of replica ids, all of one size, were wanted"
    for wrong in (3, [], [[]], [[0, 1], [2]], [[0, "1"]], [0, 1], "01"):
        with pytest.raises(ValueError, match=message):
            CommunicationOptions(implementation="hierarchical", groups=wrong)
    with pytest.raises(ValueError, match="'hierarchical'` has, and .* is AUTO"):
        CommunicationOptions(groups=[[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="each replica from 0 to 1 stands once"):
        on(2, options=ACROSS)
    options = CommunicationOptions(implementation="hierarchical", groups=[[0, 1]])
    with pytest.raises(ValueError, match="each replica from 0 to 3 stands once"):
        reduced(four, "sum", four.per_replica(np.ones((4, 3), np.float32)), options)


def test_options_with_groups_can_be_compared(four):
    again = CommunicationOptions(
        implementation="HIERARCHICAL", groups=np.array([[0, 2], [1, 3]])
    )
    assert again == ACROSS and hash(again) == hash(ACROSS)
    x = four.per_replica(np.ones((4, 3), np.float32))
    np.testing.assert_array_equal(four.reduce("sum", x, options=again), [4, 4, 4])
