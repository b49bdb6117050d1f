"""The only contact with FlashInfer: tune, observe, export, load, give back.

Public API does the work: ``autotune``, ``save_configs``, ``load_configs``. Private names are
needed for what FlashInfer offers no way to ask: which look-ups a workload made, that a loaded entry
wins over the tuner's memory, that it outlives a later ``autotune(cache=...)``, and that a pass
which must not tune does not. They stand in ``NAMES``, each with the feature that needs it; where a
release lacks one, ``lacking()`` says so and that feature alone is off, on all ranks of the group.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import math
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from fi_flags.errors import TunerError
from fi_flags.keys import KeyFormat, extras_of, runner_of
from fi_flags.table import DEFAULT_TACTIC, Entries, Table, parse, rival_key, spelt

__all__ = ["KEEP_GROUP", "Counts", "Pass", "Snapshot", "Tuner", "tuner_per_thread", "wall_clock"]

OBSERVE: Final = "observe"
LOAD: Final = "load"
SETTLE: Final = "settle"
READ_ONLY: Final = "read_only"
SKIP_OPS: Final = "skip_ops"
PROCESS_GROUP: Final = "process_group"
GIVE_UP: Final = "give_up"

# Every name of an AutoTuner object that we touch besides save_configs and load_configs: the
# features that need it, and the first that has it of the releases that the contract tests check,
# which hold this table against each. A name that no feature needs is carried along where it is.
NAMES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "search_cache": ((OBSERVE, SETTLE), "0.6.8"),
    "_get_cache_key": ((OBSERVE, SETTLE), "0.6.8"),
    "_generate_optimization_profiles": ((OBSERVE,), "0.6.8"),
    "profiling_cache": ((OBSERVE, LOAD, SETTLE), "0.6.8"),
    "_file_configs": ((LOAD, SETTLE), "0.6.8"),
    "_lock": ((LOAD, SETTLE, READ_ONLY), "0.6.8"),
    "choose_one": ((READ_ONLY, SKIP_OPS), "0.6.8"),
    "is_tuning_mode": ((READ_ONLY,), "0.6.8"),
    "stats": ((GIVE_UP,), "0.6.8"),
    "_profile_single_kernel": ((GIVE_UP,), "0.6.8"),
    "rank_tactics": ((), "0.6.18"),
    "choose_with_protocol": ((), "0.7.4"),
    "_profiling_cache_policies": ((), "0.7"),
    "_profiling_cache_selections": ((), "0.7.4"),
    "_ranked_tactics_cache": ((), "0.6.18"),
    "_file_config_policies": ((), "0.7"),
    "_file_config_selections": ((), "0.7.4"),
    "_invalidated_file_keys": ((), "0.7.4"),
    "_namespaced_records": ((), "0.6.18"),
    "_dirty_namespaces": ((), "0.6.18"),
    "_observed_cache_generations": ((), "0.6.18"),
    "_dirty": ((), "0.6.8"),
    "_dirty_seq": ((), "0.6.8"),
    "_active_managed_store": ((), "0.7"),
}
# What a snapshot holds: the tactics, and where they came from.
_TACTICS = (
    "profiling_cache",
    "_profiling_cache_policies",
    "_profiling_cache_selections",
    "_ranked_tactics_cache",
    "_file_configs",
    "_file_config_policies",
    "_file_config_selections",
    "_invalidated_file_keys",
)
# What load_configs and save_configs change besides tactics; it belongs to other passes.
_BOOKKEEPING = (
    "_namespaced_records",
    "_dirty_namespaces",
    "_observed_cache_generations",
    "_dirty",
    "_dirty_seq",
)
# Where an op enters the tuner and might tune.
_ENTRANCES = ("choose_one", "rank_tactics", "choose_with_protocol")

KEEP_GROUP: Final = object()

Snapshot: TypeAlias = dict[str, Any]
OnStep: TypeAlias = Callable[[str, int, int], None]
Site: TypeAlias = tuple[Any, ...]
"""One call of one profile: the tuner's keys of all runners that could serve it, in order."""


