"""Large tables of which each replica keeps some rows: lookups and sparse updates.

The functions mean the same on a whole table, on one device or on many. Under a strategy
with `js.StateSharding("state")` the rows that are looked up, and their gradients, go
between replicas, and the table does not.
"""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.sharded._embedding import Embedding as Embedding
    from jaxstrategy.sharded._embedding import EmbeddingState as EmbeddingState
    from jaxstrategy.sharded._lookup import lookup as lookup
    from jaxstrategy.sharded._row_optimizers import SGD as SGD
    from jaxstrategy.sharded._row_optimizers import Adagrad as Adagrad
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "sharded._embedding": "Embedding EmbeddingState",
            "sharded._lookup": "lookup",
            "sharded._row_optimizers": "SGD Adagrad",
        },
    )
