"""The choice of a device, and the settings that it refuses, by name and before anything slow happens."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.config import BadConfig
from baton.executor.torch_build import TorchBuild, TorchUnusable
from baton.node import devices
from baton.node.devices import (
    ATTENTIONS,
    CUDA_DRAFTS_MAX,
    CUDA_NGRAM_MAX,
    DTYPES,
    HostDevices,
    check_device,
    choose_device,
    find_devices,
)
from baton.node.service import ServeSettings
from baton.node.settings import DeviceChoice, EngineSettings, SpeculateMethod

GPU, PLAIN, BARE = HostDevices(True, True), HostDevices(False, True), HostDevices(True, False)


def wishing(**wishes: Any) -> EngineSettings:
    return EngineSettings("", None, b"", **wishes)


@pytest.mark.parametrize(
    ("asked", "machine", "found"),
    [
        (DeviceChoice.AUTO, GPU, DeviceChoice.CUDA),
        (DeviceChoice.AUTO, PLAIN, DeviceChoice.CPU),
        (DeviceChoice.CPU, GPU, DeviceChoice.CPU),
        (DeviceChoice.CUDA, GPU, DeviceChoice.CUDA),
    ],
)
def test_auto_takes_cuda_where_torch_sees_it(asked: DeviceChoice, machine: HostDevices, found: DeviceChoice) -> None:
    assert choose_device(wishing(device=asked), machine) is found


@pytest.mark.parametrize(
    ("wishes", "machine", "told"),
    [
        ({"device": DeviceChoice.CUDA}, PLAIN, "torch sees no CUDA device"),
        ({"device": DeviceChoice.CUDA}, BARE, "pip install 'baton-serve[cuda]'"),
        ({}, BARE, "needs triton"),
        ({"attention": "gather"}, GPU, "gather is not for CUDA, which has auto, triton (--device auto found CUDA)"),
        ({"attention": "triton"}, PLAIN, "triton is not for CPU, which has auto, native, gather (--device auto found CPU)"),
        ({"dtype": "float64"}, GPU, "float64 is not for CUDA"),
        ({"batch_invariant": True, "attention": "gather"}, PLAIN, "--batch-invariant on a CPU needs the native kernels"),
    ],
)
def test_what_a_machine_does_not_have_is_told(wishes: dict[str, Any], machine: HostDevices, told: str) -> None:
    with pytest.raises(BadConfig) as raised:
        choose_device(wishing(**wishes), machine)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("wishes", "told"),
    [
        ({"device": DeviceChoice.CPU, "attention": "triton"}, "triton is not for CPU"),
        ({"device": DeviceChoice.CUDA, "attention": "native"}, "native is not for CUDA"),
        ({"device": DeviceChoice.CUDA, "dtype": "float64"}, "float64 is not for CUDA"),
        (
            {"device": DeviceChoice.CPU, "batch_invariant": True, "dtype": "float16"},
            "--batch-invariant on a CPU needs the native kernels",
        ),
        (
            {"device": DeviceChoice.CUDA, "speculate": SpeculateMethod.NAIVE, "draft_tokens": 16},
            "--draft-tokens 16 is more than the 15",
        ),
        (
            {"device": DeviceChoice.CUDA, "speculate": SpeculateMethod.NGRAM, "ngram_max": 32},
            "--ngram-max 32 is more than the 31",
        ),
    ],
)
def test_what_no_machine_could_do_is_refused_before_the_model_is_looked_for(wishes: dict[str, Any], told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        ServeSettings(model="no such model", engine=wishing(**wishes))


def test_the_bounds_of_drafts_on_cuda_are_those_of_its_kernels() -> None:
    kernels = pytest.importorskip(
        "baton.executor.cuda.kernels_ngram", reason="kernels need Triton, which is not installed here"
    )
    assert CUDA_NGRAM_MAX < kernels.LENGTHS
    most = {
        "device": DeviceChoice.CUDA,
        "speculate": SpeculateMethod.NGRAM,
        "draft_tokens": CUDA_DRAFTS_MAX,
        "ngram_max": CUDA_NGRAM_MAX,
    }
    check_device(wishing(**most))
    check_device(wishing(**most | {"device": DeviceChoice.CPU, "draft_tokens": 100, "ngram_max": 100}))


@given(
    device=st.sampled_from(DeviceChoice),
    attention=st.sampled_from(["auto", "native", "gather", "triton"]),
    dtype=st.sampled_from(DTYPES[DeviceChoice.CPU]),
    batch_invariant=st.booleans(),
    machine=st.builds(HostDevices, st.booleans(), st.booleans()),
)
def test_a_device_that_is_chosen_is_there_and_has_all_that_is_asked_of_it(
    device: DeviceChoice, attention: str, dtype: str, batch_invariant: bool, machine: HostDevices
) -> None:
    settings = wishing(device=device, attention=attention, dtype=dtype, batch_invariant=batch_invariant)
    try:
        chosen = choose_device(settings, machine)
    except BadConfig:
        return
    check_device(settings)
    assert device in (DeviceChoice.AUTO, chosen)
    assert attention in ATTENTIONS[chosen]
    assert dtype in DTYPES[chosen]
    if chosen is DeviceChoice.CUDA:
        assert machine.sees_cuda
        assert machine.has_triton
    elif batch_invariant:
        assert dtype == "float64" or (attention != "gather" and dtype != "float16")


# ── torch itself ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_torch_looking_for_devices_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TorchUnusable, match="torch is not installed"):
        find_devices()


def test_a_torch_that_does_not_load_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "need_torch", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TorchUnusable, match="cannot be imported"):
        find_devices()


@pytest.mark.parametrize(("asked", "warnings"), [(DeviceChoice.AUTO, 1), (DeviceChoice.CPU, 0)])
def test_a_gpu_that_torch_has_no_cuda_for_is_a_warning_unless_the_cpu_was_asked_for(
    asked: DeviceChoice, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(devices, "_installed_build", lambda: TorchBuild("2.13.0+cpu", None, False))
    find_devices(asked)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
