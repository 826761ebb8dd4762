"""Several steps in one call, and one step in several parts of its batch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import cast, final

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
from jaxstrategy._src.text import array_type, whole
from jaxstrategy._src.tracing import nnx, rebinding
from jaxstrategy._src.tracing.jaxprs import KeyPath
from jaxstrategy._src.tracing.nnx import ObjectArrays, is_object_arrays
from jaxstrategy._src.tracing.references import copy_source_location
from jaxstrategy._src.tracing.traced_step import name_of
from jaxstrategy._src.values import arrays as _arrays, trees
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.slices import is_slices
from jaxstrategy._src.values.trees import is_nnx_node
from jaxstrategy._src.variables.variable import Variable


@final
class LocalMeans:
    """Local steps: replicas do not communicate until means are taken after the last."""

    def __init__(self, replica: ReplicaContext) -> None:
        self._replica = replica
        self._local = LocalSteps(replica.num_replicas_in_sync)
        self._reductions: list[HowReduced | None] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Enters a step, whose reductions use the values of this replica alone."""
        self._local.reduction.begin()
        with context.entered(local=self._local), jax.named_scope(LOCAL_SCOPE):
            yield

    def before_reduction(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        """The operands of outputs that the step has reduced; the others as they are."""
        pairs = [self._local.reduction.before(array) for array in outputs]
        self._local.reduction.forget()
        self._reductions = [how for _, how in pairs]
        return [operand for operand, _ in pairs]

    def end(
        self,
        state: Sequence[jax.Array],
        unchanged: Sequence[bool],
        outputs: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Takes means of changed float state, and does the reductions of the steps."""
        assigned = self._local.assigned.values()
        variables = [
            v for v in assigned if v.copies_must_agree and _is_float(v.value())
        ]
        arrays = [*state, *outputs, *(each.value() for each in variables)]
        means = [
            _MEAN if _is_float(array) and not is_same else None
            for array, is_same in zip(state, unchanged, strict=True)
        ]
        reductions = [*means, *self._reductions, *(_MEAN for _ in variables)]
        for how in dict.fromkeys(filter(None, reductions)):
            indices = [i for i, other in enumerate(reductions) if other == how]
            results = self._replica.all_reduce(
                how.op, [arrays[i] for i in indices], how.options, groups=how.groups
            )
            for i, array in zip(indices, results, strict=True):
                arrays[i] = array
        first, second = len(state), len(state) + len(outputs)
        # In cross-replica context a variable is assigned, whatever its aggregation.
        with context.entered(replica=None):
            for variable, mean in zip(variables, arrays[second:], strict=True):
                cast(Variable, variable).assign(mean)
        return arrays[:first], arrays[first:second]


_MEAN = HowReduced(ReduceOp.MEAN)


def _is_float(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


class ArrayTree:
    """A pytree as its arrays and the rest of it."""

    def __init__(self, tree: PyTree, with_numbers: bool = True) -> None:
        pairs, self.structure = jax.tree.flatten_with_path(tree, is_leaf=trees.is_whole)
        self.paths = [path for path, _ in pairs]
        self.leaves = [
            mesh.array_of(leaf) if with_numbers and _is_number(leaf) else leaf
            for _, leaf in pairs
        ]
        self._are_arrays = list(map(_arrays.is_array, self.leaves))

    @property
    def arrays(self) -> list[jax.Array]:
        leaves = zip(self.leaves, self._are_arrays, strict=True)
        return [jnp.asarray(leaf) for leaf, is_array in leaves if is_array]

    def take(self) -> list[jax.Array]:
        """Removes and returns the arrays: those of a trace must not outlive it."""
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


def _is_number(leaf: Leaf) -> bool:
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)


def _are_alike(a: Leaf, b: Leaf, but_rows: bool = False) -> bool:
    """Whether both have the same type and static value, apart from rows if asked."""
    if _arrays.is_array(a) and _arrays.is_array(b):
        if but_rows and a.ndim and b.ndim:
            return (a.shape[1:], a.dtype) == (b.shape[1:], b.dtype)
        return (a.shape, a.dtype) == (b.shape, b.dtype)
    # Of one type, because 1, 1.0 and True are equal.
    return a is b or (type(a) is type(b) and bool(a == b))


def _text(value: object) -> str:
    if _arrays.is_array(value):
        return array_type(value.dtype, value.shape)
    is_leaf = jax.tree_util.all_leaves([value])
    return repr(value) if is_leaf else f"a {type(value).__name__}"


def signature_of(fn: Function) -> inspect.Signature | None:
    """The signature of the step, with `batches` for its last argument."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in POSITIONAL]
    if not positional or "batches" in signature.parameters:
        return signature
    last = parameters.index(positional[-1])
    parameters[last] = parameters[last].replace(name="batches")
    return signature.replace(parameters=parameters)


POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def batch_runs(name: str, given: object) -> list[list[ArrayTree]]:
    """Groups consecutive batches of one size, each group for one `lax.scan`."""
    if not isinstance(given, (tuple, list)):
        raise TypeError(
            f"`{name}` makes several steps and takes a tuple of batches in the "
            f"last place, as `jaxstrategy.experimental.grouped(dataset, 10)` makes "
            f"them. It was given {_text(given)}; write `(batch,)` for one step."
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
        if not _are_alike(leaf, first, but_rows=True):
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"`{name}`: `batches[{number}]{where}` is {_text(leaf)}, and "
                f"`batches[0]{where}` is {_text(first)}. {advice}"
            )


class StepLoop:
    """One call of a loop over steps: its carry, and arguments that stay."""

    def __init__(
        self,
        fn: Function,
        args: list[PyTree],
        kwargs: dict[str, PyTree],
        local: LocalMeans | None,
    ) -> None:
        self._fn = fn
        self._local = local
        self._name = name_of(fn)
        signature = signature_of(fn)
        parameters = [] if signature is None else signature.parameters.values()
        names = [p.name for p in parameters if p.kind in POSITIONAL]
        names += [f"args[{i}]" for i in range(len(names), len(args))]
        self._names = names
        self._carried = [i for i, each in enumerate(args) if self._is_carried(i, each)]
        captured = nnx.captured_by(fn)
        self._objects, arguments = nnx.as_arrays((args, kwargs), captured)
        self._captured, (new, self._kwargs) = tuple(captured), arguments
        self._args = list(new)
        states = [args[i] for i in self._carried]
        self._parts = [] if self._objects is None else self._objects.parts()
        self._initial = ArrayTree((states, self._parts))
        self._unchanged = [True] * len(self._initial.arrays)
        self._outputs = ArrayTree(None)
        self._returns_state = False

    def _is_carried(self, place: int, argument: PyTree) -> bool:
        """Whether the step returns a new value of this argument."""
        leaves = jax.tree.leaves(argument, is_leaf=_is_whole)
        if any(map(is_nnx_node, leaves)):
            if any(_arrays.is_array(leaf) or _is_number(leaf) for leaf in leaves):
                raise ObjectError(
                    f"`{self._name}`: `{self._names[place]}` holds objects of Flax "
                    "NNX, which are changed in place, and arrays, which are returned. "
                    "In a loop of several steps give them as arguments of their own."
                )
            return False
        is_leaf = jax.tree_util.all_leaves([argument], is_leaf=trees.is_whole)
        return not is_leaf or _arrays.is_array(argument) or _is_number(argument)

    def run(self, batch_runs: Sequence[Sequence[ArrayTree]]) -> PyTree:
        carry, stacked = self._initial.arrays, []
        for batches in batch_runs:
            carry, outputs = self._scan(batches, carry)
            stacked.append((self._outputs, outputs))
        outputs = self._concatenated(stacked)
        if self._local is not None:
            carry, outputs = self._local.end(carry, self._unchanged, outputs)
        return self._finish(carry, outputs)

    def _concatenated(
        self, stacked: list[tuple[ArrayTree, list[jax.Array]]]
    ) -> list[jax.Array]:
        ((first, outputs), *others) = stacked
        for tree, arrays in others:
            pairs = zip(outputs, arrays, strict=True)
            if tree.structure != first.structure or any(
                a.shape[1:] != b.shape[1:] for a, b in pairs
            ):
                shapes = [list(a.shape[1:]) for a in outputs]
                raise ValueError(
                    f"`{self._name}` returned arrays that differ with the size of the "
                    f"batch, of shapes {shapes} and "
                    f"{[list(a.shape[1:]) for a in arrays]}, which cannot be stacked. "
                    "Return sums or means over the rows, or leave out the smaller "
                    'batch with `InputOptions(remainder="drop")`.'
                )
        if not others:
            return outputs
        columns = zip(*(arrays for _, arrays in stacked), strict=True)
        return [jnp.concatenate(column) for column in columns]

    def _scan(
        self, batches: Sequence[ArrayTree], carry: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        rows = zip(*(batch.arrays for batch in batches), strict=True)
        columns = [list(column) for column in rows]
        loop_masks = LoopMasks(columns)

        def body(
            carry: list[jax.Array],
            batch: tuple[list[jax.Array], dict[int, jax.Array]],
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            arrays, masks = batch
            with loop_masks.step(arrays, masks):
                return self._step(carry, batches[0].with_arrays(arrays))

        inputs = [jnp.stack(column) for column in columns], loop_masks.masks
        return jax.lax.scan(body, carry, inputs, length=len(batches))

    def _step(
        self, carry: list[jax.Array], batch: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        states, parts = self._initial.with_arrays(carry)
        args, kwargs, objects = self._rebuilt(states, parts)
        # Captured objects are among the keyword arguments.
        replaced = {name: kwargs.pop(name) for name in self._captured}
        with rebinding.rebound(self._fn, replaced) as fn:
            local = self._local
            with contextlib.nullcontext() if local is None else local.step():
                returned = jax.tree.map(
                    lambda leaf: leaf.value() if isinstance(leaf, Variable) else leaf,
                    fn(*args, batch, **kwargs),
                    is_leaf=_is_whole,
                )
        if any(map(is_nnx_node, jax.tree.leaves(returned, is_leaf=_is_whole))):
            raise ObjectError(
                f"`{self._name}` returned an object of Flax NNX. In a loop of several "
                "steps objects are changed in place; return only what else there is."
            )
        states, rest = self._split_results(returned)
        self._outputs = ArrayTree(rest, with_numbers=False)
        new = self._checked(states, self._parts_after(objects, parts))
        # An array that no step changes, as a replica's key, stays the same object.
        triples = zip(self._unchanged, carry, new, strict=True)
        self._unchanged = [same and old is now for same, old, now in triples]
        outputs = self._outputs.take()
        local = self._local
        return new, outputs if local is None else local.before_reduction(outputs)

    def _rebuilt(
        self, states: Sequence[PyTree], parts: Sequence[ObjectArrays]
    ) -> tuple[list[PyTree], dict[str, PyTree], list[PyTree]]:
        args = list(self._args)
        for place, state in zip(self._carried, states, strict=True):
            args[place] = state
        if self._objects is None:
            return args, dict(self._kwargs), []
        objects = self._objects.structure.merge(parts)
        following = iter(objects)
        args, kwargs = jax.tree.map(
            lambda leaf: next(following) if is_object_arrays(leaf) else leaf,
            (args, self._kwargs),
            is_leaf=lambda node: is_object_arrays(node) or trees.is_whole(node),
        )
        return args, kwargs, objects

    def _parts_after(
        self, objects: list[PyTree], before: Sequence[ObjectArrays]
    ) -> Sequence[ObjectArrays]:
        if self._objects is None:
            return []
        parts = self._objects.structure.split(objects, before)
        for change in parts[0].changes:
            raise ObjectError(
                f"`{self._name}` changes `{change.name}` of an object of Flax NNX, "
                "which is no variable. In a loop of several steps Python runs once for "
                "all of them: change it before, with `model.train()` for example, or "
                "make it an `nnx.Variable`."
            )
        return parts

    def _split_results(self, returned: PyTree) -> tuple[list[PyTree], PyTree]:
        """The new values of the carried arguments, and the other results."""
        count = len(self._carried)
        if not count:
            return [], returned
        structures = [_structure(self._args[i]) for i in self._carried]
        if count == 1 and structures[0] == _structure(returned):
            self._returns_state = True
            return [returned], ()
        if not isinstance(returned, tuple) or len(returned) < count:
            names = ", ".join(self._names[i] for i in self._carried)
            raise TypeError(
                f"`{self._name}` goes on with {names}, so each step is to return "
                f"`({names}, ...)`, the new ones first. It returned "
                f"{_text(returned)}. Give by keyword what is the same in all steps."
            )
        for place, want, new in zip(self._carried, structures, returned, strict=False):
            have = _structure(new)
            if have != want:
                raise TypeError(
                    f"`{self._name}` was given `{self._names[place]}` and returned "
                    f"something else in its place: {have} instead of {want}. The next "
                    "step goes on with what a step returns first. Give by keyword "
                    "what is the same in all steps."
                )
        return list(returned[:count]), returned[count:]

    def _checked(
        self, states: list[PyTree], parts: Sequence[ObjectArrays]
    ) -> list[jax.Array]:
        now = ArrayTree((states, parts))
        leaves = zip(now.paths, self._initial.leaves, now.leaves, strict=True)
        for path, before, after in leaves:
            if not _are_alike(before, after):
                raise TypeError(
                    f"`{self._name}`: {self._label(path)} is {_text(before)} before a "
                    f"step and {_text(after)} after it. In a loop of several steps it "
                    "stays what it is: begin with what a step makes, or convert it "
                    "(`.astype`)."
                )
        return now.arrays

    def _label(self, path: KeyPath) -> str:
        (kind, which, *rest) = path
        where = jax.tree_util.keystr(tuple(rest))
        if kind.idx == 1:
            return f"`{where.removeprefix('.')}` of an object"
        return f"`{self._names[self._carried[which.idx]]}{where}`"

    def _finish(
        self, carry: Sequence[jax.Array], outputs: Sequence[jax.Array]
    ) -> PyTree:
        triples = zip(self._unchanged, self._initial.arrays, carry, strict=True)
        states, parts = self._initial.with_arrays(
            [before if same else after for same, before, after in triples]
        )
        if self._objects is not None:
            self._objects.store(parts)
        others = self._outputs.with_arrays(outputs)
        if not self._carried:
            return others
        return states[0] if self._returns_state else (*states, *others)


def _is_whole(node: object) -> bool:
    if trees.is_whole(node) or is_nnx_node(node):
        return True
    # A state of NNX has copies of variables, and is carried like other state.
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
            local = LocalMeans(replica) if replica.num_replicas_in_sync > 1 else None
        groups = batch_runs(name_of(fn), batches)
        return StepLoop(fn, first, kwargs, local).run(groups)

    if (signature := signature_of(fn)) is not None:
        steps.__dict__["__signature__"] = signature
    steps.__dict__["makes_several"] = True
    copy_source_location(steps, fn)
    return steps


def number_of_steps(fn: Function, args: Sequence[PyTree]) -> int:
    return len(args[-1]) if getattr(fn, "makes_several", False) else 1


def accumulated(
    fn: Callable[..., PyTree], k: int, mean: bool, has_aux: bool
) -> Callable[..., PyTree]:
    """`fn` called on `k` parts of its arguments, one after the other."""

    @functools.wraps(fn)
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten_with_path((args, kwargs))
        for path, leaf in leaves:
            _check_rows(path, leaf, k)

        def of_part(index: jax.Array) -> tuple[PyTree, PyTree]:
            args, kwargs = treedef.unflatten([_part(x, index, k) for _, x in leaves])
            with masks.part(index, k):
                returned = fn(*args, **kwargs)
            sums, aux = returned if has_aux else (returned, None)
            return jax.tree.map(_summable, sums, is_leaf=is_slices), aux

        def body(total: PyTree, index: jax.Array) -> tuple[PyTree, PyTree]:
            result, aux = of_part(index)
            return jax.tree.map(jnp.add, total, jax.tree.map(_wide, result)), aux

        if context.current().eager is not None:  # traced arrays have no values
            parts = [of_part(jnp.int32(index)) for index in range(k)]
            results, auxes = zip(*parts, strict=True)
            types = results[0]
            total = jax.tree.map(lambda *each: sum(map(_wide, each)), *results)
            aux = jax.tree.map(lambda *each: jnp.stack(each), *auxes)
        else:
            # Traces `fn` once more: a scan needs the types of the sums.
            types, _ = jax.eval_shape(of_part, jnp.int32(0))
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, _wide_dtype(x.dtype)), types
            )
            total, aux = jax.lax.scan(body, zeros, jnp.arange(k))
        result = jax.tree.map(lambda x, like: _narrow(x, like, k, mean), total, types)
        return (result, aux) if has_aux else result

    return call


def checked_parts(k: object) -> int:
    number = whole(k)
    if number is None:
        raise TypeError(
            f"`k` was {k!r}; the number of parts of a batch was wanted, a whole number."
        )
    if number < 1:
        raise ValueError(f"`k` was {number}; a batch has at least one part.")
    return number


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
    """The dtype of sums: float32 for floats of 16 bits or fewer."""
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
