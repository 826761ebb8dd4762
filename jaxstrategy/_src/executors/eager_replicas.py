"""Eager steps: `eager_replicas`, and the arguments, variables, results of a call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import EllipsisType
from typing import Any, TypeAlias, cast, final

import jax
import numpy as np
from jax.core import Tracer
from jax.lax import convert_element_type_p

from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import (
    ContextError,
    NonFiniteError,
    NotMirroredError,
    NotMirroredVariableError,
    PlacementError,
)
from jaxstrategy._src.executors.replica_thread import ReplicaThread
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.inner_axes import sharding_like
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import user_code
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.text.user_code import Line
from jaxstrategy._src.tracing import roles as _roles
from jaxstrategy._src.tracing.checks import varying_results
from jaxstrategy._src.tracing.functions import rebinding
from jaxstrategy._src.tracing.jaxprs.visit import KeyPath
from jaxstrategy._src.tracing.nnx.object_calls import (
    array_options,
    array_step,
    object_call,
)
from jaxstrategy._src.tracing.nnx.objects import AttributeChange
from jaxstrategy._src.tracing.results import Results
from jaxstrategy._src.tracing.roles import Role
from jaxstrategy._src.tracing.stages.placement import Placement
from jaxstrategy._src.tracing.stages.stages import MaskArguments
from jaxstrategy._src.tracing.traced_step import ReplicaStep, StepEnvironment, name_of
from jaxstrategy._src.tracing.translation import translated
from jaxstrategy._src.values import (
    arrays as _arrays,
    building,
    per_replica as _per_replica,
)
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.values.slices import Versions
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.access import StepVariables
from jaxstrategy._src.variables.kinds import on_host
from jaxstrategy._src.variables.variable import Variable

_UNBOUND = re.compile(r"[Uu]nbound axis name:? *'?(\w+)")
# JAX's own messages say what to do, in a function that is mapped or differentiated.
_TRACED = (
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
)


def eagerly_translated(
    error: Exception, name: str, replicas: Replicas, options: RunOptions
) -> Exception | None:
    """A clearer error to raise instead of a replica's, if there is one."""
    if isinstance(error, _TRACED):
        return None
    line = user_code.users_line(error.__traceback__)
    where = f"\n  {line}\n" if line else " "
    if isinstance(error, NameError) and (unbound := _UNBOUND.search(str(error))):
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
            line=line and str(line),
        )
    return translated(error, name, replicas)


def local_values(value: Leaf, replicas: Replicas) -> list[Leaf]:
    """The value of each replica of this process, of a value of all replicas."""
    if isinstance(value, PerReplica):
        return list(versions(_per_replica.contents(value), replicas))
    if isinstance(value, jax.Array):
        return list(copies(value, replicas))
    return [value] * len(replicas.local_ids)


def versions(stacked: Leaf, replicas: Replicas) -> list[jax.Array]:
    placed = _per_replica.contents(building.place_stacked(stacked, replicas))
    return list(replicas.versions(placed))


def copies(array: jax.Array, replicas: Replicas) -> list[jax.Array]:
    """Copies of an array on the devices of each replica of this process."""
    whole = mesh.place(array, sharding_like(array, replicas))
    is_weak = getattr(array, "weak_type", False)
    return [with_weak_type(copy, is_weak) for copy in replicas.copies(whole)]


def with_weak_type(array: jax.Array, is_weak: bool) -> jax.Array:
    if is_key(array.dtype) or array.weak_type == is_weak:
        return array
    convert: Any = convert_element_type_p
    return convert.bind(array, new_dtype=array.dtype, weak_type=is_weak, sharding=None)


def per_replica_of(versions: Sequence[Leaf], replicas: Replicas) -> PerReplica:
    """The versions of this process's replicas as a `PerReplica` of all."""
    return PerReplica(
        replicas.stacked(
            [v if isinstance(v, jax.Array) else np.asarray(v) for v in versions]
        )
    )


