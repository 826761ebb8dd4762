"""Large tables of which each replica keeps some rows: lookups and sparse updates."""
