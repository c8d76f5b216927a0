"""Changes of kernels that `test_ptx_mutants.py` must find, with the test that finds each."""

from __future__ import annotations

from ptx_mutation import Mutant

LLM = "models/llm/kernels/"
SAMPLING = "sampling/kernels/"
LIBRARY = "models/test_kernel_library.py::"
FEW = LIBRARY + "test_gated_linear_equals_linear_and_silu_mul[3-rounded]"
MANY = LIBRARY + "test_gated_linear_equals_linear_and_silu_mul[20-rounded]"
INVARIANT = LIBRARY + "test_tensor_core_linear_is_row_invariant[bfloat16-rounded-48-128]"
TALL = LIBRARY + "test_tall_tiles_give_bits_of_other_tiles[norm-1]"
LONG = LIBRARY + "test_tensor_core_linear_is_row_invariant[float16-rounded-16-1152]"
SPLIT = "models/test_attention.py::test_split_attention_equals_causal_softmax[4-1-64-bfloat16-4]"
STEP = LLM + "attention_step.cuh"
PROMPT = "models/test_attention.py::test_split_attention_equals_causal_softmax[4-1-64-bfloat16-64]"
PROMPT_TILES = "models/test_attention.py::test_split_attention_is_row_invariant[4]"
LATER = "models/test_attention.py::test_attention_nan_in_later_row_does_not_affect_earlier_rows[64]"
TREE = "models/test_attention.py::test_split_attention_tree_rows_equal_chain_rows[13]"
TILES = "models/test_attention.py::test_split_attention_is_row_invariant[4]"
PARTS = "models/test_attention.py::test_split_attention_reuses_parts_for_long_rows"
WARP = LIBRARY + "test_attention_is_stable_for_large_scores[warp]"
NORM = LIBRARY + "test_norm_equals_rms_norm[warp-600]"
FP8 = "models/test_fp8.py::test_fp8_linear_uses_exact_value_of_every_code[warp-128]"
TARGET = "sampling/test_target.py::test_filtered_distribution_matches_reference[block64-70]"
MASK = "sampling/test_mask_apply.py::test_mask_apply_selects_mask_rows[block64]"
VERIFY = "sampling/test_verify.py::test_rejection_sampling_matches_reference[block64-same]"
BEGIN = "models/test_draft_row_assignment.py::test_round_begin_assigns_rows_by_acceptance"
MAILBOX = (
    "cudagraph/test_mailbox.py::test_mailbox_answers_every_replay_of_unreferenced_graph[mailbox]"
)

PUBLISH = "sampling/test_adjust.py::test_published_results_are_complete_when_host_sees_stamp"
GRAFT = "cudagraph/kernels/graft.cuh"
MAILBOX_KERNELS = "cudagraph/kernels/mailbox.cu"
RELEASE = "st.release.sys"
SYSTEM_FENCE = "  __threadfence_system();\n"
COUNTER = "  *counter = number;\n"

PROGRAMMATIC = "models/test_programmatic.py::test_programmatic_kernels_wait_for_previous_kernel"

