"""Agreement of processes while they save and restore together."""
