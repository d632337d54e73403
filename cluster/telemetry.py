"""Logging: one line per record, on standard error. Prompts, outputs and secrets are never logged."""

from __future__ import annotations

import json
import logging
import os
import sys

ROOT = "quire"


def get_logger(name: str) -> logging.Logger:
    """A logger under Quire's root, so that a host program (Ray, a test) can set all of ours at once."""
    return logging.getLogger(f"{ROOT}.{name}")


def setup_logging(process: str, *, default_level: str = "INFO") -> None:
    """Write Quire's records to standard error, marked with ``process`` ("router", "group-0").

    QUIRE_LOG sets the level by name (default ``default_level``); QUIRE_LOG_FORMAT=json makes each line a JSON object.
    Calling it again replaces the handler. Only Quire's own logger is touched: the root belongs to the host program.
    """
    handler = logging.StreamHandler(sys.stderr)
    as_json = os.environ.get("QUIRE_LOG_FORMAT", "").lower() == "json"
    handler.setFormatter(_JsonFormatter(process) if as_json else _LineFormatter(process))
    root = logging.getLogger(ROOT)
    root.handlers[:] = [handler]
    root.propagate = False
    wanted = os.environ.get("QUIRE_LOG", default_level).upper()
    known = logging.getLevelNamesMapping()
    root.setLevel(known.get(wanted, logging.INFO))
    if wanted not in known:
        root.warning("QUIRE_LOG=%s is no level; using INFO", wanted)


class _LineFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process.replace('%', '%%')} %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        # A traceback stays in its record's line, so that lines of several processes can be mixed and still be read.
        return super().format(record).replace("\n", "\\n")


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": record.created,
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
