"""Calls of `shard_map`, and prints in steps that say which replica printed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, final

import jax
from jax import lax

from jaxstrategy._src.contexts.replica_context import MERGE_SCOPE, REPLICA_SCOPE
from jaxstrategy._src.replicas.inner_axes import WHOLE, InnerSpec
from jaxstrategy._src.replicas.replicas import LayoutOrDimension, Replicas
from jaxstrategy._src.tracing.jaxprs import (
    Equation,
    Jaxpr,
    all_eqns,
    rewritten,
    rewritten_function,
    with_inner,
)
from jaxstrategy._src.values.arrays import Function, PyTree


def on_own_devices(
    fn: Function,
    replicas: Replicas,
    taken: Sequence[LayoutOrDimension],
    returned: PyTree,
) -> Function:
    """As `on_replicas`, for replicas that do not share devices."""
    # With check_vma=True, JAX sums the gradient of a replicated value over replicas,
    # and the user's own mean of it is N times too large (JAX 0.10 and 0.12).
    options: dict[str, Any] = {"check_vma": False}
    if replicas.inner_axes:
        options["axis_names"] = set(replicas.axes)
    return jax.shard_map(
        fn,
        mesh=replicas.mesh,
        in_specs=tuple(map(replicas.spec, taken)),
        out_specs=jax.tree.map(replicas.spec, returned),
        **options,
    )


def on_each_device(fn: Function, inner: InnerSpec, replicas: Replicas) -> Function:
    """`fn` of one device's shard, as a function of its replica's array."""
    return jax.shard_map(
        fn,
        in_specs=inner,
        out_specs=inner,
        axis_names=set(replicas.inner_axes),
        check_vma=False,
    )


@final
class OneText(str):
    """A format string that is printed once for all replicas."""

    __slots__ = ()


@final
class NumberedText(str):
    """A format string for the leaves of some arguments and the id of a replica."""

    __slots__ = ("has_fields", "has_prefix", "structure")

    structure: Any  # a `PyTreeDef`; in JAX 0.12 of another registry than the usual one
    has_fields: bool
    has_prefix: bool

    @classmethod
    def of(
        cls, text: str, structure: object, has_fields: bool, has_prefix: bool
    ) -> NumberedText:
        made = cls(text)
        made.structure, made.has_fields = structure, has_fields
        made.has_prefix = has_prefix
        return made

    def format(self, *values: object, **_: object) -> str:
        """The text for these leaves and the id."""
        *leaves, number = values
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        if self.has_fields:
            text = super().format(*args, **kwargs)
        else:
            text = " ".join((self, *map(str, args)))
        if not self.has_prefix:
            return text
        return re.sub(r"\A|(?<=\n)(?!\Z)", f"replica {number}: ", text)

    # JAX lowers equations with equal parameters once.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumberedText) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)

    @property
    def _parts(self) -> tuple[object, ...]:
        return str(self), self.structure, self.has_fields, self.has_prefix


def has_prints(jaxpr: Jaxpr, replicas: Replicas) -> bool:
    """Whether a step has prints that `with_numbers` changes."""
    changed = _changed(replicas)
    return bool(changed) and any(e.primitive.name in changed for e in all_eqns(jaxpr))


def with_numbers(jaxpr: Jaxpr, replicas: Replicas) -> Jaxpr:
    """Lets each `jax.debug.print` say which replica printed."""
    if not has_prints(jaxpr, replicas):
        return jaxpr
    return rewritten(with_merges(jaxpr), _Prints(replicas).replacement)


def with_merges(jaxpr: Any, is_merged: bool = False) -> Jaxpr:
    """Marks the prints in a `merge_call`, by the innermost of their scopes."""

    def marked(eqn: Any) -> Equation:
        scopes = str(eqn.source_info.name_stack)
        merge, each = scopes.rfind(MERGE_SCOPE), scopes.rfind(REPLICA_SCOPE)
        # In neither: an inner jaxpr has no outer scopes.
        inside = is_merged if merge == each else merge > each
        if inside and eqn.primitive.name == "debug_print":
            params = {**eqn.params, "fmt": OneText(eqn.params["fmt"])}
            return eqn.replace(params=params)
        return with_inner(eqn, lambda inner: with_merges(inner, inside))

    return jaxpr.replace(eqns=list(map(marked, jaxpr.eqns)))


def with_numbered_prints(fn: Function, replicas: Replicas) -> Function:
    """As `with_numbers`, for a function whose prints `with_merges` has marked."""
    return rewritten_function(fn, _Prints(replicas).replacement)


def _changed(replicas: Replicas) -> Sequence[str]:
    """The names of primitives that are rewritten."""
    if replicas.inner_axes:
        return ("debug_print", "debug_callback")
    return ("debug_print",) if replicas.count > 1 else ()


@final
@dataclasses.dataclass(frozen=True)
class _Prints:
    replicas: Replicas

    def replacement(self, eqn: Equation) -> Function | None:
        if eqn.primitive.name not in _changed(self.replicas):
            return None
        if eqn.primitive.name == "debug_callback":
            return self._on_one_device(_with(eqn))
        is_merged = isinstance(eqn.params["fmt"], OneText)
        has_prefix = self.replicas.count > 1 and not is_merged
        printed = self._on_one_device(_numbered(eqn, has_prefix))
        if is_merged:
            printed = _on_first_replica(printed)
        return lambda *operands: printed(*operands, self.replicas.index())

    def _on_one_device(self, call: Function) -> Function:
        """`call` on the first device of the replica."""
        if not self.replicas.inner_axes:
            return call

        def device(*whole: jax.Array) -> PyTree:
            is_first = lax.axis_index(self.replicas.inner_axes) == 0
            return lax.cond(is_first, lambda: call(*whole), lambda: [])

        return on_each_device(device, WHOLE, self.replicas)


def _with(eqn: Equation, **changed: object) -> Function:
    """An equation with other parameters, as a function."""
    primitive: Any = eqn.primitive
    return lambda *operands: primitive.bind(*operands, **{**eqn.params, **changed})


def _numbered(eqn: Equation, has_prefix: bool) -> Function:
    """A print with the id of the replica as its last operand."""
    structure, has_fields = eqn.params["in_tree"], eqn.params["has_placeholders"]
    text = NumberedText.of(eqn.params["fmt"], structure, has_fields, has_prefix)
    leaves = tuple(range(structure.num_leaves + 1))
    in_tree = jax.tree.structure((leaves, {}))
    return _with(eqn, fmt=text, in_tree=in_tree, has_placeholders=True)


def _on_first_replica(call: Function) -> Function:
    """`call` on the first replica; its last operand is the id."""

    def called(*operands: jax.Array) -> PyTree:
        return lax.cond(operands[-1] == 0, lambda: call(*operands), lambda: [])

    return called
