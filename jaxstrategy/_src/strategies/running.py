"""The methods of a strategy that run and compile steps: `RunsSteps`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, overload

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.replica_context import check_arguments
from jaxstrategy._src.executors.compiled import (
    CompiledStep,
    ReplicatedFunction,
    file_of,
)
from jaxstrategy._src.executors.step_loop import several
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.strategies.choices import (
    check_function,
    check_options,
    needs_arguments,
)
from jaxstrategy._src.strategies.composition import ComposedStrategy
from jaxstrategy._src.values.arrays import Function, PyTree

Decorator: TypeAlias = Callable[[Function], ReplicatedFunction]

NOT_GIVEN: Any = object()
"""The default of arguments that may be anything."""


class RunsSteps(ComposedStrategy):
    """The methods of a strategy that run steps, or compile them ahead of time."""

    @overload
    def run(self, *, options: RunOptions | None = None) -> Decorator: ...
    @overload
    def run(self, fn: Callable[[], Any]) -> PyTree: ...
    @overload
    def run(
        self, fn: Function, *, options: RunOptions | None = None
    ) -> ReplicatedFunction: ...
    @overload
    def run(
        self,
        fn: Function,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree] | None = None,
        options: RunOptions | None = None,
    ) -> PyTree: ...
    @overload
    def run(
        self,
        fn: Function,
        args: Sequence[PyTree] = ...,
        *,
        kwargs: dict[str, PyTree],
        options: RunOptions | None = None,
    ) -> PyTree: ...
    def run(
        self,
        fn: Function = NOT_GIVEN,
        args: Sequence[PyTree] = NOT_GIVEN,
        kwargs: dict[str, PyTree] | None = None,
        options: RunOptions | None = None,
    ) -> PyTree:
        """Runs `fn(*args, **kwargs)` on every replica, as one compiled program.

        `fn` is traced once per combination of argument structure, shapes and static
        values, whatever the number of replicas. In the arguments, each `PerReplica`
        arrives as this replica's version; arrays and numbers are the same on every
        replica; bools, strings, None and other hashable objects are static. In the
        results, an array that is provably equal on all replicas is a plain array,
        replicated; any other is a `PerReplica`. Variables, and
        whatever else is not an array, come back as they are (as they were when the
        step was traced). The call returns before the devices are done.

        As a decorator it makes a step that runs on all replicas whenever it is called:

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> @strategy.run
        ... def step(total, x):
        ...     x = js.get_replica_context().all_reduce("sum", x)
        ...     return total + x
        >>> x = strategy.per_replica([1.0, 2.0, 3.0, 4.0])
        >>> step(0.0, x)
        Array(10., dtype=float32)

        `@strategy.run(options=...)` takes options. A function without parameters is
        run at once by `strategy.run(fn)`, as in TensorFlow. One that has parameters
        and needs none is decorated by `@strategy.step`, or run with `args=()`.

        Where there are several replicas, each line of `jax.debug.print` in `fn` begins
        with the one that printed it, as in `replica 3: loss 0.25`.

        Args:
          fn: the step, as one replica sees it, or what `@strategy.run` made of it.
            Inside it `get_replica_context()` has the replica's id and the ways to the
            other replicas.
          args: its positional arguments, a tuple or list.
          kwargs: its keyword arguments.
          options: see `RunOptions`.

        Returns:
          A pytree like the one `fn` returns.

        Raises:
          ContextError: inside another `run`, or in another strategy's scope.
          TracedValueError: Python code in `fn` needs the value of a traced array.
          PlacementError: an argument belongs to another strategy, or is split over
            the replicas without being a `PerReplica`.
          DonatedValueError: an argument was donated to an earlier call.
          TypeError: an argument is neither an array nor hashable, or `fn` returned
            an object that hides arrays of the step; or no arguments were given to a
            function that takes some and needs none.
        """
        check_options(options)
        if fn is NOT_GIVEN:
            return functools.partial(self._decorate, options=options)
        if not callable(fn):
            raise TypeError(
                f"`run` was given {fn!r}, which cannot be called. Give the step "
                "function itself: `strategy.run(step, args=(state, batch))`."
            )
        if args is NOT_GIVEN:
            if kwargs is None and needs_arguments(fn):
                return self._decorate(fn, options=options)
            args = ()
        check_arguments(args, kwargs)
        if isinstance(fn, CompiledStep) and options is None:
            return fn(*args, **(kwargs or {}))
        fn, options = _undecorated(fn, options)
        return self._executor.run(fn, tuple(args), dict(kwargs or {}), options)

    @overload
    def step(self, *, options: RunOptions | None = None) -> Decorator: ...
    @overload
    def step(
        self, fn: Function, *, options: RunOptions | None = None
    ) -> ReplicatedFunction: ...
    def step(
        self,
        fn: Function = NOT_GIVEN,
        *,
        options: RunOptions | None = None,
    ) -> ReplicatedFunction | Decorator:
        """Makes a step that runs on all replicas whenever it is called.

        What `run` does as a decorator, whatever arguments the function takes: `run`
        calls a function without parameters at once, as TensorFlow does.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> @strategy.step
        ... def count(by=1):
        ...     return js.get_replica_context().all_reduce("sum", by)
        >>> count()
        Array(4, dtype=int32)

        Args:
          fn: the step, as one replica sees it. Without it, `@strategy.step(options=)`
            is a decorator.
          options: see `RunOptions`.

        Returns:
          A function of the same arguments, as `run` takes them.

        Raises:
          TypeError: `fn` cannot be called.
        """
        check_options(options)
        if fn is NOT_GIVEN:
            return functools.partial(self.step, options=options)
        if not callable(fn):
            raise TypeError(
                f"`step` was given {fn!r}, which cannot be called. Give the step "
                "function itself; it is called afterwards: `strategy.step(fn)(*args)`."
            )
        return self._decorate(fn, options=options)

    @overload
    def several(self, *, options: RunOptions | None = None) -> Decorator: ...
    @overload
    def several(
        self, step: Function, *, options: RunOptions | None = None
    ) -> ReplicatedFunction: ...
    def several(
        self,
        step: Function = NOT_GIVEN,
        *,
        options: RunOptions | None = None,
    ) -> ReplicatedFunction | Decorator:
        """A step that is made several times in one call, with a batch for each time.

        One program goes through the batches, so that the host has little to do: for
        steps that are shorter than the time it takes to start one. The results are
        those of a loop in Python, up to rounding. The batches are stacked on the
        devices, so that during the call they are there twice.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> @strategy.run(options=js.RunOptions(donate_argnums=0))
        ... def step(total, batch):
        ...     share = js.masked_mean(batch)
        ...     mean = js.get_replica_context().all_reduce("mean", share)
        ...     return total + mean, mean
        >>> many = strategy.several(step)
        >>> dataset = strategy.experimental_distribute_dataset(
        ...     js.batches(np.arange(10.0), 4))
        >>> total = strategy.mirror(0.0)
        >>> for batches in js.experimental.grouped(dataset, 2):
        ...     total, means = many(total, batches)
        ...     print(means)
        [1.5 5.5]
        [8.5]

        Args:
          step: a function, or what `@strategy.run` made of one. Its last positional
            argument is a batch. The arguments before it are what it goes on with: it
            returns new ones first, then anything else. Modules and optimizers of Flax
            NNX are changed in place and not returned. Keyword arguments, and arguments
            that are no arrays or trees of them (strings, bools, functions), are the
            same in all steps.
          options: how it is compiled, by default as `step` is; `donate_argnums` counts
            the arguments in the same way.

        Returns:
          A function of the same arguments, with a tuple of batches in the last place.
          It returns what the last step goes on with, and anything else stacked:
          `[step, ...]`. Each number of batches is compiled once. `explain` takes it.
          Without `step`, a decorator.

        Raises:
          TypeError: `step` cannot be called. When it is called: the batches are in no
            tuple; the step does not return what it goes on with, of the same structure,
            shapes and dtypes.
          ValueError: there are no batches, or they differ in structure, shape or dtype.
          ObjectError: it returns an NNX object, or changes of one what is no variable.
        """
        return self._looped(step, options, "several")

    @overload
    def local_steps(self, *, options: RunOptions | None = None) -> Decorator: ...
    @overload
    def local_steps(
        self, step: Function, *, options: RunOptions | None = None
    ) -> ReplicatedFunction: ...
    def local_steps(
        self,
        step: Function = NOT_GIVEN,
        *,
        options: RunOptions | None = None,
    ) -> ReplicatedFunction | Decorator:
        """Several steps in one call, that each replica takes by itself.

        One call takes k batches and k steps, as `several`, and no step waits for the
        other replicas. After the last, each floating-point array of the state that a
        step changed becomes its mean over the replicas: parameters, moments of the
        optimizer, statistics of BatchNorm, in a pytree, objects of Flax NNX and
        mirrored variables alike. All replicas have the same state again, and the state
        was sent once for k steps. This is local SGD (Stich 2018, arXiv:1805.09767). The
        optimizer of `jaxstrategy.optax.outer` keeps moments for each replica.

        The step is the one that trains with all replicas together. Its reductions take
        what this replica has for what every replica has: the mean, the smallest and
        the largest are the replica's own, the sum is that times their number. So one
        step of plain SGD and a mean afterwards is a step on the global batch. Whatever
        else it sends (`all_gather`, `jax.lax.pmean` by hand, Flax's
        `BatchNorm(axis_name=...)`) is refused. What the step reduces *and returns*
        besides the state, such as a loss, is reduced as it says, over all replicas,
        for all k steps at once; what else it returns is each replica's own.

        >>> import jax
        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> @strategy.run
        ... def step(w, goal):
        ...     loss, grad = jax.value_and_grad(lambda w: (w - goal) ** 2 / 2)(w)
        ...     loss, grad = js.get_replica_context().all_reduce("mean", (loss, grad))
        ...     return w - 0.5 * grad, loss
        >>> local = strategy.local_steps(step)
        >>> goals = strategy.per_replica([4.0, 8.0])
        >>> local(0.0, (goals, goals))  # they get to 3 and 6
        (Array(4.5, dtype=float32), Array([20.,  5.], dtype=float32))

        Args:
          step: as of `several`: a function, or what `@strategy.run` made of one. Its
            last positional argument is a batch, those before it are the state.
          options: how it is compiled, by default as `step` is.

        Returns:
          A function of the same arguments, with a tuple of batches in the last place,
          as `grouped(dataset, k)` makes them. It returns the state, and anything else
          stacked: `[step, ...]`. Each number of batches is compiled once. With one
          replica it is `several`. Without `step`, a decorator.

        Raises:
          TypeError: `step` cannot be called; otherwise as of `several`.
          ValueError: there are no batches, or they differ in structure, shape or dtype.
          ContextError: the step sends something that is not reduced.
          NotMirroredError: an NNX object has whole numbers that differ between the
            replicas afterwards; elsewhere they come back as a `PerReplica`, and a
            warning says so.
        """
        return self._looped(step, options, "local_steps")

    def _looped(
        self,
        step: Function,
        options: RunOptions | None,
        method: str,
    ) -> ReplicatedFunction | Decorator:
        """`step` several times in one call."""
        if step is NOT_GIVEN:
            return functools.partial(getattr(self, method), options=options)
        if not callable(step):
            raise TypeError(
                f"`{method}` was given {step!r}, which cannot be called. Give the "
                f"step: `many = strategy.{method}(step)`."
            )
        check_options(options)
        step, options = _undecorated(step, options)
        return self._decorate(several(step, method == "local_steps"), options=options)

    def _decorate(
        self, fn: Function, *, options: RunOptions | None = None
    ) -> ReplicatedFunction:
        fn, options = _undecorated(fn, options)
        return ReplicatedFunction(fn, self._executor, repr(self), options)

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


def _undecorated(
    fn: Function, options: RunOptions | None
) -> tuple[Function, RunOptions | None]:
    """The function that a strategy made a step of, and how it is to be compiled."""
    if isinstance(fn, (ReplicatedFunction, CompiledStep)):
        return fn.function, fn.options if options is None else options
    return fn, options
