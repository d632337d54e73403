"""Keys: who is let in, what a file may hold, and that neither ever shows up in a message."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from cluster.errors import ConfigError, Unauthenticated
from router.auth import ANONYMOUS, Authenticator, make_key, parse_keys


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_without_a_file_everybody_is_anonymous() -> None:
    for value in (None, "Bearer whatever", "nonsense"):
        assert Authenticator(None).tenant(value) == ANONYMOUS


def test_a_key_is_its_tenant(tmp_path: Path) -> None:
    alice, alice_line = make_key("alice")
    bob, bob_line = make_key("bob")
    assert alice not in alice_line
    file = write(tmp_path / "keys", f"# who\n\n{alice_line}\n{bob_line}  # the second\n")
    authenticator = Authenticator(file)
    assert authenticator.tenant(f"Bearer {alice}") == "alice"
    assert authenticator.tenant(f"bearer {bob}") == "bob"
    assert authenticator.tenant(f"Bearer {bob}".encode()) == "bob"
    assert authenticator.shared


@pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer wrong", "Bearer é", b"\xff\xfe"])
def test_anything_else_is_refused_without_showing_it(tmp_path: Path, value: str | bytes | None) -> None:
    authenticator = Authenticator(write(tmp_path / "keys", make_key("alice")[1]))
    with pytest.raises(Unauthenticated) as caught:
        authenticator.tenant(value)
    assert "wrong" not in caught.value.message
    assert not authenticator.shared


def test_a_hash_is_no_key(tmp_path: Path) -> None:
    line = make_key("alice")[1]
    with pytest.raises(Unauthenticated):
        Authenticator(write(tmp_path / "keys", line)).tenant(f"Bearer {line.split()[1]}")


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    with pytest.raises(Unauthenticated):
        Authenticator(write(tmp_path / "keys", "# none yet\n")).tenant("Bearer x")


@pytest.mark.parametrize(
    "line",
    ["secretkey", "alice", "alice secret", f"alice {'0' * 63}", f"alice {'0' * 64} more", f"al/ice {'0' * 64}", "é x"],
)
def test_a_bad_line_is_named_and_never_shown(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(["# fine", line], "keys.txt")
    assert "keys.txt, line 2" in caught.value.message
    assert line not in caught.value.message
    assert "\n" not in caught.value.message


def test_one_key_of_two_tenants_is_an_error() -> None:
    digest = hashlib.sha256(b"k").hexdigest()
    with pytest.raises(ConfigError, match="line 2"):
        parse_keys([f"a {digest}", f"b {digest.upper()}"], "keys")
    assert parse_keys([f"a {digest}", f"a {digest}"], "keys") == {digest: "a"}


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Authenticator(file)
    assert str(file) in caught.value.message


def test_a_changed_file_counts_at_once_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    old, old_line = make_key("alice")
    new, new_line = make_key("alice")
    file = write(tmp_path / "keys", old_line)
    authenticator = Authenticator(file)
    write(file, f"{new_line}\n")
    assert authenticator.tenant(f"Bearer {new}") == "alice"
    with pytest.raises(Unauthenticated):
        authenticator.tenant(f"Bearer {old}")
    write(file, "half a li")
    assert authenticator.tenant(f"Bearer {new}") == "alice"
    os.remove(file)
    assert authenticator.tenant(f"Bearer {new}") == "alice"
    write(file, f"{old_line}\n\n")
    assert authenticator.tenant(f"Bearer {old}") == "alice"


def test_a_tenant_has_plain_characters() -> None:
    with pytest.raises(ConfigError):
        make_key("two words")
