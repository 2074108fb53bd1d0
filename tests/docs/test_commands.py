"""Every command line in README, ARCHITECTURE and docs/ is one that the real parser takes; those that end soon are run.

What is a placeholder (a model, a key, a file that the reader has) is declared here; any other file that a command names must
exist. Commands that are not run carry a mark with the reason (`pages`).
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from baton.api.schema import ChatBody, CompletionBody, parse
from baton.cli.main import app
from baton.cli.reference import metric_rows
from baton.kv.store import parse_size, parse_url
from baton.sim.__main__ import parser as fuzzer
from tests.docs import pending
from tests.docs.pages import (
    FENCE,
    LANGUAGES,
    ROOT,
    Block,
    Span,
    blocks,
    blocks_of,
    commands_of,
    lines_of,
    read,
    spans_of,
    written_pages,
)
from tests.fuzz.__main__ import arguments as decoder_fuzz_arguments
from tests.support.server import ServerProcess, baton_serve

ASKS_MAX = 10
SECONDS_MAX = 120
"""What is run ends within 30 s on two cores; they may be busy with other tests."""
SERVER = "http://127.0.0.1:8000"
WITH_SERVER = "run with a server"
NOT_RUN = re.compile(
    r"not run: (needs a GPU|needs several machines|long|needs a running (server|fleet)|needs a recording"
    r"|needs a package registry|serves until it is stopped|sets up an environment|installs the package)"
)
PLACEHOLDERS = frozenset(
    [
        "./folder-of-safetensors", "./kv", "./my-model", "./recordings",
        "./recordings/*.baton", "engine-decode-1.baton", "/path/to/run-in-vllm-venv", "cluster.key", "fleet.toml",
        "gpu.json", "mooncake_conversation_trace.jsonl.gz", "my-machine.json", "range.json", "run.json", "run.png",
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    ]
)  # fmt: skip
"""Files and folders that the reader has or makes."""
FILES_THERE = PLACEHOLDERS & {
    "./recordings/*.baton", "cluster.key", "engine-decode-1.baton", "mooncake_conversation_trace.jsonl.gz",
}  # fmt: skip
"""Those that a command looks for before it does anything."""
WRITTEN_FOR = {
    "ADDRESS": "10.0.0.1",
    "FILE.toml": "fleet.toml",
    "GROUP:KEY": "team:key",
    "KEY": "key",
    "MODEL": "./my-model",
    "N": "1",
}
"""What stands for a reader's own words where a value must parse."""
FORMS = frozenset(["baton bench NAME", "python -m benchmarks NAME"])
GONE = frozenset(["--attention flashinfer"])
"""Only said to be gone."""
COMPARING = frozenset(["docs/coming-from-vllm.md"])
FOREIGN = frozenset(
    [
        "--async-scheduling", "--cpu-offload-gb", "--data-parallel-size", "--enable-auto-tool-choice",
        "--enable-log-requests", "--enable-lora", "--enable-prefix-caching", "--gpu-memory-utilization",
        "--kv-cache-dtype", "--kv-events-config", "--kv-offloading-size", "--kv-transfer-config", "--limit-mm-per-prompt",
        "--num-gpu-blocks-override", "--otlp-traces-endpoint", "--pipeline-parallel-size",
        "--scheduling-policy", "--speculative-config", "--tensor-parallel-size", "--tool-call-parser", "--trust-remote-code",
        "--uvicorn-log-level",
    ]
)  # fmt: skip
"""Options of another engine, which pages that compare may name."""
EVALUATOR = frozenset(["--batch_size", "--include_path", "--model", "--model_args", "--tasks"])
"""Options of lm-eval 0.4.13 that the pages use, each with a value."""
SHELL = frozenset(["base64", "chmod", "export", "head"])
TAKES_LONG = ("baton sim fuzz",)
"""More than five seconds, of what is run."""
SH_BLOCKS = blocks("sh")
SH_LINES = [(block, line) for block in SH_BLOCKS for line in lines_of(block)]
INLINE = [span for page in written_pages() for span in spans_of(page)]


# ── parsing ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def benchmarks_app() -> typer.Typer:
    """Until there are experiments beside the package, they are commands of it."""
    place = "benchmarks.__main__" if find_spec("benchmarks") else "baton.cli.bench"
    module = import_module(place)
    found = module.__dict__.get("app") or module.__dict__["bench_app"]
    assert isinstance(found, typer.Typer)
    return found


