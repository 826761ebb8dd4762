"""The predicted seconds are those of the algorithms, played out message by message."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from helpers.cases import each_of

from jaxstrategy.profiling import Topology

KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
REPLICAS = [1, 2, 3, 4, 5, 7, 8, 12]
ALGORITHMS = ["ring", "tree"]


class Wire:
    """Carries messages and keeps, for each step, the bytes of the largest one."""

    def __init__(self):
        self.largest = []

    def step(self, messages):
        """What each destination receives of `{(source, destination): array}`."""
        sources, destinations = zip(*messages, strict=True)
        assert len(set(sources)) == len(sources), "a replica sends twice in a step"
        assert len(set(destinations)) == len(destinations), "a replica receives twice"
        self.largest.append(max(message.nbytes for message in messages.values()))
        return {to: np.array(message) for (_, to), message in messages.items()}

    def shift(self, outgoing, distance):
        """What each replica receives when all send `distance` places on."""
        n = len(outgoing)
        received = self.step({(r, (r + distance) % n): outgoing[r] for r in range(n)})
        return [received[r] for r in range(n)]


# Each player takes `data[replica, part, element]` and returns what every replica ends
# with, so that a schedule counted here is known to do its work.


def ring_reduce_scatter(wire, data):
    n = len(data)
    sums = data.copy()
    for step in range(n - 1):
        received = wire.shift([sums[r, (r - step - 1) % n] for r in range(n)], 1)
        for r in range(n):
            sums[r, (r - step - 2) % n] += received[r]
    return [sums[r, r] for r in range(n)]


def ring_all_gather(wire, data):
    n = len(data)
    latest = list(data)
    parts = [{r: data[r]} for r in range(n)]
    for step in range(1, n):
        latest = wire.shift(latest, 1)
        for r in range(n):
            parts[r][(r - step) % n] = latest[r]
    return [np.stack([parts[r][q] for q in range(n)]) for r in range(n)]


def ring_all_reduce(wire, data):
    return ring_all_gather(wire, ring_reduce_scatter(wire, data))


def pairwise_all_to_all(wire, data):
    n = len(data)
    out = [{r: data[r, r]} for r in range(n)]
    for step in range(1, n):
        received = wire.shift([data[r, (r + step) % n] for r in range(n)], step)
        for r in range(n):
            out[r][(r - step) % n] = received[r]
    return [np.stack([out[r][q] for q in range(n)]) for r in range(n)]


def tree_all_reduce(wire, data):
    n = len(data)
    values = data.copy()
    distances = [1 << k for k in range(n) if 1 << k < n]
    for distance in distances:
        senders = range(distance, n, 2 * distance)
        received = wire.step({(r, r - distance): values[r] for r in senders})
        for r, value in received.items():
            values[r] += value
    for distance in reversed(distances):
        receivers = range(distance, n, 2 * distance)
        messages = {(r - distance, r): values[r - distance] for r in receivers}
        for r, value in wire.step(messages).items():
            values[r] = value
    return list(values)


def doubling_all_gather(wire, data):
    """Replica `r` holds the parts `r, r + 1, ...`, twice as many after each step."""
    n = len(data)
    held = [data[r][None] for r in range(n)]
    while (m := len(held[0])) < n:
        received = wire.shift([h[: min(m, n - m)] for h in held], -m)
        held = [np.concatenate(pair) for pair in zip(held, received, strict=True)]
    return [np.roll(held[r], r, axis=0) for r in range(n)]


def halving_reduce_scatter(wire, data):
    """`doubling_all_gather` backwards: sums travel where the parts came from."""
    n = len(data)
    held = [np.roll(data[r], -r, axis=0) for r in range(n)]
    while len(held[0]) > 1:
        m = 1 << (len(held[0]) - 1).bit_length() - 1
        received = wire.shift([h[m:] for h in held], m)
        held = [h[:m].copy() for h in held]
        for sums, more in zip(held, received, strict=True):
            sums[: len(more)] += more
    return [h[0] for h in held]


def bruck_all_to_all(wire, data):
    n = len(data)
    held = [np.roll(data[r], -r, axis=0) for r in range(n)]
    for distance in [1 << k for k in range(n) if 1 << k < n]:
        moved = [i for i in range(n) if i & distance]
        received = wire.shift([h[moved] for h in held], distance)
        for r in range(n):
            held[r][moved] = received[r]
    return [np.stack([held[r][(r - q) % n] for q in range(n)]) for r in range(n)]


def permute(wire, data):
    return wire.shift(list(data), 1) if len(data) > 1 else list(data)


PLAYERS = {
    ("ring", "all_reduce"): ring_all_reduce,
    ("ring", "all_gather"): ring_all_gather,
    ("ring", "reduce_scatter"): ring_reduce_scatter,
    ("ring", "all_to_all"): pairwise_all_to_all,
    ("ring", "permute"): permute,
    ("tree", "all_reduce"): tree_all_reduce,
    ("tree", "all_gather"): doubling_all_gather,
    ("tree", "reduce_scatter"): halving_reduce_scatter,
    ("tree", "all_to_all"): bruck_all_to_all,
    ("tree", "permute"): permute,
}

RESULTS = {
    "all_reduce": lambda data: np.broadcast_to(data.sum(0), data.shape),
    "all_gather": lambda data: np.broadcast_to(data, (len(data), *data.shape)),
    "reduce_scatter": lambda data: data.sum(0),
    "all_to_all": lambda data: data.swapaxes(0, 1),
    "permute": lambda data: np.roll(data, 1, axis=0),
}


def played(algorithm, kind, n):
    """A wire after the collective, and the bytes of one replica's operand."""
    data = np.random.default_rng(n).integers(1000, size=(n, n, 3))
    wire = Wire()
    out = PLAYERS[algorithm, kind](wire, data)
    np.testing.assert_array_equal(out, RESULTS[kind](data))
    return wire, data[0].nbytes


