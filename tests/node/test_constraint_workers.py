"""Processes that compile constraints: what they give, what they refuse, and that hostile ones cost nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from baton.api.constraint_cache import Outcome
from baton.api.constraint_compiler import CompileOutcome
from baton.api.constraint_jobs import ConstraintJob
from baton.api.constraints.schema_writer import OPEN_NAMES_MAX
from baton.api.constraints.wanted import ConstraintKind
from baton.api.errors import ApiError
from baton.core.engine.request import Constraint
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.llguidance_backend import LlguidanceBackend
from baton.executor.constraints.version_skew import digest_after
from baton.executor.python_command import python_command
from baton.node import constraint_workers
from baton.node.available_memory import available_bytes
from baton.node.constraint_messages import GrammarCompiled, GrammarRefused, MaskComputed
from baton.node.constraint_worker import ConstraintChecker, RankedTokens, longest_first, strings_first
from baton.node.constraint_worker_process import WorkerUnavailable
from baton.node.constraint_workers import ConstraintWorkers
from baton.node.scripted_text import BYTE_VOCABULARY, write_byte_tokenizer

LONG_S = 60.0
"""For what must succeed, on however busy a machine."""


def job(value: object, kind: ConstraintKind = ConstraintKind.JSON_SCHEMA) -> bytes:
    return ConstraintJob(kind, value, "field").encode()


def regex(pattern: str) -> bytes:
    return job(pattern, ConstraintKind.REGEX)


SHORT_S = 0.02
"""CPU time that is enough for something small."""
SLOW = job([f"{i:05d}" * 5 for i in range(9000)], ConstraintKind.CHOICE)


async def _make_impatient(workers: ConstraintWorkers) -> None:
    """Have it ask workers that get little CPU time."""
    await workers.close()
    workers._cpu_s = SHORT_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
async def workers(folder: Path) -> AsyncIterator[ConstraintWorkers]:
    made = ConstraintWorkers(folder, cpu_s=LONG_S, wall_s=LONG_S)
    yield made
    await made.close()


@dataclass
class Meter:
    """Keeps what it is told."""

    outcomes: Counter[CompileOutcome] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    held_bytes: int = 0

    def count_constraint(self, outcome: CompileOutcome) -> None:
        self.outcomes[outcome] += 1

    def observe_constraint(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def note_constraints_held(self, size_bytes: int) -> None:
        self.held_bytes = size_bytes


async def test_every_outcome_of_compiling_is_counted_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    workers = ConstraintWorkers(folder, meter, cpu_s=LONG_S, wall_s=LONG_S)
    try:
        await workers.compile("a", regex("x"), "field")
        await workers.compile("a", regex("x"), "field")
        held = meter.held_bytes
        assert held > 0
        for _ in range(2):
            with pytest.raises(ApiError):
                await workers.compile("a", job({"contains": {}}), "field")
        assert meter.held_bytes > held, "refusals are kept too"
        await _make_impatient(workers)
        with pytest.raises(ApiError):
            await workers.compile("a", SLOW, "field")
        monkeypatch.setattr(workers._queue, "waiting_weight_of", lambda tenant: constraint_workers.TENANT_WAITING_BYTES_MAX)
        with pytest.raises(ApiError):
            await workers.compile("a", regex("z"), "field")
    finally:
        await workers.close()
    assert meter.outcomes == {
        CompileOutcome.COMPILED: 1,
        CompileOutcome.CACHED: 1,
        CompileOutcome.REFUSED: 2,
        CompileOutcome.TOO_COMPLEX: 1,
        CompileOutcome.BUSY: 1,
    }
    assert len(meter.seconds) == 3, "of what was compiled, refused and too complex, each the first time"


async def test_a_worker_that_started_early_gets_the_first_constraint(folder: Path) -> None:
    workers = ConstraintWorkers(folder, cpu_s=LONG_S, wall_s=LONG_S)
    try:
        workers.start_early()
        (early,) = await asyncio.gather(*workers._starting)
        assert isinstance(await workers.compile("a", regex("x"), "field"), Constraint)
        assert workers._idle == [early]
        assert len(workers._starting) == 1, "the other one starts with the first constraint"
    finally:
        await workers.close()


async def test_an_early_worker_that_was_ended_meanwhile_is_not_asked(folder: Path) -> None:
    workers = ConstraintWorkers(folder, cpu_s=LONG_S, wall_s=LONG_S)
    try:
        workers.start_early()
        (early,) = await asyncio.gather(*workers._starting)
        early.kill()
        await early.process.wait()
        assert isinstance(await workers.compile("a", regex("x"), "field"), Constraint)
    finally:
        await workers.close()


async def test_where_memory_is_short_no_worker_starts_early(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_workers, "available_bytes", lambda: constraint_workers.SPARE_BYTES_MIN - 1)
    workers = ConstraintWorkers(folder)
    workers.start_early()
    assert not workers._starting


def test_what_a_container_allows_bounds_the_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert available_bytes(meminfo, tmp_path) == 5000 << 10
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 500\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 5000 << 10
    (tmp_path / "memory.max").write_text("4000\n")
    assert available_bytes(meminfo, tmp_path) == 1500
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


def test_a_worker_imports_no_arrays_no_http_and_no_validation() -> None:
    banned = ("asyncio", "fastapi", "numpy", "pydantic", "starlette", "torch", "transformers")
    code = f"import sys, baton.node.constraint_worker; print([name for name in {banned} if name in sys.modules])"
    command = [*python_command("x")[:-2], "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("allowed", "found"),
    [([0], 0), ([0, 40], 40), ([0, 33, 40], 33), ([33, 40, 50], 33), ([99], 99), ([50, 99], 50), ([], 0)],
)
def test_the_longest_token_that_a_mask_allows_is_found(allowed: list[int], found: int) -> None:
    longest = RankedTokens({"a": 0, "abc": 33, "ab": 40, "b": 50}, longest_first)
    assert longest.first_in(sum(1 << token for token in allowed).to_bytes(16, "little")) == found


def test_a_trial_prefers_what_opens_and_closes_strings_to_text_and_text_to_ends() -> None:
    texts = ["}", '"}', "long text", '"', ",", ',"', "no"]
    ranked = RankedTokens({text: at for at, text in enumerate(texts)}, strings_first)
    found: list[int] = []
    while len(found) < len(texts):
        allowed = sum(1 << at for at in range(len(texts)) if at not in found)
        found.append(ranked.first_in(allowed.to_bytes(1, "little")))
    assert [texts[at] for at in found] == ['"', ',"', ",", "long text", "no", '"}', "}"]


@pytest.mark.parametrize("grammar", ["start: e\ne: e e | /[a-z]/", 'start: e\ne: e e | e e e | "a"'])
async def test_a_grammar_whose_masks_grow_with_every_token_is_refused_at_once(folder: Path, grammar: str) -> None:
    _add_long_tokens(folder)
    workers = ConstraintWorkers(folder, wall_s=LONG_S)
    try:
        with pytest.raises(ApiError) as refusal:
            await workers.compile("a", job(grammar, ConstraintKind.GRAMMAR), "field")
        assert refusal.value.status == 400
    finally:
        await workers.close()


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def answer_to(folder: Path, value: object) -> GrammarCompiled | GrammarRefused | MaskComputed:
    return ConstraintChecker(folder).answer(job(value))


@pytest.mark.parametrize("schema", [optional(OPEN_NAMES_MAX), {"type": "array", "items": optional(130)}])
def test_many_optional_properties_are_accepted_and_served(folder: Path, schema: dict[str, Any]) -> None:
    answer = answer_to(folder, schema)
    assert isinstance(answer, GrammarCompiled), answer
    matcher = LlguidanceBackend.of_folder(folder, BYTE_VOCABULARY).compile(answer.source).matcher()
    text = '{"p0":"a","p1":"b","p99":"c"}'
    for token in ids_of(folder, text if schema["type"] == "object" else f"[{text}]"):
        assert matcher.consume(token)
    assert matcher.is_stopped or matcher.copy().consume(BYTE_VOCABULARY - 1)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (optional(OPEN_NAMES_MAX + 1), None),
        ({"items": {"anyOf": [optional(300), {**optional(300), "required": ["p299"]}]}}, "/items"),
        ({"properties": {"a/b": optional(500)}}, "/properties/a~1b"),
    ],
)
def test_more_optional_properties_than_a_matcher_can_hold_are_refused_by_name(
    folder: Path, schema: dict[str, Any], place: str | None
) -> None:
    answer = answer_to(folder, schema)
    assert isinstance(answer, GrammarRefused)
    assert "'properties'" in answer.message
    assert place is None or f"at {place}:" in answer.message


def test_patterns_of_names_that_overlap_are_refused_with_the_place_and_the_patterns(folder: Path) -> None:
    inner = {"type": "object", "patternProperties": {"^x$": True, "^a": {"type": "null"}, "b$": {"type": "string"}}}
    answer = answer_to(folder, {"type": "array", "items": inner})
    assert isinstance(answer, GrammarRefused)
    assert "'patternProperties' at /items/patternProperties: a name may match two patterns '^a', 'b$'" in answer.message


def test_a_place_with_too_many_alternatives_behind_a_string_is_met_by_the_trial(folder: Path) -> None:
    """The longest tokens alone would stay inside the string."""
    lists = {"anyOf": [{"type": "array", "prefixItems": [{"const": i}]} for i in range(800)]}
    answer = answer_to(folder, {"type": "array", "prefixItems": [{"type": "string"}, lists], "minItems": 2})
    assert isinstance(answer, GrammarRefused)
    assert "too many alternatives" in answer.message


def _add_long_tokens(folder: Path) -> None:
    """Tokens of two to 32 letters, as every model's tokenizer has them."""
    path = folder / "tokenizer.json"
    read = json.loads(path.read_text())
    first = 1 + max(*read["model"]["vocab"].values(), *(token["id"] for token in read["added_tokens"]))
    for number, size in enumerate((1, 2, 4, 8, 16)):
        read["model"]["vocab"]["a" * 2 * size] = first + number
        read["model"]["merges"].append(["a" * size] * 2)
    path.write_text(json.dumps(read))


