"""What frames are about: the numbers of their kinds."""

from __future__ import annotations

import enum


class Kind(enum.IntEnum):
    """Kinds below 16 are of each protocol; the others are requests of one."""

    ALIVE = 0  # sent to who waits for an answer
    PATIENCE = 1  # how long the sender waits for an answer, or for a sign of life
    DONE = 2
    FAILED = 3
    PING = 4  # are you there?
    SESSION = 5  # first on streams of a cluster: for which coordinator they are

    CREATE = 16  # requests to parameter servers
    DROP = 17
    READ = 18
    PUSH = 19
    DEFINE = 20
    FENCE = 21
    VERSIONS = 22

    PROGRAM = 32  # requests to workers
    BUILD = 33
    RELEASE = 34
    CALL = 35
    OWN = 36

    METHODS = 64  # requests to servers of `experimental.rpc`
    INVOKE = 65
