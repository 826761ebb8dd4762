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
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
    seconds_of,
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


def free_port() -> int:
    """Returns a port of the loopback address that nobody uses."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def job(make: Callable[..., Any], args: Sequence[Any], count: int, devices: int = 1):
    """Starts a job of so many processes of JAX, which answer by what `make` makes."""
    env = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAXSTRATEGY_COORDINATOR": f"127.0.0.1:{free_port()}",
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

# The case, how many a turn, how many megabytes one moves, and the microseconds of one,
# or of a megabyte, with TensorFlow on two idle cores (2026-11-23, AMD EPYC).
CASES = {
    "trivial": (1000, 1, 853),
    "fetch": (200, 1, 2324),
    "assign_add": (600, 1, 1464),
    "perceptron": (150, 1, 3395),
    "embedding": (200, 1, 2408),
    "lookup": (300, 1, 1856),
    "move 1": (100, 2, 1529),
    "move 10": (20, 20, 880),
    "move 100": (4, 200, 677),
}
LAYERS = ((64, 256), (256, 256), (256, 256), (256, 10))
ROWS_OF_TABLE, WIDTH, BATCH, IDS = 100_000, 64, 64, 8


class Functions:
    """What two workers and one parameter server do, made in the strategy's scope."""

    def __init__(self, coordinator: js.coordinator.ClusterCoordinator) -> None:
        self._coordinator = coordinator
        draw = np.random.default_rng(0)
        self._scalar = js.Variable(0.0)
        self._layers: list[Any] = [
            js.Variable(0.05 * draw.normal(size=shape).astype("float32"))
            for shape in LAYERS
        ]
        table = draw.normal(size=(ROWS_OF_TABLE, WIDTH))
        self._table = js.Variable(table.astype("float32"))
        self._arrays: dict[str, Any] = {
            f"move {size}": js.Variable(np.zeros(size * 250_000, "float32"))
            for size in (1, 10, 100)
        }
        self._x = draw.normal(size=(BATCH, 64)).astype("float32")
        self._y = draw.integers(0, 10, BATCH).astype("int32")
        self._ids = draw.integers(0, ROWS_OF_TABLE, (BATCH, IDS)).astype("int32")
        self._functions: dict[str, Any] = {}

    def seconds(self, case: str, count: int) -> float:
        """How long so many functions take; a few were run before."""
        if case not in self._functions:
            self._functions[case] = self._coordinator.function(self._made(case))
            self._run(case, 4)
        return seconds_of(lambda: self._run(case, count))

    def _run(self, case: str, count: int) -> None:
        for _ in range(count):
            value = self._coordinator.schedule(self._functions[case])
            if case == "fetch":
                value.fetch()
        self._coordinator.join()

    def _made(self, case: str) -> Callable[[], Any]:
        def add(variable: Any, value: Any) -> None:
            variable.assign_add(value)

        if case in self._arrays:
            array = self._arrays[case]
            return lambda: add(array, array + 1.0)
        if case == "assign_add":
            return lambda: add(self._scalar, 1.0)
        if case in ("trivial", "fetch"):
            return lambda: jnp.int32(1)
        return getattr(self, case)

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


@benchmark(dict(only=tuple(CASES), backend="processes", rounds=5, seconds=3.0))
def coordinator(args: Any) -> Iterator[Comparison]:
    """Functions on workers and variables on servers cost a third of TensorFlow's.

    Two workers and one parameter server are processes of this host, as TensorFlow's
    were when it was measured. Microseconds of a function, or of a megabyte, both ways.
    """
    with contextlib.ExitStack() as stack:
        strategy = js.ParameterServerStrategy(
            workers=2, parameter_servers=1, backend=args.backend
        )
        stack.callback(strategy.close)
        schedules = js.coordinator.ClusterCoordinator(strategy)
        stack.callback(schedules.close)
        with strategy.scope():
            functions = Functions(schedules)
        for case in args.only:
            count, size, recorded = CASES[case]
            measures = {"ours": functools.partial(functions.seconds, case, count)}
            turns = in_turn(measures, args.rounds, args.seconds)
            values = scaled(turns, 1e6 / count / size)
            values["TensorFlow, recorded"] = [recorded] * len(turns["ours"])
            quantity = "a megabyte" if case.startswith("move") else "a function"
            yield Comparison(case, quantity, "us", values, 1 / 3)


BENCHMARKS = [multiprocess, predictions, coordinator]

if __name__ == "__main__":
    main(BENCHMARKS)
