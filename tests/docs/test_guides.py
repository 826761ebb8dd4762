"""README.md and the guides are true: they run, and print what they say."""

import doctest
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import nbformat
import pytest
from helpers.guides import FOLDER, ROOT, all_prose, names, prose
from nbclient import NotebookClient

import jaxstrategy as js

NOTEBOOKS = [name.removesuffix(".ipynb") for name in names() if name.endswith("ipynb")]
README = (ROOT / "README.md").read_text()
FENCES = re.compile(r"^```(.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Run a second time in their kernel: they leave files, use up data, or change state.
AGAIN = ("checkpoints", "data", "variables")
# What belongs to the machine that ran a notebook.
MACHINES = re.compile(
    r"(?<![\w.:/])/(?:tmp|home|root|work|opt|usr|var|mnt|Users|private)\b"
    r"|\b[A-Za-z]:\\|ipykernel_|site-packages"
)
quiet = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning"
)


def codes(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in codes(notebook) for output in cell.outputs]


def complaints(notebook):
    """Errors, and what was written to standard error."""
    return [
        output
        for output in outputs(notebook)
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


@pytest.mark.timeout(600)  # two whole trainings or more
@quiet
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name != "debugging"])
def test_notebooks_run_and_some_run_again_in_the_same_kernel(
    name, tmp_path, tmp_path_factory, monkeypatch
):
    monkeypatch.delenv("MPLBACKEND", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if name in AGAIN:
        # The second time XLA has compiled nearly all: 4 s, not 14 s of one guide.
        compiled = tmp_path_factory.mktemp("compiled")
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
        monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=400, resources=resources)
    with client.setup_kernel():
        for _ in range(2 if name in AGAIN else 1):
            for cell in codes(notebook):
                cell.outputs = []
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            assert outputs(notebook) and not complaints(notebook)
    assert not list(tmp_path.iterdir())


def test_outputs_are_committed_and_tell_nothing_of_the_machine():
    for name in NOTEBOOKS:
        path = FOLDER / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        counts = [cell.execution_count for cell in codes(notebook)]
        assert counts == list(range(1, len(counts) + 1)), f"{name}: not one run"
        assert outputs(notebook) and not complaints(notebook), name
        assert path.stat().st_size < 500_000, name
        for output in outputs(notebook):
            kinds = output.get("data", {})
            texts = [kinds[kind] for kind in kinds if kind.startswith("text/")]
            for text in (output.get("text", ""), *texts):
                assert not MACHINES.search(text), name
    assert MACHINES.search("/".join(("", "tmp", "ipykernel_12", "345.py:3: x")))
    assert not MACHINES.search("train.py:3: a / b, https://docs.jax.dev/usr, x/tmp")


@quiet
def test_execute_names_cells_instead_of_files(tmp_path):
    source = "def where(): pass\nprint(where.__code__.co_filename, 'line 1')"
    cells = [nbformat.v4.new_code_cell(code) for code in ("1 + 1", source)]
    path = tmp_path / "small.ipynb"
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)))
    runpy.run_path(str(FOLDER / "execute.py"))["execute"](path)
    first, second = codes(nbformat.read(path, as_version=4))
    assert first.outputs[0].data["text/plain"] == "2"
    assert second.outputs[0].text == "In[2] line 1\n"


