"""Tokenizer and chat template of a checkpoint. Loading checks that they match the model."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from graft.models.errors import ConfigError, TokenizerError
from graft.models.json_fields import Fields
from graft.models.text.chat import ChatTemplate
from graft.models.text.stream import Detokenizer, IncrementalDecoder, call_tokenizer
from graft.native.errors import short_repr

__all__ = ["RESERVED_VARIABLES", "Tokenizer"]

#: Names that a chat-template variable cannot have: they are parameters of `Tokenizer.chat`.
RESERVED_VARIABLES = frozenset(
    {"self", "messages", "continue_final_message", "parse_special", "max_bytes"}
)


class Tokenizer:
    """The tokenizer of a checkpoint: ``tokenizer.json``, stop ids and chat template.

    Truncation, padding and BPE dropout, which checkpoints may configure for training, are disabled.

    Parameters
    ----------
    path
        Checkpoint folder.
    vocab_size
        Number of rows of the model's embedding. By default, it is read from ``config.json`` if the
        file exists.
    chat_template
        Jinja template that replaces the chat templates of the checkpoint; None to use those of the
        checkpoint. A conversation with tools is rendered with the template named ``tool_use`` if
        the checkpoint has one, and with its default template otherwise.

    Attributes
    ----------
    path
        Checkpoint folder.
    backend
        Tokenizer object of the tokenizers library.
    vocab_size
        Largest token id plus one.
    special_names
        Names of the special tokens, such as ``<s>``. `decode` omits these tokens by default.
    stop_ids
        Ids that end the output: those in ``generation_config.json`` and ``config.json``, and the
        tokenizer's end-of-sequence token.

    Raises
    ------
    TokenizerError
        If a file is damaged, an id is outside the model's vocabulary, or a special token is not in
        the tokenizer's vocabulary.
    """

    def __init__(
        self, path: str | Path, *, vocab_size: int | None = None, chat_template: str | None = None
    ) -> None:
        self.path = Path(path)
        file = self.path / "tokenizer.json"
        self.backend = _load_backend(file)
        self._ids: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        if not self._ids:
            raise TokenizerError(f"{file}: the vocabulary is empty")
        self.vocab_size = max(self._ids.values()) + 1
        self._check_unique_ids(file)
        self._detokenizer = Detokenizer(self.backend, self.vocab_size, str(file))
        special_names = []
        for token in self.backend.get_added_tokens_decoder().values():
            if token.special and token.content:
                special_names.append(token.content)
        self.special_names = tuple(special_names)
        self._config = _read_optional(self.path / "tokenizer_config.json")
        if vocab_size is None:
            vocab_size = self._model_vocab_size()
        if self.vocab_size > vocab_size:
            name = max(self._ids, key=lambda token: self._ids[token])
            raise TokenizerError(
                f"{file}: token {name!r} has id {self.vocab_size - 1}, outside the model's "
                f"vocabulary of {vocab_size}"
            )
        self._special = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            self._special[name] = self._content(name)
        bos = self._special["bos_token"]
        if bos is not None:
            self._id_of("bos_token", bos)
        self.stop_ids = self._stop_ids(vocab_size)
        sources = self._chat_templates() if chat_template is None else {"default": chat_template}
        #: Source of the chat template for conversations with tools; None if there is no template.
        self.tool_template = sources.get("tool_use", sources.get("default"))
        self._templates: dict[str, ChatTemplate] = {}
        for name in sources.keys() & {"default", "tool_use"}:
            self._templates[name] = ChatTemplate(sources[name], str(self.path))

    def _check_unique_ids(self, file: Path) -> None:
        """Raise `TokenizerError` if two tokens have the same id: the id would have two texts."""
        names: dict[int, str] = {}
        for name, token in self._ids.items():
            other = names.setdefault(token, name)
            if other != name:
                raise TokenizerError(
                    f"{file}: the tokens {short_repr(other)} and {short_repr(name)} have the same "
                    f"id {token}"
                )

    def _model_vocab_size(self) -> int:
        """Return `vocab_size` of config.json; if it is absent, the tokenizer's vocabulary size."""
        config = _read_optional(self.path / "config.json")
        return config.integer("vocab_size", low=1, high=1 << 31, default=self.vocab_size)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._templates)

    def encode(self, text: str, *, special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Parameters
        ----------
        text
            Text to encode.
        special
            Whether to add the special tokens that the model expects around a text, such as BOS.
        parse_special
            Whether the name of a special token in the text is encoded as its id. If not, the name
            is plain text.

        Raises
        ------
        TokenizerError
            If the text is not valid Unicode, or the library fails.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is not valid Unicode: {error}") from error
        self.backend.encode_special_tokens = not parse_special
        try:
            encoding = call_tokenizer(lambda: self.backend.encode(text, add_special_tokens=special))
            return list(encoding.ids)
        finally:
            self.backend.encode_special_tokens = False

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids, including special tokens only if `special` is true.

        The text is that of the tokenizers library, with one exception: if a sequence of byte tokens
        such as ``<0xE3>`` is not valid UTF-8 as a whole, the library replaces all its bytes with
        U+FFFD. This method keeps the valid characters and replaces the other bytes only.
        """
        decoder = self.incremental(special=special)
        return decoder.push(ids) + decoder.finish()

    def incremental(
        self, *, special: bool = False, shown: Iterable[str] = ()
    ) -> IncrementalDecoder:
        """Return an incremental decoder for one output.

        Parameters
        ----------
        special
            As in `decode`.
        shown
            Names of special tokens that the text includes even if `special` is false. Unknown names
            have no effect.
        """
        ids = [self._ids[name] for name in shown if name in self._ids]
        return IncrementalDecoder(self._detokenizer, special=special, shown=ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        parse_special: bool = True,
        max_bytes: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation, rendered with the chat template.

        Parameters
        ----------
        messages
            Messages as the template expects them, usually with ``role`` and ``content``.
        add_generation_prompt
            Whether the template appends the header of the assistant's message.
        continue_final_message
            Whether the prompt ends with the content of the last message, so that the model
            continues this message. `add_generation_prompt` must then be False.
        parse_special
            Whether names of special tokens in messages and variables are encoded as their ids. If
            not, they are plain text. Names that the template itself contains are always encoded as
            ids.
        max_bytes
            Maximum size of the rendered text in UTF-8 bytes; None for no limit.
        **variables
            Further variables of the template (``tools``, ``date_string``, ...).

        Raises
        ------
        TokenizerError
            If there is no template, the template rejects the messages, or the text is too long.
        """
        messages = list(messages)
        end_marker = f"\ue000{secrets.token_hex(8)}"  # random: user text cannot contain it
        if continue_final_message:
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{end_marker}"}
        names = () if parse_special else self.special_names
        escaper = _SpecialNameEscaper(names)
        try:
            escaped = escaper.escape({**variables, "messages": messages})
        except RecursionError:
            raise TokenizerError(
                f"{self.path}: invalid chat messages: they are nested too deeply"
            ) from None
        text = self.render(**{"add_generation_prompt": add_generation_prompt, **escaped})
        if continue_final_message:
            text, found, _ = text.rpartition(end_marker)
            if not found:
                raise TokenizerError(
                    f"{self.path}: the chat template does not render the last message, so that "
                    "it cannot be continued"
                )
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        if max_bytes is not None and num_bytes > max_bytes:
            raise TokenizerError(
                f"{self.path}: the chat template rendered more than {max_bytes} bytes"
            )
        ids: list[int] = []
        for part, is_plain in escaper.split(text):
            ids += self.encode(part, special=False, parse_special=not is_plain)
        return ids

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the text of a conversation, rendered with the chat template."""
        if not self._templates:
            raise TokenizerError(f"{self.path}: the tokenizer has no chat template")
        special = {name: text for name, text in self._special.items() if text is not None}
        # Templates test whether tools and documents are None. An undefined variable is not None.
        absent = {"tools": None, "documents": None}
        all_variables = {"messages": list(messages), **absent, **special, **variables}
        template = self._templates["default"]
        if all_variables["tools"] is not None:
            template = self._templates.get("tool_use", template)
        return template.render(all_variables)

    def _content(self, name: str) -> str | None:
        """Return the text of the special token `name` of tokenizer_config.json; None if absent.

        The file contains the token as a string, or as an object with a string in the field
        "content".
        """
        value = self._config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise TokenizerError(
                f"{self._config.where}: {name} is {short_repr(value)}, must be a token"
            )
        return value

    def _id_of(self, name: str, token: str) -> int:
        if token not in self._ids:
            raise TokenizerError(f"{self._config.where}: {name} {token!r} is not in the vocabulary")
        return self._ids[token]

    def _stop_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Return the stop ids that the files of the checkpoint list.

        In many checkpoints, the files list different ids. For example, ``config.json`` has the id
        that ends a text, and ``generation_config.json`` the id that ends a message.
        """
        ids: list[int] = []
        for file in ("generation_config.json", "config.json"):
            fields = _read_optional(self.path / file)
            try:
                found = fields.integers("eos_token_id") or ()
            except ConfigError as error:
                raise TokenizerError(str(error)) from error
            for token in found:
                if not 0 <= token < vocab_size:
                    raise TokenizerError(
                        f"{fields.where}: eos_token_id {token} is outside the model's vocabulary "
                        f"of {vocab_size}"
                    )
            ids += found
        eos = self._special["eos_token"]
        if eos is not None:
            ids.append(self._id_of("eos_token", eos))
        return tuple(dict.fromkeys(ids))

    def _chat_templates(self) -> dict[str, str]:
        """Return the sources of the checkpoint's chat templates by name.

        The template in chat_template.jinja, which is named "default", replaces those in
        tokenizer_config.json. Each file in additional_chat_templates is a template with the name of
        the file.
        """
        sources = {}
        file = self.path / "chat_template.jinja"
        if file.is_file():
            sources["default"] = _read_template(file)
        else:
            sources = self._configured_templates()
        for file in sorted(self.path.glob("additional_chat_templates/*.jinja")):
            sources[file.stem] = _read_template(file)
        if sources and "default" not in sources:
            raise TokenizerError(
                f"{self.path}: there are the chat templates {', '.join(sorted(sources))}, but none "
                "is named 'default'"
            )
        return sources

    def _configured_templates(self) -> dict[str, str]:
        """Return the chat templates of tokenizer_config.json: one, or several with names."""
        value = self._config.get("chat_template")
        if value is None:
            return {}
        if isinstance(value, str):
            return {"default": value}
        sources = {}
        for entry in value if isinstance(value, list) else [value]:
            name, source = None, None
            if isinstance(entry, dict):
                name, source = entry.get("name"), entry.get("template")
            if not isinstance(name, str) or not isinstance(source, str):
                raise TokenizerError(
                    f"{self._config.where}: chat_template must be a string or a list of objects "
                    f"with a name and a template, got {value!r:.80}"
                )
            sources[name] = source
        return sources


class _SpecialNameEscaper:
    """Replaces names of special tokens in user text with markers while a template is rendered.

    A user could otherwise write the name of a special token, such as the end of a message, to forge
    the structure of a conversation. After rendering, a marker tells that the name came from user
    text and not from the template.

    Parameters
    ----------
    names
        Names of special tokens.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._names)))
        self._marker = f"\ue000{secrets.token_hex(8)}."  # random: user text cannot contain it

    def escape(self, value: Any) -> Any:
        """Return a copy of a text or nested object; markers replace the names of special tokens."""
        if not self._names:
            return value
        if isinstance(value, str):
            return self._pattern.sub(self._mark, value)
        if isinstance(value, Mapping):
            escaped = {}
            for key, item in value.items():
                escaped[self.escape(key) if isinstance(key, str) else key] = self.escape(item)
            return escaped
        if isinstance(value, (list, tuple)):
            return [self.escape(item) for item in value]
        return value

    def _mark(self, match: re.Match[str]) -> str:
        return f"{self._marker}{self._names.index(match[0])}\ue001"

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Split rendered text at the markers, and replace each marker with the name it encodes.

        Returns
        -------
        list of tuple
            Parts of the text in order, as pairs (text, is_name). `is_name` is True if the text is
            the name of a special token that occurred in user text.
        """
        # The pattern captures an index into `_names`. re.split puts captured texts at odd indices.
        parts = re.split(rf"{re.escape(self._marker)}(\d+)\ue001", text)
        result = []
        for index, part in enumerate(parts):
            is_name = index % 2 == 1
            if not part:
                continue
            if is_name:
                part = self._names[int(part)]
            result.append((part, is_name))
        return result


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file}: cannot be read ({error})") from error


def _load_backend(file: Path) -> tokenizers.Tokenizer:
    """Load tokenizer.json without truncation, padding and BPE dropout."""
    if not file.is_file():
        raise TokenizerError(f"{file}: the file is missing")
    try:
        backend = call_tokenizer(lambda: tokenizers.Tokenizer.from_file(str(file)))
    except TokenizerError as error:
        raise TokenizerError(f"{file}: cannot be read ({error.__cause__})") from error
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None
    return backend


def _read_optional(path: Path) -> Fields:
    """Return the fields of a JSON file; an empty object if the file does not exist."""
    if not path.is_file():
        return Fields({}, str(path))
    try:
        return Fields.from_file(path)
    except ConfigError as error:
        raise TokenizerError(str(error)) from error