def mirrored(array: Leaf, replicas: Replicas) -> jax.Array:
    """An array that all replicas have, as one array replicated on the mesh."""
    return mesh.place(array, sharding_like(array, replicas))


def digest(array: Leaf) -> str:
    """Equal for arrays of the same type and bits."""
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    text = f"{host.dtype}{host.shape}".encode() + host.tobytes()
    return hashlib.sha256(text).hexdigest()


AllGatherTexts = Callable[[Sequence[Sequence[str]]], Sequence[Sequence[str]]]
"""Gathers a row of texts of each replica from all processes."""


@final
class VariableCopy:
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
        frame = user_code.users_frame()
        self.line = frame and Line(frame.f_code.co_filename, frame.f_lineno)


Changes: TypeAlias = list[tuple[Variable, list[VariableCopy]]]


@final
class VariableCopies:
    """The variables that an eager step uses: a copy for each replica here."""

    def __init__(self, replicas: Replicas, name: str, gather: AllGatherTexts) -> None:
        self._replicas = replicas
        self._name = name
        self._gather = gather
        self._copies: dict[int, tuple[Variable, list[VariableCopy]]] = {}

    def of(self, variable: Variable, place: int) -> VariableCopy:
        return self._copies[id(variable)][1][place]

    def has(self, variable: Variable) -> bool:
        return id(variable) in self._copies

    def make(self, variable: Variable) -> None:
        with access.one_at_a_time:
            contents = variable.cell[...]
            if self._has_versions(variable):
                arrays = [v[None] for v in self._replicas.versions(contents)]
            else:
                arrays = copies(contents, self._replicas)
        made = [VariableCopy(array, variable.name) for array in arrays]
        self._copies[id(variable)] = variable, made

    def _has_versions(self, variable: Variable) -> bool:
        is_here = variable.lives_on(self._replicas)
        return is_here and not variable.copies_must_agree

    def changes(self) -> Changes:
        """The variables that a replica assigned; raises if their copies differ."""
        used = list(self._copies.values())
        flags = self._columns(used, lambda copy: str(copy.array is not copy.before))
        changes = [
            each for each, flag in zip(used, flags, strict=True) if "True" in flag
        ]
        mirrored = [each for each in changes if not self._has_versions(each[0])]
        digests = self._columns(mirrored, lambda copy: digest(copy.array))
        for (variable, copies), column in zip(mirrored, digests, strict=True):
            if len(set(column)) > 1:
                raise _drifted(variable, copies, column, self._name, self._replicas)
        return changes

    def _columns(
        self, variables: Changes, text: Callable[[VariableCopy], str]
    ) -> list[tuple[str, ...]]:
        """For each variable the texts of the copies of all replicas."""
        local = [map(text, copies) for _, copies in variables]
        rows = self._gather([list(row) for row in zip(*local, strict=True)])
        return list(zip(*rows, strict=True))

    def store(self, changes: Changes) -> None:
        """Assigns variables what replicas have assigned, and drops the copies."""
        with access.one_at_a_time:
            for variable, copies in changes:
                value = copies[0].array
                if self._has_versions(variable):
                    versions = [copy.array[0] for copy in copies]
                    value = per_replica_of(versions, self._replicas).stacked
                variable.cell[...] = mesh.place(value, variable.sharding)
        self._copies.clear()


def _drifted(
    variable: Variable,
    copies: Sequence[VariableCopy],
    column: Sequence[str],
    name: str,
    replicas: Replicas,
) -> NotMirroredVariableError:
    line = next((copy.line for copy in copies if copy.line is not None), None)
    where = "" if line is None else f"  it was assigned at {line}\n"
    return NotMirroredVariableError(
        f"Variable {variable.name!r} is mirrored, but `{name}` assigned it values that "
        f"differ between replicas: its copies would drift apart.\n{where}"
        f"{describe_versions([copy.array for copy in copies], column, replicas)}\n"
        "Reduce it first, or make the variable with an `aggregation` "
        "('sum', 'mean', 'only_first_replica'), or with `synchronization='on_read'` if "
        "each replica is to have its own.",
        path=variable.name,
        line=line and str(line),
    )


