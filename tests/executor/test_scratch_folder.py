"""Temporary folders of killed processes are removed; those of living ones, and other people's, stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.executor import scratch_folder as scratch_folder_module
from baton.executor.scratch_folder import LOCK, ScratchFolder, remove_lock_last, scratch_folder, sweep

HOLDING = """
import sys
from pathlib import Path
from baton.executor.scratch_folder import ScratchFolder
folder = ScratchFolder("baton-", Path(sys.argv[1]))
(folder.path / "below").mkdir()
(folder.path / "below" / "file").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert sweep(tmp_path, "baton-") == 0
        assert (path / "below" / "file").exists()
        process.kill()
        process.wait()
    assert sweep(tmp_path, "baton-") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_is_removed_at_the_end_unless_it_was_renamed(tmp_path: Path) -> None:
    with scratch_folder("baton-", tmp_path) as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())
    with scratch_folder("baton-", tmp_path) as folder:
        (folder.path / "file").touch()
        folder.rename(tmp_path / "made")
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "file"]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "baton-old").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / LOCK).touch()
    (tmp_path / "baton-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "baton-file").touch()
    assert sweep(tmp_path, "baton-") == 0
    assert sweep(tmp_path / "absent", "baton-") == 0
    assert len(list(tmp_path.iterdir())) == 4


def test_other_entries_hide_no_folder_and_of_ours_only_so_many_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_folder_module, "ENTRIES_MAX", 3)
    for number in range(50):
        (tmp_path / f"other-{number}").touch()
    for number in range(5):
        left = tmp_path / f"baton-{number}"
        left.mkdir()
        (left / LOCK).touch()
    assert sweep(tmp_path, "baton-") == 3
    assert sweep(tmp_path, "baton-") == 2


def test_a_link_inside_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "dear").mkdir()
    (tmp_path / "dear" / "file").touch()
    left = tmp_path / "baton-left"
    left.mkdir()
    (left / LOCK).touch()
    (left / "link").symlink_to(tmp_path / "dear")
    assert sweep(tmp_path, "baton-") == 1
    assert not left.exists()
    assert (tmp_path / "dear" / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_stays(tmp_path: Path) -> None:
    left = tmp_path / "baton-left"
    left.mkdir()
    (left / LOCK).touch()
    os.chown(left, 65534, 65534)
    assert sweep(tmp_path, "baton-") == 0


def test_removing_twice_is_removing_once(tmp_path: Path) -> None:
    folder = ScratchFolder("baton-", tmp_path)
    folder.remove()
    folder.remove()
    assert not list(tmp_path.iterdir())


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("removed", range(3))
def test_who_is_killed_while_it_removes_a_folder_leaves_it_to_the_next_start(
    removed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "baton-left"
    left.mkdir()
    for name in (LOCK, "beats", "engine", "zeta"):
        (left / name).touch()
    unlinked = list[str]()

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if len(unlinked) == removed:
            raise _Killed
        unlinked.append(path.name)
        os.unlink(path)

    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", unlink)
        with pytest.raises(_Killed):
            remove_lock_last(left)
    assert len(list(left.iterdir())) == 4 - removed
    assert sweep(tmp_path, "baton-") == 1
    assert not list(tmp_path.iterdir())
