"""Functions and their arguments, looked at before anything is done with them."""

from __future__ import annotations

from collections.abc import Mapping


def check_arguments(args: object, kwargs: object) -> None:
    """Raise unless these are a sequence of arguments and a dict or None.

    Raises:
      TypeError: they are not.
    """
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"`args` was a {type(args).__name__}; a tuple of the function's arguments "
            "was wanted. Write `args=(x,)` for one argument."
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(
            f"`kwargs` was a {type(kwargs).__name__}; a dict of the function's keyword "
            "arguments was wanted."
        )


def check_merge_call(merge_fn: object, args: object, kwargs: object) -> None:
    """Raise unless `merge_call` can call `merge_fn` with these.

    Raises:
      TypeError: it cannot.
    """
    if not callable(merge_fn):
        raise TypeError(
            f"`merge_call` was given {merge_fn!r}, which cannot be called. Give a "
            "function that takes the strategy and the arguments."
        )
    check_arguments(args, None if isinstance(kwargs, Mapping) else kwargs)
