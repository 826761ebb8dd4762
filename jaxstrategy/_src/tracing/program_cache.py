"""The programs of functions with one cache key, by signature: `ProgramCache`."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, final

import jax
import numpy as np

from jaxstrategy._src import text
from jaxstrategy._src.errors import CompiledStepError, RecompilationWarning
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.text import array_type, shown
from jaxstrategy._src.tracing import nnx, signature as _signature
from jaxstrategy._src.tracing.checks.step_checks import check
from jaxstrategy._src.tracing.checks.varying_results import Returned, Unstated
from jaxstrategy._src.tracing.jaxprs import ArrayType
from jaxstrategy._src.tracing.program import InputLayout, NotTraced, Program, Retraced
from jaxstrategy._src.tracing.references import (
    References,
    code_of,
    source_location,
    weak_method,
)
from jaxstrategy._src.tracing.saved_step import Obtain
from jaxstrategy._src.tracing.signature import Signature, are_live_arrays
from jaxstrategy._src.tracing.step_agreement import AgreedPreparation, StepAgreement
from jaxstrategy._src.tracing.traced_step import (
    ReplicaStep,
    StepEnvironment,
    TracedStep,
    name_of,
)
from jaxstrategy._src.values import per_replica, trees
from jaxstrategy._src.values.arrays import (
    Arguments,
    Function,
    Leaf,
    PyTree,
    TreeStructure,
)
from jaxstrategy._src.variables import access

# Warns when a function is compiled again and again, and says what changed.
#
# Compilations are counted by code: a lambda inside a loop is a new function at each
# turn, with the same code. A program that was called `WORTH` times does not count. If a
# function captures another number or array each time, the warning comes early, as there
# may be no end to those; of functions, strings and bools there are only a few.

# Compilations of one function without a warning: a few batch shapes, training and
# evaluation.
QUIET = 5
WORTH = 10
# The same for a function that captures other data each time.
QUIET_DATA = 2

_CHOICES = (bool, str, bytes, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class Calls:
    """The number of calls of functions with one cache key, and what they capture."""

    def __init__(self, references: References | None) -> None:
        self.count = 0
        self._opaque = None if references is None else references.opaque
        self._tokens = () if references is None else references.key
        nodes = () if references is None else references.nodes
        self._labels = [node.label for node in nodes]
        self._kinds = [type(node.value) for node in nodes]
        self._texts = [_described(node.value) for node in nodes]

    def difference(self, other: Calls) -> tuple[str, bool]:
        """Describes the difference from `other`; and whether it is data."""
        if (opaque := other._opaque) is not None:
            known = dict(zip(other._labels, other._texts, strict=True))
            text = known.get(opaque, "more than can be looked through")
            return (
                f"it is a new function object each time and uses `{opaque}`, {text}, "
                "of which Python does not say whether it has changed. Define the "
                "function once, outside, or pass what changes as an argument."
            ), True
        for i, (was, now) in enumerate(zip(self._tokens, other._tokens, strict=False)):
            if was != now and "__defaults__" not in other._labels[i]:
                label, old, new = other._labels[i], self._texts[i], other._texts[i]
                changed = f"it was {old}, is {new}" if old != new else f"it is {new}"
                return (
                    f"it is a new function object each time, and `{label}` changed: "
                    f"{changed}. Pass it as an argument."
                ), not issubclass(other._kinds[i], (*_CHOICES, *_FUNCTIONS, type))
        return (
            "it is a new function object each time, made anew in a loop or function. "
            "Define it once, outside, and pass what changes as an argument."
        ), False


def _described(value: Leaf) -> str:
    kind = type(value)
    if kind in (*_CHOICES, int, float, complex) or issubclass(
        kind, (*_FUNCTIONS, type)
    ):
        return shown(value)
    if issubclass(kind, (jax.Array, np.ndarray)):
        return f"another {array_type(value.dtype, value.shape)}"
    return f"a {kind.__name__}"


class History:
    """The compilations of one function's code."""

    def __init__(self, quiet: bool = False) -> None:
        self.warned: set[type[Warning]] = set()
        self._quiet = quiet
        self._count = 0
        self._count_of_data = 0
        self._has_warned = False
        self._calls_before = 0
        self._last: tuple[Calls, Signature, Sequence[ArrayType]] | None = None

    def record(
        self,
        fn: Function,
        calls: Calls,
        signature: Signature,
        avals: Sequence[ArrayType],
    ) -> None:
        """Counts a compilation; warns once when there have been too many."""
        last, self._last = self._last, (calls, signature, list(avals))
        if last is not None and last[0].count - self._calls_before >= WORTH:
            self._count = self._count_of_data = 0
            self._has_warned = False
        self._calls_before = calls.count - 1
        self._count += 1
        if self._quiet or last is None:
            return
        what, is_data = None, False
        if last[0] is not calls:
            what, is_data = last[0].difference(calls)
        self._count_of_data += is_data
        is_early = is_data and self._count_of_data >= QUIET_DATA
        if not self._has_warned and (is_early or self._count > QUIET):
            self._has_warned = True
            name = getattr(fn, "__qualname__", type(fn).__name__)
            number = "3rd" if self._count == 3 else f"{self._count}th"
            what = what or _change(fn, *last[1:], signature, avals)
            text.warn(
                f"`{name}` is being compiled for the {number} time, because {what}",
                RecompilationWarning,
            )


