"""The programs that functions which do the same share: `SharedPrograms`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, final

import jax

from jaxstrategy._src.errors import CompiledStepError
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.tracing import recompilation, roles as _roles
from jaxstrategy._src.tracing.checks.varying_results import Returned
from jaxstrategy._src.tracing.executable import InputLayout, NotTraced, Retraced
from jaxstrategy._src.tracing.functions import code, weak_references
from jaxstrategy._src.tracing.functions.weak_references import weakly
from jaxstrategy._src.tracing.jaxprs.visit import ArrayType
from jaxstrategy._src.tracing.nnx.object_calls import (
    BoundCall,
    ObjectCall,
    ObjectCalls,
    options_of,
)
from jaxstrategy._src.tracing.program import Program
from jaxstrategy._src.tracing.roles import Role, Signature, are_live_arrays
from jaxstrategy._src.tracing.saved_step import Obtain
from jaxstrategy._src.tracing.stages.stage import Checked, Counted, Stage
from jaxstrategy._src.tracing.stages.stages import stages_of
from jaxstrategy._src.tracing.step_agreement import AgreedPreparation, StepAgreement
from jaxstrategy._src.tracing.traced_step import (
    ReplicaStep,
    StepEnvironment,
    TracedStep,
    name_of,
)
from jaxstrategy._src.values import per_replica, trees
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables import access


@final
class AgreedProgram(Stage):
    """A program that several processes run together."""

    def __init__(
        self,
        step: ReplicaStep,
        checked: Stage,
        stages: Sequence[Stage],
        agreement: StepAgreement,
    ) -> None:
        self._step = step
        self._program = Program(step, [checked, self, *stages])
        self._agreement = agreement
        self._name = getattr(step.fn, "__qualname__", type(step.fn).__name__)
        place = code.place_of(step.fn)
        self._where = f"{place[0]}:{place[1]}" if place else "unknown line"
        self._is_new = True
        self._is_dispatched = False  # now, and not part of a larger program
        self._leaves: Sequence[Leaf] = ()  # what it is called with now
        self._preparation: AgreedPreparation | None = None  # now

    @property
    def layout(self) -> InputLayout:
        """The form in which the compiled function takes the arguments."""
        return self._program.layout

    def __call__(self, leaves: Sequence[Leaf], inputs: Sequence[PyTree]) -> PyTree:
        """The step's results for these leaves, which are live arrays, as `Program`."""
        return self._agreed(self._program, leaves, inputs)

    def place_and_call(self, leaves: Sequence[Leaf]) -> PyTree:
        """The same, for leaves of any kind and in any place."""
        return self._agreed(self._program.place_and_call, leaves)

    def prepare(self, leaves: Sequence[Leaf], obtain: Obtain) -> None:
        """Has it compiled for arguments of these types, and for no others."""
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
            # In a larger program it is part of what its caller dispatches.
            if access.is_traced():
                return call(leaves, *more)
            if agreement.begin(self._name, self._where):
                same = {} if self._is_new else self._step.same(leaves)
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
        # Another thread's call may have ended, which has cleared them.
        leaves = self._leaves
        same = self._step.same(leaves) if leaves else {}
        self._agreement.traced(step, self._where, same, self._is_dispatched)


@final
class FrozenSignatures:
    """Says whether a step may have further programs."""

    def __init__(self) -> None:
        self.is_closed = False
        self._signatures: list[Signature] = []

    def add(self, signature: Signature) -> None:
        """Takes note of arguments for which there is a program."""
        self._signatures.append(signature)

    def check_function(self, fn: Function) -> None:
        """Raises if the step refers to other things than when it was compiled."""
        if self.is_closed:
            raise CompiledStepError(
                f"`{name_of(fn)}` was compiled ahead of time, and what it captures has "
                "changed since: a variable of the function around it, or an attribute "
                "of its object. Compile it again, or pass what changes as an argument."
            )

    def check_arguments(self, fn: Function, signature: Signature) -> None:
        """Raises if a step has no program for these arguments, and is to have none."""
        if not self.is_closed:
            return
        known = self._signatures[-1]
        what = _structures(known, signature) or _roles_of(fn, known, signature)
        raise CompiledStepError(
            f"`{name_of(fn)}` was compiled ahead of time for other arguments: {what}. "
            "Call it with arguments like those it was compiled for, or compile it for "
            "these."
        )


def _structures(known: Signature, given: Signature) -> str | None:
    if known.treedef == given.treedef:
        return None
    if _paths(known.treedef) == _paths(given.treedef):
        return (
            "their structure holds other static data, such as functions or settings of "
            "a `TrainState`. A model or an optimizer that is made anew is another one: "
            "make it once, outside of the function that builds the state"
        )
    return f"their structure was {shown(known.treedef)}, and is {shown(given.treedef)}"


