"""Large tables sharded over replicas by rows: lookups and sparse updates."""
