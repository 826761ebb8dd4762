"""Jitted functions that other processes call: `experimental.rpc`, as in TensorFlow.

What it is for: a few processes that ask one another for small things, such as a server
of actions or of metrics. Steps of training belong into strategies.
"""

from typing import NoReturn

from jaxstrategy.rpc._rpc_client import RpcClient
from jaxstrategy.rpc._rpc_errors import (
    DeadlineExceededError as DeadlineExceededError,
)
from jaxstrategy.rpc._rpc_errors import (
    FailedPreconditionError as FailedPreconditionError,
)
from jaxstrategy.rpc._rpc_errors import InternalError as InternalError
from jaxstrategy.rpc._rpc_errors import InvalidArgumentError as InvalidArgumentError
from jaxstrategy.rpc._rpc_errors import (
    ResourceExhaustedError as ResourceExhaustedError,
)
from jaxstrategy.rpc._rpc_errors import RpcError as RpcError
from jaxstrategy.rpc._rpc_errors import UnauthenticatedError as UnauthenticatedError
from jaxstrategy.rpc._rpc_errors import UnavailableError as UnavailableError
from jaxstrategy.rpc._rpc_server import RpcServer
from jaxstrategy.rpc._status_or_result import StatusOrResult as StatusOrResult
from jaxstrategy.text import _absent

Client = RpcClient
Server = RpcServer


def __getattr__(name: str) -> NoReturn:
    """Names of TensorFlow that are not here say what to use instead."""
    raise _absent.missing(__name__, name)
