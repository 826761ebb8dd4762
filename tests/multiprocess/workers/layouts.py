"""Replicas of several devices, or that share one, in several processes.

What each process finds wrong it raises.
"""

import os

import jax

import jaxstrategy as js


def refused(**layout):
    """The words in which a layout is refused."""
    try:
        js.MultiWorkerMirroredStrategy(**layout)
    except (ValueError, TypeError) as error:
        return str(error)
    raise AssertionError(f"{layout} was taken")


def of_three_devices():
    """Refuses what crosses processes, and goes on with what does not."""
    for sizes in ({"core": 2}, {"core": 6}, {"a": 3, "b": 2}):
        text = refused(logical_axes=sizes)
        assert text.startswith(f"`logical_axes` was {sizes}: replica "), text
        assert "would have devices of processes 0, 1. Give sizes whose" in text
    assert "6 are no multiple of that" in refused(logical_axes={"core": 4})
    assert "Give one of the two" in refused(
        logical_axes={"core": 3}, replicas_per_device=2
    )
    s = js.MultiWorkerMirroredStrategy(logical_axes={"core": 3})
    assert s.reduce("sum", s.per_replica([1.0, 2.0])) == 3


def of_one_device():
    """Refuses two devices of two processes, and then different replicas in each."""
    text = refused(logical_axes={"core": 2})
    assert "replica 0 would have devices of processes 0, 1" in text, text
    print("now differs", flush=True)
    js.MultiWorkerMirroredStrategy(replicas_per_device=1 + jax.process_index())


def main():
    globals()[os.environ["WHAT"]]()
    print("all is well", flush=True)
