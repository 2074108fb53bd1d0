"""What another user may have written is neither run nor trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.executor import private_files
from baton.executor.cache_folder import private_cache
from baton.executor.private_files import UnsafeFile, check_folder, private_folder, read_private_file, why_unsafe

STRANGER = 65534


@given(st.integers(0, 3), st.integers(0, 0o777), st.integers(0, 3))
def test_only_what_nobody_but_the_user_and_root_can_write_is_safe(owner: int, mode: int, user: int) -> None:
    safe = owner in (user, 0) and not mode & 0o022
    assert (why_unsafe(owner, 0o100000 | mode, user) is None) == safe


def test_folders_are_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    assert private_cache("kernels").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(UnsafeFile, match=r"can be written by .*chmod go-w"):
        private_folder(tmp_path)
    tmp_path.chmod(0o755)
    private_folder(tmp_path)


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"x")
    assert read_private_file(file) == b"x"
    monkeypatch.setattr(private_files, "ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UnsafeFile, match="belongs to user"):
        read_private_file(file)
    with pytest.raises(UnsafeFile, match="belongs to user"):
        private_folder(tmp_path)


def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "key").symlink_to(tmp_path / "target")
    with pytest.raises(UnsafeFile, match="no plain file"):
        read_private_file(tmp_path / "key")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a stranger's link")
def test_a_link_to_a_folder_may_be_ours_but_not_a_strangers(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    check_folder(link)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(UnsafeFile, match=f"link of user {STRANGER}"):
        check_folder(link)
