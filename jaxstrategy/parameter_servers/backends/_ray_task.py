"""One worker or parameter server that an actor of Ray has started: `RayTask`."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping
from typing import Literal, final

from jaxstrategy.cluster.resolvers._cluster_spec import address_of
from jaxstrategy.cluster.resolvers._environment import VARIABLE as TF_CONFIG
from jaxstrategy.launch._child_process import OutputThread, described
from jaxstrategy.launch._ray import RayActors, RayStartedProcess
from jaxstrategy.parameter_servers.backends._called_tasks import CalledTask
from jaxstrategy.parameter_servers.backends._child_process import show

Job = Literal["worker", "ps"]
_PROGRAM = ("-m", "jaxstrategy.parameter_servers")
_NAMES = {"worker": "Worker", "ps": "Parameter server"}
_DRAIN_SECONDS = 1.0
_NEWS_SECONDS = 5.0  # until it is heard of an end; under load, Ray takes more than one


@final
class RayTask:
    """A process of `python -m jaxstrategy.parameter_servers` on a machine of Ray's."""

    def __init__(
        self,
        actors: RayActors,
        bundle: int,
        job: Job,
        index: int,
        variables: Mapping[str, str],
        host: str | None,
        seconds: float,
        ended: Callable[[RayTask], None],
    ) -> None:
        self._actors = actors
        self._name = f"{_NAMES[job]} {index}"
        self._own_lines = f"jaxstrategy: {job} {index}: ".encode()
        self._code: int | None = None
        self._over = threading.Event()
        self._building = threading.Lock()
        self._actor = actors.start(bundle)
        try:
            where = self._address(host, seconds)
            own = {TF_CONFIG: json.dumps(_config(job, index, where))}
            arguments = _PROGRAM, {**variables, **own}, None, None, True
            actors.ask(lambda: self._actor.start.remote(*arguments), seconds)
        except BaseException:
            actors.end(self._actor)
            raise
        with self._building:
            self._process = RayStartedProcess(
                actors, self._actor, self._name, lambda code: self._end(code, ended)
            )
            self._output = OutputThread(
                self._name, functools.partial(self._process.read, 0), self._show
            )
        self.called = CalledTask(
            self._name, where, self._over, self.kill, self.last_output
        )

    @property
    def end(self) -> str | None:
        """How it has ended, in words; None while it has not."""
        return None if self._code is None else f"it ended with {described(self._code)}"

    def last_output(self) -> str:
        """The last lines that it wrote, and how it has ended if it has."""
        # Its connections break before it is known that it is over.
        if self._over.wait(_NEWS_SECONDS):
            self._output.finish(_DRAIN_SECONDS)
        lines = [line.decode(errors="replace") for line in self._output.tail]
        lines += [f"({self.end})"] if self.end else []
        return "\n".join(lines)

    def kill(self) -> None:
        """End it now, and what it has started."""
        self._process.kill()

    def close(self) -> None:
        """Wait for its end, and give its place to the next one."""
        self._process.close()
        self._output.finish(_DRAIN_SECONDS)
        self._actors.end(self._actor)

    def _address(self, host: str | None, seconds: float) -> str:
        ask = self._actors.ask
        _, found = ask(lambda: self._actor.machine.remote(), seconds)
        chosen = host or found
        port = ask(lambda: self._actor.free_port.remote(chosen), seconds)
        return address_of(chosen, port)

    def _show(self, line: bytes) -> None:
        # Who waits for whom is news where people start tasks, and none here.
        if not line.startswith(self._own_lines):
            show(self._name.lower(), line)

    def _end(self, code: int, ended: Callable[[RayTask], None]) -> None:
        with self._building:  # some end at once
            self._code = code
        self._over.set()
        self.close()
        ended(self)


def _config(job: Job, index: int, address: str) -> dict[str, object]:
    """A cluster for one task, which looks at no other address than its own."""
    cluster = {"worker": [address], "ps": [address]}
    cluster[job] = [address] * (index + 1)
    return {"cluster": cluster, "task": {"type": job, "index": index}}
