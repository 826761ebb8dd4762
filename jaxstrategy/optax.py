"""Optax transformations that act across the replicas of the current strategy.

They stand in any chain, and do nothing where there is one replica. Where
`all_reduce_gradients` stands decides what the others see:

    optax.chain(js.optax.all_reduce_gradients(), optax.clip_by_global_norm(1.0), ...)

clips the mean gradient, as one device would that has the whole batch. The other order
clips each replica's own gradient first: each has another norm, so the mean of what is
left has another direction. `check_chain` finds such a chain.
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.training.optax import (
        OuterState as OuterState,
        all_reduce_gradients as all_reduce_gradients,
        apply_if_finite as apply_if_finite,
        check_chain as check_chain,
        outer as outer,
        own_copies as own_copies,
    )
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
