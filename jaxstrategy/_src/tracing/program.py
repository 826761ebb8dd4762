"""A step compiled for one structure of arguments: `Program`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_context
from jax.sharding import NamedSharding
from jax.stages import Wrapped

from jaxstrategy._src.errors import CompiledStepError
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.tracing import signature as _signature
from jaxstrategy._src.tracing.constants import constants
from jaxstrategy._src.tracing.finite import Finite
from jaxstrategy._src.tracing.jaxprs import Jaxpr
from jaxstrategy._src.tracing.partition.layout import output_shardings
from jaxstrategy._src.tracing.partition.partitioned_step import PartitionedStep
from jaxstrategy._src.tracing.references import are_identical, weak_method
from jaxstrategy._src.tracing.saved_step import (
    Obtain,
    Preparation,
    PreparedCall,
    outdated,
    traced_caller,
)
from jaxstrategy._src.tracing.signature import Role, Signature, must_check_first
from jaxstrategy._src.tracing.step_arguments import (
    ConstantObjects,
    MaskArguments,
    Placement,
    VariableArguments,
    VariableBuffers,
    count_dispatch,
    must_count,
)
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values.arrays import Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables import access


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
        self._donated = frozenset(step.signature.donated(options.donated))
        self._masks = MaskArguments(step)
        self._objects = ConstantObjects(step)
        self._is_counted = must_count(step.replicas.all_devices)
        self._finite: Finite | None = None
        if options.check_finite:
            self._finite = Finite(step, with_infinities=options.check_finite != "nan")
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
                return self._call(executable, leaves, inputs)
            return self._dispatch(leaves, inputs)
        except (NotTraced, Retraced):
            pass  # out of the block: not to be the context of later errors
        except jax.errors.JaxRuntimeError:
            # JAX 0.10 raises it for an array donated twice.
            self.placement.check_once(leaves)
            raise
        except ValueError:
            # JAX raises it for an array with another sharding, which is to be moved, or
            # refused with our advice.
            if self.is_placed(leaves) and not self._is_newly_inside():
                raise
        return self.place_and_call(leaves)

    def call_bare(
        self,
        executable: Executable,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        """The step's results, without a look at leaves other than `PerReplica`s."""
        layout, traces = self.layout, self._traces
        # To JAX keyword arguments are one more argument, a dict as others may be.
        if bool(kwargs) is not layout.has_keywords:
            raise NotTraced
        inputs = (*args, kwargs) if kwargs else args
        for number, structure, pairs in layout.per_replica:
            # JAX would move those of another strategy.
            leaves = structure.flatten_up_to(inputs[number])
            shardings = self.placement.last_shardings
            for position, index in pairs:
                sharding, expected = leaves[position].sharding, shardings[index]
                if sharding is not expected and sharding != expected:
                    raise NotTraced
        traces.inputs = inputs
        try:
            results, _, _ = executable.compiled(*inputs)
        finally:
            traces.inputs = ()
        return (
            _signature.unwrap_non_arrays(results) if traces.has_non_arrays else results
        )

    def _call(
        self, executable: Executable, leaves: Sequence[Leaf], inputs: Sequence[PyTree]
    ) -> PyTree:
        """The step's results for leaves that are placed."""
        finite, traces, buffers = self._finite, self._traces, executable.buffers
        if self.placement.must_check_first:
            self.placement.check_once(leaves)
        if executable.masks is not None:
            executable.masks.check(leaves)
        before_call = () if finite is None else self._variables.in_references()
        values = () if buffers.is_empty else buffers.values()
        traces.inputs = inputs
        try:
            results, outputs, new_values = executable.compiled(*inputs, *values)
        finally:
            traces.inputs = ()
        if finite is not None:
            try:
                finite.check(outputs[-1])
            except Exception:
                # References were changed in place; other variables are unchanged.
                for reference, value in before_call:
                    reference[...] = value
                raise
        if new_values:
            buffers.store(new_values)
        if self._is_counted:
            count_dispatch(outputs[0])
        return (
            _signature.unwrap_non_arrays(results) if traces.has_non_arrays else results
        )

    def is_placed(self, leaves: Sequence[Leaf]) -> bool:
        """Whether live arrays have the shardings that the program needs."""
        return are_identical(self.placement.placed(leaves), leaves)

    def place_and_call(self, leaves: Sequence[Leaf]) -> PyTree:
        """The step's results for leaves of any kind, with any sharding."""
        placed = self.placement.placed(leaves)
        try:
            return self._call_placed(placed)
        finally:
            is_moved = not are_identical(placed, leaves)
            self._must_place = is_moved or self._variables.by_reference

    def prepare(self, leaves: Sequence[Leaf], obtain: Obtain) -> None:
        """Compiles ahead of time for arguments of these types, and for no others."""
        # Flat: a file cannot hold the user's trees.
        layout = InputLayout(self._step.signature, self._donated, is_flat=True)
        self.layout = layout
        self._compile()
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
            compiled, buffers = self.executable[:2]
            assert isinstance(compiled, Wrapped), "it is compiled once"
            names = {variable.cell: variable.name for variable in step.used}
            inputs = [*layout.inputs(placed), *buffers.values()]
            stages = ["Counted"] * self._is_counted
            if self._finite is not None:
                stages.append(self._finite.kind)
            preparation = Preparation(
                step,
                inputs=inputs,
                variables=[names[cell] for cell in buffers.cells],
                stages=", ".join(stages),
                must_be_lowered=self._finite is not None,
                compiler_options=self._compiler_options,
                lower=lambda: compiled.lower(*inputs),
            )
            with self._traces.using(lambda: step):
                prepared = PreparedCall(obtain(preparation), preparation)
            self._is_prepared = True
            self._set_compiled(prepared)

    def _trace_in_call(self, leaves: Sequence[Leaf]) -> TracedStep | None:
        """Traces for a call without placement; None if leaves must be placed first."""
        if not self.is_placed(leaves):
            return None
        if not self._tracing_lock.acquire(blocking=False):
            return None
        try:
            step = self._trace(leaves)
            if step.used and not self._variables.are_used:
                return None
            return self._adapted(step, self._variables.caller_is_traced, leaves)
        finally:
            self._tracing_lock.release()

    def _adapted(
        self, step: TracedStep, is_traced: bool, leaves: Sequence[Leaf]
    ) -> TracedStep:
        """`step` for the call in progress; raises if `jax.jit` must be called again."""
        # After a trace something else may be found about the same call.
        self._masks.check(leaves)
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
        one_at_a_time: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._variables.are_used:
            self._variables.check_outside()
            # A call donates the variables' buffers and stores new ones; two threads at
            # once would end the process (JAX 0.10 and 0.12).
            one_at_a_time = access.one_at_a_time
        with one_at_a_time:
            if self._is_prepared and access.is_traced():
                raise CompiledStepError(traced_caller(self._name))
            # Both are called: each remembers what has changed.
            if self._objects.is_outdated() | self._variables.drop_references():
                self._compile()
            return self._call(self.executable, leaves, inputs)

    def _trace(self, leaves: Sequence[Leaf]) -> TracedStep:
        """Traces the step for arguments of these types, and checks the trace."""
        step = self._step.trace(leaves, self._masks.tracing)
        step.donated = self._donated
        _announce_slow_compilation(step.name, step.jaxpr)
        found = list(constants(step.closed))
        self.placement.check_captured(found)
        self._on_trace(step)
        self._objects.traced(found)
        if step.is_partitioned:
            step.partitioned = PartitionedStep(step, leaves)
        elif step.replicas.inner_axes:
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
            self._set_compiled(self.executable.compiled)
        return has_changed

    def _set_compiled(self, compiled: Callable[..., _Returned]) -> None:
        variables, placement = self._variables, self.placement
        masks = self._masks if self._masks.is_active else None
        is_plain = not (variables.are_used or self._objects.are_used)
        needs_leaves = placement.is_open or placement.must_check_first or masks
        needs_leaves = needs_leaves or self._finite or self._is_counted
        is_bare = is_plain and variables.buffers.is_empty and not needs_leaves
        is_bare = is_bare and self.layout.structure is not None
        self.executable = Executable(
            compiled, variables.buffers, masks, is_plain, is_bare
        )

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
            self._set_compiled(outdated(self._name))
            return
        buffers = self._variables.buffers
        layout = self.layout
        donated = [*layout.donated]
        donated += range(layout.count, layout.count + len(buffers.local_cells))
        # A call that raises after it ran leaves arguments and variables unchanged.
        if self._finite is not None:
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
            self._finite,
            self._is_counted,
            donate_argnums=donated,
            **options,
        )
        self._set_compiled(compiled)


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
class InputLayout:
    """How a jitted function takes the arguments of its step: as trees, or flat."""

    def __init__(
        self, signature: Signature, donated: frozenset[int], is_flat: bool = False
    ) -> None:
        count = len(signature.dynamic)
        self.structure = None if is_flat else _structure_of(signature)
        inputs = self.inputs(range(count))
        # For each argument of the jitted function the indices of its leaves.
        self._leaves = [jax.tree.leaves(each) for each in inputs]
        self.count = len(inputs)
        self.has_keywords = self.structure is not None and bool(
            jax.tree.unflatten(self.structure, range(count))[1]
        )
        # Of each argument all leaves are donated, or none.
        self.donated = [i for i, some in enumerate(self._leaves) if donated & {*some}]
        self._expected = jax.tree.structure(tuple(inputs))
        roles = [role for role in signature.roles if role is not Role.STATIC]
        # Arguments with a `PerReplica`: their number, structure, and for each of these
        # its index among the argument's leaves and among all.
        self.per_replica: list[tuple[int, TreeStructure, list[tuple[int, int]]]] = []
        for number, indices in enumerate(self._leaves):
            pairs = [
                (position, index)
                for position, index in enumerate(indices)
                if roles[index] is Role.PER_REPLICA
            ]
            if pairs:
                structure = jax.tree.structure(inputs[number])
                self.per_replica.append((number, structure, pairs))

    def inputs(self, leaves: Sequence[Leaf]) -> Sequence[PyTree]:
        """The arguments of the jitted function, from their leaves."""
        if self.structure is None:
            return tuple(leaves)
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return (*args, kwargs) if kwargs else args  # to JAX one more argument

    def leaves(self, inputs: Sequence[PyTree]) -> list[Tracer] | None:
        """The leaves of its arguments; None if their structure is another."""
        leaves, structure = jax.tree.flatten(tuple(inputs))
        return leaves if structure == self._expected else None

    def shardings(self, shardings: Sequence[NamedSharding]) -> Sequence[PyTree]:
        """`in_shardings` for `jax.jit`."""
        by_argument = [[shardings[i] for i in indices] for indices in self._leaves]
        if all(len(set(some)) == 1 for some in by_argument):
            # The user's classes may accept nothing but arrays.
            return tuple(some[0] for some in by_argument)
        return self.inputs(shardings)


