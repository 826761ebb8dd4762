"""Metrics arrive in each library of logs, offline, in steps of any order."""

import importlib
import json
import logging
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxstrategy as js
from jaxstrategy.profiling import MetricLogger

LOGGED = [(3, 0.5), (1, 0.25), (4, 0.125)]


class Calls(list):
    """A library that keeps what it is called with, as (name, arguments)."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def method(*args, **kwargs):
            self.append((name, args, kwargs))
            return self

        return method

    @property
    def info(self):
        return types.SimpleNamespace(run_id="r1")

    def named(self, name):
        return [(args, kwargs) for found, args, kwargs in self if found == name]


def given(library, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, library)


WRITERS = {
    "wandb": lambda: js.profiling.WandbWriter(project="p", mode="offline"),
    "mlflow": lambda: js.profiling.MlflowWriter(run_name="n"),
    "trackio": lambda: js.profiling.TrackioWriter("p", name="n"),
    "clu.metric_writers": lambda: js.profiling.CluWriter("there", asynchronous=False),
    "tensorboardX": lambda: js.profiling.TensorBoardWriter(Path("there")),
}
BEGUN = {
    "wandb": ("init", (), {"project": "p", "mode": "offline"}),
    "mlflow": ("start_run", (), {"run_name": "n"}),
    "trackio": ("init", (), {"project": "p", "name": "n"}),
    "clu.metric_writers": (
        "create_default_writer", ("there",), {"asynchronous": False},
    ),
    "tensorboardX": ("SummaryWriter", ("there",), {}),
}  # fmt: skip
WRITTEN = {
    "wandb": ("log", ({"loss": 0.5, "step": 3},), {}),
    "mlflow": ("log_metrics", ({"loss": 0.5},), {"step": 3, "run_id": "r1"}),
    "trackio": ("log", ({"loss": 0.5},), {"step": 3}),
    "clu.metric_writers": ("write_scalars", (3, {"loss": 0.5}), {}),
    "tensorboardX": ("add_scalar", ("loss", 0.5, 3), {}),
}
ENDED = {
    "wandb": [("finish", (), {"exit_code": 0}), ("finish", (), {"exit_code": 1})],
    "mlflow": [("end_run", ("FINISHED",), {}), ("end_run", ("FAILED",), {})],
    "trackio": [("finish", (), {})] * 2,
    "clu.metric_writers": [("close", (), {})] * 2,
    "tensorboardX": [("close", (), {})] * 2,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_run_begins_with_the_log_and_ends_with_it(name, monkeypatch):
    library = Calls()
    given(library, name, monkeypatch)
    writer = WRITERS[name]()
    assert library == []
    with MetricLogger(writer) as log:
        assert library[0] == BEGUN[name]
        log(3, {"loss": jnp.float32(0.5)})
    assert WRITTEN[name] in library
    assert library[-1] == ENDED[name][0]
    log.close()
    assert library.count(ENDED[name][0]) == 1
    with pytest.raises(ValueError, match="step 4 were logged after the `MetricLogger`"):
        log(4, {"loss": 1.0})


@pytest.mark.parametrize("name", WRITERS)
def test_a_run_of_a_loop_that_failed_ends_so(name, monkeypatch):
    library = Calls()
    given(library, name, monkeypatch)
    with pytest.raises(KeyError, match="of the loop"):
        with MetricLogger(WRITERS[name]()):
            raise KeyError("of the loop")
    assert library[-1] == ENDED[name][1]


@pytest.mark.parametrize("name", WRITERS)
def test_only_process_0_opens_a_run(name, monkeypatch):
    library = Calls()
    given(library, name, monkeypatch)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with MetricLogger(WRITERS[name]()) as log:
        log(3, {"loss": 0.5})
    assert library == []


@pytest.mark.parametrize(
    "name, words",
    [("wandb", "a `WandbWriter`, which needs `wandb`, .* 'jaxstrategy[wandb]', or"),
     ("mlflow", "an `MlflowWriter`, which needs `mlflow`, .* 'jaxstrategy[mlflow]'"),
     ("trackio", "a `TrackioWriter`, which needs `trackio`, .* 'jaxstrategy[trackio]'"),
     ("clu.metric_writers", "a `CluWriter`, .* 'jaxstrategy[clu]'"),
     ("tensorboardX", "a directory, which needs `tensorboardX`, .*[tensorboard]'")],
)  # fmt: skip
def test_a_library_that_is_missing_is_named(name, words, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    pattern = words.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(js.MissingExtraError, match=pattern):
        MetricLogger(WRITERS[name]())


def test_open_runs_are_known_by_their_methods():
    class Wandb(Calls):
        def define_metric(self, name, step_metric=None):
            self.append(("define_metric", name, step_metric))

        def log(self, data, step=None):
            self.append(("log", data, step))

    class Mlflow(Calls):
        def log_metrics(self, metrics, step=None):
            self.append(("log_metrics", metrics, step))

    class Trackio(Calls):
        def log(self, metrics, step=None):
            self.append(("log", metrics, step))

    # `Calls` has all methods there are: only those of the class count here.
    for kind in (Wandb, Mlflow, Trackio):
        kind.__getattr__ = object.__getattribute__
    runs = Wandb(), Mlflow(), Trackio()
    for run in runs:
        with MetricLogger(run) as log:
            for step, loss in LOGGED:
                log(step, {"loss": loss})
        log(5, {"loss": 0.0})  # what was given open is not closed
        log.close()
    told = [*LOGGED, (5, 0.0)]
    assert runs[0][0] == ("define_metric", "*", "step")
    assert runs[0][1:] == [("log", {"loss": x, "step": n}, None) for n, x in told]
    assert runs[1] == [("log_metrics", {"loss": x}, n) for n, x in told]
    assert runs[2] == [("log", {"loss": x}, n) for n, x in told]


@pytest.mark.parametrize("writer", [logging.getLogger("x"), math, js.profiling])
def test_another_log_is_refused(writer):
    with pytest.raises(TypeError, match="a `RunWriter`, an object with `write_scalars"):
        MetricLogger(writer)


def test_a_class_of_writers_is_refused():
    words = re.escape("`log(scalars, step=)`, or a function of a step and a dict of")
    with pytest.raises(TypeError, match=words + ".*an object of that class"):
        MetricLogger(js.profiling.WandbWriter)


# The libraries themselves, each in a process of its own: they start threads and more.

LOOP = """
from jaxstrategy.profiling import *
with MetricLogger({writer}) as log:
    for step, loss in {steps}:
        log(step, {{"train": {{"loss": loss}}}})
