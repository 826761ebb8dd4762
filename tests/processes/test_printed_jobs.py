"""What is printed for Slurm and Kubernetes says what was given, and runs none of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import example, given, settings

from jaxstrategy.launch import (
    _kubernetes_manifest,
    _slurm_script,
)
from jaxstrategy.launch._launch_options import (
    Options,
    parse,
)
from jaxstrategy.launch._main import main

DEADLINE = 60  # seconds; what takes longer has hung
BOUNDED = settings(max_examples=100, deadline=None, derandomize=True)
OWNED = "$(touch${IFS}OWNED)"
NASTY = [
    OWNED,
    "`touch OWNED`",
    "; touch OWNED;",
    "' && touch OWNED '",
    '" && touch OWNED "',
    "\n#SBATCH --uid=0\ntouch OWNED\n",
    "a\\\nb",
    "\\",
    "\\'",
    "$HOME",
    "$(HOME)",
    "$$(HOME)",
    "$$$(HOME)$",
    "${HOME}",
    "!!",
    "*",
    "~",
    "{a,b}",
    "{name}",
    "%j",
    "# not a comment",
    "- a: b",
    "&a *a !!str |",
    "null",
    "",
    " ",
    "--",
    "\ttab",
    "caf\N{LATIN SMALL LETTER E WITH ACUTE}",
    "\N{GRINNING FACE}",
    "\x01\x7f\x85\N{LINE SEPARATOR}\N{ZERO WIDTH NO-BREAK SPACE}\uffff",
]
# Anything that an argument can be which is text.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def options(script="train.py", *arguments, **others):
    return Options(command=(script, *arguments), **others)


# Slurm


@pytest.fixture
def sbatch(tmp_path):
    """Runs a batch script where `srun` notes down what it is given.

    Returns the arguments and the environment.
    """
    tools = tmp_path / "tools"
    tools.mkdir()
    scripts = {
        "scontrol": "echo node7; echo node8",
        "srun": f"""printf '%s\\0' "$@" > {tmp_path}/args; env -0 > {tmp_path}/env""",
    }
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{script}\n")
        (tools / name).chmod(0o755)
    folder = tmp_path / "folder"
    folder.mkdir()
    environment = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "12",
        "HOME": "/elsewhere",
    }

    def run(text):
        script = os.fsencode(text)
        for check in (["bash", "-n"], ["bash"]):
            done = subprocess.run(
                check,
                input=script,
                cwd=folder,
                env=environment,
                capture_output=True,
                timeout=DEADLINE,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        assert os.listdir(folder) == []
        arguments = (tmp_path / "args").read_bytes().split(b"\0")[:-1]
        pairs = (tmp_path / "env").read_bytes().split(b"\0")[:-1]
        variables = dict(os.fsdecode(pair).split("=", 1) for pair in pairs)
        return list(map(os.fsdecode, arguments)), variables

    return run


def program(arguments):
    """What a task runs, out of the arguments of `srun`."""
    place = arguments.index("bash")
    assert arguments[place + 1] == "-c" and arguments[place + 3] == "bash"
    return arguments[place + 4 :]


def test_a_batch_script_carries_arguments_as_they_are(sbatch):
    arguments, _ = sbatch(_slurm_script.script(options("train.py", *NASTY)))
    assert program(arguments) == ["python", "train.py", *NASTY]


@pytest.mark.parametrize("script", [f"{text}.py" for text in NASTY[:8] + NASTY[-3:]])
def test_a_batch_script_runs_scripts_of_any_name(script, sbatch):
    arguments, _ = sbatch(_slurm_script.script(options(script)))
    assert program(arguments) == ["python", script]


def test_a_batch_script_may_have_arguments_that_are_no_text(sbatch):
    given = os.fsdecode(b"\xff\xfe'\n")
    arguments, _ = sbatch(_slurm_script.script(options("train.py", given)))
    assert program(arguments) == ["python", "train.py", given]


@pytest.mark.parametrize("address", [f"{OWNED}:80", "a'b:80", "[::1]:80", 'a"b\n:80'])
def test_a_batch_script_carries_the_coordinator_as_it_is(address, sbatch):
    _, variables = sbatch(_slurm_script.script(options(coordinator=address)))
    assert variables["JAXSTRATEGY_COORDINATOR"] == address


def test_the_coordinator_of_a_batch_script_is_its_first_node(sbatch):
    _, variables = sbatch(_slurm_script.script(options()))
    assert variables["JAXSTRATEGY_COORDINATOR"] == "node7:61452"


@given(texts)
@example("x\n#SBATCH --uid=0")
@example("\N{GRINNING FACE}")
@BOUNDED
def test_what_sbatch_itself_reads_has_no_other_options(name):
    text = _slurm_script.script(options(f"{name}.py", nodes=2, gpus_per_process=1))
    head, _ = text.split("set -euo pipefail", 1)
    lines = [line for line in head.split("\n") if line.startswith("#SBATCH")]
    kinds = [
        r"--job-name=[A-Za-z0-9_.+][A-Za-z0-9_.+-]{0,63}",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-task=1",
        "--requeue",
        "--signal=TERM@120",
    ]
    assert len(lines) == len(kinds)
    for line, kind in zip(lines, kinds, strict=True):
        assert re.fullmatch(f"#SBATCH {kind}", line), line
    assert all(line.startswith("#") for line in head.splitlines() if line)


def test_a_batch_script_makes_a_secret_for_each_run_and_shows_it_to_nobody(sbatch):
    text = _slurm_script.script(options())
    made = set()
    for _ in range(2):
        arguments, variables = sbatch(text)
        secret = variables["JAXSTRATEGY_CLUSTER_SECRET"]
        assert re.fullmatch("[0-9a-f]{64}", secret)
        assert not any(secret in argument for argument in arguments)
        assert "--export=ALL" in arguments  # else `sbatch --export` may keep it back
        made.add(secret)
    assert len(made) == 2


# Kubernetes


def expanded(text, variables):
    """What Kubernetes makes of a string in a command or an environment.

    After `Expand` in k8s.io/kubernetes/third_party/forked/golang/expansion.
    """
    made, place = "", 0
    while place < len(text):
        if text[place] != "$" or place + 1 == len(text):
            made += text[place]
            place += 1
        elif text[place + 1] == "$":
            made += "$"
            place += 2
        elif text[place + 1] == "(" and ")" in text[place:]:
            end = text.index(")", place)
            name = text[place + 2 : end]
            made += variables.get(name, f"$({name})")
            place = end + 1
        else:
            made += text[place : place + 2]
            place += 2
    return made


def test_the_stand_in_expands_as_kubernetes_does():
    """Some cases of its own test."""
    variables = {"VAR_A": "A", "VAR_EMPTY": ""}
    for text, wanted in {
        "$(VAR_A)": "A",
        "___$(VAR_A)___": "___A___",
        "$$(VAR_A)": "$(VAR_A)",
        "$$$(VAR_A)": "$A",
        "$$$$(VAR_A)": "$$(VAR_A)",
        "$(VAR_EMPTY)x": "x",
        "$(VAR_DNE)": "$(VAR_DNE)",
        "$VAR_A": "$VAR_A",
        "$": "$",
        "$$": "$",
        "foo$(bar": "foo$(bar",
    }.items():
        assert expanded(text, variables) == wanted


def pod(text):
    """The names that a manifest gives, and its one container as Kubernetes sees it."""
    manifest = yaml.safe_load(text)
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return manifest["metadata"]["name"], replicated["name"], job, container


def test_a_manifest_carries_arguments_as_they_are():
    text = _kubernetes_manifest.manifest(options("train.py", *NASTY))
    *_, container = pod(text)
    got = [expanded(part, {"HOME": "/elsewhere"}) for part in container["command"]]
    assert got == ["python", "train.py", *NASTY]
    assert text.isascii() and text.isprintable() == ("\n" not in text)


@given(st.lists(texts, max_size=4), texts)
@BOUNDED
def test_a_manifest_carries_any_text(arguments, name):
    text = _kubernetes_manifest.manifest(options(f"{name}.py", *arguments))
    *_, container = pod(text)
    got = [expanded(part, {"HOME": "/elsewhere"}) for part in container["command"]]
    script = f"{name}.py"
    script = f"./{script}" if script.startswith("-") else script
    assert got == ["python", script, *arguments]


@given(texts)
@example("x" * 39 + "-y")
@example("\N{GRINNING FACE}")
@example("null")
@example("on")
@example("1e3")
@example("3.14")
@example("-")
@BOUNDED
def test_names_are_what_kubernetes_calls_a_name(name):
    text = _kubernetes_manifest.manifest(
        options(f"{name}.py", nodes=10_000, processes=10)
    )
    jobset, replicated, job, container = pod(text)
    label = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035, at most 63
    last = job["completions"] - 1
    # The names of a pod, with the five characters that keep it apart from its heirs.
    for made in (jobset, replicated, f"{jobset}-{replicated}-0-{last}-abcde"):
        assert isinstance(made, str) and label.fullmatch(made) and len(made) <= 63
    (port,) = container["ports"]
    assert port == {"containerPort": 2222}
    variables = [entry["name"] for entry in container["env"]]
    assert len(set(variables)) == len(variables)
    assert all(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) for name in variables)
    assert all(isinstance(entry.get("value", ""), str) for entry in container["env"])


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize("name", ["null", "true", "on", "yes", "no", "y", "e1"])
def test_names_stay_text_in_yaml(name, module):
    command = name if module else f"{name}.py"
    text = _kubernetes_manifest.manifest(options(command, module=module))
    assert pod(text)[0] == name


@pytest.mark.parametrize("port", ["80", "080", "08"])
def test_a_port_is_a_number(port):
    *_, container = pod(
        _kubernetes_manifest.manifest(options(coordinator=f"a.b:{port}"))
    )
    assert container["ports"] == [{"containerPort": int(port)}]
    assert container["env"][0]["value"] == f"a.b:{port}"


def test_the_secret_of_a_manifest_is_one_of_kubernetes():
    """And neither in the manifest nor on the command line that makes it."""
    text = _kubernetes_manifest.manifest(options())
    jobset, _, _, container = pod(text)
    (reference,) = [
        entry["valueFrom"]["secretKeyRef"]
        for entry in container["env"]
        if entry["name"] == "JAXSTRATEGY_CLUSTER_SECRET"
    ]
    assert reference == {"name": f"{jobset}-cluster-secret", "key": "secret"}
    assert len(reference["name"]) <= 63
    assert not re.search("[0-9a-f]{32}", text)
    make = re.search(r"#   (.*) \|\n#     (kubectl create secret .*)", text)
    assert f"{reference['name']} --from-file=secret=/dev/stdin" in make[2]
    python, secret = re.fullmatch('python -c "(.*)"', make[1]), None
    done = subprocess.run(
        [sys.executable, "-c", python[1]], capture_output=True, timeout=DEADLINE
    )
    secret = done.stdout.decode().strip()
    assert re.fullmatch("[0-9a-f]{64}", secret)


# The command line


def test_a_manifest_cannot_have_what_is_no_text(capsys):
    given = ["--print", "k8s", "train.py", os.fsdecode(b"\xff")]
    assert main(given) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(
        r"jaxstrategy.launch: error: '\udcff' has bytes that are not UTF-8"
    )


def test_what_is_printed_does_not_depend_on_the_terminal(tmp_path):
    """Arguments come out as the bytes that came in."""
    package = Path(_slurm_script.__file__).parents[1]
    launcher = (
        "import sys, types; package = types.ModuleType('jaxstrategy'); "
        f"package.__path__ = [{str(package)!r}]; sys.modules['jaxstrategy'] = package; "
        "from jaxstrategy.launch._main import main; sys.exit(main())"
    )
    argument = "\N{GRINNING FACE}".encode() + b"\xff"
    done = subprocess.run(
        [sys.executable, "-c", launcher, "--print", "slurm", "train.py", argument],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=DEADLINE,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"'" + argument + b"'" in done.stdout


@pytest.mark.parametrize(
    "address",
    [f"{OWNED}:80", "`id`:80", "a;b:80", "-a:80", "a..b:80", f"{'a' * 64}.b:80",
     "a:\N{ARABIC-INDIC DIGIT THREE}", "a:1" + "0" * 400, "a\n:80"],
)  # fmt: skip
def test_a_coordinator_that_is_no_address_is_refused(address, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(["--print", "slurm", f"--coordinator={address}", "train.py"])
    assert f"{address!r} is not an address. Give it as host:port" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["-c.py", "--version", "-"])
def test_a_script_that_looks_like_an_option_of_pythons_is_a_script(name):
    given = options(name, "-x")
    assert given.program == (f"./{name}", "-x")
    assert options("-c", module=True).program == ("-m", "-c")
