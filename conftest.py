"""Eight simulated CPU devices for every test, and shared strategies."""

import contextlib
import ctypes
import gc
import os
import pathlib
import signal

import jax
import numpy as np
import pytest

os.environ["KERAS_BACKEND"] = "jax"  # read when Keras is imported
# What a shell runs in the background ignores SIGINT, and so would what a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")

import jaxstrategy as js  # noqa: E402
from jaxstrategy.compat import contrib, v1  # noqa: E402

pytest.register_assert_rewrite("helpers")
# No examples, and no tests; all but the first are programs of their own.
collect_ignore = [
    "tests/helpers",
    "tests/multiprocess/workers",
    "tests/first_ten_minutes",
    "tests/typed_programs",
    "tests/wheel/programs",
]


MOST_BYTES = 1_300_000_000
"""Of memory, before JAX forgets its programs; each file leaves 10 to 100 MB of them."""


@pytest.fixture(scope="module", autouse=True)
def only_objects_of_this_file():
    """The collector looks only through what has been made since a file began.

    Modules, tests and the caches of JAX are millions of objects late in a process: each
    `gc.collect()` took 1.4 s then, and those of `make test` 200 s in all.
    """
    if is_large := resident_bytes() > MOST_BYTES:
        gc.unfreeze()
        jax.clear_caches()
    gc.collect()
    if is_large:
        give_back_memory()
    gc.freeze()


def give_back_memory():
    """Else the C library keeps what is free, and each file would count as large."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes():
    """The memory that this process has now; 0 where no file tells it."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    assert len(jax.devices()) == 8, "the tests need 8 simulated CPU devices"


@pytest.fixture(autouse=True)
def default_context_after_each_test():
    yield
    assert not js.has_strategy() and not js.in_cross_replica_context()


@pytest.fixture(
    params=[1, pytest.param(2, marks=pytest.mark.slow), 8], ids="{}-replicas".format
)
def strategy(request):
    return js.MirroredStrategy(jax.devices()[: request.param])


@pytest.fixture
def ranks_may_differ():
    """For libraries that add a bias to a matrix."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def two():
    return js.MirroredStrategy(jax.devices()[:2])


@pytest.fixture
def four():
    return js.MirroredStrategy(jax.devices()[:4])


@pytest.fixture
def compilations():
    """Counts the programs that XLA compiles: `compilations()` since the last call."""
    count = 0
    on = True

    def listen(event, _, **__):
        nonlocal count
        count += on and event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)

    def taken():
        nonlocal count
        now, count = count, 0
        return now

    yield taken
    on = False


@pytest.fixture(autouse=True)
def doctest_names(doctest_namespace):
    older = {"contrib": contrib, "v1": v1}
    doctest_namespace.update(jax=jax, np=np, jnp=jax.numpy, js=js, **older)