def history_of(fn: Function, known: dict[int, History]) -> History:
    """The history of the code of `fn`; `known` is by the `id` of code."""
    code = code_of(fn)
    if code is None:  # a callable object: its own history
        return History()
    if not text.is_users(code.co_filename):
        return History(quiet=True)
    # By `id`: the code of a notebook cell that is run again is equal, but another one.
    if id(code) not in known:
        weakref.finalize(code, known.pop, id(code), None)
    return known.setdefault(id(code), History())


def _change(
    fn: Function,
    old: Signature,
    old_avals: Sequence[ArrayType],
    new: Signature,
    new_avals: Sequence[ArrayType],
) -> str:
    """Describes the difference between the arguments of two compilations."""
    if str(old.treedef) != str(new.treedef):
        return (
            "the structure of its arguments changed: it was "
            f"{shown(old.treedef)}, is {shown(new.treedef)}. Pass the same "
            "containers with the same keys each time."
        )
    if (changed := old.difference(fn, new)) is not None:
        label, was, now = changed
        return (
            f"the static argument {label} changed: it was {was}, is {now}. Pass it as "
            "a number or an array, which are traced, if the function does not need its "
            "value in Python."
        )
    for index, (was, now) in enumerate(zip(old_avals, new_avals, strict=True)):
        if was != now:
            where = new.label(fn, new.dynamic[index])
            return (
                f"the shape or dtype of {where} changed: it was {was.str_short()}, is "
                f"{now.str_short()}. Pad batches to one shape, or drop the last one."
            )
    return "its programs were forgotten or its context changed."


@final
class AgreedProgram:
    """A program that several processes agree on before they trace or run it."""

    def __init__(
        self,
        step: ReplicaStep,
        options: RunOptions,
        on_trace: Callable[[TracedStep], object],
        agreement: StepAgreement,
    ) -> None:
        self._step = step
        self._program = Program(step, options, on_trace)
        self._agreement = agreement
        self._name = getattr(step.fn, "__qualname__", type(step.fn).__name__)
        location = source_location(step.fn)
        self._where = f"{location[0]}:{location[1]}" if location else "unknown line"
        self._is_new = True
        # Of the call in progress.
        self._is_dispatched = False  # and not part of a larger program
        self._leaves: Sequence[Leaf] = ()
        self._preparation: AgreedPreparation | None = None

    @property
    def layout(self) -> InputLayout:
        return self._program.layout

    def __call__(self, leaves: Sequence[Leaf], inputs: Sequence[PyTree]) -> PyTree:
        return self._agreed(self._program, leaves, inputs)

    def place_and_call(self, leaves: Sequence[Leaf]) -> PyTree:
        return self._agreed(self._program.place_and_call, leaves)

    def prepare(self, leaves: Sequence[Leaf], obtain: Obtain) -> None:
        self._preparation = self._agreement.preparation(self._name, self._where)
        try:
            self._preparation.run(self._program.prepare, leaves, obtain)
        finally:
            self._preparation = None
        self._is_new = False  # its first call does not compile

    def _agreed(
        self,
        call: Callable[..., PyTree],
        leaves: Sequence[Leaf],
        *more: Sequence[PyTree],
    ) -> PyTree:
        agreement, self._leaves = self._agreement, leaves
        try:
            # Part of a larger program, which the caller dispatches.
            if access.is_traced():
                return call(leaves, *more)
            if agreement.begin(self._name, self._where):
                same = {} if self._is_new else self._step.mirrored_values(leaves)
                agreement.compare(self._name, self._where, leaves, same)
            if self._is_new:
                agreement.compiles(self._name)
            self._is_dispatched = True
            try:
                results = call(leaves, *more)
            finally:
                self._is_dispatched = False
                agreement.end()
            self._is_new = False
            return results
        finally:
            self._leaves = ()

    def traced(self, step: TracedStep) -> None:
        """Compares a new trace with those of the other processes."""
        if self._preparation is not None:
            self._preparation.traced(step)
            return
        # Another thread's call may have cleared them.
        leaves = self._leaves
        same = self._step.mirrored_values(leaves) if leaves else {}
        self._agreement.traced(step, self._where, same, self._is_dispatched)


