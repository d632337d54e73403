"""What a request forbids and favours, made ready once: the sampler looks at it in every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class Masks:
    """Of one request's SamplingParams. Its arrays are never changed."""

    __slots__ = ("_endings", "allowed", "banned", "bias", "biased", "stops")

    def __init__(
        self,
        logit_bias: Mapping[int, float],
        allowed_token_ids: Iterable[int],
        bad_token_sequences: Iterable[Sequence[int]],
        stop_token_ids: Iterable[int],
    ) -> None:
        self.biased = _ids(logit_bias)
        self.bias = np.array([logit_bias[token_id] for token_id in self.biased.tolist()], np.float32)
        self.allowed = _ids(allowed_token_ids)  # empty: all
        self.stops = _ids(stop_token_ids)
        sequences = [tuple(sequence) for sequence in bad_token_sequences]
        self.banned = _ids({sequence[0] for sequence in sequences if len(sequence) == 1})
        # Longer ones by the token before their last: of thousands a step looks at the few that may be near their end.
        self._endings: dict[int, list[tuple[list[int], int]]] = {}
        for sequence in dict.fromkeys(sequence for sequence in sequences if len(sequence) > 1):
            self._endings.setdefault(sequence[-2], []).append((list(sequence[:-1]), sequence[-1]))

    @property
    def is_empty(self) -> bool:
        """Whether no logit is touched; stop ids alone touch one only while min_tokens forbids them."""
        return not (len(self.biased) or len(self.allowed) or len(self.banned) or self._endings)

    def banned_behind(self, output: npt.NDArray[np.int32]) -> list[int]:
        """Tokens that would complete a bad sequence of several."""
        if not self._endings or not len(output):
            return []
        near = self._endings.get(int(output[-1]), ())
        return [last for head, last in near if len(output) >= len(head) and output[-len(head) :].tolist() == head]


def _ids(values: Iterable[int]) -> Ids:
    return np.array(sorted(set(values)), np.int64)
