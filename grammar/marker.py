"""Free text until a marker, then the grammar: for models that reason before they answer.

Before the marker nothing is constrained. The grammar begins with the token after the one that
completes the marker; a token that would carry the marker's end *and* more text is illegal, so that
no byte of the answer escapes the grammar. The marker is a token id, or text that may be spread over
tokens, in accepted tokens and in drafts alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import GrammarError
from .vocabulary import Vocabulary

__all__ = ["Marker"]


@dataclass(frozen=True)
class Marker:
    """Where free text ends.

    Attributes
    ----------
    text
        The marker as text, or empty. Where an added token of the tokenizer has this very text, its
        id is the marker too.
    token
        The marker as a token id, or None.
    required
        ``False``: a stop id in the free text ends the output, without the grammar ever having
        begun. ``True``: stop ids are illegal until the marker has come.
    """

    text: str = ""
    token: int | None = None
    required: bool = False

    def ids(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        """Tokens that are the marker by themselves.

        Raises
        ------
        GrammarError
            If the id is out of range or a stop id.
        """
        ids = [] if self.token is None else [self.token]
        if self.text in vocabulary.names:
            ids.append(vocabulary.names[self.text])
        for token in ids:
            if not 0 <= token < vocabulary.size:
                raise GrammarError(f"marker: token {token} is outside [0, {vocabulary.size})")
            if token in vocabulary.stop_ids:
                raise GrammarError(f"marker: token {token} is a stop id")
        return tuple(dict.fromkeys(ids))

