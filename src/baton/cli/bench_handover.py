"""`baton bench handover`: how fast KV goes from one process to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.bench.handover import MODELS, TransferFailed, run, show, ways_of
from baton.bench.report import write_json
from baton.cli.bench_screen import model_folder, progress_bar, voice_of, wide_console
from baton.kv.transfer_contract import KINDS, available

Megabytes = Annotated[int, typer.Option(min=64, max=4096, help="KV to hand over each time, in MB.")]
Rounds = Annotated[int, typer.Option(min=3, max=100, help="Times that each way is measured.")]
HandoverJson = Annotated[Path, typer.Option("--json", dir_okay=False, help="Where the numbers go.")]


OverlapSwitch = Annotated[bool, typer.Option(help="Also measure how much leaves while the prefill still computes.")]
Model = Annotated[str, typer.Option(help="For that: a folder of safetensors, a GGUF file, or smollm2.")]
PromptTokens = Annotated[int, typer.Option(min=64, help="For that: length of the prompt.")]
StepTokens = Annotated[int, typer.Option(min=16, help="For that: most tokens a step.")]
OverlapRounds = Annotated[int, typer.Option(min=1, max=100, help="For that: times that each way is measured.")]
OverlapJson = Annotated[Path, typer.Option(dir_okay=False, help="For that: where the numbers go.")]


def handover(
    megabytes: Megabytes = 128,
    rounds: Rounds = 5,
    json_file: HandoverJson = Path("bench-results/handover.json"),
    overlap: OverlapSwitch = True,
    model: Model = "smollm2",
    prompt_tokens: PromptTokens = 2000,
    step_tokens: StepTokens = 2048,
    overlap_rounds: OverlapRounds = 3,
    overlap_json: OverlapJson = Path("bench-results/overlap.json"),
) -> None:
    """Measure the bandwidth of a hand-over between two processes, beside memcpy and a bare socket.

    shm, tcp and, where it is installed, mooncake, with and without checks, for the KV of a large and of a small model.
    Blocks are scattered and every layer is sent on its own. Then, with a real model, the share of a prompt's KV that leaves
    before its prefill ends, and the time to the first token beside sending it afterwards. Exits with 1 when one failed.
    """
    console = wide_console()
    with progress_bar(console) as bar:
        ways = ways_of([kind for kind in KINDS if available(kind) is None])
        task = bar.add_task("starting", total=len(ways) * rounds * len(MODELS))
        try:
            report = run(megabytes * 1_000_000, rounds, voice_of(console, bar, task))
        except TransferFailed as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from error
    show(console, report)
    write_json(json_file, report)
    console.print(f"Written to {json_file}.", style="dim")
    if overlap:
        _overlap(console, model_folder(console, model), prompt_tokens, step_tokens, overlap_rounds, overlap_json)


def _overlap(console: Console, folder: Path, prompt_tokens: int, step_tokens: int, rounds: int, json_file: Path) -> None:
    # Imported here because torch takes seconds, and the rest of the command must not pay for it.
    from baton.bench import overlap

    kinds = [kind for kind in ("shm", "tcp") if available(kind) is None]
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=overlap.RUNS_A_ROUND * len(kinds) * rounds)
        voice = voice_of(console, bar, task)
        report = overlap.run(folder, "bfloat16", kinds, prompt_tokens, step_tokens, rounds, voice)
    overlap.show(console, report)
    write_json(json_file, report)
    console.print(f"Written to {json_file}.", style="dim")
