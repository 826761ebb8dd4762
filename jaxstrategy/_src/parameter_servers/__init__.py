"""Variables on parameter servers and functions on workers, without a strategy."""
