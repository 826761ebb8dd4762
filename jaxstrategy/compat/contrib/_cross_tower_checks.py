"""The side of `call_for_each_tower` on which the methods of 2018 may be called."""

from __future__ import annotations

from jaxstrategy._errors import ContextError
from jaxstrategy._options import ReduceOp, VariableAggregation
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._strategy_face import StrategyFace
from jaxstrategy.reductions._reduce_operations import OPERATIONS
from jaxstrategy.strategies import _current

_ADVICE = (
    "Methods of 2018 do not enter the scope by themselves: write "
    "`with distribution_strategy.scope():` around the call."
)


def require_scope(face: StrategyFace, method: str) -> None:
    """Raise unless code is part of this strategy, on either side.

    Raises:
      ContextError: it is part of none, or of another strategy.
    """
    current = _current.get_strategy()
    if current is face.core:
        return
    if not _current.has_strategy():
        raise ContextError(
            'Need to be inside "with distribution_strategy.scope()" for '
            f"{face!r}: `{method}` was called outside. {_ADVICE}"
        )
    raise ContextError(
        f"Mixing different DistributionStrategy objects: {face!r} is not "
        f"{current!r}, which is the current one where `{method}` was called."
    )


def require_cross_tower(face: StrategyFace, method: str) -> None:
    """Raise unless code is in the cross-tower context of this strategy.

    Raises:
      ContextError: it is in a tower, or is part of no strategy or of another.
    """
    context = _context.current()
    if context.strategy is face.core and context.replica is None:
        return
    require_scope(face, method)
    raise ContextError(
        "Method requires being in cross-tower context, use "
        f"get_tower_context().merge_call(): `{method}` was called in a tower."
    )


def operation_of(aggregation: VariableAggregation | str) -> ReduceOp:
    """SUM or MEAN, the aggregations that reduce values.

    Raises:
      ValueError: it is another one, or none.
    """
    try:
        op = ReduceOp(aggregation)
    except (ValueError, TypeError):
        op = None
    if op is not None and OPERATIONS[op].is_sum:
        return op
    raise ValueError(
        f"`aggregation` was {aggregation!r}; `VariableAggregation.SUM` or "
        "`VariableAggregation.MEAN` was wanted."
    )
