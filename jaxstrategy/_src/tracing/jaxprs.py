"""Visits and rewrites the equations of jaxprs; the table of JAX's collectives."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import DropVar, Literal
from jax.ref import AbstractRef

from jaxstrategy._src.values.arrays import Function, Leaf, PyTree

KeyPath: TypeAlias = tuple[Any, ...]
"""The keys of a leaf in a pytree."""

ArrayType: TypeAlias = Any
"""An abstract value; `Any`, as not all of JAX's have a shape and a dtype."""


class Atom(Protocol):
    """An operand of an equation, a `Var` or a `Literal`."""

    @property
    def aval(self) -> ArrayType: ...


Var: TypeAlias = Atom
"""An input of a jaxpr, or a result of an equation."""


class Equation(Protocol):
    """One operation of a jaxpr."""

    # `Any`: JAX does not export these classes.
    primitive: core.Primitive
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any
    replace: Any

    @property
    def invars(self) -> Sequence[Atom]: ...

    @property
    def outvars(self) -> Sequence[Var]: ...


Jaxpr: TypeAlias = core.Jaxpr
"""A traced function as a list of equations, without constants."""

ClosedJaxpr: TypeAlias = Any
"""A jaxpr with its constants; before JAX 0.12 a class of its own."""


def plain(jaxpr: ClosedJaxpr) -> Jaxpr:
    """`jaxpr` without its constants; before JAX 0.12 a class of its own."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner_eqns(params: object) -> Iterator[Equation]:
    """All equations in the jaxprs among an equation's parameters."""
    seen: set[int] = set()
    for jaxpr in inner_jaxprs(params):
        yield from all_eqns(jaxpr, seen)


def all_eqns(jaxpr: Jaxpr, seen: set[int] | None = None) -> Iterator[Equation]:
    """All equations of `jaxpr` and inner jaxprs, each once."""
    seen = set() if seen is None else seen
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn.params):
            yield from all_eqns(inner, seen)


def inner_jaxprs(value: object) -> Iterator[Jaxpr]:
    """The jaxprs among parameters, without their constants."""
    return map(plain, closed_jaxprs(value))


def closed_jaxprs(value: object) -> Iterator[ClosedJaxpr]:
    """The jaxprs among parameters, with their constants."""
    if value.__class__ in _PLAIN:
        return
    if hasattr(value, "eqns"):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            if item.__class__ not in _PLAIN:
                yield from closed_jaxprs(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            if item.__class__ not in _PLAIN:
                yield from closed_jaxprs(item)


_CALLS = ("jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call")


def callee(eqn: Equation) -> ClosedJaxpr | None:
    """The function that an equation only calls, once; None of other equations."""
    if eqn.primitive.name not in _CALLS:
        return None
    keys = ("jaxpr", "call_jaxpr")
    return next(eqn.params[key] for key in keys if key in eqn.params)


def scan_counts(eqn: Equation) -> tuple[int, int]:
    """The numbers of operands of a scan that are constants, and that are its carry."""
    inner = plain(eqn.params["jaxpr"])
    # Operands are constants, carry and xs; results are carry and ys. The parameters
    # with their numbers change between versions; but only xs and ys have one dimension
    # more outside the loop.
    n_carry = _count_equal_rank(eqn.outvars, inner.outvars)
    return _count_equal_rank(eqn.invars, inner.invars) - n_carry, n_carry


def _count_equal_rank(outer: Sequence[Atom], inner: Sequence[Atom]) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)


def variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    """The atoms without literals."""
    return (x for x in atoms if not isinstance(x, core.Literal | core.DropVar))


def origins_of(eqns: Iterable[Equation]) -> dict[Var, Equation]:
    """The equation that computes each variable."""
    return {var: eqn for eqn in eqns for var in eqn.outvars}


def uses_of(eqns: Iterable[Equation]) -> dict[Var, list[Equation]]:
    """The equations that read each variable."""
    uses: dict[Var, list[Equation]] = collections.defaultdict(list)
    for eqn in eqns:
        for var in variables(eqn.invars):
            uses[var].append(eqn)
    return uses


def read_by(eqns: Iterable[Equation]) -> set[Var]:
    """The variables that equations read."""
    return set(variables(atom for eqn in eqns for atom in eqn.invars))


