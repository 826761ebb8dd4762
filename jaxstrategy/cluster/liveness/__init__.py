"""Liveness: whether a job gets on, and how its processes end together if it does not.

The watchdog looks on while steps are pending, by what an `AbstractBoard` says of the
others; the ending is how this process leaves a job, or takes the others with it.
"""
