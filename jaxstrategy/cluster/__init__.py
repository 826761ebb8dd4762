"""Who the processes of a job are, and how they keep an eye on each other."""
