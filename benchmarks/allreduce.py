"""Claim: reducing a tree in packs is faster than `lax.psum`, and never slower.

The sum over simulated CPU devices of trees of float32 arrays, in these forms:

- `run`: `all_reduce` in `strategy.run`;
- `psum`: `lax.psum(tree)` in `jax.jit(jax.shard_map(...))`, written by hand;
- `leaves`: the same with one `lax.pmean` for each array;
- `again`: `psum` once more, another compiled program: how far to trust a ratio.

The forms take turns in one process. Measured are, for each tree,

- in a loop: one of several reductions in one program, each of what the last one made;
- by itself: a program of one reduction, with the call and the wait for its results.

The trees are of arrays of one size, and of the shapes of well-known networks. With
`--largest` and `--pack` other ways to pack are measured, against `psum` too.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from _shapes import NETWORKS, Shape, count
from _timing import Comparison, add_options, in_turn, report
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxstrategy as js
from jaxstrategy._src.reductions.cross_device_ops import CrossDeviceOps, PlannedOps
from jaxstrategy._src.reductions.packing import Packing
from jaxstrategy._src.reductions.plan import Plan

PyTree = Any
Reduce = Callable[[PyTree], PyTree]

LOOP, ALONE = "in a loop", "by itself"
# At most so many times the time of `psum`, on any tree.
TARGET = 1.03
# The same for trees of small arrays, in a loop on eight devices.
SMALL_TARGET = 1 / 3
SMALL = 4 * 2**10

KB, MB = 2**10, 2**20
# Number of arrays, and bytes of each.
GRID = [
    *itertools.product((10, 100, 1000), (1 * KB, 4 * KB, 16 * KB)),
    *itertools.product((100,), (8 * KB, 32 * KB, 64 * KB, 256 * KB)),
    (50, 1 * MB),
    (4, 16 * MB),
    (1, 64 * MB),
]

# A loop has so many turns that it moves so many bytes per replica, within bounds.
LOOP_BYTES = 4 * MB
TURNS = range(2, 11)
# Trees larger than this are reduced by themselves only: a loop holds them twice.
LARGEST_LOOP = 128 * MB


@dataclasses.dataclass(frozen=True)
class Case:
    """A tree.

    Attributes:
      name: of the tree.
      shapes: of its arrays.
    """

    name: str
    shapes: Sequence[Shape]

    @property
    def nbytes(self) -> int:
        """Of the tree of one replica."""
        return 4 * count(self.shapes)

    @property
    def is_small(self) -> bool:
        """Whether all arrays are."""
        return all(4 * count([shape]) <= SMALL for shape in self.shapes)

    @property
    def turns(self) -> int:
        """Of the loop."""
        return min(max(LOOP_BYTES // self.nbytes, TURNS[0]), TURNS[-1])

    def trees(self, strategy: js.Strategy) -> PyTree:
        """Some numbers for each replica, as `PerReplica`s."""
        n = strategy.num_replicas_in_sync
        draw = np.random.default_rng(0)
        return tuple(
            strategy.per_replica(draw.random((n, *shape), np.float32))
            for shape in self.shapes
        )


def cases() -> dict[str, Case]:
    """All of them."""
    found = [Case(name, shapes) for name, shapes in NETWORKS.items()]
    for number, size in GRID:
        name = f"{number} x {_size(size)}"
        found.append(Case(name, [(size // 4,)] * number))
    return {case.name: case for case in found}


def repeated(reduce: Reduce, turns: int) -> Reduce:
    """`turns` reductions, one after the other."""

    def step(tree: PyTree) -> PyTree:
        def turn(_: Any, carry: PyTree) -> PyTree:
            total = reduce(carry)
            return jax.tree.map(lambda x, s: x + 0.01 * s, tree, total)

        return lax.fori_loop(0, turns, turn, tree)

    return step


@dataclasses.dataclass(frozen=True)
class Tried(PlannedOps):
    """Reductions that pack as they are told."""

    packing: Packing

    def plan(self, replicas: Any) -> Plan:
        return Plan(self.packing)


Program = Callable[[], object]


def with_run(
    case: Case,
    devices: Sequence[jax.Device],
    trees: PyTree,
    quantity: str,
    ops: CrossDeviceOps | None = None,
) -> Program:
    """As a user of jaxstrategy writes it."""
    strategy = js.MirroredStrategy(devices, ops)

    def reduce(tree: PyTree) -> PyTree:
        return js.get_replica_context().all_reduce("sum", tree)

    step = repeated(reduce, case.turns) if quantity == LOOP else reduce
    return functools.partial(strategy.run(step), trees)


def by_hand(
    case: Case,
    devices: Sequence[jax.Device],
    trees: PyTree,
    quantity: str,
    reduce: Reduce,
) -> Program:
    """With JAX alone."""
    mesh = js.MirroredStrategy(devices).mesh

    def step(stacked: PyTree) -> PyTree:
        tree = tuple(array.reshape(array.shape[1:]) for array in stacked)
        if quantity == LOOP:
            done = repeated(reduce, case.turns)(tree)
            return jax.tree.map(lambda array: array[None], done)
        return reduce(tree)

    out = P("replica") if quantity == LOOP else P()
    function = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=P("replica"), out_specs=out, check_vma=False
        )
    )
    return functools.partial(function, tuple(value.stacked for value in trees))


def _psum(tree: PyTree) -> PyTree:
    return lax.psum(tree, "replica")


def _pmean(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: lax.pmean(leaf, "replica"), tree)


def compare(
    case: Case,
    devices: Sequence[jax.Device],
    quantity: str,
    args: argparse.Namespace,
    tried: Sequence[Packing],
) -> list[Comparison]:
    """All forms of one case."""
    trees = case.trees(js.MirroredStrategy(devices))
    given = case, devices, trees, quantity
    ours = {"run": with_run(*given)}
    ours |= {_packing_name(p): with_run(*given, Tried(p)) for p in tried}
    theirs = {
        name: by_hand(*given, reduce)
        for name, reduce in (("psum", _psum), ("leaves", _pmean), ("again", _psum))
    }
    times = in_turn(
        {
            name: functools.partial(seconds, program)
            for name, program in (ours | theirs).items()
            if seconds(program)  # compiles it
        },
        args.rounds,
        args.seconds,
    )
    turns = case.turns if quantity == LOOP else 1
    times = {name: [1e6 * t / turns for t in each] for name, each in times.items()}
    is_easy = case.is_small and quantity == LOOP and len(devices) == 8
    return [
        Comparison(
            f"{case.name}, {len(devices)} devices" + (f", {name}" if tried else ""),
            quantity,
            "us",
            {"run": times[name]} | {each: times[each] for each in theirs},
            SMALL_TARGET if is_easy else TARGET,
        )
        for name in ours
    ]


def seconds(program: Program) -> float:
    """Until all results are there."""
    start = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - start


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    """All comparisons that were asked for."""
    devices = js.simulate(max(args.devices))
    tried = [Packing(*sizes) for sizes in itertools.product(args.largest, args.pack)]
    for name, case in cases().items():
        if not any(wanted in name for wanted in args.only):
            continue
        for n, quantity in itertools.product(args.devices, args.quantity):
            if quantity == LOOP and case.nbytes > LARGEST_LOOP:
                continue
            jax.clear_caches()  # and what compiled programs hold
            for each in compare(case, devices[:n], quantity, args, tried):
                if args.verbose and each.ratio is not None:
                    print(each.case, quantity, f"{each.ratio.median:.3f}", flush=True)
                yield each


def _packing_name(packing: Packing) -> str:
    return f"{_size(packing.largest)}/{_size(packing.pack)}"


def _size(nbytes: int) -> str:
    if nbytes % MB == 0 and nbytes:
        return f"{nbytes // MB} MB"
    return f"{nbytes // KB} KB" if nbytes % KB == 0 else f"{nbytes} B"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--devices", type=int, nargs="+", default=[2, 4, 8])
    add("--quantity", nargs="+", choices=(LOOP, ALONE), default=(LOOP, ALONE))
    add("--only", nargs="+", default=[""], help="trees with one of these in their name")
    add("--largest", type=int, nargs="+", default=[], help="bytes of an array to pack")
    add("--pack", type=int, nargs="+", default=[4 * MB], help="bytes of a pack")
    add("--verbose", action="store_true", help="print each ratio when it is there")
    add_options(parser, rounds=100, seconds=5.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    print(f"JAX {jax.__version__}; medians (quartiles); ratio: run to psum")
    report(measure(args), args)


if __name__ == "__main__":
    main()
