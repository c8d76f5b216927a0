"""A language model that writes given texts: a one-layer Llama with hand-made weights.

`write_scripted_model` writes a checkpoint folder that engines and servers load like any other. The
model knows several scripts. The prompt contains the name of a script as a token, for example
``<script:hello>`` in the content of a user message, and the model then writes the text of this
script, token by token, and its stop token.

The next token is a function of the last token and of the script, so a token must not occur twice in
a script. Texts are therefore cut into pieces that occur only once, the shortest ones first ("a",
"b", "ab", "aba", ...), and each piece is a token. Added tokens such as ``<think>`` are single
tokens. If an added token occurs a second time in a script, it is spelled with other tokens.

A mask may forbid the next token of the script. The model then prefers the tokens in `CLOSING`,
which soon end any JSON text. After the end of the script's text, it first prefers the tokens in
`Script.closing`, in this order. The script continues as soon as one of its tokens is chosen.

How it works: the attention of every position selects the script's name in the prompt, and adds the
one-hot vector of the script to the one-hot vector of the last token. The MLP has one unit per pair
of a token and a script, which adds the one-hot vector of the next token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tiny_models import llama_config, write_json
from tokenizers import AddedToken, decoders, models, pre_tokenizers

#: Tokens that the model prefers if the script's token is illegal or if there is none, best first.
#: The model prefers stop tokens to all of them. After ``</think>``, it prefers a quotation mark.
CLOSING = ("</think>", '"', "}", "]", "0", "{", "[", ":", ",", " ", "a")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if open_reasoning %}<think>{% endif %}"
)
_MAX_SCRIPTS = 64  # one per dimension of the attention head
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


@dataclass(frozen=True)
class Script:
    """A text that the model writes.

    Attributes
    ----------
    text
        The text. Names of added tokens are single tokens.
    stop
        Name of the stop token after the text; empty to repeat the text endlessly.
    closing
        Names of added tokens that follow the text if `stop` is illegal, best first.
    spelled
        Whether added tokens are spelled with ordinary tokens.
    """

    text: str
    stop: str = "<eos>"
    closing: tuple[str, ...] = ("</think>", "</tool_call>")
    spelled: bool = False


def write_scripted_model(
    folder: Path,
    scripts: dict[str, Script],
    *,
    added: dict[str, bool] | None = None,
    stops: tuple[str, ...] = ("<eos>",),
    chat_template: str = CHAT_TEMPLATE,
    max_length: int = 1024,
) -> Path:
    """Write a checkpoint folder and return it.

    Parameters
    ----------
    scripts
        The scripts by name, at most 64. The prompt token of a script is ``<script:NAME>``.
    added
        Added tokens by name, and whether the tokenizer marks them as special.
    stops
        Names of the stop tokens, which are special. As in many checkpoints, they are in several
        files: the first one is the tokenizer's EOS token, the second one is in
        generation_config.json, and the others are in config.json.
    chat_template
        The chat template. Its last token should be ``<|assistant|>`` or ``<think>``.
    """
    assert len(scripts) <= _MAX_SCRIPTS
    special = {name: True for name in (*stops, *_ROLES)}
    names = {f"<script:{name}>": False for name in scripts}
    all_added = special | (added or {}) | names
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encode = byte_alphabet()
    pieces: dict[bytes, int] = {bytes([byte]): alphabet.index(encode[byte]) for byte in range(256)}
    used: set[bytes] = set()
    paths = {}
    for name, script in scripts.items():
        single = () if script.spelled else tuple(added or ())
        paths[name] = _cut(script.text, single, used)
    for piece in sorted(used - pieces.keys()):
        pieces[piece] = len(pieces)
    vocab = {"".join(encode[byte] for byte in piece): token for piece, token in pieces.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, is_special in all_added.items():
        token = AddedToken(name, special=is_special, normalized=False)
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([token])

    def token_id(part: str | bytes) -> int:
        found = pieces[part] if isinstance(part, bytes) else tokenizer.token_to_id(part)
        assert found is not None, part
        return found

    transitions: list[tuple[int, int, dict[int, float]]] = []
    for index, (name, script) in enumerate(scripts.items()):
        ids = [token_id(part) for part in paths[name]]
        next_ids: dict[int, dict[int, float]] = {}
        for last, following in itertools.pairwise(ids):
            next_ids[last] = {following: 80.0}
        closers = [closer for closer in script.closing if closer in all_added]
        next_ids[ids[-1]] = {
            **{token_id(closer): 40.0 - i for i, closer in enumerate(closers)},
            token_id(script.stop or paths[name][0]): 80.0,
        }
        for start in ("<|assistant|>", "<think>"):
            if tokenizer.token_to_id(start) is not None:
                next_ids.setdefault(token_id(start), {ids[0]: 80.0})
        if "</think>" in all_added:
            next_ids.setdefault(token_id("</think>"), {token_id(b'"'): 40.0})
        transitions += [(last, index, found) for last, found in next_ids.items()]
    closers = [part for part in CLOSING if len(part) == 1 or part in all_added]
    preferred = [*stops, *(part.encode() if len(part) == 1 else part for part in closers)]
    ranks = {token_id(part): 20.0 - i for i, part in enumerate(preferred)}
    selectors = [token_id(f"<script:{name}>") for name in scripts]
    vocab_size = -(-tokenizer.get_vocab_size() // 8) * 8

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json", {"eos_token": stops[0], "chat_template": chat_template}
    )
    _, *other_stops = map(token_id, stops)
    if other_stops:
        write_json(folder / "generation_config.json", {"eos_token_id": other_stops[0]})
    config, tensors = _weights(vocab_size, selectors, transitions, ranks)
    config |= {"eos_token_id": other_stops[1:], "max_position_embeddings": max_length}
    write_json(folder / "config.json", config)
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def _cut(
    text: str, single: tuple[str, ...], used: set[bytes], bounded: bool = True
) -> list[str | bytes]:
    """Cut a text into names of added tokens and pieces that are not in `used`; add the pieces.

    If `bounded`, each piece ends before the next added token, so that the token is not spelled. If
    no such cut exists, the text is cut without this rule.
    """
    parts: list[str | bytes] = []
    data = text.encode()
    seen: set[str] = set()
    known = set(used)
    at = 0
    while at < len(data):
        name = next((n for n in single if data.startswith(n.encode(), at) and n not in seen), None)
        if name is not None:
            seen.add(name)
            parts.append(name)
            at += len(name.encode())
            continue
        names = (data.find(n.encode(), at) for n in single if bounded and n not in seen)
        limit = min((found for found in names if found >= 0), default=len(data))
        end = at + 1
        while data[at:end] in known and end < limit:
            end += 1
        piece = data[at:end]
        while piece in known:  # join it with the piece before it
            before = parts.pop() if parts else ""
            if isinstance(before, str):
                assert bounded, f"{text!r} occurs in another script"
                return _cut(text, single, used, bounded=False)
            piece = before + piece
        known.add(piece)
        parts.append(piece)
        at = end
    used |= known
    return parts


def byte_alphabet() -> dict[int, str]:
    """Return the character with which byte-level tokenizers (GPT-2) write each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + i) for i, byte in enumerate(others)
    }


