"""Which torch the set-up takes, told by made-up reports of pip; and what it says of one that it leaves."""

from __future__ import annotations

from typing import Any

import pytest

from tools import torch_setup
from tools.torch_setup import LeaveOffer, TakeOffer, TorchOffer, decide, offer_in

CUDA_NEEDS = (
    "filelock",
    'cuda-bindings<14,>=13.0.3; platform_system == "Linux"',
    'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"',
    'triton==3.7.1; platform_system == "Linux"',
)
CPU_NEEDS = ("filelock", "sympy>=1.13.3", 'nvidia-ml-py; extra == "monitor"')
CPU, CUDA = TorchOffer("2.13.0+cpu", is_cuda=False), TorchOffer("2.13.0", is_cuda=True, bytes=888_000_000)


def report(version: str, *needs: str, system: str = "Linux") -> dict[str, Any]:
    metadata = {"name": "torch", "version": version, "requires_dist": list(needs)}
    return {"environment": {"platform_system": system}, "install": [{"metadata": metadata}]}


@pytest.mark.parametrize(
    ("told", "is_cuda"),
    [
        (report("2.13.0", *CUDA_NEEDS), True),
        (report("2.13.0+cu130"), True),
        (report("2.13.0+cpu", *CPU_NEEDS), False),
        (report("2.13.0", *CPU_NEEDS), False),
        (report("2.13.0", *CUDA_NEEDS, system="Darwin"), False),
    ],
)
def test_a_build_that_needs_cuda_libraries_is_the_cuda_build(told: dict[str, Any], is_cuda: bool) -> None:
    assert offer_in(told).is_cuda is is_cuda


def test_a_cuda_build_is_left_where_no_gpu_is_and_the_message_has_its_size_and_both_ways_on() -> None:
    match decide(CUDA, has_gpu=False, takes_any=False, python=".venv/bin/python"):
        case LeaveOffer(why):
            for told in ("888 MB", "5.4 GB", "install selector", ".venv/bin/python -m pip", "TORCH=any make serve"):
                assert told in why
        case taken:
            pytest.fail(str(taken))


def test_a_size_that_the_registry_does_not_tell_is_left_out() -> None:
    match decide(TorchOffer("2.13.0", is_cuda=True), has_gpu=False, takes_any=False, python="python"):
        case LeaveOffer(why):
            assert "None" not in why
            assert "5.4 GB" in why
        case taken:
            pytest.fail(str(taken))


@pytest.mark.parametrize(
    ("offer", "has_gpu", "takes_any", "remark"),
    [
        (CPU, False, False, None),
        (CPU, True, False, "on the CPU only"),
        (CUDA, True, False, "several gigabytes"),
        (CUDA, False, True, "several gigabytes"),
    ],
)
def test_what_fits_the_machine_or_was_asked_for_is_taken(
    offer: TorchOffer, has_gpu: bool, takes_any: bool, remark: str | None
) -> None:
    match decide(offer, has_gpu, takes_any, "python"):
        case TakeOffer(said):
            assert said == remark or (remark is not None and said is not None and remark in said)
        case left:
            pytest.fail(str(left))


def test_a_torch_that_is_there_is_kept_and_pip_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_setup, "asked_offer", lambda _: pytest.fail("pip was asked"))
    monkeypatch.setattr(torch_setup, "installed", lambda: "2.14.1+cpu")
    assert torch_setup.main([]) == 0


def test_nothing_is_installed_where_the_offer_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_setup, "installed", lambda: None)
    monkeypatch.setattr(torch_setup, "asked_offer", lambda _: CUDA)
    monkeypatch.setattr(torch_setup, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(torch_setup.subprocess, "run", lambda *_, **__: pytest.fail("pip was run"))
    assert torch_setup.main([]) == 1
    assert "TORCH=any" in capsys.readouterr().err


def test_another_word_than_any_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_setup.main(["cuda"]) == 2
    assert "TORCH can be 'any'" in capsys.readouterr().err


def test_the_least_torch_is_the_one_that_the_package_declares() -> None:
    import tomllib

    from baton.executor.torch_build import TORCH_LEAST

    extras = tomllib.loads((torch_setup.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"torch>={'.'.join(map(str, TORCH_LEAST))},<3" in extras["cuda"]
