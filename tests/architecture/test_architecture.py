"""Rules worth having are tests: stubs current, layers kept, fields documented, errors stable, no dead test file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from cluster import errors
from cluster.config import ClusterConfig

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "proto").glob("*.proto"))


def test_generated_stubs_are_current(tmp_path: Path) -> None:
    flags = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "cluster/pb=proto", *flags]
    subprocess.run([*command, *(f"proto/{proto.name}" for proto in PROTOS)], cwd=ROOT, check=True, timeout=60)
    made = {path.name: path.read_text() for path in (tmp_path / "cluster" / "pb").iterdir()}
    assert made
    kept = {path.name: path.read_text() for path in (ROOT / "cluster" / "pb").glob("*_pb2*")}
    assert made == kept, "run `make protos`"


FIELD = re.compile(r"^\s+(optional |repeated )?(map<.*>|[\w.]+) \w+ = \d+;")


@pytest.mark.parametrize("proto", PROTOS, ids=lambda p: p.name)
def test_every_proto_field_is_commented(proto: Path) -> None:
    """Directly above it, or above the oneof, enum or run of fields that it stands in without a gap."""
    lines = proto.read_text().splitlines()
    bare = [
        line.strip()
        for i, line in enumerate(lines)
        if FIELD.match(line) and not lines[i - 1].strip().startswith("//") and "//" not in line
    ]
    assert any(FIELD.match(line) for line in lines)
    assert not bare


def test_proto_folder_is_no_python_package() -> None:
    """proto/__init__.py would shadow proto-plus, which ray[serve] imports."""
    assert not list((ROOT / "proto").glob("*.py"))


def test_tests_have_no_packages_and_every_test_file_collects_a_test() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert not [path for path in files if path.name == "__init__.py"]
    named = [path for path in files if path.name.startswith("test_")]
    assert named
    for path in named:
        names = [node.name for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "name")]
        assert any(str(name).startswith(("test", "Test")) for name in names), f"{path} collects no test"
    stems = [path.stem for path in named]
    assert len(stems) == len(set(stems)), "two test files share a name"


def _models(model: type[BaseModel]) -> list[type[BaseModel]]:
    fields = [field.annotation for field in model.model_fields.values()]
    children = [child for field in fields for child in (field, *get_args(field))]
    inner = [child for child in children if isinstance(child, type) and issubclass(child, BaseModel)]
    return [model, *(m for child in inner for m in _models(child))]


@pytest.mark.parametrize("model", _models(ClusterConfig), ids=lambda m: m.__name__)
def test_every_setting_is_documented_frozen_and_strict(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert field.description, f"{model.__name__}.{name} has no description"
    assert model.model_config["frozen"]
    assert model.model_config["extra"] == "forbid"


def test_every_file_with_compiled_code_names_the_folder_of_the_cache() -> None:
    """numba looks at one file alone: a kernel that takes another from elsewhere would stay as it was."""
    from workers.threads import KERNEL_SOURCES

    workers = ROOT / "workers"
    marked = re.compile(r"^@(kernel|parallel_kernel|helper|precise_helper|intrinsic)\b", re.MULTILINE)
    compiled = {str(path.relative_to(workers)) for path in workers.rglob("*.py") if marked.search(path.read_text())}
    assert compiled <= set(KERNEL_SOURCES)
    assert all((workers / name).is_file() for name in KERNEL_SOURCES)


def test_error_reasons_are_unique_and_codes_exist() -> None:
    import grpc

    def tree(cls: type[errors.QuireError]) -> list[type[errors.QuireError]]:
        return [cls, *(c for child in cls.__subclasses__() for c in tree(child))]

    classes = tree(errors.QuireError)
    reasons = [cls.reason for cls in classes]
    assert len(reasons) == len(set(reasons))
    for cls in classes:
        assert cls.code in grpc.StatusCode.__members__
        assert cls.__doc__


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("cluster.errors", {"torch", "ray", "transformers", "redis", "grpc", "numpy"}),
        ("router.client", {"torch", "ray", "transformers", "redis", "workers"}),
        ("router.server", {"torch", "ray", "workers"}),
        ("workers.engine", {"torch", "ray", "router", "grpc"}),
        ("cluster.cli", {"torch", "ray", "transformers"}),
    ],
)
def test_importing_a_module_loads_nothing_heavy(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert found.stdout.strip() == ""


def test_no_machine_path_or_unfinished_mark_in_the_source() -> None:
    marks = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "Not" + "ImplementedError")))
    for folder in ("cluster", "router", "workers"):
        for path in (ROOT / folder).rglob("*.py"):
            if "pb" not in path.parts:
                assert not marks.search(path.read_text()), f"{path} is unfinished"


BUGS = {
    "Text": (
        "a stop string spread over several tokens leaks its head",
        "stop text and EOS in one multi-token step",
        "min_tokens ignored by stop strings",
        "min_tokens ignored by second EOS ids",
        "the first delta repeats the prompt",
        "characters lost or doubled between deltas",
        "two BOS tokens after a chat template",
    ),
    "Sampling": (
        "temperature 1e-5 gives inf",
        "a greedy row in a mixed batch",
        "top_k above the vocabulary",
        "a seeded request changes when a neighbour has no seed",
        "preemption restarts the generator",
        "everything masked → token 0 comes out",
        "a token id outside the vocabulary",
        "logprob −inf is not JSON",
        "penalties that ignore the part of the prompt that came from the cache",
        "a row changes with its neighbours",
    ),
    "Limits": (
        "an empty prompt kills the server",
        "a prompt exactly as long as the context, one less, one more",
        "a request that fits the context but not the page pool blocks the queue",
    ),
    "Pages": (
        "a full prefix hit leaves zero tokens to run",
        "a preempted request comes back with a stale hit count",
        "freed while a step still writes them",
        "abort before the first step, abort while loading, abort twice",
        "a block published before it is complete poisons a prefix",
        "a padding slot of -1 writes into the last page",
    ),
}
"""What broke in other engines, each by the words that the docstring of our test names it with."""


def test_what_broke_elsewhere_is_tested_here_by_name() -> None:
    named = [
        " ".join((ast.get_docstring(node) or "").split())
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    missing = [
        f"{kind}: {bug}"
        for kind, bugs in BUGS.items()
        for bug in bugs
        if not any(f"{kind}: " in text and bug in text for text in named)
    ]
    assert missing == []
