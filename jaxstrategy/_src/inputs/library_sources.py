"""Sources for Grain, PyTorch and Hugging Face, and which one a dataset is."""

from __future__ import annotations

import base64
import inspect
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.inputs import sources
from jaxstrategy._src.inputs.sources import (
    Dataset,
    ReadingOrder,
    SnapshotIterator,
    Source,
    SourceIterator,
    State,
)
from jaxstrategy._src.text import array_type, first_few
from jaxstrategy._src.values import arrays as _arrays, per_replica
from jaxstrategy._src.values.arrays import Leaf, PyTree

_NAME = "the PyTorch DataLoader"


def torch_source(loader: Dataset) -> Source:
    """A loader whose tensors become NumPy arrays, in the same memory if it can be."""
    # Lists become tuples: PyTorch gives a batch of pairs as the list `[x, y]`.
    order = ReadingOrder()

    def length() -> int | None:
        # The `len` of an iterable is only a guess.
        return None if _is_iterable_style(loader) else sources.length_of(loader)

    def start() -> SourceIterator:
        if hasattr(loader, "state_dict"):
            return _StatefulPass(loader, _NAME, order, length())
        begin, refusal = lambda _: map(to_numpy, iter(loader)), _refusal(loader)
        return SourceIterator(_NAME, begin, length(), refusal=refusal)

    return Source(_NAME, start, length)


def _refusal(loader: Dataset) -> str | None:
    """Why a pass cannot resume; None if each gives the same batches in order."""
    data = sys.modules["torch.utils.data"]
    sampler, of_batches = loader.sampler, loader.batch_sampler
    is_plain = of_batches is None or type(of_batches) is data.BatchSampler
    if of_batches is not None and is_plain:
        sampler = of_batches.sampler
    # With a batch sampler of the user's own, `loader.sampler` is not used.
    if _is_iterable_style(loader):
        why = "its dataset is an iterable, which PyTorch cannot begin in the middle"
    elif is_plain and type(sampler) is data.SequentialSampler:
        return None
    else:
        why = "its sampler is not sequential, so the order would differ"
    return (
        f"{why}. Use a `torchdata.stateful_dataloader.StatefulDataLoader`, Grain, or "
        "`js.batches(arrays, batch_size, shuffle=seed)`."
    )


@final
class _StatefulPass(SnapshotIterator):
    """A pass over a loader with `state_dict` and `load_state_dict`."""

    _is_over = False  # a loader's state at the end begins a new pass

    def _start(self) -> Any:
        return iter(self._dataset)

    def _read(self) -> PyTree:
        try:
            return to_numpy(super()._read())
        except StopIteration:
            self._is_over = True
            raise

    def _take(self) -> dict[str, State]:
        file = io.BytesIO()
        sys.modules["torch"].save(self._dataset.state_dict(), file)
        text = base64.b64encode(file.getvalue()).decode()
        place = {"torch": text, "is_over": self._is_over}
        return {**place, **sources.of_length(self._length)}

    def _load(self, state: State) -> None:
        match state:
            case {"torch": str(text), "is_over": bool(is_over)}:
                file = io.BytesIO(base64.b64decode(text))
                # Only tensors and plain values are read: a checkpoint runs no code.
                own = sys.modules["torch"].load(file, weights_only=True)
            case _:
                raise sources.foreign(_NAME, state, "its `state_dict`")
        sources.check_length(state, self._length, _NAME)
        self.close()
        self._dataset.load_state_dict(own)
        self._is_over = is_over
        self._begun((lambda: iter(())) if is_over else None)

    def close(self) -> None:
        self._iterator = None  # workers end with it


def to_numpy(batch: PyTree, what: str = "batch") -> PyTree:
    """`batch` with NumPy arrays for tensors, tuples for lists, dicts for mappings."""
    if isinstance(batch, Mapping):  # such as what tokenizers of Hugging Face return
        return {
            key: to_numpy(value, f"{what}[{key!r}]") for key, value in batch.items()
        }
    if isinstance(batch, (list, tuple)):
        parts = [to_numpy(value, f"{what}[{i}]") for i, value in enumerate(batch)]
        is_named = hasattr(batch, "_fields")
        return type(batch)(*parts) if is_named else tuple(parts)
    return _array(batch, what) if hasattr(batch, "untyped_storage") else batch


# Types that NumPy lacks and JAX has, and integers of the same size.
_OTHERS = {
    "torch.bfloat16": ("int16", jnp.bfloat16),
    "torch.float8_e4m3fn": ("uint8", jnp.float8_e4m3fn),
    "torch.float8_e4m3fnuz": ("uint8", jnp.float8_e4m3fnuz),
    "torch.float8_e5m2": ("uint8", jnp.float8_e5m2),
    "torch.float8_e5m2fnuz": ("uint8", jnp.float8_e5m2fnuz),
}


