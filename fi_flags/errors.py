"""One error tree: every error has an exit code and says what to do next.

This module imports nothing of ours, so anything may raise these. Errors travel between
processes (a launcher, a pool), so each keeps its fields and pickles.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "DeviceError",
    "FlagsError",
    "RanksError",
    "SettingsError",
    "TableError",
    "TunerError",
    "WorkloadError",
]


class FlagsError(Exception):
    """Base of every error that fi_flags raises on purpose.

    Attributes:
        message: What happened, in one line.
        hint: What the reader can do about it, or an empty string.
        exit_code: The exit code of the command line for this error.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", **fields: Any) -> None:  # noqa: ANN401
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by message and fields, which Exception alone would lose."""
        return _rebuild, (type(self), self.message, self.hint, self.fields)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def _rebuild(cls: type[FlagsError], message: str, hint: str, fields: dict[str, Any]) -> FlagsError:
    return cls(message, hint=hint, **fields)


class SettingsError(FlagsError):
    """A setting has a value we refuse; fields: name, value, source, accepted."""

    exit_code = 2


class TableError(FlagsError):
    """A table is unsound or unusable; fields: path, status."""

    exit_code = 3


class RanksError(FlagsError):
    """Ranks were lost, stuck, or disagreed fatally; fields: ranks, phase."""

    exit_code = 4


class WorkloadError(FlagsError):
    """The workload raised on some rank; fields: ranks, cause."""

    exit_code = 5


class DeviceError(FlagsError):
    """The device that the workload needs is missing; fields: needed, found."""

    exit_code = 6


class TunerError(FlagsError):
    """FlashInfer is missing, or lacks what a request needs; fields: feature."""

    exit_code = 6
