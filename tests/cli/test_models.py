"""`baton models`: what is listed, what is pruned, and what is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.node.model_cache import ModelCacheError, seconds_of, used_model

DAY_S = 86_400


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    models = tmp_path / "models"
    models.mkdir(mode=0o700)
    return models


def model(cache: Path, name: str, size: int, unused_days: float = 0) -> Path:
    folder = cache / name
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(size))
    at_s = os.stat(folder).st_mtime - unused_days * DAY_S
    os.utime(folder, (at_s, at_s))
    return folder


def run(*words: str, answer: str = "") -> tuple[int, str]:
    done = CliRunner().invoke(app, ["models", *words], input=answer)
    return done.exit_code, done.output


def test_the_list_has_names_sizes_and_last_uses(cache: Path) -> None:
    model(cache, "one-aa", 2048, unused_days=3.5)
    held = model(cache, "two-bb", 1 << 20)
    (cache / ".making-x").mkdir()
    with used_model(held):
        code, text = run("list")
    lines = [line.split() for line in text.splitlines()]
    assert code == 0
    assert ["one-aa", "2.0", "KiB", "3", "days", "ago"] in lines
    assert ["two-bb", "1.0", "MiB", "in", "use"] in lines
    assert len(lines) == 4, "a heading, two models and the sum"


def test_an_empty_cache_is_said_to_be_empty(cache: Path) -> None:
    assert run("list") == (0, f"no models in {cache}\n")
    cache.rmdir()
    assert run("list") == (0, f"no models in {cache}\n")


def test_only_what_is_named_is_removed_after_a_question(cache: Path) -> None:
    one, two = model(cache, "one-aa", 10), model(cache, "two-bb", 10)
    assert run("prune", "one", answer="n\n")[0] == 1
    assert one.exists()
    assert run("prune", "one", answer="y\n")[0] == 0
    assert not one.exists()
    assert two.exists()
    assert [path.name for path in cache.iterdir()] == ["two-bb"], "and nothing else is left"


def test_what_was_not_used_for_long_is_removed(cache: Path) -> None:
    old, young = model(cache, "old-aa", 10, unused_days=31), model(cache, "young-bb", 10, unused_days=29)
    code, text = run("prune", "--older-than", "30d", "--yes")
    assert code == 0
    assert "removed 1" in text
    assert (old.exists(), young.exists()) == (False, True)


def test_a_start_of_a_server_counts_as_use(cache: Path) -> None:
    old = model(cache, "old-aa", 10, unused_days=31)
    with used_model(old):
        pass
    assert "nothing to remove" in run("prune", "--older-than", "30d", "--yes")[1]
    assert old.exists()


def test_what_a_server_uses_is_never_removed(cache: Path) -> None:
    held = model(cache, "held-aa", 10, unused_days=31)
    with used_model(held):
        code, text = run("prune", "held", "--yes")
    assert code == 0
    assert "held-aa is in use and stays" in text
    assert held.exists()


def test_two_servers_may_use_one_model(cache: Path) -> None:
    held = model(cache, "held-aa", 10)
    with used_model(held):
        with used_model(held):
            pass
        assert "in use" in run("list")[1]


def test_a_model_elsewhere_is_not_touched(cache: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with used_model(own):
        assert list(own.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("prune",), "name models, or say how long"),
        (("prune", "three"), "no model in the cache is called 'three'; there are: one-aa"),
        (("prune", "--older-than", "long"), "'long' is not an age such as 12h, 30d or 4w"),
    ],
)
def test_a_wrong_command_is_one_line(cache: Path, words: tuple[str, ...], why: str) -> None:
    model(cache, "one-aa", 10)
    code, text = run(*words)
    assert code == 2
    assert why in text
    assert len(text.splitlines()) == 1


def test_a_model_that_is_removed_while_a_server_starts_is_a_sentence(cache: Path) -> None:
    with pytest.raises(ModelCacheError, match="removed from the cache just now"), used_model(cache / "gone"):
        pass


def test_ages() -> None:
    assert [seconds_of(age) for age in ("12h", "30d", "4w")] == [12 * 3600, 30 * DAY_S, 28 * DAY_S]
