"""Steps that are compiled before they are called: `CompilesSteps`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.call_arguments import check_arguments
from jaxstrategy._src.executors.replicated_function import (
    CompiledStep,
    ReplicatedFunction,
    file_of,
)
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.strategies.calls import check_function, check_options
from jaxstrategy._src.strategies.composition import ComposedStrategy
from jaxstrategy._src.values.types import Function, PyTree


class CompilesSteps(ComposedStrategy):
    """The methods of a strategy that compile steps ahead of time."""

    def compile(
        self,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        *,
        options: RunOptions | None = None,
    ) -> CompiledStep:
        """Compiles what `run(fn, args, kwargs)` would run, without running it.

        With several processes each must call it, or `load_compiled`, for the same step:
        all of them get it, or an error.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> @strategy.run
        ... def step(w, batch):
        ...     share = js.masked_mean(w * batch)
        ...     return w - js.get_replica_context().all_reduce("mean", share)
        >>> dataset = strategy.experimental_distribute_dataset(
        ...     js.batches(np.arange(8.0), 8))
        >>> w = jax.ShapeDtypeStruct((), np.float32)
        >>> train = strategy.compile(step, (w, dataset.element_spec))
        >>> for batch in dataset:
        ...     print(train(np.float32(1.0), batch))
        -2.5

        Args:
          fn: the step, or what `@strategy.run` or `several` made of it.
          args: its positional arguments. Types may stand for arrays: a
            `jax.ShapeDtypeStruct`, in a `PerReplica` with shape `[replica, ...]`, the
            `element_spec` of a dataset, a whole state by `jax.eval_shape`. A
            `TrainState` holds its model and optimizer: make them once, outside of the
            function that builds it, or they are others than those compiled for.
          kwargs: its keyword arguments.
          options: how it is compiled; by default as it was decorated.

        Returns:
          A `CompiledStep`: called as the step is, for arguments of these types only.
          Its `save(path)` writes it into a file, for `load_compiled`. What the step
          captures is used as by `run`: variables and captured arrays may change, other
          things may not.

        Raises:
          ContextError: inside `run`, or in another strategy's scope.
          TypeError: an argument is neither an array nor hashable.
          ClusterError: another process does something else, or with other types, or has
            traced another program.
          CompiledStepError: another process has raised, which the message has.
          NotImplementedError: the strategy does not compile its steps here.
        """
        fn, options = self._checked_step("compile", fn, args, kwargs, options)
        return CompiledStep(
            fn, tuple(args), dict(kwargs or {}), self._executor, options
        )

    def load_compiled(
        self,
        path: str | os.PathLike[str],
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        *,
        options: RunOptions | None = None,
    ) -> CompiledStep:
        """A step that `compile(fn, args, kwargs).save(path)` has saved.

        The step is traced, which is a small part of the time that compiling takes, to
        see that it computes what it did when it was saved.

        With several processes each has a file of its own, and all must call this, or
        `compile`. If one cannot load its file, this is an error in all, so that all can
        go on to `compile`:

        ```
        try:
            train = strategy.load_compiled(path, step, args)
        except (FileNotFoundError, js.errors.CompiledStepError):
            train = strategy.compile(step, args)
            train.save(path)
        ```

        Args:
          path: as `save` was given it.
          fn: the step, as of `compile`.
          args: its positional arguments, or types, as of `compile`.
          kwargs: its keyword arguments.
          options: how it was compiled; by default as it was decorated.

        Returns:
          A `CompiledStep`.

        Raises:
          ContextError: inside `run`, or in another strategy's scope.
          TypeError: an argument is neither an array nor hashable.
          FileNotFoundError: there is no such file.
          CompiledStepError: the file is of another version of JAX or jaxstrategy,
            another platform, processor, mesh, or option; of other arguments; or the
            step computes something else now. Or another user can write it: loading a
            compiled step runs what is in the file. Or another process has raised.
          Exception: whatever `compile` raises.
        """
        fn, options = self._checked_step("load_compiled", fn, args, kwargs, options)
        return CompiledStep(
            fn, tuple(args), dict(kwargs or {}), self._executor, options, file_of(path)
        )

    def _checked_step(
        self,
        method: str,
        fn: Function,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree] | None,
        options: RunOptions | None,
    ) -> tuple[Function, RunOptions | None]:
        """The function of a step and its options; raises if the call is wrong."""
        context.require_host(self, method)
        if isinstance(fn, (ReplicatedFunction, CompiledStep)):
            options = fn.options if options is None else options
            fn = fn.function
        check_options(options)
        check_function(fn, method)
        check_arguments(args, kwargs)
        return fn, options
