"""The index of the worker that runs code: `experimental_get_current_worker_index`."""

from __future__ import annotations

import jax

from jaxstrategy._errors import ContextError
from jaxstrategy.parameter_servers import _worker_surroundings
from jaxstrategy.scheduled import _recorder


def experimental_get_current_worker_index() -> jax.Array | int:
    """The index of the worker that runs this code, from 0.

    In a scheduled function, which is traced once for all workers, an int32 scalar that
    only the worker knows: choose by it with `jnp.where` or `jax.lax.cond`. In the
    function of a per-worker dataset, which each worker calls, an int of Python; while
    the coordinator calls that to learn what elements are like, 0.

    Raises:
      ContextError: in other code. It is a `RuntimeError`.

    >>> import jaxstrategy as js
    >>> index = js.coordinator.experimental_get_current_worker_index
    >>> strategy = js.ParameterServerStrategy(workers=2, parameter_servers=1,
    ...                                       backend="threads")
    >>> with js.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...     dataset = coordinator.create_per_worker_dataset(
    ...         lambda: [np.arange(4)[index()::2]])
    ...     @coordinator.function
    ...     def is_own(iterator):
    ...         return next(iterator)[0] == index()
    ...     coordinator.schedule(is_own, (iter(dataset),)).fetch()
    np.True_
    """
    surroundings = _worker_surroundings.current()
    if surroundings is not None:
        return surroundings.index
    recorder = _recorder.current()
    if recorder is not None and recorder.index is not None:
        return recorder.index
    raise ContextError(
        "`experimental_get_current_worker_index` was called by code that no worker "
        "runs. Call it in a function that a `ClusterCoordinator` schedules, or in the "
        "one given to `create_per_worker_dataset`."
    )