@dataclass(frozen=True)
class Counts:
    """What a pass found, in profiles (op, shapes and extras, one for each token bucket).

    Attributes:
        loaded: Served by what was loaded before the run.
        tuned: Tuned in this run.
        held: Served by what an earlier pass of this process had tuned.
        missing: Without a tactic afterwards, so FlashInfer's default serves them.
        failed: Those of the missing that this rank tried to tune.
    """

    loaded: int = 0
    tuned: int = 0
    held: int = 0
    missing: int = 0
    failed: int = 0


@dataclass
class Tuned:
    """The tuning of one call.

    Attributes:
        began: By ``time.perf_counter``.
        ended: Likewise.
        times: Milliseconds of each tactic that ran, by ``spelt``.
        tactics: How many were tried.
    """

    site: Site
    began: float
    ended: float = 0.0
    times: dict[str, float] = field(default_factory=dict)
    tactics: int = 0


@dataclass
class Pass:
    """What one run of a workload asked of the tuner.

    Attributes:
        before: What the tuner's memory held when the run began.
        form: How this release spells its keys.
        sites: The calls known so far, and whether each was looked up yet.
        done: How many were.
        failures: Keys of which some tactic had failed before the run.
        out_of_memory: Whether memory ran out in it, so that a failure says nothing of a tactic.
        given_up: Calls of which every tactic failed, so that FlashInfer's default serves them.
        here: The call that was looked up last.
        tuned: What was tuned, and when.
        names: The calls' file keys, and the extras of the call that has each.
        blind: Why look-ups could not be observed or told apart, or empty.
    """

    tune: bool
    before: dict[Any, Any]
    form: KeyFormat = field(default_factory=KeyFormat)
    sites: dict[Site, bool] = field(default_factory=dict)
    names: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    done: int = 0
    failures: frozenset[Any] = frozenset()
    out_of_memory: bool = False
    given_up: set[Site] = field(default_factory=set)
    here: Site = ()
    tuned: list[Tuned] = field(default_factory=list)
    blind: str = ""

    def calls(self) -> list[tuple[str, ...]]:
        """The sites by their file keys."""
        return [tuple(self.form.file_key(key) for key in site) for site in self.sites]


