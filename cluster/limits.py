"""How much one request may ask for. A router and a group hold it against the same numbers; the protos tell them.

Each bounds work that nobody else should have to wait for: checking a message on an event loop, a mask in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Sized

from cluster.errors import InvalidRequest

MAX_SAMPLES = 64
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 100_000
"""Entries over the whole prompt, some 1.5 MB: they are one message, and others wait behind it."""

MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_SEQUENCES = 4096
MAX_BAD_SEQUENCE_TOKENS = 64
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_BAD_WORDS = 1024
MAX_MESSAGES = 4096
MAX_REQUEST_ID_BYTES = 128
MAX_NAME_BYTES = 256
MAX_PRIORITY = 100


def check_token_lists(
    prefix: str,
    logit_bias: Sized,
    allowed_token_ids: Sized,
    stop_token_ids: Sized,
    bad_token_sequences: Sized,
) -> None:
    """Raise InvalidRequest for a list in SamplingParams that is too long.

    ``prefix``: the path of the message that holds them.
    """
    for name, given, most in (
        ("logit_bias", logit_bias, MAX_LOGIT_BIAS),
        ("allowed_token_ids", allowed_token_ids, MAX_ALLOWED_TOKEN_IDS),
        ("stop_token_ids", stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("bad_token_sequences", bad_token_sequences, MAX_BAD_SEQUENCES),
    ):
        if len(given) > most:
            raise InvalidRequest.of(
                f"{prefix}.{name}", len(given), f"must have at most {most} entries", limit=str(most)
            )


def check_bad_sequence(field: str, token_ids: Collection[int]) -> None:
    """Raise InvalidRequest for one that is empty or too long."""
    if not 1 <= len(token_ids) <= MAX_BAD_SEQUENCE_TOKENS:
        raise InvalidRequest.of(
            field,
            len(token_ids),
            f"must hold at least one token id and at most {MAX_BAD_SEQUENCE_TOKENS}",
            limit=str(MAX_BAD_SEQUENCE_TOKENS),
        )
