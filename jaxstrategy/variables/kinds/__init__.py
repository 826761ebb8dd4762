"""What the kinds of variables do where."""
