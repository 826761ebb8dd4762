"""Eager steps: `eager_replicas`, and the arguments, variables, results of a call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import EllipsisType
from typing import Any, TypeAlias, cast, final

import jax
import numpy as np
from jax.core import Tracer
from jax.lax import convert_element_type_p

from jaxstrategy._src import text
from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import (
    ContextError,
    NonFiniteError,
    NotMirroredError,
    NotMirroredVariableError,
    PlacementError,
)
from jaxstrategy._src.executors.replica_thread import (
    MERGE_CALL,
    EagerOperands,
    MergeCall,
    Rendezvous,
    ReplicaThread,
    rendezvous,
    run_in_turns,
    thread_settings,
)
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.processes.agreement import Operation, users_line
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.reductions.reduction import EagerCollective, Reduction
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.inner_axes import sharding_like
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import Line, shown
from jaxstrategy._src.tracing import signature as _signature
from jaxstrategy._src.tracing.checks import varying_results
from jaxstrategy._src.tracing.functions import code as _code, rebinding
from jaxstrategy._src.tracing.functions.references import Binding
from jaxstrategy._src.tracing.nnx.object_calls import (
    array_options,
    array_step,
    object_call,
)
from jaxstrategy._src.tracing.nnx.objects import AttributeChange
from jaxstrategy._src.tracing.signature import NamedResults, Results, Role
from jaxstrategy._src.tracing.stages.stages import MaskArguments, Placement
from jaxstrategy._src.tracing.traced_step import ReplicaStep, StepEnvironment, name_of
from jaxstrategy._src.tracing.translation import (
    CONCRETIZATION_ERRORS,
    UNBOUND_AXIS,
    line_of,
    translated,
)
from jaxstrategy._src.values import (
    arrays as _arrays,
    building,
    per_replica as _per_replica,
    trees as _trees,
)
from jaxstrategy._src.values.arrays import Arguments, Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.values.slices import Versions
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.access import StepVariables
from jaxstrategy._src.variables.kinds import on_host
from jaxstrategy._src.variables.variable import Variable


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


@final
class EagerBlock:
    """One block of `eager_replicas`, and which results have varied in it."""

    def __init__(self, disable_jit: bool) -> None:
        self.disable_jit = disable_jit
        self.varying: set[Hashable] = set()


_ADVICE = (
    "The replicas of all processes must call the same collectives in the same order, "
    "and all processes must be in `eager_replicas()`, or none."
)


@final
class EagerSteps:
    """Runs functions on the replicas of one strategy, each in a thread of its own."""

    def __init__(
        self,
        strategy: AbstractStrategy,
        environment: StepEnvironment,
        compiled: Callable[[Function, tuple[PyTree, ...]], PyTree],
        processes: Processes | None,
    ) -> None:
        self._strategy = strategy
        self._environment = environment
        self._compiled = compiled
        several = processes is not None and processes.count > 1
        self._processes = processes if several else None

    def run(
        self, fn: Function, arguments: Arguments, options: RunOptions | None
    ) -> PyTree:
        options = options or RunOptions()
        call = _EagerCall(fn, arguments, options, self._environment)
        if _arrays.is_traced() or any(isinstance(x, Tracer) for x in call.leaves):
            raise ContextError(
                f"`{call.name}` was to be run in `eager_replicas()` by code that JAX "
                "traces (`jax.jit`, `jax.grad`, `jax.lax.scan` around `run`), where no "
                "array has a value that the threads of replicas could go on with. Call "
                "it outside of what is traced, or take the gradient inside of the step."
            )
        replicas = self._strategy._replicas
        agree = functools.partial(self._compare, call.name, message=None)
        gather = functools.partial(self._gathered, call.name)
        copies = _VariableCopies(replicas, call.name, gather)
        block = cast(EagerBlock, context.current().runs_eagerly)
        settings = thread_settings(call.options, block.disable_jit, replicas)
        columns = call.columns(replicas)

        def body(place: int, thread: ReplicaThread) -> object:
            leaves = [column[place] for column in columns]
            with (
                settings(thread.number),
                context.entered(
                    strategy=self._strategy,
                    replica=ReplicaContext(self._strategy),
                    in_step=True,
                    updated=(),
                    eager=thread,
                    variables=_ReplicaVariables(copies, place, thread),
                    trace=context.new_trace(),
                ),
                call.masks.tracing(leaves),
            ):
                returned = call.run(leaves)
            return _signature.flatten_results(
                returned, call.signature.statics, call.name
            )

        threads = [
            ReplicaThread(
                number,
                jax.device_put(np.int32(number), replicas.place_of(number)),
                replicas,
                rendezvous,
                functools.partial(body, place),
            )
            for place, number in enumerate(replicas.local_ids)
        ]

        def answer(waiting: Sequence[Rendezvous]) -> Sequence[object]:
            values = [each.value for each in waiting]
            if waiting[0].kind != MERGE_CALL:
                return self._reduced(values)
            copies.store(copies.changes())
            return _Merger(replicas, call.name).merged(self._strategy, values)

        agree("the beginning of an eager step")
        run_in_turns(call.name, threads, answer, agree)
        returned = [
            cast("tuple[list[jax.Array], Results]", each.result) for each in threads
        ]
        results = _EagerResults(call, replicas, returned, gather)
        results.check(call.expected)
        changes = copies.changes()
        key = id(self._strategy), id(_code.code_of(call.fn) or call.fn)
        roles = zip(columns, call.roles, strict=True)
        per_replica = [column for column, role in roles if role is Role.PER_REPLICA]
        value = results.value(key, block, per_replica)
        copies.store(changes)
        if call.masks.is_active:  # warns if rows that only fill up the batch counted
            call.masks.check(call.leaves)
        return value if call.objects is None else call.objects.finish(value)

    def _reduced(self, operands: Sequence[EagerOperands]) -> Sequence[object]:
        """Runs a collective, compiled; returns the results of each replica."""
        replicas = self._strategy._replicas
        first = operands[0]
        stacked = [
            _per_replica_of(column, replicas)
            for column in zip(*(each.arrays for each in operands), strict=True)
        ]
        results = self._compiled(_collective_step, (first.collective, *stacked))
        columns = [
            [_with_weak_type(each, weak) for each in _local_values(result, replicas)]
            for result, weak in zip(results, first.weak, strict=True)
        ]
        return [[column[i] for column in columns] for i in range(len(operands))]

    # With other processes.

    def _compare(self, name: str, what: str, message: object) -> list[object]:
        """Raises unless all processes come to the same; returns their messages."""
        if self._processes is None:
            return [message]
        operation = Operation(f"{what} in `{name}`", users_line())
        return list(self._processes.operations.compare(operation, _ADVICE, message))

    def _gathered(self, name: str, local: _Texts) -> _Texts:
        """Gathers a row of texts of each replica from all processes."""
        ids = self._strategy._replicas.local_ids
        numbered = [[i, *row] for i, row in zip(ids, local, strict=False)]
        replies = self._compare(name, "the results of an eager step", numbered)
        rows = [row for reply in replies for row in cast("list[list[Any]]", reply)]
        return [row[1:] for row in sorted(rows, key=lambda row: int(row[0]))]


def _collective_step(
    collective: EagerCollective, *arrays: jax.Array
) -> list[jax.Array]:
    strategy = context.current().strategy
    assert strategy is not None, "it is a step's"
    return collective(cast(Reduction, strategy._reduction), arrays)


_Texts: TypeAlias = Sequence[Sequence[str]]
_Gather: TypeAlias = Callable[[_Texts], _Texts]
"""Gathers a row of texts of each replica from all processes."""


# The arguments of a call.


@final
class _EagerCall:
    """A call of an eager step, with its arguments placed as for a compiled one."""

    def __init__(
        self,
        fn: Function,
        arguments: Arguments,
        options: RunOptions,
        environment: StepEnvironment,
    ) -> None:
        self.fn = fn
        self.name = name_of(fn)
        self.options = options
        self._replicas = environment.replicas
        self._changes: list[AttributeChange] = []
        captured = rebinding.references(fn)
        both = {**captured.objects, **captured.arrays}
        try:
            self._begin(arguments, both, environment)
        except PlacementError:
            if not captured.arrays:
                raise
            # Captured arrays may lie where no argument may: they become constants.
            self._begin(arguments, captured.objects, environment)

    def _begin(
        self,
        arguments: Arguments,
        captured: dict[str, object],
        environment: StepEnvironment,
    ) -> None:
        call = object_call(arguments, captured)
        self.objects = None
        self.expected = self.options.expect_mirrored
        self._step_fn = step_fn = self.fn
        if call is not None:
            self.objects = call.objects
            form = None if call.objects is None else call.objects.form
            self._step_fn = step_fn = array_step(lambda: self.fn, form, call.captured)
            arguments = call.arguments
        if self.objects is not None:
            self.expected = array_options(self.options).expect_mirrored
        self.leaves, self.signature = _signature.flatten(step_fn, arguments)
        step = ReplicaStep(lambda: step_fn, environment, self.signature, lambda: False)
        self.roles = step.roles
        self.masks = MaskArguments(step)
        self._placed = Placement(step, frozenset()).placed(self.leaves)

    def columns(self, replicas: Replicas) -> list[list[Leaf]]:
        """The value of each replica of this process, for each argument."""
        return [
            _versions(leaf, replicas)
            if role is Role.PER_REPLICA
            else _copies(leaf, replicas)
            for leaf, role in zip(self._placed, self.roles, strict=True)
        ]

    def run(self, leaves: Sequence[Leaf]) -> PyTree:
        """Calls the step with the arguments of one replica."""
        args, kwargs = self.signature.rebuild(leaves)
        try:
            returned = self._step_fn(*args, **kwargs)
        except rebinding.Leak as leak:
            raise leak.as_error() from None
        except Exception as error:
            better = _translated(error, self.name, self._replicas, self.options)
            if better is None:
                raise
            raise better from error
        if self.objects is None:
            return returned
        results, parts = returned
        return results, [
            dataclasses.replace(part, changes=tuple(map(self._shared, part.changes)))
            for part in parts
        ]

    def _shared(self, change: AttributeChange) -> AttributeChange:
        """The equal change of an earlier replica in place of this one's."""
        for other in self._changes:
            is_same = (other.path, other.name) == (change.path, change.name)
            if is_same and (other.value is change.value or other.value == change.value):
                return other
        self._changes.append(change)
        return change


