"""Runs eager steps, each replica in a thread: rendezvous and `merge_call`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.executors import eager_replicas
from jaxstrategy._src.executors.eager_replicas import (
    EagerBlock,
    EagerCall,
    EagerResults,
    ReplicaVariables,
    VariableCopies,
)
from jaxstrategy._src.executors.replica_thread import (
    EagerArrays,
    MergeCall,
    Rendezvous,
    ReplicaThread,
    ReplicaTurns,
    thread_settings,
)
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.processes.agreement import Operation, users_line
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.reductions import reduction as _reduction
from jaxstrategy._src.reductions.reduction import EagerCollective, Reduction
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.tracing import results as _results
from jaxstrategy._src.tracing.functions import code as _code
from jaxstrategy._src.tracing.roles import Role
from jaxstrategy._src.tracing.traced_step import StepEnvironment
from jaxstrategy._src.values import arrays as _arrays, trees as _trees
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica

_ADVICE = (
    "The replicas of all processes must call the same collectives in the same order, "
    "and all processes must be in `eager_replicas()`, or none."
)


@final
class ProcessRounds:
    """Compares, between processes, what their replicas do next."""

    def __init__(self, processes: Processes | None, replicas: Replicas) -> None:
        several = processes is not None and processes.count > 1
        self._processes = processes if several else None
        self._replicas = replicas
        self._name = ""

    def begin(self, name: str) -> None:
        self._name = name
        self.agree("the beginning of an eager step")

    def agree(self, what: str) -> None:
        if self._processes is not None:
            self._compare(what, None)

    def gather(self, local: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        """Gathers a row of texts of each replica from all processes."""
        if self._processes is None:
            return local
        numbered: list[list[Any]] = [
            [i, *row] for i, row in zip(self._replicas.local_ids, local, strict=False)
        ]
        replies = self._compare("the results of an eager step", numbered)
        rows = [row for reply in replies for row in cast("list[list[Any]]", reply)]
        return [row[1:] for row in sorted(rows, key=lambda row: int(row[0]))]

    def _compare(self, what: str, message: object) -> list[object]:
        assert self._processes is not None
        operation = Operation(f"{what} in `{self._name}`", users_line())
        return list(self._processes.operations.compare(operation, _ADVICE, message))


_rendezvous_p = Primitive("jaxstrategy_rendezvous")
_rendezvous_p.multiple_results = True


def rendezvous(collective: EagerCollective, arrays: Sequence[jax.Array]) -> PyTree:
    types = _this_replica(collective).result_types(collective, arrays)
    results = _rendezvous_p.bind(*arrays, collective=collective)
    return jax.tree.structure(types).unflatten(results)


def _this_replica(collective: EagerCollective) -> ReplicaThread:
    thread = context.current().eager
    if isinstance(thread, ReplicaThread):
        return thread
    raise ContextError(
        f"{collective.name} was called in `eager_replicas()` by a thread that is no "
        "replica's. Call it in the step itself, not in a thread or callback of it."
    )


@_rendezvous_p.def_impl
def _run(*arrays: jax.Array, collective: EagerCollective) -> list[jax.Array]:
    return _this_replica(collective).rendezvous(collective, arrays)


@_rendezvous_p.def_abstract_eval
def _types(*types: ShapedArray, collective: EagerCollective) -> list[ShapedArray]:
    structs = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, weak_type=each.weak_type)
        for each in types
    ]
    results = _this_replica(collective).result_types(collective, structs)
    return [
        ShapedArray(each.shape, each.dtype, weak_type=each.weak_type)
        for each in jax.tree.leaves(results)
    ]


def _derivative(
    primals: Sequence[Any], tangents: Sequence[Any], *, collective: EagerCollective
) -> tuple[list[Any], list[Any]]:
    results = _rendezvous_p.bind(*primals, collective=collective)
    differs = tuple(not isinstance(each, ad.Zero) for each in tangents)
    nonzero = [each for each in tangents if not isinstance(each, ad.Zero)]
    derivative = _reduction.derivative(collective, differs)
    out = iter(_rendezvous_p.bind(*primals, *nonzero, collective=derivative))
    return results, [
        next(out)
        if jnp.issubdtype(result.dtype, jnp.inexact)
        else ad.Zero(jax.typeof(result).to_tangent_aval())
        for result in results
    ]


def _transpose(
    cotangents: Sequence[Any], *operands: Any, collective: EagerCollective
) -> list[Any]:
    linear = tuple(
        jax.ShapeDtypeStruct(
            each.aval.shape, each.aval.dtype, weak_type=each.aval.weak_type
        )
        if ad.is_undefined_primal(each)
        else None
        for each in operands
    )
    known = [each for each in operands if not ad.is_undefined_primal(each)]
    cotangents = [ad.instantiate_zeros(each) for each in cotangents]
    transposed = _reduction.transposed(collective, linear)
    out = iter(_rendezvous_p.bind(*known, *cotangents, collective=transposed))
    return [None if like is None else next(out) for like in linear]


def _mapped(
    operands: Sequence[Any], dimensions: Sequence[Any], *, collective: EagerCollective
) -> tuple[list[Any], list[int]]:
    mapped = _reduction.mapped(collective, tuple(dimensions))
    results = _rendezvous_p.bind(*operands, collective=mapped)
    return results, [0] * len(results)


def _compiled(*_: Any, collective: EagerCollective, **__: Any) -> Any:
    raise ContextError(
        f"{collective.name} was called in a function that JAX compiles for one replica "
        "by itself, where in `eager_replicas()` it cannot meet the others. Leave out "
        "what compiles there: `jax.jit` in `jax.disable_jit(False)`, `.lower()`."
    )


ad.primitive_jvps[_rendezvous_p] = _derivative
ad.primitive_transposes[_rendezvous_p] = _transpose
batching.primitive_batchers[_rendezvous_p] = _mapped
mlir.register_lowering(_rendezvous_p, _compiled)


_NUMBERS = (bool, int, float, complex)
_DIFFERENT = object()


@final
class ReplicaMerger:
    """Merges the replicas' arguments of `merge_call`, and calls it once for all."""

    def __init__(self, replicas: Replicas, name: str) -> None:
        self._replicas = replicas
        self._name = name

    def merged(
        self, strategy: AbstractStrategy, calls: Sequence[MergeCall]
    ) -> list[PyTree]:
        """Calls the merge function; returns each replica's part of the result."""
        merge_fn = self.function([each.merge_fn for each in calls], "`merge_fn`")
        args = self.tree([each.args for each in calls], "args")
        kwargs = self.tree([each.kwargs for each in calls], "kwargs")
        with context.entered(strategy=strategy, replica=None):
            result = merge_fn(strategy, *args, **kwargs)
        return self.parts(result)

    def parts(self, result: PyTree) -> list[PyTree]:
        """Each replica's part of a result of all."""
        columns: list[list[Leaf]] = []
        _trees.map_around_objects(
            lambda leaf: columns.append(
                eager_replicas.local_values(leaf, self._replicas)
            ),
            result,
        )

        def part(i: int) -> PyTree:
            following = iter(columns)
            return _trees.map_around_objects(lambda _: next(following)[i], result)

        return list(map(part, range(len(self._replicas.local_ids))))

    def tree(self, trees: Sequence[PyTree], what: str) -> PyTree:
        """One pytree for the replicas' pytrees, with `PerReplica`s for arrays."""
        paths, structure = jax.tree.flatten_with_path(trees[0], is_leaf=_trees.is_whole)
        columns = [[leaf] for _, leaf in paths]
        for number, tree in enumerate(trees[1:], start=1):
            leaves, other = jax.tree.flatten(tree, is_leaf=_trees.is_whole)
            if other != structure:
                raise ValueError(
                    f"`merge_call` was given `{what}` of other structures by the "
                    f"replicas of `{self._name}`: {structure} by the first, {other} by "
                    f"replica {self._replicas.local_ids[number]}."
                )
            for column, leaf in zip(columns, leaves, strict=True):
                column.append(leaf)
        labels = [f"{what}{jax.tree_util.keystr(path)}" for path, _ in paths]
        pairs = zip(columns, labels, strict=True)
        return structure.unflatten([self._leaf(each, label) for each, label in pairs])

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
        if all(map(_arrays.is_array, column)):
            return self._array(column, label)
        if (one := self._one(column, f"`{label}`")) is not _DIFFERENT:
            return one
        if all(isinstance(leaf, _NUMBERS) or _arrays.is_array(leaf) for leaf in column):
            return self._array([jax.numpy.asarray(leaf) for leaf in column], label)
        raise ValueError(
            f"`merge_call` was given `{label}` that differs between the replicas of "
            f"`{self._name}` and is no array: {', '.join(map(shown, column))}."
        )

    def _array(self, column: Sequence[Leaf], label: str) -> Leaf:
        if self._replicas.count == 1:
            return column[0]
        kinds = {(leaf.shape, leaf.dtype) for leaf in column}
        if len(kinds) > 1:
            seen = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in column)
            raise ValueError(
                f"`merge_call` was given `{label}` of other shapes or dtypes by the "
                f"replicas of `{self._name}`: {seen}. One array holds all versions, so "
                "they need one shape; pad them, or gather their sizes first."
            )
        return eager_replicas.per_replica_of(column, self._replicas)

    def function(self, functions: Sequence[Any], what: str) -> Any:
        """One function for those of the replicas, which must do the same."""
        first = functions[0]
        if all(each is first for each in functions):
            return first
        kind = type(first)
        if any(type(each) is not kind for each in functions):
            raise self._other_functions(what)
        if isinstance(first, types.FunctionType):
            return self._closure(functions, what)
        if isinstance(first, types.MethodType):
            owner = self._captured([each.__self__ for each in functions], what, "self")
            function = self.function([each.__func__ for each in functions], what)
            return types.MethodType(function, owner)
        if isinstance(first, functools.partial):
            inner = self.function([each.func for each in functions], what)
            args = self.tree([each.args for each in functions], what)
            return functools.partial(
                inner, *args, **self.tree([each.keywords for each in functions], what)
            )
        if all(each == first for each in functions):
            return first
        raise self._other_functions(what)

    def _closure(
        self, functions: Sequence[types.FunctionType], what: str
    ) -> types.FunctionType:
        first = functions[0]
        code = first.__code__
        if any(each.__code__ is not code for each in functions):
            raise self._other_functions(what)
        cells = []
        for place, name in enumerate(code.co_freevars):
            variants = [(each.__closure__ or ())[place] for each in functions]
            contents = [_contents(cell) for cell in variants]
            one = self._captured(contents, what, name)
            cells.append(variants[0] if one is contents[0] else types.CellType(one))
        function = types.FunctionType(
            code, first.__globals__, first.__name__, None, tuple(cells)
        )
        defaults = [each.__defaults__ for each in functions]
        function.__defaults__ = self._captured(defaults, what, "its defaults")
        named = [each.__kwdefaults__ for each in functions]
        function.__kwdefaults__ = self._captured(named, what, "its defaults")
        return function

    def _captured(self, values: Sequence[Any], what: str, name: str) -> Any:
        first = values[0]
        is_array = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(first))
        if all(each is first for each in values) and not is_array:
            return first
        if isinstance(first, types.FunctionType):
            return self.function(values, what)
        structure = jax.tree.structure(first)
        if all(jax.tree.structure(each) == structure for each in values):
            columns = zip(*map(jax.tree.leaves, values), strict=True)
            return structure.unflatten(
                [self._equal(column, what, name) for column in columns]
            )
        raise self._differs(what, name)

    def _equal(self, column: Sequence[Leaf], what: str, name: str) -> Leaf:
        first = column[0]
        if all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in column):
            if any(isinstance(leaf, Tracer) for leaf in column):
                raise self._differs(what, name)
            if len(set(map(eager_replicas.digest, column))) > 1:
                raise self._differs(what, name)
            return eager_replicas.mirrored(first, self._replicas)
        if (one := self._one(column, what)) is not _DIFFERENT:
            return one
        raise self._differs(what, name)

    def _one(self, column: Sequence[Leaf], what: str) -> Leaf:
        """A value that is equal on all replicas and no array, or `_DIFFERENT`."""
        first = column[0]
        if all(leaf is first for leaf in column):
            return first
        if callable(first):
            return self.function(column, what)
        is_equal = all(type(leaf) is type(first) and leaf == first for leaf in column)
        return first if is_equal else _DIFFERENT

    def _differs(self, what: str, name: str) -> ValueError:
        return ValueError(
            f"The replicas of `{self._name}` called `merge_call`, in "
            f"`eager_replicas()`, with {what} that refers to `{name}`, which differs "
            "between them. It is called once for all: pass it as an argument, "
            f"`merge_call(merge_fn, args=({name},))`, which arrives as a PerReplica."
        )

    def _other_functions(self, what: str) -> ValueError:
        return ValueError(
            f"The replicas of `{self._name}` called `merge_call` with different "
            f"functions for {what}, which is called once for all. Give the same one on "
            "all replicas."
        )


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return cell


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
        self._rounds = ProcessRounds(processes, strategy._replicas)

    def run(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
    ) -> PyTree:
        call = EagerCall(fn, args, kwargs, options or RunOptions(), self._environment)
        if _arrays.is_traced() or any(isinstance(x, Tracer) for x in call.leaves):
            raise ContextError(
                f"`{call.name}` was to be run in `eager_replicas()` by code that JAX "
                "traces (`jax.jit`, `jax.grad`, `jax.lax.scan` around `run`), where no "
                "array has a value that the threads of replicas could go on with. Call "
                "it outside of what is traced, or take the gradient inside of the step."
            )
        replicas = self._strategy._replicas
        copies = VariableCopies(replicas, call.name, self._rounds.gather)
        merger = ReplicaMerger(replicas, call.name)
        block = cast(EagerBlock, context.current().runs_eagerly)
        settings = thread_settings(call.options, block.disable_jit)
        columns = call.columns(replicas)

        def body(place: int, thread: ReplicaThread) -> object:
            leaves = [column[place] for column in columns]
            device = replicas.devices_of(thread.number)[0]
            with (
                settings(replicas, thread.number, device),
                context.entered(
                    strategy=self._strategy,
                    replica=ReplicaContext(self._strategy),
                    in_step=True,
                    updated=(),
                    eager=thread,
                    variables=ReplicaVariables(copies, place, thread),
                    trace=context.new_trace(),
                ),
                call.masks.tracing(leaves),
            ):
                returned = call.run(leaves)
            return _results.flatten(returned, call.signature.statics, call.name)

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
            if isinstance(waiting[0], MergeCall):
                copies.store(copies.changes())
                calls = cast("Sequence[MergeCall]", waiting)
                return merger.merged(self._strategy, calls)
            return self._reduced(cast("Sequence[EagerArrays]", waiting))

        self._rounds.begin(call.name)
        ReplicaTurns(call.name, threads, answer, self._rounds.agree).run()
        returned = [
            cast("tuple[list[jax.Array], _results.Results]", t.result) for t in threads
        ]
        results = EagerResults(call, replicas, returned, self._rounds.gather)
        results.check(call.expected)
        changes = copies.changes()
        key = id(self._strategy), id(_code.code_of(call.fn) or call.fn)
        roles = zip(columns, call.roles, strict=True)
        arguments = [column for column, role in roles if role is Role.PER_REPLICA]
        value = results.value(key, block, arguments)
        copies.store(changes)
        if call.masks.is_active:  # warns if rows that only fill up the batch counted
            call.masks.check(call.leaves)
        return value if call.objects is None else call.objects.finish(value)

    def _reduced(self, operands: Sequence[EagerArrays]) -> Sequence[object]:
        """Runs a collective, compiled; returns the results of each replica."""
        replicas = self._strategy._replicas
        first = operands[0]
        stacked = [
            eager_replicas.per_replica_of(column, replicas)
            for column in zip(*(each.arrays for each in operands), strict=True)
        ]
        results = self._compiled(_collective_step, (first.collective, *stacked))
        columns = [
            [eager_replicas.with_weak_type(each, weak) for each in column]
            for result, weak in zip(results, first.weak, strict=True)
            for column in [eager_replicas.local_values(result, replicas)]
        ]
        return [[column[i] for column in columns] for i in range(len(operands))]


def _collective_step(
    collective: EagerCollective, *arrays: jax.Array
) -> list[jax.Array]:
    strategy = context.current().strategy
    assert strategy is not None, "it is a step's"
    return collective(cast(Reduction, strategy._reduction), arrays)
