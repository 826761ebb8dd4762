"""Jitted functions that other processes call: `experimental.rpc`, as in TensorFlow.

What it is for: a few processes that ask one another for small things, such as a server
of actions or of metrics. Steps of training belong into strategies.
"""

from typing import TYPE_CHECKING

from jaxstrategy._src import lazy_names

if TYPE_CHECKING:
    from jaxstrategy._src.rpc import (
        DeadlineExceededError as DeadlineExceededError,
        FailedPreconditionError as FailedPreconditionError,
        InternalError as InternalError,
        InvalidArgumentError as InvalidArgumentError,
        ResourceExhaustedError as ResourceExhaustedError,
        RpcClient as RpcClient,
        RpcError as RpcError,
        RpcServer as RpcServer,
        StatusOrResult as StatusOrResult,
        UnauthenticatedError as UnauthenticatedError,
        UnavailableError as UnavailableError,
    )

    Client = RpcClient
    Server = RpcServer
else:
    __getattr__, __dir__ = lazy_names.attach(__name__)
