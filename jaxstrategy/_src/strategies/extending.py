"""What the methods of `strategy.extended` have in common: `ExtendsStrategy`."""

from __future__ import annotations

from jaxstrategy._src.contexts.abstract_strategy import AbstractStrategy
from jaxstrategy._src.executors.executor import AbstractExecutor
from jaxstrategy._src.strategies.destinations import (
    CopyPlace,
    Destinations,
    check_task,
    copies_on,
)
from jaxstrategy._src.strategies.process_role import ProcessRole
from jaxstrategy._src.variables import components
from jaxstrategy._src.variables.variable import Variable


class ExtendsStrategy:
    """A strategy, its executor, and whose variables are its own.

    Args:
      strategy: that has the additional methods.
      executor: runs its functions.
      role: of this process among those of the job.
    """

    def __init__(
        self,
        strategy: AbstractStrategy,
        executor: AbstractExecutor,
        role: ProcessRole | None = None,
    ) -> None:
        self._strategy = strategy
        self._executor = executor
        self._role = role or ProcessRole()

    def _place(self, destinations: Destinations) -> CopyPlace:
        """The place that destinations of a call name.

        Raises:
          ValueError: there is no destination, no such device, or it is of another task.
          TypeError: they name no devices.
        """
        check_task(destinations, self._role)
        return copies_on(destinations, self._strategy._replicas)

    def value_container(self, value: object) -> object:
        """The variable that `value` is a copy of; else `value` itself.

        Copies are what `experimental_local_results(variable)` gives. A copy is known as
        long as it is held: `experimental_local_results(value_container(copy))` holds
        the same object until the variable changes.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope():
        ...     v = js.Variable(1.0)
        >>> first, second = strategy.experimental_local_results(v)
        >>> strategy.extended.value_container(second) is v
        True
        """
        owner = components.owner_of(value)
        return value if owner is None else owner

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether `v`, or the variable that it is a copy of, was made in the scope.

        Raises:
          TypeError: it is neither a variable nor a copy of one.
        """
        variable = checked_variable(
            self.value_container(v), "variable_created_in_scope"
        )
        are_owned = self._strategy._variable_policy.are_owned
        return variable.strategy is (self._strategy if are_owned else None)

    def _own(self, given: object, method: str, ordinary: bool = True) -> Variable:
        """`given` if it is a variable of the strategy, or, if that will do, of none.

        Raises:
          ValueError: it is another strategy's.
          TypeError: it is no variable.
        """
        var = checked_variable(given, method)
        if self.variable_created_in_scope(var) or (ordinary and var.strategy is None):
            return var
        whose = "no strategy" if var.strategy is None else repr(var.strategy)
        raise ValueError(
            f"`extended.{method}` was given variable {var.name!r} of {whose}, not one "
            f"made in the scope of {self._strategy!r}. Make it in "
            "`with strategy.scope():`."
        )


def checked_variable(var: object, method: str) -> Variable:
    """`var`, given to a method of `strategy.extended`.

    Raises:
      TypeError: it is no variable.
    """
    if not isinstance(var, Variable):
        raise TypeError(
            f"`extended.{method}` was given {var!r}, a {type(var).__name__}; a "
            "jaxstrategy.Variable was wanted."
        )
    return var
