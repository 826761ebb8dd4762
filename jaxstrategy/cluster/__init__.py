"""The processes of a job: who they are, how they meet, agree and end together.

Each folder can be used without those after it, and `agreement/` and `liveness/` without
each other: resolvers, connections, meeting, board, liveness, agreement. `_processes`
puts them together.
"""
