"""Eager steps: `eager_replicas`, and `EagerCall` of one step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
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
    Rendezvous,
    ReplicaThread,
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
from jaxstrategy._src.text import Line, shown
from jaxstrategy._src.tracing import nnx, rebinding, signature as _signature
from jaxstrategy._src.tracing.checks import varying_results
from jaxstrategy._src.tracing.function_cache import FunctionCache
from jaxstrategy._src.tracing.nnx import AttributeChange
from jaxstrategy._src.tracing.references import Identity, References, code_of
from jaxstrategy._src.tracing.signature import NamedResults, Results, Role
from jaxstrategy._src.tracing.step_arguments import MaskArguments, Placement
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
from jaxstrategy._src.values.trees import is_nnx_node
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
_Returned: TypeAlias = tuple[list[jax.Array], Results]
_Changes: TypeAlias = "list[tuple[Variable, list[_VariableCopy]]]"
_NUMBERS = (bool, int, float, complex)


@final
class EagerCall:
    """One call of a step whose replicas run eagerly, each in a thread of its own."""

    def __init__(
        self,
        strategy: AbstractStrategy,
        environment: StepEnvironment,
        programs: FunctionCache,
        processes: Processes | None,
        fn: Function,
        options: RunOptions | None,
    ) -> None:
        several = processes is not None and processes.count > 1
        self._processes = processes if several else None
        self._strategy = strategy
        self._environment = environment
        self._replicas = environment.replicas
        self._programs = programs
        self._fn = fn
        self._name = name_of(fn)
        self._options = options or RunOptions()
        self._changed: list[AttributeChange] = []
        # The variables that the step uses, by `id`: a copy for each replica here.
        self._copies: dict[int, tuple[Variable, list[_VariableCopy]]] = {}

    def run(self, arguments: Arguments) -> PyTree:
        """Calls the step in all replicas, and returns what they return together."""
        captured = rebinding.references(self._fn)
        try:
            placed = self._place(arguments, {**captured.objects, **captured.arrays})
        except PlacementError:
            if not captured.arrays:
                raise
            # Captured arrays may lie where no argument may: they become constants.
            placed = self._place(arguments, captured.objects)
        if _arrays.is_traced() or any(isinstance(x, Tracer) for x in self._leaves):
            raise ContextError(
                f"`{self._name}` was to be run in `eager_replicas()` by code that JAX "
                "traces (`jax.jit`, `jax.grad`, `jax.lax.scan` around `run`), where no "
                "array has a value that the threads of replicas could go on with. Call "
                "it outside of what is traced, or take the gradient inside of the step."
            )
        self._columns = [
            self._versions(leaf) if role is Role.PER_REPLICA else self._copies_of(leaf)
            for leaf, role in zip(placed, self._roles, strict=True)
        ]
        block = cast(EagerBlock, context.current().runs_eagerly)
        settings = thread_settings(self._options, block.disable_jit, self._replicas)
        threads = [
            ReplicaThread(
                number,
                self._replicas,
                functools.partial(self._run_replica, settings, place),
            )
            for place, number in enumerate(self._replicas.local_ids)
        ]
        self._agree("the beginning of an eager step")
        run_in_turns(self._name, threads, self._answer, self._agree)
        value = self._finish([cast(_Returned, each.result) for each in threads], block)
        if self._masks.is_active:  # warns if rows that only fill up the batch counted
            self._masks.check(self._leaves)
        return value if self._objects is None else self._objects.finish(value)

    def _place(
        self, arguments: Arguments, captured: dict[str, object]
    ) -> Sequence[Leaf]:
        """Takes the arguments of a call, and returns them placed as for a program."""
        self._objects, arguments = nnx.as_arrays(arguments, captured)
        self._takes_arrays = self._objects is not None or bool(captured)
        fn = self._fn
        self._leaves, self._signature = _signature.flatten(fn, arguments)
        step = ReplicaStep(
            lambda: fn, self._environment, self._signature, lambda: False
        )
        self._roles = step.roles
        self._masks = MaskArguments(step)
        return Placement(step, frozenset()).placed(self._leaves)

    def _run_replica(
        self,
        settings: Callable[[int], contextlib.ExitStack],
        place: int,
        thread: ReplicaThread,
    ) -> _Returned:
        """Calls the step with the arguments of one replica."""
        leaves = [column[place] for column in self._columns]
        with (
            settings(thread.number),
            context.entered(
                strategy=self._strategy,
                replica=ReplicaContext(self._strategy),
                in_step=True,
                updated=(),
                eager=thread,
                variables=_ReplicaVariables(self, place, thread),
                trace=context.new_trace(),
            ),
            self._masks.tracing(leaves),
        ):
            args, kwargs = self._signature.rebuild(leaves)
            try:
                if self._takes_arrays:
                    returned = nnx.call(self._fn, self._name, (), *args, **kwargs)
                else:
                    returned = self._fn(*args, **kwargs)
            except rebinding.Leak as leak:
                raise leak.as_error() from None
            except Exception as error:
                better = self._translated(error)
                if better is None:
                    raise
                raise better from error
            if self._objects is not None:
                results, parts = returned
                returned = (
                    results,
                    [
                        dataclasses.replace(
                            x, changes=tuple(map(self._shared, x.changes))
                        )
                        for x in parts
                    ],
                )
        return _signature.flatten_results(returned, self._signature.statics, self._name)

    def _shared(self, change: AttributeChange) -> AttributeChange:
        """The equal change of an earlier replica in place of this one's."""
        for other in self._changed:
            is_same = (other.path, other.name) == (change.path, change.name)
            if is_same and (other.value is change.value or other.value == change.value):
                return other
        self._changed.append(change)
        return change

    def _translated(self, error: Exception) -> Exception | None:
        """A clearer error to raise instead of a replica's, if there is one."""
        # JAX's own messages say what to do in functions that it maps or differentiates.
        if isinstance(error, CONCRETIZATION_ERRORS):
            return None
        where = line_of(error)
        if isinstance(error, NameError) and (
            unbound := UNBOUND_AXIS.search(str(error))
        ):
            return NameError(
                f"`{self._name}` reduces over the axis {unbound[1]!r} by hand, which "
                f"`eager_replicas()` has not:{where}"
                "Each replica runs by itself there, and JAX knows nothing of the "
                "others. Use `get_replica_context().all_reduce('sum', x)` or "
                "`all_gather` instead of `jax.lax.psum` and its like, and "
                "`replica_id_in_sync_group` instead of `jax.lax.axis_index`; or run "
                "this step compiled."
            )
        if self._options.check_finite and type(error) is FloatingPointError:
            return NonFiniteError(
                f"`{self._name}` made a NaN in `eager_replicas()`:{where}{error}",
                line=where.strip() or None,
            )
        return translated(error, self._name, self._replicas)

    # What the replicas do together.

    def _answer(self, waiting: Sequence[Rendezvous]) -> Sequence[object]:
        """The reply for each replica, when all wait for the same."""
        if waiting[0].kind != MERGE_CALL:
            return self._reduced([each.value for each in waiting])
        self._store(self._changes())
        merge_fns, args, kwargs = zip(*(each.value for each in waiting), strict=True)
        with contextlib.ExitStack() as blocks:
            merge_fn = self._one_function(merge_fns, "`merge_fn`", blocks)
            args = self._tree(args, "args", blocks)
            kwargs = self._tree(kwargs, "kwargs", blocks)
            blocks.enter_context(context.entered(strategy=self._strategy, replica=None))
            result = merge_fn(self._strategy, *args, **kwargs)
        columns: list[list[Leaf]] = []
        _trees.map_around_objects(
            lambda leaf: columns.append(self._local_values(leaf)), result
        )

        def part(place: int) -> PyTree:
            following = iter(columns)
            return _trees.map_around_objects(lambda _: next(following)[place], result)

        return list(map(part, range(len(waiting))))

    def _reduced(
        self, operands: Sequence[tuple[EagerCollective, Any, Any]]
    ) -> Sequence[object]:
        """Runs a collective, compiled; returns the results of each replica."""
        collective, _, weak = operands[0]
        stacked = [
            self._per_replica(column)
            for column in zip(*(arrays for _, arrays, _ in operands), strict=True)
        ]
        program = self._programs.of(_collective_step)
        results = program((collective, *stacked), {})
        columns = [
            [_with_weak_type(each, is_weak) for each in self._local_values(result)]
            for result, is_weak in zip(results, weak, strict=True)
        ]
        return [[column[i] for column in columns] for i in range(len(operands))]

    def _tree(
        self, trees: Sequence[PyTree], what: str, blocks: contextlib.ExitStack
    ) -> PyTree:
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
        columns = zip(*rows, strict=True)
        return structure.unflatten(
            self._leaf(column, label, blocks)
            for column, label in zip(columns, labels, strict=True)
        )

    def _leaf(
        self, column: Sequence[Leaf], label: str, blocks: contextlib.ExitStack
    ) -> Leaf:
        first = column[0]
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
            if callable(first):
                return self._one_function(column, f"`{label}`", blocks)
            if all(
                x is first or (type(x) is type(first) and x == first) for x in column
            ):
                return first
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
        return self._per_replica(column)

    def _one_function(
        self, functions: Sequence[Any], what: str, blocks: contextlib.ExitStack
    ) -> Any:
        """One function for the replicas' equal ones, with the arrays of all."""
        first = functions[0]
        # A method is another object at each access, and equal.
        if all(each is first or each == first for each in functions):
            return first
        arrays: dict[int, Sequence[Any]] = {}
        label = _difference(functions, arrays)
        if label in ("captured", "captured self"):  # the code itself, or its object
            raise ValueError(
                f"The replicas of `{self._name}` called `merge_call` with different "
                f"functions for {what}, which is called once for all. Give the same "
                "one on all replicas."
            )
        called = (
            f"The replicas of `{self._name}` called `merge_call`, in "
            f"`eager_replicas()`, with {what} that"
        )
        if label is not None:
            name = label.removeprefix("captured ")
            raise ValueError(
                f"{called} refers to `{name}`, which differs between them. It is "
                "called once for all: pass it as an argument, `merge_call(merge_fn, "
                f"args=({name},))`, which arrives as a PerReplica."
            )
        of_all = {
            key: jax.tree.map(self._mirrored, column[0])
            if _are_equal(column)
            else self._leaf(column, what.strip("`"), blocks)
            for key, column in arrays.items()
        }
        rebindings = rebinding.FunctionRebindings(first, of_all)

        @contextlib.contextmanager
        def rebound() -> Iterator[None]:
            rebindings.set()
            try:
                yield
            finally:
                rebindings.take_back()
            if (changed := _difference(functions, {})) is not None:
                name = changed.removeprefix("captured ")
                raise ValueError(
                    f"{called} changes `{name}`, of which each replica has its own. It "
                    "is called once for all: return from it what they are to get."
                )

        blocks.enter_context(rebound())
        return rebindings.function

    # Values of all replicas, and of each.

    def _local_values(self, value: Leaf) -> list[Leaf]:
        """The value of each replica of this process, of a value of all replicas."""
        if isinstance(value, PerReplica):
            return self._versions(_per_replica.contents(value))
        if isinstance(value, jax.Array):
            return self._copies_of(value)
        return [value] * len(self._replicas.local_ids)

    def _versions(self, stacked: Leaf) -> list[Leaf]:
        placed = building.place_stacked(stacked, self._replicas)
        return list(self._replicas.versions(_per_replica.contents(placed)))

    def _copies_of(self, array: jax.Array) -> list[Leaf]:
        """Copies of an array on the devices of each replica of this process."""
        is_weak = getattr(array, "weak_type", False)
        copies = self._replicas.copies(self._mirrored(array))
        return [_with_weak_type(copy, is_weak) for copy in copies]

    def _mirrored(self, array: Leaf) -> jax.Array:
        """An array that all replicas have, as one array replicated on the mesh."""
        return mesh.place(array, sharding_like(array, self._replicas))

    def _per_replica(self, versions: Sequence[Leaf]) -> PerReplica:
        """The versions of this process's replicas as a `PerReplica` of all."""
        arrays = [v if isinstance(v, jax.Array) else np.asarray(v) for v in versions]
        return PerReplica(self._replicas.stacked(arrays))

    # With other processes.

    def _agree(self, what: str, message: object = None) -> list[object]:
        """Raises unless all processes come to the same; returns their messages."""
        if self._processes is None:
            return [message]
        operation = Operation(f"{what} in `{self._name}`", users_line())
        return list(self._processes.operations.compare(operation, _ADVICE, message))

    def _digests(
        self, columns: Sequence[Sequence[Any]], digest: Callable[[Any], str]
    ) -> list[tuple[str, ...]]:
        """A text for each value in a column, here and on replicas elsewhere."""
        texts = [map(digest, column) for column in columns]
        rows = zip(*texts, strict=True)
        ids = self._replicas.local_ids
        numbered = [[i, *row] for i, row in zip(ids, rows, strict=False)]
        replies = self._agree("the results of an eager step", numbered)
        rows = [row for reply in replies for row in cast("list[list[Any]]", reply)]
        rows.sort(key=lambda row: int(row[0]))
        return list(zip(*(row[1:] for row in rows), strict=True))

    def _described(self, column: Sequence[Any], digests: Sequence[str]) -> str:
        """Which replicas hold which array; `digests` are equal where arrays are."""
        here = zip(self._replicas.local_ids, column, strict=True)
        texts = {digests[i]: _short(array) for i, array in here}
        groups: dict[str, list[int]] = {}
        for number, each in enumerate(digests):
            groups.setdefault(each, []).append(number)
        return "\n".join(
            f"  replica{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: "
            f"{texts.get(each, 'of another process')}"
            for each, numbers in groups.items()
        )

    # Variables.

    def copy_of(
        self, variable: Variable, place: int, thread: ReplicaThread
    ) -> _VariableCopy:
        """The copy of a variable that one replica uses, made for all at first."""
        if id(variable) not in self._copies:
            thread.in_caller(functools.partial(self._copy, variable))
        return self._copies[id(variable)][1][place]

    def _copy(self, variable: Variable) -> None:
        with access.one_at_a_time:
            contents = variable.cell[...]
            if self._has_versions(variable):
                arrays = [v[None] for v in self._replicas.versions(contents)]
            else:
                arrays = self._copies_of(contents)
        made = [_VariableCopy(array, variable.name) for array in arrays]
        self._copies[id(variable)] = variable, made

    def _has_versions(self, variable: Variable) -> bool:
        is_here = variable.lives_on(self._replicas)
        return is_here and not variable.copies_must_agree

    def _changes(self) -> _Changes:
        """The variables that a replica assigned; raises if their copies differ."""
        used = list(self._copies.values())
        changed = self._digests(
            [copies for _, copies in used], lambda x: str(x.array is not x.before)
        )
        changes = [x for x, each in zip(used, changed, strict=True) if "True" in each]
        mirrored = [each for each in changes if not self._has_versions(each[0])]
        columns = [[copy.array for copy in copies] for _, copies in mirrored]
        digests = self._digests(columns, _digest)
        rows = zip(mirrored, columns, digests, strict=True)
        for (variable, copies), arrays, column in rows:
            if len(set(column)) == 1:
                continue
            line = next((copy.line for copy in copies if copy.line is not None), None)
            where = "" if line is None else f"  it was assigned at {line}\n"
            raise NotMirroredVariableError(
                f"Variable {variable.name!r} is mirrored, but `{self._name}` assigned "
                "it values that differ between replicas: its copies would drift apart."
                f"\n{where}{self._described(arrays, column)}\n"
                "Reduce it first, or make the variable with an `aggregation` "
                "('sum', 'mean', 'only_first_replica'), or with "
                "`synchronization='on_read'` if each replica is to have its own.",
                path=variable.name,
                line=line and str(line),
            )
        return changes

    def _store(self, changes: _Changes) -> None:
        """Assigns variables what replicas have assigned, and drops the copies."""
        with access.one_at_a_time:
            for variable, copies in changes:
                value = copies[0].array
                if self._has_versions(variable):
                    versions = [copy.array[0] for copy in copies]
                    value = self._per_replica(versions).stacked
                variable.cell[...] = mesh.place(value, variable.sharding)
        self._copies.clear()

    # Results.

    def _finish(self, returned: Sequence[_Returned], block: EagerBlock) -> PyTree:
        """The results of all replicas; stores what they have assigned."""
        ids, first = self._replicas.local_ids, returned[0][1]
        rows = []
        for number, (arrays, results) in zip(ids, returned, strict=True):
            if results.treedef != first.treedef:
                raise ValueError(
                    f"`{self._name}` returned pytrees of different structures: "
                    f"{first.treedef} on replica {ids[0]}, and {results.treedef} on "
                    f"replica {number}. Return the same structure on all replicas; "
                    "what differs may be an array of another shape, a number or a "
                    "string."
                )
            following = iter(arrays)
            rows.append(
                [next(following) if x is None else x.value for x in results.leaves]
            )
        columns = list(zip(*rows, strict=True))
        digests = self._digests(columns, _leaf_digest)
        named = NamedResults(self._name, first, self._objects is not None)
        self._check_expected(named, columns, digests)
        changes = self._changes()
        step = id(self._strategy), id(code_of(self._fn) or self._fn)
        numbered = first.treedef.unflatten(range(len(columns)))
        merged = []
        for path, position in jax.tree.leaves_with_path(numbered):
            column, result = columns[position], (step, named.path(path))
            if len(set(digests[position])) > 1 or self._is_argument(column):
                block.varying.add(result)
            varies = result in block.varying and self._replicas.count > 1
            merged.append(self._result(column, digests[position], varies))
        self._store(changes)
        return first.treedef.unflatten(merged)

    def _check_expected(
        self,
        named: NamedResults,
        columns: Sequence[Sequence[Any]],
        digests: Sequence[Sequence[str]],
    ) -> None:
        expected = self._options.expect_mirrored
        if expected is None and not named.has_objects:
            return
        is_expected = varying_results.expectation(named, expected)
        for position, keys in named.results.array_paths():
            column = columns[position]
            if len(set(digests[position])) == 1 or not is_expected(
                position, keys, jax.typeof(column[0])
            ):
                continue
            path = named.path(keys)
            what = f"{path} was expected to be mirrored, but the replicas differ."
            advice = varying_results.OF_RESULTS
            if named.is_of_object(keys):
                what = f"`{self._name}` leaves {path} different on each replica."
                advice = varying_results.OF_OBJECTS
            versions = self._described(column, digests[position])
            message = f"{what}\n{versions}\n{advice}"
            raise NotMirroredError(message, path=path.strip("`"))

    def _is_argument(self, column: Sequence[Leaf]) -> bool:
        """Whether a result is a `PerReplica` argument, returned as it is."""
        return any(
            role is Role.PER_REPLICA
            and all(a is b for a, b in zip(column, argument, strict=True))
            for argument, role in zip(self._columns, self._roles, strict=True)
        )

    def _result(
        self, column: Sequence[Leaf], digests: Sequence[str], varies: bool
    ) -> Leaf:
        is_array = all(map(_arrays.is_array, column))
        is_equal = len(set(digests)) == 1
        if not varies or (is_equal and not is_array):
            return self._mirrored(column[0]) if is_array else column[0]
        types = {each.rpartition(" ")[0] for each in digests}
        if len(types) > 1 or not all(_is_array_or_number(x) for x in column):
            return Versions(column, self._replicas.local_ids)
        return self._per_replica(
            [x if _arrays.is_array(x) else jax.numpy.asarray(x) for x in column]
        )