@final
class FrozenSignatures:
    """The signatures of a step compiled ahead; no others are compiled once frozen."""

    def __init__(self) -> None:
        self.is_frozen = False
        self._last: Signature | None = None

    def add(self, signature: Signature) -> None:
        self._last = signature

    def check_function(self, fn: Function) -> None:
        """Raises if frozen, for a function that captures other values."""
        if self.is_frozen:
            raise CompiledStepError(
                f"`{name_of(fn)}` was compiled ahead of time, and what it captures has "
                "changed since: a variable of the function around it, or an attribute "
                "of its object. Compile it again, or pass what changes as an argument."
            )

    def check_arguments(self, fn: Function, signature: Signature) -> None:
        """Raises if frozen, for arguments of another signature."""
        if not self.is_frozen:
            return
        assert self._last is not None, "it is frozen after it was compiled"
        what = _difference(fn, self._last, signature)
        raise CompiledStepError(
            f"`{name_of(fn)}` was compiled ahead of time for other arguments: {what}. "
            "Call it with arguments like those it was compiled for, or compile it for "
            "these."
        )


def _difference(fn: Function, old: Signature, new: Signature) -> str:
    """The difference between two signatures, in words."""
    if str(old.treedef) != str(new.treedef):
        if _paths(old.treedef) != _paths(new.treedef):
            was, now = shown(old.treedef), shown(new.treedef)
            return f"their structure was {was}, and is {now}"
        return (
            "their structure holds other static data, such as functions or settings of "
            "a `TrainState`. A model or an optimizer that is made anew is another one: "
            "make it once, outside of the function that builds the state"
        )
    if (changed := old.difference(fn, new)) is not None:
        label, was, now = changed
        return f"{label} was {was}, and is {now}"
    return (
        "something static in them, as an argument or an attribute of an object, has "
        "another value, or is equal to what it was and not the same"
    )


def _paths(structure: TreeStructure) -> list[str]:
    tree = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


_Program: TypeAlias = Program | AgreedProgram
_MAX_FAST_PATH_MISSES = 3


