"""Visits and rewrites jaxprs."""
