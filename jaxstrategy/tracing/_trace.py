"""A step traced once, as one replica sees it, and what its program makes of that.

First the step is traced with references to all variables that it might use. Then the
replication analysis says which results are equal on all replicas, and the trace is
evaluated again inside the `shard_map` that is compiled, with the variables that it did
use; or part of it there, see `division/`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.ref import AbstractRef
from jax.sharding import AxisType

from jaxstrategy._errors import ContextError
from jaxstrategy.reductions._packing import AbstractPacking
from jaxstrategy.replicas._inner_specs import has_inner_axes
from jaxstrategy.replicas._replicas import SAME, SPLIT, Meaning, Replicas
from jaxstrategy.tracing._numbered_prints import with_numbers
from jaxstrategy.tracing._on_replicas import on_replicas
from jaxstrategy.tracing._one_replica import (
    CapturedReference,
    OneReplica,
    by_axes,
    in_shard_map,
)
from jaxstrategy.tracing._ready_packs import in_ready_packs
from jaxstrategy.tracing._results import Results
from jaxstrategy.tracing._unknown_axes import UnknownAxis
from jaxstrategy.tracing.jaxprs._visit import (
    ArrayType,
    ClosedJaxpr,
    Jaxpr,
    all_eqns,
    closed,
)
from jaxstrategy.tracing.replication._rules import analyse
from jaxstrategy.tracing.replication._types import Findings, Replication, Site
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Function, Leaf
from jaxstrategy.variables import _access
from jaxstrategy.variables._access import StepVariables
from jaxstrategy.variables._cell import AbstractCell
from jaxstrategy.variables._variable import Variable

# Of the inputs of one replica its results, and whatever a program returns besides.
Evaluate = Callable[[Sequence[Leaf]], tuple[list[jax.Array], list[jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A step as it was traced.

    Attributes:
      closed: a jaxpr of the arguments and the values of all variables that there were.
      jaxpr: the step of one replica, without constants.
      inputs: for each input of `jaxpr` its place among arguments and variables; None
        for a constant that the step captured.
      constants: those, by their place among the inputs.
      meanings: of each input.
      given_types: the types of the arguments, on all replicas.
      unpacking: how many of the first equations of `jaxpr` only unpack arguments.
      results: what the step returned, but for the arrays.
      variables: all that there were; those that belong elsewhere, too.
      used: those that the step reads or writes.
      replicas: of the step.
      findings: what is known about the arrays that it returned.
      is_divided: whether the step is to be divided where all replicas become equal.
    """

    closed: ClosedJaxpr
    jaxpr: Jaxpr
    inputs: list[int | None]
    constants: dict[int, Leaf]
    meanings: list[Meaning]
    given_types: list[ArrayType]
    unpacking: int
    results: Results
    variables: Sequence[Variable]
    used: Sequence[Variable]
    replicas: Replicas
    findings: Findings
    is_divided: bool

    @property
    def contents(self) -> list[tuple[Variable, Replication | None]]:
        """The contents of each used variable afterwards, as far as they are known.

        None of those that the step only reads.
        """
        first = len(self.given_types)
        places, used = self.inputs, set(self.used)
        return [
            (
                variable,
                self.findings.contents.get(places.index(first + index)),
            )
            for index, variable in enumerate(self.variables)
            if variable in used
        ]

    @property
    def varies(self) -> list[bool]:
        """For each array that the step returns, whether it may differ."""
        return [state is not None and state.varies for state in self.findings.outputs]

    def evaluate(
        self,
        leaves: Sequence[Leaf],
        references: dict[AbstractCell, jax.Ref],
        within: Callable[[Evaluate], Evaluate],
    ) -> tuple[list[jax.Array | PerReplica], list[jax.Array]]:
        """The step's results, as the analysis proved them, and further outputs.

        Args:
          leaves: the arguments.
          references: for each variable that is carried the one to work on.
          within: adds outputs to the evaluation of the jaxpr of one replica. There is
            at least one if the step returns no arrays: XLA runs the callbacks of a
            program that returns nothing on the first device only (JAX 0.10 and 0.12).
        """
        operands = self.operands(leaves, references)
        kept = [i for i, each in enumerate(operands) if each is not None]
        varies = self.varies

        def replica(*locals_: Leaf) -> tuple[list[jax.Array], list[jax.Array]]:
            jaxpr = with_numbers(self.jaxpr, self.replicas)
            step = core.jaxpr_as_fun(closed(jaxpr))
            evaluate = within(lambda inputs: (step(*inputs), []))
            given = dict(zip(kept, locals_, strict=True))
            returned, more = evaluate([given.get(i) for i in range(len(operands))])
            arrays = [
                jax.lax.expand_dims(array, (0,)) if differs else array
                for array, differs in zip(returned, varies, strict=True)
            ]
            if not arrays and not more:
                more = [jnp.zeros((), jnp.int8)]
            return arrays, more

        returned = [SPLIT if differs else SAME for differs in varies]
        arrays, more = on_replicas(
            replica,
            self.replicas,
            [self.meanings[i] for i in kept],
            (returned, SAME),
        )(*(operands[i] for i in kept))
        wrapped = [
            PerReplica(array) if differs else array
            for array, differs in zip(arrays, varies, strict=True)
        ]
        return wrapped, more

    def operands(
        self, leaves: Sequence[Leaf], references: dict[AbstractCell, jax.Ref]
    ) -> list[Leaf]:
        """For each input of `jaxpr` what it is, None of a variable that is not used.

        Args:
          leaves: the arguments.
          references: for each variable that is carried the one to work on.
        """
        used = set(self.used)
        given: list[Leaf] = list(leaves)
        for variable in self.variables:
            # A variable that is not used stays out of the program.
            is_given = variable not in used or variable.cell in references
            own = references.get(variable.cell) if variable in used else None
            given.append(own if is_given else variable.cell.ref)
        return [
            self.constants[index] if place is None else given[place]
            for index, place in enumerate(self.inputs)
        ]


