"""The cache of compiled functions of one strategy: `FunctionCache`."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, final

import jax

from jaxstrategy._src import errors
from jaxstrategy._src.errors import CompiledStepError
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.tracing import nnx, rebinding, signature as _signature
from jaxstrategy._src.tracing.checks.step_checks import check
from jaxstrategy._src.tracing.checks.varying_results import Returned, Unstated
from jaxstrategy._src.tracing.nnx import came_from_step
from jaxstrategy._src.tracing.program import NotTraced, Program, Retraced
from jaxstrategy._src.tracing.recompilation import (
    Calls,
    History,
    history_of,
    other_arguments,
)
from jaxstrategy._src.tracing.references import (
    UNBOUND,
    Binding,
    Identity,
    References,
    attributes_of,
    code_of,
    keys_match,
    weak_function,
    weak_method,
)
from jaxstrategy._src.tracing.saved_step import Obtain
from jaxstrategy._src.tracing.signature import Signature, are_live_arrays
from jaxstrategy._src.tracing.step_agreement import AgreedProgram, StepAgreement
from jaxstrategy._src.tracing.traced_step import (
    ReplicaStep,
    StepEnvironment,
    TracedStep,
    name_of,
)
from jaxstrategy._src.values import per_replica, trees
from jaxstrategy._src.values.arrays import (
    Arguments,
    Function,
    Leaf,
    PyTree,
    TreeStructure,
)
from jaxstrategy._src.values.trees import is_nnx_node

# For each code, keys of functions that died are kept: a function may be defined anew.
_MAX_UNUSED_KEYS = 8
_MAX_MUTATING = 256


# Equal for functions that do the same: the code, options, and what is referred to.
Key: TypeAlias = tuple[Hashable, ...]


def _identities(key: Key) -> list[Identity]:
    """The objects without which no function can have this key any more."""
    return [token for token in key if isinstance(token, Identity)]


class _Unshared(Identity):
    """In the key of a function that is cached by its identity."""


@final
class FunctionCache:
    """All programs of a strategy: functions with equal keys share theirs.

    The programs of functions that died stay, a few for each code, as long as the code
    and what they captured: the function around them may define them anew.
    """

    def __init__(
        self,
        environment: StepEnvironment,
        agreement: StepAgreement | None = None,
    ) -> None:
        self._environment = environment
        self._agreement = agreement
        # Compiles nothing any more.
        self.is_frozen = False
        self._functions: dict[Hashable, CachedFunction] = {}
        self._histories: dict[int, History] = {}
        self._table: dict[Key, ProgramCache] = {}
        # The captured values that a trace mutates, as indices into its references.
        self._mutated: dict[Key, tuple[int, ...]] = {}
        # Functions that need the values of captured arrays in Python, by their code.
        self.with_constants: set[Identity] = set()

    def of(self, fn: Function, options: RunOptions | None = None) -> CachedFunction:
        """The programs of `fn`, the same object as long as `fn` lives."""
        number, functions = (identity(fn), options), self._functions
        function = functions.get(number)
        if function is None:
            get_fn = weak_function(fn, lambda _: functions.pop(number, None))
            function = functions[number] = CachedFunction(get_fn, options, self)
        return function

    def key_of(
        self, fn: Function, options: RunOptions | None, references: References
    ) -> tuple[Key, dict[str, Leaf]]:
        """The cache key of a function, and the captured values its programs take."""
        code = Identity(code_of(fn))
        captured: dict[str, Leaf] = dict(references.objects)
        constants: list[Leaf] = []
        if code in self.with_constants:
            constants = list(references.arrays.values())
        else:
            captured |= references.arrays
        tokens = references.key
        if references.opaque or _is_module_level(fn):
            is_method = isinstance(fn, types.MethodType)
            # The function of a method is the same at each access, the method is not.
            function, *owner = (fn.__func__, fn.__self__) if is_method else (fn,)
            tokens = (_Unshared(function), *map(Identity, owner))
        return (code, options, *tokens, *map(Identity, constants)), captured

    def programs(
        self,
        key: Key,
        fn: Function,
        options: RunOptions | None,
        references: References,
    ) -> ProgramCache:
        """The programs of functions with this key."""
        if self._mutated:
            key = self._with_mutated(key, references)
        if (known := self._table.get(key)) is not None:
            return known
        if self.is_frozen:
            raise CompiledStepError(
                f"`{name_of(fn)}` was compiled ahead of time, and what it captures has "
                "changed since: a variable of the function around it, or an attribute "
                "of its object. Compile it again, or pass what changes as an argument."
            )
        history, calls = history_of(fn, self._histories), Calls(references)
        made = ProgramCache(self._environment, self._agreement, options, history, calls)
        self._purge(key[0])
        # At once: programs may hold large constants.
        on_death = weak_method(self, FunctionCache._purge, None)
        made.watched = [each.watch(on_death) for each in _identities(key)]
        made.key = key
        return self._table.setdefault(key, made)  # or another thread's

    def unshare(self, programs: ProgramCache) -> None:
        """Lets no other function use these programs."""
        if self._table.get(programs.key) is programs:
            del self._table[programs.key]

    def share_mutating(
        self,
        key: Key,
        references: References,
        mutated: tuple[int, ...],
        programs: ProgramCache,
    ) -> None:
        """Lets functions share programs whose trace has mutated what they capture."""
        if len(self._mutated) >= _MAX_MUTATING:
            del self._mutated[next(iter(self._mutated))]
        self._mutated[key] = mutated
        programs.key = self._with_mutated(key, references)
        self._table.setdefault(programs.key, programs)

    def _with_mutated(self, key: Key, references: References) -> Key:
        """`key`, with the identities of what a trace mutates."""
        indices = self._mutated.get(key, ())
        return (*key, *(Identity(references.nodes[i].value) for i in indices))

    def _purge(self, code: Hashable = None, *_: object) -> None:
        """Drops programs that no function can use any more, and old ones of `code`."""
        items = list(self._table.items())
        old = []
        for key in [key for key, programs in items if not programs.is_in_use]:
            if any(identity.is_gone for identity in _identities(key)):
                self._table.pop(key, None)
            elif key[0] == code:
                old.append(key)
        for key in old[: max(0, len(old) - _MAX_UNUSED_KEYS + 1)]:
            self._table.pop(key, None)


_NOTHING_FOUND: tuple[ProgramCache | None, dict[str, Leaf]] = (None, {})


@final
class CachedFunction:
    """The programs of one function object with one choice of options.

    The cache key is computed at the first call, and again whenever the function may
    capture something else.
    """

    def __init__(
        self,
        get_fn: Callable[[], Function | None],
        options: RunOptions | None,
        cache: FunctionCache,
    ) -> None:
        self._get_fn = get_fn
        self._options = options
        self._cache = cache
        # Its programs, and the captured values that they take as arguments, by label:
        # one tuple, as another thread may look them up meanwhile.
        self._found = _NOTHING_FOUND
        # What it referred to at the last lookup, during a call; and the key of that.
        self._references: References | None = None
        self._key: Key = ()
        # Bindings that lead to captured values, with what they had.
        self._captured_bindings: list[tuple[Binding, object]] = []
        # Of a method's object, or a callable one, the attributes that its code names.
        self._names: list[str] | None = None

    def __call__(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """The results of the function on all replicas."""
        programs, captured = self._found
        if programs is None or captured or programs.owner not in (None, self):
            return self._call_checked((args, kwargs))
        # Outside of the block, because a step may raise the same.
        is_same = True
        try:
            for cell, value in self._cells:
                if cell.cell_contents is not value:
                    is_same = False
        except ValueError:  # a variable that is not assigned yet
            is_same = False
        if not is_same:
            return self._call_checked((args, kwargs))
        if self._names is not None and not self._has_same_attributes(self._get_fn()):
            return self._call_checked((args, kwargs))
        programs.get_caller = self._get_fn
        traces = programs.traces
        try:
            return programs(args, kwargs)
        finally:
            if programs.traces != traces:
                self._update_key(self._get_fn(), programs)

    def prepare(self, arguments: Arguments, obtain: Obtain) -> None:
        """Compiles the program of such a call now; types may stand for arrays."""
        self._call_checked(arguments, obtain)

    def bound(self, objects: Sequence[PyTree]) -> Callable[..., PyTree]:
        """The function with these first arguments, which are flattened only once."""
        fn = self._get_fn()
        assert fn is not None, "the caller holds the function"
        programs, captured = self._lookup(fn)
        self._references = None
        return programs.bound(fn, objects, captured)

    def _take_snapshot(self, fn: Function) -> None:
        """Remembers the values of free variables, and of attributes."""
        function = fn.__func__ if isinstance(fn, types.MethodType) else fn
        cells = list(map(Binding, getattr(function, "__closure__", None) or ()))
        self._free_variables = [(binding, binding.get()) for binding in cells]
        # The same, for each call.
        self._cells = [
            (binding.owner, value) for binding, value in self._free_variables
        ]
        names = self._names or ()
        values = {} if self._names is None else _attributes(fn)
        # Code may name attributes that come later, too.
        self._all_names = frozenset(values)
        self._attributes = [
            (name, Identity(values.get(name, UNBOUND))) for name in names
        ]

    def _has_same_attributes(self, fn: Function | None) -> bool:
        values = _attributes(fn)
        if values.keys() != self._all_names:
            return False
        for name, identity in self._attributes:
            if not identity.is_of(values.get(name, UNBOUND)):
                return False
        return True

    def _call_checked(
        self, arguments: Arguments, obtain: Obtain | None = None
    ) -> PyTree:
        """A call of a function that may capture something else than before."""
        fn, (programs, captured) = self._get_fn(), self._found
        assert fn is not None, "the caller holds the function"
        is_usable = programs is not None and programs.owner in (None, self)
        if programs is None or not is_usable or not self._captures_the_same(fn):
            programs, captured = self._lookup(fn)
        programs.get_caller = self._get_fn
        traces = programs.traces
        try:
            if obtain is None:
                return programs.call_with(captured, arguments)
            programs.prepare(captured, arguments, obtain)
        except Exception as error:
            has_arrays = not all(map(is_nnx_node, captured.values()))
            if not has_arrays or programs.has_succeeded or not _needs_constants(error):
                raise
            # The function may need the value of an array in Python, or the sharding of
            # a captured array is none of an argument: then they are constants.
            code = Identity(code_of(fn))
            self._cache.with_constants.add(code)
            self._found = _NOTHING_FOUND
            try:
                return self._call_checked(arguments, obtain)
            except BaseException:
                self._cache.with_constants.discard(code)  # they were not the reason
                self._found = _NOTHING_FOUND
                raise
        finally:
            if programs.traces != traces:
                self._update_key(fn, programs)
            self._references = None

    def _captures_the_same(self, fn: Function) -> bool:
        bindings = (*self._free_variables, *self._captured_bindings)
        is_same = all(
            rebinding.original_value(binding) is value for binding, value in bindings
        )
        return is_same and (self._names is None or self._has_same_attributes(fn))

    def _lookup(self, fn: Function) -> tuple[ProgramCache, dict[str, Leaf]]:
        """Finds the programs of the cache key, and the captured values they take."""
        self._found = _NOTHING_FOUND  # the previous ones are not right any more
        # It captures no arrays, and is known by itself: nothing needs to be hashed.
        is_simple = _is_module_level(fn) and not trees.object_kinds()
        references = rebinding.references(_nothing if is_simple else fn)
        self._references = references
        self._key, captured = self._cache.key_of(fn, self._options, references)
        bindings = references.captured_bindings
        self._captured_bindings = bindings() if captured else []
        if isinstance(references.root, types.MethodType):
            self._names = references.named_attributes(references.root)
        self._take_snapshot(fn)
        programs = self._cache.programs(self._key, fn, self._options, references)
        programs.add(self._get_fn)
        self._found = programs, captured
        return programs, captured

    def _update_key(self, fn: Function | None, programs: ProgramCache) -> None:
        """After a trace, which may have changed what the function captures."""
        if fn is None or self._found[0] is not programs:
            return
        self._take_snapshot(fn)
        if any(isinstance(token, _Unshared) for token in self._key):
            return
        references = rebinding.references(fn)
        key, _ = self._cache.key_of(fn, self._options, references)
        if keys_match(key, self._key):
            return
        self._key = key
        self._cache.unshare(programs)
        programs.owner = self  # other functions may have found them already
        before = self._references
        if before and (mutated := references.mutated_since(before)):
            self._cache.share_mutating(key, references, mutated, programs)


def _attributes(fn: Any) -> dict[str, object]:
    """The attributes of a method's object, or of a callable object."""
    return attributes_of(fn.__self__ if isinstance(fn, types.MethodType) else fn)


