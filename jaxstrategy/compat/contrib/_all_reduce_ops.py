"""The all-reduces of 2018: `AllReduceCrossTowerOps`."""

from __future__ import annotations

from jaxstrategy.reductions._cross_device_ops import CrossDeviceOps
from jaxstrategy.reductions._planned_ops import (
    HierarchicalCopyAllReduce,
    NcclAllReduce,
)
from jaxstrategy.text._whole_numbers import whole

_KINDS = {
    "nccl": NcclAllReduce,
    "hierarchical_copy": HierarchicalCopyAllReduce,
}


def AllReduceCrossTowerOps(  # noqa: N802 - a class in TensorFlow
    all_reduce_alg: str = "nccl",
    num_packs: int = 1,
    agg_small_grads_max_bytes: int = 0,
    agg_small_grads_max_group: int = 10,
) -> CrossDeviceOps:
    """All-reduces of the values of all towers.

    Args:
      all_reduce_alg: "nccl", or "hierarchical_copy" for sums inside groups of near
        devices first.
      num_packs: in how many packs arrays of one dtype are joined; 0 for none.
      agg_small_grads_max_bytes: changes nothing, as packs join small arrays.
      agg_small_grads_max_group: likewise.

    Returns:
      Today's `NcclAllReduce` or `HierarchicalCopyAllReduce`.

    Raises:
      ValueError: another algorithm; a negative number.
      TypeError: no whole number.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> ops = contrib.AllReduceCrossTowerOps("hierarchical_copy")
    >>> contrib.MirroredStrategy(js.simulate(8)[:4], cross_tower_ops=ops).num_towers
    4
    """
    if all_reduce_alg not in _KINDS:
        raise ValueError(
            f"`all_reduce_alg` was {all_reduce_alg!r}; 'nccl' or 'hierarchical_copy' "
            "was wanted."
        )
    for name, given in (
        ("num_packs", num_packs),
        ("agg_small_grads_max_bytes", agg_small_grads_max_bytes),
        ("agg_small_grads_max_group", agg_small_grads_max_group),
    ):
        if whole(given) is None:
            raise TypeError(f"`{name}` was {given!r}; a whole number was wanted.")
    return _KINDS[all_reduce_alg](num_packs)