class Tuner:
    """This process's FlashInfer AutoTuner.

    Raises:
        TunerError: FlashInfer cannot be imported.
    """

    def __init__(self) -> None:
        try:
            self._api = importlib.import_module("flashinfer.autotuner")
            self._tuner = self._api.AutoTuner.get()
        except Exception as error:  # FlashInfer's import runs CUDA, JIT and DSL code
            raise TunerError(
                f"FlashInfer cannot be imported: {type(error).__name__}: {error}",
                hint="install flashinfer-python 0.6.8 or newer, and what it needs",
                feature="import",
            ) from error
        self._form = KeyFormat()
        self._unread: dict[str, str] = {}
        self._look()
        self._loaded: set[str] = set()

    def _look(self) -> None:
        """Find out how this release spells keys and values, by letting it spell some."""
        try:
            self._form = replace(self._form, with_extras=_keys_hold_extras(self._api))
        except Exception as error:  # noqa: BLE001 - a release that we do not know may do anything
            why = f"its keys are not understood ({type(error).__name__}: {error})"
            self._unread = dict.fromkeys((OBSERVE, LOAD, SETTLE), why)
            return
        try:
            self._form = replace(self._form, with_index=_values_hold_index(self._api))
        except Exception as error:  # noqa: BLE001
            why = f"its memory is not understood ({type(error).__name__}: {error})"
            self._unread = {SETTLE: why}

    def lacking(self) -> dict[str, str]:
        """The features that this release lacks, each with why; found by looking, not by version.

        ``observe``: which look-ups a workload makes. ``load``: that stored tactics win. ``settle``:
        that they outlive a later ``autotune(cache=...)``. ``read_only``: that a pass which must not
        tune does not, even where the workload opens ``autotune()`` itself. ``skip_ops``: leaving
        ops out. ``process_group``: timings averaged over a group. ``give_up``: keeping which
        calls have no tactic that works.
        """
        missing: dict[str, list[str]] = {}
        for name, (features, _since) in NAMES.items():
            if not hasattr(self._tuner, name):
                for feature in features:
                    missing.setdefault(feature, []).append(name)
        found = {feature: f"its AutoTuner has no {', '.join(m)}" for feature, m in missing.items()}
        if self._skips_ops():
            found.pop(SKIP_OPS, None)
        if not hasattr(self._api, "set_autotune_process_group"):
            found[PROCESS_GROUP] = "it has no set_autotune_process_group"
        return {
            feature: f"FlashInfer {self.version}: {why}"
            for feature, why in sorted((self._unread | found).items())
        }

    @property
    def version(self) -> str:
        """FlashInfer's version as it says itself, or an empty text."""
        return str(getattr(sys.modules.get("flashinfer"), "__version__", ""))

    def _skips_ops(self) -> bool:
        return SKIP_OPS in inspect.signature(self._api.autotune).parameters

    def obstacle(self) -> str:
        """Why a stored table cannot be served by this FlashInfer, or an empty string."""
        lacking = self.lacking()
        for needed in (LOAD, OBSERVE):
            if needed in lacking:
                return lacking[needed]
        if getattr(self._tuner, "_active_managed_store", None) is not None:
            return "FlashInfer's own managed store is attached (autotune_v2)"
        if getattr(self._tuner, "is_tuning_mode", False):
            return "someone else's autotune() is open around the warm-up"
        return ""

    def dead(self) -> str:
        """Why nothing more can run on this rank's GPU, or empty: a CUDA error may never go away."""
        cuda = sys.modules.get("torch.cuda")
        if cuda is None or not cuda.is_available() or not cuda.is_initialized():
            return ""
        try:
            cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - torch's class for it changed between releases
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def held(self) -> int:
        """How many tactics the tuner holds, whoever put them there."""
        return sum(len(self._held(name)) for name in ("profiling_cache", "_file_configs"))

    def _held(self, name: str) -> dict[Any, Any]:
        """One of the tuner's dictionaries, empty where the release has none."""
        held: dict[Any, Any] = getattr(self._tuner, name, {})
        return held

    def _locked(self) -> contextlib.AbstractContextManager[Any]:
        lock: contextlib.AbstractContextManager[Any] = getattr(
            self._tuner, "_lock", contextlib.nullcontext()
        )
        return lock

    # -- running ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def run(
        self,
        *,
        tune: bool,
        skip_ops: Collection[str] = (),
        group: object = None,
        on_step: OnStep | None = None,
        opens_itself: bool = False,
    ) -> Iterator[Pass]:
        """Run a workload inside FlashInfer's ``autotune``; its look-ups are taken note of.

        Args:
            tune: Whether calls that no tactic serves are tuned. If not, none is, though the
                workload opens an ``autotune()`` of its own.
            skip_ops: Ops that keep FlashInfer's default.
            group: FlashInfer's process group for timings meanwhile; ``KEEP_GROUP``: as it is.
            on_step: Called with an op, the profiles done, and the profiles known so far.
            opens_itself: Whether the workload opens ``autotune(True)`` around the calls that are to
                be tuned, and only around those.
        """
        options: dict[str, Any] = {}
        if skip_ops and self._skips_ops():
            options["skip_ops"], skip_ops = set(skip_ops), ()
        seen = Pass(tune, dict(self._held("profiling_cache")), self._form)
        seen.failures = self._failures()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._quiet())
            stack.enter_context(self._with_group(group))
            stack.enter_context(self._observe(seen, on_step))
            stack.enter_context(self._watch_profiling(seen))
            stack.enter_context(self._guard(tune, frozenset(skip_ops)))
            stack.enter_context(self._api.autotune(tune and not opens_itself, **options))
            yield seen

    def counts(self, seen: Pass) -> Counts:
        """What a pass loaded, tuned, and left without a tactic. Call it before ``settle``."""
        kinds = dict.fromkeys(("loaded", "tuned", "held", "missing"), 0)
        with self._locked():
            for site in seen.sites:
                kinds[self._kind(site, seen)] += 1
            # rank_tactics looks nothing up: what it tunes shows in memory only.
            looked_up = {key for site in seen.sites for key in site}
            kinds["tuned"] += sum(
                value is not seen.before.get(key) and key not in looked_up
                for key, value in self._held("profiling_cache").items()
            )
        return Counts(**kinds, failed=kinds["missing"] if seen.tune else 0)

    def _kind(self, site: Site, seen: Pass) -> str:
        memory, filed = self._held("profiling_cache"), self._held("_file_configs")
        if site in seen.given_up:
            return "missing"
        for key in site:
            if key in memory:
                if memory[key] is not seen.before.get(key):
                    return "tuned"
                return "loaded" if self._form.file_key(key) in self._loaded else "held"
        names = [self._form.file_key(key) for key in site]
        if any(name in self._loaded for name in names):
            return "loaded"
        return "held" if any(name in filed for name in names) else "missing"

    # -- tactics ----------------------------------------------------------------------------

    def stamps(self) -> dict[str, str]:
        """What FlashInfer writes into a table's ``_metadata`` on this machine."""
        return self._save().stamps

    def export(self, seen: Pass, also: Iterable[str] = ()) -> Entries:
        """What serves the calls of a pass, tuned by it or hit by it, and those of more file keys.

        Rivals are included: what the tuner holds for a call counts, whatever the runner.

        Raises:
            TunerError: The pass could not be observed, so nobody knows what it asked for; or it
                made calls that a file cannot tell apart.
        """
        if seen.blind:
            raise TunerError(seen.blind, feature=OBSERVE)
        calls = {rival_key(name) for call in seen.calls() for name in call}
        calls.update(rival_key(name) for name in also)
        with self._locked():
            calls.update(
                rival_key(self._form.file_key(key))
                for key, value in self._held("profiling_cache").items()
                if value is not seen.before.get(key)
            )
        entries = self._save().entries
        return {name: entry for name, entry in entries.items() if rival_key(name) in calls}

    def load(self, entries: Entries, stamps: dict[str, Any]) -> Snapshot:
        """Make entries win over whatever the tuner holds for the same calls.

        Entries and records of other passes stay as they are.

        Returns:
            What to give back to undo it.

        Raises:
            TunerError: FlashInfer refused the table. Nothing has changed then.
        """
        before = self.snapshot()
        accepted = False
        try:
            with self._scratch() as path, self._locked():
                self._forget({rival_key(name) for name in entries})
                path.write_bytes(Table(entries, stamps).render())
                accepted = self._tuner.load_configs(str(path))
                # FlashInfer leaves out what it knows to be outdated; that is tuned again.
                self._loaded.update(entries.keys() & self._tuner._file_configs.keys())  # noqa: SLF001
        finally:
            if not accepted:
                self.give_back(before)
        if not accepted:
            raise TunerError("FlashInfer refused the table's environment", feature="load_configs")
        return before

    def unload(self, names: Collection[str]) -> None:
        """Forget loaded entries, by their file keys; what is in memory stays."""
        with self._locked():
            self._loaded.difference_update(names)
            for held in ("_file_configs", "_file_config_policies", "_file_config_selections"):
                for name in names:
                    self._held(held).pop(name, None)

    def settle(self, seen: Pass) -> None:
        """Move loaded tactics that a pass looked up into the tuner's memory.

        A later ``autotune(cache=...)`` of someone else drops what was loaded, but not what is in
        memory; and a call is served from memory as fast as after tuning.
        """
        if seen.blind:
            return
        tuner = self._tuner
        with self._locked():
            self._align(seen)
            for key, index in _indices(seen, every=self._form.with_index).items():
                name = self._form.file_key(key)
                loaded = tuner._file_configs.get(name)  # noqa: SLF001
                if key in tuner.profiling_cache or loaded is None:
                    continue
                runner, tactic = loaded
                if runner != runner_of(key) or name not in self._loaded:
                    continue
                tuner.profiling_cache[key] = self._form.value(index, tactic)
                for kept, filed in (
                    ("_profiling_cache_policies", "_file_config_policies"),
                    ("_profiling_cache_selections", "_file_config_selections"),
                ):
                    value = self._held(filed).get(name)
                    if value is not None:
                        getattr(tuner, kept)[(None, key)] = value

    def give_up(self, seen: Pass) -> None:
        """Keep FlashInfer's default for calls of which this pass found that every tactic fails.

        So the next start does not try them all again. Nothing is kept where memory ran out, which
        says nothing of a tactic, or where some runner offered none.
        """
        if seen.blind or not seen.tune or seen.out_of_memory or GIVE_UP in self.lacking():
            return
        failed = self._failures() - seen.failures
        with self._locked():
            memory = self._held("profiling_cache")
            default = self._form.value(0, DEFAULT_TACTIC)
            # A merge may have brought what another rank found to work.
            seen.given_up = {site for site in seen.given_up if memory.get(site[0]) == default}
            for site in seen.sites:
                if failed.issuperset(site) and self._kind(site, seen) == "missing":
                    memory.setdefault(site[0], default)
                    seen.given_up.add(site)

    def _failures(self) -> frozenset[Any]:
        """The keys of which some tactic failed in this process, as FlashInfer's statistics say."""
        failed = getattr(getattr(self._tuner, "stats", None), "failed_profiling_count", {})
        return frozenset(key for keys in failed.values() for key in keys)

    def _align(self, seen: Pass) -> None:
        """Let memory say of a file key what a file would say of it.

        Memory tells runners of one class apart by their attributes, a file does not: it keeps the
        tactic that was stored last, which is then what a later start serves to all of them.
        """
        memory, form = self._tuner.profiling_cache, self._form
        mine = {name for call in seen.calls() for name in call}
        names = {key: name for key in memory if (name := form.file_key(key)) in mine}
        last = {name: form.tactic(memory[key]) for key, name in names.items()}
        for key, name in names.items():
            if form.tactic(memory[key]) != last[name]:
                memory[key] = form.with_tactic(memory[key], last[name])

    def snapshot(self) -> Snapshot:
        """What the tuner holds now, for ``give_back``."""
        with self._locked():
            held = {name: _copied(self._tuner, name) for name in _TACTICS + _BOOKKEEPING}
        return {**held, "loaded": set(self._loaded)}

    def give_back(self, snapshot: Snapshot) -> None:
        """Put back what the tuner held when the snapshot was taken."""
        with self._locked():
            self._loaded = set(snapshot["loaded"])
            for name in _TACTICS + _BOOKKEEPING:
                _put_back(self._tuner, name, snapshot[name])

    def _forget(self, calls: Collection[str]) -> None:
        def mine(key: Any) -> bool:  # noqa: ANN401 - FlashInfer is untyped
            return rival_key(key if isinstance(key, str) else self._form.file_key(key)) in calls

        for name in ("profiling_cache", "_ranked_tactics_cache"):
            held = self._held(name)
            for key in [key for key in held if mine(key)]:
                del held[key]
        for name in ("_profiling_cache_policies", "_profiling_cache_selections"):
            held = self._held(name)
            for owner, key in [pair for pair in held if mine(pair[1])]:
                if owner is None:  # other owners are managed stores
                    del held[(owner, key)]
        for name in ("_file_configs", "_file_config_policies", "_file_config_selections"):
            held = self._held(name)
            for text in [text for text in held if mine(text)]:
                del held[text]

    def _save(self) -> Table:
        with self._scratch() as path:
            self._tuner.save_configs(str(path))
            return parse(path.read_bytes())

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A file for FlashInfer to write or read; its notes on that file do not stay."""
        kept = {name: _copied(self._tuner, name) for name in _BOOKKEEPING}
        with tempfile.TemporaryDirectory(prefix="fi_flags-") as directory, self._quiet():
            try:
                yield Path(directory, "table.json")
            finally:
                for name, value in kept.items():
                    _put_back(self._tuner, name, value)

    # -- surroundings -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _observe(self, seen: Pass, on_step: OnStep | None) -> Iterator[None]:
        """Take note of each look-up, on this tuner object only."""
        why = self.lacking().get(OBSERVE)
        if why:
            seen.blind = why
            yield
            return

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            def search_cache(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - FlashInfer's own
                found = original(*args, **kwargs)
                try:
                    self._note(seen, on_step, *args, **kwargs)
                except Exception as error:  # noqa: BLE001 - must not disturb what is watched
                    text = f"look-ups could not be observed: {type(error).__name__}: {error}"
                    seen.blind = seen.blind or text
                return found

            return search_cache

        with _wrapped(self._tuner, "search_cache", watch):
            yield

    @contextlib.contextmanager
    def _watch_profiling(self, seen: Pass) -> Iterator[None]:
        """Take note of when a tactic is timed, and whether it runs out of memory meanwhile."""
        if GIVE_UP in self.lacking():
            yield
            return
        import torch  # noqa: PLC0415 - FlashInfer has brought it

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            def profile(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - FlashInfer's own
                if not seen.tuned or seen.tuned[-1].site != seen.here:
                    seen.tuned.append(Tuned(seen.here, time.perf_counter()))
                last = seen.tuned[-1]
                try:
                    milliseconds = original(*args, **kwargs)
                except Exception as error:
                    # A kernel of FlashInfer's own says it in words only.
                    said = "out of memory" in str(error).lower()
                    if said or isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
                        seen.out_of_memory = True
                    raise
                finally:
                    last.ended, last.tactics = time.perf_counter(), last.tactics + 1
                with contextlib.suppress(Exception):  # what is watched must not be disturbed
                    last.times[_timed(*args, **kwargs)] = float(milliseconds)
                return milliseconds

            return profile

        with _wrapped(self._tuner, "_profile_single_kernel", watch):
            yield

    @contextlib.contextmanager
    def _guard(self, tune: bool, skip_ops: frozenset[str]) -> Iterator[None]:  # noqa: FBT001
        """Hold ``tune=False`` also inside an ``autotune(True)`` that the workload opens itself.

        And leave ops out where FlashInfer has no ``skip_ops``, as later releases do it: such an op
        gets the first runner's fallback tactic.
        """
        lacking = self.lacking()
        if READ_ONLY in lacking:
            tune = True
        if tune and (not skip_ops or SKIP_OPS in lacking):
            yield
            return

        def guard(original: Callable[..., Any]) -> Callable[..., Any]:
            def entrance(custom_op: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                if custom_op in skip_ops:
                    runners = kwargs["runners"] if "runners" in kwargs else args[0]
                    return runners[0], -1
                if tune:
                    return original(custom_op, *args, **kwargs)
                with self._not_tuning():
                    return original(custom_op, *args, **kwargs)

            return entrance

        with contextlib.ExitStack() as stack:
            for name in _ENTRANCES:
                if hasattr(self._tuner, name):
                    stack.enter_context(_wrapped(self._tuner, name, guard))
            yield

    @contextlib.contextmanager
    def _not_tuning(self) -> Iterator[None]:
        with self._locked():  # FlashInfer holds the same lock while it tunes
            mode = self._tuner.is_tuning_mode
            self._tuner.is_tuning_mode = False
            try:
                yield
            finally:
                self._tuner.is_tuning_mode = mode

    def _note(
        self,
        seen: Pass,
        on_step: OnStep | None,
        custom_op: str,
        runners: list[Any],
        input_shapes: Any,  # noqa: ANN401
        tuning_config: Any,  # noqa: ANN401
        inputs: list[Any] | None = None,
        **_options: Any,  # noqa: ANN401
    ) -> None:
        extras = [() if inputs is None else r.get_cache_key_extras(inputs) for r in runners]

        def site(shapes: Any) -> Site:  # noqa: ANN401
            return tuple(
                self._tuner._get_cache_key(custom_op, runner, shapes, tuning_config, extra)  # noqa: SLF001
                for runner, extra in zip(runners, extras, strict=True)
            )

        def note(site: Site, looked_up: bool) -> None:  # noqa: FBT001
            seen.sites.setdefault(site, looked_up)
            for key in site:
                name = seen.form.file_key(key)
                if seen.names.setdefault(name, extras_of(key)) != extras_of(key):
                    seen.blind = seen.blind or (
                        f"calls of {custom_op} differ in extras that this FlashInfer's file keys "
                        f"leave out, so a file would mix up their tactics: {name}"
                    )

        here = seen.here = site(input_shapes)
        if here not in seen.sites:
            # All buckets of the call, also those that this look-up, outside tuning, leaves out.
            if inputs is not None:
                profiles = self._tuner._generate_optimization_profiles(tuning_config, inputs)  # noqa: SLF001
                for profile in profiles:
                    note(site(profile.get_opt_shapes()), looked_up=False)
            note(here, looked_up=False)
        if not seen.sites[here]:
            seen.sites[here] = True
            seen.done += 1
            if on_step is not None:
                on_step(custom_op, seen.done, len(seen.sites))

    @contextlib.contextmanager
    def _with_group(self, group: object) -> Iterator[None]:
        if group is KEEP_GROUP or PROCESS_GROUP in self.lacking():
            yield
            return
        before = self._api.get_autotune_process_group()
        self._api.set_autotune_process_group(group)
        try:
            yield
        finally:
            self._api.set_autotune_process_group(before)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Hold back FlashInfer's progress bars, what it logs below a warning, and repetitions."""
        module = sys.modules[type(self._tuner).__module__]
        logger, bars = getattr(module, "logger", None), getattr(module, "tqdm", None)
        only_warnings = _WarningsOnce()  # an object of our own: removing it leaves others' alone
        if logger is not None:
            logger.addFilter(only_warnings)
        if isinstance(bars, types.ModuleType):
            module.tqdm = types.SimpleNamespace(tqdm=_NoBar)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if isinstance(bars, types.ModuleType):
                module.tqdm = bars  # type: ignore[attr-defined]
            if logger is not None:
                logger.removeFilter(only_warnings)


