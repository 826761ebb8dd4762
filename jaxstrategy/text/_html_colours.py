"""The colours of reports and charts: each has one meaning in all of them."""

from __future__ import annotations

import enum


class Colour(enum.Enum):
    """What a colour stands for, and its value.

    A page may set `--jaxstrategy-compute` and so on to others. These are seen on white
    and on dark pages alike: the contrast with both is at least 3.
    """

    COMPUTE = "#3b82c4"
    """Devices compute."""
    COMMUNICATION = "#d9730d"
    """Devices exchange data."""
    HOST = "#2e9e4f"
    """Python is busy on the host."""
    INPUT = "#9467bd"
    """Batches are read, or waited for."""
    COMPILE = "#9c8420"
    """A program is traced and compiled."""
    SAVE = "#6f8f1f"
    """Checkpoints are written, or waited for."""
    IDLE = "#8a8a8a"
    """Nothing happens, or what it is is not known."""
    PROBLEM = "#d64545"
    """Something failed, or will."""
    WHOLE = "#a67c5b"
    """Each device has all of an array."""
    PART = "#159aa8"
    """Each device has a part of an array."""
    OWN = "#cf5698"
    """Each replica has a version of its own."""

    @property
    def css(self) -> str:
        """The colour as a value in a style sheet."""
        return f"var(--jaxstrategy-{self.name.lower()},{self.value})"
