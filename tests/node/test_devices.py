"""Where an engine computes, and which wishes are refused there, by name and before anything slow happens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.config import BadConfig
from baton.node.devices import ATTENTIONS, CUDA_DRAFTS_MAX, CUDA_NGRAM_MAX, DTYPES, Machine, check_device, choose_device
from baton.node.service import ServeSettings
from baton.node.settings import EngineSettings, OnDevice, Speculate

GPU, PLAIN, BARE = Machine(True, True), Machine(False, True), Machine(True, False)


def wishing(**wishes: Any) -> EngineSettings:
    return EngineSettings("", None, b"", **wishes)


@pytest.mark.parametrize(
    ("asked", "machine", "found"),
    [
        (OnDevice.AUTO, GPU, OnDevice.CUDA),
        (OnDevice.AUTO, PLAIN, OnDevice.CPU),
        (OnDevice.CPU, GPU, OnDevice.CPU),
        (OnDevice.CUDA, GPU, OnDevice.CUDA),
    ],
)
def test_auto_takes_cuda_where_torch_sees_it(asked: OnDevice, machine: Machine, found: OnDevice) -> None:
    assert choose_device(wishing(device=asked), machine) is found


@pytest.mark.parametrize(
    ("wishes", "machine", "told"),
    [
        ({"device": OnDevice.CUDA}, PLAIN, "torch sees no CUDA device"),
        ({"device": OnDevice.CUDA}, BARE, "pip install 'baton-serve[cuda]'"),
        ({}, BARE, "needs triton"),
        ({"attention": "gather"}, GPU, "gather is not for CUDA, which has auto, triton (--device auto found CUDA)"),
        ({"attention": "triton"}, PLAIN, "triton is not for CPU, which has auto, native, gather (--device auto found CPU)"),
        ({"dtype": "float64"}, GPU, "float64 is not for CUDA"),
        ({"batch_invariant": True}, PLAIN, "--batch-invariant is for CUDA"),
    ],
)
def test_what_a_machine_does_not_have_is_told(wishes: dict[str, Any], machine: Machine, told: str) -> None:
    with pytest.raises(BadConfig) as raised:
        choose_device(wishing(**wishes), machine)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("wishes", "told"),
    [
        ({"device": OnDevice.CPU, "attention": "triton"}, "triton is not for CPU"),
        ({"device": OnDevice.CUDA, "attention": "native"}, "native is not for CUDA"),
        ({"device": OnDevice.CUDA, "dtype": "float64"}, "float64 is not for CUDA"),
        ({"device": OnDevice.CPU, "batch_invariant": True}, "--batch-invariant is for CUDA"),
        (
            {"device": OnDevice.CUDA, "speculate": Speculate.NAIVE, "draft_tokens": 16},
            "--draft-tokens 16 is more than the 15",
        ),
        ({"device": OnDevice.CUDA, "speculate": Speculate.NGRAM, "ngram_max": 32}, "--ngram-max 32 is more than the 31"),
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
        "device": OnDevice.CUDA,
        "speculate": Speculate.NGRAM,
        "draft_tokens": CUDA_DRAFTS_MAX,
        "ngram_max": CUDA_NGRAM_MAX,
    }
    check_device(wishing(**most))
    check_device(wishing(**most | {"device": OnDevice.CPU, "draft_tokens": 100, "ngram_max": 100}))


@given(
    device=st.sampled_from(OnDevice),
    attention=st.sampled_from(["auto", "native", "gather", "triton"]),
    dtype=st.sampled_from(DTYPES[OnDevice.CPU]),
    batch_invariant=st.booleans(),
    machine=st.builds(Machine, st.booleans(), st.booleans()),
)
def test_a_device_that_is_chosen_is_there_and_has_all_that_is_asked_of_it(
    device: OnDevice, attention: str, dtype: str, batch_invariant: bool, machine: Machine
) -> None:
    settings = wishing(device=device, attention=attention, dtype=dtype, batch_invariant=batch_invariant)
    try:
        chosen = choose_device(settings, machine)
    except BadConfig:
        return
    check_device(settings)
    assert device in (OnDevice.AUTO, chosen)
    assert attention in ATTENTIONS[chosen]
    assert dtype in DTYPES[chosen]
    if chosen is OnDevice.CUDA:
        assert machine.sees_cuda
        assert machine.has_triton
    else:
        assert not batch_invariant
