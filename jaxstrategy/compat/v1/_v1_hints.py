"""The options of a reduction under their older name, `experimental_hints`."""

from __future__ import annotations

from jaxstrategy._communication_options import CommunicationOptions


def options_of(
    options: CommunicationOptions | None, hints: CommunicationOptions | None
) -> CommunicationOptions | None:
    """The options by whichever name they were given.

    Raises:
      ValueError: by both.
      TypeError: the hints are something else.
    """
    if hints is None:
        return options
    if options is not None:
        raise ValueError(
            "`options` and `experimental_hints` are two names of one argument, and "
            "both were given. Use `options`."
        )
    if not isinstance(hints, CommunicationOptions):
        raise TypeError(
            f"`experimental_hints` was {hints!r}; `experimental.CollectiveHints(...)` "
            "were wanted, for example with `bytes_per_pack=2**20`."
        )
    return hints
