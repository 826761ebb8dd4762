from helpers.shared import four, pytest_collection_modifyitems, two  # noqa: F401