def _translated(
    error: Exception, name: str, replicas: Replicas, options: RunOptions
) -> Exception | None:
    """A clearer error to raise instead of a replica's, if there is one."""
    # JAX's own messages say what to do, in a function that is mapped or differentiated.
    if isinstance(error, CONCRETIZATION_ERRORS):
        return None
    where = line_of(error)
    if isinstance(error, NameError) and (unbound := UNBOUND_AXIS.search(str(error))):
        return NameError(
            f"`{name}` reduces over the axis {unbound[1]!r} by hand, which "
            f"`eager_replicas()` has not:{where}"
            "Each replica runs by itself there, and JAX knows nothing of the others. "
            "Use `get_replica_context().all_reduce('sum', x)` or `all_gather` instead "
            "of `jax.lax.psum` and its like, and `replica_id_in_sync_group` instead of "
            "`jax.lax.axis_index`; or run this step compiled."
        )
    if options.check_finite and type(error) is FloatingPointError:
        return NonFiniteError(
            f"`{name}` made a NaN in `eager_replicas()`:{where}{error}",
            line=where.strip() or None,
        )
    return translated(error, name, replicas)


# Values of all replicas, and of each.


def _local_values(value: Leaf, replicas: Replicas) -> list[Leaf]:
    """The value of each replica of this process, of a value of all replicas."""
    if isinstance(value, PerReplica):
        return _versions(_per_replica.contents(value), replicas)
    if isinstance(value, jax.Array):
        return _copies(value, replicas)
    return [value] * len(replicas.local_ids)