@each_of("n", REPLICAS)
@each_of("kind", KINDS)
@each_of("algorithm", ALGORITHMS)
def test_a_step_pays_latency_once_and_bandwidth_for_its_largest_message(
    algorithm, kind, n
):
    wire, nbytes = played(algorithm, kind, n)
    topology = Topology(bandwidth=1e300, latency=1.0, replicas=n)
    predicted = getattr(topology, algorithm)(kind, nbytes)
    assert predicted == pytest.approx(len(wire.largest), abs=1e-9)
    topology = Topology(bandwidth=7.0, latency=0.0, replicas=n)
    predicted = getattr(topology, algorithm)(kind, nbytes)
    counted = sum(wire.largest) / 7.0
    if (algorithm, kind) == ("tree", "all_to_all") and n & (n - 1):
        assert counted < predicted <= 2 * counted  # a bound, as the docstring says
    else:
        assert predicted == pytest.approx(counted)


# Each list: ring, tree; latency 1 s, bandwidth 10 B/s.
BY_HAND = {
    (4, 40): {
        "all_reduce": [6 + 6, 4 + 16],
        "all_gather": [3 + 12, 2 + 12],
        "reduce_scatter": [3 + 3, 2 + 3],
        "all_to_all": [3 + 3, 2 + 4],
        "permute": [1 + 4, 1 + 4],
    },
    (6, 60): {
        "all_reduce": [10 + 10, 6 + 36],
        "all_gather": [5 + 30, 3 + 30],
        "reduce_scatter": [5 + 5, 3 + 5],
        "all_to_all": [5 + 5, 3 + 9],
        "permute": [1 + 6, 1 + 6],
    },
}


