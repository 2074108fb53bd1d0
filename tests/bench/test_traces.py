from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from baton.bench.traces import TracedRequest, TraceMalformed, read_trace, smear

MOONCAKE = (
    '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]}\n'
    '{"timestamp": 6000, "input_length": 10, "output_length": 7, "hash_ids": [3]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)
ETALON = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n290,905,1195,0.32\n"


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_lines_are_read(tmp_path: Path, name: str) -> None:
    assert list(read_trace(written(tmp_path, MOONCAKE, name))) == [
        TracedRequest(0.0, 600, 5, (0, 1)),
        TracedRequest(0.0, 700, 6, (0, 2)),
        TracedRequest(3.0, 10, 7, (3,)),
    ]


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_azure_rows_are_read(tmp_path: Path, name: str) -> None:
    first, second = read_trace(written(tmp_path, AZURE, name))
    assert (first.at_s, first.input_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579)


def test_rows_with_a_time_zone_are_read(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00.009930+00:00,1,2\n2024-05-10 02:00:01.009930+02:00,3,4\n"
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows
    assert [request.at_s for request in read_trace(written(tmp_path, text))] == [0.0, 1.0]


def test_etalon_rows_have_no_times(tmp_path: Path) -> None:
    assert list(read_trace(written(tmp_path, ETALON))) == [TracedRequest(None, 74, 918), TracedRequest(None, 290, 905)]


def test_the_limit_stops_before_a_later_mistake(tmp_path: Path) -> None:
    assert len(list(read_trace(written(tmp_path, ETALON + "x,y,z,w\n"), limit=2))) == 2


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("", 1, "1"),
        ("a,b,c\n", 1, "1"),
        (AZURE + "2023-11-16 18:16:00,12\n", 4, "GeneratedTokens"),
        (AZURE + "2023-11-16 18:16:00,12,13,14\n", 4, "4"),
        (AZURE + "2023-11-16 18:16:00,twelve,13\n", 4, "ContextTokens"),
        (AZURE + "2023-11-16 18:16:00,-1,13\n", 4, "ContextTokens"),
        (AZURE + "yesterday,12,13\n", 4, "TIMESTAMP"),
        (ETALON + "1,2.5,3,4\n", 4, "num_decode_tokens"),
        (MOONCAKE + '{"timestamp": 7000, "input_length": "x", "output_length": 1}\n', 4, "input_length"),
        (MOONCAKE + '{"timestamp": 7000, "input_length": 1}\n', 4, "1"),
        (
            MOONCAKE + '{"timestamp": 7000, "input_length": 1, "output_length": 1, "hash_ids": [1, "a"]}\n',
            4,
            "hash_ids[1]",
        ),
        (MOONCAKE + "{oops\n", 4, "1"),
    ],
)
def test_a_malformed_trace_is_refused_by_line_and_column(tmp_path: Path, text: str, line: int, column: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TraceMalformed) as refused:
        list(read_trace(path))
    assert str(refused.value).startswith(f"{path}, line {line}, column {column}: ")


def test_a_request_logged_late_is_due_at_once(tmp_path: Path) -> None:
    times = [request.at_s for request in read_trace(written(tmp_path, AZURE + "2023-11-16 18:00:00,1,1\n"))]
    assert times == [0.0, pytest.approx(4.314579), times[1]]


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode())[:-10])
    with pytest.raises(TraceMalformed, match="gzip"):
        list(read_trace(path))
    path.write_bytes(b"not gzip at all")
    with pytest.raises(TraceMalformed, match="gzip"):
        list(read_trace(path))


def test_smearing_spreads_a_bunch_until_the_next(tmp_path: Path) -> None:
    smeared = smear(read_trace(written(tmp_path, MOONCAKE)))
    assert [request.at_s for request in smeared] == [0.0, 1.5, 3.0]
