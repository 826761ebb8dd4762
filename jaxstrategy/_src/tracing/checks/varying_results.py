"""Results that differ between replicas, and are meant to be equal."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import jax
from jax.extend.core import Literal

from jaxstrategy._src.errors import NotMirroredError, NotMirroredWarning
from jaxstrategy._src.options import is_function
from jaxstrategy._src.text import user_code
from jaxstrategy._src.text.shown import listed
from jaxstrategy._src.text.user_code import Line
from jaxstrategy._src.tracing.jaxprs.visit import (
    ArrayType,
    Atom,
    ClosedJaxpr,
    Equation,
    KeyPath,
    Var,
    plain,
)
from jaxstrategy._src.tracing.replication.types import Replication
from jaxstrategy._src.tracing.results import Results
from jaxstrategy._src.tracing.roles import Role, Signature
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
# It keeps all elements, and stands between each `PerReplica` and the step.
_ELEMENTWISE |= {"squeeze"}

_SCATTERS = frozenset(("scatter", "scatter-add", "scatter-sub", "scatter-mul"))
_SCATTERS |= {"scatter-min", "scatter-max"}


# New parameters are the old ones plus an update, a new running mean is a part of the
# old one plus a part of another. What was multiplied as a matrix, summed over a batch
# or made by differentiation is something else.
def contributions(jaxpr: ClosedJaxpr) -> list[Inputs]:
    """For each output of `jaxpr` the inputs that go into it."""
    return _contributions(plain(jaxpr), {})


# What is known of nested jaxprs, by their identity; the outer one holds them.
_Known = dict[int, list[Inputs]]


def _contributions(jaxpr: ClosedJaxpr, nested: _Known) -> list[Inputs]:
    if id(jaxpr) in nested:
        return nested[id(jaxpr)]
    known: dict[Var, Inputs] = {
        var: frozenset((index,)) for index, var in enumerate(jaxpr.invars)
    }

    def read(atom: Atom) -> Inputs:
        return _NONE if isinstance(atom, Literal) else known.get(atom, _NONE)

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if any(operands) and not _is_gradient(eqn):
            outputs = _through(eqn, operands, nested)
            # Not strict: of an operation that is not elementwise there are none.
            known.update(zip(eqn.outvars, outputs, strict=False))
    nested[id(jaxpr)] = [read(atom) for atom in jaxpr.outvars]
    return nested[id(jaxpr)]


def _is_gradient(eqn: Equation) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def _through(eqn: Equation, operands: list[Inputs], nested: _Known) -> list[Inputs]:
    name, params = eqn.primitive.name, eqn.params
    # Also an elementwise one, but each of its results has one operand only.
    if name == "optimization_barrier":
        return operands
    if name in _ELEMENTWISE:
        return [_NONE.union(*operands)]
    if name in _SCATTERS:
        return [operands[0]]  # some elements become others, the rest stay
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
    jaxpr: ClosedJaxpr, operands: Sequence[Inputs], nested: _Known
) -> list[Inputs]:
    """The same for the outputs of a jaxpr that is given these operands.

    Of a loop, this is the first turn; what goes in at all does so there.
    """
    return [
        _NONE.union(*(operands[index] for index in inner))
        for inner in _contributions(plain(jaxpr), nested)
    ]


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of a pytree: its structure, and the place of its first leaf."""

    structure: TreeStructure
    start: int

    def __len__(self) -> int:
        return self.structure.num_leaves

    @property
    def is_anonymous(self) -> bool:
        """Whether it is a tuple or list of bare arrays."""
        # A leaf has no data, but only parts of several nodes are asked.
        kind, _ = cast("tuple[type, object]", self.structure.node_data())
        inner = self.structure.children()
        return kind in (tuple, list) and all(each.num_nodes == 1 for each in inner)

    def parts(self) -> Iterator[_Part]:
        """The parts it is made of."""
        start = self.start
        for structure in self.structure.children():
            yield _Part(structure, start)
            start += structure.num_leaves

    def all_parts(self) -> Iterator[_Part]:
        """It and all in it that are put together of something."""
        if self.structure.num_nodes > 1 and len(self):
            yield self
            for part in self.parts():
                yield from part.all_parts()


# Nothing says which results those are. A part of the results counts as the successor of
# a part of the arguments if both are put together alike, of arrays of the same types,
# and some array of it is the old one, changed element by element. A bare array does not
# count, nor does a tuple of a few that are alike: those may be anything.
def successors(step: TracedStep) -> dict[int, int]:
    """For each result that takes the place of an argument which argument.

    Results are counted among all leaves, arguments among those that are arrays. Only
    arguments count that are equal on all replicas.
    """
    return _Matching(step).found()


