"""What functions capture, as cache keys."""
