"""Partitioners: how many parts a variable is to have, of its shape and dtype.

They are for `Variable(..., sharding=partitioner)`. A variable is divided along the
dimension of which a partitioner wants more than one part, and the number of parts is
then that of the replicas: each keeps one, all equally long.
"""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.variables._partitioners import (
        FixedShardsPartitioner as FixedShardsPartitioner,
    )
    from jaxstrategy.variables._partitioners import (
        MaxSizePartitioner as MaxSizePartitioner,
    )
    from jaxstrategy.variables._partitioners import (
        MinSizePartitioner as MinSizePartitioner,
    )
    from jaxstrategy.variables._partitioners import Partitioner as Partitioner
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "variables._partitioners": (
                "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner "
                "Partitioner"
            ),
        },
    )
