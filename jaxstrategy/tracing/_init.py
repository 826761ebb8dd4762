"""State built in mirrored form, on all devices at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxstrategy import _mesh, _values
from jaxstrategy._values import PyTree
from jaxstrategy.tracing import _results, _roles
from jaxstrategy.tracing._program import name_of


def build_replicated(
    fn: Callable[..., PyTree], args: Sequence[Any], mesh: Mesh
) -> PyTree:
    """`fn(*args)` compiled so that its arrays come out whole on each device of `mesh`.

    Raises:
      TypeError: `fn` cannot be called; an argument is a `PerReplica` or cannot be
        hashed; a leaf of the result is neither an array nor a plain value.
    """
    if not callable(fn):
        raise TypeError(
            f"`init` was given {fn!r}, which cannot be called. Give the function that "
            "builds the state and then its arguments: `strategy.init(model.init, key)`."
        )
    leaves, signature = _roles.take_apart(fn, tuple(args), {})
    if _roles.Role.PER_REPLICA in signature.roles:
        raise TypeError(
            "`init` was given a PerReplica, but it builds one state that is the same "
            "on all replicas. Give it plain arrays."
        )

    def build(*leaves: Any) -> PyTree:
        args, _ = signature.rebuild(leaves)
        returned = fn(*args)
        results = _results.take_apart(returned, signature.statics, name_of(fn))
        return results.rebuild(results.arrays)

    compiled = jax.jit(build, out_shardings=_mesh.replicated(mesh))
    return _results.unwrap_plain(compiled(*_values.replicate(leaves, mesh)))
