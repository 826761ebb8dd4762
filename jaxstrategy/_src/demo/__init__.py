"""A convolutional network trained on many replicas and on one, with the same losses."""
