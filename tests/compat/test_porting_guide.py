"""What `notebooks/porting.md` says, tables of names, functions of arrays are true."""

import inspect
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.oracle import found_at, recorded
from helpers.porting import main, ported, table, tables

GUIDE = Path(__file__).parents[2] / "notebooks" / "porting.md"
TEXT = GUIDE.read_text()
BEFORE = re.findall(
    r"```python\n# before: (\w+\.py)\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL
)
RUNNING = re.findall(
    r"```python\n# (?!before)[^\n]*\n(.*?)```\n\nprints `([^`]*)`", TEXT, re.DOTALL
)


def test_no_program_is_left_out():
    assert len(BEFORE) == 4
    assert len(BEFORE) + len(RUNNING) == TEXT.count("```python\n")


@pytest.mark.parametrize("name, program, said", BEFORE, ids=[b[0] for b in BEFORE])
def test_the_tool_says_what_the_guide_says(
    name, program, said, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(program)
    main([name])
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if line.startswith(f"{name}:")]
    assert [line for line in told if "note: " not in line] == said.splitlines()
    assert len(told) > len(said.splitlines())


@pytest.mark.parametrize("program, printed", RUNNING)
def test_what_was_made_of_it_runs(program, printed, capsys):
    with jax.numpy_rank_promotion("allow"):  # as Keras needs it
        exec(compile(program, "after.py", "exec"), {})
    assert capsys.readouterr().out.strip() == printed


def test_tables_are_those_of_the_tool():
    for which in ["tf2", "tf1", "2018", "others"]:
        assert f"<!-- names: {which} -->\n\n{table(which)}\n" in TEXT


# The table of old names: each leads to something that is here, and none is missing.


SYMBOLS = recorded("tf_surface.json")["symbols"]
# What `tf.contrib.distribute` of TensorFlow 1.12 exports, and functions of its modules.
OF_2018 = """
AllReduceCrossTowerOps CollectiveAllReduceStrategy CrossTowerOps DistributeConfig
DistributionStrategy MirroredStrategy Monitor OneDeviceStrategy ParameterServerStrategy
ReductionToOneDeviceCrossTowerOps Step StandardInputStep StandardSingleLossStep
TowerContext TPUStrategy get_cross_tower_context get_distribution_strategy
get_loss_reduction get_tower_context has_distribution_strategy require_tower_context
run_standard_tensorflow_server UpdateContext get_update_device increment_var
""".split()


def test_each_name_leads_somewhere_or_has_advice():
    names = [*SYMBOLS, *(f"tf.contrib.distribute.{name}" for name in OF_2018)]
    assert [name for name in names if name not in tables.NAMES] == []
    for row in tables.ROWS:
        if row.new is not None:
            assert found_at(row.new) is not None, row
    for row in tables.ROWS:
        assert row.new is not None or len(row.text) > 15, row
        assert "\n" not in row.text and not row.text.endswith("."), row
    assert tables.row_of("tf.optimizers.Adam").old == "tf.optimizers"
    assert tables.row_of("tf.distribute.MirroredStrategy.run").new is not None
    assert tables.row_of("tf.distribute.NoSuchName").old == "tf"
    assert tables.row_of("tf.float32.max").old == "tf"


def test_forms_of_calls_are_those_of_the_new_function():
    for row in tables.ROWS:
        if row.pattern is None or row.new is None:
            continue
        try:
            parameters = inspect.signature(found_at(row.new)).parameters
        except (TypeError, ValueError):
            continue
        kinds = [p.kind for p in parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            # Those by place come first.
            by_place = [kind for kind in kinds if kind <= kind.POSITIONAL_OR_KEYWORD]
            assert row.pattern.positional <= len(by_place), row
        for name in filter(None, row.pattern.keywords.values()):
            kind = parameters[name].kind
            assert kind is not inspect.Parameter.POSITIONAL_ONLY, row


# Functions of arrays that the porting tool renames give TensorFlow's numbers.


CALLS = recorded("array_functions.json")["calls"]
F = np.array([[1.5, -2.25, 0.5], [3.0, -0.75, 2.5]], np.float32)
GIVEN = {
    "f": F,
    "p": np.abs(F),
    "i": np.array([[3, -2, 5], [7, 0, 1]], np.int32),
    "b": np.array([[True, False, True], [True, True, True]]),
}


@pytest.mark.slow
def test_calls_give_what_tensorflow_gives():
    lines = [f"r{n} = {each['call']}" for n, each in enumerate(CALLS)]
    done = ported("\n".join(["import tensorflow as tf", *lines]))
    assert "tf." not in done.text
    names = dict(GIVEN)
    exec(done.text, names)
    for n, each in enumerate(CALLS):
        result = np.asarray(names[f"r{n}"])
        kind = str(result.dtype), list(result.shape)
        assert kind == (each["dtype"], each["shape"]), each["call"]
        np.testing.assert_allclose(
            result.astype(np.float64).ravel(),
            each["value"],
            rtol=2e-5,
            atol=1e-6,
            err_msg=each["call"],
        )


# Their results have another type, which their rows say; or they are TensorFlow 1's.
NOT_RECORDED = {"tf.log", "tf.argmax", "tf.nest.map_structure", "tf.nest.flatten"}


def test_each_function_is_recorded():
    called = {each["call"].partition("(")[0].replace("math.", "") for each in CALLS}
    for row in [r for r in tables.ARRAYS if r.pattern]:
        assert row.old.replace("tf.math.", "tf.") in called | NOT_RECORDED
