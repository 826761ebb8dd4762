"""The results of an eager step, one value of those of all replicas: `EagerResults`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import final

import jax
import numpy as np

from jaxstrategy._errors import NotMirroredError
from jaxstrategy.executors.replica_threads import _versions_of_replicas
from jaxstrategy.executors.replica_threads._replica_copies import Digests, told_versions
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.tracing._results import Results
from jaxstrategy.tracing.checks import _varying_results
from jaxstrategy.tracing.jaxprs._visit import KeyPath
from jaxstrategy.values import _arrays
from jaxstrategy.values._types import Leaf, PyTree
from jaxstrategy.values._versions import Versions

_NUMBERS = (int, float, complex, np.number)


@final
class EagerBlock:
    """One block of `eager_replicas`, and what its steps remember of each other.

    Args:
      disable_jit: whether functions that are jitted run in Python, too.

    Attributes:
      disable_jit: as given.
      varying: results that have differed once, by their function and path. They are
        `PerReplica`s from then on, as a result of a compiled step is at each call.
    """

    def __init__(self, disable_jit: bool) -> None:
        self.disable_jit = disable_jit
        self.varying: set[Hashable] = set()


@final
class EagerResults:
    """What the replicas of an eager step returned.

    Args:
      name: of the step.
      has_objects: whether new arrays of objects stand behind its own results.
      replicas: all of them.
      own: of each replica of this process the arrays, and the rest.
      digests: compares with the other processes.

    Attributes:
      name: as given.
      has_objects: likewise.
      results: the rest of what the first replica returned.
    """

    def __init__(
        self,
        name: str,
        has_objects: bool,
        replicas: Replicas,
        own: Sequence[tuple[list[jax.Array], Results]],
        digests: Digests,
    ) -> None:
        self.name = name
        self.has_objects = has_objects
        self.results = own[0][1]
        self._replicas = replicas
        for number, (_, other) in zip(replicas.own, own, strict=True):
            if other.treedef != self.results.treedef:
                raise ValueError(
                    f"`{name}` returned pytrees of different structures: "
                    f"{self.results.treedef} on replica {replicas.own[0]}, and "
                    f"{other.treedef} on replica {number}. Return the same structure "
                    "on all replicas; what differs may be an array of another shape, "
                    "a number or a string."
                )
        self._columns = list(zip(*map(_leaves, own), strict=True))
        kinds = [[_kind(leaf) for leaf in column] for column in self._columns]
        rows = digests([list(row) for row in zip(*kinds, strict=True)])
        self._digests = list(zip(*rows, strict=True))

    def path(self, keys: KeyPath) -> str:
        """The name of the result at `keys` in messages."""
        if self.is_of_object(keys):
            return f"`{jax.tree_util.keystr(keys[2:]).removeprefix('.')}`"
        return f"`{self.name}(...){jax.tree_util.keystr(keys[self.has_objects :])}`"

    def is_of_object(self, keys: KeyPath) -> bool:
        """Whether the result at `keys` is a new array of an object."""
        return self.has_objects and bool(keys) and keys[0].idx == 1

    def check(self, expected: PyTree) -> None:
        """Raises unless the results are equal that should be.

        Args:
          expected: as of `RunOptions`.

        Raises:
          NotMirroredError: one is not.
        """
        if expected is None:
            return
        is_expected = _varying_results.expectation(self, expected)
        for position, keys in self.results.array_paths():
            column = self._columns[position]
            like = jax.typeof(column[0])
            if self._are_equal(position) or not is_expected(position, keys, like):
                continue
            path, digests = self.path(keys), self._digests[position]
            is_object = self.is_of_object(keys)
            what = (
                f"`{self.name}` leaves {path} different on each replica."
                if is_object
                else f"{path} was expected to be mirrored, but the replicas differ."
            )
            advice = _varying_results.OF_OBJECTS if is_object else OF_RESULTS
            told = told_versions(column, digests, self._replicas)
            raise NotMirroredError(f"{what}\n{told}\n{advice}", path=path.strip("`"))

    def value(
        self, key: Hashable, block: EagerBlock, own: Sequence[Sequence[Leaf]]
    ) -> PyTree:
        """The results, as `run` returns them.

        Args:
          key: of the function.
          block: in which results may have differed before.
          own: arguments of which each replica has its version: returned unchanged they
            are their `PerReplica` again.
        """
        numbered = self.results.treedef.unflatten(range(len(self._columns)))
        paths = [path for path, _ in jax.tree.leaves_with_path(numbered)]
        found = []
        for position, path in enumerate(paths):
            known = key, self.path(path)
            column = self._columns[position]
            is_given = any(
                all(a is b for a, b in zip(column, each, strict=True)) for each in own
            )
            if not self._are_equal(position) or is_given:
                block.varying.add(known)
            varies = known in block.varying and self._replicas.count > 1
            found.append(self._one(position, varies))
        return self.results.treedef.unflatten(found)

    def _are_equal(self, position: int) -> bool:
        return len(set(self._digests[position])) == 1

    def _one(self, position: int, varies: bool) -> Leaf:
        column = self._columns[position]
        is_array = all(map(_arrays.is_array, column))
        if not varies or (self._are_equal(position) and not is_array):
            first = column[0]
            return (
                _versions_of_replicas.mirrored(first, self._replicas)
                if is_array
                else first
            )
        is_numeric = all(_arrays.is_array(x) or _is_number(x) for x in column)
        kinds = {each.rpartition(" ")[0] for each in self._digests[position]}
        if not is_numeric or len(kinds) > 1:
            return Versions(column, self._replicas.own)
        arrays = [x if _arrays.is_array(x) else jax.numpy.asarray(x) for x in column]
        return _versions_of_replicas.together(arrays, self._replicas)


OF_RESULTS = _varying_results.OF_RESULTS


def _leaves(returned: tuple[list[jax.Array], Results]) -> list[Leaf]:
    arrays, rest = returned
    following = iter(arrays)
    return [next(following) if leaf is None else leaf.value for leaf in rest.leaves]


def _is_number(value: object) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def _kind(leaf: Leaf) -> str:
    """Equal for equal leaves: the type of an array or number, and what it holds."""
    if _arrays.is_array(leaf):
        digest = _versions_of_replicas.digest(leaf)
        return f"{leaf.dtype}{leaf.shape} {digest}"
    if leaf is None or isinstance(leaf, (bool, str, int, float, complex)):
        return f"{type(leaf).__name__} {leaf!r}"
    try:
        return f"{type(leaf).__name__} {hash(leaf)}"
    except TypeError:
        return f"{type(leaf).__name__} {id(leaf)}"
