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

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.checkpoint.folder import (
        CheckpointError as CheckpointError,
        DamagedCheckpointWarning as DamagedCheckpointWarning,
        MismatchError as MismatchError,
        Record as Record,
    )
    from jaxstrategy._src.checkpoint.manager import (
        CheckpointManager as CheckpointManager,
        Restored as Restored,
    )
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
