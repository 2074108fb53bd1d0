"""The parts of `baton bench gpu`, on the CPU executor and a model so small that none of it takes time."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from baton.bench import gpu_parts
from baton.bench.copied_masks import copied_masks
from baton.bench.gpu import WRONG, main
from baton.bench.gpu_floor import GpuRates
from baton.bench.gpu_parts import PARTS, GpuBench, Scale, parts_named
from baton.bench.gpu_peer import PeerFailed, PeerRun, load_peer, run_peer
from baton.bench.gpu_profile import Span
from baton.bench.gpu_report import PartResult
from baton.bench.gpu_serve import ClosedLoopLoad
from baton.bench.gpu_steps import CannotMeasure
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.fingerprint import fingerprint_of
from baton.executor.model_loading import LoadedModel, load_shape

SMALL = Scale(
    shape="tiny-qwen3", moe_shape="tiny-qwen3-moe", families=("tiny-llama", "tiny-gemma2"), checked=("tiny-mistral",),
    dtype="float32", slots=48, blocks_max=200, blocks_max_others=200, context_tokens=512, step_tokens=128, batches=(1, 4),
    context=64, long=(2, 300), grid=((2, 32),), prefill_tokens=64, prefills=((1, 16, 0), (2, 16, 32)),
    load=ClosedLoopLoad(6, 20, 8, 4), small_load=ClosedLoopLoad(2, 20, 4, 2), draft_batches=(2,), profile_steps=3,
    constrained_batch=4,
    idle_from_step=2,
    idle_steps=4,
)  # fmt: skip


def on_cpu(
    loaded: LoadedModel, shape: ExecutorShape, *, step_tokens: int, attention: str, batch_invariant: bool
) -> Executor:
    plain = replace(shape, burst=1)
    thread = ThreadPoolExecutor(max_workers=1)
    constraints = CompiledConstraints(copied_masks(loaded.vocabulary))
    fingerprint = fingerprint_of(loaded.mark, "float32", "cpu")
    return TorchCpuExecutor(loaded, plain, fingerprint, None, thread, constraints=constraints)


def bench() -> GpuBench:
    return GpuBench(SMALL, "cpu", on_cpu, GpuRates(1e10, 1e11), lambda _line: None)


def done(name: str) -> PartResult:
    made = bench()
    try:
        result = PARTS[name](made)
    finally:
        made.close()
    assert result.part == name
    return result


def test_tokens_are_checked_against_the_cpu_executor() -> None:
    (row,) = done("check").rows
    assert (row.ratio, row.met) == (1.0, True)
    assert row.unit == "of 96 tokens"


def test_decodes_are_held_against_their_floor() -> None:
    result = done("decode")
    assert [row.what for row in result.rows[:3]] == [f"tiny-qwen3, batch {one}" for one in ("1 × 64", "4 × 64", "2 × 300")]
    assert all(row.ratio is not None and row.ratio > 0 for row in result.rows)
    assert [(point.decodes, point.context_tokens) for point in result.points] == [(1, 64), (4, 64), (2, 300)]
    assert [row.against.split()[0] for row in result.rows[3:]] == ["greedy"] * 3


def test_prefills_are_held_against_the_matrix_rate() -> None:
    result = done("prefill")
    assert [row.what for row in result.rows] == ["tiny-qwen3, 1 × 64", "tiny-qwen3, 8 × 8"]
    assert result.rows[0].target == "≥ 0.6"


def test_the_grid_gives_points_of_both_kinds() -> None:
    points = done("grid").points
    assert [(point.decodes, point.sequences, point.begin_tokens) for point in points] == [(2, 0, 0), (0, 1, 0), (0, 2, 32)]


def test_a_batch_half_constrained_is_held_against_one_without_constraints() -> None:
    rows = done("constrained").rows
    assert [row.what.split(": ")[1] for row in rows] == ["half constrained", "constrained rows"] * 2
    assert rows[0].ratio is not None
    assert rows[1].unit == "tokens/s"


def test_serving_is_held_against_its_own_steps() -> None:
    (row,) = done("serve").rows
    assert row.what == "6 × (20 in, 8 out)"
    assert row.ratio is not None
    assert row.ratio > 0


@pytest.mark.slow
def test_the_other_shapes_and_modes_are_measured() -> None:
    assert [row.what for row in done("moe").rows][:2] == ["tiny-qwen3-moe, batch 1 × 64", "tiny-qwen3-moe, batch 4 × 64"]
    assert {row.what.split(",")[0] for row in done("families").rows} == {"tiny-llama", "tiny-gemma2"}
    assert [row.against.split()[0] for row in done("invariant").rows] == ["usual"] * 3
    assert [row.unit for row in done("drafts").rows] == ["", "ms", "tokens/s"]


@pytest.mark.slow
def test_the_peer_is_given_the_whole_load_only_if_that_fits_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "load_peer", lambda _shape, _device: object())
    asked: list[ClosedLoopLoad] = []

    def told(seconds: float, load: ClosedLoopLoad) -> PeerRun:
        asked.append(load)
        return PeerRun(seconds, load.requests * load.output_tokens, "sdpa")

    for seconds, loads in ((1.0, [SMALL.small_load, SMALL.load]), (60.0, [SMALL.small_load])):
        asked.clear()
        monkeypatch.setattr(gpu_parts, "run_peer", lambda _model, load, _limit_s, took=seconds: told(took, load))
        (row,) = done("peer").rows
        assert asked == loads
        assert row.what == str(loads[-1])


@pytest.mark.slow
def test_the_peer_itself_does_a_load_with_the_same_weights() -> None:
    model = load_peer("tiny-llama", "cpu")
    mine = load_shape("tiny-llama", "bfloat16").model.state_dict()
    assert all(torch.equal(tensor, mine[name]) for name, tensor in model.state_dict().items())
    run = run_peer(model, ClosedLoopLoad(3, 10, 5, 3), limit_s=120.0)
    assert (run.output_tokens, run.attention) == (15, "sdpa")
    with pytest.raises(PeerFailed, match="of 3 requests were done"):
        run_peer(model, ClosedLoopLoad(3, 10, 5, 3), limit_s=0.0)


@pytest.mark.slow
def test_what_the_profiler_saw_becomes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder:
        spans: tuple[Span, ...] = ()

        def start(self) -> None:
            self.spans = tuple(Span("attend_decode", 10.0 * at, 10.0 * at + 8) for at in range(30))

        def stop(self) -> None: ...

    monkeypatch.setattr(gpu_parts, "Recorder", Recorder)
    between, gaps = done("idle").rows
    assert (between.ratio, gaps.ratio) == (0.0, pytest.approx(0.2, abs=0.01))
    kernels = [row for row in done("attention").rows if row.what.endswith("kernels")]
    assert len(kernels) == 2
    assert kernels[0].measured == pytest.approx(30 * 8 / 3 / 1000)


def test_parts_are_done_in_their_order_and_unknown_ones_refused() -> None:
    assert parts_named(["prefill", "decode"]) == ["decode", "prefill"]
    with pytest.raises(CannotMeasure, match=r"no part 'prefil' \(there are: rates, check, decode"):
        parts_named(["prefil"])


@pytest.mark.slow
def test_it_runs_where_the_libraries_of_the_servers_are_missing() -> None:
    missing = ("zmq", "fastapi", "typer", "rich", "uvicorn", "aiohttp", "pydantic", "prometheus_client", "xxhash")
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in missing)
    script = f"import sys\n{blocked}\nimport baton.bench.gpu, baton.bench.gpu_parts, baton.bench.gpu_worker"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_without_a_device_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == WRONG
    assert capsys.readouterr() == ("", "torch sees no CUDA device here\n")
