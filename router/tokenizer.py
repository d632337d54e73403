"""Text to token ids and back, and the chat template. No torch: a router serves text on hosts without it.

Encoding and decoding go straight to the ``tokenizers`` backend, which any number of threads may use at once; the
methods of transformers' classes change its truncation settings in each call, and fail when two do so together.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import tokenizers
import tokenizers.decoders
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

from cluster.errors import InvalidRequest, ModelLoadError
from cluster.gguf_header import read_metadata
from cluster.models import ModelFiles, hf_config

_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

# What transformers' apply_chat_template takes besides variables of the template. A client must not set these: one of
# them is the template.
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "tools",
    "documents",
}


class Tokenizer:
    """Of one model. Thread-safe."""

    def __init__(self, files: ModelFiles) -> None:
        """Raises ModelLoadError."""
        try:
            self._outer = _from_gguf(files) if files.kind == "gguf" else _from_folder(files)
        except ModelLoadError:
            raise
        except Exception as error:  # the readers of foreign files raise whatever they come upon
            raise ModelLoadError(
                f"{files.path}: its tokenizer cannot be read: {type(error).__name__}: {error}", path=files.path
            ) from error
        self._backend = cast(tokenizers.Tokenizer, self._outer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids: tuple[int, ...] = tuple(hf_config(files)["eos_token_id"])
        self.bos_token_id: int | None = cast("int | None", self._outer.bos_token_id)
        # Where the tokenizer adds none, a text that begins with two has them from its author.
        self._adds_bos = self.bos_token_id is not None and self._backend.encode("").ids[:1] == [self.bos_token_id]
        self.has_chat_template = bool(self._outer.chat_template)
        self.is_byte_level = isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel)
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._texts: dict[int, str] = {}  # of single tokens: a vocabulary of them at most

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens are added as the model's tokenizer is configured to, a BOS never twice."""
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_token_id]:
            return ids[1:]  # the text had one already
        return ids

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation. ``variables``: more for the template.

        Raises InvalidRequest for a variable that is not the client's to set, and for what the template refuses.
        """
        for name in variables:
            if name in _RESERVED:
                raise InvalidRequest.of("template_variables_json", name, "is reserved; choose another name")
        try:
            text = self._outer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
            # Templates write their special tokens themselves. One that writes half a surrogate pair cannot be encoded.
            return self.encode(cast(str, text), add_special_tokens=False)
        except Exception as error:  # a template is a program of the model's, and raises what it likes
            reason = str(error)[:200] or type(error).__name__
            raise InvalidRequest(f"messages: the chat template refuses them: {reason}", field="messages") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text. Ids that the tokenizer does not know, which padded vocabularies have, give nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; U+FFFD for a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def spellings(self, text: str, most_tokens: int) -> list[list[int]]:
        """Every way in which up to ``most_tokens`` tokens of the vocabulary spell a text, the shortest first.

        A model may write a word in other tokens than those that encoding gives.
        """
        vocabulary, longest = self._by_bytes
        found: list[list[int]] = []
        begun: list[tuple[bytes, list[int]]] = [(text.encode(), [])]
        for left in range(most_tokens - 1, -1, -1):
            longer: list[tuple[bytes, list[int]]] = []
            for rest, ids in begun:
                for length in range(1, min(len(rest), longest) + 1):
                    for token_id in vocabulary.get(rest[:length], ()):
                        if length == len(rest):
                            found.append([*ids, token_id])
                        elif len(rest) - length <= left * longest:
                            longer.append((rest[length:], [*ids, token_id]))
            begun = longer
        return found

    @functools.cached_property
    def _by_bytes(self) -> tuple[dict[bytes, list[int]], int]:
        """Ids of ordinary tokens by what they spell, and the length of the longest."""
        found: dict[bytes, list[int]] = {}
        for token, token_id in self._backend.get_vocab(with_added_tokens=False).items():
            if token_id in self._special:
                continue
            if self.is_byte_level:
                spelt = self.token_bytes(token_id)
            elif self.is_byte(token_id):
                spelt = bytes([self.byte_value(token_id)])
            else:
                spelt = token.replace("▁", " ").encode()
            if spelt:
                found.setdefault(spelt, []).append(token_id)
        return found, max(map(len, found), default=0)

    # -- what incremental decoding needs to know of a token --

    def is_known(self, token_id: int) -> bool:
        """Whether decoding sees it; padded vocabularies have ids that it does not."""
        return self._backend.id_to_token(token_id) is not None

    def is_special(self, token_id: int) -> bool:
        """Whether ``skip_special_tokens`` leaves it out."""
        return token_id in self._special

    def is_byte(self, token_id: int) -> bool:
        """Whether it is a byte-fallback token, which stands for a part of a character."""
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def byte_value(self, token_id: int) -> int:
        """Of a byte-fallback token, 0 to 255."""
        return int((self._backend.id_to_token(token_id) or "")[3:5], 16)

    def token_bytes(self, token_id: int) -> bytes:
        """Of a byte-level vocabulary's token; empty for an unknown id."""
        token = self._backend.id_to_token(token_id) or ""
        try:
            return bytes(_BYTES[character] for character in token)
        except KeyError:  # an added token, which is spelled as it is
            return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: itself where it is one, else the next beyond U+00FF."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def _from_gguf(files: ModelFiles) -> PreTrainedTokenizerFast:
    """As transformers makes it of ``gguf_file=``; its own reader would import torch."""
    metadata = read_metadata(files.path)
    groups = {
        group: {ours: metadata[f"tokenizer.{key}"] for key, ours in keys.items() if f"tokenizer.{key}" in metadata}
        for group, keys in GGUF_TOKENIZER_MAPPING.items()
    }
    vocabulary, settings = groups["tokenizer"], groups["tokenizer_config"]
    if "tokens" not in vocabulary:
        raise ModelLoadError(f"{files.path}: it holds no vocabulary (tokenizer.ggml.tokens)", path=files.path)
    if vocabulary.get("tokenizer_type") == "llama":
        settings.setdefault("add_bos_token", True)  # a sentencepiece vocabulary has it unless it says otherwise
    backend, more = convert_gguf_tokenizer(metadata["general.architecture"], vocabulary)
    for ours, theirs in _SPECIAL.items():
        token_id = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        settings[f"{ours}_token"] = None if token_id is None else vocabulary["tokens"][token_id]
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)


def _from_folder(files: ModelFiles) -> PreTrainedTokenizerFast:
    """tokenizer.json as it is. AutoTokenizer would import torch, and run a class of its own over the same file."""
    if not (files.path / "tokenizer.json").is_file():
        raise ModelLoadError(
            f"{files.path}: no tokenizer.json; make one with transformers' AutoTokenizer and save_pretrained",
            path=files.path,
        )
    return cast(PreTrainedTokenizerFast, PreTrainedTokenizerFast.from_pretrained(files.path, local_files_only=True))
