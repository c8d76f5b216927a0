"""Launch configurations of products on tensor cores (linear_few.cu, linear_many.cu).

All configurations give the same bits. The one with the least estimated time is selected.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from graft.models.llm.kernels.loader import ceil_div

# Tile and block sizes. They must match the constants in the kernels.
INNER_MULTIPLE = 128
COLUMN_MULTIPLE = 16
_MAX_SPLITS = 4  # split-K: maximum number of blocks that compute one tile
_TILE_COLUMNS = 128
# Number of inner indices that the pipeline stages of linear_many hold in shared memory together, by
# bytes per weight and rows per tile.
_STAGED = {1: {32: 320, 64: 384, 128: 256}, 2: {32: 192, 64: 256, 128: 192}}
# Rows of a tall tile. Tall tiles need 16-bit inputs and TALL_SHARED bytes of shared memory per
# block, which some GPUs do not have. _TALL_STAGED is like _STAGED, for tall tiles.
_TALL_TILE = 256
_TALL_STAGED = 128
# Tiles of _WIDE_ROWS rows have _WIDE_COLUMNS columns if that is faster. Such wide tiles are used
# only on GPUs with enough shared memory for tall tiles.
_WIDE_ROWS = 64
_WIDE_COLUMNS = 256
TALL_SHARED = 227 * 1024
_FEW_ROWS = 16  # maximum rows for linear_few; more rows use linear_many
#: Number of multiprocessors of an H100 or H200. The number of K splits is chosen for these GPUs.
MULTIPROCESSORS = 132
# Blocks that run on one multiprocessor at the same time: of linear_few by TILES, and of linear_many
# by rows per tile.
_FEW_BLOCKS_PER_MULTIPROCESSOR = {1: 3, 2: 2}
_BLOCKS_PER_MULTIPROCESSOR = {32: 2, 64: 1, 128: 1, _TALL_TILE: 1}
# Time of a wave of tall tiles, in units of the time of a wave of tiles of 128 rows. It is a little
# less than 1.5, the ratio of the bytes that the two waves read through the L2 cache, because tall
# tiles need fewer instructions.
_TALL_WAVE = 1.4
# Estimated cost of K splits, in units of the time of one wave without splits that multiplies
# _SPLIT_COST_INNER inner indices. The end of each wave costs _SPLIT_COST. Storing and adding a
# partial sum per output of all tiles of a wave costs _SPLIT_COST_PER_ROW for each row of a tile.
_SPLIT_COST_PER_ROW = 0.025 / 32
_SPLIT_COST_INNER = 4096
_SPLIT_COST = 0.07


class MmaShape(NamedTuple):
    """Launch configuration of a tensor-core product (linear_mma.cuh)."""

    kernel: str  # name of the kernel and of its file
    defines: dict[str, int]  # compile-time constants that depend on the shape
    grid: tuple[int, int, int]  # of linear_many: K splits, tiles of rows, tiles of columns
    block: int  # threads per block
    blocks_per_multiprocessor: int  # number of blocks that run at the same time
    shared: int = 0  # dynamic shared memory in bytes
    # Sizes of the split-K workspaces in floats and integers; 0 without splits.
    partials: int = 0
    counters: int = 0

    @property
    def waves(self) -> int:
        """Number of waves in which the blocks run on an H100 or H200."""
        return ceil_div(math.prod(self.grid), MULTIPROCESSORS * self.blocks_per_multiprocessor)


def mma_shape(
    rows: int,
    columns: int,
    nbytes: int = 2,
    *,
    inner: int = _SPLIT_COST_INNER,
    allow_tall: bool = False,
) -> MmaShape:
    """Return the launch configuration of a tensor-core product.

    Parameters
    ----------
    rows
        Number of rows that are multiplied: the number of input rows, or twice that number if
        activations are split.
    columns, inner
        Number of outputs and inputs per row.
    nbytes
        Bytes of a stored weight: 1 or 2.
    allow_tall
        Whether tiles may have 256 rows or 256 columns, which requires 16-bit inputs and a GPU with
        about 225 KB of shared memory per block.
    """
    if rows <= _FEW_ROWS:
        # A block computes `tiles` tiles of rows and `tiles` tiles of columns. With more than eight
        # rows, it thus uses each input row that it loads for twice as many output columns.
        tiles = ceil_div(rows, 8)
        across = ceil_div(columns, tiles * COLUMN_MULTIPLE)
        per_multiprocessor = _FEW_BLOCKS_PER_MULTIPROCESSOR[tiles]
        grid = (across, 1, 1)
        return MmaShape("linear_few", {"TILES": tiles}, grid, 128 * tiles, per_multiprocessor)
    staged = _STAGED[nbytes]
    block = next((size for size in staged if rows <= size), max(staged))
    if allow_tall and rows > block:
        block = _choose_block(rows, columns, inner)
    outputs = _choose_columns(columns) if allow_tall and block == _WIDE_ROWS else _TILE_COLUMNS
    across = ceil_div(columns, outputs)
    down = ceil_div(rows, block)
    splits = _choose_splits(across * down, block, inner)
    partials = 0
    counters = 0
    if splits > 1:
        partials = across * down * _MAX_SPLITS * block * outputs
        counters = across * down * splits
    stage_bytes = outputs * nbytes + block * 2
    if block == _TALL_TILE:
        shared = _TALL_STAGED * stage_bytes + 4 * block * outputs
    else:
        shared = staged[block] * stage_bytes
    return MmaShape(
        "linear_many",
        {"ROW_BLOCK": block, "OUTPUTS": outputs},
        (splits, down, across),
        256,
        _BLOCKS_PER_MULTIPROCESSOR[block],
        shared,
        partials,
        counters,
    )


def _choose_columns(columns: int) -> int:
    """Return the number of columns per tile of 64 rows: more if that takes no additional time.

    A wave of wide tiles computes twice as many columns, and reads half as many rows per column.
    """
    waves, wide_waves = (
        ceil_div(ceil_div(columns, size), MULTIPROCESSORS)
        for size in (_TILE_COLUMNS, _WIDE_COLUMNS)
    )
    return _WIDE_COLUMNS if 2 * wide_waves <= waves else _TILE_COLUMNS


def _choose_block(rows: int, columns: int, inner: int) -> int:
    """Return the number of rows per tile, 128 or 256, with the least estimated time."""

    def estimated_time(block: int) -> float:
        tiles = ceil_div(columns, _TILE_COLUMNS) * ceil_div(rows, block)
        splits = _choose_splits(tiles, block, inner)
        return _estimated_time(tiles, block, inner, splits)

    return min((128, _TALL_TILE), key=estimated_time)


def _choose_splits(tiles: int, rows: int, inner: int) -> int:
    """Return the number of K splits with the least estimated time.

    The product has `tiles` tiles of `rows` rows each.
    """
    # min() returns the first, that is the smallest, of several equally good numbers.
    return min((1, 2, _MAX_SPLITS), key=lambda splits: _estimated_time(tiles, rows, inner, splits))


def _estimated_time(tiles: int, rows: int, inner: int, splits: int) -> float:
    """Return the estimated time of a product, in units of the time of a wave without splits.

    With s splits there are more waves, each of which takes 1 / s of the time. But partial sums have
    to be stored and added: the first block of a tile has a total of its partial sums, and the other
    blocks have several partial sums. One of these sums stays in the block that adds them, and the
    others are stored. Each of the `tiles` has `rows` rows.
    """
    concurrent = MULTIPROCESSORS * _BLOCKS_PER_MULTIPROCESSOR[rows]
    waves = ceil_div(tiles * splits, concurrent)
    time = waves / splits
    if rows == _TALL_TILE:
        time *= _TALL_WAVE
    if splits == 1:
        return time
    stored = _MAX_SPLITS - _MAX_SPLITS // splits
    cost = _SPLIT_COST_PER_ROW * stored * rows * tiles / concurrent
    return time + (cost + _SPLIT_COST * waves) * _SPLIT_COST_INNER / inner
