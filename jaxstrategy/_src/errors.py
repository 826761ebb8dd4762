"""Exceptions and warnings that a caller can act on."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstrategy._src.text import and_more, listed, with_noun


class ContextError(RuntimeError):
    """A method was called on the wrong side of `run`, or for another strategy.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> try:
    ...     strategy.run(lambda: strategy.reduce("sum", 1.0))
    ... except js.errors.ContextError as error:
    ...     print(str(error).partition(". `")[0])
    `strategy.reduce` was called inside `run`, where code sees one replica
    """


class TracedValueError(TypeError):
    """Python needed the value of something that is known only on the devices.

    The original JAX error is the `__cause__`.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> def step(x):
    ...     return x if x > 0 else -x  # `jnp.abs(x)`
    >>> try:
    ...     strategy.run(step, (1.0,))
    ... except js.errors.TracedValueError as error:
    ...     print(str(error).partition(",")[0])
    `step` asked Python for the value of something that only the devices will know
    """


class LeakedTracerError(RuntimeError):
    """A step left a value of its trace in something that stays after the step.

    The message names the place and the line where the value was made.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> losses = []
    >>> def step(x):
    ...     losses.append(x * x)  # return it instead
    >>> try:
    ...     strategy.run(step, (1.0,))
    ... except js.errors.LeakedTracerError as error:
    ...     print(str(error).partition(", made")[0], losses)
    `step` left a value of its trace, float32[], in `captured losses[0]` []
    """


class PlacementError(ValueError):
    """A value lies on devices, or is split in a way, that the strategy cannot use.

    >>> import jaxstrategy as js
    >>> devices = js.simulate(8)
    >>> one, other = js.MirroredStrategy(devices[:2]), js.MirroredStrategy(devices[2:4])
    >>> try:
    ...     other.run(lambda x: x, (one.per_replica([1.0, 2.0]),))
    ... except js.errors.PlacementError as error:
    ...     print(str(error).partition(":")[0])
    `x` is a PerReplica of another strategy
    """


class DonatedValueError(RuntimeError):
    """A value was used after its memory had been given to an earlier step.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> @strategy.run(options=js.RunOptions(donate_argnums=0))
    ... def step(w):
    ...     return w + 1
    >>> w = strategy.mirror(1.0)
    >>> new = step(w)
    >>> try:
    ...     step(w)
    ... except js.errors.DonatedValueError as error:
    ...     print(str(error).partition(". ")[0])
    `w` was donated to an earlier call, which has reused its memory
    """


class DivergentCollectiveError(RuntimeError):
    """Only some replicas would reach a collective, and wait for ever for the others.

    Attributes:
      collective_line: `file:line: code` of the collective, None if unknown.
      predicate_line: of where the value that decides began to vary.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> def step(x):
    ...     total = lambda: js.get_replica_context().all_reduce("sum", x)
    ...     return jax.lax.cond(x > 1, total, lambda: x)
    >>> try:
    ...     strategy.run(step, (strategy.per_replica([1.0, 2.0]),))
    ... except js.errors.DivergentCollectiveError as error:
    ...     print(error.predicate_line.partition(": ")[2])
    return jax.lax.cond(x > 1, total, lambda: x)
    """

    def __init__(
        self,
        message: str,
        collective_line: str | None = None,
        predicate_line: str | None = None,
    ) -> None:
        super().__init__(message)
        self.collective_line = collective_line
        self.predicate_line = predicate_line


class NotMirroredError(RuntimeError):
    """A result that should be equal on all replicas may differ between them.

    Attributes:
      path: the result, as in `step(...)['params']`.
      line: `file:line: code` of where it began to vary, None if unknown.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> @strategy.run(options=js.RunOptions(expect_mirrored=True))
    ... def step(w, x):
    ...     return w - 0.1 * x
    >>> try:
    ...     step(1.0, strategy.per_replica([1.0, 2.0]))
    ... except js.errors.NotMirroredError as error:
    ...     print(error.path, "|", error.line.partition(": ")[2])
    step(...) | return w - 0.1 * x
    """

    def __init__(
        self, message: str, path: str | None = None, line: str | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


class NotMirroredVariableError(NotMirroredError, ValueError):
    """A step assigns a mirrored variable a value that may differ between replicas.

    Attributes:
      path: the variable's name.
      line: `file:line: code` of where the value began to vary, or was assigned; None if
        unknown.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     w = js.Variable(1.0, name="w")
    >>> try:
    ...     strategy.run(w.assign, (strategy.per_replica([1.0, 2.0]),))
    ... except js.errors.NotMirroredVariableError as error:
    ...     print(error.path, "|", str(error).partition(",")[0])
    w | Variable 'w' is mirrored
    """


class NotMirroredWarning(UserWarning):
    """State goes into a step equal on all replicas and comes out different on each.

    >>> import warnings
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> def step(params, x):
    ...     return {"w": params["w"] - x}  # the gradient is not reduced
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     _ = strategy.run(step, ({"w": 1.0}, strategy.per_replica([1.0, 2.0])))
    >>> print(caught[0].category.__name__, str(caught[0].message).partition(",")[0])
    NotMirroredWarning `step` was given `params['w']` equal on all replicas
    """


class NonFiniteError(FloatingPointError):
    """A NaN or an Inf arose in a step that was to be checked.

    Attributes:
      replicas: the ids of those where it arose.
      line: `file:line: code` of where, None if it came in, or if it is unknown.
      source: the argument or variable that it came in by, None if it did not.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> @strategy.run(options=js.RunOptions(check_finite=True))
    ... def step(x):
    ...     return jnp.log(x)
    >>> try:
    ...     step(strategy.per_replica([1.0, -1.0]))
    ... except js.NonFiniteError as error:
    ...     print(error.replicas, error.line.partition(": ")[2])
    (1,) return jnp.log(x)
    """

    def __init__(
        self,
        message: str,
        replicas: tuple[int, ...] = (),
        line: str | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__(message)
        self.replicas = replicas
        self.line = line
        self.source = source


class OutOfSyncError(RuntimeError):
    """Replicas hold different copies of what should be equal on all of them.

    Attributes:
      leaves: the arrays that differ, by their paths; for each the groups of replicas
        that agree, the largest first: `{"tree['w']": ((0, 1, 3), (2,))}`.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:3])
    >>> try:
    ...     strategy.assert_in_sync(strategy.per_replica([7, 8, 7]), "count")
    ... except js.errors.OutOfSyncError as error:
    ...     print(error.leaves)
    {'count': ((0, 2), (1,))}
    """

    _NAMED = 8  # arrays, groups, and replicas of a group; the others are counted

    def __init__(self, leaves: dict[str, tuple[tuple[int, ...], ...]]) -> None:
        super().__init__(leaves)
        self.leaves = leaves

    def __str__(self) -> str:
        count = len(self.leaves)
        are = "is" if count == 1 else "are"
        arrays = with_noun(count, "array")
        lines = [f"{arrays} {are} not equal, bit by bit, on all replicas:"]
        lines += [
            f"  `{path}`: {self._difference(groups)}"
            for path, groups in list(self.leaves.items())[: self._NAMED]
        ]
        if more := and_more(count, self._NAMED):
            lines += [f" {more}; the exception's `leaves` has them all"]
        return "\n".join([*lines, self._ADVICE])

    def _difference(self, groups: tuple[tuple[int, ...], ...]) -> str:
        most, *others = groups
        rest = sorted(replica_id for group in others for replica_id in group)
        if len(most) <= len(rest):
            named = " | ".join(map(self._listed, groups[: self._NAMED]))
            return f"replicas {named}{and_more(len(groups), self._NAMED)}"
        if len(rest) == 1:
            return f"replica {rest[0]} differs from the other {len(most)}"
        return f"replicas {self._listed(rest)} differ from the other {len(most)}"

    def _listed(self, replica_ids: Sequence[int]) -> str:
        return listed(replica_ids, self._NAMED)

    _ADVICE = (
        "`run` gives back as one array only what it has proved equal, so look for what "
        "it cannot see: arrays put together by hand, callbacks with side effects, host "
        "data that differs between processes, GPU operations that are not "
        "deterministic, faulty hardware. A PerReplica differs if something it was "
        "computed from was not reduced. To go on, restore a checkpoint, or mirror the "
        "copies of one replica i that you trust: `strategy.mirror(tree, replica=i)`, "
        "of a PerReplica `strategy.mirror(value.local(i))`."
    )


class SimulationError(RuntimeError):
    """Simulated devices were asked for after JAX had already started its devices.

    >>> import jaxstrategy as js
    >>> eight = js.simulate(8)
    >>> try:
    ...     js.simulate(3)
    ... except js.errors.SimulationError as error:
    ...     print(str(error).partition(",")[0])
    `simulate(3)` came too late: JAX has already started
    """


class ClusterError(RuntimeError):
    """The processes of a job could not meet, or one of them cannot go on.

    The message names the processes by their ids and hosts.

    >>> import jaxstrategy as js
    >>> resolver = js.cluster_resolver.SimpleClusterResolver({})
    >>> try:
    ...     strategy = js.MultiWorkerMirroredStrategy(resolver)
    ... except js.ClusterError as error:
    ...     print(error)  # which process did not come, and why
    """


class MissingExtraError(ImportError):
    """An optional dependency is needed; the message names the extra to install.

    >>> import jaxstrategy as js
    >>> try:
    ...     layer = js.flax.nnx.BatchNorm
    ... except js.errors.MissingExtraError as error:
    ...     print(error)  # without Flax: pip install 'jaxstrategy[flax]'
    """


class LateReplicaWarning(UserWarning):
    """In `eager_replicas()` a replica runs on and on; the message says where it is.

    >>> import jaxstrategy as js
    >>> issubclass(js.errors.LateReplicaWarning, UserWarning)
    True
    """


class CompiledStepError(ValueError):
    """A step that was compiled ahead of time does not fit what it is to be used for.

    A call has arguments of other types than those it was compiled for; a file is of
    another version, mesh or step, or of a user who is not trusted.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> double = strategy.compile(lambda x: 2 * x, (np.zeros(3, np.float32),))
    >>> try:
    ...     double(np.zeros(4, np.float32))
    ... except js.errors.CompiledStepError as error:
    ...     print(str(error).partition(". ")[0])
    Argument `x` of `<lambda>` is float32[4], and the step is compiled for float32[3]
    """


class RecompilationWarning(UserWarning):
    """One function is compiled again and again; the message says what changed.

    >>> import warnings
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     for rows in range(1, 12):
    ...         _ = strategy.run(lambda x: x.sum(), (np.ones(rows),))
    >>> print(caught[0].category.__name__, str(caught[0].message).partition(",")[0])
    RecompilationWarning `<lambda>` is being compiled for the 6th time
    """


class DoubleReductionWarning(UserWarning):
    """The result of a reduction is summed over the replicas again.

    >>> import warnings
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> def step(x):
    ...     reduce = js.get_replica_context().all_reduce
    ...     return reduce("sum", reduce("mean", x))
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     total = strategy.run(step, (strategy.per_replica([1.0, 2.0]),))
    >>> print(caught[0].category.__name__, total)
    DoubleReductionWarning 3.0
    """


class WholeTableWarning(UserWarning):
    """A function for workers looks up rows, and yet all of the table must be sent.

    >>> import warnings
    >>> import jaxstrategy as js
    >>> strategy = js.ParameterServerStrategy(workers=1, parameter_servers=1,
    ...                                       backend="threads")
    >>> with strategy.scope():
    ...     table = js.Variable(jnp.arange(8), name="table")
    >>> def step(ids):
    ...     lookup = js.experimental.embedding_lookup
    ...     return lookup(table, lookup(table, ids))
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     rows = strategy.run(step, (jnp.array([3]),))
    >>> print(caught[0].category.__name__, rows)
    WholeTableWarning [3]
    """


class PaddedRowsWarning(UserWarning):
    """A step was given rows that only fill up a batch, and does not ask which.

    >>> import warnings
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> (batch,) = strategy.experimental_distribute_dataset([np.arange(3.0)])
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     sums = strategy.run(lambda batch: batch.sum(), (batch,))
    >>> print(caught[0].category.__name__, strategy.reduce("sum", sums))
    PaddedRowsWarning 5.0
    >>> strategy.reduce("sum", strategy.run(js.masked_sum, (batch,)))
    Array(3., dtype=float32)
    """


class OutOfRangeError(StopIteration):
    """`get_next` was called at the end of the data; TensorFlow's name for it.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> iterator = iter(strategy.experimental_distribute_dataset([np.arange(4)]))
    >>> batch = iterator.get_next()
    >>> try:
    ...     iterator.get_next()
    ... except js.OutOfRangeError:
    ...     print("one batch")
    one batch
    """


class ObjectError(ValueError):
    """A step does to an object what a compiled step cannot do, or what would be lost.

    Such objects are modules, optimizers and metrics of Flax NNX.

    >>> import jaxstrategy as js
    >>> from flax import nnx
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> def step(model):
    ...     model.bias = nnx.Param(jnp.zeros(1))  # do it before the step
    >>> try:
    ...     strategy.run(step, (nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0)),))
    ... except js.errors.ObjectError as error:
    ...     print(str(error).partition(". ")[0])
    The step changed which variables its objects have: added `bias`
    """


class WorkerLost(RuntimeError):
    """A worker of a `ParameterServerStrategy` ended, or does not answer any more.

    What it was running is run again by another worker, so that users meet this only as
    the cause of other errors.

    >>> import jaxstrategy as js
    >>> issubclass(js.WorkerLost, RuntimeError)
    True
    """


class ParameterServerLost(RuntimeError):
    """A parameter server ended, and with it the variables that it held.

    Start again from the last checkpoint.

    >>> import jaxstrategy as js
    >>> issubclass(js.errors.ParameterServerLost, RuntimeError)
    True
    """


class _ClosureError(RuntimeError):
    _what: str

    def __init__(self, original_exception: BaseException) -> None:
        if isinstance(original_exception, _ClosureError):
            original_exception = original_exception.original_exception
        self.original_exception = original_exception
        name = type(original_exception).__name__
        super().__init__(f"{self._what}: {name}: {original_exception}")


class ClosureInputError(_ClosureError):
    """An input of a scheduled function, such as a dataset, could not be built.

    Attributes:
      original_exception: what went wrong there; never an error of this kind.

    >>> import jaxstrategy as js
    >>> cause = js.errors.ClosureInputError(KeyError("x"))
    >>> js.errors.ClosureInputError(cause).original_exception
    KeyError('x')
    """

    _what = "An input of a scheduled function could not be built on its worker"


class ClosureAbortedError(_ClosureError):
    """A scheduled function did not run, because an earlier one had failed.

    Attributes:
      original_exception: of the one that failed; never an error of this kind.

    >>> import jaxstrategy as js
    >>> js.errors.ClosureAbortedError(KeyError("x")).original_exception
    KeyError('x')
    """

    _what = "The function did not run, because one that was scheduled before it failed"


class CancelledError(RuntimeError):
    """The result of a function that was cancelled before it had one.

    >>> import jaxstrategy as js
    >>> issubclass(js.errors.CancelledError, RuntimeError)
    True
    """
