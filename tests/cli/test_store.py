"""`baton store` on a file store: what it says, what it drops, and what it leaves alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cli.main import app
from baton.cli.store import shown_bytes
from baton.kv.store import Store, open_store
from tests.support.stores import Sample, sample, samples


def run(*words: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["store", *words], input=answer, env={"COLUMNS": "150"})


@pytest.fixture
def made() -> list[Sample]:
    return samples(random.Random(1), 100, 300)


@pytest.fixture
def url(tmp_path: Path, made: list[Sample]) -> str:
    store = open_store(f"file:{tmp_path}")
    store.put([each.name for each in made], [memoryview(each.data) for each in made])
    return f"file:{tmp_path}"


def objects(url: str) -> int:
    store: Store = open_store(url, create=False)
    return store.stat().objects


def path_of(folder: Path, each: Sample) -> Path:
    layout, key = each.name.split("/")
    return folder / layout / key[:2] / key


def test_stat_tells_how_much_there_is(url: str, tmp_path: Path) -> None:
    said = run("stat", f"{url}?limit=2G")
    assert said.exit_code == 0
    for words in (
        ["kind", "file"],
        ["objects", "100"],
        ["size", "35.5 KiB"],
        ["limit", "2.0 GiB"],
        ["folder", str(tmp_path)],
    ):
        assert any(line.split(maxsplit=1) == words for line in map(str.strip, said.stdout.splitlines())), words


def test_a_sound_store_is_said_to_be_sound(url: str) -> None:
    said = run("verify", url)
    assert (said.exit_code, said.stdout) == (0, "100 objects are sound (35.5 KiB)\n")


def test_what_is_not_sound_is_named_and_left_until_repair_is_asked_for(url: str, tmp_path: Path, made: list[Sample]) -> None:
    flipped = bytearray(made[0].data)
    flipped[200] ^= 1
    path_of(tmp_path, made[0]).write_bytes(flipped)
    path_of(tmp_path, made[1]).write_bytes(made[1].data[:50])
    path_of(tmp_path, made[2]).write_bytes(made[3].data)
    said = run("verify", url)
    assert said.exit_code == 1
    assert "97 objects are sound" in said.stdout
    assert "3 are not sound: checksum 1, torn 1, under another's name 1" in said.stdout
    for each, reason in zip(made, ("checksum", "torn", "under another's name"), strict=False):
        assert f"{each.name}  {reason}" in said.stdout
    assert objects(url) == 100
    said = run("verify", url, "--repair")
    assert said.exit_code == 0
    assert "dropped" in said.stdout
    assert objects(url) == 97
    assert run("verify", url).stdout.startswith("97 objects are sound")


def test_many_that_are_not_sound_are_counted_and_some_named(url: str, tmp_path: Path, made: list[Sample]) -> None:
    for each in made:
        path_of(tmp_path, each).write_bytes(b"")
    said = run("verify", url)
    assert "100 are not sound: torn 100" in said.stdout
    assert "… and 80 more" in said.stdout


def test_objects_larger_than_the_usual_are_verified_too(url: str) -> None:
    large = [sample(random.Random(10 + at), 20 << 20) for at in range(2)]
    open_store(url).put([each.name for each in large], [memoryview(each.data) for each in large])
    assert run("verify", url).stdout.startswith("102 objects are sound (40.0 MiB)")


@pytest.mark.parametrize(("answer", "left", "code"), [("n\n", 100, 1), ("", 100, 1), ("y\n", 0, 0)])
def test_clear_asks_before_it_drops(url: str, answer: str, left: int, code: int) -> None:
    said = run("clear", url, answer=answer)
    assert "Drop 100 objects (35.5 KiB) of this file store?" in said.output
    assert (said.exit_code, objects(url)) == (code, left)


def test_clear_with_yes_asks_nothing_and_leaves_what_is_not_an_object(url: str, tmp_path: Path) -> None:
    (tmp_path / "prefix.key").write_bytes(b"secret")
    said = run("clear", url, "--yes")
    assert (said.exit_code, said.stdout) == (0, "dropped 100 objects\n")
    assert objects(url) == 0
    assert (tmp_path / "prefix.key").exists()


@pytest.mark.parametrize("command", ["stat", "verify", "clear"])
def test_what_is_no_store_is_told_in_a_line_and_not_made(tmp_path: Path, command: str) -> None:
    said = run(command, f"file:{tmp_path / 'none'}")
    assert (said.exit_code, said.stdout) == (2, f"baton store: there is no store at {tmp_path / 'none'}\n")
    assert list(tmp_path.iterdir()) == []
    said = run(command, "ftp://host")
    assert said.exit_code == 2
    assert "baton store: ftp://host is not the address of a store, such as file:DIR" in said.output


def test_sizes_are_shown_in_units() -> None:
    assert [shown_bytes(size) for size in (0, 1023, 1024, 3 << 19, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "5.0 TiB",
    ]
