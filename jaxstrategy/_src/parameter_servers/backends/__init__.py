"""What starts workers and servers: threads, processes of this host, other hosts."""
