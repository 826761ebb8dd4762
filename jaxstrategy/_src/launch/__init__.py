"""Start the processes of a job on this machine, watch them, end them together."""
