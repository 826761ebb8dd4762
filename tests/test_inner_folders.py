"""The folders inside a layer can be used without those that come after them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxstrategy

PACKAGE = Path(jaxstrategy.__file__).parent
# Each folder may use those before it, and none uses the files beside the folders.
ORDERS = {
    "cluster": [
        "resolvers",
        "connections",
        "meeting",
        "board",
        "liveness",
        "agreement",
    ],
    "checkpoint": ["processes", "sorts", "folders", "backends"],
}
APART = {("agreement", "liveness")}  # which do not use each other
FOLDERS = [(layer, folder) for layer, order in ORDERS.items() for folder in order]


def used_inside(path, layer):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[:2] == ["jaxstrategy", layer]:
                # `from jaxstrategy.cluster import _processes` has no folder.
                yield parts[2] if len(parts) > 2 else node.names[0].name


@pytest.mark.parametrize(("layer", "folder"), FOLDERS)
def test_folders_use_those_before_them(layer, folder):
    order = ORDERS[layer]
    allowed = set(order[: order.index(folder) + 1])
    allowed -= {other for one, other in APART if one == folder}
    for path in (PACKAGE / layer / folder).glob("*.py"):
        assert set(used_inside(path, layer)) <= allowed, path


@pytest.mark.parametrize("layer", ORDERS)
def test_all_folders_are_in_the_order(layer):
    inner = (PACKAGE / layer).iterdir()
    found = {path.name for path in inner if (path / "__init__.py").exists()}
    assert found == set(ORDERS[layer])


def test_messages_need_no_meeting_and_no_jax():
    """Two sockets and a secret: all else is the caller's."""
    code = """
import socket, sys, types, pathlib, importlib.util
# The package without its public names, which import JAX.
package = types.ModuleType("jaxstrategy")
found = importlib.util.find_spec("jaxstrategy")
package.__path__ = [str(pathlib.Path(found.origin).parent)]
sys.modules["jaxstrategy"] = package
from jaxstrategy.cluster.connections._channel import Greeting
from jaxstrategy.cluster.connections._secret import Secret
from jaxstrategy.cluster.connections._wire import Connection, received
secret = Secret("a secret of sufficient length")
sockets = socket.socketpair()
guest, host = (Greeting(secret, is_host=k) for k in (False, True))
sockets[0].sendall(guest.own)
sockets[1].sendall(host.own)
ends = [
    Connection(sock, greeting.add(received(sock)))
    for sock, greeting in zip(sockets, (guest, host))
]
ends[0].send({"function": 3, "arguments": [1.5, "x"]})
assert ends[1].receive() == {"function": 3, "arguments": [1.5, "x"]}
ends[1].send({"result": 7})
assert ends[0].receive() == {"result": 7}
loaded = [name for name in sys.modules if name.startswith("jaxstrategy.cluster.")]
assert not any("meeting" in name or "board" in name for name in loaded), loaded
print("jax" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n", done.stderr
