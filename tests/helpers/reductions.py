"""Strategies and steps that reduce trees."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers.cases import each_of
from helpers.replicas import replica

import jaxstrategy as js
from jaxstrategy.experimental import CommunicationOptions

AXIS = "replica"
OPS = ["sum", "mean", "min", "max"]


def on(n, ops=None, options=None):
    return js.MirroredStrategy(jax.devices()[:n], ops, options)


def stacked(n):
    """A tree of several dtypes and shapes, also empty ones."""
    draw = np.random.default_rng(0)

    def normal(*shape):
        return draw.normal(size=(n, *shape)).astype(np.float32)

    return {
        "a": normal(3, 5),
        "b": (normal(), normal(7)),
        "empty": normal(0, 3),
        "half": normal(4).astype(jnp.bfloat16),
        "large": normal(300, 300),
        "n": draw.integers(-50, 50, (n, 6)),
        "small": draw.integers(0, 9, (n, 2)).astype(np.uint8),
        "z": (normal(3) + 1j * normal(3)).astype(np.complex64),
    }


def ordered(tree):
    """Without the complex numbers, which have no order."""
    return {key: leaf for key, leaf in tree.items() if key != "z"}


def reduced(strategy, op, tree, options=None, groups=None):
    def step(tree):
        return replica().all_reduce(op, tree, options, groups=groups)

    return strategy.run(step, (tree,))


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def collectives(strategy, step, *args):
    """What the step does, in order: (operation, dtypes, bytes)."""
    found = strategy.explain(step, args, compiled=False).collectives
    return [(each.operation, *each.dtypes, each.nbytes) for each in found]


RING = CommunicationOptions(implementation="RING")
ALGORITHMS = {
    "default": (None, None),
    "nccl": (js.NcclAllReduce(), None),
    "unpacked": (js.NcclAllReduce(0), None),
    "hierarchical": (js.HierarchicalCopyAllReduce(), None),
    "one device": (js.ReductionToOneDevice(), None),
    "ring": (None, RING),
}
algorithms = each_of("name", ALGORITHMS)
