"""Checkpoints of training, which any strategy restores.

What is saved are logical values: what a variable reads as, one copy of what is
mirrored. So a checkpoint does not depend on the strategy, the number of replicas,
devices or processes that wrote it. The arrays are written by Orbax, and plain Orbax
reads them.

    manager = js.checkpoint.CheckpointManager("checkpoints", strategy)
    state, step = manager.restore_or_init(init)
    ...
    manager.save(step, state)
"""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.checkpoint._manager import CheckpointManager as CheckpointManager
    from jaxstrategy.checkpoint._manager import Restored as Restored
    from jaxstrategy.checkpoint._record import CheckpointError as CheckpointError
    from jaxstrategy.checkpoint._record import (
        DamagedCheckpointWarning as DamagedCheckpointWarning,
    )
    from jaxstrategy.checkpoint._record import MismatchError as MismatchError
    from jaxstrategy.checkpoint._record import Record as Record
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "checkpoint._manager": "CheckpointManager Restored",
            "checkpoint._record": (
                "CheckpointError DamagedCheckpointWarning MismatchError Record"
            ),
        },
    )
