"""How long a step takes to start: tracing, its analysis, compiling, and a saved step.

python benchmarks/tracing.py [scaling] [analysis] [warm_start]
"""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from _harness import Comparison, benchmark, counted, in_process, in_turn, main, scaled
from _training import (
    AXIS,
    FlaxTask,
    Perceptron,
    Task,
    Training,
    Transformer,
    by_hand,
    mapped,
    pmean,
    pmean_of_each,
    unchanged,
    with_run,
)
from jax.sharding import PartitionSpec as P

import jaxstrategy as js
from jaxstrategy._src import demo
from jaxstrategy._src.tracing.replication.rules import analyse

# Numbers of replicas and of arrays.

FORMS: Mapping[str, Callable[..., Training]] = {
    "run": with_run,
    "shard_map": functools.partial(by_hand, mean=pmean_of_each),
    # The replicas' parameters drift apart, which JAX is told to overlook.
    "floor": functools.partial(by_hand, mean=unchanged),
}
# What one process found; None: it was stopped.
Found = dict[str, float] | None


@benchmark(
    dict(replicas=(1, 2, 8, 64), leaves=(10, 100, 1000), limit=60, rounds=2),
    dict(replicas=(2, 8), leaves=(10, 100), rounds=1),
)
def scaling(args: Any) -> Iterator[Comparison]:
    """Start-up does not grow with replicas, and `run` adds little to the floor.

    A perceptron of 30 layers x 32 units on simulated devices, each number of them in
    processes of its own: processor seconds of Python's part of the first call (trace)
    and of XLA's (compile); `run` beside the same step by hand without any
    communication; and the memory of a device. And how trace and compile grow with the
    number of arrays, beside `shard_map` by hand. A process that uses more than
    `--limit` seconds is stopped.
    """
    found = start_in_turn(
        [("run", 0, n) for n in args.replicas], args.rounds, args.limit
    )
    few = min((n for n in args.replicas if n > 1), default=0)
    for n in args.replicas:
        own, case = found["run", 0, n], counted(n, "replica")
        for quantity in ("trace", "compile"):
            both, target = {"run": values(own, quantity)}, None
            if n > few > 0:
                both[f"{few} replicas"] = values(found["run", 0, few], quantity)
                target = 1.3
            yield Comparison(case, quantity, "cpu s", both, target, tolerance=0.2)
        names = {"run": "step run", "without communication": "step floor"}
        steps = {label: values(own, name) for label, name in names.items()}
        yield Comparison(case, "step", "ms", scaled(steps, 1e3))
        memory = scaled({"run": values(own, "memory")}, 2**-10)
        yield Comparison(case, "memory of a device", "KiB", memory)
    for leaves in args.leaves:
        cases = [(form, leaves, 8) for form in ("run", "shard_map")]
        # Of many arrays there is one process for each case.
        found = start_in_turn(cases, args.rounds if leaves < 1000 else 1, args.limit)
        of = {form: found[form, leaves, 8] for form in ("run", "shard_map")}
        case = f"{leaves:,} arrays"
        note = f"stopped after {args.limit} s" if None in of["run"] else ""
        for quantity in ("trace", "compile"):
            both = {form: values(each, quantity) for form, each in of.items()}
            options: Any = {"note": note, "tolerance": 0.2}
            yield Comparison(case, quantity, "cpu s", both, **options)
        both = {form: values(each, "trace", "compile") for form, each in of.items()}
        yield Comparison(case, "trace + compile", "cpu s", both, 1.15, note=note)


def values(found: Sequence[Found], *quantities: str) -> list[float]:
    """Of quantities together, a round each; none if the case was stopped."""
    if None in found:
        return []
    return [sum(each[q] for q in quantities) for each in found if each is not None]


def start_in_turn(
    cases: Sequence[tuple[str, int, int]], rounds: int, limit: int
) -> dict[tuple[str, int, int], list[Found]]:
    """What each case found at each turn; one that was stopped is not tried again."""
    found: dict[tuple[str, int, int], list[Found]] = {case: [] for case in cases}
    order, shuffled = random.Random(0), list(cases)
    for _ in range(rounds):
        order.shuffle(shuffled)
        for case in shuffled:
            if None in found[case]:
                continue
            try:
                found[case].append(in_process(started, limit, *case))
            except subprocess.CalledProcessError as error:
                if error.returncode != -signal.SIGXCPU:
                    raise
                found[case].append(None)
    return found


