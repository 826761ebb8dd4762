"""The devices of one replica by number, and arrays in equal tiles on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.sharding import NamedSharding, PartitionSpec

from jaxstrategy._src.replicas.replicas import SPLIT, Meaning, Replicas

Tiles = Sequence[tuple[str, ...]]
"""For each dimension of an array the inner axes that divide it."""


def logical_axes(count: int) -> dict[str, int]:
    """The inner axes of replicas of `count` devices: one for each prime factor.

    So each division into equal tiles is one along axes. The first axis is the one along
    which the numbers of devices differ most.
    """
    factors = list(_prime_factors(count))
    if len(factors) == 1:
        return {"core": factors[0]}
    return {f"core_{number}": factor for number, factor in enumerate(factors)}


def tiles(splits: Sequence[int], replicas: Replicas) -> Tiles:
    """The axes that divide an array's dimensions into so many parts.

    If the number of devices is a power of one prime, such as 2, the tiles lie on them
    in row-major order.

    Args:
      splits: the number of parts of each dimension; their product is the number of
        devices of a replica.
      replicas: with `logical_axes`.
    """
    left = replicas.inner_sizes
    found: list[tuple[str, ...]] = []
    for parts in splits:
        names: list[str] = []
        for factor in _prime_factors(parts):
            name = next(name for name, size in left.items() if size == factor)
            del left[name]
            names.append(name)
        found.append(tuple(names))
    return found


def sharding_of(divided: Tiles, meaning: Meaning, replicas: Replicas) -> NamedSharding:
    """The placement of an array of this meaning in tiles on each replica's devices.

    Args:
      divided: the axes of each dimension of one replica's array.
      meaning: of the array on all replicas.
      replicas: that it is placed on.
    """
    first = [replicas.axes] if meaning is SPLIT else []
    return NamedSharding(replicas.mesh, PartitionSpec(*first, *divided))


def _prime_factors(number: int) -> Iterator[int]:
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
            yield factor