def describe_versions(
    arrays: Sequence[jax.Array | np.ndarray], column: Sequence[str], replicas: Replicas
) -> str:
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


@final
class ReplicaVariables(StepVariables):
    def __init__(
        self, copies: VariableCopies, place: int, thread: ReplicaThread
    ) -> None:
        # The first replica runs first, so the others find the variables that it makes.
        super().__init__((), may_create=thread.number == 0)
        self._all = copies
        self._thread = thread
        self._place = place

    @property
    def any(self) -> bool:
        return True

    def reference(self, variable: Handle) -> VariableCopy:
        context.check_unstaged(f"Variable {variable.name!r}")
        self.used.setdefault(id(variable), variable)
        used = cast(Variable, variable)
        if not self._all.has(used):
            self._thread.in_caller(functools.partial(self._all.make, used))
        return self._all.of(used, self._place)

    def create(self, variable: Handle, start: jax.Array) -> None:
        """Let the step make `variable`; its cell holds its copies."""
        self.created.append(variable)


@final
class EagerBlock:
    """One block of `eager_replicas`, and which results have varied in it."""

    def __init__(self, disable_jit: bool) -> None:
        self.disable_jit = disable_jit
        self.varying: set[Hashable] = set()


@final
class EagerResults:
    """What the replicas of an eager step returned, compared and put together."""

    def __init__(
        self,
        call: EagerCall,
        replicas: Replicas,
        returned: Sequence[tuple[list[jax.Array], Results]],
        gather: AllGatherTexts,
    ) -> None:
        self.name = name = call.name
        self.has_objects = call.objects is not None
        self.results = returned[0][1]
        self._replicas = replicas
        for number, (_, other) in zip(replicas.local_ids, returned, strict=True):
            if other.treedef != self.results.treedef:
                raise ValueError(
                    f"`{name}` returned pytrees of different structures: "
                    f"{self.results.treedef} on replica {replicas.local_ids[0]}, and "
                    f"{other.treedef} on replica {number}. Return the same structure "
                    "on all replicas; what differs may be an array of another shape, "
                    "a number or a string."
                )
        self._columns = list(zip(*map(_leaves, returned), strict=True))
        local = [map(_leaf_digest, column) for column in self._columns]
        rows = gather([list(row) for row in zip(*local, strict=True)])
        self._digests = list(zip(*rows, strict=True))

    def path(self, keys: KeyPath) -> str:
        if self.is_of_object(keys):
            return f"`{jax.tree_util.keystr(keys[2:]).removeprefix('.')}`"
        return f"`{self.name}(...){jax.tree_util.keystr(keys[self.has_objects :])}`"

    def is_of_object(self, keys: KeyPath) -> bool:
        """Whether the result at `keys` is a new array of an object."""
        return self.has_objects and bool(keys) and keys[0].idx == 1

    def check(self, expected: PyTree) -> None:
        if expected is None:
            return
        is_expected = varying_results.expectation(self, expected)
        for position, keys in self.results.array_paths():
            column = self._columns[position]
            like = jax.typeof(column[0])
            if self._are_equal(position) or not is_expected(position, keys, like):
                continue
            path, digests = self.path(keys), self._digests[position]
            is_object = self.is_of_object(keys)
            what = (
                f"`{self.name}` leaves {path} different on each replica."
                if is_object
                else f"{path} was expected to be mirrored, but the replicas differ."
            )
            advice = (
                varying_results.OF_OBJECTS if is_object else varying_results.OF_RESULTS
            )
            versions = describe_versions(column, digests, self._replicas)
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
            first = column[0]
            return mirrored(first, self._replicas) if is_array else first
        is_numeric = all(_arrays.is_array(x) or _is_number(x) for x in column)
        kinds = {each.rpartition(" ")[0] for each in self._digests[position]}
        if not is_numeric or len(kinds) > 1:
            return Versions(column, self._replicas.local_ids)
        arrays = [x if _arrays.is_array(x) else jax.numpy.asarray(x) for x in column]
        return per_replica_of(arrays, self._replicas)


