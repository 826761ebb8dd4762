"""Finds results that vary between replicas although they should be equal."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import jax
from jax.extend.core import Literal

from jaxstrategy._src import text
from jaxstrategy._src.errors import NotMirroredError, NotMirroredWarning
from jaxstrategy._src.options import is_function
from jaxstrategy._src.text import Line, listed
from jaxstrategy._src.tracing.jaxprs import (
    ArrayType,
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    KeyPath,
    Var,
    plain,
)
from jaxstrategy._src.tracing.replication.types import Replication
from jaxstrategy._src.tracing.signature import NamedResults, Role, Signature
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.values import per_replica, trees
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.per_replica import PerReplica

Inputs = frozenset[int]
_NONE: Inputs = frozenset()

_ELEMENTWISE = frozenset(
    ("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "select_n", "copy")
)
_ELEMENTWISE |= {"convert_element_type", "reduce_precision", "optimization_barrier"}
_ELEMENTWISE |= {"clamp", "stop_gradient"}
# It keeps all elements, and takes each replica's version of a `PerReplica`.
_ELEMENTWISE |= {"squeeze"}

_SCATTERS = frozenset(("scatter", "scatter-add", "scatter-sub", "scatter-mul"))
_SCATTERS |= {"scatter-min", "scatter-max"}


# The contributions of inner jaxprs, by `id`; the outer one keeps them alive.
_Nested = dict[int, list[Inputs]]


# Such as new parameters, the old ones plus an update, or a new running mean. Matrix
# products, sums over a batch and gradients are no updates of their operands.
def contributions(jaxpr: Jaxpr, nested: _Nested) -> list[Inputs]:
    """For each output of `jaxpr` the inputs from which it is computed elementwise."""
    if id(jaxpr) in nested:
        return nested[id(jaxpr)]
    known: dict[Var, Inputs] = {
        var: frozenset((index,)) for index, var in enumerate(jaxpr.invars)
    }

    def read(atom: Atom) -> Inputs:
        return _NONE if isinstance(atom, Literal) else known.get(atom, _NONE)

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        is_gradient = "transpose(" in str(eqn.source_info.name_stack)
        if any(operands) and not is_gradient:
            outputs = _through(eqn, operands, nested)
            # Not strict: empty for operations that are not elementwise.
            known.update(zip(eqn.outvars, outputs, strict=False))
    nested[id(jaxpr)] = [read(atom) for atom in jaxpr.outvars]
    return nested[id(jaxpr)]


def _through(eqn: Equation, operands: list[Inputs], nested: _Nested) -> list[Inputs]:
    name, params = eqn.primitive.name, eqn.params
    if name == "optimization_barrier":
        return operands
    if name in _ELEMENTWISE:
        return [_NONE.union(*operands)]
    if name in _SCATTERS:
        return [operands[0]]  # most elements stay
    if name == "cond":
        rest = operands[1:]
        branches = [_called(each, rest, nested) for each in params["branches"]]
        return [_NONE.union(*each) for each in zip(*branches, strict=True)]
    if name == "scan":
        return _called(params["jaxpr"], operands, nested)
    if name == "while":
        rest = operands[params["cond_nconsts"] :]
        return _called(params["body_jaxpr"], rest, nested)
    for inner in (params.get(key) for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")):
        if inner is not None and len(plain(inner).invars) == len(operands):
            return _called(inner, operands, nested)
    return []


def _called(
    jaxpr: ClosedJaxpr, operands: Sequence[Inputs], nested: _Nested
) -> list[Inputs]:
    """The contributions to a jaxpr's outputs; for a loop, those of one iteration."""
    return [
        _NONE.union(*(operands[index] for index in inner))
        for inner in contributions(plain(jaxpr), nested)
    ]


_Part: TypeAlias = tuple[TreeStructure, int]
"""A subtree: its structure, and the index of its first leaf."""


def _children(part: _Part) -> Iterator[_Part]:
    structure, start = part
    for child in structure.children():
        yield child, start
        start += child.num_leaves


def _subtrees(part: _Part) -> Iterator[_Part]:
    """The subtree and all in it that have leaves."""
    if part[0].num_nodes > 1 and part[0].num_leaves:
        yield part
        for child in _children(part):
            yield from _subtrees(child)


def _is_anonymous(structure: TreeStructure) -> bool:
    """Whether it is a tuple or list of bare arrays."""
    # Never called for a leaf, which has no data.
    kind, _ = cast("tuple[type, object]", structure.node_data())
    inner = structure.children()
    return kind in (tuple, list) and all(each.num_nodes == 1 for each in inner)


