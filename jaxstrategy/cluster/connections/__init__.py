"""Authenticated messages between two processes, of whatever they are about.

A `Greeting` makes a `Channel` of a secret that both sides know; a `Connection` is a
channel over a socket. `_fields` says whether a message has the fields that it should.
"""
