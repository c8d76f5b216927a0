"""Reasoning models: separation of the reasoning section from the answer.

A reasoning model generates a section that ends with `END`, and then its answer. If the chat
template of a model ends with `BEGIN`, every output starts within the section and does not contain
`BEGIN`. Otherwise, an output has a reasoning section only if it begins with `BEGIN`, after at most
`MAX_SPACE` white-space characters. At most `MAX_SPACE` white-space characters after `END`, such as
the two line feeds of Qwen3, are not part of the answer.

`ReasoningParser` and the grammar of `answer_grammar` follow the same rules, so the grammar
constrains exactly the text that the parser returns as the answer. There is one exception: if the
answer itself begins with white space, the parser removes it.
"""

from __future__ import annotations

from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.spec import MAX_SPACE, WHITE_SPACE
from graft.tools.serve.tool_formats.source import partial_length

BEGIN = "<think>"
END = "</think>"
#: Reasoning parsers of ``graft serve --reasoning-parser``. With ``deepseek_r1``, every output that
#: can have a reasoning section starts within it. With ``qwen3``, an output has a section only if
#: the prompt opens it with `BEGIN`, or the output begins with `BEGIN`.
REASONING_PARSERS = ("deepseek_r1", "qwen3")


def has_reasoning(prompt: str, continued: str = "") -> bool:
    """Return whether the output that follows a prompt can have a reasoning section.

    `continued` is the message that the output continues, or "". The result is False if this message
    already contains the end of the section. It is also False if the chat template has put an empty
    section at the end of the prompt, as some templates do with ``enable_thinking=False``.
    """
    is_closed = continued.rfind(END) > continued.rfind(BEGIN)
    return not is_closed and not prompt.rstrip().endswith(END)


def starts_in_reasoning(parser: str, prompt: str, continued: str = "") -> bool:
    """Return whether the output starts within the reasoning section, without the tag ``<think>``.

    `parser` is one of `REASONING_PARSERS`. `prompt` and `continued` are as in `has_reasoning`,
    which must have returned True for them.
    """
    return parser == "deepseek_r1" or BEGIN in continued or prompt.rstrip().endswith(BEGIN)


def answer_grammar(
    grammar: GrammarSpec, starts_in_reasoning: bool, *, required: bool
) -> GrammarSpec:
    """Return the grammar of an output whose answer, the text after `END`, matches `grammar`.

    If an answer is not `required`, the output may end in the reasoning section.
    """
    opening = "" if starts_in_reasoning else BEGIN
    return grammar.after(END, required=required, opening=opening, skips_space=True)


class ReasoningParser:
    """Incremental parser that separates generated text into reasoning and answer.

    `starts_in_reasoning` says that the output starts within the reasoning section and does not
    contain `BEGIN` (``<think>``). Otherwise, the output has a reasoning section only if it begins
    with `BEGIN`. If `keep_tags` is true, the reasoning text includes `BEGIN`, `END` and the white
    space after `END`.
    """

    def __init__(self, starts_in_reasoning: bool, keep_tags: bool = False):
        self._in_reasoning = starts_in_reasoning
        self._keep_tags = keep_tags
        self._has_begun = False
        self._has_ended = False
        self._space_left = 0  # number of white-space characters that may still follow `END`
        self._text = ""

    def feed(self, text: str, last: bool) -> tuple[str, str]:
        """Process the next piece of the output; return its reasoning text and its answer text.

        Text that may be a part of `BEGIN` or `END` is held back until more text shows whether it
        is. `last` says whether this is the last piece.
        """
        if self._has_ended:
            return self._split_space(text)
        self._text += text
        if not self._has_begun and not self._read_begin(last):
            return "", ""
        if not self._in_reasoning:
            self._has_ended = True
            return "", self._take(len(self._text))
        end = self._text.find(END)
        if end < 0:
            held = 0 if last else partial_length(self._text, [END])
            return self._take(len(self._text) - held), ""
        reasoning = self._take(end)
        tag = self._take(len(END))
        if self._keep_tags:
            reasoning += tag
        self._has_ended = True
        self._space_left = MAX_SPACE
        space, answer = self._split_space(self._take(len(self._text)))
        return reasoning + space, answer

    def _split_space(self, text: str) -> tuple[str, str]:
        """Split the text after the tag `END` into leading white space and the answer.

        The white space belongs to the reasoning section. It is dropped unless tags are kept.
        """
        answer = text.lstrip(WHITE_SPACE)
        size = min(len(text) - len(answer), self._space_left)
        self._space_left = 0 if size < len(text) else self._space_left - size
        return text[:size] if self._keep_tags else "", text[size:]

    def _read_begin(self, last: bool) -> bool:
        """Find `BEGIN` at the beginning of the output, and remove it unless tags are kept.

        Return False if more text is needed to know whether the output begins with `BEGIN`.
        """
        begun = self._text.lstrip(WHITE_SPACE)
        if len(self._text) - len(begun) > MAX_SPACE:
            begun = self._text
        elif not last and BEGIN.startswith(begun):
            return False
        self._has_begun = True
        if begun.startswith(BEGIN):
            self._in_reasoning = True
            if not self._keep_tags:
                self._text = begun.removeprefix(BEGIN)
        return True

    def _take(self, length: int) -> str:
        """Remove and return the first characters of the text that has not been processed."""
        taken = self._text[:length]
        self._text = self._text[length:]
        return taken
