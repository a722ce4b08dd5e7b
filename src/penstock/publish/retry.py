"""Patience: what is tried again, how soon, and what is not.

A push makes thousands of requests over hours, so some will fail. Those that may go better next time are repeated with
growing, jittered waits, or after as long as the server asked for; the others stop the push with what to do.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.errors import NotAllowed, PenstockError, RemoteFailed, UsageError

T = TypeVar("T")

# A conflict is another commit in the same moment; 412 is answered by whoever knows what the parent should be.
AGAIN = frozenset({408, 409, 423, 425, 429, 500, 502, 503, 504, 520, 522, 524})
REFUSED = frozenset({401, 403})
# S3 says these with a status of 400: a body that stalled, or did not arrive as it was sent.
AGAIN_CODES = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "SlowDown"})
_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "botocore", "h11", "ssl")


@dataclass(frozen=True)
class Patience:
    """How often and how long. `PENSTOCK_RETRY_SECONDS` scales the waits; a server's own `Retry-After` is kept to."""

    attempts: int = 10
    first: float = field(default_factory=lambda: float(os.environ.get("PENSTOCK_RETRY_SECONDS", "1")))
    most: float = 60.0
    longest_asked: float = 3700.0  # the Hub's limits are by the hour

    def wait(self, attempt: int, asked: float | None, *, jitter: float) -> float:
        """Seconds before the next attempt: doubling, between half and all of it, or what the server asked for."""
        if asked is not None:
            return min(asked, self.longest_asked) + jitter * self.first
        return min(self.most, self.first * 2.0**attempt) * (0.5 + jitter / 2)


def patiently(
    call: Callable[[], T],
    *,
    what: str,
    where: str,
    patience: Patience,
    stopped: threading.Event | None = None,
    before_again: Callable[[], T | None] = lambda: None,
) -> T:
    """The answer of a call, however often it must be asked. `before_again` may find that it went through after all."""
    attempt = 0
    while True:
        try:
            return call()
        except PenstockError:
            raise
        except Exception as error:
            wait = _wait_for(error, attempt, what=what, where=where, patience=patience)
        if stopped is not None:
            if stopped.wait(wait):
                raise RemoteFailed(f"{what} was stopped", where=where)
        else:
            threading.Event().wait(wait)
        attempt += 1
        if (found := before_again()) is not None:
            return found


def _wait_for(error: Exception, attempt: int, *, what: str, where: str, patience: Patience) -> float:
    """Seconds to wait before this call is made again; raises where another attempt cannot help."""
    for below in _chain(error):
        if isinstance(below, PenstockError):
            raise below from error
    status, asked, said = facts(error)
    if status in REFUSED:
        raise NotAllowed(
            f"{what} was refused ({status}{': ' + said if said else ''})",
            where=where,
            do="give a token that may write here (hf auth login, HF_TOKEN or token=) and run the same command again:"
            " what was sent stays",
        ) from error
    if status not in AGAIN and not (status is None and _of_the_network(error)):
        raise RemoteFailed(f"{what} failed ({said or error})", where=where, do="mend that and run again") from error
    if attempt + 1 >= patience.attempts:
        raise RemoteFailed(
            f"{what} failed {attempt + 1} times ({said or _short(error)})",
            where=where,
            do="run the same command again later: what was sent stays",
        ) from error
    return patience.wait(attempt, asked, jitter=random.random())


def facts(error: BaseException) -> tuple[int | None, float | None, str]:
    """An error's HTTP status, the seconds its server asked to wait, and what the server said."""
    for below in _chain(error):
        response: Any = getattr(below, "response", None)
        status = getattr(response, "status_code", None)
        if isinstance(response, dict):  # botocore
            stated = response.get("Error", {})
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return 503 if stated.get("Code") in AGAIN_CODES else status, None, str(stated.get("Message", ""))
        if isinstance(status, int):
            said = getattr(below, "server_message", None) or response.headers.get("X-Error-Message") or ""
            return status, _seconds(response.headers.get("Retry-After")), " ".join(str(said).split())[:300]
    return None, None, ""


def _seconds(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        from datetime import UTC, datetime
        from email.utils import parsedate_to_datetime

        try:
            return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
        except (TypeError, ValueError):
            return None


def _of_the_network(error: BaseException) -> bool:
    """A reset, a timeout, a name that did not resolve: told by where the error's class comes from."""
    return any(
        isinstance(below, ConnectionError | TimeoutError)
        or any(kind.__module__.partition(".")[0] in _CLIENTS for kind in type(below).__mro__)
        for below in _chain(error)
        if not isinstance(below, UsageError)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