def live_equations(
    eqns: Sequence[Equation],
    outputs: Iterable[Atom],
    operands: Callable[[Equation], Iterable[Atom]] = lambda eqn: eqn.invars,
) -> list[Equation]:
    """The equations from which `outputs` are computed (dead code elimination).

    Args:
      operands: what an equation needs.
    """
    live, eqns_kept = set(variables(outputs)), list[Equation]()
    for eqn in reversed(eqns):
        if not live.isdisjoint(eqn.outvars):
            eqns_kept.append(eqn)
            live.update(variables(operands(eqn)))
    return eqns_kept[::-1]


def with_jaxprs(value: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """A parameter of an equation, with each jaxpr in it changed."""
    if isinstance(value, (tuple, list)) and any(hasattr(x, "eqns") for x in value):
        new = [with_jaxprs(each, change) for each in value]
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        # `custom_linear_solve` keeps its jaxprs in named tuples.
        make = getattr(value, "_make", type(value))
        return make(new)
    if not hasattr(value, "eqns"):
        return value
    inner = plain(value)
    new = change(inner)
    if new is inner:
        return value
    if inner is value:
        return new
    closed: Any = value
    return closed.replace(jaxpr=new)


# The classes of most parameters.
_PLAIN = frozenset((int, bool, float, str, type(None), np.dtype))


def jaxpr_of(
    invars: Sequence[Var], eqns: Sequence[Equation], outvars: Sequence[Atom]
) -> Jaxpr:
    """A jaxpr of these equations, without constants."""
    effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns))
    given: Any = (list(invars), list(outvars), list(eqns))
    # JAX's own would have other numbers of inputs and results.
    debug_info = core.DebugInfo("jit", "part of a step", None, None)
    return core.Jaxpr((), *given, effects=effects, debug_info=debug_info)


def closed(jaxpr: Jaxpr) -> ClosedJaxpr:
    """A closed jaxpr without constants."""
    # One class since JAX 0.12, where `ClosedJaxpr` is deprecated.
    if hasattr(jaxpr, "consts"):
        return jaxpr
    return core.ClosedJaxpr(jaxpr, ())  # pyright: ignore[reportPrivateImportUsage]


class Effect(enum.Enum):
    """What a collective does."""

    SUM = "every replica has the sum"
    EXTREME = "every replica has the smallest or largest"
    GATHER = "every replica has all values"
    BROADCAST = "every replica has the value of one"
    PERMUTE = "every replica has the value of another, or zeros"
    SCATTER = "every replica has another part"
    SUM_SCATTER = "every replica has another part of the sum"
    UNKNOWN = "nothing is known of it"


@dataclasses.dataclass(frozen=True)
class CollectivePrimitive:
    """One of JAX's collectives."""

    name: str
    effect: Effect
    kind: str  # for a `Topology`
    lowered: str  # the StableHLO operation
    functions: tuple[str, ...] = ()  # of `jax.lax`, for users


_ROWS = (
    ("psum", Effect.SUM, "all_reduce", "all_reduce", ("psum", "pmean")),
    ("psum_invariant", Effect.SUM, "all_reduce", "all_reduce"),
    ("pmax", Effect.EXTREME, "all_reduce", "all_reduce", ("pmax",)),
    ("pmin", Effect.EXTREME, "all_reduce", "all_reduce", ("pmin",)),
    ("all_gather", Effect.GATHER, "all_gather", "all_gather", ("all_gather",)),
    ("all_gather_invariant", Effect.GATHER, "all_gather", "all_gather"),
    # No slower than an all-reduce; a `Topology` has no formula for it.
    ("pbroadcast", Effect.BROADCAST, "all_reduce", "collective_broadcast",
     ("pbroadcast",)),
    ("ppermute", Effect.PERMUTE, "permute", "collective_permute",
     ("ppermute", "pshuffle")),
    ("all_to_all", Effect.SCATTER, "all_to_all", "all_to_all",
     ("all_to_all", "pswapaxes")),
    ("ragged_all_to_all", Effect.SCATTER, "all_to_all", "all_to_all",
     ("ragged_all_to_all",)),
    ("reduce_scatter", Effect.SUM_SCATTER, "reduce_scatter", "reduce_scatter",
     ("psum_scatter",)),
    ("psend", Effect.SCATTER, "permute", "send"),
    ("precv", Effect.SCATTER, "permute", "recv"),
    ("pgather", Effect.UNKNOWN, "permute", "all_gather"),
)  # fmt: skip
COLLECTIVES = {row[0]: CollectivePrimitive(*row) for row in cast(Any, _ROWS)}


def effect_of(eqn: Equation) -> Effect | None:
    """The effect of a collective; None for other equations."""
    row = COLLECTIVES.get(eqn.primitive.name)
    return None if row is None else row.effect


