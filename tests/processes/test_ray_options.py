"""What `--on ray` takes, and what is refused before Ray is asked."""

import os
import subprocess
import sys
import types

import pytest

from jaxstrategy import ClusterError
from jaxstrategy.launch import _ray_cluster, _ray_options
from jaxstrategy.launch._launch_options import parse
from jaxstrategy.launch._ray_options import RayOptions


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "train.py").touch()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "inner.py").touch()
    return "train.py"


def test_without_options_a_process_takes_one_cpu(script):
    options = parse(["--on", "ray", "-n", "3", script])
    assert options.processes == 3 and options.ray == RayOptions()
    assert options.ray.cpus == 1 and options.ray.placement == "PACK"


def test_another_job_has_no_ray(script):
    assert parse([script]).ray is None


def test_all_options(script, monkeypatch):
    monkeypatch.setenv("TOKEN", "x")
    given = (
        "--on ray --gpus-per-process 2 --ray-address a:6379 --ray-cpus 0.5 "
        "--ray-resource TPU=4 --ray-resource disk=1 --ray-placement STRICT_SPREAD "
        "--ray-working-dir code --ray-env TOKEN --ray-wait 7 inner.py --ray-cpus 3"
    )
    options = parse(given.split())
    assert options.ray == RayOptions(
        address="a:6379",
        cpus=0.5,
        resources=(("TPU", 4.0), ("disk", 1.0)),
        placement="STRICT_SPREAD",
        working_dir="code",
        variables=("TOKEN",),
        wait=7.0,
    )
    assert options.gpus_per_process == 2
    assert options.program == ("inner.py", "--ray-cpus", "3")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--ray-cpus 2 train.py", "--ray-cpus needs --on ray"),
        ("--ray-resource a=1 train.py", "--ray-resource needs --on ray"),
        ("--ray-working-dir code train.py", "--ray-working-dir needs --on ray"),
        ("--ray-env HOME train.py", "--ray-env needs --on ray"),
        ("--on slurm train.py", "invalid choice: 'slurm'"),
        ("--on ray --ray-cpus x train.py", "'x' is not a number from 0 on"),
        ("--on ray --ray-wait -1 train.py", "'-1' is not a time in seconds"),
        ("--on ray --ray-resource TPU train.py", "'TPU' is not NAME=K, such as TPU=4"),
        ("--on ray --ray-resource =4 train.py", "'=4' is not NAME=K"),
        ("--on ray --ray-placement near train.py", "invalid choice: 'near'"),
        ("--on ray --ray-env NOWHERE train.py", "--ray-env NOWHERE: there is no such"),
        ("--on ray --ray-cpus 0 train.py", "--ray-cpus 0 needs GPUs or"),
        ("--on ray --ray-working-dir no train.py", "'no' is no folder"),
        ("--on ray --ray-working-dir code train.py", "'code/train.py' is no file"),
        ("--on ray --ray-working-dir code /x.py", "in a copy of 'code'; give the path"),
        ("--on ray no.py", "'no.py' is no file"),
        ("--on ray", "the script is missing"),
        ("--on ray --nodes 2 train.py", "leave out --nodes, --node-rank and"),
        ("--on ray --node-rank 0 train.py", "leave out --nodes, --node-rank and"),
        ("--on ray --coordinator a:1 train.py", "leave out --nodes, --node-rank and"),
        ("--on ray --print k8s train.py", "--print and --on ray are two ways"),
        ("--on ray --ray-address ray://a:1 train.py", "an address for Ray's client"),
    ],
)
def test_what_cannot_be_is_refused(given, said, script, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(given.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_address_of_the_environment_is_looked_at():
    told = _ray_options.complaint(RayOptions(), 0, {"RAY_ADDRESS": "ray://head:10001"})
    assert told is not None and told.startswith("'ray://head:10001' is an address")


def test_gpus_alone_are_enough(script):
    given = ["--on", "ray", "--ray-cpus", "0", "--gpus-per-process", "1", script]
    assert parse(given).ray == RayOptions(cpus=0.0)


def test_visible_gpus_of_the_launcher_do_not_count(script, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    parse(["--on", "ray", "-n", "2", "--gpus-per-process", "4", script])


def test_without_ray_the_extra_is_named(script):
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from jaxstrategy.launch._main import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--on", "ray", script],
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "jaxstrategy.launch: error: Ray is not installed, on which the processes "
        'should run. Install the extra: pip install "jaxstrategy[ray]"\n'
    )


class NoRay:
    """What Ray does where nobody answers; it takes half a minute to find out."""

    exceptions = types.SimpleNamespace(RayError=LookupError)

    def __init__(self, error):
        self.error = error

    def init(self, **_):
        raise self.error


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, LookupError])
def test_a_ray_that_does_not_answer_is_the_cause(kind):
    with pytest.raises(ClusterError) as told:
        _ray_cluster._connect(NoRay(kind("No route.\nAnd more.")), "a:1", None)
    assert str(told.value) == (
        "Ray at a:1 does not answer: No route. Is the address that of its head, and "
        "has a Ray that asks for a token RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here "
        "as well?"
    )


def test_a_ray_that_was_imported_before_takes_no_new_token(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_ray_cluster._Head, "has_token", False)
    imported = types.SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", imported)
    with pytest.raises(ClusterError, match=r"Connect first, by `ray.init\(\)`, which"):
        _ray_cluster.RayCluster(None, 1)
