"""What lies where, as text and as pictures."""
