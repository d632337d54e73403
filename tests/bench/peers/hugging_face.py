"""A model of ours as a folder that other engines read: fp32, no quantization, with its tokenizer.

python -m tests.bench.peers.hugging_face MODEL FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.models import resolve


def main() -> None:
    """transformers reads and writes, so nothing of ours is between the weights and the other engine."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files, out = resolve(sys.argv[1]), Path(sys.argv[2])
    where = {"gguf_file": files.path.name} if files.kind == "gguf" else {}
    folder = files.path.parent if files.kind == "gguf" else files.path
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    if hasattr(loaded.config, "quantization_config"):  # the numbers are in fp32 now, whatever they were in the file
        del loaded.config.quantization_config
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    plain = type(loaded)(config).float()
    missing, unexpected = plain.load_state_dict(loaded.state_dict(), strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise SystemExit(f"{files.path}: weights do not fit the architecture: {missing} {unexpected}")
    plain.tie_weights()
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, **where).save_pretrained(out)


if __name__ == "__main__":
    main()
