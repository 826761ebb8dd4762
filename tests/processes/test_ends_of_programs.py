"""Programs end as Python programs do, whatever they have left open."""

import os
import signal
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest
from helpers.processes import with_variable
from helpers.threads import until

from jaxstrategy.checkpoint import CheckpointManager

SECONDS = 200

PARAMETER_SERVERS = """
import numpy as np
import jaxstrategy as js

strategy = js.ParameterServerStrategy(workers=2, parameter_servers=2)
coordinator = js.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = js.Variable(0.0)
batches = iter(
    coordinator.create_per_worker_dataset(
        lambda: js.batches(np.ones(64, np.float32), 4, epochs=None)
    )
)

@coordinator.function
def step(iterator):
    total.assign_add(next(iterator).sum())

for _ in range(8):
    coordinator.schedule(step, (batches,))
coordinator.join()
assert float(total) == 32
for _ in range(200):  # left to run
    coordinator.schedule(step, (batches,))
"""

OTHERS = """
import sys
import jax, numpy as np
import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager
from jaxstrategy.experimental import PreemptionWatcher, rpc

strategy = js.MirroredStrategy(js.simulate(2))
rows = js.batches(np.ones(64, np.float32), 4, epochs=None)
batches = iter(strategy.experimental_distribute_dataset(lambda: iter(rows)))
next(batches)

with js.experimental.eager_replicas():
    strategy.run(lambda x: x + 1, (1.0,))

server = rpc.Server.create("grpc", "127.0.0.1:0")
server.register("double", jax.jit(lambda x: 2 * x), 1)
server.start()
client = rpc.Client.create("grpc", server.address)
client.double_blocking(4)

threads = js.ParameterServerStrategy(workers=2, parameter_servers=1, backend="threads")
coordinator = js.coordinator.ClusterCoordinator(threads)
with threads.scope():
    count = js.Variable(0)

@coordinator.function
def add():
    count.assign_add(1)

for _ in range(200):
    coordinator.schedule(add)

local = js.Server.create_local_server()
watcher = PreemptionWatcher()
manager = CheckpointManager(sys.argv[1])
manager.save(1, {f"array {i}": np.full(30_000, i) for i in range(30)})
"""

ENDS = {
    "exit": ("import sys; sys.exit(3)", 3),
    "interrupt": ("import time; time.sleep(300)", -signal.SIGINT),
}


def check_end(program, end, folder):
    """Runs a program to that end: its own exit code and traceback, and nothing else."""
    line, code = ENDS[end]
    mark = uuid.uuid4().hex
    (folder / "program.py").write_text(f"{program}\nprint('end', flush=True)\n{line}\n")
    ran = subprocess.Popen(
        [sys.executable, "-W", "error", "program.py", folder / "saved"],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said = ran.stdout.readline()
        if end == "interrupt" and said:
            time.sleep(0.5)  # in a callback of the collector Python would drop it
            os.killpg(ran.pid, signal.SIGINT)
        rest, errors = ran.communicate(timeout=SECONDS)
    finally:
        if ran.poll() is None:
            os.killpg(ran.pid, signal.SIGKILL)
            ran.wait()
    assert (ran.returncode, said + rest) == (code, "end\n"), errors
    if end == "exit":
        assert errors == ""
    else:
        assert errors.startswith("Traceback (most recent call last):\n"), errors
        assert errors.endswith("KeyboardInterrupt\n"), errors
        assert errors.count("Traceback") == 1, errors
        assert "jaxstrategy" not in errors
    until(lambda: not with_variable(mark))


@pytest.mark.slow
def test_a_program_with_parameter_servers_simply_ends(tmp_path):
    check_end(PARAMETER_SERVERS, "interrupt", tmp_path)


@pytest.mark.slow
def test_a_program_with_all_else_left_open_simply_ends(tmp_path):
    check_end(OTHERS, "exit", tmp_path)
    with CheckpointManager(tmp_path / "saved") as manager:
        state = manager.restore({"array 29": np.zeros(30_000, int)}, 1, partial=True)
    assert (state["array 29"] == 29).all()
