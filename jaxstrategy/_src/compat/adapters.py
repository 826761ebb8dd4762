"""Strategies and contexts of older generations, as adapters of today's."""

from __future__ import annotations

import abc
import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Self, TypeVar, final

from jaxstrategy._src.contexts.replica_context import (
    ReplicaContext,
    StrategyAdapter,
    core_of,
)
from jaxstrategy._src.strategies.choices import name_methods_after
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.variable import Variable

F = TypeVar("F", bound=StrategyAdapter)
Class = TypeVar("Class", bound=type[StrategyAdapter])


@final
class StrategyAdapters(Generic[F]):
    """The strategies of one generation, one object for each of today's."""

    def __init__(self, common: Callable[[], type[F]]) -> None:
        self._common = common
        self._classes: dict[type, type[StrategyAdapter]] = {}
        # By the strategy's `id`, which is no other's while the adapter keeps it alive.
        self._known: weakref.WeakValueDictionary[int, F] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    def of_type(self, *strategies: type) -> Callable[[Class], Class]:
        """A decorator of the class of adapters for these types of strategies."""

        def register(cls: Class) -> Class:
            self._classes.update(dict.fromkeys(strategies, cls))
            return cls

        return register

    def add(self, adapter: F) -> None:
        """Makes `adapter` the one of its strategy."""
        with self._lock:
            assert self._known.get(id(adapter.core), adapter) is adapter
            self._known[id(adapter.core)] = adapter

    def of(self, strategy: Any) -> F:
        """The adapter of a strategy."""
        core = strategy.core if isinstance(strategy, StrategyAdapter) else strategy
        with self._lock:
            known = self._known.get(id(core))
        if known is not None:
            return known
        # Imports the module of all classes: never while the lock is held, because that
        # module asks for adapters when it is imported.
        common: Any = self._common()
        with self._lock:
            known = self._known.get(id(core))
            return self._made(core, common) if known is None else known

    def _made(self, core: Any, common: Any) -> F:
        """A new adapter, without the `__init__` of its class that makes a strategy."""
        cls: Any = self._classes.get(type(core), common)
        adapter = cls.__new__(cls)
        common.__init__(adapter, core)
        return adapter


C = TypeVar("C")


@final
class ContextAdapters(Generic[C]):
    """One object of a generation for each replica context, while somebody holds it."""

    def __init__(self, make: Callable[[ReplicaContext], C]) -> None:
        self._make = make
        # By the context's `id`, which is no other's while the adapter keeps it alive.
        self._known: weakref.WeakValueDictionary[int, C] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def of(self, context: ReplicaContext) -> C:
        """The object for a replica context."""
        with self._lock:
            known = self._known.get(id(context))
            if known is None:
                known = self._known[id(context)] = self._make(context)
            return known


@final
class AdapterScope(contextlib.AbstractContextManager[F], Generic[F]):
    """A `with` block in which a strategy is current, and which is given its adapter."""

    def __init__(
        self, adapter: F, scope: contextlib.AbstractContextManager[object]
    ) -> None:
        self._adapter = adapter
        self._scope = scope

    def __enter__(self) -> F:
        self._scope.__enter__()
        return self._adapter

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)


NAMES_IN_2018 = {
    "batch_reduce_to": "batch_reduce",
    "broadcast_to": "broadcast",
    "call_for_each_replica": "call_for_each_tower",
    "experimental_local_results": "unwrap",
    "experimental_make_numpy_dataset": "distribute_dataset",
    "experimental_run": "call_for_each_tower",
    "experimental_run_steps_on_iterator": "run_steps_on_dataset",
    "experimental_run_v2": "call_for_each_tower",
    "make_dataset_iterator": "distribute_dataset",
    "make_input_fn_iterator": "distribute_dataset",
    "num_replicas_in_sync": "num_towers",
    "reduce_to": "reduce",
    "replica_id_in_sync_group": "tower_id",
    "run": "call_for_each_tower",
    "strategy": "distribution_strategy",
}
"""Members of 2018 by what the same is called since TensorFlow 1.13."""