def _collective_step(
    collective: EagerCollective, *arrays: jax.Array
) -> list[jax.Array]:
    strategy = context.current().strategy
    assert strategy is not None, "it is a step's"
    return collective(cast(Reduction, strategy._reduction), arrays)


def _difference(
    functions: Sequence[Function], arrays: dict[int, Sequence[Any]]
) -> str | None:
    """The label of the first value that the replicas' functions have not in common.

    `arrays` gets the columns of arrays and objects that are to be those of all
    replicas, by the `id` of the first one's; of a `partial` they may differ.
    """
    found = list(map(rebinding.references, functions))
    first = found[0]
    captured = {id(x) for x in (*first.arrays.values(), *first.objects.values())}
    keys = zip(*(each.key for each in found), strict=False)
    for index, tokens in enumerate(keys):
        label, _, value, _ = first.nodes[index]
        column = [each.nodes[index].value for each in found]
        is_same = all(other is value for other in column)
        if all(isinstance(x, jax.Array) or is_nnx_node(x) for x in column):
            if not (is_same or _are_equal(column) or _is_of_partial(first, index)):
                return label
            if not is_same or id(value) in captured:
                known = arrays.setdefault(id(value), column)
                is_known = all(x is y for x, y in zip(known, column, strict=True))
                # Else one array of a replica would stand for several of another.
                if not (is_known or _are_equal([*known, *column])):
                    return label
        elif any(token != tokens[0] for token in tokens) and not (
            # Such as the structure of a tree, which is found by its identity.
            isinstance(tokens[0], Identity)
            and not isinstance(value, (Handle, PerReplica))
            and all(type(x) is type(value) and x == value for x in column)
        ):
            return label
    return None


