"""Snapshots in the memory of hosts: each has its own part and a neighbour's.

A file holds what one process has saved: a header of JSON, with the record and where
each piece of an array stands, then the bytes of the pieces. Its name has a checksum.
Files of "own" have pieces that no other host has; the next host copies them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import secrets
import shutil
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import numpy as np
from jax.sharding import Sharding

from jaxstrategy._src.checkpoint import agreement
from jaxstrategy._src.checkpoint.agreement import first_line
from jaxstrategy._src.checkpoint.record import (
    OTHER_CHECKSUM,
    CheckpointError,
    Damage,
    Record,
    checksums,
    described,
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
_HEADER = 8  # bytes that say how long the header is
_MOST_HEADER = 1 << 28  # bytes
_WHOLE = "whole"  # a file that says that all hosts have their parts
_SNAPSHOT = re.compile(r"\d{1,19}-[0-9a-f]{8}")
_FILE = re.compile(r"(\d{1,9})-(all|own)-([0-9a-f]{8})")


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
        self._clients: dict[str, Client] = {}
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
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
            entries, arrays = written.saved()
            told = [f"`{name}` ({described(e)})" for name, e in entries.items()]
            token, *_ = agreement.compare_leaves(what, told, secrets.token_hex(4))
            record = Record(step, entries, metrics, extra)
            pieces = self._pieces(arrays)
        self._last = step
        self._thread = threading.Thread(
            target=self._keep, args=(f"{step}-{token}", record, pieces), name="snapshot"
        )
        self._thread.start()
        return True

    def join(self) -> None:
        """Wait until the last one is kept everywhere.

        Raises:
          CheckpointError: it is not.
        """
        if self._thread is not None:
            what = f"a snapshot of `{self._directory}` to be kept"
            agreement.join(self._thread, what)
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(
                f"A snapshot could not be kept: {first_line(failure)}"
            ) from failure

    def _pieces(self, arrays: Mapping[str, Array]) -> Pieces:
        """Copies of what this process is to keep, by the kind of file."""
        rank, hosts, number = jax.process_index(), self._hosts, 0
        found: Pieces = {"all": [], "own": []}
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
                is_own = len({hosts[p] for p in processes}) == 1 < len(set(hosts))
                found["own" if is_own else "all"].append((name, spans, data))
        # Copied, because the state may be donated or changed when `save` returns.
        return {
            kind: [(name, spans, np.array(data, order="C")) for name, spans, data in of]
            for kind, of in found.items()
        }

    def _keep(self, name: str, record: Record, pieces: Pieces) -> None:
        """In the background: write, copy the neighbour's part, delete the last one."""
        topic, folder = f"snapshot {name} of {self._directory}", self._folder / name
        own = self._local()

        def write() -> list[tuple[str, int]]:
            folder.mkdir(0o700, exist_ok=True)
            written = []
            for kind, of in pieces.items():
                if kind == "own" and not of:
                    continue
                ends = itertools.accumulate(data.nbytes for *_, data in of)
                places = [
                    (name, spans, end - data.nbytes)
                    for (name, spans, data), end in zip(of, ends, strict=True)
                ]
                told = {"record": record.to_json(), "pieces": places}
                header = json.dumps(told).encode()
                contents = (data.reshape(-1).view(np.uint8).data for *_, data in of)
                parts = [len(header).to_bytes(_HEADER, "little"), header, *contents]
                unnamed = folder / f"{jax.process_index()}-{kind}"
                written.append((_stored(unnamed, parts).name, sum(map(len, parts))))
            return written

        def copy() -> None:
            hosts = list(dict.fromkeys(self._hosts))
            neighbour = hosts[hosts.index(self._host) - 1]
            of_hosts = zip(self._hosts, told, strict=True)
            files = [f for host, of in of_hosts for f in of if host == neighbour]
            files = [(file, size) for file, size in files if "-own-" in file]
            for file, size in files[own.index(jax.process_index()) :: len(own)]:
                parts = (
                    self._read(
                        f"{name}/{file}", at, min(_CHUNK, size - at), [neighbour]
                    )
                    for at in range(0, size, _CHUNK)
                )
                if _stored(folder / file[:-9], parts).name != file:
                    raise OSError(f"{file} of a snapshot came with another checksum")

        def finish() -> None:
            if own[0] == jax.process_index():
                (folder / _WHOLE).touch()
                for other in self._folder.iterdir():
                    if other != folder:
                        shutil.rmtree(other)

        is_whole = False
        try:
            told = agreement.together(topic, write)
            if len(set(self._hosts)) > 1:
                agreement.together(topic, copy)
            is_whole = True
            # Together: one process alone must not go on without snapshots.
            agreement.together(topic, finish)
        except Exception as error:  # any: nobody catches it in this thread
            self._failure = error
            if not is_whole:
                shutil.rmtree(folder, ignore_errors=True)

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

    def _read(
        self, path: str, offset: int, size: int, hosts: Sequence[str]
    ) -> np.ndarray:
        """Bytes of a file that is on these hosts."""
        client = None
        if self._host not in hosts:
            # The processes of this host ask those of the other one, each another one.
            there = [p for p, host in enumerate(self._hosts) if host == hosts[0]]
            process = there[self._local().index(jax.process_index()) % len(there)]
            address, secret = self._addresses[process], Secret.of_environment()
            if address not in self._clients:
                self._clients[address] = Client(address, secret, largest=2 * _CHUNK)
            client = self._clients[address]
        out = np.empty(size, np.uint8)
        for at in range(0, size, _CHUNK):
            asked = path, offset + at, min(_CHUNK, size - at)
            if client is None:
                part = self._slice(*asked)
            else:
                told = json.dumps(asked).encode()
                (part,) = client.request(told, timeout_seconds=_SECONDS)
            if len(part) != asked[2]:
                raise OSError(f"{path} of a snapshot is cut")
            out[at : at + len(part)] = np.frombuffer(part, np.uint8)
        return out

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
        holders = {f"{name}/{k}": v for k, v in found.items() if _FILE.fullmatch(k)}
        parts: dict[str, dict[Spans, tuple[bool, str, int]]] = {}  # best on this host
        record = wrong = None

        def damaged() -> list[str]:
            """Of this process's share of the files of its host."""
            own = self._local()
            here = [path for path, hosts in holders.items() if self._host in hosts]
            here = here[own.index(jax.process_index()) :: len(own)]
            sums = checksums(self._folder, here)
            return [k for k, v in zip(here, sums, strict=True) if k[-8:] != f"{v:08x}"]

        def index() -> None:
            nonlocal record
            for path, hosts in holders.items():
                if not hosts:
                    continue
                head = self._read(path, 0, _HEADER, hosts)
                size = int.from_bytes(head.tobytes(), "little")
                if size > _MOST_HEADER:
                    raise OSError(f"{path} of a snapshot has no header")
                told = json.loads(self._read(path, _HEADER, size, hosts).tobytes())
                record = Record.from_json(told["record"])
                for name, spans, at in told["pieces"]:
                    key: Spans = tuple((begin, end) for begin, end in spans)
                    place = self._host in hosts, path, _HEADER + size + at
                    of = parts.setdefault(name, {})
                    of[key] = max(of.get(key, place), place)

        with _readable(what, step):
            told = agreement.together(what, damaged)
            for host, paths in zip(self._hosts, told, strict=True):
                for path in paths:
                    holders[path].remove(host)
                    wrong = f"its file `{path}` " + OTHER_CHECKSUM
            agreement.together(what, index)
        lacking = "the record" if record is None else _lacking(record, parts)
        if record is None or lacking is not None:
            wrong = wrong or f"the hosts that had {lacking} are lost"
            raise CheckpointError(
                f"The snapshot of step {step} in memory is damaged: {wrong}."
            )

        def part(name: str, reading: Reading, index: Index | None) -> np.ndarray:
            wanted = _spans(index or (), reading.shape)
            whole = np.empty([e - b for b, e in wanted], reading.dtype)
            for spans, (_, path, offset) in parts[name].items():
                common = [
                    (max(a, c), min(b, d))
                    for (a, b), (c, d) in zip(spans, wanted, strict=True)
                ]
                if any(begin >= end for begin, end in common):
                    continue
                shape = [e - b for b, e in spans]
                size = math.prod(shape) * reading.dtype.itemsize
                read = self._read(path, offset, size, holders[path])
                piece = read.view(reading.dtype).reshape(shape)
                if spans == wanted:
                    return piece
                whole[_within(common, wanted)] = piece[_within(common, spans)]
            return whole

        def read(readings: Mapping[str, Reading]) -> dict[str, Array]:
            arrays: dict[str, Array] = {}

            def work() -> None:
                for name, reading in readings.items():
                    shape, dtype, sharding = reading
                    of = functools.partial(part, name, reading)
                    arrays[name] = (
                        of(tuple(slice(0, n) for n in shape))
                        if sharding is None
                        else jax.make_array_from_callback(
                            shape, sharding, of, dtype=dtype
                        )
                    )

            with _readable(what, step):
                agreement.together(what, work)
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
            for client in self._clients.values():
                client.close()
            if self._server is not None:
                self._server.close()


def _stored(unnamed: pathlib.Path, parts: Iterable[Any]) -> pathlib.Path:
    """The new file of these bytes, whose name ends with their checksum."""
    checksum = 0
    writing = unnamed.with_name(f"{unnamed.name}-writing")
    with open(writing, "xb") as file:
        for part in parts:
            file.write(part)
            checksum = zlib.crc32(part, checksum)
    return writing.rename(unnamed.with_name(f"{unnamed.name}-{checksum:08x}"))


@contextlib.contextmanager
def _readable(what: str, step: int) -> Iterator[None]:
    try:
        with agreement.watched(what, busy="reads a snapshot"):
            yield
    except (OSError, RemoteError, Damage, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The snapshot of step {step} in memory cannot be read: {first_line(error)}"
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
