"""A convolutional network trained on many replicas and on one, with the same losses.

`python -m jaxstrategy.demo` trains on the 1,797 handwritten digits that ship inside
scikit-learn, on all accelerators of the machine or, on a plain CPU, on 8 simulated
devices. Then it trains on one replica, compares the two loss curves, prints a table
and draws `demo.png`. `--help` lists the options.

`training_step` (in `_src/demo.py`) is the part to copy.
"""
