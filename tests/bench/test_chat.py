from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from baton.cli import chat as chat_module
from baton.cli.chat import Conversation, Next, Partner, chat
from tests.bench.server import Faults, OpenAiServer

Serve = Callable[..., OpenAiServer]


def piped(server: OpenAiServer, text: str, *options: str) -> Result:
    app = typer.Typer()
    app.command()(chat)
    return CliRunner().invoke(app, ["--url", server.url, *options], input=text)


def talking(server: OpenAiServer, system: str | None = None) -> tuple[Conversation, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, width=120)
    return Conversation(console, Partner(server.url, "words", None, 0.0, 3), system), screen


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
        assert conversation.hear(line) is Next.GO_ON
    contents = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert contents == [["one"], ["one", "w0 w1 w2 ", "two"], ["be brief", "three"]]
    assert "tokens/s" in screen.getvalue()


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_exit_leaves(serve: Serve, word: str) -> None:
    assert talking(serve())[0].hear(word) is Next.LEAVE


def test_an_unknown_command_is_not_sent(serve: Serve) -> None:
    server = serve()
    conversation, screen = talking(server)
    conversation.hear("/help")
    conversation.hear("   ")
    assert not server.bodies
    assert "/reset" in screen.getvalue()


def test_a_failed_question_is_not_kept(serve: Serve) -> None:
    server = serve(Faults(status={0: 503}))
    conversation, screen = talking(server)
    conversation.hear("one")
    conversation.hear("two")
    assert "not now" in screen.getvalue()
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["two"]


def test_ctrl_c_stops_the_answer_and_keeps_the_session(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    conversation, screen = talking(server)
    real = chat_module.stream_answer

    async def interrupted(partner: Partner, messages: list, answer: chat_module.Answer, show: chat_module.Show) -> None:
        await real(partner, messages, answer, show)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_module, "stream_answer", interrupted)
    conversation.hear("one")
    monkeypatch.setattr(chat_module, "stream_answer", real)
    conversation.hear("two")
    assert "stopped" in screen.getvalue()
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "w0 w1 w2 ", "two"]


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
    answer = chat_module.Answer()
    chat_module._take(b'{"choices": [{"delta": {"content": "a\\u001b[2Jb\\n\\tc\\u009b"}}]}', answer, shown.append)
    assert shown == ["a[2Jb\n\tc"]
