"""A chat template is compiled at the start as `transformers` will compile it at the first chat."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from baton.api.chat_template import BadTemplate, check_template, read_template
from baton.node.http_server import api_settings
from baton.node.scripted_text import CHAT_TEMPLATE
from baton.node.settings import HttpSettings

SOUND = {
    "usual": CHAT_TEMPLATE,
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m == 1 %}{% continue %}{% endif %}{{ m.content|tojson }}{% endfor %}",
    "functions": "{{ raise_exception('no') if not messages }}{{ strftime_now('%Y') }}{% set n = namespace(a=1) %}",
    "static": "no syntax at all",
}
BROKEN = {
    "a block that does not end": ("{% for m in messages %}\n{{ m }}\n", 2),
    "an expression that does not end": ("\n\n{{ messages[0] ", 3),
    "an unknown statement": ("a\n{% foreach m %}", 2),
    "an unknown filter": ("{{ messages|pretty }}", 1),
}


@pytest.mark.parametrize("template", SOUND.values(), ids=SOUND)
def test_what_transformers_renders_is_accepted(template: str) -> None:
    render_jinja_template([[{"role": "user", "content": "hello"}]], chat_template=template)
    check_template(template, "t")


@pytest.mark.parametrize(("template", "line"), BROKEN.values(), ids=BROKEN)
def test_what_does_not_parse_is_refused_with_file_and_line(template: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    with pytest.raises(BadTemplate, match=rf"the chat template {file} does not parse, line {line}: \S") as refusal:
        api_settings(HttpSettings(chat_template=str(file)), ("m",))
    assert "\n" not in str(refusal.value)


def test_a_template_on_the_command_line_is_called_so() -> None:
    with pytest.raises(BadTemplate, match="given with --chat-template does not parse, line 1"):
        api_settings(HttpSettings(chat_template="{% if %}"), ("m",))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTemplate, match=f"the chat template {tmp_path}/none cannot be read: No such file"):
        read_template(f"{tmp_path}/none")
    with pytest.raises(BadTemplate, match=f"the chat template {tmp_path} cannot be read: Is a directory"):
        read_template(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(BadTemplate, match="binary is no text in UTF-8"):
        read_template(tmp_path / "binary")
