"""Several steps in one call, and one step in several parts of its batch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy._src import masks
from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import LOCAL_SCOPE, LocalSteps
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import ObjectError
from jaxstrategy._src.masks import LoopMasks
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.reductions.reduction import HowReduced
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.text.shown import array_type, whole
from jaxstrategy._src.tracing.functions import code, rebinding
from jaxstrategy._src.tracing.jaxprs.visit import KeyPath
from jaxstrategy._src.tracing.nnx import object_calls
from jaxstrategy._src.tracing.nnx.object_form import (
    Parts,
    is_changed_in_place,
    is_parts,
)
from jaxstrategy._src.tracing.traced_step import name_of
from jaxstrategy._src.values import arrays as _arrays, trees
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.values.slices import is_slices
from jaxstrategy._src.variables.variable import Variable


@final
class AfterTheLast:
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

    def kept(self, rest: Sequence[jax.Array]) -> list[jax.Array]:
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
    ) -> tuple[list[jax.Array], list[jax.Array]]:
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
        leaves = zip(self.leaves, self._are_arrays, strict=True)
        return [jnp.asarray(leaf) for leaf, is_array in leaves if is_array]

    def take(self) -> list[jax.Array]:
        """The arrays, which are not kept: those of a trace must not outlive it."""
        arrays = self.arrays
        leaves = zip(self.leaves, self._are_arrays, strict=True)
        self.leaves = [None if is_array else leaf for leaf, is_array in leaves]
        return arrays

    def with_arrays(self, arrays: Sequence[jax.Array]) -> PyTree:
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
    signature = signature_of(fn)
    parameters = [] if signature is None else signature.parameters.values()
    known = [p.name for p in parameters if p.kind in POSITIONAL]
    return [known[i] if i < len(known) else f"args[{i}]" for i in range(count)]


def runs(name: str, given: object) -> list[list[ArrayTree]]:
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
    return [list(run) for _, run in by_size]


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
        local: AfterTheLast | None,
    ) -> None:
        self._fn = fn
        self._local = local
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

    def over(self, runs: Sequence[Sequence[ArrayTree]]) -> PyTree:
        going, found = self._start.arrays, []
        for run in runs:
            going, rest = self._over(run, going)
            found.append((self._rest, rest))
        rest = self._joined(found)
        if self._local is not None:
            going, rest = self._local.end(going, self._same, rest)
        return self._finish(going, rest)

    def _joined(
        self, found: list[tuple[ArrayTree, list[jax.Array]]]
    ) -> list[jax.Array]:
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
        self, batches: Sequence[ArrayTree], going: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        rows = zip(*(batch.arrays for batch in batches), strict=True)
        columns = [list(column) for column in rows]
        turns = LoopMasks(columns)

        def turn(
            going: list[jax.Array], given: _Given
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            arrays, masks = given
            with turns.turn(arrays, masks):
                return self._step(going, batches[0].with_arrays(arrays))

        stacked = [jnp.stack(column) for column in columns]
        return jax.lax.scan(turn, going, (stacked, turns.masks), length=len(batches))

    def _step(
        self, going: list[jax.Array], batch: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        states, parts = self._start.with_arrays(going)
        args, kwargs, objects = self._filled(states, parts)
        # Those that the step captured stand among the keyword arguments.
        replaced = {name: kwargs.pop(name) for name in self._captured}
        with rebinding.rebound(self._fn, replaced) as fn:
            local = self._local
            with contextlib.nullcontext() if local is None else local.step():
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
        others = self._rest.take()
        return new, others if self._local is None else self._local.kept(others)

    def _filled(
        self, states: Sequence[PyTree], parts: Sequence[Parts]
    ) -> tuple[list[PyTree], dict[str, PyTree], list[PyTree]]:
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


def several(fn: Function, are_local: bool = False) -> Function:
    """A function that makes one step of `fn` after the other, with a batch for each."""

    @functools.wraps(fn)
    def steps(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if not args:
            raise TypeError(
                f"`{name_of(fn)}` was called without batches. Its last positional "
                "argument is the tuple of them: `many(state, (batch, next_batch))`."
            )
        *first, batches = args
        replica, local = context.current().replica, None
        if are_local and isinstance(replica, ReplicaContext):
            local = AfterTheLast(replica) if replica.num_replicas_in_sync > 1 else None
        loop = StepLoop(fn, first, kwargs, local)
        return loop.over(runs(name_of(fn), batches))

    if (signature := signature_of(fn)) is not None:
        steps.__dict__["__signature__"] = signature
    steps.__dict__["makes_several"] = True
    code.define_at(steps, code.place_of(fn))
    return steps


def number_of_steps(fn: Function, args: Sequence[PyTree]) -> int:
    return len(args[-1]) if getattr(fn, "makes_several", False) else 1


def accumulated(
    fn: Callable[..., PyTree], k: int, mean: bool, has_aux: bool
) -> Callable[..., PyTree]:
    """`fn` called on `k` parts of its arguments, one after the other."""

    @functools.wraps(fn)
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        parts = _split((args, kwargs), k)

        def of_part(index: jax.Array) -> tuple[PyTree, PyTree]:
            args, kwargs = parts(index)
            with masks.part(index, k):
                returned = fn(*args, **kwargs)
            sums, aux = returned if has_aux else (returned, None)
            return jax.tree.map(_summable, sums, is_leaf=is_slices), aux

        def turn(total: PyTree, index: jax.Array) -> tuple[PyTree, PyTree]:
            result, aux = of_part(index)
            return jax.tree.map(jnp.add, total, jax.tree.map(_wide, result)), aux

        if context.current().eager is not None:  # what is traced has no values
            return _in_turn(of_part, k, mean, has_aux)
        # This traces `fn` once more: the loop must be told of what type the sums are
        # before it begins.
        shapes, _ = jax.eval_shape(of_part, jnp.int32(0))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide_dtype(x.dtype)), shapes)
        total, aux = jax.lax.scan(turn, zeros, jnp.arange(k))
        result = jax.tree.map(lambda x, like: _narrow(x, like, k, mean), total, shapes)
        return (result, aux) if has_aux else result

    return call


def _in_turn(
    of_part: Callable[[jax.Array], tuple[PyTree, PyTree]],
    k: int,
    mean: bool,
    has_aux: bool,
) -> PyTree:
    """The same by a loop in Python, for replicas that run eagerly."""
    found = [of_part(jnp.int32(index)) for index in range(k)]
    results = [result for result, _ in found]
    total = jax.tree.map(lambda *each: sum(map(_wide, each)), *results)
    result = jax.tree.map(lambda x, like: _narrow(x, like, k, mean), total, results[0])
    aux = jax.tree.map(lambda *each: jnp.stack(each), *(aux for _, aux in found))
    return (result, aux) if has_aux else result


def checked_parts(k: object) -> int:
    number = whole(k)
    if number is None:
        raise TypeError(
            f"`k` was {k!r}; the number of parts of a batch was wanted, a whole number."
        )
    if number < 1:
        raise ValueError(f"`k` was {number}; a batch has at least one part.")
    return number


def _split(tree: PyTree, k: int) -> Callable[[jax.Array], PyTree]:
    """A function of `i` that returns part `i` of each array in `tree`."""
    leaves, treedef = jax.tree.flatten_with_path(tree)
    for path, leaf in leaves:
        _check_rows(path, leaf, k)

    def part(index: jax.Array) -> PyTree:
        return treedef.unflatten([_part(leaf, index, k) for _, leaf in leaves])

    return part


def _is_array(leaf: Leaf) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _check_rows(path: KeyPath, leaf: Leaf, k: int) -> None:
    if not _is_array(leaf) or leaf.ndim == 0:
        return
    (_, *inner) = path
    where = f"argument {jax.tree_util.keystr(tuple(inner))}"
    if leaf.shape == (2,) and leaf.dtype == jnp.uint32:
        raise ValueError(
            f"`accumulate`: {where} looks like a random key of the old kind, which "
            "would be split as if it were two rows. Make it with `jax.random.key`, or "
            "wrap it: `jax.random.wrap_key_data(key)`."
        )
    if leaf.shape[0] % k:
        raise ValueError(
            f"`accumulate`: {where} has {leaf.shape[0]} rows on each replica, which "
            f"{k} parts cannot share equally. Use a batch that they can, or close over "
            "what is not to be split."
        )


def _part(leaf: Leaf, index: jax.Array, k: int) -> Leaf:
    if not _is_array(leaf):
        return leaf
    if leaf.ndim == 0:
        # With the same key all parts would draw the same numbers.
        return jax.random.fold_in(leaf, index) if is_key(leaf.dtype) else leaf
    rows = leaf.shape[0] // k
    return jax.lax.dynamic_slice_in_dim(leaf, index * rows, rows)


def _summable(leaf: Leaf) -> jax.Array:
    if is_slices(leaf):
        raise TypeError(
            "`accumulate` was given a function that returns IndexedSlices, which have "
            "no sum of the same size. Return `slices.to_dense()`."
        )
    return mesh.array_of(leaf)


def _wide_dtype(dtype: np.dtype) -> DTypeLike:
    """The dtype that numbers of `dtype` are summed in: 16 bits are too few for it."""
    is_small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2
    return jnp.float32 if is_small else dtype


def _wide(array: jax.Array) -> jax.Array:
    return array.astype(_wide_dtype(array.dtype))


def _narrow(
    total: jax.Array, like: jax.Array | jax.ShapeDtypeStruct, k: int, mean: bool
) -> jax.Array:
    if not mean:
        return total.astype(like.dtype)
    average = total / k
    is_inexact = jnp.issubdtype(like.dtype, jnp.inexact)
    return average.astype(like.dtype) if is_inexact else average
