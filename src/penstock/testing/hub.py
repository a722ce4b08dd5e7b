"""A Hugging Face Hub on 127.0.0.1 for the real `huggingface_hub` (1.x and 2.x) and `datasets` clients.

It answers as the Hub does: LFS uploads checked against their SHA-256, commits with history, branches, pull requests,
private repositories, roles, and the Hub's own words for what went wrong. Xet is not served: with `hf_xet` installed,
clients must be told `HF_HUB_DISABLE_XET=1` (`env` does) unless they upload from a file object.

    with LoopbackHub() as hub:
        subprocess.run(["penstock", "push", ...], env=os.environ | hub.env())

As a process of its own: `python -m penstock.testing.hub --folder F --port P`, which prints its URL first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.testing.accounts import TOKENS, Accounts, Tokens
from penstock.testing.faults import Faults
from penstock.testing.hub_api import KINDS, HubApi
from penstock.testing.repos import Blobs, Repos
from penstock.testing.server import Control, Process, Server, command_line, options, serve_until_ended
from penstock.testing.wire import Answer, Refused, Request, json_answer

MULTIPART_OVER, PART_SIZE = 256 << 20, 64 << 20
PAGE = 1000  # what the Hub gives of a tree at once


class HubControl(Control):
    """What can be asked of a loopback Hub, in this process or another."""

    folder: Path

    def env(self, token: str | None = "hf_writer") -> dict[str, str]:
        """The variables that turn a client process to this Hub. They are read when `huggingface_hub` is imported."""
        fixed = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.folder / "client"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        return fixed | ({} if token is None else {"HF_TOKEN": token})

    def history(self, repo_id: str, *, repo_type: str = "dataset", revision: str = "main") -> list[dict[str, Any]]:
        """A branch's commits, oldest first: oid, parent, title, description, author, date, files (path -> SHA-256).

        The first is the Hub's own "initial commit" with `.gitattributes`. Empty: no such repository or branch.
        """
        repo = self.state()["repos"].get(f"{KINDS[repo_type]}/{repo_id}", {"commits": [], "refs": {}})
        commits = {commit["oid"]: commit for commit in repo["commits"]}
        oid = repo["refs"].get(f"refs/heads/{revision}") or repo["refs"].get(revision)
        found = []
        while oid:
            found.append(commits[oid])
            oid = commits[oid]["parent"]
        return found[::-1]

    def files(self, repo_id: str, *, repo_type: str = "dataset", revision: str = "main") -> dict[str, str]:
        """A branch's files now: path -> SHA-256."""
        history = self.history(repo_id, repo_type=repo_type, revision=revision)
        return dict(history[-1]["files"]) if history else {}

    def expire(self, token: str) -> None:
        """From now on this token is refused."""
        self._control("POST", "expire", {"token": token})


class LoopbackHub(Server, HubControl):
    """A Hub in a thread of this process.

    Files over `multipart_over` bytes are uploaded in parts of `part_size`; a tree is listed `page` entries at a time.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        tokens: Tokens = TOKENS,
        faults: Faults | None = None,
        multipart_over: int = MULTIPART_OVER,
        part_size: int = PART_SIZE,
        page: int = PAGE,
        port: int = 0,
    ) -> None:
        super().__init__(folder, faults=faults, port=port)
        self._accounts = Accounts(tokens)
        self._repos = Repos(self.folder)
        blobs = Blobs(self.folder)
        self._api = HubApi(blobs, self._repos, multipart_over=multipart_over, part_size=part_size, page=page)

    @staticmethod
    def start_process(
        folder: Path,
        *,
        tokens: Tokens = TOKENS,
        faults: Faults | None = None,
        multipart_over: int = MULTIPART_OVER,
        part_size: int = PART_SIZE,
        page: int = PAGE,
        port: int = 0,
    ) -> HubProcess:
        """The same in a process of its own, for tests that limit or kill this one."""
        given = options(folder=folder, port=port, faults=faults, tokens=tokens, page=page)
        given += ["--multipart-over", str(multipart_over), "--part-size", str(part_size)]
        return HubProcess(folder, given)

    def answer(self, request: Request) -> Answer:
        self._api.url = self.url
        if request.parts[0] == "_lfs":  # as a store's presigned links: whoever holds one may use it
            return self._api.store(request, request.parts[1:])
        return self._api.answer(request, self._accounts.user(request))

    def refusal(self, refused: Refused) -> Answer:
        shown = refused.message.replace("\n", " ").encode("latin-1", "replace").decode("latin-1")
        headers = {"X-Error-Message": shown} | ({"X-Error-Code": refused.code} if refused.code else {})
        return json_answer({"error": refused.message}, status=refused.status, headers=headers)

    def who(self, request: Request) -> str | None:
        return self._accounts.name(request)

    def describe(self) -> dict[str, Any]:
        with self._repos.lock:
            return {"repos": {f"{repo.kind}/{repo.name}": repo.describe() for repo in self._repos.all()}}

    def command(self, name: str, data: Any) -> bool:
        if name == "expire":
            self._accounts.expire(data["token"])
        return name == "expire"


class HubProcess(Process, HubControl):
    """A Hub in a process of its own: `stop` ends it, `kill` ends it at once."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.folder = folder
        super().__init__("penstock.testing.hub", arguments)


def main() -> None:
    parser = command_line("hub", "A loopback Hugging Face Hub.")
    parser.add_argument("--tokens", type=json.loads, default=TOKENS, help="JSON: token -> who holds it")
    parser.add_argument("--multipart-over", type=int, default=MULTIPART_OVER, help="bytes")
    parser.add_argument("--part-size", type=int, default=PART_SIZE, help="bytes")
    parser.add_argument("--page", type=int, default=PAGE, help="entries of a tree given at once")
    given = vars(parser.parse_args())
    with_parent = given.pop("with_parent")
    serve_until_ended(LoopbackHub(given.pop("folder"), **given), with_parent=with_parent)


if __name__ == "__main__":
    main()