# A subtree of the results is an update of a subtree of the arguments if both have the
# same structure and types, and some array is computed from the old one elementwise. A
# bare array does not count, nor a tuple of a few of one type: those may be anything.
def updated_arguments(step: TracedStep) -> dict[int, int]:
    """For each result that updates an argument which argument.

    Results are counted among all leaves, arguments among arrays. Only for arguments
    that are equal on all replicas.
    """
    outputs = {at: n for n, (at, _) in enumerate(step.results.array_paths())}
    inputs = step.input_of
    leaves = [r for r in enumerate(step.signature.roles) if r[1] is not Role.MASK]
    numbers = {at: n for n, at in enumerate(step.signature.dynamic)}
    # For each leaf of the arguments its index among arrays, by role.
    mirrored, per_replica_only = (
        [numbers[at] if role is wanted else None for at, role in leaves]
        for wanted in (Role.SAME, Role.PER_REPLICA)
    )
    arguments = [
        part
        for args in _children((step.signature.treedef, 0))
        for argument in _children(args)
        for part in _subtrees(argument)
    ]
    sources = functools.cache(lambda: contributions(step.jaxpr, {}))
    found: dict[int, int] = {}

    def have_same_type(output: int, argument: int) -> bool:
        if argument not in inputs:
            return True  # unused
        new, old = step.outputs[output], step.type_of(argument)
        return new.shape == old.shape and new.dtype == old.dtype

    def updates(
        part: _Part, other: _Part, arguments: Sequence[int | None]
    ) -> dict[int, int]:
        """The results and arguments at the same places, if the former update these."""
        structure, start = part
        pairs: dict[int, int] = {}
        for at, argument in enumerate(arguments[other[1] :][: structure.num_leaves]):
            if start + at in outputs and argument is not None:
                pairs[start + at] = argument
        types = [step.outputs[outputs[at]] for at in pairs]
        has_one_type = len({(each.shape, each.dtype) for each in types}) <= 1
        if has_one_type and _is_anonymous(structure):
            return {}
        if not all(have_same_type(outputs[at], a) for at, a in pairs.items()):
            return {}
        is_update = any(
            inputs.get(a) in sources()[outputs[at]] for at, a in pairs.items()
        )
        return pairs if is_update else {}

    def match(part: _Part) -> None:
        structure, count = part[0], part[0].num_leaves
        if structure.num_nodes <= 1 or not count:
            return
        candidates = [each for each in arguments if each[0] == structure]
        for other in candidates:
            same = mirrored[other[1] : other[1] + count]
            # State that was per replica before may stay so, even where values that are
            # equal on all replicas go into it.
            is_own = all(each is None for each in same)
            if is_own and updates(part, other, per_replica_only):
                return
        for other in candidates:
            if pairs := updates(part, other, mirrored):
                found.update(pairs)
                return
        for inner in _children(part):
            match(inner)

    match((step.results.treedef, 0))
    return found


def unexpected_results(
    step: TracedStep, expected: PyTree
) -> Iterator[NotMirroredError]:
    """An error for each result that varies and is expected to be mirrored."""
    if expected is None and not step.has_objects:
        return
    for _, keys, state, is_expected in _varying(step, expected):
        if not is_expected:
            continue
        line, path = step.line_of(state), step.path(keys)
        what, advice = (
            (f"`{step.name}` leaves {path} different on each replica.", OF_OBJECTS)
            if step.is_of_object(keys)
            else (_EXPECTED.format(path=path), OF_RESULTS)
        )
        text = f"{what}\n  it varies since: {step.origin_of(state)}\n{advice}"
        yield NotMirroredError(text, path=path.strip("`"), line=line and str(line))


_EXPECTED = "{path} was expected to be mirrored, but may differ between replicas."
OF_RESULTS = (
    "Something it is computed from was not reduced: use "
    "`get_replica_context().all_reduce('mean', ...)` on the way, usually on the "
    "gradients. If it may differ, take it out of `expect_mirrored`."
)
OF_OBJECTS = (
    "Reduce what it is computed from: the gradients with "
    "`get_replica_context().all_reduce('mean', grads)`, statistics of BatchNorm with "
    "`jaxstrategy.flax.nnx.BatchNorm`; and update metrics with "
    "`jaxstrategy.flax.nnx.update_metrics`, given what each row has, such as losses "
    "before their mean."
)


@dataclasses.dataclass(frozen=True)
class Unstated:
    """A result that varies, and for which `expect_mirrored` has no entry, in words."""

    path: str
    why: str


def unstated(
    step: TracedStep, expected: PyTree
) -> dict[int, tuple[KeyPath, Replication]]:
    """Results that vary and have no entry in `expected`, by their index of leaves."""
    if step.replicas.count == 1:
        return {}
    return {
        position: (keys, state)
        for position, keys, state, is_expected in _varying(step, expected)
        if is_expected is None
    }


def forgotten_reductions(
    step: TracedStep, varying: Mapping[int, tuple[KeyPath, Replication]]
) -> Iterator[tuple[str, str, Line | None]]:
    """A path, a message and a line if mirrored state is among `unstated` results."""
    updated = updated_arguments(step) if varying else {}
    found = [(updated[each], *varying[each]) for each in varying if each in updated]
    if not found:
        return
    (argument, keys, state), *others = found
    paths = [step.path(other).strip("`") for _, other, _ in others]
    also = listed(paths, 3, "`")
    message = (
        f"`{step.name}` was given {step.label(argument)} equal on all replicas, and "
        f"returns {step.path(keys)}, what takes its place, different on each.\n"
        f"  it varies since: {step.origin_of(state)}\n"
        + (f"  so do {also}\n" if others else "")
        + "A loop that goes on with it has a model for each replica instead of one. "
        + SHOULD_BE_REDUCED
    )
    yield step.path(keys).strip("`"), message, step.line_of(state)


