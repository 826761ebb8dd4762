"""Variables on parameter servers and functions on workers, without a strategy.

A server keeps arrays and changes them one operation at a time; a worker runs programs
that were traced elsewhere. Both are threads of this process, or processes of their own.
"""
