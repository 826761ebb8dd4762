"""The line of the user's code that an operation is put down to."""

import linecache

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from helpers.lines import fails_with, ids, place
from jax import lax


def began(strategy, step, *args):
    """Where the only result of a step began to vary."""
    return fails_with(strategy, True, step, args).line


@jax.jit
def called_twice(x):
    doubled = x * 2  # <- inside
    return doubled


def test_a_line_inside_a_jitted_function_whoever_calls_it(two):
    def step(x):
        first = called_twice(1.0)
        return first + called_twice(x)

    called_twice(jnp.float32(1))
    assert began(two, step, ids(two)) == place(called_twice, "inside")
    assert began(two, lambda x: called_twice(x), ids(two)) == place(
        called_twice, "inside"
    )


def test_the_users_line_that_calls_into_numpy_is_not_an_earlier_ones(two):
    def earlier(x):
        return jnp.clip(x, 0, 9), jnp.linalg.norm(x[None]), jnp.median(x[None])

    def clips(x):
        return jnp.clip(x, 0, 9)  # <- here

    def norms(x):
        return jnp.linalg.norm(x[None] * 1.0)  # <- here

    two.run(earlier, (ids(two),))  # JAX keeps what it traced in there
    assert began(two, clips, ids(two)) == place(clips, "here")
    assert began(two, norms, ids(two)) == place(norms, "here")


def defined_in(filename, source):
    names = {"lax": lax, "jnp": jnp}
    exec(compile(source, filename, "exec"), names)
    return names["step"]


def test_lines_of_a_notebooks_cell(two, monkeypatch):
    source = "def step(x):\n    y = x * 2\n    return y + 1\n"
    name = "<ipython-input-1>"
    entry = (len(source), None, source.splitlines(keepends=True), name)
    monkeypatch.setitem(linecache.cache, name, entry)
    line = began(two, defined_in(name, source), ids(two))
    assert line == "<ipython-input-1>:2: y = x * 2"


def test_a_file_that_is_gone_gives_the_number_of_the_line(two, tmp_path):
    gone = str(tmp_path / "gone.py")
    step = defined_in(gone, "def step(x):\n    return x * 2\n")
    assert began(two, step, ids(two)) == f"{gone}:2"


def test_code_made_on_the_fly_is_put_down_to_the_line_that_calls_it(two):
    generated = defined_in("<string>", "def step(x):\n    return x * 2\n")

    def step(x):
        return generated(x)  # <- here

    assert began(two, step, ids(two)) == place(step, "here")
    assert began(two, generated, ids(two)) == "<string>:2"  # there is no better


def test_a_line_in_a_library_is_put_down_to_the_users_that_calls_it(two):
    net = nn.Dense(2)
    params = net.init(jax.random.key(0), jnp.ones(3))

    def step(params, x):
        return net.apply(params, x * jnp.ones(3))

    def of_params(params, x):
        return net.apply(x, jnp.ones(3))  # <- here

    x = two.per_replica([1.0, 2.0])
    stacked = two.per_replica([params, params])
    assert began(two, of_params, params, stacked) == place(of_params, "here")
    assert began(two, step, params, x).endswith("net.apply(params, x * jnp.ones(3))")


def test_a_step_that_is_a_librarys_has_the_librarys_line(two):
    line = began(two, optax.safe_norm, ids(two), 0.1)
    assert "optax" in line