def _structure_of(signature: Signature) -> TreeStructure | None:
    """The structure of the arguments; None if they must be passed flat."""
    if signature.static_leaves:
        return None
    nodes: list[Leaf] = []
    for index, role in enumerate(signature.roles):
        if role is Role.MASK:
            nodes[-1] = dataclasses.replace(nodes[-1], _mask=index)
        else:
            nodes.append(PerReplica(index) if role is Role.PER_REPLICA else index)
    try:
        tree = jax.tree.unflatten(signature.treedef, nodes)
        leaves, structure = jax.tree.flatten(tree)
        again = jax.tree.structure(jax.tree.unflatten(structure, leaves))
    except Exception:  # raised by the user's classes, which may accept arrays only
        return None
    is_same = leaves == list(range(len(signature.roles))) and again == structure
    return structure if is_same else None


# The results of a step, the outputs of stages, the variables' new values.
_Returned: TypeAlias = tuple[PyTree, list[jax.Array], list[jax.Array]]


class NotTraced(Exception):
    """The jitted function has no trace for these arguments: they must be placed first.

    After an exception JAX dispatches all calls of these types by a way that takes 60 us
    longer (0.10 and 0.12). So it is raised only for arguments that must be moved.
    """


class Retraced(Exception):
    """The trace uses other variables or shardings: `jax.jit` must be called again."""

    def __init__(self, step: TracedStep) -> None:
        self.step = step


