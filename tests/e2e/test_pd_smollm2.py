"""The embedded model in float32, prefilled here and decoded there: the tokens of one instance, but for counted near-ties."""

from __future__ import annotations

import pytest

from tests.support.cluster import cluster, complete, handed_over
from tests.support.server import ServerProcess, baton_serve

pytestmark = pytest.mark.smollm2

OPTIONS = (
    "smollm2", "--dtype", "float32", "--quantization", "none", "--threads", "1", "--kv-blocks", "64",
    "--served-model-name", "m", "--max-num-batched-tokens", "32", "--max-num-seqs", "8",
)  # fmt: skip
UNDECIDED = 1e-3
"""Of the two best log-probabilities: closer than float32 tells apart in another batch."""
PROMPTS = (
    "The capital of France is a city that everybody in Europe knows, and its name is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who had",
    "A list of the planets of our solar system, from the one nearest to the sun to the farthest:",
    "def fibonacci(n):\n    # returns the first n numbers of the sequence\n    numbers = []\n",
)


def answers(server: ServerProcess) -> list[tuple[list[int], list[float]]]:
    """Tokens, and how far the best two were apart at each."""
    made = []
    for prompt in PROMPTS:
        (choice,) = complete(server.url, prompt=prompt, logprobs=2).json()["choices"]
        best = [sorted(step.values(), reverse=True) for step in choice["logprobs"]["top_logprobs"]]
        made.append((choice["token_ids"], [pair[0] - pair[1] for pair in best]))
    return made


@pytest.mark.slow
def test_the_embedded_model_says_the_same_when_a_peer_prefills() -> None:
    with baton_serve(*OPTIONS) as mixed:
        wanted = answers(mixed)
    with cluster(*OPTIONS) as running:
        (server,) = running.decodes
        given = answers(server)
        assert handed_over(server) > 0
        running.settle()
    ties = 0
    for (tokens, _), (reference, gaps) in zip(given, wanted, strict=True):
        first = next((at for at, pair in enumerate(zip(tokens, reference, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            ties += 1
            assert gaps[first] < UNDECIDED, f"token {first}: {tokens[first]} for {reference[first]}, gap {gaps[first]}"
    print(f"{len(PROMPTS)} prompts, {ties} left the mixed instance's answer at a tie")
