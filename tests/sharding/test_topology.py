"""The predicted seconds of collectives are those worked out by hand."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from helpers.cases import each_of

from jaxstrategy.profiling import Topology

KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]


# Each list: ring, tree; latency 1 s, bandwidth 10 B/s.
BY_HAND = {
    (1, 40): dict.fromkeys(KINDS, [0, 0]),
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
    assert topology.fastest(kind, nbytes) == pytest.approx(min(times))
    deep = Topology(bandwidth=1.0, latency=1.0, replicas=2**60 + 1)
    assert deep.tree("all_reduce", 0) == 2 * 61  # not rounded


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


def test_an_unknown_kind_is_told_the_known_ones():
    for kind in ("broadcast", "ALL_REDUCE", None, []):
        for method in ("ring", "tree", "fastest"):
            with pytest.raises(ValueError, match="a collective was wanted") as caught:
                getattr(Topology(1.0, 0.0, 1), method)(kind, 8)
            assert f"`kind` was {kind!r};" in str(caught.value)
            assert all(repr(known) in str(caught.value) for known in KINDS)


# Links of which the times of some messages are known.


@each_of("nbytes", [0, 5, 40, 60, 80, 100, 400, 4000])
def test_a_message_takes_what_lies_between_those_that_are_known(nbytes):
    points = ((10.0, 2.0), (20.0, 3.0), (25.0, 13.0))
    links = Topology(1.0, 1.0, 4, messages=points)
    # Six messages of a quarter each; the last two points go on.
    behind = (2500.0, 13.0 + 2475 * 2)
    wanted = 6 * np.interp(nbytes / 4, *zip(*points, behind, strict=True))
    assert links.ring("all_reduce", nbytes) == pytest.approx(wanted)
    assert links.with_replicas(1).ring("all_reduce", nbytes) == 0
    # On a line they are latency and bandwidth.
    line = tuple((float(size), 3.0 + size / 7) for size in (0, 1, 10, 40))
    known, plain = Topology(1.0, 1.0, 5, messages=line), Topology(7.0, 3.0, 5)
    for kind in KINDS:
        for method in ("ring", "tree"):
            found, wanted = (getattr(x, method)(kind, nbytes) for x in (known, plain))
            assert found == pytest.approx(wanted)


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


# Links of two levels: the predicted seconds are those of the stages, played out.

# 2 hosts of 4; inside 1 s and 100 B/s, between 5 s and 10 B/s; 80 B. Ring, tree, and
# of each stage the faster.
OF_HOSTS = {
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
def test_times_between_hosts_are_those_worked_out_by_hand(kind):
    methods = (TWO_HOSTS.ring, TWO_HOSTS.tree, TWO_HOSTS.fastest)
    assert [method(kind, 80) for method in methods] == pytest.approx(OF_HOSTS[kind])


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
