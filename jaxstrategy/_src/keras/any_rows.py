"""Keras' data parallelism for batches of any number of rows. Imports Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import keras


@final
class AnyRows(keras.distribution.DataParallel):
    """A batch whose rows do not divide equally lies whole on each device.

    Keras' own class refuses it (Keras 3.15).
    """

    def get_data_layout(
        self, data_shape: Sequence[int]
    ) -> keras.distribution.TensorLayout:
        """The layout of a batch of this shape."""
        if data_shape and data_shape[0] % self.num_model_replicas == 0:
            return super().get_data_layout(data_shape)
        axes = [None] * len(data_shape)
        return keras.distribution.TensorLayout(axes, self.device_mesh)
