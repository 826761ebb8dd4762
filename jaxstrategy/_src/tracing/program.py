"""A step compiled for one structure of arguments: `Program`."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
from jax.stages import Lowered, Wrapped

from jaxstrategy._src.errors import CompiledStepError
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.tracing.executable import (
    Executable,
    InputLayout,
    NotTraced,
    Retraced,
    TraceProvider,
    jitted,
)
from jaxstrategy._src.tracing.functions.weak_references import weak_method
from jaxstrategy._src.tracing.jaxprs.visit import Jaxpr
from jaxstrategy._src.tracing.partition.layout import output_shardings
from jaxstrategy._src.tracing.partition.partitioned_step import PartitionedStep
from jaxstrategy._src.tracing.roles import must_check_first
from jaxstrategy._src.tracing.saved_step import (
    Obtain,
    OutdatedCall,
    Preparation,
    PreparedCall,
    traced_caller,
)
from jaxstrategy._src.tracing.stages.placement import Placement
from jaxstrategy._src.tracing.stages.stages import Stages
from jaxstrategy._src.tracing.stages.variables import VariableArguments
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.variables import access

# Of a sum, 500 arrays take 2.5 s of processor time to compile, 2,000 take 17 s.
_MANY = 2000

_announced: set[tuple[str, int]] = set()


def _announce_slow_compilation(name: str, jaxpr: Jaxpr) -> None:
    """Prints, once for a step, why it takes long to compile."""
    if max(len(jaxpr.invars), len(jaxpr.outvars)) < _MANY:  # the usual case
        return
    # A trace has all live variables as inputs: those count that it uses.
    atoms = [atom for eqn in jaxpr.eqns for atom in eqn.invars]
    used = {id(atom) for atom in (*atoms, *jaxpr.outvars)}
    num_inputs = sum(id(var) in used for var in jaxpr.invars)
    count = max(num_inputs, len(jaxpr.outvars))
    if count < _MANY or (name, count) in _announced:
        return
    _announced.add((name, count))
    print(
        f"jaxstrategy: `{name}` takes or returns {count:,} arrays and is being "
        "compiled. XLA needs longer than in proportion to their number: about 20 s of "
        "processor time for 2,000, several minutes for 10,000. Stack arrays of equal "
        "layers, or join small ones (`jax.flatten_util.ravel_pytree`).",
        file=sys.stderr,
        flush=True,
    )


@final
class Program:
    """A step for one structure of arguments; shapes and dtypes are open."""

    def __init__(
        self,
        step: ReplicaStep,
        options: RunOptions,
        on_trace: Callable[[TracedStep], object],
    ) -> None:
        self._step = step
        self._on_trace = on_trace
        self._stages = Stages(step, options)
        self._donated = self._stages.donated
        self.placement = Placement(step, self._donated)
        self._variables = VariableArguments(step, weak_method(self, Program._compile))
        # Held while tracing: a trace decides which variables are arguments.
        self._tracing_lock = threading.RLock()
        self._traces = TraceProvider(weak_method(self, Program._trace_in_call))
        self.layout = InputLayout(step.signature, self._donated)
        # Part of another program, whose compiler options count.
        self._is_inside = False
        # The last call had to move an array: the next one probably must, too.
        self._must_place = False
        # Compiled ahead of time; never compiled again.
        self._is_prepared = False
        self.must_check_first = must_check_first(len(step.replicas.all_devices))
        self._name = step.name
        self._compile()

    def __call__(self, leaves: Sequence[Leaf], inputs: Sequence[PyTree]) -> PyTree:
        """The step's results."""
        if self._must_place or not self.placement.is_as_before(leaves):
            return self.place_and_call(leaves)
        try:
            executable = self.executable
            if executable.is_plain:  # the usual case, kept short
                return executable(leaves, inputs)
            return self._dispatch(leaves, inputs)
        except (NotTraced, Retraced):
            pass  # out of the block: not to be the context of later errors
        except jax.errors.JaxRuntimeError:
            self.placement.check_once(
                leaves
            )  # JAX 0.10 raises it for an array donated twice
            raise
        except ValueError:
            # JAX raises it for an array with another sharding, which is to be moved, or
            # refused with our advice.
            if self.is_placed(leaves) and not self._is_newly_inside():
                raise
        return self.place_and_call(leaves)

    def is_placed(self, leaves: Sequence[Leaf]) -> bool:
        """Whether live arrays have the shardings that the program needs."""
        return not _differ(self.placement.placed(leaves), leaves)

    def place_and_call(self, leaves: Sequence[Leaf]) -> PyTree:
        """The step's results for leaves of any kind, with any sharding."""
        placed = self.placement.placed(leaves)
        moved = _differ(placed, leaves)
        try:
            return self._call_placed(placed)
        finally:
            self._must_place = moved or self._variables.by_reference

    def lower(self, leaves: Sequence[Leaf]) -> Lowered:
        """The program, lowered; `leaves` may be types of arrays."""
        with self._traced_for(leaves) as (_, placed):
            return self.executable.lower(placed)

    def prepare(self, leaves: Sequence[Leaf], obtain: Obtain) -> None:
        """Compiles ahead of time for arguments of these types, and for no others."""
        # Flat: a file cannot hold the user's trees.
        self.layout = InputLayout(self._step.signature, self._donated, is_flat=True)
        self._compile()
        with self._traced_for(leaves) as (step, placed):
            executable = self.executable
            buffers = self._variables.buffers
            names = {variable.cell: variable.name for variable in step.trace.used}
            preparation = Preparation(
                step,
                inputs=[*placed, *buffers.values()],
                variables=[names[cell] for cell in buffers.cells],
                stages=self._stages.description,
                must_be_lowered=self._stages.finite is not None,
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
        # With the weak types of Python's numbers, as a call passes them.
        types = mesh.types_of(leaves)
        self.placement.check_types(types)
        with self._tracing_lock:
            step = self._trace([*leaves])
            self._adapt(step, access.is_traced(), types)
            placed = [
                jax.ShapeDtypeStruct(
                    of_type.shape,
                    of_type.dtype,
                    sharding=self.placement.sharding(index, leaf),
                    weak_type=of_type.weak_type,
                )
                for index, (leaf, of_type) in enumerate(zip(leaves, types, strict=True))
            ]
            with self._traces.using(lambda: step):
                yield step, placed

    def _trace_in_call(self, leaves: Sequence[Leaf]) -> TracedStep | None:
        """Traces for a call without placement; None if leaves must be placed first."""
        if not self.is_placed(leaves):
            return None
        if not self._tracing_lock.acquire(blocking=False):
            return None
        try:
            step = self._trace(leaves)
            if step.trace.used and not self._variables.are_used:
                return None
            return self._adapted(step, self._variables.caller_is_traced, leaves)
        finally:
            self._tracing_lock.release()

    def _adapted(
        self, step: TracedStep, is_traced: bool, leaves: Sequence[Leaf]
    ) -> TracedStep:
        """`step` for the call in progress; raises if `jax.jit` must be called again."""
        # After a trace something else may be found about the same call.
        self._stages.masks.check(leaves)
        if self._adapt(step, is_traced, leaves):
            raise Retraced(step)
        return step

    def _call_placed(self, leaves: Sequence[Leaf]) -> PyTree:
        is_traced = access.is_traced()  # in the jitted function it is always True
        if self._is_newly_inside():
            self._is_inside = True
            self._compile()

        def trace() -> TracedStep:
            return self._adapted(self._trace(leaves), is_traced, leaves)

        with self._tracing_lock:
            try:
                with self._traces.using(trace):
                    return self._dispatch(leaves, self.layout.inputs(leaves))
            except Retraced as retraced:
                step = retraced.step
            leaves = self.placement.placed(leaves)
            with self._traces.using(lambda: step):
                return self._dispatch(leaves, self.layout.inputs(leaves))

    def _dispatch(self, leaves: Sequence[Leaf], inputs: Sequence[PyTree]) -> PyTree:
        """The results for placed leaves."""
        if not self._variables.are_used:
            return self._valid_executable()(leaves, inputs)
        self._variables.check_outside()
        # A call donates the variables' buffers and stores new ones; two threads at once
        # would end the process (JAX 0.10 and 0.12).
        with access.one_at_a_time:
            return self._valid_executable()(leaves, inputs)

    def _valid_executable(self) -> Executable:
        if self._is_prepared and access.is_traced():
            raise CompiledStepError(traced_caller(self._name))
        # Both are called: each remembers what has changed.
        if self.executable.is_outdated() | self._variables.drop_references():
            self._compile()
        return self.executable

    def _trace(self, leaves: Sequence[Leaf]) -> TracedStep:
        """Traces the step for arguments of these types, and checks the trace."""
        trace = self._step.trace(leaves, self._stages.masks.tracing)
        step = TracedStep(self._step, trace, self._donated)
        _announce_slow_compilation(step.name, step.jaxpr)
        self.placement.check_captured(step)
        self._on_trace(step)
        self._stages.objects.traced(step)
        if trace.is_partitioned:
            step.partitioned = PartitionedStep(step, leaves)
        elif trace.replicas.inner_axes:
            step.output_shardings = output_shardings(step, leaves)
        return step

    def _adapt(self, step: TracedStep, is_traced: bool, leaves: Sequence[Leaf]) -> bool:
        """Adapts to a new trace; returns whether there is another jitted function."""
        self._traces.has_non_arrays |= step.results.has_non_arrays
        has_changed = self._variables.traced(step, is_traced)
        has_changed |= self.placement.traced(step, leaves)
        if has_changed:
            self._compile()
        else:
            self._use(self.executable.compiled)
        return has_changed

    @property
    def _compiler_options(self) -> dict[str, str]:
        overlap = None if self._is_inside else self._step.overlap
        return {} if overlap is None else {**overlap.compiler_options}

    def _is_newly_inside(self) -> bool:
        """Whether it has compiler options, and is called inside another program."""
        has_options = bool(self._compiler_options) and not self._is_prepared
        return has_options and access.is_traced()

    def _compile(self) -> None:
        """Replaces the jitted function, which compiles at its next call."""
        if self._is_prepared:
            self._use(OutdatedCall(self._name))
            return
        buffers = self._variables.buffers
        layout = self.layout
        donated = [*layout.donated]
        donated += range(layout.count, layout.count + len(buffers.local_cells))
        # A call that raises after it ran leaves arguments and variables unchanged.
        if self._stages.finite is not None:
            donated = []
        # JAX has no rule for references inside a jitted function with shardings inside
        # another jitted function (0.10 and 0.12). So each call checks its arguments; so
        # it does where they may have several shardings.
        options: dict[str, Any] = {}
        if not (self._variables.by_reference or self.placement.is_open):
            arguments = layout.shardings(self.placement.shardings)
            options["in_shardings"] = (*arguments, *buffers.shardings)
        if compiler_options := self._compiler_options:
            options["compiler_options"] = compiler_options
        compiled = jitted(
            self._step.name,
            layout,
            self._traces,
            buffers,
            self._stages,
            donate_argnums=donated,
            **options,
        )
        self._use(compiled)

    def _use(self, compiled: Wrapped | PreparedCall | OutdatedCall) -> None:
        """Lets later calls use this."""
        self.executable = Executable(
            compiled,
            self.layout,
            self._traces,
            self._variables,
            self._stages,
            self.placement,
        )


def _differ(new: Sequence[Leaf], old: Sequence[Leaf]) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))
