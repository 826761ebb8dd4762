"""The speed of a training loop, and its logs."""
