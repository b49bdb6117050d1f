"""`fi-flags warmup` as a person runs it: whole processes, real ranks, real signals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fi_flags import launch
from fi_flags.cli import app
from fi_flags.errors import RanksError, WorkloadError

LIMIT_S = 90
SMALL = ["--tokens", "4"]
COMMAND = [sys.executable, "-m", "fi_flags", "warmup"]


def environment(tmp_path: Path, flag: str, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "VLLM_FLASHINFER_PERSISTENT_CACHE": flag,
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": str(tmp_path / "tables"),
        **more,
    }


def warmup(
    tmp_path: Path, flag: str, *options: str, command: list[str] = COMMAND, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *SMALL, *options],
        env=environment(tmp_path, flag, **more),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def descendants(parent: int) -> list[int]:
    direct = children(parent)
    return direct + [pid for child in direct for pid in descendants(child)]


def test_two_local_ranks_start_cold_then_warm(tmp_path: Path) -> None:
    cold = report(warmup(tmp_path, "on", "--json"))
    warm = report(warmup(tmp_path, "on", "--json"))
    assert (cold["outcome"], warm["outcome"]) == ("cold", "warm")
    assert set(cold) == {
        "outcome", "decision", "plan", "seconds", "saved_seconds", "table", "ranks",
    }  # fmt: skip
    assert set(warm["ranks"][1]) == {
        "rank", "host", "outcome", "seconds", "loaded", "tuned", "missing", "failed", "digest",
        "votes",
    }  # fmt: skip
    assert cold["table"]["digest"] == warm["table"]["digest"]
    assert cold["table"]["path"] == warm["table"]["path"]
    assert cold["saved_seconds"] is None
    assert isinstance(warm["saved_seconds"], float)
    assert [rank["tuned"] for rank in warm["ranks"]] == [0, 0]


@pytest.mark.parametrize("flag", ["on", "off"])
def test_one_rank_prints_decision_plan_outcome_and_a_row(flag: str, tmp_path: Path) -> None:
    for _ in range(2):
        done = warmup(tmp_path, flag, "--ranks", "1")
        assert done.returncode == 0, done.stderr
        for word in ("decision", "plan", "outcome", "seconds", "rank", "votes"):
            assert word in done.stdout
        events = [json.loads(line)["event"] for line in done.stderr.splitlines()]
        assert events == [
            "flashinfer_cache_decision", "flashinfer_autotune_plan", "flashinfer_autotune_outcome",
        ]  # fmt: skip
    assert "warm: served from the stored table" in done.stdout or flag == "off"


def test_under_torchrun_it_joins_the_ranks_it_is_given_and_one_prints(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*torchrun, "2", "-m", "fi_flags", "warmup"]
    cold = report(warmup(tmp_path, "on", "--json", command=command))
    warm = report(warmup(tmp_path, "on", "--json", command=command))
    assert (cold["outcome"], warm["outcome"]) == ("cold", "warm")
    assert len(warm["ranks"]) == 2


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_and_leaves_no_process_and_no_half_file(
    sent: signal.Signals, tmp_path: Path
) -> None:
    unmeasured = environment(tmp_path, "on")
    unmeasured.pop("COVERAGE_PROCESS_CONFIG", None)  # it has a SIGTERM handler, which may fail
    process = subprocess.Popen(
        [*COMMAND, "--tokens", "4096"],
        env=unmeasured,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:  # the plan is made: the ranks tune now
        if "flashinfer_autotune_plan" in line:
            break
    started = descendants(process.pid)
    assert len(started) >= 3, "a fork server and two ranks"
    os.killpg(process.pid, sent)  # as a terminal does: every process gets it
    rest = process.communicate(timeout=20)[1]
    assert process.returncode == 128 + sent
    assert "Traceback" not in rest
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert not list((tmp_path / "tables").rglob("*.json"))
    assert not list((tmp_path / "tables").rglob("*.tmp"))


def test_a_killed_rank_is_named_with_its_signal_and_exit_code_4(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--tokens", "4096", "--json"],
        env=environment(tmp_path, "on"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "flashinfer_autotune_plan" in line:
            break
    ranks = [pid for child in children(process.pid) for pid in children(child)]
    os.kill(max(ranks), signal.SIGKILL)
    out, _err = process.communicate(timeout=60)
    assert process.returncode == 4
    error = json.loads(out)["error"]
    assert error["type"] == "RanksError"
    assert "SIGKILL" in error["message"]
    assert len(error["fields"]["ranks"]) == 1


def test_on_a_terminal_a_person_sees_a_bar_and_no_json(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--ranks", "1", "--tokens", "16"],
        env=environment(tmp_path, "on", TERM="xterm", COLUMNS="160"),
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    seen = b""
    try:
        while chunk := os.read(leader, 65536):
            seen += chunk
    except OSError:  # the other end is closed: that is how a pty says so
        pass
    os.close(leader)
    assert process.wait(LIMIT_S) == 0
    text = seen.decode()
    assert "profiles" in text
    assert "fi_flags_cpu::" in text
    assert "[AutoTuner]" not in text
    assert '"event"' not in text
    assert "cold: tuned from the beginning" in text
    assert "kept for the next start" in text


def call(*options: str) -> Any:
    return CliRunner().invoke(app, ["warmup", *options])


def test_cuda_without_a_gpu_exits_6_and_says_what_to_do() -> None:
    result = call("--device", "cuda", "--json")
    assert result.exit_code == 6
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "DeviceError"
    assert error["fields"] == {"needed": "cuda", "found": "no GPU"}


def test_a_bad_flag_exits_2_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FLASHINFER_PERSISTENT_CACHE", "maybe")
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("a rank was started"))
    result = call()
    assert result.exit_code == 2
    assert "maybe" in result.stderr


def test_ranks_that_the_decoder_does_not_divide_by_exit_2() -> None:
    result = call("--ranks", "3")
    assert result.exit_code == 2
    assert "choose 1, 2, 4 or 8" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(WorkloadError("the workload failed: boom"), 5), (RanksError("rank 1 was lost"), 4)],
)
def test_a_ranks_error_becomes_the_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_rank", lambda *_, **__: {"error": error})
    result = call("--ranks", "1")
    assert result.exit_code == code
    assert str(error) in result.stderr


def test_only_rank_0_prints_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_rank", lambda *_, **__: {"report": {}})
    for rank, expected in (("0", {}), ("1", None)):
        environ = {"TORCHELASTIC_RUN_ID": "x", "RANK": rank}
        assert launch.launch(launch.Job(), 2, environ) == expected


def test_a_rank_that_never_comes_to_torchrun_is_named_within_the_join_deadline(
    tmp_path: Path,
) -> None:
    script = tmp_path / "rank.sh"
    script.write_text(
        f'[ "$RANK" = 1 ] && exec sleep 60\nexec {sys.executable} -m fi_flags warmup --tokens 4\n'
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "--no-python", "sh", str(script)],
        env=environment(tmp_path, "on", VLLM_FLASHINFER_AUTOTUNE_JOIN_S="2"),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode != 0
    assert "rank 1 did not join in phase join: not heard within 2 s" in done.stderr


@pytest.mark.parametrize("wrong", [["--tokens", "abc"], ["--bogus"], ["--ranks", "0"]])
def test_wrong_usage_is_a_document_under_json(wrong: list[str], tmp_path: Path) -> None:
    done = warmup(tmp_path, "off", *wrong, "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == 2
    assert wrong[0] in error["message"]
    assert "Traceback" not in done.stderr


def test_a_trace_of_both_ranks_is_written_where_it_was_asked(tmp_path: Path) -> None:
    done = report(warmup(tmp_path, "on", "--json", "--trace", str(tmp_path / "trace.json")))
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    tuned = [event["pid"] for event in events if event.get("cat") == "profile"]
    assert [tuned.count(rank) for rank in (0, 1)] == [rank["tuned"] for rank in done["ranks"]]


def test_a_trace_in_a_directory_that_is_not_there_is_refused_before_any_rank_starts(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "nowhere" / "trace.json"
    done = CliRunner().invoke(app, ["warmup", "--trace", str(trace)])
    assert done.exit_code == 2
    assert f"--trace {trace}: there is no directory {trace.parent}" in done.stderr
