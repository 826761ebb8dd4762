"""Parts of training loops: losses, 16 bits, values for the host, the loop itself."""
