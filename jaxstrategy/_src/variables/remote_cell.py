"""The memory of a variable that is in another process: `RemoteCell`."""

from __future__ import annotations

import abc
from typing import NoReturn

import jax
import numpy as np

from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.variables.cell import AbstractCell


class RemoteCell(AbstractCell):
    """A `Cell` that has no array or reference for a step of this process.

    Args:
      like: shape and dtype of what it stands for.
      name: the variable's, for messages.

    Attributes:
      array: None: it has nothing to lend.
      is_alone: False.
    """

    array = None
    is_alone = False

    def __init__(self, like: jax.ShapeDtypeStruct, name: str) -> None:
        self._like = like
        self._name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the variable."""
        return self._like.shape

    @property
    def dtype(self) -> np.dtype:
        """Of the variable."""
        return np.dtype(self._like.dtype)

    @property
    def is_reference(self) -> bool:
        """False: it never becomes one."""
        return False

    @property
    def ref(self) -> NoReturn:
        """None: a function that JAX traces by itself cannot reach it.

        Raises:
          ContextError: always.
        """
        raise self._refusal()

    def lend(self) -> NoReturn:
        """As `ref`."""
        raise self._refusal()

    @abc.abstractmethod
    def _refusal(self) -> ContextError:
        """The error of code that wants an array here."""