@final
class ProgramCache:
    """The programs of functions with one cache key, by signature."""

    def __init__(
        self,
        environment: StepEnvironment,
        agreement: StepAgreement | None,
        options: RunOptions | None,
        history: History,
        calls: Calls,
        frozen: FrozenSignatures | None = None,
    ) -> None:
        self._environment = environment
        self._agreement = agreement
        self._options = options if options is not None else RunOptions()
        self._history = history
        self._calls = calls
        self._frozen = frozen
        self._functions: list[Callable[[], Function | None]] = []
        # The function that is called now; another thread may call another.
        self.get_caller: Callable[[], Function | None] = lambda: None
        # The only function that may use these, as their trace has mutated its captures.
        self.owner: object | None = None
        self.traces = 0
        self.has_succeeded = False
        # Weak references whose callbacks drop programs; kept alive here.
        self.watched: list[object] = []
        self._watched_handles: list[weakref.ref[per_replica.Handle]] = []
        self._returned = Returned()
        # By signature; without static arguments also by the structure of the arguments,
        # which is found in half the time.
        self._programs: dict[Hashable, _Program] = {}
        self._last: tuple[Any, _Program | None] = (None, None)
        # The program to call without a look at the arguments: JAX raises for those that
        # differ. Given up after a few misses, each of which costs an exception.
        self._fast_path: Program | None = None
        self._fast_path_misses = 0
        # Once a call has had objects of Flax NNX, all are looked through for them.
        self._objects = nnx.RecentObjects()
        self._takes_objects = False

    def add(self, get_fn: Callable[[], Function | None]) -> None:
        """Adds a function that may use these programs, without keeping it alive."""
        self._functions = [get for get in self._functions if get() is not None]
        self._functions.append(get_fn)

    @property
    def is_in_use(self) -> bool:
        """Whether one of its functions is alive."""
        return self._get_fn() is not None

    def _get_fn(self) -> Function | None:
        for get in (self.get_caller, *reversed(self._functions)):
            if (fn := get()) is not None:
                return fn
        return None

    @property
    def _fn(self) -> Function:
        fn = self._get_fn()
        assert fn is not None, "the caller holds a function"
        return fn

    def __call__(
        self,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
        has_arrays: bool = False,  # for objects
    ) -> PyTree:
        """The results of the function on all replicas."""
        if self._takes_objects and not has_arrays:
            return self._call_with_objects((args, kwargs), {})
        self._calls.count += 1
        program = self._fast_path
        if program is not None and (executable := program.executable).is_bare:
            try:
                return program.call_bare(executable, args, kwargs)
            except Exception as error:
                if not self._is_fast_path_miss(program, error, (args, kwargs)):
                    raise
            return self._call_by_structure((args, kwargs))
        arguments = args, kwargs
        structure, program = self._last
        if program is not None:
            # Flattening as the last call's arguments takes half the time of flattening
            # and comparing: 2 us instead of 5 for 20 leaves, 33 instead of 69 for 300.
            try:
                leaves = structure.flatten_up_to(arguments)
            except (ValueError, RuntimeError):
                pass  # `RuntimeError`: JAX's message shows arrays, one of them deleted
            else:
                if are_live_arrays(leaves):
                    return self._call_live(program, leaves, arguments)
        return self._call_by_structure(arguments)

    def _call_live(
        self, program: _Program, leaves: list[Leaf], arguments: Arguments
    ) -> PyTree:
        """A call whose leaves are live arrays."""
        inputs = leaves
        if program.layout.structure is not None:
            args, kwargs = arguments
            inputs = (*args, kwargs) if kwargs else args
        results = program(leaves, inputs)
        may_be_fast = self._fast_path_misses < _MAX_FAST_PATH_MISSES
        if may_be_fast and isinstance(program, Program):
            self._fast_path = None if program.must_check_first else program
        return results

    def _is_fast_path_miss(
        self, program: Program, error: Exception, arguments: Arguments
    ) -> bool:
        """Whether a call failed only because its arguments need the slow path."""
        if isinstance(error, jax.errors.JaxRuntimeError):
            program.placement.check_once(jax.tree.leaves(arguments))
            return False  # the devices have begun
        if not isinstance(error, (NotTraced, Retraced)):
            leaves, structure = _flatten(arguments)
            is_same = structure == program.layout.structure and are_live_arrays(leaves)
            if is_same and program.is_placed(leaves):
                return False
        self._fast_path_misses += 1
        self._fast_path = None
        return True

    def _call_by_structure(self, arguments: Arguments) -> PyTree:
        """A call whose structure differs from the last one, or with other leaves."""
        leaves, structure = _flatten(arguments)
        program = self._programs.get(structure)
        if program is None or not are_live_arrays(leaves):
            return self._call_by_signature(arguments, structure)
        self._last = (structure, program)
        return self._call_live(program, leaves, arguments)

    def call_with(self, captured: dict[str, Leaf], arguments: Arguments) -> PyTree:
        """The results of a function with captured values as further arguments."""
        if captured:
            results = self._call_with_objects(arguments, captured)
        else:
            results = self(*arguments)
        self.has_succeeded = True
        return results

    def prepare(
        self, captured: dict[str, Leaf], arguments: Arguments, obtain: Obtain
    ) -> None:
        """Compiles the program of such a call now; types may stand for arrays."""
        _, arguments = nnx.as_arrays(arguments, captured, self._objects)
        leaves, signature = _signature.flatten(self._fn, arguments, abstract=True)
        program, _ = self._new_program(signature)
        program.prepare(leaves, obtain)
        self._programs[signature] = program
        if self._frozen is not None:
            self._frozen.add(signature)
        self.has_succeeded = True

    def _call_by_signature(
        self, arguments: Arguments, structure: TreeStructure
    ) -> PyTree:
        fn = self._fn
        if nnx.has_objects(arguments):
            self._takes_objects = True
            return self._call_with_objects(arguments, {})
        leaves, signature = _signature.flatten(fn, arguments)
        program, unstated = self._programs.get(signature), None
        if program is None:
            if self._frozen is not None:
                self._frozen.check_arguments(fn, signature)
            self._returned.check(signature, leaves, fn)
            made, unstated = self._new_program(signature)
            program = self._programs.setdefault(signature, made)  # or another thread's
            drop = weak_method(self, ProgramCache._drop, signature)
            self._watched_handles += (weakref.ref(v, drop) for v in signature.handles)
        if not signature.static_leaves:
            self._programs[structure] = program
            self._last = (structure, program)
        results = program.place_and_call(leaves)
        if unstated is not None:
            self._returned.add(signature, results, unstated)
        return results

    def _new_program(
        self, signature: Signature
    ) -> tuple[_Program, dict[int, Unstated]]:
        """A program, and after its first trace the results that may vary unstated."""
        step = ReplicaStep(
            self._get_fn, self._environment, signature, lambda: not self.traces
        )
        expected, unstated = self._options.expect_mirrored, dict[int, Unstated]()

        def on_trace(traced: TracedStep) -> None:
            found = check(traced, expected, self._history.warned)
            unstated.clear()
            unstated.update(found)
            if isinstance(program, AgreedProgram):
                program.traced(traced)
            self.traces += 1
            count = len(signature.dynamic)
            types = [var.aval for var in traced.closed.jaxpr.invars[:count]]
            self._history.record(step.fn, self._calls, signature, types)

        if self._agreement is None:
            program = Program(step, self._options, on_trace)
        else:
            program = AgreedProgram(step, self._options, on_trace, self._agreement)
        return program, unstated

    def _drop(
        self, signature: Signature, dead: weakref.ref[per_replica.Handle]
    ) -> None:
        """Drops the program for a static variable that died."""
        self._programs.pop(signature, None)
        self._watched_handles.remove(dead)

    # Calls with objects that the step changes in place.

    def _call_with_objects(
        self, arguments: Arguments, captured: dict[str, Leaf]
    ) -> PyTree:
        objects, arguments = nnx.as_arrays(arguments, captured, self._objects)
        results = self(*arguments, has_arrays=True)
        return results if objects is None else objects.finish(results)

    def bound(
        self, fn: Function, objects: Sequence[PyTree], captured: dict[str, Leaf]
    ) -> Callable[..., PyTree]:
        """A function with these first arguments, which are flattened only once."""
        found, arguments = nnx.as_arrays((tuple(objects), {}), captured, self._objects)
        caller, alive = nnx.require_objects(found), objects
        leaves, structure = jax.tree.flatten(arguments, is_leaf=nnx.is_whole_or_arrays)
        places = [i for i, leaf in enumerate(leaves) if nnx.is_object_arrays(leaf)]
        for place in places:  # their old arrays are not kept alive
            leaves[place] = None

        @functools.wraps(fn)
        def step(*rest: PyTree, **kwargs: PyTree) -> PyTree:
            assert alive  # the objects, as long as this may be called
            new = leaves.copy()
            for place, parts in zip(places, caller.parts(), strict=True):
                new[place] = parts
            args, captured = structure.unflatten(new)
            kwargs.update(captured)
            return caller.finish(self((*args, *rest), kwargs, has_arrays=True))

        return step


def _flatten(arguments: Arguments) -> tuple[list[Leaf], TreeStructure]:
    """Flattens a call, without reading variables or the arrays of objects."""
    trees.object_kinds()
    return jax.tree.flatten(arguments, is_leaf=_is_variable_or_object)


def _is_variable_or_object(node: object) -> bool:
    return isinstance(node, per_replica.Handle) or trees.is_object(node)
