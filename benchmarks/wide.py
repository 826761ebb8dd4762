"""Claim: the first reduction of a wide tree costs less than by hand, and grows with it.

Trees of some thousands of leaves, outside of steps, of

- `few types`: five types of arrays, as the layers of a network have;
- `many types`: no two arrays of one shape;

are reduced for the first time by

- `reduce`: `strategy.reduce("sum", tree)`;
- `by hand`: `jax.jit(jax.shard_map(...))` with one `lax.psum` of the tree.

JAX's caches are emptied before each turn. Measured are processor seconds of the first
call, compiling included. By hand 10,000 leaves take over 10 minutes: beyond `--most`
leaves that form is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from _timing import Comparison, add_options, in_turn, report
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxstrategy as js

LAYER = ((64, 64), (64,), (3, 3, 16, 16), (16,), (256, 10))
KINDS = ("few types", "many types")


def shapes(kind: str, count: int) -> list[tuple[int, ...]]:
    """Those of the leaves of a tree."""
    if kind == "few types":
        return [LAYER[k % len(LAYER)] for k in range(count)]
    return [(k % 200 + 1, k // 200 + 1) for k in range(count)]


class Tree:
    """The versions of a tree, and the ways to reduce it."""

    def __init__(self, strategy: js.MirroredStrategy, kind: str, count: int) -> None:
        n = strategy.num_replicas_in_sync
        self._strategy = strategy
        self._tree = [
            strategy.per_replica(np.ones((n, *shape), np.float32))
            for shape in shapes(kind, count)
        ]
        self._stacked = [leaf.stacked for leaf in self._tree]
        jax.block_until_ready(self._stacked)

    def reduce(self) -> Sequence[jax.Array]:
        return self._strategy.reduce("sum", self._tree)

    def by_hand(self) -> Sequence[jax.Array]:
        def total(leaves: list[jax.Array]) -> list[jax.Array]:
            return lax.psum([leaf[0] for leaf in leaves], "replica")

        mesh = self._strategy.mesh
        program = jax.shard_map(
            total, mesh=mesh, in_specs=P("replica"), out_specs=P(), check_vma=False
        )
        return jax.jit(program)(self._stacked)


def first(call: Callable[[], Sequence[jax.Array]]) -> Callable[[], float]:
    """A measure of the processor seconds of its first call."""

    def measure() -> float:
        jax.clear_caches()
        start = time.process_time()
        results = jax.block_until_ready(call())
        seconds = time.process_time() - start
        n = len(jax.devices())
        if any(float(result.ravel()[0]) != n for result in (results[0], results[-1])):
            raise AssertionError(f"a sum of {n} ones was {results[0]}")
        return seconds

    return measure


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    strategy = js.MirroredStrategy(js.simulate(args.devices))
    for kind in KINDS:
        for count in args.leaves:
            tree = Tree(strategy, kind, count)
            forms = {"reduce": first(tree.reduce), "by hand": first(tree.by_hand)}
            if count > args.most:
                del forms["by hand"]
            values = in_turn(forms, args.rounds if count <= args.most else 1)
            yield Comparison(
                f"{count} leaves, {kind}",
                "first reduction",
                "cpu s",
                values if count <= args.most else {**values, "by hand": []},
                1.0 if count <= args.most else None,
                tolerance=0.2,
            )


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--leaves", type=int, nargs="+", default=[500, 2000, 10000])
    add("--most", type=int, default=2000, help="leaves that are reduced by hand")
    add("--devices", type=int, default=8)
    add_options(parser, rounds=2)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    report(measure(args), args)


if __name__ == "__main__":
    main()
