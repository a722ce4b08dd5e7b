"""Who asks a loopback Hub, and what they may do: tokens, organizations, roles, private repositories."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from penstock.testing.repos import Repo, Repos
from penstock.testing.wire import Refused, Request

User = Mapping[str, Any]
Tokens = Mapping[str, User]

# name: the user. orgs: organization -> role in it. role: what the token may do. expires_after: so many requests.
TOKENS: Tokens = {
    "hf_writer": {"name": "writer", "orgs": {"org": "write"}, "role": "write", "expires_after": None},
    "hf_reader": {"name": "reader", "orgs": {"org": "read"}, "role": "read", "expires_after": None},
    "hf_stranger": {"name": "stranger", "orgs": {}, "role": "write", "expires_after": None},
}
_WRITERS = ("admin", "write")
_NOBODY = "Invalid username or password."  # the Hub's words


class Accounts:
    """The tokens a Hub knows, and how often each was used."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._uses = Counter[str]()
        self._expired: set[str] = set()
        self._lock = threading.Lock()

    def name(self, request: Request) -> str | None:
        token = _token(request)
        return str(self.tokens[token]["name"]) if token and token in self.tokens else None

    def user(self, request: Request) -> User | None:
        """Who asks, counting one use of their token. None: nobody in particular."""
        token = _token(request)
        if token is None:
            return None
        if token not in self.tokens:
            raise Refused(401, "Invalid credentials in Authorization header")
        user = self.tokens[token]
        limit = user.get("expires_after")
        with self._lock:
            self._uses[token] += 1
            if token in self._expired or (limit is not None and self._uses[token] > limit):
                raise Refused(401, f'User Access Token "{user["name"]}" is expired')
        return user

    def expire(self, token: str) -> None:
        with self._lock:
            self._expired.add(token)


def visible(repos: Repos, user: User | None, kind: str, name: str) -> Repo:
    """A repository the user may see. To others a private one does not exist."""
    repo = repos.find(kind, name)
    if repo is None or (repo.private and not _role(user, name)):
        # The Hub gives nobody a 401 for it, with this code or without; clients take it for "not found" by the code
        # alone when the address is not https.
        raise (
            Refused(401, _NOBODY, "RepoNotFound")
            if user is None
            else Refused(404, "Repository not found", "RepoNotFound")
        )
    return repo


def known(user: User | None) -> User:
    if user is None:
        raise Refused(401, _NOBODY)
    return user


def may_create(user: User | None, kind: str, name: str) -> User:
    user = known(user)
    if user["role"] == "read" or _role(user, name) not in _WRITERS:
        what = f"""You don't have the rights to create a {kind[:-1]} under the namespace "{name.split("/")[0]}\""""
        raise Refused(403, what)
    return user


def may_write(user: User | None, repo: Repo, *, pull: bool = False) -> User:
    """Anybody with a write token may open a pull request on what they can see."""
    user = known(user)
    if user["role"] == "read":
        raise Refused(403, "Forbidden: you must use a write token to upload to a repository.")
    if not pull and _role(user, repo.name) not in _WRITERS:
        raise Refused(403, f"Forbidden: you don't have write access to {repo.name}.")
    return user


def _role(user: User | None, name: str) -> str | None:
    """What a user is to a repository's namespace; None: nothing."""
    namespace = name.split("/")[0]
    if user is None:
        return None
    role = user.get("orgs", {}).get(namespace)
    return "admin" if user["name"] == namespace else (None if role is None else str(role))


def _token(request: Request) -> str | None:
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" and token.strip() else None
