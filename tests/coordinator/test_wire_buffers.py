"""Memory of received arrays is used again, and never while anybody can see it."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxstrategy.parameter_servers.wire._receive_buffers import SMALLEST, ReceiveBuffers

SIZE = 4 * SMALLEST


def place(array):
    return array.__array_interface__["data"][0]


def test_memory_comes_back_when_the_array_is_gone():
    buffers = ReceiveBuffers()
    first = buffers.take(SIZE)
    where = place(first)
    second = buffers.take(SIZE)
    assert place(second) != where
    del first
    assert buffers.idle_bytes == SIZE
    third = buffers.take(SIZE)
    assert place(third) == where and buffers.idle_bytes == 0


VIEWS = {
    "part": lambda a: a[5:9],
    "view": lambda a: a.view(np.float32),
    "bfloat16": lambda a: a.view(ml_dtypes.bfloat16)[1:],
    "shaped": lambda a: a.reshape(4, -1).T,
    "ndarray": lambda a: np.ndarray((3, 2), np.int32, a),
    "part of a part": lambda a: a.view(np.int64)[10:][2:5].reshape(3, 1),
    "memoryview": lambda a: memoryview(a)[3:],
    "frombuffer": lambda a: np.frombuffer(a, np.int16)[7:],
    "iterator": lambda a: iter(a),
    "dlpack": lambda a: np.from_dlpack(a[2:]),
    "jax": lambda a: jax.device_put(a.view(np.float32), jax.devices("cpu")[0]),
    "jax of a part": lambda a: jnp.asarray(a[64:].view(np.float32)),
    "closure": lambda a: lambda: a,
}


@pytest.mark.parametrize("name", VIEWS)
def test_memory_stays_while_anything_made_of_the_array_lives(name):
    buffers = ReceiveBuffers()
    array = buffers.take(SIZE)
    array[:] = 7
    gone = weakref.ref(array)
    where = place(array)
    view = jax.block_until_ready(VIEWS[name](array))
    del array
    gc.collect()
    others = [buffers.take(SIZE) for _ in range(3)]
    is_lent = gone() is not None
    assert is_lent == (where not in map(place, others))
    for each in others:
        each[:] = 9
    match view:  # what the view shows has not changed, lent or copied
        case np.ndarray() | memoryview() | jax.Array():
            assert set(np.asarray(view).tobytes()) == {7}
        case _:
            assert is_lent
    del view, others
    gc.collect()
    assert gone() is None
    assert where in [place(each) for each in [buffers.take(SIZE) for _ in range(4)]]


def test_a_program_that_runs_keeps_its_arguments_memory():
    buffers = ReceiveBuffers()
    step = jax.jit(lambda x: jnp.sin(x).sum())
    found = []
    for turn in range(20):
        array = buffers.take(SIZE).view(np.float32)
        array[:] = turn
        found.append(step(array))  # not waited for
        del array
    expected = [np.sin(np.float32(turn)) * (SIZE // 4) for turn in range(20)]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def late(x):
    """Reads its argument when other work is done."""
    matrix = jax.lax.fori_loop(0, 50, lambda _, m: jnp.sin(m @ m), jnp.eye(200) / 2)
    return x + jnp.minimum(matrix[0, 0], 0) * 0


def unchanged(x):
    return x


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
@pytest.mark.parametrize("function", [late, unchanged])
def test_memory_is_not_used_again_while_a_program_reads_or_holds_it(function, donated):
    buffers = ReceiveBuffers()
    jitted = jax.jit(function, donate_argnums=donated)
    ahead = jitted.lower(jax.ShapeDtypeStruct((SIZE // 4,), np.float32)).compile()
    for call in (jitted, ahead):
        for place_ in (lambda x: x, jax.device_put, jnp.asarray):
            array = buffers.take(SIZE).view(np.float32)
            array[:] = 7
            found = call(place_(array))
            del array
            for _ in range(3):
                buffers.take(SIZE)[:] = 255  # whatever is given, it is written
            np.testing.assert_array_equal(found, np.full(SIZE // 4, 7, np.float32))
            for _ in range(3):
                buffers.take(SIZE)[:] = 255
            np.testing.assert_array_equal(found, np.full(SIZE // 4, 7, np.float32))


def test_similar_sizes_share_memory_and_others_do_not():
    buffers = ReceiveBuffers()
    where = place(buffers.take(SIZE - 3))
    assert place(buffers.take(SIZE)) == where
    large = buffers.take(2 * SIZE)
    assert large.size == 2 * SIZE and buffers.idle_bytes == SIZE


@pytest.mark.parametrize(
    "size", [0, 1, SMALLEST - 1, SMALLEST, SMALLEST + 1, 1_000_003]
)
def test_arrays_have_their_size_and_can_be_written(size):
    array = ReceiveBuffers().take(size)
    array[:] = 3
    assert array.shape == (size,) and array.dtype == np.uint8
    assert size < SMALLEST or place(array) % 64 == 0


def test_only_so_much_idle_memory_is_kept():
    buffers = ReceiveBuffers(most=3 * SIZE)
    held = [buffers.take(SIZE) for _ in range(5)]
    held += [buffers.take(2 * SIZE)]
    del held
    assert buffers.idle_bytes <= 3 * SIZE
    again = [buffers.take(SIZE) for _ in range(3)]
    assert len({place(each) for each in again}) == 3


def test_memory_in_a_circle_comes_back_with_the_collector():
    buffers = ReceiveBuffers()
    circle = [buffers.take(SIZE)]
    circle.append(circle)
    del circle
    gc.collect()
    assert buffers.idle_bytes == SIZE


def test_threads_never_share_memory():
    buffers = ReceiveBuffers()
    wrong = []

    def run(own):
        for _ in range(300):
            array = buffers.take(SIZE)
            array[::4096] = own
            view = array[::4096]
            del array
            if (view != own).any():
                wrong.append(own)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert buffers.idle_bytes <= 6 * SIZE
