"""Tables on disk: where they live, and that a reader sees the old file or the new one, whole."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from fi_flags import store as store_module
from fi_flags.errors import TableError
from fi_flags.store import Store, environment_name, workload_name
from fi_flags.table import MAX_BYTES, Entries, Status, Table

STAMPS = {"flashinfer_version": "0.7.4", "gpu": "NVIDIA H200"}


def key(op: str, runner: str = "Alpha") -> str:
    return f"({op!r}, {runner!r}, (4, 8), ())"


def table(*ops: str, tactic: int = 1, stamps: dict[str, Any] = STAMPS) -> Table:
    return Table({key(op): ["Alpha", tactic] for op in ops or ("gemm",)}, stamps)


@pytest.fixture
def place(tmp_path: Path) -> Store:
    return Store.at(tmp_path / "tables", "env", "work", "world")


def entries_of(place: Store) -> Entries:
    verdict = place.read(STAMPS)
    assert verdict.status is Status.OK, verdict
    assert verdict.table is not None
    return verdict.table.entries


def names(place: Store) -> set[str]:
    """What lies in the directory, but for the lock."""
    return {path.name for path in place.path.parent.iterdir()} - {"world.lock"}


def set_aside(place: Store) -> list[Path]:
    return sorted(place.path.parent.glob("world.json.quarantined-*"))


# -- names ----------------------------------------------------------------------------------


def test_a_table_lies_under_version_environment_workload_and_group(tmp_path: Path) -> None:
    place = Store.at(tmp_path, environment_name(STAMPS), workload_name("toy", {"a": 1}), "dp0_pp1")
    version, environment, workload, file = place.path.relative_to(tmp_path).parts
    assert (version, file) == ("v1", "dp0_pp1.json")
    assert environment.startswith("0.7.4-NVIDIA_H200-")
    assert workload.startswith("toy-")
    assert not list(tmp_path.glob("*/"))[1:]  # the empty working directory is there already


def test_names_depend_on_every_stamp_and_every_part_of_an_identity() -> None:
    environments = [STAMPS, {**STAMPS, "cudnn": "1"}, {**STAMPS, "gpu": "NVIDIA_H200"}, {}]
    assert len({environment_name(stamps) for stamps in environments}) == len(environments)
    assert environment_name(STAMPS) == environment_name(dict(reversed(STAMPS.items())))
    identities: list[dict[str, Any]] = [{}, {"a": 1}, {"a": "1"}, {"a": [1]}, {"b": 1}]
    assert len({workload_name("toy", identity) for identity in identities}) == len(identities)
    assert workload_name("toy", {"path": Path("x")}) == workload_name("toy", {"path": "x"})


@pytest.mark.parametrize(
    "gpu",
    ["", ".", "..", "../../etc", "/", "a/b", "NVIDIA H200 (MIG 1g.18gb)", "x" * 1000, "GPÜ\n\0"],
)
def test_an_odd_gpu_name_is_one_plain_directory_name(gpu: str, tmp_path: Path) -> None:
    stamps = {**STAMPS, "gpu": gpu}
    name = environment_name(stamps)
    assert name.isascii()
    assert not set(name) & set("/\\ \n\0")
    assert not name.startswith(".")
    assert len(name) < 120
    place = Store.at(tmp_path / "tables", name, "work", "world")
    assert place.publish(table(stamps=stamps))
    assert place.path.parent.parent.parent == tmp_path / "tables" / "v1"
    assert place.read(stamps).status is Status.OK


def test_groups_whose_names_are_cut_or_cleaned_have_files_of_their_own(tmp_path: Path) -> None:
    groups = ["a-b", "a_b", "a/b", "a b", "x" * 100, "x" * 101, "..", ".", ""]
    files = {Store.at(tmp_path, "env", "work", group).path for group in groups}
    assert len(files) == len(groups)
    assert {file.parent for file in files} == {tmp_path / "v1" / "env" / "work"}
    assert max(len(file.name) for file in files) < 100


# -- reading and publishing -----------------------------------------------------------------


def test_what_was_published_is_read_again(place: Store) -> None:
    assert place.read(STAMPS).status is Status.ABSENT
    assert place.publish(table("gemm", "moe"))
    assert entries_of(place) == table("gemm", "moe").entries
    assert names(place) == {"world.json"}


def test_reading_makes_nothing(place: Store, tmp_path: Path) -> None:
    place.read(STAMPS)
    assert not (tmp_path / "tables").exists()


def test_a_table_is_readable_by_every_user_whatever_the_umask(place: Store) -> None:
    before = os.umask(0o077)
    try:
        place.publish(table())
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.path.stat().st_mode) == 0o644


def test_the_same_entries_are_not_written_again(place: Store) -> None:
    place.publish(table())
    before = place.path.stat()
    assert not place.publish(table())
    assert not place.publish(Table(table().entries, STAMPS, {"written": "later"}))
    assert place.path.stat().st_ino == before.st_ino


def test_other_entries_of_a_sound_table_are_kept_and_new_ones_win(place: Store) -> None:
    place.publish(table("gemm", "skipped", tactic=1))
    assert place.publish(table("gemm", "new", tactic=2))
    assert entries_of(place) == {
        key("gemm"): ["Alpha", 2],
        key("new"): ["Alpha", 2],
        key("skipped"): ["Alpha", 1],
    }


def test_a_rival_of_another_runner_gives_way(place: Store) -> None:
    place.publish(table("gemm"))
    rival = {key("gemm", "Beta"): ["Beta", 3]}
    assert place.publish(Table(rival, STAMPS))
    assert entries_of(place) == rival


def test_a_part_of_what_is_there_is_not_written(place: Store) -> None:
    place.publish(table("gemm", "moe"))
    assert not place.publish(table("moe"))
    assert entries_of(place).keys() == {key("gemm"), key("moe")}


def test_a_table_of_another_environment_is_left_alone(place: Store) -> None:
    place.publish(table(stamps={**STAMPS, "gpu": "NVIDIA B200"}))
    before = place.path.read_bytes(), place.path.stat().st_ino
    with pytest.raises(TableError, match="gpu is NVIDIA B200 there, NVIDIA H200 here") as caught:
        place.publish(table())
    assert caught.value.fields == {"path": str(place.path), "status": "foreign"}
    assert (place.path.read_bytes(), place.path.stat().st_ino) == before
    assert names(place) == {"world.json"}


@pytest.mark.parametrize(
    ("junk", "status"),
    [
        (b"", "suspect"),
        (b"{", "suspect"),
        (b"\0" * 100, "suspect"),
        (table().render()[:-30], "suspect"),
        (table(stamps={**STAMPS, "gpu": "unknown"}).render(), "suspect"),
        (Table({}, STAMPS).render(), "empty"),
    ],
)
def test_a_table_that_cannot_be_used_is_moved_aside_as_it_is(
    junk: bytes, status: str, place: Store
) -> None:
    place.path.parent.mkdir(parents=True)
    place.path.write_bytes(junk)
    assert place.publish(table())
    assert entries_of(place) == table().entries
    (aside,) = set_aside(place)
    assert aside.read_bytes() == junk
    assert aside.name.endswith(f"-{status}")


def test_a_second_bad_table_does_not_replace_the_first(place: Store) -> None:
    place.publish(table())
    for junk in (b"one", b"two"):
        place.path.write_bytes(junk)
        assert place.publish(table())
    assert [path.read_bytes() for path in set_aside(place)] == [b"one", b"two"]


def test_a_file_that_is_too_large_is_unreadable_and_moved_aside(place: Store) -> None:
    place.path.parent.mkdir(parents=True)
    with place.path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    verdict = place.read(STAMPS)
    assert verdict.status is Status.UNREADABLE
    assert f"more than {MAX_BYTES}" in verdict.why
    assert place.publish(table())
    assert [path.stat().st_size for path in set_aside(place)] == [MAX_BYTES + 1]


# -- what is no file ------------------------------------------------------------------------


def put(kind: str, path: Path) -> None:
    """Put something that is no regular file in a table's place."""
    path.parent.mkdir(parents=True)
    if kind == "directory":
        path.mkdir()
        (path / "kept").write_text("kept")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))  # such an address is short
    elif kind == "device":
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("making a device needs privileges")
    else:
        target = path.parent / "target.json"
        if kind == "link":
            target.write_bytes(table("elsewhere").render())
        path.symlink_to("/dev/zero" if kind == "link to device" else target)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


