"""Requests and engine options of the tests that compare engines."""

import functools
import json
import random
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from engine_util import DEMO, DRAFTER, TARGET, demo_engine, mixed_requests
from tiny_models import make_tiny_dflash, make_tiny_mtp, matrix, write_json, write_safetensors

from graft.cudagraph.driver.dtypes import to_float32
from graft.grammar.automaton.device import DeviceAutomata
from graft.models.drafters import CascadeDrafter, NGram, Suffix, UserDrafter
from graft.models.drafters.load import make_drafter
from graft.models.llm.checkpoint import Checkpoint
from graft.models.request import Request

MODES = {"greedy": {}, "coupled": {"temperature": 0.9, "top_p": 0.95, "verify": "coupled"}}


def workload(**options):
    """Return requests with and without grammars, with various finish reasons and penalties.

    Parameters
    ----------
    **options
        Fields to set in all requests.
    """
    requests = mixed_requests(8, seed=17)
    for index, max_tokens in ((0, 1), (2, 3), (4, 7), (6, 12)):
        requests[index] = replace(requests[index], max_tokens=max_tokens, closing="off")
    free = Request(tokens=[300, 301, 302], max_tokens=40)
    requests += [replace(free, stop=["e", "a"]), replace(free, tokens=[41]), free]
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    requests += [
        replace(requests[1], repetition_penalty=1.4, min_tokens=9, logprobs=2),
        replace(requests[3], **penalties, logit_bias={t: 2.0 for t in range(40, 90)}),
        replace(free, **penalties, banned_ids=range(100, 200, 3), logprobs=0, stop=["e", "a"]),
        replace(free, allowed_ids=range(4, 400), min_tokens=20, logprobs=20, presence_penalty=-1.5),
    ]
    numbered = []
    for i, request in enumerate(requests):
        numbered.append(replace(request, id=str(i), seed=500 + i, **options))
    return numbered


def workload_in_turn(modes, first=0):
    """Return the requests of `workload`, the first one with mode `first`, the next with the next.

    `modes` is a sequence of request options.
    """
    workloads = [workload(**mode) for mode in modes]
    return [workloads[(first + i) % len(modes)][i] for i in range(len(workloads[0]))]


def answer(output):
    """Return the fields of an output that must not depend on drafts, batching or overlap."""
    assert output.logprobs is None or len(output.logprobs) == len(output.tokens)
    return output.reason, output.tokens, output.text, output.logprobs


def answers(outputs):
    return [answer(output) for output in outputs]


def answers_and_drafts(outputs):
    """Return the `answer` of each output, and its numbers of rounds, drafts and accepted drafts."""
    results = []
    for output in outputs:
        results.append((answer(output), output.rounds, output.drafted, output.accepted))
    return results


def keep_some_on_host(monkeypatch):
    """Keep the requests of every third slot on the host, although their grammars have automata."""
    join = DeviceAutomata.join

    def join_some(self, lane, slot, *arguments, **options):
        return slot % 3 != 2 and join(self, lane, slot, *arguments, **options)

    monkeypatch.setattr(DeviceAutomata, "join", join_some)


@contextmanager
def settled(engine):
    """Context manager that closes an engine at the end of the block.

    Before that, it checks that no slot, page or replay is in use, and that the grammar decoder
    counted no errors.
    """
    with engine:
        yield engine
        engine.synchronize()
        counters = engine.counters()
        assert not any(counters["held"].values()), counters["held"]
        grammar = counters["grammar"]
        for name in ("desyncs", "errors", "missing_snapshots"):
            assert not grammar[name], grammar


#: Every second request of `workload`, for short runs. No grammar of them is cut off.
SHORT = slice(1, None, 2)
WHOLE = slice(None)


@functools.cache
def expected_answers(mode, has_grammars=True):
    """Return a function of a slice of `workload` that returns the answers to its requests.

    The requests are generated one by one without drafter and overlap, each when it is needed.

    Parameters
    ----------
    mode
        Name of an entry of `MODES`.
    has_grammars
        If false, the requests have no grammars.
    """
    requests = workload(**MODES[mode])
    if not has_grammars:
        requests = without_grammars(requests)
    known = {}

    def answers_to(part):
        missing = [request for request in requests[part] if request.id not in known]
        if missing:
            with settled(demo_engine(speculation=False, max_batch_size=1, overlap=False)) as engine:
                known.update((output.id, answer(output)) for output in engine.generate(missing))
        return [known[request.id] for request in requests[part]]

    return answers_to


def without_grammars(requests):
    return [replace(request, grammar=None) for request in requests]