@each_of("n, nbytes", BY_HAND)
@each_of("kind", KINDS)
def test_times_are_those_worked_out_by_hand(kind, n, nbytes):
    topology = Topology(bandwidth=10, latency=1, replicas=n)
    times = [topology.ring(kind, nbytes), topology.tree(kind, nbytes)]
    assert times == pytest.approx(BY_HAND[n, nbytes][kind])
    assert topology.fastest(kind, nbytes) == pytest.approx(
        min(BY_HAND[n, nbytes][kind])
    )


@each_of("kind", KINDS)
@each_of("method", ["ring", "tree", "fastest"])
def test_one_replica_waits_for_nobody(method, kind):
    assert getattr(Topology(1.0, 1.0, 1), method)(kind, 1e9) == 0


@each_of("n", [2**60 - 1, 2**60, 2**60 + 1])
def test_the_depth_of_a_tree_is_not_rounded(n):
    depth = 60 if n <= 2**60 else 61
    topology = Topology(bandwidth=1.0, latency=1.0, replicas=n)
    assert topology.tree("all_reduce", 0) == 2 * depth


def test_with_replicas_keeps_the_links():
    topology = Topology(bandwidth=2.0, latency=3.0, replicas=4)
    assert topology.with_replicas(5) == Topology(2.0, 3.0, 5)
    assert topology.replicas == 4
    with pytest.raises(ValueError, match="`replicas` was 0"):
        topology.with_replicas(0)


