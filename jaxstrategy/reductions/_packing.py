"""Small arrays joined into a few large ones before they are reduced.

XLA joins neighbouring all-reduces by itself, but into one operation on many arrays,
which is slow on CPU. Large arrays gain nothing, and joining them costs two copies.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp


class AbstractPacking(abc.ABC):
    """A choice of the arrays that are joined."""

    @abc.abstractmethod
    def buckets(self, sizes: Sequence[int]) -> list[list[int]]:
        """The numbers of the arrays that go together, for arrays of so many bytes.

        In the order of their first arrays, which is the same on every process.
        """


@dataclasses.dataclass(frozen=True)
class Packing(AbstractPacking):
    """Small arrays are joined, in order; a large one goes alone.

    Attributes:
      largest: arrays of up to so many bytes are joined,
      pack: into arrays of up to so many bytes.
    """

    largest: int
    pack: int

    def buckets(self, sizes: Sequence[int]) -> list[list[int]]:
        """Joined ones, and large ones alone."""
        limit = min(self.largest, self.pack)
        groups: list[list[int]] = []
        alone: list[list[int]] = []
        room = -1  # in the group that is being filled; there is none yet
        for index, size in enumerate(sizes):
            if size > limit:
                alone.append([index])
                continue
            if size > room:
                groups.append([])
                room = self.pack
            groups[-1].append(index)
            room -= size
        return sorted(groups + alone)


@dataclasses.dataclass(frozen=True)
class NumberOfPacks(AbstractPacking):
    """All arrays are joined, in order, into so many of about one size; 0: none are."""

    number: int

    def buckets(self, sizes: Sequence[int]) -> list[list[int]]:
        """That many, fewer if there are fewer arrays."""
        if self.number == 0:
            return [[index] for index in range(len(sizes))]
        total, before = max(sum(sizes), 1), 0
        groups: dict[int, list[int]] = {}
        for index, size in enumerate(sizes):
            # By where its middle lies, so that the packs are of about one size.
            place = (before + size / 2) * self.number // total
            groups.setdefault(min(int(place), self.number - 1), []).append(index)
            before += size
        return list(groups.values())


# From so many replicas on, arrays of up to so many bytes are joined. Measured on
# simulated CPU devices, on two shared cores: packing 100 arrays of 8, 16, 32 and 64 KB
# takes 0.62, 0.95, 1.02 and over 1 times as long as not packing them on two devices,
# and 0.34, 0.44, 0.66 and 0.90 times on eight, in a loop; a program that does nothing
# else loses earlier, at 16 and at 64 KB. How large the packs are makes no difference.
#   python benchmarks/allreduce.py --only "100 x" --largest 262144 --pack 262144 1048576
_ON_CPU = {1: Packing(8 * 1024, 4 * 1024**2), 4: Packing(16 * 1024, 4 * 1024**2)}
# Between processes each collective waits for messages: packing 4, 8 and 3 arrays of
# 16 KB, 256 KB and 1 MB takes 0.6, 0.4 and 0.7 times as long on two of one host.
#   python benchmarks/multiprocess.py
_BETWEEN_PROCESSES = Packing(1024**2, 8 * 1024**2)
# Not measured yet: what is launched apart costs some microseconds on accelerators too.
_ELSEWHERE = {1: Packing(256 * 1024, 4 * 1024**2)}


def best_on(platform: str, replicas: int, processes: int = 1) -> Packing:
    """The best packing for replicas of some processes on a platform (`"cpu"`)."""
    if platform == "cpu" and processes > 1:
        return _BETWEEN_PROCESSES
    known = _ON_CPU if platform == "cpu" else _ELSEWHERE
    return known[max(fewest for fewest in known if fewest <= replicas)]


def in_packs(
    function: Callable[[jax.Array], jax.Array],
    arrays: Sequence[jax.Array],
    packing: AbstractPacking,
) -> list[jax.Array]:
    """`function`, which works element by element, of each of some arrays.

    Arrays of one dtype are joined; the results are those of the arrays one by one, up
    to the order in which the collective adds.
    """
    # Without elements they are equal on all replicas, and no collective takes them.
    results = {i: jnp.zeros_like(x) for i, x in enumerate(arrays) if x.size == 0}
    for indices in _by_dtype(arrays):
        sizes = [arrays[index].nbytes for index in indices]
        for bucket in packing.buckets(sizes):
            chosen = [indices[place] for place in bucket]
            done = _together(function, [arrays[index] for index in chosen])
            results.update(zip(chosen, done, strict=True))
    return [results[index] for index in range(len(arrays))]


def pairs_in_packs(
    function: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    arrays: Sequence[jax.Array],
    packing: AbstractPacking,
) -> list[tuple[jax.Array, jax.Array]]:
    """`function` of each of some arrays, which have elements, and of the joined ones.

    Args:
      function: from a flat array to two of its shape.
      arrays: those of one dtype are joined.
      packing: which of them.

    Returns:
      For each array two of its shape.
    """
    results: dict[int, tuple[jax.Array, jax.Array]] = {}
    for indices in _by_dtype(arrays):
        sizes = [arrays[index].nbytes for index in indices]
        for bucket in packing.buckets(sizes):
            chosen = [indices[place] for place in bucket]
            like = [arrays[index] for index in chosen]
            first, second = function(_joined(like))
            parts = zip(_apart(first, like), _apart(second, like), strict=True)
            results.update(zip(chosen, parts, strict=True))
    return [results[index] for index in range(len(arrays))]


def _by_dtype(arrays: Sequence[jax.Array]) -> Iterable[list[int]]:
    """The places of the arrays of each dtype that have elements, in order."""
    found: dict[object, list[int]] = {}
    for index, array in enumerate(arrays):
        if array.size:
            found.setdefault(array.dtype, []).append(index)
    return found.values()


def _together(
    function: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    if len(arrays) == 1:
        return [function(arrays[0])]
    return _apart(function(_joined(arrays)), arrays)


def _joined(arrays: Sequence[jax.Array]) -> jax.Array:
    """The elements of all arrays, of one dtype, in one flat array."""
    return jnp.concatenate([array.reshape(-1) for array in arrays])


def _apart(flat: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """What was joined, in the shapes of `like`."""
    offsets = list(itertools.accumulate((a.size for a in like[:-1]), initial=0))
    parts = zip(_cut(flat, offsets, [a.size for a in like]), like, strict=True)
    return [part.reshape(array.shape) for part, array in parts]


# From so many parts on, XLA is not told where they begin: it then compiles one kernel
# for all parts of one size, not one for each. With JAX 0.12 a step with 1,000 arrays
# of 1 KB on eight CPU devices compiles in 2.9 s, not 8.7 s, and takes 1.05 times as
# long; with JAX 0.10 nothing changes.
_MANY_PARTS = 64
_LARGEST_INT32 = 2**31 - 1


def _cut(
    flat: jax.Array, offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[jax.Array]:
    if len(offsets) < _MANY_PARTS or flat.size > _LARGEST_INT32:
        for offset, size in zip(offsets, sizes, strict=True):
            yield jax.lax.slice(flat, (offset,), (offset + size,))
        return
    unknown = jax.lax.optimization_barrier(tuple(jnp.int32(at) for at in offsets))
    for offset, size in zip(unknown, sizes, strict=True):
        yield jax.lax.dynamic_slice(flat, (offset,), (size,))
