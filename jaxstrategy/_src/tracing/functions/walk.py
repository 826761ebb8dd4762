"""A walk along all that a function refers to: `ReferenceWalk`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import types
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, NamedTuple, Protocol

import jax
from jax.core import Tracer

from jaxstrategy._src.tracing.functions.code import CALLABLE, Reach
from jaxstrategy._src.tracing.jaxprs.visit import KeyPath
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import PyTree


class _Gone:
    def __repr__(self) -> str:
        return "nothing"


# What a place holds that holds nothing.
GONE = _Gone()


class Place(Protocol):
    """Something that can be made to refer to another value."""

    @property
    def owner(self) -> object:
        """The object that the place is in."""
        ...

    @property
    def where(self) -> Hashable:
        """Equal for the same place, as long as it is there."""
        ...

    def get(self) -> object:
        """The value; `GONE` if there is none."""
        ...

    def set(self, value: object) -> None:
        """Refer to `value`, or with `GONE` to nothing."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ClosureCell:
    """A variable of an enclosing function."""

    cell: types.CellType

    @property
    def owner(self) -> object:
        """The cell."""
        return self.cell

    @property
    def where(self) -> Hashable:
        """The identity of the cell."""
        return (id(self.cell),)

    def get(self) -> object:
        """The value of the variable."""
        try:
            return self.cell.cell_contents
        except ValueError:  # not set yet
            return GONE

    def set(self, value: object) -> None:
        """Gives the variable another value."""
        if value is GONE:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    """An entry of a dict: a global name, an attribute, an item."""

    # `Any`: a dict that has names as keys is no mapping of all that can be hashed.
    mapping: MutableMapping[Any, object]
    key: Hashable

    @property
    def owner(self) -> object:
        """The dict."""
        return self.mapping

    @property
    def where(self) -> Hashable:
        """The identity of the dict, and the key."""
        return (id(self.mapping), self.key)

    def get(self) -> object:
        """The value of the entry."""
        return self.mapping.get(self.key, GONE)

    def set(self, value: object) -> None:
        """Gives the entry another value."""
        if value is GONE:
            self.mapping.pop(self.key, None)
        else:
            self.mapping[self.key] = value


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """An entry of a list."""

    items: list[object]
    index: int

    @property
    def owner(self) -> object:
        """The list."""
        return self.items

    @property
    def where(self) -> Hashable:
        """The identity of the list, and the index."""
        return (id(self.items), self.index)

    def get(self) -> object:
        """The entry."""
        return self.items[self.index] if self.index < len(self.items) else GONE

    def set(self, value: object) -> None:
        """Puts another entry there, or takes it out."""
        if value is GONE:
            del self.items[self.index]
        else:
            self.items[self.index] = value


@dataclasses.dataclass(frozen=True, eq=False)
class Attribute:
    """An attribute that is in no dict: of a class, or in a slot."""

    owner: object
    name: str

    @property
    def where(self) -> Hashable:
        """The identity of the owner, and the name."""
        return (id(self.owner), self.name)

    def get(self) -> object:
        """The value of the attribute."""
        if isinstance(self.owner, type):  # not what a descriptor makes of it
            return vars(self.owner).get(self.name, GONE)
        return getattr(self.owner, self.name, GONE)

    def set(self, value: object) -> None:
        """Gives the attribute another value."""
        if value is GONE:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


def is_container(value: object) -> bool:
    """Whether `value` is a node of pytrees and no leaf; None is one."""
    return not jax.tree_util.all_leaves([value])


def one_level(value: PyTree) -> tuple[list[tuple[KeyPath, PyTree]], Any]:
    """The values that a registered container holds, and its structure."""
    # `Any`: to type checkers JAX's `PyTreeDef` is a variable, and no type.
    return jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda node: node is not value
    )


