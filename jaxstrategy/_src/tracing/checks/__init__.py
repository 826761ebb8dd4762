"""Checks of a traced step: what would hang, or break a promise, is refused."""
