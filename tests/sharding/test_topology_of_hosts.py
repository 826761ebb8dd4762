"""Links of two levels: the predicted seconds are those of the stages, played out."""

import pytest
from helpers.cases import each_of
from test_topology import KINDS

from jaxstrategy.profiling import Topology

# Each takes `data[host, local, ...]`, and returns what each replica ends with.


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


@each_of("kind", KINDS)
def test_times_are_those_worked_out_by_hand(kind):
    methods = (TWO_HOSTS.ring, TWO_HOSTS.tree, TWO_HOSTS.fastest)
    assert [method(kind, 80) for method in methods] == pytest.approx(BY_HAND[kind])


def test_the_replicas_of_one_host_use_its_links():
    for n in (1, 3, 4):
        alone = TWO_HOSTS.with_replicas(n)
        assert alone.ring("all_reduce", 80) == HOST.with_replicas(n).ring(
            "all_reduce", 80
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


@each_of("members", [[], [8], [-1, 0]])
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


@each_of("given", [8, "host", (1.0, 1.0, 8)])
def test_what_is_no_topology_is_refused_inside(given):
    with pytest.raises(TypeError, match=r"`inside` was .*; a `Topology` was wanted"):
        Topology(1.0, 1.0, 8, inside=given)
