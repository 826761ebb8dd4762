"""Public names are there, and their modules are read when a program asks for one."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import jaxstrategy as js

PACKAGE = Path(js.__file__).parent


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


# What lies beside `_src`, but for programs.
PUBLIC = {
    name: path
    for path in PACKAGE.rglob("*.py")
    if "._" not in (name := module_of(path))
}


def declared(path):
    """The public names that type checkers see: what each is, by its name."""
    tree = ast.parse(path.read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    if not blocks:
        return {}
    (block,) = blocks
    found, local = {}, {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                local[alias.name] = (node.module, alias.name)
                if alias.asname == alias.name:
                    found[alias.name] = local[alias.name]
        else:
            found[node.targets[0].id] = local[node.value.id]
    return found


def in_a_fresh_process(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_public_modules_have_exactly_their_names():
    """What type checkers see is what programs see, and nothing that is imported."""
    assert len(PUBLIC) > 20
    for name, path in PUBLIC.items():
        package, wanted = importlib.import_module(name), declared(path)
        public = {each for each in dir(package) if not each.startswith("_")}
        folders = {each for each in public if f"{name}.{each}" in PUBLIC}
        assert public - (folders - set(wanted)) == set(wanted) - {"__version__"}, name
        for each, (module, defined) in wanted.items():
            home = importlib.import_module(module)
            assert getattr(package, each) is getattr(home, defined), (name, each)
            assert each in vars(package), (name, each)  # and is asked for once


def test_no_package_waits_for_its_own_modules():
    """Else threads that import two of them at once could wait in a circle."""
    light = {"jaxstrategy._src.lazy_names"}
    for name, path in PUBLIC.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module != "typing":
                names = {f"{node.module}.{each.name}" for each in node.names}
                assert names <= light, name


def test_the_import_reads_three_files():
    code = """
import sys
import jax
before = set(sys.modules)
import jaxstrategy
print(*sorted(set(sys.modules) - before))
"""
    assert in_a_fresh_process(code) == [
        "jaxstrategy",
        "jaxstrategy._src",
        "jaxstrategy._src.lazy_names",
    ]


def test_threads_may_ask_for_names_at_once():
    code = """
import random, sys, threading
import jaxstrategy as js
sys.setswitchinterval(1e-5)
names = [name for name in dir(js) if not name.startswith("_")]
found, start = [], threading.Barrier(12)

def ask(seed):
    own = random.Random(seed).sample(names, len(names))
    start.wait()
    found.append({name: getattr(js, name) for name in own})

threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 12, "some have failed"
assert all(each[name] is found[0][name] for each in found for name in names)
print(60 >= len(names) > 50)
"""
    assert in_a_fresh_process(code) == ["True"]


def test_a_module_that_lacks_something_else_says_so(monkeypatch):
    """Only the library of the extra is an extra that is missing."""
    monkeypatch.delitem(sys.modules, "jaxstrategy._src.keras.keras_models", False)
    monkeypatch.delitem(vars(js.keras), "BatchNormalization", False)
    monkeypatch.setitem(sys.modules, "jax.numpy", None)
    with pytest.raises(ModuleNotFoundError, match=r"jax\.numpy"):
        js.keras.BatchNormalization  # noqa: B018


def test_names_that_are_elsewhere_say_where():
    with pytest.raises(AttributeError, match=r"it is `jaxstrategy\.training\.pipeline"):
        js.pipeline  # noqa: B018
    with pytest.raises(AttributeError, match=r"`jaxstrategy\.errors\.ObjectError`"):
        js.ObjectError  # noqa: B018
    code = """
import jaxstrategy as js
try:
    js.planning
except AttributeError as error:
    print(error)
from jaxstrategy import planning
assert js.planning is planning and "planning" not in dir(js)
"""
    said = " ".join(in_a_fresh_process(code))
    assert said.endswith("it is a module: `import jaxstrategy.planning`")
