"""Everything that is known about a step once it has been traced: `TracedStep`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxstrategy.text._user_code import Line
from jaxstrategy.tracing._results import Results
from jaxstrategy.tracing._trace import Trace
from jaxstrategy.tracing.replication._levels import (
    Findings,
    State,
)
from jaxstrategy.tracing.stages._roles import (
    Role,
    Signature,
)


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step, as one replica sees it.

    Attributes:
      name: how messages call it.
      signature: of its arguments.
      label: how messages call an argument, by its place among the dynamic ones.
      donated: the arguments that the step may overwrite.
      inputs: for each input of the analysis the argument it is, None for a constant
        that the step captured.
      types: of these inputs on one replica; an argument that is a `PerReplica` has
        there a dimension of 1 before its own.
      jaxpr: it, from these inputs to `outputs`.
      results: the pytree it returned.
      outputs: the types of its arrays on one replica.
      findings: what the analysis knows about them.
      variables: for each that it uses its name, whether its copies must agree, and
        what is known of what it holds afterwards.
      held_by: for each input of the analysis the name of the variable it is, None for
        others.
      num_replicas: how many take it.
      has_objects: whether it returns the new arrays of objects besides, as a step does
        that is given objects as arrays.
    """

    name: str
    signature: Signature
    label: Callable[[int], str]
    donated: frozenset[int]
    inputs: Sequence[int | None]
    types: Sequence[Any]
    jaxpr: Any
    results: Results
    outputs: Sequence[Any]
    findings: Findings
    variables: Sequence[tuple[str, bool, State | None]] = ()
    held_by: Sequence[str | None] = ()
    num_replicas: int = 1
    has_objects: bool = False

    def is_per_replica(self, argument: int) -> bool:
        """Whether the argument was a `PerReplica`."""
        role = self.signature.roles[self.signature.dynamic[argument]]
        return role is Role.PER_REPLICA

    def type_of(self, argument: int) -> Any:
        """The type of the argument as the step saw it."""
        aval = self.types[self.inputs.index(argument)]
        return aval.update(shape=aval.shape[self.is_per_replica(argument) :])

    def path(self, keys: Any) -> str:
        """How messages call the result at `keys`: `` `step(...)['loss']` ``."""
        if self.is_of_object(keys):  # which has the name of the array as one key
            return f"`{jax.tree_util.keystr(keys[2:]).removeprefix('.')}`"
        return f"`{self.name}(...){jax.tree_util.keystr(keys[self.has_objects :])}`"

    def is_of_object(self, keys: Any) -> bool:
        """Whether the result at `keys` is a new array of an object."""
        return self.has_objects and bool(keys) and keys[0].idx == 1

    def began(self, state: State) -> Line | None:
        """The user's line where a value began to be what it is."""
        return None if state.site is None else state.site.line

    @property
    def sources(self) -> list[str | None]:
        """How messages call the inputs; None of an array that the step captured."""
        return [
            None if self._is_captured(index) else self.source(index)
            for index in range(len(self.inputs))
        ]

    def _is_captured(self, index: int) -> bool:
        """Whether an input is an array that the step captured, as a constant or not."""
        argument = self.inputs[index]
        if argument is None:
            return self.held_by[index] is None
        return self.label(argument).startswith("`captured ")

    def why(self, state: State) -> str:
        """Where a value began to vary, in words."""
        line = self.began(state)
        if state.input is None:
            return str(line or "a line that JAX did not keep")
        source = self.source(state.input)
        kind = "a PerReplica" if self.inputs[state.input] is not None else _COPIES
        source = f"{source}, {kind}"
        return source if line is None else f"{line}\n    (from {source})"

    def source(self, index: int) -> str:
        """How messages call an input of the analysis: an argument or a variable."""
        argument = self.inputs[index]
        if argument is not None:
            return f"argument {self.label(argument)}"
        name = self.held_by[index]
        assert name is not None, "what a step captures is the same everywhere"
        return f"variable {name!r}"


_COPIES = "which has a copy per replica"


def traced_step(
    done: Trace,
    name: str,
    signature: Signature,
    label: Callable[[int], str],
    donated: frozenset[int],
    has_objects: bool = False,
) -> TracedStep:
    """What is known about a step that was traced; the rest as in `TracedStep`."""
    n = len(signature.dynamic)
    places = done.inputs
    return TracedStep(
        name=name,
        signature=signature,
        label=label,
        donated=donated,
        # Variables are no arguments.
        inputs=[i if i is not None and i < n else None for i in places],
        types=[var.aval for var in done.jaxpr.invars],
        jaxpr=done.jaxpr,
        results=done.results,
        outputs=[atom.aval for atom in done.jaxpr.outvars],
        findings=done.findings,
        variables=[
            (variable.name, variable.copies_must_agree, state)
            for variable, state in done.contents
        ],
        held_by=[
            None if i is None or i < n else done.variables[i - n].name for i in places
        ],
        num_replicas=done.mesh.size,
        has_objects=has_objects,
    )
