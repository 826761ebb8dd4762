"""Claim: predicted times of collectives and steps are within a quarter of measured.

Jobs of 2, 4, 8 and 16 processes on this machine, with a device each, measure their
links once, by `strategy.measure_links()`. On these links `strategy.explain` predicts

- all-reduces of 16 KB, where messages count, to 4 MB, where bytes do;
- training steps of two perceptrons (layers x units): the time of the same steps
  without their reduction, as it is measured, and the predicted communication.

Sixteen of them are one program, so that it is not measured how late the processes
come to a call. Sizes between those of the measured links are what is asked for. All
processes share the cores, and so slow each other down: that is part of the links.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from _timing import Comparison, add_options, in_turn, report
from multiprocess import MODELS, loss, of_jax, start_of

SIZES = {"16 KB": 2**14, "256 KB": 2**18, "4 MB": 2**22}
IN_A_ROW = 16
WITHIN = 1.25


class Case:
    """Something that takes time, and that a prediction is made of.

    Args:
      run: takes it once, and waits for the end.
      times: how many of what is predicted that is.
      predicted: microseconds of one; of a step without its local part.
      alone: the local part.
    """

    def __init__(
        self,
        run: Callable[[], object],
        times: int,
        predicted: float,
        alone: Callable[[], object] | None = None,
    ) -> None:
        self._run = run
        self._alone = alone
        self._times = times
        self._predicted = predicted

    def answer(self, question: str) -> float:
        """Microseconds of one: "measured", of the "local" part, or "predicted"."""
        if question == "predicted":
            return self._predicted
        function = self._run if question == "measured" else self._alone
        return 0.0 if function is None else self._microseconds(function)

    def _microseconds(self, function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        return 1e6 * (time.perf_counter() - start) / self._times


def worker() -> None:
    """Answer each line `case question` with microseconds."""
    import jaxstrategy as js

    strategy = js.MultiWorkerMirroredStrategy()
    print("ready", flush=True)
    cases: dict[str, Case] = {}
    for line in sys.stdin:
        name, _, question = line.rstrip("\n").rpartition(" ")
        if question == "prepare":
            cases = prepared(strategy)
            found = 0.0
        else:
            found = cases[name].answer(question)
        print("took", found, flush=True)


def prepared(strategy: Any) -> dict[str, Case]:
    """All cases, with predictions, and compiled."""
    links = strategy.measure_links()
    cases = {name: all_reduces(strategy, links, size) for name, size in SIZES.items()}
    for name, model in MODELS.items():
        cases[name] = steps(strategy, links, *model)
    for case in cases.values():
        case.answer("measured")
        case.answer("local")
    return cases


def all_reduces(strategy: Any, links: Any, nbytes: int) -> Case:
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
    predicted = 1e6 * told.communication_time(links, "ring") / IN_A_ROW
    program = strategy.run(step)
    return Case(lambda: jax.block_until_ready(program(x)), IN_A_ROW, predicted)


def steps(strategy: Any, links: Any, layers: int, units: int) -> Case:
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
    predicted = 1e6 * told.communication_time(links, "ring") / IN_A_ROW
    forms = [strategy.run(in_a_row(step)) for step in (reduced, local)]
    run, alone = (
        lambda program=program: jax.block_until_ready(program(weights, x))
        for program in forms
    )
    return Case(run, IN_A_ROW, predicted, alone)


def measured(count: int, args: argparse.Namespace) -> Iterator[Comparison]:
    """Comparisons of what `count` processes predict and measure."""
    with of_jax(count, 1, (), script=__file__) as group:
        group.ask("prepare")
        for name in (*SIZES, *MODELS):
            what = "all-reduce" if name in SIZES else "step"
            asked = {
                question: lambda line=f"{name} {question}": group.ask(line)
                for question in ("measured", "local", "predicted")
            }
            times = in_turn(asked, args.rounds, args.seconds)
            pairs = zip(times["local"], times["predicted"], strict=True)
            yield Comparison(
                f"{name}, {count} processes",
                f"{what}, to its prediction",
                "us",
                {
                    "measured": times["measured"],
                    "predicted": [local + told for local, told in pairs],
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
    add_options(parser, rounds=20, seconds=3.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    report((each for count in args.processes for each in measured(count, args)), args)


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["--worker"] else main()
