"""Snapshots in the memory of hosts: each has its own part and a neighbour's.

A file is an archive (ZIP) of what one process has saved: the record, and pieces of
arrays with their checksums. Files of "own" have pieces that no other host has; the next
host copies them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import re
import secrets
import shutil
import socket
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import numpy as np
from jax.sharding import Sharding

from jaxstrategy._src.checkpoint import agreement
from jaxstrategy._src.checkpoint.agreement import first_line
from jaxstrategy._src.checkpoint.folder import (
    OTHER_CHECKSUM,
    CheckpointError,
    Damage,
    Record,
)
from jaxstrategy._src.checkpoint.state import Array, Reading, State
from jaxstrategy._src.cluster.resolvers import environment
from jaxstrategy._src.cluster.resolvers.cluster_spec import address_of, endpoint
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.messages import Client, RemoteError, Request, Server
from jaxstrategy._src.processes.rendezvous import Json
from jaxstrategy._src.processes.secret import Secret

Read: TypeAlias = Callable[[Mapping[str, Reading]], dict[str, Array]]
Index: TypeAlias = tuple[slice, ...]
Spans: TypeAlias = tuple[tuple[int, int], ...]
"""A part of an array: along each axis, where it begins and ends."""
Pieces: TypeAlias = dict[str, list[tuple[str, Spans, Any]]]
"""Parts of arrays with their contents, by the kind of file that they go to."""

_CHUNK = 1 << 22  # bytes that a host is asked for at once
_SECONDS = 60.0  # for an answer
_RECORD = "record"
_WHOLE = "whole"  # a file that says that all hosts have their parts
_SNAPSHOT = re.compile(r"\d{1,19}-[0-9a-f]{8}")
_FILE = re.compile(r"\d{1,9}-(all|own)")


@final
class Snapshots:
    """Those of what is saved to one directory; all processes call the same methods.

    Args:
      directory: that of the checkpoints.
      memory: a folder in memory that outlives the processes of this host; there is
        another one on each host.
    """

    def __init__(self, directory: str, memory: str) -> None:
        name = hashlib.sha256(directory.encode()).hexdigest()
        self._directory = directory
        self._host, self._folder = memory, pathlib.Path(memory, name)
        self._hosts: list[str] = []  # of each process, once they have met
        self._addresses: list[Any] = []
        self._server: Server | None = None
        self._keeping = agreement.Background()
        self._last: int | None = None

    # Saving.

    def save(
        self, step: int, written: State, metrics: dict[str, float], extra: Json
    ) -> bool:
        """Begin to keep a state, which may be changed when this returns."""
        self.join()
        if step == self._last:
            return False
        what = f"keep a snapshot of step {step} of `{self._directory}`"
        self._meet(what)
        with written.snapshot(step):
            token = secrets.token_hex(4)
            entries, arrays, (token, *_) = written.saved(what, token)
            record = Record(step, entries, metrics, extra)
            pieces = self._pieces(arrays)
        self._last = step
        keep = functools.partial(self._keep, f"{step}-{token}", record, pieces)
        waiting = f"a snapshot of `{self._directory}` to be kept"
        self._keeping.start("snapshot", waiting, keep)
        return True

    def join(self) -> None:
        """Wait until the last one is kept everywhere.

        Raises:
          CheckpointError: it is not.
        """
        self._keeping.join()

    def _pieces(self, arrays: Mapping[str, Array]) -> Pieces:
        """Copies of what this process is to keep, by the kind of file."""
        rank, hosts, number = jax.process_index(), self._hosts, 0
        is_alone = len(set(hosts)) == 1
        found: Pieces = {"all": []}
        for name, array in arrays.items():
            # Of arrays of NumPy, that of the first process counts, as on disk.
            whole: Spans = tuple((0, n) for n in array.shape)
            parts: Mapping[Spans, Sequence[int]] = {whole: (0,)}
            local: dict[Spans, Array] = {whole: array}
            if isinstance(array, jax.Array):
                parts = _partition(array.sharding, array.shape)
                shards = array.addressable_shards
                local = {_spans(each.index, array.shape): each.data for each in shards}
            for spans, processes in parts.items():
                number += 1
                here = [p for p in processes if hosts[p] == self._host]
                if not here or here[number % len(here)] != rank:
                    continue
                if isinstance(data := local[spans], jax.Array):
                    data.copy_to_host_async()
                is_own = len(here) == len(processes) and not is_alone
                pieces = found.setdefault("own" if is_own else "all", [])
                pieces.append((name, spans, data))
        # Copied, because the state may be donated or changed when `save` returns.
        return {
            kind: [(name, spans, np.array(data, order="C")) for name, spans, data in of]
            for kind, of in found.items()
        }

    def _keep(self, name: str, record: Record, pieces: Pieces) -> None:
        """In the background: write, copy the neighbour's part, delete the last one."""
        topic, folder = f"snapshot {name} of {self._directory}", self._folder / name
        rank, own = jax.process_index(), self._local()

        def write() -> list[str]:
            folder.mkdir(0o700, exist_ok=True)
            for kind, of in pieces.items():
                with zipfile.ZipFile(folder / f"{rank}-{kind}", "x") as file:
                    told = json.dumps(record.to_json())
                    # Without a date, as clocks may be wrong.
                    file.writestr(zipfile.ZipInfo(_RECORD), told)
                    for name, spans, data in of:
                        contents = data.reshape(-1).view(np.uint8).data
                        file.writestr(zipfile.ZipInfo(_member(name, spans)), contents)
            return [f"{rank}-{kind}" for kind in pieces]

        def copy() -> None:
            hosts = list(dict.fromkeys(self._hosts))
            neighbour = hosts[hosts.index(self._host) - 1]
            of_hosts = zip(self._hosts, written, strict=True)
            files = [f for host, of in of_hosts for f in of if host == neighbour]
            files = [file for file in files if file.endswith("own")]
            for file in files[own.index(rank) :: len(own)]:
                self._fetch(f"{name}/{file}", neighbour)

        def finish() -> None:
            if own[0] == rank:
                (folder / _WHOLE).touch()
                for other in self._folder.iterdir():
                    if other != folder:
                        shutil.rmtree(other)

        is_whole = False
        try:
            written = agreement.together(topic, write)
            if len(set(self._hosts)) > 1:
                agreement.together(topic, copy)
            is_whole = True
            # Together: one process alone must not go on without snapshots.
            agreement.together(topic, finish)
        except Exception as error:
            if not is_whole:
                shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"A snapshot could not be kept: {first_line(error)}"
            ) from error

    # Between hosts.

    def _meet(self, what: str) -> None:
        """Learn once which processes share a host, and where the others answer."""
        if self._hosts:
            return
        self._hosts = agreement.agree(what, self._host)
        try:
            self._addresses = agreement.together(what, self._prepare)
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(first_line(error)) from error

    def _prepare(self) -> str | None:
        """Make the folder; where this process answers other hosts, if there are any."""
        self._folder.mkdir(0o700, exist_ok=True)
        if len(set(self._hosts)) == 1:
            return None
        secret = Secret.of_environment()
        host, port = endpoint(os.environ[environment.COORDINATOR])
        family, kind, *_, coordinator = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(coordinator)  # nothing is sent
            own = address_of(probe.getsockname()[0], 0)
        _secret.check_address(secret, own)
        self._server = Server(secret, self._answer, address=own, largest=1 << 16)
        return self._server.address

    def _answer(self, request: Request) -> None:
        """Send a part of a file of a snapshot, and of nothing else."""
        path, offset, size = json.loads(bytes(request.frames[0]))
        snapshot, _, file = path.partition("/")
        if not (_SNAPSHOT.fullmatch(snapshot) and _FILE.fullmatch(file)):
            raise ValueError("that is no file of a snapshot")
        request.reply(self._slice(path, offset, min(size, _CHUNK)))

    def _slice(self, path: str, offset: int, size: int) -> bytes:
        with open(self._folder / path, "rb") as source:
            return os.pread(source.fileno(), size, offset)

    def _fetch(self, path: str, host: str) -> None:
        """Copy a file of a snapshot from another host."""
        # The processes of this host ask those of the other one, each another one.
        there = [p for p, each in enumerate(self._hosts) if each == host]
        rank = jax.process_index()
        address = self._addresses[there[self._local().index(rank) % len(there)]]
        client = Client(address, Secret.of_environment(), largest=2 * _CHUNK)
        unnamed, part = self._folder / f"{path}-{rank}", None
        with contextlib.closing(client), open(unnamed, "wb") as file:
            while part is None or len(part) == _CHUNK:
                asked = json.dumps([path, file.tell(), _CHUNK]).encode()
                (part,) = client.request(asked, timeout_seconds=_SECONDS)
                file.write(part)
        unnamed.rename(self._folder / path)

    def _local(self) -> list[int]:
        """The processes of this host, in order."""
        return [p for p, host in enumerate(self._hosts) if host == self._host]

    # Restoring.

    def latest(self, what: str) -> int | None:
        """The step of the last one that was kept everywhere."""
        return max((step for step, _ in self._kept(what)), default=None)

    def _kept(self, what: str) -> dict[tuple[int, str], dict[str, list[str]]]:
        """The hosts of each file of each snapshot, by its step and its name."""
        self.join()
        self._meet(what)
        own: dict[str, list[str]] = {}
        wrong = None
        try:
            if self._local()[0] == jax.process_index():
                for name in filter(_SNAPSHOT.fullmatch, os.listdir(self._folder)):
                    own[name] = sorted(os.listdir(self._folder / name))
        except OSError as error:
            wrong = first_line(error)
        told = agreement.agree(what, [own, wrong])
        if wrong := next((wrong for _, wrong in told if wrong is not None), None):
            raise CheckpointError(wrong)
        found: dict[tuple[int, str], dict[str, list[str]]] = {}
        for host, (said, _) in zip(self._hosts, told, strict=True):
            for name, files in said.items():
                holders = found.setdefault((int(name.partition("-")[0]), name), {})
                for file in files:
                    holders.setdefault(file, []).append(host)
        return {key: files for key, files in found.items() if _WHOLE in files}

    def find(self, what: str) -> tuple[Record, Read]:
        """The record of the last one, and what reads arrays of it.

        Raises:
          CheckpointError: it is damaged, or was lost with its hosts.
        """
        (step, name), found = max(self._kept(what).items())
        folder, own = self._folder / name, self._local()
        files = {file: hosts for file, hosts in found.items() if _FILE.fullmatch(file)}

        def contents() -> list[Json]:
            """The record, and the pieces in this process's share of the files."""
            here = [file for file, hosts in files.items() if hosts[0] == self._host]
            record, members = None, {}
            for file in sorted(here)[own.index(jax.process_index()) :: len(own)]:
                with zipfile.ZipFile(folder / file) as opened:
                    members[file] = opened.namelist()
                    members[file].remove(_RECORD)
                    record = record or json.loads(_contents(opened, _RECORD))
            return [record, members]

        with _readable(what, step):
            told = agreement.together(what, contents)
            record = next((Record.from_json(each) for each, _ in told if each), None)
            parts: dict[str, dict[Spans, str]] = {}  # the files, best on this host
            members = {file: of for _, each in told for file, of in each.items()}
            for file in sorted(members, key=lambda file: self._host in files[file]):
                for name_of, places in map(json.loads, members[file]):
                    spans: Spans = tuple((begin, end) for begin, end in places)
                    parts.setdefault(name_of, {})[spans] = file
        lacking = "the record" if record is None else _lacking(record, parts)
        if record is None or lacking is not None:
            raise CheckpointError(
                f"The snapshot of step {step} in memory is damaged: the hosts that had "
                f"{lacking} are lost."
            )
        archives: dict[str, zipfile.ZipFile] = {}

        def part(name_of: str, reading: Reading, index: Index | None) -> np.ndarray:
            wanted = _spans(index or (), reading.shape)
            whole = np.empty([e - b for b, e in wanted], reading.dtype)
            for spans, file in parts[name_of].items():
                common = [
                    (max(a, c), min(b, d))
                    for (a, b), (c, d) in zip(spans, wanted, strict=True)
                ]
                if any(begin >= end for begin, end in common):
                    continue
                if file not in archives:
                    if self._host not in files[file]:
                        folder.mkdir(0o700, exist_ok=True)
                        self._fetch(f"{name}/{file}", files[file][0])
                    archives[file] = zipfile.ZipFile(folder / file)
                data = _contents(archives[file], _member(name_of, spans))
                shape = [e - b for b, e in spans]
                piece = np.frombuffer(data, np.uint8).view(reading.dtype).reshape(shape)
                whole[_within(common, wanted)] = piece[_within(common, spans)]
            return whole

        def read(readings: Mapping[str, Reading]) -> dict[str, Array]:
            arrays: dict[str, Array] = {}

            def work() -> None:
                for name, (shape, dtype, sharding) in readings.items():
                    of = functools.partial(part, name, readings[name])
                    if sharding is None:
                        arrays[name] = of((slice(None),) * len(shape))
                    else:
                        arrays[name] = jax.make_array_from_callback(
                            shape, sharding, of, dtype=dtype
                        )

            with _readable(what, step):
                agreement.together(what, work)
            archives.clear()
            return arrays

        return record, read

    # The end.

    def delete(self, what: str) -> None:
        """Delete all, which are of a course that is left."""
        self.join()
        self._meet(what)
        if self._local()[0] == jax.process_index():
            with contextlib.suppress(FileNotFoundError):
                for each in self._folder.iterdir():
                    shutil.rmtree(each, ignore_errors=True)
        self._last = None
        agreement.agree(what, None)  # no process goes on before it is deleted

    def close(self) -> None:
        """Wait for what is being kept, and hang up."""
        try:
            self.join()
        finally:
            if self._server is not None:
                self._server.close()


