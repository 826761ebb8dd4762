"""One step compiled for all replicas of a mesh.

The step is traced once, as one replica sees it. The replication analysis then says
which results are equal on all replicas, and the same trace is compiled with those as
replicated arrays and the others split over the replicas. `jax.jit` keeps one executable
per combination of shapes and dtypes; everything Python has to decide is decided when a
`Program` is made or traced, so that a call is little more than the call of the jitted
function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh

from jaxstrategy import _mesh, _source
from jaxstrategy._errors import TracedValueError
from jaxstrategy._values import PerReplica, PyTree
from jaxstrategy.tracing import _inflight, _results, _roles
from jaxstrategy.tracing._placement import Placement
from jaxstrategy.tracing._roles import Role, Signature
from jaxstrategy.tracing._traced import TracedStep
from jaxstrategy.tracing.replication._rules import analyse
from jaxstrategy.tracing.replication._state import Findings

# What JAX raises when Python asks for a value that only the devices will know.
_ASKED_TOO_EARLY = (
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
)


class Program:
    """A step for one structure of arguments; shapes and dtypes are open.

    Args:
      get_fn: returns the step, or None when it has been collected.
      call: runs the step as one replica: `call(fn, args, kwargs)`, contexts included.
      signature: the arguments that this program is for.
      mesh: where the replicas are.
      donate: positions in `args` whose memory may be reused.
      check: called with each new trace; may raise.
      traced: called with the step and the types of its arrays after each new trace.
    """

    def __init__(
        self,
        get_fn: Callable[[], Callable[..., Any] | None],
        call: Callable[..., Any],
        signature: Signature,
        mesh: Mesh,
        donate: Sequence[int],
        check: Callable[[TracedStep], None],
        traced: Callable[[Callable[..., Any], Sequence[Any]], None],
    ) -> None:
        self._get_fn = get_fn
        self._call = call
        self._signature = signature
        self._mesh = mesh
        self._check = check
        self._traced = traced
        self._bounded = _inflight.needed(mesh)
        self._has_plain = False
        self._users_error: ValueError | None = None
        # Whether the last call had to move an array: then the next one probably must.
        self._check_places = False
        self._may_trace = False
        self._roles = [role for role in signature.roles if role is not Role.STATIC]
        donated = _donated_leaves(signature, donate)
        self._donated = frozenset(donated)
        self._placement = Placement(
            mesh=mesh,
            split=[role is Role.PER_REPLICA for role in self._roles],
            donated=donated,
            label=self._label,
        )
        self._compiled = jax.jit(
            _named(self._trace, self._fn_name()),
            in_shardings=self._placement.shardings,
            donate_argnums=donated,
        )

    def __call__(self, leaves: Sequence[Any]) -> PyTree:
        """The step's results for these leaves, which are live arrays."""
        if self._check_places or not self._placement.is_right(leaves):
            return self.place_and_call(leaves)
        try:
            return self._dispatch(leaves)
        except _NotPlaced:
            return self.place_and_call(leaves)

    def place_and_call(self, leaves: Sequence[Any]) -> PyTree:
        """The same, for leaves of any kind and in any place."""
        placed = self._placement.placed(leaves)
        self._check_places = _differ(placed, leaves)
        self._may_trace = True
        try:
            return self._dispatch(placed)
        finally:
            self._may_trace = False

    def lower(self, leaves: Sequence[Any]) -> Any:
        """JAX's lowered form of the program; `leaves` may be types of arrays."""
        types = [
            jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type
            )
            for leaf, sharding in zip(
                jax.eval_shape(list, leaves), self._placement.shardings, strict=True
            )
        ]
        self._may_trace = True
        try:
            return self._compiled.lower(*types)
        finally:
            self._may_trace = False

    def _dispatch(self, leaves: Sequence[Any]) -> PyTree:
        if self._donated:
            self._placement.check_donated(leaves)
        try:
            results, token = self._compiled(*leaves)
        except ValueError as error:
            results, token = self._call_again(leaves, error)
        if self._bounded:
            _inflight.dispatched(token)
        return _results.unwrap_plain(results) if self._has_plain else results

    def _call_again(self, leaves: Sequence[Any], error: ValueError) -> Any:
        """After an error that may be JAX's about an array split in another way.

        Such an array is moved, or refused with our advice. Another error is raised.
        """
        users, self._users_error = self._users_error, None
        if error is users:
            raise error
        placed = self._placement.placed(leaves)
        if not _differ(placed, leaves):
            raise error
        return self._compiled(*placed)

    # Tracing: called by `jax.jit` once per combination of shapes and dtypes.

    def _trace(self, *leaves: Any) -> PyTree:
        # To JAX an array that lies elsewhere has another type, and would be compiled
        # for a second time. It is placed first.
        if not self._may_trace:
            raise _NotPlaced
        for index, role in enumerate(self._roles):
            if role is Role.PER_REPLICA:
                self._placement.check_replicas(index, leaves[index])
        found: list[_results.Results] = []

        def replica(*locals_: Any) -> list[Any]:
            arrays, results = self._run_replica(locals_)
            found.append(results)
            return arrays

        specs = self._placement.specs
        # SAME for every output is not a claim: this shard_map is only looked into.
        traced = jax.make_jaxpr(self._shard_map(replica, specs, _mesh.SAME))(*leaves)
        # A step without results needs one all the same: XLA runs the callbacks of a
        # program that returns nothing on the first device only.
        (results,) = found
        with_token = self._bounded or not results.has_arrays
        step = self._look_into(traced, results)
        self._check(step)
        arrays, token = self._evaluate(traced, leaves, step.findings, with_token)
        self._has_plain = self._has_plain or results.has_plain
        self._traced(self._fn(), [jax.typeof(leaf) for leaf in leaves])
        return results.rebuild(arrays), token

    def _run_replica(
        self, locals_: Sequence[Any]
    ) -> tuple[list[jax.Array], _results.Results]:
        fn = self._fn()
        args, kwargs = self._signature.rebuild(
            [
                jax.lax.squeeze(leaf, (0,)) if role is Role.PER_REPLICA else leaf
                for leaf, role in zip(locals_, self._roles, strict=True)
            ]
        )
        try:
            returned = self._call(fn, args, kwargs)
        except _ASKED_TOO_EARLY as error:
            raise _asked_too_early(error, self._fn_name()) from error
        except ValueError as error:  # not to be taken for one about placement
            self._users_error = error
            raise
        return _results.take_apart(returned, self._signature.statics, self._fn_name())

    def _look_into(self, traced: Any, results: _results.Results) -> TracedStep:
        """What is known about the step that `traced` is the shard_map of."""
        (eqn,) = traced.jaxpr.eqns
        # The captured constants come first, as variables of their own.
        place = {var: index for index, var in enumerate(traced.jaxpr.invars)}
        inputs = [
            None if isinstance(atom, core.Literal) else place.get(atom)
            for atom in eqn.invars
        ]
        varies = [spec != _mesh.SAME for spec in eqn.params["in_specs"]]
        jaxpr = eqn.params["jaxpr"]
        return TracedStep(
            name=self._fn_name(),
            signature=self._signature,
            label=self._label,
            donated=self._donated,
            inputs=inputs,
            types=[var.aval for var in jaxpr.invars],
            results=results,
            outputs=[atom.aval for atom in jaxpr.outvars],
            findings=analyse(
                jaxpr,
                varies,
                _mesh.REPLICA_AXIS,
                self._mesh.size,
                unpacking=sum(varies),
            ),
        )

    def _evaluate(
        self,
        traced: Any,
        leaves: Sequence[Any],
        findings: Findings,
        with_token: bool,
    ) -> tuple[list[Any], jax.Array | None]:
        """The traced step's results, as the analysis proved them, and a token."""
        (eqn,) = traced.jaxpr.eqns
        known = dict(zip(traced.jaxpr.invars, leaves, strict=True))
        known.update(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        operands = [
            atom.val if isinstance(atom, core.Literal) else known[atom]
            for atom in eqn.invars
        ]
        jaxpr, in_specs = eqn.params["jaxpr"], tuple(eqn.params["in_specs"])
        varies = [state is not None and state.varies for state in findings.outputs]
        step = core.jaxpr_as_fun(_closed(jaxpr))

        def replica(*locals_: Any) -> Any:
            arrays = [
                jax.lax.expand_dims(array, (0,)) if differs else array
                for array, differs in zip(step(*locals_), varies, strict=True)
            ]
            return arrays, jnp.zeros((), jnp.int8) if with_token else None

        out_specs = [_mesh.SPLIT if differs else _mesh.SAME for differs in varies]
        arrays, token = self._shard_map(replica, in_specs, (out_specs, _mesh.SAME))(
            *operands
        )
        wrapped = [
            PerReplica(array) if differs else array
            for array, differs in zip(arrays, varies, strict=True)
        ]
        return wrapped, token

    def _shard_map(self, fn: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        # check_vma=False: with True, JAX sums the gradient of a replicated value over
        # the replicas by itself, and the user's own mean of it is N times too large.
        return jax.shard_map(
            fn,
            mesh=self._mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _fn(self) -> Callable[..., Any]:
        fn = self._get_fn()
        assert fn is not None, "the caller of a program holds its function"
        return fn

    def _fn_name(self) -> str:
        return name_of(self._fn())

    def _label(self, index: int) -> str:
        args, kwargs = self._signature.rebuild([0] * len(self._roles))
        leaf = self._signature.dynamic[index]
        return _roles.label(self._fn(), args, kwargs, leaf)


class _NotPlaced(Exception):
    """A program was about to be traced for arrays that may lie elsewhere."""


def _differ(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))


def _closed(jaxpr: Any) -> Any:
    """`jaxpr`, which has no constants, in the form that can be called."""
    # One class since JAX 0.12, where `ClosedJaxpr` is on its way out.
    if hasattr(jaxpr, "consts"):
        return jaxpr
    return core.ClosedJaxpr(jaxpr, ())  # pyright: ignore[reportPrivateImportUsage]


def name_of(fn: Callable[..., Any]) -> str:
    """What messages and profiles call a step."""
    return getattr(fn, "__name__", type(fn).__name__)


def _named(trace: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`trace` under the step's own name, which profiles and HLO dumps show."""

    def program(*leaves: Any) -> Any:
        return trace(*leaves)

    program.__name__ = program.__qualname__ = name
    return program


def _donated_leaves(signature: Signature, donate: Sequence[int]) -> tuple[int, ...]:
    """Which dynamic leaves belong to the donated positions of `args`.

    Raises:
      ValueError: a position is beyond the arguments.
    """
    leaves = signature.positions()
    beyond = [position for position in donate if position >= len(leaves)]
    if beyond:
        raise ValueError(
            f"`donate_argnums` names argument {beyond[0]}, but `args` has "
            f"{len(leaves)}. Positions count from 0; keyword arguments are not donated."
        )
    chosen = {leaf for n in donate for leaf in leaves[n]}
    return tuple(new for new, old in enumerate(signature.dynamic) if old in chosen)


def _asked_too_early(error: Exception, name: str) -> TracedValueError:
    line = _source.users_line(error.__traceback__)
    where = f"\n  {line}\n" if line else " "
    return TracedValueError(
        f"`{name}` asked Python for the value of something that only the devices will "
        f"know, with `if`, `while`, `int()`, `float()`, indexing a list or NumPy:"
        f"{where}"
        "`run` traces the function once for all replicas, so array and number "
        "arguments, and `replica_id_in_sync_group`, have no value yet. Choose with "
        "`jnp.where` or `jax.lax.cond`, index with `jnp.take`; or pass what decides as "
        "a Python bool or string, which are static."
    )
