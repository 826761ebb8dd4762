"""The one record of where code runs, and values that steps emit: `Context`."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
import functools
import importlib
import itertools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast, final

import jax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import (
    CommunicationOptions,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from jaxstrategy._src.reductions.packing import Overlap
from jaxstrategy._src.reductions.reduction import (
    EagerReduction,
    LocalReduction,
    Reduction,
)
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.values import arrays, trees
from jaxstrategy._src.values.arrays import Function, PyTree
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.values.trees import without_eager_sharding

# The name scope of local steps, by which checks find their collectives.
LOCAL_SCOPE = "jaxstrategy.local_steps"


@final
class LocalSteps:
    """Steps in which each replica is by itself, and the variables they assigned."""

    def __init__(self, count: int) -> None:
        self.reduction = LocalReduction(count)
        self.assigned: dict[int, Handle] = {}


class Rebindings(Protocol):
    """Temporary replacements of what a function captures."""

    def set(self) -> None: ...

    def take_back(self) -> None: ...


class EagerReplica(abc.ABC):
    """One replica that runs in a thread of its own, while the others wait."""

    number: int  # from 0
    index: jax.Array  # the same as an int32 array on the replica's device
    reduction: EagerReduction  # in place of the strategy's

    @abc.abstractmethod
    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> PyTree:
        """This replica's part of the result of `merge_fn`, called once for all."""

    @abc.abstractmethod
    def rebinding(
        self, rebindings: Rebindings
    ) -> contextlib.AbstractContextManager[None]:
        """Applies rebindings while this replica runs."""


class AbstractVariablePolicy(abc.ABC):
    """A strategy's policy for variables, as lower layers see it."""

    are_owned: bool  # whether variables made in its scope belong to the strategy
    replicas: Replicas  # that mirrored variables are on, one copy each

    # Of the step of a checkpoint a `with` block in which no variable changes, where
    # others than this thread change them.
    pause: Callable[[int], contextlib.AbstractContextManager[None]] | None = None

    # Not abstract, as most policies take any device.
    def check_devices(self, devices: tuple[Device, ...]) -> None:  # noqa: B027
        """Raise unless mirrored variables can be made on these devices."""


class AbstractStrategy(abc.ABC):
    """A strategy, as lower layers see it."""

    # Users have no need of these: `dir(strategy)` shows what they may call.
    _replicas: Replicas
    _variable_policy: AbstractVariablePolicy
    _overlap: Overlap | None  # how programs reduce beside the computation, if asked to

    @property
    def _parameter_replicas(self) -> Replicas:
        """The replicas on whose devices mirrored variables are, one copy each."""
        return self._variable_policy.replicas

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take a step together."""

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
    def _reduction(self) -> Reduction | LocalReduction | EagerReduction:
        """The way in which the replicas' values become one, where the code runs."""

    @abc.abstractmethod
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
        *,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """One value from all replicas' versions."""


_numbers = itertools.count()


def new_trace() -> int:
    return next(_numbers)


