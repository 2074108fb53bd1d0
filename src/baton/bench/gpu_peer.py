"""The peer: continuous batching of `transformers`, with the same weights and load.

Owns how it is called. It is given what it is said to like best: paged attention over flash kernels where they are installed,
CUDA graphs and asynchronous batching as it sees fit. Its warm-up is not in the time.
"""

from __future__ import annotations

import dataclasses
import time

from transformers import GenerationConfig, PreTrainedModel

from baton.bench.gpu_serve import ClosedLoopLoad
from baton.core.errors import BatonError
from baton.executor.model_loading import load_shape

LOOK_S = 0.5


class PeerFailed(BatonError):
    """The peer did not finish the load; the message says how far it got."""


@dataclasses.dataclass(frozen=True, slots=True)
class PeerRun:
    seconds: float
    output_tokens: int
    attention: str

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


def load_peer(shape: str, device: str) -> PreTrainedModel:
    """The executor's model, loaded by `transformers`."""
    model = load_shape(shape, "bfloat16", device).model
    model.set_attn_implementation("sdpa")
    return model


def run_peer(model: PreTrainedModel, load: ClosedLoopLoad, limit_s: float) -> PeerRun:
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=load.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = load.prompts(int(model.config.vocab_size))
    batching = model.continuous_batching_context_manager(generation_config=settings)  # type: ignore[operator]
    with batching as manager:
        attention = str(model.config._attn_implementation)
        began_s = time.perf_counter()
        manager.add_requests(prompts, max_new_tokens=load.output_tokens)
        finished = tokens = 0
        while finished < load.requests:
            answer = manager.get_result(timeout=LOOK_S)
            if answer is not None and answer.is_finished():
                if answer.error is not None:
                    raise PeerFailed(f"a request of the peer failed: {answer.error}")
                finished += 1
                tokens += len(answer.generated_tokens)
            spent_s = time.perf_counter() - began_s
            if spent_s > limit_s or not manager.is_running():
                raise PeerFailed(f"after {spent_s:.0f} s {finished} of {load.requests} requests were done")
        return PeerRun(time.perf_counter() - began_s, tokens, attention)
