"""What a step would do, told without running it."""
