"""Stages: what a program does for a step besides computing it, one thing a file."""
