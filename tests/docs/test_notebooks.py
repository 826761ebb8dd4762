"""Every notebook runs from top to bottom in a process of its own, and then again.

The committed ones are as `python notebooks/execute.py` leaves them: with the outputs of
one run in a fresh kernel, and no errors.
"""

import re
import runpy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = [
    "batchnorm_dropout_metrics",
    "checkpoints",
    "communication",
    "data",
    "debugging",
    "flax_and_optax",
    "from_pmap_and_shard_map",
    "from_tf_distribute",
    "keras",
    "parameter_servers",
    "pipelines",
    "processes_and_hosts",
    "quickstart",
    "speed",
    "steps",
    "tables",
    "tensor_parallelism",
    "training_what_does_not_fit",
    "variables",
]
# They compile a language model in several designs, 100 s of processor time; or start
# processes that compile, one of them twice.
ONCE = [
    "parameter_servers",
    "processes_and_hosts",
    "tensor_parallelism",
    "training_what_does_not_fit",
]
each_notebook = pytest.mark.parametrize("name", NAMES)
# What belongs to the machine that ran a notebook.
MACHINES = re.compile(
    r"(?<![\w.:/])/(?:tmp|home|root|work|opt|usr|var|mnt|Users|private)\b"
    r"|\b[A-Za-z]:\\|ipykernel_|site-packages"
)


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def codes(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in codes(notebook) for output in cell.outputs]


def texts(notebook):
    """All that a reader sees of the outputs, as text."""
    for output in outputs(notebook):
        yield output.get("text", "")
        for kind, data in output.get("data", {}).items():
            if kind.startswith("text/"):
                yield data


def complaints(notebook):
    """Errors, and what was written to standard error."""
    return [
        output
        for output in outputs(notebook)
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


def test_there_are_no_others():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.timeout(600)  # two whole trainings or more, most of them twice
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.slow
@each_notebook
def test_it_runs_and_runs_again_in_the_same_kernel(
    name, tmp_path, tmp_path_factory, monkeypatch
):
    monkeypatch.delenv("MPLBACKEND", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    # The second time XLA has compiled nearly everything: 4 s and not 14 s of one guide.
    compiled = tmp_path_factory.mktemp("compiled")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    notebook = read(name)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=400, resources=resources)
    with client.setup_kernel():
        for _ in range(1 if name in ONCE else 2):
            for cell in codes(notebook):
                cell.outputs = []
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            assert outputs(notebook) and not complaints(notebook)
    assert not list(tmp_path.iterdir())


@each_notebook
def test_outputs_are_committed(name):
    notebook = read(name)
    counts = [cell.execution_count for cell in codes(notebook)]
    assert counts == list(range(1, len(counts) + 1))  # one run, in a fresh kernel
    assert outputs(notebook) and not complaints(notebook)
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 500_000


@each_notebook
def test_outputs_tell_nothing_of_the_machine(name):
    for text in texts(read(name)):
        assert not MACHINES.search(text)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "debugging"])
def test_pictures_are_committed(name):
    found = [output.get("data", {}) for output in outputs(read(name))]
    assert any(
        "image/png" in data or "<svg" in data.get("text/html", "") for data in found
    )


@pytest.mark.parametrize(
    "text",
    [
        "/".join(("", "tmp", "ipykernel_12", "345.py:3: x")),
        '"' + "/".join(("", "home", "me", 'a.py"')),
        "<b>" + "/".join(("", "root", "x")),
        "\\".join(("C:", "Users", "me")),
    ],
)
def test_paths_of_machines_are_found(text):
    assert MACHINES.search(text)


def test_other_paths_are_not():
    assert not MACHINES.search("train.py:3: a / b, https://docs.jax.dev/usr, x/tmp")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_execute_names_cells_instead_of_files(tmp_path):
    source = "def where(): pass\nprint(where.__code__.co_filename, 'line 1')"
    cells = [nbformat.v4.new_code_cell(code) for code in ("1 + 1", source)]
    path = tmp_path / "small.ipynb"
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)))
    runpy.run_path(str(FOLDER / "execute.py"))["execute"](path)
    first, second = codes(nbformat.read(path, as_version=4))
    assert first.outputs[0].data["text/plain"] == "2"
    assert second.outputs[0].text == "In[2] line 1\n"
