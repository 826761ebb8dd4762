"""What users choose about reductions: `CommunicationOptions`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Literal, TypeGuard

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy._src.options import named
from jaxstrategy._src.text.shown import several_whole, whole


class CommunicationImplementation(enum.Enum):
    """The algorithm by which a sum over the replicas is computed.

    AUTO leaves it to the strategy, NCCL is one all-reduce (XLA uses NCCL on NVIDIA
    GPUs, and each platform's own library elsewhere), RING a reduce-scatter followed by
    an all-gather. HIERARCHICAL sums inside groups of near devices, then between the
    groups, then goes back to all: only one part of each array per device goes between
    groups, where links are slow.

    >>> import jaxstrategy as js
    >>> ring = js.experimental.CommunicationImplementation.RING
    >>> options = js.experimental.CommunicationOptions(implementation=ring)
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> strategy.reduce("sum", strategy.per_replica([1.0, 2.0]), options=options)
    Array(3., dtype=float32)
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"
    HIERARCHICAL = "HIERARCHICAL"

    @classmethod
    def _missing_(cls, value: object) -> CommunicationImplementation:
        return named(cls, value, "implementation")


@dataclasses.dataclass(frozen=True)
class PowerSGD:
    """A compression of gradients: each matrix is sent as the product of two thin ones.

    An array `[..., columns]` is taken as a matrix `[rows, columns]`; of it go
    `rank * (rows + columns)` numbers instead of `rows * columns`. One step of power
    iteration, begun with what the last step found, follows the gradients' largest
    directions; what was not sent is added to the next gradients. T. Vogels, S. P.
    Karimireddy, M. Jaggi. PowerSGD: Practical low-rank gradient compression for
    distributed optimization. NeurIPS 2019. arXiv:1905.13727.

    Attributes:
      rank: how many columns the thin matrices have.
      min_compression_rate: arrays of which it would send more than one number in so
        many, and those of less than two dimensions, are reduced exactly.

    Raises:
      TypeError: `rank` is no whole number, `min_compression_rate` is no number.
      ValueError: `rank` is less than 1, `min_compression_rate` too.

    >>> import jaxstrategy as js
    >>> power_sgd = js.experimental.PowerSGD(rank=2)
    >>> options = js.experimental.CommunicationOptions(compression=power_sgd)
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> params = {"w": np.zeros((64, 64), np.float32), "b": np.zeros(64, np.float32)}
    >>> strategy.compression_state(params, options)
    CompressionState(errors={'b': None, 'w': PerReplica(float32[64,64] on cpu:0, \
cpu:1)}, bases={'b': None, 'w': ...})
    """

    rank: int = 2
    min_compression_rate: float = 2.0

    def __post_init__(self) -> None:
        rank = whole(self.rank)
        if rank is None:
            raise TypeError(f"`rank` was {self.rank!r}; a whole number was wanted.")
        if rank < 1:
            raise ValueError(f"`rank` was {self.rank!r}; at least 1 was wanted.")
        object.__setattr__(self, "rank", rank)
        rate = self.min_compression_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise TypeError(
                f"`min_compression_rate` was {rate!r}; a number was wanted."
            )
        if not rate >= 1:
            raise ValueError(
                f"`min_compression_rate` was {rate!r}; at least 1 was wanted, or more "
                "would be sent than without compression."
            )


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of reductions: how values are reduced over the replicas.

    Attributes:
      bytes_per_pack: arrays of up to so many bytes are joined before they are reduced,
        into packs of at most so many; 0 stands for what is best on the platform.
      timeout_seconds: of `MultiWorkerMirroredStrategy`: a step that makes no progress
        for so long ends the process, with a report. Refused elsewhere: a reduction is
        part of a compiled program, which cannot be interrupted.
      implementation: a `CommunicationImplementation` or its name.
      reduce_dtype: floating-point numbers are summed in this dtype, and come back in
        their own. By default in their own, those of 16 bits and less in float32.
      compression: what is sent of gradients. 'int8' sends each number in 8 bits, with
        a scale for every 256 of them; a `PowerSGD` sends thin matrices. What was not
        sent is added to the next gradients (*error feedback*), so they need a state:
        `ReplicaContext.all_reduce_compressed` and `optax.all_reduce_gradients` take
        such options, nothing else does. With `implementation='hierarchical'` 8 bits go
        between groups, and all bits inside.
      groups: of `implementation='hierarchical'`: replica ids in groups of one size. By
        default the devices of each process or slice, if there are several; else the
        most groups that are not more than the replicas in each: 2 groups of 4, for 8.
      overlap: of a strategy: True asks that arrays be reduced while others are still
        computed. Joined are those that a step computes one after the other, the last
        layers' gradients first; and XLA is asked for all-reduces beside the
        computation, on TPU v5e and v6e, where arrays of more than 256 KiB go alone.
        GPUs do that anyway, with packs of 30 MB; theirs get the size `bytes_per_pack`,
        by default 25 MiB. Sums stay the same.
        Of a strategy only: it holds for all reductions of a program. Under a
        `jax.jit` of yours, which compiles with its own options, XLA is not asked.
      deterministic: numbers are added in the order of the replicas, in pairs, wherever
        these are: a sum of the same numbers has the same bits on any number of
        devices and processes. Of a strategy, replicas that share a device also compute
        one after the other what lies between reductions: a step has the same bits on
        any devices that at least two replicas share (seen on CPUs, not promised by
        XLA), and up to rounding those of one replica on each. Steps take longer, and
        can be differentiated backwards only.

    Raises:
      ValueError: a negative size; no such implementation or compression; a timeout that
        is not positive, or where there can be none; groups of several sizes, or of
        another implementation; an overlap of one reduction; `deterministic` with an
        implementation, a compression or an overlap, which have orders of their own.
      TypeError: `reduce_dtype` is not a floating-point dtype; the size is no number;
        `overlap` or `deterministic` is no bool.

    >>> CommunicationOptions(bytes_per_pack=2**20, implementation="ring").bytes_per_pack
    1048576
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    reduce_dtype: DTypeLike | None = None
    compression: Literal["int8"] | PowerSGD | None = None
    groups: Sequence[Sequence[int]] | None = None
    overlap: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_pack", _checked_size(self.bytes_per_pack))
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ValueError(
                f"`timeout_seconds` was {self.timeout_seconds!r}; a positive number "
                "was wanted."
            )
        object.__setattr__(
            self, "implementation", CommunicationImplementation(self.implementation)
        )
        if self.reduce_dtype is not None:
            object.__setattr__(self, "reduce_dtype", _float_dtype(self.reduce_dtype))
        _check_compression(self.compression)
        for name in ("overlap", "deterministic"):
            if not isinstance(given := getattr(self, name), bool):
                raise TypeError(f"`{name}` was {given!r}; a bool was wanted.")
        if self.deterministic:
            self._check_order()
        if self.groups is not None:
            object.__setattr__(self, "groups", self._checked_groups(self.groups))

    def _check_order(self) -> None:
        """Raise if something else decides in which order numbers are added."""
        is_auto = self.implementation is CommunicationImplementation.AUTO
        others = {
            "implementation": None if is_auto else self.implementation,
            "compression": self.compression,
            "overlap": self.overlap or None,
        }
        for name, given in others.items():
            if given is not None:
                raise ValueError(
                    f"`deterministic` was True and `{name}` {given!r}, which adds "
                    "numbers in an order of its own. Give one of the two."
                )

    def _checked_groups(self, given: object) -> tuple[tuple[int, ...], ...]:
        rows = [several_whole(each) for each in given] if _is_iterable(given) else []
        groups = tuple(row for row in rows if row)
        if not groups or len(groups) < len(rows) or len(set(map(len, groups))) > 1:
            raise ValueError(
                f"`groups` was {given!r}; groups of replica ids, all of one size, were "
                "wanted, such as [[0, 1], [2, 3]]."
            )
        chosen = CommunicationImplementation(self.implementation)
        if chosen is not CommunicationImplementation.HIERARCHICAL:
            raise ValueError(
                f"`groups` was {given!r}, which `implementation='hierarchical'` has, "
                f"and `implementation` is {chosen.name}."
            )
        return groups


def _checked_size(given: object) -> int:
    size = whole(given)
    if size is None or size < 0:
        error = ValueError if isinstance(given, int) else TypeError
        raise error(
            f"`bytes_per_pack` was {given!r}; a number of bytes was wanted, or 0 for "
            "what is best on the platform."
        )
    return size


def _float_dtype(given: DTypeLike) -> np.dtype:
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"`reduce_dtype` was {given!r}; a floating-point dtype was wanted, for "
            "example 'bfloat16'. Whole numbers are always summed in their own."
        )
    return dtype