def check_disturbed(engine, requests, expected, seed):
    """Submit, preempt and cancel requests at random times, and check the answers.

    Return the number of preemptions.
    """
    rng = random.Random(seed)
    pending = list(requests)
    found = {}
    preemptions = 0
    rng.shuffle(pending)
    while pending or engine.busy:
        num_submitted = min(rng.choice((0, 1, 1, 3)), len(pending))
        for _ in range(num_submitted):
            engine.submit(pending.pop())
        for event in engine.step():
            if event.output is not None:
                found[event.id] = event.output
        ids = [str(r.id) for r in rng.sample(requests, len(requests))]
        if rng.random() < 0.3 or not preemptions:
            preemptions += any(engine.preempt(request_id) for request_id in ids)
        if rng.random() < 0.03:
            engine.cancel(ids[-1])
    for request, wanted in zip(requests, expected, strict=True):
        output = found[request.id]
        where = (engine.options.max_batch_size, seed, request.id)
        if output.reason == "cancelled":
            assert output.tokens == wanted[1][: len(output.tokens)], where
        else:
            assert answer(output) == wanted, where
    return preemptions


@dataclass(frozen=True)
class RandomDrafter:
    """Factory of drafters with random weights for the demo target.

    If `modules` is positive, the drafter has this number of multi-token prediction modules.
    Otherwise it is a block drafter: DFlash if `rank` is 0, else DSpark with a Markov head of this
    rank.
    """

    modules: int = 0
    rank: int = 0

    @property
    def feeds_blocks(self) -> bool:
        return not self.modules

    def __call__(self, context):
        config = json.loads((TARGET / "config.json").read_text())
        with tempfile.TemporaryDirectory() as folder:
            if self.modules:
                make_tiny_mtp(Path(folder), config, modules=self.modules)
            else:
                make_tiny_dflash(Path(folder), config, layers=(0, 2), block=5, rank=self.rank)
            return make_drafter(folder, context)


