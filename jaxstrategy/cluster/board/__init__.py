"""The board: values that all processes share, and news of those that have ended.

Process 0 keeps it. Its hub is one thread that serves all processes, itself included.
"""
