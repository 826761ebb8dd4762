"""Checks of a traced step."""
