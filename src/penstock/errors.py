"""Typed errors: what happened, where, and what to do next.

Every error is one line when printed. `exit_code` is what the command line ends with.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of all errors Penstock raises on purpose.

    >>> str(PenstockError("is cut short", where="a.parquet", do="fetch it again"))
    'a.parquet: is cut short; fetch it again'
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        what = " ".join(what.split())  # one line, whatever a library or a user's exception says
        self.what, self.where, self.do = what, where, do
        super().__init__((f"{where}: " if where else "") + what + (f"; {do}" if do else ""))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.do)


def _rebuild(kind: type[PenstockError], what: str, where: str, do: str) -> PenstockError:
    return kind(what, where=where, do=do)


class UsageError(PenstockError, ValueError):
    """The call or the command was wrong; nothing was started."""

    exit_code = 2


class NotFound(UsageError, FileNotFoundError):
    """A path that does not exist, or holds no data."""

    __str__ = Exception.__str__  # FileNotFoundError would print its errno


class DestinationConflict(UsageError):
    """The destination holds something this run may not touch."""


class DoesNotFit(PenstockError):
    """No schedule keeps this plan under the budget. Names the smallest budget that does."""

    exit_code = 3


class BadFile(PenstockError):
    """A source file is damaged, encrypted, or not what its name says."""


class BadRow(PenstockError):
    """A row cannot be read: malformed, or of a type that clashes with the column's."""


class SchemaClash(PenstockError):
    """Two files disagree on a column."""


class SourceChanged(PenstockError):
    """A source file is not the one that was planned."""


class FunctionFailed(PenstockError):
    """A user's function raised, or returned what it may not."""


class OverBudget(PenstockError):
    """A task took more memory than the budget holds and was ended."""


class WorkerDied(PenstockError):
    """A task ended its worker process again and again."""


class DiskFull(PenstockError):
    """No space left; committed work stays, the same command goes on."""


class Busy(PenstockError):
    """Another run holds this destination."""


class NotAllowed(UsageError):
    """A token is missing, no longer valid, or may not write where it is asked to."""


class NotFetched(PenstockError):
    """A file's name is there and its content is not: a git-annex link or pointer, or a Git LFS pointer."""


class RemoteFailed(PenstockError):
    """A Hub or a store did not do what it was asked, after every attempt. What was sent stays."""
