"""What every loopback server promises: faults that come when asked for and again in the next run, and an honest log."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.testing import Faults, LoopbackHub, Rule

DATA = bytes(range(256)) * 40
OID = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path / "hub") as started:
        yield started


def ask(
    hub: LoopbackHub, method: str, path: str, body: Any = None, *, token: str | None = "hf_writer", **headers: str
) -> http.client.HTTPResponse:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
    if token:
        headers["Authorization"] = f"Bearer {token}"
    connection.request(method, path, json.dumps(body) if isinstance(body, dict | list) else body, headers)
    return connection.getresponse()


def put(hub: LoopbackHub, data: bytes = DATA) -> int:
    return ask(hub, "PUT", f"/_lfs/{OID}", data, token=None).status


def stored(hub: LoopbackHub) -> list[str]:
    return sorted(
        file.name for folder in ("blobs", "uploads") for file in (hub.folder / folder).rglob("*") if file.is_file()
    )


def test_a_status_comes_so_many_times_and_the_next_request_goes_well(hub: LoopbackHub) -> None:
    hub.set_faults(rules=(Rule(r"PUT /_lfs/", "status:503", times=2, retry_after=1.5),))
    first = ask(hub, "PUT", f"/_lfs/{OID}", DATA, token=None)
    assert (first.status, first.headers["Retry-After"]) == (503, "1.5")
    assert json.loads(first.read()) == {"error": "Service Unavailable (injected)"}
    assert ask(hub, "GET", "/api/whoami-v2").status == 200
    assert (put(hub), stored(hub), put(hub), stored(hub)) == (503, [], 200, [OID])


def test_a_rule_can_wait_for_its_turn(hub: LoopbackHub) -> None:
    hub.set_faults(Faults(rules=(Rule("whoami", "status:500", skip=2), Rule("whoami", "status:429", skip=2))))
    assert [ask(hub, "GET", "/api/whoami-v2").status for _ in range(5)] == [200, 200, 500, 429, 200]


def test_a_reset_in_the_middle_of_a_body_leaves_nothing(hub: LoopbackHub) -> None:
    hub.set_faults(rules=(Rule("PUT", "reset", after_bytes=1000),))
    with pytest.raises(ConnectionError):
        put(hub)
    assert stored(hub) == []
    assert hub.log()[-1] | {"path": ""} == {
        "method": "PUT", "path": "", "status": 0, "bytes_in": 1000, "bytes_out": 0, "who": None, "fault": "reset",
    }  # fmt: skip
    assert (put(hub), stored(hub)) == (200, [OID])


def test_a_lost_answer_is_lost_after_the_work(hub: LoopbackHub) -> None:
    hub.set_faults(rules=(Rule("repos/create", "lose_answer"),))
    with pytest.raises(http.client.RemoteDisconnected):
        ask(hub, "POST", "/api/repos/create", {"type": "dataset", "name": "a"})
    assert len(hub.history("writer/a")) == 1
    assert hub.log()[-1]["status"] == 200
    assert ask(hub, "POST", "/api/repos/create", {"type": "dataset", "name": "a"}).status == 409


def test_a_hang_goes_on_afterwards(hub: LoopbackHub) -> None:
    hub.set_faults(rules=(Rule("whoami", "hang:0.3"),))
    started = time.monotonic()
    assert ask(hub, "GET", "/api/whoami-v2").status == 200
    assert time.monotonic() - started >= 0.3


def test_chance_repeats_with_its_seed_whatever_else_is_asked(hub: LoopbackHub) -> None:
    def run(seed: int, *, between: bool) -> list[int]:
        hub.set_faults(error_rate=0.3, statuses=(500, 502), match="whoami", seed=seed)
        found = []
        for _ in range(60):
            found.append(ask(hub, "GET", "/api/whoami-v2").status)
            if between:
                assert ask(hub, "GET", "/api/datasets/org/none").status == 404
        return found

    first = run(1, between=False)
    assert first == run(1, between=True)
    assert first != run(2, between=False)
    assert set(first) == {200, 500, 502}
    assert 5 < sum(status != 200 for status in first) < 35


def test_faults_that_make_no_sense_are_refused(hub: LoopbackHub) -> None:
    with pytest.raises(ValueError, match="no such fault: 'explode'"):
        Rule("x", "explode")
    answer = ask(hub, "POST", "/_control/faults", {"rules": [{"match": "x", "action": "explode"}]})
    assert (answer.status, json.loads(answer.read())["error"]) == (
        400, "no such fault: 'explode'; choose status:N, reset, lose_answer or hang:SECONDS",
    )  # fmt: skip
    assert ask(hub, "POST", "/_control/faults", {"eror_rate": 1}).status == 400
    assert ask(hub, "GET", "/_control/nothing").status == 404


def test_control_meets_no_faults_and_is_not_logged(hub: LoopbackHub) -> None:
    hub.set_faults(error_rate=1.0)
    assert ask(hub, "GET", "/api/whoami-v2").status == 500
    assert [entry["path"] for entry in hub.log()] == ["/api/whoami-v2"]
    hub.clear_log()
    assert hub.log() == []
    hub.set_faults()
    assert ask(hub, "GET", "/api/whoami-v2").status == 200


def test_the_log_counts_bytes_and_names_people_but_no_tokens(hub: LoopbackHub) -> None:
    put(hub)
    body = ask(hub, "GET", "/api/whoami-v2?x=1").read()
    ask(hub, "GET", "/api/whoami-v2", token="hf_unknown")
    assert [tuple(entry.values()) for entry in hub.log()] == [
        ("PUT", f"/_lfs/{OID}", 200, len(DATA), 0, None, None),
        ("GET", "/api/whoami-v2?x=1", 200, 0, len(body), "writer", None),
        ("GET", "/api/whoami-v2", 401, 0, 56, None, None),
    ]
    assert "hf_" not in json.dumps(hub.log())


def test_a_connection_serves_one_request_after_another(hub: LoopbackHub) -> None:
    hub.set_faults(rules=(Rule("PUT", "status:500"),))
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
    found = []
    for method, path in (("PUT", f"/_lfs/{OID}"), ("PUT", f"/_lfs/{OID}"), ("PUT", "/_lfs/short"), ("GET", "/nowhere")):
        connection.request(method, path, DATA if method == "PUT" else None)
        answer = connection.getresponse()
        answer.read()
        found.append(answer.status)
    assert found == [500, 200, 422, 404]


def test_chunked_bodies_are_put_together(hub: LoopbackHub) -> None:
    pieces = (DATA[at : at + 999] for at in range(0, len(DATA), 999))
    connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
    connection.request("PUT", f"/_lfs/{OID}", pieces, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    assert connection.getresponse().status == 200
    assert (stored(hub), hub.log()[0]["bytes_in"]) == ([OID], len(DATA))


def test_a_client_that_goes_away_leaves_nothing(hub: LoopbackHub) -> None:
    with socket.create_connection(("127.0.0.1", hub.port)) as client:
        client.sendall(
            f"PUT /_lfs/{OID} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(DATA)}\r\n\r\n".encode() + DATA[:-1]
        )
    while not hub.log():
        time.sleep(0.01)
    assert (hub.log()[0]["status"], hub.log()[0]["bytes_in"], stored(hub)) == (0, len(DATA) - 1, [])


def test_a_body_that_is_not_what_it_says_is_refused(hub: LoopbackHub) -> None:
    assert put(hub, DATA[:-1]) == 400
    assert stored(hub) == []


def test_a_server_that_stops_ends_its_connections(tmp_path: Path) -> None:
    with LoopbackHub(tmp_path) as hub:
        connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=10)
        connection.request("GET", "/api/whoami-v2")
        connection.getresponse().read()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        connection.request("GET", "/api/whoami-v2")
        connection.getresponse()


def test_a_server_of_its_own_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from penstock.testing import LoopbackHub\n"
        f"hub = LoopbackHub.start_process(Path({str(tmp_path)!r})); print(hub.port, flush=True); os._exit(0)"
    )
    port = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    deadline = time.monotonic() + 20
    with pytest.raises(ConnectionRefusedError):
        while time.monotonic() < deadline:
            socket.create_connection(("127.0.0.1", port)).close()
            time.sleep(0.02)


def test_the_servers_need_the_standard_library_alone() -> None:
    code = "import sys, penstock.testing.hub, penstock.testing.s3; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()
    assert "penstock.testing.s3" in loaded
    assert not {name.partition(".")[0] for name in loaded} & {"pyarrow", "numpy", "orjson", "yaml", "huggingface_hub"}
