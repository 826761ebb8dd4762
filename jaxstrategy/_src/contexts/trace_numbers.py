"""The numbers of traces, by which JAX tells apart what they have jitted."""

from __future__ import annotations

import itertools

import jax

_numbers = itertools.count()


def new_trace() -> int:
    """A number that no other trace has."""
    return next(_numbers)


def forget_jitted() -> None:
    """Let no jitted function keep tracers, if JAX is to look for kept ones.

    One that stands outside of a step and uses a variable is kept with the tracer of its
    reference (or of its value, in a function that is differentiated); so are masks. No
    other trace finds it, but `jax.checking_leaks` does; and there is no telling which
    function it is. It is the tool for finding errors: that all are traced and compiled
    again is better than an alarm at what the user has not done.
    """
    if jax.config.jax_check_tracer_leaks:
        jax.clear_caches()
