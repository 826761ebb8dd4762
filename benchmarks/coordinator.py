"""What a coordinator costs, against TensorFlow's in turns.

    python benchmarks/coordinator.py [--others-python PYTHON] [--backend threads]

Two workers and one parameter server are processes of this host, as TensorFlow's are. Of
each case both run as many functions, one after the other; the figures are functions (or
megabytes, both ways) a second. The first targets are three times TensorFlow's, the
others figures of an idle machine with two cores: ratios count. Without an environment
that has TensorFlow only the latter are compared.
"""

import argparse
import json
import pathlib
import subprocess
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from _tensorflow_coordinator import BATCH, IDS, LAYERS, ROWS, WIDTH
from _timing import Comparison, add_options, in_turn, report

import jaxstrategy as js

# The case, how many a turn, the figure that is wanted, its unit, and how much one is.
CASES = {
    "trivial": (1000, 3200, "/s", 1),
    "fetch": (200, 1000, "/s", 1),
    "assign_add": (600, 2100, "/s", 1),
    "perceptron": (150, 520, "/s", 1),
    "embedding": (200, 830, "/s", 1),
    "lookup": (300, 1150, "/s", 1),
    "move 1": (100, 1500, "MB/s", 2),
    "move 10": (20, 1200, "MB/s", 20),
    "move 100": (4, 1200, "MB/s", 200),
}


class Ours:
    """The cases on a `ParameterServerStrategy`."""

    def __init__(self, backend: str) -> None:
        self._strategy = js.ParameterServerStrategy(
            workers=2, parameter_servers=1, backend=backend
        )
        self._coordinator = js.coordinator.ClusterCoordinator(self._strategy)
        random = np.random.default_rng(0)
        with self._strategy.scope():
            self._scalar = js.Variable(0.0)
            self._layers = [
                js.Variable(0.05 * random.normal(size=shape).astype("float32"))
                for shape in LAYERS
            ]
            self._table = js.Variable(
                random.normal(size=(ROWS, WIDTH)).astype("float32")
            )
            self._arrays = {
                size: js.Variable(np.zeros(size * 250_000, "float32"))
                for size in (1, 10, 100)
            }
        self._x = random.normal(size=(BATCH, 64)).astype("float32")
        self._y = random.integers(0, 10, BATCH)
        self._ids = random.integers(0, ROWS, (BATCH, IDS)).astype("int32")
        self._functions = {}

    def seconds(self, case: str, count: int) -> float:
        """How long so many functions take; a few were run before."""
        if case not in self._functions:
            self._functions[case] = self._coordinator.function(self._made(case))
            self._run(case, 4)
        begin = time.perf_counter()
        self._run(case, count)
        return time.perf_counter() - begin

    def _run(self, case: str, count: int) -> None:
        function = self._functions[case]
        if case == "fetch":
            for _ in range(count):
                self._coordinator.schedule(function).fetch()
            return
        for _ in range(count):
            self._coordinator.schedule(function)
        self._coordinator.join()

    def _made(self, case: str):
        if case.startswith("move"):
            array = self._arrays[int(case.removeprefix("move "))]
            return lambda: (array.assign_add(array + 1.0), None)[1]
        made = {
            "trivial": lambda: jnp.int32(1),
            "fetch": lambda: jnp.int32(1),
            "assign_add": lambda: (self._scalar.assign_add(1.0), None)[1],
            "perceptron": self._perceptron,
            "embedding": self._embedding,
            "lookup": self._lookup,
        }
        return made[case]

    def _perceptron(self) -> jax.Array:
        def loss_of() -> jax.Array:
            h = self._x
            for layer in self._layers[:-1]:
                h = jax.nn.relu(h @ layer)
            logits = jax.nn.log_softmax(h @ self._layers[-1])
            return -jnp.mean(logits[jnp.arange(BATCH), self._y])

        loss, gradients = js.value_and_grad(loss_of, self._layers)()
        for layer, gradient in zip(self._layers, gradients, strict=True):
            layer.assign_sub(0.01 * gradient)
        return loss

    def _embedding(self) -> jax.Array:
        def loss_of() -> jax.Array:
            rows = js.experimental.embedding_lookup(self._table, self._ids)
            return jnp.mean(rows.sum(1) ** 2)

        loss, gradient = js.value_and_grad(loss_of, self._table)()
        self._table.scatter_sub(
            js.IndexedSlices(0.1 * gradient.values, gradient.indices)
        )
        return loss

    def _lookup(self) -> jax.Array:
        rows = js.experimental.embedding_lookup(self._table, self._ids)
        self._scalar.assign_add(1.0)
        return rows.sum()

    def close(self) -> None:
        """End all processes."""
        self._coordinator.close()
        self._strategy.close()


class TensorFlow:
    """The same in TensorFlow, in a process of its own."""

    def __init__(self, python: str) -> None:
        script = pathlib.Path(__file__).with_name("_tensorflow_coordinator.py")
        self._process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        print("TensorFlow", self._answer()["version"])

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("TensorFlow ended. Try the command by itself.")
        return json.loads(line)

    def seconds(self, case: str, count: int) -> float:
        """How long so many functions take."""
        print(
            json.dumps({"case": case, "count": count}),
            file=self._process.stdin,
            flush=True,
        )
        return self._answer()["seconds"]

    def close(self) -> None:
        """End it, and its servers."""
        self._process.stdin.close()
        self._process.wait()


def compared(
    case: str, ours: Ours, others: TensorFlow | None, given: argparse.Namespace
) -> Comparison:
    """Seconds for one, of both, and the comparison with the target."""
    count, wanted, unit, size = CASES[case]
    if others is None:
        alone = {"ours": lambda: ours.seconds(case, count)}
        turns = in_turn(alone, given.rounds, given.seconds)
        turns["wanted"] = [count * size / wanted] * len(turns["ours"])
        target = 1.0
    else:
        both = {"ours": ours, "TensorFlow": others}
        turns = in_turn(
            {name: lambda it=it: it.seconds(case, count) for name, it in both.items()},
            given.rounds,
            given.seconds,
        )
        turns = {name: turns[name] for name in both}
        target = 1 / 3
    each = {
        name: [1e6 * value / count / size for value in values]
        for name, values in turns.items()
    }
    best = {name: count * size / min(values) for name, values in turns.items()}
    print(f"{case}:", ", ".join(f"{k} {v:,.0f} {unit}" for k, v in best.items()))
    quantity = "a megabyte" if unit == "MB/s" else "a function"
    return Comparison(case, quantity, "us", each, target)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="processes")
    parser.add_argument("--others-python", help="of an environment with TensorFlow")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    add_options(parser, rounds=9, seconds=60.0)
    return parser.parse_args(arguments)


def main() -> None:
    """Run the cases."""
    given = parsed()
    ours = Ours(given.backend)
    others = None if given.others_python is None else TensorFlow(given.others_python)
    try:
        report((compared(case, ours, others, given) for case in given.only), given)
    finally:
        ours.close()
        if others is not None:
            others.close()


if __name__ == "__main__":
    main()