def primitives_with(*effects: Effect) -> list[str]:
    """The names of primitives with one of these effects."""
    return [row.name for row in COLLECTIVES.values() if row.effect in effects]


def axis_names(eqn: Equation) -> tuple[object, ...]:
    """The mesh axes along which an equation communicates; none for most."""
    # `psum`, `pmax` and `pmin` have `axes`, the others `axis_name`: a tuple of names
    # or one name (JAX 0.10 and 0.12).
    found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def is_along(eqn: Equation, axes: Iterable[str]) -> bool:
    """Whether an equation communicates along one of these mesh axes."""
    return not set(axes).isdisjoint(axis_names(eqn))


Rule: TypeAlias = Callable[[Equation], Function | None]
"""Replaces an equation by a function of its operands; None: it stays.

The function returns a sequence of results. Inner jaxprs are already rewritten.
"""

Grouped: TypeAlias = Callable[[Sequence[Equation]], Sequence[Equation]]
"""Changes the equations of a jaxpr before they are rewritten."""


def rewritten(
    jaxpr: Jaxpr,
    rule: Rule,
    axis_sizes: Sequence[tuple[str, int]] = (),
    operands: Rule = lambda _: None,
    grouped: Grouped = lambda eqns: eqns,
) -> Jaxpr:
    """Rewrites `jaxpr` and inner jaxprs by a rule.

    Args:
      operands: replaces the operands of an equation by functions of them.
    """
    # An inner jaxpr may be in several equations.
    done: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def of_jaxpr(jaxpr: Any) -> Jaxpr:
        if id(jaxpr) not in done:
            eqns = [new for eqn in grouped(jaxpr.eqns) for new in of_equation(eqn)]
            effects = frozenset[Any](jaxpr.effects).union(*(e.effects for e in eqns))
            is_same = len(eqns) == len(jaxpr.eqns) and all(
                new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)
            )
            new = jaxpr if is_same else jaxpr.replace(eqns=eqns, effects=effects)
            done[id(jaxpr)] = jaxpr, new
        return done[id(jaxpr)][1]

    def of_equation(eqn: Any) -> list[Equation]:
        if eqn.primitive.name == "shard_map":
            return [eqn]  # its collectives are those of devices
        new = with_inner(eqn, of_jaxpr)
        if (function := operands(new)) is not None:
            # The equation with what the function makes of its operands.
            fresh = [core.Var(atom.aval) for atom in new.invars]
            eqns = _equations_of(function, new.replace(outvars=fresh), axis_sizes)
            return [*eqns, new.replace(invars=list(fresh))]
        function = rule(new)
        return [new] if function is None else _equations_of(function, new, axis_sizes)

    return of_jaxpr(jaxpr)


def rewritten_function(fn: Function, rule: Rule) -> Function:
    """`fn` with its equations rewritten; call it where its axis names are bound."""

    def called(*args: Leaf) -> PyTree:
        made, results = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr: Any = made.jaxpr
        whole = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        evaluate = core.jaxpr_as_fun(closed(rewritten(whole, rule)))
        arrays = evaluate(*made.consts, *args)
        return jax.tree.unflatten(jax.tree.structure(results), arrays)

    return called


_TRIVIAL_ALONE = (
    Effect.SUM,
    Effect.EXTREME,
    Effect.GATHER,
    Effect.BROADCAST,
    Effect.PERMUTE,
    Effect.SUM_SCATTER,
)


def without_collectives(fn: Function, axes: Iterable[str]) -> Function:
    """`fn` without collectives along axes of size 1.

    XLA keeps those of a single device: of 30 layers on a CPU, a third of the step.
    """
    names = set(axes)
    return rewritten_function(fn, lambda eqn: _alone(eqn, names))


def _alone(eqn: Equation, axes: set[str]) -> Function | None:
    """A rule that replaces collectives of a single participant."""
    others = tuple(name for name in axis_names(eqn) if name not in axes)
    if others == axis_names(eqn):
        return None
    if others:  # dimensions, where `jax.vmap` has an axis of the same collective
        reduces = "axes" in eqn.params
        return function_of(eqn, axes=others) if reduces else None
    if eqn.primitive.name == "axis_index":
        return lambda: [jnp.copy(jnp.zeros((), eqn.outvars[0].aval.dtype))]
    is_exchange = eqn.primitive.name == "all_to_all"
    if effect_of(eqn) not in _TRIVIAL_ALONE and not is_exchange:
        return None
    is_sent = eqn.params.get("perm") != ()

    def own(*arrays: jax.Array) -> list[jax.Array]:
        types = [var.aval for var in eqn.outvars]
        if not is_sent:
            return [jnp.copy(jnp.zeros(each.shape, each.dtype)) for each in types]
        # At most a dimension of size 1 comes, goes or moves.
        return [
            jnp.copy(lax.convert_element_type(array, each.dtype).reshape(each.shape))
            for array, each in zip(arrays, types, strict=True)
        ]

    return own


