"""Tables that come from elsewhere: bundles, and the per-rank files of vLLM and SGLang."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fi_flags import bundle, imports, logs
from fi_flags.bundle import pack, unpack
from fi_flags.cli import app
from fi_flags.ranks import Ranks
from fi_flags.report import Outcome, Report
from fi_flags.settings import FlashInferSettings
from fi_flags.shelf import tables
from fi_flags.store import Store
from fi_flags.table import MAX_BYTES, Table, parse
from fi_flags.warmup import warm_up
from tests.toy import Crowd, Toy, fresh_tuner, own_tuners, this_thread, tuner_of_this_thread

REAL = sorted((Path(__file__).parent / "data").glob("*.json"))
WHERE = "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"


def run(place: Path, *arguments: object) -> Result:
    words = ["cache", *map(str, arguments)]
    return CliRunner().invoke(app, words, env={WHERE: str(place), "COLUMNS": "400"})


def shown(place: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    result = run(place, *arguments, "--json")
    assert result.exit_code == code, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def actions(document: dict[str, Any]) -> list[str]:
    return [one["action"] for one in document["tables"]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A cache directory with the real tables of an H200, each as our own starts would write it."""
    from fi_flags.store import environment_name  # noqa: PLC0415

    cache_dir = tmp_path / "cache"
    for path in REAL:
        table = parse(path.read_bytes())
        store = Store.at(cache_dir, environment_name(table.stamps), "llama-def", "world")
        store.publish(Table(table.entries, table.stamps, {"cold_seconds": 170.25}))
    return cache_dir


@pytest.fixture
def packed(place: Path, tmp_path: Path) -> Path:
    shown(place, "export", tmp_path / "tables.zip")
    return tmp_path / "tables.zip"


# -- bundles --------------------------------------------------------------------------------


