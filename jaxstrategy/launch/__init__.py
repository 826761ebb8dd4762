"""Start the processes of a job on this machine, watch them, end them together.

`python -m jaxstrategy.launch -n 4 train.py` is to `jaxstrategy` what `torchrun` is to
PyTorch; `python -m jaxstrategy.launch --help` tells it all. It needs Python's
standard library only and starts no device; a worker is any Python program.
"""
