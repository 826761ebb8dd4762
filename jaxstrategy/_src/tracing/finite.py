"""Finds the first operation of a step that makes a NaN or Inf: `Finite`.

The trace is evaluated equation by equation. The program also returns, for each replica,
the number of the first equation with a NaN in its results and none in its operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core
from jax.extend.core import Literal
from jax.ref import AbstractRef

from jaxstrategy._src.errors import ContextError, NonFiniteError
from jaxstrategy._src.text import array_type, first_few, plural
from jaxstrategy._src.tracing.jaxprs import (
    ArrayType,
    Atom,
    ClosedJaxpr,
    Equation,
    callee,
    is_along,
    plain,
    scan_counts,
)
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values.arrays import Value

# They make no NaN: bits are kept, and references are checked when they are written.
_MOVES = frozenset(("bitcast_convert_type", "get", "swap", "addupdate"))

_Flag: TypeAlias = jax.Array | bool
# Whether an array holds a NaN, and whether it holds an Inf.
_Kinds: TypeAlias = tuple[jax.Array, _Flag]
# The outputs of a branch or an iteration, and what was found so far.
_Outputs: TypeAlias = tuple[list[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class _Origin:
    """An equation, or an input at the beginning or end of a step."""

    source: str = ""
    site: Site | None = None
    is_end: bool = False


@final
class Finite:
    """Checks all values of a program for NaN, and perhaps Inf."""

    def __init__(self, step: ReplicaStep, with_infinities: bool) -> None:
        self._name = step.name
        self.replicas = step.replicas
        self.with_infinities = with_infinities
        # Of all traces, so that numbers are unique.
        self._origins: list[_Origin] = []

    @property
    def kind(self) -> str:
        what = "NaN and Inf" if self.with_infinities else "NaN"
        return f"{type(self).__name__} ({what})"

    def number(self, origin: _Origin) -> int:
        """A number for `origin`, not 0, larger than those before."""
        self._origins.append(origin)
        return len(self._origins)

    def evaluate(
        self, step: TracedStep, inputs: Sequence[Value]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The results of one replica, and the first finding of each."""
        evaluation = _Evaluation(self, ())
        references = []
        for value, source in zip(inputs, step.sources, strict=True):
            if value is None:  # a variable that the step does not use
                continue
            if isinstance(jax.typeof(value), AbstractRef):
                references.append((value, source))
                value = value[...]
            # Captured infinities are intended, as in a mask.
            origin = _Origin(source or "an array that it captured")
            evaluation.check(value, origin, source)
        outputs = evaluation.run(plain(step.jaxpr), inputs)
        for reference, source in references:
            origin = _Origin(source or "", is_end=True)
            evaluation.check(reference[...], origin, source)
        axes = self.replicas.axes
        return outputs, [lax.all_gather(evaluation.found, axes)]

    def check(self, output: jax.Array) -> None:
        if isinstance(output, Tracer):
            raise ContextError(
                f"`{self._name}` is to be checked (`check_finite`) inside a function "
                "that JAX traces, where no value is known yet. Call it outside "
                "`jax.jit`, `jax.grad` and `jax.lax.scan`, or leave the option out."
            )
        codes = np.asarray(output.addressable_data(0))
        if codes.any():
            raise self._error(codes)

    def _error(self, codes: np.ndarray) -> NonFiniteError:
        first = codes[codes > 0].min() // 2
        origin = self._origins[first - 1]
        replicas = np.flatnonzero(codes // 2 == first)
        kinds = [name for bit, name in _KINDS.items() if bit in codes[replicas] % 2]
        where = f"{' or '.join(kinds)} {_on(replicas.tolist(), len(codes))}"
        line = origin.site and origin.site.line
        return NonFiniteError(
            f"{self._described(origin, where)}\n{_ADVICE}",
            replicas=tuple(replicas.tolist()),
            line=line and str(line),
            source=origin.source.partition("`")[2].strip("`") or origin.source or None,
        )

    def _described(self, origin: _Origin, where: str) -> str:
        if origin.site is None:
            when = "ends" if origin.is_end else "begins"
            return f"{origin.source} holds {where} when `{self._name}` {when}."
        eqn = origin.site.eqns[0]
        made = ", ".join(_type(var.aval) for var in eqn.outvars)
        line = origin.site.line or "a line that JAX did not keep"
        return (
            f"`{self._name}` makes {where}, of values that are finite:\n"
            f"  {line}\n"
            f"  (the operation `{eqn.primitive.name}`, which makes {made})"
        )


_KINDS = {1: "a NaN", 0: "an Inf"}
_ADVICE = (
    "This is the first that arises; what is made of it is not told. A value that is "
    "discarded later, with `jnp.where`, counts too: its gradient is NaN. "
    "`RunOptions(check_finite='nan')` looks for NaN only."
)


def _on(replicas: Sequence[int], count: int) -> str:
    if len(replicas) == count:
        return "on all replicas"
    noun = plural(len(replicas), "replica")
    return f"on {noun} {first_few(replicas, 8)} of {count}"


def _type(aval: ArrayType) -> str:
    return array_type(getattr(aval, "dtype", aval), getattr(aval, "shape", ()), ", ")


class _Evaluation:
    """Evaluates a jaxpr with checks: the program, a branch, the body of a loop."""

    def __init__(
        self,
        owner: Finite,
        holders: tuple[Equation, ...],
        found: jax.Array | None = None,
    ) -> None:
        self._owner = owner
        self._holders = holders
        self.found = jnp.zeros((), jnp.int32) if found is None else found
        # By `id`; with the value, so that no other gets its `id`.
        self._seen: dict[int, tuple[Value, _Kinds]] = {}

    def check(self, value: Value, origin: _Origin, source: str | None) -> None:
        """Records what an input holds; an Inf only with a `source`."""
        kinds = self._kinds(value)
        if kinds is not None:
            infinite = kinds[1] if source is not None else False
            self._record(kinds[0], infinite, origin)

    def _record(self, nan: _Flag, infinite: _Flag, origin: _Origin) -> None:
        number = self._owner.number(origin) * 2
        code = jnp.where(nan, number + 1, jnp.where(infinite, number, 0))
        self.found = jnp.where(self.found == 0, code.astype(jnp.int32), self.found)

    def _kinds(self, value: Value) -> _Kinds | None:
        """Whether an array holds a NaN, or an Inf; None if it cannot."""
        if not _may_be_infinite(value):
            return None
        known = self._seen.get(id(value))
        if known is None:
            infinite = self._owner.with_infinities and jnp.isinf(value).any()
            known = self._seen[id(value)] = value, (jnp.isnan(value).any(), infinite)
        return known[1]

    def run(self, jaxpr: ClosedJaxpr, inputs: Sequence[Value]) -> list[jax.Array]:
        """The outputs of `jaxpr`."""
        inside = plain(jaxpr)
        known: dict[Atom, Value] = dict(zip(inside.invars, inputs, strict=True))
        known.update(zip(inside.constvars, getattr(jaxpr, "consts", ()), strict=False))

        def read(atom: Atom) -> Value:
            return atom.val if isinstance(atom, Literal) else known[atom]

        for eqn in inside.eqns:
            # The mesh and the settings of JAX when it was traced.
            with eqn.ctx.manager:
                outputs = self._outputs(eqn, [read(atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in inside.outvars]

    def _outputs(self, eqn: Equation, operands: list[Value]) -> Sequence[jax.Array]:
        name = eqn.primitive.name
        if (inner := callee(eqn)) is not None:
            inlined = _Evaluation(self._owner, (eqn, *self._holders), self.found)
            inlined._seen = self._seen
            outputs = inlined.run(inner, operands)
            self.found = inlined.found
            return outputs
        if name == "cond":
            return self._branch(eqn, operands)
        if name == "scan":
            return self._scan(eqn, operands)
        if name == "while":
            return self._while(eqn, operands)
        params = eqn.primitive.get_bind_params(eqn.params)
        outputs = eqn.primitive.bind(*operands, **params)
        outputs = outputs if eqn.primitive.multiple_results else [outputs]
        if name not in _MOVES:
            self._compare(eqn, operands, outputs)
        return outputs

    def _inner(self, eqn: Equation, jaxpr: ClosedJaxpr) -> Callable[..., _Outputs]:
        """An inner jaxpr, as a function of what was found before it and its inputs."""

        def evaluate(found: jax.Array, *inputs: Value) -> _Outputs:
            inner = _Evaluation(self._owner, (eqn, *self._holders), found)
            return inner.run(jaxpr, inputs), inner.found

        return evaluate

    def _compare(
        self, eqn: Equation, operands: Sequence[Value], outputs: Sequence[jax.Array]
    ) -> None:
        """Records a NaN or Inf in `outputs` if there is none in `operands`."""
        after = [kinds for kinds in map(self._kinds, outputs) if kinds is not None]
        if not after:
            return
        before = [kinds for kinds in map(self._kinds, operands) if kinds is not None]
        had_nan, had_inf = _any(before, 0), _any(before, 1)
        if is_along(eqn, self._owner.replicas.axes):
            # That of another replica was found there.
            flags = jnp.stack([jnp.asarray(had_nan), jnp.asarray(had_inf)])
            axes = self._owner.replicas.axes
            had_nan, had_inf = lax.pmax(flags.astype(jnp.int32), axes) > 0
        # Inf minus Inf makes a NaN; an Inf made of a NaN does not count.
        nan = _any(after, 0) & ~jnp.asarray(had_nan)
        infinite = _any(after, 1) & ~(jnp.asarray(had_inf) | had_nan)
        self._record(nan, infinite, _Origin(site=Site((eqn, *self._holders))))

    def _branch(self, eqn: Equation, operands: list[Value]) -> Sequence[jax.Array]:
        index, *rest = operands

        def branch(jaxpr: ClosedJaxpr) -> Callable[[jax.Array], _Outputs]:
            evaluate = self._inner(eqn, jaxpr)
            return lambda found: evaluate(found, *rest)

        branches = list(map(branch, eqn.params["branches"]))
        outputs, self.found = lax.switch(index, branches, self.found)
        return outputs

    def _scan(self, eqn: Equation, operands: list[Value]) -> Sequence[jax.Array]:
        params = eqn.params
        first, count = scan_counts(eqn)
        last = first + count
        consts, start, rows = operands[:first], operands[first:last], operands[last:]
        evaluate = self._inner(eqn, params["jaxpr"])

        def body(
            carry: _Outputs, row: list[jax.Array]
        ) -> tuple[_Outputs, list[jax.Array]]:
            outputs, found = evaluate(carry[1], *consts, *carry[0], *row)
            return (outputs[:count], found), outputs[count:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (end, self.found), stacked = lax.scan(
            body, (start, self.found), rows, **options
        )
        return [*end, *stacked]

    def _while(self, eqn: Equation, operands: list[Value]) -> Sequence[jax.Array]:
        params = eqn.params
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        cond_consts, consts = operands[:first], operands[first:last]
        # Not checked: a condition returns only a bool.
        condition = core.jaxpr_as_fun(params["cond_jaxpr"])
        evaluate = self._inner(eqn, params["body_jaxpr"])
        end, self.found = lax.while_loop(
            lambda carry: condition(*cond_consts, *carry[0])[0],
            lambda carry: evaluate(carry[1], *consts, *carry[0]),
            (operands[last:], self.found),
        )
        return end


def _may_be_infinite(value: Value) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, (float, complex))
    return not isinstance(jax.typeof(value), AbstractRef) and bool(
        jnp.issubdtype(dtype, jnp.inexact)
    )


def _any(kinds: Sequence[_Kinds], which: int) -> jax.Array:
    found = jnp.zeros((), bool)
    for each in kinds:
        found = found | each[which]
    return found
