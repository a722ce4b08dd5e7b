"""The Hugging Face Hub as a place to publish to, through the real `huggingface_hub` client (1.x and 2.x).

Content goes first and is invisible: an LFS object that no commit names. Commits come last. Every call is made
patiently, and a commit whose answer was lost is looked for before it is made again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import NotAllowed, NotFound, RemoteFailed, UsageError
from penstock.publish.commits import FILES_PER_COMMIT, Commits, ParentMoved
from penstock.publish.place import Look, Notes, Published, RemoteFile, Sealed, Sent, Streams, Wish
from penstock.publish.retry import Patience, facts, patiently

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

    from penstock.journal import Journal, Record
    from penstock.publish.card import Card

T = TypeVar("T")

MAY_WRITE = frozenset({"admin", "write", "contributor"})


class HubPlace:
    """One dataset repository, and one revision of it."""

    visible = ""  # with the last commit

    def __init__(
        self,
        repo_id: str,
        *,
        token: str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        private: bool | None = None,
        endpoint: str | None = None,
        patience: Patience | None = None,
        stopped: threading.Event | None = None,
    ) -> None:
        try:
            from huggingface_hub import HfApi, get_token
            from huggingface_hub.errors import HFValidationError
            from huggingface_hub.utils._validators import validate_repo_id
        except ImportError:
            raise UsageError(
                "publishing to the Hub needs the huggingface_hub client",
                do="install it: pip install 'penstock[hub]'",
            ) from None
        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise UsageError(f"is not a name the Hub takes ({error})", where=repo_id, do="name it ORG/NAME") from None
        self._token = token or get_token()
        self.api: HfApi = HfApi(endpoint=endpoint, token=self._token, library_name="penstock")
        self.repo_id, self.revision, self.create_pr, self.private = repo_id, revision, create_pr, private
        self.patience = patience or Patience()
        self.stopped = stopped or threading.Event()

    @property
    def endpoint(self) -> str:
        return str(self.api.endpoint)

    @property
    def name(self) -> str:
        return self.repo_id

    @property
    def title(self) -> str:
        return self.repo_id

    def describe(self) -> dict[str, Any]:
        return {"to": self.repo_id, "at": self.endpoint, "revision": self.revision, "create_pr": self.create_pr}

    def address(self) -> str:
        return f"{self.endpoint}/datasets/{self.repo_id}" + (f"/tree/{self.revision}" if self.revision else "")

    def state(self, look: Look) -> str:
        private = look.private if look.exists else bool(self.private)
        return ("exists, " if look.exists else "will be created, ") + ("private" if private else "public")

    def shard_path(self, folder: str, split: str, at: int, sha256: str) -> str:
        return ""  # `load_dataset` wants to be told how many there are

    # -- before any work ------------------------------------------------------------------------------------------

    def check(self, sources: Iterable[str] = ()) -> Look:
        """Say now what would stop the push later: no token, no such owner, no right to write."""
        if not self._token:
            raise NotAllowed(
                "there is no Hugging Face token",
                where=self.repo_id,
                do="run `hf auth login`, set HF_TOKEN, or pass token=",
            )
        who = self._ask("asking who the token belongs to", self.api.whoami)
        if "/" not in self.repo_id:
            self.repo_id = f"{who['name']}/{self.repo_id}"
        role = who.get("auth", {}).get("accessToken", {}).get("role", "write")
        if role == "read":
            raise NotAllowed(
                f"the token of {who['name']} may only read", where=self.repo_id, do="make a token that may write"
            )
        look = self.look(files=False)
        owner = self.repo_id.partition("/")[0]
        if not self.create_pr and owner != who["name"]:
            roles = {org["name"]: org.get("roleInOrg", "write") for org in who.get("orgs", ())}
            # A fine-grained token tells of no organizations; then only asking the repository itself helps.
            if role != "fineGrained" and roles.get(owner) not in MAY_WRITE:
                raise NotAllowed(
                    f"{who['name']} may not write to {owner}"
                    + (f" (role: {roles[owner]})" if owner in roles else ", and is no member of it"),
                    where=self.repo_id,
                    do="publish under your own name, or ask for the right to write",
                )
        if look.exists and not self.create_pr:
            self._ask("asking whether it may be written to", self._try_preupload)
        return look

    def _try_preupload(self) -> None:
        """What the client asks before every upload; the Hub answers it only to who may write."""
        from huggingface_hub import CommitOperationAdd

        self.api.preupload_lfs_files(
            self.repo_id,
            additions=[CommitOperationAdd("README.md", b"\n")],
            revision=None if self._revision_missing() else self.revision,
            repo_type="dataset",
        )

    def _revision_missing(self) -> bool:
        from huggingface_hub.errors import RevisionNotFoundError

        if self.revision is None:
            return False
        try:
            self.api.repo_info(self.repo_id, revision=self.revision, repo_type="dataset")
        except RevisionNotFoundError:
            return True
        return False

    def look(self, *, files: bool = True) -> Look:
        """What is there now. A revision that does not exist yet looks empty."""
        return self._ask("looking at the repository", lambda: self._look(files=files))

    def _look(self, *, files: bool) -> Look:
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            info = self.api.repo_info(self.repo_id, revision=self.revision, repo_type="dataset")
        except RevisionNotFoundError:
            return Look(exists=True, files={})
        except RepositoryNotFoundError:
            return Look(exists=False, files={})
        private = bool(getattr(info, "private", False))
        if not files or info.sha is None:
            return Look(True, private, info.sha, {} if info.sha is None else None)
        return Look(True, private, info.sha, dict(self._listed(info.sha)))

    def _listed(self, revision: str) -> Iterator[tuple[str, RemoteFile]]:
        from huggingface_hub.hf_api import RepoFile

        for entry in self.api.list_repo_tree(self.repo_id, recursive=True, revision=revision, repo_type="dataset"):
            if isinstance(entry, RepoFile):
                lfs = entry.lfs
                yield (
                    entry.path,
                    RemoteFile(lfs.size if lfs else entry.size, lfs.sha256 if lfs else None, entry.blob_id),
                )

    def read(self, path: str, *, revision: str | None) -> bytes | None:
        """A small file as it is there now; None where there is none."""
        from huggingface_hub import get_session
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import hf_raise_for_status

        url = f"{self.endpoint}/datasets/{self.repo_id}/resolve/{revision or 'main'}/{path}"

        def get() -> bytes | None:
            try:
                response = get_session().get(
                    url, headers=build_hf_headers(token=self._token), follow_redirects=True, timeout=60
                )
                hf_raise_for_status(response)
            except (EntryNotFoundError, RevisionNotFoundError, RepositoryNotFoundError):
                return None
            return bytes(response.content)

        return self._ask(f"reading {path}", get)

    # -- content, invisible ---------------------------------------------------------------------------------------

    def prepare(self, look: Look, journal: Journal) -> None:
        if not look.exists or self.revision is not None:
            self.create()

    def create(self) -> None:
        """Make the repository, and the revision, if they are not there."""
        self._ask(
            "creating the repository",
            lambda: self.api.create_repo(self.repo_id, private=self.private, exist_ok=True, repo_type="dataset"),
        )
        if self.revision is not None and not self.revision.startswith("refs/"):
            branch = self.revision
            self._ask(
                "creating the branch",
                lambda: self.api.create_branch(self.repo_id, branch=branch, exist_ok=True, repo_type="dataset"),
            )

    def send(self, sealed: Sealed, stream: Callable[[], BufferedIOBase], notes: Notes | None = None) -> str:
        """Send content, unless the Hub has it already; how a commit will have to name it ("lfs" or "regular")."""
        return self.send_together([(sealed, stream)])[0]

    def send_together(self, content: Sequence[tuple[Sealed, Callable[[], BufferedIOBase]]]) -> list[str]:
        """Many small files at once: one request tells which of them go inside the commit."""

        def upload() -> list[str]:
            with ExitStack() as stack, _quiet():
                operations = [_addition(sealed, stack.enter_context(stream())) for sealed, stream in content]
                self.api.preupload_lfs_files(
                    self.repo_id,
                    additions=operations,
                    revision=self.revision,
                    create_pr=self.create_pr,
                    num_threads=1,
                    free_memory=False,
                    repo_type="dataset",
                )
                return [str(operation._upload_mode) for operation in operations]

        first = content[0][0].path
        return self._ask(f"sending {first}" + (f" and {len(content) - 1} more" if len(content) > 1 else ""), upload)

    def present(self, content: Sequence[Sealed]) -> list[bool]:
        """Whether the Hub still has content that no commit names yet."""
        from huggingface_hub.lfs import post_lfs_batch_info

        found: dict[str, bool] = {}
        lfs = [one for one in content if one.mode == "lfs"]
        for at in range(0, len(lfs), FILES_PER_COMMIT):
            chunk = lfs[at : at + FILES_PER_COMMIT]

            def ask(chunk: Sequence[Sealed] = chunk) -> list[dict[str, Any]]:
                actions, errors, *_ = post_lfs_batch_info(
                    upload_infos=[_addition(one, None).upload_info for one in chunk],
                    token=self._token,
                    repo_type="dataset",
                    repo_id=self.repo_id,
                    revision=None if self.create_pr else self.revision,
                    endpoint=self.endpoint,
                )
                return [*actions, *errors]

            for answer in self._ask("asking what was sent", ask):
                found[answer["oid"]] = not answer.get("actions") and "error" not in answer
        return [one.mode == "regular" or found.get(one.sha256, False) for one in content]

    def holds(self, files: Sequence[Sealed]) -> bool:
        look = self.look()
        return all(look.holds(one) for one in files)

    def discard(self, records: Mapping[str, Record]) -> None:
        """Nothing: the Hub drops content that no commit comes to name."""

    # -- commits --------------------------------------------------------------------------------------------------

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The client draws a bar for each file it is handed; there is one of ours for all of them."""
        from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

        shown = not are_progress_bars_disabled()
        if shown:
            disable_progress_bars()
        try:
            yield
        finally:
            if shown:
                enable_progress_bars()

    def publish(self, sent: Sequence[Sent], wish: Wish, journal: Journal, streams: Streams, fresh: Card) -> Published:
        commits = Commits(self, wish, journal, sent, streams, fresh)
        return Published(commits.publish(), len(commits.made))

    def commit(
        self,
        adds: Sequence[tuple[Sealed, Callable[[], BufferedIOBase] | None]],
        deletes: Sequence[str],
        *,
        message: str,
        description: str | None = None,
        parent: str | None,
        open_pr: bool = False,
        went_through: Callable[[], str | None],
    ) -> tuple[str, str | None]:
        """One commit; its id, and the revision of a pull request it opened.

        Raises `ParentMoved` where the repository has gone on from `parent`; whoever made the commit looks again.
        """
        from huggingface_hub import CommitOperationDelete

        def make() -> tuple[str, str | None]:
            with ExitStack() as stack, _quiet():
                operations: list[Any] = []
                for sealed, stream in adds:
                    opened = stack.enter_context(stream()) if stream is not None else None
                    operation = _addition(sealed, opened)
                    if sealed.mode == "lfs":
                        operation._upload_mode = "lfs"
                        operation._is_uploaded = True
                    operations.append(operation)
                operations += [CommitOperationDelete(path, is_folder=False) for path in deletes]
                try:
                    made = self.api.create_commit(
                        self.repo_id,
                        operations,
                        commit_message=message,
                        commit_description=description,
                        parent_commit=parent,
                        revision=self.revision,
                        create_pr=open_pr,
                        repo_type="dataset",
                    )
                except Exception as error:
                    if facts(error)[0] == 412:
                        raise ParentMoved("another commit came first", where=self.repo_id) from error
                    raise
            return made.oid, made.pr_revision

        def look_again() -> tuple[str, str | None] | None:
            found = went_through()
            return None if found is None else (found, None)

        return patiently(
            make,
            what="the commit",
            where=self.repo_id,
            patience=self.patience,
            stopped=self.stopped,
            before_again=look_again,
        )

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            return patiently(call, what=what, where=self.repo_id, patience=self.patience, stopped=self.stopped)
        except RemoteFailed as error:
            if isinstance(error.__cause__, RepositoryNotFoundError):
                raise NotFound(
                    "there is no such dataset repository, or this token may not see it",
                    where=self.repo_id,
                    do="check the name and the token",
                ) from error.__cause__
            raise