SHOULD_BE_REDUCED = (
    "Something it is computed from was not reduced: use "
    "`get_replica_context().all_reduce('mean', ...)` on the way, usually on the "
    "gradients (for BatchNorm: `jaxstrategy.flax.linen.BatchNorm`; for BatchNorm and "
    "metrics of Keras: what `jaxstrategy.keras` has). If each replica is to have its "
    "own, say so: `RunOptions(expect_mirrored=False)`."
)


def _varying(
    step: TracedStep, expected: PyTree
) -> Iterator[tuple[int, KeyPath, Replication, bool | None]]:
    """The varying results: position, path, type, and whether they should not vary."""
    is_expected = expectation(step, expected)
    arrays = step.results.array_paths()
    states = zip(arrays, step.outputs, step.findings.outputs, strict=True)
    for (position, keys), output, state in states:
        if state is not None and state.varies:
            yield position, keys, state, is_expected(position, keys, output)


def expectation(
    step: NamedResults, expected: PyTree
) -> Callable[[int, KeyPath, ArrayType], bool | None]:
    """Whether a result with a position, path and type should be mirrored, if stated."""
    entries: list[bool | None] | None = None
    if expected is not None and not is_function(expected):
        entries = _broadcast(expected, step)

    def is_expected(position: int, keys: KeyPath, output: ArrayType) -> bool | None:
        if step.is_of_object(keys):
            return True
        if entries is not None:
            return entries[position]
        if expected is not None:
            leaf = jax.ShapeDtypeStruct(output.shape, output.dtype)
            return bool(expected(keys[step.has_objects :], leaf))

    return is_expected


def _broadcast(prefix: PyTree, step: NamedResults) -> list[bool | None]:
    """The entry of a pytree prefix for each leaf of the results."""
    results = step.results
    shape = results.treedef.unflatten(range(len(results.leaves)))
    # None has no leaves, but may have an entry: use -1.
    shape = jax.tree.map(lambda n: -1 if n is None else n, shape, is_leaf=_is_none)
    try:
        whole = (prefix, True) if step.has_objects else prefix
        spread = jax.tree.broadcast(whole, shape, is_leaf=_is_none)
    except ValueError as error:
        treedef = results.treedef
        if step.has_objects:
            treedef = treedef.children()[0]
        structure = str(treedef).removeprefix("PyTreeDef(").removesuffix(")")
        raise ValueError(
            f"`expect_mirrored` is {prefix!r}, which does not fit what the step "
            f"returns: {step.path(())} is {structure}. Give True or False for all of "
            "it, or for each part, in containers like its own."
        ) from error
    entries = jax.tree.leaves(spread, is_leaf=_is_none)
    pairs = zip(jax.tree.leaves(shape), entries, strict=True)
    return [entry for position, entry in pairs if position >= 0]


def _is_none(entry: object) -> bool:
    return entry is None


# If a step takes a mirrored array, and in a later call its own varying result instead,
# a reduction is missing.
class Returned:
    """Varying results of the first call of each program, without keeping them alive."""

    def __init__(self) -> None:
        self._signatures: list[Signature] = []
        self._results: dict[int, tuple[weakref.ref[jax.Array], Unstated]] = {}
        self._has_warned = False

    def add(
        self, signature: Signature, results: PyTree, unstated: dict[int, Unstated]
    ) -> None:
        """Adds the results of a new program."""
        self._signatures.append(signature)
        if self._has_warned or not unstated:
            return
        leaves = jax.tree.leaves(results, is_leaf=trees.is_whole)
        for position, each in unstated.items():
            leaf = leaves[position]
            if isinstance(leaf, PerReplica):
                array = per_replica.contents(leaf)
                self._results[id(array)] = weakref.ref(array), each

    def check(self, signature: Signature, leaves: Sequence[Leaf], fn: Function) -> None:
        """Warns, once, if an argument is such a result and was mirrored before."""
        if not self._results:
            return
        before = [s for s in self._signatures if s.treedef == signature.treedef]
        for index, array in zip(signature.dynamic, leaves, strict=True):
            known = self._results.get(id(array))
            # Another array may have got the id.
            if known is None or known[0]() is not array:
                continue
            leaf = signature.leaves.index(index)
            if any(s.roles[s.leaves[leaf]] is Role.SAME for s in before):
                self._warn(signature.labels(fn)[index], known[1], fn)
                return

    def _warn(self, argument: str, result: Unstated, fn: Function) -> None:
        self._has_warned, self._results = True, {}
        name = getattr(fn, "__name__", type(fn).__name__)
        text.warn(
            f"{argument}, an argument of `{name}`, was equal on all replicas at an "
            f"earlier call and differs between them now: it is {result.path}, which "
            "that call returned.\n"
            f"  it varies since: {result.why}\n"
            f"Each replica goes on with its own. {SHOULD_BE_REDUCED}",
            NotMirroredWarning,
        )
