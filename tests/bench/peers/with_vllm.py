"""Runs in vLLM's own environment: the requests of a file, twice, then one alone. Prints one JSON line.

python with_vllm.py MODEL_FOLDER REQUESTS.jsonl
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ["HF_HUB_OFFLINE"] = "1"
from vllm import LLM, SamplingParams

MAX_RUNNING, CONTEXT = 32, 2048


def main() -> None:
    """Greedy, EOS ignored, fp32."""
    model, path = sys.argv[1:]
    with open(path, encoding="utf-8") as lines:
        work = [json.loads(line) for line in lines]
    llm = LLM(
        model=model, dtype="float32", max_model_len=CONTEXT, max_num_seqs=MAX_RUNNING, enable_prefix_caching=False
    )

    def rate(some: list[dict[str, Any]]) -> float:
        prompts = [{"prompt_token_ids": item["prompt_token_ids"]} for item in some]
        params = [SamplingParams(temperature=0, max_tokens=item["max_tokens"], ignore_eos=True) for item in some]
        start = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers) / (time.perf_counter() - start)

    rate(work[:1])  # what it compiles at its first step is no part of its speed
    batch = max(rate(work[:-1]) for _ in range(2))
    print(json.dumps({"output_tok_s": batch, "single_tok_s": rate(work[-1:])}), flush=True)


if __name__ == "__main__":
    main()