def trace(
    run: Callable[[Sequence[Leaf]], tuple[list[jax.Array], Results]],
    leaves: Sequence[Leaf],
    meanings: Sequence[Meaning],
    replicas: Replicas,
    variables: Callable[[], Sequence[Variable]],
    may_create: bool,
    ready_packing: AbstractPacking | None = None,
) -> Trace:
    """Traces a step once; or twice, if it makes variables or names unknown axes.

    Args:
      run: calls the step with one replica's part of `leaves`.
      leaves: its arguments, on all replicas.
      meanings: of each of them.
      replicas: of the step.
      variables: returns those that the step may use.
      may_create: whether it may make some.
      ready_packing: of arrays that are summed, in the order in which they are computed.

    Raises:
      ValueError: a `while_loop` changes a variable that its condition reads.
      TypeError: the step captures a reference that is no variable.
    """
    there = list(variables())
    found: list[Results] = []
    seen: list[StepVariables] = []

    def replica(*locals_: Leaf) -> list[jax.Array]:
        own, references = locals_[: len(leaves)], locals_[len(leaves) :]
        pairs = list(zip(there, references, strict=True))
        seen.append(StepVariables(pairs, may_create))
        try:
            with _access.traced_with(seen[-1]):
                arrays, results = run(own)
        except UnknownAxis as error:
            if seen[-1].created:
                raise _MadeVariables from error
            raise
        if seen[-1].created:
            # The trace cannot end: `shard_map` has no rule for their references.
            raise _MadeVariables
        found.append(results)
        return arrays

    given = [*meanings, *(_meaning(variable, replicas) for variable in there)]
    divided = [variable for variable in there if not variable.division.is_whole]
    is_by_axes = divides_state(replicas) or bool(divided) and can_divide(replicas)
    is_by_axes |= replicas.per_device > 1
    look = by_axes if is_by_axes else _with_or_without_mesh
    try:
        found_in = look(replica, leaves, there, given, replicas)
        if is_by_axes and _goes_inside(found_in[1], replicas):
            seen.clear()
            found.clear()
            is_by_axes = False
            found_in = in_shard_map(replica, leaves, there, given, replicas)
        closed, jaxpr, places, constants = found_in
    except _MadeVariables:
        return trace(run, leaves, meanings, replicas, variables, False, ready_packing)
    except CapturedReference as error:
        raise TypeError(
            "The step uses a `jax.Ref` that was made outside of it, whose memory is on "
            "one device. Make a `js.Variable` in the strategy's scope, which has a "
            "copy on each; or pass `ref[...]`, and write what the step returns."
        ) from error
    step, (results,) = seen[-1], found
    if ready_packing is not None:
        jaxpr = in_ready_packs(jaxpr, ready_packing, replicas.axis_sizes)
    if step.used:
        _check_conditions(jaxpr)
    of_inputs = [SAME if place is None else given[place] for place in places]
    unpacking = sum(meaning is SPLIT for meaning in meanings)
    findings = analyse(
        jaxpr,
        [replicas.differ(meaning) for meaning in of_inputs],
        replicas.collective_axes,
        replicas.count,
        unpacking=unpacking,
        mesh=replicas.mesh,
    )
    return Trace(
        closed=closed,
        jaxpr=jaxpr,
        inputs=places,
        constants=constants,
        meanings=of_inputs,
        given_types=[var.aval for var in closed.jaxpr.invars[: len(leaves)]],
        unpacking=unpacking,
        results=results,
        variables=there,
        used=cast("list[Variable]", list(step.used.values())),
        replicas=replicas,
        findings=findings,
        is_divided=is_by_axes
        and can_divide(replicas)
        and (
            divides_state(replicas)
            or any(id(variable) in step.used for variable in divided)
        ),
    )


