"""The variables of an eager step, of which each replica has a copy: `ReplicaCopies`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import cast, final

import jax
import numpy as np
from jax.core import Tracer

from jaxstrategy._errors import NotMirroredVariableError
from jaxstrategy.contexts import _context
from jaxstrategy.executors.replica_threads import _versions_of_replicas
from jaxstrategy.executors.replica_threads._replica_thread import ReplicaThread
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.text import _user_code
from jaxstrategy.text._user_code import Line
from jaxstrategy.values import _per_replica
from jaxstrategy.values._handle import Handle
from jaxstrategy.variables import _access
from jaxstrategy.variables._access import StepVariables
from jaxstrategy.variables._variable import Variable
from jaxstrategy.variables.kinds._kind import on_host

Digests = Callable[[Sequence[Sequence[str]]], Sequence[Sequence[str]]]
"""Of what each replica of this process has the same of all replicas."""


@final
class OneCopy:
    """One replica's copy of a variable, read and written whole, with `[...]`.

    Args:
      array: the copy; of an on-read variable `[1, ...]`.
      name: of the variable.

    Attributes:
      array: what it holds now.
      before: what it held at first.
      line: of the user's code that assigned it last.
    """

    def __init__(self, array: jax.Array, name: str) -> None:
        self.array = self.before = array
        self.line: Line | None = None
        self._name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it holds."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """Of what it holds."""
        return self.array.dtype

    def __getitem__(self, index: EllipsisType) -> jax.Array:
        return self.array

    def __setitem__(self, index: EllipsisType, value: jax.Array) -> None:
        if isinstance(value, Tracer):
            raise ValueError(
                f"Variable {self._name!r} was assigned, in `eager_replicas()`, a value "
                "that JAX traces (in `jax.vmap`, or with what is differentiated), and "
                "has no one number yet. Return the value from the function that is "
                "mapped or traced, and assign it outside."
            )
        self.array = value
        frame = _user_code.users_frame()
        self.line = frame and Line(frame.f_code.co_filename, frame.f_lineno)


@final
class ReplicaCopies:
    """All variables that an eager step uses: a copy for each replica of this process.

    Args:
      replicas: of the step.
      name: of the step.
      digests: compares with the other processes.
    """

    def __init__(self, replicas: Replicas, name: str, digests: Digests) -> None:
        self._replicas = replicas
        self._name = name
        self._digests = digests
        self._copies: dict[int, tuple[Variable, list[OneCopy]]] = {}

    def of(self, variable: Variable, place: int) -> OneCopy:
        """The copy of one replica, by its place among those of this process."""
        return self._copies[id(variable)][1][place]

    def has(self, variable: Variable) -> bool:
        """Whether the copies have been made."""
        return id(variable) in self._copies

    def make(self, variable: Variable) -> None:
        """Makes the copies of what the variable holds now."""
        self._copies[id(variable)] = variable, self._made(variable)

    def _made(self, variable: Variable) -> list[OneCopy]:
        with _access.one_at_a_time:
            held = variable.cell[...]
            if self._is_own(variable):
                found = [v[None] for v in self._replicas.versions(held)]
            else:
                found = _versions_of_replicas.copies(held, self._replicas)
        return [OneCopy(array, variable.name) for array in found]

    def _is_own(self, variable: Variable) -> bool:
        is_here = variable.lives_on(self._replicas)
        return is_here and not variable.copies_must_agree

    def checked(self) -> list[tuple[Variable, list[OneCopy]]]:
        """The variables that some replica has changed.

        Raises:
          NotMirroredVariableError: copies that must be equal are not.
        """
        found = list(self._copies.values())
        changed = [
            [str(copy.array is not copy.before) for copy in copies]
            for _, copies in found
        ]
        by_replica = self._digests(list(map(list, zip(*changed, strict=True))))
        is_changed = [
            any(said == "True" for said in column)
            for column in zip(*by_replica, strict=True)
        ]
        changes = [each for each, it in zip(found, is_changed, strict=True) if it]
        self._check_equal([each for each in changes if not self._is_own(each[0])])
        return changes

    def _check_equal(self, changes: Sequence[tuple[Variable, list[OneCopy]]]) -> None:
        digest = _versions_of_replicas.digest
        digests = [[digest(copy.array) for copy in copies] for _, copies in changes]
        by_replica = self._digests(list(map(list, zip(*digests, strict=True))))
        columns = zip(*by_replica, strict=True)
        for (variable, copies), column in zip(changes, columns, strict=True):
            if len(set(column)) > 1:
                raise _drifted(variable, copies, column, self._name, self._replicas)

    def store(self, changes: Sequence[tuple[Variable, list[OneCopy]]]) -> None:
        """Lets variables hold what replicas have assigned, and forgets the copies."""
        with _access.one_at_a_time:
            for variable, copies in changes:
                if self._is_own(variable):
                    arrays = [copy.array[0] for copy in copies]
                    whole = _per_replica.contents(
                        _versions_of_replicas.together(arrays, self._replicas)
                    )
                else:
                    whole = copies[0].array
                variable.cell[...] = _versions_of_replicas.mirrored_on(
                    whole, variable.sharding
                )
        self._copies.clear()


def _drifted(
    variable: Variable,
    copies: Sequence[OneCopy],
    column: Sequence[str],
    name: str,
    replicas: Replicas,
) -> NotMirroredVariableError:
    line = next((copy.line for copy in copies if copy.line is not None), None)
    where = "" if line is None else f"  it was assigned at {line}\n"
    return NotMirroredVariableError(
        f"Variable {variable.name!r} is mirrored, but `{name}` assigned it values that "
        f"differ between replicas: its copies would drift apart.\n{where}"
        f"{told_versions([copy.array for copy in copies], column, replicas)}\n"
        "Reduce it first, or make the variable with an `aggregation` "
        "('sum', 'mean', 'only_first_replica'), or with `synchronization='on_read'` if "
        "each replica is to have its own.",
        path=variable.name,
        line=line and str(line),
    )


def told_versions(
    arrays: Sequence[jax.Array | np.ndarray], column: Sequence[str], replicas: Replicas
) -> str:
    """Which replicas have what, for messages.

    Args:
      arrays: of the replicas of this process.
      column: of all replicas what tells their arrays apart.
      replicas: all of them.
    """
    texts = {column[i]: _short(a) for i, a in zip(replicas.own, arrays, strict=True)}
    groups: dict[str, list[int]] = {}
    for number, each in enumerate(column):
        groups.setdefault(each, []).append(number)
    return "\n".join(
        f"  replica{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: "
        f"{texts.get(each, 'of another process')}"
        for each, numbers in groups.items()
    )


def _short(array: jax.Array | np.ndarray) -> str:
    if not isinstance(array, np.ndarray):
        array = on_host(array)
    if not array.ndim:
        return repr(array.item())
    text = np.array2string(array, separator=", ", threshold=8, edgeitems=3)
    return " ".join(text.split())


@final
class CopiesOfReplica(StepVariables):
    """The variables of a step as one replica has them.

    Args:
      copies: of all.
      place: of the replica among those of this process.
      thread: of the replica.
    """

    def __init__(
        self, copies: ReplicaCopies, place: int, thread: ReplicaThread
    ) -> None:
        # The first replica runs first: what it makes the others find.
        super().__init__((), may_create=thread.number == 0)
        self._all = copies
        self._thread = thread
        self._place = place

    @property
    def any(self) -> bool:
        """Whether there are some that the step may use."""
        return True

    def reference(self, variable: Handle) -> OneCopy:
        """This replica's copy."""
        _context.check_unstaged(f"Variable {cast(Variable, variable).name!r}")
        self.used.setdefault(id(variable), variable)
        own = cast(Variable, variable)
        if not self._all.has(own):
            self._thread.in_caller(functools.partial(self._all.make, own))
        return self._all.of(own, self._place)

    def create(self, variable: Handle, start: jax.Array) -> None:
        """Let the step make `variable`; its cell holds its copies."""
        self.created.append(variable)
