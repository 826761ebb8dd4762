"""`Topology`: the time that a collective takes on given links, by arithmetic."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import numbers
from collections.abc import Iterable
from typing import TypeAlias, final

from jaxstrategy._src.text import shown, whole


def _finite(value: object, complaint: str) -> float:
    """`value` as a float; `complaint` is raised unless it is finite and 0 or more."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(complaint)
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(complaint) from None
    if not 0 <= number < math.inf:
        raise ValueError(complaint)
    return number


def _finite_pairs(value: object, complaint: str) -> tuple[tuple[float, float], ...]:
    try:
        pairs = [(one, two) for one, two in value]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise TypeError(complaint) from None
    return tuple((_finite(x, complaint), _finite(y, complaint)) for x, y in pairs)


def _checked_messages(value: object) -> tuple[tuple[float, float], ...]:
    complaint = (
        f"`messages` was {shown(value)}; pairs of bytes and seconds were wanted, both "
        "ascending, at least two. Give a link as `messages=((1e3, 1e-5), (1e6, 5e-5))`."
    )
    messages = _finite_pairs(value, complaint)
    for (size, seconds), (larger, longer) in itertools.pairwise(messages):
        if size >= larger or seconds > longer:
            raise ValueError(complaint)
    if len(messages) == 1:
        raise ValueError(complaint)
    return messages


def _checked_spread(value: object, count: int) -> tuple[tuple[float, float], ...]:
    complaint = (
        f"`spread` was {shown(value)}; a pair of the least and the most seconds was "
        f"wanted for each of {count} messages. Give `spread=((1e-5, 2e-5), ...)`."
    )
    spread = _finite_pairs(value, complaint)
    if len(spread) not in (0, count) or any(least > most for least, most in spread):
        raise ValueError(complaint)
    return spread


def _checked_replicas(value: object) -> int:
    complaint = (
        f"`replicas` was {shown(value)}; a whole number, 1 or more, was wanted. "
        "Give how many replicas take part, for example `replicas=8`."
    )
    count = whole(value)
    if count is None:
        raise TypeError(complaint)
    if count < 1:
        raise ValueError(complaint)
    return count


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")


