"""Folders of checkpoints: their files, the record of each, and which of them stay."""
