"""Messages between the supervisor and a worker it started: pickles with a length before each, over a socket pair.

Both ends are this run's own processes; nothing else ever reaches the socket.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_HEAD = struct.Struct("<Q")


class Channel:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: object) -> None:
        body = pickle.dumps(message, protocol=5)
        self._socket.sendall(_HEAD.pack(len(body)) + body)

    def receive(self) -> Any:
        """The next message; EOFError when the other end is gone."""
        (length,) = _HEAD.unpack(self._exactly(_HEAD.size))
        return pickle.loads(self._exactly(length))

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._socket.recv(min(count - len(parts), 1 << 20))
            except ConnectionError:
                part = b""
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)
