"""Claim: several steps per call cost the host what a scan written by hand costs.

One small training step (that of `dispatch.py`: a perceptron, plain gradient descent,
gradients averaged over the replicas) over the same batches, each already on simulated
CPU devices, in three forms:

- `several`: `strategy.several(step)`, given a tuple of k batches;
- `shard_map`: `jax.jit(jax.shard_map(...))` written by hand over the same mesh, given
  the same tuple, which it stacks and scans over;
- `run`: a loop in Python over k calls of a function decorated with `strategy.run`.

The forms take turns in one process; the state flows from call to call. Measured are, by
the step,

- dispatch: how long the host is busy, on idle devices;
- end to end: the calls and the wait for their results.

A call is one of `run`, so that for small k its target for dispatch is that of
`dispatch.py`.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from _timing import Comparison, add_options, in_turn, report
from dispatch import Model, step_with
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

PyTree = Any

QUANTITIES = ("dispatch", "end to end")

# Calls that a form makes in each turn; their median counts.
BURST = 5


class Loop:
    """A training loop with one form of k steps."""

    def __init__(self, steps: Callable[..., Any], params: PyTree, batches: Any) -> None:
        self._steps = steps
        self._params = params
        self._batches = batches

    def times(self) -> tuple[float, float]:
        """Seconds of k more steps until they are dispatched, and until they are done.

        By the step.
        """
        start = time.perf_counter()
        results = self._steps(self._params, self._batches)
        dispatched = time.perf_counter()
        jax.block_until_ready(results)
        done = time.perf_counter()
        self._params, _ = results
        k = len(self._batches)
        return (dispatched - start) / k, (done - start) / k

    def burst(self) -> tuple[float, float]:
        """The medians of `times` over a few calls."""
        dispatch, end = zip(*(self.times() for _ in range(BURST)), strict=True)
        return statistics.median(dispatch), statistics.median(end)


def ours(params: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
    """A step as a user of jaxstrategy writes it; inputs are targets too."""
    return step_with(lambda tree: js.get_replica_context().all_reduce("mean", tree))(
        params, batch, batch
    )


def with_several(model: Model, devices: Sequence[jax.Device], k: int) -> Loop:
    """One call of `strategy.several`."""
    strategy = js.MirroredStrategy(devices)
    batches = [strategy.per_replica({"x": model.batch(len(devices))})["x"]] * k
    return Loop(strategy.several(ours), strategy.mirror(model.params()), tuple(batches))


def with_run(model: Model, devices: Sequence[jax.Device], k: int) -> Loop:
    """k calls of a step."""
    strategy = js.MirroredStrategy(devices)
    batches = [strategy.per_replica({"x": model.batch(len(devices))})["x"]] * k
    step = strategy.run(ours)

    def steps(params: PyTree, batches: Any) -> tuple[PyTree, Any]:
        losses = []
        for batch in batches:
            params, loss = step(params, batch)
            losses.append(loss)
        return params, losses

    return Loop(steps, strategy.mirror(model.params()), tuple(batches))


def by_hand(model: Model, devices: Sequence[jax.Device], k: int) -> Loop:
    """One call with JAX alone."""
    mesh = js.MirroredStrategy(devices).mesh
    step = step_with(lambda tree: jax.lax.pmean(tree, "replica"))

    def steps(params: PyTree, batches: Any) -> tuple[PyTree, jax.Array]:
        return jax.lax.scan(
            lambda params, x: step(params, x, x), params, jnp.stack(batches)
        )

    compiled = jax.jit(
        jax.shard_map(
            steps,
            mesh=mesh,
            in_specs=(P(), P("replica")),
            out_specs=(P(), P()),
            check_vma=False,
        )
    )
    rows = model.batch(len(devices)).reshape(-1, model.units)
    batch = jax.device_put(rows, NamedSharding(mesh, P("replica")))
    params = jax.device_put(model.params(), NamedSharding(mesh, P()))
    return Loop(compiled, params, (batch,) * k)


# The first is held against the second.
FORMS = {"several": with_several, "shard_map": by_hand, "run": with_run}


def compare(
    model: Model, devices: Sequence[jax.Device], k: int, args: argparse.Namespace
) -> list[Comparison]:
    """Dispatch and end-to-end time of a step, k at a time."""
    loops = {name: make(model, devices, k) for name, make in FORMS.items()}
    for loop in loops.values():
        loop.burst()  # compiles it
    bursts = {name: loop.burst for name, loop in loops.items()}
    times = in_turn(bursts, args.rounds, args.seconds)
    return [
        Comparison(
            f"{len(devices)} devices, k = {k}",
            quantity,
            "us",
            {
                name: [1e6 * both[index] for both in of_form]
                for name, of_form in times.items()
            },
            1.10 if quantity == "dispatch" and k < 10 else 1.03,
        )
        for index, quantity in enumerate(QUANTITIES)
    ]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--k", type=int, nargs="+", default=[1, 2, 10, 50], help="steps in a call")
    add("--devices", type=int, nargs="+", default=[2, 4, 8])
    add("--layers", type=int, default=5, help="of the perceptron, two leaves each")
    add_options(parser, rounds=200, seconds=12.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    devices = js.simulate(max(args.devices))
    print(f"JAX {jax.__version__}; medians (quartiles) of a step; ratio: to shard_map")
    comparisons = (
        comparison
        for n in args.devices
        for k in args.k
        for comparison in compare(Model(args.layers), devices[:n], k, args)
    )
    report(comparisons, args)


if __name__ == "__main__":
    main()
