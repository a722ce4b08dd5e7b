"""`penstock` without the second that imports take: a process that holds them, and forks for every command it is given.

Each command is a process of its own, in a session of its own, with its own streams and environment: it can be killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from command import Ran

PRELOADED = (
    "huggingface_hub",
    "huggingface_hub.hf_api",
    "huggingface_hub.lfs",
    "huggingface_hub._commit_api",
    "numpy",
    "pandas",  # pyarrow imports it at the first array
    "pyarrow",
    "pyarrow.compute",
    "pyarrow.json",
    "pyarrow.parquet",
    "penstock.cli.main",
    "penstock.cli.push",
    "penstock.media.files",
    "penstock.publish.push",
)


class Forks:
    """The process that forks. `environment` is what its commands start from."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        tests = os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from forks import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, "PYTHONPATH": tests},
        )
        self._answer()

    def start(self, *words: str | Path, env: Mapping[str, str | None], streams: Path) -> Forked:
        out, err = f"{streams}.out", f"{streams}.err"
        self._ask({"words": [str(word) for word in words], "env": dict(env), "out": out, "err": err})
        return Forked(self, self._answer(), Path(out), Path(err))

    def wait(self, pid: int, timeout: float) -> int | None:
        """The code a command ended with, negative for a signal; None: it goes on."""
        self._ask({"wait": pid, "timeout": timeout})
        code = self._answer()
        return None if code == GOES_ON else code

    def close(self) -> None:
        self._process.communicate(timeout=30)

    def _ask(self, question: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


class Forked:
    """A command under way."""

    def __init__(self, forks: Forks, pid: int, out: Path, err: Path) -> None:
        self._forks, self.pid, self._out, self._err = forks, pid, out, err
        self._code: int | None = None

    def ended(self, *, timeout: float = 60) -> Ran:
        """What it said, once it has ended. One that does not end is killed."""
        if not self.has_ended(timeout=timeout):
            self.signal(signal.SIGKILL)
            self.has_ended(timeout=10)
            raise TimeoutError(f"not within {timeout} s: {self._out.read_text()}{self._err.read_text()}")
        assert self._code is not None
        return Ran(self._code, self._out.read_text(), self._err.read_text())

    def has_ended(self, *, timeout: float = 0) -> bool:
        if self._code is None:
            self._code = self._forks.wait(self.pid, timeout)
        return self._code is not None

    def signal(self, number: signal.Signals) -> None:
        assert not self.has_ended(), f"it had ended: {self._out.read_text()}{self._err.read_text()}"
        os.kill(self.pid, number)


GOES_ON = 1_000


def serve() -> None:
    """The other side: a line of JSON in, a number out."""
    from importlib import import_module

    for name in PRELOADED:
        import_module(name)
    sys.stdout.write("0\n")
    sys.stdout.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        answer = _waited(asked["wait"], asked["timeout"]) if "wait" in asked else os.fork()
        if answer == 0 and "words" in asked:
            _become(asked)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _become(asked: Mapping[str, object]) -> None:
    """The command itself, in the child."""
    from penstock.cli.main import main

    os.setsid()
    for fd, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, str(asked["out"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, str(asked["err"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    env = asked["env"]
    assert isinstance(env, dict)
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    words = asked["words"]
    assert isinstance(words, list)
    sys.argv = ["penstock", *words]
    sys.exit(main(words))


def _waited(pid: int, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return GOES_ON
        time.sleep(0.005)
