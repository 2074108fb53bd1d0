"""`baton sim fuzz` and `baton sim replay`: whole clusters with faults, one seed a world."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.cli.bench_screen import progress_bar, refuse, wide_console
from baton.core.config import WorkerConfig
from baton.sim.faults import CLASSES
from baton.sim.fuzz import EVERY_FAULT, EVERY_MOVE, FuzzTotals, ShardDied, ShrunkWorld, cores, shrink
from baton.sim.fuzz_range import EVERYTHING_FIRES_FROM, RANDOM, NotASeed, first_seed_of, run_range, write_report
from baton.sim.fuzzed_run import WorldVerdict, run_seed
from baton.sim.scenario import ScenarioTrim, draw_scenario
from baton.sim.shard import SeedReport

STORY_LINES = 120

Seeds = Annotated[int, typer.Option(min=1, max=10_000_000, help="How many worlds to run.")]
FirstSeed = Annotated[
    str, typer.Option(metavar="SEED", help="The seed of the first, or `random`, which is printed; the others follow.")
]
Minutes = Annotated[
    float | None, typer.Option(min=0.01, help="Run for so long, however many seeds that is; --seeds is then not asked.")
]
Jobs = Annotated[int | None, typer.Option(min=1, max=256, help="Processes at once. Default: one a core.")]
StoryFile = Annotated[Path | None, typer.Option("--story", dir_okay=False, help="Write the whole story of a failure here.")]
Shrinks = Annotated[bool, typer.Option("--shrink/--no-shrink", help="Look for the smallest world that still fails.")]
KeepGoing = Annotated[bool, typer.Option("--keep-going", help="Go on after a broken law, and report all of them.")]
ReportFile = Annotated[
    Path | None, typer.Option("--report", dir_okay=False, help="Write the range's report here, for `baton sim ledger add`.")
]
Seed = Annotated[int, typer.Argument(min=0, help="The seed of the world.")]
Faults = Annotated[str | None, typer.Option(help=f"Only these faults, by comma: {', '.join(CLASSES)}. Default: as drawn.")]
Requests = Annotated[str | None, typer.Option(help="Only these requests, as 3,7,12-15. Default: all.")]
About = Annotated[str | None, typer.Option(help="Only lines with this in them, such as 'client 36' or 'instance 1'.")]
Instances = Annotated[int | None, typer.Option(min=1, max=64, help="So many instances. Default: as drawn.")]


def fuzz(
    seeds: Seeds = 2000,
    first_seed: FirstSeed = "0",
    minutes: Minutes = None,
    jobs: Jobs = None,
    story: StoryFile = None,
    shrinks: Shrinks = True,
    keep_going: KeepGoing = False,
    report: ReportFile = None,
) -> None:
    """Run simulated clusters with faults until one breaks a law, or all seeds are done.

    Each seed is a world of its own: instances with the real scheduler and
    wire protocol, clients, a network, disks, and faults at rates that the
    seed draws. First chaos, with safety laws after each event; then
    everything heals, and every open request must end.

    The first seed that fails is shrunk to the smallest world that still
    fails, and told as a story, one line an event.

    From 1,000 seeds on, a fault or transition that never happened is an
    error as well, unless the first seed was random.
    """
    console = wide_console()
    try:
        first = first_seed_of(first_seed)
        _writable("--story", story)
        _writable("--report", report)
    except (NotASeed, typer.BadParameter) as error:
        raise refuse(console, error) from error
    if first_seed == RANDOM:
        console.print(f"first seed {first}", highlight=False)
    with progress_bar(console) as bar:
        task = bar.add_task("seeds", total=seeds if minutes is None else None)

        def seen(_report: SeedReport) -> None:
            bar.update(task, advance=1)

        try:
            wanted = seeds if minutes is None else None
            totals, ran = run_range(first, wanted, minutes, jobs or cores(), seen, keep_going=keep_going)
        except ShardDied as error:
            raise refuse(console, error) from error
    if report is not None:
        write_report(report, ran)
    show_totals(console, totals, ran.seconds)
    _judge(console, totals, first_seed != RANDOM, story, shrinks)


def _judge(console: Console, totals: FuzzTotals, everything_fires: bool, story: Path | None, shrinks: bool) -> None:
    """Tell the first failure; exit with 1 for a broken law, or for what had to happen and never did."""
    failure = totals.first_failure
    if failure is not None:
        for other in totals.failures:
            console.print(f"seed {other.seed}: {other.law}; baton sim replay {other.seed}", markup=False, soft_wrap=True)
        _tell_failure(console, failure, story, shrinks)
        raise typer.Exit(1)
    never = totals.never()
    if never and everything_fires and totals.seeds >= EVERYTHING_FIRES_FROM:
        console.print(f"[red]never happened in {totals.seeds} seeds: {', '.join(never)}[/red]")
        raise typer.Exit(1)
    console.print(f"[green]no law is broken in {totals.seeds:,} seeds[/green]", highlight=False)


def replay(
    seed: Seed,
    faults: Faults = None,
    requests: Requests = None,
    instances: Instances = None,
    about: About = None,
    story: StoryFile = None,
) -> None:
    """Run one seed again and tell its story, one line an event; all laws after every event."""
    console = wide_console()
    try:
        trim = ScenarioTrim(_classes(faults), _indices(requests, draw_scenario(seed).asks), instances)
        _writable("--story", story)
    except typer.BadParameter as error:
        raise refuse(console, error) from error
    verdict = run_seed(seed, trim, tell_story=True, always_audit=True)
    _tell_story(console, verdict, story, about)
    console.print(f"digest {verdict.digest}, {verdict.events:,} events, {verdict.virtual_us / 1e6:.3f} s of virtual time")
    if verdict.broken is not None:
        raise typer.Exit(1)


def _classes(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in CLASSES:
            raise typer.BadParameter(f"--faults {name!r} is none of {', '.join(CLASSES)}")
    return tuple(sorted(set(names)))


def _indices(text: str | None, there: tuple[int, ...]) -> tuple[int, ...] | None:
    if text is None:
        return None
    kept: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            bounds = int(first), int(last if dash else first)
        except ValueError:
            raise typer.BadParameter(f"--requests {part!r} is neither a number nor a range such as 3-7") from None
        wanted = [index for index in there if bounds[0] <= index <= bounds[1]]
        if not wanted:
            raise typer.BadParameter(f"--requests {part!r} names none of the requests {there[0]}-{there[-1]} of this seed")
        kept += wanted
    return tuple(kept)


def _writable(option: str, file: Path | None) -> None:
    """Raise before the run when the file cannot be written."""
    if file is not None:
        try:
            file.open("a").close()
        except OSError as error:
            raise typer.BadParameter(f"{option} {file}: {error.strerror}") from None


# ── what is printed ──────────────────────────────────────────────────────────────────────────────────────────────────────


def show_totals(console: Console, totals: FuzzTotals, wall_s: float) -> None:
    console.print(
        f"{totals.seeds:,} seeds in {wall_s:.1f} s ({totals.seeds / wall_s:.1f} a second): {totals.events:,} events, "
        f"{totals.requests:,} requests, {totals.virtual_us / 1e6:,.0f} s of virtual time; "
        f"each with at least {totals.instances_min or 0} instances, {totals.requests_min or 0} requests and "
        f"{totals.classes_min or 0} classes of faults"
    )
    console.print(_counts("fault", totals.fired, EVERY_FAULT))
    console.print(_counts("transition", totals.moves, EVERY_MOVE))
    console.print(_counts("end of a request", totals.ends, tuple(sorted(totals.ends))))


def _counts(title: str, counts: Counter[str], names: tuple[str, ...]) -> Table:
    table = Table(title_justify="left")
    table.add_column(title)
    table.add_column("times", justify="right")
    for name in names:
        times = counts[name]
        table.add_row(name, f"{times:,}" if times else "[red]never[/red]")
    return table


def _tell_failure(console: Console, failure: SeedReport, story: Path | None, shrinks: bool) -> None:
    console.print(f"[red]seed {failure.seed} breaks a law[/red]: {failure.law}: {failure.what}")
    if failure.law is None:
        return
    if shrinks:
        with console.status("shrinking …"):
            shrunk = shrink(failure.seed)
        console.print(f"shrunk in {shrunk.runs} runs")
    else:
        shrunk = ShrunkWorld(ScenarioTrim(), run_seed(failure.seed, tell_story=True, always_audit=True), 0)
    _tell_story(console, shrunk.verdict, story)
    console.print(f"replay with: [bold]{replay_command(failure.seed, shrunk.trim)}[/bold]", soft_wrap=True)


def replay_command(seed: int, trim: ScenarioTrim) -> str:
    words = ["baton", "sim", "replay", str(seed)]
    if trim.classes is not None:
        words += ["--faults", ",".join(trim.classes)]
    if trim.asks is not None:
        words += ["--requests", ",".join(str(index) for index in trim.asks)]
    if trim.instances is not None:
        words += ["--instances", str(trim.instances)]
    return shlex.join(words)


def _tell_story(console: Console, verdict: WorldVerdict, file: Path | None, about: str | None = None) -> None:
    scenario = verdict.scenario
    roles = ", ".join(role.name for role in scenario.roles)
    lines = [_line(line) for line in verdict.story if about is None or about in line]
    console.print(
        f"seed {verdict.seed}: {scenario.instances} instances ({roles}), {len(scenario.asks)} requests, faults: "
        f"{', '.join(scenario.classes) or 'none'}; {_settings(scenario.config)}",
        soft_wrap=True,
    )
    if file is not None:
        file.write_text("\n".join(lines) + "\n")
        console.print(f"the story, {len(lines):,} lines, is in {file}")
    if len(lines) > STORY_LINES:
        console.print(f"… {len(lines) - STORY_LINES:,} lines before these" + ("" if file else " (--story FILE has all)"))
    for line in lines[-STORY_LINES:]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if verdict.broken is None:
        console.print("[green]no law is broken[/green]")
    else:
        console.print(f"[red]broken[/red]: {verdict.broken.law}: ", end="")
        console.print(verdict.broken.what, markup=False, soft_wrap=True)


def _settings(config: WorkerConfig) -> str:
    """Options that differ from the defaults."""
    plain = WorkerConfig(slots=config.slots, blocks=config.blocks, step_tokens=config.step_tokens)
    named = ("slots", "blocks", "step_tokens")
    names = sorted((item.name for item in fields(config)), key=lambda name: name not in named)
    values = ((name, getattr(config, name), getattr(plain, name)) for name in names)
    return ", ".join(f"{name} {value}" for name, value, usual in values if value != usual or name in named)


def _line(line: str) -> str:
    at_us, _, rest = line.partition(" ")
    return f"{int(at_us) / 1000:>12.3f} ms  {rest}"