def forget_jitted() -> None:
    """Clears JAX's caches of tracers under `jax.checking_leaks`.

    A jitted function outside of a step that uses a variable or a mask is cached with
    its tracer. No other trace finds it, but `jax.checking_leaks` does, and would blame
    the user. Which function it is cannot be told.
    """
    if jax.config.jax_check_tracer_leaks:
        jax.clear_caches()


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """The state of the code that runs; `entered` changes fields of it for a block.

    Layers that stand above this one keep here what they must know, so that there is
    one state and one way in and out.
    """

    # Whose scope, step or `merge_call` it is; None outside of all.
    strategy: AbstractStrategy | None = None
    # The `ReplicaContext`; None in cross-replica context, and outside.
    replica: object = None
    # Whether a step is traced: values are one replica's own, collectives may be used.
    in_step: bool = False
    # Whether it was set rather than entered, and may be set again.
    is_set: bool = False
    # Makes the `with` block of each step of `run` in some scope.
    around: Callable[[], AbstractContextManager[None]] | None = None
    # The variables of the step that is traced, and the number of that trace, if its
    # step may use variables.
    variables: object = None
    trace: int | None = None
    # The devices of the copies that code of `extended.update` or `update_on` changes,
    # and what variables held before.
    updated: tuple[Device, ...] = ()
    before: object = None
    # The variable or replicas beside which `colocate_vars_with` makes variables.
    colocated: Handle | Replicas | None = None
    # How variables that do not say it are kept.
    new_variables: tuple[VariableSynchronization, VariableAggregation] | None = None
    # The names that variables get, for `compat.variables_by_name`.
    variable_scope: object = None
    # The devices that code says it updates, and those that it updated before.
    update_device: tuple[tuple[Device, ...], tuple[Device, ...]] | None = None
    # Of a function that is differentiated: what variables hold, by their `id`; lookups
    # of tables that it makes; and what takes the `id` of each variable that it reads.
    # Python 3.11 takes a mapping proxy, which it cannot hash, for a mutable default.
    differentiated: Mapping[int, object] = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({})
    )
    lookups: object = None
    reads: set[int] | None = None
    # Receives values that steps return besides their results, and those of the step
    # that is traced.
    step_outputs: object = None
    step_messages: tuple[object, list[Any]] | None = None
    # Whether JAX traces a function that makes an initial value, which reads what
    # variables hold now.
    is_initial: bool = False
    # The batches of the step that is traced, and the part on which it works.
    batches: object = None
    # The local steps that are traced, in which each replica is by itself.
    local: LocalSteps | None = None
    # On a worker of a coordinator: what it has unpickled of a function.
    unpickled: list[object] | None = None
    # What a function uses that a coordinator sends to workers, while it is traced.
    function: object = None
    # The worker for which a dataset is built or read.
    worker: object = None
    # Whether objects are pickled for a worker, which has its own strategies.
    is_shipping: bool = False
    # What steps that run eagerly remember of each other; None if steps are compiled.
    runs_eagerly: object = None
    # The replica whose thread it is.
    eager: EagerReplica | None = None
    # Is told of each call of `run` before it is made: the executor, function,
    # arguments, keyword arguments and options.
    observer: Callable[..., None] | None = None

    @property
    def jit_key(self) -> Hashable:
        """The key of JAX's caches, None outside of steps.

        A jitted helper that a step calls must be traced again on the other side of
        `merge_call`, and in another trace of the step: its trace has references to the
        variables of that trace. Eager replicas compile each operation once for all
        calls; `check_unstaged` raises for what a traced helper must not cache.
        """
        strategy = self.strategy if self.in_step else None
        if strategy is None:
            return self.trace
        side = self.replica is None, self.local is not None
        if self.eager is not None:
            return type(strategy), strategy._replicas, side, "eager", self.eager.number
        return type(strategy), strategy._replicas, side, self.trace


OUTSIDE = Context()
"""The context outside of all strategies; compared by identity."""

_current: contextvars.ContextVar[Context] = contextvars.ContextVar(
    "jaxstrategy_context", default=OUTSIDE
)
current: Callable[[], Context] = _current.get

# Set only while a step is traced: elsewhere a jitted function keeps its cache.
_jit_key = jax.make_user_context(None)
_same_key = contextlib.nullcontext()


@contextlib.contextmanager
def entered(**changed: Any) -> Iterator[Context]:
    """Changes fields of the current context for the length of the `with` block."""
    context = dataclasses.replace(_current.get(), **changed)
    key, token = context.jit_key, _current.set(context)
    try:
        with _same_key if key is None else _jit_key(key):
            yield context
        if _current.get() is not context:
            raise _wrong_order(context)
    finally:
        _current.reset(token)


def outside() -> contextlib.AbstractContextManager[Context]:
    return entered(
        strategy=None, replica=None, in_step=False, updated=(), colocated=None
    )