def _member(name: str, spans: Spans) -> str:
    """The name of a piece in an archive."""
    return json.dumps([name, spans])


def _contents(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except RuntimeError as error:  # where a wrong bit says that it is encrypted
        raise zipfile.BadZipFile(str(error)) from error


_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)


@contextlib.contextmanager
def _readable(what: str, step: int) -> Iterator[None]:
    where = f"The snapshot of step {step} in memory"
    try:
        with agreement.watched(what, busy="reads a snapshot"):
            yield
    except (OSError, RemoteError) as error:
        raise CheckpointError(f"{where} cannot be read: {first_line(error)}") from error
    except (*_DAMAGE, Damage, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where} is damaged: a file of it {OTHER_CHECKSUM}."
        ) from error


def _within(common: Sequence[tuple[int, int]], spans: Spans) -> Index:
    """What is common, as a part of what begins where `spans` does."""
    pairs = zip(common, spans, strict=True)
    return tuple(slice(b - first, e - first) for (b, e), (first, _) in pairs)


def _spans(index: Index, shape: Sequence[int]) -> Spans:
    found = (each.indices(n) for each, n in zip(index, shape, strict=True))
    return tuple((begin, end) for begin, end, _ in found)


@functools.lru_cache(4096)
def _partition(
    sharding: Sharding, shape: tuple[int, ...]
) -> dict[Spans, tuple[int, ...]]:
    """The parts of an array, and which processes hold each."""
    found: dict[Spans, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(_spans(index, shape), set()).add(device.process_index)
    return {spans: tuple(sorted(processes)) for spans, processes in found.items()}


def _lacking(record: Record, pieces: Mapping[str, Any]) -> str | None:
    """A value that the hosts do not have completely."""
    for name, entry in record.leaves.items():
        if entry["kind"] in ("array", "per_replica"):
            size = math.prod((*entry["shape"], *entry.get("words", ())))
            there = sum(math.prod(e - b for b, e in s) for s in pieces.get(name, ()))
            if there != size:
                return f"`{name}`"
    return None
