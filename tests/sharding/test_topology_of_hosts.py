"""Links of two levels: the predicted seconds are those of the stages, played out."""

import numpy as np
import pytest
from test_topology import PLAYERS, RESULTS, Wire

from jaxstrategy import Topology
from jaxstrategy.replicas._topology import KINDS

HOSTS = [(2, 2), (2, 4), (3, 2), (4, 4)]


class Wires:
    """The links inside hosts and between them; each group of replicas has its own."""

    def __init__(self, algorithm):
        self._algorithm = algorithm
        self.inside, self.between = Wire(), Wire()

    def play(self, kind, groups, wire):
        """What each member of each group ends with; all do the same at once."""
        ended = []
        for group in groups:
            own = Wire()
            ended.append(np.stack(PLAYERS[self._algorithm, kind](own, group)))
        wire.largest += own.largest
        return np.stack(ended)


# Each takes `data[host, local, ...]`, and returns what each replica ends with.


def all_reduce(wires, data):
    h, m, n, k = data.shape
    parts = data.reshape(h, m, m, h, k)
    sums = wires.play("reduce_scatter", parts, wires.inside)
    totals = wires.play("all_reduce", sums.swapaxes(0, 1), wires.between)
    whole = wires.play("all_gather", totals.swapaxes(0, 1), wires.inside)
    return whole.reshape(h, m, n, k)


def all_gather(wires, data):
    h, m, *shape = data.shape
    own = wires.play("all_gather", data.swapaxes(0, 1), wires.between)
    whole = wires.play("all_gather", own.swapaxes(0, 1), wires.inside)
    return whole.swapaxes(2, 3).reshape(h, m, h * m, *shape)


def reduce_scatter(wires, data):
    h, m, _, k = data.shape
    parts = data.reshape(h, m, h, m, k).swapaxes(2, 3)
    sums = wires.play("reduce_scatter", parts, wires.inside)
    return wires.play("reduce_scatter", sums.swapaxes(0, 1), wires.between).swapaxes(
        0, 1
    )


def all_to_all(wires, data):
    h, m, n, k = data.shape
    parts = data.reshape(h, m, h, m, k).swapaxes(2, 3)
    met = wires.play("all_to_all", parts, wires.inside)  # [h, m, from m, to h, k]
    out = wires.play(
        "all_to_all", met.swapaxes(2, 3).swapaxes(0, 1), wires.between
    )  # [m, h, from h, from m, k]
    return out.swapaxes(0, 1).reshape(h, m, n, k)


STAGES = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}


# A tree's all-to-all is a bound where a number is no power of two.
CASES = [
    (algorithm, kind, h, m)
    for algorithm in ("ring", "tree")
    for kind in STAGES
    for h, m in HOSTS
    if (algorithm, kind, h) != ("tree", "all_to_all", 3)
]


@pytest.mark.parametrize("algorithm, kind, h, m", CASES)
def test_each_stage_costs_its_messages(algorithm, kind, h, m):
    n = h * m
    data = np.random.default_rng(n).integers(1000, size=(n, n, 3))
    wires = Wires(algorithm)
    out = STAGES[kind](wires, data.reshape(h, m, n, 3))
    wanted = RESULTS[kind](data)
    np.testing.assert_array_equal(out.reshape(wanted.shape), wanted)

    inside = Topology(bandwidth=70.0, latency=1.0, replicas=m)
    topology = Topology(bandwidth=7.0, latency=10.0, replicas=n, inside=inside)
    fast, slow = wires.inside.largest, wires.between.largest
    counted = len(fast) + sum(fast) / 70 + 10 * len(slow) + sum(slow) / 7
    predicted = getattr(topology, algorithm)(kind, data[0].nbytes)
    assert predicted == pytest.approx(counted)


# 2 hosts of 4; inside 1 s and 100 B/s, between 5 s and 10 B/s; 80 B. Ring, tree, and
# of each stage the faster.
BY_HAND = {
    "all_reduce": [
        (3 + 0.6) + (10 + 2) + (3 + 0.6),
        (2 + 0.6) + (10 + 4) + (2 + 0.6),
        (2 + 0.6) + (10 + 2) + (2 + 0.6),
    ],
    "all_gather": [(5 + 8) + (3 + 4.8), (5 + 8) + (2 + 4.8), (5 + 8) + (2 + 4.8)],
    "reduce_scatter": [(3 + 0.6) + (5 + 1), (2 + 0.6) + (5 + 1), (2 + 0.6) + (5 + 1)],
    "all_to_all": [(3 + 0.6) + (5 + 4), (2 + 0.8) + (5 + 4), (2 + 0.8) + (5 + 4)],
    "permute": [5 + 8, 5 + 8, 5 + 8],
}
HOST = Topology(bandwidth=100, latency=1, replicas=4)
TWO_HOSTS = Topology(bandwidth=10, latency=5, replicas=8, inside=HOST)


