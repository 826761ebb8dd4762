"""Eight simulated CPU devices for every test, and shared strategies."""

import gc
import os

import jax
import numpy as np
import pytest

os.environ["KERAS_BACKEND"] = "jax"  # read when Keras is imported

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")

import jaxstrategy as js  # noqa: E402

pytest.register_assert_rewrite("helpers")
# No examples, and no tests; all but the first are programs of their own.
collect_ignore = [
    "tests/helpers",
    "tests/multiprocess/workers",
    "tests/first_ten_minutes",
    "tests/typed_programs",
    "tests/wheel/programs",
]


@pytest.fixture(scope="module", autouse=True)
def only_objects_of_this_file():
    """The collector looks only through what has been made since a file began.

    Modules, tests and the caches of JAX are millions of objects late in a process: each
    `gc.collect()` took 1.4 s then, and those of `make test` 200 s in all.
    """
    gc.collect()
    gc.freeze()


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
    doctest_namespace.update(jax=jax, np=np, jnp=jax.numpy, js=js)
