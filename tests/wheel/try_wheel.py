"""Installs a wheel into an empty environment and tries it there.

    python tests/wheel/try_wheel.py dist/jaxstrategy-*.whl             # with no extra
    python tests/wheel/try_wheel.py dist/jaxstrategy-*.whl flax keras  # these besides
    python tests/wheel/try_wheel.py dist/jaxstrategy-*.whl --all       # each extra

For each extra there is an environment of its own, in which nothing is installed but the
wheel, what it needs always, and this one extra. Then `programs/EXTRA.py` runs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
# Extras of people who work on the package; `make` targets install and use them.
DEVELOPERS = re.compile(r"benchmarks|dist|docs|lint|test")
SECONDS = 600


def extras(wheel: Path) -> list[str]:
    """The extras that users may ask for, as the wheel's metadata names them."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    named = re.findall(r"^Provides-Extra: (\S+)$", text, re.MULTILINE)
    return [name for name in named if not DEVELOPERS.match(name)]


def environment(folder: Path, base: Path | None = None) -> Path:
    """The Python of a new, empty environment; of one that has what `base` has."""
    venv.create(folder, with_pip=False)
    if base is not None:
        (site,) = folder.glob("lib/python*/site-packages")
        (others,) = base.parent.parent.glob("lib/python*/site-packages")
        (site / "base.pth").write_text(f"{others}\n")
    return folder / "bin" / "python"


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command to its end; say what it printed if it fails.

    Raises:
      SystemExit: it has failed.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        printed = f"{done.stdout}{done.stderr}".rstrip()
        sys.exit(f"{printed}\n{command} ended with {done.returncode}.")


def install(python: Path, requirement: str, cwd: Path) -> None:
    """Install something into the environment of `python`."""
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*pip, "--disable-pip-version-check", "--no-compile", requirement, cwd=cwd)


def main() -> None:
    """Try the wheel, without and with the extras of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--all", action="store_true", help="each extra by itself")
    options = parser.parse_args()
    wheel = options.wheel.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = tried(wheel, None, folder)
        for extra in extras(wheel) if options.all else options.extras:
            tried(wheel, extra, folder, base)


def tried(
    wheel: Path, extra: str | None, folder: Path, base: Path | None = None
) -> Path:
    """Install the wheel with an extra and run its program; the Python it ran in."""
    start = time.perf_counter()
    own = folder / (extra or "none")
    python = environment(own, base)
    install(python, f"{wheel}[{extra}]" if extra else str(wheel), folder)
    program = PROGRAMS / f"{own.name}.py"
    # -P: its folder, where programs are called as packages are, is not looked into.
    run(python, "-P", "-W", "error::DeprecationWarning:jaxstrategy", program, cwd=own)
    print(f"{own.name}: works, {time.perf_counter() - start:.0f} s", flush=True)
    return python


if __name__ == "__main__":
    main()