@pytest.mark.parametrize("kind", KINDS)
def test_times_are_those_worked_out_by_hand(kind):
    methods = (TWO_HOSTS.ring, TWO_HOSTS.tree, TWO_HOSTS.fastest)
    assert [method(kind, 80) for method in methods] == pytest.approx(BY_HAND[kind])


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_ring_moves_as_much_at_two_levels_as_at_one(kind):
    links = Topology(bandwidth=10, latency=0, replicas=4)
    levels = Topology(bandwidth=10, latency=0, replicas=12, inside=links)
    assert levels.ring(kind, 48) == pytest.approx(
        links.with_replicas(12).ring(kind, 48)
    )


def test_between_hosts_an_all_reduce_sends_a_part_of_the_bytes():
    """1/4 of what a network without faster links inside would."""
    fast = Topology(bandwidth=1e30, latency=0, replicas=4)
    slow = Topology(bandwidth=10, latency=0, replicas=8, inside=fast)
    assert slow.ring("all_reduce", 80) == pytest.approx(2 * 1 / 2 * 20 / 10)


def test_the_replicas_of_one_host_use_its_links():
    for n in (1, 3, 4):
        alone = TWO_HOSTS.with_replicas(n)
        assert alone.ring("all_reduce", 80) == HOST.with_replicas(n).ring(
            "all_reduce", 80
        )


def test_a_host_that_is_not_full_counts_as_full():
    assert TWO_HOSTS.with_replicas(5).ring("all_gather", 8) == TWO_HOSTS.ring(
        "all_gather", 8
    )


def test_three_levels():
    chip = Topology(bandwidth=1000, latency=0, replicas=2)
    host = Topology(bandwidth=100, latency=0, replicas=4, inside=chip)
    hosts = Topology(bandwidth=10, latency=0, replicas=8, inside=host)
    # 80 B, halved at each level: on chips, in hosts, between them.
    scattered = 1 / 2 * 80 / 1000 + 1 / 2 * 40 / 100
    gathered = 20 / 100 + 40 / 1000
    assert hosts.ring("all_reduce", 80) == pytest.approx(scattered + 2 + gathered)


def test_the_links_among_some_replicas():
    assert TWO_HOSTS.among([4, 5, 7]) == HOST.with_replicas(3)
    across = TWO_HOSTS.among([1, 5])
    assert across.ring("all_reduce", 80) == pytest.approx(2 * 5 + 2 * 1 / 2 * 80 / 10)
    uneven = TWO_HOSTS.among([0, 1, 2, 6])
    assert uneven.replicas == 6 and uneven.inside == HOST.with_replicas(3)
    assert Topology(1.0, 2.0, 8).among([3, 3, 7]) == Topology(1.0, 2.0, 2)


@pytest.mark.parametrize("members", [[], [8], [-1, 0]])
def test_replicas_that_are_not_there_are_refused(members):
    with pytest.raises(ValueError, match=r"numbers from 0 to 7 were wanted, at least"):
        TWO_HOSTS.among(members)


def test_devices_with_several_replicas_each():
    devices = TWO_HOSTS.with_replicas_per_device(2)
    assert devices == Topology(10.0, 5.0, 4, HOST.with_replicas(2))
    assert TWO_HOSTS.with_replicas_per_device(3).replicas == 3
    assert TWO_HOSTS.with_replicas_per_device(64).ring("all_reduce", 80) == 0
    with pytest.raises(ValueError, match="`replicas` was 0"):
        TWO_HOSTS.with_replicas_per_device(0)


@pytest.mark.parametrize("given", [8, "host", (1.0, 1.0, 8)])
def test_what_is_no_topology_is_refused_inside(given):
    with pytest.raises(TypeError, match=r"`inside` was .*; a `Topology` was wanted"):
        Topology(1.0, 1.0, 8, inside=given)