def leaf_of(program: typer.Typer, words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that these words call, and the words that are left for it."""
    command: Any = typer.main.get_command(program)
    rest = list(words)
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        context = command.make_context("baton", [], resilient_parsing=True)
        found = command.get_command(context, rest[0])
        assert found is not None, f"{rest[0]} is no command"
        command, rest = found, rest[1:]
    return command, rest


def check_words(program: typer.Typer, words: Sequence[str], named: bool) -> None:
    command, rest = leaf_of(program, words)
    if named and not rest:
        return
    assert not isinstance(command, TyperGroup) or rest, "it lacks its last word"
    try:
        context = command.make_context(command.name, [WRITTEN_FOR.get(word, word) for word in rest])
    except typer.Exit:
        return  # --help; what is wrong is another exception
    for parameter in command.params:
        value = context.params.get(parameter.name)
        if value is not None and parameter.metavar == "SIZE":
            parse_size(value)
        if value is not None and parameter.name == "kv_store":
            parse_url(value)


@cache
def commands(program: typer.Typer) -> tuple[Any, ...]:
    """Every command that has no commands of its own."""

    def below(command: Any) -> Iterator[Any]:
        if not isinstance(command, TyperGroup):
            yield command
            return
        context = command.make_context("baton", [], resilient_parsing=True)
        for name in command.list_commands(context):
            yield from below(command.get_command(context, name))

    return tuple(below(typer.main.get_command(program)))


@cache
def having(option: str) -> tuple[Any, ...]:
    every = {*commands(app), *commands(benchmarks_app())}
    return tuple(one for one in every if any(option in (*p.opts, *p.secondary_opts) for p in one.params))


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the reader has, to parse and run in; nothing of the environment is for Baton."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "kv").mkdir()
    (folder / "recordings").mkdir()
    for name in FILES_THERE:
        (folder / name).touch()
    (table,) = blocks("toml")
    (folder / "fleet.toml").write_text(table.text)
    given = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("BATON_")}
    with contextlib.chdir(folder):
        yield folder
    os.environ.update(given)


# ── what commands there are ──────────────────────────────────────────────────────────────────────────────────────────────


def check_make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(" ".join(re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)).split())
    variables = set(re.findall(r"\$\((\w+)\)", makefile)) | pending.MAKE_VARIABLES
    for word in words:
        name, given, _ = word.partition("=")
        assert name in (variables if given else targets), f"make knows no {name}"


def check_pip(words: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for word in words[1:]:
        named = re.fullmatch(r"\.(?:\[([\w,]+)\])?", word)
        assert named, f"pip install {word}"
        assert not named[1] or set(named[1].split(",")) <= set(extras), f"there is no extra {named[1]}"


def check_curl(words: Sequence[str]) -> None:
    (address,) = [word for word in words if word.startswith("http")]
    assert address.startswith(SERVER)
    if "-d" in words:
        kind = ChatBody if address.endswith("/chat/completions") else CompletionBody
        parse(words[words.index("-d") + 1].encode(), kind)


def check_evaluator(words: Sequence[str]) -> None:
    """lm-eval is not installed here: what can be told is that it asks our server for a task that the page has."""
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert set(options) <= EVALUATOR
    tasks = {line.removeprefix("task: ") for block in blocks("yaml") for line in block.text.splitlines()}
    assert options["--tasks"] in tasks
    arguments = dict(word.split("=", 1) for word in options["--model_args"].split(","))
    assert arguments["base_url"].startswith(SERVER)
    assert f'"{arguments["base_url"].removeprefix(SERVER)}"' in sources()


def check_command(words: Sequence[str], named: bool = False) -> None:
    """`named`: a command may stand without what it needs, to speak of it."""
    while words and (assigned := re.fullmatch(r"([A-Z_]+)=.*", words[0])):
        check_variable(assigned[1])
        words = words[1:]
    match words:
        case ["baton", *rest]:
            check_words(app, rest, named)
        case ["python", "-m", "benchmarks", *rest]:
            check_words(benchmarks_app(), rest, named)
        case ["python", "-m", "baton.sim", *rest]:
            fuzzer().parse_args(rest)
        case ["python", "-m", "tests.fuzz", *rest]:
            decoder_fuzz_arguments(rest)
        case ["python", script] if script.startswith("tools/"):
            pass  # a file of ours: it must exist
        case ["make", *rest]:
            check_make(rest)
        case ["pip", *rest]:
            check_pip(rest)
        case ["curl", *rest]:
            check_curl(rest)
        case ["lm_eval", *rest]:
            check_evaluator(rest)
        case ["export", *rest]:
            for word in rest:
                check_variable(word.partition("=")[0])
        case [name, *_]:
            assert name in SHELL, f"{name} is not a command that these pages may use"
    check_files(words)


@cache
def sources() -> str:
    folders = [folder for folder in (ROOT / "src", ROOT / "benchmarks") if folder.is_dir()]
    return "\n".join(path.read_text() for folder in folders for path in sorted(folder.rglob("*.py")))


def check_variable(name: str) -> None:
    if name.startswith("BATON_"):
        option = "--" + name.removeprefix("BATON_").lower().replace("_", "-")
        assert having(option) or name in sources(), f"nothing reads {name}"


def check_files(words: Sequence[str]) -> None:
    for word in words:
        name = word.partition("=")[2] if re.match(r"[A-Z_]+=", word) else word
        name = name.removeprefix("file:")
        if "://" in name or name == "." or name.startswith(("/v1", "/dev/", "/var/lib/", "-", ".[", "{")) or " " in name:
            continue
        if "/" in name or re.search(r"\.(json|toml|key|gz|png|gguf|baton)$", name):
            assert name in PLACEHOLDERS or (ROOT / name).exists(), f"{name} is no file here and no declared placeholder"


# ── tests ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_there_are_commands_to_check() -> None:
    assert len(SH_LINES) > 50
    assert sum(block.mark is None for block in SH_BLOCKS) >= 4


@pytest.mark.parametrize("block", SH_BLOCKS, ids=str)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.mark is None or block.mark == WITH_SERVER or NOT_RUN.match(block.mark), block.mark


@pytest.mark.parametrize(("block", "line"), SH_LINES, ids=[f"{block} {line[:60]}" for block, line in SH_LINES])
@pytest.mark.usefixtures("desk")
def test_the_parser_takes_the_line(block: Block, line: str) -> None:
    for words in commands_of(line):
        check_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "baton serve --no-such-option",
        "baton serve --reserve sometimes",
        "baton serve --port 70000",
        "baton serve --kv-memory plenty",
        "baton serve --kv-store nowhere",
        "baton serve ./another-model",
        "baton bench calibrate",
        "baton fly",
        "python -m benchmarks nothing",
        "make coffee",
        "make test NO_SUCH_VARIABLE=1",
        "pip install '.[jewels]'",
        "BATON_NO_SUCH_OPTION=1 baton serve",
        "rm -r kv",
        "lm_eval --model local-completions --tasks no-such-task --model_args base_url=http://127.0.0.1:8000/v1/completions",
        "lm_eval --tasks capitals --model_args base_url=http://127.0.0.1:8000/no-such-path",
        "lm_eval --no_such_option 1 --tasks capitals --model_args base_url=http://127.0.0.1:8000/v1/completions",
        'for file in ./recordings/*.baton; do baton replay --no-such-option "$file"; done',
        "for file in ./nowhere/*.baton; do baton replay $file; done",
    ],
)
@pytest.mark.usefixtures("desk")
def test_a_wrong_line_is_found(line: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011  of the parser's own classes, which move with its version, or an assertion
        check_command(commands_of(line)[0])


def test_a_loop_is_its_body_for_the_first_of_its_words_and_a_line_may_go_on_below() -> None:
    looped = 'for file in a.baton b.baton; do baton replay "$file"; baton models list; done; baton --help'
    assert commands_of(looped) == [["baton", "replay", "a.baton"], ["baton", "models", "list"], ["baton", "--help"]]
    assert commands_of("baton \\\n  --help  # 'aside'") == [["baton", "--help"]]
    assert commands_of("echo 'a;b' && ls > c") == [["echo", "a;b"], ["ls"]]


FENCES = [
    (page, number, line)
    for page in written_pages()
    for number, line in enumerate(read(page).splitlines(), start=1)
    if line.lstrip().startswith(("```", "~~~"))
]


def test_a_block_is_in_a_language_that_is_checked() -> None:
    """A language beside the known ones, or a fence that is not read as one, would hide commands from these tests."""
    assert not [fence for fence in FENCES if (found := FENCE.match(fence[2])) is None or found[1] not in LANGUAGES]
    assert {block.language for page in written_pages() for block in blocks_of(page)} == LANGUAGES


UNNAMED = [block for language in ("", "text") for block in blocks(language)]


@pytest.mark.parametrize("block", UNNAMED, ids=str)
def test_a_block_without_a_language_holds_no_command(block: Block) -> None:
    assert not re.search(r"^\s*(\$ |(baton|make|pip|curl|python|lm_eval|for) )", block.text, re.MULTILINE)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_a_block_of_json_is_json(block: Block) -> None:
    json.loads(block.text)


COMMAND_SPANS = [span for span in INLINE if re.match(r"(baton|make|pip) \S|python -m benchmarks", span.text)]


@pytest.mark.parametrize("span", [span for span in COMMAND_SPANS if span.text not in FORMS], ids=str)
@pytest.mark.usefixtures("desk")
def test_the_parser_takes_a_command_inside_of_a_line(span: Span) -> None:
    for words in commands_of(span.text):
        check_command(words, named=True)


OPTION_SPANS = [
    span
    for span in INLINE
    if re.match(r"--\w", span.text) and span.text not in GONE and not (span.page in COMPARING and span.text in FOREIGN)
]


@pytest.mark.parametrize("span", OPTION_SPANS, ids=str)
@pytest.mark.usefixtures("desk")
def test_an_option_inside_of_a_line_exists_and_its_value_parses(span: Span) -> None:
    option, *values = span.text.split()
    found = having(option)
    assert found, f"no command has {option}"
    if not values:
        return
    errors = []
    for command in found:
        needed = ["x" for parameter in command.params if parameter.param_type_name == "argument" and parameter.required]
        try:
            command.make_context(command.name, [option, *(WRITTEN_FOR.get(value, value) for value in values), *needed])
        except Exception as error:  # noqa: BLE001  of the parser's own classes, which move with its version
            errors.append(error)
    assert len(errors) < len(found), errors


@pytest.mark.parametrize("option", sorted(FOREIGN))
def test_what_is_said_to_be_of_another_engine_is_not_ours_and_is_told(option: str) -> None:
    assert not having(option), "map it to our own option of this name"
    assert any(f"`{option}`" in read(page) for page in COMPARING)


UNITS = blocks("ini")


@pytest.mark.parametrize("block", UNITS, ids=str)
@pytest.mark.usefixtures("desk")
def test_the_parser_takes_the_command_of_a_unit(block: Block) -> None:
    (line,) = re.findall(r"^ExecStart=(.+)$", block.text, re.MULTILINE)
    (words,) = commands_of(line)
    check_command(words)


def test_what_is_gone_is_said_nowhere_else() -> None:
    for page in written_pages():
        for gone in GONE:
            assert gone not in read(page) or page == "docs/changes.md"


def test_every_experiment_is_listed_where_it_moved_and_where_figures_are() -> None:
    named = {command.name for command in commands(benchmarks_app())} - {"serve", "gpu", "calibrate"}
    (row,) = [line for line in read("docs/changes.md").splitlines() if "`baton bench NAME`" in line]
    moved = re.findall(r"`([a-z-]+)`", row.partition(")")[0])
    shown = re.findall(r"^python -m benchmarks ([a-z-]+)", read("docs/measuring.md"), re.MULTILINE)
    assert len(moved) == len(set(moved))
    assert set(moved) <= named
    assert set(shown) == named


@pytest.mark.parametrize("span", [span for span in INLINE if re.match(r"(GET|POST|DELETE) /", span.text)], ids=str)
def test_an_endpoint_exists(span: Span) -> None:
    path = span.text.split()[1].replace("/models/{id}", "/models/{id:path}")
    assert f'"{path}"' in sources()


@pytest.mark.parametrize("span", [span for span in INLINE if re.fullmatch(r"baton_(?!usage$)[a-z_]+", span.text)], ids=str)
def test_a_metric_exists(span: Span) -> None:
    assert {span.text, f"{span.text}_total"} & {row.name for rows in metric_rows() for row in rows}


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(words: Sequence[str], folder: Path) -> str:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    if words[0] == "baton":
        words = [sys.executable, "-m", "baton", *words[1:]]
    elif words[0] == "python":
        words = [sys.executable, *words[1:]]
    done = subprocess.run(
        words,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(words: list[str], folder: Path) -> None:
    if words[:3] == ["python", "-m", "benchmarks"] and not find_spec("benchmarks"):
        words = ["baton", "bench", *words[3:]]
    run(words, folder)


RUN = [
    pytest.param(line, id=f"{block} {line[:40]}", marks=[pytest.mark.slow] if line.startswith(TAKES_LONG) else [])
    for block, line in SH_LINES
    if block.mark is None
]


SECRETS = frozenset({"--api-key", "--admin-key", "--cluster-key"})


@pytest.mark.parametrize(("block", "line"), SH_LINES, ids=str)
def test_no_command_shows_a_key_to_all_users_of_the_machine(block: Block, line: str) -> None:
    given = {word.partition("=")[0] for words in commands_of(line) for word in words}
    assert not given & SECRETS, f"{block}: give it in the environment or a file"


@pytest.mark.parametrize("line", RUN)
def test_the_command_runs(line: str, desk: Path) -> None:
    for words in commands_of(line):
        run_here(words, desk)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with baton_serve("--executor", "scripted", "--served-model-name", "smollm2") as process:
        yield process


@pytest.mark.parametrize("line", [line for block, line in SH_LINES if block.mark == WITH_SERVER])
def test_the_request_is_answered(line: str, server: ServerProcess, desk: Path) -> None:
    (words,) = commands_of(line.replace(SERVER, server.url))
    answer = json.loads(run([*words, "--silent"], desk))
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


# ── Python ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

CALLS_TOOLS = "run with a server whose model calls tools"
PYTHON = [block for block in blocks("python") if block.mark in (None, WITH_SERVER, CALLS_TOOLS)]
ASKING = [block for block in PYTHON if SERVER in block.text]
OF_THE_CODE = frozenset(["ARCHITECTURE.md", "docs/design/simulator.md"])
"""Their Python is of Baton's own parts, and asks no server."""
TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}</tool_call>\n{% endfor %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "
)


