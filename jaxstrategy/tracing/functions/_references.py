"""The values that a function refers to without being given them.

A function refers to values by name: in its closure, its globals, the defaults of its
parameters; a method by its object, a partial function by its arguments. Those refer to
others: functions in turn, containers by their entries, objects by their attributes.

A walk along all of these gives a *form*, which two functions share whose calls do the
same: the code is the same, and so is what the code refers to. What the program of a
step is given instead, objects of Flax NNX and arrays in closures, is only counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeAlias

import jax

from jaxstrategy.tracing.functions import _contents
from jaxstrategy.tracing.functions._object_attributes import as_method, attributes_of
from jaxstrategy.tracing.functions._places import Key, Place
from jaxstrategy.tracing.functions._reach import Reach
from jaxstrategy.tracing.functions._walk import Referred, Token, Walk, path_to
from jaxstrategy.values._types import Function

# The number of a value in a walk, and whether it stands for what holds that value.
Owner: TypeAlias = tuple[int, bool]

# As many values are looked at; with more, a function is known by itself alone.
_LIMIT = 5000


class References:
    """All that a function refers to.

    Args:
      fn: any callable; of what is written in C nothing is known.
      is_object: which objects the program of a step is given.
      limit: how many values are looked at.
      with_form: whether the form is asked for. For that NumPy's arrays are read, and of
        objects only those attributes count that the function can name. Else all do.
      more: values that are looked at as well, by label.

    Attributes:
      root: the function, or of an object that can be called the method.
      reached: all values, in the order in which they were come by.
      objects: those that `is_object` says, by label.
      arrays: arrays in closures, defaults and partial functions, by label.
      opaque: the label of something of which Python does not say what it is now.
    """

    def __init__(
        self,
        fn: Function,
        is_object: Callable[[object], bool],
        limit: int = _LIMIT,
        with_form: bool = True,
        more: Sequence[tuple[str, object]] = (),
    ) -> None:
        self.root = as_method(fn)
        look_into = functools.partial(_contents.look_into, is_object)

        def walked(reach: Reach, whole: set[int]) -> Walk:
            walk = Walk(look_into, limit, with_form, reach, whole)
            walk.visit("captured", None, self.root, -1)
            for label, value in more:
                walk.visit(label, None, value, -1)
            return walk

        # What code can ask for decides where a walk goes, and a walk comes to more
        # code: until nothing is added.
        known = Reach(), set[int]()
        walk = walked(*known)
        while (found := (walk.reach, walk.whole)) != known:
            known = found
            walk = walked(*known)
        self.reached = walk.reached
        self.objects = walk.objects
        self.arrays = walk.arrays
        self.opaque = walk.opaque
        self._tokens = walk.tokens

    @property
    def form(self) -> tuple[Token, ...]:
        """Equal for functions that do the same with the same objects and arrays.

        It may not be hashed if there is something `opaque`.
        """
        return tuple(self._tokens)

    def owner(self, owner: Owner) -> object:
        """The container, object or variable that `changed` has named by its number."""
        number, is_holder = owner
        each = self.reached[number]
        if not is_holder:
            return each.value
        assert each.place is not None
        # Not the dict of an object, which would keep alive what the object has.
        if isinstance(each.place, Key) and each.parent >= 0:
            parent = self.reached[each.parent].value
            if attributes_of(parent) is each.place.mapping:
                return parent
        return each.place.owner

    def changed(self, before: References) -> tuple[list[Owner], list[Owner]]:
        """What has changed since another look at the same function.

        Returns:
          What was changed, as `owner` takes it, by its numbers before and now.
        """
        slots, was_slots = self._slots(), before._slots()
        values, was_values = self._values(), before._values()
        owners = {
            id(before.owner((was_slots[w], True)))
            for w in was_slots.keys() - slots.keys()
        }
        for where, number in slots.items():
            was = was_slots.get(where)
            if was is None or (
                self.reached[number].value is not before.reached[was].value
                and self._tokens[number] != before._tokens[was]
            ):
                owners.add(id(self.owner((number, True))))
        for value in values.keys() & was_values.keys():
            if self._tokens[values[value]] != before._tokens[was_values[value]]:
                owners.add(value)
        return before._numbers(owners), self._numbers(owners)

    def _slots(self) -> dict[Hashable, int]:
        reached = enumerate(self.reached)
        return {each.place.where: i for i, each in reached if each.place is not None}

    def _values(self) -> dict[int, int]:
        last = len(self.reached) - 1
        backwards = enumerate(reversed(self.reached))
        # An array may be deleted, when it is donated.
        return {
            id(each.value): last - i
            for i, each in backwards
            if not isinstance(each.value, jax.Array)
        }

    def _numbers(self, owners: Collection[int]) -> list[Owner]:
        found: dict[int, Owner] = {}
        for number, each in enumerate(self.reached):
            for is_holder in (False, True) if each.place is not None else (False,):
                owner = id(self.owner((number, is_holder)))
                if owner in owners:
                    found.setdefault(owner, (number, is_holder))
        return list(found.values())

    def holders(self, values: Collection[int]) -> list[Referred]:
        """The places that hold values, or a tuple with one in it, as they were reached.

        Args:
          values: the identities of the values.
        """
        carriers = set(values)
        for number, each in enumerate(self.reached):
            if id(each.value) in values:
                for step in path_to(self.reached, number):
                    carriers.add(id(self.reached[step].value))
                    if self.reached[step].place is not None:
                        break
        return [
            each for each in self.reached if each.place and id(each.value) in carriers
        ]

    def watched(self) -> list[tuple[Place, object]]:
        """The places that must hold what they hold for the same objects to be found."""
        slots = {id(v) for v in (*self.objects.values(), *self.arrays.values())}
        wanted: set[int] = set()
        for number, each in enumerate(self.reached):
            if id(each.value) in slots:
                for step in path_to(self.reached, number):
                    if step in wanted:
                        break
                    wanted.add(step)
        found = (self.reached[number] for number in sorted(wanted))
        return [(each.place, each.value) for each in found if each.place is not None]