MUTANTS = [
    # Barriers.
    Mutant("linear_few: no barrier before the parts are added", LLM + "linear_few.cu",
           "  __syncthreads();\n  if (!is_owner) return;", "  if (!is_owner) return;",
           FEW, "race", "result"),
    Mutant("linear_many: no barrier before a stage is read", LLM + "linear_many.cu",
           "wait_copies<STAGES - 2>();\n    __syncthreads();", "wait_copies<STAGES - 2>();",
           MANY, "race", "result"),
    Mutant("linear_many: no barrier before the sums overwrite the stages", LLM + "linear_many.cu",
           "  __syncthreads();  // all threads have read the last stage\n", "", MANY,
           "race", "result"),
    Mutant("linear_many: no barrier before the totals of a tall tile are read",
           LLM + "linear_many.cu",
           "  __syncthreads();  // all threads have read the last stage\n", "", TALL,
           "race", "result"),
    Mutant("attention_split: no barrier after the rows of the tile", LLM + "attention_split.cu",
           "    __syncthreads();\n    const int first_part", "    const int first_part",
           SPLIT, "race", "result"),
    Mutant("attention_split: no barrier after the queries", LLM + "attention_split.cu",
           "    __syncthreads();\n\n    for (int part", "\n    for (int part",
           SPLIT, "race", "result"),
    Mutant("attention_split: no barrier after the results of the quarters",
           LLM + "attention_split.cu",
           "      __syncthreads();\n      if (part <", "      if (part <", SPLIT, "race", "result"),
    Mutant("attention_split: no barrier before the next part", LLM + "attention_split.cu",
           "      __syncthreads();  // the next part", "      // the next part", PARTS,
           "race", "result"),
    Mutant("attention_split: no barrier before the next tile", LLM + "attention_split.cu",
           "      __syncthreads();  // the next tile", "      // the next tile", TILES,
           "race", "result"),
    Mutant("attention_split: no barrier after the factors of the parts", STEP,
           "  __syncthreads();\n  for (int item", "  for (int item", PARTS, "race", "result"),
    Mutant("attention_prompt: no barrier before a stage is read", LLM + "attention_prompt.cu",
           "wait_copies<STAGES - 2>();\n      __syncthreads();", "wait_copies<STAGES - 2>();",
           PROMPT, "race", "result"),
    Mutant("attention_prompt: no barrier before the quarters are added",
           LLM + "attention_prompt.cu",
           "      __syncthreads();\n      const int own", "      const int own", PROMPT,
           "race", "result"),
    Mutant("attention_prompt: no barrier before the next tile", LLM + "attention_prompt.cu",
           "      __syncthreads();  // the next tile", "      // the next tile", PROMPT_TILES,
           "race", "result"),
    Mutant("attention_prompt: waits for one stage too few", LLM + "attention_prompt.cu",
           "wait_copies<STAGES - 2>();", "wait_copies<STAGES - 1>();", PROMPT, "result", ""),
    Mutant("attention_warp: no barrier after the query", LLM + "attention_warp.cu",
           "from[d] * scale;\n  __syncthreads();", "from[d] * scale;", WARP, "race", ""),
    Mutant("norm: no barrier before the sums of the warps are added", LLM + "norm.cu",
           "= sum;\n  __syncthreads();", "= sum;", NORM, "race", "result"),
    Mutant("row: no barrier in the reduction of a block", SAMPLING + "row.cuh",
           "= x;\n  }\n  __syncthreads();", "= x;\n  }", TARGET, "race", "result"),
    Mutant("row: no barrier before the histogram is filled", SAMPLING + "row.cuh",
           "scratch.spans.clear();\n  block_sync();", "scratch.spans.clear();",
           TARGET, "race", "result"),
    Mutant("round_begin: no barrier before the replay number is written",
           "models/round/kernels/round.cu",
           "  __syncthreads();  // all threads must read", "  // all threads must read", BEGIN,
           "race", "result"),
    # Races that the order of threads of the host form hides.
    Mutant("linear_many: copies overwrite the stage that is read", LLM + "linear_many.cu",
           "const int free = at > 0 ? at - 1 : STAGES - 1;", "const int free = at;",
           LONG, "race", "result"),
    Mutant("histogram: counts without atomics", SAMPLING + "row.cuh",
           "atomicAdd(&members[bin], count);", "members[bin] += count;", TARGET, "race", ""),
    Mutant("narrow: list without atomics", SAMPLING + "row.cuh",
           "scratch.columns[atomicAdd(&scratch.listed, 1u)] = i;",
           "scratch.columns[scratch.listed++] = i;", TARGET, "result", ""),
    Mutant("round_begin: drafts counted without atomics", "models/round/kernels/round.cu",
           "atomicAdd(&num_above[bit], own_above);", "num_above[bit] += own_above;", BEGIN,
           "race", ""),
    Mutant("row: all threads write the cut's token", SAMPLING + "row.cuh",
           "  if (threadIdx.x == 0) {\n    u64 left = *need;", "  {\n    u64 left = *need;",
           TARGET, "race", ""),
    # Asynchronous copies.
    Mutant("linear_many: no wait for copies", LLM + "linear_many.cu",
           "    wait_copies<STAGES - 2>();\n", "", LONG, "result", ""),
    Mutant("linear_many: waits for one stage too few", LLM + "linear_many.cu",
           "wait_copies<STAGES - 2>", "wait_copies<STAGES - 1>", LONG, "result", ""),
    Mutant("linear_many: copies are not committed", LLM + "linear_many.cu",
           "    commit_copies();\n", "", LONG, "result", ""),
    # Fragments, operands of instructions and shuffles.
    Mutant("linear_many: totals of a tall tile without the first part", LLM + "linear_many.cu",
           "begin == 0 && part > 0;", "begin == 0 && part > 1;", TALL, "result", "result"),
    Mutant("mma: operands a1 and a2 exchanged", LLM + "mma.cuh",
           '"r"(a[1]), "r"(a[2])', '"r"(a[2]), "r"(a[1])', FEW, "result", ""),
    Mutant("mma: sums d1 and d2 exchanged", LLM + "mma.cuh",
           '"+f"(d[1]), "+f"(d[2])', '"+f"(d[2]), "+f"(d[1])', FEW, "result", ""),
    Mutant("linear_mma: fragment of the other half", LLM + "linear_mma.cuh",
           "a[1] = low.u[2 * h];", "a[1] = low.u[h];", INVARIANT, "result", "result"),
    Mutant("linear_many: fragment of the next row", LLM + "linear_many.cu",
           "own_column + m * 16 + g + 8, sub, t", "own_column + m * 16 + g + 7, sub, t",
           INVARIANT, "result", "result"),
    Mutant("pack_pair: high and low exchanged", LLM + "mma.cuh",
           'cvt.rn.bf16x2.f32 %0, %1, %2', 'cvt.rn.bf16x2.f32 %0, %2, %1', INVARIANT,
           "result", ""),
    Mutant("pack_pair: rounds towards zero", LLM + "mma.cuh",
           'cvt.rn.bf16x2.f32 %0', 'cvt.rz.bf16x2.f32 %0', INVARIANT, "result", ""),
    Mutant("widen: bytes of E4M3 weights exchanged", LLM + "mma.cuh",
           "0x3424 : 0x1404", "0x2434 : 0x1404", FP8, "result", ""),
    Mutant("load_weight: words 1 and 2 exchanged", LLM + "mma.cuh",
           '"=r"(p.u[1]), "=r"(p.u[2])', '"=r"(p.u[2]), "=r"(p.u[1])', INVARIANT, "result", ""),
    Mutant("attention_split: keys of the wrong lanes", LLM + "attention_split.cu",
           "at, 8 * j + lane / 4)", "at, 8 * j + lane % 8)", SPLIT, "result", "result"),
    Mutant("attention_split: maximum over two lanes of four", STEP,
           "for (int offset = 1; offset < 4; offset <<= 1) {\n      const float other",
           "for (int offset = 1; offset < 2; offset <<= 1) {\n      const float other",
           SPLIT, "result", "result"),
    Mutant("attention_split: mask of half a warp", LLM + "attention_split.cu",
           "__shfl_sync(FULL_WARP, at, 2 *", "__shfl_sync(0xffffu, at, 2 *", SPLIT,
           "fault", "fault"),
    Mutant("attention_split: half a warp votes", STEP,
           "is_chain = __all_sync", "if (lane < 16) is_chain = __all_sync", SPLIT,
           "fault", "fault"),
    Mutant("attention_split: values of later positions are kept", STEP,
           "b.u[i] &= visible[i % 2];", "b.u[i] &= 0xffffffffu;", LATER, "result", "result"),
    Mutant("attention_split: a row of a tree uses the keys of another row",
           LLM + "attention_split.cu",
           "!tile.is_chain ||", "", TREE, "result", "result"),
    Mutant("mask_apply: word of another lane", SAMPLING + "mask.cu",
           "__shfl_sync(FULL_WARP, loaded, t)", "__shfl_sync(FULL_WARP, loaded, t ^ 1)",
           MASK, "result", "result"),
    # Uninitialised data and alignment.
    Mutant("linear_many: sums not initialised", LLM + "linear_many.cu",
           "float sum[COLUMN_TILES][ROW_TILES][4] = {};", "float sum[COLUMN_TILES][ROW_TILES][4];",
           INVARIANT, "result", "result"),
    Mutant("attention_warp: sums not initialised", LLM + "attention_warp.cu",
           "float sum[PER_LANE] = {};", "float sum[PER_LANE];", WARP, "result", ""),
    Mutant("attention_split: sums of a quarter without positions not initialised",
           LLM + "attention_split.cu", "        sums.clear();\n", "", SPLIT, "result", ""),
    Mutant("attention_prompt: sums of a quarter without positions not initialised",
           LLM + "attention_prompt.cu", "          sums.clear();\n", "", PROMPT, "result", ""),
    Mutant("load_transposed: matrices 1 and 2 exchanged", LLM + "mma.cuh",
           '"=r"(columns.u[1]), "=r"(columns.u[2])', '"=r"(columns.u[2]), "=r"(columns.u[1])',
           PROMPT, "result", ""),
    Mutant("attention_prompt: packs of another value", LLM + "attention_prompt.cu",
           "value_pack(lane % 16, lane / 16)", "value_pack(lane % 16 ^ 1, lane / 16)", PROMPT,
           "result", "result"),
    Mutant("row: count of listed columns not initialised", SAMPLING + "row.cuh",
           "  if (tid == 0) scratch.listed = 0;\n", "", TARGET, "result", "result"),
    Mutant("linear_warp: vector loads of unaligned rows", LLM + "linear_warp.cu",
           "if (inner % PACK == 0) {", "if (inner >= PACK) {",
           LIBRARY + "test_linear_equals_matrix_product[warp-3-5-31-float32]", "fault", ""),
    # Order between blocks, kernels and the host.
    Mutant("arrive: no fence before the counter", LLM + "model.cuh",
           "  __threadfence();\n  const bool is_last", "  const bool is_last", PARTS, "race", ""),
    Mutant("linear_many: a block is counted before it has stored its sums", LLM + "linear_many.cu",
           "  __syncthreads();  // the sums of the other shares are stored\n", "", LONG,
           "race", ""),
    Mutant("linear_many: a block does not wait for the sums of its share",
           LLM + "linear_many.cu", "if (*count != static_cast<unsigned int>(others)) continue;",
           "", LONG, "race", "result"),
    Mutant("linear_many: the counter of a share is not reset", LLM + "linear_many.cu",
           "    *count = 0;\n", "", LONG, "race", "result"),
    Mutant("row: no fence before the counter", SAMPLING + "row.cuh",
           "    __threadfence();\n    scratch.token", "    scratch.token", TARGET, "race", ""),
    Mutant("row: best column without atomics", SAMPLING + "row.cuh",
           "if (leader) atomicMax(&cross_block.best, best);",
           "if (leader && best > cross_block.best) cross_block.best = best;", TARGET, "race", ""),
    Mutant("test_drafts: every block of a row stores the result", SAMPLING + "verify.cu",
           "  } else if (blockIdx.y > 0) {\n    return;  // every block", "    // every block",
           VERIFY, "race", ""),
    Mutant("attention_split: two blocks write one part", LLM + "attention_split.cu",
           "for (int part = first_part; part", "for (int part = max(first_part - 1, 0); part",
           PARTS, "race", ""),
    Mutant("attention_split: a block without parts arrives", LLM + "attention_split.cu",
           "const int end_tile = is_idle ? from.tile : to", "const int end_tile = to",
           SPLIT, "race", "result"),
    Mutant("graft: no griddepcontrol.wait", GRAFT,
           "griddepcontrol.wait;\\n\\t", "", PROGRAMMATIC, "fault", ""),
    Mutant("linear_few: residual loaded before griddepcontrol.wait", LLM + "linear_few.cu",
           "  wait_for_previous_kernel();\n  const Output y = {",
           "  const float early = residual == nullptr ? 0.0f : residual[threadIdx.x];\n"
           "  wait_for_previous_kernel();\n"
           "  if (early == 3e38f) return;\n  const Output y = {", PROGRAMMATIC, "fault", ""),
    *(
        Mutant(f"mailbox: {name}", GRAFT, RELEASE, store, MAILBOX, "result", "",
               ((MAILBOX_KERNELS, COUNTER + SYSTEM_FENCE, COUNTER + fence),))
        for name, store, fence in (
            ("no fence, and the request is stored without release", "st.relaxed.sys", ""),
            ("fence and release with the scope of a block", "st.release.cta",
             "  __threadfence_block();\n"),
            ("fence and release with the scope of the device", "st.release.gpu",
             "  __threadfence();\n"),
            ("no fence, and the request is a weak store", "st.weak", ""),
        )
    ),
    Mutant("mailbox: the answer is polled with weak loads", GRAFT, "ld.relaxed.sys", "ld.weak",
           MAILBOX.replace("[mailbox]", "[spinkernel]"), "result", ""),
    Mutant("publish_round: no fence, and the stamp is stored without release",
           SAMPLING + "adjust.cu", SYSTEM_FENCE + "  block_sync();\n  if (threadIdx.x == 0) store",
           "  block_sync();\n  if (threadIdx.x == 0) store", PUBLISH, "result", "",
           ((GRAFT, RELEASE, "st.relaxed.sys"),)),
]  # fmt: skip
