"""Functions by what they refer to, so that those that do the same share programs."""
