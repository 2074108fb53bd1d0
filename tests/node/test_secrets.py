"""The key of the prefix cache outlives restarts, and damage to it costs cached names, never the start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.executor.private_files import UnsafeFile
from baton.kv.store import BadStore
from baton.node.secrets import prefix_secret, shared_prefix_secret, store_key
from baton.wire.keyfile import KEY_BYTES, read_key, write_key


def test_the_key_is_the_same_after_a_restart(tmp_path: Path) -> None:
    assert prefix_secret(tmp_path) == prefix_secret(tmp_path)
    assert (tmp_path / "prefix.key").stat().st_mode & 0o777 == 0o600


def test_who_has_the_cluster_key_names_prefixes_alike_and_nobody_learns_the_key_from_it() -> None:
    key, other = b"k" * 32, b"o" * 32
    assert shared_prefix_secret(key) == shared_prefix_secret(key)
    assert len({key, shared_prefix_secret(key), shared_prefix_secret(other)}) == 3


def test_the_key_of_a_store_is_kept_with_it_where_it_is_a_folder_and_else_on_this_machine(tmp_path: Path) -> None:
    store, here = tmp_path / "store", tmp_path / "here"
    kept = store_key(f"file:{store}?limit=1G", here)
    assert (store / "prefix.key").exists()
    assert store.stat().st_mode & 0o777 == 0o700, "others need not read what is stored"
    assert not here.exists()
    assert store_key(f"file:{store}", tmp_path / "another machine") == kept
    assert store_key("valkey://h:1", here) == store_key("mooncake://h:1", here) != kept
    assert (here / "prefix.key").exists()


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("file", "is a file, not a folder for a store"),
        ("file/below", "Not a directory"),
        ("linked", "is a link; a store keeps its drafts in the folder itself"),
    ],
)
def test_a_folder_that_can_be_no_store_is_what_is_said_and_not_that_its_key_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".writing").symlink_to(tmp_path)
    with pytest.raises(BadStore, match=reason):
        store_key(f"file:{tmp_path}/{folder}", tmp_path / "here")
    assert not caplog.records


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 52])
def test_a_damaged_file_is_replaced_by_a_new_key(tmp_path: Path, damage: bytes) -> None:
    first = prefix_secret(tmp_path)
    (tmp_path / "prefix.key").write_bytes(damage)
    second = prefix_secret(tmp_path)
    assert second != first
    assert prefix_secret(tmp_path) == second


def test_a_folder_that_cannot_be_written_costs_only_stability(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert len(prefix_secret(tmp_path / "file" / "folder")) == KEY_BYTES


@given(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), st.data())
def test_no_damaged_file_is_taken_for_a_key(secret: bytes, data: st.DataObject) -> None:
    whole = write_key(secret)
    assert read_key(whole) == secret
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    assert read_key(bytes(flipped)) is None
    assert read_key(whole[:at]) is None


@pytest.mark.parametrize("harm", ["folder", "file"])
def test_a_key_that_others_may_have_written_is_refused(tmp_path: Path, harm: str) -> None:
    prefix_secret(tmp_path)
    (tmp_path if harm == "folder" else tmp_path / "prefix.key").chmod(0o777)
    with pytest.raises(UnsafeFile, match="can be written by everybody"):
        prefix_secret(tmp_path)


def test_a_link_in_place_of_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(write_key(b"t" * KEY_BYTES))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "prefix.key").symlink_to(tmp_path / "theirs")
    with pytest.raises(UnsafeFile, match="no plain file"):
        prefix_secret(tmp_path / "own")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    prefix_secret(tmp_path)
    os.chown(tmp_path / "prefix.key", 65534, 65534)
    with pytest.raises(UnsafeFile, match="belongs to user 65534"):
        prefix_secret(tmp_path)


def test_a_store_that_others_may_write_is_refused(tmp_path: Path) -> None:
    store_key(f"file:{tmp_path}/store", tmp_path / "here")
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(UnsafeFile, match="can be written by everybody"):
        store_key(f"file:{tmp_path}/store", tmp_path / "here")
