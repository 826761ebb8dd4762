"""Objects of Flax NNX in steps: the one door to Flax, which the adapter is."""
