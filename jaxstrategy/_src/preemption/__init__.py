"""Machines that are wanted back: all processes save at one step, and end."""
