"""Public names whose modules are imported when a program first asks for them.

A public module lists its names in a block of `if TYPE_CHECKING`, as imports, which type
checkers follow; programs get the same list, read from the source, but import a module
only when they use one of its names. So a launcher reads ten modules of the package, and
a step on one machine no coordinator, no parameter servers and no older generations.

Threads may ask for different names at once, so one of them imports at a time: the
modules of JAX import each other in circles, which other threads would see half made
(0.10 and 0.12). For the same reason no public module imports modules of the package
when it is imported itself.
"""

from __future__ import annotations

import ast
import importlib
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

_importing = threading.RLock()


def attach(
    package: str, *, extra: tuple[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a public module, for the names that it lists.

    Other names raise an `AttributeError` with advice if TensorFlow has them; names of
    an extra that is not installed raise a `MissingExtraError`.
    """
    listed = _listed(package)

    def find(name: str) -> Any:
        if name == "__all__":  # which `from jaxstrategy import *` asks for
            return [each for each in listed if not each.startswith("_")]
        if name not in listed:
            raise _absent(package, name)
        home, defined = listed[name]
        try:
            with _importing:
                module = importlib.import_module(home)
        except ModuleNotFoundError as missing:
            if extra is None or (missing.name or "").partition(".")[0] != extra[0]:
                raise
            from jaxstrategy._src.errors import MissingExtraError

            library, title = extra
            raise MissingExtraError(
                f"`{package}.{name}` needs {title}, which is not installed. Install "
                f"the extra: pip install 'jaxstrategy[{library}]'"
            ) from missing
        found = getattr(module, defined) if defined else module
        setattr(sys.modules[package], name, found)  # asked for once
        return found

    def names() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*listed, *(each for each in own if each.startswith("_"))})

    return find, names


def _listed(package: str) -> dict[str, tuple[str, str]]:
    """For each name its module and its name there, "" for a module itself."""
    spec = sys.modules[package].__spec__
    get_source = getattr(spec and spec.loader, "get_source", lambda name: None)
    if (source := get_source(package)) is None:
        raise ImportError(f"`{package}` needs its source file, which lists its names.")
    (block,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    found: dict[str, tuple[str, str]] = {}
    hidden: dict[str, tuple[str, str]] = {}
    for node in block.body:
        match node:
            case ast.ImportFrom(module=str(home), names=aliases):
                for alias in aliases:
                    is_public = alias.asname == alias.name
                    is_module = "._src" not in home
                    place = (
                        (f"{home}.{alias.name}", "")
                        if is_module
                        else (home, alias.name)
                    )
                    (found if is_public else hidden)[alias.name] = place
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=value)):
                found[name] = hidden.get(value) or found[value]
    return found


# Names of `tf.distribute` that are not here, and what to use instead.

# Names of 2019 and later, by those of 2018.
_NAMES_OF_2018 = {
    "get_replica_context": "get_tower_context",
    "get_strategy": "get_distribution_strategy",
    "has_strategy": "has_distribution_strategy",
    "in_cross_replica_context": "get_cross_tower_context",
    "ReplicaContext": "TowerContext",
    "Strategy": "DistributionStrategy",
    "CrossDeviceOps": "CrossTowerOps",
    "NcclAllReduce": "AllReduceCrossTowerOps",
    "ReductionToOneDevice": "ReductionToOneDeviceCrossTowerOps",
    "PerReplica": "PerDevice",
    "ReduceOp": "VariableAggregation",
}

ADVICE = {
    "compat.v1.distribute": (
        "Here its names are those of `compat.v1` itself: `from jaxstrategy.compat "
        "import v1 as distribute`."
    ),
    **{
        f"compat.v1.{name}": f"It is one of 2.x, and here `jaxstrategy.{name}`."
        for name in (
            "coordinator",
            "DistributedDataset",
            "DistributedIterator",
            "DistributedValues",
            "InputOptions",
        )
    },
    **{
        f"compat.v1.{name}": f"There it is `compat.v1.experimental.{name}`, and here."
        for name in (
            "CentralStorageStrategy",
            "MultiWorkerMirroredStrategy",
            "ParameterServerStrategy",
            "TPUStrategy",
        )
    },
    **{
        f"compat.v1.{older}": (
            f"It is of 2018, and in `compat.contrib`; since 1.13 it is `{name}`."
        )
        for name, older in _NAMES_OF_2018.items()
        if name not in ("NcclAllReduce", "PerReplica")
    },
    "compat.contrib.MultiWorkerAllReduce": (
        "Here it is `jaxstrategy.HierarchicalCopyAllReduce`, which sums inside each "
        "process first."
    ),
    "compat.contrib.DistributeConfig": (
        "It is for Estimators. `jaxstrategy.training.training_loop` trains with any "
        "strategy."
    ),
    "compat.contrib.run_standard_tensorflow_server": (
        "It is for parameter servers: `jaxstrategy.Server(cluster_spec, ...).join()`."
    ),
    **{
        f"compat.contrib.{name}": (
            f"In 2018 it was `{older}`, which is here; it is `jaxstrategy.{name}` now."
        )
        for name, older in _NAMES_OF_2018.items()
    },
}


_HOMES = ("errors", "training", "experimental", "profiling", "planning")


def _absent(module: str, name: str) -> AttributeError:
    full = f"{module}.{name}".removeprefix("jaxstrategy.")
    text = f"module {module!r} has no attribute {name!r}"
    if module == "jaxstrategy":
        for home in (f"{module}.{each}" for each in _HOMES):
            importlib.import_module(home)
            text += f"; it is `{home}.{name}`" * (name in _listed(home))
        if name.isidentifier() and find_spec(f"{module}.{name}"):
            text += f"; it is a module: `import {module}.{name}`"
    if full in ADVICE:
        text = f"{text}, which TensorFlow has. {ADVICE[full]}"
    return AttributeError(text, name=name)
