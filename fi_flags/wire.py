"""A store whose every call ends: by its answer, or after a deadline.

A call on a TCP store has no deadline of its own: where the server is frozen, or its host is cut
off, it blocks inside torch, and so would whoever made it. So each connection has a thread that
makes the calls, and the caller waits for that thread no longer than it means to.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Wire", "within"]

T = TypeVar("T")


class _Call:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.done = threading.Event()
        self.answer: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        try:
            self.answer = self.work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            self.error = error
        self.done.set()

    def result(self, deadline: float, what: str) -> Any:  # noqa: ANN401 - the store's own
        if not self.done.wait(deadline):
            raise RuntimeError(f"no answer to {what} within {deadline:g} s")
        if self.error is not None:
            raise self.error
        return self.answer


def within(deadline: float, work: Callable[[], T], what: str) -> T:
    """Do something that may block inside torch, in a thread of its own.

    Raises:
        RuntimeError: It took longer than ``deadline`` seconds; its thread is left behind.
    """
    call = _Call(work)
    threading.Thread(target=call.make, name="fi_flags-wire", daemon=True).start()
    result: T = call.result(deadline, what)
    return result


class Wire:
    """One connection to a store.

    Every method raises RuntimeError, as torch does for a store that is gone, if there is no answer
    within ``deadline`` seconds; from then on every call raises at once.

    Args:
        store: The store.
        deadline: Seconds.
        direct: Make the calls in the caller's own thread: for a store in this process, which
            always answers.
    """

    def __init__(self, store: Store, deadline: float, *, direct: bool = False) -> None:
        self._store: Any = store
        self._direct = direct
        self._deadline = deadline
        self._silent = ""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        if not direct:
            threading.Thread(target=self._work, name="fi_flags-wire", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is known to be there."""
        return bytes(self._ask("get", key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are known to be there."""
        return list(self._ask("multi_get", keys))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its value afterwards."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Store a value if the key has the expected one; the value afterwards."""
        return bytes(self._ask("compare_set", key, expected, value))

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return bool(self._ask("delete_key", key))

    def hurry(self, deadline: float) -> None:
        """Wait no longer than this from now on: nothing that matters hangs on the answers."""
        self._deadline = min(self._deadline, deadline)

    def close(self) -> None:
        """Let the thread end."""
        self._calls.put(None)

    def _ask(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - the store's own
        if self._silent:
            raise RuntimeError(self._silent)
        if self._direct:
            return getattr(self._store, name)(*arguments)
        call = _Call(lambda: getattr(self._store, name)(*arguments))
        self._calls.put(call)
        try:
            return call.result(self._deadline, name)
        except RuntimeError as error:
            if not call.done.is_set():
                self._silent = str(error)
            raise

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()