def _paths(structure: TreeStructure) -> list[str]:
    tree = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _roles_of(fn: Function, known: Signature, given: Signature) -> str:
    was, now = _described(known), _described(given)
    for leaf, (old, new) in enumerate(zip(was, now, strict=True)):
        if old != new:
            label = given.label(fn, given.leaves[leaf])
            return f"{label} was {old}, and is {new}"
    return (
        "something static in them, as an argument or an attribute of an object, has "
        "another value, or is equal to what it was and not the same"
    )


def _described(signature: Signature) -> list[str]:
    """For each leaf what it is, in words."""
    statics = dict(signature.with_statics())
    roles = [*signature.roles, Role.SAME]
    return [
        _words(roles[i], roles[i + 1] is Role.MASK, statics.get(i))
        for i in signature.leaves
    ]


def _words(role: Role, has_mask: bool, static: Leaf) -> str:
    if role is Role.STATIC:  # of a variable the `repr` reads its array
        is_handle = isinstance(static, Handle)
        return f"variable {static.name!r}" if is_handle else shown(static)
    if role is Role.SAME:
        return "an array or number, the same on all replicas"
    return f"a PerReplica {'with' if has_mask else 'without'} a mask of its rows"


_Program: TypeAlias = Program | AgreedProgram
_MOST_REFUSED = 3


