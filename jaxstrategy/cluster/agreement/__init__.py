"""Agreement of a job's processes: each gives a value and gets the values of all.

`_agreement` is the interface, about one topic. Built on it are agreement about what all
are about to do (`_operation_agreement`) and about the call after which all stop
(`_stop_agreement`).

`jax.experimental.multihost_utils` agrees by collectives on the devices. These have no
deadline and name nobody: a process that does not come, or that is in another program,
leaves the others in them (measured with 0.10 and 0.12: a checkpoint that one process of
two saved held both for as long as we waited, 240 s, whatever the timeout). They also
compete with the steps for the devices, so no thread that reads ahead can use them. Here
messages go through the board, whose every wait ends when a process does.
"""
