"""The requests that every engine is measured with: random prompts, so that no cache helps; output lengths are fixed."""

from __future__ import annotations

import random


def requests(
    n: int = 32,
    seed: int = 0,
    vocab: int = 49_000,
    prompt: tuple[int, int] = (32, 384),
    output: tuple[int, int] = (32, 192),
) -> list[tuple[list[int], int]]:
    """``n`` pairs of (prompt token ids, tokens to put out), the same for the same arguments; ranges are inclusive."""
    generator = random.Random(seed)
    made = []
    for _ in range(n):
        length = generator.randint(*prompt)
        made.append(([generator.randrange(10, vocab) for _ in range(length)], generator.randint(*output)))
    return made
