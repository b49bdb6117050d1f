"""What a setting may hold: its words, and how each kind of value is parsed.

A parser takes a value from any source, or one it has itself returned, and gives what the
setting holds. Otherwise it raises ValueError, whose text is what would have been accepted.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final, TypeVar

WHOLE: Final = 100.0


class Word(str, Enum):
    """One word of a few; it prints as itself on every Python."""

    def __str__(self) -> str:
        return str(self.value)


class Mode(Word):
    """What the operator asks of the flag."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"
    SHADOW = "shadow"
    FORCE = "force"


class Access(Word):
    """What may be done with the stored table."""

    RW = "rw"
    RO = "ro"
    WO = "wo"


class Split(Word):
    """Who tunes what on a cold start."""

    ALL = "all"
    LEADER = "leader"


class OnFailure(Word):
    """What a failed warm-up does to the start."""

    RAISE = "raise"
    UNTUNED = "untuned"


class LogFormat(Word):
    """How the command line writes its log."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


_W = TypeVar("_W", bound=Word)


def _folded(value: object) -> str:
    return value.strip().lower() if isinstance(value, str) else ""


def _switch(value: object) -> bool | None:
    """The truth of a word, of a boolean, or of the numbers 0 and 1; None for anything else."""
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    return {
        **dict.fromkeys(("off", "0", "false", "no"), False),
        **dict.fromkeys(("on", "1", "true", "yes"), True),
    }.get(_folded(value))


def parse_switch(value: object) -> bool:
    """A switch: on or off, in any of their spellings."""
    if (truth := _switch(value)) is None:
        raise ValueError("on (1, true, yes) or off (0, false, no)")
    return truth


def parse_mode(value: object) -> Mode:
    """The flag: a switch's spellings, or one of the other modes."""
    if (truth := _switch(value)) is not None:
        return Mode.ON if truth else Mode.OFF
    try:
        return Mode(_folded(value))
    except ValueError:
        raise ValueError("off (0, false, no), on (1, true, yes), auto, shadow or force") from None


def one_of(kind: type[_W]) -> Callable[[object], _W]:
    """The parser for one word of a kind; case and surrounding blanks do not matter."""

    def parse(value: object) -> _W:
        try:
            return kind(_folded(value))
        except ValueError:
            raise ValueError(", ".join(word.value for word in kind)) from None

    return parse


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def parse_seconds(value: object) -> float:
    """A finite time above zero, in seconds."""
    number = _number(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError("a number of seconds above 0")
    return number


def parse_percent(value: object) -> float:
    """A share from 0 to 100."""
    number = _number(value)
    if not 0 <= number <= WHOLE:
        raise ValueError("a number from 0 to 100")
    return number


def _is_clean(text: str) -> bool:
    """Whether a text can be logged and encoded: no control characters, no lone surrogates."""
    return not any(unicodedata.category(char) in {"Cc", "Cs"} for char in text)


def parse_text(value: object) -> str:
    """A text that can be logged, without surrounding blanks."""
    if not isinstance(value, str) or not _is_clean(value.strip()):
        raise ValueError("a text without control characters")
    return value.strip()


def parse_names(value: object) -> tuple[str, ...]:
    """Names: separated by commas, or several texts; blanks around them and empty ones go."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple | set | frozenset):
        raise ValueError("names, separated by commas; in TOML an array of texts")
    return tuple(name for item in items if (name := parse_text(item)))


def parse_directory(value: object) -> Path:
    """A directory or file, which need not exist; `~` is expanded, nothing else is."""
    accepted = "an absolute path, or one below ~, without $ and control characters"
    if not isinstance(value, str | Path):
        raise ValueError(accepted)
    text = str(value).strip()
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # a ~user that does not exist
        raise ValueError(accepted) from None
    if not path.is_absolute() or "$" in text or not _is_clean(text):
        raise ValueError(accepted)
    return path