@final
class SharedPrograms:
    """The programs of functions that do the same, with one choice of options."""

    def __init__(
        self,
        environment: StepEnvironment,
        agreement: StepAgreement | None,
        options: RunOptions | None,
        history: recompilation.History,
        calls: recompilation.Calls,
        holder: SharedPrograms | None = None,
        seal: FrozenSignatures | None = None,
    ) -> None:
        self._environment = environment
        self._agreement = agreement
        self._options = options if options is not None else RunOptions()
        self._history = history
        self._calls = calls
        self._holder = holder
        self._seal = seal
        self._functions: list[Callable[[], Function | None]] = []
        # The one that is called now; another thread may call another.
        self.get_caller: Callable[[], Function | None] = lambda: None
        # Of the one function that they are left to, as a trace has changed something.
        self.sole: object | None = None
        self.traces = 0
        self.has_succeeded = False
        # Kept, so that the programs are forgotten with one of these.
        self.referred_to: list[object] = []
        self._returned = Returned()
        self._watched: list[weakref.ref[per_replica.Handle]] = []
        # The programs, by signature; and where no argument is static by the structure
        # of the arguments too, which is found in half the time. The last one first.
        self._programs: dict[Hashable, _Program] = {}
        self._last: tuple[Any, _Program | None] = (None, None)
        # What the last call can be made of without looking at its arguments; no more
        # when JAX has refused a few calls, for each of which an exception is raised.
        self._direct: Program | None = None
        self._refused = 0
        # With objects, the functions are ones of arrays, which have programs of their
        # own for objects that are put together alike.
        self._object_calls = ObjectCalls(self._get_fn, self._for_arrays)

    def add(self, fn: Function) -> None:
        """Takes note of a function; it is not kept alive."""
        self._functions = [get for get in self._functions if get() is not None]
        self._functions.append(weakly(fn))

    @property
    def is_in_use(self) -> bool:
        """Whether one of the functions lives."""
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

    def __call__(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """The results of the function on all replicas."""
        self._calls.count += 1
        direct = self._direct
        if direct is not None and (executable := direct.executable).is_bare:
            try:
                return executable.call_bare(args, kwargs)
            except Exception as error:
                if not self._is_for_others(direct, error, args, kwargs):
                    raise
            return self._call_other(args, kwargs)
        structure, program = self._last
        if program is not None:
            # Flattening as the last call's arguments takes half the time of flattening
            # and comparing: 2 us instead of 5 for 20 leaves, 33 instead of 69 for 300.
            try:
                leaves = structure.flatten_up_to((args, kwargs))
            except (ValueError, RuntimeError):
                pass  # of a deleted array JAX's message fails, which shows all of them
            else:
                if are_live_arrays(leaves):
                    return self._call_live(program, leaves, args, kwargs)
        return self._call_other(args, kwargs)

    def _call_live(
        self,
        program: _Program,
        leaves: list[Leaf],
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        """A call whose leaves are live arrays."""
        inputs = leaves
        if program.layout.structure is not None:
            inputs = (*args, kwargs) if kwargs else args
        results = program(leaves, inputs)
        if self._refused < _MOST_REFUSED and isinstance(program, Program):
            self._direct = None if program.looks_first else program
        return results

    def _is_for_others(
        self,
        direct: Program,
        error: Exception,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
    ) -> bool:
        """Whether a call that JAX alone has refused is to be made in another way."""
        if isinstance(error, jax.errors.JaxRuntimeError):
            direct.check_once(jax.tree.leaves((args, kwargs)))
            return False  # the devices have begun
        if not isinstance(error, (NotTraced, Retraced)):
            trees.object_kinds()
            leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_whole)
            is_alike = structure == direct.layout.structure and are_live_arrays(leaves)
            if is_alike and direct.is_placed(leaves):
                return False
        self._refused += 1
        self._direct = None
        return True

    def _call_other(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """A call that is not like the last one, or not of live arrays alone."""
        # A variable is not to be read here, and an object not to be looked into.
        trees.object_kinds()
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_whole)
        program = self._programs.get(structure)
        if program is None or not are_live_arrays(leaves):
            return self._call_carefully(args, kwargs, structure)
        self._last = (structure, program)
        return self._call_live(program, leaves, args, kwargs)

    def call_with(
        self,
        captured: dict[str, Leaf],
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        """The results of a function that is given what it captured besides."""
        if not captured:
            results = self(args, kwargs)
        else:
            self._calls.count += 1
            call = self._object_calls.find(args, kwargs, captured)
            assert call is not None
            results = self._call_with_objects(call)
        self.has_succeeded = True
        return results

    def prepare(
        self,
        captured: dict[str, Leaf],
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
        obtain: Obtain,
    ) -> None:
        """Has the program of such a call compiled now; types may stand for arrays."""
        call = self._object_calls.find(args, kwargs, captured)
        if call is not None:
            programs = self._object_calls.programs(call)
            programs.prepare({}, call.args, call.kwargs, obtain)
        else:
            fn = self._fn
            leaves, signature = _roles.take_apart(fn, args, kwargs, abstract=True)
            program, _ = self._new_program(signature)
            program.prepare(leaves, obtain)
            self._programs[signature] = program
            if self._seal is not None:
                self._seal.add(signature)
        self.has_succeeded = True

    def _call_carefully(
        self,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
        structure: TreeStructure,
    ) -> PyTree:
        fn = self._fn
        call = self._object_calls.find(args, kwargs, {})
        if call is not None:
            return self._call_with_objects(call)
        leaves, signature = _roles.take_apart(fn, args, kwargs)
        program = self._programs.get(signature)
        if program is None:
            return self._call_new(fn, leaves, signature, structure)
        self._remember(program, signature, structure)
        return program.place_and_call(leaves)

    def _call_new(
        self,
        fn: Function,
        leaves: list[Leaf],
        signature: Signature,
        structure: TreeStructure,
    ) -> PyTree:
        """The first call for arguments of this structure."""
        if self._seal is not None:
            self._seal.check_arguments(fn, signature)
        self._returned.check(signature, leaves, fn)
        made, checked = self._new_program(signature)
        program = self._programs.setdefault(signature, made)  # or another thread's
        forget = weak_references.of(self, SharedPrograms._gone, signature)
        self._watched += (weakref.ref(v, forget) for v in signature.handles)
        self._remember(program, signature, structure)
        results = program.place_and_call(leaves)
        self._returned.add(signature, results, checked.unstated)
        return results

    def _remember(
        self, program: _Program, signature: Signature, structure: TreeStructure
    ) -> None:
        if not signature.kept:
            self._programs[structure] = program
            self._last = (structure, program)

    def _new_program(self, signature: Signature) -> tuple[_Program, Checked]:
        step = ReplicaStep(
            self._get_fn, self._environment, signature, lambda: not self.traces
        )
        checked = Checked(self._options.expect_mirrored, self._history.told)
        counted = Counted(functools.partial(self._note, signature))
        stages = [*stages_of(step, self._options), counted]
        if self._agreement is None:
            return Program(step, [checked, *stages]), checked
        return AgreedProgram(step, checked, stages, self._agreement), checked

    def _gone(
        self, signature: Signature, gone: weakref.ref[per_replica.Handle]
    ) -> None:
        """Drops the program for arguments one of which is gone, and its memory."""
        self._programs.pop(signature, None)
        self._watched.remove(gone)

    def _note(
        self, signature: Signature, fn: Function, avals: Sequence[ArrayType]
    ) -> None:
        self.traces += 1
        if self._holder is not None:
            self._holder.traces += 1
        self._history.record(fn, self._calls, signature, avals)

    # Calls with objects that the step changes in place.

    def _call_with_objects(self, call: ObjectCall) -> PyTree:
        programs = self._object_calls.programs(call)
        return call.finish(programs(call.args, call.kwargs))

    def _for_arrays(self, function: Function) -> SharedPrograms:
        """The programs of these functions as one of arrays."""
        options = options_of(self._options)
        programs = SharedPrograms(
            self._environment,
            self._agreement,
            options,
            self._history,
            self._calls,
            self,
            self._seal,
        )
        programs.add(function)
        return programs

    def bound(
        self, fn: Function, objects: Sequence[PyTree], captured: dict[str, Leaf]
    ) -> Callable[..., PyTree]:
        """A function with these first arguments, which are looked into only now."""
        call = self._object_calls.require(objects, captured)
        programs, kept = self._object_calls.programs(call), objects
        bound = BoundCall(call)

        @functools.wraps(fn)
        def step(*rest: PyTree, **kwargs: PyTree) -> PyTree:
            assert kept  # they must live as long as this is called
            return bound.objects.finish(programs(*bound.arguments(rest, kwargs)))

        return step


def _is_whole(node: object) -> bool:
    return isinstance(node, per_replica.Handle) or trees.is_object(node)