def printed(path):
    """What each cell with code prints, whatever the ends of its lines."""
    texts = [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in codes(nbformat.read(path, as_version=4))
        if "jax.debug.print" not in cell.source  # the replicas print in any order
    ]
    # XLA may round the last digit otherwise, by its options.
    return [
        re.sub(r"\d+\.\d+", lambda n: f"{float(n[0]):.4g}", " ".join(text.split()))
        for text in texts
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@quiet
def test_the_debugging_guide_shows_what_mistakes_are_answered_with(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    shown = printed(FOLDER / "debugging.ipynb")
    copy = shutil.copy(FOLDER / "debugging.ipynb", tmp_path)
    runpy.run_path(str(FOLDER / "execute.py"))["execute"](Path(copy))
    assert printed(copy) == shown
    assert not complaints(nbformat.read(copy, as_version=4))
    for error, line in (
        ("NotMirroredError", "it varies since: In["),
        ("DoubleReductionWarning", "reduced first: In["),
        ("DivergentCollectiveError", "its predicate varies since: In["),
        ("TracedValueError", "if js.get_replica_context()"),
        ("LeakedTracerError", "losses.append(x * x)"),
        ("NonFiniteError", "loss = jnp.log(w * x - 1)"),
    ):
        (answer, *_) = [text for text in shown if text.startswith(f"{error}: ")]
        assert line in answer


(FIRST,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def ran(folder, code, *options):
    """The outcome of a script of these lines, in a process of its own."""
    (folder / "train.py").write_text(code)
    return subprocess.run(
        [sys.executable, *options, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_readme_is_short():
    assert len(README.split()) <= 700 and len(FIRST.splitlines()) <= 45
    trained = FIRST[: FIRST.index("guess =")]
    assert sum(bool(line.strip()) for line in trained.splitlines()) <= 25


def test_the_first_example_prints_what_the_readme_says(tmp_path):
    done = ran(tmp_path, FIRST, "-W", "error")
    assert done.returncode == 0, done.stderr
    loss, accuracy = re.match(r"loss ([\d.]+), .* ([\d.]+)%", done.stdout).groups()
    said = re.search(r"It prints `loss ([\d.]+), .* ([\d.]+)%`", README)
    assert abs(float(loss) - float(said[1])) < 0.005
    assert abs(float(accuracy) - float(said[2])) < 1.5


@pytest.mark.slow
def test_a_forgotten_reduction_is_answered_as_the_readme_says(tmp_path):
    [reduction] = re.findall(r"^.*all_reduce\(.*\n", FIRST, re.MULTILINE)
    said = "Forget the `all_reduce`, and a `NotMirroredWarning` says since which"
    assert said in README
    forgotten = FIRST.replace(reduction, "").replace("batches * 10", "batches[:1]")
    lines = [line.strip() for line in forgotten.splitlines()]
    varies = lines.index("logits = state.apply_fn(params, images)")
    warned = ran(tmp_path, forgotten).stderr
    assert "NotMirroredWarning" in warned
    assert f"since: {tmp_path}/train.py:{varies + 1}: {lines[varies]}" in warned


# A script needs no line of what every program of a guide begins with.
BEGINNING = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxstrategy as js

js.simulate(8)
"""
# Programs that other tests run, with what stands before and behind them; and recipes
# for libraries that are not installed here.
ELSEWHERE = {
    "porting.md": ("# before: ", "# after", "# mixed", "# eager"),
    "speed.ipynb": ("run = wandb.init", "with mlflow.start_run"),
}


def text(page):
    return README if page == "README.md" else prose(page)


def scripts():
    for page in names():
        blocks = [body for kind, body in FENCES.findall(text(page)) if kind == "python"]
        for number, body in enumerate(blocks):
            if ">>>" not in body and not body.startswith(ELSEWHERE.get(page, ("\0",))):
                yield pytest.param(body, id=f"{page}-{number}")


def test_examples_of_a_session_print_what_they_say():
    for page in ["README.md", *names()]:
        kinds = {kind for kind, _ in FENCES.findall(text(page))}
        assert kinds <= {"python", "console", "text"}, page
        if ">>> " in text(page):
            examples = doctest.DocTestParser().get_doctest(
                text(page), {}, page, page, 0
            )
            results = doctest.DocTestRunner().run(examples)
            assert results.attempted and not results.failed, page


@pytest.mark.slow
@pytest.mark.parametrize("code", list(scripts()))
def test_other_blocks_run_as_scripts(code, tmp_path):
    done = ran(tmp_path, BEGINNING + code)
    assert done.returncode == 0, done.stderr


def test_commands_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(extras["optional-dependencies"])
    targets = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = set(" ".join(targets).split())
    said = {}
    for command in commands():
        match command:
            case ["make", *wanted]:
                assert {target for target in wanted if "=" not in target} <= targets
            case ["pip", "install", *what]:
                named = re.findall(r"\[([\w,-]+)\]", " ".join(what))
                assert {extra for each in named for extra in each.split(",")} <= extras
            case ["python", "-m", module, *rest]:
                if module not in said:
                    said[module] = subprocess.run(
                        [sys.executable, "-m", module, "--help"],
                        cwd=ROOT,
                        capture_output=True,
                        text=True,
                        timeout=120,
                        check=True,
                    ).stdout
                for word in rest:
                    if option := re.match(r"--?[a-z][\w-]*", word):
                        assert re.search(rf"{option[0]}\b", said[module]), command
            case ["python", file, *_]:
                assert (ROOT / file).exists() or (FOLDER / file).exists()
            case _:
                pytest.fail(f"nothing here runs {command}")


def commands():
    for page in ["README.md", *names()]:
        for kind, body in FENCES.findall(text(page)):
            if kind == "console":
                for line in body.replace("\\\n", " ").splitlines():
                    if line.strip():
                        yield shlex.split(line, comments=True)


LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
CODE = re.compile(r"^```.*?^```|(?<!`)`[^`\n]+`(?!`)", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)
PAGES = "README.md CONTRIBUTING.md CHANGELOG.md benchmarks/README.md".split()
PAGES += ["benchmarks/FIGURES.md", *(f"notebooks/{name}" for name in names())]


def markdown(page):
    if page.startswith("notebooks/"):
        return prose(page.removeprefix("notebooks/"))
    return (ROOT / page).read_text()


def links(page):
    return LINK.findall(CODE.sub("code", markdown(page)))


def anchors(markdown):
    """The names of sections: on GitHub and on the site, and in Jupyter."""
    outside = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    for heading in HEADING.findall(outside):
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "")
        yield re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        yield plain.replace(" ", "-")


def test_links_lead_to_files_and_sections():
    """No other host is asked: of addresses only the form is looked at."""
    broken = []
    for page in PAGES:
        for link in links(page):
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme == "https" and "." in parts.netloc, link
                continue
            target = (ROOT / page).parent / parts.path if parts.path else ROOT / page
            if not target.exists():
                broken.append((page, link))
            elif parts.fragment and target.suffix in {".md", ".ipynb"}:
                there = str(target.resolve().relative_to(ROOT))
                if parts.fragment not in anchors(markdown(there)):
                    broken.append((page, link))
    assert not broken
    led = {link for link in links("README.md") if link.startswith("notebooks/")}
    assert {f"notebooks/{name}" for name in names()} <= led
    assert "whats-it-a_b" in anchors("# What's it `a_b`?\n")


NAME = re.compile(r"(?<![\w.])(js|strategy)((?:\.[A-Za-z_]\w*)+)")


def is_there(root, path):
    """Whether a name exists, as far as modules and classes lead."""
    found = {"js": js, "strategy": js.Strategy}[root]
    for name in path.split(".")[1:]:
        if not isinstance(found, type | ModuleType):
            return True
        # A field without a default is no attribute of its class.
        if name in getattr(found, "__annotations__", {}):
            return True
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def test_names_in_prose_exist():
    # The strategies of older generations have other methods.
    for page in ["README.md", *(name for name in names() if name != "porting.md")]:
        outside = FENCES.sub("", text(page))
        code = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", outside)
        named = [each for body in code for each in NAME.findall(body)]
        assert [f"{page}: {r}{p}" for r, p in named if not is_there(r, p)] == []
    assert not is_there("js", ".no_such_name") and not is_there("strategy", ".run_it")
    assert is_there("js", ".checkpoint.CheckpointManager.save")


def test_tests_that_tables_of_faults_name_are_there():
    named = set()
    for row in re.findall(r"^\|.*::test_.*\|$", all_prose(), re.M):
        file = "test_checkpoint_faults.py"  # of rows that name none
        for path, function in re.findall(r"`([\w/]*\.?p?y?)::(test_\w+)`", row):
            file = path or file
            named.add((file, function))
    assert len(named) > 25
    for file, function in named:
        found = list((ROOT / "tests").rglob(file))
        assert found and f"\ndef {function}(" in found[0].read_text(), function
