"""Who the processes of a job are, as clusters and their environments tell."""