def with_inner(eqn: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """An equation with its inner jaxprs changed."""
    params = {key: with_jaxprs(value, change) for key, value in eqn.params.items()}
    if all(params[key] is value for key, value in eqn.params.items()):
        return eqn
    inner = (each.effects for each in params.values() if hasattr(each, "effects"))
    # Axis names are effects, which JAX expects of inner jaxprs, too.
    effects = frozenset[Any](eqn.effects).union(
        effect for some in inner for effect in some if hasattr(effect, "name")
    )
    return eqn.replace(params=params, effects=effects)


def _equations_of(
    function: Function, eqn: Any, axis_sizes: Sequence[tuple[str, int]]
) -> list[Equation]:
    """The equations of a function that replaces `eqn`."""
    types = [type_of(atom) for atom in eqn.invars]
    refs = references(eqn)

    def called(*operands: jax.Array, function: Function = function) -> list[Any]:
        new = {i: jax.new_ref(operands[i]) for i in refs}
        return list(function(*(new.get(i, x) for i, x in enumerate(operands))))

    made: Any = jax.make_jaxpr(called, axis_env=axis_sizes)(*types)
    if made.consts:
        # Constants inside a jitted function need no inputs of the jaxpr here.
        wrapped = functools.partial(called, function=jax.jit(function))
        made = jax.make_jaxpr(wrapped, axis_env=axis_sizes)(*types)
    names: dict[Atom, Atom] = dict(zip(made.jaxpr.invars, eqn.invars, strict=True))
    # Without the creation of references, which exist already.
    eqns = made.jaxpr.eqns[len(refs) :]
    for each in made.jaxpr.eqns[: len(refs)]:
        names[each.outvars[0]] = names[each.invars[0]]
    return _renamed(eqns, made.jaxpr.outvars, names, eqn)


def _renamed(
    eqns: Sequence[Any], results: Sequence[Atom], names: dict[Atom, Atom], eqn: Any
) -> list[Equation]:
    """Renames variables so that `results` are those of `eqn`."""
    computed = {var for each in eqns for var in each.outvars}
    # A result that is no result of `eqns`, or that of two, needs a copy.
    copied: list[tuple[Atom, Atom]] = []
    for atom, var in zip(results, eqn.outvars, strict=True):
        if isinstance(var, DropVar):
            continue
        if isinstance(atom, Literal) or atom not in computed or atom in names:
            copied.append((atom, var))
        else:
            names[atom] = var

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    renamed: list[Equation] = [
        each.replace(
            invars=list(map(read, each.invars)),
            outvars=[names.get(var, var) for var in each.outvars],
            source_info=eqn.source_info,
        )
        for each in eqns
    ]
    return renamed + [_copy(read(atom), var, eqn) for atom, var in copied]


def _copy(atom: Atom, var: Var, eqn: Any) -> Equation:
    made: Any = jax.make_jaxpr(lambda x: lax.copy_p.bind(x))(type_of(atom))
    (copy,) = made.jaxpr.eqns
    return copy.replace(invars=[atom], outvars=[var], source_info=eqn.source_info)


def type_of(atom: Atom) -> jax.ShapeDtypeStruct:
    aval = atom.aval
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)


def function_of(eqn: Any, **params: Any) -> Function:
    """An equation, with other parameters, as a function of its operands."""
    # With distinct inputs: an operand passed twice has two derivatives.
    invars = [core.Var(atom.aval) for atom in eqn.invars]
    outvars = [core.Var(var.aval) for var in eqn.outvars]
    alone = eqn.replace(
        invars=list(invars), outvars=list(outvars), params={**eqn.params, **params}
    )
    return core.jaxpr_as_fun(closed(jaxpr_of(invars, [alone], outvars)))


class Run(NamedTuple):
    """Equations that follow each other, as one function."""

    function: Function
    inputs: list[Var]
    outputs: list[Var]


