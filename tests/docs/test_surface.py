"""Every public name, method and argument of `tf.distribute` is here, or has a reason.

`oracle/tf_surface.json` holds the public names of TensorFlow 2.21 with their members
and parameters; `oracle/surface_reasons.json` what is not here, or different, and why.
More optional arguments and more members than TensorFlow's are fine.
"""

import dataclasses
import enum
import fnmatch
import inspect

from helpers.oracle import found_at, recorded

SYMBOLS = recorded("tf_surface.json")["symbols"]
REASONS = recorded("surface_reasons.json")
# Where a name of TensorFlow is found, by its longest beginning.
HOMES = {
    "tf.distribute": "jaxstrategy",
    "tf.compat.v1.distribute": "jaxstrategy.compat.v1",
    "tf.train.ClusterSpec": "jaxstrategy.cluster_resolver.ClusterSpec",
    "tf.nn": "jaxstrategy.training",
    "tf.types.experimental.distributed": "jaxstrategy",
    "tf": "jaxstrategy",
}
# Defaults that mean the same: nothing was given.
NOTHING = {"None", "()", "[]", "{}", "''"}


def home(name):
    start = max((n for n in HOMES if f"{name}.".startswith(f"{n}.")), key=len)
    return HOMES[start] + name.removeprefix(start)


def gaps(name):
    """What is missing or different: pairs of a name of TensorFlow and a text."""
    wanted, ours = SYMBOLS[name], found_at(home(name))
    if ours is None:
        return [(name, "absent")]
    if wanted["kind"] == "function":
        return of_arguments(name, wanted["parameters"], ours)
    found = []
    if wanted["kind"] == "class":
        found += of_arguments(name, wanted.get("parameters"), ours)
    for member, spec in wanted.get("members", {}).items():
        found += of_member(f"{name}.{member}", member, spec, ours)
    return found


def of_member(name, member, spec, ours):
    if not has(ours, member):
        return [(name, "absent")]
    wants_call = spec["kind"] in ("method", "function")
    static = inspect.getattr_static(ours, member, None)
    is_call = callable(getattr(ours, member, None)) and not isinstance(static, property)
    if spec["kind"] == "property" and is_call:
        return [(name, "a method instead of a property")]
    if not wants_call:
        return []
    if not is_call:
        return [(name, "a property instead of a method")]
    return of_arguments(name, spec.get("parameters"), getattr(ours, member))


def has(ours, member):
    """Whether a class, or each of its objects, has such a member."""
    fields = (getattr(base, "__annotations__", ()) for base in ours.__mro__)
    return hasattr(ours, member) or any(member in each for each in fields)


def of_arguments(name, wanted, function):
    if wanted is None:
        return []
    try:
        ours = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    if not inspect.isclass(function) and ours and ours[0].name in ("self", "cls"):
        ours = ours[1:]
    return [(name, text) for text in differences(wanted, ours)]


def differences(wanted, ours):
    """How the parameters of one of our functions fall short, in words."""
    by_name = {each.name: each for each in ours}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in ours)
    order = [
        e.name for e in ours if e.kind in (e.POSITIONAL_ONLY, e.POSITIONAL_OR_KEYWORD)
    ]
    given = [each for each in wanted if not each["kind"].startswith("VAR_")]
    for place, each in enumerate(given):
        mine = by_name.get(each["name"])
        if mine is None:
            if not takes_any:
                yield f"no argument `{each['name']}`"
            continue
        by_place = each["kind"] == "POSITIONAL_OR_KEYWORD"
        if by_place and (
            each["name"] not in order or order.index(each["name"]) != place
        ):
            yield f"`{each['name']}` is not argument {place}"
        if not means_the_same(each["default"], mine.default):
            yield f"`{each['name']}` is not {each['default']} by default"
    names = {each["name"] for each in wanted}
    for each in ours:
        if each.name not in names and each.default is each.empty:
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                yield f"`{each.name}` must be given"


def means_the_same(wanted, default):
    """Whether a default is TensorFlow's; where it has none, any will do."""
    if wanted is None:
        return True
    if isinstance(default, enum.Enum):
        default = default.name
    elif default is not None and type(default).__module__ != "builtins":
        return True  # an object that stands for "not given"
    if default is inspect.Parameter.empty:
        return False
    if wanted in NOTHING:
        return repr(default) in NOTHING or type(default) is object
    return str(default).lower() == wanted.rpartition(".")[2].strip("'").lower()


@dataclasses.dataclass(frozen=True)
class Reason:
    pattern: str
    text: str

    def covers(self, name):
        return fnmatch.fnmatchcase(name, self.pattern)


WRITTEN = [Reason(name, text) for text, names in REASONS.items() for name in names]


def test_each_name_is_here_or_has_a_reason():
    without = [
        f"{member}: {text}"
        for name in SYMBOLS
        for member, text in gaps(name)
        if not any(reason.covers(member) for reason in WRITTEN)
    ]
    assert not without, "\n".join(without)


def test_no_reason_is_out_of_date():
    names = {member for name in SYMBOLS for member, _ in gaps(name)}
    for reason in WRITTEN:
        assert any(map(reason.covers, names)), reason
