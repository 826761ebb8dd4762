"""Packs small arrays for one reduction, and overlaps reductions with computation.

XLA joins neighbouring all-reduces by itself, but into one operation on many arrays,
which is slow on CPU. Large arrays gain nothing, and joining them costs two copies.

What XLA makes of reductions that are to overlap can be seen without a device:
`benchmarks/reductions.py overlap` compiles a step ahead of time for TPUs and GPUs (JAX
0.10 and 0.12, libtpu 0.0.42 and 0.0.50); nothing of it was timed yet.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstrategy._src.options import CommunicationOptions
from jaxstrategy._src.replicas.replicas import Replicas


@final
@dataclasses.dataclass(frozen=True)
class Packing:
    """Small arrays are joined; a large one goes alone."""

    largest: int  # arrays of up to so many bytes are joined
    pack: int  # into arrays of up to so many bytes
    # Arrays come in the order of computing; none waits for more bytes than these.
    window: int | None = None

    def buckets(self, sizes: Sequence[int]) -> list[list[int]]:
        """The numbers of the arrays that go together, for arrays of so many bytes.

        By their first arrays, or with a window by their last, on all processes alike.
        """
        buckets: list[list[int]] = []
        joined: list[int] = []
        room = waited = 0
        for index, size in enumerate(sizes):
            is_small = size <= min(self.largest, self.pack)
            waited += size
            is_late = self.window is not None and waited > self.window
            if joined and (is_late or (is_small and size > room)):
                buckets.append(joined)
                joined = []
            if not is_small:
                buckets.append([index])
                continue
            if not joined:
                room, waited = self.pack, size
            joined.append(index)
            room -= size
        if joined:
            buckets.append(joined)
        return sorted(buckets) if self.window is None else buckets


@final
@dataclasses.dataclass(frozen=True)
class NumberOfPacks:
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


AbstractPacking: TypeAlias = Packing | NumberOfPacks

# From so many replicas on, arrays of up to so many bytes are joined. Measured on
# simulated CPU devices, on two shared cores: packing 100 arrays of 8, 16, 32 and 64 KB
# takes 0.62, 0.95, 1.02 and over 1 times as long as not packing them on two devices,
# and 0.34, 0.44, 0.66 and 0.90 times on eight, in a loop; a program that does nothing
# else loses earlier, at 16 and at 64 KB. How large the packs are makes no difference.
#   python benchmarks/reductions.py allreduce --only "100 x" --largest 262144
_ON_CPU = {2: Packing(8 * 1024, 4 * 1024**2), 4: Packing(16 * 1024, 4 * 1024**2)}
# Between processes each collective waits for messages: packing 4, 8 and 3 arrays of
# 16 KB, 256 KB and 1 MB takes 0.6, 0.4 and 0.7 times as long on two of one host.
#   python benchmarks/processes.py multiprocess
_BETWEEN_PROCESSES = Packing(1024**2, 8 * 1024**2)


def best_on(platform: str, replicas: int, processes: int = 1) -> AbstractPacking:
    """The best packing for replicas of some processes on a platform (`"cpu"`)."""
    # Elsewhere XLA joins: on GPUs it copies arrays that are computed one after the
    # other into packs of 30 MB, on TPUs one operation takes all (JAX 0.10 and 0.12,
    # `benchmarks/reductions.py overlap`). What was joined before it cannot take apart.
    # XLA drops the all-reduces of one replica, and not the copies into a pack.
    if platform != "cpu" or replicas == 1:
        return NumberOfPacks(0)
    return best_on_cpu(replicas, processes)


def best_on_cpu(replicas: int, processes: int = 1) -> Packing:
    """The best packing for replicas of some processes on CPU devices."""
    if processes > 1:
        return _BETWEEN_PROCESSES
    return _ON_CPU[max(fewest for fewest in _ON_CPU if fewest <= replicas)]


def in_packs(
    function: Callable[[jax.Array], jax.Array],
    arrays: Sequence[jax.Array],
    packing: AbstractPacking,
    *,
    tells_places: bool = False,
) -> list[jax.Array]:
    """`function`, which works element by element, of each of some arrays."""
    # Without elements they are equal on all replicas, and no collective takes them.
    results = {i: jnp.zeros_like(x) for i, x in enumerate(arrays) if x.size == 0}
    for chosen, given in _buckets(arrays, packing):
        done = _together(function, given, tells_places)
        results.update(zip(chosen, done, strict=True))
    return [results[index] for index in range(len(arrays))]


def pairs_in_packs(
    function: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    arrays: Sequence[jax.Array],
    packing: AbstractPacking,
) -> list[tuple[jax.Array, jax.Array]]:
    """`function` of each of some arrays that are not empty, and of the joined ones."""
    results: dict[int, tuple[jax.Array, jax.Array]] = {}
    for chosen, like in _buckets(arrays, packing):
        first, second = function(_joined(like))
        parts = zip(_apart(first, like), _apart(second, like), strict=True)
        results.update(zip(chosen, parts, strict=True))
    return [results[index] for index in range(len(arrays))]


def _buckets(
    arrays: Sequence[jax.Array], packing: AbstractPacking
) -> Iterator[tuple[list[int], list[jax.Array]]]:
    """The places of arrays of one dtype that are joined, and these."""
    by_dtype: dict[object, list[int]] = {}
    for index, array in enumerate(arrays):
        if array.size:
            by_dtype.setdefault(array.dtype, []).append(index)
    for indices in by_dtype.values():
        for bucket in packing.buckets([arrays[index].nbytes for index in indices]):
            chosen = [indices[place] for place in bucket]
            yield chosen, [arrays[index] for index in chosen]


def _together(
    function: Callable[[jax.Array], jax.Array],
    arrays: Sequence[jax.Array],
    tells_places: bool,
) -> list[jax.Array]:
    if len(arrays) == 1:
        return [function(arrays[0])]
    # Those that are joined along the columns of a table.
    rows = [
        index
        for index, array in enumerate(arrays)
        if array.nbytes in _COPIED_BY_MOVES and array.size % _ROWS == 0
    ]
    if tells_places or len(rows) < _FEWEST_IN_ROWS:
        return _apart(function(_joined(arrays)), arrays, tells_places)
    others = [index for index in range(len(arrays)) if index not in rows]
    rest = [arrays[index] for index in others]
    widths = [arrays[index].size // _ROWS for index in rows]
    table = lax.concatenate(
        [
            lax.reshape(arrays[index], (_ROWS, width))
            for index, width in zip(rows, widths, strict=True)
        ],
        1,
    )
    flat = function(_joined([table, *rest]))
    parts = _apart(flat, rest, first=table.size)
    done = dict(zip(others, parts, strict=True))
    table = lax.reshape(lax.slice(flat, (0,), (table.size,)), table.shape)
    columns = _unknown(list(itertools.accumulate(widths[:-1], initial=0)))
    for index, left, width in zip(rows, columns, widths, strict=True):
        part = lax.dynamic_slice(table, (np.uint32(0), left), (_ROWS, width))
        done[index] = lax.reshape(part, arrays[index].shape)
    return [done[index] for index in range(len(arrays))]


# XLA on CPU copies an operand of a concatenation in one piece. LLVM makes one of up to
# 256 bytes a sequence of moves, which takes it 1.8 ms of processor time for 64 floats,
# 0.5 ms for 16, and 0.2 ms for any longer one (JAX 0.10 and 0.12). Of a table with some
# rows each piece is one row of an operand: a program that joins 100 arrays of 64 floats
# and 50 of 8 compiles in 66 ms, not 204 ms, and runs in the same time.
_ROWS = 8
_COPIED_BY_MOVES = range(65, 257)
# The table needs a kernel of its own.
_FEWEST_IN_ROWS = 16


def _joined(arrays: Sequence[jax.Array]) -> jax.Array:
    """The elements of all arrays, of one dtype, in one flat array."""
    return lax.concatenate([_shaped(array, (array.size,)) for array in arrays], 0)


def _apart(
    flat: jax.Array,
    like: Sequence[jax.Array],
    tells_places: bool = False,
    first: int = 0,
) -> list[jax.Array]:
    """What was joined, in the shapes of `like`, from the element `first` on."""
    sizes = [array.size for array in like]
    *offsets, _ = itertools.accumulate(sizes, initial=first)
    counts = collections.Counter(sizes)
    # A size that occurs once has a kernel of its own however it is cut.
    repeated = [i for i, size in enumerate(sizes) if counts[size] > 1]
    if flat.size > _LARGEST_UINT32 or tells_places:
        repeated = []
    unknown = _unknown([offsets[index] for index in repeated])
    starts = dict(zip(repeated, unknown, strict=True))
    parts: list[jax.Array] = []
    for index, (offset, array) in enumerate(zip(offsets, like, strict=True)):
        if index in starts:
            part = lax.dynamic_slice(flat, (starts[index],), (array.size,))
        else:
            part = lax.slice(flat, (offset,), (offset + array.size,))
        parts.append(_shaped(part, array.shape))
    return parts


def _shaped(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return array if array.shape == shape else lax.reshape(array, shape)


_LARGEST_UINT32 = 2**32 - 1


def _unknown(numbers: Sequence[int]) -> list[jax.Array]:
    """Numbers, each a scalar, that XLA does not know while it makes kernels."""
    # It then compiles one kernel for all parts of one size, not one for each, which
    # takes some 20 ms: a step with 60 arrays on eight CPU devices compiles in 0.5 s,
    # not 1.3 s. JAX 0.10 removes the barrier before XLA fuses, which takes constants
    # of one element into a kernel; so each has two.
    if not numbers:
        return []
    table = np.array([(number, 0) for number in numbers], np.uint32)
    rows = lax.optimization_barrier(lax.split(table, [1] * len(numbers)))
    return [lax.reshape(lax.slice(row, (0, 0), (1, 1)), ()) for row in rows]


# XLA's own packs have 30 MB on GPUs, and no pack should wait for much more. 25 MB do
# well for models of different sizes over NCCL: S. Li et al. PyTorch Distributed:
# Experiences on Accelerating Data Parallel Training. VLDB 2020. arXiv:2006.15704.
_WINDOW = 25 * 1024**2
# On TPUs, where XLA runs no all-reduce of large flat arrays beside anything on v5e.
_SMALL = Packing(256 * 1024, 4 * 1024**2)
# Each pack is an all-reduce of its own, as XLA does not run those of several arrays
# beside anything on TPU v5e.
_NOT_JOINED = {"xla_jf_crs_combiner_threshold_in_bytes": "1"}
# By a part of the device's kind. On TPU v4 and v5p XLA can do neither: by default it
# makes one all-reduce at the end, which stays.
_ON_TPU = {
    "v5 lite": {
        **_NOT_JOINED,
        "xla_enable_async_all_reduce": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    },
    "v6 lite": {
        **_NOT_JOINED,
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    },
}
# What the user has said by these stays.
_OF_USER = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@final
@dataclasses.dataclass(frozen=True)
class Overlap:
    """What is done for a strategy's programs so that reductions go beside the rest."""

    # Of arrays in the order in which a step computes them; None: XLA joins them.
    packing: AbstractPacking | None
    compiler_options: Mapping[str, str]  # of `jax.jit`


def overlap_on(
    replicas: Replicas, options: CommunicationOptions | None
) -> Overlap | None:
    """What is to be done for these replicas; None if they are not asked to overlap."""
    if options is None or not options.overlap or replicas.count == 1:
        return None
    device = replicas.devices[0]
    size = options.bytes_per_pack
    if device.platform == "gpu":
        size = size or _WINDOW
        return Overlap(
            None, _open({"xla_gpu_all_reduce_combine_threshold_bytes": size})
        )
    small = _SMALL
    if device.platform == "cpu":
        processes = len({each.process_index for each in replicas.all_devices})
        small = best_on_cpu(replicas.count, processes)
    largest, pack, window = small.largest, small.pack, _WINDOW
    if size:
        largest = size if device.platform == "cpu" else min(largest, size)
        pack = window = size
    packing = Packing(largest, pack, window)
    kinds = (known for part, known in _ON_TPU.items() if part in device.device_kind)
    return Overlap(packing, _open(next(kinds, {})))


def _open(wanted: Mapping[str, str | int]) -> dict[str, str]:
    """Those options about which the user has said nothing."""
    said = " ".join(os.environ.get(name, "") for name in _OF_USER)
    return {name: str(value) for name, value in wanted.items() if name not in said}
