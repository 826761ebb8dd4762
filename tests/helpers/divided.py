"""Strategies that divide state, and the comparison of what comes of them."""

import jax
import numpy as np

import jaxstrategy as js

SHARDS = ["state", "optimizer"]


def sharded(count=8, shard="state", **options):
    """A strategy that divides all that can be divided."""
    chosen = js.StateSharding(shard, **{"min_bytes": 0, **options})
    return js.MirroredStrategy(jax.devices()[:count], sharding=chosen)


def whole(count=8):
    """The same without."""
    return js.MirroredStrategy(jax.devices()[:count])


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def lies(strategy, tree):
    """The dimension along which each array is divided, by its path."""
    return {
        jax.tree_util.keystr(path): strategy._replicas.dimension_of(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def bytes_of(tree):
    """The bytes that the first device has of it."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == first
    )


def on_host(value):
    if isinstance(value, js.PerReplica):
        value = value.stacked
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def assert_alike(have, want, tolerance=None):
    """Equal, bit by bit without a tolerance; relative to the largest with one."""
    one_leaves, structure = _flat(have)
    other_leaves, wanted = _flat(want)
    assert structure == wanted
    for one, other in zip(one_leaves, other_leaves, strict=True):
        assert isinstance(one, js.PerReplica) == isinstance(other, js.PerReplica)
        one, other = on_host(one), on_host(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if tolerance is None or one.dtype.kind not in "fc":
            np.testing.assert_array_equal(one, other)
        else:
            largest = np.abs(other).max(initial=0)
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest)


def _flat(tree):
    return jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, js.PerReplica))
