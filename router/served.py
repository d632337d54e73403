"""The model that a router serves, as far as text is concerned: its name, its tokenizer, its sizes. No weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cluster.config import ClusterConfig
from cluster.errors import InvalidRequest, ModelLoadError, ModelNotFound, QuireError
from cluster.limits import MAX_BAD_SEQUENCES
from cluster.models import hf_config, resolve
from router.tokenizer import Tokenizer
from router.validation import Conversation, Message

LONG_TEXT_CHARACTERS = 2_000
"""Longer inputs go to a thread: the event loop carries everybody's tokens."""

MOST_TOKENS_OF_A_BAD_WORD = 4
"""Of spellings in which a word is forbidden, beside the tokenizer's own: longer ones are many, and hardly occur."""

THREADS = 2

Result = TypeVar("Result")


class ServedModel:
    """Made by ``load``. Its methods may be called from any number of requests at once."""

    def __init__(self, name: str, tokenizer: Tokenizer, vocab_size: int, trained_context: int) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.trained_context = trained_context
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")

    @classmethod
    async def load(cls, config: ClusterConfig) -> ServedModel:
        """Read the tokenizer of ``config.model``, on a thread. Raises ModelLoadError."""
        return await asyncio.to_thread(cls._load, config)

    @classmethod
    def _load(cls, config: ClusterConfig) -> ServedModel:
        files = resolve(config.model, name=config.model_name)
        raw = hf_config(files)
        try:
            sizes = int(raw["vocab_size"]), int(raw["max_position_embeddings"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{files.path}: its configuration lacks {error}", field="model") from error
        return cls(files.name, Tokenizer(files), *sizes)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_name(self, name: str) -> str:
        """The model that a request means; an empty name is the only one. Raises ModelNotFound."""
        if name not in ("", self.name):
            raise ModelNotFound(
                f"model: {name[:80]!r} is not served; there is: {self.name}", field="model", models=self.name
            )
        return self.name

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens as the tokenizer is configured to."""
        return await self._run(len(text), lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def render(self, conversation: Conversation, *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation in the chat template. Raises InvalidRequest for what the template refuses."""
        if not self.tokenizer.has_chat_template:
            raise InvalidRequest.of("model", self.name, "has no chat template; use Generate")
        # A template is a program, and what it takes does not follow from the length of the contents.
        return await self._run(
            LONG_TEXT_CHARACTERS + 1,
            lambda: self._render(conversation.messages, conversation.variables, add_generation_prompt),
        )

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return await self._run(
            10 * len(ids), lambda: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return await self._run(10 * len(ids), lambda: list(map(self.tokenizer.token_text, ids)))

    async def tokenizations(self, words: Sequence[str]) -> list[list[int]]:
        """The ways in which a text can hold these words, as the proto says: none twice. Raises InvalidRequest."""
        return await self._run(LONG_TEXT_CHARACTERS + 1 if words else 0, lambda: self._tokenizations(words))

    def _tokenizations(self, words: Sequence[str]) -> list[list[int]]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip(" ")):
                found[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
                for ids in self.tokenizer.spellings(text, MOST_TOKENS_OF_A_BAD_WORD):
                    found[tuple(ids)] = None
            if len(found) > MAX_BAD_SEQUENCES:
                rule = f"have more than {MAX_BAD_SEQUENCES} spellings; name fewer or shorter ones"
                raise InvalidRequest.of("options.bad_words", len(words), rule, limit=str(MAX_BAD_SEQUENCES))
        return [list(ids) for ids in found if ids]

    def _render(
        self, messages: Sequence[Message], variables: Mapping[str, Any], add_generation_prompt: bool
    ) -> list[int]:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **variables
            )
        except QuireError:
            raise
        except Exception as error:  # a template is a program of the model's, and its input is the client's
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {str(error)[:200]}", field="messages"
            ) from error

    async def _run(self, size: int, call: Callable[[], Result]) -> Result:
        if size <= LONG_TEXT_CHARACTERS:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