def check_unstaged(what: str) -> None:
    """Raise where a replica runs eagerly, but JAX stages the caller's code."""
    if _current.get().eager is None or not arrays.is_staged():
        return
    raise ContextError(
        f"{what} was used, in `eager_replicas()`, in a function that JAX traces by "
        "itself (`jax.checkpoint`; `jax.jit` with `disable_jit=False`), which would "
        "keep it for later calls. Use it before, and pass the function the arrays that "
        "it needs."
    )


def set_current(strategy: AbstractStrategy | None) -> None:
    """Makes `strategy` current until another is set or an outer block ends."""
    context = dataclasses.replace(
        _current.get(), strategy=strategy, is_set=strategy is not None
    )
    _current.set(OUTSIDE if context == OUTSIDE else context)


def replica_index(strategy: AbstractStrategy) -> jax.Array | int:
    """The id of this replica: a tracer in compiled steps, 0 without axes."""
    eager = _current.get().eager
    return strategy._replicas.index() if eager is None else eager.index


def describe(context: Context) -> str:
    """A context in words, for messages."""
    if context.strategy is None:
        return "the default context"
    side = "cross-replica" if context.replica is None else "replica"
    return f"the {side} context of {context.strategy!r}"


def require_same(context: Context, strategy: AbstractStrategy) -> None:
    """Raise unless `strategy` is the current strategy or there is none."""
    if context.strategy is not None and context.strategy is not strategy:
        raise ContextError(
            f"Mixing different Strategy objects: {strategy!r} was used inside "
            f"{describe(context)}. Leave that `scope()` or `run` first, or use one "
            "strategy for both."
        )


def require_cross_replica(strategy: AbstractStrategy, method: str) -> Context:
    """The context; raises in replica context, where `strategy.method` is an error."""
    context = _current.get()
    require_same(context, strategy)
    if context.replica is not None:
        raise ContextError(
            f"`strategy.{method}` was called inside `run`, where code sees one "
            f"replica. `{method}` needs all of them (cross-replica context): use "
            "`get_replica_context().merge_call(merge_fn, args)` and call it in "
            "`merge_fn`, or use a method of the replica context such as `all_reduce`."
        )
    return context


# Keras has state of its own in a scope. The module is above this one in the layers.
_KERAS_SCOPE = "jaxstrategy._src.keras.keras_scope"


class Scope:
    """A `with` block in which a strategy is current; may be entered again.

    Raises:
      ContextError: on entering, inside another strategy's scope or inside `run`; on
        leaving, when a block entered inside it was not left. Then nothing changes, and
        it can be left after the inner one.
    """

    def __init__(self, strategy: AbstractStrategy) -> None:
        self._strategy = strategy
        self._entered: list[tuple[Context, Context, contextlib.ExitStack]] = []

    def __enter__(self) -> AbstractStrategy:
        before = require_cross_replica(self._strategy, "scope")
        # A new record each time, so that leaving in the wrong order is detected.
        context = dataclasses.replace(before, strategy=self._strategy, is_set=False)
        blocks = contextlib.ExitStack()
        # Not `jax.set_mesh`, as Flax advises: computing with arrays of one replica
        # would be an error then (JAX 0.10 and 0.12).
        if jax.sharding.get_abstract_mesh().empty:
            blocks.enter_context(without_eager_sharding())
        keras_scope = importlib.import_module(_KERAS_SCOPE)
        blocks.enter_context(keras_scope.block(self._strategy))
        self._entered.append((context, before, blocks))
        _current.set(context)
        return self._strategy

    def __exit__(self, *error: object) -> None:
        context, before, blocks = self._entered[-1]
        if _current.get() is not context:
            raise _wrong_order(context)
        self._entered.pop()
        _current.set(before)
        blocks.close()


def _wrong_order(context: Context) -> ContextError:
    return ContextError(
        "Strategy contexts were left in another order than they were entered: leaving "
        f"{describe(context)} while in {describe(_current.get())}, which was entered "
        "later. Use `with` blocks, one inside the other."
    )


