"""The attributes that code can ask an object for: only those that it names.

A step that uses `self.model` refers to an object with many attributes more. Of those
that its code does not name it cannot know, as long as it asks the object for attributes
and does nothing else with it: code that is handed the object may ask for any.
"""

from __future__ import annotations

import abc
import dis
import types
import typing
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from jaxstrategy.tracing.functions import _code

# With these, code reaches attributes that it does not name, without the object.
_DYNAMIC = frozenset(
    "__dict__ __class__ __dir__ __getattr__ __getattribute__ __getstate__ __reduce__ "
    "__reduce_ex__ __slots__ __weakref__ __closure__ __self__ __wrapped__ locals "
    "globals vars eval exec _getframe currentframe get_objects get_referents "
    "get_referrers".split()
)
_ASKS = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR")
# Of their own, these read no attributes.
_BASES = (object, abc.ABC, typing.Generic, typing.Protocol)
_HOOKS = ("__getattribute__", "__setattr__", "__delattr__")


class Reach(NamedTuple):
    """The uses that some code makes of names.

    Attributes:
      used: the names in it, attributes among them.
      passed_on: of variables and attributes whose value it uses as a whole.
    """

    used: frozenset[str] = frozenset()
    passed_on: frozenset[str] = frozenset()

    def plus(self, other: Reach) -> Reach:
        """The uses of both."""
        return Reach(self.used | other.used, self.passed_on | other.passed_on)

    @property
    def is_dynamic(self) -> bool:
        """Whether it may use attributes that it does not name."""
        return not self.used.isdisjoint(_DYNAMIC)

    def only_asks(self, value: object, name: str) -> bool:
        """Whether what it has as `name` is only asked for attributes that it names."""
        kind = type(value)
        if self.is_dynamic or not _is_plain_class(kind):
            return False
        return self.passed_on.isdisjoint({name, *self._first_parameters(kind)})

    def _first_parameters(self, kind: type) -> Iterator[str]:
        """The names by which the methods that it uses call the object."""
        for base in kind.__mro__:
            for name in self.used & vars(base).keys():
                member = vars(base)[name]
                for part in ("", "__func__", "fget", "fset", "fdel", "func"):
                    function = getattr(member, part, None) if part else member
                    if isinstance(function, types.FunctionType):
                        yield from function.__code__.co_varnames[:1]


def _is_plain_class(kind: type) -> bool:
    """Whether only the user's own code reads the attributes of objects of a class."""
    if type(kind) not in (type, abc.ABCMeta) or hasattr(kind, "__getattr__"):
        return False
    if hasattr(kind, "__dataclass_fields__"):  # compared, shown and copied as a whole
        return False
    if any(getattr(kind, name) is not getattr(object, name) for name in _HOOKS):
        return False
    return all(base in _BASES or _code.is_users_class(base) for base in kind.__mro__)


# By the identity of code.
_known: dict[int, Reach] = {}


def of(code: types.CodeType) -> Reach:
    """The uses that code makes of names, and functions defined in it."""
    known = _known.get(id(code))
    if known is None:
        known = Reach(frozenset(code.co_names), frozenset(_passed_on(code)))
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                known = known.plus(of(inner))
        _known[id(code)] = known
        # Another code may get the same `id` when this one is gone.
        weakref.finalize(code, _known.pop, id(code), None)
    return known


def _passed_on(code: types.CodeType) -> Iterator[str]:
    enclosed = {*code.co_cellvars, *code.co_freevars}
    instructions = [i for i in dis.get_instructions(code) if i.opname != "NOP"]
    for index, each in enumerate(instructions):
        if "LOAD_" not in each.opname or each.opname in ("LOAD_CONST", "LOAD_CLOSURE"):
            continue
        following = instructions[index + 1 : index + 3]
        if following and following[0].opname == "COPY":  # of `x.a += 1`
            following = following[1:]
        asks = bool(following) and following[0].opname in _ASKS
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if "FAST" in each.opname:  # of such a variable it loads the cell
            names = [name for name in names if name not in enclosed]
        for place, name in enumerate(names):
            if isinstance(name, str) and not (asks and place == len(names) - 1):
                yield name