def _weights(
    vocab_size: int,
    selectors: list[int],
    transitions: list[tuple[int, int, dict[int, float]]],
    ranks: dict[int, float],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the config and the weights of the model.

    The first dimensions of the hidden state represent the tokens, the following ones the scripts,
    whose name tokens are `selectors`. Each of the `transitions` is (last token, script, weight of
    each next token), and `ranks` has the weights of the tokens that follow any token.
    """
    dim = _MAX_SCRIPTS
    hidden = -(-(vocab_size + len(selectors)) // 16) * 16
    inner = -(-(len(transitions) + 1) // 16) * 16
    # After the first norm, the nonzero element of a one-hot vector has this value.
    one = np.float32(np.sqrt(hidden))
    # After the second norm, each of the two nonzero elements has this value.
    two = np.float32(np.sqrt(hidden / 2))
    query, key, value = (np.zeros((dim, hidden), np.float32) for _ in range(3))
    # RoPE hardly rotates the last pair, so the score does not depend on the distance.
    query[dim // 2 - 1, :vocab_size] = 24 / one
    key[dim // 2 - 1, selectors] = 24 / one
    output = np.zeros((hidden, dim), np.float32)
    for index, selector in enumerate(selectors):
        value[index, selector] = 1 / one
        output[vocab_size + index, index] = 1
    gate, up = (np.zeros((inner, hidden), np.float32) for _ in range(2))
    down = np.zeros((hidden, inner), np.float32)
    up[:, :vocab_size] = 1 / two
    for unit, (last, script, following) in enumerate(transitions):
        gate[unit, :vocab_size] = -60 / two
        gate[unit, last] += 40 / two
        gate[unit, vocab_size + script] = 40 / two
        for token, weight in following.items():
            down[token, unit] = weight / 20
    gate[-1, :vocab_size] = 20 / two
    for token, weight in ranks.items():
        down[token, -1] = weight / 20
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": np.eye(vocab_size, hidden, dtype=np.float32),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": 4 * np.eye(vocab_size, hidden, dtype=np.float32),
        f"{layer}input_layernorm.weight": np.ones(hidden, np.float32),
        f"{layer}post_attention_layernorm.weight": np.ones(hidden, np.float32),
        f"{layer}self_attn.q_proj.weight": query,
        f"{layer}self_attn.k_proj.weight": key,
        f"{layer}self_attn.v_proj.weight": value,
        f"{layer}self_attn.o_proj.weight": output,
        f"{layer}mlp.gate_proj.weight": gate,
        f"{layer}mlp.up_proj.weight": up,
        f"{layer}mlp.down_proj.weight": down,
    }
    config = llama_config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=dim,
        rope_theta=1e7,
        tie_word_embeddings=False,
    )
    return config, tensors
