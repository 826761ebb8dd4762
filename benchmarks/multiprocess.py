"""Claim: a step of several processes is as fast as JAX can do it by hand.

Perceptrons (layers x units) with a small batch for each replica, one device a process,
on 1, 2 and 4 processes of this machine, as

- `run`: a function decorated with `strategy.run` of a `MultiWorkerMirroredStrategy`,
  which averages loss and gradients with `all_reduce("mean", ...)`;
- `shard_map`: `jax.jit(jax.shard_map(...))` by hand in the same processes, with one
  `lax.pmean` of loss and gradients, raveled into one array;
- `one process`: `run` of a `MirroredStrategy` on as many simulated devices;
- `compared`: `run` with every step compared between the processes, whose difference
  to `run` is what a comparison costs (usually one step of 64 is);
- `torch`: PyTorch's `DistributedDataParallel` with gloo in as many processes, where
  installed (`--others-python`).

The state flows from step to step. The forms take turns in the same processes; `one
process` and `torch` take theirs while the others wait. It prints; only with `--check`
is a missed target a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from _timing import Comparison, add_options, in_turn, report

ROWS = 32
RATE = 0.01
TARGETS = {"run / shard_map": 1.05, "run / torch": 1.0}
MODELS = {"4 x 64": (4, 64), "3 x 512": (3, 512)}

TORCH = """
import json, os, sys, time
import numpy as np, torch, torch.distributed as dist
rank, count, port, layers, units = map(int, sys.argv[1:6])
torch.set_num_threads(max(1, os.cpu_count() // count))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
dist.init_process_group("gloo", rank=rank, world_size=count)
torch.manual_seed(0)
parts = []
for _ in range(layers):
    parts += [torch.nn.Linear(units, units, bias=False), torch.nn.Tanh()]
model = torch.nn.Sequential(*parts)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=%r)
x = torch.randn(%r, units)
def step():
    optimizer.zero_grad(set_to_none=True)
    loss = ((model(x) - x) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss
for line in sys.stdin:
    steps = int(line)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    loss.item()
    print(1e6 * (time.perf_counter() - start) / steps, flush=True)
"""


# What runs in the processes of JAX.


def worker() -> None:
    """Answer each line `form steps` with microseconds a step."""
    import jax

    import jaxstrategy as js
    from jaxstrategy._src.tracing import step_agreement

    layers, units = int(sys.argv[2]), int(sys.argv[3])
    strategy = js.MultiWorkerMirroredStrategy()
    forms = {
        "run": ours(strategy, layers, units),
        "shard_map": by_hand(strategy.devices, layers, units),
    }
    if jax.process_count() > 1:
        usual, step_agreement._EACH = step_agreement._EACH, 1
        every = js.MultiWorkerMirroredStrategy()
        assert every._executor.agreement is not None
        every._executor.agreement._each = 1
        step_agreement._EACH = usual
        forms["compared"] = ours(every, layers, units)
    print("ready", *forms, flush=True)
    for line in sys.stdin:
        name, steps = line.split()
        print("took", forms[name](int(steps)), flush=True)


def start_of(layers: int, units: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Weights of all layers, and rows for one replica."""
    draw = np.random.default_rng(0)
    shape = (units, units)
    weights = [draw.normal(0, units**-0.5, shape) for _ in range(layers)]
    rows = draw.normal(size=(ROWS, units))
    return [w.astype(np.float32) for w in weights], rows.astype(np.float32)


def loss(weights: Sequence[Any], x: Any) -> Any:
    """How far the network is from doing nothing."""
    import jax.numpy as jnp

    out = x
    for w in weights:
        out = jnp.tanh(out @ w)
    return ((out - x) ** 2).mean()


def ours(strategy: Any, layers: int, units: int) -> Callable[[int], float]:
    """Microseconds a step, of some steps in `run`."""
    import jax

    import jaxstrategy as js

    @strategy.run(options=js.RunOptions(donate_argnums=0))
    def step(weights: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        value, grads = js.get_replica_context().all_reduce("mean", (value, grads))
        return jax.tree.map(lambda w, g: w - RATE * g, weights, grads), value

    weights, rows = start_of(layers, units)
    x = strategy.experimental_distribute_values_from_function(lambda _: rows)
    return timed(step, strategy.mirror(weights), x)


def by_hand(devices: Sequence[Any], layers: int, units: int) -> Callable[[int], float]:
    """The same with `jax.jit(jax.shard_map(...))`."""
    import jax
    from jax import lax
    from jax.flatten_util import ravel_pytree
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

    mesh = Mesh(np.asarray(devices), ("r",), axis_types=(AxisType.Auto,))

    def mean(value: Any, grads: Any) -> Any:
        flat, back = ravel_pytree((value, grads))
        return back(lax.pmean(flat, "r"))

    def step(weights: Any, x: Any) -> Any:
        value, grads = mean(*jax.value_and_grad(loss)(weights, x[0]))
        return jax.tree.map(lambda w, g: w - RATE * g, weights, grads), value

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("r")), out_specs=P(), check_vma=False
    )
    weights, rows = start_of(layers, units)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("r"))

    def placed(array: np.ndarray, sharding: Any) -> Any:
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: array[index]
        )

    x = placed(np.broadcast_to(rows, (len(devices), *rows.shape)), split)
    weights = [placed(w, whole) for w in weights]
    return timed(jax.jit(mapped, donate_argnums=0), weights, x)


