"""The block in which replicas run eagerly: `eager_replicas`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.executors.replica_threads.eager_call import EagerBlock
from jaxstrategy._src.text.shown import shown


@contextlib.contextmanager
def eager_replicas(*, disable_jit: bool = True) -> Iterator[None]:
    """A `with` block in which steps run eagerly, for debugging.

    `run`, and steps made with `@run`, `step`, `several` and `local_steps`, call the
    function once for each replica of this process, in a Python thread of its own,
    instead of compiling it. So `print`, `breakpoint()`, a Python `if` on values or on
    the replica's id, and shapes that depend on data work. One replica runs at a time,
    in their order, from one collective to the next. What the replicas do together
    (`all_reduce`, `all_gather`, `merge_call`, assignments with an aggregation) they do
    by the compiled operations, with the same numbers; also in gradients. The rest is
    computed operation by operation, as the compiled step up to rounding, and slowly:
    JAX compiles each operation once on each device.

    A result is a plain array if all replicas have the same bits of it, and a
    `PerReplica` if they differ, if they did at an earlier call in this block, or if it
    is such an argument, returned as it is. (Compiled, it is proved: what may differ is
    a `PerReplica`, even if it happens to be equal. `reduce`, `gather`, `run` and
    `experimental_local_results` take both.) What differs in shape, or is no array, is
    a `Versions`. Variables and objects of Flax NNX that must be equal are compared;
    what a step that raises has assigned is lost, but for what stood before a
    `merge_call`, as compiled steps leave it. Nothing is donated. `check_finite` looks
    for NaN alone.

    `merge_fn` is called once, outside of any trace, with the arrays of all replicas.

    Without a strategy nothing changes. Steps of a `ParameterServerStrategy` run on
    workers and are refused. Collectives by hand (`jax.lax.psum`) find no axis.

    Args:
      disable_jit: whether functions that are jitted, JAX's own too, and loops and
        branches of `jax.lax` run in Python, as in `jax.disable_jit()`. If not, it is
        faster, and collectives in them are refused, as are variables and masks.

    Raises:
      ContextError: entered inside a step.
      TypeError: `disable_jit` is neither True nor False.
      DivergentCollectiveError: from `run`: some replicas wait at a collective where
        the others wait at another one, or have returned.
      NotMirroredError: from `run`: replicas differ in what must be equal.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> @strategy.run
    ... def step(x):
    ...     context = js.get_replica_context()
    ...     if context.replica_id_in_sync_group == 1:
    ...         print("replica 1 has", x)
    ...     return context.all_reduce("sum", x)
    >>> with js.experimental.eager_replicas():
    ...     print(step(strategy.per_replica([1.0, 2.0])))
    replica 1 has 2.0
    3.0
    """
    if not isinstance(disable_jit, bool):
        raise TypeError(
            f"`disable_jit` was {shown(disable_jit)}; True or False was wanted."
        )
    if context.current().in_step:
        raise ContextError(
            "`eager_replicas()` was entered inside a step, which is compiled or runs "
            "eagerly already. Enter it around the call of the step."
        )
    with context.entered(runs_eagerly=EagerBlock(disable_jit)):
        yield