def _with_or_without_mesh(
    replica: Function,
    leaves: Sequence[Leaf],
    there: Sequence[Variable],
    meanings: Sequence[Meaning],
    replicas: Replicas,
) -> OneReplica:
    """Traces one replica inside a `shard_map`, if what it says of meshes allows that.

    Where a replica is one device, Flax's annotations mean nothing. Flax leaves them out
    where there is no mesh; it finds that of the `shard_map`, which has other axes.
    """
    try:
        return in_shard_map(replica, leaves, there, meanings, replicas)
    except UnknownAxis:
        if has_inner_axes(replicas):
            raise
    return by_axes(replica, leaves, there, meanings, replicas)


def divides_state(replicas: Replicas) -> bool:
    """Whether all steps of these replicas are divided where all become equal."""
    return replicas.state_sharding is not None and can_divide(replicas)


def can_divide(replicas: Replicas) -> bool:
    """Whether steps of these replicas can be divided where all become equal."""
    return replicas.parts > 1


def _goes_inside(jaxpr: Jaxpr, replicas: Replicas) -> bool:
    """Whether a step says itself what each device of a replica does.

    What is traced there names the mesh, and can be evaluated in a `shard_map` only.
    """
    return bool(replicas.inner_axes) and any(
        eqn.primitive.name == "shard_map" for eqn in all_eqns(jaxpr)
    )


class _MadeVariables(Exception):
    """A step has made variables: they are to be there before it."""


def _check_conditions(jaxpr: ClosedJaxpr) -> None:
    """Raise if a `while_loop` changes a variable that its condition reads.

    The condition would see what the variable held before the loop, each time (JAX 0.10
    and 0.12), and such a loop often does not end.
    """
    for eqn in all_eqns(jaxpr):
        if eqn.primitive.name != "while":
            continue
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        read = [var for var in eqn.invars[:n] if isinstance(var.aval, AbstractRef)]
        body = all_eqns(eqn.params["body_jaxpr"].jaxpr)
        if any(var in eqn.invars[n : n + m] for var in read) and any(
            inner.primitive.name in ("swap", "addupdate") for inner in body
        ):
            raise ValueError(
                "The condition of a `while_loop` reads a variable that its body uses, "
                "and would not see it change.\n"
                f"  the `while_loop`: {Site((eqn,)).line or 'unknown'}\n"
                "Let the loop carry the value, and assign it to the variable as well."
            )


def check_not_divided(name: str) -> None:
    """Raise if code runs on each of several devices already.

    Raises:
      ContextError: it does, inside `jax.pmap` or a `jax.shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in mesh.axis_types:
        raise ContextError(
            f"`{name}` was to be run on all replicas inside a function that `jax.pmap` "
            "or `jax.shard_map` runs on each of several devices already. A strategy "
            "does that itself: call `strategy.run` instead of it, on the whole batch. "
            "Inside `jax.jit`, `jax.vmap` and `jax.lax.scan` it may be called."
        )


def _meaning(variable: Variable, replicas: Replicas) -> Meaning:
    is_own = variable.lives_on(replicas) and not variable.copies_must_agree
    return SPLIT if is_own else SAME
