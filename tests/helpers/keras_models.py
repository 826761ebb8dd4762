"""A Keras model with all that is hard to divide."""

import keras


def compiled(columns=3, **options):
    """A model with all that is hard to divide: statistics and random numbers."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    # A bias before a norm has no gradient, and Adam takes steps of the rounding.
    dense = layers.Dense(4, use_bias=False)
    norm, drop = layers.BatchNormalization(), layers.Dropout(0.3)
    parts = [keras.Input((columns,)), dense, norm, drop, layers.Dense(1)]
    model = keras.Sequential(parts)
    optimizer = keras.optimizers.Adam(1e-2)
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model
