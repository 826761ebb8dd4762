"""PyTorch: `torch.utils.data.DataLoader`, and loaders that keep a state."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any, final

import jax.numpy as jnp
import numpy as np

from jaxstrategy.inputs.sources import _counted
from jaxstrategy.inputs.sources._counted import CountedPass, SnapshotPass
from jaxstrategy.inputs.sources._reading_order import ReadingOrder
from jaxstrategy.inputs.sources._source import Dataset, Pass, Source, State
from jaxstrategy.values._types import Leaf, PyTree

_NAME = "the PyTorch DataLoader"


@final
class TorchSource(Source):
    """A loader whose tensors become NumPy arrays, in the same memory where it can be.

    Lists become tuples: PyTorch gives a batch of pairs as the list `[x, y]`.
    """

    def __init__(self, loader: Dataset) -> None:
        self._loader = loader
        self._order = ReadingOrder()

    def start(self) -> Pass:
        if hasattr(self._loader, "state_dict"):
            return _StatefulPass(self._loader, self._order, self.length)
        return _TorchPass(self._loader, self.length)

    @property
    def length(self) -> int | None:
        if _is_iterable_style(self._loader):  # its `len` is only a guess
            return None
        try:
            return len(self._loader)
        except (TypeError, NotImplementedError):
            return None

    @property
    def name(self) -> str:
        return _NAME


@final
class _TorchPass(Pass):
    def __init__(self, loader: Dataset, length: int | None) -> None:
        self._loader = loader
        self._batches = CountedPass(lambda: iter(loader), _NAME, length)

    def __next__(self) -> PyTree:
        return to_numpy(next(self._batches))

    def get_state(self) -> State:
        self._check_order()
        return self._batches.get_state()

    def set_state(self, state: State) -> PyTree | None:
        self._check_order()
        return to_numpy(self._batches.set_state(state))

    def _check_order(self) -> None:
        if not _keeps_order(self._loader):
            why = (
                "its dataset is an iterable, which PyTorch cannot begin in the middle"
                if _is_iterable_style(self._loader)
                else "its sampler is not sequential, so the order would differ"
            )
            raise TypeError(
                f"A pass over {_NAME} cannot resume: {why}. Use a "
                "`torchdata.stateful_dataloader.StatefulDataLoader`, Grain, or "
                "`js.batches(arrays, batch_size, shuffle=seed)`."
            )

    def close(self) -> None:
        self._batches.close()


@final
class _StatefulPass(SnapshotPass):
    """A pass over a loader with `state_dict` and `load_state_dict`."""

    name = _NAME

    def __init__(
        self, loader: Dataset, order: ReadingOrder, length: int | None
    ) -> None:
        self._loader = loader
        self._length = length
        self._order = order
        self._iterator: Any = None
        self._is_over = False  # a loader's state at the end begins a new pass

    def _begun(self) -> Any:
        if self._iterator is None:
            self._order.begin(self)
            self._iterator = iter(self._loader)
        return self._iterator

    def _read(self) -> PyTree:
        iterator = self._begun()
        self._order.take(self)
        try:
            return to_numpy(next(iterator))
        except StopIteration:
            self._is_over = True
            raise

    def _check_place(self) -> None:
        self._begun()
        self._order.check(self, _NAME)

    def _take(self) -> dict[str, State]:
        state = _to_text(self._loader.state_dict())
        place = {"torch": state, "is_over": self._is_over}
        return {**place, **_counted.of_length(self._length)}

    def _load(self, state: State) -> None:
        match state:
            case {"torch": str(text), "is_over": bool(is_over)}:
                own = _from_text(text)
            case _:
                raise _counted.foreign(_NAME, state, "its `state_dict`")
        _counted.check_length(state, self._length, _NAME)
        self.close()
        self._loader.load_state_dict(own)
        self._is_over = is_over
        if is_over:
            self._order.begin(self)
            self._iterator = iter(())
        else:
            self._begun()

    def close(self) -> None:
        self._iterator = None  # workers end with it


def to_numpy(batch: PyTree, what: str = "batch") -> PyTree:
    """`batch` with NumPy arrays for tensors and tuples for lists.

    Raises:
      TypeError: a tensor is of a kind that NumPy does not have.
    """
    if isinstance(batch, dict):
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


def _keeps_order(loader: Dataset) -> bool:
    """Whether each pass gives the same batches, as far as the samplers tell."""
    data = sys.modules["torch.utils.data"]
    sampler = loader.sampler
    if loader.batch_sampler is not None:
        if type(loader.batch_sampler) is not data.BatchSampler:
            return False  # with one of the user's own, `loader.sampler` is not used
        sampler = loader.batch_sampler.sampler
    return type(sampler) is data.SequentialSampler and not _is_iterable_style(loader)


def _is_iterable_style(loader: Dataset) -> bool:
    kind = sys.modules["torch.utils.data"].IterableDataset
    return isinstance(getattr(loader, "dataset", None), kind)


def _to_text(state: State) -> str:
    file = io.BytesIO()
    sys.modules["torch"].save(state, file)
    return base64.b64encode(file.getvalue()).decode()


def _from_text(text: str) -> State:
    file = io.BytesIO(base64.b64decode(text))
    # Only tensors and plain values are read: a checkpoint runs no code.
    return sys.modules["torch"].load(file, weights_only=True)
