"""The sampler on the device chooses what the sampler of the host chooses, from vocabularies as large as they get."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.core.engine.request import Sampling
from baton.executor.sampling import Sampler

pytestmark = pytest.mark.cuda

VOCABULARY, ROWS = 151_936, 48
WISHES = [
    Sampling(seed=row, choice=row % 3, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for row, (temperature, top_k, top_p, min_p) in enumerate(
        [
            (0.0, 0, 1.0, 0.0),
            (1.0, 0, 1.0, 0.0),
            (0.7, 0, 0.9, 0.0),
            (1.3, 40, 1.0, 0.0),
            (1.0, 50, 0.8, 0.05),
            (0.9, 0, 1.0, 0.1),
        ]
        * (ROWS // 6)
    )
]
SLOTS, POSITIONS = np.arange(ROWS, dtype=np.int32), np.arange(100, 100 + ROWS, dtype=np.int32)


def rows_of(kind: str) -> torch.Tensor:
    """On the host, in float32."""
    stream = torch.Generator().manual_seed(4)
    rows = torch.randn(ROWS, VOCABULARY, generator=stream) * 4
    match kind:
        case "tied":
            rows = rows.round()
        case "rounded to bfloat16":
            rows = rows.bfloat16().float()
        case "broken":
            rows[torch.rand(ROWS, VOCABULARY, generator=stream) < 0.01] = float("nan")
            rows[0] = float("-inf")
    return rows


def chosen_here(rows: torch.Tensor) -> list[int]:
    sampler = Sampler(ROWS, VOCABULARY, torch.device("cpu"))
    for slot, wish in enumerate(WISHES):
        sampler.start(slot, np.array([1], np.int32), 1, wish)
    return sampler.sample(rows, SLOTS, POSITIONS.astype(np.int64)).tokens.tolist()


def near_a_cut(row: torch.Tensor, wish: Sampling) -> bool:
    """Whether the rounding of sums alone could decide what is inside top-p."""
    if wish.temperature == 0 or wish.top_p >= 1:
        return False
    values = (row.double().nan_to_num(nan=float("-inf")) / wish.temperature).sort(descending=True).values
    weights = (values - values[0]).exp()[: wish.top_k or None]
    return bool(((weights.cumsum(0) / weights.sum() - wish.top_p).abs() < 1e-6).any())


@pytest.mark.parametrize("kind", ["smooth", "tied", "rounded to bfloat16", "broken"])
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "as a graph"])
def test_tokens_are_those_of_the_host(kind: str, captured: bool) -> None:
    from baton.executor.cuda.sampling import DeviceSampler

    rows, device = rows_of(kind), torch.device("cuda")
    sampler = DeviceSampler(ROWS, VOCABULARY, ROWS, device)
    for slot, wish in enumerate(WISHES):
        sampler.start(slot, wish)
    there, slots, positions = rows.to(device), torch.from_numpy(SLOTS).to(device), torch.from_numpy(POSITIONS).to(device)
    out = torch.full((ROWS,), -1, dtype=torch.int32, device=device)
    mode = sampler.mode_of(SLOTS)
    sampler.draw(there, slots, positions, out, mode)
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sampler.draw(there, slots, positions, out, mode)
        out.fill_(-1)
        graph.replay()
    given, wanted = out.tolist(), chosen_here(rows)
    wrong = [row for row in range(ROWS) if given[row] != wanted[row] and not near_a_cut(rows[row], WISHES[row])]
    assert not wrong, [(row, given[row], wanted[row], WISHES[row]) for row in wrong]
