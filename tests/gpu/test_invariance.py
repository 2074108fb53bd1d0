"""In batch-invariant mode the bits of KV and tokens are the same, whoever else is in the batch and however it is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.invariance import SHAPE, Machine, Run, assert_same
from tests.support.on_cuda import on_cuda

pytestmark = pytest.mark.cuda

NAMES = ["tiny-qwen3", "tiny-llama", "tiny-mistral", "tiny-gemma2"]


@pytest.fixture(scope="module", params=NAMES)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    executor = on_cuda(request.param, SHAPE, "bfloat16", invariant=True)
    yield Machine(executor)
    executor.close()


@pytest.fixture(scope="module")
def alone(machine: Machine) -> Run:
    return machine.run()


@pytest.mark.parametrize("chunk_tokens", [1, 16, 37, 64, 100])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(machine: Machine, alone: Run, chunk_tokens: int) -> None:
    assert_same(machine, machine.run(chunk_tokens), alone)


@pytest.mark.parametrize("company", [1, 5, 23])
@pytest.mark.parametrize("first", [False, True], ids=["behind it", "before it"])
def test_bits_do_not_depend_on_the_company(machine: Machine, alone: Run, company: int, first: bool) -> None:
    assert_same(machine, machine.run(company=company, company_first=first), alone)
    assert_same(machine, machine.run(chunk_tokens=29, company=company, company_first=first), alone)
