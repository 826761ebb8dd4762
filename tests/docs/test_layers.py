"""Imports point down only: the layers of the package, from the ground up."""

import ast
import subprocess
import sys
from pathlib import Path

import jaxstrategy

PACKAGE = Path(jaxstrategy.__file__).parent

FLOORS = """
    text errors lazy_names version cluster processes launch options replicas tpu
    values reductions contexts parameter_servers rpc sharded masks inputs variables
    tracing executors scheduled checkpoint profiling strategies planning preemption
    coordinator flax keras training compat __init__ public demo doctor
""".split()


def floor(name):
    """Of a module, by its name with dots; all that lies beside `_src` is public."""
    parts = [*name.split("."), "__init__"][1:]
    return FLOORS.index(parts[1] if parts[0] == "_src" else "public")


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


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


def test_imports_point_down_and_in_no_circle():
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        name = module_of(path)
        graph[name] = {n for n in imported(path) if n != name}
    for path in PACKAGE.rglob("*.py"):
        own = floor(module_of(path))
        for name in graph[module_of(path)]:
            is_program = module_of(path).endswith("__main__")
            assert floor(name) <= own or is_program, f"{path} imports {name}, above it"
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
assert default.num_replicas_in_sync == default._replicas.count == 1
jax.config.update("jax_num_cpu_devices", 3)  # an error once a device was touched
assert len(jax.devices("cpu")) == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
