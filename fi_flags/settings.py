"""The settings: what an operator can say, what it means, and who said it.

Precedence, strongest first: arguments, environment, `.env`, TOML file, default
(`layers.py` reads them). An empty or blank text counts as not set, in every source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BeforeValidator, Field, PrivateAttr, TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from fi_flags.errors import SettingsError
from fi_flags.layers import (
    DEFAULT,
    DOTENV,
    PREFIX,
    Given,
    Inputs,
    brief,
    read_layers,
    refused,
    toml_key,
    variable,
)
from fi_flags.values import (
    WHOLE,
    Access,
    LogFormat,
    Mode,
    OnFailure,
    Split,
    Word,
    one_of,
    parse_directory,
    parse_mode,
    parse_names,
    parse_percent,
    parse_seconds,
    parse_switch,
    parse_text,
)

__all__ = [
    "JSON",
    "PERSISTENT_CACHE_DEFAULT",
    "TODO_LINKS",
    "Access",
    "FlashInferSettings",
    "LogFormat",
    "Mode",
    "OnFailure",
    "Provenance",
    "Split",
    "describe",
    "off_because",
    "plan_values",
    "settings_or_off",
]

# TODO: persistence is off until FlashInfer's file keys, and what serves them, have proven sound.
#   https://github.com/flashinfer-ai/flashinfer/issues/3363  keys drop the runner's extras
#   https://github.com/flashinfer-ai/flashinfer/pull/3367    its fix, in 0.6.13
#   https://github.com/vllm-project/vllm/pull/43119          vLLM turns its cache off
PERSISTENT_CACHE_DEFAULT: Final[bool] = False
TODO_LINKS: Final = (
    "https://github.com/flashinfer-ai/flashinfer/issues/3363",
    "https://github.com/flashinfer-ai/flashinfer/pull/3367",
    "https://github.com/vllm-project/vllm/pull/43119",
)

_LARGEST: Final = 1 << 53  # beyond it, JSON readers lose digits
_NOWHERE: Final = Path("/nonexistent/fi_flags")

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


_Seconds = Annotated[float, BeforeValidator(parse_seconds)]
_Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]
_Switch = Annotated[bool, BeforeValidator(parse_switch)]
_Text = Annotated[str, BeforeValidator(parse_text)]


@dataclass(frozen=True)
class Provenance:
    """Who gave a setting its value.

    Attributes:
        source: `override`, `init`, `env`, `dotenv`, `toml:<path>` or `default`.
        variable: The environment variable of the setting.
        toml: Its dotted name in a TOML file.
        overridden: The values of weaker sources that lost, strongest first.
    """

    source: str
    variable: str
    toml: str
    overridden: tuple[Given, ...] = ()


class FlashInferSettings(BaseSettings):
    """Every setting, validated and frozen; `provenance` says where each value came from.

    Raises:
        SettingsError: a value is not accepted, a setting does not exist, or a file that was
            named cannot be read.
    """

    # Our layers stand in for the sources of pydantic-settings, which cannot take an
    # environment as an argument, say what a value overrode, or notice a misspelt name.
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    persistent_cache: Annotated[Mode, BeforeValidator(parse_mode)] = Field(
        default=parse_mode(PERSISTENT_CACHE_DEFAULT),
        description="keep FlashInfer's autotune results on disk: off, on, auto, shadow or force",
    )
    autotune_cache_dir: Annotated[Path, BeforeValidator(parse_directory)] = Field(
        description="where tables live; by default fi_flags below $VLLM_CACHE_ROOT or the XDG cache"
    )
    autotune_cache_access: Annotated[Access, BeforeValidator(one_of(Access))] = Field(
        default=Access.RW,
        description="rw, ro (never write) or wo (tune afresh and write, never read)",
    )
    autotune_skip_ops: Annotated[frozenset[str], BeforeValidator(parse_names)] = Field(
        default=frozenset(), description="ops that are neither tuned nor loaded, on every rank"
    )
    autotune_distributed_sync: _Switch = Field(
        default=False, description="let FlashInfer average timings over the group on a cold start"
    )
    autotune_split: Annotated[Split, BeforeValidator(one_of(Split))] = Field(
        default=Split.ALL, description="who tunes: all ranks, or the leader for all"
    )
    autotune_join_s: _Seconds = Field(
        default=600.0, description="seconds that the first vote waits for ranks that have not come"
    )
    autotune_timeout_s: _Seconds = Field(
        default=600.0, description="seconds without a heartbeat after which a rank is lost"
    )
    autotune_stall_s: _Seconds = Field(
        default=3600.0, description="seconds without progress after which a live rank is stuck"
    )
    autotune_abort_peers: _Switch = Field(
        default=True, description="end peers still inside the model when a rank is lost or failed"
    )
    autotune_heartbeat_s: _Seconds = Field(
        default=30.0, description="seconds between log lines of a leader that waits or tunes"
    )
    autotune_on_failure: Annotated[OnFailure, BeforeValidator(one_of(OnFailure))] = Field(
        default=OnFailure.RAISE, description="raise, or serve untuned with FlashInfer's defaults"
    )
    autotune_trace: Annotated[Path | None, BeforeValidator(parse_directory)] = Field(
        default=None,
        validate_default=False,
        description="a file in which rank 0 writes, as a Chrome trace, what each rank did when",
    )
    rollout_percent: Annotated[float, BeforeValidator(parse_percent)] = Field(
        default=WHOLE, description="share of deployments, in percent, that auto includes"
    )
    rollout_salt: _Text = Field(default="", description="another salt draws another sample")
    rollout_id: _Text = Field(
        description="what is drawn; by default $MASTER_ADDR unless loopback, else the host name"
    )
    rollout_hosts: _Names = Field(
        default=("*",), description="host name patterns that auto includes"
    )
    rollout_deny_hosts: _Names = Field(
        default=(), description="host name patterns that auto excludes, before any other rule"
    )
    rollout_archs: _Names = Field(
        default=("*",), description="GPU architectures that auto includes, such as sm90"
    )
    gates_file: Annotated[Path | None, BeforeValidator(parse_directory)] = Field(
        default=None,
        validate_default=False,
        description="a TOML file of gates to add, or to lift",
    )
    flags_log: Annotated[LogFormat, BeforeValidator(one_of(LogFormat))] = Field(
        default=LogFormat.AUTO, description="log of the command line: auto, json or console"
    )

    _provenance: dict[str, Provenance] = PrivateAttr(default_factory=dict)
    _warnings: tuple[str, ...] = PrivateAttr(default=())
    _files: tuple[Path | None, tuple[Path, ...]] = PrivateAttr(default=(None, ()))
    _invalid: SettingsError | None = PrivateAttr(default=None)

    def __init__(self, _inputs: Inputs | None = None, **init: Any) -> None:  # noqa: ANN401
        fields = tuple(type(self).model_fields)
        layers = read_layers(_inputs or Inputs(), fields, init)
        given = {
            field: tuple(layer[field] for layer in layers.given if field in layer)
            for field in fields
        }
        try:
            values: dict[str, Any] = {field: all_[0].value for field, all_ in given.items() if all_}
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            accepted = str(first["ctx"]["error"])  # each of our parsers says it so
            raise refused(given[str(first["loc"][0])][0], accepted) from None
        self._check_file(given)
        self._provenance = {
            field: Provenance(
                source=values[0].source if values else DEFAULT,
                variable=variable(field),
                toml=toml_key(field),
                overridden=tuple(one for one in values[1:] if one.source != DEFAULT),
            )
            for field, values in given.items()
        }
        self._warnings = layers.warnings + self._doubts()
        self._files = (layers.file, layers.hidden)

    def _check_file(self, given: Mapping[str, Sequence[Given]]) -> None:
        """Refuse a bad value in a file also where something stronger hides it today."""
        for name, values in given.items():
            for hidden in [one for one in values[1:] if one.source.startswith("toml:")]:
                field = type(self).model_fields[name]
                kind: Any = Annotated[(field.annotation, *field.metadata)]
                try:
                    TypeAdapter(kind).validate_python(hidden.value)
                except ValidationError as error:
                    raise refused(hidden, str(error.errors()[0]["ctx"]["error"])) from None

    @classmethod
    def load(
        cls,
        *,
        environ: Mapping[str, str] | None = None,
        dotenv: Path | None = DOTENV,
        config: Path | None = None,
        **init: Any,  # noqa: ANN401
    ) -> FlashInferSettings:
        """Read the settings from given inputs instead of the process's surroundings.

        Args:
            environ: The environment; None is the process's.
            dotenv: The `.env` file, which need not exist; None reads none.
            config: A TOML file that must exist; None looks in the usual places.
            init: Settings by name; they win over every other source.
        """
        return cls(Inputs(environ, dotenv, config), **init)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is upstream's
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let pydantic-settings read nothing more: the layers are already merged."""
        return (init_settings,)

    @property
    def provenance(self) -> Mapping[str, Provenance]:
        """For each setting, who gave it its value."""
        return MappingProxyType(self._provenance)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What looks like a mistake but stops nothing; the caller logs it."""
        return self._warnings

    @property
    def invalid(self) -> SettingsError | None:
        """The error for which `settings_or_off` fell back to off, if it did."""
        return self._invalid

    @property
    def file(self) -> Path | None:
        """The TOML file that was read, if any."""
        return self._files[0]

    @property
    def hidden(self) -> tuple[Path, ...]:
        """TOML files in the usual places that were not read, since one file only is."""
        return self._files[1]

    def _doubts(self) -> tuple[str, ...]:
        if self.persistent_cache is not Mode.AUTO:
            return ()  # nobody is drawn
        if self.rollout_percent == WHOLE or self.provenance["rollout_id"].source != DEFAULT:
            return ()
        percent, identity = variable("rollout_percent"), variable("rollout_id")
        risk = f"{self.rollout_id!r} is drawn, which another start may not share"
        return (f"{percent} is under 100 and {identity} is not set: {risk}",)


def settings_or_off(**arguments: Any) -> FlashInferSettings:  # noqa: ANN401
    """As `FlashInferSettings.load`, but a bad value gives the defaults with the flag off.

    For servers, which a flag must never stop. The error is kept in `invalid`; `decide` then
    answers INVALID_SETTING, which is logged as an error. Nothing else that was configured is
    taken over: half of a configuration never runs.
    """
    try:
        return FlashInferSettings.load(**arguments)
    except SettingsError as error:
        return off_because(error)
    except Exception as error:  # noqa: BLE001 - a flag never stops a server
        text = f"the settings cannot be read: {type(error).__name__}: {error}"
        return off_because(SettingsError(text, hint="please report this", source="default"))


def off_because(error: SettingsError) -> FlashInferSettings:
    """The defaults with the flag off, for a server whose settings have an error."""
    settings = FlashInferSettings(
        Inputs(environ={}, dotenv=None, places=(), override={}),
        persistent_cache=Mode.OFF,
        autotune_cache_dir=_NOWHERE,
        rollout_id="none",
    )
    settings._invalid = error  # noqa: SLF001 - ours
    return settings


def plan_values(settings: FlashInferSettings) -> dict[str, JSON]:
    """The settings that every rank of a group must share, because the plan depends on them.

    The flag itself is compared by what each rank decided, and deadlines may differ.
    """
    return {
        name: _plain(getattr(settings, name))
        for name in (
            "autotune_cache_access",
            "autotune_skip_ops",
            "autotune_distributed_sync",
            "autotune_split",
            "autotune_on_failure",
        )
    }


def describe(settings: FlashInferSettings) -> dict[str, dict[str, JSON]]:
    """Every setting with its value, its source, and the names to set it by."""
    return {
        name: {
            "value": _plain(getattr(settings, name)),
            "source": origin.source,
            "env": origin.variable,
            "toml": origin.toml,
            "overridden": [
                {"value": _plain(lost.value), "source": lost.source} for lost in origin.overridden
            ],
        }
        for name, origin in settings.provenance.items()
    }


def _plain(value: object) -> JSON:
    """A value as JSON has it; sets are sorted, and what JSON lacks is shown as text."""
    if isinstance(value, Word | Path):
        return str(value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float) and abs(value) < _LARGEST:  # neither nan nor endless
        return value
    if isinstance(value, set | frozenset):
        return [_plain(item) for item in sorted(map(str, value))]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return brief(value)