def _is_of_partial(found: References, index: int) -> bool:
    """Whether an array is in an argument of a `functools.partial`."""
    if not isinstance(found.nodes[index].value, jax.Array):
        return False
    above = iter(found.ancestors(index))
    next(above)
    values = (found.nodes[each].value for each in above)
    holder = next((x for x in values if not isinstance(x, (dict, list, tuple))), None)
    return isinstance(holder, functools.partial)


def _are_equal(trees: Sequence[PyTree]) -> bool:
    """Whether arrays, or objects of Flax NNX, are equal bit by bit."""
    leaves, structures = zip(*map(jax.tree.flatten, trees), strict=True)
    arrays = [array for each in leaves for array in each]
    if any(isinstance(x, Tracer) or _arrays.is_deleted(x) for x in arrays):
        return False
    digests = [list(map(_leaf_digest, each)) for each in leaves]
    pairs = list(zip(digests, structures, strict=True))
    return all(pair == pairs[0] for pair in pairs)


def _with_weak_type(array: jax.Array, is_weak: bool) -> jax.Array:
    if is_key(array.dtype) or array.weak_type == is_weak:
        return array
    convert: Any = convert_element_type_p
    return convert.bind(array, new_dtype=array.dtype, weak_type=is_weak, sharding=None)


def _is_array_or_number(value: object) -> bool:
    is_number = isinstance(value, (int, float, complex, np.number))
    return _arrays.is_array(value) or (is_number and not isinstance(value, bool))


def _digest(array: Leaf) -> str:
    """Equal for arrays of the same type and bits."""
    host = on_host(array)
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


def _short(array: Leaf) -> str:
    host = on_host(array)
    if not host.ndim:
        return repr(host.item())
    text = np.array2string(host, separator=", ", threshold=8, edgeitems=3)
    return " ".join(text.split())


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


@final
class _ReplicaVariables(StepVariables):
    def __init__(self, call: EagerCall, place: int, thread: ReplicaThread) -> None:
        # The first replica runs first, so the others find the variables that it makes.
        super().__init__((), may_create=thread.number == 0)
        self._copy_of: Callable[[Variable], _VariableCopy]
        self._copy_of = functools.partial(call.copy_of, place=place, thread=thread)

    def reference(self, variable: Handle) -> _VariableCopy:
        context.check_unstaged(f"Variable {variable.name!r}")
        self.used.setdefault(id(variable), variable)
        return self._copy_of(cast(Variable, variable))

    def create(self, variable: Handle, start: jax.Array) -> None:
        """Let the step make `variable`; its cell holds its copies."""
        self.created.append(variable)