"""


def read(folder, writer, reader, **environment):
    """What `reader` prints of `LOGGED` in a process after that which has logged it."""
    for script in (LOOP.format(steps=LOGGED, writer=writer), reader):
        found = subprocess.run(
            [sys.executable, "-c", script],
            cwd=folder,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert found.returncode == 0, found.stdout + found.stderr
    return json.loads(found.stdout)


@pytest.mark.slow
def test_weights_and_biases_keeps_steps_in_any_order(tmp_path):
    pytest.importorskip("wandb")
    # The file of an offline run, as `wandb sync` reads it: a log of LevelDB.
    reader = """
import json
from wandb.proto import wandb_internal_pb2
import pathlib, struct
(path,) = pathlib.Path("wandb").glob("offline-run-*/*.wandb")
data, at, whole, found = path.read_bytes(), 7, b"", []
while at + 7 <= len(data):
    if (left := 32768 - at % 32768) < 7:
        at += left
        continue
    _, size, kind = struct.unpack("<IHB", data[at : at + 7])
    whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
    if kind in (1, 4):  # a whole record, or the last part of one
        record, whole = wandb_internal_pb2.Record.FromString(whole), b""
        items = record.history.item
        items = {i.key or "/".join(i.nested_key): i.value_json for i in items}
        if "train/loss" in items:
            found.append([json.loads(items["step"]), json.loads(items["train/loss"])])
print(json.dumps(found))
"""
    writer = 'WandbWriter(project="p", mode="offline")'
    found = read(tmp_path, writer, reader, WANDB_SILENT="true")
    assert [tuple(row) for row in found] == LOGGED


@pytest.mark.slow
def test_mlflow_keeps_steps_in_any_order(tmp_path):
    pytest.importorskip("mlflow")
    reader = """
import json
import mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs(["0"])
found = client.get_metric_history(run.info.run_id, "train/loss")
print(json.dumps([run.info.status, sorted([m.step, m.value] for m in found)]))
"""
    status, found = read(
        tmp_path,
        'MlflowWriter(run_name="n")',
        reader,
        MLFLOW_TRACKING_URI=f"file:{tmp_path}/runs",
        MLFLOW_ALLOW_FILE_STORE="true",
    )
    assert status == "FINISHED"
    assert [tuple(row) for row in found] == sorted(LOGGED)


@pytest.mark.slow
def test_trackio_keeps_steps_in_any_order(tmp_path):
    pytest.importorskip("trackio")
    reader = """
import json
import pathlib, sqlite3
(path,) = pathlib.Path("there").glob("*.db")
rows = sqlite3.connect(path).execute("select step, metrics from metrics").fetchall()
found = []
for step, metrics in rows:
    metrics = json.loads(metrics)
    if "train/loss" in metrics:
        found.append([step, metrics["train/loss"]])
print(json.dumps(sorted(found)))
"""
    writer = 'TrackioWriter("p", name="n", embed=False, auto_log_cpu=False)'
    found = read(tmp_path, writer, reader, TRACKIO_DIR=f"{tmp_path}/there")
    assert [tuple(row) for row in found] == sorted(LOGGED)


def test_a_writer_of_clu_takes_it(monkeypatch, caplog):
    clu = pytest.importorskip("clu")
    # The package `clu.metric_writers` imports TensorFlow; its files do not.
    package = types.ModuleType("clu.metric_writers")
    package.__path__ = [str(Path(clu.__path__[0]) / "metric_writers")]
    monkeypatch.setitem(sys.modules, "clu.metric_writers", package)
    try:
        interface = importlib.import_module("clu.metric_writers.interface")
    except ImportError as missing:
        pytest.skip(f"a dependency of CLU is missing: {missing}")
    package.interface = interface
    written = []

    class Writer(interface.MetricWriter):
        def write_scalars(self, step, scalars):
            written.append((step, dict(scalars)))

        def flush(self):
            written.append("flushed")

    for name in interface.MetricWriter.__abstractmethods__ - {"write_scalars", "flush"}:
        setattr(Writer, name, lambda *args, **kwargs: None)
    Writer.__abstractmethods__ = frozenset()
    with MetricLogger(Writer()) as log:
        log(3, {"loss": jnp.float32(0.5)})
    assert written == [(3, {"loss": 0.5}), "flushed", "flushed"]
