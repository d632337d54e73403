"""From credential to tenant. Keys are kept as SHA-256: the file alone lets nobody in."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from cluster.errors import ConfigError, Unauthenticated
from cluster.telemetry import get_logger

ANONYMOUS = "anonymous"
KEY_PREFIX = "quire_"

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")

_log = get_logger("auth")


def make_key(tenant: str) -> tuple[str, str]:
    """A new key, and the line of the key file that lets it in. Raises ConfigError for a tenant of other characters."""
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(f"tenant: 1 to 64 letters, digits, '-', '_' or '.'; got {tenant!r}", field="tenant")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, f"{tenant} {_digest(key)}"


class Authenticator:
    """Knows the keys of one file, and reads it again when it changes. Without a file everybody is ANONYMOUS."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError when the file cannot be read or has a bad line; the line is named, never shown."""
        self._path = path
        self._version = _version(path) if path is not None else None
        self._keys = _read(path) if path is not None else {}

    @property
    def shared(self) -> bool:
        """Whether there are several tenants."""
        return len(set(self._keys.values())) > 1

    def tenant(self, authorization: str | bytes | None) -> str:
        """The tenant of an ``authorization`` value, "Bearer KEY". Raises Unauthenticated."""
        if self._path is None:
            return ANONYMOUS
        self._refresh(self._path)
        text = authorization.decode("latin-1") if isinstance(authorization, bytes) else authorization or ""
        scheme, _, key = text.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("no API key: send the metadata 'authorization: Bearer KEY'", field="authorization")
        shown = _digest(key.strip())
        # All are compared, each in constant time: how long a refusal takes tells nothing about the keys.
        found = [tenant for digest, tenant in self._keys.items() if hmac.compare_digest(digest, shown)]
        if not found:
            raise Unauthenticated("unknown API key", field="authorization")
        return found[0]

    def _refresh(self, path: Path) -> None:
        version = _version(path)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = _read(path)
        except ConfigError as error:
            # A typo, or an editor in the middle of writing: nobody is let in or locked out by it.
            _log.error("the API keys stay as they were: %s", error.message)
        else:
            _log.info("%d API keys were read", len(self._keys))


def parse_keys(lines: Iterable[str], source: str) -> dict[str, str]:
    """Digest to tenant, from lines 'tenant sha256hex'; # begins a comment. Raises ConfigError naming the line."""
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        parts = line.partition("#")[0].split()
        if not parts:
            continue
        if len(parts) != 2 or not _TENANT.fullmatch(parts[0]) or not _DIGEST.fullmatch(parts[1].lower()):
            raise ConfigError(f"{source}, line {number}: must be 'tenant sha256hex'", field="router.api_keys_file")
        digest = parts[1].lower()
        if keys.get(digest, parts[0]) != parts[0]:
            raise ConfigError(
                f"{source}, line {number}: this key has another tenant already", field="router.api_keys_file"
            )
        keys[digest] = parts[0]
    return keys


def _read(path: Path) -> dict[str, str]:
    try:
        return parse_keys(path.read_text().splitlines(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"router.api_keys_file {path}: {why}", field="router.api_keys_file") from error


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    # The inode too: a file that is replaced within the clock's resolution keeps its time.
    return status.st_mtime_ns, status.st_size, status.st_ino


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