def timed(step: Callable[..., Any], weights: Any, x: Any) -> Callable[[int], float]:
    """A function of a number of steps: microseconds for each."""
    state = [weights]

    def burst(steps: int) -> float:
        start = time.perf_counter()
        for i in range(steps):
            state[0], value = step(state[0], x)
            if i % 8 == 7:  # more in flight hang where JAX is older than 0.12
                value.block_until_ready()
        float(value)
        return 1e6 * (time.perf_counter() - start) / steps

    return burst


# What asks them.


class Group:
    """Processes that answer together."""

    def __init__(self, commands: Sequence[list[str]], envs: Sequence[dict[str, str]]):
        self._processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, **env},
            )
            for command, env in zip(commands, envs, strict=True)
        ]  # fmt: skip

    def ask(self, line: str) -> float:
        """The slowest one's answer."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return max(float(text.split()[-1]) for text in self.hear("took"))

    def hear(self, word: str) -> list[str]:
        """The next line of each that begins with `word`, or is a number."""
        return [self._line(process, word) for process in self._processes]

    def _line(self, process: Any, word: str) -> str:
        for line in process.stdout:
            if line.startswith(word) or line[0].isdigit():
                return line
        raise RuntimeError(f"{process.args} ended with {process.wait()}")

    def end(self) -> None:
        """Let them go."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait(60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def of_jax(
    count: int, devices: int, given: Sequence[int], script: str = __file__
) -> Iterator[Group]:
    """Processes of JAX that are ready, each given some numbers."""
    port = free_port()
    command = [sys.executable, script, "--worker", *map(str, given)]
    envs = [
        {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAXSTRATEGY_COORDINATOR": f"127.0.0.1:{port}",
            "JAXSTRATEGY_NUM_PROCESSES": str(count),
            "JAXSTRATEGY_PROCESS_ID": str(rank),
        }
        for rank in range(count)
    ]
    group = Group([command] * count, envs)
    group.hear("ready")
    try:
        yield group
    finally:
        group.end()


@contextlib.contextmanager
def of_torch(python: str, count: int, model: tuple[int, int]) -> Iterator[Group]:
    """Processes of PyTorch that are ready."""
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "ddp.py")
        script.write_text(TORCH % (RATE, ROWS))
        numbers = [count, free_port(), *model]
        group = Group(
            [[python, str(script), str(k), *map(str, numbers)] for k in range(count)],
            [{}] * count,
        )
        try:
            yield group
        finally:
            group.end()


def has_torch(python: str) -> bool:
    return not subprocess.run(
        [python, "-c", "import torch.distributed"], capture_output=True
    ).returncode


def measured(count: int, name: str, args: argparse.Namespace) -> Iterator[Comparison]:
    """Comparisons on `count` processes."""
    model = MODELS[name]
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(of_jax(count, 1, model))
        measures = {
            form: lambda form=form: group.ask(f"{form} {args.steps}")
            for form in ("run", "shard_map", *(["compared"] * (count > 1)))
        }
        if count > 1:
            one = stack.enter_context(of_jax(1, count, model))
            measures["one process"] = lambda: one.ask(f"run {args.steps}")
        if has_torch(args.others_python):
            ddp = stack.enter_context(of_torch(args.others_python, count, model))
            measures["torch"] = lambda: ddp.ask(str(args.steps))
        for measure in measures.values():
            measure()  # compiles
        found = in_turn(measures, args.rounds, args.seconds)
    case = f"{name}, {count} process{'es' * (count > 1)}"
    for other in (name for name in found if name != "run"):
        values = {"run": found["run"], other: found[other]}
        target = TARGETS.get(f"run / {other}")
        yield Comparison(case, f"run / {other}", "us", values, target)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--processes", type=int, nargs="+", default=[1, 2, 4])
    add("--steps", type=int, default=64, help="steps of a turn")
    add("--others-python", default=sys.executable, help="a Python that has PyTorch")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add_options(parser, rounds=20, seconds=math.inf)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    comparisons = (
        comparison
        for name in args.models
        for count in args.processes
        for comparison in measured(count, name, args)
    )
    report(comparisons, args)


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["--worker"] else main()
