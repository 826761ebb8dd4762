"""Programs that call Python while they run, which have no exported form: `HostCode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
import numpy as np

from jaxstrategy.contexts import _context
from jaxstrategy.contexts._abstract_strategy import AbstractStrategy
from jaxstrategy.parameter_servers import _worker_surroundings
from jaxstrategy.parameter_servers._shipped_program import LoadedCode, ShippedProgram
from jaxstrategy.parameter_servers.wire import _pickled
from jaxstrategy.scheduled._host_errors import with_errors_of_python
from jaxstrategy.scheduled._iterator_slot import IteratorSlot
from jaxstrategy.tracing import _roles
from jaxstrategy.tracing._jaxpr_types import Jaxpr
from jaxstrategy.tracing._roles import Signature
from jaxstrategy.tracing.replication._jaxprs import all_eqns
from jaxstrategy.values._types import Function, Leaf
from jaxstrategy.variables._variable import Variable

_CALLBACKS = (
    "pure_callback",
    "io_callback",
    "debug_callback",
    "debug_print",
    "buffer_callback",
)
TraceHere: TypeAlias = Callable[
    [
        Function,
        AbstractStrategy,
        Signature,
        Sequence[Leaf],
        Sequence[IteratorSlot],
    ],
    ShippedProgram,
]


def calls_python(jaxpr: Jaxpr) -> bool:
    """Whether a program calls Python while it runs, as `jax.debug.print` does."""
    return any(eqn.primitive.name in _CALLBACKS for eqn in all_eqns(jaxpr))


@final
class HostCode:
    """The code of one function; in this process as it is, in others the function.

    A worker in another process gets the function by cloudpickle, and traces it anew:
    JAX exports no program that calls Python (0.10 and 0.12).

    Args:
      main: the main program.
      ids: that of ids.
      trace: traces the function where it is called.
      fn: the function.
      strategy: of the coordinator.
      signature: of its arguments.
      leaves: the arguments, or their types.
      slots: its iterators.
    """

    def __init__(
        self,
        main: Callable[..., Any],
        ids: Callable[..., Any] | None,
        trace: TraceHere,
        fn: Function,
        strategy: AbstractStrategy,
        signature: Signature,
        leaves: Sequence[Leaf],
        slots: Sequence[IteratorSlot],
    ) -> None:
        self._code = main, ids
        self._trace = trace
        self._call = fn, strategy, signature, leaves, slots
        self._sent: tuple[bytes, Sequence[np.ndarray]] | None = None

    def loaded(self, program: ShippedProgram) -> LoadedCode:
        """What a worker calls.

        Args:
          program: of which this is the code.
        """
        if self._sent is None:
            main, ids = self._code
            return LoadedCode(program, with_errors_of_python(main), ids)
        surroundings = _worker_surroundings.current()
        assert surroundings is not None, "a worker loads it"
        arrived: list[object] = []
        with _context.entered(arrived=arrived):
            strategy, fn, args, kwargs, slots = _pickled.loaded(*self._sent)
        for each in arrived:
            if isinstance(each, Variable):
                each.adopt(strategy)
        with _context.entered(worker=None):
            leaves, signature = _roles.take_apart(fn, args, kwargs)
            own = self._trace(fn, strategy, signature, leaves, slots)
        # What it refers to must live as long as it may be called.
        self._call = fn, strategy, signature, leaves, slots
        assert isinstance(own.main, HostCode)
        main, ids = own.main._code
        return LoadedCode(own, with_errors_of_python(main), ids)

    def __getstate__(self) -> dict[str, object]:
        fn, strategy, signature, leaves, slots = self._call
        blanks = [_blank(leaf) for leaf in leaves]
        args, kwargs = signature.rebuild(blanks)
        with _context.entered(is_shipping=True):
            sent = _pickled.dumped((strategy, fn, args, kwargs, tuple(slots)))
        return {"_sent": sent, "_trace": self._trace, "_code": None, "_call": None}


def _blank(leaf: Leaf) -> Leaf:
    """An array of the type of one, of which nobody looks at the numbers."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, np.ndarray):
        return jax.numpy.zeros(leaf.shape, leaf.dtype)
    array = np.asarray(leaf)
    return np.zeros(array.shape, array.dtype)