def _versions(stacked: Leaf, replicas: Replicas) -> list[Leaf]:
    placed = _per_replica.contents(building.place_stacked(stacked, replicas))
    return list(replicas.versions(placed))


def _copies(array: jax.Array, replicas: Replicas) -> list[Leaf]:
    """Copies of an array on the devices of each replica of this process."""
    is_weak = getattr(array, "weak_type", False)
    copies = replicas.copies(_mirrored(array, replicas))
    return [_with_weak_type(copy, is_weak) for copy in copies]


def _with_weak_type(array: jax.Array, is_weak: bool) -> jax.Array:
    if is_key(array.dtype) or array.weak_type == is_weak:
        return array
    convert: Any = convert_element_type_p
    return convert.bind(array, new_dtype=array.dtype, weak_type=is_weak, sharding=None)


def _per_replica_of(versions: Sequence[Leaf], replicas: Replicas) -> PerReplica:
    """The versions of this process's replicas as a `PerReplica` of all."""
    return PerReplica(
        replicas.stacked(
            [v if isinstance(v, jax.Array) else np.asarray(v) for v in versions]
        )
    )


def _mirrored(array: Leaf, replicas: Replicas) -> jax.Array:
    """An array that all replicas have, as one array replicated on the mesh."""
    return mesh.place(array, sharding_like(array, replicas))