def started(limit: int, form: str, leaves: int, replicas: int) -> dict[str, float]:
    """What this process, which has done nothing yet, finds about one case."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    devices = js.simulate(replicas)
    startup(FORMS[form](task_of(1, 32), devices))  # what JAX does only once
    if leaves:
        return startup(FORMS[form](task_of(leaves // 2, 8), devices))
    task = task_of(30, 32)
    found = startup(FORMS[form](task, devices))
    trainings = {name: make(task, devices) for name, make in FORMS.items()}
    losses = [trainings[name].losses(3) for name in ("run", "shard_map")]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    bursts = {name: lambda t=t: t.burst(5) for name, t in trainings.items()}
    for burst in bursts.values():
        burst()
    times = in_turn(bursts, sys.maxsize, 1.5)
    return found | {f"step {name}": float(np.median(t)) for name, t in times.items()}


def task_of(layers: int, units: int) -> Task:
    """A perceptron of Flax, whose first parameters no trace makes."""
    task = FlaxTask(Perceptron(layers, units), optax.sgd(0.1), 8)
    draw = np.random.default_rng(0)
    params = {
        f"{i}": {
            "kernel": draw.normal(0, units**-0.5, (units, units)).astype(np.float32),
            "bias": np.zeros(units, np.float32),
        }
        for i in range(layers)
    }
    state = {"params": params, "slots": task.optimizer.init(params)}
    return Task(lambda: state, task.batch, task.step_with)


def startup(training: Training) -> dict[str, float]:
    """Processor seconds to trace and to compile a new step, and bytes per device."""
    jax.clear_caches()
    whole = jax.jit(training.step, donate_argnums=0)
    start = time.process_time()
    lowered = whole.lower(training.state, *training.batch)
    traced = time.process_time()
    memory = (compiled := lowered.compile()).memory_analysis()
    done = time.process_time()
    del compiled
    assert memory is not None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    size = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
    return {"trace": traced - start, "compile": done - traced, "memory": float(size)}


# A process that is started again.


@benchmark(dict(rounds=1))
def warm_start(args: Any) -> Iterator[Comparison]:
    """A first call of a saved step, or a cached one, costs 0.2 of one that compiles.

    Fresh processes take turns: one compiles the demo's step, one finds its program in
    JAX's compilation cache, one loads a step that was compiled ahead of time and saved.
    Measured is the processor time from there until the first results are there.
    """
    env = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        call = functools.partial(in_process, first_call, folder, **env)
        for how in ("save", "cache"):
            call(how)
        ways = {how: functools.partial(call, how) for how in ("saved", "cache", "cold")}
        found = in_turn(ways, args.rounds)
    losses = {loss for each in found.values() for _, loss in each}
    if len(losses) != 1:
        sys.exit(f"the first calls have different losses: {losses}")
    seconds = {how: [second for second, _ in each] for how, each in found.items()}
    for how, name in (("saved", "a saved step"), ("cache", "the compilation cache")):
        both = {"again": seconds[how], "compiled": seconds["cold"]}
        case, quantity = f"the demo's step, {name}", "first call of a new process"
        # Single calls in processes that start differ by much.
        yield Comparison(case, quantity, "cpu s", both, 0.2, tolerance=0.3)


def first_call(folder: str, how: str) -> tuple[float, float]:
    """The processor seconds of a first call in a new process, and the loss."""
    if how == "cache":
        js.experimental.compilation_cache(os.path.join(folder, "cache"))
    strategy = js.MirroredStrategy()
    options = demo.Arguments(**vars(demo.make_parser().parse_args([])))
    state = demo.initial_state(strategy, options)
    examples, _ = demo.load()
    batches = js.batches(examples, options.batch_size, shuffle=0)
    batch = next(iter(strategy.experimental_distribute_dataset(batches)))
    step, saved = demo.training_step(strategy), os.path.join(folder, "saved")
    jax.block_until_ready((state, batch))
    start = time.process_time()
    if how == "save":
        strategy.compile(step, (state, *batch)).save(saved)
        return 0.0, 0.0
    if how == "saved":
        step = strategy.load_compiled(saved, step, (state, *batch))
    _, loss = jax.block_until_ready(step(state, *batch))
    return time.process_time() - start, float(loss)


# The analysis of what is mirrored.


@benchmark(dict(blocks=(6,), rounds=2, seconds=20.0))
def analysis(args: Any) -> Iterator[Comparison]:
    """Proving what is mirrored takes at most a tenth of tracing.

    Of the training step of a transformer, against the time that JAX takes to trace it.
    That the proof is right, and exact, is what `tests/proof` has.
    """
    mesh = js.MirroredStrategy(js.simulate(4)).mesh
    cases = [("loop", blocks) for blocks in args.blocks]
    cases += [(variant, max(args.blocks)) for variant in ("scan", "jit", "remat")]
    for variant, blocks in cases:
        task = FlaxTask(Transformer(32, 8, blocks, variant), optax.adam(1e-3), 2, 4)
        both = {"both": functools.partial(analysed, task, mesh)}
        turns = in_turn(both, args.rounds, args.seconds)["both"]
        analysis, tracing = zip(*turns, strict=True)
        found = scaled({"analysis": analysis, "tracing": tracing}, 1e3)
        yield Comparison(f"{blocks} blocks, {variant}", "time", "ms", found, 0.10)


def analysed(task: FlaxTask, mesh: jax.sharding.Mesh) -> tuple[float, float]:
    """Seconds of the analysis and of tracing."""
    step = mapped(task.step_with(pmean), mesh, (P(), P(AXIS), P(AXIS)))
    state = jax.eval_shape(task.build, jax.random.key(0))
    batch = [x.reshape(-1, *x.shape[2:]) for x in task.batch(mesh.size)]
    jax.clear_caches()
    start = time.perf_counter()
    outer = jax.make_jaxpr(step)(state, *batch)
    tracing = time.perf_counter() - start
    (eqn,) = outer.jaxpr.eqns
    varies = [spec != P() for spec in eqn.params["in_specs"]]
    start = time.perf_counter()
    outputs = analyse(eqn.params["jaxpr"], varies, AXIS, mesh.size).outputs
    seconds = time.perf_counter() - start
    assert not any(each is None or each.varies for each in outputs), "all is reduced"
    return seconds, tracing


BENCHMARKS = [scaling, analysis, warm_start]

if __name__ == "__main__":
    main(BENCHMARKS)