def test_fields_become_plain_numbers_that_cannot_change():
    topology = Topology(np.float32(2), np.int64(3), np.int64(4))
    numbers = (topology.bandwidth, topology.latency, topology.replicas)
    assert [type(number) for number in numbers] == [float, float, int]
    assert hash(topology) == hash(Topology(2.0, 3.0, 4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology.replicas = 5


NOT_NUMBERS = ["1e9", None, 1j]
NOT_FINITE = [-1.0, math.inf, math.nan]


def refused(error, given, name, message):
    return pytest.raises(error, match=rf"^`{name}` was {given!r}; {message}")


def test_numbers_of_links_that_cannot_be_are_refused():
    for name, make, message, wrong in [
        ("bandwidth", lambda x: Topology(x, 0.0, 1), "a positive, .*25e9", [0, 0.0]),
        ("latency", lambda x: Topology(1.0, x, 1), "a finite .*latency=5e-6", []),
        ("nbytes", Topology(1.0, 0.0, 1).ring, r"a finite .*x\.nbytes", []),
        ("nbytes", Topology(1.0, 0.0, 2).fastest, r"a finite .*x\.nbytes", []),
    ]:
        if name == "nbytes":
            make = functools.partial(make, "permute")
        for given in [*NOT_NUMBERS, *NOT_FINITE, *wrong]:
            error = TypeError if given in NOT_NUMBERS else ValueError
            with refused(error, given, name, message):
                make(given)
    for given, error in [("2", TypeError), (2.0, TypeError), (0, ValueError)]:
        message = r"a whole number, 1 or more, was wanted\. Give .*replicas=8"
        with refused(error, given, "replicas", message):
            Topology(1.0, 0.0, given)


@each_of("kind", ["broadcast", "all-reduce", "ALL_REDUCE", None, []])
@each_of("method", ["ring", "tree", "fastest"])
def test_an_unknown_kind_is_told_the_known_ones(method, kind):
    with pytest.raises(ValueError, match="a collective was wanted") as caught:
        getattr(Topology(1.0, 0.0, 1), method)(kind, 8)
    assert f"`kind` was {kind!r};" in str(caught.value)
    assert all(repr(known) in str(caught.value) for known in KINDS)


# Links of which the times of some messages are known.


@each_of("n", REPLICAS)
@each_of("kind", KINDS)
@each_of("algorithm", ALGORITHMS)
def test_messages_on_a_line_are_latency_and_bandwidth(algorithm, kind, n):
    line = Topology(bandwidth=7.0, latency=3.0, replicas=n)
    points = tuple((float(size), 3.0 + size / 7) for size in (0, 1, 10, 40))
    known = Topology(1.0, 1.0, n, messages=points)
    for nbytes in (0, 8, 1000):
        wanted = getattr(line, algorithm)(kind, nbytes)
        assert getattr(known, algorithm)(kind, nbytes) == pytest.approx(wanted)


@each_of("nbytes", [0, 5, 40, 60, 80, 100, 400, 4000])
def test_a_message_takes_what_lies_between_those_that_are_known(nbytes):
    points = ((10.0, 2.0), (20.0, 3.0), (25.0, 13.0))
    links = Topology(1.0, 1.0, 4, messages=points)
    # Six messages of a quarter each; the last two points go on.
    behind = (2500.0, 13.0 + 2475 * 2)
    wanted = 6 * np.interp(nbytes / 4, *zip(*points, behind, strict=True))
    assert links.ring("all_reduce", nbytes) == pytest.approx(wanted)
    assert links.with_replicas(1).ring("all_reduce", nbytes) == 0


@each_of(("given", "error"), [
    (3, TypeError), (((1, 2), 3), TypeError), (((1, 2, 3),), TypeError),
    (((1, "a"), (2, 3)), TypeError), (((1, 2),), ValueError),
    (((1, 2), (1, 3)), ValueError), (((2, 2), (1, 3)), ValueError),
    (((1, 3), (2, 2)), ValueError), (((-1, 3), (2, 4)), ValueError),
])  # fmt: skip
def test_messages_that_are_no_ascending_pairs_are_refused(given, error):
    message = "pairs of bytes and seconds were wanted, both ascending, at least two"
    with pytest.raises(error, match=rf"^`messages` was .*; {message}\. Give a link as"):
        Topology(1.0, 1.0, 2, messages=given)


def test_a_message_takes_as_long_as_its_neighbours_which_vary():
    points, spread = ((10, 2), (20, 3), (25, 13)), ((1, 2.5), (2, 4), (9, 15))
    links = Topology(1.0, 1.0, 2, messages=points, spread=spread)
    for nbytes, least, most in [
        (5, 0, 2.5),  # smaller than all
        (10, 1, 2.5),
        (12, 1, 4),
        (20, 2, 4),
        (24, 2, 15),
        (25, 9, 15),
        (30, 9 + 10, 15 + 10),  # the last two points go on
    ]:
        assert links.bounds("permute", nbytes) == (least, most), nbytes
        assert least <= links.ring("permute", nbytes) <= most, nbytes
    # Without a spread known sizes are exact, and a formula is everywhere.
    exact = Topology(1.0, 1.0, 2, messages=points)
    assert exact.bounds("permute", 20) == (3, 3)
    assert Topology(2.0, 3.0, 2).bounds("permute", 8) == (7, 7)
    # Of several messages and stages, the sum.
    host = Topology(1.0, 1.0, 2)
    hosts = Topology(1.0, 1.0, 4, inside=host, messages=points, spread=spread)
    within = host.ring("reduce_scatter", 24) + host.ring("all_gather", 12)
    low, high = hosts.bounds("all_reduce", 24, "ring")
    assert (low, high) == (within, within + 2 * 2.5)


def test_a_spread_that_does_not_fit_the_messages_is_refused():
    for given, error in [
        (3, TypeError),
        (((1, 2), (1, 2), (1, 2)), ValueError),
        (((1, 2), (2, 1)), ValueError),
        (((1, 2), (2, "a")), TypeError),
    ]:
        with pytest.raises(error, match=r"^`spread` was .*; a pair of the least and"):
            Topology(1.0, 1.0, 2, messages=((1, 2), (2, 3)), spread=given)
    with pytest.raises(ValueError, match="`algorithm` was 'star'; 'ring', 'tree' or"):
        Topology(1.0, 1.0, 2).bounds("permute", 1, "star")
