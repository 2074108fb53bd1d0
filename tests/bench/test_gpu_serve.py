"""The engine without its servers: everybody gets the undisturbed answer, and its plans can be run again."""

from __future__ import annotations

import pytest

from baton.bench.gpu_serve import ClosedLoop, ClosedLoopLoad, steps_alone_s
from baton.bench.gpu_steps import SharedPool, StepTimer
from baton.core.engine.request import Sampling
from baton.core.errors import InvariantViolated
from baton.executor.contract import ExecutorShape
from baton.executor.scripted import ScriptedExecutor, undisturbed

SHAPE = ExecutorShape(slots=8, blocks=200, block_size=4, context_tokens=128)


def executor(blocks: int = 200) -> SharedPool:
    return SharedPool(ScriptedExecutor(ExecutorShape(8, blocks, 4, 128), vocabulary=97))


@pytest.mark.parametrize(
    "load",
    [ClosedLoopLoad(5, 20, 9, 5), ClosedLoopLoad(12, 17, 7, 3), ClosedLoopLoad(4, 9, 6, 4, 1.0, lengths=(1, 9, 30, 4))],
    ids=str,
)
@pytest.mark.parametrize("blocks", [200, 40])
def test_every_client_gets_its_undisturbed_answer(load: ClosedLoopLoad, blocks: int) -> None:
    served = ClosedLoop(executor(blocks), load, step_tokens=16).run()
    prompts = load.prompts(97)
    sampling = [Sampling(seed=number, temperature=load.temperature) for number in range(load.requests)]
    wanted = [undisturbed(prompt, one, load.output_tokens, 97) for prompt, one in zip(prompts, sampling, strict=True)]
    assert served.answers() == wanted
    assert served.output_tokens == load.requests * load.output_tokens


def test_the_plans_of_a_run_can_be_run_again_alone() -> None:
    shared = executor()
    served = ClosedLoop(shared, ClosedLoopLoad(10, 20, 9, 4), step_tokens=32).run()
    assert steps_alone_s(shared, served.plans) > 0
    assert steps_alone_s(shared, served.plans) > 0
    assert StepTimer(shared).decode(2, 30).tokens_a_step == 2


def test_whoever_watches_hears_of_every_step() -> None:
    heard: list[int] = []
    served = ClosedLoop(executor(), ClosedLoopLoad(6, 20, 9, 3), 32, heard.append).run()
    assert heard == list(range(1, len(served.plans) + 1))


def test_a_load_that_never_fits_is_an_error_and_no_endless_wait() -> None:
    with pytest.raises(InvariantViolated, match="refused"):
        ClosedLoop(executor(), ClosedLoopLoad(1, 500, 9, 1), 32).run()