@final
@dataclasses.dataclass(frozen=True)
class Topology:
    """Replicas joined by links, and the seconds a collective takes on them.

    Attributes:
      bandwidth: bytes per second that one replica can send, and at the same time
        receive, over its slowest link. Replicas of a host that share its link have an
        equal part of it each.
      latency: seconds that a message takes before its first byte arrives.
      replicas: how many replicas take part.
      inside: the faster links among the first `inside.replicas` of them, the next as
        many, and so on, as in a host; `bandwidth` and `latency` are then those between
        hosts. None: all links are equal. It may have an `inside` itself.
      messages: pairs of the bytes of a message and the seconds that it takes, in
        ascending order of bytes, for links of which one latency and one bandwidth do
        not tell enough. Between them time goes along a straight line, behind them as
        between the last two, and a smaller message takes as long as the first. Where
        they are given, `latency` and `bandwidth` only sum them up.
      spread: for each of `messages` the seconds between which it usually takes, as a
        pair; none: always the same. `bounds` are made of them.

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

    With `messages`, the time of `k` messages that carry `c B` bytes, `k a + c B/b`, is
    `k` times that of a message of `c B/k` bytes.

    One replica alone sends nothing: every time is 0.

    With `inside`, of `m` replicas each on `h = ceil(n/m)` hosts, a collective has
    stages [4], each with the formula above of `m` replicas inside or `h` between. Each
    replica exchanges with those that have its place on the other hosts. Where `n` is no
    multiple of `m`, the last host counts as full; up to `m` replicas are on one host.

    ```
    all_reduce      reduce_scatter of B inside, all_reduce of B/m between,
                    all_gather of B/m inside
    all_gather      all_gather of B between, all_gather of h B inside
    reduce_scatter  reduce_scatter of B inside, reduce_scatter of B/m between
    all_to_all      all_to_all of B inside, all_to_all of B between
    permute         permute of B between
    ```

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
    [4] M. Cho, U. Finkler, M. Serrano, D. Kung, H. Hunter. BlueConnect: Decomposing
        all-reduce for deep learning on heterogeneous network hierarchy. IBM J. Res.
        Dev. 63 (2019) 1:1-1:11.

    Raises:
      TypeError: a field is not a number, `replicas` not a whole one, `inside` no
        `Topology`, or `messages` no pairs.
      ValueError: `bandwidth` is not positive, `latency` negative, one of them not
        finite, or `replicas` less than 1; or `messages` are one alone, or do not
        ascend; or `spread` does not have a pair for each.

    >>> import jaxstrategy as js
    >>> topology = js.profiling.Topology(bandwidth=1e9, latency=1e-6, replicas=8)
    >>> print(f"{topology.ring('all_reduce', 8e6):.6f} s")
    0.014014 s
    >>> print(f"{topology.tree('all_reduce', 8e6):.6f} s")
    0.048006 s

    Hosts of 8 replicas, with links ten times as fast inside:

    >>> Topology = js.profiling.Topology
    >>> host = Topology(bandwidth=1e10, latency=1e-6, replicas=8)
    >>> hosts = Topology(bandwidth=1e9, latency=1e-5, replicas=64, inside=host)
    >>> print(f"{hosts.ring('all_reduce', 8e6):.6f} s")
    0.003304 s
    """

    bandwidth: float
    latency: float
    replicas: int
    inside: Topology | None = None
    messages: tuple[tuple[float, float], ...] = ()
    spread: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        complaint = (
            f"`bandwidth` was {shown(self.bandwidth)}; a positive, finite number of "
            "bytes per second was wanted. Give a link of 200 Gbit/s as "
            "`bandwidth=25e9`."
        )
        bandwidth = _finite(self.bandwidth, complaint)
        if bandwidth == 0:
            raise ValueError(complaint)
        latency = _finite(
            self.latency,
            f"`latency` was {shown(self.latency)}; a finite number of seconds, 0 or "
            "more, was wanted. Give 5 microseconds as `latency=5e-6`.",
        )
        object.__setattr__(self, "bandwidth", bandwidth)
        object.__setattr__(self, "latency", latency)
        object.__setattr__(self, "replicas", _checked_replicas(self.replicas))
        if not isinstance(self.inside, Topology | None):
            raise TypeError(
                f"`inside` was {shown(self.inside)}; a `Topology` was wanted, or None. "
                "Give the links of one host as `inside=Topology(bandwidth=300e9, "
                "latency=2e-6, replicas=8)`."
            )
        object.__setattr__(self, "messages", _checked_messages(self.messages))
        spread = _checked_spread(self.spread, len(self.messages))
        object.__setattr__(self, "spread", spread)

    def ring(self, kind: str, nbytes: float) -> float:
        """Seconds of the collective `kind` around a ring.

        `nbytes` are the bytes of one replica's operand; `kind` is one of "all_reduce",
        "all_gather", "reduce_scatter", "all_to_all" and "permute".

        Raises:
          TypeError: `nbytes` is not a number.
          ValueError: another `kind`, or `nbytes` is negative or not finite.
        """
        return self._times(kind, nbytes, "ring")[0]

    def tree(self, kind: str, nbytes: float) -> float:
        """Seconds of the collective `kind` along a tree; arguments as for `ring`.

        Raises:
          TypeError: `nbytes` is not a number.
          ValueError: another `kind`, or `nbytes` is negative or not finite.
        """
        return self._times(kind, nbytes, "tree")[0]

    def fastest(self, kind: str, nbytes: float) -> float:
        """The smaller of `ring` and `tree`, for each stage: few bytes favour the tree.

        Raises:
          TypeError: `nbytes` is not a number.
          ValueError: another `kind`, or `nbytes` is negative or not finite.

        >>> import jaxstrategy as js
        >>> topology = js.profiling.Topology(bandwidth=1e9, latency=1e-6, replicas=8)
        >>> topology.fastest("all_reduce", 8) == topology.tree("all_reduce", 8)
        True
        >>> topology.fastest("all_reduce", 8e6) == topology.ring("all_reduce", 8e6)
        True
        """
        return self._times(kind, nbytes, "fastest")[0]

    def bounds(
        self, kind: str, nbytes: float, algorithm: str = "fastest"
    ) -> tuple[float, float]:
        """The seconds between which the collective takes, by what is known of links.

        With `messages`, a message takes no less than the next smaller one that is
        known, and no more than the next larger one, each with its `spread`; of one
        smaller than all, the least is 0. Without, both are the time of the formula.

        Raises:
          TypeError: `nbytes` is not a number.
          ValueError: another `kind` or `algorithm`, or `nbytes` is negative or not
            finite.

        >>> import jaxstrategy as js
        >>> known = ((1e3, 1.0), (1e6, 3.0))
        >>> links = js.profiling.Topology(1e6, 1.0, 2, messages=known)
        >>> links.bounds("permute", 5e5), links.bounds("permute", 10)
        ((1.0, 3.0), (0.0, 1.0))
        """
        _, least, most = self._times(kind, nbytes, algorithm)
        return least, most

    def with_replicas(self, replicas: int) -> Topology:
        """The same links between another number of replicas.

        Raises:
          TypeError: it is not a whole number.
          ValueError: it is less than 1.

        >>> import jaxstrategy as js
        >>> js.profiling.Topology(1e9, 1e-6, replicas=8).with_replicas(64).replicas
        64
        """
        return dataclasses.replace(self, replicas=replicas)

    def among(self, replicas: Iterable[int]) -> Topology:
        """The links among some of the replicas, given by their numbers.

        Of hosts with unequally many of them, each counts as the one with the most.

        Raises:
          ValueError: there is none, or no replica has such a number.

        >>> import jaxstrategy as js
        >>> Topology = js.profiling.Topology
        >>> host = Topology(bandwidth=1e10, latency=1e-6, replicas=8)
        >>> hosts = Topology(bandwidth=1e9, latency=1e-5, replicas=64, inside=host)
        >>> hosts.among(range(8, 12)) == host.with_replicas(4)
        True
        >>> hosts.among([0, 8, 16]).ring("permute", 1e9)
        1.00001
        """
        members = sorted(set(replicas))
        if not members or not 0 <= members[0] <= members[-1] < self.replicas:
            raise ValueError(
                f"`replicas` was {shown(members)}; numbers from 0 to "
                f"{self.replicas - 1} were wanted, at least one."
            )
        if self.inside is None:
            return self.with_replicas(len(members))
        size = self.inside.replicas
        hosts: dict[int, list[int]] = {}
        for member in members:
            hosts.setdefault(member // size, []).append(member % size)
        fullest = self.inside.among(max(hosts.values(), key=len))
        if len(hosts) == 1:
            return fullest
        count = len(hosts) * fullest.replicas
        return dataclasses.replace(self, replicas=count, inside=fullest)

    def with_replicas_per_device(self, count: int) -> Topology:
        """The same links between devices with `count` replicas each.

        Raises:
          TypeError: it is not a whole number.
          ValueError: it is less than 1.

        >>> import jaxstrategy as js
        >>> links = js.profiling.Topology(1e9, 1e-6, replicas=64)
        >>> links.with_replicas_per_device(8).replicas
        8
        """
        sharing = _checked_replicas(count)
        within = self.inside
        return dataclasses.replace(
            self,
            replicas=-(-self.replicas // sharing),
            inside=None if within is None else within.with_replicas_per_device(sharing),
        )

    def _times(self, kind: str, nbytes: float, algorithm: str) -> _Times:
        """The times of all stages together, each by the faster algorithm."""
        algorithms = ("ring", "tree") if algorithm == "fastest" else (algorithm,)
        if algorithms[0] not in ("ring", "tree"):
            raise ValueError(
                f"`algorithm` was {algorithm!r}; 'ring', 'tree' or 'fastest' was "
                "wanted."
            )
        if kind not in KINDS:
            names = ", ".join(map(repr, KINDS))
            raise ValueError(
                f"`kind` was {kind!r}; a collective was wanted. Use one of {names}."
            )
        size = _finite(
            nbytes,
            f"`nbytes` was {shown(nbytes)}; a finite number of bytes, 0 or more, was "
            "wanted. Give the size of one replica's operand, for an array `x` its "
            "`x.nbytes`.",
        )
        stages = [
            min(
                links._time_of(*_cost(by, each, links.replicas), operand)
                for by in algorithms
            )
            for links, each, operand in self._stages(kind, size)
        ]
        predicted, least, most = map(sum, zip(*stages, strict=True))
        return predicted, least, most

    def _time_of(self, messages: int, operands: float, nbytes: float) -> _Times:
        if not self.messages or not messages:
            seconds = messages * self.latency + operands * nbytes / self.bandwidth
            return seconds, seconds, seconds
        predicted, least, most = self._time_of_message(operands * nbytes / messages)
        return messages * predicted, messages * least, messages * most

    def _time_of_message(self, nbytes: float) -> _Times:
        """The time of one message, interpolated between `messages`."""
        sizes, seconds = zip(*self.messages, strict=True)
        spread = self.spread or tuple((each, each) for each in seconds)
        above = bisect.bisect_left(sizes, nbytes)
        if above == 0:
            least = spread[0][0] if nbytes == sizes[0] else 0.0
            return seconds[0], least, spread[0][1]
        high = min(above, len(sizes) - 1)
        low = high - 1
        slope = (seconds[high] - seconds[low]) / (sizes[high] - sizes[low])
        predicted = seconds[low] + (nbytes - sizes[low]) * slope
        if above < len(sizes):
            below = high if nbytes == sizes[high] else low
            return predicted, spread[below][0], spread[high][1]
        more = predicted - seconds[high]
        return predicted, spread[high][0] + more, spread[high][1] + more

    def _stages(self, kind: str, nbytes: float) -> list[_Stage]:
        """The stages in order: links, collective, and bytes of one operand of each."""
        if self.inside is None:
            return [(self, kind, nbytes)]
        if self.replicas <= self.inside.replicas:
            return self.inside.with_replicas(self.replicas)._stages(kind, nbytes)
        size = self.inside.replicas
        hosts = -(-self.replicas // size)
        within = self.inside._stages
        between = dataclasses.replace(self, replicas=hosts, inside=None)._stages
        match kind:
            case "all_reduce":
                return [
                    *within("reduce_scatter", nbytes),
                    *between("all_reduce", nbytes / size),
                    *within("all_gather", nbytes / size),
                ]
            case "all_gather":
                return [*between(kind, nbytes), *within(kind, hosts * nbytes)]
            case "reduce_scatter":
                return [*within(kind, nbytes), *between(kind, nbytes / size)]
            case "all_to_all":
                return [*within(kind, nbytes), *between(kind, nbytes)]
        return between(kind, nbytes)


# The predicted seconds, the least and the most.
_Times: TypeAlias = tuple[float, float, float]
_Stage: TypeAlias = tuple[Topology, str, float]


def _cost(algorithm: str, kind: str, n: int) -> tuple[int, float]:
    """The messages one of `n` replicas sends in turn, and the operands they carry."""
    share, depth = (n - 1) / n, (n - 1).bit_length()  # ceil(log2(n)), without rounding
    costs = {
        "ring": {
            "all_reduce": (2 * (n - 1), 2 * share),
            "all_gather": (n - 1, n - 1),
            "reduce_scatter": (n - 1, share),
            "all_to_all": (n - 1, share),
        },
        "tree": {
            "all_reduce": (2 * depth, 2 * depth),
            "all_gather": (depth, n - 1),
            "reduce_scatter": (depth, share),
            "all_to_all": (depth, depth / 2),
        },
    }
    # Permuted is by one message of one operand, unless a replica is alone.
    return costs[algorithm].get(kind, (1, 1) if n > 1 else (0, 0))