def _check_compression(given: object) -> None:
    is_known = isinstance(given, str) and given == "int8"
    if given is not None and not is_known and not isinstance(given, PowerSGD):
        raise ValueError(
            f"`compression` was {given!r}; 'int8', a `PowerSGD(rank=2)` or None was "
            "wanted."
        )


def _is_iterable(given: object) -> TypeGuard[Iterable[object]]:
    return isinstance(given, Iterable)


def checked_options(
    options: object,
    *,
    with_timeout: bool = False,
    with_compression: bool = False,
    of_strategy: bool = False,
) -> None:
    """Raise unless this is a `CommunicationOptions` or None."""
    if options is not None and not isinstance(options, CommunicationOptions):
        raise TypeError(
            f"`options` was {options!r}; a `CommunicationOptions` was wanted, for "
            "example `experimental.CommunicationOptions(bytes_per_pack=2**20)`."
        )
    if options is not None and options.timeout_seconds is not None and not with_timeout:
        raise ValueError(
            f"`timeout_seconds` was {options.timeout_seconds!r}, which cannot be kept: "
            "reductions are part of a compiled program, and no part of one can be "
            "given up. `MultiWorkerMirroredStrategy(communication_options=...)` ends a "
            "process whose step makes no progress for so long; leave it out elsewhere."
        )
    if not isinstance(options, CommunicationOptions):
        return
    if not with_compression:
        _check_exact(options)
    if options.overlap and not of_strategy:
        raise ValueError(
            "`overlap=True` was given in the options of one reduction; the compiler "
            "can be asked for it once for a whole program only. Give it to the "
            "strategy: `MirroredStrategy(communication_options="
            "CommunicationOptions(overlap=True))`."
        )


def _check_exact(options: CommunicationOptions) -> None:
    if options.compression is not None:
        raise ValueError(
            f"`compression` was {options.compression!r} in the options of a reduction "
            "that has no state, so that what is not sent would be lost: numbers much "
            "smaller than the largest would never arrive. For gradients use "
            "`jaxstrategy.optax.all_reduce_gradients(options=...)`, which keeps it in "
            "the optimizer's state, or `get_replica_context().all_reduce_compressed("
            "'mean', grads, state, options)`."
        )


CollectiveHints = CommunicationOptions
"""TensorFlow's older name of `CommunicationOptions`."""