def test_python_of_the_pages_is_run_here_or_where_its_mark_says() -> None:
    for block in blocks("python"):
        if block in ASKING or block.page in OF_THE_CODE:
            continue
        assert block.mark == "run by tests/docs/test_snippets.py", block
    assert {block.page for block in ASKING} == {"README.md", "docs/apis.md", "docs/constraints.md", "docs/tools.md"}


@pytest.mark.parametrize("block", [block for block in ASKING if block.mark != CALLS_TOOLS], ids=str)
def test_the_python_prints_an_answer(block: Block, server: ServerProcess, desk: Path) -> None:
    program = block.text.replace(SERVER, server.url)
    # Nothing seeds it, and what the scripted executor draws may end at once.
    assert any(run([sys.executable, "-c", program], desk).strip() for _ in range(ASKS_MAX))


@pytest.fixture(scope="module")
def calling() -> Iterator[ServerProcess]:
    """A server whose chat template has a place for tools; what is drawn there is a call where a call is forced."""
    options = ("--served-model-name", "my-model", "--chat-template", TOOLS_TEMPLATE, "--tool-parser", "hermes")
    with baton_serve("--executor", "scripted", *options) as process:
        yield process


@pytest.mark.parametrize("forced", ["auto", "required"])
def test_the_python_about_tools_makes_messages_that_the_server_takes(
    forced: str, calling: ServerProcess, desk: Path
) -> None:
    (block,) = [block for block in ASKING if block.mark == CALLS_TOOLS]
    asked = "tools=[weather]"
    assert block.text.count(asked) == 1
    # Nobody forces a call on the page: the scripted executor makes none by itself.
    program = block.text.replace(SERVER, calling.url).replace(asked, f"{asked}, tool_choice={forced!r}, max_tokens=2000")
    after = (
        "print([message['role'] if isinstance(message, dict) else message.role for message in messages])",
        "client.chat.completions.create(model='my-model', messages=messages, tools=[weather], max_tokens=1)",
    )
    roles = ast.literal_eval(run([sys.executable, "-c", "\n".join((program, *after))], desk))
    assert roles[:2] == ["user", "assistant"]
    assert set(roles[2:]) == ({"tool"} if forced == "required" else set())