def _digest(array: Leaf) -> str:
    """Equal for arrays of the same type and bits."""
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    text = f"{host.dtype}{host.shape}".encode() + host.tobytes()
    return hashlib.sha256(text).hexdigest()


def _leaf_digest(leaf: Leaf) -> str:
    """A text that is equal for equal leaves: type and contents."""
    if _arrays.is_array(leaf):
        return f"{leaf.dtype}{leaf.shape} {_digest(leaf)}"
    if leaf is None or isinstance(leaf, (bool, str, int, float, complex)):
        return f"{type(leaf).__name__} {leaf!r}"
    try:
        return f"{type(leaf).__name__} {hash(leaf)}"
    except TypeError:
        return f"{type(leaf).__name__} {id(leaf)}"


def _columns(rows: Sequence[list[str]], gather: _Gather) -> list[tuple[str, ...]]:
    """Rows of texts of the replicas here, as columns of those of all."""
    return list(zip(*gather(rows), strict=True))


def _describe_versions(
    arrays: Sequence[jax.Array | np.ndarray], column: Sequence[str], replicas: Replicas
) -> str:
    """Which replicas hold which value; `column` is equal where values are."""
    texts = {
        column[i]: _short(a) for i, a in zip(replicas.local_ids, arrays, strict=True)
    }
    groups: dict[str, list[int]] = {}
    for number, each in enumerate(column):
        groups.setdefault(each, []).append(number)
    return "\n".join(
        f"  replica{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: "
        f"{texts.get(each, 'of another process')}"
        for each, numbers in groups.items()
    )


def _short(array: jax.Array | np.ndarray) -> str:
    if not isinstance(array, np.ndarray):
        array = on_host(array)
    if not array.ndim:
        return repr(array.item())
    text = np.array2string(array, separator=", ", threshold=8, edgeitems=3)
    return " ".join(text.split())


# Variables.


@final
class _VariableCopy:
    """One replica's copy of a variable, read and assigned whole, with `[...]`."""

    def __init__(self, array: jax.Array, name: str) -> None:
        self.array = self.before = array
        self.line: Line | None = None
        self._name = name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def __getitem__(self, index: EllipsisType) -> jax.Array:
        return self.array

    def __setitem__(self, index: EllipsisType, value: jax.Array) -> None:
        if isinstance(value, Tracer):
            raise ValueError(
                f"Variable {self._name!r} was assigned, in `eager_replicas()`, a value "
                "that JAX traces (in `jax.vmap`, or with what is differentiated), and "
                "has no one number yet. Return the value from the function that is "
                "mapped or traced, and assign it outside."
            )
        self.array = value
        frame = text.users_frame()
        self.line = frame and Line(frame.f_code.co_filename, frame.f_lineno)


_Changes: TypeAlias = list[tuple[Variable, list[_VariableCopy]]]


