"""With which exit codes a process ends that could not go on.

All lie outside what shells and signals use, so that a launcher can tell them apart.
"""

WATCHDOG = 75
"""A step made no progress within its time."""

PEER_DIED = 76
"""Another process of the job died, failed or went silent."""

PREEMPTED = 77
"""The machine is wanted back; the state was saved."""