class _Matching:
    """The search for the successors in one step."""

    def __init__(self, step: TracedStep) -> None:
        self._step = step
        arrays = [position for position, _ in step.results.array_paths()]
        self._outputs = {position: n for n, position in enumerate(arrays)}
        leaves = [r for r in enumerate(step.signature.roles) if r[1] is not Role.MASK]
        numbers = {at: n for n, at in enumerate(step.signature.dynamic)}
        # For each leaf of the arguments its place among the arrays.
        self._arguments = [
            numbers[at] if role is Role.SAME else None for at, role in leaves
        ]
        self._own = [
            numbers[at] if role is Role.PER_REPLICA else None for at, role in leaves
        ]
        self._inputs = {a: i for i, a in enumerate(step.inputs) if a is not None}
        self._contributions: list[Inputs] | None = None

    def found(self) -> dict[int, int]:
        """See `successors`."""
        found: dict[int, int] = {}
        given = [
            part
            for arguments in _Part(self._step.signature.treedef, 0).parts()
            for argument in arguments.parts()
            for part in argument.all_parts()
        ]
        self._match(_Part(self._step.results.treedef, 0), given, found)
        return found

    def _match(self, part: _Part, given: list[_Part], found: dict[int, int]) -> None:
        if part.structure.num_nodes <= 1 or not len(part):
            return
        alike = [
            other
            for other in given
            if len(other) == len(part) and other.structure == part.structure
        ]
        # State that was each replica's own before may stay so, also where it is moved
        # by what is equal on all, as towards the parameters of all replicas.
        if any(self._is_of_each_replica(part, other) for other in alike):
            return
        for other in alike:
            pairs = self._pairs(part, other, self._arguments)
            if pairs and self._is_update(pairs):
                found.update(pairs)
                return
        for inner in part.parts():
            self._match(inner, given, found)

    def _is_of_each_replica(self, part: _Part, other: _Part) -> bool:
        """Whether `part` takes the place of `other`, arrays of each replica alone."""
        if any(self._arguments[other.start + i] is not None for i in range(len(part))):
            return False
        pairs = self._pairs(part, other, self._own)
        return pairs is not None and bool(pairs) and self._is_update(pairs)

    def _pairs(
        self, part: _Part, other: _Part, arguments: Sequence[int | None]
    ) -> dict[int, int] | None:
        """Results and the `arguments` in the same places; None if types differ."""
        pairs = {}
        for offset in range(len(part)):
            output = self._outputs.get(part.start + offset)
            argument = arguments[other.start + offset]
            if output is None or argument is None:
                continue
            if not self._are_alike(output, argument):
                return None
            pairs[part.start + offset] = argument
        return None if part.is_anonymous and self._are_all_alike(pairs) else pairs

    def _are_all_alike(self, pairs: dict[int, int]) -> bool:
        types = [self._step.outputs[self._outputs[position]] for position in pairs]
        return len({(each.shape, each.dtype) for each in types}) <= 1

    def _are_alike(self, output: int, argument: int) -> bool:
        if argument not in self._inputs:
            return True  # not used at all
        new, old = self._step.outputs[output], self._step.type_of(argument)
        return new.shape == old.shape and new.dtype == old.dtype

    def _is_update(self, pairs: dict[int, int]) -> bool:
        # Only where something matches: it goes through the whole jaxpr, once.
        if self._contributions is None:
            self._contributions = contributions(self._step.jaxpr)
        return any(
            self._inputs.get(argument) in self._contributions[self._outputs[position]]
            for position, argument in pairs.items()
        )


class NamedResults(Protocol):
    """The results of a step, of which messages say the names."""

    @property
    def results(self) -> Results:
        """The pytree that it returned."""
        ...

    @property
    def has_objects(self) -> bool:
        """Whether new arrays of objects stand behind them."""
        ...

    def path(self, keys: KeyPath) -> str:
        """The name of the result at `keys`."""
        ...


def broken_promises(step: TracedStep, expected: PyTree) -> Iterator[NotMirroredError]:
    """One for each result that is expected to be mirrored and varies."""
    if expected is None:
        return
    for _, keys, state, is_expected in _varying(step, expected):
        if not is_expected:
            continue
        line, path = step.began(state), step.path(keys)
        what, advice = (
            (f"`{step.name}` leaves {path} different on each replica.", OF_OBJECTS)
            if step.is_of_object(keys)
            else (_EXPECTED.format(path=path), OF_RESULTS)
        )
        text = f"{what}\n  it varies since: {step.why(state)}\n{advice}"
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
    """A result that varies, and of which nobody has said whether it should."""

    path: str
    why: str


def unstated(step: TracedStep, expected: PyTree) -> dict[int, Unstated]:
    """The unstated results of `step`, by their place among the leaves."""
    return {
        position: Unstated(step.path(keys), step.why(state))
        for position, (keys, state) in _unstated(step, expected).items()
    }


