"""Partitioners: how many parts a variable is to have, of its shape and dtype.

They are for `Variable(..., sharding=partitioner)`. A variable is divided along the
dimension of which a partitioner wants more than one part, and the number of parts is
then that of the replicas: each keeps one, all equally long.
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.variables.sharding_choice import (
        FixedShardsPartitioner as FixedShardsPartitioner,
        MaxSizePartitioner as MaxSizePartitioner,
        MinSizePartitioner as MinSizePartitioner,
        Partitioner as Partitioner,
    )
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