@final
class TraceProvider:
    """Gives a jitted function the trace of its step."""

    def __init__(self, trace: Callable[[Sequence[Leaf]], TracedStep | None]) -> None:
        self._thread = threading.local()
        self._trace = trace
        # Of the call in progress, of whatever thread.
        self.inputs: Sequence[PyTree] = ()
        self.has_non_arrays = False

    @contextlib.contextmanager
    def using(self, trace: Callable[[], TracedStep]) -> Iterator[None]:
        """A `with` block in which this thread traces the step with `trace`."""
        self._thread.trace = trace
        try:
            yield
        finally:
            self._thread.trace = None

    def get(self, inputs: Sequence[Tracer]) -> TracedStep:
        """The step, traced for inputs of these types."""
        trace = getattr(self._thread, "trace", None)
        # Outside of the trace of the jitted function, which calls this.
        with eval_context():
            if trace is not None:
                return trace()
            leaves = jax.tree.leaves(self.inputs)
            # Another thread's inputs do as well if their types are equal.
            step = self._trace(leaves) if _are_alike(leaves, inputs) else None
        if step is None:
            raise NotTraced
        return step


def _are_alike(leaves: Sequence[Leaf], inputs: Sequence[Tracer]) -> bool:
    def types(arrays: Sequence[jax.Array]) -> list[tuple[object, ...]]:
        # Random keys have no weak types.
        return [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in arrays]

    are_arrays = all(isinstance(leaf, jax.Array) for leaf in leaves)
    return are_arrays and types(leaves) == types(inputs[: len(leaves)])