def _unstated(
    step: TracedStep, expected: PyTree
) -> dict[int, tuple[KeyPath, Replication]]:
    if step.num_replicas == 1:  # one replica cannot differ from itself
        return {}
    return {
        position: (keys, state)
        for position, keys, state, is_expected in _varying(step, expected)
        if is_expected is None
    }


def forgotten_reductions(
    step: TracedStep, expected: PyTree
) -> Iterator[tuple[str, str, Line | None]]:
    """A path, a message and a line if state comes out different that went in equal."""
    varying = _unstated(step, expected)
    replaced = successors(step) if varying else {}
    found = [(replaced[each], *varying[each]) for each in varying if each in replaced]
    if not found:
        return
    (argument, keys, state), *others = found
    paths = [step.path(other).strip("`") for _, other, _ in others]
    also = listed(paths, 3, "`")
    message = (
        f"`{step.name}` was given {step.label(argument)} equal on all replicas, and "
        f"returns {step.path(keys)}, what takes its place, different on each.\n"
        f"  it varies since: {step.why(state)}\n"
        + (f"  so do {also}\n" if others else "")
        + "A loop that goes on with it has a model for each replica instead of one. "
        + SHOULD_BE_REDUCED
    )
    yield step.path(keys).strip("`"), message, step.began(state)


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
    """The results that vary: position, path, why, and whether they should not."""
    is_expected = expectation(step, expected)
    arrays = step.results.array_paths()
    states = zip(arrays, step.outputs, step.findings.outputs, strict=True)
    for (position, keys), output, state in states:
        if state is not None and state.varies:
            yield position, keys, state, is_expected(position, keys, output)


def expectation(
    step: NamedResults, expected: PyTree
) -> Callable[[int, KeyPath, ArrayType], bool | None]:
    """Whether the result with this position, path and type should be mirrored.

    None: nothing was said of it.
    """
    if expected is None:
        return lambda position, keys, output: None
    if is_function(expected):
        return lambda position, keys, output: bool(
            expected(keys, jax.ShapeDtypeStruct(output.shape, output.dtype))
        )
    wanted = _spread(expected, step)
    return lambda position, keys, output: wanted[position]


def _spread(prefix: PyTree, step: NamedResults) -> list[bool | None]:
    """For each leaf of the results the entry of `prefix`, a pytree prefix, above it."""
    results = step.results
    shape = results.treedef.unflatten(range(len(results.leaves)))
    # None has no leaves, but may have an entry of its own; -1 stands for it.
    shape = jax.tree.map(lambda n: -1 if n is None else n, shape, is_leaf=_is_none)
    try:
        spread = jax.tree.broadcast(prefix, shape, is_leaf=_is_none)
    except ValueError as error:
        treedef = results.treedef
        if step.has_objects:  # nobody has written what stands for them
            prefix, treedef = prefix[0], treedef.children()[0]
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


# A step that was given an array equal on all replicas, and is then given what it made
# of it, different on each, has lost a reduction on the way.
class Returned:
    """Varying results that the programs of one function returned when they were new.

    It keeps no array alive.
    """

    def __init__(self) -> None:
        self._signatures: list[Signature] = []
        self._results: dict[int, tuple[weakref.ref[jax.Array], Unstated]] = {}
        self._is_told = False

    def add(
        self, signature: Signature, results: PyTree, unstated: dict[int, Unstated]
    ) -> None:
        """Take note of what a new program returned."""
        self._signatures.append(signature)
        if self._is_told or not unstated:
            return
        leaves = jax.tree.leaves(results, is_leaf=trees.is_whole)
        for position, each in unstated.items():
            leaf = leaves[position]
            if isinstance(leaf, PerReplica):
                array = per_replica.contents(leaf)
                self._results[id(array)] = weakref.ref(array), each

    def check(self, signature: Signature, leaves: Sequence[Leaf], fn: Function) -> None:
        """Warn, once, if an argument is such a result and was mirrored before."""
        if not self._results:
            return
        before = [s for s in self._signatures if s.treedef == signature.treedef]
        for index, array in zip(signature.dynamic, leaves, strict=True):
            known = self._results.get(id(array))
            # An array that is gone may have left its id to another one.
            if known is None or known[0]() is not array:
                continue
            leaf = signature.leaves.index(index)
            if any(s.roles[s.leaves[leaf]] is Role.SAME for s in before):
                self._warn(signature.label(fn, index), known[1], fn)
                return

    def _warn(self, argument: str, result: Unstated, fn: Function) -> None:
        self._is_told, self._results = True, {}
        name = getattr(fn, "__name__", type(fn).__name__)
        user_code.warn(
            f"{argument}, an argument of `{name}`, was equal on all replicas at an "
            f"earlier call and differs between them now: it is {result.path}, which "
            "that call returned.\n"
            f"  it varies since: {result.why}\n"
            f"Each replica goes on with its own. {SHOULD_BE_REDUCED}",
            NotMirroredWarning,
        )
