"""Jitted functions that other processes call: `experimental.rpc`, as in TensorFlow.

What it is for: a few processes that ask one another for small things, such as a server
of actions or of metrics. Steps of training belong into strategies.
"""

from typing import TYPE_CHECKING

from jaxstrategy import _lazy_names

if TYPE_CHECKING:
    from jaxstrategy.rpc._client import RpcClient as RpcClient
    from jaxstrategy.rpc._client import StatusOrResult as StatusOrResult
    from jaxstrategy.rpc._errors import (
        DeadlineExceededError as DeadlineExceededError,
    )
    from jaxstrategy.rpc._errors import (
        FailedPreconditionError as FailedPreconditionError,
    )
    from jaxstrategy.rpc._errors import InternalError as InternalError
    from jaxstrategy.rpc._errors import InvalidArgumentError as InvalidArgumentError
    from jaxstrategy.rpc._errors import (
        ResourceExhaustedError as ResourceExhaustedError,
    )
    from jaxstrategy.rpc._errors import RpcError as RpcError
    from jaxstrategy.rpc._errors import UnauthenticatedError as UnauthenticatedError
    from jaxstrategy.rpc._errors import UnavailableError as UnavailableError
    from jaxstrategy.rpc._server import RpcServer as RpcServer

    Client = RpcClient
    Server = RpcServer
else:
    __getattr__, __dir__ = _lazy_names.of(
        __name__,
        {
            "rpc._errors": (
                "DeadlineExceededError FailedPreconditionError InternalError "
                "InvalidArgumentError ResourceExhaustedError RpcError "
                "UnauthenticatedError UnavailableError"
            ),
            "rpc._client": "RpcClient Client=RpcClient StatusOrResult",
            "rpc._server": "RpcServer Server=RpcServer",
        },
    )
