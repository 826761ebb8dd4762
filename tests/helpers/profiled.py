"""What a block calls, as the interpreter tells it."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import jax

from jaxstrategy._src.tracing.stages import stages


@contextlib.contextmanager
def each_call(called: Callable[[str, FrameType], object]) -> Iterator[None]:
    """Tells `called` of each `"call"` of Python and `"c_call"` of C in the block.

    Nothing that came before plays a part: JAX has a function called at each garbage
    collection, and with an old jaxlib the sixteenth step in flight waits for eight.
    """

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            called(event, frame)

    while stages._running:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # as a test wanted it
            stages._running.popleft().block_until_ready()
    was_enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        if was_enabled:
            gc.enable()


# JAX 0.10 ends the process where an array lies in a wrong order, so each is asked
# where it lies.
ASKED_OF_EACH_ARRAY = () if jax.__version_info__ >= (0, 12) else ("ArrayImpl.sharding",)


def python_calls(call: Callable[[], object]) -> list[str]:
    """The functions of Python that `call` calls, JAX's own included."""
    found: list[str] = []

    def called(event: str, frame: FrameType) -> None:
        name = frame.f_code.co_qualname
        if event == "call" and name not in ASKED_OF_EACH_ARRAY:
            found.append(name)

    with each_call(called):
        call()
        count = len(found)  # what follows ends the block
    return found[:count]