async def test_a_constraint_names_the_backend_and_is_compiled_once(workers: ConstraintWorkers) -> None:
    wanted = job({"type": "object"})
    first, second = await asyncio.gather(*(workers.compile("a", wanted, "field") for _ in range(2)))
    assert isinstance(first, Constraint)
    assert first.backend == "llguidance"
    assert first.version
    assert first is second, "whoever comes meanwhile waits for the same"
    assert await workers.compile("a", wanted, "field") is first


async def test_what_cannot_be_enforced_is_refused_with_field_and_place(workers: ConstraintWorkers) -> None:
    with pytest.raises(ApiError) as refusal:
        await workers.compile("a", job({"properties": {"x": {"unevaluatedItems": 1}}}), "other")
    assert (refusal.value.status, refusal.value.param) == (400, "field")
    assert "/properties/x/unevaluatedItems" in refusal.value.message


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(keyword: str, levels: int) -> dict[str, Any]:
    """2^levels ways through a chain of references."""
    definitions = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": {**definitions, f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


HOSTILE = {
    "counted twice": regex("(a{1000}){1000}"),
    "counted thrice": regex("((a{100}){100}){100}"),
    "exponential automaton": regex("(a|b)*a(a|b){500}c"),
    "many properties": job({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(15_000)}}),
    "deep": job(nested(190)),
    "itself": job({"$ref": "#"}),
    "a circle": job({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "doubling allOf": job(doubling("allOf", 60)),
    "doubling anyOf": job(doubling("anyOf", 60)),
    "doubling oneOf": job(doubling("oneOf", 60)),
    "intersections": regex("&".join(f"(.*{chr(97 + i % 26)}.*)" for i in range(200))),
    "items": job({"type": "array", "items": nested(20), "minItems": 10**9, "maxItems": 10**9}),
    "lengths": job({"type": "string", "minLength": 10**9, "maxLength": 10**9 + 1}),
    "big numbers": job({"type": "integer", "minimum": 10**300, "multipleOf": 7**100}),
    "grammar that grows": job(
        "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "a"', ConstraintKind.GRAMMAR
    ),
    "grammar that recurses": job('start: start start | ""', ConstraintKind.GRAMMAR),
}


async def test_hostile_constraints_end_within_limits_and_others_are_served(folder: Path) -> None:
    """Each is refused, or compiled, by a worker that lives on or is replaced. None is an error of the server."""
    workers = ConstraintWorkers(folder)
    try:
        await workers.compile("b", regex("first"), "field")
        for number, (name, hostile) in enumerate(HOSTILE.items()):
            attack = asyncio.create_task(workers.compile("a", hostile, "field"))
            await asyncio.sleep(0)
            assert isinstance(await _patiently(workers, regex(f"b{number}")), Constraint), name
            (outcome,) = await asyncio.gather(attack, return_exceptions=True)
            print(name, type(outcome).__name__, outcome.message if isinstance(outcome, ApiError) else "")
            if isinstance(outcome, Constraint):
                continue
            assert isinstance(outcome, ApiError), (name, outcome)
            assert (outcome.status, outcome.param) == (400, "field"), (name, outcome.message)
            assert outcome.code in ("unsupported_constraint", "constraint_too_complex"), (name, outcome.message)
    finally:
        await workers.close()


async def _patiently(workers: ConstraintWorkers, wanted: bytes) -> Constraint | None:
    """On a machine that stands still, even a small constraint may be late; it is not refused for ever."""
    for _ in range(10):
        with contextlib.suppress(ApiError):
            return await workers.compile("b", wanted, "field")
    return None


async def test_a_worker_that_takes_too_long_is_ended_and_replaced(folder: Path) -> None:
    workers = ConstraintWorkers(folder, cpu_s=SHORT_S, wall_s=LONG_S)
    try:
        with pytest.raises(ApiError) as refusal:
            await workers.compile("a", SLOW, "field")
        assert (refusal.value.status, refusal.value.code) == (400, "constraint_too_complex")
        assert workers.lost == 1, "no other worker is asked"
        assert isinstance(await workers.compile("a", regex("x"), "field"), Constraint)
    finally:
        await workers.close()


async def test_what_waits_is_bounded_for_a_tenant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_workers, "TENANT_WAITING_BYTES_MAX", 3 * constraint_workers.ENTRY_BYTES)
    workers = ConstraintWorkers(folder, cpu_s=LONG_S, wall_s=LONG_S)
    try:
        asked = [asyncio.create_task(workers.compile("a", regex(f"x{i}"), "field")) for i in range(20)]
        other = asyncio.create_task(workers.compile("b", regex("y"), "field"))
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in outcomes if isinstance(one, ApiError)]
        assert {one.status for one in refused} == {429}
        assert len(refused) >= 16
        assert isinstance(await other, Constraint)
    finally:
        await workers.close()


