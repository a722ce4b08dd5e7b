"""What the loopback servers share: HTTP/1.1 on 127.0.0.1, a request log, faults, and control from outside.

A request is read, worked on, logged, and only then answered, so an answer can be lost after its work was done; bodies
pass through buffers of 1 MiB, so a server needs a few MB whatever it is sent.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast
from urllib.parse import parse_qsl, urlsplit

from penstock.testing.faults import Chance, Faults, Rule
from penstock.testing.wire import Answer, Body, FileRange, Refused, Request, json_answer

LOG_ENTRIES = 100_000  # about 50 MB when full; a server that runs for days must not grow for ever


class _Reset(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "penstock-loopback", ""
    disable_nagle_algorithm = True
    rbufsize = 1 << 17
    server: _Listener

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal: `GET /_control/log` has it."""

    def work(self) -> None:
        owner = self.server.owner
        split = urlsplit(self.path)
        body = Body(
            self.rfile,
            length=int(self.headers.get("Content-Length") or 0),
            chunked="chunked" in self.headers.get("Transfer-Encoding", "").lower(),
        )
        query = dict(parse_qsl(split.query, keep_blank_values=True))
        request = Request(self.command, self.path, split.path, query, cast(Mapping[str, str], self.headers), body)
        if split.path.startswith("/_control/"):
            self._send(owner.control(request))
            return
        rule = owner.chance.next(f"{self.command} {self.path}")
        action = rule.action if rule else ""
        answer, status = None, 0
        try:
            answer = self._answer(request, rule)
            body.drain()
            status = answer.status
        except _Reset:
            self._reset()
        except ConnectionError:
            self.close_connection = True
        finally:
            sent = answer.length if answer and self.command != "HEAD" else 0
            owner.note(request, status=status, sent=sent, fault=action)
        if answer is None or action == "lose_answer":
            self.close_connection = True
        else:
            self._send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = work  # noqa: N815 (the standard library's names)

    def _answer(self, request: Request, rule: Rule | None) -> Answer:
        owner = self.server.owner
        name, _, value = rule.action.partition(":") if rule else ("", "", "")
        if rule and name == "status":
            request.body.drain()
            refused = owner.refusal(Refused(int(value), f"{http.client.responses.get(int(value), 'Fault')} (injected)"))
            wait = {} if rule.retry_after is None else {"Retry-After": f"{rule.retry_after:g}"}
            return Answer(refused.status, refused.body, {**refused.headers, **wait})
        if rule and name == "reset":
            request.body.drain(rule.after_bytes)
            raise _Reset
        if name == "hang":
            time.sleep(float(value))
        try:
            return owner.answer(request)
        except Refused as refused:
            return owner.refusal(refused)
        except ConnectionError:
            raise
        except Exception as error:
            traceback.print_exc()
            return owner.refusal(Refused(500, f"{type(error).__name__}: {error}", "Internal"))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(answer.length))
        self.end_headers()
        if self.command == "HEAD" or not answer.length:
            return
        if isinstance(answer.body, FileRange):
            with answer.body.path.open("rb") as file:
                self.connection.sendfile(file, answer.body.start, answer.body.length)
        else:
            self.wfile.write(answer.body)

    def _reset(self) -> None:
        """Close with a TCP reset instead of the polite end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()  # holds the socket open otherwise
        self.connection.close()


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, owner: Server, port: int) -> None:
        self.owner = owner
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that hangs up is what these servers are for
            traceback.print_exc()


class Control:
    """Talks to a server's `/_control/` endpoints, wherever the server runs. They meet no faults and are not logged."""

    url: str

    def log(self) -> list[dict[str, Any]]:
        """Requests so far: method, path, status (0: no answer), bytes_in, bytes_out, who, fault."""
        return cast("list[dict[str, Any]]", self._control("GET", "log"))

    def clear_log(self) -> None:
        self._control("POST", "clear_log")

    def state(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self._control("GET", "state"))

    def set_faults(self, faults: Faults | None = None, **fields: Any) -> None:
        """`set_faults(Faults(...))`, `set_faults(error_rate=0.05)`; `set_faults()`: none. Counting starts anew."""
        self._control("POST", "faults", asdict(faults or Faults(**fields)))

    def _control(self, method: str, name: str, data: object = None) -> object:
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(self.url).port or 80, timeout=60)
        try:
            connection.request(method, f"/_control/{name}", None if data is None else json.dumps(data))
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(json.loads(body)["error"])
        return json.loads(body)