def _array(tensor: Leaf, what: str) -> np.ndarray:
    torch = sys.modules["torch"]
    try:
        if str(tensor.dtype) in _OTHERS:
            bits, dtype = _OTHERS[str(tensor.dtype)]
            same = tensor.detach().cpu().contiguous().view(getattr(torch, bits))
            return same.numpy().view(dtype)
        return tensor.numpy(force=True)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"`{what}` is a tensor of {tensor.dtype} ({tensor.layout}), which NumPy "
            f"cannot hold ({error}). Convert it in the dataset or in `collate_fn`, "
            "with `tensor.to_dense()` or `tensor.to(torch.float32)` for example."
        ) from error


def _is_iterable_style(loader: Dataset) -> bool:
    kind = sys.modules["torch.utils.data"].IterableDataset
    return isinstance(getattr(loader, "dataset", None), kind)


# Elements are whole batches here: Grain's 500 read ahead would fill the memory.
_THREADS = 16
_AHEAD = 32


def grain_source(dataset: Dataset) -> Source:
    """A Grain dataset or loader of batches, resumed by Grain's own state."""
    bases = [base.__name__ for base in type(dataset).__mro__]
    kinds = (kind for kind in ("MapDataset", "IterDataset") if kind in bases)
    name, length = f"the Grain {next(kinds, bases[0])}", _length(dataset)

    def start() -> SourceIterator:
        read = dataset
        if hasattr(dataset, "to_iter_dataset"):
            options = sys.modules["grain"].ReadOptions(
                num_threads=_THREADS, prefetch_buffer_size=_AHEAD
            )
            read = dataset.to_iter_dataset(options)
        return _GrainPass(read, name, length=length)

    return Source(name, start, lambda: length)


@final
class _GrainPass(SnapshotIterator):
    def _start(self) -> Any:
        return _told(lambda: iter(self._dataset))

    def _read(self) -> PyTree:
        return _told(super()._read)

    def _take(self) -> dict[str, State]:
        state = self._begun().get_state()
        if isinstance(state, bytes):  # of a DataLoader: JSON already
            return {"data_loader": state.decode()}
        try:
            # Through text: a copy, which Grain does not change as it goes on.
            own = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"The state of {self._name} cannot be written as JSON ({error}), so it "
                "cannot be resumed. Let the `get_state` of its own iterators return "
                "numbers, text, lists and dicts."
            ) from error
        return {"dataset": own, **sources.of_length(self._length)}

    def _load(self, state: State) -> None:
        match state:
            case {"data_loader": str(text)}:
                own: Any = text.encode()
            case {"dataset": own}:
                pass
            case _:
                raise sources.foreign(self._name, state, "Grain's state")
        sources.check_length(state, self._length, self._name)
        self.close()
        try:
            self._begun().set_state(own)
        except (KeyError, TypeError, ValueError) as error:
            wanted = f"a state that Grain takes (it said: {error})"
            raise sources.foreign(self._name, state, wanted) from error


def _told(read: Callable[[], Any]) -> Any:
    """What `read` returns; Grain's error about flags says what to do."""
    try:
        return read()
    except Exception as error:
        if type(error).__name__ == "UnparsedFlagAccessError":
            error.add_note(
                "Grain's worker processes want absl's flags: call "
                "`absl.flags.FLAGS.mark_as_parsed()` before the first batch."
            )
        raise


def _length(dataset: Dataset) -> int | None:
    """The number of batches of a `MapDataset`, if it is known without reading."""
    if not hasattr(dataset, "to_iter_dataset") or _may_discard(dataset):
        return None
    length = len(dataset)
    return None if length == sys.maxsize else length  # repeated without end


def _may_discard(dataset: Dataset) -> bool:
    """Whether elements may be left out, which `len` counts all the same."""
    return "Filter" in type(dataset).__name__ or any(
        _may_discard(parent) for parent in getattr(dataset, "parents", ())
    )


_ADVICE = 'Give `dataset.with_format("numpy").batch(batch_size)`.'


def table_source(dataset: Dataset) -> Source:
    """A `datasets.Dataset`, each of whose rows is a batch."""
    name, form = "the Hugging Face Dataset", dataset.format["type"]
    if form != "numpy":
        raise TypeError(
            f"The Hugging Face dataset is in the form {form!r} and not in that of "
            f"NumPy. {_ADVICE}"
        )

    def begin(first: int) -> Iterator[PyTree]:
        for number in range(first, len(dataset)):
            batch = dataset[number]
            _check(batch)
            yield batch

    def start() -> SourceIterator:
        return SourceIterator(name, begin, len(dataset), skips=True)

    return Source(name, start, lambda: len(dataset))


