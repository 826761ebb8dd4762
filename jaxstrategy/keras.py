"""Keras 3 on JAX: models that are made in `strategy.scope()` train on its devices.

Nothing of this module has to be called. With `KERAS_BACKEND=jax`, this takes the steps
of one device with the whole batch::

    with strategy.scope():
        model = keras.Sequential([...])
        model.compile(optimizer, loss)
    model.fit(x, y, batch_size=32)

`batch_size` is the global one, and BatchNorm, Dropout, losses and metrics see all its
rows. `fit`, `evaluate` and `predict` may be called inside or outside of the scope. A
batch whose rows the devices cannot divide equally is computed whole by each, so its
numbers are exact. Each process of a job gives the same data, and takes its own part of
each batch.

The first scope in a process that has imported Keras adds to methods of
`keras.Model`: what they do for other models stays as it was. `distribution(strategy)`
is the `keras.distribution.DataParallel` for programs that want to set it themselves.

For a loop of your own, `stateless_call` and `stateless_update_state` stand for the
methods of these names in a step of `strategy.run`, and `BatchNormalization` for Keras'
layer. Keras is imported when that layer is asked for.
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.keras.keras_models import (
        BatchNormalization as BatchNormalization,
        distribution as distribution,
        stateless_call as stateless_call,
        stateless_update_state as stateless_update_state,
    )
else:
    __getattr__, __dir__ = lazy_names.attach(__name__, extra=("keras", "Keras"))
