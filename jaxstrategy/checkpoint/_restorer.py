"""Reading checkpoints into states: `Restorer`."""

from __future__ import annotations

from typing import final

import jax

from jaxstrategy.checkpoint._restored import Restored
from jaxstrategy.checkpoint._written_state import WrittenState
from jaxstrategy.checkpoint.backends._backend import AbstractBackend
from jaxstrategy.checkpoint.folders import _record
from jaxstrategy.checkpoint.folders._catalogue import Catalogue
from jaxstrategy.checkpoint.folders._checkpoint_errors import (
    CheckpointError,
    DamagedCheckpointWarning,
)
from jaxstrategy.checkpoint.folders._record import Damage
from jaxstrategy.checkpoint.processes import _checkpoint_agreement
from jaxstrategy.checkpoint.processes._checkpoint_agreement import first_line
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.text import _user_code
from jaxstrategy.values._types import PyTree


@final
class Restorer:
    """Restores states from a folder, once all processes have found it undamaged.

    Args:
      catalogue: of the folder.
      backend: reads.
    """

    def __init__(self, catalogue: Catalogue, backend: AbstractBackend) -> None:
        self._catalogue = catalogue
        self._folder = catalogue.folder
        self._backend = backend

    def restore(
        self,
        state_like: PyTree,
        step: int | None,
        partial: bool,
        replicas: Replicas | None,
    ) -> tuple[PyTree, Restored]:
        """A state as it was saved, and what else is known of it.

        Args:
          state_like: a state of the same structure.
          step: of the checkpoint; None for the latest that is not damaged.
          partial: restore what both have.
          replicas: where values go that lie nowhere yet.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CheckpointError: it is damaged, or all are.
          MismatchError: it holds something else.
        """
        named = self._catalogue.named(self._catalogue.what("restore", step))
        damaged: dict[int, str] = {}
        if step is not None:
            self._catalogue.require(step, named)
            self._check(step)
        elif named:
            step, damaged = self._latest_good(named)
        else:
            raise FileNotFoundError(
                f"There is no checkpoint in `{self._folder.path}`. Save one, "
                "or begin with `restore_or_init`."
            )
        return self._read(state_like, step, partial, damaged, replicas)

    def _check(self, step: int) -> None:
        reason = self._verified(step)
        if reason is not None:
            raise CheckpointError(
                f"Checkpoint {step} in `{self._folder.path}` is damaged: "
                f"{reason}. Without a step the latest good one is restored."
            )

    def _latest_good(self, named: list[int]) -> tuple[int, dict[int, str]]:
        damaged: dict[int, str] = {}
        step = named[-1]
        # Orbax goes back to no earlier step by itself (0.12.8).
        for step in reversed(named):
            reason = self._verified(step)
            if reason is None:
                break
            damaged[step] = reason
        told = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
        if len(damaged) == len(named):
            raise CheckpointError(
                f"All checkpoints in `{self._folder.path}` are damaged. {told}. Delete "
                "or move them to begin anew."
            )
        if damaged:
            self._catalogue.damaged |= set(damaged)
            _user_code.warn(
                f"Checkpoint {step} in `{self._folder.path}` is restored, "
                f"because later ones are damaged. {told}.",
                DamagedCheckpointWarning,
            )
        return step, damaged

    def _verified(self, step: int) -> str | None:
        """The reason why a checkpoint cannot be used, the same in all processes."""
        folder, what = (
            self._folder.of(step),
            self._catalogue.what("verify", step),
        )
        try:
            with _checkpoint_agreement.watched(what, busy="reads its files"):
                record = self._folder.record(step)
                _record.verify(folder, record, jax.process_index(), jax.process_count())
            reason = None
        except Damage as damage:
            reason = str(damage)
        except OSError as error:
            reason = f"it cannot be read: {first_line(error)}"
        reasons = _checkpoint_agreement.agree(what, reason)
        return next((each for each in reasons if each is not None), None)

    def _read(
        self,
        state_like: PyTree,
        step: int,
        partial: bool,
        damaged: dict[int, str],
        replicas: Replicas | None,
    ) -> tuple[PyTree, Restored]:
        record = self._catalogue.record(step)
        state = WrittenState(state_like, replicas)
        what = self._catalogue.what("restore", step)
        _checkpoint_agreement.compare_leaves(what, list(state.names))
        where = f"Checkpoint {step} in `{self._folder.path}`"
        fit = state.fit(record.leaves, where, partial)
        readings = state.readings(record.leaves, fit.common)
        try:
            with _checkpoint_agreement.watched(what, busy="reads arrays"):
                arrays = self._backend.read(self._folder.of(step), readings)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{where} could not be read: {first_line(error)}. Did "
                "another program delete or change it meanwhile?"
            ) from error
        restored = state.restored(record.leaves, fit.common, arrays)
        return restored, Restored(
            step, record.metrics, record.extra, fit.missing, fit.unexpected, damaged
        )
