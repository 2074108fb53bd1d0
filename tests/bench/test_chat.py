from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from baton.cli import chat as chat_module
from baton.cli.chat import ChatServer, ChatSession, NextInput, chat
from tests.bench.server import Faults, OpenAiServer

Serve = Callable[..., OpenAiServer]


def piped(server: OpenAiServer, text: str, *options: str) -> Result:
    app = typer.Typer()
    app.command()(chat)
    return CliRunner().invoke(app, ["--url", server.url, *options], input=text)


def talking(server: OpenAiServer, system: str | None = None) -> tuple[ChatSession, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, width=120)
    return ChatSession(console, ChatServer(server.url, "words", None, 0.0, 3), system), screen


def test_piped_input_is_answered_once(serve: Serve) -> None:
    server = serve()
    ran = piped(server, "hello\nthere\n", "--max-tokens", "3", "--system", "be kind", "--temperature", "0")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout == "w0 w1 w2 \n"
    assert "3 tokens" in ran.stderr
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello\nthere"},
    ]


def test_nobody_at_the_address_says_what_to_run(serve: Serve) -> None:
    server = serve()
    server.url = "http://127.0.0.1:1"
    ran = piped(server, "hello")
    assert ran.exit_code == 1
    assert "baton serve" in ran.stderr


def test_a_refusal_is_shown_and_fails_the_command(serve: Serve) -> None:
    ran = piped(serve(Faults(status={0: 503})), "hello")
    assert ran.exit_code == 1
    assert "503: not now" in ran.stderr


def test_an_error_in_the_stream_is_shown_and_fails_the_command(serve: Serve) -> None:
    ran = piped(serve(Faults(error_event={0})), "hello")
    assert ran.exit_code == 1
    assert "engine died" in ran.stderr


def test_history_grows_and_reset_forgets_it(serve: Serve) -> None:
    server = serve()
    conversation, screen = talking(server)
    for line in ("one", "two", "/reset", "/system be brief", "three"):
        assert conversation.handle_line(line) is NextInput.GO_ON
    contents = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert contents == [["one"], ["one", "w0 w1 w2 ", "two"], ["be brief", "three"]]
    assert "tokens/s" in screen.getvalue()


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_exit_leaves(serve: Serve, word: str) -> None:
    assert talking(serve())[0].handle_line(word) is NextInput.LEAVE


def test_an_unknown_command_is_not_sent(serve: Serve) -> None:
    server = serve()
    conversation, screen = talking(server)
    conversation.handle_line("/help")
    conversation.handle_line("   ")
    assert not server.bodies
    assert "/reset" in screen.getvalue()


def test_a_failed_question_is_not_kept(serve: Serve) -> None:
    server = serve(Faults(status={0: 503}))
    conversation, screen = talking(server)
    conversation.handle_line("one")
    conversation.handle_line("two")
    assert "not now" in screen.getvalue()
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["two"]


def test_ctrl_c_stops_the_answer_and_keeps_the_session(serve: Serve) -> None:
    server = serve(Faults(token_s=0.02))
    master, terminal = os.openpty()
    command = [sys.executable, "-c", "import typer; from baton.cli.chat import chat; typer.run(chat)", "--url", server.url]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    try:
        _read_until(master, "›")
        os.write(master, b"one\n")
        _read_until(master, "w3")
        process.send_signal(signal.SIGINT)
        assert "stopped" in _read_until(master, "›")
        os.write(master, b"two\n")
        _read_until(master, "w1")
        process.send_signal(signal.SIGINT)
        _read_until(master, "›")
        os.write(master, b"/exit\n")
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    first, answer, second = server.bodies[1]["messages"]
    assert (first["content"], second["content"]) == ("one", "two")
    assert answer["content"].startswith("w0 w1 w2 w3 ")


def _read_until(terminal: int, mark: str) -> str:
    seen = ""
    deadline = time.monotonic() + 10
    while mark not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
    return seen


def test_the_prompt_survives_ctrl_c_and_ends_at_ctrl_d(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    lines: list[str | type[BaseException]] = ["one", KeyboardInterrupt, "two", EOFError]

    def typed(*_args: object, **_more: object) -> str:
        line = lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(Console, "input", typed)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    chat(url=server.url, max_tokens=2)
    assert len(server.bodies) == 2
    assert not lines


def test_what_a_model_writes_cannot_steer_the_terminal() -> None:
    shown: list[str] = []
    answer = chat_module.ChatAnswer()
    chat_module._take(b'{"choices": [{"delta": {"content": "a\\u001b[2Jb\\n\\tc\\u009b"}}]}', answer, shown.append)
    assert shown == ["a[2Jb\n\tc"]