def rebuilt(value: Any, others: Mapping[int, object]) -> Any:
    """`value`, or if it holds one of `others` and cannot be changed, one like it."""
    if id(value) in others:
        return others[id(value)]
    # `Any`, and the class: `isinstance` asks some libraries' objects.
    kind = type(value)
    if issubclass(kind, types.MethodType):
        parts = [value.__func__, value.__self__]
        new = [rebuilt(part, others) for part in parts]
        return value if are_same(new, parts) else types.MethodType(*new)
    if issubclass(kind, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        func, *rest = new = [rebuilt(part, others) for part in parts]
        if are_same(new, parts):
            return value
        n = len(value.args)
        keywords = dict(zip(value.keywords, rest[n:], strict=True))
        return kind(func, *rest[:n], **keywords)
    if issubclass(kind, tuple):
        new = [rebuilt(part, others) for part in value]
        if are_same(new, value):
            return value
        return kind(*new) if hasattr(kind, "_fields") else kind(new)
    if issubclass(kind, (list, dict, type, *CALLABLE)) or trees.is_whole(value):
        return value
    if is_container(value):
        children, structure = one_level(value)
        parts = [child for _, child in children]
        new = [rebuilt(part, others) for part in parts]
        return value if are_same(new, parts) else structure.unflatten(new)
    return value


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


_PLAIN = (
    type(None),
    bool,
    int,
    str,
    bytes,
    range,
    type(Ellipsis),
    type(NotImplemented),
)
# The name by which an object has its class.
ITS_CLASS = "__class__"

# What stands for a value in the form of a function.
Token = Hashable


class Referred(NamedTuple):
    """One value that a walk came to."""

    label: str
    place: Place | None
    value: Any
    parent: int


class ReferenceWalk:
    """One pass through all that a function refers to, in an order that is always the
    same.
    """

    def __init__(
        self,
        look_into: Callable[[ReferenceWalk, str, object, int], Token],
        limit: int,
        with_form: bool,
        reach: Reach,
        whole: Iterable[int],
    ) -> None:
        self._look_into = look_into
        self._limit = limit
        self.with_form = with_form
        self.reach = reach
        self.whole = set(whole)
        # By identity; `reached` keeps the values, so that no `id` is used again.
        self._seen: dict[int, int] = {}
        self._in_part: set[int] = set()
        self.is_enclosed = True
        self.reached: list[Referred] = []
        self.tokens: list[Token] = []
        self.objects: dict[str, object] = {}
        self.arrays: dict[str, jax.Array | Tracer] = {}
        self.opaque: str | None = None

    def visit(
        self,
        label: str,
        place: Place | None,
        value: object,
        parent: int,
        name: str | None = None,
    ) -> None:
        """Looks into a value; `name` is what the user's code calls it, if it does."""
        kind = type(value)
        if kind in _PLAIN:  # with its class: True is equal to 1
            self.add(label, place, value, parent, (kind, value))
        elif kind in (float, complex):  # -0.0 is not 0.0, and nan is nan
            self.add(label, place, value, parent, (kind, repr(value)))
        elif id(value) in self._seen:
            again = self._seen[id(value)]
            if id(value) in self._in_part and not self._is_part(value, name):
                self.whole.add(id(value))
            self.add(label, place, value, parent, ("again", again))
        elif len(self.reached) >= self._limit:
            self.opaque = self.opaque or label
        else:
            self._seen[id(value)] = len(self.reached)
            number = self.add(label, place, value, parent, None)
            if self._is_part(value, name):
                self._in_part.add(id(value))
            self.tokens[number] = self._look_into(self, label, value, number)

    def add(
        self, label: str, place: Place | None, value: object, parent: int, token: Token
    ) -> int:
        """Takes note of a value; returns its number."""
        self.reached.append(Referred(label, place, value, parent))
        self.tokens.append(token)
        return len(self.reached) - 1

    def member(
        self, owner: object, label: str, place: Place, number: int, name: str
    ) -> None:
        """Looks into the attribute `name` of `owner`."""
        # Who is handed the owner as a whole may hand on what it has.
        own = name if self.is_in_part(owner) else None
        self.visit(label, place, place.get(), number, own)

    def named(self, value: object, names: Iterable[str]) -> list[str]:
        """The names of attributes that count, of all these names."""
        if not self.is_in_part(value):
            return list(names)
        return [name for name in names if name in self.reach.used]

    def is_in_part(self, value: object) -> bool:
        """Whether of `value` only what the code names counts."""
        return id(value) in self._in_part

    def _is_part(self, value: object, name: str | None) -> bool:
        """Whether of `value`, come by as `name`, only what the code names counts."""
        if not self.with_form or name is None or id(value) in self.whole:
            return False
        if isinstance(value, type):
            return name == ITS_CLASS
        return self.reach.only_asks(value, name)

    def unused(self, label: str) -> str:
        """`label`, or one like it that no object and no array has."""
        number, free = 2, label
        while free in self.objects or free in self.arrays:
            free, number = f"{label} ({number})", number + 1
        return free

    @contextlib.contextmanager
    def in_the_open(self) -> Iterator[None]:
        """A `with` block for values that other code of the user's can come to, too."""
        was, self.is_enclosed = self.is_enclosed, False
        try:
            yield
        finally:
            self.is_enclosed = was


def are_plain(values: Iterable[object]) -> bool:
    """Whether each of `values` is known by its value alone."""
    return all(type(value) in _PLAIN for value in values)


def path_to(reached: Sequence[Referred], number: int) -> Iterator[int]:
    """The number of a value, of what refers to it, and so on up to the function."""
    while number >= 0:
        yield number
        number = reached[number].parent