class Server(Control):
    """A loopback server in a thread of this process. Use it as a block, or `start` and `stop` it.

    What it holds is in `folder` (without one: in a temporary folder that goes with it); another server may be started
    on the same folder later.
    """

    def __init__(self, folder: Path | None = None, *, faults: Faults | None = None, port: int = 0) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="penstock-loopback-") if folder is None else None
        self.folder = Path(self._temporary.name) if self._temporary else Path(cast(Path, folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = port
        self.url = ""
        self.chance = Chance(faults or Faults())
        self._log: deque[dict[str, Any]] = deque(maxlen=LOG_ENTRIES)
        self._listener: _Listener | None = None

    def answer(self, request: Request) -> Answer:
        """The server's own work."""
        raise NotImplementedError

    def refusal(self, refused: Refused) -> Answer:
        """An error in the form this server's clients expect."""
        raise NotImplementedError

    def who(self, request: Request) -> str | None:
        """The name behind a request's credentials, for the log: never the credentials."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What `GET /_control/state` says."""
        raise NotImplementedError

    def start(self) -> Self:
        self._listener = _Listener(self, self.port)
        self.port = self._listener.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop listening and end every open connection. The folder stays, unless it was temporary."""
        if self._listener:
            self._listener.shutdown()
            self._listener.server_close()
            for connection in list(self._listener.connections):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._listener = None
        if self._temporary:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self if self._listener else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def note(self, request: Request, *, status: int, sent: int, fault: str) -> None:
        entry = {"method": request.method, "path": request.target, "status": status, "bytes_in": request.body.count}
        self._log.append(entry | {"bytes_out": sent, "who": self.who(request), "fault": fault or None})

    def control(self, request: Request) -> Answer:
        data = request.json()
        match request.method, request.parts[1]:
            case "GET", "log":
                return json_answer(list(self._log))
            case "GET", "state":
                return json_answer(self.describe())
            case "POST", "clear_log":
                self._log.clear()
            case "POST", "faults":
                try:
                    self.chance = Chance(Faults.of(data))
                except (TypeError, ValueError, re.error) as error:
                    return json_answer({"error": str(error)}, status=400)
            case "POST", name if self.command(name, data):
                pass
            case _:
                return json_answer({"error": f"no such control: {request.path}"}, status=404)
        return json_answer({})

    def command(self, name: str, data: Any) -> bool:
        """A server's own `POST /_control/<name>`; false when it has none of that name."""
        return False


class Process(Control):
    """A loopback server in a process of its own, which ends with this one."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", module, "--with-parent", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.url = cast(BinaryIO, self.process.stdout).readline().decode().strip()
        if not self.url:
            raise RuntimeError(f"the loopback server did not start (exit code {self.process.wait()})")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 80

    def stop(self) -> None:
        self._end(self.process.terminate)

    def kill(self) -> None:
        """SIGKILL: no request under way is finished. Start another on the same folder and port to go on."""
        self._end(self.process.kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _end(self, how: Any) -> None:
        how()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            cast(BinaryIO, pipe).close()


def options(*, folder: Path, port: int, faults: Faults | None, **more: object) -> list[str]:
    """The arguments `command_line` reads."""
    texts = {"folder": str(folder), "port": str(port), "faults": json.dumps(asdict(faults or Faults()))}
    texts |= {key: value if isinstance(value, str) else json.dumps(value) for key, value in more.items()}
    return [text for key, value in texts.items() for text in ("--" + key.replace("_", "-"), value)]


def command_line(name: str, about: str) -> argparse.ArgumentParser:
    """What every server's command takes."""
    parser = argparse.ArgumentParser(prog=f"python -m penstock.testing.{name}", description=about)
    parser.add_argument("--folder", type=Path, required=True, help="what the server holds; may be used again")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0: a free one")
    parser.add_argument("--faults", type=Faults.parse, default=Faults(), help="JSON: error_rate, seed, rules, …")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input closes")
    return parser


def serve_until_ended(server: Server, *, with_parent: bool) -> None:
    """Print the URL as the first line and serve until the process is ended or, `with_parent`, standard input closes."""
    server.start()
    sys.stdout.write(server.url + "\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        if with_parent:
            sys.stdin.buffer.read()
        else:
            threading.Event().wait()
    server.stop()
