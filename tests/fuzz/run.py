"""Calls the public names with odd arguments: `python tests/fuzz/run.py --calls 10000`.

Nothing may end the process, hang, or raise an error of Python's from inside our own
files that says nothing to a user: `KeyError`, `IndexError`, `AttributeError`, ... The
calls are made in another process. It says which call comes next before each, so that
one that ends it or hangs is known, and the one after it is made in a new process.

A call depends on the seed and its number alone: `--seed 5 --first 17 --calls 1` makes
it again.
"""

import argparse
import collections
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).parent


class Worker:
    """A process that makes calls from `first` on."""

    def __init__(self, seed, first, last, folder):
        self._process = subprocess.Popen(
            [sys.executable, HERE / "worker.py", str(seed), str(first), str(last)],
            stdout=subprocess.PIPE,
            stderr=open(folder / "stderr", "wb"),
            cwd=folder,
            text=True,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "NO_GCE_CHECK": "true",  # credentials are looked for in no network
                "JAX_TRACEBACK_FILTERING": "off",  # who raised is looked at
            },
        )
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def told(self, seconds):
        """The next thing it says; None if it ended.

        Raises:
          queue.Empty: it said nothing for so long.
        """
        line = self._lines.get(timeout=seconds)
        return None if line is None else json.loads(line)

    def end(self):
        """Its exit code."""
        self._process.kill()
        return self._process.wait()

    def wait(self):
        return self._process.wait()


def fuzz(seed, first, calls, seconds, tell=print):
    """Makes the calls; returns findings, and how often each target came to an end."""
    number, last = first, first + calls
    findings, counts = [], collections.Counter()
    start = time.monotonic()
    while number < last:
        with tempfile.TemporaryDirectory() as root:
            folder = pathlib.Path(root, "a", "b", "c", "d")
            folder.mkdir(parents=True)
            worker = Worker(seed, number, last, folder)
            begun = None
            try:
                while (said := worker.told(seconds if begun else 120)) is not None:
                    if "call" in said:
                        begun, number = said["call"], said["number"]
                        continue
                    number += 1
                    counts[said["result"]] += 1
                    if "finding" in said:
                        findings.append(f"{number - 1}: {begun}: {said['finding']}")
                        tell(findings[-1])
                code = worker.wait()
                if code == 0:
                    break
                errors = (folder / "stderr").read_text(errors="replace")
                assert begun is not None, f"it did not begin: {errors}"
                why = f"the process ended with {code}: {errors[-1500:]}"
            except queue.Empty:
                worker.end()
                why = f"nothing for {seconds} seconds"
            findings.append(f"{number}: {begun}: {why}")
            tell(findings[-1])
            number += 1
    counts["seconds"] = round(time.monotonic() - start)
    return findings, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--seconds", type=float, default=60, help="for each call")
    args = parser.parse_args()
    print(f"--seed {args.seed} --first {args.first} --calls {args.calls}", flush=True)
    findings, counts = fuzz(args.seed, args.first, args.calls, args.seconds)
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))
    print(f"{len(findings)} findings")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
