"""Public names tell of themselves: example, arguments, shapes, what they raise."""

import ast
import builtins
import functools
import importlib
import inspect
import re
import typing
from pathlib import Path

from helpers.guides import all_prose

import jaxstrategy

PACKAGE = Path(jaxstrategy.__file__).parent
MODULES = [
    "jaxstrategy",
    "jaxstrategy.checkpoint",
    "jaxstrategy.cluster_resolver",
    "jaxstrategy.compat.contrib",
    "jaxstrategy.compat.v1",
    "jaxstrategy.compat.v1.experimental",
    "jaxstrategy.errors",
    "jaxstrategy.experimental",
    "jaxstrategy.experimental.partitioners",
    "jaxstrategy.experimental.rpc",
    "jaxstrategy.flax",
    "jaxstrategy.flax.linen",
    "jaxstrategy.flax.nnx",
    "jaxstrategy.keras",
    "jaxstrategy.launch",
    "jaxstrategy.optax",
    "jaxstrategy._src.preemption",
    "jaxstrategy.profiling",
    "jaxstrategy.sharded",
    "jaxstrategy.tpu.experimental",
    "jaxstrategy.training",
]


def exported(module):
    """Its classes and functions by name: what it defines, and imports as `X as X`."""
    body = ast.parse(Path(module.__file__).read_text()).body
    lazy = [node for block in body if isinstance(block, ast.If) for node in block.body]
    for node in [*body, *lazy]:
        match node:
            case ast.ImportFrom():
                names = [a.name for a in node.names if a.asname == a.name]
            case ast.FunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.Assign(targets=[ast.Name(id=name)]):
                names = [name]
            case _:
                names = []
        for name in names:
            value = getattr(module, name)
            if not name.startswith("_") and callable(value):
                yield name, value


PUBLIC = list(map(importlib.import_module, MODULES))
NAMES = {
    f"{module.__name__}.{name}": value
    for module in PUBLIC
    for name, value in exported(module)
}


def plain(member):
    """The function behind a property, a class method or a static one; else None."""
    if isinstance(member, (property, functools.cached_property)):
        member = getattr(member, "fget", None) or member.func
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    return member if inspect.isfunction(member) else None


def members(cls):
    """Its public methods and properties, inherited ones of ours too, by their names."""
    for name in sorted(set(dir(cls)) - set(getattr(cls, "__dataclass_fields__", ()))):
        function = plain(inspect.getattr_static(cls, name))
        if not name.startswith("_") and function and is_ours(function):
            yield name, function


def is_ours(value):
    return (getattr(value, "__module__", None) or "").startswith("jaxstrategy")


def is_written(function):
    """Whether it stands in a file: dataclasses write some by themselves."""
    return function.__code__.co_filename.startswith(str(PACKAGE))


def parts(name, value):
    """Each function, constructor and public method of `value`, with its class."""
    if not inspect.isclass(value):
        yield name, value, None
        return
    for maker in ("__new__", "__init__", "__post_init__"):
        function = plain(inspect.getattr_static(value, maker, None))
        if function and is_ours(function) and is_written(function):
            yield f"{name}.{maker}", function, value
    for member, function in members(value):
        yield f"{name}.{member}", function, value


def documented():
    """The parts of exported names, and of classes of ours that those return."""
    found, known = {}, set(NAMES.values())
    for name, value in NAMES.items():
        for part in parts(name, value):
            # A subclass of `Strategy` has copies, under its own name.
            key = part[1].__code__, part[0] if "__" in part[0] else None
            found.setdefault(key, part)
    for _, function, _ in list(found.values()):
        for cls in returned(function):
            if cls not in known:
                known.add(cls)
                found.update(((p[0], p[1]), p) for p in parts(cls.__name__, cls))
    return list(found.values())


def returned(function):
    """The classes of ours that its annotation says it returns."""
    try:
        hint = typing.get_type_hints(function).get("return")
    except NameError:  # a name that only type checkers import
        return []
    hints = [hint, *typing.get_args(hint)]
    classes = (typing.get_origin(hint) or hint for hint in hints)
    return [cls for cls in classes if inspect.isclass(cls) and is_ours(cls)]


def words(function, owner):
    """The docstring that tells of `function`: of a constructor that of its class."""
    told = owner if function.__name__.startswith("__") else function
    return inspect.getdoc(told) or ""


EVERY = documented()


def told(complaints):
    """Fails with all of them at once."""
    complaints = list(complaints)
    assert not complaints, "\n".join(["", *complaints])


def test_each_name_has_an_example_and_each_method_a_first_line():
    told([name for name, value in NAMES.items() if ">>>" not in (value.__doc__ or "")])
    told([name for name, function, owner in EVERY if not words(function, owner)])
    told(
        f"{name}: {words(function, owner).splitlines()[0]}"
        for name, function, owner in EVERY
        if name.startswith("jaxstrategy") and NO_NOUN.match(words(function, owner))
    )


NO_NOUN = re.compile(r"(What|How|Which|When|Where|Who|It|Those|Nothing)\b")


def is_exception(name, function):
    values = [getattr(place, name, None) for place in (builtins, *PUBLIC)]
    for value in (function.__globals__.get(name), *values):
        if inspect.isclass(value) and issubclass(value, BaseException):
            return True
    return False


def section(function, owner, name):
    """The names that a section of the docstring explains, without asterisks."""
    text = words(function, owner) + "\n"
    found = re.search(rf"^{name}:\n((?:  .*\n|\n)+)", text, re.MULTILINE)
    heads = re.findall(r"^  ([*\w][\w, *]*):", found[1], re.MULTILINE) if found else []
    return [one.strip(" *") for head in heads for one in head.split(",")]


def test_what_is_said_to_be_raised_exists():
    told(
        f"{name} cannot raise {error}"
        for name, function, owner in EVERY
        for error in section(function, owner, "Raises")
        if not is_exception(error, function)
    )


def parameters(function):
    """Their names; those by position that are refused are no arguments."""
    given = inspect.signature(function).parameters.values()
    return [p.name for p in given if p.name not in ("self", "cls", "misplaced")]


def test_of_the_arguments_all_are_explained_or_none():
    told(
        f"{name} explains {', '.join(explained)}, and takes {', '.join(taken)}"
        for name, function, owner in EVERY
        if (explained := section(function, owner, "Args"))
        and function.__name__ != "__post_init__"  # its arguments are fields
        and sorted(explained) != sorted(taken := parameters(function))
    )


def test_a_guide_says_when_each_error_comes():
    lines = all_prose().splitlines()
    table = "\n".join(line for line in lines if line.startswith("|"))
    classes = {n.split(".")[-1]: v for n, v in NAMES.items() if inspect.isclass(v)}
    errors = (n for n, v in classes.items() if issubclass(v, BaseException))
    told(name for name in errors if f"`{name}`" not in table)
