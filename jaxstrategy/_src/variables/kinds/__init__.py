"""The kinds of variables: mirrored, and on read."""
