"""The collectives of a step whose state is divided: `collectives_of`."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Sequence
from typing import final

import jax
from jax.extend.core import Literal

from jaxstrategy.reductions._table_rows import part_of_sum
from jaxstrategy.tracing._jaxpr_types import ArrayType, Equation, Var
from jaxstrategy.tracing.division._borders import is_sum_of_all
from jaxstrategy.tracing.division._dimensions import UNKNOWN
from jaxstrategy.tracing.division._divided_step import DividedStep
from jaxstrategy.tracing.division._inside import Exchange
from jaxstrategy.tracing.explanation._explained_collective import explained, nbytes_of
from jaxstrategy.tracing.explanation._facts import ExplainedCollective
from jaxstrategy.tracing.replication._collective_table import COLLECTIVES
from jaxstrategy.tracing.replication._control import scan_counts
from jaxstrategy.tracing.replication._jaxprs import all_eqns
from jaxstrategy.tracing.replication._levels import Collective
from jaxstrategy.tracing.replication._site import Site


def collectives_of(
    division: DividedStep, names: Sequence[str]
) -> Iterator[ExplainedCollective]:
    """What the program does, in order.

    Args:
      division: of the step.
      names: of what it returns or assigns that is equal on all replicas.
    """
    yield from _Inside(division).all()
    yield from _outside(division, names)


@final
class _Inside:
    """Those of the part of each replica."""

    def __init__(self, division: DividedStep) -> None:
        self._division = division
        self._eqns = division.cut.inside
        self._count = division.replicas.parts
        self._origins = {var: eqn for eqn in self._eqns for var in eqn.outvars}
        self._found: dict[int, list[Collective]] = collections.defaultdict(list)
        for found in division.collectives:
            self._found[id(found.site.eqns[-1])].append(found)
        self._made: dict[int, list[Exchange]] = collections.defaultdict(list)
        for exchange in division.inside.exchanges:
            self._made[id(exchange.before)].append(exchange)

    def all(self) -> Iterator[ExplainedCollective]:
        for eqn in self._eqns:
            made = self._made[id(eqn)]
            gathers = [each for each in made if each.kind == "all_gather"]
            yield from map(self._gather, gathers)
            for found in self._found[id(eqn)]:
                yield from self._own(found)
            yield from self._of_functions(eqn)
            yield from map(
                self._scatter, (each for each in made if each not in gathers)
            )

    def _own(self, found: Collective) -> Iterator[ExplainedCollective]:
        """One of the step's, but for the sums that are divided."""
        eqns = found.site.eqns
        operands = [atom.aval for atom in eqns[0].invars]
        if len(eqns) == 1 and is_sum_of_all(eqns[0], self._division.replicas):
            sums = self._division.borders.sums
            pairs = zip(operands, eqns[0].outvars, strict=True)
            operands = [operand for operand, result in pairs if result not in sums]
        if operands:
            yield explained(self._division.site(eqns), operands)

    def _scatter(self, exchange: Exchange) -> ExplainedCollective:
        """A sum of which each replica gets its part."""
        turns = _turns(exchange.loop)
        site = self._division.site((self._origins[exchange.var],))
        return ExplainedCollective(
            operation="reduce_scatter",
            kind="reduce_scatter",
            nbytes=nbytes_of([exchange.type]) // math.prod(turns),
            dtypes=(str(exchange.type.dtype),),
            loops=turns,
            in_branch=False,
            groups=None,
            line=site.line,
            is_transposed=site.is_transposed,
            cause="sharding",
            why="each replica needs its part of the sum only",
        )

    def _gather(self, exchange: Exchange) -> ExplainedCollective:
        """An array that each replica has a part of and needs all of."""
        turns = _turns(exchange.loop)
        nbytes = nbytes_of([exchange.type]) // math.prod(turns) // self._count
        return ExplainedCollective(
            operation="all_gather",
            kind="all_gather",
            nbytes=nbytes,
            dtypes=(str(exchange.type.dtype),),
            loops=turns,
            in_branch=False,
            groups=None,
            line=self._division.site((exchange.before,)).line,
            is_transposed=False,
            cause="sharding",
            array=self._label(exchange.var),
            why=self._why(exchange),
            parts=self._count,
        )

    def _label(self, var: Var) -> str:
        """The argument that a value is, perhaps in another dtype."""
        leaves = self._division.layout.leaves
        while var not in leaves:
            origin = self._origins.get(var)
            if origin is None or origin.primitive.name != "convert_element_type":
                return ""
            var = origin.invars[0]
        return leaves[var].label.strip("`")

    def _why(self, exchange: Exchange) -> str:
        if exchange.loop is not None:
            return "in the turns of the loop over its layers"
        if exchange.before.primitive.name in ("checkpoint", "remat", "remat2"):
            return "again, for what is computed a second time"
        loops = [eqn for eqn in self._eqns if _is_layered(eqn, exchange.var)]
        if not loops:
            return "whole from its first use on"
        if self._division.inside.dimensions.get(exchange.var) == 0:
            return "whole for a loop, along whose turns it is divided"
        return "whole, as it is used outside of the loop over its layers too"

    def _of_functions(self, eqn: Equation) -> Iterator[ExplainedCollective]:
        """What functions use that are computed from parts."""
        division = self._division
        if (function := division.inside.functions.get(id(eqn))) is not None:
            name = self._label(eqn.invars[function.divided[0]])
            yield from self._traced(eqn, function.of_parts, function.divided, name)
        for result in eqn.outvars:
            for call in division.borders.of_functions.get(result, ()):
                yield from self._traced(call, _summing(call, result), (), "")

    def _traced(
        self, eqn: Equation, function, divided: Sequence[int], name: str
    ) -> Iterator[ExplainedCollective]:
        """The collectives of a function that takes parts of some operands."""
        replicas = self._division.replicas
        types = [
            _part(atom.aval, self._count if place in divided else 1)
            for place, atom in enumerate(eqn.invars)
        ]
        axes = replicas.collective_axes
        jaxpr = jax.make_jaxpr(
            lambda *operands: function(*operands, axes=axes),
            axis_env=replicas.axis_sizes,
        )(*types).jaxpr
        for inner in all_eqns(jaxpr):
            if inner.primitive.name in COLLECTIVES:
                yield explained(
                    Site((inner,)),
                    [atom.aval for atom in inner.invars],
                    line=self._division.site((eqn,)).line,
                    cause="sharding",
                    array=name,
                    why="for rows of a table of which each replica has a part",
                )