def _indices(seen: Pass, *, every: bool) -> dict[Any, int]:
    """The keys of a pass, each with its runner's place in the call's list of runners.

    Args:
        seen: The pass.
        every: Leave out a key whose place differs from call to call.
    """
    places: dict[Any, set[int]] = {}
    for site in seen.sites:
        for index, key in enumerate(site):
            places.setdefault(key, set()).add(index)
    return {key: min(found) for key, found in places.items() if not every or len(found) == 1}


def _timed(runner: Any, _inputs: Any, tactic: Any, *_: Any, **__: Any) -> str:  # noqa: ANN401
    return spelt(type(runner).__name__, tactic)


@contextlib.contextmanager
def _wrapped(
    tuner: Any,  # noqa: ANN401 - FlashInfer is untyped
    name: str,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Put a wrapper around one method of this tuner object, and take only that off again."""
    original = getattr(tuner, name)
    own = vars(tuner).get(name)  # someone else's wrapper, which must stay
    wrapper = functools.wraps(original)(wrap(original))
    setattr(tuner, name, wrapper)
    try:
        yield
    finally:
        if vars(tuner).get(name) is wrapper:
            if own is None:
                delattr(tuner, name)
            else:
                setattr(tuner, name, own)


@functools.cache
def _keys_hold_extras(api: Any) -> bool:  # noqa: ANN401
    """Whether file keys tell calls apart that differ in extras only.

    Keys that know their own file key do. Of others, a tuner of its own is asked to save one.

    Raises:
        ValueError: It saved something else.
    """
    if hasattr(getattr(api, "ProfilingCacheKey", None), "file_key"):
        return True
    tuner = api.AutoTuner()
    key = ("fi_flags::look", "Runner", 0, ((1,),), ("extra",))
    tuner.profiling_cache[key] = (0, 7, None)
    with tempfile.TemporaryDirectory(prefix="fi_flags-") as directory:
        path = Path(directory, "table.json")
        tuner.save_configs(str(path))
        saved = set(parse(path.read_bytes()).entries)
    for with_extras in (True, False):
        if saved == {KeyFormat(with_extras).file_key(key)}:
            return with_extras
    raise ValueError(f"a file calls {key} {', '.join(sorted(saved)) or 'nothing'}")


@functools.cache
def _values_hold_index(api: Any) -> bool:  # noqa: ANN401
    """Whether memory's values begin with the runner's place in the call's list of runners.

    Raises:
        ValueError: A tuner of its own understands neither.
    """

    class Runner(api.TunableRunner):  # type: ignore[misc]
        def get_valid_tactics(self, *_: object) -> list[int]:
            return [7]

        def forward(self, inputs: list[Any], **_: object) -> Any:  # noqa: ANN401
            return inputs[0]

    tuner, runner = api.AutoTuner(), Runner()
    op, shapes, config = "fi_flags::look", ((1,),), api.TuningConfig()
    key = tuner._get_cache_key(op, runner, shapes, config)  # noqa: SLF001
    for with_index in (False, True):
        tuner.profiling_cache[key] = KeyFormat(with_index=with_index).value(0, 7)
        with contextlib.suppress(ValueError):  # too many values to unpack, or too few
            if tuner.search_cache(op, [runner], shapes, config) == (True, 0, 7, None):
                return with_index
    raise ValueError("neither (tactic, profile) nor (runner, tactic, profile)")


class _NoBar:
    """In place of a tqdm bar; a disabled one would still make a semaphore for all processes."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def update(self, _done: int = 1) -> None:
        pass

    def close(self) -> None:
        pass


class _WarningsOnce(logging.Filter):
    """Lets warnings pass, each text once: memory may run out in every profile."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return False
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - whose message is malformed, its handler says
            return True
        new = text not in self._said
        self._said.add(text)
        return new


def _copied(tuner: Any, name: str) -> Any:  # noqa: ANN401
    """A shallow copy of one of the tuner's attributes; None where the release has none."""
    value = getattr(tuner, name, None)
    return value.copy() if isinstance(value, dict | set) else value


def _put_back(tuner: Any, name: str, value: Any) -> None:  # noqa: ANN401
    """Undo what happened to one attribute since ``_copied``, in the very same container."""
    held = getattr(tuner, name, None)
    if isinstance(held, dict | set):
        held.clear()
        held.update(value)
    elif held is not None:
        setattr(tuner, name, value)


def _mean(value: float, api: Any) -> float:  # noqa: ANN401
    """The mean over FlashInfer's process group, which its own timer makes of a tactic's times."""
    group = getattr(api, "get_autotune_process_group", lambda: None)()
    if group is None:
        return value
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total.item() / dist.get_world_size(group))


