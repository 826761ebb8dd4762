"""Exceptions and warnings that a caller can act on."""

from __future__ import annotations


class ContextError(RuntimeError):
    """A method was called on the wrong side of `run`, or for another strategy."""


class TracedValueError(TypeError):
    """Python needed the value of something that is known only on the devices.

    The original JAX error is the `__cause__`.
    """


class PlacementError(ValueError):
    """A value lies on devices, or is split in a way, that the strategy cannot use."""


class DonatedValueError(RuntimeError):
    """A value was used after its memory had been given to an earlier step."""


class SimulationError(RuntimeError):
    """Simulated devices were asked for after JAX had already started its devices."""


class MissingExtraError(ImportError):
    """An optional dependency is needed; the message names the extra to install."""


class RecompilationWarning(UserWarning):
    """One function is compiled again and again; the message says what changed."""