def _is_module_level(fn: Function) -> bool:
    """Whether `fn` was defined at the top of a module, and is not defined again."""
    if not isinstance(fn, types.FunctionType):
        return False
    is_plain = not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__)
    return is_plain and "<" not in fn.__qualname__


def _nothing() -> None:
    """Refers to nothing."""


def _needs_constants(error: Exception) -> bool:
    """Whether a step may succeed with captured arrays as constants."""
    if isinstance(error, errors.PlacementError):
        return True
    is_ours = type(error).__module__ == errors.__name__
    if is_ours and not isinstance(error, errors.TracedValueError):
        return False
    return came_from_step(error)


def identity(fn: Function) -> Hashable:
    """The `id` of a function; a method is another object at each access."""
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), id(fn.__func__)
    return id(fn)


_Program: TypeAlias = Program | AgreedProgram
_MAX_FAST_PATH_MISSES = 3


@final
class ProgramCache:
    """The programs of functions with one cache key, by signature."""

    def __init__(
        self,
        environment: StepEnvironment,
        agreement: StepAgreement | None,
        options: RunOptions | None,
        history: History,
        calls: Calls,
    ) -> None:
        self._environment = environment
        self._agreement = agreement
        self._options = options if options is not None else RunOptions()
        self._history = history
        self._calls = calls
        # The only ones that may be called, if they are compiled ahead of time.
        self._prepared: Signature | None = None
        self._functions: list[Callable[[], Function | None]] = []
        # The function that is called now; another thread may call another.
        self.get_caller: Callable[[], Function | None] = lambda: None
        # The only function that may use these, as their trace has mutated its captures.
        self.owner: object | None = None
        self.key: Key = ()  # by which others find them
        self.traces = 0
        self.has_succeeded = False
        # Weak references whose callbacks drop programs; kept alive here.
        self.watched: list[object] = []
        self._watched_handles: list[weakref.ref[per_replica.Handle]] = []
        self._returned = Returned()
        # By signature; without static arguments also by the structure of the arguments,
        # which is found in half the time.
        self._programs: dict[Hashable, _Program] = {}
        self._last: tuple[Any, _Program | None] = (None, None)
        # The program to call without a look at the arguments: JAX raises for those that
        # differ. Given up after a few misses, each of which costs an exception.
        self._fast_path: Program | None = None
        self._fast_path_misses = 0
        # Once a call has had objects of Flax NNX, all are looked through for them.
        self._objects = nnx.RecentObjects()
        self._takes_objects = False

    def add(self, get_fn: Callable[[], Function | None]) -> None:
        """Adds a function that may use these programs, without keeping it alive."""
        self._functions = [get for get in self._functions if get() is not None]
        self._functions.append(get_fn)

    @property
    def is_in_use(self) -> bool:
        """Whether one of its functions is alive."""
        return self._get_fn() is not None

    def _get_fn(self) -> Function | None:
        for get in (self.get_caller, *reversed(self._functions)):
            if (fn := get()) is not None:
                return fn
        return None

    @property
    def _fn(self) -> Function:
        fn = self._get_fn()
        assert fn is not None, "the caller holds a function"
        return fn

    def __call__(
        self,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
        has_arrays: bool = False,  # for objects
    ) -> PyTree:
        """The results of the function on all replicas."""
        if self._takes_objects and not has_arrays:
            return self._call_with_objects((args, kwargs), {})
        self._calls.count += 1
        program = self._fast_path
        if program is not None and (executable := program.executable).is_bare:
            try:
                return program.call_bare(executable, args, kwargs)
            except Exception as error:
                if not self._is_fast_path_miss(program, error, (args, kwargs)):
                    raise
            return self._call_by_structure((args, kwargs))
        arguments = args, kwargs
        structure, program = self._last
        if program is not None:
            # Flattening as the last call's arguments takes half the time of flattening
            # and comparing: 2 us instead of 5 for 20 leaves, 33 instead of 69 for 300.
            try:
                leaves = structure.flatten_up_to(arguments)
            except (ValueError, RuntimeError):
                pass  # `RuntimeError`: JAX's message shows arrays, one of them deleted
            else:
                if are_live_arrays(leaves):
                    return self._call_live(program, leaves, arguments)
        return self._call_by_structure(arguments)

    def _call_live(
        self, program: _Program, leaves: list[Leaf], arguments: Arguments
    ) -> PyTree:
        """A call whose leaves are live arrays."""
        inputs = leaves
        if program.layout.structure is not None:
            args, kwargs = arguments
            inputs = (*args, kwargs) if kwargs else args
        results = program(leaves, inputs)
        may_be_fast = self._fast_path_misses < _MAX_FAST_PATH_MISSES
        if may_be_fast and isinstance(program, Program):
            self._fast_path = None if program.must_check_first else program
        return results

    def _is_fast_path_miss(
        self, program: Program, error: Exception, arguments: Arguments
    ) -> bool:
        """Whether a call failed only because its arguments need the slow path."""
        if isinstance(error, jax.errors.JaxRuntimeError):
            program.placement.check_once(jax.tree.leaves(arguments))
            return False  # the devices have begun
        if not isinstance(error, (NotTraced, Retraced)):
            leaves, structure = _flatten(arguments)
            is_same = structure == program.layout.structure and are_live_arrays(leaves)
            if is_same and program.is_placed(leaves):
                return False
        self._fast_path_misses += 1
        self._fast_path = None
        return True

    def _call_by_structure(self, arguments: Arguments) -> PyTree:
        """A call whose structure differs from the last one, or with other leaves."""
        leaves, structure = _flatten(arguments)
        program = self._programs.get(structure)
        if program is None or not are_live_arrays(leaves):
            return self._call_by_signature(arguments, structure)
        self._last = (structure, program)
        return self._call_live(program, leaves, arguments)

    def call_with(self, captured: dict[str, Leaf], arguments: Arguments) -> PyTree:
        """The results of a function with captured values as further arguments."""
        if captured:
            results = self._call_with_objects(arguments, captured)
        else:
            results = self(*arguments)
        self.has_succeeded = True
        return results

    def prepare(
        self, captured: dict[str, Leaf], arguments: Arguments, obtain: Obtain
    ) -> None:
        """Compiles the program of such a call now; types may stand for arrays."""
        _, arguments = nnx.as_arrays(arguments, captured, self._objects)
        leaves, signature = _signature.flatten(self._fn, arguments, abstract=True)
        program, _ = self._new_program(signature)
        program.prepare(leaves, obtain)
        self._programs[signature] = program
        self._prepared = signature
        self.has_succeeded = True

    def _call_by_signature(
        self, arguments: Arguments, structure: TreeStructure
    ) -> PyTree:
        fn = self._fn
        if nnx.has_objects(arguments):
            self._takes_objects = True
            return self._call_with_objects(arguments, {})
        leaves, signature = _signature.flatten(fn, arguments)
        program, unstated = self._programs.get(signature), None
        if program is None:
            if self._prepared is not None:
                raise other_arguments(fn, self._prepared, signature)
            self._returned.check(signature, leaves, fn)
            made, unstated = self._new_program(signature)
            program = self._programs.setdefault(signature, made)  # or another thread's
            drop = weak_method(self, ProgramCache._drop, signature)
            self._watched_handles += (weakref.ref(v, drop) for v in signature.handles)
        if not signature.static_leaves:
            self._programs[structure] = program
            self._last = (structure, program)
        results = program.place_and_call(leaves)
        if unstated is not None:
            self._returned.add(signature, results, unstated)
        return results

    def _new_program(
        self, signature: Signature
    ) -> tuple[_Program, dict[int, Unstated]]:
        """A program, and after its first trace the results that may vary unstated."""
        step = ReplicaStep(
            self._get_fn, self._environment, signature, lambda: not self.traces
        )
        expected, unstated = self._options.expect_mirrored, dict[int, Unstated]()

        def on_trace(traced: TracedStep) -> None:
            found = check(traced, expected, self._history.warned)
            unstated.clear()
            unstated.update(found)
            if isinstance(program, AgreedProgram):
                program.traced(traced)
            self.traces += 1
            count = len(signature.dynamic)
            types = [var.aval for var in traced.closed.jaxpr.invars[:count]]
            self._history.record(step.fn, self._calls, signature, types)

        if self._agreement is None:
            program = Program(step, self._options, on_trace)
        else:
            program = AgreedProgram(step, self._options, on_trace, self._agreement)
        return program, unstated

    def _drop(
        self, signature: Signature, dead: weakref.ref[per_replica.Handle]
    ) -> None:
        """Drops the program for a static variable that died."""
        self._programs.pop(signature, None)
        self._watched_handles.remove(dead)

    # Calls with objects that the step changes in place.

    def _call_with_objects(
        self, arguments: Arguments, captured: dict[str, Leaf]
    ) -> PyTree:
        objects, arguments = nnx.as_arrays(arguments, captured, self._objects)
        results = self(*arguments, has_arrays=True)
        return results if objects is None else objects.finish(results)

    def bound(
        self, fn: Function, objects: Sequence[PyTree], captured: dict[str, Leaf]
    ) -> Callable[..., PyTree]:
        """A function with these first arguments, which are flattened only once."""
        found, arguments = nnx.as_arrays((tuple(objects), {}), captured, self._objects)
        caller, alive = nnx.require_objects(found), objects
        leaves, structure = jax.tree.flatten(arguments, is_leaf=nnx.is_whole_or_arrays)
        places = [i for i, leaf in enumerate(leaves) if nnx.is_object_arrays(leaf)]
        for place in places:  # their old arrays are not kept alive
            leaves[place] = None

        @functools.wraps(fn)
        def step(*rest: PyTree, **kwargs: PyTree) -> PyTree:
            assert alive  # the objects, as long as this may be called
            new = leaves.copy()
            for place, parts in zip(places, caller.parts(), strict=True):
                new[place] = parts
            args, captured = structure.unflatten(new)
            kwargs.update(captured)
            return caller.finish(self((*args, *rest), kwargs, has_arrays=True))

        return step


def _flatten(arguments: Arguments) -> tuple[list[Leaf], TreeStructure]:
    """Flattens a call, without reading variables or the arrays of objects."""
    trees.object_kinds()
    return jax.tree.flatten(arguments, is_leaf=_is_variable_or_object)


def _is_variable_or_object(node: object) -> bool:
    return isinstance(node, per_replica.Handle) or trees.is_object(node)