@contextlib.contextmanager
def wall_clock(repeat: int | None = None) -> Iterator[None]:
    """Stand in for what a machine without CUDA lacks, so that FlashInfer's real tuner runs there.

    FlashInfer times a tactic with CUDA events and asks whether a stream is being captured; here a
    tactic's time is the best of several calls by the wall clock, and nothing is captured. This is
    for CPU workloads and tests; on a GPU it would be wrong.

    Args:
        repeat: Calls that count; by default as many as FlashInfer makes, after as many to warm up.
    """
    import torch  # noqa: PLC0415 - importing fi_flags must not cost torch

    api = importlib.import_module("flashinfer.autotuner")
    auto_tuner = api.AutoTuner

    def profile(
        tuner: Any,  # noqa: ANN401
        runner: Any,  # noqa: ANN401
        inputs: list[Any],
        tactic: Any,  # noqa: ANN401
        *_args: Any,  # noqa: ANN401
        input_tensor_batches: Any = None,  # noqa: ANN401, ARG001
        tuning_config: Any = None,  # noqa: ANN401, ARG001
        **kwargs: Any,  # noqa: ANN401
    ) -> float:
        best = math.inf
        try:
            for _ in range(repeat or tuner.warmup + tuner.repeat):
                began = time.perf_counter()
                runner(inputs, tactic=tactic, **kwargs)
                best = min(best, (time.perf_counter() - began) * 1e3)
        except BaseException:
            _mean(math.inf, api)  # the others wait for this rank there
            raise
        return _mean(best, api)

    kept = auto_tuner._profile_single_kernel, torch.cuda.is_current_stream_capturing  # noqa: SLF001
    auto_tuner._profile_single_kernel = profile  # noqa: SLF001
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        auto_tuner._profile_single_kernel, torch.cuda.is_current_stream_capturing = kept  # noqa: SLF001


@contextlib.contextmanager
def tuner_per_thread() -> Iterator[None]:
    """Give each thread an AutoTuner of its own, for tests whose ranks are threads.

    FlashInfer has one tuner in a process; ranks that shared it would tune into each other's memory.
    """
    auto_tuner = importlib.import_module("flashinfer.autotuner").AutoTuner
    this_thread = threading.local()

    def get(_cls: object) -> Any:  # noqa: ANN401 - FlashInfer is untyped
        if not hasattr(this_thread, "tuner"):
            this_thread.tuner = auto_tuner()
        return this_thread.tuner

    kept = vars(auto_tuner)["get"]
    auto_tuner.get = classmethod(get)
    try:
        yield
    finally:
        auto_tuner.get = kept
