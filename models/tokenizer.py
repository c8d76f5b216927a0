"""A model's tokenizer and chat template, checked against the model before use."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from graft.models.errors import ConfigError, TokenizerError
from graft.models.json_fields import Fields
from graft.models.text.chat import ChatTemplate
from graft.models.text.stream import IncrementalDecoder, decode, safely

#: What no variable of a chat template can be called: arguments of `Tokenizer.chat` are.
TAKEN = frozenset({"self", "messages", "names", "most_bytes"})


class Tokenizer:
    """``tokenizer.json`` of a model folder, its stop ids and its chat template.

    What the file says of truncation, padding and dropout is for training, and switched off.

    Parameters
    ----------
    path : the model's folder.
    vocab_size : rows of the model's embedding; taken from ``config.json`` where that exists.

    Attributes
    ----------
    backend : the library's object.
    vocab_size : one more than the greatest token id.
    special_names : special tokens, which `decode` leaves out.
    stop_ids : ids that end a text: those of ``generation_config.json``, else of ``config.json``,
        else the tokenizer's own end-of-sequence token.

    Raises
    ------
    TokenizerError
        Files damaged; ids outside the model's vocabulary; special tokens that do not exist.
    """

    def __init__(self, path: str | Path, *, vocab_size: int | None = None) -> None:
        self.path = Path(path)
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{file}: is missing")
        try:
            self.backend = safely(lambda: tokenizers.Tokenizer.from_file(str(file)))
        except TokenizerError as error:
            raise TokenizerError(f"{file}: cannot be read ({error.__cause__})") from error
        self.backend.no_truncation()
        self.backend.no_padding()
        if getattr(self.backend.model, "dropout", None):
            self.backend.model.dropout = None
        self._ids: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        if not self._ids:
            raise TokenizerError(f"{file}: has no tokens")
        self.vocab_size = max(self._ids.values()) + 1
        added = self.backend.get_added_tokens_decoder()
        self.special_names = tuple(t.content for t in added.values() if t.special and t.content)
        self._config = _optional(self.path / "tokenizer_config.json")
        if vocab_size is None:
            model = _optional(self.path / "config.json")
            vocab_size = model.integer("vocab_size", low=1, high=1 << 31, default=self.vocab_size)
        if self.vocab_size > vocab_size:
            name = max(self._ids, key=lambda token: self._ids[token])
            raise TokenizerError(
                f"{file}: token {name!r} has id {self.vocab_size - 1}, outside the model's "
                f"vocabulary of {vocab_size}"
            )
        self._special = {
            name: self._content(name)
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        bos = self._special["bos_token"]
        if bos is not None:
            self._id_of("bos_token", bos)
        self.stop_ids = self._stop_ids(vocab_size)
        self._template = self._chat_template()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = True, names: bool = True) -> list[int]:
        """Token ids of a text.

        Parameters
        ----------
        special : add what the model expects around a text (e.g. BOS).
        names : a special token's name in the text is that token; False takes it for plain text.

        Raises
        ------
        TokenizerError
            When it is no Unicode text, or the library fails.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is not Unicode: {error}") from error
        self.backend.encode_special_tokens = not names
        try:
            return list(safely(lambda: self.backend.encode(text, add_special_tokens=special)).ids)
        finally:
            self.backend.encode_special_tokens = False

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; special tokens only where `special` is true."""
        return decode(self.backend, self.vocab_size, ids, special)

    def incremental(self) -> IncrementalDecoder:
        """A decoder for one streamed text."""
        return IncrementalDecoder(self.backend, self.vocab_size)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        names: bool = True,
        most_bytes: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template.

        Parameters
        ----------
        messages : each with ``role`` and ``content``, as the template wants them.
        names : names of special tokens in messages and variables are those tokens; False takes them
            for plain text. The template's own always are.
        most_bytes : of the text that the template makes.
        **variables
            Further variables of the template (``tools``, ``date_string``, ...).

        Raises
        ------
        TokenizerError
            No template, the template refuses the messages, or its text is too long.
        """
        hidden = _Hidden(() if names else self.special_names)
        given = hidden.hide({**variables, "messages": list(messages)})
        text = self.render(**{"add_generation_prompt": add_generation_prompt, **given})
        if most_bytes is not None and len(text.encode("utf-8", "surrogatepass")) > most_bytes:
            raise TokenizerError(f"{self.path}: the chat template made over {most_bytes} bytes")
        return [
            token
            for part, plain in hidden.parts(text)
            for token in self.encode(part, special=False, names=not plain)
        ]

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text that `chat` encodes."""
        if self._template is None:
            raise TokenizerError(f"{self.path}: the tokenizer has no chat template")
        special = {name: text for name, text in self._special.items() if text is not None}
        return self._template.render({"messages": list(messages), **special, **variables})

    def _content(self, name: str) -> str | None:
        """Text of a special token of tokenizer_config.json: a string, or an object holding one."""
        value = self._config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise TokenizerError(f"{self._config.where}: {name} is {value!r}, not a token")
        return value

    def _id_of(self, name: str, token: str) -> int:
        if token not in self._ids:
            raise TokenizerError(f"{self._config.where}: {name} {token!r} is not in the vocabulary")
        return self._ids[token]

    def _stop_ids(self, vocab_size: int) -> tuple[int, ...]:
        for file in ("generation_config.json", "config.json"):
            fields = _optional(self.path / file)
            try:
                ids = fields.integers("eos_token_id")
            except ConfigError as error:
                raise TokenizerError(str(error)) from error
            if ids:
                for i in ids:
                    if not 0 <= i < vocab_size:
                        raise TokenizerError(
                            f"{fields.where}: eos_token_id {i} outside the model's vocabulary "
                            f"of {vocab_size}"
                        )
                return tuple(dict.fromkeys(ids))
        eos = self._special["eos_token"]
        return () if eos is None else (self._id_of("eos_token", eos),)

    def _chat_template(self) -> ChatTemplate | None:
        file = self.path / "chat_template.jinja"
        source: Any = None
        if file.is_file():
            try:
                source = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{file}: cannot be read ({error})") from error
        else:
            source = self._config.get("chat_template")
            if isinstance(source, list):  # named templates
                source = next(
                    (
                        t.get("template")
                        for t in source
                        if isinstance(t, dict) and t.get("name") == "default"
                    ),
                    source,
                )
        if source is None:
            return None
        if not isinstance(source, str):
            raise TokenizerError(
                f"{self._config.where}: chat_template is neither a text nor a list that names one "
                "'default'"
            )
        return ChatTemplate(source, str(self.path))


class _Hidden:
    """Names of special tokens in user text, out of sight while a template is rendered."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._names)))
        self._mark = f"\ue000{secrets.token_hex(8)}."  # nobody's text has it

    def hide(self, value: Any) -> Any:
        """The same text or object with a mark for each name."""
        if not self._names:
            return value
        if isinstance(value, str):
            return self._pattern.sub(
                lambda m: f"{self._mark}{self._names.index(m[0])}\ue001", value
            )
        if isinstance(value, Mapping):
            return {self.hide(k): self.hide(v) for k, v in value.items()}
        return [self.hide(v) for v in value] if isinstance(value, (list, tuple)) else value

    def parts(self, text: str) -> list[tuple[str, bool]]:
        """The text in pieces, and whether each is a name that stood in user text."""
        pieces = re.split(rf"{re.escape(self._mark)}(\d+)\ue001", text)
        return [
            (self._names[int(piece)] if at % 2 else piece, bool(at % 2))
            for at, piece in enumerate(pieces)
            if piece
        ]


def _optional(path: Path) -> Fields:
    """Fields of a JSON file that need not exist."""
    if not path.is_file():
        return Fields({}, str(path))
    try:
        return Fields.from_file(path)
    except ConfigError as error:
        raise TokenizerError(str(error)) from error
