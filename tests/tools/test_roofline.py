"""The roofline model: its launches are those of the kernels, and its numbers those of the code."""

import math
from types import SimpleNamespace

import machine_code
import model_util
import pytest
from tiny_models import llama_config

from graft.models.llm.config import LlamaConfig
from graft.models.llm.kernels import tensor_cores
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.kernels.loader import FOLDER, KernelLoader
from graft.models.llm.rows import Rows
from graft.models.llm.stack import DecoderLayer, DecoderStack
from graft.tools.bench import roofline


class RecordingLane:
    """Records the launches of kernels by node name, and runs nothing."""

    def __init__(self):
        self.launches = {}

    def kernel(self, kernel, grid, block, args, *, shared=0, name=""):
        file, defines = kernel
        self.launches[name] = SimpleNamespace(file=file, defines=defines, grid=grid, args=args)


MATRICES = roofline.LAYER_MATRICES


@pytest.fixture(scope="module")
def stack(device):
    """One layer of an 8B Llama in bfloat16, without values, whose kernels are not compiled."""
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "torch_dtype": "bfloat16",
    }
    config = LlamaConfig.from_dict(llama_config(num_hidden_layers=1, **shape))
    sizes = {name: device.empty(size, "bfloat16") for name, size in MATRICES.items()}
    norm = device.empty(4096, "float32")
    layer = DecoderLayer(
        input_norm=norm,
        qkv=sizes["qkv"],
        out=sizes["attention out"],
        post_norm=norm,
        gate_up=sizes["gate, up"],
        down=sizes["down"],
    )
    kv = model_util.make_cache(device, config, pages=1100, page_size=16, max_pages_per_slot=1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelLoader, "load", lambda _, file, name, **defines: (file, defines))
        yield DecoderStack(ModelKernels(device, "warp"), config, [layer], kv, max_rows=1024)


@pytest.mark.parametrize("count", [1, 8, 9, 16, 32, 64, 128, 256, 1024])
@pytest.mark.full("[9]", "[16]", "[32]", "[256]", "[1024]")
def test_roofline_models_launched_shapes(device, stack, count):
    """Kernels, grids, tiles and dtypes of a layer's launches are those of the model."""
    token = device.empty(count, "int32")
    rows = Rows(token, token, token, rows_per_slot=count)
    lane = RecordingLane()
    stack.run(lane, rows, stack.input_norm(count))
    for name, size in MATRICES.items():
        launch = lane.launches[name]
        shape = roofline.product_shape(count, *size)
        assert (launch.file, launch.grid) == (shape.kernel, shape.grid)
        assert launch.defines.items() >= shape.defines.items()
        assert launch.defines["X16"] == 1 and launch.defines["WEIGHT8"] == 0
        tile_rows, tile_columns = roofline.tile_size(shape)
        tile = roofline.TILES[tile_rows, tile_columns]
        assert tile.warp_rows <= tile_rows // 8 and tile.warp_columns <= tile_columns // 16
    plan = lane.launches["attention plan"]
    assert plan.args[6] == roofline.attention_tile_rows(count)
    assert math.prod(lane.launches["attention"].grid) <= 2 * roofline.MULTIPROCESSORS


@pytest.mark.parametrize("count", [32, 64, 128, 256, 512, 1024])
def test_roofline_estimates_chosen_splits_as_fast_as_others(monkeypatch, count):
    """The launch configurations are chosen with a simpler model than the roofline."""
    of_14b = ("attention out", (5120, 5120))
    for name, size in (*MATRICES.items(), of_14b):
        chosen = roofline.product(name, count, *size).seconds
        for splits in (1, 2, 4):
            with monkeypatch.context() as patch:
                patch.setattr(tensor_cores, "_choose_splits", lambda *_, splits=splits: splits)
                other = roofline.product(name, count, *size).seconds
            assert chosen <= 1.15 * other, (name, size, splits, chosen / other)


