"""Keeps snapshots of a state that is divided over processes; restores the last one."""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

LAST = 6


def main(folder, there):
    strategy = js.MultiWorkerMirroredStrategy(num_replicas=12)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    divided, mirrored = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())

    @jax.jit
    def whole(x):
        return jax.lax.with_sharding_constraint(x, mirrored)

    def state_of(step):
        rows = np.arange(120.0, dtype=np.float32).reshape(24, 5) * step
        return {
            "divided": jax.make_array_from_callback(
                rows.shape, divided, lambda index: rows[index]
            ),
            "keys": whole(jax.random.split(jax.random.key(step), 2)),
            "mirrored": whole(jnp.full(3, step, jnp.bfloat16)),
            "host": np.full(2, step),
            "none": np.zeros((0, 3)),
            "step": step,
        }

    with js.checkpoint.CheckpointManager(folder, strategy, memory_every=2) as manager:
        state, step = manager.restore_or_init(state_of(0))
        if step:
            assert manager.restored.from_memory
            for name, wanted in state_of(step).items():
                found = state[name]
                if name == "keys":
                    found, wanted = map(jax.random.key_data, (found, wanted))
                if isinstance(found, jax.Array):
                    found, wanted = (
                        whole(each).addressable_data(0) for each in (found, wanted)
                    )
                np.testing.assert_array_equal(found, wanted)
            print(f"restored step {step} with {jax.process_count()}", flush=True)
            return
        for step in range(1, LAST + 1):
            manager.snapshot(step, state_of(step))
        manager.wait()
        pathlib.Path(there, str(jax.process_index())).touch()
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
