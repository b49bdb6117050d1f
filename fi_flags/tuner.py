"""The only contact with FlashInfer: tune, observe, export, load, give back.

Public API does the work: ``autotune``, ``save_configs``, ``load_configs``. Private names are
needed for three things that FlashInfer offers no way to ask: which look-ups a workload made, that
a loaded entry wins over the tuner's memory, and that it outlives a later ``autotune(cache=...)``.
They stand in ``_PRIVATE`` and are probed; where a release lacks one, ``obstacle()`` says so and the
group tunes per rank, as with the flag off.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from fi_flags.errors import TunerError
from fi_flags.table import Entries, Table, parse, rival_key

__all__ = ["KEEP_GROUP", "Counts", "Pass", "Snapshot", "Tuner", "tuner_per_thread", "wall_clock"]

# Private names of AutoTuner that we touch, tested on 0.7.4. The first group must be there; the
# second holds provenance that newer releases keep beside the tactics.
_PRIVATE = ("_lock", "_file_configs", "_get_cache_key", "_generate_optimization_profiles")
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
class Pass:
    """What one run of a workload asked of the tuner.

    Attributes:
        before: What the tuner's memory held when the run began.
        sites: The calls known so far, and whether each was looked up yet.
        done: How many were.
        blind: Why look-ups could not be observed, or empty.
    """

    tune: bool
    before: dict[Any, Any]
    sites: dict[Site, bool] = field(default_factory=dict)
    done: int = 0
    blind: str = ""

    def calls(self) -> list[tuple[str, ...]]:
        """The sites by their file keys."""
        return [tuple(key.file_key for key in site) for site in self.sites]


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
        self._loaded: set[str] = set()

    @property
    def features(self) -> tuple[str, ...]:
        """What this release can do, found by looking at it rather than at its version."""
        options = inspect.signature(self._api.autotune).parameters
        found = {
            "file_key": hasattr(getattr(self._api, "ProfilingCacheKey", None), "file_key"),
            "process_group": hasattr(self._api, "set_autotune_process_group"),
            "skip_ops": "skip_ops" in options,
        }
        return tuple(name for name, there in sorted(found.items()) if there)

    def lacking(self) -> dict[str, str]:
        """What this release cannot do, each with why."""
        known = ("process_group", "skip_ops")
        return {
            name: f"this FlashInfer has no {name}" for name in known if name not in self.features
        }

    def obstacle(self) -> str:
        """Why a stored table cannot be served by this FlashInfer, or an empty string."""
        lacking = [name for name in _PRIVATE if not hasattr(self._tuner, name)]
        if lacking:
            return f"this FlashInfer's AutoTuner has no {', '.join(lacking)}"
        if "file_key" not in self.features:
            return "this FlashInfer's keys are not understood"
        if getattr(self._tuner, "_active_managed_store", None) is not None:
            return "FlashInfer's own managed store is attached (autotune_v2)"
        if self._tuner.is_tuning_mode:
            return "someone else's autotune() is open around the warm-up"
        return ""

    def held(self) -> int:
        """How many tactics the tuner holds, whoever put them there."""
        return len(self._tuner.profiling_cache) + len(self._tuner._file_configs)  # noqa: SLF001

    # -- running ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def run(
        self,
        *,
        tune: bool,
        skip_ops: Collection[str] = (),
        group: object = None,
        on_step: OnStep | None = None,
    ) -> Iterator[Pass]:
        """Run a workload inside FlashInfer's ``autotune``; its look-ups are taken note of.

        Args:
            tune: Whether calls that no tactic serves are tuned.
            skip_ops: Ops that keep FlashInfer's default, where the release can skip ops.
            group: FlashInfer's process group for timings meanwhile; ``KEEP_GROUP``: as it is.
            on_step: Called with an op, the profiles done, and the profiles known so far.
        """
        options: dict[str, Any] = {}
        if skip_ops and "skip_ops" in self.features:
            options["skip_ops"] = set(skip_ops)
        seen = Pass(tune=tune, before=dict(self._tuner.profiling_cache))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._quiet())
            stack.enter_context(self._with_group(group))
            stack.enter_context(self._observe(seen, on_step))
            stack.enter_context(self._api.autotune(tune, **options))
            yield seen

    def counts(self, seen: Pass) -> Counts:
        """What a pass loaded, tuned, and left without a tactic. Call it before ``settle``."""
        kinds = dict.fromkeys(("loaded", "tuned", "held", "missing"), 0)
        with self._tuner._lock:  # noqa: SLF001
            for site in seen.sites:
                kinds[self._kind(site, seen)] += 1
            # rank_tactics looks nothing up: what it tunes shows in memory only.
            looked_up = {key for site in seen.sites for key in site}
            kinds["tuned"] += sum(
                value is not seen.before.get(key) and key not in looked_up
                for key, value in self._tuner.profiling_cache.items()
            )
        return Counts(**kinds, failed=kinds["missing"] if seen.tune else 0)

    def _kind(self, site: Site, seen: Pass) -> str:
        memory = self._tuner.profiling_cache
        for key in site:
            if key in memory:
                if memory[key] is not seen.before.get(key):
                    return "tuned"
                return "loaded" if key.file_key in self._loaded else "held"
        names = [key.file_key for key in site]
        if any(name in self._loaded for name in names):
            return "loaded"
        return "held" if any(n in self._tuner._file_configs for n in names) else "missing"  # noqa: SLF001

    # -- tactics ----------------------------------------------------------------------------

    def stamps(self) -> dict[str, str]:
        """What FlashInfer writes into a table's ``_metadata`` on this machine."""
        return self._save().stamps

    def export(self, seen: Pass, also: Iterable[str] = ()) -> Entries:
        """What serves the calls of a pass, tuned by it or hit by it, and those of more file keys.

        Rivals are included: what the tuner holds for a call counts, whatever the runner.

        Raises:
            TunerError: The pass could not be observed, so nobody knows what it asked for.
        """
        if seen.blind:
            text = f"look-ups could not be observed: {seen.blind}"
            raise TunerError(text, feature="search_cache")
        calls = {rival_key(key.file_key) for site in seen.sites for key in site}
        calls.update(rival_key(name) for name in also)
        with self._tuner._lock:  # noqa: SLF001
            calls.update(
                rival_key(key.file_key)
                for key, value in self._tuner.profiling_cache.items()
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
            with self._scratch() as path, self._tuner._lock:  # noqa: SLF001
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

    def settle(self, seen: Pass) -> None:
        """Move loaded tactics that a pass looked up into the tuner's memory.

        A later ``autotune(cache=...)`` of someone else drops what was loaded, but not what is in
        memory; and a call is served from memory as fast as after tuning.
        """
        tuner = self._tuner
        with tuner._lock:  # noqa: SLF001
            self._align(seen)
            for key in {key for site in seen.sites for key in site}:
                loaded = tuner._file_configs.get(key.file_key)  # noqa: SLF001
                if key in tuner.profiling_cache or loaded is None:
                    continue
                runner, tactic = loaded
                if runner != key.runner_class_name or key.file_key not in self._loaded:
                    continue
                tuner.profiling_cache[key] = (tactic, None)
                for kept, filed in (
                    ("_profiling_cache_policies", "_file_config_policies"),
                    ("_profiling_cache_selections", "_file_config_selections"),
                ):
                    value = getattr(tuner, filed, {}).get(key.file_key)
                    if value is not None:
                        getattr(tuner, kept)[(None, key)] = value

    def _align(self, seen: Pass) -> None:
        """Let memory say of a file key what a file would say of it.

        Memory tells runners of one class apart by their attributes, a file does not: it keeps the
        tactic that was stored last, which is then what a later start serves to all of them.
        """
        memory = self._tuner.profiling_cache
        mine = {key.file_key for site in seen.sites for key in site}
        last = {key.file_key: value for key, value in memory.items() if key.file_key in mine}
        for key, value in memory.items():
            final = last.get(key.file_key, value)
            if value[0] != final[0]:
                memory[key] = final

    def snapshot(self) -> Snapshot:
        """What the tuner holds now, for ``give_back``."""
        with self._tuner._lock:  # noqa: SLF001
            held = {name: _copied(self._tuner, name) for name in _TACTICS + _BOOKKEEPING}
        return {**held, "loaded": set(self._loaded)}

    def give_back(self, snapshot: Snapshot) -> None:
        """Put back what the tuner held when the snapshot was taken."""
        with self._tuner._lock:  # noqa: SLF001
            self._loaded = set(snapshot["loaded"])
            for name in _TACTICS + _BOOKKEEPING:
                _put_back(self._tuner, name, snapshot[name])

    def _forget(self, calls: Collection[str]) -> None:
        tuner = self._tuner
        for name in ("profiling_cache", "_ranked_tactics_cache"):
            held = getattr(tuner, name, {})
            for key in [key for key in held if rival_key(key.file_key) in calls]:
                del held[key]
        for name in ("_profiling_cache_policies", "_profiling_cache_selections"):
            held = getattr(tuner, name, {})
            for owner, key in [pair for pair in held if rival_key(pair[1].file_key) in calls]:
                if owner is None:  # other owners are managed stores
                    del held[(owner, key)]
        for name in ("_file_configs", "_file_config_policies", "_file_config_selections"):
            held = getattr(tuner, name, {})
            for text in [text for text in held if rival_key(text) in calls]:
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
        original = self._tuner.search_cache

        @functools.wraps(original)
        def search_cache(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - FlashInfer's own
            found = original(*args, **kwargs)
            try:
                self._note(seen, on_step, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - watching must not disturb what is watched
                seen.blind = seen.blind or f"{type(error).__name__}: {error}"
            return found

        self._tuner.search_cache = search_cache
        try:
            yield
        finally:
            if self._tuner.__dict__.get("search_cache") is search_cache:
                del self._tuner.search_cache

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

        here = site(input_shapes)
        if here not in seen.sites:
            # All buckets of the call, also those that this look-up, outside tuning, leaves out.
            if inputs is not None:
                profiles = self._tuner._generate_optimization_profiles(tuning_config, inputs)  # noqa: SLF001
                for profile in profiles:
                    seen.sites.setdefault(site(profile.get_opt_shapes()), False)
            seen.sites.setdefault(here, False)
        if not seen.sites[here]:
            seen.sites[here] = True
            seen.done += 1
            if on_step is not None:
                on_step(custom_op, seen.done, len(seen.sites))

    @contextlib.contextmanager
    def _with_group(self, group: object) -> Iterator[None]:
        if group is KEEP_GROUP or "process_group" not in self.features:
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
        """Hold back FlashInfer's progress bars and what it logs below a warning."""
        module = sys.modules[type(self._tuner).__module__]
        logger, bars = getattr(module, "logger", None), getattr(module, "tqdm", None)
        only_warnings = _WarningsOnly()  # an object of our own: removing it leaves others' alone
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


class _NoBar:
    """In place of a tqdm bar; a disabled one would still make a semaphore for all processes."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def update(self, _done: int = 1) -> None:
        pass

    def close(self) -> None:
        pass


class _WarningsOnly(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING


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

    auto_tuner = importlib.import_module("flashinfer.autotuner").AutoTuner

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
        times = []
        for _ in range(repeat or tuner.warmup + tuner.repeat):
            began = time.perf_counter()
            runner(inputs, tactic=tactic, **kwargs)
            times.append(time.perf_counter() - began)
        return min(times) * 1e3

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
