"""What users choose: enums and frozen dataclasses."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jaxstrategy._src.text import several_whole, whole

PyTree = Any
_Choice = TypeVar("_Choice", bound=enum.Enum)


class ReduceOp(enum.Enum):
    """The operation by which the replicas' versions of a value become one.

    Everything that takes a `ReduceOp` also takes its name as a string, in any case.

    >>> ReduceOp("sum") is ReduceOp.SUM
    True
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp | None:
        if isinstance(value, VariableAggregation):
            return cls.from_variable_aggregation(value)
        if not isinstance(value, str):
            names = ", ".join(_quoted(cls))
            raise TypeError(
                f"A reduce operation was expected, got {value!r}. "
                f"Use a ReduceOp or one of {names}."
            )
        if value.upper() in cls.__members__:
            return cls[value.upper()]
        raise ValueError(f"{value!r} is not a valid ReduceOp; {_all_of(cls)} are.")

    @classmethod
    def from_variable_aggregation(cls, aggregation: VariableAggregation) -> ReduceOp:
        """The operation that a variable's aggregation does.

        >>> ReduceOp.from_variable_aggregation(VariableAggregation.MEAN).name
        'MEAN'
        """
        aggregation = VariableAggregation(aggregation)
        if aggregation.name in cls.__members__:
            return cls[aggregation.name]
        raise ValueError(
            f"Could not convert from {aggregation} to a ReduceOp: it reduces nothing. "
            f"{_all_of(cls)} do."
        )


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`: how a step is compiled, and what is checked.

    Attributes:
      donate_argnums: positions in `args` whose memory the step may reuse for its
        results. Arrays passed there cannot be used afterwards; a later `run` that is
        given one says which argument it was.
      expect_mirrored: the results that must be equal on all replicas, proved while the
        step is traced; one that is not raises `NotMirroredError`, which names it and
        the line where it began to vary. True for all of them, a pytree prefix of bools
        like the results (`(True, False)` for `return state, loss`), or a function
        `(path, leaf) -> bool` that is given JAX's key path and a
        `jax.ShapeDtypeStruct`. Give the same function at each call: a new one is a
        new choice, for which the step is compiled again. False says that a result may
        differ, so that no `NotMirroredWarning` is given for it.
      check_finite: whether to look for NaN and Inf in the arguments, in each value that
        the step computes, and in its variables: the first that arises raises
        `NonFiniteError`, which names the replicas, the line, and the argument if it
        came in. 'nan' looks for NaN only. What the step writes down or captures as
        infinite is meant, as in a mask. Each call then waits for the devices, and takes
        several times as long, and donates nothing: the results of a step that raises
        are lost, arguments, variables and objects are what they were before it. Without
        the option nothing is looked at.

    Raises:
      TypeError: `donate_argnums` are no whole numbers, or `expect_mirrored` has
        something else in it than True and False.
      ValueError: a negative position, or another value of `check_finite`.

    >>> RunOptions(donate_argnums=0).donate_argnums
    (0,)
    >>> options = RunOptions(expect_mirrored=(True, {"loss": False}))
    """

    donate_argnums: int | Sequence[int] = dataclasses.field(default=(), compare=False)
    expect_mirrored: PyTree | Callable[[KeyPath, jax.ShapeDtypeStruct], bool] = (
        dataclasses.field(default=None, compare=False)
    )
    check_finite: bool | Literal["nan"] = False
    # What makes two options equal. A pytree counts by its entries and its structure,
    # whether its class can be compared or not.
    _key: tuple[object, ...] | None = dataclasses.field(
        init=False, repr=False, default=None
    )
    # Worked out once: options are looked up at each call of `run`.
    _hash: int = dataclasses.field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        self._check_donated()
        self._check_expected()
        if self.check_finite not in (True, False, "nan"):
            raise ValueError(
                f"`check_finite` was {self.check_finite!r}; True, False or 'nan' was "
                "wanted."
            )

    def __hash__(self) -> int:
        return self._hash

    def _check_expected(self) -> None:
        leaves, structure = jax.tree.flatten(
            self.expect_mirrored, is_leaf=lambda entry: entry is None
        )
        wrong = [
            entry for entry in leaves if entry is not None and type(entry) is not bool
        ]
        if wrong and not is_function(self.expect_mirrored):
            raise TypeError(
                f"`expect_mirrored` was {self.expect_mirrored!r}, with {wrong[0]!r} "
                "where True or False was wanted. Give True for all results, a pytree "
                "of True and False in the shape of the results, or a function of a "
                "path and a leaf."
            )
        key = self.donate_argnums, tuple(leaves), structure
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key[:2]))

    def _check_donated(self) -> None:
        value = self.donate_argnums
        one = whole(value)
        numbers = several_whole(value if one is None else (one,))
        if numbers is None:
            raise TypeError(
                f"`donate_argnums` was {value!r}; an argument position or a sequence "
                "of them was wanted, for example `donate_argnums=(0,)`."
            )
        positions = tuple(sorted(set(numbers)))
        if positions and positions[0] < 0:
            raise ValueError(
                f"`donate_argnums` was {value!r}; positions count from 0 at the first "
                "argument of the function and cannot be negative."
            )
        object.__setattr__(self, "donate_argnums", positions)

    @property
    def donated(self) -> tuple[int, ...]:
        """The positions of `donate_argnums`, always as a tuple."""
        value = self.donate_argnums
        return (value,) if isinstance(value, int) else tuple(value)


def is_function(expected: object) -> bool:
    """Whether an `expect_mirrored` is a function, not a pytree of True and False.

    A model can be both callable and a pytree: then its leaves are what counts.
    """
    return callable(expected) and not any(
        isinstance(leaf, bool) for leaf in jax.tree.leaves(expected)
    )


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The replica that a value is made for.

    Given to the function of `Strategy.experimental_distribute_values_from_function`.

    >>> print(ValueContext(1, 4))
    jaxstrategy.experimental.ValueContext(replica id 1, total replicas in sync: 4)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            "jaxstrategy.experimental.ValueContext"
            f"(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


class VariableSynchronization(enum.Enum):
    """The moment at which the copies of a variable are brought together.

    AUTO is ON_WRITE. NONE is refused, as in TensorFlow's mirrored strategies. A
    variable takes the name as a string, too, in any case.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> on_read = js.VariableSynchronization.ON_READ
    >>> with strategy.scope():
    ...     seen = js.Variable(0, synchronization=on_read, aggregation="sum")
    >>> _ = strategy.run(lambda: seen.assign_add(1))
    >>> int(seen)
    2
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"

    @classmethod
    def _missing_(cls, value: object) -> VariableSynchronization:
        return named(cls, value, "synchronization")


class VariableAggregation(enum.Enum):
    """The operation that makes one value of those of the replicas, for a variable.

    A variable takes the name as a string, too, in any case.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     best = js.Variable(0.0, aggregation=js.VariableAggregation.MEAN)
    >>> strategy.run(best.assign, (strategy.per_replica([1.0, 2.0]),))
    Array(1.5, dtype=float32)
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"

    @classmethod
    def _missing_(cls, value: object) -> VariableAggregation:
        return named(cls, value, "aggregation")


def _quoted(kind: type[enum.Enum]) -> list[str]:
    """The names that an enum's members may be given by."""
    return [repr(name.lower()) for name in kind.__members__]


def _all_of(kind: type[enum.Enum]) -> str:
    *names, last = _quoted(kind)
    return f"{', '.join(names)} and {last}"


def named(kind: type[_Choice], value: object, what: str) -> _Choice:
    """The member of the enum `kind` with this name, in any case."""
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    names = ", ".join(_quoted(kind))
    raise ValueError(
        f"`{what}` was {value!r}; a {kind.__name__} or one of {names} was wanted."
    )


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
        size = whole(self.bytes_per_pack)
        if size is None or size < 0:
            error = ValueError if isinstance(self.bytes_per_pack, int) else TypeError
            raise error(
                f"`bytes_per_pack` was {self.bytes_per_pack!r}; a number of bytes was "
                "wanted, or 0 for what is best on the platform."
            )
        object.__setattr__(self, "bytes_per_pack", size)
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
        is_known = self.compression is None or isinstance(self.compression, PowerSGD)
        if not is_known and not (
            isinstance(self.compression, str) and self.compression == "int8"
        ):
            raise ValueError(
                f"`compression` was {self.compression!r}; 'int8', a `PowerSGD(rank=2)` "
                "or None was wanted."
            )
        for name in ("overlap", "deterministic"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"`{name}` was {value!r}; a bool was wanted.")
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
        for name, value in others.items():
            if value is not None:
                raise ValueError(
                    f"`deterministic` was True and `{name}` {value!r}, which adds "
                    "numbers in an order of its own. Give one of the two."
                )

    def _checked_groups(self, value: object) -> tuple[tuple[int, ...], ...]:
        is_iterable = isinstance(value, Iterable)
        rows = [several_whole(each) for each in value] if is_iterable else []
        groups = tuple(row for row in rows if row)
        if not groups or len(groups) < len(rows) or len(set(map(len, groups))) > 1:
            raise ValueError(
                f"`groups` was {value!r}; groups of replica ids, all of one size, were "
                "wanted, such as [[0, 1], [2, 3]]."
            )
        chosen = CommunicationImplementation(self.implementation)
        if chosen is not CommunicationImplementation.HIERARCHICAL:
            raise ValueError(
                f"`groups` was {value!r}, which `implementation='hierarchical'` has, "
                f"and `implementation` is {chosen.name}."
            )
        return groups


def _float_dtype(value: DTypeLike) -> np.dtype:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"`reduce_dtype` was {value!r}; a floating-point dtype was wanted, for "
            "example 'bfloat16'. Whole numbers are always summed in their own."
        )
    return dtype


def checked_options(
    options: object,
    *,
    with_timeout: bool = False,
    with_compression: bool = False,
    of_strategy: bool = False,
) -> None:
    """Raise unless this is a `CommunicationOptions` or None."""
    if options is None:
        return
    if not isinstance(options, CommunicationOptions):
        raise TypeError(
            f"`options` was {options!r}; a `CommunicationOptions` was wanted, for "
            "example `experimental.CommunicationOptions(bytes_per_pack=2**20)`."
        )
    if options.timeout_seconds is not None and not with_timeout:
        raise ValueError(
            f"`timeout_seconds` was {options.timeout_seconds!r}, which cannot be kept: "
            "reductions are part of a compiled program, and no part of one can be "
            "given up. `MultiWorkerMirroredStrategy(communication_options=...)` ends a "
            "process whose step makes no progress for so long; leave it out elsewhere."
        )
    if options.compression is not None and not with_compression:
        raise ValueError(
            f"`compression` was {options.compression!r} in the options of a reduction "
            "that has no state, so that what is not sent would be lost: numbers much "
            "smaller than the largest would never arrive. For gradients use "
            "`jaxstrategy.optax.all_reduce_gradients(options=...)`, which keeps it in "
            "the optimizer's state, or `get_replica_context().all_reduce_compressed("
            "'mean', grads, state, options)`."
        )
    if options.overlap and not of_strategy:
        raise ValueError(
            "`overlap=True` was given in the options of one reduction; the compiler "
            "can be asked for it once for a whole program only. Give it to the "
            "strategy: `MirroredStrategy(communication_options="
            "CommunicationOptions(overlap=True))`."
        )


CollectiveHints = CommunicationOptions
"""TensorFlow's older name of `CommunicationOptions`."""
