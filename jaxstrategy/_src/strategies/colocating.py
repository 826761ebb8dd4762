"""Variables beside others: `ColocatesVariables`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.strategies.extending import ExtendsStrategy
from jaxstrategy._src.variables.variable import Variable

Beside: TypeAlias = Variable | Device | str | Sequence[Device | str]
"""A variable, or devices or their names."""


class ColocatesVariables(ExtendsStrategy):
    """The method of `strategy.extended` that says where variables are made."""

    def colocate_vars_with(
        self, colocate_with_variable: Beside
    ) -> contextlib.AbstractContextManager[None]:
        """A `with` block in which variables are made on that variable's devices.

        On-read variables have a copy on each replica's device all the same.

        Args:
          colocate_with_variable: a variable of the strategy; or a device or its name,
            or several, such as `extended.parameter_devices`.

        Raises:
          ValueError: the variable belongs to another strategy, or to none; there is no
            such device; devices are given, and variables are on parameter servers, or
            have one copy and would need several.
          TypeError: it is neither a variable nor devices.
          ContextError: outside the strategy's `scope()`, or in another strategy's.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope(), strategy.extended.colocate_vars_with("CPU:1"):
        ...     v = js.Variable(1.0)
        >>> v.devices
        (CpuDevice(id=1),)
        """
        given = colocate_with_variable
        if isinstance(given, (str, Device, list, tuple)):
            replicas = self._place(given).replicas
            self._strategy._variable_policy.check_devices(replicas.devices)
            return self._colocated(replicas)
        return self._colocated(self._own(given, "colocate_vars_with", ordinary=False))

    @contextlib.contextmanager
    def _colocated(self, beside: Variable | Replicas) -> Iterator[None]:
        context = _context.current()
        _context.require_same(context, self._strategy)
        if context.strategy is None and self._strategy._variable_policy.are_owned:
            raise ContextError(
                "`extended.colocate_vars_with` was called outside of the scope of "
                f"{self._strategy!r}, where variables are no strategy's. Write `with "
                "strategy.scope(), strategy.extended.colocate_vars_with(v):`."
            )
        with _context.entered(colocated=beside):
            yield
