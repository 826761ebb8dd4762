"""A dataset that is divided where it is read: `DeferredDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, final

from jaxstrategy.inputs._dataset import DistributedDataset
from jaxstrategy.inputs._distribute import Feeding
from jaxstrategy.inputs._input_options import InputContext, InputOptions
from jaxstrategy.inputs.sources._choose import as_source
from jaxstrategy.inputs.sources._source import Dataset
from jaxstrategy.processes._agreement import Agreement
from jaxstrategy.replicas._replicas import Replicas


@final
class DeferredDataset(DistributedDataset):
    """Batches for the replicas of whichever worker reads them.

    Made by `experimental_distribute_dataset` and `distribute_datasets_from_function` of
    a `ParameterServerStrategy`. Its batches are on the workers: give it, or a function
    that makes it, to `ClusterCoordinator.create_per_worker_dataset`.

    Args:
      given: where batches come from; or a function of an `InputContext`.
      is_function: whether it is one.
      options: how they reach the replicas.

    Raises:
      TypeError: it is nothing that batches can be read from.

    >>> import jaxstrategy as js
    >>> strategy = js.ParameterServerStrategy(workers=2, parameter_servers=1,
    ...                                       backend="threads")
    >>> strategy.experimental_distribute_dataset([np.arange(4)])
    DeferredDataset(the list)
    """

    def __init__(
        self,
        given: Dataset | Callable[[InputContext], Dataset],
        is_function: bool,
        options: InputOptions,
    ) -> None:
        self._given = given
        self._is_function = is_function
        self._options = options
        if not is_function:
            as_source(given)  # which complains now, and not on each worker

    @property
    def only_once(self) -> Iterator[Any] | None:
        """The iterator that it reads from, if that can be read only once."""
        given: Any = self._given
        return given if isinstance(given, Iterator) and not self._is_function else None

    def placed(self, replicas: Replicas) -> DistributedDataset:
        """The batches, divided over some replicas of this process.

        Raises:
          TypeError: the function gives nothing that batches can be read from.
        """
        feeding = Feeding(replicas, Agreement)
        make = feeding.of_function if self._is_function else feeding.of_dataset
        return make(self._given, self._options)

    def __iter__(self) -> NoReturn:
        raise self._refusal()

    @property
    def element_spec(self) -> NoReturn:
        """None: workers may have another one.

        Raises:
          ValueError: always; the per-worker dataset made of it has one.
        """
        raise self._refusal()

    def __len__(self) -> NoReturn:
        raise TypeError(
            "How many steps a dataset of a ParameterServerStrategy has is known on the "
            "workers only."
        )

    def reduce(self, initial_state: object, reduce_func: object) -> NoReturn:
        """None: the batches are not here.

        Raises:
          ValueError: always.
        """
        raise self._refusal()

    def _refusal(self) -> ValueError:
        return ValueError(
            "A dataset of a ParameterServerStrategy was read directly, but its batches "
            "are for the workers. Pass it, or a function that makes it, to "
            "`ClusterCoordinator.create_per_worker_dataset`, and schedule functions of "
            "an iterator over what that returns."
        )

    def __repr__(self) -> str:
        if self._is_function:
            name = getattr(self._given, "__name__", type(self._given).__name__)
        else:
            name = as_source(self._given).name
        return f"DeferredDataset({name})"
