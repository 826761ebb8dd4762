"""One step compiled for all replicas of a strategy: `Program`."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, final

import jax
from jax.stages import Lowered, Wrapped

from jaxstrategy._src.errors import CompiledStepError
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.tracing.executable import (
    Executable,
    Handover,
    InputLayout,
    NotTraced,
    Retraced,
    jitted,
)
from jaxstrategy._src.tracing.functions import weak_references
from jaxstrategy._src.tracing.jaxprs.visit import ClosedJaxpr
from jaxstrategy._src.tracing.partition.divided_step import DividedStep
from jaxstrategy._src.tracing.partition.layout import kept_placements
from jaxstrategy._src.tracing.roles import must_look_first
from jaxstrategy._src.tracing.saved_step import (
    Obtain,
    OutdatedCall,
    Preparation,
    PreparedCall,
    traced_caller,
)
from jaxstrategy._src.tracing.stages.placement import Placement
from jaxstrategy._src.tracing.stages.stage import Stage, overridden
from jaxstrategy._src.tracing.stages.variables import VariableArguments
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.variables import access

# Of a sum, 500 arrays take 2.5 s of processor time to compile, 2,000 take 17 s.
_MANY = 2000

_told: set[tuple[str, int]] = set()


def tell(name: str, jaxpr: ClosedJaxpr) -> None:
    """Say once of a step why nothing will be seen of it for a while."""
    if max(len(jaxpr.invars), len(jaxpr.outvars)) < _MANY:  # the usual case
        return
    count = max(_used(jaxpr), len(jaxpr.outvars))
    if count < _MANY or (name, count) in _told:
        return
    _told.add((name, count))
    print(
        f"jaxstrategy: `{name}` takes or returns {count:,} arrays and is being "
        "compiled. XLA needs longer than in proportion to their number: about 20 s of "
        "processor time for 2,000, several minutes for 10,000. Stack arrays of equal "
        "layers, or join small ones (`jax.flatten_util.ravel_pytree`).",
        file=sys.stderr,
        flush=True,
    )


def _used(jaxpr: ClosedJaxpr) -> int:
    """How many inputs a step uses: a trace has all variables that live, too."""
    atoms = [atom for eqn in jaxpr.eqns for atom in eqn.invars]
    used = {id(atom) for atom in (*atoms, *jaxpr.outvars)}
    return sum(id(var) in used for var in jaxpr.invars)


@final
class Program:
    """A step for one structure of arguments; shapes and dtypes are open."""

    def __init__(self, step: ReplicaStep, stages: Sequence[Stage]) -> None:
        self._step = step
        self._stages = stages
        self._donated = frozenset[int]().union(*(stage.donated for stage in stages))
        self._placement = Placement(step, self._donated)
        forget = weak_references.of(self, Program._compile)
        self._variables = VariableArguments(step, forget)
        # One thread traces, so that one trace tells which variables there are.
        self._one_tracer = threading.RLock()
        self._handover = Handover(weak_references.asked(self, Program._trace_in_call))
        self.layout = InputLayout(step.signature, self._donated)
        # Whether it is part of another program, which has options of its own.
        self._is_inside = False
        # Whether the last call had to move an array: then the next one probably must.
        self._must_place = False
        # Whether it was compiled before it was called, and is not to be compiled again.
        self._is_prepared = False
        self.looks_first = must_look_first(len(step.replicas.all_devices))
        self._name = step.name
        self._compile()

    def __call__(self, leaves: Sequence[Leaf], inputs: Sequence[PyTree]) -> PyTree:
        """The step's results."""
        if self._must_place or not self._placement.is_right(leaves):
            return self.place_and_call(leaves)
        try:
            executable = self.executable
            if executable.is_plain:  # the usual case, kept short
                return executable(leaves, inputs)
            return self._dispatch(leaves, inputs)
        except (NotTraced, Retraced):
            pass  # and out of the block, or this were the context of later errors
        except jax.errors.JaxRuntimeError:
            self.check_once(leaves)  # of which JAX 0.10 tells so
            raise
        except ValueError:
            # It may be JAX's, about an array that is split in another way. Such an
            # array is moved, or refused with our advice.
            if self.is_placed(leaves) and not self._is_newly_inside():
                raise
        return self.place_and_call(leaves)

    def is_placed(self, leaves: Sequence[Leaf]) -> bool:
        """Whether live arrays lie where the program needs them."""
        return not _differ(self._placement.placed(leaves), leaves)

    def check_once(self, leaves: Sequence[Leaf]) -> None:
        """Raises if a donated array is passed twice."""
        self._placement.check_once(leaves)

    def place_and_call(self, leaves: Sequence[Leaf]) -> PyTree:
        """The same, for leaves of any kind and in any place."""
        placed = self._placement.placed(leaves)
        moved = _differ(placed, leaves)
        try:
            return self._call_placed(placed)
        finally:
            self._must_place = moved or self._variables.by_reference

    def lower(self, leaves: Sequence[Leaf]) -> Lowered:
        """JAX's lowered form of the program; `leaves` may be types of arrays."""
        with self._traced_for(leaves) as (_, placed):
            return self.executable.lower(placed)

    def prepare(self, leaves: Sequence[Leaf], obtain: Obtain) -> None:
        """Has the program compiled for arguments of these types, and for no others."""
        # A file has no trees of the user's.
        self.layout = InputLayout(self._step.signature, self._donated, is_flat=True)
        self._compile()
        with self._traced_for(leaves) as (step, placed):
            executable = self.executable
            carried = self._variables.carried
            names = {variable.cell: variable.name for variable in step.trace.used}
            preparation = Preparation(
                step,
                inputs=[*placed, *carried.values()],
                variables=[names[cell] for cell in carried.cells],
                stages=[stage.kind for stage in self._active],
                must_be_lowered=any(stage.learns_within for stage in self._active),
                compiler_options=self._compiler_options,
                lower=functools.partial(executable.lower, placed),
            )
            prepared = PreparedCall(obtain(preparation), preparation)
            self._is_prepared = True
            self._use(prepared)

    @contextlib.contextmanager
    def _traced_for(
        self, leaves: Sequence[Leaf]
    ) -> Iterator[tuple[TracedStep, list[jax.ShapeDtypeStruct]]]:
        """A `with` block in which the program is traced for these types."""
        # With the weak types of Python's numbers, as a call passes them: without them,
        # this would be another program than the call's.
        types = mesh.types_of(leaves)
        self._placement.check_types(types)
        with self._one_tracer:
            step = self._trace([*leaves])
            self._fit(step, access.is_traced(), types)
            placed = [
                jax.ShapeDtypeStruct(
                    of_type.shape,
                    of_type.dtype,
                    sharding=self._placement.wanted(index, leaf),
                    weak_type=of_type.weak_type,
                )
                for index, (leaf, of_type) in enumerate(zip(leaves, types, strict=True))
            ]
            with self._handover.of(lambda: step):
                yield step, placed

    def _trace_in_call(self, leaves: Sequence[Leaf]) -> TracedStep | None:
        """A trace for a call dispatched as it is; None if it must be placed."""
        if _differ(self._placement.placed(leaves), leaves):
            return None
        if not self._one_tracer.acquire(blocking=False):
            return None
        try:
            step = self._trace(leaves)
            if step.trace.used and not self._variables.are_used:
                return None
            self._check_again(leaves)
            if self._fit(step, self._variables.caller_is_traced, leaves):
                raise Retraced(step)
            return step
        finally:
            self._one_tracer.release()

    def _check_again(self, leaves: Sequence[Leaf]) -> None:
        """Lets stages look at a call again, of which they may know better now."""
        for before in overridden(self._active, "before"):
            before(leaves)

    def _call_placed(self, leaves: Sequence[Leaf]) -> PyTree:
        is_traced = access.is_traced()  # in the jitted function it always is
        if self._is_newly_inside():
            self._is_inside = True
            self._compile()

        def trace() -> TracedStep:
            step = self._trace(leaves)
            self._check_again(leaves)
            if self._fit(step, is_traced, leaves):
                raise Retraced(step)
            return step

        with self._one_tracer:
            try:
                with self._handover.of(trace):
                    return self._dispatch(leaves, self.layout.inputs(leaves))
            except Retraced as found:
                step = found.step
            leaves = self._placement.placed(leaves)
            with self._handover.of(lambda: step):
                return self._dispatch(leaves, self.layout.inputs(leaves))

    def _dispatch(self, leaves: Sequence[Leaf], inputs: Sequence[PyTree]) -> PyTree:
        """The results for leaves that lie where they belong."""
        if not self._variables.are_used:
            return self._valid_executable()(leaves, inputs)
        self._variables.check_outside()
        # Calling a program gives it the memory of the variables and takes other memory
        # back; two threads at once would end the process (JAX 0.10 and 0.12).
        with access.one_at_a_time:
            return self._valid_executable()(leaves, inputs)

    def _valid_executable(self) -> Executable:
        if self._is_prepared and access.is_traced():
            raise CompiledStepError(traced_caller(self._name))
        # Both are asked: each takes note of what has changed.
        if self.executable.is_outdated() | self._variables.settle():
            self._compile()
        return self.executable

    def _trace(self, leaves: Sequence[Leaf]) -> TracedStep:
        """Traces the step for arguments like these, and lets all stages know."""
        trace = self._step.trace(leaves, overridden(self._stages, "tracing"))
        step = TracedStep(self._step, trace, self._donated)
        tell(step.name, step.jaxpr)
        self._placement.check_captured(step)
        for stage in self._stages:
            stage.traced(step)
        if trace.is_divided:
            step.division = DividedStep(step, leaves)
        elif trace.replicas.inner_axes:
            step.placements = kept_placements(step, leaves)
        return step

    def _fit(self, step: TracedStep, is_traced: bool, leaves: Sequence[Leaf]) -> bool:
        """Makes calls do what `step` needs; returns whether JAX is to compile anew."""
        self._handover.has_plain |= step.results.has_plain
        is_other = self._variables.traced(step, is_traced)
        is_other |= self._placement.traced(step, leaves)
        if is_other:
            self._compile()
        else:
            self._use(self.executable.compiled)
        return is_other

    @property
    def _compiler_options(self) -> dict[str, str]:
        """What the compiler is asked for."""
        overlap = self._step.overlap
        return (
            {} if overlap is None or self._is_inside else {**overlap.compiler_options}
        )

    def _is_newly_inside(self) -> bool:
        """Whether it has compiler options, and is called inside another program."""
        is_asked = bool(self._compiler_options) and not self._is_prepared
        return is_asked and access.is_traced()

    @property
    def _active(self) -> list[Stage]:
        return [stage for stage in self._stages if stage.is_active]

    def _compile(self) -> None:
        """Forgets what was compiled; JAX compiles anew when it is called."""
        if self._is_prepared:  # for what is not there any more
            self._use(OutdatedCall(self._name))
            return
        carried = self._variables.carried
        layout = self.layout
        rebound = range(layout.count, layout.count + len(carried.lent))
        # A call that is refused afterwards leaves arguments and variables as they were.
        is_refused_late = bool(overridden(self._stages, "check"))
        taken = () if is_refused_late else (*layout.donated, *rebound)
        # JAX has no rule for references inside a jitted function with shardings inside
        # another jitted function (0.10 and 0.12). So each call checks its arguments; so
        # it does where they may lie in several ways.
        is_open = self._variables.by_reference or self._placement.is_open
        options: dict[str, Any] = {}
        if not is_open:
            arguments = layout.shardings(self._placement.shardings)
            options["in_shardings"] = (*arguments, *carried.shardings)
        if asked := self._compiler_options:
            options["compiler_options"] = asked
        compiled = jitted(
            self._step.name,
            layout,
            self._handover,
            carried,
            self._stages,
            donate_argnums=taken,
            **options,
        )
        self._use(compiled)

    def _use(self, compiled: Wrapped | PreparedCall | OutdatedCall) -> None:
        """Lets later calls be of this, and of the stages that are active now."""
        self.executable = Executable(
            compiled,
            self.layout,
            self._handover,
            self._variables,
            self._stages,
            self._placement,
        )


def _differ(new: Sequence[Leaf], old: Sequence[Leaf]) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))
