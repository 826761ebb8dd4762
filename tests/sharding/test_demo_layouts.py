"""The main job, on replicas of several devices and on several of one device."""

import jax
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.demo import _demo as demo
from jaxstrategy.demo._command_line import make_parser


@pytest.mark.slow
def test_the_loss_curve_is_that_of_one_device():
    options = demo.Arguments(**vars(make_parser().parse_args(["--epochs", "1"])))

    def curve(devices, **layout):
        strategy = js.MirroredStrategy(jax.devices()[:devices], **layout)
        (epoch,) = demo.train(strategy, options, lambda: None)
        return epoch.losses

    with jax.default_matmul_precision("float32"):
        wanted = curve(1)
        assert wanted[-1] < wanted[0] / 2
        for found in (
            curve(8, logical_axes={"core": 2}),
            curve(1, replicas_per_device=4),
        ):
            np.testing.assert_allclose(found, wanted, atol=1e-5)