@final
class _VariableCopies:
    """The variables that an eager step uses: a copy for each replica here."""

    def __init__(self, replicas: Replicas, name: str, gather: _Gather) -> None:
        self._replicas = replicas
        self._name = name
        self._gather = gather
        self._copies: dict[int, tuple[Variable, list[_VariableCopy]]] = {}

    def of(
        self, variable: Variable, place: int, thread: ReplicaThread
    ) -> _VariableCopy:
        if id(variable) not in self._copies:
            thread.in_caller(functools.partial(self._make, variable))
        return self._copies[id(variable)][1][place]

    def _make(self, variable: Variable) -> None:
        with access.one_at_a_time:
            contents = variable.cell[...]
            if self._has_versions(variable):
                arrays = [v[None] for v in self._replicas.versions(contents)]
            else:
                arrays = _copies(contents, self._replicas)
        made = [_VariableCopy(array, variable.name) for array in arrays]
        self._copies[id(variable)] = variable, made

    def _has_versions(self, variable: Variable) -> bool:
        is_here = variable.lives_on(self._replicas)
        return is_here and not variable.copies_must_agree

    def changes(self) -> _Changes:
        """The variables that a replica assigned; raises if their copies differ."""
        used = list(self._copies.values())
        flags = self._texts(used, lambda copy: str(copy.array is not copy.before))
        changes = [
            each for each, flag in zip(used, flags, strict=True) if "True" in flag
        ]
        mirrored = [each for each in changes if not self._has_versions(each[0])]
        digests = self._texts(mirrored, lambda copy: _digest(copy.array))
        for (variable, copies), column in zip(mirrored, digests, strict=True):
            if len(set(column)) == 1:
                continue
            line = next((copy.line for copy in copies if copy.line is not None), None)
            where = "" if line is None else f"  it was assigned at {line}\n"
            arrays = [copy.array for copy in copies]
            raise NotMirroredVariableError(
                f"Variable {variable.name!r} is mirrored, but `{self._name}` assigned "
                "it values that differ between replicas: its copies would drift apart."
                f"\n{where}{_describe_versions(arrays, column, self._replicas)}\n"
                "Reduce it first, or make the variable with an `aggregation` "
                "('sum', 'mean', 'only_first_replica'), or with "
                "`synchronization='on_read'` if each replica is to have its own.",
                path=variable.name,
                line=line and str(line),
            )
        return changes

    def _texts(
        self, variables: _Changes, text: Callable[[_VariableCopy], str]
    ) -> list[tuple[str, ...]]:
        """For each variable the texts of the copies of all replicas."""
        local = [map(text, copies) for _, copies in variables]
        return _columns([list(row) for row in zip(*local, strict=True)], self._gather)

    def store(self, changes: _Changes) -> None:
        """Assigns variables what replicas have assigned, and drops the copies."""
        with access.one_at_a_time:
            for variable, copies in changes:
                value = copies[0].array
                if self._has_versions(variable):
                    versions = [copy.array[0] for copy in copies]
                    value = _per_replica_of(versions, self._replicas).stacked
                variable.cell[...] = mesh.place(value, variable.sharding)
        self._copies.clear()


@final
class _ReplicaVariables(StepVariables):
    def __init__(
        self, copies: _VariableCopies, place: int, thread: ReplicaThread
    ) -> None:
        # The first replica runs first, so the others find the variables that it makes.
        super().__init__((), may_create=thread.number == 0)
        self._copies = copies
        self._thread = thread
        self._place = place

    @property
    def any(self) -> bool:
        return True

    def reference(self, variable: Handle) -> _VariableCopy:
        context.check_unstaged(f"Variable {variable.name!r}")
        self.used.setdefault(id(variable), variable)
        return self._copies.of(cast(Variable, variable), self._place, self._thread)

    def create(self, variable: Handle, start: jax.Array) -> None:
        """Let the step make `variable`; its cell holds its copies."""
        self.created.append(variable)


# Results.


