"""JAX's persistent compilation cache, set up by one option: `compilation_cache`."""

from __future__ import annotations

import functools
import os
import stat
import tempfile

import jax

from jaxstrategy._src.cluster.resolvers.environment import COMPILATION_CACHE
from jaxstrategy._src.text import user_code
from jaxstrategy._src.text.shown import shown

# JAX keeps what took at least a second to compile, and of a size that depends on the
# file system; 0 stands for the latter, so that -1 means everything (0.10 and 0.12).
_KEEP_ALL = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def compilation_cache(directory: str | os.PathLike[str] | None) -> str | None:
    """Keeps what XLA compiles in a folder, where later processes find it.

    The first call of a step in a process that is started again then traces the step and
    reads its program, instead of compiling it. All programs are kept, however fast they
    were compiled; call it before the first step. JAX finds a program by what it
    computes, the devices, the versions and the options of XLA. The processes of a job
    use one folder: process 0 writes it. On CPUs JAX's key of a program differs between
    processes, so that the others compile still (JAX 0.10 and 0.12); steps that are
    saved by `strategy.compile` are each process's own. Nothing is ever removed from the
    folder, and whoever can write there decides what the processes run.

    `python -m jaxstrategy.launch --compilation-cache DIR` does so in each process of a
    job and each restart, and so does the variable `JAXSTRATEGY_COMPILATION_CACHE` of
    the environment when a strategy is made.

    Args:
      directory: where; it is made if need be, for this user alone. It may be an address
        of what JAX can write besides, such as `gs://bucket/folder`. None turns the
        cache off.

    Returns:
      The folder's path; None if the cache is off. A folder that cannot be written, or
      that everybody can write, is a `RuntimeWarning`, and the cache is off.

    Raises:
      TypeError: `directory` is no path.

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     js.experimental.compilation_cache(folder) == folder
    True
    >>> js.experimental.compilation_cache(None)
    """
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            f"`compilation_cache` was given {shown(directory)}; the path of a folder "
            "was wanted, or None for no cache."
        )
    path = None if directory is None else os.fspath(directory)
    if path is not None and "://" not in path:
        path = os.path.abspath(os.path.expanduser(path))
        if (why := _why_refused(path)) is not None:
            user_code.warn(
                f"There is no compilation cache in {path!r}: {why}. Every process "
                "compiles its programs itself. Give a folder that this user alone, or "
                "its group, can write.",
                RuntimeWarning,
            )
            path = None
    if jax.config.jax_compilation_cache_dir != path:
        from jax.experimental.compilation_cache import compilation_cache as jax_cache

        # JAX goes on with the first folder that it has used.
        jax_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", path)
    if path is not None:
        for name, value in _KEEP_ALL.items():
            jax.config.update(name, value)
    return path


@functools.cache
def set_up_by_environment() -> None:
    """Uses the folder that the environment names, once; nothing if it names none."""
    if directory := os.environ.get(COMPILATION_CACHE):
        compilation_cache(directory)


def _why_refused(path: str) -> str | None:
    """Why a folder cannot be used; None if it can. Makes it if it is not there."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"it cannot be written ({error.strerror or error})"
    if hasattr(os, "getuid") and mode & stat.S_IWOTH:
        return "everybody can write it, and a program that is found there is run"
    return None
