"""What is told that something is gone, at the end of the interpreter too."""

import sys
import weakref

from jaxstrategy.tracing.functions import _callbacks


class Owner:
    def __init__(self):
        self.told = []

    def gone(self, *what):
        self.told.append(what)


def emptied(monkeypatch, module):
    """As when the interpreter exits: the names of a module are None before objects."""
    for name in [name for name in vars(module) if not name.startswith("__")]:
        monkeypatch.setattr(module, name, None)


def test_the_owner_is_told_with_the_names_of_the_module_gone(monkeypatch):
    owner, thing = Owner(), Owner()
    reference = weakref.ref(thing, _callbacks.of(owner, Owner.gone, "first"))
    emptied(monkeypatch, _callbacks)
    del thing
    assert owner.told == [("first", reference)]


def test_nothing_is_told_while_the_interpreter_exits(monkeypatch):
    owner, thing = Owner(), Owner()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "is_finalizing", lambda: True)
        reference = weakref.ref(thing, _callbacks.of(owner, Owner.gone))
    emptied(monkeypatch, _callbacks)
    del thing
    assert reference() is None and not owner.told


def test_the_owner_is_not_kept(monkeypatch):
    owner, thing = Owner(), Owner()
    told = owner.told
    reference = weakref.ref(thing, _callbacks.of(owner, Owner.gone))
    del owner, thing
    assert reference() is None and not told
