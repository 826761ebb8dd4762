"""Trees of numbers."""

import jax
import numpy as np


def assert_close(have, want, tolerance=1e-5):
    def close(have, want):
        np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance)

    jax.tree.map(close, have, want)