KINDS = ["directory", "fifo", "socket", "device", "link", "dangling link", "link to device"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_neither_followed_nor_waited_for_and_moved_aside(
    kind: str, place: Store
) -> None:
    put(kind, place.path)
    before = place.path.lstat()
    with within(5):
        verdict = place.read(STAMPS)
        assert verdict.status is Status.UNREADABLE
        assert verdict.why
        assert place.publish(table())
    assert entries_of(place) == table().entries
    assert stat.S_ISREG(place.path.lstat().st_mode)
    (aside,) = set_aside(place)
    assert (aside.lstat().st_ino, aside.lstat().st_mode) == (before.st_ino, before.st_mode)
    if kind == "link":
        assert (place.path.parent / "target.json").read_bytes() == table("elsewhere").render()


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_reading_what_is_no_file_leaves_no_descriptor_open(kind: str, place: Store) -> None:
    put(kind, place.path)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    for _ in range(10):
        place.read(STAMPS)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_directory_under_a_file_is_not_writable_and_publishing_raises(tmp_path: Path) -> None:
    (tmp_path / "tables").write_text("a file")
    place = Store.at(tmp_path / "tables", "env", "work", "world")
    assert place.read(STAMPS).status in (Status.ABSENT, Status.UNREADABLE)
    assert not place.writable()
    with pytest.raises(OSError, match="tables"):
        place.publish(table())
    assert (tmp_path / "tables").read_text() == "a file"


def test_writable_makes_nothing(place: Store, tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    assert place.writable()
    assert set(tmp_path.rglob("*")) == before
    place.publish(table())
    assert place.writable()


def test_a_directory_that_refuses_writing_is_not_writable(
    place: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def access(path: Path, mode: int) -> bool:
        asked.append((Path(path), mode))
        return False

    monkeypatch.setattr(os, "access", access)
    assert not place.writable()
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]


def test_a_dangling_link_in_the_way_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "tables").symlink_to(tmp_path / "nowhere")
    assert not Store.at(tmp_path / "tables", "env", "work", "world").writable()
    assert not (tmp_path / "nowhere").exists()


# -- disks that fail ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EROFS, errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("before", ["old", "none"])
def test_a_failing_disk_raises_and_leaves_the_old_file_and_nothing_else(
    number: int, call: str, before: str, place: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    if before == "old":
        place.publish(table("gemm"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match=re_of(number)):
            place.publish(table("moe"))
    assert names(place) == ({"world.json"} if before == "old" else set())
    if before == "old":
        assert entries_of(place) == table("gemm").entries
    assert place.publish(table("moe"))


def re_of(number: int) -> str:
    return rf"\[Errno {number}\]"


def test_a_full_disk_while_writing_leaves_the_old_file_and_nothing_else(place: Store) -> None:
    place.publish(table("gemm"))
    code = f"""
        import resource, signal, sys
        from pathlib import Path
        from fi_flags.store import Store
        from fi_flags.table import Table
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            Store(Path({str(place.path)!r})).publish(
                Table({{str(n): ["Alpha", n] for n in range(1000)}}, {STAMPS!r})
            )
        except OSError as error:
            sys.exit(error.errno)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=60)
    assert done.returncode == errno.EFBIG
    assert entries_of(place) == table("gemm").entries
    assert names(place) == {"world.json"}


def test_an_interrupt_while_writing_leaves_nothing(
    place: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        place.publish(table())
    assert names(place) == set()


def test_a_directory_that_cannot_be_synced_does_not_undo_a_publication(
    place: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "not readable")
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert place.publish(table())
    assert entries_of(place) == table().entries


def test_the_directory_is_synced_after_the_rename(
    place: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[bool, bool]] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append((is_directory, place.path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    place.publish(table())
    assert synced == [(False, False), (True, True)]


def test_a_writer_that_dies_before_the_rename_leaves_the_old_file(place: Store) -> None:
    place.publish(table("gemm"))
    before = place.path.read_bytes()
    code = f"""
        import os
        from pathlib import Path
        from fi_flags.store import Store
        from fi_flags.table import Table
        os.replace = lambda *_: os._exit(9)
        Store(Path({str(place.path)!r})).publish(
            Table({{"('moe', 'Alpha', (4, 8), ())": ["Alpha", 1]}}, {STAMPS!r})
        )
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=60)
    assert done.returncode == 9
    assert place.path.read_bytes() == before
    # Its lock died with it, and what it left is neither read nor in the way.
    with within(5):
        assert place.publish(table("moe"))
    assert entries_of(place).keys() == {key("gemm"), key("moe")}


# -- several at once ------------------------------------------------------------------------


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_eight_writers_and_every_read_is_whole(
    locks: str, place: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if locks == "no locks":
        monkeypatch.setattr(FileLock, "acquire", unsupported)
    place.publish(table("first"))
    with ThreadPoolExecutor(10) as pool:

        def write(number: int) -> None:
            for turn in range(5):
                place.publish(table(f"op{number}", *(f"op{n}/{turn}" for n in range(30))))

        writers = [pool.submit(write, number) for number in range(8)]

        def read() -> set[Status]:
            seen = {place.read(STAMPS).status}
            while not all(writer.done() for writer in writers):
                seen.add(place.read(STAMPS).status)
            return seen

        readers = [pool.submit(read) for _ in range(2)]
        for writer in writers:
            writer.result(timeout=60)
        assert [reader.result(timeout=60) for reader in readers] == [{Status.OK}] * 2
    assert names(place) == {"world.json"}
    if locks == "locks":
        assert entries_of(place).keys() >= {key("first"), *(key(f"op{n}") for n in range(8))}


def unsupported(*_: object, **__: object) -> None:
    raise NotImplementedError("this file system has no locks")


def test_writers_in_other_processes_lose_no_entry(place: Store) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from fi_flags.store import Store
        from fi_flags.table import Table
        for turn in range(10):
            name = f"('op{{sys.argv[1]}}-{{turn}}', 'Alpha', (4, 8), ())"
            Store(Path({str(place.path)!r})).publish(Table({{name: ["Alpha", 1]}}, {STAMPS!r}))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    writers = [subprocess.Popen([*command, str(number)]) for number in range(3)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        seen.add(place.read(STAMPS).status)
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert seen <= {Status.ABSENT, Status.OK}
    assert entries_of(place).keys() == {
        key(f"op{n}-{turn}") for n in range(3) for turn in range(10)
    }


def test_a_held_lock_delays_publication_and_does_not_stop_it(
    place: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.path.parent.mkdir(parents=True)
    code = f"""
        import sys
        from filelock import FileLock
        with FileLock({str(place.path.with_suffix(".lock"))!r}):
            print("held", flush=True)
            sys.stdin.read()
    """
    monkeypatch.setattr(store_module, "_LOCK_S", 0.3)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        began = time.monotonic()
        assert place.publish(table())
        assert 0.3 <= time.monotonic() - began < 5
        holder.communicate("")
    assert holder.returncode == 0
    assert entries_of(place) == table().entries


def test_a_lock_that_is_released_lets_the_entries_be_merged(place: Store) -> None:
    place.publish(table("gemm"))
    lock = FileLock(place.path.with_suffix(".lock"))
    lock.acquire()
    writer = threading.Thread(target=place.publish, args=(table("moe"),))
    writer.start()
    time.sleep(0.2)
    assert entries_of(place) == table("gemm").entries
    lock.release()
    writer.join(10)
    assert entries_of(place) == table("gemm", "moe").entries


@pytest.mark.parametrize(
    "error", [NotImplementedError("no locks"), OSError(errno.ENOLCK, "no locks available")]
)
def test_a_file_system_without_locks_is_published_to(
    error: Exception, place: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(FileLock, "acquire", fail)
    assert place.publish(table())
    assert entries_of(place) == table().entries


def test_a_lock_that_cannot_be_opened_does_not_stop_publication(place: Store) -> None:
    place.path.with_suffix(".lock").mkdir(parents=True)  # as one of another user cannot be
    assert place.publish(table())
    assert entries_of(place) == table().entries


def test_a_bad_table_that_someone_else_moved_aside_does_not_stop_publication(
    place: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.path.parent.mkdir(parents=True)
    place.path.write_bytes(b"junk")
    read = Store.read

    def and_lose(self: Store, stamps: dict[str, str]) -> Any:
        verdict = read(self, stamps)
        self.path.unlink()
        return verdict

    monkeypatch.setattr(Store, "read", and_lose)
    assert place.publish(table())


def test_what_a_killed_writer_left_behind_is_swept_by_the_next(place: Store) -> None:
    place.publish(table())
    leftover = place.path.with_name(f".{place.path.stem}.1.abc.tmp")
    leftover.write_text("half a ta")
    other = place.path.with_name(".another.1.abc.tmp")
    other.write_text("not ours")
    place.publish(table("new"))
    assert other.exists()
    assert not leftover.exists()


def test_a_mount_that_knows_no_modes_still_keeps_the_table(
    place: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no modes here")

    monkeypatch.setattr("os.fchmod", refuse)
    assert place.publish(table())
    assert entries_of(place) == table().entries
