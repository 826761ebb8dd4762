"""Several steps in one call: a loop on the devices; what replicas synchronize."""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, cast, final

import jax
import jax.numpy as jnp

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import LOCAL_SCOPE, LocalSteps
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import ObjectError
from jaxstrategy._src.masks import LoopMasks
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.reductions.reduction import HowReduced
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.text.shown import array_type
from jaxstrategy._src.tracing.functions import code, rebinding
from jaxstrategy._src.tracing.jaxprs.visit import KeyPath
from jaxstrategy._src.tracing.nnx import object_calls
from jaxstrategy._src.tracing.nnx.object_form import (
    Parts,
    is_changed_in_place,
    is_parts,
)
from jaxstrategy._src.values import arrays as _arrays, trees
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables.variable import Variable

# Arrays of the state, and others, which the loop returns.
Ends: TypeAlias = tuple[Sequence[jax.Array], Sequence[jax.Array]]


class AbstractSynchronization(abc.ABC):
    """What the replicas have to do with each other in a loop of several steps."""

    @abc.abstractmethod
    def step(self) -> contextlib.AbstractContextManager[object]:
        """A `with` block in which a step is traced."""

    @abc.abstractmethod
    def kept(self, rest: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """What the loop keeps of the arrays that a step returned beside its state."""

    @abc.abstractmethod
    def end(
        self,
        state: Sequence[jax.Array],
        same: Sequence[bool],
        rest: Sequence[jax.Array],
    ) -> Ends:
        """The state and the other arrays that the loop returns."""


@final
class InEachStep(AbstractSynchronization):
    """The steps reduce what they want to."""

    def step(self) -> contextlib.AbstractContextManager[object]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def kept(self, rest: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """All as it is."""
        return rest

    def end(
        self,
        state: Sequence[jax.Array],
        same: Sequence[bool],
        rest: Sequence[jax.Array],
    ) -> Ends:
        """All as it is."""
        return state, rest


@final
class AfterTheLast(AbstractSynchronization):
    """Each replica is by itself until the last step, and then they take means."""

    def __init__(self, replica: ReplicaContext) -> None:
        self._replica = replica
        self._local = LocalSteps(replica.num_replicas_in_sync)
        self._how: list[HowReduced | None] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A `with` block whose reductions take the replica's own for all."""
        self._local.reduction.begin()
        with context.entered(local=self._local), jax.named_scope(LOCAL_SCOPE):
            yield

    def kept(self, rest: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Of what the step has reduced, what it was before."""
        pairs = [self._local.reduction.before(array) for array in rest]
        self._local.reduction.forget()
        self._how = [how for _, how in pairs]
        return [own for own, _ in pairs]

    def end(
        self,
        state: Sequence[jax.Array],
        same: Sequence[bool],
        rest: Sequence[jax.Array],
    ) -> Ends:
        """The means of floating-point arrays, and what the steps reduced, reduced."""
        variables = list(filter(_has_mean, self._local.assigned.values()))
        arrays = [*state, *rest, *(each.value() for each in variables)]
        changed = zip(state, same, strict=True)
        means = [_MEAN if _is_float(a) and not kept else None for a, kept in changed]
        found = self._reduced(arrays, [*means, *self._how, *(_MEAN for _ in variables)])
        first, second = len(state), len(state) + len(rest)
        # On this side a variable takes what it is given, whatever its aggregation.
        with context.entered(replica=None):
            for variable, mean in zip(variables, found[second:], strict=True):
                cast(Variable, variable).assign(mean)
        return found[:first], found[first:second]

    def _reduced(
        self, arrays: list[jax.Array], each: Sequence[HowReduced | None]
    ) -> list[jax.Array]:
        """Each of `arrays` reduced as is said of it, with None as it is."""
        found = list(arrays)
        for how in dict.fromkeys(filter(None, each)):
            places = [i for i, other in enumerate(each) if other == how]
            results = self._replica.all_reduce(
                how.op, [arrays[i] for i in places], how.options, groups=how.groups
            )
            for i, array in zip(places, results, strict=True):
                found[i] = array
        return found


_MEAN = HowReduced(ReduceOp.MEAN)


def _has_mean(variable: Handle) -> bool:
    return variable.copies_must_agree and _is_float(variable.value())


def _is_float(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def synchronization_after_the_last() -> AbstractSynchronization:
    """That of the replicas of the step which is traced; with one there is none."""
    replica = context.current().replica
    if not isinstance(replica, ReplicaContext) or replica.num_replicas_in_sync == 1:
        return InEachStep()
    return AfterTheLast(replica)


class ArrayTree:
    """A pytree as its arrays and the rest of it."""

    def __init__(self, tree: PyTree, with_numbers: bool = True) -> None:
        found, self.structure = jax.tree.flatten_with_path(tree, is_leaf=trees.is_whole)
        self.paths = [path for path, _ in found]
        self.leaves = [
            mesh.array_of(leaf) if with_numbers and is_number(leaf) else leaf
            for _, leaf in found
        ]
        self._are_arrays = list(map(_arrays.is_array, self.leaves))

    @property
    def arrays(self) -> list[jax.Array]:
        """The arrays among the leaves."""
        leaves = zip(self.leaves, self._are_arrays, strict=True)
        return [jnp.asarray(leaf) for leaf, is_array in leaves if is_array]

    def take(self) -> list[jax.Array]:
        """The arrays, which are not kept: those of a trace must not outlive it."""
        arrays = self.arrays
        leaves = zip(self.leaves, self._are_arrays, strict=True)
        self.leaves = [None if is_array else leaf for leaf, is_array in leaves]
        return arrays

    def with_arrays(self, arrays: Sequence[jax.Array]) -> PyTree:
        """The pytree with other arrays."""
        following = iter(arrays)
        leaves = zip(self.leaves, self._are_arrays, strict=True)
        return self.structure.unflatten(
            next(following) if is_array else leaf for leaf, is_array in leaves
        )


def is_number(leaf: Leaf) -> bool:
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)


def are_alike(a: Leaf, b: Leaf, but_rows: bool = False) -> bool:
    """Whether `a` is as `b` is; perhaps but for the number of rows."""
    if _arrays.is_array(a) and _arrays.is_array(b):
        if but_rows and a.ndim and b.ndim:
            return (a.shape[1:], a.dtype) == (b.shape[1:], b.dtype)
        return (a.shape, a.dtype) == (b.shape, b.dtype)
    # Of one type, because 1, 1.0 and True are equal.
    return a is b or (type(a) is type(b) and bool(a == b))


def told(value: object) -> str:
    if _arrays.is_array(value):
        return array_type(value.dtype, value.shape)
    is_leaf = jax.tree_util.all_leaves([value])
    return repr(value) if is_leaf else f"a {type(value).__name__}"


def name_of(fn: Function) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def signature_of(fn: Function) -> inspect.Signature | None:
    """The signature of the step, with batches instead of a batch."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in POSITIONAL]
    if not positional or "batches" in signature.parameters:
        return signature
    place = parameters.index(positional[-1])
    parameters[place] = parameters[place].replace(name="batches")
    return signature.replace(parameters=parameters)


POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def first_names(fn: Function, count: int) -> list[str]:
    """The names of the first arguments in messages."""
    signature = signature_of(fn)
    parameters = [] if signature is None else signature.parameters.values()
    known = [p.name for p in parameters if p.kind in POSITIONAL]
    return [known[i] if i < len(known) else f"args[{i}]" for i in range(count)]


class BatchRun:
    """Batches of one size, one after the other."""

    def __init__(self, batches: Sequence[ArrayTree]) -> None:
        self.form = batches[0]
        rows = zip(*(batch.arrays for batch in batches), strict=True)
        self.columns = [list(column) for column in rows]
        self._number = len(batches)

    def __len__(self) -> int:
        return self._number


def runs(name: str, given: object) -> list[BatchRun]:
    """The batches of one call: one loop each for those of one size."""
    if not isinstance(given, (tuple, list)):
        raise TypeError(
            f"`{name}` makes several steps and takes a tuple of batches in the "
            f"last place, as `jaxstrategy.experimental.grouped(dataset, 10)` makes "
            f"them. It was given {told(given)}; write `(batch,)` for one step."
        )
    if not given:
        raise ValueError(
            f"`{name}` was given no batches, and each step needs one. Leave out "
            "the call."
        )
    batches = list(map(ArrayTree, given))
    for number, batch in enumerate(batches):
        _check_kind(name, number, batch, batches[0])
    by_size = itertools.groupby(batches, lambda batch: [a.shape for a in batch.arrays])
    return [BatchRun(list(run)) for _, run in by_size]


def _check_kind(name: str, number: int, batch: ArrayTree, form: ArrayTree) -> None:
    advice = "Steps of one loop need batches of one kind; call it for each kind."
    if batch.structure != form.structure:
        raise ValueError(
            f"`{name}`: `batches[{number}]` has another structure than "
            f"`batches[0]`: {batch.structure} instead of {form.structure}. "
            f"{advice}"
        )
    for path, leaf, first in zip(batch.paths, batch.leaves, form.leaves, strict=True):
        if not are_alike(leaf, first, but_rows=True):
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"`{name}`: `batches[{number}]{where}` is {told(leaf)}, and "
                f"`batches[0]{where}` is {told(first)}. {advice}"
            )


# Of one step: the arrays of its batch, and the masks of those that have one.
_Given: TypeAlias = tuple[list[jax.Array], dict[int, jax.Array]]


class StepLoop:
    """One call: what it carries from step to step, and what stays."""

    def __init__(
        self,
        fn: Function,
        args: list[PyTree],
        kwargs: dict[str, PyTree],
        synchronization: AbstractSynchronization,
    ) -> None:
        self._fn = fn
        self._synchronization = synchronization
        self._name = name_of(fn)
        self._names = first_names(fn, len(args))
        self._going = [i for i, each in enumerate(args) if self._goes_on(i, each)]
        call = object_calls.call_of(args, kwargs, object_calls.captured_by(fn))
        self._objects = None if call is None else call.objects
        self._captured = () if call is None else call.captured
        self._args = args if call is None else list(call.args)
        self._kwargs = kwargs if call is None else call.kwargs
        states = [args[i] for i in self._going]
        self._parts = [] if self._objects is None else self._objects.parts()
        self._start = ArrayTree((states, self._parts))
        self._same = [True] * len(self._start.arrays)
        self._rest = ArrayTree(None)
        self._is_alone = False

    def _goes_on(self, place: int, argument: PyTree) -> bool:
        """Whether the step returns what takes the place of this argument."""
        leaves = jax.tree.leaves(argument, is_leaf=_is_whole)
        if any(map(is_changed_in_place, leaves)):
            if any(_arrays.is_array(leaf) or is_number(leaf) for leaf in leaves):
                raise ObjectError(
                    f"`{self._name}`: `{self._names[place]}` holds objects of Flax "
                    "NNX, which are changed in place, and arrays, which are returned. "
                    "In a loop of several steps give them as arguments of their own."
                )
            return False
        is_leaf = jax.tree_util.all_leaves([argument], is_leaf=trees.is_whole)
        return not is_leaf or _arrays.is_array(argument) or is_number(argument)

    def over(self, runs: Sequence[BatchRun]) -> PyTree:
        """The results of all steps."""
        going, found = self._start.arrays, []
        for run in runs:
            going, rest = self._over(run, going)
            found.append((self._rest, rest))
        ends = self._synchronization.end(going, self._same, self._joined(found))
        return self._finish(*ends)

    def _joined(
        self, found: list[tuple[ArrayTree, list[jax.Array]]]
    ) -> list[jax.Array]:
        """The other arrays of all steps, stacked."""
        ((first, rest), *others) = found
        for form, arrays in others:
            pairs = zip(rest, arrays, strict=True)
            if form.structure != first.structure or any(
                a.shape[1:] != b.shape[1:] for a, b in pairs
            ):
                shapes = [list(a.shape[1:]) for a in rest]
                raise ValueError(
                    f"`{self._name}` returned arrays that differ with the size of the "
                    f"batch, of shapes {shapes} and "
                    f"{[list(a.shape[1:]) for a in arrays]}, which cannot be stacked. "
                    "Return sums or means over the rows, or leave out the smaller "
                    'batch with `InputOptions(remainder="drop")`.'
                )
        if not others:
            return rest
        columns = zip(*(arrays for _, arrays in found), strict=True)
        return [jnp.concatenate(column) for column in columns]

    def _over(
        self, batches: BatchRun, going: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The end of what these steps go on with, and what else they returned."""
        turns = LoopMasks(batches.columns)

        def turn(
            going: list[jax.Array], given: _Given
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            arrays, masks = given
            with turns.turn(arrays, masks):
                return self._step(going, batches.form.with_arrays(arrays))

        stacked = [jnp.stack(column) for column in batches.columns]
        return jax.lax.scan(turn, going, (stacked, turns.masks), length=len(batches))

    def _step(
        self, going: list[jax.Array], batch: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """One step: what it goes on with, and the other arrays it returned."""
        states, parts = self._start.with_arrays(going)
        args, kwargs, objects = self._filled(states, parts)
        # Those that the step captured stand among the keyword arguments.
        replaced = {name: kwargs.pop(name) for name in self._captured}
        with rebinding.rebound(self._fn, replaced) as fn:
            with self._synchronization.step():
                returned = _with_values(fn(*args, batch, **kwargs))
        if any(map(is_changed_in_place, jax.tree.leaves(returned, is_leaf=_is_whole))):
            raise ObjectError(
                f"`{self._name}` returned an object of Flax NNX. In a loop of several "
                "steps objects are changed in place; return only what else there is."
            )
        states, rest = self._divided(returned)
        self._rest = ArrayTree(rest, with_numbers=False)
        new = self._checked(states, self._taken(objects, parts))
        # What no step changes stays the same object: so the key of a replica is told.
        pairs = zip(self._same, going, new, strict=True)
        self._same = [known and old is now for known, old, now in pairs]
        return new, list(self._synchronization.kept(self._rest.take()))

    def _filled(
        self, states: Sequence[PyTree], parts: Sequence[Parts]
    ) -> tuple[list[PyTree], dict[str, PyTree], list[PyTree]]:
        """The arguments of one step, and the objects among them."""
        args = list(self._args)
        for place, state in zip(self._going, states, strict=True):
            args[place] = state
        if self._objects is None:
            return args, dict(self._kwargs), []
        objects = self._objects.form.put_together(parts)
        following = iter(objects)
        args, kwargs = jax.tree.map(
            lambda leaf: next(following) if is_parts(leaf) else leaf,
            (args, self._kwargs),
            is_leaf=lambda node: is_parts(node) or trees.is_whole(node),
        )
        return args, kwargs, objects

    def _taken(self, objects: list[PyTree], before: Sequence[Parts]) -> Sequence[Parts]:
        """The arrays of the objects after a step."""
        if self._objects is None:
            return []
        parts = self._objects.form.take_apart(objects, before)
        for change in parts[0].changes:
            raise ObjectError(
                f"`{self._name}` changes `{change.name}` of an object of Flax NNX, "
                "which is no variable. In a loop of several steps Python runs once for "
                "all of them: change it before, with `model.train()` for example, or "
                "make it an `nnx.Variable`."
            )
        return parts

    def _divided(self, returned: PyTree) -> tuple[list[PyTree], PyTree]:
        """The results that take the place of the first arguments, and the rest."""
        count = len(self._going)
        if not count:
            return [], returned
        wanted = [_structure(self._args[i]) for i in self._going]
        if count == 1 and wanted[0] == _structure(returned):
            self._is_alone = True
            return [returned], ()
        if not isinstance(returned, tuple) or len(returned) < count:
            names = ", ".join(self._names[i] for i in self._going)
            raise TypeError(
                f"`{self._name}` goes on with {names}, so each step is to return "
                f"`({names}, ...)`, the new ones first. It returned "
                f"{told(returned)}. Give by keyword what is the same in all steps."
            )
        for place, want, new in zip(self._going, wanted, returned, strict=False):
            have = _structure(new)
            if have != want:
                raise TypeError(
                    f"`{self._name}` was given `{self._names[place]}` and returned "
                    f"something else in its place: {have} instead of {want}. The next "
                    "step goes on with what a step returns first. Give by keyword "
                    "what is the same in all steps."
                )
        return list(returned[:count]), returned[count:]

    def _checked(self, states: list[PyTree], parts: Sequence[Parts]) -> list[jax.Array]:
        """The arrays that the next step goes on with."""
        now = ArrayTree((states, parts))
        leaves = zip(now.paths, self._start.leaves, now.leaves, strict=True)
        for path, before, after in leaves:
            if not are_alike(before, after):
                raise TypeError(
                    f"`{self._name}`: {self._label(path)} is {told(before)} before a "
                    f"step and {told(after)} after it. In a loop of several steps it "
                    "stays what it is: begin with what a step makes, or convert it "
                    "(`.astype`)."
                )
        return now.arrays

    def _label(self, path: KeyPath) -> str:
        (kind, which, *rest) = path
        where = jax.tree_util.keystr(tuple(rest))
        if kind.idx == 1:
            return f"`{where.removeprefix('.')}` of an object"
        return f"`{self._names[self._going[which.idx]]}{where}`"

    def _finish(self, end: Sequence[jax.Array], rest: Sequence[jax.Array]) -> PyTree:
        arrays = zip(self._same, self._start.arrays, end, strict=True)
        states, parts = self._start.with_arrays(
            [before if same else after for same, before, after in arrays]
        )
        if self._objects is not None:
            self._objects.store(parts)
        others = self._rest.with_arrays(rest)
        if not self._going:
            return others
        return states[0] if self._is_alone else (*states, *others)


def _with_values(tree: PyTree) -> PyTree:
    """`tree` with each variable as the value that it has after this step."""
    return jax.tree.map(
        lambda leaf: leaf.value() if isinstance(leaf, Variable) else leaf,
        tree,
        is_leaf=_is_whole,
    )


def _is_whole(node: object) -> bool:
    if trees.is_whole(node) or is_changed_in_place(node):
        return True
    # Whose variables are copies, so that it is a state like any other.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.State)


def _structure(tree: PyTree) -> TreeStructure:
    return jax.tree.structure(tree, is_leaf=trees.is_whole)


def several(
    fn: Function, synchronization: Callable[[], AbstractSynchronization] = InEachStep
) -> Function:
    """A function that makes one step of `fn` after the other, with a batch for each."""

    @functools.wraps(fn)
    def steps(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if not args:
            raise TypeError(
                f"`{name_of(fn)}` was called without batches. Its last positional "
                "argument is the tuple of them: `many(state, (batch, next_batch))`."
            )
        *first, batches = args
        loop = StepLoop(fn, first, kwargs, synchronization())
        return loop.over(runs(name_of(fn), batches))

    if (signature := signature_of(fn)) is not None:
        steps.__dict__["__signature__"] = signature
    steps.__dict__["makes_several"] = True
    code.define_at(steps, code.place_of(fn))
    return steps


def number_of_steps(fn: Function, args: Sequence[PyTree]) -> int:
    """The number of steps that a call of `fn` makes."""
    return len(args[-1]) if getattr(fn, "makes_several", False) else 1
