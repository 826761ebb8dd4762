"""Several processes of this machine: steps, predicted times, and the coordinator.

    python benchmarks/processes.py [multiprocess] [predictions] [coordinator]

The forms take turns in the same processes; other programs take theirs while these wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _others
import jax
import jax.numpy as jnp
import numpy as np
from _harness import (
    Comparison,
    Workers,
    benchmark,
    counted,
    in_turn,
    main,
    median_seconds,
    scaled,
)
from _training import (
    PyTree,
    all_reduce_mean,
    by_hand,
    perceptron,
    pmean,
    unchanged,
    with_run,
)
from jax.flatten_util import ravel_pytree

import jaxstrategy as js
from jaxstrategy._src.tracing import step_agreement

ROWS = 32
MODELS = {"4 x 64": (4, 64), "3 x 512": (3, 512)}


def job(make: Callable[..., Any], args: Sequence[Any], count: int, devices: int = 1):
    """Starts a job of so many processes of JAX, which answer by what `make` makes."""
    env = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAXSTRATEGY_COORDINATOR": f"127.0.0.1:{_others.free_port()}",
        "JAXSTRATEGY_NUM_PROCESSES": str(count),
    }
    envs = [{**env, "JAXSTRATEGY_PROCESS_ID": str(rank)} for rank in range(count)]
    return Workers(make, [args] * count, envs)


def raveled_pmean(tree: PyTree) -> PyTree:
    """One `lax.pmean` of one array."""
    flat, back = ravel_pytree(tree)
    return back(pmean(flat))


# Steps.


@benchmark(
    dict(processes=(2,), models=tuple(MODELS), steps=64, rounds=8, seconds=math.inf),
    dict(rounds=5, models=("4 x 64",)),
)
def multiprocess(args: Any) -> Iterator[Comparison]:
    """A step of several processes costs at most 1.05 of a hand-written program's.

    Perceptrons (layers x units), one device a process, as `run`; as `shard_map` by hand
    in the same processes, with one `lax.pmean` of raveled loss and gradients; as `run`
    in one process on as many simulated devices; and as `run` with every step compared
    between the processes (usually one of 64 is).
    """
    for name in args.models:
        for count in args.processes:
            with contextlib.ExitStack() as stack:
                yield from compare_steps(name, count, stack, args)


def compare_steps(
    name: str, count: int, stack: contextlib.ExitStack, args: Any
) -> Iterator[Comparison]:
    """Microseconds of a step on `count` processes, of the slowest of them."""
    groups, model = {}, MODELS[name]
    jobs = stack.enter_context(job(trainings, model, count))
    for form in ("run", "shard_map", "compared")[: 3 if count > 1 else 2]:
        groups[form] = jobs, form
    if count > 1:
        one = stack.enter_context(job(trainings, model, 1, count))
        groups["one process"] = one, "run"
    measures = {
        form: lambda group=group, what=what: max(group.ask(what, args.steps))
        for form, (group, what) in groups.items()
    }
    for measure in measures.values():
        measure()  # compiles
    found = scaled(in_turn(measures, args.rounds, args.seconds), 1e6)
    for other in [*found][1:]:
        values = {"run": found["run"], other: found[other]}
        case, quantity = f"{name}, {counted(count, 'process')}", f"run / {other}"
        yield Comparison(
            case, quantity, "us", values, 1.05 if other == "shard_map" else None
        )


def trainings(layers: int, units: int) -> Callable[[str, int], float]:
    """Answers a form and a number of steps with the seconds of each."""
    strategy, task = js.MultiWorkerMirroredStrategy(), perceptron(layers, units, ROWS)
    forms = {
        "run": with_run(task, strategy),
        "shard_map": by_hand(task, strategy, mean=raveled_pmean),
    }
    if jax.process_count() > 1:
        usual, step_agreement._EACH = step_agreement._EACH, 1
        every = js.MultiWorkerMirroredStrategy()
        executor: Any = every._executor
        executor.agreement._each = 1
        step_agreement._EACH = usual
        forms["compared"] = with_run(task, every)
    # More than 8 in flight hang where JAX is older than 0.12.
    return lambda form, steps: float(
        np.mean([forms[form].burst(8) for _ in range(steps // 8)])
    )


# Predictions.

SIZES = {"16 KB": 2**14, "256 KB": 2**18, "4 MB": 2**22}
IN_A_ROW = 16


@benchmark(
    dict(processes=(2, 4), rounds=5, seconds=30.0), dict(processes=(2,), rounds=2)
)
def predictions(args: Any) -> Iterator[Comparison]:
    """Predicted times of collectives and steps are within a quarter of measured.

    On links that processes measure by `measure_links()`, `explain` predicts all-reduces
    of 16 KB, where messages count, to 4 MB, where bytes do, and training steps: the
    time of the same steps without their reduction, as it is measured, and the
    communication. All is measured in each turn, in a random order. Sixteen are one
    program, which begins when all processes have come out of an all-reduce: how late
    they come to a call is left out.
    """
    order, names = random.Random(0), (*SIZES, *MODELS)

    def turn(workers: Workers) -> dict[tuple[str, str], float]:
        asked = [(name, how) for name in names for how in ("measured", "local")]
        asked.append(("", "links"))
        order.shuffle(asked)
        asked += [(name, "predicted") for name in names]
        return {each: max(workers.ask(*each)) for each in asked}

    for count in args.processes:
        with job(predictor, (), count) as workers:
            measures = {"all": lambda w=workers: turn(w)}
            turns = in_turn(measures, args.rounds, args.seconds)["all"]
        for name in names:
            what = "all-reduce" if name in SIZES else "step"
            values = {
                "measured": [found[name, "measured"] for found in turns],
                "predicted": [
                    found[name, "local"] + found[name, "predicted"] for found in turns
                ],
            }
            yield Comparison(
                f"{name}, {count} processes",
                f"{what}, to its prediction",
                "us",
                values,
                1.25,
                least=1 / 1.25,
                tolerance=0.3,
            )


@dataclasses.dataclass(frozen=True)
class Case:
    """Something that takes time, `IN_A_ROW` times, and what `explain` says of it."""

    run: Callable[[], object]
    explained: Any
    local: Callable[[], object] | None = None


def predictor() -> Callable[[str, str], float]:
    """Answers a case and a question, or "links", with microseconds."""
    strategy = js.MultiWorkerMirroredStrategy()

    def case_of(steps: Sequence[Any], *args: Any) -> Case:
        explained = strategy.explain(steps[0], args, compiled=False)
        programs = [strategy.run(step) for step in steps]
        calls = [lambda p=p: jax.block_until_ready(p(*args)) for p in programs]
        return Case(calls[0], explained, *calls[1:])

    def in_a_row(step: Callable[..., Any]) -> Callable[..., Any]:
        return lambda carry, *args: jax.lax.scan(
            lambda carry, _: step(carry, *args), carry, length=IN_A_ROW
        )

    cases = {}
    for name, nbytes in SIZES.items():
        step = in_a_row(lambda x: (all_reduce_mean(x), None))
        cases[name] = case_of([step], strategy.mirror(jnp.ones(nbytes // 4)))
    for name, model in MODELS.items():
        task = perceptron(*model, ROWS)
        x = strategy.per_replica(task.batch(strategy.num_replicas_in_sync)[0])
        steps = [in_a_row(task.step_with(f)) for f in (all_reduce_mean, unchanged)]
        cases[name] = case_of(steps, strategy.mirror(task.state()), x)
    together = next(iter(cases.values())).run
    links = strategy.measure_links()

    def answer(name: str, question: str) -> float:
        nonlocal links
        if question == "links":
            links = strategy.measure_links()
            return links.latency
        case = cases[name]
        if question == "predicted":
            return 1e6 * case.explained.communication_time(links, "ring") / IN_A_ROW
        function = case.run if question == "measured" else case.local
        if function is None:
            return 0.0
        found = []
        for _ in range(5):
            together()
            found.append(median_seconds(function, 1))
        return 1e6 * float(np.median(found)) / IN_A_ROW

    for name in cases:  # compiles
        answer(name, "measured")
        answer(name, "local")
    return answer


# The coordinator.

# The case, how many a turn, the figure that is wanted a second, and how much one is.
CASES = {
    "trivial": (1000, 3200, 1),
    "fetch": (200, 1000, 1),
    "assign_add": (600, 2100, 1),
    "perceptron": (150, 520, 1),
    "embedding": (200, 830, 1),
    "lookup": (300, 1150, 1),
    "move 1": (100, 1500, 2),
    "move 10": (20, 1200, 20),
    "move 100": (4, 1200, 200),
}


class OurCases(_others.CoordinatorCases):
    """On a `ParameterServerStrategy`."""

    def assigned(self, value: Any) -> None:
        return None

    def one(self) -> Any:
        return jnp.int32(1)

    def perceptron(self) -> jax.Array:
        def loss_of() -> jax.Array:
            h = self._x
            for layer in self._layers[:-1]:
                h = jax.nn.relu(h @ layer)
            logits = jax.nn.log_softmax(h @ self._layers[-1])
            return -jnp.mean(logits[jnp.arange(len(self._y)), self._y])

        loss, gradients = js.value_and_grad(loss_of, self._layers)()
        for layer, gradient in zip(self._layers, gradients, strict=True):
            layer.assign_sub(0.01 * gradient)
        return loss

    def embedding(self) -> jax.Array:
        def loss_of() -> jax.Array:
            rows = js.experimental.embedding_lookup(self._table, self._ids)
            return jnp.mean(rows.sum(1) ** 2)

        loss, found = js.value_and_grad(loss_of, self._table)()
        self._table.scatter_sub(js.IndexedSlices(0.1 * found.values, found.indices))
        return loss

    def lookup(self) -> jax.Array:
        rows = js.experimental.embedding_lookup(self._table, self._ids)
        self._scalar.assign_add(1.0)
        return rows.sum()


@benchmark(
    dict(
        only=tuple(CASES), backend="processes", others_python="", rounds=5, seconds=3.0
    )
)
def coordinator(args: Any) -> Iterator[Comparison]:
    """Functions on workers and variables on servers cost a third of TensorFlow's.

    Two workers and one parameter server are processes of this host, as TensorFlow's. Of
    each case both run as many functions; the figures are microseconds of a function, or
    of a megabyte, both ways. Without `--others-python` they are held against figures of
    an idle machine with two cores.
    """
    with contextlib.ExitStack() as stack:
        strategy = js.ParameterServerStrategy(
            workers=2, parameter_servers=1, backend=args.backend
        )
        stack.callback(strategy.close)
        schedules = js.coordinator.ClusterCoordinator(strategy)
        stack.callback(schedules.close)
        with strategy.scope():
            ours = OurCases(schedules, js.Variable, schedules.function)
        of: dict[str, Callable[..., float]] = {"ours": ours.seconds}
        if args.others_python:
            quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
            start = _others.tensorflow_coordinator
            workers = Workers(start, [()], [quiet], args.others_python)
            stack.enter_context(workers)
            of["TensorFlow"] = lambda *request: workers.ask(*request)[0]
        for case in args.only:
            count, wanted, size = CASES[case]
            measures = {k: functools.partial(f, case, count) for k, f in of.items()}
            turns = in_turn(measures, args.rounds, args.seconds)
            if len(turns) == 1:
                turns["wanted"] = [count * size / wanted] * len(turns["ours"])
            values = scaled(turns, 1e6 / count / size)
            quantity = "a megabyte" if case.startswith("move") else "a function"
            target = 1 / 3 if args.others_python else 1.0
            yield Comparison(case, quantity, "us", values, target)


BENCHMARKS = [multiprocess, predictions, coordinator]

if __name__ == "__main__":
    main(BENCHMARKS)
