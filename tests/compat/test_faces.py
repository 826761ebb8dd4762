"""Faces of strategies: one for each, kept as long as somebody holds it."""

import gc
import weakref

import pytest

import jaxstrategy as js
from jaxstrategy.compat._adapters import Faces
from jaxstrategy.contexts._strategy_face import StrategyFace, core_of


@pytest.fixture
def generation():
    faces = Faces(lambda: Common)

    class Common(StrategyFace):
        def __init__(self, core):
            self._core = core
            faces.add(self)

        @property
        def core(self):
            return self._core

    @faces.of_type(js.OneDeviceStrategy)
    class One(Common):
        def __init__(self, device):
            super().__init__(js.OneDeviceStrategy(device))

    return faces, Common, One


def test_a_strategy_has_one_face(generation, two):
    faces, common, _ = generation
    face = faces.of(two)
    assert type(face) is common
    assert faces.of(two) is face
    assert faces.of(face) is face
    assert core_of(face) is two
    assert core_of(two) is two


def test_the_type_of_a_strategy_chooses_the_class(generation):
    faces, common, one = generation
    made = one("CPU:0")
    assert faces.of(made.core) is made
    core = js.OneDeviceStrategy("CPU:0")
    assert type(faces.of(core)) is one
    assert faces.of(core).core is core


def test_a_face_keeps_its_strategy_and_nobody_keeps_the_face(generation):
    faces, *_ = generation
    core = js.OneDeviceStrategy("CPU:0")
    face, watched = faces.of(core), weakref.ref(core)
    del core
    gc.collect()
    assert faces.of(watched()) is face
    del face
    gc.collect()
    assert watched() is None