def _leaves(returned: tuple[list[jax.Array], Results]) -> list[Leaf]:
    arrays, rest = returned
    following = iter(arrays)
    return [next(following) if leaf is None else leaf.value for leaf in rest.leaves]


def _is_number(value: object) -> bool:
    kinds = (int, float, complex, np.number)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _leaf_digest(leaf: Leaf) -> str:
    """A text that is equal for equal leaves: type and contents."""
    if _arrays.is_array(leaf):
        return f"{leaf.dtype}{leaf.shape} {digest(leaf)}"
    if leaf is None or isinstance(leaf, (bool, str, int, float, complex)):
        return f"{type(leaf).__name__} {leaf!r}"
    try:
        return f"{type(leaf).__name__} {hash(leaf)}"
    except TypeError:
        return f"{type(leaf).__name__} {id(leaf)}"


@final
class EagerCall:
    """A call of an eager step, with its arguments placed as for a compiled one."""

    def __init__(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
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
            self._begin(args, kwargs, both, environment)
        except PlacementError:
            if not captured.arrays:
                raise
            # Captured arrays may lie where no argument may: they become constants.
            self._begin(args, kwargs, captured.objects, environment)

    def _begin(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        captured: dict[str, object],
        environment: StepEnvironment,
    ) -> None:
        call = self.objects = object_call(args, kwargs, captured)
        self._step_fn = self.fn
        arguments: tuple[Sequence[PyTree], dict[str, PyTree]] = args, kwargs
        if call is not None:
            form = None if call.objects is None else call.objects.form
            self._step_fn = array_step(lambda: self.fn, form, call.captured)
            arguments = call.args, call.kwargs
        self.leaves, self.signature = _roles.flatten(self._step_fn, *arguments)
        step = ReplicaStep(
            lambda: self._step_fn, environment, self.signature, lambda: False
        )
        self.roles = step.roles
        self.masks = MaskArguments(step)
        self._placed = Placement(step, frozenset()).placed(self.leaves)

    @property
    def expected(self) -> PyTree:
        options = self.options if self.objects is None else array_options(self.options)
        return options.expect_mirrored

    def columns(self, replicas: Replicas) -> list[list[Leaf]]:
        return [
            versions(leaf, replicas)
            if role is Role.PER_REPLICA
            else copies(leaf, replicas)
            for leaf, role in zip(self._placed, self.roles, strict=True)
        ]

    def run(self, leaves: Sequence[Leaf]) -> PyTree:
        """Calls the step with the arguments of one replica."""
        args, kwargs = self.signature.rebuild(leaves)
        try:
            return self._with_shared_changes(self._step_fn(*args, **kwargs))
        except rebinding.Leak as leak:
            raise leak.as_error() from None
        except Exception as error:
            better = eagerly_translated(error, self.name, self._replicas, self.options)
            if better is None:
                raise
            raise better from error

    def _with_shared_changes(self, returned: PyTree) -> PyTree:
        """`returned`, with the first replica's change in place of each equal one."""
        if self.objects is None:
            return returned
        results, parts = returned
        return results, [
            dataclasses.replace(part, changes=tuple(map(self._shared, part.changes)))
            for part in parts
        ]

    def _shared(self, change: AttributeChange) -> AttributeChange:
        for other in self._changes:
            is_same = (other.path, other.name) == (change.path, change.name)
            if is_same and (other.value is change.value or other.value == change.value):
                return other
        self._changes.append(change)
        return change


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
