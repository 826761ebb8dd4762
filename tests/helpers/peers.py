"""Servers, workers and connections within this process, for tests of the wire."""

import contextlib
import threading
import time

import numpy as np

from jaxstrategy._errors import OutOfRangeError, ParameterServerLost, WorkerLost
from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._abstract_worker import AbstractWorker
from jaxstrategy.parameter_servers.wire import _stream
from jaxstrategy.parameter_servers.wire._peer import Peer, dial_of
from jaxstrategy.parameter_servers.wire._remote_server import RemoteServer
from jaxstrategy.parameter_servers.wire._remote_worker import RemoteWorker
from jaxstrategy.parameter_servers.wire._responder import Responder
from jaxstrategy.parameter_servers.wire._server_answers import ServerAnswers
from jaxstrategy.parameter_servers.wire._worker_answers import WorkerAnswers


class PlainServer(AbstractServer):
    """A dict of arrays under one lock."""

    def __init__(self):
        self.lock = threading.Lock()
        self.values, self.programs, self.calls, self.fences = {}, {}, [], []
        self.tables = set()

    def create(self, number, value, is_table=False):
        self.values[number] = np.array(value)
        if is_table:
            self.tables.add(number)

    def drop(self, numbers):
        for number in numbers:
            self.values.pop(number, None)

    def read(self, reads):
        with self.lock:
            found = [(self.values[number], rows) for number, rows in reads]
            return [np.array(v if rows is None else v[rows]) for v, rows in found]

    def push(self, operations, call=None):
        with self.lock:
            if call is not None and call in self.calls:
                return False
            self.calls.append(call)
            for each in operations:
                self.change(each)
            return True

    def change(self, operation):
        (number,), operands = operation.variables, operation.operands
        match operation.name:
            case "add":
                self.values[number] = self.values[number] + operands[0]
            case "set":
                if operands[0].shape != self.values[number].shape:
                    raise ValueError(f"{operands[0].shape} is another shape")
                self.values[number] = np.array(operands[0])
            case "scatter_add":
                np.add.at(self.values[number], *operands)
            case name:
                raise NotImplementedError(name)

    def define(self, key, exported):
        self.programs[key] = exported

    def fence(self, worker, incarnation):
        self.fences.append((worker, incarnation))

    def versions(self, numbers):
        return [len(self.calls) for _ in numbers]


class PlainWorker(AbstractWorker):
    """Runs nothing: keeps what it is told, and answers by the name of a program."""

    def __init__(self, index=3):
        self.index = index
        self.programs, self.resources, self.calls = {}, {}, []
        self.go_on = threading.Event()
        self.began = threading.Event()

    def define(self, program):
        self.programs[program.key] = program

    def build(self, resource, builder, uses=()):
        used = [self.resources[number] for number in uses]
        self.resources[resource] = builder(self.index, *used)

    def release(self, resources):
        for number in resources:
            self.resources.pop(number, None)

    def call(self, call):
        self.calls.append(call)
        match call.program:
            case "wait":
                self.began.set()
                assert self.go_on.wait(60)
            case "end":
                raise OutOfRangeError("no more")
            case "next":
                return [np.asarray(next(self.resources[n])) for n in call.iterators]
        return [np.asarray(each) for each in call.arguments]

    def own(self, variable):
        return self.resources[variable]

    def kill(self):
        raise AssertionError("nobody asks for this over the wire")


@contextlib.contextmanager
def served(answers, on_lost=None):
    """A responder, and a `dial` that makes socket pairs to it."""
    responder = Responder(answers, on_lost)

    def dial():
        here, there = _stream.pair()
        responder.add(there)
        return here

    try:
        yield dial
    finally:
        responder.close()


@contextlib.contextmanager
def remote(server, name="Parameter server 0", **options):
    """A `RemoteServer` whose other end is that server."""
    with served(ServerAnswers(server)) as dial:
        peer = Peer(name, dial, ParameterServerLost, **options)
        found = RemoteServer(peer)
        try:
            yield found
        finally:
            found.close()


@contextlib.contextmanager
def remote_worker(worker, end=None, **options):
    """A `RemoteWorker` whose other end is that worker."""
    with served(WorkerAnswers(worker)) as dial:
        peer = Peer("Worker 3", dial_of([dial()]), WorkerLost, **options)
        found = RemoteWorker(peer, end)
        try:
            yield found
        finally:
            found.close()


def until(condition, seconds=30):
    """Wait for a condition; fail when it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)
