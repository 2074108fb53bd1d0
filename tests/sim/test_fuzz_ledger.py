"""Ranges of fuzzed seeds: without gaps, reported as files, kept in a ledger that counts since the last mended law."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.sim.fuzz import FAILURES_MAX
from baton.sim.fuzz_ledger import LEDGER_FILE, PAGE_FILE, FuzzLedger, LawMended, LedgerRefused, rendered, shown_on
from baton.sim.fuzz_range import (
    RANDOM_SEEDS,
    SIMULATED,
    BrokenSeed,
    NotASeed,
    RangeReport,
    first_seed_of,
    never_happened,
    read_report,
    run_range,
    source_digest,
    write_report,
)
from baton.sim.fuzzed_run import run_seed
from baton.sim.shard import SeedReport

ROOT = Path(__file__).parents[2]
LEAN = """
import sys
from importlib.machinery import PathFinder

class OnlyNumpyAndMsgspec:
    def find_spec(self, name, path=None, target=None):
        if path is None and name.partition(".")[0] not in {"baton", "numpy", "msgspec", *sys.stdlib_module_names}:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not PathFinder and isinstance(finder, type)]
sys.meta_path.append(OnlyNumpyAndMsgspec())
"""
"""As `sitecustomize`: other packages are not found."""
SCRIPTED_SHARD = """#!/bin/sh
while read seed; do
    law=null
    case $seed in *[37]) law='"a law"';; esac
    printf '{"seed":%s,"digest":"","law":%s,"what":"so","events":2,"virtual_us":3,"requests":40,' $seed "$law"
    echo '"instances":3,"classes":[],"fired":{"packet lost":1},"moves":{},"ends":{}}'
done
"""
"""Stands for a process that runs seeds: those that end in 3 or 7 break a law."""


def a_range(first_seed: int, seeds: int, source: str = "aa", broken: tuple[BrokenSeed, ...] = ()) -> RangeReport:
    return RangeReport(
        first_seed=first_seed,
        seeds=seeds,
        commit="0123456789",
        source=source,
        ended="2026-01-01 00:00",
        python="3.11.7",
        jobs=2,
        seconds=10,
        cpu_seconds=20,
        events=3000 * seeds,
        requests=40 * seeds,
        virtual_us=4_000_000 * seeds,
        broken=broken,
        fired={"packet lost": 7, "instance crashed": 2, "engine failed with last words": 1},
        moves={"request: WAITING ─admit→": 5},
        ends={"stop": 9},
    )


MENDED = LawMended("2026-01-02 00:00", "abcdef", "a law")


@pytest.fixture
def scripted_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = tmp_path / "shard"
    shard.write_text(SCRIPTED_SHARD)
    shard.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shard))


# ── ranges ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_fuzzer_runs_where_only_numpy_and_msgspec_are_installed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LEAN)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    command = [sys.executable, "-m", "baton.sim", "fuzz", "--seeds", "2", "--first-seed", "4", "--report", "range.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "first seed 4" in done.stdout
    report = read_report(tmp_path / "range.json")
    assert (report.first_seed, report.seeds, report.broken) == (4, 2, ())
    assert report.events > 1000
    assert report.cpu_seconds > 0
    assert report.source == source_digest()
    shard = subprocess.run(
        [*command[:2], "baton.sim.shard"], env=environment, input=b"4\n", capture_output=True, check=True, timeout=120
    )
    assert msgspec.json.decode(shard.stdout, type=SeedReport).digest == run_seed(4).digest, "a world with a store"
    lacking = subprocess.run([*command[:2], "baton"], env=environment, capture_output=True, text=True, check=False)
    assert "No module named 'typer'" in lacking.stderr


IMPORTED = """
import sys
from pathlib import Path
import baton
from baton.sim.fuzzed_run import run_seed
for seed in range(6):
    run_seed(seed)
