"""Claim: to save, to write and to restore takes no longer than with Orbax alone.

The same arrays are saved, mirrored over simulated CPU devices, by

- `ours`: `js.checkpoint.CheckpointManager`, which checksums all files afterwards;
- `orbax`: Orbax's own `CheckpointManager`, with its `StandardSave`;
- `again`: `orbax` once more: how far to trust a ratio.

The forms take turns in one process. Measured are, for states of some sizes,

- blocked: until an asynchronous `save` returns, when training goes on;
- written: until the checkpoint is complete;
- restored: until the arrays lie on a quarter of the devices, in another strategy.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import functools
import math
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from _timing import Comparison, add_options, in_turn, report

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

BLOCKED, WRITTEN, RESTORED = "blocked", "written", "restored"
TARGETS = {BLOCKED: 1.0, WRITTEN: 1.0, RESTORED: 1.0}
MB = 2**20
ARRAYS = 20

Times = dict[str, float]


class Ours:
    """Saves and restores as a user of jaxstrategy does."""

    def __init__(self, folder: pathlib.Path, structs: Any) -> None:
        self._manager = CheckpointManager(folder, keep=1)
        self._structs = structs

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, state)

    def wait(self) -> None:
        self._manager.wait()

    def restore(self, step: int) -> Any:
        return self._manager.restore(self._structs, step)

    def close(self) -> None:
        self._manager.close()


class Orbax:
    """Saves and restores with Orbax alone."""

    def __init__(self, folder: pathlib.Path, structs: Any) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        self._manager = ocp.CheckpointManager(folder, options=options)
        self._structs = structs

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, step: int) -> Any:
        args = ocp.args.StandardRestore(self._structs)
        return self._manager.restore(step, args=args)

    def close(self) -> None:
        self._manager.close()


class Turns:
    """One form, a step further at each turn."""

    def __init__(self, form: Any, state: Any) -> None:
        self._form, self._state, self._step = form, state, 0

    def __call__(self) -> Times:
        self._step += 1
        start = time.perf_counter()
        self._form.save(self._step, self._state)
        blocked = time.perf_counter() - start
        self._form.wait()
        written = time.perf_counter() - start
        start = time.perf_counter()
        jax.block_until_ready(self._form.restore(self._step))
        restored = time.perf_counter() - start
        return {BLOCKED: blocked, WRITTEN: written, RESTORED: restored}

    def close(self) -> None:
        self._form.close()


def compare(
    megabytes: int,
    devices: Sequence[jax.Device],
    args: argparse.Namespace,
    root: pathlib.Path,
) -> list[Comparison]:
    """All quantities of one size."""
    strategy = js.MirroredStrategy(devices)
    other = js.MirroredStrategy(devices[: max(1, len(devices) // 4)])
    draw = np.random.default_rng(0)
    count = megabytes * MB // 4 // ARRAYS
    state = {
        f"array {i}": strategy.mirror(draw.random(count, np.float32))
        for i in range(ARRAYS)
    }
    where = other.mirror(0.0).sharding
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state
    )
    kinds: dict[str, Callable[..., Any]] = {
        "ours": Ours,
        "orbax": Orbax,
        "again": Orbax,
    }
    turns = {
        name: Turns(kind(root / f"{megabytes} {name}", structs), state)
        for name, kind in kinds.items()
    }
    for turn in turns.values():
        turn()
    found = in_turn(turns, args.rounds, args.seconds)
    for turn in turns.values():
        turn.close()
    return [
        Comparison(
            f"{megabytes} MB, {len(devices)} devices",
            quantity,
            "ms",
            {name: [1e3 * t[quantity] for t in times] for name, times in found.items()},
            target,
        )
        for quantity, target in TARGETS.items()
    ]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[100, 1000], help="MB of a state")
    add("--devices", type=int, default=8)
    add("--folder", type=pathlib.Path, help="where to save; by default a new one")
    add_options(parser, rounds=10, seconds=math.inf)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    print(f"JAX {jax.__version__}; medians (quartiles); ratio: ours to orbax")
    devices = js.simulate(args.devices)
    root = pathlib.Path(tempfile.mkdtemp(dir=args.folder))
    measure = functools.partial(compare, devices=devices, args=args, root=root)
    try:
        report((each for size in args.sizes for each in measure(size)), args)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
