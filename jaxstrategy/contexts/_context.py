"""Which side of `run` code is on.

A thread (or asyncio task) is in one of three states: the default one, in which code
runs alone as its own single replica; the cross-replica context of a strategy (inside
`scope()` and `merge_call`), in which code sees all replicas at once; and the replica
context of a strategy (inside `run`), in which it sees one of them. One `ContextVar`
holds the state, and `entered` is the one way to change it.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from jaxstrategy._errors import ContextError
from jaxstrategy._options import CommunicationOptions, ReduceOp
from jaxstrategy.reductions._sums import Groups
from jaxstrategy.replicas._devices import Device

if TYPE_CHECKING:
    from jaxstrategy.values._per_replica import PyTree


class AbstractReduction(abc.ABC):
    """The one way in which replicas combine their values, inside a step."""

    @abc.abstractmethod
    def of_leaves(
        self,
        op: ReduceOp,
        leaves: Sequence[Any],
        options: CommunicationOptions | None = None,
        groups: Groups | None = None,
    ) -> list[Any]:
        """This replica's arrays reduced over all, or over its group."""

    @abc.abstractmethod
    def gathered(self, leaf: Any, axis: int) -> jax.Array:
        """Every replica's array, joined along `axis` in replica order."""

    @abc.abstractmethod
    def first(self, leaf: Any) -> jax.Array:
        """The array of the first replica."""


class AbstractStrategy(abc.ABC):
    """What lower layers may ask of a strategy."""

    # Whether this is the strategy of code that runs under none.
    is_default = False

    @property
    @abc.abstractmethod
    def mesh(self) -> Mesh:
        """The mesh with one device per replica."""

    @property
    def parameter_mesh(self) -> Mesh:
        """The mesh of the devices that hold mirrored variables."""
        return self.mesh

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """How many replicas take a step together."""

    @property
    @abc.abstractmethod
    def devices(self) -> tuple[Device, ...]:
        """The replicas' devices, in replica order."""

    @abc.abstractmethod
    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Each replica's version."""

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[AbstractStrategy]:
        """A `with` block in which this is the current strategy."""

    @property
    @abc.abstractmethod
    def reduction(self) -> AbstractReduction:
        """How the replicas' values become one."""

    @abc.abstractmethod
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: Any = None,
        *,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """One value from all replicas' versions."""


@dataclasses.dataclass(frozen=True)
class Context:
    """A side of the fence: of which strategy, which replica, inside which step.

    Attributes:
      strategy: whose context it is.
      replica: the replica context object, or None in cross-replica context.
      in_step: whether a step of `run` is being traced, so that values are one
        replica's own and collectives may be used on them.
    """

    strategy: AbstractStrategy
    replica: Any = None
    in_step: bool = False


_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar(
    "jaxstrategy_context", default=None
)

# A jitted helper that asks for its context must be traced again on the other side:
# JAX keys its caches by this value. It is set only while a step is traced.
_jit_key = jax.make_user_context(None)

current: Callable[[], Context | None] = _current.get


# What is called before and after each step of `run`, in a context that is not the
# default one.
_around: contextvars.ContextVar[tuple[Callable[[], None], Callable[[], None]] | None]
_around = contextvars.ContextVar("jaxstrategy_around_steps", default=None)
steps_are_watched: Callable[[], Any] = _around.get


@contextlib.contextmanager
def around_steps(
    before: Callable[[], None], after: Callable[[], None]
) -> Iterator[None]:
    """A `with` block in which each step of `run` in some scope is told of."""
    token = _around.set((before, after))
    try:
        yield
    finally:
        _around.reset(token)


@contextlib.contextmanager
def entered(context: Context | None) -> Iterator[None]:
    """Make `context` the current one for the length of the `with` block.

    None is the default context.

    Raises:
      ContextError: something else was entered inside the block and not left.
    """
    token = _current.set(context)
    try:
        with _jit_key_of(context):
            yield
        if _current.get() is not context:
            raise _wrong_order(context)
    finally:
        _current.reset(token)


def _jit_key_of(context: Context | None) -> contextlib.AbstractContextManager[Any]:
    if context is None or not context.in_step:
        return contextlib.nullcontext()
    strategy = context.strategy
    return _jit_key((type(strategy), strategy.mesh, context.replica is None))


def set_current(context: Context | None) -> None:
    """Replace the current context until it is set again or an outer block ends."""
    _current.set(context)


def describe(context: Context | None) -> str:
    """A context in words, for messages."""
    if context is None:
        return "the default context"
    side = "cross-replica" if context.replica is None else "replica"
    return f"the {side} context of {context.strategy!r}"


def require_same(context: Context | None, strategy: AbstractStrategy) -> None:
    """Raise unless `strategy` is the current strategy or there is none.

    Raises:
      ContextError: code of one strategy is used inside another's.
    """
    if context is not None and context.strategy is not strategy:
        raise ContextError(
            f"Mixing different Strategy objects: {strategy!r} was used inside "
            f"{describe(context)}. Leave that `scope()` or `run` first, or use one "
            "strategy for both."
        )


def require_cross_replica(strategy: AbstractStrategy, method: str) -> Context | None:
    """The context, if `strategy.method` may be called here: not inside a replica.

    Raises:
      ContextError: in a replica context, or in another strategy's.
    """
    context = _current.get()
    require_same(context, strategy)
    if context is not None and context.replica is not None:
        raise ContextError(
            f"`strategy.{method}` was called inside `run`, where code sees one "
            f"replica. `{method}` needs all of them (cross-replica context): use "
            "`get_replica_context().merge_call(merge_fn, args)` and call it in "
            "`merge_fn`, or use a method of the replica context such as `all_reduce`."
        )
    return context


class Scope:
    """A `with` block in which a strategy is current; may be entered again.

    Raises:
      ContextError: on entering, inside another strategy's scope or inside `run`; on
        leaving, when a block entered inside it was not left. Then nothing changes, and
        it can be left after the inner one.
    """

    def __init__(self, strategy: AbstractStrategy) -> None:
        self._strategy = strategy
        self._entered: list[tuple[Context, Context | None]] = []

    def __enter__(self) -> AbstractStrategy:
        before = require_cross_replica(self._strategy, "scope")
        in_step = before is not None and before.in_step
        # A new record each time, so that leaving in the wrong order is seen.
        context = Context(self._strategy, in_step=in_step)
        self._entered.append((context, before))
        _current.set(context)
        return self._strategy

    def __exit__(self, *error: object) -> None:
        context, before = self._entered[-1]
        if _current.get() is not context:
            raise _wrong_order(context)
        self._entered.pop()
        _current.set(before)


def _wrong_order(context: Context | None) -> ContextError:
    return ContextError(
        "Strategy contexts were left in another order than they were entered: leaving "
        f"{describe(context)} while in {describe(_current.get())}, which was entered "
        "later. Use `with` blocks, one inside the other."
    )


def require_host(strategy: AbstractStrategy, method: str) -> None:
    """Raise unless `strategy.method` is called outside every step.

    Raises:
      ContextError: inside `run`, `merge_call`, or another strategy's scope.
    """
    context = _current.get()
    require_same(context, strategy)
    if context is None or not context.in_step:
        require_cross_replica(strategy, method)
        return
    where = "`merge_call`" if context.replica is None else "`run`"
    raise ContextError(
        f"`strategy.{method}` was called inside {where}, while a step is traced and no "
        "value is known yet. Call it outside the step; what the step needs of its "
        "result is passed to it as an argument."
    )