root = Path(baton.__file__).parent
files = [getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith("baton.")]
print(*(Path(file).relative_to(root).as_posix() for file in files if file))
"""


def test_the_digest_of_the_source_has_what_worlds_import() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True, timeout=120)
    files = [file for file in done.stdout.split() if not file.endswith("__init__.py")]
    assert "sim/world.py" in files
    assert [file for file in files if not file.startswith(SIMULATED)] == []


@pytest.mark.usefixtures("scripted_shards")
def test_a_run_stops_at_the_first_broken_law_and_what_was_run_is_a_range_without_gaps() -> None:
    seen: list[int] = []
    totals, report = run_range(1, 1000, None, 3, lambda one: seen.append(one.seed), commit="x")
    assert totals.first_failure is not None
    assert totals.first_failure.seed == 3
    assert sorted(seen) == list(range(1, 1 + report.seeds))
    assert report.seeds < 20
    assert report.broken[0] == BrokenSeed(3, "a law", "so", "baton sim replay 3")


@pytest.mark.usefixtures("scripted_shards")
def test_a_run_that_keeps_going_reports_every_broken_law() -> None:
    _, report = run_range(100, 40, None, 2, keep_going=True, commit="x")
    assert report.seeds == 40
    assert [broken.seed for broken in report.broken] == [103, 107, 113, 117, 123, 127, 133, 137]
    assert report.fired == {"packet lost": 40}
    _, endless = run_range(0, None, None, 2, keep_going=True, commit="x")
    assert FAILURES_MAX <= len(endless.broken) <= FAILURES_MAX + 4


@pytest.mark.usefixtures("scripted_shards")
def test_a_time_limit_and_sigterm_end_a_run_with_a_report_of_a_range_without_gaps() -> None:
    seen: list[int] = []
    _, limited = run_range(1, None, 1e-9, 2, lambda one: seen.append(one.seed), keep_going=True, commit="x")
    assert sorted(seen) == list(range(1, 1 + limited.seeds))
    assert limited.seeds <= 4
    _, told = run_range(1, None, None, 2, lambda _: os.kill(os.getpid(), signal.SIGTERM), keep_going=True, commit="x")
    assert told.seeds <= 4


def test_a_first_seed_is_a_number_or_random() -> None:
    assert first_seed_of("17") == 17
    drawn = {first_seed_of("random") for _ in range(20)}
    assert len(drawn) > 15
    assert all(seed in RANDOM_SEEDS for seed in drawn)
    for nonsense in ("-1", "x", "", "1.5", "²"):
        with pytest.raises(NotASeed, match="neither a number"):
            first_seed_of(nonsense)


def test_a_random_first_seed_is_printed_and_the_report_has_it(tmp_path: Path) -> None:
    report = tmp_path / "range.json"
    result = CliRunner().invoke(app, ["sim", "fuzz", "--first-seed", "random", "--seeds", "1", "--report", str(report)])
    assert result.exit_code == 0, result.output
    assert f"first seed {read_report(report).first_seed}\n" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fuzz", "--first-seed", "soon"], "neither a number"),
        (["fuzz", "--report", "/nowhere/range.json"], "--report /nowhere/range.json: No such file"),
        (["ledger", "add", __file__, "--ledger", "/nowhere/ledger"], "is no report of a range"),
        (["ledger", "show", "--ledger", __file__], "is no ledger"),
    ],
)
def test_nonsense_on_the_command_line_is_refused(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["sim", *arguments])
    assert result.exit_code == 2
    assert complaint in result.output


def test_what_did_not_happen_in_a_range_is_named() -> None:
    never = never_happened(a_range(0, 1))
    assert "crash" not in never
    assert "connection stalled" in never


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_report_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    report = a_range(5, 3, broken=(BrokenSeed(6, "a law", "so", "baton sim replay 6"),))
    write_report(tmp_path / "range.json", report)
    assert read_report(tmp_path / "range.json") == report


def test_a_ledger_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    ledger = FuzzLedger().with_ranges([a_range(0, 10)]).with_mended(MENDED).with_ranges([a_range(50, 10)])
    ledger.write(tmp_path / "ledger")
    assert FuzzLedger.read(tmp_path / "ledger") == ledger
    assert FuzzLedger.read(tmp_path / "none") == FuzzLedger()


@pytest.mark.parametrize(("first_seed", "seeds"), [(100, 10), (95, 6), (109, 1), (90, 40)])
def test_seeds_that_were_run_on_the_same_code_are_not_counted_twice(first_seed: int, seeds: int) -> None:
    ledger = FuzzLedger().with_ranges([a_range(100, 10)])
    with pytest.raises(LedgerRefused, match="same code"):
        ledger.with_ranges([a_range(first_seed, seeds)])
    assert len(ledger.with_ranges([a_range(first_seed, seeds, source="bb")]).counted) == 2
    assert len(ledger.with_ranges([a_range(90, 10), a_range(110, 10)]).counted) == 3


def test_counting_starts_again_when_a_law_is_mended() -> None:
    before = FuzzLedger().with_ranges([a_range(0, 1000)])
    assert "1,000 seeds in 1 ranges: no law was broken" in rendered(before)
    mended = before.with_mended(MENDED)
    assert rendered(mended) == "No range was run since 2026-01-02 00:00 (abcdef: a law).\n"
    after = mended.with_ranges([a_range(0, 20)])
    assert "20 seeds in 1 ranges since 2026-01-02 00:00 (abcdef: a law)" in rendered(after)


def test_the_rendering_has_ranges_time_faults_by_class_transitions_and_broken_laws() -> None:
    broken = BrokenSeed(6, "nobody waits", "so", "baton sim replay 6")
    text = rendered(FuzzLedger().with_ranges([a_range(5, 3, broken=(broken,)), a_range(900, 7)]))
    assert "10 seeds in 2 ranges: **1 worlds broke a law**. 0.01 hours, 0.01 of processor time" in text
    assert "| 5 | 3 | 0123456789 | aa | 2026-01-01 00:00 | 10 on 2 | 0.3 | 10 | 5 | 6: nobody waits |" in text
    assert "| crash | 6 |" in text
    assert "| request: WAITING ─admit→ | 10 |" in text
    assert "Never: connection reset" in text


def test_ranges_from_files_are_added_and_shown_on_the_page(tmp_path: Path) -> None:
    page, ledger, files = tmp_path / "page.md", tmp_path / "ledger", [tmp_path / "a.json", tmp_path / "b.json"]
    page.write_text("# Page\n\n<!-- ledger: begin --><!-- ledger: end -->\nmore\n")
    for number, file in enumerate(files):
        write_report(file, a_range(100 * number, 10))
    places = ["--ledger", str(ledger), "--page", str(page)]
    added = CliRunner().invoke(app, ["sim", "ledger", "add", *map(str, files), *places])
    assert "20 seeds in 2 ranges" in added.output
    assert "20 seeds in 2 ranges" in page.read_text()
    assert page.read_text().endswith("<!-- ledger: end -->\nmore\n")
    again = CliRunner().invoke(app, ["sim", "ledger", "add", str(files[0]), *places])
    assert again.exit_code == 2
    assert len(ledger.read_bytes().splitlines()) == 2
    CliRunner().invoke(app, ["sim", "ledger", "mended", "a cause", *places])
    assert "No range was run since" in page.read_text()
    assert "a cause" in CliRunner().invoke(app, ["sim", "ledger", "show", "--ledger", str(ledger)]).output


def test_a_page_without_marks_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "a.json"
    page.write_text("# Page\n")
    write_report(file, a_range(0, 10))
    places = ["--ledger", str(tmp_path / "ledger"), "--page", str(page)]
    assert CliRunner().invoke(app, ["sim", "ledger", "add", str(file), *places]).exit_code == 2
    assert not (tmp_path / "ledger").exists()


def test_the_page_shows_the_ledger_that_is_kept() -> None:
    page = (ROOT / PAGE_FILE).read_text()
    assert page == shown_on(page, FuzzLedger.read(ROOT / LEDGER_FILE)), "baton sim ledger show differs from the page"


def test_every_line_of_the_kept_ledger_can_be_read() -> None:
    for entry in FuzzLedger.read(ROOT / LEDGER_FILE).entries:
        assert msgspec.json.encode(entry)
