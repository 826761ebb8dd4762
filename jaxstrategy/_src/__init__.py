"""The private code of the package; its public modules stand beside it."""
