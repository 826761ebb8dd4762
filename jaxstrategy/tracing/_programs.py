"""The programs of one strategy, in one table.

A function is known by its code and what it refers to (`_references`): one that is
defined anew at each call of the function around it, and refers to the same things each
time, has one program. While a function object lives, that is looked at once, and again
when a variable of its closure has been given another value, or an attribute that a
method reads of its object; a function at the top of a module is known by itself.

The programs of functions that are gone stay, a few for each code, as long as the code.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxstrategy import _errors
from jaxstrategy._options import RunOptions
from jaxstrategy.tracing import (
    _checks,
    _recompilation,
)
from jaxstrategy.tracing._company import Company, accompanied
from jaxstrategy.tracing._program import Program
from jaxstrategy.tracing._returned import Returned
from jaxstrategy.tracing._traced import TracedStep
from jaxstrategy.tracing.functions import (
    _callbacks,
    _code,
    _lending,
)
from jaxstrategy.tracing.functions._places import (
    Cell,
    Place,
)
from jaxstrategy.tracing.functions._references import (
    Identity,
    References,
    attributes_of,
)
from jaxstrategy.tracing.nnx import _objects
from jaxstrategy.tracing.nnx._binding import (
    Binding,
    is_changed_in_place,
)
from jaxstrategy.tracing.stages import _roles
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import PyTree
from jaxstrategy.variables._variable import Variable

# Models, optimizers and metrics of one function: those of a few trainings at once.
_BINDINGS_KEPT = 8
# What functions of one code did that are gone: as when they are choices of a few.
_FORMS_KEPT = 8


class Programs:
    """All programs of a strategy.

    Args:
      mesh: where its replicas are.
      call: runs a function as one replica: `call(fn, args, kwargs)`.
      variables: returns those that steps of the strategy may use.
      company: the other processes, if there are any.
    """

    def __init__(
        self,
        mesh: Mesh,
        call: Callable[..., Any],
        variables: Callable[[], Sequence[Variable]],
        company: Company | None = None,
    ) -> None:
        self.company = company
        self.mesh = mesh
        self.call = call
        self.variables = variables
        self.log = _recompilation.Log()
        self._of_function: dict[Any, FunctionPrograms] = {}
        self._table: dict[Any, Compiled] = {}
        self._codes: set[int] = set()
        # Codes that ask Python for the values of arrays that they capture.
        self.asking: set[Identity] = set()

    def of(
        self, fn: Callable[..., Any], options: RunOptions | None = None
    ) -> FunctionPrograms:
        """The programs of `fn`, the same object as long as `fn` lives."""
        key = _identity(fn), options
        programs = self._of_function.get(key)
        if programs is None:
            programs = FunctionPrograms(
                fn, options, self, lambda: self._of_function.pop(key, None)
            )
            self._of_function[key] = programs
        return programs

    def compiled(
        self,
        key: Any,
        fn: Callable[..., Any],
        options: RunOptions | None,
        seen: Callable[[], _recompilation.Seen],
    ) -> Compiled:
        """What functions of one form, and no others, share."""
        compiled = self._table.get(key)
        if compiled is None:
            compiled = Compiled(options, self, self.log.of(fn), seen())
            self._make_room(key)
            self._table[key] = compiled
            if isinstance(key[0], tuple):
                drop = _callbacks.of(self, Programs.drop_gone)
                tokens = [token for token in key[0] if isinstance(token, Identity)]
                compiled.referred_to = [token.watched(drop) for token in tokens]
            code = _code.code_of(fn)
            if code is not None and id(code) not in self._codes:
                self._codes.add(id(code))
                weakref.finalize(
                    code, _callbacks.of(self, Programs.drop_code, id(code))
                )
        return compiled

    def also(self, key: Any, compiled: Compiled) -> None:
        """Let functions of another form share this, too."""
        self._table.setdefault(key, compiled)

    def forget(self, compiled: Compiled, shared: bool) -> None:
        """After a function is gone: forget what no other function will ask for."""
        if not shared and not compiled.is_in_use:
            self._drop([k for k, v in self._table.items() if v is compiled])

    def _make_room(self, key: Any) -> None:
        """Forget forms that cannot come back, and old ones of the same code."""
        self.drop_gone()
        code = key[1]
        alike = [k for k, c in self._table.items() if k[1] == code and not c.is_in_use]
        self._drop(alike[: max(0, len(alike) - _FORMS_KEPT + 1)])

    def drop_gone(self, *_: Any) -> None:
        """Forget forms that cannot come back: something that they refer to is gone."""
        known = list(self._table.items())
        self._drop([k for k, c in known if _is_gone(k) and not c.is_in_use])

    def drop_code(self, code: int) -> None:
        """Forget the programs of a code that is gone."""
        self._codes.discard(code)
        self._drop([k for k in list(self._table) if k[1].is_gone])

    def _drop(self, keys: Sequence[Any]) -> None:
        for key in keys:
            self._table.pop(key, None)


def _is_gone(key: Any) -> bool:
    tokens = key[0] if isinstance(key[0], tuple) else key[:1]
    return any(isinstance(token, Identity) and token.is_gone for token in tokens)


class FunctionPrograms:
    """The programs of one function, as long as it lives, with one choice of options."""

    def __init__(
        self,
        fn: Callable[..., Any],
        options: RunOptions | None,
        owner: Programs,
        forget: Callable[[], object],
    ) -> None:
        let_go = _callbacks.of(self, FunctionPrograms.let_go)

        def died() -> None:
            let_go()
            forget()

        self._get_fn = _weakly(fn, died)
        self._options = options
        self._owner = owner
        self._compiled: Compiled | None = None
        self._shared = False
        # What its programs are given besides, and what leads to that.
        self._captured: dict[str, Any] = {}
        self._watched: list[tuple[Place, Any]] = []
        self._variables = _variables_of(fn)
        is_method = isinstance(fn, types.MethodType)
        self._names = _code.attributes_read(fn) if is_method else set[str]()
        self._attributes = self._attributes_of(fn)

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> PyTree:
        """The results of the function on all replicas."""
        compiled = self._compiled
        if compiled is None or self._captured:
            return self._call_anew(args, kwargs)
        for place, value in self._variables:
            if place.get() is not value:
                return self._call_anew(args, kwargs)
        if self._names and self._attributes_of(self._get_fn()) != self._attributes:
            return self._call_anew(args, kwargs)
        return compiled(args, kwargs)

    def _attributes_of(self, method: Any) -> dict[str, Identity]:
        """What a method reads of its object, which is not kept alive by this."""
        held = attributes_of(method.__self__) if self._names else {}
        return {name: Identity(held[name]) for name in self._names & held.keys()}

    def _call_anew(self, args: Any, kwargs: Any) -> PyTree:
        """A call of a function that refers to other things than before, maybe."""
        fn = self._get_fn()
        assert fn is not None
        compiled = self._compiled
        if compiled is None or not self._is_as_it_was(fn):
            compiled = self._look_at(fn)
        traces = compiled.traces
        try:
            return self._call(compiled, args, kwargs)
        finally:
            if compiled.traces != traces:
                self._look_again(fn, compiled)

    def _call(self, compiled: Compiled, args: Any, kwargs: Any) -> PyTree:
        arrays = [k for k, v in self._captured.items() if not is_changed_in_place(v)]
        if not arrays or compiled.has_succeeded:
            return compiled.call_with(self._captured, args, kwargs)
        try:
            return compiled.call_with(self._captured, args, kwargs)
        except Exception as error:
            if _is_ours(error) or not _objects.came_from_step(error):
                raise
            # The function may need their values in Python: then they are constants.
            return self._call_with_constants(args, kwargs)

    def _call_with_constants(self, args: Any, kwargs: Any) -> PyTree:
        fn = self._get_fn()
        assert fn is not None
        code = Identity(_code.code_of(fn))
        self._owner.asking.add(code)
        try:
            return self._call(self._look_at(fn), args, kwargs)
        except BaseException:
            self._owner.asking.discard(code)  # they were not the reason
            self._compiled = None
            raise

    def _is_as_it_was(self, fn: Any) -> bool:
        with _lending.one_at_a_time:
            places = (*self._variables, *self._watched)
            has_same = self._attributes_of(fn) == self._attributes
            return has_same and all(place.get() is value for place, value in places)

    def _look_at(self, fn: Any) -> Compiled:
        """Finds the programs of functions like this one."""
        if _is_of_a_module(fn) and not _per_replica.object_kinds():
            self._captured, self._watched = {}, []
            key, references = (Identity(fn), Identity(_code.code_of(fn))), None
        else:
            with _lending.one_at_a_time:
                references = References(fn, is_changed_in_place)
            self._captured, key = self._key_of(fn, references)
            self._watched = references.watched() if self._captured else []
        self._shared = not isinstance(key[0], Identity)
        self._variables = _variables_of(fn)
        self._attributes = self._attributes_of(fn)
        seen = functools.partial(_recompilation.Seen, references)
        compiled = self._owner.compiled((*key, self._options), fn, self._options, seen)
        compiled.add(fn)
        self._compiled = compiled
        return compiled

    def _key_of(self, fn: Any, references: References) -> tuple[dict[str, Any], Any]:
        """What the programs of `fn` are given besides, and who shares them."""
        code = Identity(_code.code_of(fn))
        captured: dict[str, Any] = dict(references.objects)
        constants: list[Any] = []
        if code in self._owner.asking:
            constants = [Identity(array) for array in references.arrays.values()]
        else:
            captured |= references.arrays
        if references.opaque or _is_of_a_module(fn):
            of = Identity(fn.__self__) if isinstance(fn, types.MethodType) else None
            return captured, (Identity(_itself(fn)), code, of, *constants)
        return captured, ((*references.form, *constants), code)

    def _look_again(self, fn: Any, compiled: Compiled) -> None:
        """After the function was traced, which may have changed what it refers to.

        That happens once, while it is traced; its program goes on to be right.
        """
        if self._compiled is not compiled:
            return
        self._variables = _variables_of(fn)
        self._attributes = self._attributes_of(fn)
        if not self._shared:
            return
        with _lending.one_at_a_time:
            references = References(fn, is_changed_in_place)
        captured, key = self._key_of(fn, references)
        if captured.keys() == self._captured.keys() and not references.opaque:
            self._owner.also((*key, self._options), compiled)

    def bound(self, objects: Sequence[Any]) -> Callable[..., PyTree]:
        """The function with these first arguments, which are looked into only now.

        Raises:
          TypeError: none of them can be changed in place.
        """
        fn = self._get_fn()
        assert fn is not None
        compiled = self._look_at(fn)
        return compiled.bound(fn, objects, self._captured)

    def let_go(self) -> None:
        """The function is gone."""
        if self._compiled is not None:
            self._owner.forget(self._compiled, self._shared)


class Compiled:
    """The programs of functions that do the same, with one choice of options.

    Args:
      options: how they are compiled.
      owner: all programs.
      history: of their code.
      seen: what such a function refers to, for messages.
      calls: how often they were called, if others count, too.
    """

    def __init__(
        self,
        options: RunOptions | None,
        owner: Programs,
        history: _recompilation.History,
        seen: _recompilation.Seen,
        calls: _recompilation.Calls | None = None,
    ) -> None:
        self._options = options if options is not None else RunOptions()
        self._owner = owner
        self._history = history
        self._calls = calls or _recompilation.Calls(seen)
        self._functions: list[Callable[[], Any]] = []
        self.traces = 0
        self.traced_by: Compiled | None = (
            None  # whose function this has as one of arrays
        )
        self.has_succeeded = False
        # Kept, so that the programs are forgotten with one of these.
        self.referred_to: list[Any] = []
        self._returned = Returned()
        # Results of the last trace of which nobody has said whether they may differ.
        self._unstated: dict[int, _checks.Unstated] = {}
        self._watched: list[weakref.ref[Any]] = []
        self._by_signature: dict[_roles.Signature, Any] = {}
        # Objects that were given lately, and the function as one of their arrays.
        self._bindings: list[Binding] = []
        self._with_objects: dict[Any, tuple[Any, Any, Compiled]] = {}
        # For calls without static leaves: found by structure alone, the last one first.
        self._by_structure: dict[Any, Any] = {}
        self._last: tuple[Any, Any] = (None, None)

    def add(self, fn: Callable[..., Any]) -> None:
        """Take note of a function; it is not kept alive."""
        self._functions = [get for get in self._functions if get() is not None]
        self._functions.append(_weakly(fn, _nothing))

    @property
    def is_in_use(self) -> bool:
        """Whether one of the functions lives."""
        return self._get_fn() is not None

    def _get_fn(self) -> Any:
        for get in reversed(self._functions):
            if (fn := get()) is not None:
                return fn
        return None

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> PyTree:
        """The results of the function on all replicas."""
        self._calls.count += 1
        structure, program = self._last
        if program is not None:
            # Flattening as the last call's arguments takes half the time of flattening
            # and comparing: 2 us instead of 5 for 20 leaves, 33 instead of 69 for 300.
            try:
                leaves = structure.flatten_up_to((args, kwargs))
            except (ValueError, RuntimeError):
                pass  # of a deleted array JAX's message fails, which shows all of them
            else:
                if _are_live_arrays(leaves):
                    return program(leaves)
        return self._call_other(args, kwargs)

    def _call_other(self, args: Any, kwargs: Any) -> PyTree:
        """A call that is not like the last one, or not of live arrays alone."""
        # A variable is not to be read here, and an object not to be looked into.
        _per_replica.object_kinds()
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_whole)
        program = self._by_structure.get(structure)
        if program is None or not _are_live_arrays(leaves):
            return self._call_carefully(args, kwargs, structure)
        self._last = (structure, program)
        return program(leaves)

    def call_with(
        self, captured: dict[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> PyTree:
        """The results of a function that is given what it captured besides."""
        if not captured:
            results = self(args, kwargs)
        else:
            self._calls.count += 1
            call = _objects.call_of(args, kwargs, captured, self._bindings)
            assert call is not None
            results = self._call_with_objects(call)
        self.has_succeeded = True
        return results

    def _call_carefully(self, args: Any, kwargs: Any, structure: Any) -> PyTree:
        fn = self._get_fn()
        assert fn is not None
        call = _objects.call_of(args, kwargs, {}, self._bindings)
        if call is not None:
            return self._call_with_objects(call)
        leaves, signature = _roles.take_apart(fn, args, kwargs)
        program = self._by_signature.get(signature)
        is_new = program is None
        if program is None:
            self._returned.check(signature, leaves, fn)
            program = self._new_program(signature)
            self._by_signature[signature] = program
            forget = _callbacks.of(self, Compiled._gone, signature)
            self._watched += (weakref.ref(v, forget) for v in signature.handles)
        if not signature.kept:
            self._by_structure[structure] = program
            self._last = (structure, program)
        results = program.place_and_call(leaves)
        if is_new:
            self._returned.add(signature, results, self._unstated)
        return results

    def _call_with_objects(self, call: _objects.Call) -> PyTree:
        programs = self._of_objects(call)
        return _called(programs, call.binding, call.args, call.kwargs)

    def _of_objects(self, call: _objects.Call) -> Compiled:
        binding = call.binding
        if binding is None:
            return self._functional(None, call.captured)[1]
        if binding.known is not None and binding.known[0] == call.captured:
            return binding.known[1]  # hashing takes a tenth of a call
        if binding.may_be_kept and binding not in self._bindings:
            current = [b for b in self._bindings if not b.is_outdated_by(binding)]
            self._bindings = [binding, *current][:_BINDINGS_KEPT]
        binding.form, programs = self._functional(binding.form, call.captured)
        binding.known = call.captured, programs
        return programs

    def _functional(self, form: Any, captured: tuple[str, ...]) -> tuple[Any, Compiled]:
        """The programs of the function as one of arrays."""
        key = None if form is None else form.key, captured
        known = self._with_objects.get(key)
        if known is None:
            function = _objects.functional(self._get_fn, form, captured)
            options = _objects.options_of(self._options)
            seen = self._calls.seen
            programs = Compiled(options, self._owner, self._history, seen, self._calls)
            programs.add(function)
            programs.traced_by = self
            known = self._with_objects[key] = form, function, programs
        return known[0], known[2]

    def bound(
        self, fn: Any, objects: Sequence[Any], captured: dict[str, Any]
    ) -> Callable[..., PyTree]:
        """A function with these first arguments, which are looked into only now.

        Raises:
          TypeError: none of them can be changed in place.
        """
        call = _objects.require_objects(tuple(objects), captured, self._bindings)
        binding, programs = call.binding, self._of_objects(call)
        assert binding is not None

        @functools.wraps(fn)
        def step(*rest: Any, **kwargs: Any) -> PyTree:
            bound = call.with_rest(rest, kwargs)
            return _called(programs, binding, *bound, kept=objects)

        return step

    def _new_program(self, signature: _roles.Signature) -> Any:
        program = Program(
            get_fn=self._get_fn,
            call=self._owner.call,
            signature=signature,
            mesh=self._owner.mesh,
            donate=self._options.donated,
            variables=self._owner.variables,
            may_create=lambda: not self.traces,
            check=self._check,
            traced=functools.partial(self._note, signature),
            check_finite=self._options.check_finite,
        )
        return accompanied(program, self._owner.company, self._get_fn())

    def _gone(self, signature: _roles.Signature, gone: Any) -> None:
        """Drop the program for arguments one of which is gone, and its memory."""
        self._by_signature.pop(signature, None)
        self._watched.remove(gone)

    def _note(self, signature: _roles.Signature, fn: Any, avals: Sequence[Any]) -> None:
        self.traces += 1
        if self.traced_by is not None:
            self.traced_by.traces += 1
        self._history.record(fn, self._calls, signature, avals)

    def _check(self, step: TracedStep) -> None:
        expected = self._options.expect_mirrored
        _checks.check(step, expected, self._history.told)
        self._unstated = _checks.unstated(step, expected)


def _are_live_arrays(leaves: Sequence[Any]) -> bool:
    """Whether all leaves are arrays on devices, none of them donated before."""
    # On JAX 0.10, dispatching a deleted array on several devices ends the process.
    for is_deleted in (_plain_is_deleted(), _is_deleted):
        try:
            return not any(map(is_deleted, leaves))
        except (TypeError, AttributeError, jax.errors.ConcretizationTypeError):
            continue
    return False


def _is_deleted(leaf: Any) -> bool:
    """Of random keys too, at three times the cost."""
    # A variable of Flax NNX has all methods of the array in it.
    if not isinstance(leaf, jax.Array):
        raise TypeError
    return leaf.is_deleted()


@functools.cache
def _plain_is_deleted() -> Callable[[Any], bool]:
    """The method of the class of ordinary arrays, a name that JAX does not export."""
    with jax.ensure_compile_time_eval():
        return type(jax.device_put(0)).is_deleted


def _called(
    programs: Compiled,
    binding: Binding | None,
    args: Any,
    kwargs: Any,
    kept: Sequence[Any] = (),
) -> PyTree:
    """What a step returned that was called with the arrays of objects.

    Args:
      programs: those of the step as a function of arrays.
      binding: the objects, which then hold their new arrays; None if there are none.
      args: positional arguments.
      kwargs: keyword arguments.
      kept: what must live as long as this is called.
    """
    returned, parts = programs(args, kwargs)
    if binding is None:
        return returned
    binding.store(parts)
    return binding.with_callers_objects(returned)


def _nothing() -> None:
    pass


def _is_whole(node: object) -> bool:
    return isinstance(node, _per_replica.Handle) or _per_replica.is_object(node)


def _identity(fn: Callable[..., Any]) -> Any:
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), id(fn.__func__)
    return id(fn)


def _itself(fn: Any) -> Any:
    """What is the same at each access of a method of an object."""
    return fn.__func__ if isinstance(fn, types.MethodType) else fn


def _is_of_a_module(fn: Any) -> bool:
    """Whether `fn` was defined at the top of a module, and is not defined again."""
    if not isinstance(fn, types.FunctionType):
        return False
    is_plain = not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__)
    return is_plain and "<" not in fn.__qualname__


def _variables_of(fn: Any) -> list[tuple[Place, Any]]:
    """The variables of enclosing functions that a function uses, and their values."""
    cells = getattr(_itself(fn), "__closure__", None) or ()
    return [(place, place.get()) for place in map(Cell, cells)]


def _is_ours(error: Exception) -> bool:
    """Whether an error is not one of code that asks for the value of an array."""
    asks = (_errors.TracedValueError, _errors.PlacementError)
    known = type(error).__module__ == _errors.__name__
    return known and not isinstance(error, asks)


def _weakly(
    fn: Callable[..., Any], forget: Callable[[], object]
) -> Callable[[], Callable[..., Any] | None]:
    """A function that returns `fn` while it lives; `forget` is called when it dies."""

    def died(_: Any) -> None:
        forget()

    try:
        if isinstance(fn, types.MethodType):
            return weakref.WeakMethod(fn, died)
        return weakref.ref(fn, died)
    except TypeError:  # its type allows no weak references
        return lambda: fn
