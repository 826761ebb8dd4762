"""What is printed for Slurm and Kubernetes says what was given, and runs none of it."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import hypothesis.strategies as st
import pytest
import yaml
from helpers.launching import DEADLINE, command, printed
from helpers.processes import with_variable
from helpers.threads import until
from hypothesis import example, given, settings

BOUNDED = settings(max_examples=20, deadline=None, derandomize=True)
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


def put(folder, scripts, shell="/bin/bash"):
    """Puts commands into a folder; the `PATH` where they are found first."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!{shell}\n{textwrap.dedent(script)}\n")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def sbatch(tmp_path):
    """Runs a batch script where `srun` notes down what it is given."""
    scripts = {
        "scontrol": "echo node7; echo node8",
        "srun": f"""printf '%s\\0' "$@" > {tmp_path}/args; env -0 > {tmp_path}/env""",
    }
    folder = tmp_path / "folder"
    folder.mkdir()
    environment = {
        "PATH": put(tmp_path / "tools", scripts),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "12",
        "HOME": "/elsewhere",
    }

    def run(text):
        done = subprocess.run(
            ["bash"],
            input=os.fsencode(text),
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
    no_text = os.fsdecode(b"\xff\xfe'\n")
    text, secrets = printed("slurm", "train.py", *NASTY, no_text), set()
    for _ in range(2):
        arguments, variables = sbatch(text)
        assert program(arguments) == ["python", "train.py", *NASTY, no_text]
        assert variables["JAXSTRATEGY_COORDINATOR"] == "node7:61452"
        secret = variables["JAXSTRATEGY_CLUSTER_SECRET"]
        assert re.fullmatch("[0-9a-f]{64}", secret)
        assert not any(secret in argument for argument in arguments)
        assert "--export=ALL" in arguments  # else `sbatch --export` may keep it back
        secrets.add(secret)
    assert len(secrets) == 2  # each run makes one
    for script in f"{OWNED}.py", f"{NASTY[4]}.py", f"{NASTY[5]}.py", "-c.py":
        text = printed("slurm", script, options="--coordinator [::1]:80")
        arguments, variables = sbatch(text)
        # Python would take a script called `-c` for an option.
        name = f"./{script}" if script == "-c.py" else script
        assert program(arguments) == ["python", name]
        assert variables["JAXSTRATEGY_COORDINATOR"] == "[::1]:80"


@given(texts)
@example("x\n#SBATCH --uid=0")
@example("\N{GRINNING FACE}")
@BOUNDED
def test_what_sbatch_itself_reads_has_no_other_options(name):
    text = printed("slurm", f"{name}.py", options="--nodes 2 --gpus-per-process 1")
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


def test_a_batch_script_starts_and_restarts_as_the_launcher_does(tmp_path):
    # Stand-ins for Slurm's commands: tasks one after the other, on one machine.
    scripts = {
        "scontrol": '[ "$1" = show ] && echo node7 && echo node8; '
        '[ "$1" = requeue ] && echo requeued "$2"; true',
        "srun": """
            while [ "${1#--}" != "$1" ]; do shift; done
            code=0
            for rank in 0 1; do
                SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" || code=$?
            done
            exit $code""",
        "python": f'exec {sys.executable} -IS "$@"',
    }
    env = os.environ | {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "12"}
    env["PATH"] = put(tmp_path / "tools", scripts)
    path = tmp_path / "train.py"
    names = "COORDINATOR", "PROCESS_ID", "NUM_PROCESSES", "ATTEMPT", "LOCAL_RANK"
    path.write_text(
        "import os, sys\n"
        f"print(*(os.environ['JAXSTRATEGY_' + name] for name in {names}),"
        " os.environ.get('JAX_NUM_CPU_DEVICES'), sys.argv[2:], flush=True)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )

    def batch(code, options):
        text = printed("slurm", str(path), str(code), "a b", options=options)
        run = ["bash", "-c", text]
        done = subprocess.run(
            run, env=env, capture_output=True, text=True, timeout=DEADLINE
        )
        assert done.returncode == code, done
        return text, done.stdout

    text, out = batch(0, "-n 1 --nodes 2 --devices-per-process 4")
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in text
    assert out.splitlines() == [
        f"node7:61452 {rank} 2 0 {rank} 4 ['a b']" for rank in range(2)
    ]
    for code, attempts in (5, 3), (75, 3), (76, 3), (78, 1), (77, 1), (0, 1):
        _, out = batch(code, "-n 2 --max-restarts 2")
        assert out.count("node7:61452") == 2 * attempts
        assert ("requeued 12" in out) == (code == 77)
    text = printed("slurm", "train.py", options="-n 4 --gpus-per-process 2")
    assert text.count("--gpus-per-task=2") == 2 and "JAX_PLATFORMS" not in text


def expanded(text, variables):
    """What Kubernetes makes of a string in a command or an environment."""

    def put_in(found):
        name = found[1]
        return "$" if name is None else variables.get(name, found[0])

    return re.sub(r"(?s)\$(?:\$|\((.*?)\))", put_in, text)


def pod(text):
    """The names that a manifest gives, and its one container as Kubernetes sees it."""
    manifest = yaml.safe_load(text)
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return manifest["metadata"]["name"], replicated["name"], job, container


def test_a_manifest_starts_the_same_processes():
    options = "-n 2 --nodes 3 --max-restarts 4 --gpus-per-process 1"
    text = printed("k8s", "folder/script.py", "--epochs", "a b", options=options)
    manifest = yaml.safe_load(text)
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert manifest["kind"] == "JobSet"
    assert manifest["metadata"] == {"name": "script"}
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 4
    assert [rule["action"] for rule in policy["rules"]] == ["FailJobSet"]
    _, name, job, container = pod(text)
    assert name == "process" and manifest["spec"]["replicatedJobs"][0]["replicas"] == 1
    assert (job["completions"], job["parallelism"]) == (6, 6)
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    assert [
        (rule["action"], rule["onExitCodes"]["values"])
        for rule in job["podFailurePolicy"]["rules"]
    ] == [("FailJob", [78]), ("Ignore", [77])]
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert container["command"] == ["python", "folder/script.py", "--epochs", "a b"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert container["ports"] == [{"containerPort": 2222}]


def test_a_manifest_has_the_environment_of_a_worker():
    options = "-n 2 --devices-per-process 4 --coordinator a.b:080"
    *_, container = pod(printed("k8s", "script.py", options=options))
    annotation = {
        "JAXSTRATEGY_PROCESS_ID": "batch.kubernetes.io/job-completion-index",
        "JAXSTRATEGY_ATTEMPT": "jobset.sigs.k8s.io/restart-attempt",
    }
    assert {entry.pop("name"): entry for entry in container["env"]} == {
        "JAXSTRATEGY_COORDINATOR": {"value": "a.b:080"},
        "JAXSTRATEGY_NUM_PROCESSES": {"value": "2"},
        "JAXSTRATEGY_LOCAL_RANK": {"value": "0"},
        "PYTHONUNBUFFERED": {"value": "1"},
        "JAX_NUM_CPU_DEVICES": {"value": "4"},
        "JAX_PLATFORMS": {"value": "cpu"},
        "JAXSTRATEGY_CLUSTER_SECRET": {
            "valueFrom": {
                "secretKeyRef": {"name": "script-cluster-secret", "key": "secret"}
            }
        },
    } | {
        name: {
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}
        }
        for name, key in annotation.items()
    }
    assert container["ports"] == [{"containerPort": 80}]
    assert "resources" not in container
    *_, container = pod(printed("k8s", "script.py", options="-n 2"))
    assert container["env"][0]["value"] == "script-process-0-0.script:2222"


@given(st.lists(texts, max_size=4), texts)
@example(NASTY, "train")
@BOUNDED
def test_a_manifest_carries_any_text(arguments, name):
    text = printed("k8s", f"{name}.py", *arguments)
    assert text.isascii()
    *_, container = pod(text)
    got = [expanded(part, {"HOME": "/elsewhere"}) for part in container["command"]]
    script = f"{name}.py"
    script = f"./{script}" if script.startswith("-") else script
    assert got == ["python", script, *arguments]


def test_bytes_that_are_no_text_and_wrong_addresses_are_refused():
    done = command("--print", "k8s", "train.py", os.fsdecode(b"\xff"))
    assert done.code == 2 and done.out == ""
    said = r"jaxstrategy.launch: error: '\udcff' has bytes that are not UTF-8"
    assert done.err.startswith(said)
    addresses = [f"{OWNED}:80", "`id`:80", "a;b:80", "-a:80", "a..b:80"]
    addresses += [f"{'a' * 64}.b:80", "a:\N{ARABIC-INDIC DIGIT THREE}", "a\n:80"]
    for address in [*addresses, "a:1" + "0" * 400]:
        done = command("--print", "slurm", f"--coordinator={address}", "train.py")
        text = f"{address!r} is not an address. Give it as host:port"
        assert done.code == 2 and text in done.err


@given(texts)
@example("x" * 39 + "-y")
@example("null")
@example("on")
@example("1e3")
@example("3.14")
@example("-")
@BOUNDED
def test_names_are_what_kubernetes_calls_a_name(name):
    text = printed("k8s", f"{name}.py", options="--nodes 100 -n 100")
    jobset, replicated, job, container = pod(text)
    label = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035, at most 63
    last = job["completions"] - 1
    # The names of a pod, with the five characters that keep it apart from its heirs.
    for made in (jobset, replicated, f"{jobset}-{replicated}-0-{last}-abcde"):
        assert isinstance(made, str) and label.fullmatch(made) and len(made) <= 63
    assert jobset == name or name not in ("null", "on")
    variables = [entry["name"] for entry in container["env"]]
    assert len(set(variables)) == len(variables)
    assert all(isinstance(entry.get("value", ""), str) for entry in container["env"])


def test_the_secret_of_a_manifest_is_one_of_kubernetes():
    """And neither in the manifest nor on the command line that makes it."""
    text = printed("k8s", "train.py")
    assert not re.search("[0-9a-f]{32}", text)
    make = re.search(r"#   (.*) \|\n#     (kubectl create secret .*)", text)
    assert "train-cluster-secret --from-file=secret=/dev/stdin" in make[2]
    python = re.fullmatch('python -c "(.*)"', make[1])
    done = subprocess.run(
        [sys.executable, "-c", python[1]], capture_output=True, timeout=DEADLINE
    )
    assert re.fullmatch("[0-9a-f]{64}", done.stdout.decode().strip())


# As Slurm's: runs tasks beside each other, and hands SIGTERM on to them.
SRUN = """
import os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
options = []
while sys.argv[1].startswith("-"):
    options.append(sys.argv.pop(1))
of = dict(o.lstrip("-").partition("=")[::2] for o in options)
given = dict(e.split("=") for e in of.get("export", "").split(",") if "=" in e)
tasks = []
for rank in range(int(of["ntasks"])):
    own = {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"node{rank % 2}"}
    env = {**os.environ, **given, **own, "OPTIONS": " ".join(options)}
    tasks.append(subprocess.Popen(sys.argv[1:], env=env, stdout=subprocess.PIPE,
                                  text=True, start_new_session=True,
                                  preexec_fn=lambda: signal.pthread_sigmask(
                                      signal.SIG_UNBLOCK, [signal.SIGTERM])))
signal.signal(
    signal.SIGTERM, lambda *_: [os.killpg(task.pid, signal.SIGTERM) for task in tasks]
)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
for rank, task in enumerate(tasks):
    for line in task.stdout:
        print(f"{rank}: {line}", end="", flush=True)
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""

# Notes down what it is told. The script, which is the chief, waits for the others.
PYTHON = """
import json, os, sys, time
folder = os.environ["NOTES"]
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}{task['index']}"
starts = sum(each.startswith(name) for each in os.listdir(folder))
with open(f"{folder}/part", "a"): pass
path = f"{folder}/{name}.{starts}"
with open(path + "part", "w") as out:
    json.dump([sys.argv[1:], dict(os.environ)], out)
os.rename(path + "part", path)
end = time.monotonic() + 30
while task["type"] == "chief" and time.monotonic() < end:
    told = [each for each in os.listdir(folder) if not each.endswith("part")]
    if len(told) >= int(os.environ["WAIT"]):
        sys.exit(int(os.environ["CODES"].split(",")[starts]))
    time.sleep(0.02)
if task["type"] == "worker" and not starts:
    sys.exit(3)
time.sleep(600)
"""


@pytest.fixture
def sbatch_roles(tmp_path):
    """Runs a batch script; its exit code, and what its programs were told, by name."""
    scripts, python = {"srun": SRUN, "python": PYTHON}, f"{sys.executable} -IS"
    path = put(tmp_path / "commands", scripts, python)

    def run(text, codes="0", wait=4):
        notes = tmp_path / f"notes{codes}"
        notes.mkdir()
        env = {
            "PATH": path,
            "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": "node0",
            "NOTES": str(notes),
            "CODES": codes,
            "WAIT": str(wait),
        }
        (tmp_path / "batch").write_bytes(os.fsencode(text))
        process = subprocess.Popen(
            ["bash", "batch"], env=env, cwd=tmp_path, start_new_session=True
        )
        try:
            code = process.wait(DEADLINE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                for pid in with_variable(f"NOTES={notes}\0"):
                    os.kill(pid, signal.SIGKILL)
        assert not (tmp_path / "OWNED").exists()
        until(lambda: not with_variable(f"NOTES={notes}\0"))
        names = sorted(n for n in os.listdir(notes) if not n.endswith("part"))
        return code, {name: json.loads((notes / name).read_text()) for name in names}

    return run


def roles(kind, *arguments, options=""):
    options = f"--workers 2 --nodes 2 {options}"
    return printed(kind, "train.py", *arguments, options=options)


def test_a_batch_script_runs_the_script_and_those_that_it_calls(sbatch_roles):
    nasty = "$(touch OWNED) 'a\" b\n"
    text = roles("slurm", nasty, options="--devices-per-process 2 --evaluator")
    code, told = sbatch_roles(text, wait=7)
    assert code == 0
    # Both workers ended once, and were started again.
    assert list(told) == [
        "chief0.0", "evaluator0.0", "ps0.0",
        "worker0.0", "worker0.1", "worker1.0", "worker1.1",
    ]  # fmt: skip
    cluster = {
        "chief": ["node0:20007"],
        "worker": ["node0:20008", "node1:20009"],
        "ps": ["node0:20010"],
        "evaluator": ["node0:20011"],
    }
    secrets = set()
    for name, (arguments, environment) in told.items():
        config = json.loads(environment["TF_CONFIG"])
        assert config["cluster"] == cluster
        is_script = name.startswith(("chief", "evaluator"))
        served = ["-m", "jaxstrategy.parameter_servers"]
        assert arguments == (["train.py", nasty] if is_script else served)
        devices = "1" if name.startswith("ps") else "2"
        assert environment["JAX_NUM_CPU_DEVICES"] == devices
        secrets.add(environment["JAXSTRATEGY_CLUSTER_SECRET"])
    assert len(secrets) == 1 and len(secrets.pop()) == 64


def test_a_batch_script_starts_its_script_again(sbatch_roles):
    text = roles("slurm", options="--gpus-per-process 2 --max-restarts 1")
    assert "#SBATCH --gpus=4\n" in text
    for codes, code, starts in ("5,0", 0, 2), ("5,6", 6, 2), ("78,0", 78, 1):
        ended, told = sbatch_roles(text, codes)
        assert ended == code
        assert sum(name.startswith("chief") for name in told) == starts
    # GPUs are those of workers.
    assert "--gpus-per-task=2" in told["worker0.0"][1]["OPTIONS"]
    for name in ("ps0.0", "chief0.0"):
        assert "gpus" not in told[name][1]["OPTIONS"]
        assert told[name][1]["JAX_PLATFORMS"] == "cpu"


def jobs(manifest):
    found = yaml.safe_load(manifest)["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"] for job in found}


def container(job):
    (found,) = job["template"]["spec"]["containers"]
    return found


def test_a_manifest_has_a_job_of_pods_for_each_role():
    options = "--parameter-servers 3 --evaluator --gpus-per-process 2"
    text = roles("k8s", options=options)
    found = jobs(text)
    counts = {name: job["completions"] for name, job in found.items()}
    assert counts == {"chief": 1, "worker": 2, "ps": 3, "evaluator": 1}
    for name, job in found.items():
        assert job["parallelism"] == counts[name]
        is_script = name in ("chief", "evaluator")
        served = ["-m", "jaxstrategy.parameter_servers"]
        program = ["train.py"] if is_script else served
        assert container(job)["command"] == ["python", *program]
        limits = container(job).get("resources", {}).get("limits", {})
        assert limits == ({"nvidia.com/gpu": 2} if name == "worker" else {})
        restart = job["template"]["spec"]["restartPolicy"]
        assert restart == ("Never" if name == "chief" else "OnFailure")
        assert (job["backoffLimit"] == 0) is ("podFailurePolicy" in job)
    codes = [
        rule["onExitCodes"]["values"]
        for rule in found["chief"]["podFailurePolicy"]["rules"]
    ]
    assert codes == [[78], [77]] and "podFailurePolicy" not in found["worker"]
    policy = yaml.safe_load(text)["spec"]["successPolicy"]
    assert policy == {"operator": "All", "targetReplicatedJobs": ["chief"]}


def test_pods_are_told_the_cluster_and_their_place():
    for name, job in jobs(roles("k8s")).items():
        variables = {each["name"]: each for each in container(job)["env"]}
        assert "secretKeyRef" in str(variables["JAXSTRATEGY_CLUSTER_SECRET"])
        names = list(variables)
        # Kubernetes puts in what is defined before.
        assert names.index("INDEX") < names.index("TF_CONFIG")
        text = variables["TF_CONFIG"]["value"]
        assert text.count("$") == text.count("$(INDEX)") == 1
        assert json.loads(text.replace("$(INDEX)", "1")) == {
            "cluster": {
                "chief": ["train-chief-0-0.train:2222"],
                "worker": [f"train-worker-0-{k}.train:2222" for k in range(2)],
                "ps": ["train-ps-0-0.train:2222"],
            },
            "task": {"type": name, "index": 1},
        }
