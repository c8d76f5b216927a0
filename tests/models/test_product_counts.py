"""Memory traffic of products on tensor cores, counted on PTX for sm_90."""

import launch_counts
import pytest

from graft.tools.bench import roofline

pytestmark = [pytest.mark.ptx, pytest.mark.nvrtc]


@pytest.mark.parametrize(
    ("rows", "kernel"),
    [
        (64, "linear_many"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((8, "linear_few"), (256, "linear_many"))
        ),
    ],
)
def test_roofline_counts_bytes_of_products(tmp_path, rows, kernel):
    """The model contains all bytes that products load and store: weights, rows, partial sums,
    residuals, sums of squares and results. It does not contain norm weights.
    """
    columns, inner = 256, 1024
    arguments = {"rows": rows, "columns": columns, "inner": inner}
    counts = launch_counts.run("product_launch.py", tmp_path / "counts", arguments)
    products = [launch for launch in counts if launch["kernel"] == kernel]
    assert len(products) == 2
    for launch, name, outputs in zip(
        products, ("attention out", "gate, up"), (inner, columns), strict=True
    ):
        modelled = roofline.product(name, rows, outputs, inner)
        moved = launch["loaded"]["global"] + launch["stored"]["global"]
        assert modelled.work["L2"] + modelled.early_bytes == pytest.approx(moved, rel=0.015)
