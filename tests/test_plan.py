"""The plan: each rule with its reason, their order, and what holds for every set of ballots."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fi_flags import plan as plan_module
from fi_flags.ballots import PROTOCOL, Ballot, Tally
from fi_flags.decision import Reason, Strategy
from fi_flags.plan import (
    Action,
    Next,
    Plan,
    after_run,
    all_loaded,
    count_ballots,
    make_plan,
    make_plans,
    publishers,
    read_plans,
)
from fi_flags.settings import FlashInferSettings, OnFailure, plan_values
from fi_flags.table import Status

examples = settings(deadline=None)
many = settings(deadline=None, max_examples=500)

ENVIRONMENT = {"flashinfer_version": "0.7.4", "gpu": "NVIDIA H200"}
OK = {"table": "ok", "entries": 6, "digest": "d"}
LEADER_WORKER = Strategy.LEADER_WORKER.value
PER_RANK = Strategy.PER_RANK.value


@functools.cache
def default_settings() -> dict[str, Any]:
    return dict(plan_values(FlashInferSettings()))


def ballot(rank: int, **given: Any) -> Ballot:
    """What a rank with the flag on and an empty cache says; settings by their plain names."""
    names = ("cache_access", "split", "distributed_sync", "skip_ops", "on_failure")
    chosen = {f"autotune_{name}": given.pop(name) for name in names if name in given}
    usual: dict[str, Any] = {
        "host": f"host{rank}",
        "mode": "on",
        "strategy": LEADER_WORKER,
        "reason": Reason.OPERATOR_ON.value,
        "settings": default_settings() | chosen,
        "workload": "toy-1",
        "environment": ENVIRONMENT,
        "place": "/tables/world.json",
        "writable": True,
    }
    return Ballot(rank, **(usual | given))


def off(rank: int, **given: Any) -> Ballot:
    usual = {"mode": "off", "strategy": PER_RANK, "reason": "DEFAULT_OFF", "environment": {}}
    return ballot(rank, **(usual | given))


def over_the_wire(one: Ballot) -> Ballot:
    return Ballot.from_json(json.loads(json.dumps(one.to_json())))


# -- gates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [{}, OK])
def test_ops_that_a_rank_may_not_use_are_left_out_by_all(table: dict[str, Any]) -> None:
    ballots = [ballot(0, skip_ops=["moe"], **table), ballot(1, skip_ops=["moe"], **table)]
    gated = [ballots[0], dataclasses.replace(ballots[1], gate_ops=("gemm",))]
    assert make_plan(ballots).skip_ops == {"moe"}
    plan = make_plan([over_the_wire(one) for one in gated])
    assert plan.skip_ops == {"moe", "gemm"}
    assert plan.action is (Action.WARM if table else Action.COLD)


def test_ops_of_gates_are_tuned_as_ever_where_the_cache_is_not_used() -> None:
    assert make_plan([ballot(0, gate_ops=("gemm",)), off(1)]).skip_ops == set()
    unusable = [ballot(0, gate_ops=("gemm",), unusable="old"), ballot(1)]
    assert make_plan(unusable).skip_ops == set()


@pytest.mark.parametrize("who", [0, 1])
def test_timings_are_not_shared_where_a_gate_forbids_it_and_the_plan_names_it(who: int) -> None:
    ballots = [
        ballot(r, distributed_sync=True, no_sync="unagreed-hits" if r == who else "")
        for r in (0, 1)
    ]
    plan = make_plan([over_the_wire(one) for one in ballots])
    assert (plan.action, plan.sync) == (Action.COLD, False)
    assert f"gate unagreed-hits (rank {who}) forbids it" in plan.why
    unasked = [dataclasses.replace(one, settings=default_settings()) for one in ballots]
    assert "forbids" not in make_plan(unasked).why


# -- rule 1: an error -----------------------------------------------------------------------


def test_an_error_fails_every_rank_and_names_each_rank_with_its_cause() -> None:
    plan = make_plan([ballot(0), ballot(1, error="no GPU"), ballot(2, error="no model")])
    assert plan.action is Action.FAIL
    assert plan.why == "rank 1 (host1): no GPU; rank 2 (host2): no model"


def test_an_error_goes_before_every_other_rule() -> None:
    worst = [
        off(0, workload="other", protocol=9),
        ballot(1, error="boom", unusable="x", environment={"a": "b"}, cache_access="ro"),
    ]
    assert make_plan(worst).action is Action.FAIL


# -- rule 2: ranks that disagree ------------------------------------------------------------

DISAGREEMENTS: list[tuple[dict[str, Any], str]] = [
    ({"protocol": 2}, "protocol differs: 1 (ranks 0-2), 2 (rank 3)"),
    ({"workload": "toy-2"}, "workload differs: toy-1 (ranks 0-2), toy-2 (rank 3)"),
    ({"cache_access": "ro"}, "autotune_cache_access differs: rw (ranks 0-2), ro (rank 3)"),
    ({"split": "leader"}, "autotune_split differs: all (ranks 0-2), leader (rank 3)"),
    (
        {"distributed_sync": True},
        "autotune_distributed_sync differs: false (ranks 0-2), true (rank 3)",
    ),
    ({"skip_ops": ["moe"]}, 'autotune_skip_ops differs: [] (ranks 0-2), ["moe"] (rank 3)'),
    ({"on_failure": "untuned"}, "autotune_on_failure differs: raise (ranks 0-2), untuned (rank 3)"),
    (
        {"strategy": PER_RANK, "reason": "SHADOW", "mode": "shadow"},
        "strategy differs: leader_worker (OPERATOR_ON) (ranks 0-2), per_rank (SHADOW) (rank 3)",
    ),
]


@pytest.mark.parametrize(("other", "why"), DISAGREEMENTS)
def test_what_ranks_disagree_on_is_named_with_values_and_ranks_and_all_tune_alone(
    other: dict[str, Any], why: str
) -> None:
    plan = make_plan([ballot(0), ballot(1), ballot(2), ballot(3, **other)])
    assert (plan.action, plan.reason) == (Action.UNCACHED, Reason.RANKS_DISAGREE)
    assert plan.why == why
    assert plan.tuners == {0, 1, 2, 3}
    assert not plan.publish


@pytest.mark.parametrize("who", [0, 1, 2, 3])
def test_any_rank_may_be_the_one_that_disagrees(who: int) -> None:
    plan = make_plan([off(r) if r == who else ballot(r) for r in range(4)])
    assert plan.reason is Reason.RANKS_DISAGREE
    assert f"per_rank (DEFAULT_OFF) (rank {who})" in plan.why


def test_several_disagreements_are_all_named() -> None:
    plan = make_plan([ballot(0), ballot(1, split="leader", workload="toy-2")])
    assert "workload differs" in plan.why
    assert "; autotune_split differs" in plan.why


def test_a_setting_that_one_rank_does_not_know_is_a_disagreement() -> None:
    plan = make_plan([ballot(0), ballot(1, settings={})])
    assert plan.reason is Reason.RANKS_DISAGREE
    assert "autotune_split differs: all (rank 0), null (rank 1)" in plan.why


def test_a_list_and_a_tuple_are_no_disagreement() -> None:
    plan = make_plan([ballot(0, skip_ops=("moe",)), ballot(1, skip_ops=["moe"])])
    assert plan.action is Action.COLD


def test_hosts_places_tables_and_modes_may_differ() -> None:
    plan = make_plan([ballot(0), ballot(1, mode="force", reason="OPERATOR_FORCED", place="/b")])
    assert plan.action is Action.COLD


def test_an_op_that_one_rank_skips_is_skipped_by_all_though_they_disagree() -> None:
    plan = make_plan([ballot(0, skip_ops=["a"]), ballot(1, skip_ops=["b"])])
    assert plan.reason is Reason.RANKS_DISAGREE
    assert plan.skip_ops == {"a", "b"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["untuned", "untuned"], OnFailure.UNTUNED),
        (["untuned", "raise"], OnFailure.RAISE),
        (["raise", "untuned"], OnFailure.RAISE),
        (["raise", "raise"], OnFailure.RAISE),
    ],
)
def test_a_failure_that_one_rank_must_raise_all_do(values: list[str], expected: OnFailure) -> None:
    plan = make_plan([ballot(rank, on_failure=value) for rank, value in enumerate(values)])
    assert plan.on_failure is expected


def test_a_disagreement_goes_before_an_environment_and_a_table() -> None:
    plan = make_plan([ballot(0, **OK), ballot(1, workload="x", environment={"gpu": "A"})])
    assert plan.reason is Reason.RANKS_DISAGREE


def auto(rank: int, strategy: str, **given: Any) -> Ballot:
    included = strategy == LEADER_WORKER
    reason = Reason.AUTO_ELIGIBLE if included else Reason.ROLLOUT_EXCLUDED
    return ballot(rank, mode="auto", strategy=strategy, reason=reason.value, **given)


@pytest.mark.parametrize("answers", list(itertools.product([LEADER_WORKER, PER_RANK], repeat=3)))
def test_under_auto_rank_0_answers_for_all_whether_the_rollout_includes_them(
    answers: tuple[str, ...],
) -> None:
    plan = make_plan([auto(rank, answer) for rank, answer in enumerate(answers)])
    included = answers[0] == LEADER_WORKER
    assert plan.action is (Action.COLD if included else Action.UNCACHED)
    assert plan.reason is (Reason.AUTO_ELIGIBLE if included else Reason.ROLLOUT_EXCLUDED)


@pytest.mark.parametrize("reason", ["GATE_CLOSED", "DEVICE_UNSUPPORTED"])
def test_under_auto_a_rank_that_cannot_is_a_disagreement(reason: str) -> None:
    other = ballot(1, mode="auto", strategy=PER_RANK, reason=reason)
    plan = make_plan([auto(0, LEADER_WORKER), other])
    assert plan.reason is Reason.RANKS_DISAGREE
    assert f"per_rank ({reason}) (rank 1)" in plan.why


def test_auto_on_one_rank_only_is_a_disagreement_where_the_answers_differ() -> None:
    assert make_plan([auto(0, PER_RANK), ballot(1)]).reason is Reason.RANKS_DISAGREE
    assert make_plan([auto(0, LEADER_WORKER), ballot(1)]).action is Action.COLD


# -- rule 3: per-rank -----------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["DEFAULT_OFF", "OPERATOR_OFF", "GATE_CLOSED"])
def test_per_rank_is_uncached_with_the_decisions_own_reason(reason: str) -> None:
    plan = make_plan([off(0, reason=reason), off(1, reason=reason)])
    assert (plan.action, plan.reason.value) == (Action.UNCACHED, reason)
    assert (plan.publish, plan.sync, plan.exchange) == (False, False, False)
    assert plan.tuners == {0, 1}


def test_per_rank_goes_before_environment_access_and_table() -> None:
    plan = make_plan([off(0, cache_access="ro", unusable="x", **OK), off(1, cache_access="ro")])
    assert (plan.action, plan.reason) == (Action.UNCACHED, Reason.DEFAULT_OFF)


# -- rule 4: environments -------------------------------------------------------------------


def test_environments_that_differ_are_named_field_by_field() -> None:
    other = {"flashinfer_version": "0.7.3", "gpu": "NVIDIA H200", "cudnn": "9"}
    plan = make_plan([ballot(0, **OK), ballot(1, **OK), ballot(2, environment=other)])
    assert (plan.action, plan.reason) == (Action.UNCACHED, Reason.CACHE_UNUSABLE)
    assert plan.why == (
        "cudnn differs: null (ranks 0, 1), 9 (rank 2); "
        "flashinfer_version differs: 0.7.4 (ranks 0, 1), 0.7.3 (rank 2)"
    )


def test_a_rank_that_cannot_serve_a_table_is_named_with_why() -> None:
    plan = make_plan([ballot(0, **OK), ballot(1, unusable="no _lock", environment={})])
    assert (plan.action, plan.reason) == (Action.UNCACHED, Reason.CACHE_UNUSABLE)
    assert plan.why == "stored tables cannot be served: no _lock (rank 1)"


@pytest.mark.parametrize("access", ["rw", "ro", "wo"])
def test_an_environment_goes_before_access_and_table(access: str) -> None:
    plan = make_plan([ballot(r, cache_access=access, environment={"gpu": str(r)}) for r in (0, 1)])
    assert (plan.action, plan.reason) == (Action.UNCACHED, Reason.CACHE_UNUSABLE)


# -- rule 5: access -------------------------------------------------------------------------


def test_write_only_is_cold_though_every_table_is_ok() -> None:
    plan = make_plan([ballot(r, cache_access="wo", **OK) for r in (0, 1)])
    assert (plan.action, plan.reason) == (Action.COLD, Reason.OPERATOR_ON)
    assert plan.why == "write-only: tuned afresh"
    assert plan.publish


@pytest.mark.parametrize(
    "status", [s.value for s in Status if s not in (Status.OK, Status.IMPORTED)]
)
def test_read_only_without_an_ok_table_is_untuned_and_says_what_was_found(status: str) -> None:
    one = ballot(0, cache_access="ro", table=status, why="because")
    plan = make_plan([one, ballot(1, cache_access="ro")])
    assert (plan.action, plan.reason) == (Action.UNTUNED, Reason.OPERATOR_ON)
    assert plan.tuners == frozenset()
    assert not plan.publish
    assert f"{status} (because) (rank 0), absent (rank 1)" in plan.why


def test_read_only_with_an_ok_table_is_warm_and_neither_tunes_nor_publishes() -> None:
    plan = make_plan([ballot(0, cache_access="ro"), ballot(1, cache_access="ro", **OK)])
    assert (plan.action, plan.leader, plan.exchange) == (Action.WARM, 1, True)
    assert (plan.tuners, plan.publish) == (frozenset(), False)


# -- rule 6: warm ---------------------------------------------------------------------------


@pytest.mark.parametrize("held", list(itertools.product([True, False], repeat=3)))
def test_the_leader_is_the_lowest_rank_whose_table_is_ok(held: tuple[bool, ...]) -> None:
    plan = make_plan([ballot(rank, **(OK if has else {})) for rank, has in enumerate(held)])
    if not any(held):
        assert plan.action is Action.COLD
        return
    assert (plan.action, plan.reason) == (Action.WARM, Reason.OPERATOR_ON)
    assert plan.leader == held.index(True)
    assert plan.exchange == (not all(held))
    assert plan.publish
    assert plan.tuners == {0, 1, 2}
    assert f"rank {plan.leader}'s table of 6 entries" in plan.why


def test_ok_tables_that_differ_are_brought_together() -> None:
    plan = make_plan([ballot(0, **OK), ballot(1, **(OK | {"digest": "e"}))])
    assert (plan.action, plan.exchange) == (Action.WARM, True)
    assert not make_plan([ballot(0, **OK), ballot(1, **OK)]).exchange


@pytest.mark.parametrize(("table", "leader"), [({}, 0), (OK, 2)])
def test_split_leader_lets_one_rank_tune(table: dict[str, Any], leader: int) -> None:
    ballots = [ballot(r, split="leader", **(table if r == 2 else {})) for r in range(3)]
    plan = make_plan(ballots)
    assert plan.leader == leader
    assert plan.tuners == {leader}


# -- rule 7: cold ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "status", [s.value for s in Status if s not in (Status.OK, Status.IMPORTED)]
)
def test_no_ok_table_is_cold_and_says_what_was_found(status: str) -> None:
    plan = make_plan([ballot(0), ballot(1, table=status, why="because")])
    assert (plan.action, plan.reason) == (Action.COLD, Reason.OPERATOR_ON)
    assert plan.why.startswith("no usable table: absent (rank 0)")
    assert f"{status} (because) (rank 1)" in plan.why
    assert plan.tuners == {0, 1}
    assert (plan.publish, plan.exchange, plan.leader) == (True, False, 0)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"distributed_sync": False}, False),
        ({"split": "leader"}, False),
        ({"cache_access": "wo"}, True),
        ({"cache_access": "ro"}, False),
        (OK, False),
    ],
)
def test_timings_are_shared_only_on_a_cold_plan_with_split_all(
    more: dict[str, Any], expected: object
) -> None:
    given: dict[str, Any] = {"distributed_sync": True} | more
    assert make_plan([ballot(0, **given), ballot(1, **given)]).sync is expected


@pytest.mark.parametrize("who", [0, 1])
def test_timings_are_not_shared_where_a_rank_holds_something(who: int) -> None:
    ballots = [ballot(r, distributed_sync=True, held=int(r == who)) for r in (0, 1)]
    assert not make_plan(ballots).sync


# -- ranks in words -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ([3], "rank 3"),
        ([3, 4], "ranks 3, 4"),
        ([3, 4, 5], "ranks 3-5"),
        ([3, 5, 6], "ranks 3, 5, 6"),
        (list(range(1, 40, 2)), "ranks 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31 "),
    ],
)
def test_ranks_are_named_shortly(who: list[int], words: str) -> None:
    plan = make_plan([ballot(r, workload="odd" if r in who else "toy") for r in range(40)])
    assert f"odd ({words}" in plan.why
    assert ("and 4 more)" in plan.why) == (len(who) > 16)


# -- shadow ---------------------------------------------------------------------------------

SHADOW = {"strategy": PER_RANK, "reason": "SHADOW", "mode": "shadow"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"environment": {"gpu": "H20"}}, "gpu differs: NVIDIA H200 (rank 0), H20 (rank 1)"),
        ({"unusable": "no"}, "nothing is compared, since stored tables cannot be served: no"),
        ({"reason": "GATE_CLOSED", "mode": "on"}, "since reason differs: SHADOW (rank 0), GATE"),
    ],
)
def test_shadow_compares_only_where_all_ranks_can(change: dict[str, Any], why: str) -> None:
    plan = make_plan([ballot(0, **OK, **SHADOW), ballot(1, **(OK | SHADOW | change))])
    assert (plan.action, plan.shadow, plan.publish) == (Action.UNCACHED, False, False)
    assert why in plan.why


def test_shadow_says_before_tuning_that_nothing_can_be_written() -> None:
    plan = make_plan([ballot(r, **(OK | SHADOW | {"writable": False})) for r in range(2)])
    assert plan.shadow
    assert "it will not be kept, since nothing can be written to" in plan.why
    assert "rank 0's table is compared with it" in plan.why


# -- every set of ballots -------------------------------------------------------------------

words = st.sampled_from(["", "x", "y", "x" * 700, "x" * 699 + "y", "ä\n\0"])


@st.composite
def ballots_of(draw: st.DrawFn) -> list[Ballot]:
    """Mostly alike, as real ranks are; each odd in something with some probability."""
    seldom = st.integers(0, 9).map(lambda n: n == 0)
    strategies = st.sampled_from([LEADER_WORKER] * 3 + [PER_RANK])
    fields: dict[str, st.SearchStrategy[Any]] = {
        "host": words,
        "mode": st.sampled_from(["off", "on", "auto", "auto", "force", "shadow"]),
        "reason": st.sampled_from([r.value for r in Reason] + ["AUTO_ELIGIBLE"] * 3 + ["NEW"]),
        "strategy": strategies,
        "workload": words.map(lambda word: word or "toy"),
        "environment": st.dictionaries(st.sampled_from(["gpu", "cudnn"]), words),
        "lacking": st.dictionaries(
            st.sampled_from(["settle", "read_only", "process_group"]), words, max_size=1
        ),
        "unusable": words,
        "held": st.integers(0, 2),
        "why": words,
        "place": words,
        "writable": st.booleans(),
        "protocol": st.sampled_from([PROTOCOL, PROTOCOL, 2]),
        "cache_access": st.sampled_from(["rw", "ro", "wo"]),
        "split": st.sampled_from(["all", "leader"]),
        "distributed_sync": st.booleans(),
        "skip_ops": st.lists(words, max_size=2) | st.lists(words, max_size=2).map(tuple),
        "on_failure": st.sampled_from(["raise", "untuned"]),
        "gate_ops": st.lists(words, max_size=2).map(tuple),
        "no_sync": st.sampled_from(["", "", "gate"]),
    }
    common = {
        name: draw(values)
        for name, values in fields.items()
        if name not in ("unusable", "protocol") or draw(seldom)
    }
    result = []
    for rank in range(draw(st.integers(1, 5))):
        own = dict(common)
        if draw(seldom):
            name = draw(st.sampled_from(sorted(fields)))
            own[name] = draw(fields[name])
        own["table"] = draw(st.sampled_from([*Status, Status.OK, Status.ABSENT])).value
        own["digest"] = draw(st.sampled_from(["d", "d", "e"]))
        own["error"] = draw(words) if draw(seldom) and draw(seldom) else ""
        result.append(ballot(rank, **own))
    return result


def told(plan: Plan) -> Plan:
    """A plan without its texts, which the wire cuts."""
    return dataclasses.replace(plan, why="", stored=dataclasses.replace(plan.stored, place=""))


@many
@given(ballots_of())
def test_a_plan_exists_and_arrives_as_it_was_made(ballots: list[Ballot]) -> None:
    # Rank 0 sees its own ballot as it posted it, those of others as JSON.
    wired = [ballots[0].to_json(), *(json.loads(json.dumps(b.to_json())) for b in ballots[1:])]
    plan = make_plan([Ballot.from_json(fields) for fields in wired])
    assert read_plans(json.loads(json.dumps(count_ballots(wired)))) == {"": plan}
    whole = make_plan(ballots)
    assert told(plan) == told(whole)
    assert json.loads(json.dumps(plan.to_json()))["action"] == plan.action.value


@many
@given(ballots_of())
def test_every_plan_keeps_to_the_rules(ballots: list[Ballot]) -> None:
    check_rules(ballots, make_plan(ballots))


def test_every_plan_of_two_ranks_that_agree_keeps_to_the_rules() -> None:
    seen = set()
    for first, second, access, split, sync, held, digest in itertools.product(
        Status, Status, ("rw", "ro", "wo"), ("all", "leader"), (False, True), (0, 1), "de"
    ):
        common = {"cache_access": access, "split": split, "distributed_sync": sync, "held": held}
        ballots = [
            ballot(0, table=first.value, digest="d", **common),
            ballot(1, table=second.value, digest=digest, **common),
        ]
        plan = make_plan(ballots)
        check_rules(ballots, plan)
        seen.add(plan.action)
    assert seen == {Action.COLD, Action.WARM, Action.UNTUNED}


def check_rules(ballots: list[Ballot], plan: Plan) -> None:
    access = ballots[0].settings["autotune_cache_access"]
    kinds = [{b.rank for b in ballots if b.table == kind} for kind in ("ok", "imported")]
    ok = kinds[0] or kinds[1]
    cached = plan.action in (Action.WARM, Action.COLD, Action.UNTUNED)

    assert (plan.action is Action.FAIL) == any(b.error for b in ballots)
    assert plan.why
    assert plan.tuners <= {b.rank for b in ballots}
    gated = {op for b in ballots for op in b.gate_ops if cached}
    assert plan.skip_ops == gated | {op for b in ballots for op in b.settings["autotune_skip_ops"]}
    if plan.action is Action.WARM:
        assert plan.leader == min(ok)
        assert plan.stored.imported == (not kinds[0])
        assert access != "wo"
        digests = {b.digest for b in ballots if b.rank in ok}
        assert plan.exchange == (len(digests) > 1 or len(ok) < len(ballots))
    if cached:
        assert len({b.workload for b in ballots}) == 1
        assert len({b.protocol for b in ballots}) == 1
        assert len({json.dumps(b.settings) for b in ballots}) == 1
        assert len({json.dumps(b.environment, sort_keys=True) for b in ballots}) == 1
        assert not any(b.unusable for b in ballots)
        if access == "ro":
            assert not plan.tuners
            assert not plan.publish
    if plan.action is Action.UNTUNED:
        assert (access, ok) == ("ro", set())
    if plan.action is Action.COLD:
        assert access == "wo" or not ok
        assert plan.tuners
    if plan.sync:
        assert plan.action is Action.COLD
        assert plan.tuners == {b.rank for b in ballots}
        assert not any(b.no_sync for b in ballots)
    if (plan.publish and not plan.shadow) or plan.exchange:
        assert plan.action in (Action.WARM, Action.COLD)
    if plan.shadow:
        assert plan.action is Action.UNCACHED
        assert {b.reason for b in ballots} == {"SHADOW"}
        assert plan.publish == (access != "ro")
        assert plan.compare == (access != "wo" and bool(ok))
    assert plan.shadow or not plan.compare


@examples
@given(ballots_of(), st.data())
def test_any_difference_that_counts_is_uncached(ballots: list[Ballot], data: st.DataObject) -> None:
    calm = [dataclasses.replace(b, error="", protocol=PROTOCOL) for b in ballots]
    who = data.draw(st.integers(0, len(calm) - 1))
    other = dataclasses.replace(calm[who], workload="something else")
    plan = make_plan([*calm[:who], other, *calm[who + 1 :], dataclasses.replace(calm[0], rank=9)])
    if len(calm) > 1 or who != 0:
        assert (plan.action, plan.reason) == (Action.UNCACHED, Reason.RANKS_DISAGREE)
        assert "workload differs" in plan.why


# -- the wire -------------------------------------------------------------------------------


def test_names_that_this_version_does_not_know_are_ignored() -> None:
    fields = ballot(1, **OK).to_json() | {"colour": "red", "nested": {"a": [1]}}
    assert Ballot.from_json(fields) == ballot(1, **OK)
    assert Tally.from_json(Tally(1).to_json() | {"colour": "red"}) == Tally(1)


def test_a_ballot_that_says_little_has_defaults() -> None:
    assert Ballot.from_json({"rank": 3}) == Ballot(3)
    assert Tally.from_json({"rank": 3}) == Tally(3)
    assert make_plan([Ballot.from_json({"rank": 0})]).action is Action.UNCACHED


def test_a_reason_that_this_version_does_not_know_is_no_error() -> None:
    assert make_plan([ballot(0, reason="OF_THE_FUTURE"), ballot(1)]).action is Action.COLD


def test_the_size_of_a_ballot_is_bounded_however_long_its_texts() -> None:
    texts = [
        name
        for name, kind in typing.get_type_hints(Ballot).items()
        if kind is str and name not in ("mode", "strategy", "reason", "table", "digest", "group")
    ]
    assert {"host", "error", "why", "unusable", "place", "workload"} <= set(texts)
    given: dict[str, Any] = dict.fromkeys(texts, "\0" * 100_000)
    given["environment"] = dict.fromkeys(ENVIRONMENT, "\0" * 100_000)
    assert len(json.dumps(ballot(0, **given).to_json())) < 32_000
    tally = Tally(0, host="\0" * 100_000, error="\0" * 100_000)
    assert len(json.dumps(tally.to_json())) < 8_000


def test_long_values_that_differ_only_at_their_end_still_differ_after_the_cut() -> None:
    ballots = [over_the_wire(ballot(r, environment={"dsl": "x" * 500 + str(r)})) for r in (0, 1)]
    plan = make_plan(ballots)
    assert plan.reason is Reason.CACHE_UNUSABLE
    assert len(plan.why) < 500
    places = [over_the_wire(ballot(0, host="h", place="x" * 900 + str(r))) for r in (0, 1)]
    assert places[0].place != places[1].place


# -- after vote 1 ---------------------------------------------------------------------------


def test_all_loaded_is_empty_or_names_who_did_not_and_why() -> None:
    yes, no = Tally(0, host="a"), Tally(1, host="b", ok=False, error="OSError: full")
    assert all_loaded([yes]) == ""
    assert all_loaded([yes, no]) == "rank 1 (b): OSError: full"
    assert all_loaded([no, no]).count("rank 1") == 2


@pytest.mark.parametrize("action", [Action.UNCACHED, Action.UNTUNED, Action.COLD, Action.WARM])
@pytest.mark.parametrize(
    "answers",
    list(itertools.product([True, False], [True, False], ["d", "e"], repeat=2)),
    ids=str,
)
def test_what_follows_from_the_vote_after_the_run(
    action: Action, answers: tuple[bool, bool, str, bool, bool, str]
) -> None:
    pairs = [answers[:3], answers[3:]]
    tallies = [Tally(r, ran=a, ok=b, digest=c) for r, (a, b, c) in enumerate(pairs)]
    following = after_run(Plan(action, Reason.OPERATOR_ON, "why"), tallies)
    if not all(t.ran for t in tallies):
        assert following is (Next.RETUNE if action is Action.WARM else Next.FAIL)
    else:
        alike = all(t.ok for t in tallies) and tallies[0].digest == tallies[1].digest
        done = alike or action in (Action.UNCACHED, Action.UNTUNED)
        assert following is (Next.DONE if done else Next.MERGE)


@pytest.mark.parametrize("given", [{"aborted": True}, {"dead": "CUDA error"}])
@pytest.mark.parametrize("who", [0, 1])
def test_a_failed_warm_run_is_not_tried_again_where_some_rank_cannot(
    given: dict[str, Any], who: int
) -> None:
    tallies = [Tally(r, ran=r == who, **(given if r == who else {})) for r in (0, 1)]
    assert after_run(Plan(Action.WARM, Reason.OPERATOR_ON, "why"), tallies) is Next.FAIL


@pytest.mark.parametrize(("access", "action"), [("rw", Action.COLD), ("ro", Action.UNTUNED)])
def test_without_its_table_a_warm_plan_is_cold_or_untuned_if_read_only(
    access: str, action: Action
) -> None:
    warm = make_plan([ballot(0, cache_access=access, **OK), ballot(1, cache_access=access)])
    plan = warm.without_table("rank 1 could not")
    assert (plan.action, plan.reason) == (action, Reason.CACHE_UNUSABLE)
    assert plan.why == "rank 1 could not"
    assert (plan.exchange, plan.sync, plan.publish) == (False, False, access == "rw")
    assert plan.tuners == warm.tuners


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([("a", "/x"), ("a", "/x"), ("a", "/x")], {0}),
        ([("a", "/x"), ("b", "/x"), ("b", "/x")], {0, 1}),
        ([("a", "/x"), ("a", "/y"), ("b", "/y")], {0, 1, 2}),
        ([("a", "/x"), ("b", "/y"), ("a", "/x")], {0, 1}),
    ],
)
def test_the_lowest_rank_of_each_host_and_place_publishes(
    places: list[tuple[str, str]], expected: set[int]
) -> None:
    ballots = [ballot(r, host=host, place=place) for r, (host, place) in enumerate(places)]
    assert publishers(ballots) == expected


# -- what a release lacks -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "given", "used"),
    [
        ("settle", {}, True),
        ("settle", {"cache_access": "ro"}, False),  # nothing is loaded, so nothing to settle
        ("settle", {"cache_access": "ro", **OK}, True),
        ("read_only", {}, False),
        ("read_only", {"cache_access": "ro"}, True),
        ("read_only", {"split": "leader"}, True),
        ("skip_ops", {}, False),
        ("process_group", {}, False),
    ],
)
def test_what_one_rank_lacks_is_off_on_all_and_named_where_the_plan_would_use_it(
    feature: str, given: dict[str, Any], used: bool
) -> None:
    ballots = [ballot(0, **given), ballot(1, **given, lacking={feature: "no _such_name"})]
    plan = make_plan(ballots)
    assert plan.without == ({feature: "no _such_name (rank 1)"} if used else {})
    same = make_plan([ballot(0, **given), ballot(1, **given)])
    assert plan == dataclasses.replace(same, without=plan.without)


def test_ops_that_one_rank_cannot_leave_out_cost_the_cache_and_not_the_start() -> None:
    ballots = [
        ballot(0, skip_ops=["moe"], **OK),
        ballot(1, skip_ops=["moe"], lacking={"skip_ops": "no choose_one"}, **OK),
    ]
    plan = make_plan(ballots)
    assert (plan.action, plan.reason) == (Action.UNCACHED, Reason.CACHE_UNUSABLE)
    assert plan.why == "moe cannot be left out: no choose_one (rank 1)"
    assert plan.without == {"skip_ops": "no choose_one (rank 1)"}


# -- groups ---------------------------------------------------------------------------------


def stage(name: str, *ranks: int, **given: Any) -> list[Ballot]:
    return [ballot(rank, group=name, **given) for rank in ranks]


def test_each_group_of_a_world_has_a_plan_of_its_own() -> None:
    plans = make_plans([*stage("pp0", 0, 1, **OK), *stage("pp1", 2, 3, workload="toy-2")])
    assert {name: plan.action for name, plan in plans.items()} == {
        "pp0": Action.WARM,
        "pp1": Action.COLD,
    }
    assert plans["pp1"].members == (2, 3)
    assert plans["pp1"].tuners == {2, 3}
    assert (plans["pp0"].leader, plans["pp1"].leader) == (0, 2)


def test_groups_may_lie_in_any_order_of_ranks() -> None:
    ballots = [ballot(rank, group=f"dp{rank % 2}") for rank in range(4)]
    assert {n: p.members for n, p in make_plans(ballots).items()} == {"dp0": (0, 2), "dp1": (1, 3)}


def test_one_group_that_disagrees_or_has_other_gpus_leaves_the_others_alone() -> None:
    h100 = ENVIRONMENT | {"gpu": "NVIDIA H100"}
    ballots = [
        *stage("pp0", 0, 1, **OK),
        *stage("pp1", 2, environment=h100),
        *stage("pp1", 3),
        *stage("pp2", 4, 5, environment=h100, **OK),
        *stage("pp3", 6, skip_ops=["moe"]),
        *stage("pp3", 7),
    ]
    plans = make_plans(ballots)
    assert plans["pp0"].action is plans["pp2"].action is Action.WARM
    assert plans["pp1"].reason is Reason.CACHE_UNUSABLE
    assert "gpu differs: NVIDIA H100 (rank 2), NVIDIA H200 (rank 3)" in plans["pp1"].why
    assert plans["pp3"].reason is Reason.RANKS_DISAGREE
    assert plans["pp0"].skip_ops == set()


def test_a_rank_that_cannot_start_stops_every_group_by_name() -> None:
    plans = make_plans([*stage("pp0", 0, 1), *stage("pp1", 2), *stage("pp1", 3, error="boom")])
    for plan in plans.values():
        assert (plan.action, plan.why, plan.failed) == (Action.FAIL, "rank 3 (host3): boom", (3,))


@pytest.mark.parametrize("included", [True, False])
def test_under_auto_the_worlds_rank_0_answers_for_every_group(included: bool) -> None:
    yes = {"mode": "auto", "reason": "AUTO_ELIGIBLE"}
    no = {"mode": "auto", "reason": "ROLLOUT_EXCLUDED", "strategy": PER_RANK}
    first, other = (yes, no) if included else (no, yes)
    plans = make_plans([*stage("pp0", 0, **first), *stage("pp1", 1, 2, **other)])
    expected = Action.COLD if included else Action.UNCACHED
    assert {plan.action for plan in plans.values()} == {expected}


def test_split_leader_lets_the_first_rank_of_each_group_tune() -> None:
    plans = make_plans([*stage("pp0", 0, 1, split="leader"), *stage("pp1", 2, 3, split="leader")])
    assert [plan.tuners for plan in plans.values()] == [{0}, {2}]


def test_each_group_publishes_once_on_each_disk_it_has() -> None:
    ballots = [ballot(rank, group=f"pp{rank // 4}", host=f"node{rank % 2}") for rank in range(8)]
    assert [plan.publishers for plan in make_plans(ballots).values()] == [{0, 1}, {4, 5}]


@examples
@given(st.sets(st.integers(0, 100)))
def test_ranks_arrive_as_they_were_sent(ranks: set[int]) -> None:
    plan = dataclasses.replace(
        make_plan([ballot(0)]),
        members=tuple(sorted(ranks)),
        tuners=frozenset(ranks),
        publishers=frozenset(ranks),
    )
    sent = plan_module._plans().dump_json({"": plan})
    assert plan_module._plans().validate_json(sent) == {"": plan}


def test_a_plan_of_a_thousand_ranks_is_a_short_message() -> None:
    ballots = [ballot(rank, host=f"node{rank // 8}", **OK).to_json() for rank in range(1024)]
    assert len(json.dumps(count_ballots(ballots))) < 1000
