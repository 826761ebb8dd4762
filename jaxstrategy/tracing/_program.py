"""One step compiled for all replicas of a mesh.

The step is traced once, as one replica sees it. The replication analysis then says
which results are equal on all replicas, and the same trace is compiled with those as
replicated arrays and the others split over the replicas. `jax.jit` keeps one executable
per combination of shapes and dtypes; everything Python has to decide is decided when a
`Program` is made or traced, so that a call is little more than the call of the jitted
function.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxstrategy.masks import _step_masks
from jaxstrategy.tracing import (
    _many,
    _results,
)
from jaxstrategy.tracing._constants import Given, constants
from jaxstrategy.tracing._trace import Trace, check_not_divided, trace
from jaxstrategy.tracing._traced import TracedStep, traced_step
from jaxstrategy.tracing._translation import translated
from jaxstrategy.tracing.functions import (
    _callbacks,
    _leaks,
)
from jaxstrategy.tracing.nnx import _objects
from jaxstrategy.tracing.nnx._binding import is_changed_in_place
from jaxstrategy.tracing.nnx._held import Held
from jaxstrategy.tracing.stages import _inflight
from jaxstrategy.tracing.stages._carried import Carried
from jaxstrategy.tracing.stages._finite import Finite
from jaxstrategy.tracing.stages._mask_arguments import Masks
from jaxstrategy.tracing.stages._placement import (
    Placement,
    check_whole,
)
from jaxstrategy.tracing.stages._roles import (
    Role,
    Signature,
)
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import (
    Handle,
    PyTree,
)
from jaxstrategy.variables import (
    _access,
    _cell,
    _gradients,
)
from jaxstrategy.variables._variable import Variable


class Program:
    """A step for one structure of arguments; shapes and dtypes are open.

    Args:
      get_fn: returns the step, or None when it has been collected.
      call: runs the step as one replica: `call(fn, args, kwargs)`, contexts included.
      signature: the arguments that this program is for.
      mesh: where the replicas are.
      donate: positions in `args` whose memory may be reused.
      variables: returns those that the step may use.
      may_create: whether the step may make some now.
      check: called with each new trace; may raise.
      traced: called with the step and the types of its arrays after each new trace.
      check_finite: see `RunOptions`.
    """

    def __init__(
        self,
        get_fn: Callable[[], Callable[..., Any] | None],
        call: Callable[..., Any],
        signature: Signature,
        mesh: Mesh,
        donate: Sequence[int],
        variables: Callable[[], Sequence[Variable]],
        may_create: Callable[[], bool],
        check: Callable[[TracedStep], None],
        traced: Callable[[Callable[..., Any], Sequence[Any]], None],
        check_finite: bool | str = False,
    ) -> None:
        self._get_fn = get_fn
        self._call = call
        self._signature = signature
        self._mesh = mesh
        self._variables = variables
        self._may_create = may_create
        self._check = check
        self._traced = traced
        self._bounded = _inflight.needed(mesh)
        # Called with the name of the step and each new trace of it.
        self.observer: Callable[[str, Any], None] | None = None
        self._has_plain = False
        self._users_error: Exception | None = None
        # Whether the last call had to move an array: then the next one probably must.
        self._check_places = False
        # The thread that may trace the step now; the others wait for it.
        self._tracer: int | None = None
        self._one_tracer = threading.RLock()
        self._roles = [role for role in signature.roles if role is not Role.STATIC]
        donated = signature.donated(donate)
        self._donated = frozenset(donated)
        self._placement = Placement(
            mesh=mesh,
            split=[role is Role.PER_REPLICA for role in self._roles],
            donated=donated,
            label=self._label,
        )
        self._masks = Masks(self._roles, self._label, self._fn_name)
        self._given: Sequence[Any] = ()  # what it is traced for
        self._uses_variables = False
        self._used: list[weakref.ref[Handle]] = []
        self._uses_references = False
        # Whether JAX traces the code that called last, if variables are carried.
        self._is_traced = False
        self._pending: Trace | None = None
        self._held = Held(self._fn_name())
        self._finite = None
        if check_finite:
            self._finite = Finite(self._fn_name(), check_finite != "nan")
        # The jitted function and the variables that it is given. Threads read both at
        # once.
        self._form = self._compile(Carried(mesh))

    def _compile(self, carried: Carried) -> tuple[Any, Carried]:
        shardings: Any = (*self._placement.shardings, *carried.shardings)
        if self._uses_references:
            # JAX has no rule for references inside a jitted function with shardings
            # inside another jitted function. So arguments are checked at each call.
            shardings = None
        # A step that raises `NonFiniteError` leaves variables what they held before it.
        taken = carried.lent if self._finite is None else ()
        lent = (len(self._roles) + i for i in taken)
        compiled = jax.jit(
            _named(functools.partial(self._trace, carried), self._fn_name()),
            donate_argnums=(*sorted(self._donated), *lent),
            **({} if shardings is None else {"in_shardings": shardings}),
        )
        return compiled, carried

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
        if self._donated:  # moved twice, an array may lie in the same memory twice
            self._placement.check_donated(leaves)
        placed = self._placement.placed(leaves)
        moved = _differ(placed, leaves)

        def call() -> PyTree:
            self._given = placed
            return self._dispatch(placed)

        try:
            return self._tracing(call)
        finally:
            self._check_places = moved or self._uses_references

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
        return self._tracing(
            lambda: self._form[0].lower(*types, *self._form[1].values())
        )

    def _tracing(self, call: Callable[[], Any]) -> Any:
        """What `call` returns, which may trace the step."""
        with self._one_tracer:
            self._tracer = threading.get_ident()
            self._is_traced = _cell.is_traced()
            try:
                try:
                    return call()
                except _UsesVariables as found:
                    self._use(found.carried, found.by_reference)
                # After the block, or its exception were the context of later ones.
                return call()
            except _leaks.Leak as leak:
                raise leak.explained() from None
            finally:
                self._tracer, self._given = None, ()
                self._pending = None

    def _use(self, variables: list[Variable], by_reference: bool) -> None:
        """From now on, the program is given these variables, too."""
        self._uses_variables = True
        self._uses_references |= by_reference
        self._form = self._compile(self._form[1].plus(variables))

    def _dispatch(self, leaves: Sequence[Any]) -> PyTree:
        if self._held and self._held.have_changed():
            self._form = self._compile(self._form[1])
        if not self._uses_variables:
            return self._send(leaves)
        _gradients.check_outside(used() for used in self._used)
        with _access.one_at_a_time:
            return self._send(leaves)

    def _send(self, leaves: Sequence[Any]) -> PyTree:
        if self._donated:
            self._placement.check_donated(leaves)
        if self._masks:
            self._masks.check(leaves)
        compiled, carried = self._settled() if self._uses_variables else self._form
        inputs = leaves if carried.is_empty else [*leaves, *carried.values()]
        before = () if self._finite is None else self._in_references()
        try:
            results, token, kept = compiled(*inputs)
        except ValueError as error:
            results, token, kept = self._call_again(leaves, error)
        if self._finite is not None:
            self._finite.check(token, before)
        if kept:
            carried.store(kept)
        if self._bounded:
            _inflight.dispatched(token)
        return _results.unwrap_plain(results) if self._has_plain else results

    def _in_references(self) -> list[tuple[Any, jax.Array]]:
        """The references that the step changes in place, and what they hold now."""
        used = [variable.cell for ref in self._used if (variable := ref()) is not None]
        return [(cell.ref, cell[...]) for cell in used if cell.is_reference]

    def _settled(self) -> tuple[Any, Carried]:
        """The form for a call here and now: without variables that are references."""
        compiled, carried = self._form
        traced = carried.has_lent and _cell.is_traced()
        if traced or carried.has_references:
            self._uses_references = True
            self._form = self._compile(carried.without_references(traced))
        return self._form

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
        compiled, carried = self._form
        return compiled(*placed, *carried.values())

    # Tracing: called by `jax.jit` once per combination of shapes and dtypes.

    def _trace(self, form: Carried, *inputs: Any) -> PyTree:
        # To JAX an array that lies elsewhere has another type, and would be compiled
        # for a second time. It is placed first.
        if self._tracer != threading.get_ident():
            raise _NotPlaced
        if not _cell.is_traced() and _looks_for_nans():
            return self._debugged(form, inputs)
        check_not_divided(self._fn_name())
        n = len(self._roles)
        leaves, carried = inputs[:n], inputs[n:]
        for index, role in enumerate(self._roles):
            if role is Role.PER_REPLICA:
                self._placement.check_replicas(index, leaves[index])
        done, self._pending = self._pending, None
        if done is None:
            done = trace(
                self._run_replica,
                leaves,
                self._placement.specs,
                self._mesh,
                self._variables,
                self._may_create(),
            )
            _many.tell(self._fn_name(), done.jaxpr)
            self._check_captured(done.closed)
            self._check(self._step_of(done))
            if self.observer is not None:
                self.observer(self._fn_name(), done.closed)
        self._held.add(done.closed)
        self._watch([*done.used, *done.results.variables])
        missing = form.missing(done.used, self._is_traced)
        carried_now = sum(variable in form for variable in done.used)
        by_reference = carried_now + len(missing) < len(done.used)
        if missing or by_reference > self._uses_references:
            self._pending = done
            raise _UsesVariables(missing, by_reference)
        # A step without results needs one all the same: XLA runs the callbacks of a
        # program that returns nothing on the first device only.
        with_token = self._bounded or not done.results.has_arrays
        references = form.references(carried)
        look = None if self._finite is None else self._look(done, self._finite)
        arrays, token = done.evaluate(leaves, references, with_token, look)
        carried = [jax.freeze(ref) for ref in references.values()]
        self._has_plain = self._has_plain or done.results.has_plain
        self._traced(self._fn(), [jax.typeof(leaf) for leaf in leaves])
        return done.results.rebuild(arrays), token, carried

    def _check_captured(self, jaxpr: Any) -> None:
        for constant in constants(jaxpr):
            if _per_replica.is_placed(constant.value):
                name = f"What `{self._fn_name()}` captures, {constant.description},"
                what = "what a step captures"
                check_whole(constant.value, self._mesh, name, what)

    def _debugged(self, form: Carried, inputs: Sequence[Any]) -> PyTree:
        """The results for what has led to a NaN, which `jax_debug_nans` looks for.

        JAX calls a function again then, operation by operation. Inside a `shard_map` it
        would do so for ever, and it knows nothing of replicas.

        Raises:
          NonFiniteError: that the program makes.
        """
        infinities = bool(jax.config.jax_debug_infs)
        before, self._finite = self._finite, Finite(self._fn_name(), infinities)
        try:
            with jax.debug_nans(False), jax.debug_infs(False):
                returned = jax.jit(functools.partial(self._trace, form))(*inputs)
            self._finite.check(returned[1])
        finally:
            self._finite = before
        return returned

    def _look(self, done: Trace, finite: Finite) -> Callable[..., Any]:
        """How the trace is evaluated where all values are looked at."""
        sources = self._step_of(done).sources
        return lambda jaxpr, inputs: finite.evaluate(jaxpr, inputs, sources)

    def _watch(self, variables: Sequence[Handle]) -> None:
        """Forget what was compiled when one of these is gone.

        The function uses another one now, if it is called at all: an attribute or a
        global name that was given a new variable. And the memory is free.
        """
        forget = _callbacks.of(self, Program._gone)
        watched = {used() for used in self._used}
        self._used += (weakref.ref(v, forget) for v in variables if v not in watched)

    def same(self, leaves: Sequence[Any]) -> dict[int, Given]:
        """Those of `leaves` that are no replica's own, by their place."""
        return {
            index: Given(label, leaves[index]) for index, label in self._labels.items()
        }

    @functools.cached_property
    def _labels(self) -> dict[int, str]:
        return {
            index: self._label(index)
            for index, role in enumerate(self._roles)
            if role is Role.SAME
        }

    @property
    def is_alive(self) -> bool:
        """Whether there still is a function to trace."""
        return self._get_fn() is not None

    def _gone(self, _: Any) -> None:
        if self.is_alive:
            self.forget()

    def forget(self) -> None:
        """Be as before the first call."""
        self._used, self._uses_references = [], False
        self._form = self._compile(Carried(self._mesh))

    def _run_replica(
        self, locals_: Sequence[Any]
    ) -> tuple[list[jax.Array], _results.Results]:
        fn = self._fn()
        own = [
            jax.lax.squeeze(leaf, (0,)) if role is Role.PER_REPLICA else leaf
            for leaf, role in zip(locals_, self._roles, strict=True)
        ]
        args, kwargs = self._signature.rebuild(own)
        batches = self._masks.batches(own)
        try:
            with _step_masks.given(batches), self._without_leaks(fn):
                returned = self._call(fn, args, kwargs)
        except _leaks.Leak:
            raise
        except Exception as error:
            told = translated(error, self._fn_name())
            if isinstance(told or error, ValueError):
                self._users_error = told or error  # not one about placement
            if told is None:
                raise
            raise told from error
        self._masks.learn(batches)
        if self._given:
            self._masks.check(self._given)
        return _results.take_apart(returned, self._signature.statics, self._fn_name())

    def _without_leaks(self, fn: Any) -> contextlib.AbstractContextManager[None]:
        if _objects.is_functional(fn):
            return contextlib.nullcontext()
        statics = [
            (self._signature.label(fn, index).strip("`"), value)
            for index, value in self._signature.with_statics()
        ]
        name = self._fn_name()
        return _leaks.refused(fn, name, is_changed_in_place, statics)

    def _step_of(self, done: Trace) -> TracedStep:
        return traced_step(
            done,
            self._fn_name(),
            self._signature,
            self._label,
            self._donated,
            _objects.is_functional(self._fn()),
        )

    def _fn(self) -> Callable[..., Any]:
        fn = self._get_fn()
        assert fn is not None, "the caller of a program holds its function"
        return fn

    def _fn_name(self) -> str:
        return name_of(self._fn())

    def _label(self, index: int) -> str:
        return self._signature.label(self._fn(), self._signature.dynamic[index])


class _UsesVariables(Exception):
    """A step uses variables that its program is not given; it is to be remade."""

    def __init__(self, carried: list[Variable], by_reference: bool) -> None:
        self.carried = carried
        self.by_reference = by_reference


class _NotPlaced(Exception):
    """A program was about to be traced for arrays that may lie elsewhere."""


def _looks_for_nans() -> bool:
    return bool(jax.config.jax_debug_nans or jax.config.jax_debug_infs)


def _differ(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))


def name_of(fn: Callable[..., Any]) -> str:
    """What messages and profiles call a step."""
    return getattr(fn, "__name__", type(fn).__name__)


def _named(trace: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`trace` under the step's own name, which profiles and HLO dumps show."""

    def program(*leaves: Any) -> Any:
        return trace(*leaves)

    program.__name__ = program.__qualname__ = name
    return program
