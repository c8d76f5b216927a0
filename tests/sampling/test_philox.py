"""Random numbers: published test vectors, and accuracy of the kernels' functions."""

from __future__ import annotations

import numpy as np
import pytest
import reference_round as ref

from graft.cudagraph.lanes import StreamLane
from graft.sampling.kernels.loader import KERNELS

PROBE = """
#include "{headers}/philox.cuh"

extern "C" __global__ void probe_numbers(const unsigned int* x, const float* y, float* uniform,
                                         float* exponential_out, float* exp_out, float* log_out) {{
  const int i = blockIdx.x;
  uniform[i] = uniform24(x[i]);
  exponential_out[i] = exponential(x[i]);
  exp_out[i] = exp_nonpositive(-y[i]);
  log_out[i] = log_positive(y[i]);
}}
"""

# Random123 distribution, tests/kat_vectors: philox4x32, 10 rounds: counter, key, result.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def _hex(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.fixture(scope="module")
def probe(device, tmp_path_factory):
    """Kernels that expose the header's functions."""
    path = tmp_path_factory.mktemp("probe") / "probe.cu"
    path.write_text(PROBE.format(headers=KERNELS.resolve()))
    return device.load(path)


def _numbers(device, stream, probe, x, y):
    outs = [device.zeros(x.shape, "float32") for _ in range(4)]
    args = [device.from_host(x, "uint32"), device.from_host(y, "float32"), *outs]
    StreamLane(stream).kernel(probe["probe_numbers"], x.size, 1, args)
    stream.synchronize()
    return [out.to_host().astype(np.float64) for out in outs]


def test_philox_matches_published_vectors():
    """The reference matches the vectors of the generator's authors.

    The key is the low and high word of the seed; the counter is position, purpose and sample, id
    div 4, and round.
    """
    counter, key, wanted = (np.stack([_hex(row[i]) for row in KNOWN]) for i in range(3))
    np.testing.assert_array_equal(ref.philox4x32_10(counter, key), wanted)
    key = np.array([0x76543210, 0xFEDCBA98], np.uint32)
    counters = (np.array([70001, 3 | 9 << 8, i, 5], np.uint32) for i in range(16))
    direct = np.concatenate([ref.philox4x32_10(counter, key) for counter in counters])
    found = ref.words(0xFEDCBA9876543210, 70001, 3, np.arange(64), 9, 5)
    np.testing.assert_array_equal(found, direct)


def test_uniform_and_exponential_variates_are_accurate(device, stream, probe):
    """Uniform numbers are exact in [0, 1); exponential ones are within 4e-7, in both tails."""
    rng = np.random.default_rng(4)
    edges = [
        0,
        1,
        2,
        3,
        255,
        256,
        257,
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**32 - 128,
        2**32 - 129,
        2**32 - 256,
        2**32 - 257,
        1257925828,
        1257925829,
        1257966796,
    ]
    spread = (2.0 ** rng.uniform(0, 32, 3000)).astype(np.uint64).clip(0, 2**32 - 1)
    x = np.concatenate([np.array(edges, np.uint64), spread, 2**32 - 1 - spread]).astype(np.uint32)
    u, e, _, _ = _numbers(device, stream, probe, x, np.ones(x.size, np.float32))
    np.testing.assert_array_equal(u, ref.uniform(x))
    assert u.min() == 0.0 and u.max() == 1.0 - 2.0**-24
    wanted = np.exp(-ref.gumbel(x))
    np.testing.assert_allclose(e, wanted, rtol=4e-7)
    assert np.isclose(e[0], 2.0**-33, rtol=1e-6), "the upper Gumbel tail ends at 33 log 2"
    assert np.isclose(e.max(), 24 * np.log(2), rtol=1e-6), "the lower tail is cut at 1 - 2^-24"


def test_exp_and_log_are_accurate(device, stream, probe):
    """exp on [-87, 0] and log on normal numbers are within a few units in the last place.

    exp is exactly 1 at 0, and 0 below the smallest normal number.
    """
    rng = np.random.default_rng(5)
    y = np.concatenate([rng.uniform(0, 87, 3000), 2.0 ** rng.uniform(-30, 6, 3000)])
    y = np.concatenate([y, [1.0, 2.0, 0.5, 86.99, 0.70710678, 0.7071068]]).astype(np.float32)
    _, _, exp, log = _numbers(device, stream, probe, np.zeros(y.size, np.uint32), y)
    np.testing.assert_allclose(exp[y <= 87], np.exp(-y[y <= 87].astype(float)), rtol=3e-7)
    np.testing.assert_allclose(log, np.log(y.astype(np.float64)), rtol=3e-7, atol=3e-8)
    y = np.array([0.0, 87.5, 1e4, 3e38, np.inf], np.float32)
    _, _, exp, _ = _numbers(device, stream, probe, np.zeros(y.size, np.uint32), y)
    np.testing.assert_array_equal(exp, [1.0, 0.0, 0.0, 0.0, 0.0])
