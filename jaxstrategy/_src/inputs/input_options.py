"""Options of inputs, and the context that input functions are given."""

from __future__ import annotations

import dataclasses
import enum

from jaxstrategy._src.text import shown, whole


class InputReplicationMode(enum.Enum):
    """The number of input pipelines: one for each process, or for each replica.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> mode = js.InputReplicationMode.PER_REPLICA
    >>> options = js.InputOptions(experimental_replication_mode=mode)
    >>> def dataset_fn(context):  # called for replica 0, then for replica 1
    ...     return [np.full(2, context.input_pipeline_id)]
    >>> (batch,) = strategy.distribute_datasets_from_function(dataset_fn, options)
    >>> batch.values
    (Array([0, 0], dtype=int32), Array([1, 1], dtype=int32))
    """

    PER_WORKER = "per worker"
    """One for each process: its batches go to its replicas in turn."""
    PER_REPLICA = "per replica"
    """One for each replica."""


REMAINDERS = ("pad", "drop", "drop_empty", "error")


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """Options of a distributed dataset: how its batches reach the replicas.

    Attributes:
      experimental_fetch_to_device: copy batches to the devices ahead of the step that
        uses them. If not, they are read ahead, and copied when they are asked for.
      experimental_replication_mode: how often an input function is called.
      experimental_place_dataset_on_device: the batches of an input function for each
        replica are on its device already, so that nothing is read ahead.
      experimental_per_replica_buffer_size: how many batches are prepared ahead, in a
        thread of their own; with 0, and no thread, each when it is asked for.
      remainder: what to do with a batch with fewer rows than the first, or than the
        replicas can share equally: `"pad"` fills it up with copies of its last row,
        which `batch_mask` tells from real ones, and where there is one replica gives
        it the rows that there are; `"drop"` leaves it out; `"drop_empty"` leaves it out
        if a replica would have no row of it, and else fills it up; `"error"` raises.

    Raises:
      ValueError: an attribute has no meaning, alone or with the others.

    >>> import jaxstrategy as js
    >>> js.InputOptions(remainder="drop").remainder
    'drop'
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = (
        InputReplicationMode.PER_WORKER
    )
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 2
    remainder: str = "pad"

    def __post_init__(self) -> None:
        if self.remainder not in REMAINDERS:
            raise ValueError(
                f"`remainder` was {self.remainder!r}; one of "
                f"{', '.join(map(repr, REMAINDERS))} was wanted."
            )
        if not isinstance(self.experimental_replication_mode, InputReplicationMode):
            raise ValueError(
                "`experimental_replication_mode` was "
                f"{self.experimental_replication_mode!r}; an InputReplicationMode was "
                "wanted."
            )
        ahead = whole(self.experimental_per_replica_buffer_size)
        if ahead is None or ahead < 0:
            raise ValueError(
                "`experimental_per_replica_buffer_size` was "
                f"{self.experimental_per_replica_buffer_size!r}; a whole number of "
                "batches, at least 0, was wanted."
            )
        if self.experimental_place_dataset_on_device and (
            self.experimental_fetch_to_device
            or self.experimental_replication_mode is InputReplicationMode.PER_WORKER
        ):
            raise ValueError(
                "`experimental_place_dataset_on_device=True` says that each replica "
                "has a pipeline on its own device. It needs "
                "`experimental_fetch_to_device=False` and "
                "`experimental_replication_mode=InputReplicationMode.PER_REPLICA`."
            )

    @property
    def leaves_out(self) -> bool:
        """Whether steps some of whose rows are missing may be left out."""
        return self.remainder.startswith("drop")

    @property
    def ahead(self) -> int:
        """The number of batches that are prepared ahead."""
        if self.experimental_place_dataset_on_device:
            return 0
        return int(self.experimental_per_replica_buffer_size)


def checked_input_options(options: object) -> InputOptions:
    """`options`, or the default for None."""
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"`options` was {options!r}; an InputOptions was wanted.")
    return options


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The argument of the function for `Strategy.distribute_datasets_from_function`.

    Attributes:
      num_input_pipelines: how many times the function is called in all.
      input_pipeline_id: which of these calls this is, from 0.
      num_replicas_in_sync: how many replicas there are in all.

    Raises:
      TypeError: one of them is no whole number.
      ValueError: one of them is out of range.

    >>> import jaxstrategy as js
    >>> js.InputContext(2, 1, 6).get_per_replica_batch_size(12)
    2
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        _check_count("num_input_pipelines", self.num_input_pipelines, 1, None)
        _check_count(
            "input_pipeline_id", self.input_pipeline_id, 0, self.num_input_pipelines
        )
        _check_count("num_replicas_in_sync", self.num_replicas_in_sync, 1, None)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows of each replica.

        Raises:
          TypeError: `global_batch_size` is no whole number.
          ValueError: it is negative, or the replicas cannot share the rows equally.
        """
        _check_count("global_batch_size", global_batch_size, 0, None)
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size} is not divisible by "
                f"num_replicas_in_sync {self.num_replicas_in_sync}."
            )
        return global_batch_size // self.num_replicas_in_sync


def _check_count(name: str, given: object, least: int, below: int | None) -> None:
    """Raise unless it is a whole number from `least` on, and less than `below`."""
    number = whole(given)
    if number is not None and number >= least and (below is None or number < below):
        return
    kind = TypeError if number is None else ValueError
    end = " on" if below is None else f" to {below - 1}"
    text = f"`{name}` was {shown(given)}; a whole number from {least}{end} was wanted."
    raise kind(text)
