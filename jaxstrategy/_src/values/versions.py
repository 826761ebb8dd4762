"""What replicas have that does not fit into one array: `Versions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final, overload

from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.types import Leaf


@final
class Versions(Sequence[Leaf]):
    """One value for each replica of this process, of any shapes and kinds.

    A step returns it in `eager_replicas()` for what differs in shape between the
    replicas, or is no array; compiled there is no such result. It is a sequence in
    replica order, and to pytrees one leaf.

    Args:
      values: one for each replica of this process, in replica order.
      replicas: their numbers.

    Raises:
      TypeError: something else than sequences.
      ValueError: they are of different lengths.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with js.experimental.eager_replicas():
    ...     kept = strategy.run(lambda x: x[x > 0], (js.PerReplica(
    ...         np.array([[1.0, -1.0], [2.0, 3.0]])),))
    >>> kept
    Versions(Array([1.], dtype=float32), Array([2., 3.], dtype=float32))
    """

    def __init__(self, values: Sequence[Leaf], replicas: Sequence[int]) -> None:
        if not isinstance(values, Sequence) or not isinstance(replicas, Sequence):
            raise TypeError(
                f"`Versions` was given {shown(values)} and {shown(replicas)}; a "
                "sequence of values and one of the replicas' numbers were wanted."
            )
        if len(values) != len(replicas):
            raise ValueError(
                f"`Versions` was given {len(values)} values for {len(replicas)} "
                "replicas; one for each was wanted."
            )
        self._values = tuple(values)
        self._replicas = tuple(replicas)

    @property
    def values(self) -> tuple[Leaf, ...]:
        """They, in replica order."""
        return self._values

    def local(self, replica_id: int) -> Leaf:
        """The value of a replica.

        Raises:
          IndexError: there is no such replica in this process.
        """
        if replica_id not in self._replicas:
            raise IndexError(
                f"Replica {replica_id} was asked of a value of which this process has "
                f"replicas {self._replicas[0]} to {self._replicas[-1]}."
            )
        return self._values[self._replicas.index(replica_id)]

    @overload
    def __getitem__(self, index: int) -> Leaf: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Leaf, ...]: ...

    def __getitem__(self, index: int | slice) -> Leaf:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._values)

    def __repr__(self) -> str:
        return f"Versions({', '.join(map(repr, self._values))})"
