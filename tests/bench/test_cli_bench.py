from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cli.bench import bench_app
from tests.bench.server import Faults, OpenAiServer

Serve = Callable[..., OpenAiServer]


def bench(server: OpenAiServer, *options: object) -> Result:
    args = ["serve", "--url", server.url, *(str(option) for option in options)]
    return CliRunner().invoke(bench_app, args, env={"COLUMNS": "200"})


def test_a_run_prints_a_table_and_writes_json(serve: Serve, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run.json"
    ran = bench(serve(), "--requests", 6, "--concurrency", 2, "--input-tokens", 10, "--output-tokens", 4, "--json", out)
    assert ran.exit_code == 0, ran.output
    for word in ("time to first token", "p99", "output throughput", "6 succeeded"):
        assert word in ran.output
    report = json.loads(out.read_text())
    assert set(report) == {"schema", "made", "config", "machine", "summary"}
    assert (report["config"]["model"], report["config"]["concurrency"]) == ("words", 2)
    summary = report["summary"]
    assert set(summary) == {"duration_s", "counts", "throughput", "latency", "errors", "cut_short"}
    assert (summary["counts"]["succeeded"], summary["counts"]["output_tokens"]) == (6, 24)
    assert set(summary["latency"]["ttft_ms"]) == {"count", "mean", "p50", "p90", "p99", "min", "max"}
    assert report["machine"]["cores"] >= 1


def test_failed_requests_fail_the_command_unless_allowed(serve: Serve) -> None:
    ran = bench(serve(Faults(status={1: 503})), "--requests", 3, "--concurrency", 1)
    assert ran.exit_code == 1
    assert "http_503" in ran.output
    assert bench(serve(Faults(status={1: 503})), "--requests", 3, "--allow-errors").exit_code == 0


def test_a_picture_is_drawn(serve: Serve, tmp_path: Path) -> None:
    out = tmp_path / "run.png"
    ran = bench(serve(Faults(token_s=0.001)), "--requests", 8, "--plot", out)
    assert ran.exit_code == 0, ran.output
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 20_000


def test_a_picture_without_matplotlib_is_refused_before_the_run(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def importing(name: str, *rest: object, **more: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", importing)
    server = serve()
    ran = bench(server, "--plot", tmp_path / "run.png")
    assert ran.exit_code == 2
    assert "baton-serve[plot]" in ran.output
    assert not server.bodies


def test_a_trace_is_replayed(serve: Serve, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = "".join(f"2024-01-01 00:00:{second:02d},{10 + second},{2 + second}\n" for second in range(6))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    server = serve()
    ran = bench(server, "--trace", trace, "--limit", 5, "--speed", 100, "--skip-longer-than", 18)
    assert ran.exit_code == 0, ran.output
    sent = sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies)  # 10 ms apart: not always in order
    assert sent == [(10, 2), (11, 3), (12, 4), (13, 5)]
    assert "1 traced requests are longer" in ran.output
    assert "open loop" in ran.output


def test_a_malformed_trace_is_refused_before_anything_is_sent(serve: Serve, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n1,2\n3,many\n")
    server = serve()
    ran = bench(server, "--trace", trace)
    assert ran.exit_code == 2
    assert "line 3, column num_decode_tokens" in ran.output.replace("\n", "")
    assert not server.bodies


@pytest.mark.parametrize(
    "options",
    [
        ("--rate", 5, "--concurrency", 3),
        ("--speed", 2),
        ("--limit", 3),
        ("--sessions", 2, "--requests", 3),
        ("--rounds", 2),
        ("--think-ms", 5),
        ("--prefix-groups", 2),
        ("--id-range", "9:3"),
        ("--id-range", "few"),
        ("--concurrency", 0),
        ("--sessions", 2000, "--rounds", 1000),
    ],
)
def test_options_that_contradict_each_other_are_refused(serve: Serve, options: tuple[object, ...]) -> None:
    server = serve()
    ran = bench(server, *options)
    assert ran.exit_code == 2, ran.output
    assert not server.bodies


def test_nobody_at_the_address_is_said_clearly(serve: Serve) -> None:
    server = serve()
    server.url = "http://127.0.0.1:1"
    ran = bench(server)
    assert ran.exit_code == 1
    assert "no server answers at http://127.0.0.1:1" in ran.output


def test_sessions_and_shared_prefixes_reach_the_server(serve: Serve) -> None:
    server = serve()
    ran = bench(
        server, "--sessions", 2, "--rounds", 2, "--shared-prefix-tokens", 16, "--input-tokens", 4,
        "--output-tokens", 2, "--endpoint", "chat", "--concurrency", 1,
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert [len(body["messages"]) for body in server.bodies] == [2, 4, 2, 4]
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 1
