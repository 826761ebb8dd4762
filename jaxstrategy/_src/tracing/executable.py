"""A step compiled for all replicas of a strategy: `Executable`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import jax
import numpy as np
from jax.core import Tracer, eval_context
from jax.sharding import NamedSharding
from jax.stages import Lowered, Wrapped

from jaxstrategy._src.tracing import results as _results
from jaxstrategy._src.tracing.roles import Role, Signature
from jaxstrategy._src.tracing.saved_step import OutdatedCall, PreparedCall
from jaxstrategy._src.tracing.stages.finite import Finite
from jaxstrategy._src.tracing.stages.placement import Placement
from jaxstrategy._src.tracing.stages.stage import Stage, overridden
from jaxstrategy._src.tracing.stages.variables import VariableArguments, VariableBuffers
from jaxstrategy._src.tracing.trace import Evaluate
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables import access


@final
class InputLayout:
    """The form in which one jitted function takes the arguments of its step."""

    def __init__(
        self, signature: Signature, donated: frozenset[int], is_flat: bool = False
    ) -> None:
        count = len(signature.dynamic)
        self.structure = None if is_flat else _structure_of(signature)
        # For each argument of the jitted function its leaves.
        self._places = [[index] for index in range(count)]
        self.has_keywords = False
        if self.structure is not None:
            args, kwargs = jax.tree.unflatten(self.structure, range(count))
            places = [jax.tree.leaves(each) for each in as_inputs(args, kwargs)]
            # JAX takes whole arguments as donated ones.
            if any(donated & {*own} not in (set(), {*own}) for own in places):
                self.structure = None
            else:
                self._places, self.has_keywords = places, bool(kwargs)
        self.donated = [i for i, own in enumerate(self._places) if donated & {*own}]
        inputs = self.inputs(range(count))
        self._expected = jax.tree.structure(tuple(inputs))
        roles = [role for role in signature.roles if role is not Role.STATIC]
        self.divided: list[tuple[int, TreeStructure, list[tuple[int, int]]]] = []
        for place, own in enumerate(self._places):
            divided = [
                (among_own, index)
                for among_own, index in enumerate(own)
                if roles[index] is Role.PER_REPLICA
            ]
            if divided:
                structure = jax.tree.structure(inputs[place])
                self.divided.append((place, structure, divided))

    @property
    def count(self) -> int:
        """The number of arguments of the jitted function."""
        return len(self._places)

    def inputs(self, leaves: Sequence[Leaf]) -> Sequence[PyTree]:
        """The arguments of the jitted function that have these leaves."""
        if self.structure is None:
            return tuple(leaves)
        return as_inputs(*jax.tree.unflatten(self.structure, leaves))

    def leaves(self, inputs: Sequence[PyTree]) -> list[Tracer] | None:
        """The leaves of what JAX gives the jitted function."""
        leaves, structure = jax.tree.flatten(tuple(inputs))
        return leaves if structure == self._expected else None

    def shardings(self, shardings: Sequence[NamedSharding]) -> Sequence[PyTree]:
        """The shardings for `jax.jit`."""
        owned = [[shardings[index] for index in own] for own in self._places]
        if all(len(set(own)) == 1 for own in owned):
            # A class of the user may refuse what is no array.
            return tuple(own[0] for own in owned)
        return self.inputs(shardings)


def as_inputs(args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Sequence[PyTree]:
    """The arguments of a jitted function that takes them as the user gave them."""
    return (*args, kwargs) if kwargs else args


def _structure_of(signature: Signature) -> TreeStructure | None:
    """The structure of the arguments; None if they cannot be passed as they are."""
    if signature.kept:
        return None
    following = iter(range(len(signature.roles)))
    nodes: list[Leaf] = []
    for role in signature.roles:
        if role is Role.MASK:
            nodes[-1] = dataclasses.replace(nodes[-1], _mask=next(following))
        else:
            place = next(following)
            is_own = role is Role.PER_REPLICA
            nodes.append(PerReplica(place) if is_own else place)
    try:
        tree = jax.tree.unflatten(signature.treedef, nodes)
        leaves, structure = jax.tree.flatten(tree)
        again = jax.tree.structure(jax.tree.unflatten(structure, leaves))
    except Exception:  # whatever a class of the user raises for what is no array
        return None
    is_same = leaves == list(range(len(signature.roles))) and again == structure
    return structure if is_same else None


# The results of a step, the outputs of stages, the variables' new values.
_Returned: TypeAlias = tuple[PyTree, list[jax.Array], list[jax.Array]]


class NotTraced(Exception):
    """JAX has no executable for the arguments of a call, and it cannot be made there.

    Of a call that has raised, JAX makes all later ones like it by a way that takes 60
    us longer (0.10 and 0.12). So this is for calls whose arguments lie elsewhere.
    """


class Retraced(Exception):
    """A trace has told that the jitted function is to be another one."""

    def __init__(self, step: TracedStep) -> None:
        self.step = step


@final
class Handover:
    """Hands the trace of a step to the jitted function that asks for it."""

    __slots__ = ("_own", "_trace", "has_plain", "inputs")

    def __init__(self, trace: Callable[[Sequence[Leaf]], TracedStep | None]) -> None:
        self._own = threading.local()
        self._trace = trace
        self.inputs: Sequence[PyTree] = ()
        self.has_plain = False

    @contextlib.contextmanager
    def of(self, trace: Callable[[], TracedStep]) -> Iterator[None]:
        """A `with` block in which this thread may trace the step with `trace`."""
        self._own.trace = trace
        try:
            yield
        finally:
            self._own.trace = None

    def take(self, inputs: Sequence[Tracer]) -> TracedStep:
        """The step, traced for inputs like these."""
        trace = getattr(self._own, "trace", None)
        # As if nothing were being traced; JAX is about to trace what asks for this.
        with eval_context():
            if trace is not None:
                return trace()
            leaves = jax.tree.leaves(self.inputs)
            # They may be those of another thread's call, which do as well if alike.
            step = self._trace(leaves) if _are_alike(leaves, inputs) else None
        if step is None:
            raise NotTraced
        return step


def _are_alike(leaves: Sequence[Leaf], inputs: Sequence[Tracer]) -> bool:
    pairs = list(zip(leaves, inputs, strict=False))
    return len(pairs) == len(leaves) and all(
        isinstance(a, jax.Array) and _type(a) == _type(b) for a, b in pairs
    )


def _type(array: jax.Array) -> tuple[tuple[int, ...], np.dtype, bool]:
    # Random keys have no weak types.
    return array.shape, array.dtype, getattr(array, "weak_type", False)


@final
class Executable:
    """A compiled step and what is done around its calls; threads may share it."""

    __slots__ = (
        "compiled",
        "is_bare",
        "is_plain",
        "_after",
        "_before",
        "_carried",
        "_checks",
        "_handover",
        "_has_variables",
        "_in_references",
        "_layout",
        "_outdated",
        "_right",
    )

    def __init__(
        self,
        compiled: Wrapped | PreparedCall | OutdatedCall,
        layout: InputLayout,
        handover: Handover,
        variables: VariableArguments,
        stages: Sequence[Stage],
        placement: Placement,
    ) -> None:
        self._layout = layout
        self._handover = handover
        active = [stage for stage in stages if stage.is_active]
        self.compiled = compiled
        self._carried = variables.carried
        self._has_variables = not self._carried.is_empty
        self._in_references = variables.in_references
        self._before = overridden(active, "before")
        self._checks = _of_outputs(active, "check")
        self._after = _of_outputs(active, "after")
        self._outdated = overridden(active, "is_outdated")
        self.is_plain = not (variables.are_used or self._outdated)
        around = (self._before, self._checks, self._after, self._has_variables)
        self._right = placement.right
        is_asked = placement.is_open or any(around) or layout.structure is None
        self.is_bare = self.is_plain and not is_asked

    def __call__(self, leaves: Sequence[Leaf], inputs: Sequence[PyTree]) -> PyTree:
        """The step's results for leaves that lie where they belong."""
        for before in self._before:
            before(leaves)
        before_call = self._in_references() if self._checks else ()
        values = self._carried.values() if self._has_variables else ()
        self._handover.inputs = inputs
        try:
            results, outputs, kept = self.compiled(*inputs, *values)
        finally:
            self._handover.inputs = ()
        if self._checks:
            self._check(outputs, before_call)
        if kept:
            self._carried.store(kept)
        for place, after in self._after:
            after(outputs[place])
        has_plain = self._handover.has_plain
        return _results.unwrap_plain(results) if has_plain else results

    def call_bare(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """The step's results where JAX alone looks at the arguments."""
        # To JAX keyword arguments are one more argument, a dict as others may be.
        if bool(kwargs) is not self._layout.has_keywords:
            raise NotTraced
        inputs = (*args, kwargs) if kwargs else args
        for place, structure, own in self._layout.divided:
            # JAX would move those of another strategy.
            leaves = structure.flatten_up_to(inputs[place])
            for among_own, index in own:
                sharding, right = leaves[among_own].sharding, self._right[index]
                if sharding is not right and sharding != right:
                    raise NotTraced
        handover = self._handover
        handover.inputs = inputs
        try:
            results, _, _ = self.compiled(*inputs)
        finally:
            handover.inputs = ()
        return _results.unwrap_plain(results) if handover.has_plain else results

    def _check(
        self, outputs: Sequence[jax.Array], before: Sequence[tuple[jax.Ref, jax.Array]]
    ) -> None:
        try:
            for place, check in self._checks:
                check(outputs[place])
        except Exception:
            # The call has changed references in place; the other variables are stored
            # after the check only.
            for reference, value in before:
                reference[...] = value
            raise

    def is_outdated(self) -> bool:
        """Whether a stage says that what was compiled is of no use any more."""
        # All are asked: each takes note of what has changed.
        return any([is_outdated() for is_outdated in self._outdated])

    def lower(self, types: Sequence[jax.ShapeDtypeStruct]) -> Lowered:
        """JAX's lowered form for arguments of these types."""
        inputs = self._layout.inputs(types)
        assert isinstance(self.compiled, Wrapped), "it is compiled already"
        return self.compiled.lower(*inputs, *self._carried.values())


def _of_outputs(
    active: Sequence[Stage], method: str
) -> list[tuple[int, Callable[[jax.Array], None]]]:
    """The method of each stage that overrides it, with the place of its output."""
    adding = [stage for stage in active if type(stage).within is not Stage.within]
    return [
        (place, found)
        for place, stage in enumerate(adding)
        for found in overridden([stage], method)
    ]


def jitted(
    name: str,
    layout: InputLayout,
    handover: Handover,
    carried: VariableBuffers,
    stages: Sequence[Stage],
    **options: Any,
) -> Wrapped:
    """The jitted function that an `Executable` calls."""

    def program(*given: PyTree) -> _Returned:
        leaves = layout.leaves(given[: layout.count])
        if leaves is None:
            raise NotTraced
        inputs = [*leaves, *given[layout.count :]]
        step = handover.take(inputs)
        if not access.is_traced() and _looks_for_nans():
            return _debugged(step, inputs, carried, stages)
        return _evaluated(step, inputs, carried, stages)

    program.__name__ = program.__qualname__ = name
    return jax.jit(program, **options)


def _evaluated(
    step: TracedStep,
    inputs: Sequence[Tracer],
    carried: VariableBuffers,
    stages: Sequence[Stage],
) -> _Returned:
    """The results of a step that was traced, the stages' outputs, and the variables."""
    count = len(step.signature.dynamic)
    leaves, values = inputs[:count], inputs[count:]
    references = carried.references(values)
    active = [stage for stage in stages if stage.is_active]

    def within(evaluate: Evaluate) -> Evaluate:
        # From the last stage outwards, so that their outputs stand in their order.
        for add in reversed(overridden(active, "within")):
            evaluate = add(step, evaluate)
        return evaluate

    is_whole = any(stage.evaluates_all for stage in active)
    arrays, outputs = step.evaluate(leaves, references, within, is_whole)
    return step.results.rebuild(arrays), outputs, carried.kept(references)


def _looks_for_nans() -> bool:
    return bool(jax.config.jax_debug_nans or jax.config.jax_debug_infs)


def _debugged(
    step: TracedStep,
    inputs: Sequence[Tracer],
    carried: VariableBuffers,
    stages: Sequence[Stage],
) -> _Returned:
    """The results for what has led to a NaN, which `jax_debug_nans` looks for."""
    finite = Finite(step.replica_step, bool(jax.config.jax_debug_infs))
    others = [stage for stage in stages if not isinstance(stage, Finite)]
    with jax.debug_nans(False), jax.debug_infs(False):
        evaluated = functools.partial(_evaluated, step)
        compiled: Function = jax.jit(
            lambda *inputs: evaluated(inputs, carried, [*others, finite])
        )
        returned = compiled(*inputs)
        finite.check(returned[1][-1])
    return returned