def instructions(kernel, **defines):
    """Return the instructions of a kernel for sm_90."""
    macros = tuple((name, str(value)) for name, value in defines.items())
    variant = machine_code.Variant(FOLDER / f"{kernel}.cu", macros)
    cubin, _ = machine_code.compile_cubin(variant, 90)
    return machine_code.kernel_instructions(machine_code.disassemble(cubin))[kernel]


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("block", "outputs"), [(32, 128), (64, 128), (64, 256), (128, 128), (256, 128)]
)
def test_roofline_counts_instructions_of_machine_code(block, outputs):
    """The model adds 40 to 55 instructions per stage, which follow the last mma instruction."""
    code = instructions("linear_many", ROW_BLOCK=block, OUTPUTS=outputs, X16=1)
    mma = [i for i, text in enumerate(code) if text.startswith("HMMA")]
    barrier = max(i for i in range(mma[0]) if code[i].startswith("BAR"))
    modelled = roofline.TILES[block, outputs].instructions_per_mma * len(mma)
    assert 25 <= modelled - (mma[-1] - barrier) <= 55


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("block", "outputs"), [(32, 128), (64, 128), (64, 256), (128, 128), (256, 128)]
)
def test_roofline_counts_batches_of_machine_code(block, outputs):
    """With K splits, a batch loads all its partial sums and residuals before its first sum.

    For a pair of outputs, these are 2 * 4 partial sums and 2 residuals. A batch has the pairs of
    half a tile, or as many as fit into registers.
    """
    code = instructions("linear_many", ROW_BLOCK=block, OUTPUTS=outputs, X16=1)
    epilogue = code[max(i for i, text in enumerate(code) if text.startswith("HMMA")) :]
    loads = ["L" if text.startswith("LDG") else "+" * text.startswith("FADD") for text in epilogue]
    batch = max(map(len, "".join(loads).split("+")))
    pairs = block * outputs // 2 // 256 // 2
    assert batch // 10 == min(pairs, roofline.EPILOGUE_BATCH)


@pytest.mark.nvrtc
@pytest.mark.parametrize(("rows", "columns"), roofline.TILES)
def test_roofline_counts_early_loads_of_machine_code(rows, columns):
    """Before they wait for the previous kernel, threads load 16 bytes of weights at a time."""
    if rows <= 16:
        code = instructions("linear_few", TILES=rows // 8, X16=1)
        threads = 16 * rows
    else:
        code = instructions("linear_many", ROW_BLOCK=rows, OUTPUTS=columns, X16=1)
        threads = 256
    wait = next(i for i, text in enumerate(code) if text.startswith("ACQBULK"))
    loads = sum(text.startswith("LDG") for text in code[:wait])
    assert roofline.TILES[rows, columns].early_bytes == loads * 16 * threads


@pytest.mark.nvrtc
def test_roofline_counts_prompt_attention_instructions_of_machine_code():
    """The loop over steps contains a step for all rows, and a loop over steps of single rows."""
    of_row, of_all = attention_loops("attention_prompt")
    step = of_all["all"] - of_row["all"]
    assert step == pytest.approx(roofline.ATTENTION_TILES[4].step, rel=0.03)


@pytest.mark.nvrtc
def test_roofline_counts_decode_attention_instructions_of_machine_code():
    """The loop over steps for all rows contains code for trees, which other rows do not execute."""
    of_all, _ = attention_loops("attention_split")
    assert 0.75 * of_all["all"] <= roofline.ATTENTION_TILES[1].step <= of_all["all"]


def attention_loops(kernel):
    """Return the counts of the first loop with one step, and of the first one with two steps."""
    macros = (("OUT", "bf16_t"),)
    variant = machine_code.Variant(FOLDER / f"{kernel}.cu", macros)
    cubin, _ = machine_code.compile_cubin(variant, 90)
    found = machine_code.count_loops(machine_code.disassemble(cubin))[kernel]
    loops = [loop for loop in found if loop["mma"]]
    assert loops[0]["mma"] == roofline.ATTENTION_STEP_MMA
    return loops[0], next((loop for loop in loops if loop["mma"] == 128), None)


def test_roofline_estimate_exceeds_time_of_every_resource():
    for name, size in MATRICES.items():
        for count in (1, 16, 64, 1024):
            launch = roofline.product(name, count, *size)
            for resource, work in launch.work.items():
                assert launch.seconds > work / roofline.RATES[resource] > 0


def test_roofline_prints_which_targets_are_reached(capsys):
    roofline.main([])
    printed = capsys.readouterr().out
    assert "32k among 63 x 1k: attention, ms" in printed and "reached" in printed
