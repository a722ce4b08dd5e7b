"""A worker process: receives a job once, then tasks; notes where it is; ends with its supervisor.

Started by `engines.local`, never by a user, so a script needs no `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from typing import Any

from penstock import memory
from penstock.engines.channel import Channel
from penstock.engines.notes import Notes
from penstock.errors import PenstockError

# What the interpreter, Arrow's arenas and thread stacks may reserve beyond what is touched: `RLIMIT_DATA` counts both.
BACKSTOP_SLACK = 1 << 30


def main(channel_fd: int, notes_fd: int, parent: int) -> None:
    _end_with(parent)
    channel = Channel(socket.socket(fileno=channel_fd))
    notes = Notes(notes_fd)
    base = 0
    job: Any = None
    while True:
        try:
            message = channel.receive()
        except EOFError:
            return
        kind = message[0]
        if kind == "job":
            try:
                job = pickle.loads(message[1])
                job.warm_up()
            except BaseException as error:
                channel.send(("broken", _as_error(error), traceback.format_exc()))
                return
            memory.release()
            base = memory.data_size()
            channel.send(("ready",))
        elif kind == "task":
            _, key, payload, shared, allowed = message
            _backstop(base + allowed + BACKSTOP_SLACK)
            notes.begin()
            try:
                result = job((payload, shared), notes, lambda said, key=key: channel.send(("said", key, said)))
            except MemoryError:
                channel.send(("out of memory", key))
            except BaseException as error:
                channel.send(("failed", key, _as_error(error), traceback.format_exc()))
            else:
                memory.release()
                channel.send(("done", key, result))
                del result


def _as_error(error: BaseException) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    return PenstockError(f"{type(error).__name__}: {error}")


def _end_with(parent: int) -> None:
    """No orphans: the kernel ends this process when its supervisor dies, however it dies."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        try:
            # If the kernel must choose, let it choose a worker: the supervisor then says what happened.
            with open("/proc/self/oom_score_adj", "w") as f:
                f.write("800")
        except OSError:
            pass
    if os.getppid() != parent:
        os._exit(1)


def _backstop(limit: int) -> None:
    """The supervisor is the guard; this only stops a single allocation too large for it to watch."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
