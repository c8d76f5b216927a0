"""A bigram model that writes a given text, and an EAGLE-3 head for it.

The decoder layers of the model add nothing to the embeddings, and the row of the LM head for each
id is the embedding of the id before it in the script. Greedy decoding therefore continues the
script after any of its tokens, whatever precedes this token. `Script.output` is the oracle of the
text, which contains tokens that end inside a character.
"""

import codecs
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from scripted_model import byte_alphabet
from tiny_models import edit_tensors, llama_config, make_tiny_eagle3, make_tiny_llama, write_json
from tokenizers import decoders, models, pre_tokenizers

EOS = 0
BOS = 1


@dataclass(frozen=True)
class Script:
    """Text of a bigram model and the tokens in which the model writes it.

    Attributes
    ----------
    pieces
        Bytes of the tokens in order; all are different, and many end inside a character.
    ids
        Ids of the tokens. The id after the last one is `EOS`.
    """

    pieces: list[bytes]
    ids: list[int]

    @classmethod
    def cut(cls, text: str, seed: int) -> "Script":
        """Cut a text at random into pieces of 2 to 6 bytes that are all different."""
        rng = random.Random(seed)
        data = text.encode()
        for _ in range(10_000):
            pieces = []
            begin = 0
            while begin < len(data):
                end = begin + rng.randint(2, 6)
                if len(data) - end < 2:
                    end = len(data)
                pieces.append(data[begin:end])
                begin = end
            if len(set(pieces)) == len(pieces):
                return cls(pieces, [258 + i for i in range(len(pieces))])
        raise ValueError(f"{text!r} has no cut into different pieces")

    def prompt(self, start: int) -> list[int]:
        """Return a prompt after which the model writes the tokens from `start` on.

        The prompt contains the whole script, so that prompt lookup finds the continuation.
        """
        return [BOS, *self.ids, self.ids[start - 1]]

    def starts_character(self, index: int) -> bool:
        """Return whether a character begins at the beginning of a piece."""
        return self.pieces[index][0] & 0xC0 != 0x80

    def output(
        self, start: int, max_tokens: int | None = None, stop: tuple[str, ...] = ()
    ) -> tuple[str, list[int], str]:
        """Return the finish reason, tokens and text of the output that begins at `start`."""
        text = ""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for count, piece in enumerate(self.pieces[start:], 1):
            text += decoder.decode(piece)
            begins = [text.find(string) for string in stop if string in text]
            tokens = self.ids[start : start + count]
            if begins:
                return "stop_string", tokens, text[: min(begins)]
            if count == max_tokens:
                return "length", tokens, text
        return "stop", [*self.ids[start:], EOS], text


def make_bigram_model(folder: Path, script: Script) -> dict:
    """Write a target to ``folder/target`` and an EAGLE-3 head to ``folder/eagle3``."""
    alphabet = byte_alphabet()
    pieces = ["<eos>", "<bos>", *(alphabet[byte] for byte in range(256))]
    pieces += ["".join(alphabet[byte] for byte in piece) for piece in script.pieces]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: token for token, piece in enumerate(pieces)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<bos>"])
    config = llama_config(tie_word_embeddings=False)
    vocab = config["vocab_size"]
    hidden = config["hidden_size"]
    if len(pieces) > vocab:
        raise ValueError(f"the script has {len(script.ids)} tokens, at most {vocab - 258} fit")
    target = folder / "target"
    make_tiny_llama(target, tie_word_embeddings=False)
    backend.save(str(target / "tokenizer.json"))
    write_json(target / "tokenizer_config.json", {"bos_token": "<bos>", "eos_token": "<eos>"})
    embedding = np.random.default_rng(0).standard_normal((vocab, hidden)).astype(np.float32)
    embedding *= np.sqrt(hidden) / np.linalg.norm(embedding, axis=1, keepdims=True)
    chain = [*script.ids, EOS]

    def write_head(tensors: dict[str, np.ndarray], distance: int) -> None:
        """Make the head map each token of the script to the token `distance` places after it."""
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor[:] = 0
            if "norm" in name:
                tensor[:] = 1
        head = np.zeros_like(embedding)
        head[chain[distance:]] = embedding[chain[:-distance]] / 8
        tensors["lm_head.weight"] = head

    def write_target(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.embed_tokens.weight"] = embedding
        write_head(tensors, 1)

    def write_eagle3(tensors: dict[str, np.ndarray]) -> None:
        write_head(tensors, 2)
        tensors["fc.weight"][:] = np.eye(hidden, 3 * hidden)

    edit_tensors(target, write_target)
    eagle3 = folder / "eagle3"
    make_tiny_eagle3(eagle3, config)
    edit_tensors(eagle3, write_eagle3)
    return {"target": target, "eagle3": eagle3}