def _addition(sealed: Sealed, opened: BufferedIOBase | None) -> CommitOperationAdd:
    """The client's own operation, with a digest that is known already. Left to itself it would read the stream."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.lfs import UploadInfo

    operation = CommitOperationAdd(sealed.path, b"")
    if opened is not None and sealed.mode == "regular":
        operation = CommitOperationAdd(sealed.path, opened.read())
    elif opened is not None:
        operation.path_or_fileobj = opened  # type: ignore[assignment]  # any `io.BufferedIOBase` will do
    if sealed.mode == "lfs":
        operation.upload_info = UploadInfo(sha256=bytes.fromhex(sealed.sha256), size=sealed.size, sample=sealed.sample)
    return operation


@contextmanager
def _quiet() -> Iterator[None]:
    """The client warns at every file object that Xet is left out. It is, on purpose: its buffers know no budget. And it
    speaks of each attempt it makes again by itself, in the middle of a progress line."""
    for name, words in _CHATTER.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, _Without) for one in logger.filters):
            logger.addFilter(_Without(words))
    yield


_CHATTER = {
    "huggingface_hub._commit_api": ("not supported by Xet Storage",),
    "huggingface_hub.utils._http": ("thrown while requesting", "Retrying in ", "Rate limited. Waiting "),
}


class _Without(logging.Filter):
    """Leaves out records that hold some words."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__()
        self._words = words

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(word in message for word in self._words)
