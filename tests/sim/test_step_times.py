"""Step-time models: what they answer at, between and beyond their points, and what they refuse."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.core.errors import BatonError
from baton.sim.step_times import (
    BadStepTimes,
    MeasuredStep,
    Roofline,
    StepTimes,
    StepTimesFile,
    load_step_times,
    shipped_names,
)

ROOFLINE = Roofline(
    launch_us=1000.0,
    weight_bytes=1e9,
    weight_bytes_per_s=1e12,
    token_flop=1e9,
    decode_flop_per_s=50e12,
    prefill_flop_per_s=50e12,
    row_us=5.0,
    kv_bytes_per_token=1e5,
    kv_bytes_per_s=1e12,
    pair_flop=1e5,
    attention_flop_per_s=50e12,
)
"""A step 1,000 µs; weights 1,000 µs, as long as 50 tokens of 20 µs; 0.1 µs of context, 0.002 µs a pair."""


def made_of(*points: MeasuredStep, host_us: float = 0.0, host_row_us: float = 0.0) -> StepTimes:
    return StepTimes(
        StepTimesFile(
            name="made", measured_on="paper", roofline=ROOFLINE, host_us=host_us, host_row_us=host_row_us, points=points
        )
    )


def noisy(seed: int) -> StepTimes:
    """Points that are off by up to a half, as from a machine that others use too."""
    draw = random.Random(seed)
    points = [
        MeasuredStep(
            decodes=rows, decode_context=rows * each, us=ROOFLINE.decode_us(rows, rows * each) * draw.uniform(0.5, 1.5)
        )
        for rows in (1, 4, 16, 64)
        for each in (64, 512, 2048)
    ]
    points += [
        MeasuredStep(
            prefill_tokens=fed, prefill_pairs=fed * each, us=ROOFLINE.prefill_us(fed, fed * each) * draw.uniform(0.5, 1.5)
        )
        for fed in (16, 128, 1024)
        for each in (8, 64, 1000)
    ]
    return made_of(*points)


NOISY = [noisy(seed) for seed in range(4)]
EVERY = [*NOISY, made_of(), load_step_times("h200-8b")]

COUNTS = st.integers(0, 300) | st.integers(0, 1 << 20)
CONTEXTS = st.integers(0, 100_000) | st.integers(0, 1 << 40)


@given(st.sampled_from(EVERY), COUNTS, CONTEXTS, COUNTS, CONTEXTS, st.sampled_from(range(4)), st.integers(1, 1 << 20))
@example(EVERY[0], 0, 0, 1, 1, 0, 1)
@example(EVERY[0], 64, 64, 0, 0, 2, 1)
@settings(max_examples=1500, deadline=None)
def test_more_work_never_takes_less_time(
    times: StepTimes, decodes: int, context: int, fed: int, pairs: int, which: int, more: int
) -> None:
    step = [decodes, context, fed, pairs]
    grown = [value + more * (place == which) for place, value in enumerate(step)]
    assert times.step_us(*step) <= times.step_us(*grown)


def test_without_points_it_is_the_roofline() -> None:
    times = made_of()
    assert times.step_us(1, 1000, 0, 0) == 2105
    assert times.step_us(100, 100_000, 0, 0) == pytest.approx(1000 + 2000 + 500 + 10_000, rel=0.02)
    assert times.step_us(0, 0, 2048, 2_000_000) == pytest.approx(1000 + 40_960 + 4000, rel=0.01)


def test_a_measured_point_is_met_and_its_ratio_holds_beyond() -> None:
    times = made_of(MeasuredStep(decodes=8, decode_context=8192, us=2 * ROOFLINE.decode_us(8, 8192)))
    assert times.step_us(8, 8192, 0, 0) == round(2 * ROOFLINE.decode_us(8, 8192))
    for rows, context in ((1, 100), (256, 500_000), (3, 9_000_000)):
        assert times.step_us(rows, context, 0, 0) == pytest.approx(2 * ROOFLINE.decode_us(rows, context), rel=0.02)
    assert times.step_us(0, 0, 100, 5000) == pytest.approx(ROOFLINE.prefill_us(100, 5000), rel=0.02)


def test_between_points_the_ratio_is_between() -> None:
    low = MeasuredStep(decodes=4, decode_context=4096, us=1.0 * ROOFLINE.decode_us(4, 4096))
    high = MeasuredStep(decodes=64, decode_context=65_536, us=1.5 * ROOFLINE.decode_us(64, 65_536))
    ratio = made_of(low, high).step_us(16, 16_384, 0, 0) / ROOFLINE.decode_us(16, 16_384)
    assert ratio == pytest.approx(1.25, rel=0.01)


def test_a_mixed_step_costs_its_parts_with_the_fixed_part_once() -> None:
    times = made_of()
    mixed = times.step_us(32, 32_000, 500, 125_000)
    parts = 1000 + 20 * 532 + 5 * 32 + 0.1 * 32_000 + 0.002 * 125_000
    assert mixed == pytest.approx(parts, rel=0.02)
    assert mixed < times.step_us(32, 32_000, 0, 0) + times.step_us(0, 0, 500, 125_000)


def test_the_host_is_on_top() -> None:
    bare, hosted = made_of(), made_of(host_us=100.0, host_row_us=3.0)
    assert hosted.step_us(10, 1000, 0, 0) == bare.step_us(10, 1000, 0, 0) + 130
    assert hosted.step_us(0, 0, 10, 100) == bare.step_us(0, 0, 10, 100) + 100
    assert hosted.step_us(0, 0, 0, 0) == 100
    assert bare.step_us(0, 0, 0, 0) == 1


@pytest.mark.parametrize("name", shipped_names())
def test_what_is_shipped_says_what_was_measured(name: str) -> None:
    """Apart from what is smoothed so that more work never takes less time."""
    times = load_step_times(name)
    host_us, row_us = times.file.host_us, times.file.host_row_us
    for point in times.file.points:
        said = times.step_us(point.decodes, point.decode_context, point.prefill_tokens, point.prefill_pairs)
        assert said == pytest.approx(point.us + host_us + row_us * point.decodes, rel=0.1)


def test_the_shipped_gpu_is_one() -> None:
    """Memory read at 4 – 5 TB/s, matrices multiplied at up to a PFLOP/s: an 8B model keeps to that, or something broke."""
    times = load_step_times("h200-8b")
    assert times.file.layers == 36
    for rows, least_us in ((1, 3100), (32, 4000), (128, 7000), (256, 11_000)):
        assert least_us < times.step_us(rows, rows * 1024, 0, 0) < 2 * least_us
    products_us = 8192 * times.file.roofline.token_flop / 1e15 * 1e6
    assert products_us < times.step_us(0, 0, 8192, 8192 * 4096) < 4 * products_us


@pytest.mark.parametrize("name", shipped_names())
def test_what_is_shipped_loads_under_its_own_name(name: str) -> None:
    times = load_step_times(name)
    assert times.name == name
    assert times.file.measured_on
    assert 0 < times.step_us(1, 1, 0, 0) <= times.step_us(64, 64 * 700, 0, 0) <= times.step_us(64, 64 * 700, 2048, 300_000)


def test_equal_files_give_equal_answers_whatever_was_asked_before() -> None:
    one, other = noisy(9), noisy(9)
    for rows in range(5000):
        one.step_us(rows, rows * 10, 0, 0)
    assert [one.step_us(rows, 4000, 0, 0) for rows in range(1, 200)] == [
        other.step_us(rows, 4000, 0, 0) for rows in range(1, 200)
    ]


def written(tmp_path: Path, **changes: object) -> str:
    """A good file but for what is changed, by dotted name."""
    value = json.loads(msgspec.json.encode(NOISY[0].file))
    for name, new in changes.items():
        *outer, last = name.split("__")
        place = value
        for part in outer:
            place = place[int(part) if part.isdigit() else part]
        place[last] = new
    path = tmp_path / "times.json"
    path.write_text(json.dumps(value))
    return str(path)


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    assert load_step_times(written(tmp_path)).step_us(4, 400, 0, 0) == NOISY[0].step_us(4, 400, 0, 0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"roofline__launch_us": -1.0}, "roofline.launch_us"),
        ({"roofline__kv_bytes_per_s": 0}, "roofline.kv_bytes_per_s"),
        ({"roofline__row_us": float("nan")}, "roofline.row_us"),
        ({"points__0__us": float("inf")}, "points"),
        ({"roofline__speed": 1.0}, "speed"),
        ({"host_us": "fast"}, "host_us"),
        ({"points__0__us": 0}, "points"),
        ({"points__1__us": -5.0}, "points"),
        ({"points__1__decodes": 1.5}, "decodes"),
        ({"points__1__decodes": 0}, "points[1] feeds no tokens"),
        ({"points__1__decodes": 0, "points__1__prefill_tokens": 1}, "points[1].decode_context is"),
        ({"points__2__decode_context": 0}, "points[2].decode_context is 0"),
        ({"points__12__prefill_pairs": 3}, "points[12].prefill_pairs is 3"),
        ({"points__1__decode_context": 64}, "points[1] is the same step as points[0]"),
        ({"name": ""}, "name"),
        ({"schema": 2}, "schema"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_bad_file_is_refused_by_the_name_of_the_field(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    with pytest.raises(BadStepTimes) as refused:
        load_step_times(written(tmp_path, **changes))
    assert named in str(refused.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_values_that_never_were_json_are_checked_too(value: float) -> None:
    roofline = msgspec.structs.replace(ROOFLINE, row_us=value)
    with pytest.raises(BadStepTimes, match="row_us"):
        StepTimes(StepTimesFile(name="made", measured_on="paper", roofline=roofline))


def test_what_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(BadStepTimes, match=r"no step times 'h100'.*h200-8b"):
        load_step_times("h100")
    torn = tmp_path / "torn.json"
    torn.write_text('{"name": "x"')
    with pytest.raises(BatonError, match=r"torn\.json"):
        load_step_times(str(torn))
