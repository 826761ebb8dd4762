"""What `python -m jaxstrategy.doctor` prints."""