def test_what_is_exported_and_imported_elsewhere_is_byte_for_byte_the_same(
    place: Path, packed: Path, tmp_path: Path
) -> None:
    done = shown(tmp_path / "other", "import", packed)
    assert actions(done) == ["taken", "taken"]
    names = sorted(path.relative_to(place) for path in place.rglob("*.json"))
    assert names == sorted(
        p.relative_to(tmp_path / "other") for p in (tmp_path / "other").rglob("*.json")
    )
    for name in names:
        assert (place / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert shown(tmp_path / "other", "verify")


def test_a_bundle_is_a_plain_zip_with_a_manifest_and_the_same_tables_give_the_same_bytes(
    place: Path, packed: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(packed) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        for one in manifest["tables"]:
            data = archive.read(one["path"])
            assert hashlib.sha256(data).hexdigest() == one["sha256"]
            assert (len(data), len(parse(data).entries)) == (one["bytes"], one["entries"])
            assert one["stamps"]["gpu"] == "NVIDIA H200"
    shown(place, "export", tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == packed.read_bytes()


def test_importing_twice_changes_nothing(packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shown(other, "import", packed)
    before = {path: path.stat().st_mtime_ns for path in other.rglob("*")}
    assert actions(shown(other, "import", packed)) == ["there", "there"]
    assert {path: path.stat().st_mtime_ns for path in other.rglob("*")} == before


def test_another_table_is_never_overwritten_without_force_and_set_aside_with_it(
    place: Path, packed: Path
) -> None:
    path = min(place.rglob("*.json"))
    table = parse(path.read_bytes())
    key = next(iter(table.entries))
    other = Table({key: table.entries[key]}, table.stamps, {})
    path.write_bytes(other.render())
    refused = shown(place, "import", packed, code=3)
    assert actions(refused) == ["refused", "there"]
    assert (
        f"another table is there (ok, 1 entries): {path}; see --force"
        == refused["tables"][0]["why"]
    )
    assert path.read_bytes() == other.render()
    forced = shown(place, "import", packed, "--force")
    assert actions(forced) == ["taken", "there"]
    assert Path(forced["tables"][0]["moved_to"]).read_bytes() == other.render()
    assert parse(path.read_bytes()).entries == table.entries


def test_tables_can_be_chosen_and_unsound_ones_are_left_out(place: Path, tmp_path: Path) -> None:
    first, second = sorted(place.rglob("*.json"))
    done = shown(place, "export", tmp_path / "one.zip", first)
    assert len(done["tables"]) == 1
    second.write_text("{")
    done = shown(place, "export", tmp_path / "all.zip")
    assert (len(done["tables"]), [one["path"] for one in done["left_out"]]) == (1, [str(second)])
    text = run(place, "export", tmp_path / "two.zip").stdout
    assert f"left out: {second}: " in text


def test_an_unsound_table_that_was_named_is_refused_and_nothing_is_written(
    place: Path, tmp_path: Path
) -> None:
    first, second = sorted(place.rglob("*.json"))
    second.write_text("{")
    result = run(place, "export", tmp_path / "no.zip", first, second)
    assert result.exit_code == 3
    assert str(second) in result.stderr
    assert not (tmp_path / "no.zip").exists()


def test_nothing_to_export_is_said(tmp_path: Path) -> None:
    result = run(tmp_path / "empty", "export", tmp_path / "no.zip")
    assert (result.exit_code, "no sound table under" in result.stderr) == (3, True)


def test_a_file_that_is_there_is_not_replaced_without_force(place: Path, packed: Path) -> None:
    before = packed.read_bytes()
    result = run(place, "export", packed)
    assert (result.exit_code, packed.read_bytes()) == (2, before)
    assert "is there already" in result.stderr
    assert run(place, "export", packed, "--force").exit_code == 0


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(
    place: Path, tmp_path: Path
) -> None:
    result = run(place, "export", tmp_path / "nowhere" / "t.zip")
    assert (result.exit_code, "nowhere/t.zip cannot be written" in result.stderr) == (3, True)
    (tmp_path / "file").write_text("")
    shown(place, "export", tmp_path / "t.zip")
    refused = shown(tmp_path / "file" / "cache", "import", tmp_path / "t.zip", code=3)
    assert actions(refused) == ["refused", "refused"]
    assert "Not a directory" in refused["tables"][0]["why"]


def rezip(packed: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    with zipfile.ZipFile(packed) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return packed


def relist(members: dict[str, bytes], change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads(members["manifest.json"])
    change(manifest)
    members["manifest.json"] = json.dumps(manifest).encode()


def test_a_table_that_was_changed_is_refused_and_the_other_taken(
    packed: Path, tmp_path: Path
) -> None:
    def change(members: dict[str, bytes]) -> None:
        name = min(name for name in members if name != "manifest.json")
        members[name] = members[name].replace(b"CudnnBf16GemmRunner", b"CudnnBf17GemmRunner")

    done = shown(tmp_path / "other", "import", rezip(packed, change), code=3)
    assert actions(done) == ["refused", "taken"]
    assert done["tables"][0]["why"] == "it does not match its checksum"


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/world.json",
        "/etc/world.json",
        "v1/../../world.json",
        "v1/env/.hidden/world.json",
        "v1/elsewhere/llama-def/world.json",
        "v1/e/l/w/deep.json",
        "world.json",
        "v1/a/b/c\\d.json",
    ],
)
def test_a_place_outside_its_environment_is_refused(
    path: str, packed: Path, tmp_path: Path
) -> None:
    def change(members: dict[str, bytes]) -> None:
        name = min(name for name in members if name != "manifest.json")
        members[path] = members.pop(name)
        relist(members, lambda manifest: manifest["tables"][0].update(path=path))

    done = shown(tmp_path / "a" / "b" / "other", "import", rezip(packed, change), code=3)
    assert actions(done) == ["refused", "taken"]
    written = [p for p in tmp_path.rglob("*.json") if "cache" not in p.parts]
    assert len(written) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.pop("manifest.json"), "there is no manifest.json in it"),
        (lambda m: m.update({"manifest.json": b"{}"}), "its manifest.json is not one of ours"),
        (
            lambda m: m.update({"manifest.json": b"[" * 9999}),
            "its manifest.json is not one of ours",
        ),
        (lambda m: relist(m, lambda d: d.update(schema=2)), "has schema 2, not 1"),
        (lambda m: relist(m, lambda d: d.update(schema=True)), "has schema True, not 1"),
        (lambda m: relist(m, lambda d: d["tables"].append({"path": 1, "sha256": ""})), "not text"),
        (
            lambda m: relist(m, lambda d: d["tables"].append({"path": "x", "sha256": "y"})),
            "there is no x in it",
        ),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(
    change: Callable[[dict[str, bytes]], object], why: str, packed: Path, tmp_path: Path
) -> None:
    done = shown(tmp_path / "other", "import", rezip(packed, change), code=3)
    assert any(why in one["why"] for one in done["tables"]), done


def test_a_member_that_unpacks_to_more_than_a_table_may_have_is_refused(
    packed: Path, tmp_path: Path
) -> None:
    bomb = b" " * (MAX_BYTES + 1)

    def change(members: dict[str, bytes]) -> None:
        name = min(name for name in members if name != "manifest.json")
        members[name] = bomb

    done = shown(tmp_path / "other", "import", rezip(packed, change), code=3)
    assert f"has more than {MAX_BYTES} bytes" in done["tables"][0]["why"]


def test_a_damaged_bundle_is_refused_and_never_raises(place: Path) -> None:
    tables_ = {"v1/e/w/g.json": min(place.rglob("*.json")).read_bytes()}
    whole = pack(tables_)
    rng = random.Random(5)  # noqa: S311 - not for secrets
    for cut in [*range(200), *rng.sample(range(len(whole)), 300)]:
        with pytest.raises(ValueError, match=r"."):
            unpack(whole[:cut])
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            found = unpack(bytes(data))
        except ValueError:
            continue
        for content, verdict in found.values():
            assert verdict.table is None or content in tables_.values()


def test_a_bundle_with_too_many_tables_is_refused(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_MOST_TABLES", 1)
    with pytest.raises(ValueError, match="lists 2 tables, more than 1"):
        unpack(packed.read_bytes())


def test_an_encrypted_or_unknown_archive_is_refused() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("manifest.json", "{}")
    data = bytearray(out.getvalue())
    for offset in (6, data.index(b"PK\x01\x02") + 8):
        data[offset] |= 1  # the flag that says a member is encrypted
    with pytest.raises(ValueError, match="not a bundle"):
        unpack(bytes(data))


# -- per-rank files -------------------------------------------------------------------------


@pytest.fixture
def tuners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def cost(rank: int, name: str, tactic: Any) -> float:
        return abs(float(tactic) - (rank + 1) % 3) + (name == "Beta")

    with own_tuners(monkeypatch, cost):
        yield


def rank_files(
    where: Path,
    name: str = "autotune_configs_dp0_rank{}.json",
    ops: tuple[str, ...] = ("gemm", "moe"),
) -> list[Path]:
    """Per-rank files as vLLM keeps them: each rank tunes alone and calls ``save_configs``."""
    from flashinfer.autotuner import autotune  # noqa: PLC0415

    where.mkdir(parents=True, exist_ok=True)

    def work(ranks: Ranks) -> Path:
        fresh_tuner()
        with autotune(tune_mode=True):
            Toy(ops=ops).run()
        path = where / name.format(ranks.rank)
        tuner_of_this_thread().save_configs(str(path))
        return path

    return Crowd(2).all(work)


def start(
    tmp_path: Path, world: int = 2, toy: Callable[[int], Toy] = lambda _: Toy(), **given: Any
) -> tuple[list[Report], list[dict[Any, Any]]]:
    def work(ranks: Ranks) -> tuple[Report, dict[Any, Any]]:
        fresh_tuner()
        mine = toy(ranks.rank)
        asked: dict[str, Any] = {"persistent_cache": "on"} | given
        settings = FlashInferSettings(autotune_cache_dir=tmp_path / "tables", **asked)
        return warm_up(mine, ranks=ranks, settings=settings), mine.serving()

    done = Crowd(world).all(work)
    return [report for report, _ in done], [served for _, served in done]


def own(tmp_path: Path) -> list[Path]:
    return [p for p in (tmp_path / "tables").rglob("*.json") if p.parent.name != "imported"]


@pytest.mark.parametrize(
    "name", ["autotune_configs_dp0_rank{}.json", "rank_tp{}_pp0_dp0.json", "whatever{}.json"]
)
@pytest.mark.usefixtures("tuners")
def test_per_rank_files_wait_and_the_first_start_that_they_fit_adopts_them(
    name: str, tmp_path: Path
) -> None:
    files = rank_files(tmp_path / "theirs" / "d1", name)
    done = shown(tmp_path / "tables", "import", *files)
    assert actions(done) == ["taken", "taken"]
    assert len({one["path"] for one in done["tables"]}) == 1
    assert not own(tmp_path)

    reports, served = start(tmp_path)
    assert {report.outcome for report in reports} == {Outcome.WARM}
    assert all(rank.loaded == 6 and rank.tuned == 0 for rank in reports[0].ranks)
    assert "table of 6 entries, imported: " in reports[0].plan.why
    assert {tactic for calls in served for _, tactic in calls.values()} == {1}, "rank 0's file wins"
    (path,) = own(tmp_path)
    about = parse(path.read_bytes()).about
    assert about["adopted"] == [Path(done["tables"][0]["path"]).name]

    again, _ = start(tmp_path)
    assert {report.outcome for report in again} == {Outcome.WARM}
    assert "imported" not in again[0].plan.why


@pytest.mark.usefixtures("tuners")
def test_a_directory_stands_for_the_files_in_it_and_each_model_is_a_set(tmp_path: Path) -> None:
    rank_files(tmp_path / "theirs" / "model1", ops=("gemm",))
    rank_files(tmp_path / "theirs" / "model2", "rank_tp{}_pp0_dp0.json", ops=("moe",))
    (tmp_path / "theirs" / "notes.json").write_text("{}")
    done = shown(tmp_path / "tables", "import", tmp_path / "theirs")
    assert actions(done) == ["taken"] * 4
    assert len({one["path"] for one in done["tables"]}) == 2
    reports, _ = start(tmp_path)
    assert {report.outcome for report in reports} == {Outcome.WARM}
    assert actions(shown(tmp_path / "tables", "import", tmp_path / "theirs")) == ["there"] * 4


@pytest.mark.usefixtures("tuners")
def test_what_the_files_lack_is_tuned_and_what_is_not_the_workloads_is_not_adopted(
    tmp_path: Path,
) -> None:
    files = rank_files(tmp_path / "theirs", ops=("gemm", "other"))
    shown(tmp_path / "tables", "import", *files)
    reports, _ = start(tmp_path)
    assert {report.outcome for report in reports} == {Outcome.TOPPED_UP}
    (path,) = own(tmp_path)
    assert "other" not in path.read_text()
    assert len(parse(path.read_bytes()).entries) == 6


@pytest.mark.usefixtures("tuners")
def test_a_start_that_hits_nothing_of_them_is_cold(tmp_path: Path) -> None:
    shown(tmp_path / "tables", "import", *rank_files(tmp_path / "theirs", ops=("other",)))
    reports, _ = start(tmp_path)
    assert {report.outcome for report in reports} == {Outcome.COLD}
    (path,) = own(tmp_path)
    about = parse(path.read_bytes()).about
    assert "adopted" not in about
    assert about["cold_seconds"] > 0


@pytest.mark.usefixtures("tuners")
def test_read_only_serves_imported_tables_and_writes_nothing(tmp_path: Path) -> None:
    shown(tmp_path / "tables", "import", *rank_files(tmp_path / "theirs"))
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    reports, _ = start(tmp_path, autotune_cache_access="ro")
    assert {report.outcome for report in reports} == {Outcome.WARM}
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("tuners")
def test_read_only_that_hits_nothing_of_them_is_untuned(tmp_path: Path) -> None:
    shown(tmp_path / "tables", "import", *rank_files(tmp_path / "theirs", ops=("other",)))
    reports, _ = start(tmp_path, autotune_cache_access="ro")
    assert {report.outcome for report in reports} == {Outcome.UNTUNED}


@pytest.mark.usefixtures("tuners")
def test_write_only_does_not_read_them(tmp_path: Path) -> None:
    shown(tmp_path / "tables", "import", *rank_files(tmp_path / "theirs"))
    reports, _ = start(tmp_path, autotune_cache_access="wo")
    assert {report.outcome for report in reports} == {Outcome.COLD}


@pytest.mark.usefixtures("tuners")
def test_shadow_compares_them_and_keeps_its_own(tmp_path: Path) -> None:
    shown(tmp_path / "tables", "import", *rank_files(tmp_path / "theirs"))
    reports, _ = start(tmp_path, persistent_cache="shadow")
    found = reports[0].shadow
    assert found is not None
    assert (found.equal, found.different) == (6, 6)  # rank 1 tunes otherwise
    assert len(own(tmp_path)) == 1


@pytest.mark.usefixtures("tuners")
def test_own_tables_win_over_imported_ones_and_do_not_take_them_up(tmp_path: Path) -> None:
    start(tmp_path)
    (path,) = own(tmp_path)
    before = path.read_bytes()
    shown(tmp_path / "tables", "import", *rank_files(tmp_path / "theirs", ops=("gemm", "other")))
    reports, _ = start(tmp_path)
    assert {report.outcome for report in reports} == {Outcome.WARM}
    assert path.read_bytes() == before


@pytest.mark.usefixtures("tuners")
def test_an_imported_table_that_fails_its_first_run_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = shown(tmp_path / "tables", "import", *rank_files(tmp_path / "theirs"))
    waiting = Path(done["tables"][0]["path"])

    class Picky(Toy):
        def run(self) -> None:
            super().run()
            if getattr(this_thread, "loaded", True):
                this_thread.loaded = False
                raise RuntimeError("invalid tactic")

    def toy(_rank: int) -> Toy:
        this_thread.loaded = True
        return Picky()

    reports, _ = start(tmp_path, world=1, toy=toy)
    assert {report.outcome for report in reports} == {Outcome.RETUNED}
    assert not waiting.exists()
    (aside,) = Store(waiting).quarantined()
    moved = [r.__dict__["fi_flags"] for r in caplog.records if r.__dict__.get("fi_flags")]
    assert str(aside) in [one.get("moved_to") for one in moved if one["event"] == logs.QUARANTINED]
    assert not list(tmp_path.rglob("*.trial"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda _: b"", "Expecting value"),
        (lambda _: b"{}", "no _metadata object"),
        (lambda _: b'{"_metadata": {"flashinfer_version": "0.7.4", "gpu": "H200"}}', "no entries"),
        (lambda d: d.replace(b'"gpu": "NVIDIA H200"', b'"gpu": "*"'), "no gpu"),
        (lambda d: d.replace(b'"flashinfer_version"', b'"version"'), "no flashinfer_version"),
        (lambda d: d[: len(d) // 2], "Unterminated|Expecting"),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_its_reason(
    change: Callable[[bytes], bytes], why: str, tmp_path: Path
) -> None:
    bad = tmp_path / "autotune_configs_dp0_rank0.json"
    bad.write_bytes(change(REAL[1].read_bytes()))
    good = tmp_path / "autotune_configs_dp0_rank1.json"
    good.write_bytes(REAL[1].read_bytes())
    done = shown(tmp_path / "tables", "import", bad, good, code=3)
    assert {(one["source"], one["action"]) for one in done["tables"]} == {
        (str(bad), "refused"), (str(good), "taken"),
    }  # fmt: skip
    (reason,) = [one["why"] for one in done["tables"] if one["why"]]
    import re  # noqa: PLC0415

    assert re.search(why, reason)


def test_odd_files_are_refused_and_not_followed(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(REAL[0])
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "empty").mkdir()
    names = [link, tmp_path / "pipe.json", tmp_path / "empty", tmp_path / "missing.json"]
    done = shown(tmp_path / "tables", "import", *names, code=3)
    assert actions(done) == ["refused"] * 4
    assert not (tmp_path / "tables").exists()


def test_a_person_reads_what_became_of_each(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    text = run(tmp_path / "other", "import", packed, tmp_path / "bad.json").stdout
    assert text.count("  taken, ") == 2
    assert f"{tmp_path / 'bad.json'}\n  refused: " in text
    assert run(tmp_path / "other", "import", packed).stdout.count("  there already: ") == 2


def test_rank_10_comes_after_rank_9(tmp_path: Path) -> None:
    table = parse(REAL[1].read_bytes())
    key = next(iter(table.entries))
    for rank in range(12):
        entry = [table.entries[key][0], rank]
        path = tmp_path / f"autotune_configs_dp0_rank{rank}.json"
        path.write_bytes(Table({key: entry}, table.stamps).render())
    (tmp_path / "autotune_configs_dp0_rank0.json").unlink()
    (tmp_path / "autotune_configs_dp0_rank1.json").unlink()
    shown(tmp_path / "tables", "import", tmp_path)
    (shelved,) = tables(tmp_path / "tables")
    assert shelved.found.table is not None
    assert shelved.found.table.entries[key][1] == 2


# -- what a hostile reviewer found ----------------------------------------------------------


@pytest.mark.usefixtures("tuners")
def test_imported_tables_come_back_if_the_workload_fails_without_them_too(tmp_path: Path) -> None:
    rank_files(tmp_path / "theirs" / "model1")
    rank_files(tmp_path / "theirs" / "model2", ops=("other",))
    shown(tmp_path / "tables", "import", tmp_path / "theirs")
    before = {path: path.read_bytes() for path in (tmp_path / "tables").rglob("*.json")}

    def bug(_op: str) -> None:
        raise ValueError("bug in the model")

    with pytest.raises(AssertionError, match="WorkloadError"):
        start(tmp_path, toy=lambda _: Toy(between=bug))
    assert {p: p.read_bytes() for p in (tmp_path / "tables").rglob("*.json")} == before
    assert not list(tmp_path.rglob("*.quarantined-*"))
    assert {report.outcome for report in start(tmp_path)[0]} == {Outcome.WARM}


@pytest.mark.usefixtures("tuners")
def test_what_was_imported_and_not_asked_for_is_not_served(tmp_path: Path) -> None:
    shown(tmp_path / "tables", "import", *rank_files(tmp_path / "theirs", ops=("gemm", "other")))

    def work(ranks: Ranks) -> Any:
        fresh_tuner()
        settings = FlashInferSettings(persistent_cache="on", autotune_cache_dir=tmp_path / "tables")
        warm_up(Toy(ops=("gemm",)), ranks=ranks, settings=settings)
        return Toy(ops=("other",)).serving()

    for served in Crowd(2).all(work) + Crowd(2).all(work):
        assert {tactic for _, tactic in served.values()} == {-1}


def test_one_of_our_own_tables_must_be_sound_to_be_imported(place: Path, tmp_path: Path) -> None:
    path = min(place.rglob("*.json"))
    path.write_bytes(
        path.read_bytes().replace(b'"CudnnBf16GemmRunner",', b'"CudnnBf16GemmRunner",', 1)
    )
    document = json.loads(path.read_bytes())
    key = next(key for key in document if key != "_metadata")
    document[key][1] = 2
    path.write_text(json.dumps(document))
    done = shown(tmp_path / "tables", "import", path, code=3)
    assert actions(done) == ["refused"]
    assert "do not match their digest" in done["tables"][0]["why"]


def test_a_full_disk_leaves_the_table_that_was_to_make_way(
    place: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = min(place.rglob("*.json"))
    table = parse(path.read_bytes())
    key = next(iter(table.entries))
    path.write_bytes(Table({key: table.entries[key]}, table.stamps, {}).render())
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = shown(place, "import", packed, "--force", code=3)
    assert actions(done) == ["refused", "there"]
    assert "cannot be written: [Errno 28] No space left" in done["tables"][0]["why"]
    assert path.read_bytes() == before
    assert not list(place.rglob("*.quarantined-*"))


def test_a_history_goes_with_the_table_that_was_replaced(place: Path, packed: Path) -> None:
    path = min(place.rglob("*.json"))
    table = parse(path.read_bytes())
    key = next(iter(table.entries))
    path.write_bytes(Table({key: table.entries[key]}, table.stamps, {}).render())
    path.with_suffix(".shadow").write_text("[]")
    shown(place, "import", packed, "--force")
    assert not path.with_suffix(".shadow").exists()


def with_table(packed: Path, change: Callable[[Table], Table]) -> Path:
    """The bundle with its first table changed, and everything else made to fit."""

    def rewrite(members: dict[str, bytes]) -> None:
        name = min(name for name in members if name != "manifest.json")
        members[name] = change(parse(members[name])).render()
        checksum = hashlib.sha256(members[name]).hexdigest()
        relist(members, lambda manifest: manifest["tables"][0].update(sha256=checksum))

    return rezip(packed, rewrite)


@pytest.mark.parametrize("gpu", [7, None, "", "*"])
def test_a_bundled_table_without_a_place_is_refused(gpu: Any, packed: Path, tmp_path: Path) -> None:
    bundle_ = with_table(packed, lambda t: Table(t.entries, {**t.stamps, "gpu": gpu}, t.about))
    done = shown(tmp_path / "other", "import", bundle_, code=3)
    assert actions(done) == ["refused", "taken"]
    assert "no gpu" in done["tables"][0]["why"]


def test_seconds_that_no_float_can_hold_stop_nothing(packed: Path, tmp_path: Path) -> None:
    huge = {"cold_seconds": 10**400}
    shown(tmp_path / "o", "import", with_table(packed, lambda t: Table(t.entries, t.stamps, huge)))
    assert max(row["cold_seconds"] for row in shown(tmp_path / "o", "list")["tables"]) == 1e9


def test_a_damaged_lzma_member_is_refused(packed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    damaged = bytearray(packed.read_bytes())
    for place_ in range(2000, 2400):
        damaged[place_] ^= 0xFF
    packed.write_bytes(bytes(damaged))
    done = shown(tmp_path / "other", "import", packed, code=3)
    assert "refused" in actions(done)


def test_a_bundle_that_unpacks_to_too_much_is_refused(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MAX_BUNDLE_BYTES", 10_000)
    with pytest.raises(ValueError, match="it unpacks to more than 10000 bytes"):
        unpack(packed.read_bytes())


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    done = shown(tmp_path / "tables", "import", "x" * 5000, code=3)
    assert actions(done) == ["refused"]


def test_rank_files_that_are_too_large_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "MAX_BYTES", 1000)
    done = shown(tmp_path / "tables", "import", REAL[0], code=3)
    assert "together they have" in done["tables"][0]["why"]
    assert not (tmp_path / "tables").exists()


def test_a_link_that_leads_out_of_the_cache_directory_is_not_followed(
    packed: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "v1").symlink_to(tmp_path / "outside")
    done = shown(tmp_path / "tables", "import", packed, REAL[0], code=3)
    assert actions(done) == ["refused"] * 3
    assert "leads out of the cache directory" in done["tables"][0]["why"]
    assert not list((tmp_path / "outside").rglob("*.json"))


def test_tables_of_one_place_do_not_hide_each_other_in_a_bundle(
    place: Path, tmp_path: Path
) -> None:
    path = min(place.rglob("*.json"))
    twin = tmp_path / "elsewhere" / path.relative_to(place)
    twin.parent.mkdir(parents=True)
    twin.write_bytes(path.read_bytes())
    result = run(place, "export", tmp_path / "o.zip", path, twin)
    assert (result.exit_code, "same place in a bundle" in result.stderr) == (3, True)
    assert not (tmp_path / "o.zip").exists()