@final
class _EagerResults(NamedResults):
    """What the replicas of an eager step returned, compared and put together."""

    def __init__(
        self,
        call: _EagerCall,
        replicas: Replicas,
        returned: Sequence[tuple[list[jax.Array], Results]],
        gather: _Gather,
    ) -> None:
        super().__init__(call.name, returned[0][1], call.objects is not None)
        self._replicas = replicas
        rows = []
        for number, (arrays, other) in zip(replicas.local_ids, returned, strict=True):
            if other.treedef != self.results.treedef:
                raise ValueError(
                    f"`{self.name}` returned pytrees of different structures: "
                    f"{self.results.treedef} on replica {replicas.local_ids[0]}, and "
                    f"{other.treedef} on replica {number}. Return the same structure "
                    "on all replicas; what differs may be an array of another shape, "
                    "a number or a string."
                )
            following = iter(arrays)
            leaves = other.leaves
            rows.append([next(following) if x is None else x.value for x in leaves])
        self._columns = list(zip(*rows, strict=True))
        self._digests = _columns([list(map(_leaf_digest, x)) for x in rows], gather)

    def check(self, expected: PyTree) -> None:
        if expected is None:
            return
        is_expected = varying_results.expectation(self, expected)
        for position, keys in self.results.array_paths():
            column = self._columns[position]
            like = jax.typeof(column[0])
            if self._are_equal(position) or not is_expected(position, keys, like):
                continue
            path = self.path(keys)
            what = f"{path} was expected to be mirrored, but the replicas differ."
            advice = varying_results.OF_RESULTS
            if self.is_of_object(keys):
                what = f"`{self.name}` leaves {path} different on each replica."
                advice = varying_results.OF_OBJECTS
            digests = self._digests[position]
            versions = _describe_versions(column, digests, self._replicas)
            message = f"{what}\n{versions}\n{advice}"
            raise NotMirroredError(message, path=path.strip("`"))

    def value(
        self, key: Hashable, block: EagerBlock, arguments: Sequence[Sequence[Leaf]]
    ) -> PyTree:
        """The results of all replicas; `arguments` are those that are per replica."""
        numbered = self.results.treedef.unflatten(range(len(self._columns)))
        paths = [path for path, _ in jax.tree.leaves_with_path(numbered)]
        results = []
        for position, path in enumerate(paths):
            result = key, self.path(path)
            column = self._columns[position]
            is_argument = any(
                all(a is b for a, b in zip(column, argument, strict=True))
                for argument in arguments
            )
            if not self._are_equal(position) or is_argument:
                block.varying.add(result)
            varies = result in block.varying and self._replicas.count > 1
            results.append(self._merged(position, varies))
        return self.results.treedef.unflatten(results)

    def _are_equal(self, position: int) -> bool:
        return len(set(self._digests[position])) == 1

    def _merged(self, position: int, varies: bool) -> Leaf:
        column = self._columns[position]
        is_array = all(map(_arrays.is_array, column))
        if not varies or (self._are_equal(position) and not is_array):
            return _mirrored(column[0], self._replicas) if is_array else column[0]
        is_numeric = all(_arrays.is_array(x) or _is_number(x) for x in column)
        kinds = {each.rpartition(" ")[0] for each in self._digests[position]}
        if not is_numeric or len(kinds) > 1:
            return Versions(column, self._replicas.local_ids)
        arrays = [x if _arrays.is_array(x) else jax.numpy.asarray(x) for x in column]
        return _per_replica_of(arrays, self._replicas)


def _is_number(value: object) -> bool:
    kinds = (int, float, complex, np.number)
    return isinstance(value, kinds) and not isinstance(value, bool)


# `merge_call`.

_NUMBERS = (bool, int, float, complex)
_DIFFERENT = object()


