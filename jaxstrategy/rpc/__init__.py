"""Jitted functions that other processes call: `experimental.rpc`, as in TensorFlow.

What it is for: a few processes that ask one another for small things, such as a server
of actions or of metrics. Steps of training belong into strategies.
"""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.rpc._rpc_client import RpcClient as RpcClient
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
    from jaxstrategy.rpc._rpc_server import RpcServer as RpcServer
    from jaxstrategy.rpc._status_or_result import StatusOrResult as StatusOrResult

    Client = RpcClient
    Server = RpcServer
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "rpc._rpc_errors": (
                "DeadlineExceededError FailedPreconditionError InternalError "
                "InvalidArgumentError ResourceExhaustedError RpcError "
                "UnauthenticatedError UnavailableError"
            ),
            "rpc._status_or_result": "StatusOrResult",
            "rpc._rpc_client": "RpcClient Client=RpcClient",
            "rpc._rpc_server": "RpcServer Server=RpcServer",
        },
    )
