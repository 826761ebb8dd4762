"""Frames between processes: numbers, arrays and bytes, answered one by one.

A `Stream` sends and receives frames; `Listener`, `Door` and socket pairs make streams.
A `Responder` answers the frames of many streams, a `Peer` asks and waits for answers.
Over these, parameter servers and workers in other processes look like those in this
one. Arrays travel as raw bytes, into memory that is used again once nothing refers to
it. Only streams whose other end is known to be of the job carry pickled objects.
"""
