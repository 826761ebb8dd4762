"""Claim: 8 bits send a quarter of what exact gradients do, thin matrices far less.

For the gradients of well-known networks on eight simulated CPU devices:

- sent: the bytes that each replica sends in a reduction around a ring, counted from
  what `strategy.explain` says of the step, in all and between groups of four replicas;
- missed: how far the mean of one reduction is from the exact one, and parameters from
  the target after 200 steps of SGD, with what was not sent added to the next gradients
  and without, relative to the target; both for one matrix of normal numbers, of which
  each column has a size of its own between 0.001 and 10;
- time (`--time`): of a reduction by itself, in turn with the exact one. On one host it
  only says what packing the numbers costs: nothing there is slow to send.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _shapes import NETWORKS, Shape
from _timing import Comparison, add_options, in_turn, report
from jax import lax

import jaxstrategy as js
from jaxstrategy.experimental import CommunicationOptions

PyTree = Any

REPLICAS = 8
GROUPS = [[0, 1, 2, 3], [4, 5, 6, 7]]
LEVELS = {"implementation": "hierarchical", "groups": GROUPS}
OPTIONS = {
    "exact": CommunicationOptions(),
    "exact, two levels": CommunicationOptions(**LEVELS),
    "int8": CommunicationOptions(compression="int8"),
    "int8, two levels": CommunicationOptions(compression="int8", **LEVELS),
    "PowerSGD(1)": CommunicationOptions(compression=js.experimental.PowerSGD(1)),
    "PowerSGD(4)": CommunicationOptions(compression=js.experimental.PowerSGD(4)),
}
SENT, BETWEEN = QUANTITIES = ("sent", "sent between groups")
# At most so much of what the exact reduction sends.
TARGET = 0.27
STEPS, RATE = 200, 0.1
SIZE = 64


def reduction(options: CommunicationOptions) -> Callable[..., PyTree]:
    """From gradients and a state to their mean and the next state."""

    def step(grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        context = js.get_replica_context()
        if options.compression is None:
            return context.all_reduce("mean", grads, options), state
        return context.all_reduce_compressed("mean", grads, state, options)

    return step


def state_of(
    strategy: js.Strategy, like: PyTree, options: CommunicationOptions
) -> PyTree:
    """What the reduction needs besides."""
    if options.compression is None:
        return ()
    return strategy.compression_state(like, options)


# Bytes.


def sent(
    strategy: js.Strategy, shapes: Sequence[Shape], options: CommunicationOptions
) -> tuple[float, float]:
    """Bytes that a replica sends, in all and between groups."""
    like = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    grads = [
        js.PerReplica(jax.ShapeDtypeStruct((REPLICAS, *x.shape), x.dtype)) for x in like
    ]
    args = grads, state_of(strategy, like, options)
    found = strategy.explain(reduction(options), args, compiled=False).collectives
    total = between = 0.0
    for each in found:
        members = each.group or REPLICAS
        ring = js.profiling.Topology(bandwidth=1.0, latency=0.0, replicas=members)
        seconds = ring.ring(each.kind, float(each.nbytes)) * (each.times or 1)
        total += seconds
        if each.group == len(GROUPS):
            between += seconds
        elif each.group is None:
            # Around a ring of all replicas two of the links are between groups.
            between += seconds
    return total, between


def compare_sent(strategy: js.Strategy, only: Sequence[str]) -> Iterator[Comparison]:
    """What each network sends, in all and between the groups."""
    for name, shapes in NETWORKS.items():
        if not any(part in name for part in only):
            continue
        exact = sent(strategy, shapes, OPTIONS["exact"])
        for form, options in OPTIONS.items():
            found = sent(strategy, shapes, options)
            for quantity, own, theirs in zip(QUANTITIES, found, exact, strict=True):
                values = {"compressed": [own / 1e6], "exact": [theirs / 1e6]}
                is_claimed = form == "int8" and exact[0] > 1e6 and quantity == SENT
                target = TARGET if is_claimed else None
                yield Comparison(f"{name}, {form}", quantity, "MB", values, target)


# Distances.


def compare_missed(strategy: js.Strategy) -> Iterator[Comparison]:
    """How near means and parameters come to the exact ones."""
    draw = np.random.default_rng(0)
    size = 10 ** draw.uniform(-3, 1, SIZE)
    mean = size * draw.normal(size=(SIZE, SIZE))
    noise = size * draw.normal(size=(REPLICAS, SIZE, SIZE))
    own = strategy.per_replica((mean + noise - noise.mean(0)).astype(np.float32))
    like = np.zeros((SIZE, SIZE), np.float32)
    for form, options in OPTIONS.items():
        reduce = reduction(options)
        state = state_of(strategy, like, options)
        once, _ = strategy.run(reduce, (own, state))
        ends = [
            strategy.run(functools.partial(descend, reduce, remembers), (own, state))
            for remembers in (True, False)
        ]
        far = [np.linalg.norm(x - mean) / np.linalg.norm(mean) for x in (once, *ends)]
        yield Comparison(form, "one mean", "", {"missed by": [float(far[0])]})
        kept = {"with the memory": [float(far[1])], "without": [float(far[2])]}
        yield Comparison(form, f"{STEPS} steps", "", kept)


def descend(
    reduce: Callable[..., PyTree], remembers: bool, own: Any, state: Any
) -> Any:
    """Parameters after SGD from zeros to the mean of what the replicas have."""

    def turn(carry: PyTree, _: None) -> tuple[PyTree, None]:
        w, state = carry
        mean, after = reduce(w - own, state)
        return (w - RATE * mean, after if remembers else state), None

    return lax.scan(turn, (jnp.zeros_like(own), state), length=STEPS)[0][0]


# Time.


def compare(
    strategy: js.Strategy, name: str, shapes: Sequence[Shape], args: argparse.Namespace
) -> list[Comparison]:
    """The time of each form, against the exact reduction."""
    draw = np.random.default_rng(0)
    grads = [
        strategy.per_replica(draw.random((REPLICAS, *shape), np.float32))
        for shape in shapes
    ]
    like = [np.zeros(shape, np.float32) for shape in shapes]

    def seconds(step: Callable[..., PyTree], state: PyTree) -> float:
        start = time.perf_counter()
        jax.block_until_ready(step(grads, state))
        return time.perf_counter() - start

    programs = {
        form: functools.partial(
            seconds,
            strategy.run(reduction(options)),
            state_of(strategy, like, options),
        )
        for form, options in OPTIONS.items()
    }
    for program in programs.values():
        program()  # compiles it
    times = in_turn(programs, args.rounds, args.seconds)
    times = {form: [1e3 * t for t in each] for form, each in times.items()}
    exact = times.pop("exact")
    return [
        Comparison(f"{name}, {form}", "time", "ms", {"run": own, "exact": exact})
        for form, own in times.items()
    ]


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    """All that was asked for."""
    strategy = js.MirroredStrategy(js.simulate(REPLICAS))
    yield from compare_sent(strategy, args.only)
    yield from compare_missed(strategy)
    for name, shapes in NETWORKS.items() if args.time else ():
        if any(part in name for part in args.only):
            yield from compare(strategy, name, shapes, args)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", default=[""], help="networks with one of these in a name")
    add("--time", action="store_true", help="measure times, too")
    add_options(parser, rounds=20, seconds=5.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    # A step for each form is what is asked for.
    warnings.simplefilter("ignore", js.errors.RecompilationWarning)
    print(f"JAX {jax.__version__}")
    report(measure(args), args)


if __name__ == "__main__":
    main()
