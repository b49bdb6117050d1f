"""Pure: how a FlashInfer release spells the keys and values of its tuner's memory.

A key is a tuple ``(op, runner class, hash, profile, extras)`` in 0.6.8 to 0.6.14, and an object
that knows its own file key from 0.6.15 on. A file key leaves the hash out, and before 0.6.13 the
extras too. A value is ``(tactic, profile)``, before 0.6.16 with the runner's index in front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["KeyFormat", "extras_of", "runner_of"]


@dataclass(frozen=True)
class KeyFormat:
    """How one release spells them; which one it is, ``tuner.py`` finds out by trying.

    Attributes:
        with_extras: Whether a file key tells calls apart that differ in extras only.
        with_index: Whether a value names its runner by the place in the call's list of runners.
    """

    with_extras: bool = True
    with_index: bool = False

    def file_key(self, key: Any) -> str:  # noqa: ANN401 - FlashInfer is untyped
        """What a memory key is called in a file."""
        own = getattr(key, "file_key", None)
        if isinstance(own, str):
            return own
        op, runner, _hash, profile, extras = key
        return str((op, runner, profile, extras) if self.with_extras else (op, runner, profile))

    def value(self, index: int, tactic: Any) -> tuple[Any, ...]:  # noqa: ANN401
        """What memory holds for a tactic of the runner at an index, tuned for no profile."""
        return (index, tactic, None) if self.with_index else (tactic, None)

    def tactic(self, value: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """The tactic in a memory value."""
        return value[self.with_index]

    def with_tactic(self, value: tuple[Any, ...], tactic: Any) -> tuple[Any, ...]:  # noqa: ANN401
        """The same memory value with another tactic."""
        return (*value[: self.with_index], tactic, *value[self.with_index + 1 :])


def runner_of(key: Any) -> str:  # noqa: ANN401
    """The runner class that a memory key names."""
    return str(key[1] if isinstance(key, tuple) else key.runner_class_name)


def extras_of(key: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """What besides op, runner and shapes tells a memory key from others."""
    extras: tuple[Any, ...] = key[4] if isinstance(key, tuple) else key.extras
    return extras
