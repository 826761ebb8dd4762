"""Reductions beside the computation, as each platform can: `Overlap`.

What XLA makes of them can be seen without a device: `benchmarks/overlap.py` compiles a
step ahead of time for TPUs and GPUs, and tells what is computed while arrays are
reduced. That is where the table here comes from (JAX 0.10 and 0.12, libtpu 0.0.42 and
0.0.50); nothing of it was timed yet.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import final

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy.reductions._packing import AbstractPacking, Packing, best_on_cpu
from jaxstrategy.replicas._replicas import Replicas

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
class ReadyPacking(AbstractPacking):
    """Small arrays that are computed one after the other are joined.

    The arrays come in the order in which they are computed.

    Attributes:
      largest: arrays of up to so many bytes are joined, a larger one goes alone;
      pack: into arrays of up to so many bytes,
      window: of which no array waits for more than so many bytes after it.
    """

    largest: int
    pack: int
    window: int

    def buckets(self, sizes: Sequence[int]) -> list[list[int]]:
        """In the order in which their last arrays are there."""
        buckets: list[list[int]] = []
        joined: list[int] = []
        room = waited = 0
        for index, size in enumerate(sizes):
            is_small = size <= min(self.largest, self.pack)
            waited += size
            if joined and (waited > self.window or (is_small and size > room)):
                buckets.append(joined)
                joined = []
            if not is_small:
                buckets.append([index])
                continue
            if not joined:
                room, waited = self.pack, size
            joined.append(index)
            room -= size
        return [*buckets, joined] if joined else buckets


@final
@dataclasses.dataclass(frozen=True)
class Overlap:
    """What is done for a strategy's programs so that reductions go beside the rest.

    Attributes:
      packing: of arrays in the order in which a step computes them; None: XLA joins
        them, in that order too.
      compiler_options: of `jax.jit`.
    """

    packing: AbstractPacking | None
    compiler_options: Mapping[str, str]


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
    packing = ReadyPacking(largest, pack, window)
    kinds = (known for part, known in _ON_TPU.items() if part in device.device_kind)
    return Overlap(packing, _open(next(kinds, {})))


def _open(wanted: Mapping[str, str | int]) -> dict[str, str]:
    """Those options about which the user has said nothing."""
    said = " ".join(os.environ.get(name, "") for name in _OF_USER)
    return {name: str(value) for name, value in wanted.items() if name not in said}
