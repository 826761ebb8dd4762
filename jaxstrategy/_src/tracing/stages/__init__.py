"""What a program does for a step besides computing it."""
