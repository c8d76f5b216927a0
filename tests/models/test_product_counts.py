"""Memory traffic of products on tensor cores, counted on PTX for sm_90."""

import math

import launch_counts
import pytest

from graft.tools.bench import roofline

pytestmark = [pytest.mark.ptx, pytest.mark.nvrtc]


@pytest.mark.parametrize(
    ("rows", "columns", "kernel"),
    [
        (64, 256, "linear_many"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (8, 256, "linear_few"),
                (64, 6144, "linear_many"),  # the larger matrix has two K splits
                (256, 256, "linear_many"),
            )
        ),
    ],
)
def test_roofline_counts_bytes_of_products(tmp_path, rows, columns, kernel):
    """The model contains all bytes that products load and store: weights, rows, partial sums,
    residuals, sums of squares and results. It does not contain norm weights.
    """
    inner = 1024
    arguments = {"rows": rows, "columns": columns, "inner": inner}
    counts = launch_counts.run("product_launch.py", tmp_path / "counts", arguments)
    products = [launch for launch in counts if launch["kernel"] == kernel]
    assert len(products) == 2
    for launch, name, outputs in zip(
        products, ("attention out", "gate, up"), (inner, columns), strict=True
    ):
        modelled = roofline.product(name, rows, outputs, inner)
        moved = launch["loaded"]["global"] + launch["stored"]["global"]
        if kernel == "linear_many":
            moved -= stored_without_waiting(rows, outputs, inner)
        assert modelled.work["L2"] + modelled.early_bytes == pytest.approx(moved, rel=0.015)


def stored_without_waiting(rows, columns, inner):
    """Return the bytes that blocks store only because they run one after another.

    With K splits, a block stores the sums of its own share of the rows if other blocks of the tile
    have not stored theirs while it waits. Only the last block of the tile then keeps its share.
    """
    shape = roofline.product_shape(rows, columns, inner)
    splits, *tiles = shape.grid
    share = math.prod(roofline.tile_size(shape)) * 4 // splits
    return math.prod(tiles) * (splits - 1) * share
