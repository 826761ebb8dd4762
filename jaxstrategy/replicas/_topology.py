"""The time that a collective takes on given links: arithmetic, nothing measured."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import final

from jaxstrategy.text._shown import shown
from jaxstrategy.text._whole_numbers import whole

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")


@final
@dataclasses.dataclass(frozen=True)
class Topology:
    """Replicas joined by equal links, and the seconds a collective takes on them.

    Attributes:
      bandwidth: bytes per second that one replica can send, and at the same time
        receive, over its slowest link.
      latency: seconds that a message takes before its first byte arrives.
      replicas: how many replicas take part.

    With `n` replicas, latency `a`, bandwidth `b`, `d = ceil(log2(n))`, and `B` the
    bytes of one replica's operand, that is, of what it holds before the collective:

    ```
    kind            ring                         tree
    all_reduce      2(n-1) a + 2(n-1)/n B/b      2d a + 2d B/b
    all_gather       (n-1) a +  (n-1)   B/b       d a + (n-1) B/b
    reduce_scatter   (n-1) a +  (n-1)/n B/b       d a + (n-1)/n B/b
    all_to_all       (n-1) a +  (n-1)/n B/b       d a + d/2 B/b
    permute              a +            B/b         a + B/b
    ```

    One replica alone sends nothing: every time is 0.

    The ring's all-reduce, a reduce-scatter and an all-gather around a ring, is that of
    Patarasuk and Yuan [1]; its all-to-all is the pairwise exchange of [2], in which
    step `i` sends to the replica `i` places on. The tree's all-reduce is a reduction
    and a broadcast along a binomial tree [2]; its reduce-scatter is recursive halving
    and its all-gather recursive doubling [2], whose times hold for other `n` than
    powers of two too if the concatenation of Bruck et al. [3], forwards or backwards,
    takes their place. Its all-to-all is the index algorithm of [3]: exact for powers
    of two, and at most this for other `n`.

    Left out: the time to compute the sums, contention (messages that share a link, as
    the pairwise exchange's do on a real ring), and overlap with computation. The tree
    supposes that any two replicas are equally far apart.

    [1] P. Patarasuk, X. Yuan. Bandwidth optimal all-reduce algorithms for clusters of
        workstations. J. Parallel Distrib. Comput. 69 (2009) 117-124.
    [2] R. Thakur, R. Rabenseifner, W. Gropp. Optimization of collective communication
        operations in MPICH. Int. J. High Perform. Comput. Appl. 19 (2005) 49-66.
    [3] J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby. Efficient algorithms
        for all-to-all communications in multiport message-passing systems. IEEE Trans.
        Parallel Distrib. Syst. 8 (1997) 1143-1156.

    Raises:
      TypeError: a field is not a number, or `replicas` not a whole one.
      ValueError: `bandwidth` is not positive, `latency` negative, one of them not
        finite, or `replicas` less than 1.

    >>> import jaxstrategy as js
    >>> topology = js.Topology(bandwidth=1e9, latency=1e-6, replicas=8)
    >>> print(f"{topology.ring('all_reduce', 8e6):.6f} s")
    0.014014 s
    >>> print(f"{topology.tree('all_reduce', 8e6):.6f} s")
    0.048006 s
    """

    bandwidth: float
    latency: float
    replicas: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidth", _bandwidth(self.bandwidth))
        object.__setattr__(self, "latency", _latency(self.latency))
        object.__setattr__(self, "replicas", _replicas(self.replicas))

    def ring(self, kind: str, nbytes: float) -> float:
        """Seconds of the collective `kind` around a ring.

        `nbytes` are the bytes of one replica's operand; `kind` is one of "all_reduce",
        "all_gather", "reduce_scatter", "all_to_all" and "permute".

        Raises:
          TypeError: `nbytes` is not a number.
          ValueError: another `kind`, or `nbytes` is negative or not finite.
        """
        messages, operands = _ring(kind, self.replicas)
        return self._seconds(messages, operands, nbytes)

    def tree(self, kind: str, nbytes: float) -> float:
        """Seconds of the collective `kind` along a tree; arguments as for `ring`.

        Raises:
          TypeError: `nbytes` is not a number.
          ValueError: another `kind`, or `nbytes` is negative or not finite.
        """
        messages, operands = _tree(kind, self.replicas)
        return self._seconds(messages, operands, nbytes)

    def fastest(self, kind: str, nbytes: float) -> float:
        """The smaller of `ring` and `tree`: few bytes favour the tree.

        Raises:
          TypeError: `nbytes` is not a number.
          ValueError: another `kind`, or `nbytes` is negative or not finite.

        >>> import jaxstrategy as js
        >>> topology = js.Topology(bandwidth=1e9, latency=1e-6, replicas=8)
        >>> topology.fastest("all_reduce", 8) == topology.tree("all_reduce", 8)
        True
        >>> topology.fastest("all_reduce", 8e6) == topology.ring("all_reduce", 8e6)
        True
        """
        return min(self.ring(kind, nbytes), self.tree(kind, nbytes))

    def with_replicas(self, replicas: int) -> Topology:
        """The same links between another number of replicas.

        Raises:
          TypeError: it is not a whole number.
          ValueError: it is less than 1.

        >>> import jaxstrategy as js
        >>> js.Topology(bandwidth=1e9, latency=1e-6, replicas=8).with_replicas(64)
        Topology(bandwidth=1000000000.0, latency=1e-06, replicas=64)
        """
        return dataclasses.replace(self, replicas=replicas)

    def _seconds(self, messages: int, operands: float, nbytes: float) -> float:
        """Seconds of `messages` sent in turn that carry `operands` operands in all."""
        return messages * self.latency + operands * _nbytes(nbytes) / self.bandwidth


def _ring(kind: str, n: int) -> tuple[int, float]:
    """The messages one of `n` replicas sends in turn, and the operands they carry."""
    match kind:
        case "all_reduce":
            return 2 * (n - 1), 2 * (n - 1) / n
        case "all_gather":
            return n - 1, n - 1
        case "reduce_scatter" | "all_to_all":
            return n - 1, (n - 1) / n
        case "permute":
            return _permute(n)
    raise _unknown(kind)


def _tree(kind: str, n: int) -> tuple[int, float]:
    """The messages one of `n` replicas sends in turn, and the operands they carry."""
    depth = (n - 1).bit_length()  # ceil(log2(n)), without rounding
    match kind:
        case "all_reduce":
            return 2 * depth, 2 * depth
        case "all_gather":
            return depth, n - 1
        case "reduce_scatter":
            return depth, (n - 1) / n
        case "all_to_all":
            return depth, depth / 2
        case "permute":
            return _permute(n)
    raise _unknown(kind)


def _permute(n: int) -> tuple[int, float]:
    """One message of one operand, unless a replica is alone and keeps its own."""
    return (1, 1) if n > 1 else (0, 0)


def _unknown(kind: object) -> ValueError:
    names = ", ".join(map(repr, KINDS))
    return ValueError(
        f"`kind` was {kind!r}; a collective was wanted. Use one of {names}."
    )


def _bandwidth(given: object) -> float:
    complaint = (
        f"`bandwidth` was {shown(given)}; a positive, finite number of bytes per "
        "second was wanted. Give a link of 200 Gbit/s as `bandwidth=25e9`."
    )
    bandwidth = _finite(given, complaint)
    if bandwidth == 0:
        raise ValueError(complaint)
    return bandwidth


def _latency(given: object) -> float:
    return _finite(
        given,
        f"`latency` was {shown(given)}; a finite number of seconds, 0 or more, was "
        "wanted. Give 5 microseconds as `latency=5e-6`.",
    )


def _nbytes(given: object) -> float:
    return _finite(
        given,
        f"`nbytes` was {shown(given)}; a finite number of bytes, 0 or more, was "
        "wanted. Give the size of one replica's operand, for an array `x` its "
        "`x.nbytes`.",
    )


def _finite(given: object, complaint: str) -> float:
    """`given` as a float; `complaint` is raised unless it is finite and 0 or more."""
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(complaint)
    try:
        number = float(given)
    except OverflowError:
        raise ValueError(complaint) from None
    if not 0 <= number < math.inf:
        raise ValueError(complaint)
    return number


def _replicas(given: object) -> int:
    """`given` as an int, refused unless it is a whole number of 1 or more."""
    complaint = (
        f"`replicas` was {shown(given)}; a whole number, 1 or more, was wanted. "
        "Give how many replicas take part, for example `replicas=8`."
    )
    replicas = whole(given)
    if replicas is None:
        raise TypeError(complaint)
    if replicas < 1:
        raise ValueError(complaint)
    return replicas
