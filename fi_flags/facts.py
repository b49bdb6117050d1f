"""One look at the machine: versions, device, and this rank's place in its world.

Cheap: versions come from package metadata and the GPU from NVML, so neither torch nor
flashinfer is imported, and no CUDA context is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

UNREADABLE: Final = "unknown"


@dataclass(frozen=True)
class Facts:
    """What is true of this process, whatever its operator wants.

    Attributes:
        flashinfer: FlashInfer's version as installed; `unknown` when it is there but does not
            say; None when it is not there.
        torch: torch's version, or None.
        python: Python's version.
        host: This machine's name.
        gpu: The GPU's name, or None without a driver or a visible device.
        capability: Its compute capability (major, minor).
        driver: The version of its driver.
        cuda: The CUDA version that torch was built for, or None for a CPU build.
        vllm: vLLM's version, or None.
        sglang: SGLang's version, or None.
        rank: This process's rank in the world.
        world: How many ranks there are.
        local_rank: Its rank on this machine.
        restart: How often the elastic launcher has restarted the group.
    """

    flashinfer: str | None
    torch: str | None
    python: str
    host: str
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    driver: str | None = None
    cuda: str | None = None
    vllm: str | None = None
    sglang: str | None = None
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    restart: int = 0

    @property
    def arch(self) -> str | None:
        """The architecture's short name, such as sm90."""
        return None if self.capability is None else "sm{}{}".format(*self.capability)


def gather_facts(environ: Mapping[str, str] | None = None) -> Facts:
    """Look at the machine; what cannot be found out is None, and nothing is raised.

    Args:
        environ: The environment; None is the process's.
    """
    environ = os.environ if environ is None else environ
    local_rank = _number(environ, "LOCAL_RANK", 0)
    gpu, capability, driver = _device(environ.get("CUDA_VISIBLE_DEVICES"), local_rank)
    torch = _version("torch", "torch")
    return Facts(
        flashinfer=_version("flashinfer", "flashinfer-python"),
        torch=torch,
        python=sys.version.split()[0],
        host=socket.gethostname(),
        gpu=gpu,
        capability=capability,
        driver=driver,
        cuda=_cuda(torch),
        vllm=_version("vllm", "vllm"),
        sglang=_version("sglang", "sglang"),
        rank=_number(environ, "RANK", 0),
        world=_number(environ, "WORLD_SIZE", 1),
        local_rank=local_rank,
        restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    try:
        return max(int(environ[name]), otherwise)
    except (KeyError, ValueError):
        return otherwise


def _version(module: str, distribution: str) -> str | None:
    """A package's version by its metadata; a module without any is there, but unreadable."""
    try:
        # A damaged distribution can answer None, whatever the annotation says.
        return metadata.version(distribution) or UNREADABLE
    except metadata.PackageNotFoundError:
        pass
    except Exception:  # noqa: BLE001 - damaged metadata: it is there, and does not say
        return UNREADABLE
    try:
        return UNREADABLE if importlib.util.find_spec(module) else None
    except ValueError:  # somebody put a module without a spec there
        return UNREADABLE


def _cuda(torch: str | None) -> str | None:
    """The CUDA version that torch names, as in 2.11.0+cu130; else that of its runtime package."""
    local = (torch or "").partition("+")[2]
    if local:
        named = re.fullmatch(r"cu(\d+)(\d)", local)
        return ".".join(named.groups()) if named else None
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        with contextlib.suppress(Exception):
            return metadata.version(package)
    return None


def _device(
    visible: str | None, local_rank: int
) -> tuple[str | None, tuple[int, int] | None, str | None]:
    """Name, capability and driver of the GPU that this rank would use, by NVML.

    NVML numbers every device of the machine; CUDA_VISIBLE_DEVICES says which of them, by
    number or by UUID, the process calls its first, second, ….
    """
    chosen = str(local_rank)
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        chosen = names[local_rank] if local_rank < len(names) else names[0]
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # importing pynvml costs more than to look for this
        import pynvml  # type: ignore[import-untyped]  # noqa: PLC0415 - may be absent

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no library, no driver: no GPU
        return None, None, None
    try:
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(chosen))
            if chosen.isdecimal()
            else pynvml.nvmlDeviceGetHandleByUUID(chosen)
        )
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        name, driver = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlSystemGetDriverVersion()
        return _text(name), (major, minor), _text(driver)
    except pynvml.NVMLError:
        return None, None, None
    finally:
        pynvml.nvmlShutdown()


def _text(name: Any) -> str:  # noqa: ANN401 - bytes in old releases of pynvml
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
