"""Large tables sharded over replicas by rows: lookups and sparse updates.

The functions mean the same on a whole table, on one device or on many. Under a strategy
with `js.StateSharding("state")` the rows that are looked up, and their gradients, go
between replicas, and the table does not.
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.sharded.embedding import (
        SGD as SGD,
        Adagrad as Adagrad,
        Embedding as Embedding,
        EmbeddingState as EmbeddingState,
    )
    from jaxstrategy._src.sharded.lookup import lookup as lookup
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
