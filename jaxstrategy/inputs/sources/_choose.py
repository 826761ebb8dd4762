"""The kind of source that a dataset is."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax

from jaxstrategy.inputs.sources import _plain
from jaxstrategy.inputs.sources._grain import GrainSource
from jaxstrategy.inputs.sources._hugging_face import StreamSource, TableSource
from jaxstrategy.inputs.sources._source import Dataset, Source
from jaxstrategy.inputs.sources._tf_data import TfDataSource, is_tf_data
from jaxstrategy.inputs.sources._torch import TorchSource
from jaxstrategy.text._array_types import array_type
from jaxstrategy.text._lists import first_few
from jaxstrategy.values import _arrays, _per_replica
from jaxstrategy.values._types import Leaf

_KINDS = (
    "Give global batches: a list, a generator function or another iterable of them, "
    "`js.batches(arrays, batch_size)`, a Grain dataset, a PyTorch DataLoader, a "
    "tf.data.Dataset, or a Hugging Face dataset in NumPy form."
)
# By module, class and source. Who has such a dataset has imported the library.
_LIBRARIES = (
    ("grain", "MapDataset", GrainSource),
    ("grain", "IterDataset", GrainSource),
    ("grain", "DataLoader", GrainSource),
    ("torchdata.stateful_dataloader", "StatefulDataLoader", TorchSource),
    ("torch.utils.data", "DataLoader", TorchSource),
    ("datasets", "Dataset", TableSource),
    ("datasets", "IterableDataset", StreamSource),
)


def as_source(dataset: Dataset) -> Source:
    """`dataset` as a source of batches, by what it can do; nothing is read yet.

    Raises:
      TypeError: it is no dataset of batches; the message says what to give.
    """
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, type):
        raise TypeError(
            f"The dataset is the class {dataset.__name__}. Give an instance of it, "
            f"as in `{dataset.__name__}(...)`."
        )
    for module, kind, source in _LIBRARIES:
        if _is(dataset, module, kind):
            return source(dataset)
    if is_tf_data(dataset):
        return TfDataSource(dataset)
    _check_not_data(dataset)
    return _plain_source(dataset)


def _plain_source(dataset: Dataset) -> Source:
    if isinstance(dataset, Iterator):
        return _plain.Once(dataset)
    if isinstance(dataset, Iterable):
        return _plain.Repeatable(dataset)
    if callable(dataset):
        _check_no_arguments(dataset)
        function: Dataset = dataset
        return _plain.Generated(function)
    raise TypeError(f"{_named(dataset)} is not a dataset. {_KINDS}")


def _is(dataset: Dataset, module: str, kind: str) -> bool:
    known = getattr(sys.modules.get(module), kind, None)
    return isinstance(known, type) and isinstance(dataset, known)


def _check_not_data(dataset: Dataset) -> None:
    """Raise if `dataset` is examples, or one batch, rather than batches."""
    if isinstance(dataset, (str, bytes)):
        raise TypeError(
            f"The dataset is the text {dataset!r:.100}. If it names a file, load it: "
            f"`js.batches(np.load(file, mmap_mode='r'), batch_size)`. {_KINDS}"
        )
    if _per_replica.is_per_replica(dataset):
        raise TypeError(
            "The dataset is a PerReplica, one batch that is already divided over the "
            "replicas. Pass it to `strategy.run` as an argument."
        )
    if _is(dataset, "torch.utils.data", "Dataset"):
        raise TypeError(
            f"{_named(dataset)} is a PyTorch dataset of examples and not of batches. "
            "Give `torch.utils.data.DataLoader(dataset, batch_size)`."
        )
    if isinstance(dataset, Mapping) and any(
        _is(part, "datasets", kind)
        for part in dataset.values()
        for kind in ("Dataset", "IterableDataset")
    ):
        raise TypeError(
            f"{_named(dataset)} holds several datasets: {', '.join(map(str, dataset))}."
            f" Give one of them, as in `dataset[{next(iter(dataset))!r}]`."
        )
    if _is_arrays(dataset):
        is_named = hasattr(dataset, "_fields")
        if isinstance(dataset, (list, tuple)) and not is_named:
            raise TypeError(_several_arrays(dataset))
        raise TypeError(
            f"{_named(dataset)} is arrays without a batch size. Give "
            "`js.batches(arrays, batch_size)`, which cuts them into batches; if it is "
            "one batch, put it in a list: `[batch]`."
        )


def _is_arrays(dataset: Dataset) -> bool:
    """Whether `dataset` is a pytree of arrays rather than a list of batches."""
    if hasattr(dataset, "__array__") or isinstance(dataset, Mapping):
        return True
    if isinstance(dataset, (list, tuple)) and not hasattr(dataset, "_fields"):
        # A list is of batches, alike but for their rows. A tuple is one batch `x, y`,
        # even if both are alike.
        if not all(_arrays.is_array(part) and part.ndim for part in dataset):
            return False
        kinds = {(part.dtype, part.shape[1:]) for part in dataset}
        return len(kinds) > 1 or (isinstance(dataset, tuple) and bool(kinds))
    return dataset is not None and not jax.tree_util.all_leaves([dataset])


def _several_arrays(arrays: Sequence[Leaf]) -> str:
    """The complaint about arrays that are neither batches of one kind nor one batch."""
    types = (array_type(array.dtype, array.shape) for array in arrays)
    named = first_few(types, 4)
    why = "" if isinstance(arrays, tuple) else ", which are not batches of one kind"
    return (
        f"{_named(arrays)} holds {named}{why}. A list is a list of batches, alike but "
        "for their rows; a tuple of arrays is one batch. Give "
        "`js.batches((x, y), batch_size)`, which cuts arrays into batches; if they are "
        "one batch, put a tuple of them in a list: `[(x, y)]`."
    )


def _check_no_arguments(function: Dataset) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TypeError(
            f"The function `{getattr(function, '__name__', function)}` given as a "
            f"dataset cannot be called without arguments ({error}). Give them with "
            "`functools.partial(function, ...)` or `lambda: function(...)`. For a "
            "function of an InputContext use "
            "`strategy.distribute_datasets_from_function`."
        ) from None
    except ValueError:  # a builtin without a signature: its call will tell
        return


def _named(dataset: Dataset) -> str:
    return f"The {type(dataset).__name__} given as a dataset"