def require_host(strategy: AbstractStrategy, method: str) -> None:
    """Raise unless `strategy.method` is called outside every step."""
    context = _current.get()
    require_same(context, strategy)
    if not context.in_step:
        require_cross_replica(strategy, method)
        return
    where = "`merge_call`" if context.replica is None else "`run`"
    raise ContextError(
        f"`strategy.{method}` was called inside {where}, while a step is traced and no "
        "value is known yet. Call it outside the step; what the step needs of its "
        "result is passed to it as an argument."
    )


class Sender:
    """An object with methods by which steps emit messages; it has no state.

    So one compiled program serves all senders of a class.
    """

    @classmethod
    @functools.cache
    def of_steps(cls) -> Sender:
        """The sender that compiled steps see in place of any other."""
        return cls()


@final
class StepOutputs:
    """Receives the messages of steps that use `sender`, in order."""

    def __init__(self, sender: Sender, receive: Callable[[PyTree], object]) -> None:
        self.sender = sender
        self.receive = receive
        self._wrapped: dict[Function, Function] = {}

    def opened(self) -> AbstractContextManager[object]:
        return entered(step_outputs=self)

    def with_outputs(self, fn: Function) -> Function:
        """`with_outputs`, cached for the last few functions.

        A new function would be looked through for captured values again.
        """
        try:
            if (known := self._wrapped.get(fn)) is not None:
                return known
        except TypeError:  # it cannot be hashed
            return with_outputs(fn)
        if len(self._wrapped) >= _MOST_WRAPPED:
            del self._wrapped[next(iter(self._wrapped))]
        return self._wrapped.setdefault(fn, with_outputs(fn))


_MOST_WRAPPED = 8


def around_steps() -> StepOutputs | None:
    """The `StepOutputs` of a step that begins now, if there is one."""
    context = current()
    if context.step_outputs is None or context.step_messages is not None:
        return None
    return cast("StepOutputs", context.step_outputs)


def in_step() -> bool:
    """Whether a message emitted now is a result of a step that is traced."""
    return current().step_messages is not None


def require_open(sender: Sender, method: str) -> None:
    """Raise unless a message of `sender` is received now."""
    step_outputs = cast("StepOutputs | None", current().step_outputs)
    if step_outputs is None:
        raise ContextError(
            f"`{method}` was called after the steps had ended whose context it belongs "
            "to. Call it in the function that is run, or in a step that this starts."
        )
    if sender is not step_outputs.sender and sender is not type(sender).of_steps():
        raise ContextError(
            f"`{method}` was called on the context of other steps than those that run "
            "now. Use the context that the function of these steps is given."
        )


def emit(message: PyTree, method: str) -> None:
    """Adds a message to those of the step; outside of one it is received at once."""
    context = current()
    state, messages = context.step_messages or (None, None)
    if messages is None:
        is_inner = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(message))
    else:
        is_inner = get_opaque_trace_state() != state
    if is_inner:
        raise ContextError(
            f"`{method}` was called inside a function that JAX traces by itself within "
            "the step (`jax.jit`, `jax.grad`, `jax.lax.scan`), whose arrays nobody "
            "outside of it can use. Let the function return the value (`has_aux=True` "
            "of `jax.grad`), and call it where the function has returned."
        )
    if messages is None:
        cast("StepOutputs", context.step_outputs).receive(message)
    else:
        messages.append(message)


def with_outputs(fn: Function) -> Function:
    """`fn` as a function that also returns the list of its messages.

    It may be a function that is differentiated in a step, which emits them again.
    """

    @functools.wraps(fn)
    def step(*args: Any, **kwargs: Any) -> tuple[PyTree, list[PyTree]]:
        messages: list[PyTree] = []
        with entered(step_messages=(get_opaque_trace_state(), messages)):
            return fn(*args, **kwargs), messages

    return step


def without_sender(step_outputs: StepOutputs, tree: PyTree) -> PyTree:
    """`tree` with the sender that compiled steps see."""
    sender = step_outputs.sender
    return trees.map_around_objects(
        lambda leaf: type(sender).of_steps() if leaf is sender else leaf, tree
    )
