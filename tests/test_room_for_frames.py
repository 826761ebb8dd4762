"""Calls below which there is room for frames: what is called does what it did."""

import sys

import pytest

from jaxstrategy.tracing._room_for_frames import with_room


def test_what_is_given_is_called_with_its_arguments():
    assert with_room(divmod, 17, 5) == (3, 2)
    assert with_room(dict, [("a", 1)], b=2) == {"a": 1, "b": 2}


def test_an_error_is_that_of_the_function():
    with pytest.raises(ZeroDivisionError, match="by zero"):
        with_room(divmod, 1, 0)


def test_hundreds_of_frames_fit_and_calls_may_be_inside_each_other():
    def depth(left):
        if not left:
            return sys._getframe().f_code.co_name
        return with_room(depth, left - 1) if left % 50 == 0 else depth(left - 1)

    assert with_room(depth, 300) == "depth"


def test_a_frame_is_larger_than_a_block_of_python():
    assert with_room.__code__.co_stacksize * 8 > 16 * 1024
