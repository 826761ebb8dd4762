"""What can be added to checkpoints by itself: a backend, a sort of values."""

import fractions
import linecache
import pathlib

import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.checkpoint import (
    CheckpointManager,
    _manager,
)
from jaxstrategy.checkpoint.backends._backend import AbstractBackend
from jaxstrategy.checkpoint.folders import _record
from jaxstrategy.checkpoint.folders._folder import Folder
from jaxstrategy.checkpoint.sorts import _sorts
from jaxstrategy.checkpoint.sorts._sort import Sort


class NumPyBackend(AbstractBackend):
    """One file of NumPy for each array, written at once."""

    def path_of(self, directory):
        epath = pytest.importorskip("etils.epath")
        return epath.Path(directory).absolute()

    def begin(self, folder, arrays, record):
        for number, (name, array) in enumerate(arrays.items()):
            np.savez(pathlib.Path(folder, f"{number}.npz"), name=name, array=array)
        self._begun = folder, record

    def finish(self):
        folder, record = self._begun
        _record.write(folder, record)
        Folder(folder.parent).finish(folder.name)

    def read(self, folder, readings):
        found = {}
        for path in pathlib.Path(folder).glob("*.npz"):
            with np.load(path) as file:
                found[str(file["name"])] = file["array"]
        assert all(found[name].shape == each.shape for name, each in readings.items())
        return {name: found[name] for name in readings}

    def close(self):
        self.is_closed = True


def test_another_backend(tmp_path, monkeypatch):
    backend = NumPyBackend()
    monkeypatch.setattr(_manager, "installed", lambda: backend)
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    two = js.MirroredStrategy(js.simulate(8)[:2])
    with CheckpointManager(tmp_path, two, keep=2) as manager:
        for step in (1, 2, 3):
            state = {"x": two.mirror(step * x), "n": np.int64(step), "name": "a"}
            assert manager.save(step, state)
        manager.wait()
        assert manager.all_steps() == [2, 3]
    assert backend.is_closed
    assert sorted(p.name for p in (tmp_path / "3").iterdir()) == [
        "0.npz",
        "1.npz",
        "jaxstrategy.json",
    ]
    with CheckpointManager(tmp_path) as manager:
        like = {"x": np.zeros((2, 3), np.float32), "n": np.int64(0), "name": ""}
        found = manager.restore(like, 2)
    np.testing.assert_array_equal(found["x"], 2 * x)
    assert (found["n"], found["name"]) == (2, "a")


def test_a_backend_whose_file_was_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(_manager, "installed", NumPyBackend)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": np.ones(3)})
        manager.wait()
        path = tmp_path / "1" / "0.npz"
        changed = bytearray(path.read_bytes())
        changed[len(changed) // 2] ^= 1
        path.write_bytes(changed)
        with pytest.raises(js.checkpoint.CheckpointError, match="another checksum"):
            manager.restore({"x": np.ones(3)}, 1)


class FractionSort(Sort):
    kind = "fraction"

    @staticmethod
    def takes(value):
        return isinstance(value, fractions.Fraction)

    @staticmethod
    def is_entry(fields):
        return list(fields) == ["parts"] and len(fields["parts"]) == 2

    @staticmethod
    def told_of(entry):
        return "a fraction"

    @property
    def describe(self):
        return "a fraction"

    def saved(self):
        return {"kind": self.kind, "parts": list(self.value.as_integer_ratio())}, None

    def difference(self, entry, told):
        return None if entry["kind"] == self.kind else self.differs(told)

    def reading(self, entry):
        return None

    def restored(self, entry, array):
        return fractions.Fraction(*entry["parts"])


def test_another_sort(tmp_path, monkeypatch):
    third = {"third": fractions.Fraction(1, 3), "one": 1}
    text = "`third` is a Fraction, which a checkpoint cannot hold"
    with CheckpointManager(tmp_path / "before") as manager:
        with pytest.raises(TypeError, match=text):
            manager.save(1, third)
    monkeypatch.setattr(_sorts, "SORTS", (*_sorts.SORTS, FractionSort))
    monkeypatch.setitem(_sorts._BY_KIND, "fraction", FractionSort)
    with CheckpointManager(tmp_path / "after") as manager:
        manager.save(1, third)
        manager.wait()
        like = {"third": fractions.Fraction(0), "one": 0}
        assert manager.restore(like) == third
        with pytest.raises(
            js.checkpoint.MismatchError,
            match="`third` is a fraction in the checkpoint, and a string was wanted",
        ):
            manager.restore({"third": "", "one": 0})


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "text",
        {},
        {"kind": []},
        {"kind": "unknown", "value": 1},
        {"kind": "text"},
        {"kind": "text", "value": 1},
        {"kind": "number", "type": "int", "value": True},
        {"kind": "number", "type": "list", "value": []},
        {"kind": "number", "type": "complex", "value": [1.0]},
        {"kind": "array", "dtype": "float31", "shape": []},
        {"kind": "array", "dtype": "float32", "shape": [-1]},
        {"kind": "array", "dtype": "float32", "shape": [1], "more": 1},
        {"kind": "per_replica", "dtype": "float32", "shape": []},
        {"kind": "per_replica", "dtype": "int8", "shape": [2], "mask": ["x"]},
        {"kind": "iterator", "states": []},
    ],
)
def test_what_no_sort_has_written(value):
    assert not _sorts.is_entry(value)


@pytest.mark.parametrize("way", ["restore", "restore_or_init"])
def test_the_warning_about_damage_names_the_line_that_restores(tmp_path, way):
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"x": step})
        manager.wait()
        (tmp_path / "2" / "jaxstrategy.json").write_text("{")
        with pytest.warns(js.checkpoint.DamagedCheckpointWarning) as warned:
            getattr(manager, way)({"x": 0})
    (found,) = warned
    assert found.filename == __file__
    assert 'getattr(manager, way)({"x": 0})' in linecache.getline(
        __file__, found.lineno
    )
