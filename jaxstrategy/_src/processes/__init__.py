"""The processes of a job: they meet, agree and end together.

Each module can be used without those after it: secret, messages, rendezvous, store,
agreement, watchdog, ending. `_job` puts them together.
"""
