"""The programs of one strategy, by function object: `Programs`."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, final

from jaxstrategy._src import errors
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.tracing import recompilation
from jaxstrategy._src.tracing.functions import code as _code, rebinding, weak_references
from jaxstrategy._src.tracing.functions.code import attributes_of
from jaxstrategy._src.tracing.functions.places import ClosureCell, Place
from jaxstrategy._src.tracing.functions.references import References, is_alike
from jaxstrategy._src.tracing.functions.weak_references import Identity, weakly
from jaxstrategy._src.tracing.nnx.object_calls import (
    came_from_step,
)
from jaxstrategy._src.tracing.nnx.object_form import (
    is_changed_in_place,
)
from jaxstrategy._src.tracing.saved_step import Obtain
from jaxstrategy._src.tracing.shared_programs import FrozenSignatures, SharedPrograms
from jaxstrategy._src.tracing.step_agreement import StepAgreement
from jaxstrategy._src.tracing.traced_step import StepEnvironment
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree

# What functions of one code did that are gone: as when they are choices of a few.
_FORMS_KEPT = 8
_CHANGED_KEPT = 256


class FunctionKey(NamedTuple):
    """Equal for functions that do the same, compiled with the same options."""

    form: tuple[Hashable, ...]
    code: Identity
    options: RunOptions | None

    @property
    def is_shared(self) -> bool:
        """Whether another function can have the same key."""
        return not (self.form and isinstance(self.form[0], _Itself))

    @property
    def tokens(self) -> list[Identity]:
        """The objects without which no function can have this key any more."""
        return [token for token in self.form if isinstance(token, Identity)]

    @property
    def is_gone(self) -> bool:
        """Whether one of these is gone."""
        return any(token.is_gone for token in self.tokens)


class _Itself(Identity):
    """The identity of a function that is known by itself alone."""


def form_of_itself(fn: object, *others: object) -> tuple[Identity, ...]:
    """The form of a function that no other function shares."""
    return (_Itself(fn), *map(Identity, others))


@final
class Programs:
    """All programs of a strategy: functions of one key, and no others, share theirs.

    The programs of functions that are gone stay, a few for each code, as long as the
    code: the function around them may define them anew.
    """

    def __init__(
        self,
        environment: StepEnvironment,
        agreement: StepAgreement | None = None,
        seal: FrozenSignatures | None = None,
    ) -> None:
        self._environment = environment
        self._agreement = agreement
        self._seal = seal
        self._functions: dict[Hashable, FunctionPrograms] = {}
        self._histories: dict[int, recompilation.History] = {}
        self._table: dict[FunctionKey, SharedPrograms] = {}
        self._codes: set[int] = set()
        # The numbers of what functions change that they refer to, while traced.
        self._changed: dict[FunctionKey, tuple[int, ...]] = {}
        self.asking: set[Identity] = set()

    def of(self, fn: Function, options: RunOptions | None = None) -> FunctionPrograms:
        """The programs of `fn`, the same object as long as `fn` lives."""
        key = identity(fn), options
        programs = self._functions.get(key)
        if programs is None:
            programs = FunctionPrograms(
                fn, options, self, weak_references.of(self, Programs._gone, key)
            )
            self._functions[key] = programs
        return programs

    def _gone(self, key: Hashable, *_: object) -> None:
        """A function is gone, and with it what no other can use."""
        if (programs := self._functions.pop(key, None)) is not None:
            programs.let_go()

    def find(
        self, key: FunctionKey, fn: Function, calls: Callable[[], recompilation.Calls]
    ) -> SharedPrograms:
        """The programs of functions with this key."""
        known = self._table.get(key)
        if known is not None:
            return known
        if self._seal is not None:
            self._seal.check_function(fn)
        made = SharedPrograms(
            self._environment,
            self._agreement,
            key.options,
            recompilation.history_of(fn, self._histories),
            calls(),
            seal=self._seal,
        )
        self._make_room(key)
        if (known := self._table.setdefault(key, made)) is not made:
            return known  # another thread's
        if key.is_shared:
            drop = weak_references.of(self, Programs._drop_gone)
            made.referred_to = [token.watched(drop) for token in key.tokens]
        self._watch(_code.code_of(fn))
        return made

    def share_changed(
        self,
        key: FunctionKey,
        references: References,
        changed: tuple[int, ...],
        programs: SharedPrograms,
    ) -> None:
        """Lets functions with this key share programs that have changed the same."""
        if len(self._changed) >= _CHANGED_KEPT:
            del self._changed[next(iter(self._changed))]
        self._changed[key] = changed
        self._table.setdefault(self.known(key, references), programs)

    def known(self, key: FunctionKey, references: References) -> FunctionKey:
        """The key; of functions whose trace changes something, with what that is."""
        numbers = self._changed.get(key, ())
        owners = (Identity(references.reached[i].value) for i in numbers)
        return key._replace(form=(*key.form, *owners)) if numbers else key

    def unshare(self, key: FunctionKey, programs: SharedPrograms) -> None:
        """Lets no other function share programs by this key."""
        if self._table.get(key) is programs:
            self._drop([key])

    def forget(self, programs: SharedPrograms) -> None:
        """Forgets programs that no function will ask for."""
        if not programs.is_in_use:
            self._drop([k for k, v in self._table.items() if v is programs])

    def _watch(self, code: types.CodeType | None) -> None:
        if code is not None and id(code) not in self._codes:
            self._codes.add(id(code))
            gone = weak_references.of(self, Programs._drop_code, id(code))
            weakref.finalize(code, gone)

    def _make_room(self, key: FunctionKey) -> None:
        """Forgets keys that cannot come back, and old ones of the same code."""
        self._drop_gone()
        alike = [
            k
            for k, programs in self._table.items()
            if k.code == key.code and not programs.is_in_use
        ]
        self._drop(alike[: max(0, len(alike) - _FORMS_KEPT + 1)])

    def _drop_gone(self, *_: object) -> None:
        """Forgets keys that cannot come back: something that they name is gone."""
        known = list(self._table.items())
        self._drop([k for k, each in known if k.is_gone and not each.is_in_use])

    def _drop_code(self, code: int) -> None:
        """Forgets the programs of a code that is gone."""
        self._codes.discard(code)
        self._drop([k for k in list(self._table) if k.code.is_gone])
        for key in [k for k in list(self._changed) if k.code.is_gone]:
            self._changed.pop(key, None)

    def _drop(self, keys: Sequence[FunctionKey]) -> None:
        for key in keys:
            self._table.pop(key, None)


@final
class FunctionPrograms:
    """The programs of one function, as long as it lives, with one choice of options.

    What the function refers to is looked into once, and again when it may refer to
    something else; the table then says which programs are its own now.
    """

    def __init__(
        self,
        fn: Function,
        options: RunOptions | None,
        table: Programs,
        gone: Callable[[object], object],
    ) -> None:
        self._get_fn = weakly(fn, gone)
        self._options = options
        self._table = table
        self._key: FunctionKey | None = None
        self._programs: SharedPrograms | None = None
        # What it referred to at the last look (during a call), and what of it counts.
        self._before: References | None = None
        self._form: tuple[Hashable, ...] = ()
        # What its programs are given besides, by label, and the places that lead there.
        self._captured: dict[str, Leaf] = {}
        self._ways_to_captured: list[tuple[Place, object]] = []
        self._look_at_variables(fn)
        is_method = isinstance(fn, types.MethodType)
        self._names = _code.attributes_read(fn) if is_method else set[str]()
        self._attributes = self._attributes_of(fn)

    def __call__(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """The results of the function on all replicas."""
        programs = self._programs
        if programs is None or self._captured or programs.sole not in (None, self):
            return self._call_anew(args, kwargs)
        # Outside of the block, because a step may raise the same.
        is_same = True
        try:
            for cell, value in self._cells:
                if cell.cell_contents is not value:
                    is_same = False
        except ValueError:  # a variable that is not set yet
            is_same = False
        if not is_same:
            return self._call_anew(args, kwargs)
        if self._names and self._attributes_of(self._get_fn()) != self._attributes:
            return self._call_anew(args, kwargs)
        programs.get_caller = self._get_fn
        traces = programs.traces
        try:
            return programs(args, kwargs)
        finally:
            if programs.traces != traces:
                self._look_again(programs)

    def prepare(
        self, args: Sequence[PyTree], kwargs: dict[str, PyTree], obtain: Obtain
    ) -> None:
        """Has the program of such a call compiled now; types may stand for arrays."""
        fn = self._fn
        prepare = functools.partial(SharedPrograms.prepare, obtain=obtain)
        self._call(self._look_at(fn), args, kwargs, prepare)
        if self._programs is not None:
            self._look_again(self._programs)
        self._before = None

    def bound(self, objects: Sequence[PyTree]) -> Callable[..., PyTree]:
        """The function with these first arguments, which are looked into only now."""
        fn = self._fn
        programs, self._before = self._look_at(fn), None
        return programs.bound(fn, objects, self._captured)

    @property
    def _fn(self) -> Function:
        fn = self._get_fn()
        assert fn is not None, "the caller holds the function"
        return fn

    def _look_at_variables(self, fn: Function) -> None:
        """Takes note of the variables of enclosing functions, and their values."""
        function = fn.__func__ if isinstance(fn, types.MethodType) else fn
        cells = list(map(ClosureCell, getattr(function, "__closure__", None) or ()))
        self._variables = [(place, place.get()) for place in cells]
        # The same, for each call.
        self._cells = [(place.cell, value) for place, value in self._variables]

    def _attributes_of(self, method: Any) -> dict[str, Identity]:
        """The attributes that a method reads of its object, as weak identities."""
        held = attributes_of(method.__self__) if self._names else {}
        return {name: Identity(held[name]) for name in self._names & held.keys()}

    def _call_anew(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """A call of a function that refers to other things than before, maybe."""
        fn = self._fn
        programs = self._programs
        is_own = programs is not None and programs.sole in (None, self)
        if programs is None or not is_own or not self._is_as_it_was(fn):
            programs = self._look_at(fn)
        programs.get_caller = self._get_fn
        traces = programs.traces
        try:
            return self._call(programs, args, kwargs)
        finally:
            if programs.traces != traces:
                self._look_again(programs)
            self._before = None

    def _call(
        self,
        programs: SharedPrograms,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
        call: Callable[..., PyTree] = SharedPrograms.call_with,
    ) -> PyTree:
        arrays = [k for k, v in self._captured.items() if not is_changed_in_place(v)]
        if not arrays or programs.has_succeeded:
            return call(programs, self._captured, args, kwargs)
        try:
            return call(programs, self._captured, args, kwargs)
        except Exception as error:
            is_placement = isinstance(error, errors.PlacementError)
            if _is_ours(error) or not (is_placement or came_from_step(error)):
                raise
            # The function may need their values in Python, or none of one that lies
            # where no argument may: then they are constants.
            return self._call_with_constants(args, kwargs, call)

    def _call_with_constants(
        self,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
        call: Callable[..., PyTree],
    ) -> PyTree:
        fn = self._fn
        code = Identity(_code.code_of(fn))
        self._table.asking.add(code)
        try:
            return self._call(self._look_at(fn), args, kwargs, call)
        except BaseException:
            self._table.asking.discard(code)  # they were not the reason
            self._programs = None
            raise

    def _is_as_it_was(self, fn: Function) -> bool:
        places = (*self._variables, *self._ways_to_captured)
        is_same = all(
            rebinding.callers_value(place) is value for place, value in places
        )
        return is_same and self._attributes_of(fn) == self._attributes

    def _look_at(self, fn: Function) -> SharedPrograms:
        """Finds the programs of functions like this one."""
        self._programs = None  # those of before are not right any more
        if _is_of_a_module(fn) and not trees.object_kinds():
            self._captured, self._ways_to_captured, references = {}, [], None
            code = Identity(_code.code_of(fn))
            self._key = FunctionKey(form_of_itself(fn), code, self._options)
        else:
            references = rebinding.references(fn)
            self._captured, key = self._key_of(fn, references)
            self._key = self._table.known(key, references)
            self._before, self._form = references, key.form
            self._ways_to_captured = references.watched() if self._captured else []
        self._look_at_variables(fn)
        self._attributes = self._attributes_of(fn)
        calls = functools.partial(recompilation.Calls, references)
        self._programs = self._table.find(self._key, fn, calls)
        self._programs.add(fn)
        return self._programs

    def _key_of(
        self, fn: Function, references: References
    ) -> tuple[dict[str, Leaf], FunctionKey]:
        """The captured values that programs of `fn` are given, and their key."""
        code = Identity(_code.code_of(fn))
        captured: dict[str, Leaf] = dict(references.objects)
        constants: list[Leaf] = []
        if code in self._table.asking:
            constants = list(references.arrays.values())
        else:
            captured |= references.arrays
        if references.opaque or _is_of_a_module(fn):
            is_method = isinstance(fn, types.MethodType)
            # The function of a method is the same at each access, the method is not.
            own = (fn.__func__, fn.__self__) if is_method else (fn,)
            form = form_of_itself(*own, *constants)
        else:
            form = (*references.form, *map(Identity, constants))
        return captured, FunctionKey(form, code, self._options)

    def _look_again(self, programs: SharedPrograms) -> None:
        """After the function was traced, which may have changed what it refers to."""
        fn = self._fn
        if self._programs is not programs:
            return
        self._look_at_variables(fn)
        self._attributes = self._attributes_of(fn)
        if self._key is None or not self._key.is_shared:
            return
        references = rebinding.references(fn)
        key = self._key_of(fn, references)[1]
        if is_alike(key.form, self._form):
            return
        self._table.unshare(self._key, programs)
        programs.sole = self  # others of these functions may have them already
        if self._before and (changed := references.changed_since(self._before)):
            self._table.share_changed(key, references, changed, programs)

    def let_go(self) -> None:
        """Forgets the programs that only this function could use."""
        programs, key = self._programs, self._key
        if programs is not None and key is not None and not key.is_shared:
            self._table.forget(programs)


def _is_of_a_module(fn: Function) -> bool:
    """Whether `fn` was defined at the top of a module, and is not defined again."""
    if not isinstance(fn, types.FunctionType):
        return False
    is_plain = not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__)
    return is_plain and "<" not in fn.__qualname__


def _is_ours(error: Exception) -> bool:
    """Whether an error is not one of code that asks for the value of an array."""
    asks = (errors.TracedValueError, errors.PlacementError)
    known = type(error).__module__ == errors.__name__
    return known and not isinstance(error, asks)


def identity(fn: Function) -> Hashable:
    """Which function it is: a method is another object at each access."""
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), id(fn.__func__)
    return id(fn)