async def test_a_model_whose_tokenizer_is_of_no_use_is_said_so(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    workers = ConstraintWorkers(tmp_path, cpu_s=LONG_S, wall_s=LONG_S)
    try:
        with pytest.raises(ApiError) as refusal:
            await workers.compile("a", regex("x"), "field")
        assert (refusal.value.status, refusal.value.code) == (400, "unsupported_parameter")
        assert "no token that ends an answer" in refusal.value.message
    finally:
        await workers.close()


async def test_a_constraint_that_nobody_waits_for_any_more_leaves_the_queue(folder: Path) -> None:
    workers = ConstraintWorkers(folder, workers=1, cpu_s=LONG_S, wall_s=LONG_S)
    try:
        first = asyncio.create_task(workers.compile("a", regex("first"), "field"))
        shared = [asyncio.create_task(workers.compile("a", regex("shared"), "field")) for _ in range(2)]
        alone = asyncio.create_task(workers.compile("a", regex("alone"), "field"))
        await asyncio.sleep(0)
        waiting = workers._queue.waiting_weight
        shared[0].cancel()
        alone.cancel()
        await asyncio.wait([shared[0], alone])
        assert workers._queue.waiting_weight < waiting
        assert len(workers._compiling) == 2
        again = asyncio.create_task(workers.compile("a", regex("alone"), "field"))
        for task in (first, shared[1], again):
            assert isinstance(await task, Constraint)
        assert workers._queue.entries_in_use == 0
    finally:
        await workers.close()


def ids_of(folder: Path, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


async def test_masks_of_a_worker_have_the_digests_of_those_that_serve(folder: Path, workers: ConstraintWorkers) -> None:
    constraint = await workers.compile("a", regex("[ab]{2}c*"), "field")
    assert constraint is not None
    serving = CompiledConstraints([LlguidanceBackend.of_folder(folder, BYTE_VOCABULARY)])
    for text in ("", "a", "ab", "abc", "abcc"):
        outputs = ids_of(folder, text)
        assert await workers.mask_digest(constraint, outputs) == digest_after(serving, constraint, outputs, BYTE_VOCABULARY)
    stopped = [*ids_of(folder, "ab"), BYTE_VOCABULARY - 1]
    assert await workers.mask_digest(constraint, stopped) == digest_after(serving, constraint, stopped, BYTE_VOCABULARY)


async def test_no_mask_is_told_for_another_version_or_outputs_that_are_not_permitted(
    folder: Path, workers: ConstraintWorkers
) -> None:
    a, c = ids_of(folder, "a"), ids_of(folder, "c")
    constraint = await workers.compile("a", regex("[ab]{2}"), "field")
    assert constraint is not None
    assert await workers.mask_digest(constraint, a)
    assert await workers.mask_digest(constraint, c) == b""
    assert await workers.mask_digest(replace(constraint, version="0.1"), a) == b""
    assert await workers.mask_digest(replace(constraint, backend="xgrammar"), a) == b""
    assert await workers.mask_digest(replace(constraint, source="{"), a) == b""


@pytest.mark.parametrize(("failures", "is_told"), [(constraint_workers.MASK_TRIES - 1, True), (9, False)])
async def test_a_busy_machine_is_asked_for_a_mask_again(
    workers: ConstraintWorkers, monkeypatch: pytest.MonkeyPatch, failures: int, is_told: bool
) -> None:
    constraint = await workers.compile("a", regex("x"), "field")
    assert constraint is not None
    ask, left = workers._ask, failures

    async def busy(job: bytes) -> Outcome | bytes:
        nonlocal left
        left -= 1
        if left >= 0:
            raise WorkerUnavailable("the machine is busy")
        return await ask(job)

    monkeypatch.setattr(workers, "_ask", busy)
    monkeypatch.setattr(constraint_workers, "MASK_PAUSE_S", 0.0)
    assert bool(await workers.mask_digest(constraint, [])) == is_told
    assert failures - left == constraint_workers.MASK_TRIES


async def test_where_no_worker_can_be_had_no_mask_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}}})
    )
    made = ConstraintWorkers(tmp_path)
    try:
        assert await made.mask_digest(Constraint("llguidance", "1", "{}"), [1]) == b""
    finally:
        await made.close()
