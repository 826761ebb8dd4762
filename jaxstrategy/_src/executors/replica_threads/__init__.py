"""Steps that run eagerly, each replica in a thread of its own, one at a time."""
