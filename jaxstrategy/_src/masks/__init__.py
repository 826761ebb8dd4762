"""Masks: which rows of a batch are real, from the source to the mean."""