def _summing(call: Equation, result: Var) -> Callable[..., jax.Array]:
    """How parts of a sum are made of the rows that an equation adds."""
    shape, dtype = call.invars[0].aval.shape, result.aval.dtype

    def of_parts(zeros: jax.Array, *rows: jax.Array, axes: tuple[str, ...]):
        return part_of_sum(shape, *rows, axes=axes, dtype=dtype)

    return of_parts


def _part(aval: ArrayType, count: int) -> jax.ShapeDtypeStruct:
    if not aval.shape:
        return jax.ShapeDtypeStruct((), aval.dtype)
    return jax.ShapeDtypeStruct((aval.shape[0] // count, *aval.shape[1:]), aval.dtype)


def _turns(loop: Equation | None) -> tuple[int, ...]:
    return () if loop is None else (loop.params["length"],)


def _is_layered(eqn: Equation, var: Var) -> bool:
    """Whether an equation is a loop that reads one layer of `var` in each turn."""
    if eqn.primitive.name != "scan":
        return False
    return any(atom is var for atom in eqn.invars[sum(scan_counts(eqn)) :])


# Where it is computed once for all.


def _outside(
    division: DividedStep, names: Sequence[str]
) -> Iterator[ExplainedCollective]:
    outside = division.outside
    for exchange in outside.exchanges:
        site = division.site(exchange.eqns)
        yield _by_compiler(exchange.kind, exchange.type, site, 1, "of parts")
    origins = {var: eqn for eqn in division.cut.outside for var in eqn.outvars}
    done: set[Var] = set()
    for name, (atom, lies, first) in zip(names, division.kept, strict=True):
        if isinstance(atom, Literal) or atom in done or outside.is_whole(atom):
            continue
        done.add(atom)
        eqn = origins.get(atom)
        site = None if eqn is None else division.site((eqn,))
        for kind, why in _moves(outside.dimension(atom), lies, first):
            parts = division.replicas.parts
            yield _by_compiler(kind, atom.aval, site, parts, why, name)


def _moves(
    made: int | None, lies: int | None, first: int | None
) -> Iterator[tuple[str, str]]:
    """How a result that was made of parts comes to lie where it is to."""
    divided = first if lies is None else lies
    if made != UNKNOWN and divided not in (None, made):
        yield "all_to_all", "divided along another dimension"
    if lies is None and (first is not None or made != UNKNOWN):
        yield "all_gather", "a whole result that is computed in parts"


def _by_compiler(
    kind: str, aval: ArrayType, site: Site | None, parts: int, why: str, name: str = ""
) -> ExplainedCollective:
    return ExplainedCollective(
        operation=kind,
        kind=kind,
        nbytes=nbytes_of([aval]) // parts,
        dtypes=(str(aval.dtype),),
        loops=() if site is None else site.loops,
        in_branch=site is not None and site.in_branch,
        groups=None,
        line=None if site is None else site.line,
        is_transposed=False,
        cause="compiler",
        array=name,
        why=why,
        parts=parts,
    )
