from __future__ import annotations

import ctypes
import importlib.util
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fi_flags.facts import UNREADABLE, gather_facts


class FakeNvml(SimpleNamespace):
    """Two GPUs, as NVML shows them; anything else is an error."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, driver: bool = True) -> None:
        super().__init__(open=0, driver=driver)

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index > 1:
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid != "GPU-b":
            raise self.NVMLError
        return 1

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:  # noqa: N802
        return "NVIDIA B200" if handle else b"NVIDIA H200"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:  # noqa: N802
        return [[9, 0], [10, 0]][handle]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: None)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


H200, B200, NONE = ("NVIDIA H200", (9, 0)), ("NVIDIA B200", (10, 0)), (None, None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, H200),
        ({"LOCAL_RANK": "1"}, B200),
        ({"LOCAL_RANK": "2"}, NONE),
        ({"CUDA_VISIBLE_DEVICES": "1"}, B200),
        ({"CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "1"}, B200),
        ({"CUDA_VISIBLE_DEVICES": "1,0", "LOCAL_RANK": "1"}, H200),
        ({"CUDA_VISIBLE_DEVICES": " GPU-b , 0"}, B200),
        ({"CUDA_VISIBLE_DEVICES": "GPU-c"}, NONE),
        ({"CUDA_VISIBLE_DEVICES": ""}, NONE),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, NONE),
    ],
)
def test_gpu_is_the_one_this_rank_would_use(
    environ: dict[str, str], expected: tuple[str | None, tuple[int, int] | None], nvml: FakeNvml
) -> None:
    facts = gather_facts(environ)
    assert (facts.gpu, facts.capability) == expected
    assert nvml.open == 0


def test_arch_is_named_as_compilers_do(nvml: FakeNvml) -> None:
    assert gather_facts({}).arch == "sm90"
    assert gather_facts({"LOCAL_RANK": "1"}).arch == "sm100"
    nvml.driver = False
    assert gather_facts({}).arch is None


def test_no_driver_is_no_gpu(nvml: FakeNvml) -> None:
    assert gather_facts({}).driver == "580.1"
    nvml.driver = False
    assert gather_facts({}).gpu is None
    assert gather_facts({}).driver is None
    assert nvml.open == 0


@pytest.mark.usefixtures("nvml")
def test_no_library_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert gather_facts({}).gpu is None


@pytest.mark.usefixtures("nvml")
def test_no_nvml_package_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gather_facts({}).gpu is None


def test_versions_are_those_installed() -> None:
    facts = gather_facts({})
    assert facts.flashinfer == metadata.version("flashinfer-python")
    assert facts.torch == metadata.version("torch")
    assert facts.python == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"torch": "2.11.0+cu130"}, "13.0"),
        ({"torch": "2.6.0+cu128", "nvidia-cuda-runtime-cu12": "12.6.77"}, "12.8"),
        ({"torch": "2.13.0+cpu", "nvidia-cuda-runtime": "13.0.96"}, None),
        ({"torch": "2.11.0"}, None),
        ({"torch": "2.11.0", "nvidia-cuda-runtime": "13.0.96"}, "13.0.96"),
        ({"torch": "2.9.0", "nvidia-cuda-runtime-cu12": "12.8.90"}, "12.8.90"),
        ({}, None),
    ],
)
def test_cuda_is_what_torch_was_built_for(
    installed: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert gather_facts({}).cuda == expected


@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_frameworks_are_known_by_their_metadata(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(gather_facts({}), framework) is None
    versions = {framework: "0.33.0"}
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name, "1"))
    assert getattr(gather_facts({}), framework) == "0.33.0"


@pytest.mark.parametrize(
    ("spec", "expected"), [(None, None), (object(), UNREADABLE), (ValueError(), UNREADABLE)]
)
def test_package_without_metadata_is_missing_or_unreadable(
    spec: object, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_metadata(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    def find(_name: str) -> object:
        if isinstance(spec, ValueError):
            raise spec
        return spec

    monkeypatch.setattr(metadata, "version", no_metadata)
    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert gather_facts({}).flashinfer == expected


def test_metadata_without_a_version_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: None)
    assert gather_facts({}).flashinfer == UNREADABLE


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, 0)),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "8",
                "LOCAL_RANK": "1",
                "TORCHELASTIC_RESTART_COUNT": "2",
            },
            (3, 8, 1, 2),
        ),
        ({"RANK": "x", "WORLD_SIZE": "0", "LOCAL_RANK": "-1"}, (0, 1, 0, 0)),
    ],
)
def test_topology_comes_from_the_launcher(
    environ: dict[str, str], expected: tuple[int, int, int, int]
) -> None:
    facts = gather_facts(environ)
    assert (facts.rank, facts.world, facts.local_rank, facts.restart) == expected


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    assert gather_facts().rank == 5


@given(
    st.dictionaries(
        st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"]), st.text()
    )
)
def test_nothing_in_the_environment_raises(environ: dict[str, str]) -> None:
    assert gather_facts(environ).world >= 1
