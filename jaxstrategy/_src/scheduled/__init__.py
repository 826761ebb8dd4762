"""From a scheduled function to a program that workers run.

A function is traced once, as a step in cross-replica context, with a stand-in for each
thing that only the worker has. Then the changes of variables are taken out of the
trace, as operations of the servers, and the rows of tables that it uses.
"""
