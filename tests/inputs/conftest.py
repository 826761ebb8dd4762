from helpers.shared import four, two  # noqa: F401
