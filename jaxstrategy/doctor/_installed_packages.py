"""Which versions are installed, of what we need and of what the extras bring."""

from __future__ import annotations

import importlib.metadata
import platform
import re

OLDEST_JAX = (0, 10)
_PACKAGE = "jaxstrategy"
# Extras of people who work on the package itself.
_NOT_FOR_USERS = re.compile(r"benchmarks|dist|docs|lint|test")
_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*(?:;.*\bextra == ['\"]([\w-]+)['\"])?")


def versions() -> dict[str, str | None]:
    """By name the version of Python, of JAX, of its plugins and of optional packages.

    None stands for what is not installed.
    """
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
    }
    for name in (_PACKAGE, "jax", "jaxlib", *_plugins(), "numpy", *_optional()):
        found.setdefault(name, _version(name))
    return found


def problems(found: dict[str, str | None]) -> list[str]:
    """What is wrong with these versions, in sentences."""
    jax, jaxlib = found["jax"], found["jaxlib"]
    told = []
    if jax is not None and _numbers(jax) < OLDEST_JAX:
        oldest = ".".join(map(str, OLDEST_JAX))
        told.append(f"JAX {jax} is older than {oldest}, the oldest that is supported.")
    if jax and jaxlib and _numbers(jaxlib) != _numbers(jax):
        told.append(
            f"jax {jax} and jaxlib {jaxlib} differ. Install both at once: "
            '`pip install --upgrade "jax[...]"`, with your accelerator in the brackets.'
        )
    return told


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def _plugins() -> list[str]:
    """The installed packages by which JAX knows accelerators."""
    names = {d.name.lower() for d in importlib.metadata.distributions() if d.name}
    pattern = r"jax[-_]\w+[-_](plugin|pjrt)|libtpu\w*"
    return sorted(name for name in names if re.fullmatch(pattern, name))


def _optional() -> list[str]:
    """The packages of the users' extras, in alphabetical order."""
    requirements = importlib.metadata.requires(_PACKAGE) or []
    matches = map(_REQUIREMENT.match, requirements)
    pairs = [(match[1], match[2]) for match in matches if match and match[2]]
    names = {n.lower() for n, extra in pairs if not _NOT_FOR_USERS.match(extra)}
    return sorted(names - {_PACKAGE})


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
