"""The programs of a strategy, by what functions do: `ProgramTable`."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, final

from jaxstrategy._options import RunOptions
from jaxstrategy.tracing import _recompilation
from jaxstrategy.tracing._replica_step import StepEnvironment
from jaxstrategy.tracing._seal import Seal
from jaxstrategy.tracing._shared_programs import SharedPrograms
from jaxstrategy.tracing._step_agreement import StepAgreement
from jaxstrategy.tracing.functions import _callbacks, _code
from jaxstrategy.tracing.functions._object_identity import Identity
from jaxstrategy.tracing.functions._references import Owner, References
from jaxstrategy.values._types import Function

# What functions of one code did that are gone: as when they are choices of a few.
_FORMS_KEPT = 8
_OWNERS_KEPT = 256


class FunctionKey(NamedTuple):
    """Equal for functions that do the same, compiled with the same options.

    Attributes:
      form: what the functions refer to; of a function that is known by itself alone,
        its identity first.
      code: their code.
      options: how they are compiled.
    """

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
    """The form of a function that no other function shares.

    Args:
      fn: the function.
      others: what else it must have, its object and constants.
    """
    return (_Itself(fn), *map(Identity, others))


@final
class ProgramTable:
    """The programs of all functions: those of one key, and no others, share theirs.

    The programs of functions that are gone stay, a few for each code, as long as the
    code: the function around them may define them anew.

    Args:
      environment: what steps run in.
      agreement: with the other processes, if there are any.
      seal: says when no program may be added; None if some always may.

    Attributes:
      asking: codes that ask Python for the values of arrays that they capture.
    """

    def __init__(
        self,
        environment: StepEnvironment,
        agreement: StepAgreement | None,
        seal: Seal | None = None,
    ) -> None:
        self._environment = environment
        self._agreement = agreement
        self._seal = seal
        self._log = _recompilation.Log()
        self._table: dict[FunctionKey, SharedPrograms] = {}
        self._codes: set[int] = set()
        # Of functions that change what they refer to while they are traced: what.
        self._owners: dict[FunctionKey, list[Owner]] = {}
        self.asking: set[Identity] = set()

    def __len__(self) -> int:
        return len(self._table)

    def find(
        self, key: FunctionKey, fn: Function, seen: Callable[[], _recompilation.Seen]
    ) -> SharedPrograms:
        """The programs of functions with this key.

        Args:
          key: of `fn`.
          fn: a function.
          seen: returns what it refers to, for messages.
        """
        known = self._table.get(key)
        if known is not None:
            return known
        if self._seal is not None:
            self._seal.check_function(fn)
        calls = _recompilation.Calls(seen())
        made = SharedPrograms(
            self._environment,
            self._agreement,
            key.options,
            self._log.of(fn),
            calls,
            seal=self._seal,
        )
        self._make_room(key)
        if (known := self._table.setdefault(key, made)) is not made:
            return known  # another thread's
        if key.is_shared:
            drop = _callbacks.of(self, ProgramTable._drop_gone)
            made.referred_to = [token.watched(drop) for token in key.tokens]
        self._watch(_code.code_of(fn))
        return made

    def with_owners(self, key: FunctionKey, references: References) -> FunctionKey:
        """The key, of functions that change things with the identities of these."""
        owners = self._owners.get(key, ())
        identities = (Identity(references.owner(owner)) for owner in owners)
        return key._replace(form=(*key.form, *identities)) if owners else key

    def share_by_owners(
        self,
        key: FunctionKey,
        references: References,
        owners: list[Owner],
        programs: SharedPrograms,
    ) -> None:
        """Lets functions with this key share programs if the owners are the same.

        Args:
          key: of what a function referred to before it was traced, or after.
          references: these.
          owners: what the trace has changed of them.
          programs: of the function.
        """
        if owners:
            if len(self._owners) >= _OWNERS_KEPT:
                del self._owners[next(iter(self._owners))]
            self._owners[key] = owners
            self._table.setdefault(self.with_owners(key, references), programs)

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
            gone = _callbacks.of(self, ProgramTable._drop_code, id(code))
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

    def _drop(self, keys: Sequence[FunctionKey]) -> None:
        for key in keys:
            self._table.pop(key, None)