@final
class _Merger:
    """Merges the replicas' arguments of `merge_call`, and calls it once for all."""

    def __init__(self, replicas: Replicas, name: str) -> None:
        self._replicas = replicas
        self._name = name

    def merged(
        self, strategy: AbstractStrategy, calls: Sequence[MergeCall]
    ) -> list[PyTree]:
        """Calls the merge function; returns each replica's part of the result."""
        merge_fn = self._function([each.merge_fn for each in calls], "`merge_fn`")
        args = self._tree([each.args for each in calls], "args")
        kwargs = self._tree([each.kwargs for each in calls], "kwargs")
        with context.entered(strategy=strategy, replica=None):
            result = merge_fn(strategy, *args, **kwargs)
        columns: list[list[Leaf]] = []
        _trees.map_around_objects(
            lambda leaf: columns.append(_local_values(leaf, self._replicas)), result
        )

        def part(i: int) -> PyTree:
            following = iter(columns)
            return _trees.map_around_objects(lambda _: next(following)[i], result)

        return list(map(part, range(len(calls))))

    def _tree(self, trees: Sequence[PyTree], what: str) -> PyTree:
        """One pytree for the replicas' pytrees, with `PerReplica`s for arrays."""
        paths, structure = jax.tree.flatten_with_path(trees[0], is_leaf=_trees.is_whole)
        rows = []
        for number, tree in zip(self._replicas.local_ids, trees, strict=True):
            leaves, other = jax.tree.flatten(tree, is_leaf=_trees.is_whole)
            if other != structure:
                raise ValueError(
                    f"`merge_call` was given `{what}` of other structures by the "
                    f"replicas of `{self._name}`: {structure} by the first, {other} by "
                    f"replica {number}."
                )
            rows.append(leaves)
        labels = [f"{what}{jax.tree_util.keystr(path)}" for path, _ in paths]
        return structure.unflatten(map(self._leaf, zip(*rows, strict=True), labels))

    def _leaf(self, column: Sequence[Leaf], label: str) -> Leaf:
        for leaf in column:
            if isinstance(leaf, PerReplica):
                leaf._misused()
            if isinstance(leaf, Tracer):
                raise ContextError(
                    f"`merge_call` was given, in `eager_replicas()`, `{label}` that "
                    "JAX traces (in a function that is differentiated or mapped), and "
                    "has no one number yet. Use `all_reduce` or `all_gather` there, or "
                    "leave `merge_call` out of what is traced."
                )
        if not all(map(_arrays.is_array, column)):
            if (one := self._one(column, f"`{label}`")) is not _DIFFERENT:
                return one
            if not all(isinstance(x, _NUMBERS) or _arrays.is_array(x) for x in column):
                raise ValueError(
                    f"`merge_call` was given `{label}` that differs between the "
                    f"replicas of `{self._name}` and is no array: "
                    f"{', '.join(map(shown, column))}."
                )
            column = list(map(jax.numpy.asarray, column))
        if self._replicas.count == 1:
            return column[0]
        if len({(leaf.shape, leaf.dtype) for leaf in column}) > 1:
            seen = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in column)
            raise ValueError(
                f"`merge_call` was given `{label}` of other shapes or dtypes by the "
                f"replicas of `{self._name}`: {seen}. One array holds all versions, so "
                "they need one shape; pad them, or gather their sizes first."
            )
        return _per_replica_of(column, self._replicas)

    def _function(self, functions: Sequence[Any], what: str) -> Any:
        """One function for those of the replicas, which must do the same."""
        first = functions[0]
        # A method is another object at each access, and equal.
        if all(each is first or each == first for each in functions):
            return first
        if all(isinstance(each, functools.partial) for each in functions):
            inner = self._function([each.func for each in functions], what)
            args = self._tree([each.args for each in functions], what)
            keywords = self._tree([each.keywords for each in functions], what)
            return functools.partial(inner, *args, **keywords)
        code = getattr(first, "__code__", None)
        if code is None or any(_code.code_of(each) is not code for each in functions):
            raise ValueError(
                f"The replicas of `{self._name}` called `merge_call` with different "
                f"functions for {what}, which is called once for all. Give the same "
                "one on all replicas."
            )
        cells = []
        for place, name in enumerate(code.co_freevars):
            variants = [each.__closure__[place] for each in functions]
            values = [Binding(cell).get() for cell in variants]
            one = self._captured(values, what, name)
            cells.append(variants[0] if one is values[0] else types.CellType(one))
        defaults = [each.__defaults__ for each in functions]
        keywords = [each.__kwdefaults__ for each in functions]
        function = types.FunctionType(
            code,
            first.__globals__,
            first.__name__,
            self._captured(defaults, what, "its defaults"),
            tuple(cells),
        )
        function.__kwdefaults__ = self._captured(keywords, what, "its defaults")
        return function

    def _captured(self, values: Sequence[Any], what: str, name: str) -> Any:
        """One value for those that the replicas' functions refer to as `name`."""
        flat = [jax.tree.flatten(each) for each in values]
        leaves, structure = flat[0]
        is_array = any(isinstance(leaf, jax.Array) for leaf in leaves)
        if all(each is values[0] for each in values) and not is_array:
            return values[0]
        merged = []
        if all(other == structure for _, other in flat):
            columns = zip(*(each for each, _ in flat), strict=True)
            merged = [self._equal(column, what) for column in columns]
        if len(merged) < len(leaves) or any(one is _DIFFERENT for one in merged):
            raise ValueError(
                f"The replicas of `{self._name}` called `merge_call`, in "
                f"`eager_replicas()`, with {what} that refers to `{name}`, which "
                "differs between them. It is called once for all: pass it as an "
                f"argument, `merge_call(merge_fn, args=({name},))`, which arrives as a "
                "PerReplica."
            )
        return structure.unflatten(merged)

    def _equal(self, column: Sequence[Leaf], what: str) -> Leaf:
        """One value for equal ones of the replicas, or `_DIFFERENT`."""
        if not all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in column):
            return self._one(column, what)
        if any(isinstance(leaf, Tracer) for leaf in column):
            return _DIFFERENT
        if len(set(map(_digest, column))) > 1:
            return _DIFFERENT
        return _mirrored(column[0], self._replicas)

    def _one(self, column: Sequence[Leaf], what: str) -> Leaf:
        """A value that is equal on all replicas and no array, or `_DIFFERENT`."""
        first = column[0]
        if all(leaf is first for leaf in column):
            return first
        if callable(first):
            return self._function(column, what)
        is_equal = all(type(leaf) is type(first) and leaf == first for leaf in column)
        return first if is_equal else _DIFFERENT