@dataclass(frozen=True)
class RandomDFlash2:
    """Factory of DFlash2 drafters with the weights of the demo's block drafter.

    The convolutions are identities. The selector has random weights and chooses among `top_k` ids.
    The attention windows are as long as requests.
    """

    top_k: int = 16

    feeds_blocks = True

    def __call__(self, context):
        checkpoint = Checkpoint(DFLASH)
        rng = np.random.default_rng(2)
        tensors = {name: to_float32(*checkpoint.get(name)) for name in checkpoint.names}
        hidden = context.target.config.hidden_size
        vocab = context.target.config.vocab_size
        base = np.zeros((2, 2, hidden), "f4")
        base[:, 0] = 1.0
        projection = np.zeros((hidden // 4, hidden), "f4")
        for layer in range(3):
            for part in ("attention", "mlp"):
                name = f"layers.{layer}.{part}_conv"
                tensors[f"{name}.base_kernel"] = base
                tensors[f"{name}.kernel_projection.weight"] = projection
        selector = "candidate_selector"
        tensors[f"{selector}.hidden_projection.weight"] = matrix(rng, 8, hidden)
        tensors[f"{selector}.predecessor_codebook"] = matrix(rng, vocab, 8)
        tensors[f"{selector}.successor_codebook"] = matrix(rng, vocab, 8)
        config = json.loads((DFLASH / "config.json").read_text())
        config |= {
            "architectures": ["DFlash2DraftModel"],
            "is_causal": False,
            "use_sliding_window": True,
            "sliding_window": context.max_length,
            "layer_types": ["sliding_attention"] * 3,
        }
        config["dflash_config"] |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": self.top_k,
        }
        with tempfile.TemporaryDirectory() as folder:
            write_safetensors(Path(folder) / "model.safetensors", tensors, "float32")
            write_json(Path(folder) / "config.json", config)
            return make_drafter(folder, context)


def propose_repeat(tokens):
    return tokens[-9:-6]


def propose_tree(tokens):
    """Propose a tree of drafts: two children of the last token, and a child of the first draft."""
    ids = tokens[-4:-1]
    return ids, [0, 0, 1][: len(ids)]


def random_lengths(lengths, seed):
    """Yield an endless sequence of random draft lengths. Some are followed by five zeros."""
    rng = random.Random(seed)
    while True:
        yield rng.choice(lengths)
        yield from [0] * rng.choice((0, 0, 0, 5))


CASCADE = partial(CascadeDrafter, first=NGram)
LOOKUP_CASCADE = partial(CASCADE, then=DRAFTER)
DFLASH = DEMO / "dflash"
TREE_PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]
GROWN_TREE = {"draft_length": 5, "draft_tree": (2, 3)}
#: Engine options for each drafter, as a chain and as a tree.
DRAFTER_OPTIONS = {
    "eagle3": {},
    "eagle3, tree": GROWN_TREE,
    "dflash": {"drafter": DFLASH},
    "dflash, tree": {"drafter": DFLASH, **GROWN_TREE},
    "dflash, lattice probe": {"drafter": DFLASH, "draft_length": 6, "draft_masking": "probe"},
    "dspark": {"drafter": RandomDrafter(rank=8)},
    "dflash2": {"drafter": RandomDFlash2()},
    "dflash2, tree": {"drafter": RandomDFlash2(), **GROWN_TREE},
    "mtp": {"drafter": RandomDrafter(1), "draft_length": 2},
    "model": {"drafter": TARGET},
    "ngram": {"drafter": NGram},
    "suffix": {"drafter": Suffix},
    "suffix, tree": {"drafter": Suffix, **GROWN_TREE},
    "host": {"drafter": UserDrafter.of(propose_repeat)},
    "host, tree": {"drafter": UserDrafter.of(propose_tree, tree=True)},
    "forced": {"speculation": False, "forced_drafts": True},
    "ngram before eagle3": {"drafter": LOOKUP_CASCADE},
}
#: Draft trees of further drafters, for the full suite only.
MORE_TREE_OPTIONS = {
    "dspark, tree": {"drafter": RandomDrafter(rank=8), **GROWN_TREE},
    "mtp, tree": {"drafter": RandomDrafter(1), **GROWN_TREE},
    "model, tree": {"drafter": TARGET, **GROWN_TREE},
    "ngram, tree": {"drafter": NGram, **GROWN_TREE},
}
FEW_PAGES = {"pages": 40, "page_size": 16, "max_length": 400}
PATHS = {"draft_length": 9, "draft_tree": TREE_PATHS}
#: Engine options that are a covering array: every value of an option occurs together with every
#: value of every other option that it can be combined with. The drafters are covered as chains and
#: as trees. The default drafter is the EAGLE-3 head of the demo.
CONFIGURATIONS: list[dict[str, Any]] = [
    {
        "max_batch_size": 1,
        **PATHS,
        "overlap": False,
        **FEW_PAGES,
        "grammar_transport": "mailbox",
        "verify": "per_token",
        "weights": "fp8",
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 8,
        "draft_length": "auto",
        "draft_masking": "probe",
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "rejection",
        "forced_drafts": True,
        "grammar_backend": "xgrammar",
        "programmatic": False,
    },
    {
        "max_batch_size": 3,
        "drafter": RandomDFlash2(),
        "draft_masking": "none",
        "generation": "graph",
        "grammar_transport": "spinkernel",
        "grammar_budget_us": None,
        "verify": "relaxed",
        "device_automata": True,
    },
    {
        "max_batch_size": 3,
        "drafter": TARGET,
        "draft_length": 1,
        "composition": "two",
        **FEW_PAGES,
        "grammar_transport": "spinkernel",
        "grammar_budget_us": None,
        "verify": "coupled",
        "forced_drafts": True,
        "grammar_backend": "xgrammar",
        "weights": "fp8",
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
        "programmatic": False,
    },
    {
        "max_batch_size": 8,
        "drafter": DFLASH,
        "draft_masking": "none",
        "generation": "graph",
        **FEW_PAGES,
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "rejection",
        "device_automata": True,
        "weights": "fp8",
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
        "programmatic": False,
    },
    {
        "max_batch_size": 1,
        "drafter": Suffix,
        **GROWN_TREE,
        "draft_masking": "none",
        "composition": "two",
        "grammar_transport": "mailbox",
        "verify": "coupled",
        "grammar_backend": "xgrammar",
        "programmatic": False,
    },
    {
        "max_batch_size": 8,
        "drafter": RandomDrafter(3),
        "draft_length": 1,
        "grammar_transport": "mailbox",
        "verify": "relaxed",
        "device_automata": True,
        "forced_drafts": True,
        "weights": "fp8",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 1,
        "drafter": RandomDrafter(rank=8),
        "draft_length": "auto",
        "draft_masking": "probe",
        "composition": "two",
        **FEW_PAGES,
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "relaxed",
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 8,
        "drafter": DFLASH,
        **PATHS,
        "draft_masking": "none",
        "overlap": False,
        "grammar_transport": "spinkernel",
        "grammar_budget_us": None,
        "verify": "per_token",
        "grammar_backend": "xgrammar",
        "programmatic": False,
    },
    {
        "max_batch_size": 3,
        "drafter": NGram,
        **GROWN_TREE,
        **FEW_PAGES,
        "grammar_transport": "spinkernel",
        "grammar_budget_us": 1.0,
        "verify": "rejection",
        "weights": "fp8",
        "prefill_rows": 8,
    },
    {
        "max_batch_size": 3,
        "draft_masking": "probe",
        "overlap": False,
        **FEW_PAGES,
        "grammar_transport": "mailbox",
        "verify": "rejection",
        "forced_drafts": True,
        "grammar_backend": "xgrammar",
        "weights": "fp8",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 1,
        "drafter": LOOKUP_CASCADE,
        "draft_length": 1,
        "overlap": False,
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "coupled",
        "device_automata": True,
        "forced_drafts": True,
        "prefill_rows": 8,
    },
    {
        "max_batch_size": 3,
        "draft_length": "auto",
        "generation": "graph",
        **FEW_PAGES,
        "grammar_transport": "native",
        "verify": "per_token",
        "device_automata": True,
        "forced_drafts": True,
        "weights": "fp8",
        "prefill_rows": 8,
    },
    {
        "max_batch_size": 1,
        "drafter": NGram,
        "draft_length": "auto",
        "draft_masking": "probe",
        "grammar_transport": "spinkernel",
        "grammar_budget_us": None,
        "verify": "coupled",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 8,
        "drafter": RandomDrafter(1),
        **GROWN_TREE,
        "draft_masking": "none",
        "overlap": False,
        "grammar_transport": "native",
        "grammar_budget_us": None,
        "verify": "relaxed",
        "grammar_backend": "xgrammar",
        "weights": "fp8",
        "prefix_cache_bytes": 0,
        "programmatic": False,
    },
    {
        "max_batch_size": 8,
        "drafter": UserDrafter.of(propose_repeat),
        "draft_masking": "probe",
        "composition": "two",
        "grammar_transport": "mailbox",
        "grammar_budget_us": 1.0,
        "verify": "per_token",
        "grammar_backend": "xgrammar",
        "weights": "fp8",
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 1,
        "speculation": False,
        "grammar_transport": "mailbox",
        "grammar_budget_us": None,
        "verify": "per_token",
        "device_automata": True,
        "prefix_cache_bytes": 0,
        "programmatic": False,
    },
    {
        "max_batch_size": 1,
        "drafter": TARGET,
        **PATHS,
        "draft_masking": "none",
        "composition": "two",
        **FEW_PAGES,
        "grammar_transport": "native",
        "grammar_budget_us": None,
        "verify": "rejection",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 1,
        "drafter": Suffix,
        "draft_length": 1,
        "draft_masking": "none",
        "generation": "graph",
        "grammar_transport": "spinkernel",
        "verify": "rejection",
        "device_automata": True,
        "weights": "fp8",
        "programmatic": False,
    },
    {
        "max_batch_size": 3,
        **PATHS,
        "draft_masking": "none",
        "grammar_transport": "spinkernel",
        "grammar_budget_us": 1.0,
        "verify": "relaxed",
        "grammar_backend": "xgrammar",
    },
    {
        "max_batch_size": 8,
        "speculation": False,
        "grammar_transport": "spinkernel",
        "grammar_budget_us": None,
        "verify": "coupled",
        "forced_drafts": True,
        "prefill_rows": 8,
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 3,
        "drafter": DFLASH,
        "draft_length": "auto",
        "draft_masking": "none",
        "overlap": False,
        "grammar_transport": "mailbox",
        "verify": "relaxed",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 8,
        "drafter": RandomDFlash2(),
        **GROWN_TREE,
        "draft_masking": "none",
        "overlap": False,
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "per_token",
        "grammar_backend": "xgrammar",
        "prefill_rows": 8,
    },
    {
        "max_batch_size": 8,
        "drafter": DFLASH,
        **PATHS,
        "draft_masking": "none",
        "overlap": False,
        "grammar_transport": "mailbox",
        "verify": "coupled",
        "prefill_rows": 8,
    },
    {
        "max_batch_size": 1,
        "drafter": LOOKUP_CASCADE,
        "composition": "two",
        "grammar_transport": "native",
        "grammar_budget_us": 1.0,
        "verify": "per_token",
        "prefix_cache_bytes": 0,
    },
    {
        "max_batch_size": 8,
        "drafter": RandomDrafter(rank=8),
        **GROWN_TREE,
        "draft_masking": "none",
        "composition": "two",
        "grammar_transport": "native",
        "verify": "relaxed",
        "prefix_cache_bytes": 0,
        "programmatic": False,
    },
]
