"""What a compiled step depends on, so that a saved one is used for nothing else."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from typing import TypeAlias

import jax
from jax.extend import core

from jaxstrategy._errors import CompiledStepError
from jaxstrategy.replicas._devices import Device
from jaxstrategy.text._array_types import array_type
from jaxstrategy.tracing._constants import code_of, constants
from jaxstrategy.tracing._prepared import Preparation
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.jaxprs._visit import Jaxpr, all_eqns

# What is told, by the name of it in messages.
Facts: TypeAlias = dict[str, str]

# Variables of the environment from which XLA takes options.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Options of JAX by which no program becomes another one.
_OTHER_OPTIONS = re.compile(
    "cache|log|dump|trace|tracing|profil|compiler_detailed|explain|pgle|coordination|"
    "num_cpu_devices|platforms|include_full|check_tracer|transfer_guard|array_garbage|"
    "distributed|heartbeat|debug_|raise_persistent|share_binary|platform_name"
)


def facts_of(preparation: Preparation) -> Facts:
    """All that a program of this step depends on.

    Raises:
      CompiledStepError: it calls Python while it runs, which no file can hold.
    """
    step = preparation.step
    _check_callbacks(step)
    return {
        **_versions(),
        **_machine(step),
        **_options(),
        **{
            f"the compiler's option {name}": asked
            for name, asked in sorted(preparation.compiler_options.items())
        },
        **_arguments(preparation),
        "what is done for the step besides": ", ".join(preparation.stages),
        "what the step computes": _print_of(step),
    }


def devices_of(step: TracedStep) -> list[Device]:
    """The devices that take a step, in the order of the replicas."""
    groups = step.trace.replicas.groups
    return list(dict.fromkeys(device for group in groups for device in group))


def _versions() -> Facts:
    return {
        f"the version of {name}": importlib.metadata.version(name)
        for name in ("jaxstrategy", "jax", "jaxlib")
    }


def _machine(step: TracedStep) -> Facts:
    replicas = step.trace.replicas
    devices = devices_of(step)
    first = devices[0]
    axes = [*replicas.axis_sizes, *replicas.inner_sizes.items()]
    sizes = ", ".join(f"{name}={size}" for name, size in dict(axes).items())
    shared = f", {replicas.per_device} replicas on a device"
    return {
        "the platform": f"{first.platform} ({first.client.platform_version})",
        "the kind of device": ", ".join(sorted({d.device_kind for d in devices})),
        "the mesh": f"{replicas.count} replicas, {sizes}"
        + (shared if replicas.per_device > 1 else ""),
        "the devices of the mesh": ", ".join(str(device.id) for device in devices),
        "the place of this process": (
            f"{jax.process_index()} of {jax.process_count()}"
        ),
        "the processor": _processor() if first.platform == "cpu" else "any",
    }


@functools.cache
def _processor() -> str:
    """The kind of processor and its instructions, which programs for CPUs rest on."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.startswith(("flags", "Features"))]
    text = "".join(told) or platform.processor()
    kind = platform.machine()
    return f"{kind}, instructions {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _options() -> Facts:
    found = {f"the environment's {name}": os.environ.get(name, "") for name in _FLAGS}
    for name in sorted(jax.config.values):
        if not _OTHER_OPTIONS.search(name):
            # What a `with` block has set counts, which `values` does not know.
            found[f"JAX's option {name}"] = str(getattr(jax.config, name, None))
    return found


def _arguments(preparation: Preparation) -> Facts:
    donated = preparation.step.donated
    return {
        preparation.label(index): array_type(given.dtype, given.shape)
        + (", weak" if getattr(given, "weak_type", False) else "")
        + (", donated" if index in donated else "")
        + f", {getattr(given.sharding, 'spec', given.sharding)}"
        for index, given in enumerate(preparation.inputs)
    }


def _check_callbacks(step: TracedStep) -> None:
    for eqn in all_eqns(step.jaxpr):
        name = eqn.primitive.name
        if "callback" in name or name == "debug_print":
            raise CompiledStepError(
                f"`{step.name}` calls Python while it runs (`{name}`: `jax.debug.print`"
                ", `jax.pure_callback` or `io_callback`), which no file can hold, so "
                "that it cannot be saved. Leave that out, or use "
                "`js.compilation_cache(directory)`."
            )


def _print_of(step: TracedStep) -> str:
    """Equal for steps that compute the same, whatever their code is called."""
    text = hashlib.sha256(code_of(_of_what_is_used(step)))
    for constant in constants(step.trace.closed):
        text.update(constant.print.encode())
    text.update(repr(step.trace.varies).encode())
    return text.hexdigest()[:16]


def _of_what_is_used(step: TracedStep) -> Jaxpr:
    """The computation of one replica, without variables that it does not use."""
    jaxpr = step.jaxpr
    used = set(_variables_in(jaxpr))
    kept = [
        var
        for var, place in zip(jaxpr.invars, step.inputs, strict=True)
        if place is not None or var in used
    ]
    return jaxpr.replace(invars=kept)


def _variables_in(jaxpr: Jaxpr) -> Iterator[core.Var]:
    for eqn in jaxpr.eqns:
        yield from (atom for atom in eqn.invars if isinstance(atom, core.Var))
    yield from (atom for atom in jaxpr.outvars if isinstance(atom, core.Var))


def difference(saved: Facts, now: Facts) -> tuple[str, str, str] | None:
    """The first fact that differs, what it was, and what it is; None if none does."""
    for name in [*saved, *(name for name in now if name not in saved)]:
        was, given = saved.get(name, "nothing"), now.get(name, "nothing")
        if was != given:
            return name, was, given
    # They are passed by their place, and these facts stand by their names.
    was, given = (
        ", ".join(name for name in facts if name.startswith(("argument ", "variable ")))
        for facts in (saved, now)
    )
    return None if was == given else ("the order of its inputs", was, given)