NAMES_IN_V1 = {
    "batch_reduce": "extended.batch_reduce_to",
    "broadcast": "extended.broadcast_to",
    "call_for_each_tower": "extended.call_for_each_replica",
    "distribute_dataset": "make_dataset_iterator",
    "distribution_strategy": "strategy",
    "fetch": "extended.read_var",
    "num_towers": "num_replicas_in_sync",
    "run_steps_on_dataset": "extended.experimental_run_steps_on_iterator",
    "tower_id": "replica_id_in_sync_group",
    **{
        name: f"extended.{name}"
        for name in (
            "call_for_each_replica",
            "colocate_vars_with",
            "experimental_run_steps_on_iterator",
            "non_slot_devices",
            "parameter_devices",
            "read_var",
            "update",
            "update_non_slot",
            "value_container",
            "worker_devices",
        )
    },
}
"""Members of TensorFlow 1.13 by where 2018 had the same."""


def missing_member(
    adapter: object, core: object, name: str, way: str, names: Mapping[str, str]
) -> NoReturn:
    """Raises the error for an attribute that `adapter` does not have."""
    text = f"{type(adapter).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_") and hasattr(type(core), name):
        text += f", which is younger: `{way}.{name}` is today's"
    here = names.get(name)
    if here and hasattr(type(adapter), here.split(".")[0]):
        text += f"; in this generation it is `{here}`"
    raise AttributeError(f"{text}.", name=name, obj=adapter)


class OlderStrategy(StrategyAdapter):
    """One strategy of today, under other names.

    Args:
      core: a strategy of today.
    """

    # The module whose users know it.
    _module: ClassVar[str]
    # What it calls the members of other generations.
    _names: ClassVar[Mapping[str, str]]

    def __init__(self, core: Strategy) -> None:
        self._core = core

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_methods_after(cls)

    @property
    def core(self) -> Strategy:
        """The strategy of today, for what older ones had not: `core.gather`."""
        return self._core

    @staticmethod
    @abc.abstractmethod
    def over(core: Strategy | StrategyAdapter) -> OlderStrategy:
        """The object of this generation for a strategy, the same each time."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin: Any = self.over(copy.deepcopy(self._core, memo))
        memo[id(self)] = twin
        return twin

    def __copy__(self) -> NoReturn:
        self._core.__copy__()

    def __reduce__(self) -> tuple[Callable[[Any], OlderStrategy], tuple[Strategy]]:
        return self.over, (self._core,)

    def __repr__(self) -> str:
        text = repr(self._core).removeprefix(type(self._core).__name__)
        return f"{self._module}.{type(self).__name__}{text}"

    def _repr_html_(self) -> str:
        return self._core._repr_html_()

    if not TYPE_CHECKING:  # type checkers would find any name

        def __getattr__(self, name: str) -> NoReturn:
            core = vars(self).get("_core")
            missing_member(self, core, name, "strategy.core", self._names)


def checked_core(core: object) -> Strategy:
    """The strategy that `core` is, or stands over."""
    found = core_of(core)
    if not isinstance(found, Strategy):
        raise TypeError(
            f"`core` was {shown(core)}; a strategy of `jaxstrategy` was wanted, for "
            "example `jaxstrategy.MirroredStrategy()`."
        )
    return found


def first_named(variables: Sequence[Variable], method: str) -> Variable:
    """The variable whose name comes first."""
    if not isinstance(variables, (list, tuple)) or not all(
        isinstance(variable, (Variable, ShardedVariable)) for variable in variables
    ):
        raise TypeError(
            f"`{method}` was given {shown(variables)}; a list of variables was wanted."
        )
    if not variables:
        raise ValueError(
            f"`{method}` was given no variables; under this strategy the place is that "
            "of the variable whose name comes first."
        )
    return min(variables, key=lambda variable: variable.name)