class Executable(NamedTuple):
    """A compiled step and what its calls need; replaced as a whole, by any thread."""

    compiled: Callable[..., _Returned]
    buffers: VariableBuffers
    masks: MaskArguments | None  # that are to be checked
    is_plain: bool  # without variables
    is_bare: bool  # nothing is done around calls


def jitted(
    name: str,
    layout: InputLayout,
    traces: TraceProvider,
    buffers: VariableBuffers,
    finite: Finite | None,
    is_counted: bool,
    **options: Any,
) -> Wrapped:
    """The jitted function that a `Program` calls."""

    def evaluated(
        step: TracedStep, finite: Finite | None, *inputs: jax.Array
    ) -> _Returned:
        count = len(step.signature.dynamic)
        references = buffers.references(inputs[count:])
        checked = None
        if finite is not None:
            checked = functools.partial(finite.evaluate, step)
        arrays, outputs = step.evaluate(inputs[:count], references, checked)
        if is_counted:  # the first output is ready when the step is done
            outputs = [jnp.zeros((), jnp.int8), *outputs]
        return step.results.rebuild(arrays), outputs, buffers.frozen(references)

    def program(*inputs: PyTree) -> _Returned:
        leaves = layout.leaves(inputs[: layout.count])
        if leaves is None:
            raise NotTraced
        inputs = (*leaves, *inputs[layout.count :])
        step = traces.get(inputs)
        has_nan_checks = jax.config.jax_debug_nans or jax.config.jax_debug_infs
        if access.is_traced() or not has_nan_checks:
            return evaluated(step, finite, *inputs)
        # `jax_debug_nans` calls this again after it found a NaN.
        found = Finite(step.replica_step, bool(jax.config.jax_debug_infs))
        with jax.debug_nans(False), jax.debug_infs(False):
            returned = jax.jit(functools.partial(evaluated, step, found))(*inputs)
            found.check(returned[1][-1])
        return returned

    program.__name__ = program.__qualname__ = name
    return jax.jit(program, **options)
