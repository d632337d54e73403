"""Ranks on cards, over NCCL: the same tokens as one card gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.blocks import BlockHash
from cluster.config import EngineConfig
from cluster.models import ModelFiles
from tests.support.hf import random_model
from workers.offline import Offline, load_offline, offline_ranks
from workers.request import Failed, Request, RequestKey, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; this machine has fewer"),
]


def tokens_of(offline: Offline) -> dict[str, list[int]]:
    engine, _ = offline.engine()
    found: dict[str, list[int]] = {}
    for i in range(8):
        sampling = SamplingParams(max_tokens=16, seed=i, temperature=0.0 if i % 2 else 0.7, ignore_eos=True)
        prompt = tuple(torch.randint(10, 320, (5 + 9 * i,), generator=torch.Generator().manual_seed(i)).tolist())
        key = RequestKey("test", str(i), 1)
        engine.submit(Request(key=key, prompt=prompt, sampling=sampling, root=BlockHash(bytes(32))))
        found[key.request_id] = []
    while engine.has_work:
        for output in engine.step(0.0):
            assert not isinstance(output.end, Failed), output.end
            found[output.key.request_id] += output.token_ids
    return found


def test_two_cards_give_the_tokens_of_one(tmp_path: Path) -> None:
    random_model(tmp_path, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    files = ModelFiles("small", tmp_path, "hf")
    config = EngineConfig(device="cuda", dtype="float32")
    expected = tokens_of(load_offline(files, config, default_kv_tokens=4096))
    with offline_ranks(files, config, 2, default_kv_tokens=4096) as offline:
        assert tokens_of(offline) == expected
