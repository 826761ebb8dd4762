"""What options of the command line hold: types for `argparse`."""

from __future__ import annotations

import argparse
import math
import os

from jaxstrategy.cluster.resolvers._cluster_spec import host_and_port


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def whole(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def amount(text: str) -> float:
    """A number from 0 on."""
    return _number(text, "a number from 0 on")


def seconds(text: str) -> float:
    """A time from 0 on."""
    return _number(text, "a time in seconds")


def positive_seconds(text: str) -> float:
    """A time above 0."""
    if (number := seconds(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0 seconds")
    return number


def address(text: str) -> str:
    """A `host:port`."""
    try:
        host_and_port(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def folder(text: str) -> str:
    """A folder, or the address of what serves as one, whether it is there or not."""
    if not text or os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _number(text: str, wanted: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return number
