"""Runs of logging libraries, opened where metrics are written: `RunWriter`."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeAlias, final

from jaxstrategy._errors import MissingExtraError

Library: TypeAlias = Any
"""A module of a logging library, or an object of it: none of them has types here."""

Write: TypeAlias = Callable[[int, dict[str, float]], object]


@dataclasses.dataclass(frozen=True)
class OpenedWriter:
    """What writes the scalars of steps.

    Attributes:
      write: takes the number of a step, and its scalars by name.
      flush: has everything be on disk, or on its way.
      close: ends it; is told whether the loop failed.
      is_opened_here: whether nothing can be written after `close`.
    """

    write: Write
    flush: Callable[[], object]
    close: Callable[[bool], object]
    is_opened_here: bool = True


class RunWriter(abc.ABC):
    """A run of a logging library that a `MetricLogger` opens, writes and ends.

    Only process 0 opens it, when the `MetricLogger` is made, and only then the library
    is imported.

    >>> import jaxstrategy as js
    >>> kinds = js.profiling.WandbWriter, js.profiling.TensorBoardWriter
    >>> all(issubclass(kind, js.profiling.RunWriter) for kind in kinds)
    True
    """

    @abc.abstractmethod
    def open(self) -> OpenedWriter:
        """Begin the run.

        Raises:
          MissingExtraError: the library is not installed.
        """


@final
class TensorBoardWriter(RunWriter):
    """Files for TensorBoard in a directory, written by tensorboardX.

    A directory given to `MetricLogger` means the same.

    Args:
      directory: where to write them; it is made.

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = js.profiling.TensorBoardWriter(folder)
    ...     with js.profiling.MetricLogger(writer) as log:
    ...         log(0, {"loss": 0.5})
    ...     len(os.listdir(folder))
    1
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.fspath(directory)

    def open(self) -> OpenedWriter:
        library = _imported("tensorboardX", "a directory", "tensorboard")
        writer = library.SummaryWriter(self._directory)
        return OpenedWriter(
            one_by_one(writer.add_scalar), writer.flush, lambda failed: writer.close()
        )


@final
class CluWriter(RunWriter):
    """The default writers of CLU: a line in the log, and files for TensorBoard.

    CLU imports TensorFlow and TensorBoard for them; the extra `clu` installs all three.

    Args:
      directory: where to write the files.
      **options: further arguments of `clu.metric_writers.create_default_writer`.

    >>> import jaxstrategy as js
    >>> writer = js.profiling.CluWriter("logs", asynchronous=False)
    """

    def __init__(self, directory: str | os.PathLike[str], **options: object) -> None:
        self._directory = os.fspath(directory)
        self._options = options

    def open(self) -> OpenedWriter:
        library = _imported("clu.metric_writers", "a `CluWriter`", "clu")
        writer = library.create_default_writer(self._directory, **self._options)
        return OpenedWriter(
            writer.write_scalars, writer.flush, lambda failed: writer.close()
        )


@final
class WandbWriter(RunWriter):
    """A run of Weights & Biases, whose horizontal axis is the metric `step`.

    W&B drops what is logged for an earlier step than the last one, and metrics of a
    loop and of its profile come in no order; as a metric, the step may go back.

    Args:
      **options: arguments of `wandb.init`, such as `project="digits"` and
        `mode="offline"`.

    >>> import jaxstrategy as js
    >>> writer = js.profiling.WandbWriter(project="digits", mode="offline")
    """

    def __init__(self, **options: object) -> None:
        self._options = options

    def open(self) -> OpenedWriter:
        library = _imported("wandb", "a `WandbWriter`", "wandb")
        run = library.init(**self._options)

        def close(failed: bool) -> None:
            run.finish(exit_code=int(failed))

        return OpenedWriter(with_step_metric(run.define_metric), _nothing, close)


@final
class MlflowWriter(RunWriter):
    """A run of MLflow, where `mlflow.set_tracking_uri` or `MLFLOW_TRACKING_URI` says.

    The run is the active one until the `MetricLogger` is closed, so `mlflow.log_params`
    adds to it. It ends as `FINISHED`, or as `FAILED` if the loop did.

    Args:
      **options: arguments of `mlflow.start_run`, such as `run_name="small"`.

    >>> import jaxstrategy as js
    >>> writer = js.profiling.MlflowWriter(run_name="small")
    """

    def __init__(self, **options: object) -> None:
        self._options = options

    def open(self) -> OpenedWriter:
        library = _imported("mlflow", "an `MlflowWriter`", "mlflow")
        run_id = library.start_run(**self._options).info.run_id

        def write(step: int, scalars: dict[str, float]) -> None:
            library.log_metrics(scalars, step=step, run_id=run_id)

        def close(failed: bool) -> None:
            library.end_run("FAILED" if failed else "FINISHED")

        return OpenedWriter(write, _nothing, close)


@final
class TrackioWriter(RunWriter):
    """A run of Trackio, which keeps it on this computer unless told otherwise.

    Args:
      project: its name.
      **options: further arguments of `trackio.init`, such as `name="small"`.

    >>> import jaxstrategy as js
    >>> writer = js.profiling.TrackioWriter("digits", name="small")
    """

    def __init__(self, project: str, **options: object) -> None:
        self._options = {"project": project, **options}

    def open(self) -> OpenedWriter:
        library = _imported("trackio", "a `TrackioWriter`", "trackio")
        run = library.init(**self._options)
        return OpenedWriter(
            with_step_argument(run.log), _nothing, lambda failed: run.finish()
        )


def one_by_one(add_scalar: Callable[[str, float, int], object]) -> Write:
    """Writes each scalar by a call of its own."""

    def write(step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            add_scalar(name, value, step)

    return write


def with_step_argument(log: Callable[..., object]) -> Write:
    """Writes by a method that takes scalars, and their step by name."""
    return lambda step, scalars: log(scalars, step=step)


def with_step_metric(define_metric: Callable[..., object]) -> Write:
    """Writes with a run of Weights & Biases, given a method of it, steps in any order.

    Of `wandb` itself, the method belongs to the run that `wandb.init` has begun.
    """
    run: Library = getattr(define_metric, "__self__", None)
    run = importlib.import_module("wandb") if run is None else run
    define_metric("*", step_metric="step")
    return lambda step, scalars: run.log({**scalars, "step": step})


def _nothing() -> None:
    """Nothing is to be done: the library writes in a thread of its own."""


def _imported(module: str, given: str, extra: str) -> Library:
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        name = missing.name or module
        raise MissingExtraError(
            f"`MetricLogger` was given {given}, which needs `{name}`, and that is not "
            f"installed. Install the extra: pip install 'jaxstrategy[{extra}]', or "
            "give it a function of a step and a dict of scalars."
        ) from missing
