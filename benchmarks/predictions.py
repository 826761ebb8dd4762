"""Claim: predicted times of collectives and steps are within a quarter of measured.

Jobs of 2, 4, 8 and 16 processes on this machine, with a device each, measure their
links by `strategy.measure_links()`. On these links `strategy.explain` predicts

- all-reduces of 16 KB, where messages count, to 4 MB, where bytes do;
- training steps of two perceptrons (layers x units): the time of the same steps
  without their reduction, as it is measured, and the predicted communication.

All of that is measured in each turn, in a random order, and the ratio is taken within
the turn: all processes share the cores with whatever else the machine does, and links
that were measured when it did something else predict other times than it takes.

Sixteen of what is measured are one program, which begins when all processes have come
out of an all-reduce: so it is not measured how late the processes come to a call. Of a
turn, the median of a few counts, of the process where it is the largest. Sizes between
those of the measured links are what is asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from _timing import Comparison, add_options, in_turn, report
from multiprocess import MODELS, Group, loss, of_jax, start_of

SIZES = {"16 KB": 2**14, "256 KB": 2**18, "4 MB": 2**22}
IN_A_ROW = 16
REPEATED = 5
WITHIN = 1.25
# Of the first case, whose all-reduces let the processes begin together.
FIRST = next(iter(SIZES))


@dataclasses.dataclass(frozen=True)
class Case:
    """Something that takes time, and that a prediction is made of.

    Attributes:
      run: takes it, `IN_A_ROW` times, and waits for the end.
      told: explains these.
      alone: the local part of it, if it is a step.
    """

    run: Callable[[], object]
    told: Any
    alone: Callable[[], object] | None = None

    def predicted(self, links: Any) -> float:
        """Microseconds of one on these links; of a step without its local part."""
        return 1e6 * self.told.communication_time(links, "ring") / IN_A_ROW

    def measured(self, question: str, together: Callable[[], object]) -> float:
        """Microseconds of one: "measured", or of the "local" part.

        Args:
          question: which.
          together: waits for the other processes.
        """
        function = self.run if question == "measured" else self.alone
        if function is None:
            return 0.0
        found = []
        for _ in range(REPEATED):
            together()
            start = time.perf_counter()
            function()
            found.append(time.perf_counter() - start)
        return 1e6 * statistics.median(found) / IN_A_ROW


def worker() -> None:
    """Answer each line `case question`, or `links`, with microseconds."""
    import jaxstrategy as js

    strategy = js.MultiWorkerMirroredStrategy()
    cases = {name: all_reduces(strategy, size) for name, size in SIZES.items()}
    for name, model in MODELS.items():
        cases[name] = steps(strategy, *model)
    together = cases[FIRST].run
    for case in cases.values():  # compiles
        case.measured("measured", together)
        case.measured("local", together)
    links = strategy.measure_links()
    print("ready", flush=True)
    for line in sys.stdin:
        name, _, question = line.rstrip("\n").rpartition(" ")
        if question == "links":
            links = strategy.measure_links()
            found = 1e6 * links.latency
        elif question == "predicted":
            found = cases[name].predicted(links)
        else:
            found = cases[name].measured(question, together)
        print("took", found, flush=True)


def all_reduces(strategy: Any, nbytes: int) -> Case:
    """Means of an array over the replicas, one after the other in a step."""
    import jax
    import jax.numpy as jnp

    import jaxstrategy as js

    def step(x: Any) -> Any:
        def turn(x: Any, _: None) -> tuple[Any, None]:
            return js.get_replica_context().all_reduce("mean", x), None

        return jax.lax.scan(turn, x, length=IN_A_ROW)[0]

    x = strategy.mirror(jnp.ones(nbytes // 4))
    told = strategy.explain(step, (x,), compiled=False)
    program = strategy.run(step)
    return Case(lambda: jax.block_until_ready(program(x)), told)


def steps(strategy: Any, layers: int, units: int) -> Case:
    """Training steps of a perceptron, with and without the reduction."""
    import jax

    import jaxstrategy as js

    weights, rows = start_of(layers, units)
    x = strategy.experimental_distribute_values_from_function(lambda _: rows)
    weights = strategy.mirror(weights)

    def reduced(weights: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        value, grads = js.get_replica_context().all_reduce("mean", (value, grads))
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, grads), value

    def local(weights: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, grads), value

    def in_a_row(step: Any) -> Any:
        def several(weights: Any, x: Any) -> Any:
            def turn(weights: Any, _: None) -> tuple[Any, Any]:
                return step(weights, x)

            return jax.lax.scan(turn, weights, length=IN_A_ROW)

        return several

    told = strategy.explain(in_a_row(reduced), (weights, x), compiled=False)
    forms = [strategy.run(in_a_row(step)) for step in (reduced, local)]
    run, alone = (
        lambda program=program: jax.block_until_ready(program(weights, x))
        for program in forms
    )
    return Case(run, told, alone)


def turn(group: Group, order: random.Random) -> dict[str, float]:
    """What the processes measure, and predict on the links that they measure."""
    cases = (*SIZES, *MODELS)
    asked = [f"{name} {how}" for name in cases for how in ("measured", "local")]
    asked.append(" links")
    order.shuffle(asked)
    asked += [f"{name} predicted" for name in cases]
    return {line: group.ask(line) for line in asked}


def measured(count: int, args: argparse.Namespace) -> Iterator[Comparison]:
    """Comparisons of what `count` processes predict and measure."""
    order = random.Random(0)
    with of_jax(count, 1, (), script=__file__) as group:
        taking_turns = {"all": lambda: turn(group, order)}
        turns = in_turn(taking_turns, args.rounds, args.seconds)["all"]
    for name in (*SIZES, *MODELS):
        what = "all-reduce" if name in SIZES else "step"
        yield Comparison(
            f"{name}, {count} processes",
            f"{what}, to its prediction",
            "us",
            {
                "measured": [found[f"{name} measured"] for found in turns],
                "predicted": [
                    found[f"{name} local"] + found[f"{name} predicted"]
                    for found in turns
                ],
            },
            WITHIN,
            least=1 / WITHIN,
            tolerance=0.3,
        )


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16])
    add_options(parser, rounds=20, seconds=30.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    report((each for count in args.processes for each in measured(count, args)), args)


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["--worker"] else main()
