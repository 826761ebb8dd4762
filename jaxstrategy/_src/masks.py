"""Masks of padded rows, from the source to `masked_mean` and `masked_sum`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxstrategy._src import text
from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import PaddedRowsWarning
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.values import per_replica, trees
from jaxstrategy._src.values.arrays import PyTree, Value
from jaxstrategy._src.values.per_replica import PerReplica


def row_mask(counts: Sequence[int], rows: int) -> np.ndarray:
    """The mask of so many rows, `bool[replica, rows]`."""
    return np.arange(rows) < np.asarray(counts)[:, None]


# The live masks of padded batches, by identity, so that nothing waits for a device
# to learn that all rows of a batch are real.
_padded: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def mark_padded(mask: jax.Array) -> None:
    _padded[id(mask)] = mask


def is_padded(mask: object) -> bool:
    """Whether `mask` was marked as having rows that are not real."""
    return mask is not None and _padded.get(id(mask)) is mask


def real_versions(
    value: PerReplica, versions: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """`versions` of `value` without padded rows."""
    if value.mask is None:
        return versions
    rows = np.asarray(value.mask)
    if len(versions) < len(rows):
        rows = rows[list(per_replica.local_replicas(value))]
    return tuple(
        version if real.all() else version[np.flatnonzero(real)]
        for version, real in zip(versions, rows, strict=True)
    )


def is_of_rows(axis: int, array: ArrayLike) -> bool:
    """Whether `axis` is the first dimension of `array`, from either end."""
    return axis in (0, -np.ndim(array))


def without_padding(value: PyTree, gathered: PyTree, axis: int) -> PyTree:
    """`gathered`, the versions of `value` joined along `axis`, without padded rows."""
    leaves, treedef = jax.tree.flatten(gathered)
    versions = jax.tree.leaves(value, is_leaf=trees.is_whole)
    masks = [
        leaf.mask if isinstance(leaf, PerReplica) and is_of_rows(axis, whole) else None
        for leaf, whole in zip(versions, leaves, strict=True)
    ]
    if any(isinstance(mask, Tracer) for mask in masks):
        warn_of_traced("gather")
        return gathered
    if not any(map(is_padded, masks)):
        return gathered
    real = [
        leaf[np.flatnonzero(np.asarray(mask))] if is_padded(mask) else leaf
        for leaf, mask in zip(leaves, masks, strict=True)
    ]
    return jax.tree.unflatten(treedef, real)


def number_of_examples(batch: PyTree) -> int | None:
    """The number of real rows of `batch`; None if it has no arrays with rows."""
    for leaf in jax.tree.leaves(batch, is_leaf=per_replica.is_per_replica):
        if isinstance(leaf, PerReplica):
            if is_padded(leaf.mask):
                return int(np.asarray(leaf.mask).sum())
            if leaf.shape:
                return leaf.num_replicas * leaf.shape[0]
        elif getattr(leaf, "shape", None):
            return int(leaf.shape[0])
    return None


def warn_of_traced(method: str) -> None:
    """Warn that `strategy.method` keeps padded rows while JAX traces."""
    text.warn(
        f"`{method}` was given a batch of a dataset inside a function that JAX traces "
        "(`jax.jit`), where shapes are static, so that rows that only fill up the "
        f"batch stay in the result. Call `{method}` outside that function; or gather "
        "`strategy.run(js.batch_mask, (array,))` as well, which says which rows are "
        'real; or choose `InputOptions(remainder="drop")` or `"error"`, with which '
        "all rows are.",
        PaddedRowsWarning,
    )


@dataclasses.dataclass(frozen=True)
class BatchArray:
    """An array of a batch that a step was given."""

    array: jax.Array
    mask: jax.Array
    place: int


@dataclasses.dataclass(frozen=True)
class RealRows:
    """The real rows of one replica."""

    mask: jax.Array
    share: jax.Array


class StepMasks:
    """The masks of one call's batches, and how its trace used them."""

    def __init__(
        self,
        batches: Sequence[BatchArray] = (),
        parts: int = 1,  # that each batch is divided into
        part: ArrayLike = 0,  # on which the code that asks works
        of: StepMasks | None = None,  # of which this is a part
    ) -> None:
        self._batches = batches
        self.parts, self.part = parts, part
        self._of = of
        self.asked = False  # whether the step handles padded rows
        self.gathered = False  # whether it gathers padded rows
        # The places of masks that equally many rows may belong to.
        self.ambiguous: set[tuple[int, ...]] = set()

    @property
    def any(self) -> bool:
        return bool(self._batches)

    @property
    def whole(self) -> StepMasks:
        return self if self._of is None else self._of

    def of(self, array: jax.Array) -> BatchArray | None:
        """The mask of `array`, if it is an argument of the step."""
        return next((batch for batch in self._batches if batch.array is array), None)

    def others(self, arrays: Sequence[jax.Array]) -> list[BatchArray]:
        """The masks of arrays that are not among these."""
        known = set(map(id, arrays))
        return [batch for batch in self._batches if id(batch.array) not in known]

    def fits(self, array: jax.Array) -> bool:
        """Whether a batch has as many rows, in each of its parts."""
        return any(
            batch.mask.shape[1] == array.shape[0] * self.parts
            for batch in self._batches
        )

    def find(self, array: jax.Array, asks: bool = True) -> RealRows | None:
        """The real rows of `array`, `[rows, ...]`; None if no batch has a mask."""
        if not self._batches:
            return None
        context.check_unstaged("The mask of a batch")
        rows, parts = array.shape[0], self.parts
        batch = self.of(array)
        matching = [b for b in self._batches if b.mask.shape[1] == rows * parts]
        if batch is not None:
            matching = [batch]
        if not matching:
            known = sorted({b.mask.shape[1] // parts for b in self._batches})
            raise ValueError(
                f"An array with {rows} rows was given, but the batches of this step "
                f"have {' or '.join(map(str, known))} on each replica, so it is not "
                "known which of its rows are real. Pass `mask=`, made from "
                "`batch_mask(array)` of an array of the batch."
            )
        self.whole.asked |= asks
        if len(matching) > 1:
            self.whole.ambiguous.add(tuple(batch.place for batch in matching))
        mask = matching[0].mask
        replicas, real = mask.shape[0], jnp.maximum(jnp.sum(mask), 1)
        strategy = context.current().strategy
        assert strategy is not None, "only steps have masks"
        own = mask[context.replica_index(strategy)]
        own = jax.lax.dynamic_slice_in_dim(own, self.part * rows, rows)
        return RealRows(own, replicas * parts / real.astype(jnp.float32))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A `with` block in which a step is traced with these masks."""
        if not self.any:
            with context.entered(batches=self):
                yield
            return
        # Jitted functions that ask are cached with the masks of this trace only.
        trace = context.new_trace()
        try:
            with context.entered(batches=self, trace=trace):
                yield
        finally:
            context.forget_jitted()


_NONE = StepMasks()


def current() -> StepMasks:
    """The masks of the step that is traced; none outside of steps."""
    found = cast("StepMasks | None", context.current().batches)
    return _NONE if found is None else found


def tracing_with(masks: StepMasks) -> contextlib.AbstractContextManager[object]:
    """Enters the trace of a step with these masks."""
    is_first = context.current().batches is None
    return (masks if masks.any or is_first else current()).entered()


def part(index: ArrayLike, parts: int) -> contextlib.AbstractContextManager[object]:
    """Enters code that works on part `index` of so many of a batch."""
    if (now := current()) is _NONE:
        return contextlib.nullcontext()
    # Parts may be divided again.
    own = now.part * parts + index
    return StepMasks(now._batches, now.parts * parts, own, now.whole).entered()


def known_rows(array: jax.Array) -> jax.Array | None:
    """The mask of the rows of `array`, if a batch of the step has as many."""
    now = current()
    found = now.find(array, asks=False) if now.fits(array) else None
    return None if found is None else found.mask


def mask_of_argument(array: jax.Array) -> jax.Array | None:
    """The mask of the rows of `array`, if it is an argument of the step."""
    now = current()
    found = None if now.of(array) is None else now.find(array)
    return None if found is None else found.mask


def ignores_padding() -> None:
    """Note that the step has a result for each row, so that padded ones do no harm."""
    current().whole.asked = True


def keeps_padding(arrays: Sequence[jax.Array]) -> None:
    """Note that the step gathers these arrays, padded rows included."""
    now = current()
    now.whole.gathered |= any(now.of(array) for array in arrays)


@final
class LoopMasks:
    """The masks of the batches of several steps that are traced as one loop."""

    def __init__(self, columns: Sequence[Sequence[jax.Array]]) -> None:
        self._outer = current()
        self._others = self._outer.others([a for column in columns for a in column])
        self._places: dict[int, list[int | None]] = {}
        self.masks: dict[int, jax.Array] = {}
        for number, column in enumerate(columns):
            batches = [self._outer.of(array) for array in column]
            known = next((batch.mask for batch in batches if batch), None)
            if known is not None:
                # Batches without a mask among those with one have real rows only.
                masks = [b.mask if b else jnp.ones_like(known) for b in batches]
                self.masks[number] = jnp.stack(masks)
                self._places[number] = [b.place if b else None for b in batches]

    @contextlib.contextmanager
    def step(
        self, arrays: Sequence[jax.Array], masks: dict[int, jax.Array]
    ) -> Iterator[None]:
        """Enters the trace of a step with these arrays and masks."""
        local = [BatchArray(arrays[n], mask, _place(n)) for n, mask in masks.items()]
        outer = self._outer
        batches = StepMasks([*local, *self._others], outer.parts, outer.part)
        try:
            with batches.entered():
                yield
        finally:
            outer.whole.asked |= batches.asked
            outer.whole.gathered |= batches.gathered
            for places in batches.ambiguous:
                outer.whole.ambiguous |= self._in_each_step(places)

    def _in_each_step(self, places: tuple[int, ...]) -> set[tuple[int, ...]]:
        """The places in the call of masks that are ambiguous in a step."""
        steps = max(map(len, self._places.values()), default=1)
        columns = [
            [place] * steps if place >= 0 else self._places[_place(place)]
            for place in places
        ]
        rows = zip(*columns, strict=True)
        known = (tuple(p for p in row if p is not None) for row in rows)
        return {row for row in known if len(row) == len(places)}


def _place(number: int) -> int:
    """A negative place for a mask that goes through a loop; or back.

    >>> _place(3), _place(_place(3))
    (-4, 3)
    """
    return -1 - number


def batch_mask(array: jax.Array) -> jax.Array:
    """A mask of the rows of `array` that are real examples; for use inside a step.

    A batch that does not divide over the replicas is filled up with copies of its last
    row. Its mask goes into the step with it, and this is how to ask for it.

    The arrays of a batch share one mask. After a function of your own under `jax.jit`
    has returned them, each has one of its own, equal or not: then ask with an argument
    of the step, not with something computed from two.

    Args:
      array: of shape `[rows, ...]`: an argument of the step, or computed from one row
        by row.

    Returns:
      Booleans of shape `[rows]`. All are true for arrays that come from no dataset.

    Raises:
      ValueError: `array` is a scalar; no batch of the step has as many rows; or, when
        the step is called, two different batches have.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> (batch,) = strategy.experimental_distribute_dataset([np.arange(3)])
    >>> strategy.run(js.batch_mask, (batch,)).values
    (Array([ True,  True], dtype=bool), Array([ True, False], dtype=bool))
    """
    rows = _rows(array, "batch_mask")
    known = current().find(array)
    return jnp.ones(rows, bool) if known is None else known.mask


def masked_sum(
    values: jax.Array, *, mask: jax.Array | None = None, axis: int | None = 0
) -> jax.Array:
    """The sum of `values` over the real rows of this replica.

    Its sum over the replicas is that over all real rows of the batch.

    Args:
      values: of shape `[rows, ...]`. What rows that are not real hold has no influence,
        not even NaN.
      mask: which rows are real, `[rows]`; by default `batch_mask(values)`. With more
        dimensions, `[rows, time]`, which entries count: those of real rows do.
      axis: 0 sums over the rows, None over all dimensions. Those of `mask` are always
        summed over.

    Returns:
      An array of shape `[...]`, or a scalar; 0 on a replica without real rows. Booleans
      are counted.

    Raises:
      ValueError: as `batch_mask` does; or `mask` or `axis` does not fit.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
    >>> (batch,) = strategy.experimental_distribute_dataset([np.arange(5.0)])
    >>> strategy.reduce("sum", strategy.run(js.masked_sum, (batch,)))
    Array(10., dtype=float32)
    """
    _rows(values, "masked_sum")
    mask = batch_mask(values) if mask is None else _with_real_rows(mask, values)
    over = _dimensions(axis, mask, values, "masked_sum")
    return jnp.sum(_zeroed(values, mask), axis=over)


def masked_mean(
    values: jax.Array, *, mask: jax.Array | None = None, axis: int | None = 0
) -> jax.Array:
    """This replica's share in the mean of `values` over the real rows of the batch.

    The mean of the shares over the replicas is the mean over all real rows, exactly,
    and so for gradients: reduce both with `"mean"`. A share is the mean over the
    replica's own rows, weighted with their number; where all rows are real, it is their
    mean.

    Args:
      values: of shape `[rows, ...]`, such as the loss of each example. What rows that
        are not real hold has no influence, not even NaN.
      mask: which rows are real, `[rows]`; by default `batch_mask(values)`, which needs
        no communication. With a mask the replicas sum up their numbers of real rows.
        With more dimensions, `[rows, time]`, it says which entries count, of real rows,
        and each of them counts alike.
      axis: 0 is the mean over the rows, of shape `[...]`: losses `[rows, time]` have
        one mean for each time. None is the mean over all entries, a scalar. The
        dimensions of `mask` are always averaged over.

    Returns:
      An array of shape `[...]`, or a scalar; 0 on a replica without real rows.

    Raises:
      ValueError: as `batch_mask` does; or `mask` or `axis` does not fit.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
    >>> (batch,) = strategy.experimental_distribute_dataset([np.arange(5.0)])
    >>> shares = strategy.run(js.masked_mean, (batch,))
    >>> shares.values[0], shares.values[3]  # of 0 and 1; and of no rows
    (Array(0.8, dtype=float32), Array(0., dtype=float32))
    >>> strategy.reduce("mean", shares)
    Array(2., dtype=float32)
    """
    rows = _rows(values, "masked_mean")
    if mask is None:
        real = current().find(values)
    else:
        checked = _with_real_rows(mask, values)
        real = RealRows(checked, _share(checked))
    if real is None and rows:
        every = jnp.ones(rows, bool)
        over = _dimensions(axis, every, values, "masked_mean")
        return jnp.mean(mesh.array_of(values), over)
    if real is None:  # NumPy's mean of nothing is NaN
        real = RealRows(jnp.ones(0, bool), jnp.ones(()))
    over = _dimensions(axis, real.mask, values, "masked_mean")
    total = jnp.sum(_zeroed(values, real.mask), axis=over)
    others = math.prod(np.shape(values)[real.mask.ndim : len(over)])
    share = real.share if others == 1 else real.share / others
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total * share
    return total * share.astype(jnp.finfo(total.dtype).dtype)


def rows_of_mask(mask: Value, rows: int) -> RealRows:
    """The real rows by a user's mask; an all-reduce of their numbers."""
    checked = _checked(mask, (rows,))
    return RealRows(checked, _share(checked))


def _with_real_rows(mask: Value, values: Value) -> jax.Array:
    """A user's mask of rows, or of entries without those of padded rows."""
    mask = _checked(mask, np.shape(values))
    if mask.ndim > 1 and (known := current().find(values)) is not None:
        mask &= known.mask.reshape(-1, *[1] * (mask.ndim - 1))
    return mask


def _dimensions(
    axis: int | None, mask: jax.Array, values: Value, name: str
) -> tuple[int, ...]:
    """The first dimensions of `values`: those of `mask`, or all."""
    if axis is None:
        return tuple(range(np.ndim(values)))
    if isinstance(axis, bool) or axis != 0:
        raise ValueError(
            f"`axis` of `{name}` was {axis!r}; 0 for the rows or None for all "
            "dimensions was wanted. For others take the mean over these first."
        )
    return tuple(range(mask.ndim))


def _share(mask: jax.Array) -> jax.Array:
    """The factor that makes a masked sum this replica's share of the mean."""
    real = jnp.sum(mask).astype(jnp.float32)
    replica = context.current().replica
    if not isinstance(replica, ReplicaContext):
        return 1 / jnp.maximum(real, 1)
    total = replica.all_reduce(ReduceOp.SUM, real)
    return replica.num_replicas_in_sync / jnp.maximum(total, 1)


def _zeroed(values: Value, mask: jax.Array) -> jax.Array:
    values = mesh.array_of(values)
    along = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    return jnp.where(along, values, jnp.zeros((), values.dtype))


def _rows(values: Value, name: str) -> int:
    if np.ndim(values) == 0:
        raise ValueError(
            f"`{name}` was given a scalar; an array with one entry for each row of the "
            "batch was wanted, such as the loss of each example before their mean."
        )
    return np.shape(values)[0]


def _checked(mask: Value, values: tuple[int, ...]) -> jax.Array:
    """`mask` as Booleans, for values of this shape."""
    shape, rows = np.shape(mask), values[0]
    if not shape or shape != values[: len(shape)]:
        entries = ""
        if len(values) > 1:
            entries = f" One of entries has the first dimensions of values {values}."
        raise ValueError(
            f"`mask` has shape {shape}; one entry for each of the {rows} rows was "
            f"wanted.{entries}"
        )
    return mesh.array_of(mask).astype(bool)
