"""Imports point down only: the layers of the package, from the ground up."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import jaxstrategy

PACKAGE = Path(jaxstrategy.__file__).parent

FLOORS = [
    "text",
    "charts",
    "_errors",
    "_lazy_names",
    "_version",
    "cluster",
    "cluster_resolver",
    "launch",
    "_options",
    "_communication_options",
    "replicas",
    "tpu",
    "values",
    "reductions",
    "contexts",
    "parameter_servers",
    "rpc",
    "sharded",
    "masks",
    "inputs",
    "variables",
    "tracing",
    "executors",
    "scheduled",
    "checkpoint",
    "profiling",
    "visualization",
    "strategies",
    "preemption",
    "coordinator",
    "flax",
    "keras",
    "training",
    "optax",
    "experimental",
    "compat",
    "__init__",
    "demo",
    "doctor",
]


# Folders of `compat` in which classes are called as TensorFlow calls them.
OLDER = ["v1", "contrib"]


def floor(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path):
    """Every module of the package that the file imports, local imports included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            parts = (node.module or "").split(".")
            if parts[0] != "jaxstrategy":
                continue
            folder = PACKAGE.joinpath(*parts[1:])
            for alias in node.names:
                known = (folder / f"{alias.name}.py").exists()
                known |= (folder / alias.name).is_dir()
                yield f"{node.module}.{alias.name}" if known else node.module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "jaxstrategy":
                    yield alias.name


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=str)
def test_imports_point_down(path):
    own = FLOORS.index(floor(path))
    for name in imported(path):
        layer = f"{name}.__init__".split(".")[1]
        assert FLOORS.index(layer) <= own, f"{path} imports {name}, which is above it"


def test_there_are_no_circles():
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        graph[name] = {n for n in imported(path) if n != name}
    done, open_ = set(), []

    def visit(name):
        assert name not in open_, " -> ".join([*open_, name])
        if name in done or name not in graph:
            return
        open_.append(name)
        for other in graph[name]:
            visit(other)
        open_.pop()
        done.add(name)

    for name in graph:
        visit(name)


def test_flax_nnx_has_one_door():
    folder = PACKAGE / "tracing" / "nnx"
    for path in PACKAGE.rglob("*.py"):
        if folder not in path.parents:
            inside = [
                n for n in imported(path) if n.startswith("jaxstrategy.tracing.nnx")
            ]
            assert set(inside) <= {"jaxstrategy.tracing.nnx._adapter"}, path


def test_no_two_files_have_one_name():
    names = [path.stem for path in PACKAGE.rglob("_*.py") if "__" not in path.stem]
    assert not [name for name, count in Counter(names).items() if count > 1]


def test_no_two_classes_have_one_name():
    classes = [name for path in PACKAGE.rglob("*.py") for name in own_classes(path)]
    names = {name for name, count in Counter(classes).items() if count > 1}
    assert names == {"BatchNorm"}  # of `flax.linen` and of `flax.nnx`, as Flax has it


@pytest.mark.parametrize("generation", OLDER)
def test_an_older_generation_has_no_name_twice(generation):
    folder = PACKAGE / "compat" / generation
    own = Counter(name for path in folder.rglob("*.py") for name in classes_in(path))
    assert not [name for name, count in own.items() if count > 1]


def own_classes(path):
    """The names of classes that are ours to choose."""
    return [] if path.parent.name in OLDER else classes_in(path)


def classes_in(path):
    return [node.name for node in ast.parse(path.read_text()).body if is_class(node)]


def is_class(node):
    return isinstance(node, ast.ClassDef)


# What only `replicas/` does, and the few files that must, with the reason.
ASKED_OF_REPLICAS = {
    "names the replica axis": (r"REPLICA_AXIS|\(axis_name,\) *=", {}),
    "counts or orders devices of a mesh": (
        r"\bmesh\.(size|shape|devices|axis_names)\b",
        {"tracing/replication/_analysis.py": "any user's mesh, to lower an operation"},
    ),
    "spells how an array is divided": (
        r"\bPartitionSpec\b|\bNamedSharding\(|(?<![\w.])Mesh\(|make_mesh",
        {
            "tracing/_translation.py": "tells users what to write",
            "variables/_sharding_choice.py": "tells users what they may give",
            "variables/_variable.py": "as above",
        },
    ),
    "sorts shards as replicas": (r"\.addressable_shards|\bshard\.index", {}),
    "asks which replica it is": (
        r"lax\.axis_index\(",
        {
            "reductions/_sums.py": "collectives are given axes, and groups within them",
            "reductions/_exchange.py": "so is who has a part of an array",
            "tracing/lanes/_lane_axes.py": "it is what makes lanes replicas",
        },
    ),
    "is given a mesh and means the replicas": (
        r"\bmesh: *\"?Mesh\b",
        {
            "tracing/replication/_analysis.py": "as above",
            "tracing/replication/_lowered.py": "as above",
            "tracing/replication/_rules.py": "as above",
        },
    ),
}


@pytest.mark.parametrize("what", ASKED_OF_REPLICAS)
def test_only_replicas_know_how_replicas_lie(what):
    pattern, allowed = ASKED_OF_REPLICAS[what]
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(pattern, path.read_text())
    }
    others = {path for path in found if not path.startswith("replicas/")}
    assert others <= set(allowed), f"{what}, which `Replicas` should"
    assert others == set(allowed), f"no exception is needed any more: {what}"


def test_no_private_jax_module_is_used():
    for path in PACKAGE.rglob("*.py"):
        assert "jax._src" not in path.read_text(), path


def test_importing_touches_no_device_no_thread_and_no_extra():
    code = """
import sys, threading
import jax, numpy
before = set(sys.modules)
threads = threading.active_count()
import jaxstrategy
new = {name.split(".")[0] for name in set(sys.modules) - before}
extras = {"flax", "optax", "sklearn", "matplotlib", "rich", "orbax", "grain", "torch"}
extras |= {"datasets", "tensorflow", "torchdata", "tensorboardX", "tensorstore", "ray"}
extras |= {"clu", "keras", "kubernetes", "libcst", "mlflow", "trackio", "wandb"}
assert not new & extras, new & extras
assert threading.active_count() == threads
default = jaxstrategy.get_strategy()
assert default.num_replicas_in_sync == default.replicas.count == 1
jax.config.update("jax_num_cpu_devices", 3)  # an error once a device was touched
assert len(jax.devices("cpu")) == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_public_name_is_documented():
    for name in dir(jaxstrategy):
        if not name.startswith("_") and not isinstance(
            getattr(jaxstrategy, name), type(sys)
        ):
            assert getattr(jaxstrategy, name).__doc__, name
