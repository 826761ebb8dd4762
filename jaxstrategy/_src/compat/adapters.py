"""Strategies and contexts of older generations, as adapters of today's."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    final,
    overload,
)

import jax
from jax.core import Tracer

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import StrategyAdapter, core_of
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import VariableSynchronization
from jaxstrategy._src.reductions.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
)
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.text import at_least, shown
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.variable import Variable

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
}
"""Members of TensorFlow 1.13 by what 2018 called the same."""

NAMES_IN_2018 = {
    **{new.removeprefix("extended."): old for old, new in NAMES_IN_V1.items()},
    "experimental_local_results": "unwrap",
    "experimental_make_numpy_dataset": "distribute_dataset",
    "make_input_fn_iterator": "distribute_dataset",
    "reduce_to": "reduce",
    **dict.fromkeys(
        ("experimental_run", "experimental_run_v2", "run"), "call_for_each_tower"
    ),
}
"""Members of 2018 by what the same is called since TensorFlow 1.13."""

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="OlderStrategy")


@overload
def delegated(
    today: property, of: str = "_core", convert: Callable[[Any], Any] | None = None
) -> Any: ...
@overload
def delegated(
    today: Callable[Concatenate[Any, P], R], of: str = "_core"
) -> Callable[Concatenate[Any, P], R]: ...
def delegated(
    today: Any, of: str = "_core", convert: Callable[[Any], Any] | None = None
) -> Any:
    """Delegates a member to the object of today, the attribute `of`.

    `convert` makes what this generation has from the value of a property.
    """
    function: Any = today.fget if isinstance(today, property) else today
    name = function.__name__

    @functools.wraps(function, assigned=("__annotations__",))
    def member(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(operator.attrgetter(of)(self), name)
        if not isinstance(today, property):
            return found(*args, **kwargs)
        return found if convert is None else convert(found)

    member.__doc__ = f"Today's `{name}`. {(function.__doc__ or '').splitlines()[0]}"
    vars(member)["__signature__"] = inspect.signature(function)
    return property(member) if isinstance(today, property) else member


def refused(error: type[Exception], text: str) -> Any:
    """A property that raises, for what has no meaning here."""

    def refuse(self: object) -> NoReturn:
        raise error(text)

    refuse.__doc__ = f"Raises `{error.__name__}`."
    return property(refuse)


def made_by(today: Callable[P, Strategy]) -> Callable[Concatenate[Any, P], None]:
    """`__init__` of a class whose arguments are those of a class of today."""

    def __init__(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:  # noqa: N807
        OlderStrategy.__init__(self, today(*args, **kwargs))

    given = inspect.signature(today)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(__init__)["__signature__"] = given.replace(
        parameters=[this, *given.parameters.values()]
    )
    return __init__


_lock = threading.RLock()


class Adapter:
    """An object over one of today, `_core`, with the members of another generation."""

    # What this generation calls the members of others, and where today's are.
    _names: ClassVar[Mapping[str, str]]
    _core_path: ClassVar[str]
    _key: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._key = f"_{cls.__module__}.{cls.__name__}"

    def __init__(self, core: Any) -> None:
        self._core = core

    @classmethod
    def _cached(cls, core: Any, make: Callable[[Any], Any] | None = None) -> Self:
        """The object of this class over `core`, the same each time."""
        # A table that is not the core's own would keep both for ever.
        table = vars(core)
        if (found := table.get(cls._key)) is None:
            with _lock:
                if (found := table.get(cls._key)) is None:
                    found = table[cls._key] = (make or cls)(core)
        return found

    if not TYPE_CHECKING:  # type checkers would find any name

        def __getattr__(self, name: str) -> NoReturn:
            kind, core = type(self), vars(self).get("_core")
            text = f"{kind.__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(type(core), name):
                text += f", which is younger: `{self._core_path}.{name}` is today's"
            here = self._names.get(name, "")
            if hasattr(getattr(kind, "extended_class", None), name):
                here = f"extended.{name}"
            for place in (here, here.removeprefix("extended.")):
                if here and hasattr(kind, place.partition(".")[0]):
                    text += f"; in this generation it is `{place}`"
                    break
            raise AttributeError(f"{text}.", name=name, obj=self)


class OlderStrategy(Adapter, StrategyAdapter):
    """A strategy of an older generation; `cores` are the types of today it is over."""

    _module: ClassVar[str]  # whose users know it
    _era: ClassVar[str]
    _core_path = "strategy.core"
    _common: ClassVar[type[OlderStrategy]]
    _classes: ClassVar[dict[type, type[OlderStrategy]]]

    def __init_subclass__(cls, cores: tuple[type, ...] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if OlderStrategy in cls.__bases__:
            cls._common, cls._classes = cls, {}
        cls._classes.update(dict.fromkeys(cores, cls))

    if TYPE_CHECKING:
        __init__: Any  # each class has its own arguments
    else:

        def __init__(self, core: Strategy) -> None:
            if type(self) is self._common:
                name = type(self).__name__
                raise TypeError(
                    f"`{name}` is what all strategies of {self._era} have in common. "
                    "Make one of them, such as `MirroredStrategy()`; or of a strategy "
                    f"of `jaxstrategy`: `{name}.over(strategy)`."
                )
            self._common._cached(core, self._put_over)

    def _put_over(self, core: Strategy) -> Self:
        super().__init__(core)
        return self

    @property
    def core(self) -> Strategy:
        """The strategy of today, for what older ones had not: `core.gather`."""
        return self._core

    @classmethod
    def over(cls, core: Strategy | StrategyAdapter) -> Self:
        """The object of this generation for a strategy of today, the same each time.

        For what the classes of this generation have no arguments for.
        """
        found = core_of(core)
        if not isinstance(found, Strategy):
            raise TypeError(
                f"`core` was {shown(core)}; a strategy of `jaxstrategy` was wanted, "
                "for example `jaxstrategy.MirroredStrategy()`."
            )
        kind: Any = cls._classes.get(type(found), cls._common)
        made: Any = cls._common._cached(
            found, lambda c: kind.__new__(kind)._put_over(c)
        )
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin: Any = self.over(copy.deepcopy(self._core, memo))
        vars(twin).update({n: v for n, v in vars(self).items() if n[0] != "_"})
        memo[id(self)] = twin
        return twin

    def __copy__(self) -> Self:
        return copy.copy(self._core)  # says that it cannot be

    def __reduce__(self) -> tuple[object, ...]:
        return self.over, (self._core,)

    def __repr__(self) -> str:
        if type(self) is self._common:
            return f"{self._module}.{type(self).__name__}.over({self._core!r})"
        text = repr(self._core).removeprefix(type(self._core).__name__)
        return f"{self._module}.{type(self).__name__}{text}"

    def _repr_html_(self) -> str:
        return self._core._repr_html_()


@final
class AdapterScope(AbstractContextManager[S]):
    """A scope to be entered again, which nobody needs to hold while it lasts."""

    def __init__(self, adapter: S) -> None:
        self._adapter = adapter
        self._scope = adapter.core.scope()

    def __enter__(self) -> S:
        self._scope.__enter__()
        return self._adapter

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)


# What methods of both generations do, each under its name.


def wait_for(value: PyTree, name: str | None) -> PyTree:
    leaves = jax.tree.leaves(value)
    jax.block_until_ready([leaf for leaf in leaves if not isinstance(leaf, Tracer)])
    return leaves[0] if len(leaves) == 1 and name is None else None


def read_variable(v: object, method: str, said: str) -> jax.Array:
    """The value that the copies of a variable have together, of its shape."""
    if not isinstance(v, Variable):
        raise TypeError(
            f"`{method}` was given {shown(v)}; a jaxstrategy.Variable was wanted."
        )
    on_read = v.synchronization is VariableSynchronization.ON_READ
    if on_read and _context.current().replica is not None:
        raise ContextError(
            f"`{method}` was {said} variable {v.name!r}, of which each replica has a "
            "value of its own, `v.value()`. What they are together is known outside, "
            "or in `merge_call`."
        )
    return v.value()


def first_named(variables: Sequence[Variable], method: str) -> Variable:
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


def require_function(method: str, fn: object) -> None:
    if not callable(fn):
        raise TypeError(
            f"`{method}` was given {shown(fn)}, which cannot be called. Its arguments "
            f"follow the function: `{method}(..., fn, *args, **kwargs)`."
        )


def AllReduceCrossTowerOps(  # noqa: N802 - a class in TensorFlow
    all_reduce_alg: str = "nccl",
    num_packs: int = 1,
    agg_small_grads_max_bytes: int = 0,
    agg_small_grads_max_group: int = 10,
) -> CrossDeviceOps:
    """Today's `NcclAllReduce`, or `HierarchicalCopyAllReduce`.

    Args:
      all_reduce_alg: "nccl" or "hierarchical_copy".
      num_packs: in how many packs arrays of one dtype are joined; 0 for none.
      agg_small_grads_max_bytes: changes nothing, as packs join small arrays.
      agg_small_grads_max_group: likewise.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> ops = contrib.AllReduceCrossTowerOps("hierarchical_copy")
    >>> contrib.MirroredStrategy(js.simulate(8)[:4], cross_tower_ops=ops).num_towers
    4
    """
    kinds = {"nccl": NcclAllReduce, "hierarchical_copy": HierarchicalCopyAllReduce}
    if all_reduce_alg not in kinds:
        raise ValueError(
            f"`all_reduce_alg` was {all_reduce_alg!r}; 'nccl' or 'hierarchical_copy' "
            "was wanted."
        )
    at_least(0, "agg_small_grads_max_bytes", agg_small_grads_max_bytes)
    at_least(0, "agg_small_grads_max_group", agg_small_grads_max_group)
    return kinds[all_reduce_alg](at_least(0, "num_packs", num_packs))
