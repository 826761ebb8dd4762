"""Lines of the steps of tests, as messages name them."""

import inspect

import pytest
from jax import lax

import jaxstrategy as js
from jaxstrategy._src.text import Line

AXIS = "replica"
# One replica has nobody to wait for, and nothing differs there.
SEVERAL = pytest.mark.parametrize(
    "strategy", [8], ids="{}-replicas".format, indirect=True
)


def ids(strategy):
    """1, 2, ... on the replicas."""
    count = strategy.num_replicas_in_sync
    return strategy.per_replica([float(i + 1) for i in range(count)])


def marked(fn, mark):
    """The line of `fn` that ends with the comment `# <- mark`, as reports have it."""
    lines, start = inspect.getsourcelines(fn)
    (offset,) = (i for i, line in enumerate(lines) if line.endswith(f"# <- {mark}\n"))
    return Line(inspect.unwrap(fn).__code__.co_filename, start + offset)


def place(fn, marker):
    """`file:line: code` of the line of `fn` with `marker` in a comment after `# <-`."""
    lines, start = inspect.getsourcelines(fn)
    comments = [text.partition("# <- ")[2].strip().split(", ") for text in lines]
    (found,) = (i for i, markers in enumerate(comments) if marker in markers)
    file = inspect.unwrap(fn).__code__.co_filename
    return f"{file}:{start + found}: {lines[found].strip()}"


def forgets(w, x):
    """Forgets to reduce the gradient."""
    residual = w * x  # <- began
    grad = 2 * residual
    new = {"params": {"w": w - grad}, "loss": lax.pmean(residual**2, AXIS)}
    return new, grad


def fails_with(strategy, expected, step=forgets, args=None):
    options = js.RunOptions(expect_mirrored=expected)
    with pytest.raises(js.errors.NotMirroredError) as caught:
        strategy.run(step, args or (1.0, ids(strategy)), options=options)
    assert not js.in_cross_replica_context()
    return caught.value
