"""`python -m jaxstrategy.compat.port`: files, notebooks, and what it prints."""

import json
import os
import stat
import subprocess
import sys

import pytest
from helpers.porting import main

OLD = "import tensorflow as tf\ns = tf.distribute.MirroredStrategy()\n"
NEW = "import jaxstrategy as js\ns = js.MirroredStrategy()\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(OLD)
    return path


def test_nothing_is_written_unless_asked(file, capsys):
    assert main([str(file)]) == 0
    assert file.read_text() == OLD
    out, err = capsys.readouterr()
    assert "\n-s = tf.distribute.MirroredStrategy()\n" in out
    assert "\n+s = js.MirroredStrategy()\n" in out
    assert "1 file would change; --write changes them; 0 to decide" in err


def test_write_changes_the_file_once(file, capsys):
    file.chmod(0o754)
    assert main(["--write", str(file)]) == 0
    assert file.read_text() == NEW
    assert stat.S_IMODE(file.stat().st_mode) == 0o754
    assert os.listdir(file.parent) == ["train.py"]
    before = file.stat().st_mtime_ns
    assert main(["--write", str(file)]) == 0
    assert file.stat().st_mtime_ns == before
    assert "changed 1 file; 0 to decide" in capsys.readouterr().err


def test_a_full_disk_leaves_the_old_program(file):
    code = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))  # bytes of a file
runpy.run_module("jaxstrategy.compat.port", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, "--write", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode and "File too large" in done.stderr
    assert file.read_text() == OLD
    assert os.listdir(file.parent) == ["train.py"]


def test_check_tells_whether_something_is_left(file):
    assert main(["--check", str(file)]) == 1
    assert file.read_text() == OLD
    main(["--write", str(file)])
    assert main(["--check", str(file)]) == 0
    file.write_text("import tensorflow as tf\ntf.keras.Modell()\n")
    assert main(["--check", str(file)]) == 1
    assert main([str(file)]) == 0


def test_lines_are_those_of_the_file_that_is_left(file, capsys):
    file.write_text(f"import os\n{OLD}x = 'é', tf.cast(s, tf.int32), tf.keras.Modell()")
    main([str(file)])
    assert f"{file}:4:32: decide: tf.keras.Modell: " in capsys.readouterr().out
    main(["--write", str(file)])
    line = file.read_text().splitlines()[5]
    assert line == "x = 'é', jnp.astype(s, jnp.int32), tf.keras.Modell()"
    place = f"6:{line.index('tf.keras') + 1}"
    assert f"{file}:{place}: decide: tf.keras.Modell: " in capsys.readouterr().out


def test_encodings_and_ends_of_lines_stay(tmp_path):
    latin = tmp_path / "latin.py"
    latin.write_bytes(f"# coding: latin-1\r\nx = 'é'; {OLD}".encode("latin-1"))
    marked = tmp_path / "marked.py"
    marked.write_bytes(f"# é\n{OLD}".encode("utf-8-sig"))
    main(["--write", str(tmp_path)])
    found = latin.read_bytes().decode("latin-1")
    assert found.startswith("# coding: latin-1\r\n") and "x = 'é'; pass" in found
    assert "s = js.MirroredStrategy()\n" in found
    assert marked.read_bytes() == f"# é\n{NEW}".encode("utf-8-sig")


def test_files_that_cannot_be_read_are_told_and_the_others_done(tmp_path, capsys):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(OLD)
    bad.write_text("import tensorflow as tf\nprint tf.distribute\n")
    wrong = tmp_path / "wrong.py"
    wrong.write_bytes(b"# \xff tensorflow\n")
    (tmp_path / "no.ipynb").write_text("[]")
    missing = tmp_path / "missing.py"
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "other.py").write_text(OLD)
    assert main(["--write", str(tmp_path), str(missing)]) == 2
    assert good.read_text() == NEW
    assert "print tf.distribute" in bad.read_text()
    assert (tmp_path / ".hidden" / "other.py").read_text() == OLD
    err = capsys.readouterr().err
    assert f"{bad}: error: line 2 is Python 2. Rewrite the file for Python 3" in err
    assert f"{wrong}: error: " in err and "encoding" in err
    assert "no.ipynb: error: this is no notebook of Jupyter 4 or newer" in err
    assert f"{missing}: error: there is no such file or folder" in err


def test_wrong_arguments(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "no files or folders are given" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["--write", "--check", "a.py"])
    assert stopped.value.code == 2


def cell(source, kind="code"):
    made = {"cell_type": kind, "metadata": {}, "source": source}
    if kind == "code":
        made |= {"outputs": [{"output_type": "stream"}], "execution_count": 3}
    return made


def test_notebooks(tmp_path, capsys):
    path = tmp_path / "train.ipynb"
    cells = [
        cell(["# Title\n", "tf.distribute"], "markdown"),
        cell(["!pip install tensorflow\n", "import tensorflow as tf"]),
        cell(["%%bash\n", "echo tf.distribute"]),
        cell("x = 1\n"),
        cell(
            ["s = tf.distribute.MirroredStrategy()\n", "%time s\n", "tf.keras.Modell()"]
        ),
    ]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}, indent=2) + "\n")
    assert main([str(path)]) == 0
    assert f"{path}:cell 4:3:1: decide: tf.keras.Modell: " in capsys.readouterr().out
    assert main(["--write", str(path)]) == 0
    text = path.read_text()
    after = json.loads(text)["cells"]
    assert text.startswith('{\n  "cells"') and text.endswith("}\n")
    assert after[0] == cells[0] and after[2] == cells[2] and after[3] == cells[3]
    assert after[1]["source"] == [
        "!pip install tensorflow\n",
        "import jaxstrategy as js\n",
        "import tensorflow as tf",
    ]
    assert after[4]["source"] == [
        "s = js.MirroredStrategy()\n",
        "%time s\n",
        "tf.keras.Modell()",
    ]
    assert after[4]["outputs"] == [] and after[4]["execution_count"] is None
    assert main(["--write", str(path)]) == 0
    assert path.read_text() == text


def test_without_the_extra_it_says_what_to_install(file):
    code = (
        "import sys, runpy; sys.modules['libcst'] = None; "
        "runpy.run_module('jaxstrategy.compat.port', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "needs LibCST, which is not installed" in done.stderr
    assert "pip install 'jaxstrategy[port]'" in done.stderr


def test_a_name_that_stays_imported_is_found_on_its_line(tmp_path, capsys):
    path = tmp_path / "program.py"
    path.write_text("from tensorflow import Variable, function\nv = Variable(1)\n")
    main(["--write", str(path)])
    assert path.read_text().splitlines()[1] == "from tensorflow import function"
    assert f"{path}:2:24: decide: tf.function" in capsys.readouterr().out