def stream_source(dataset: Dataset) -> Source:
    """A `datasets.IterableDataset` of batches, resumed by its own state."""
    name, order = "the Hugging Face IterableDataset", ReadingOrder()
    return Source(name, lambda: _StreamPass(dataset, name, order))


@final
class _StreamPass(SnapshotIterator):
    _view: Dataset = None

    def _start(self) -> Iterator[PyTree]:
        return self._start_at(self._dataset.epoch)

    def _start_at(self, epoch: int, state: State = None) -> Iterator[PyTree]:
        # A dataset of its own, because a state that is loaded stays for good.
        self._view = self._dataset.with_format("numpy")
        self._view.set_epoch(epoch)
        if state is not None:
            self._view.load_state_dict(state)
        return iter(self._view)

    def _read(self) -> PyTree:
        batch = super()._read()
        _check(batch)
        return batch

    def get_state(self) -> State:
        self._check_buffer()
        return super().get_state()

    def _take(self) -> dict[str, State]:
        # Before the first batch its own state has epoch 0.
        state = {**self._view.state_dict(), "epoch": self._view.epoch}
        # Through text: a copy of numbers, text, lists and dicts.
        return {"stream": json.loads(json.dumps(state))}

    def _load(self, state: State) -> None:
        self._check_buffer()
        match state:
            case {"stream": {"examples_iterable": dict(), "epoch": int(epoch)}}:
                self.close()
                self._begun(lambda: self._start_at(epoch, state["stream"]))
            case _:
                raise sources.foreign(self._name, state, "its `state_dict`")

    def _check_buffer(self) -> None:
        if _shuffles(getattr(self._dataset, "_ex_iterable", None)):
            raise TypeError(
                f"A pass over {self._name} cannot resume: it shuffles through a "
                "buffer, whose contents are not in its state, so examples would be "
                "left out. Shuffle before batching with `Dataset.shuffle(seed=...)` of "
                "a dataset that is not streamed, or use Grain or "
                "`js.batches(arrays, batch_size, shuffle=seed)`."
            )


def _shuffles(examples: Dataset) -> bool:
    """Whether there is a shuffle buffer among the steps that lead to `examples`."""
    if examples is None:
        return False
    inner = [getattr(examples, "ex_iterable", None)]
    inner += getattr(examples, "ex_iterables", [])
    return "BufferShuffled" in type(examples).__name__ or any(map(_shuffles, inner))


def _check(batch: PyTree) -> None:
    """Raise if `batch` is a single example: a dict with a number or a text in it."""
    for column, value in batch.items():
        if not isinstance(value, (np.ndarray, dict)):
            raise TypeError(
                f"`batch[{column!r}]` of the Hugging Face dataset is {value!r:.100}: "
                f"one example and not a batch of them. {_ADVICE}"
            )


_KINDS = (
    "Give global batches: a list, a generator function or another iterable of them, "
    "`js.batches(arrays, batch_size)`, a Grain dataset, a PyTorch DataLoader, a "
    "tf.data.Dataset, or a Hugging Face dataset in NumPy form."
)
# By module, class and source. Who has such a dataset has imported the library.
_LIBRARIES = (
    ("grain", "MapDataset", grain_source),
    ("grain", "IterDataset", grain_source),
    ("grain", "DataLoader", grain_source),
    ("torchdata.stateful_dataloader", "StatefulDataLoader", torch_source),
    ("torch.utils.data", "DataLoader", torch_source),
    ("datasets", "Dataset", table_source),
    ("datasets", "IterableDataset", stream_source),
)


def as_source(dataset: Dataset) -> Source:
    """`dataset` as a source of batches, by what it can do; nothing is read yet."""
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
    if sources.is_tf_data(dataset):
        return sources.tf_data(dataset)
    _check_not_data(dataset)
    if isinstance(dataset, Iterator):
        return sources.once(dataset)
    if isinstance(dataset, Iterable):
        return sources.repeatable(dataset)
    if callable(dataset):
        function: Dataset = dataset
        _check_no_arguments(function)
        return sources.generated(function)
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
    if per_replica.is_per_replica(dataset):
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
        if isinstance(dataset, (list, tuple)) and not hasattr(dataset, "_fields"):
            types = first_few((array_type(x.dtype, x.shape) for x in dataset), 4)
            is_tuple = isinstance(dataset, tuple)
            why = "" if is_tuple else ", which are not batches of one kind"
            raise TypeError(
                f"{_named(dataset)} holds {types}{why}. A list is a list of batches, "
                "alike but for their rows; a tuple of arrays is one batch. Give "
                "`js.batches((x, y), batch_size)`, which cuts arrays into batches; if "
                "they are one batch, put a tuple of them in a list: `[(x, y)]`."
            )
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
