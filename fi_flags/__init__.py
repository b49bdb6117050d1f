"""fi_flags: a feature flag for FlashInfer's persistent autotune cache.

Importing it costs nothing: each public name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fi_flags.decision import Decision as Decision
    from fi_flags.decision import decide as decide
    from fi_flags.report import Report as Report
    from fi_flags.settings import FlashInferSettings as FlashInferSettings
    from fi_flags.warmup import flashinfer_autotune as flashinfer_autotune
    from fi_flags.warmup import warm_up as warm_up

__version__ = "0.1.0"

_HOMES: Final = {
    "Decision": "decision",
    "FlashInferSettings": "settings",
    "Report": "report",
    "decide": "decision",
    "flashinfer_autotune": "warmup",
    "warm_up": "warmup",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
