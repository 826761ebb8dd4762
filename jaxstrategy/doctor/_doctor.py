"""What `python -m jaxstrategy.doctor` finds, and how it says it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from jaxstrategy.doctor import _installed_packages, _settings
from jaxstrategy.doctor._device_answers import DeviceAnswers, asked
from jaxstrategy.launch import _options

_SECONDS = 120.0
_NOTHING = "none set"


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """All that was found.

    Attributes:
      versions: of packages, by name; None of those that are not installed.
      settings: variables of the environment.
      devices: a line for each kind of device.
      collective: what the devices have summed.
      problems: what is wrong, in sentences; empty if all is well.
      output: what JAX printed, if it failed.
    """

    versions: dict[str, str | None]
    settings: dict[str, str]
    devices: tuple[str, ...]
    collective: str | None
    problems: tuple[str, ...]
    output: str | None

    def __str__(self) -> str:
        installed = {k: v for k, v in self.versions.items() if v is not None}
        missing = [name for name, version in self.versions.items() if version is None]
        sections = [
            ("Versions", _aligned(installed)),
            ("Not installed", [f"  {', '.join(missing) or 'nothing'}"]),
            ("Environment", _aligned(self.settings) or [f"  {_NOTHING}"]),
            ("Devices", [f"  {line}" for line in self.devices or ("none",)]),
            ("Collective", [f"  {self.collective or 'none'}"]),
            ("Problems", [f"  {line}" for line in self.problems or ("none",)]),
        ]
        if self.output:
            lines = self.output.splitlines()
            sections.append(("What JAX said", [f"  {line}" for line in lines]))
        return "\n\n".join("\n".join([title, *lines]) for title, lines in sections)


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, print, and return the exit code."""
    options = _parser().parse_args(arguments)
    findings = found(options.seconds, options.simulate)
    as_json = json.dumps(dataclasses.asdict(findings), indent=2)
    print(as_json if options.json else findings)
    return 1 if findings.problems else 0


def found(seconds: float, simulated: int | None) -> DoctorReport:
    """Versions, variables, and the answers of the devices within so many seconds."""
    versions = _installed_packages.versions()
    answers = asked(seconds, simulated)
    problems = [
        *_installed_packages.problems(versions),
        *_settings.problems(os.environ),
        *([answers.problem] if answers.problem else []),
        *([] if simulated else _unseen(answers)),
    ]
    return DoctorReport(
        versions,
        _settings.settings(os.environ),
        answers.devices,
        answers.collective,
        tuple(problems),
        answers.output,
    )


def _unseen(answers: DeviceAnswers) -> list[str]:
    """Accelerators of this host that JAX does not use."""
    if not answers.devices or any("cpu" not in line for line in answers.devices):
        return []
    has_gpu = shutil.which("nvidia-smi") and Path("/dev/nvidia0").exists()
    if not has_gpu or os.environ.get("JAX_PLATFORMS", "").lower() == "cpu":
        return []
    return [
        "This host has an NVIDIA GPU, and JAX uses the CPU only: its plugin is not "
        'installed or fails. `pip install --upgrade "jax[cuda13]"` installs it.'
    ]


def _aligned(values: dict[str, str]) -> list[str]:
    width = max(map(len, values), default=0)
    return [f"  {name:{width}}  {value}" for name, value in values.items()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxstrategy.doctor",
        description="Prints what a bug report needs: versions, variables of the "
        "environment (secrets left out) and devices; and has the devices add up an "
        "array. Ends with 0 if all is well, else with 1.",
    )
    add = parser.add_argument
    add(
        "--simulate",
        type=_options.count,
        metavar="N",
        help="ask N simulated CPU devices",
    )
    add("--json", action="store_true", help="print JSON")
    text = f"how long to wait for the devices ({_SECONDS:g})"
    add("--seconds", type=_options.positive_seconds, default=_SECONDS, help=text)
    return parser
