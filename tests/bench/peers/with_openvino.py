"""Runs in OpenVINO GenAI's own environment: the requests of a file, twice, then one alone. Prints one JSON line.

python with_openvino.py MODEL_FOLDER REQUESTS.jsonl
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

MAX_BATCH_TOKENS, MAX_RUNNING = 512, 32  # as Quire's own defaults
KV_GIB = 2


def main() -> None:
    """Greedy, EOS ignored, computed in fp32; whatever the weights are stored in."""
    model, path = sys.argv[1:]
    with open(path, encoding="utf-8") as lines:
        work = [json.loads(line) for line in lines]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = KV_GIB, False, True
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = MAX_BATCH_TOKENS, MAX_RUNNING
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def rate(some: list[dict[str, Any]]) -> float:
        prompts = [openvino.Tensor(np.array([item["prompt_token_ids"]], dtype=np.int64)) for item in some]
        start = time.perf_counter()
        answers = pipeline.generate(prompts, [greedy(item["max_tokens"]) for item in some])
        made = sum(len(answer.m_generation_ids[0]) for answer in answers)
        return made / (time.perf_counter() - start)

    batch = max(rate(work[:-1]) for _ in range(2))
    print(json.dumps({"output_tok_s": batch, "single_tok_s": rate(work[-1:])}), flush=True)


def greedy(tokens: int) -> genai.GenerationConfig:
    """Exactly so many tokens."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
    return config


if __name__ == "__main__":
    main()