def in_runs(
    eqns: Sequence[Equation],
    is_special: Callable[[Equation], bool],
    results: Iterable[Atom],
    operands: Callable[[Equation], Iterable[Atom]] = lambda eqn: eqn.invars,
) -> list[Equation | Run]:
    """Special equations by themselves, and those between them together.

    Args:
      operands: what a special equation reads.
    """
    groups = [(each, list(run)) for each, run in itertools.groupby(eqns, is_special)]
    found: list[Equation | Run] = []
    read = set(variables(results))
    for are_special, group in reversed(groups):
        if are_special:
            found += group[::-1]
            read.update(variables(atom for eqn in group for atom in operands(eqn)))
            continue
        made = [var for eqn in group for var in eqn.outvars]
        outputs = [var for var in made if var in read]
        atoms = dict.fromkeys(variables(atom for eqn in group for atom in eqn.invars))
        inputs = [var for var in atoms if var not in set(made)]
        jaxpr = closed(jaxpr_of(inputs, group, outputs))
        found.append(Run(core.jaxpr_as_fun(jaxpr), inputs, outputs))
        read.update(inputs)
    return found[::-1]


def references(eqn: Equation) -> list[int]:
    """The indices of operands that are references."""
    return [i for i, x in enumerate(eqn.invars) if isinstance(x.aval, AbstractRef)]


def on_contents(function: Function, refs: Sequence[int]) -> Function:
    """`function` with values for references; it returns their new values last."""

    def called(*operands: Leaf) -> list[jax.Array]:
        new = {index: jax.new_ref(operands[index]) for index in refs}
        results = function(*(new.get(i, x) for i, x in enumerate(operands)))
        return [*results, *(new[index][...] for index in refs)]

    return called


def with_contents(function: Function, refs: Sequence[int]) -> Function:
    """The inverse of `on_contents`: reads and writes references around `function`."""

    def called(*operands: Leaf) -> Sequence[jax.Array]:
        values = [x[...] if i in refs else x for i, x in enumerate(operands)]
        results = list(function(*values))
        count = len(results) - len(refs)
        for index, content in zip(refs, results[count:], strict=True):
            operands[index][...] = content
        return results[:count]

    return called


# Equations with references must stay inside the `shard_map`. A variable that a step
# only reads and overwrites whole, outside of loops and branches, can be an argument and
# a result instead.
@final
@dataclasses.dataclass(frozen=True)
class ValueForm:
    """A jaxpr with values for the references `replaced`, and outputs for them last."""

    jaxpr: Jaxpr
    replaced: tuple[int, ...]


def with_values(jaxpr: Jaxpr, candidates: Collection[int]) -> ValueForm:
    """Replaces those references among the inputs `candidates` that can be replaced."""
    chosen = [i for i in candidates if _is_replaceable(jaxpr, jaxpr.invars[i])]
    if not chosen:
        return ValueForm(jaxpr, ())
    whole: Any = jaxpr  # JAX's own types of equations are not exported
    inputs: Sequence[Var] = whole.invars
    fresh: dict[Var, Atom] = {
        inputs[i]: core.Var(inputs[i].aval.inner_aval) for i in chosen
    }
    contents: dict[Atom | None, Atom] = {**fresh}  # at this point
    names: dict[Var, Atom] = {}
    eqns: list[Equation] = []

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    for eqn in whole.eqns:
        operands = [read(atom) for atom in eqn.invars]
        reference = operands[0] if operands else None
        if isinstance(reference, Literal) or reference not in contents:
            eqns.append(eqn.replace(invars=operands))
            continue
        before = contents[reference]
        for var in eqn.outvars:
            if not isinstance(var, DropVar):
                names[var] = before
        if eqn.primitive.name == "swap":
            contents[reference] = operands[1]
    invars = [fresh.get(var, var) for var in inputs]
    outvars = [read(atom) for atom in jaxpr.outvars]
    outvars += [contents[inputs[i]] for i in chosen]
    return ValueForm(jaxpr_of(invars, eqns, outvars), tuple(chosen))


def _is_replaceable(jaxpr: Jaxpr, reference: Var) -> bool:
    """Whether a reference is only read and written whole, at the top level."""
    if not isinstance(reference.aval, AbstractRef):
        return False
    if any(atom is reference for atom in jaxpr.outvars):
        return False
    return all(
        _is_whole_access(eqn, reference)
        for eqn in jaxpr.eqns
        if any(atom is reference for atom in eqn.invars)
    )


def _is_whole_access(eqn: Equation, reference: Var) -> bool:
    operands = {"get": 1, "swap": 2}.get(eqn.primitive.name)
    if operands != len(eqn.invars) or eqn.invars[0] is not reference:
        return False  # an index that is computed, or no access at all
    shape = reference.aval.shape
    values = [*eqn.invars[1:], *eqn.outvars]
    return all(tuple(value.aval.shape) == tuple(shape) for value in values)
