"""The state of one parameter server, inside one process."""
