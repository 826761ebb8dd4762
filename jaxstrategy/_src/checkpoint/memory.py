"""Snapshots in the memory of hosts, of which each has its part and a neighbour's.

A file holds what one process has saved: a header of JSON, with the record and where
each piece of an array stands, then the bytes of the pieces. Its name has a checksum.
Files of "own" have pieces that no other host has; the next host copies them.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import jax
import numpy as np
from jax.sharding import Sharding

from jaxstrategy._src.checkpoint import agreement
from jaxstrategy._src.checkpoint.agreement import first_line
from jaxstrategy._src.checkpoint.record import (
    CheckpointError,
    Damage,
    Record,
    checksums,
    described,
)
from jaxstrategy._src.checkpoint.state import Array, Reading, State
from jaxstrategy._src.cluster.resolvers import environment
from jaxstrategy._src.cluster.resolvers.cluster_spec import address_of, endpoint
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.messages import Client, RemoteError, Request, Server
from jaxstrategy._src.processes.rendezvous import Json
from jaxstrategy._src.processes.secret import Secret

Index: TypeAlias = tuple[slice, ...]
Spans: TypeAlias = tuple[tuple[int, int], ...]
"""A part of an array: along each axis, where it begins and ends."""

_CHUNK = 1 << 22  # bytes that a host is asked for at once
_SECONDS = 60.0  # for an answer
_HEADER = 8  # bytes that say how long the header is
_MOST_HEADER = 1 << 28  # bytes
_WHOLE = "whole"  # a file that says that all hosts have their parts
_SNAPSHOT = re.compile(r"\d{1,19}-[0-9a-f]{8}")
_FILE = re.compile(r"(\d{1,9})-(all|own)-([0-9a-f]{8})")
_FAILURES = (OSError, ValueError, RuntimeError, ClusterError)


class Piece(NamedTuple):
    """Where a part of an array is read."""

    spans: Spans
    file: str
    offset: int


@final
@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A snapshot, of which this job's hosts have all files together."""

    record: Record
    pieces: Mapping[str, Sequence[Piece]]
    holders: Mapping[str, Sequence[str]]  # the hosts of each file


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
        self._host, self._folder = memory, os.path.join(memory, name)
        self._hosts: list[str] = []  # of each process, once they have met
        self._addresses: list[str] = []
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
            reason = None
            try:
                os.makedirs(self._folder, 0o700, exist_ok=True)
            except OSError as error:
                reason = first_line(error)
            said = agreement.compare_leaves(what, told, [secrets.token_hex(4), reason])
            for process, (_, reason) in enumerate(said):
                if reason is not None:
                    raise CheckpointError(f"process {process}: {reason}")
            token = said[0][0]
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

    def _pieces(
        self, arrays: Mapping[str, Array]
    ) -> dict[str, list[tuple[str, Spans, np.ndarray]]]:
        """Copies of what this process is to keep, by the kind of file."""
        rank, found = jax.process_index(), []
        hosts, number = self._hosts, 0
        for name, array in arrays.items():
            if isinstance(array, jax.Array):
                parts = _partition(array.sharding, array.shape)
                local = {
                    _spans(s.index, array.shape): s for s in array.addressable_shards
                }
            else:  # of those of NumPy, that of the first process counts, as on disk
                parts = {tuple((0, n) for n in array.shape): (0,)}
                local = {}
            for spans, processes in parts.items():
                number += 1
                here = [p for p in processes if hosts[p] == self._host]
                if not here or here[number % len(here)] != rank:
                    continue
                data = local[spans].data if local else array
                if isinstance(data, jax.Array):
                    data.copy_to_host_async()
                is_own = len({hosts[p] for p in processes}) == 1 < len(set(hosts))
                found.append(("own" if is_own else "all", name, spans, data))
        # Copied, because the state may be donated or changed when `save` returns.
        copied = {"all": [], "own": []}
        for kind, name, spans, data in found:
            copied[kind].append((name, spans, np.array(data, order="C")))
        return copied

    def _keep(
        self,
        name: str,
        record: Record,
        pieces: Mapping[str, list[tuple[str, Spans, np.ndarray]]],
    ) -> None:
        """In the background: write, copy the neighbour's part, delete the last one."""
        topic = f"snapshot {name} of {self._directory}"
        folder = os.path.join(self._folder, name)
        own = self._local()

        def write() -> list[tuple[str, int]]:
            os.makedirs(folder, 0o700, exist_ok=True)
            kinds = [kind for kind in pieces if kind == "all" or pieces[kind]]
            return [self._write(folder, kind, record, pieces[kind]) for kind in kinds]

        def copy() -> None:
            hosts = list(dict.fromkeys(self._hosts))
            neighbour = hosts[hosts.index(self._host) - 1]
            files = [
                file
                for host, written in zip(self._hosts, told, strict=True)
                for file in written
                if host == neighbour and "-own-" in file[0]
            ]
            for file, size in files[own.index(jax.process_index()) :: len(own)]:
                self._copy(f"{name}/{file}", size, neighbour)

        try:
            told = agreement.together(topic, write)
            if len(set(self._hosts)) > 1:
                agreement.together(topic, copy)
        except Exception as error:  # any: nobody catches it in this thread
            self._failure = error
            shutil.rmtree(folder, ignore_errors=True)
            return
        try:
            if own[0] == jax.process_index():
                with open(os.path.join(folder, _WHOLE), "xb"):
                    pass
                for other in os.listdir(self._folder):
                    if other != name:
                        shutil.rmtree(os.path.join(self._folder, other))
        except OSError as error:
            self._failure = error

    def _write(
        self,
        folder: str,
        kind: str,
        record: Record,
        pieces: Sequence[tuple[str, Spans, np.ndarray]],
    ) -> tuple[str, int]:
        """The name of a new file, and its size."""
        at, places = 0, []
        for name, spans, data in pieces:
            places.append((name, spans, at))
            at += data.nbytes
        header = json.dumps({"record": record.to_json(), "pieces": places}).encode()
        rank = jax.process_index()
        unnamed = os.path.join(folder, f"{rank}-{kind}-writing")
        checksum = 0
        with open(unnamed, "xb") as file:
            for part in (
                len(header).to_bytes(_HEADER, "little"),
                header,
                *(data.reshape(-1).view(np.uint8).data for *_, data in pieces),
            ):
                file.write(part)
                checksum = zlib.crc32(part, checksum)
            size = file.tell()
        name = f"{rank}-{kind}-{checksum:08x}"
        os.rename(unnamed, os.path.join(folder, name))
        return name, size

    # Between hosts.

    def _meet(self, what: str) -> None:
        """Learn once which processes share a host, and where the others answer."""
        if self._hosts:
            return
        self._hosts = agreement.agree(what, self._host)
        if len(set(self._hosts)) == 1:
            return
        address = why = None
        try:
            address = self._listen()
        except _FAILURES as error:
            why = first_line(error)
        told = agreement.agree(what, [address, why])
        for process, (_, reason) in enumerate(told):
            if reason is not None:
                raise CheckpointError(f"process {process} cannot send its: {reason}")
        self._addresses = [each for each, _ in told]

    def _listen(self) -> str:
        """The address of this process by which it reaches the coordinator."""
        secret = Secret.of_environment()
        host, port = endpoint(os.environ[environment.COORDINATOR])
        family, kind, *_, reached = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(reached)  # nothing is sent
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
        with open(os.path.join(self._folder, path), "rb") as source:
            request.reply(os.pread(source.fileno(), min(size, _CHUNK), offset))

    def _read_into(
        self, path: str, offset: int, out: np.ndarray, hosts: Sequence[str]
    ) -> None:
        """Fill an array of bytes from a file that is on these hosts."""
        view, filled = memoryview(out), 0
        if self._host in hosts:
            with open(os.path.join(self._folder, path), "rb", buffering=0) as source:
                source.seek(offset)
                while filled < len(view) and (n := source.readinto(view[filled:])):
                    filled += n
        else:
            # The processes of this host ask those of the other one, each another one.
            there = [
                a
                for a, h in zip(self._addresses, self._hosts, strict=True)
                if h == hosts[0]
            ]
            address = there[self._local().index(jax.process_index()) % len(there)]
            if (client := self._clients.get(address)) is None:
                client = self._clients[address] = Client(
                    address, Secret.of_environment(), largest=2 * _CHUNK
                )
            while filled < len(view):
                asked = [path, offset + filled, len(view) - filled]
                (part,) = client.request(
                    json.dumps(asked).encode(), timeout_seconds=_SECONDS
                )
                if not 0 < len(part) <= len(view) - filled:
                    break
                view[filled : filled + len(part)] = part
                filled += len(part)
        if filled < len(view):
            raise OSError(f"{path} of a snapshot is cut")

    def _copy(self, path: str, size: int, host: str) -> None:
        own = os.path.join(self._folder, path)
        checksum = 0
        with open(f"{own}-copying", "xb") as file:
            for offset in range(0, size, _CHUNK):
                part = np.empty(min(_CHUNK, size - offset), np.uint8)
                self._read_into(path, offset, part, [host])
                file.write(part.data)
                checksum = zlib.crc32(part, checksum)
        if f"{checksum:08x}" != path[-8:]:
            raise OSError(f"{path} of a snapshot came with another checksum")
        os.rename(f"{own}-copying", own)

    def _local(self) -> list[int]:
        """The processes of this host, in order."""
        return [p for p, host in enumerate(self._hosts) if host == self._host]

    # Restoring.

    def latest(self, what: str) -> int | None:
        """The step of the last one that was kept everywhere."""
        return max((step for step, _ in self._kept(what)), default=None)

    def _kept(self, what: str) -> dict[tuple[int, str], dict[str, list[str]]]:
        """The hosts of each file of each snapshot, which has a step and a name."""
        self.join()
        self._meet(what)
        own: dict[str, list[str]] = {}
        if self._local()[0] == jax.process_index():
            with contextlib.suppress(FileNotFoundError):
                own = {
                    name: sorted(os.listdir(os.path.join(self._folder, name)))
                    for name in filter(_SNAPSHOT.fullmatch, os.listdir(self._folder))
                }
        found: dict[tuple[int, str], dict[str, list[str]]] = {}
        for host, said in zip(self._hosts, agreement.agree(what, own), strict=True):
            for name, files in said.items():
                holders = found.setdefault((int(name.partition("-")[0]), name), {})
                for file in files:
                    holders.setdefault(file, []).append(host)
        return {key: files for key, files in found.items() if _WHOLE in files}

    def find(self, what: str) -> Snapshot:
        """The last one.

        Raises:
          CheckpointError: it is damaged, or was lost with its hosts.
        """
        (step, name), holders = max(self._kept(what).items())
        holders = {k: v for k, v in holders.items() if _FILE.fullmatch(k)}
        own, folder = self._local(), os.path.join(self._folder, name)
        here = [file for file, hosts in holders.items() if self._host in hosts]
        here = here[own.index(jax.process_index()) :: len(own)]
        sums: list[int] = []
        with self._all_or_none(what, step):
            sums = checksums(pathlib.Path(folder), here)
        bad = [
            f for f, found in zip(here, sums, strict=True) if f"{found:08x}" != f[-8:]
        ]
        wrong = None
        for host, files in zip(self._hosts, agreement.agree(what, bad), strict=True):
            for file in files:
                wrong = (
                    f"its file `{file}` has another checksum than when it was written"
                )
                holders[file] = [each for each in holders[file] if each != host]
        holders = {f"{name}/{file}": hosts for file, hosts in holders.items() if hosts}
        record: Record | None = None
        pieces: dict[str, dict[Spans, list[Piece]]] = {}
        with self._all_or_none(what, step):
            for path, hosts in holders.items():
                head = np.empty(_HEADER, np.uint8)
                self._read_into(path, 0, head, hosts)
                size = int.from_bytes(head.tobytes(), "little")
                if size > _MOST_HEADER:
                    raise OSError(f"{path} of a snapshot has no header")
                body = np.empty(size, np.uint8)
                self._read_into(path, _HEADER, body, hosts)
                told = json.loads(body.tobytes())
                record = Record.from_json(told["record"])
                for leaf, spans, at in told["pieces"]:
                    spans: Spans = tuple((begin, end) for begin, end in spans)
                    piece = Piece(spans, path, _HEADER + size + at)
                    pieces.setdefault(leaf, {}).setdefault(spans, []).append(piece)
        lacking = "the record" if record is None else _lacking(record, pieces)
        if record is None or lacking is not None:
            wrong = wrong or f"the hosts that had {lacking} are lost"
            raise CheckpointError(
                f"The snapshot of step {step} in memory is damaged: {wrong}."
            )
        # Of pieces that several hosts have, the one of this host if there is one.
        chosen = {
            leaf: [
                max(copies, key=lambda piece: self._host in holders[piece.file])
                for copies in parts.values()
            ]
            for leaf, parts in pieces.items()
        }
        return Snapshot(record, chosen, holders)

    @contextlib.contextmanager
    def _all_or_none(self, what: str, step: int) -> Iterator[None]:
        """A block that fails in all processes if it does in one."""
        reason = None
        try:
            with agreement.watched(what, busy="reads arrays"):
                yield
        except (OSError, RemoteError, Damage, KeyError, TypeError, ValueError) as error:
            reason = first_line(error)
        for each in agreement.agree(what, reason):
            if each is not None:
                raise CheckpointError(
                    f"The snapshot of step {step} in memory cannot be read: {each}"
                )

    def read(
        self, what: str, found: Snapshot, readings: Mapping[str, Reading]
    ) -> dict[str, Array]:
        """Arrays by name, each read by each device as far as it holds it."""
        arrays: dict[str, Array] = {}
        with self._all_or_none(what, found.record.step):
            for name, reading in readings.items():
                part = functools.partial(self._part, found, name, reading)
                if reading.sharding is None:
                    arrays[name] = part(tuple(slice(0, n) for n in reading.shape))
                else:
                    arrays[name] = jax.make_array_from_callback(
                        reading.shape, reading.sharding, part, dtype=reading.dtype
                    )
        return arrays

    def _part(
        self, found: Snapshot, name: str, reading: Reading, index: Index | None
    ) -> np.ndarray:
        """A part of an array, put together of pieces."""
        wanted, whole = _spans(index or (), reading.shape), None
        for spans, file, offset in found.pieces[name]:
            common = [
                (max(a, c), min(b, d))
                for (a, b), (c, d) in zip(spans, wanted, strict=True)
            ]
            if any(begin >= end for begin, end in common):
                continue
            piece = np.empty([b - a for a, b in spans], reading.dtype)
            view = piece.reshape(-1).view(np.uint8)
            self._read_into(file, offset, view, found.holders[file])
            if spans == wanted:
                return piece
            if whole is None:
                whole = np.empty([b - a for a, b in wanted], reading.dtype)
            here, there = (
                tuple(
                    slice(b - first, e - first)
                    for (b, e), (first, _) in zip(common, of, strict=True)
                )
                for of in (wanted, spans)
            )
            whole[here] = piece[there]
        assert whole is not None, "all of it is there"
        return whole

    # The end.

    def delete(self, what: str) -> None:
        """Delete all, which are of a course that is left."""
        self.join()
        self._meet(what)
        if self._local()[0] == jax.process_index():
            shutil.rmtree(self._folder, ignore_errors=True)
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
    """A value of which no host has some part."""
    for name, entry in record.leaves.items():
        if entry["kind"] in ("array", "per_replica"):
            size = math.prod((*entry["shape"], *entry.get("words", ())))
            there = sum(math.prod(e - b for b, e in s) for s in pieces.get(name, ()))
            if there != size:
                return f"`{name}`"
    return None
