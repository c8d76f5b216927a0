"""Device arrays, pinned arrays, slots and rings, and element types."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from cudagraph_util import LIMIT_S, assert_raises, wait_until, wait_until_freed

from graft import native
from graft.cudagraph import (
    DeadlineError,
    Device,
    DeviceError,
    OptionError,
    PinnedSlots,
    Ring,
    ShapeError,
    Stream,
)
from graft.cudagraph.driver import memory, softstats
from graft.cudagraph.driver.dtypes import (
    DTYPES,
    E4M3,
    from_float32,
    itemsize,
    numpy_dtype,
    to_float32,
)
from graft.native import _native


def bfloat16_oracle(value: np.float32) -> int:
    """Return the bits of a finite float32 value rounded to bfloat16, to nearest even.

    The distances to the two neighbouring bfloat16 values are compared in float64.
    """
    bits = int(np.float32(value).view(np.uint32))
    low = bits & 0xFFFF0000
    high = (bits & 0xFFFF0000) + 0x10000
    exact = float(value)

    def as_float(pattern: int) -> float:
        if pattern & 0x7FFFFFFF == 0x7F800000:  # one step above the largest finite value
            return -(2.0**128) if pattern >> 31 else 2.0**128
        return float(np.uint32(pattern).view(np.float32))

    down = abs(exact - as_float(low))
    up = abs(as_float(high) - exact)
    if down != up:
        return (low if down < up else high) >> 16
    return (low if (low >> 16) % 2 == 0 else high) >> 16


def test_transfer_interrupted_by_ctrl_c_keeps_its_memory(device: Device, monkeypatch) -> None:
    """Ctrl-C may arrive directly after the driver has enqueued a copy, which then still runs."""
    enqueue = memory.cu.cuMemcpyHtoDAsync

    def interrupted(*args):
        enqueue(*args)
        raise KeyboardInterrupt

    source = np.arange(1 << 20, dtype=np.int32)
    reference = weakref.ref(source)
    interrupted.__name__ = "cuMemcpyHtoDAsync"
    with monkeypatch.context() as patch:
        patch.setattr(memory.cu, "cuMemcpyHtoDAsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            device.from_host(source)
    del source
    gc.collect()
    assert reference() is not None
    # Transfers run in order, so a later one shows that the interrupted one has finished.
    device.zeros((1,), "int32")
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_device_array_round_trip_keeps_bits(device: Device, dtype: str) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 256, 6 * itemsize(dtype), np.uint8)
    host = bits.view(numpy_dtype(dtype)).reshape(2, 3)
    array = device.from_host(host, dtype)
    assert (array.shape, array.dtype, array.nbytes) == ((2, 3), dtype, host.nbytes)
    assert array.to_host().tobytes() == host.tobytes()


def test_bfloat16_rounds_to_nearest_even() -> None:
    """The conversion to bfloat16 agrees with bfloat16_oracle() and keeps NaN and infinity."""
    rng = np.random.default_rng(2)
    values = rng.integers(0, 1 << 32, 4000, np.uint32).view(np.float32)
    ties = (rng.integers(0, 1 << 16, 500, np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([values, ties, np.array([0.0, -0.0, 3.3895314e38, 1e-45], np.float32)])
    finite = values[np.isfinite(values)]
    rounded = from_float32(finite, "bfloat16")
    assert rounded.tolist() == [bfloat16_oracle(v) for v in finite]
    special = from_float32(np.array([np.nan, np.inf, -np.inf], np.float32), "bfloat16")
    back = to_float32(special, "bfloat16")
    assert np.isnan(back[0]) and back[1] == np.inf and back[2] == -np.inf


def test_e4m3_rounds_to_nearest_even() -> None:
    """In the conversion to float8 E4M3, magnitudes above 464, infinity and NaN become NaN."""
    numbers = np.arange(127)  # exponent and mantissa, 7 bits
    fraction = np.where(numbers < 8, numbers % 8, 8 + numbers % 8)
    exponent = numbers // 8
    values = np.ldexp(fraction, np.maximum(exponent, 1) - 10).astype(np.float32)
    every = np.concatenate([values, -values])
    codes = np.concatenate([numbers, numbers + 128])
    assert from_float32(every, E4M3).tolist() == codes.tolist()
    assert to_float32(codes.astype(np.uint8), E4M3).tobytes() == every.tobytes()
    middle = np.append((values[:-1] + values[1:]) / 2, np.float32(464))
    even = numbers + numbers % 2
    for sign in (1, -1):
        for direction, expected in ((0, numbers), (None, even), (1e3, numbers + 1)):
            near = middle if direction is None else np.nextafter(middle, np.float32(direction))
            assert (from_float32(sign * near, E4M3) & 127).tolist() == expected.tolist()
    odd = np.array([np.nan, -np.nan, np.inf, 1e30, 1e-45, 0.0], np.float32)
    assert (from_float32(odd, E4M3) & 127).tolist() == [127, 127, 127, 127, 0, 0]
    assert np.isnan(to_float32(np.array([127, 255], np.uint8), E4M3)).all()


def test_float16_conversion_matches_numpy() -> None:
    """Values beyond the range of the dtype become infinity, without a warning of NumPy."""
    values = np.array([1.0, 65504.0, 1e6, 6e-8, -2.5], np.float32)
    expected = np.array([1, 65504, np.inf, 6e-8, -2.5], np.float16)
    assert np.array_equal(from_float32(values, "float16"), expected)
    assert to_float32(expected, "float16").dtype == np.float32


def test_from_host_and_copy_from_round_float32(device: Device) -> None:
    values = np.array([[1.0, 1.00390625, 3.14159]], np.float32)
    array = device.from_host(values, "bfloat16")
    assert np.array_equal(array.to_host(), from_float32(values, "bfloat16"))
    array.copy_from(values * 2)
    assert np.array_equal(array.to_host(), from_float32(values * 2, "bfloat16"))
    array = device.from_host(values, E4M3)
    assert array.to_host().tolist() == [[0x38, 0x38, 0x45]]


def test_device_array_views_share_memory(device: Device) -> None:
    host = np.arange(24, dtype=np.int32).reshape(4, 3, 2)
    array = device.from_host(host)
    assert np.array_equal(array[1].to_host(), host[1])
    assert np.array_equal(array[-1][2].to_host(), host[-1, 2])
    assert np.array_equal(array[1:3].to_host(), host[1:3])
    assert np.array_equal(array.reshape(6, -1).to_host(), host.reshape(6, -1))
    assert [row.to_host().tolist() for row in array] == host.tolist()
    assert array[2].ptr - array.ptr == 2 * 6 * 4
    array[2].copy_from(np.full((3, 2), 7, np.int32))
    host[2] = 7
    assert np.array_equal(array.to_host(), host)


def test_device_array_fill_sets_bytes_of_view(device: Device) -> None:
    array = device.zeros((4, 4), "int32")
    assert not array.to_host().any()
    array[1].fill(0x11)
    expected = np.zeros((4, 4), np.int32)
    expected[1] = 0x11111111
    assert np.array_equal(array.to_host(), expected)


def test_device_memory_lives_as_long_as_last_view(device: Device) -> None:
    wait_until_freed()
    before = native.live_resources()
    array = device.from_host(np.arange(8, dtype=np.int32))
    view = array[2:4]
    del array
    gc.collect()
    assert view.to_host().tolist() == [2, 3]
    assert native.live_resources() == before + 1
    del view
    assert _native.flush(10)
    assert native.live_resources() == before


def test_device_array_close_frees_memory_and_rejects_use(device: Device) -> None:
    wait_until_freed()
    before = native.live_resources()
    array = device.zeros((4,), "int32")
    view = array[1:]
    assert_raises(ShapeError, {"view": view.close})
    array.close()
    assert native.live_resources() == before
    for user in (array, view):
        assert_raises(DeviceError, {"closed": user.to_host})


def test_pinned_array_is_zeroed_and_outlived_by_numpy_view(device: Device) -> None:
    pinned = device.pinned((2, 5), "uint64")
    assert not pinned.array.any() and pinned.array.ctypes.data == pinned.host_ptr
    assert pinned.ptr and pinned.nbytes == 80
    pinned.array[1, 4] = 9
    view = pinned.array
    pinned.close()
    del pinned
    gc.collect()
    assert _native.flush(10)
    assert view[1, 4] == 9
    view[0, 0] = 1


@pytest.mark.parametrize(
    "use",
    [
        lambda pinned: pinned.array,
        lambda pinned: pinned.buffer,
        lambda pinned: pinned.host_ptr,
        lambda pinned: pinned.view(0, (1,)),
        np.asarray,
        np.from_dlpack,
    ],
)
def test_closed_pinned_array_raises_error(device: Device, use: Callable) -> None:
    """A closed array is not an empty one, in which a program would find no data."""
    pinned = device.pinned((2, 5), "uint64")
    view = pinned.view(0, (5,))
    for array in (view, pinned):
        array.close()
        array.close()
        assert_raises(DeviceError, {"is closed": partial(use, array)})


def test_cuda_array_interface_describes_memory(device: Device) -> None:
    array = device.zeros((3, 2), "float16")
    interface = array.__cuda_array_interface__
    assert interface["shape"] == (3, 2) and interface["typestr"] == "<f2"
    assert interface["data"] == (array.ptr, False) and interface["version"] == 3
    assert array.__dlpack_device__() == (2, device.ordinal)


@pytest.mark.cuda
def test_dlpack_and_array_interface_share_memory_with_cupy(device: Device) -> None:
    cupy = pytest.importorskip("cupy")
    array = device.from_host(np.arange(6, dtype=np.float32).reshape(2, 3))
    for other in (cupy.from_dlpack(array), cupy.asarray(array)):
        assert other.data.ptr == array.ptr and other.shape == (2, 3)
        other += 1
    cupy.cuda.get_current_stream().synchronize()
    assert array.to_host().tolist() == [[2, 3, 4], [5, 6, 7]]


FIELDS = {"mask": ("int32", (3, 5)), "count": ("int32", ()), "wide": ("uint64", (9,))}


def test_pinned_field_rows_start_on_cache_lines(device: Device) -> None:
    slots = PinnedSlots(device, 4, FIELDS)
    for name, (dtype, shape) in FIELDS.items():
        field = slots[name]
        assert field.array.shape == (4, *shape) and field.dtype == dtype
        step = field.stride * np.dtype(dtype).itemsize
        assert step % 64 == 0 and step >= field.array[0].nbytes
        assert field.ptr % 64 == 0 and field.host_ptr % 64 == 0
        assert field.array.ctypes.data == field.host_ptr
        assert field.array.strides[0] == step
    slots["mask"].array[2] = -1
    for name in FIELDS:
        array = slots[name].array
        for slot in range(4):
            expected = -1 if (name, slot) == ("mask", 2) else 0
            assert (array[slot].astype(np.int64) == expected).all()


def test_pinned_array_is_backed_by_ctypes_buffer(device: Device) -> None:
    """The ctypes buffer, the NumPy view and views of the array share the pinned memory."""
    pinned = device.pinned((3, 4), "int32")
    buffer = pinned.buffer
    assert ctypes.addressof(buffer) == pinned.host_ptr and len(buffer) == pinned.nbytes
    assert pinned.array.__array_interface__["data"] == (pinned.host_ptr, False)
    row = pinned.view(4, (4,))
    assert ctypes.addressof(row.buffer) == row.host_ptr == pinned.host_ptr + 16
    ctypes.c_int32.from_buffer(row.buffer, 8).value = 7
    assert pinned.array.tolist() == [[0] * 4, [0, 0, 7, 0], [0] * 4]
    wait_until_freed()
    resources = native.live_resources()
    del row, pinned
    assert _native.flush(10) and native.live_resources() == resources
    buffer[0] = 3
    del buffer
    assert _native.flush(10) and native.live_resources() == resources - 1


class Committed(ctypes.Structure):
    _fields_ = (("replay", ctypes.c_int32), ("count", ctypes.c_int32))


def test_pinned_field_gives_row_as_ctypes_object(device: Device) -> None:
    """A row is available as an array, a scalar or a structure that shares the memory."""
    fields = {**FIELDS, "half": ("bfloat16", (2,)), "committed": ("int32", (6,))}
    slots = PinnedSlots(device, 4, fields)
    row = slots["mask"].ctypes(2)
    assert ctypes.addressof(row) == slots["mask"].array[2].ctypes.data
    row[1][3] = -5
    assert slots["mask"].array[2, 1, 3] == -5
    count = slots["count"].ctypes(1)
    assert isinstance(count, ctypes.c_int32)
    count.value = 9
    assert slots["count"].array.tolist() == [0, 9, 0, 0]
    assert isinstance(slots["half"].ctypes(0)[1], int)
    committed = slots["committed"].ctypes(3, Committed)
    committed.replay, committed.count = 11, 2
    assert slots["committed"].array[3].tolist() == [11, 2, 0, 0, 0, 0]
    layout = np.dtype([("replay", np.int32), ("ids", np.int32, (5,))])
    record = slots["committed"].ctypes(3, layout)
    assert (record.replay, list(record.ids)) == (11, [2, 0, 0, 0, 0])
    slots.close()
    committed.count = 5  # the ctypes object keeps the memory alive
    assert committed.count == record.ids[0] == 5


def test_ring_entry_is_available_as_ctypes_object(device: Device) -> None:
    ring = Ring(device, 3, {"token": ("int32", (4,))})
    tokens = ring["token"].ctypes(ring.reserve(5))
    tokens[:] = [1, 2, 3, 4]
    ring.publish(5)
    ring.synchronize(5, timeout_s=1)
    assert ring.row("token", 5).tolist() == [1, 2, 3, 4]


def test_ring_rejects_overwriting_entry_in_use(device: Device) -> None:
    ring = Ring(device, 3, {"token": ("int32", (4,))})
    for replay in (1, 2, 3):
        ring.row("token", replay)[:] = replay
        ring.publish(replay)
    assert_raises(OptionError, {"replay 1 ": lambda: ring.publish(4)})
    assert ring.row("token", 1).tolist() == [1] * 4
    ring.synchronize(1, timeout_s=1)
    ring.release(1)
    ring.publish(4)
    ring.synchronize(4, timeout_s=1)
    assert_raises(
        OptionError,
        {
            "replay 4": lambda: ring.release(1),
            "begin with 1": lambda: ring.publish(0),
            r"less than 2\*\*32": lambda: ring.publish(2**32),
        },
    )


def test_ring_continues_after_replay_numbers_exceed_32_bits(device: Device) -> None:
    """A stamp contains the lower 32 bits of a replay number."""
    ring = Ring(device, 2, {"token": ("int32", (1,))})
    for replay in (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 4):
        ring.row("token", replay)[:] = 7
        ring.publish(replay)
        assert ring.wait(replay, 0.0) and not ring.wait(replay + 2, 0.0)
        assert ring.stamp.array[replay % 2, 0] == np.int64(replay).astype(np.int32)
        ring.release(replay)


def test_ring_wait_queries_stream_while_it_polls(device: Device, stream: Stream) -> None:
    """On some platforms, the device's stores reach the host only when the driver is called."""
    if device.kind != "soft":
        pytest.skip("only the soft device counts calls")

    def queries() -> int:
        return softstats.counters()["calls"].get("cuStreamQuery", 0)

    ring = Ring(device, 2, {"token": ("int32", (1,))})
    before = queries()
    assert not ring.wait(1, 0.05)
    assert queries() == before
    assert not ring.wait(1, 0.05, stream=stream.handle)
    assert queries() <= before + 51
    before = queries()

    def publish() -> None:
        wait_until(lambda: queries() >= before + 2)
        ring.publish(1)

    writer = threading.Thread(target=publish)
    writer.start()
    assert ring.wait(1, LIMIT_S, stream=stream.handle)
    writer.join()


def test_ring_synchronize_waits_for_stamp(device: Device) -> None:
    """A wait for a ring entry does not end because of an older replay's stamp in that entry."""
    ring = Ring(device, 2, {"token": ("int32", (1,))})
    ring.publish(1)
    ring.release(1)
    with pytest.raises(DeadlineError, match="stamp is 1"):
        ring.synchronize(3, timeout_s=0.02)

    def write() -> None:
        time.sleep(0.05)
        ring.row("token", 3)[:] = 33
        ring.publish(3)

    writer = threading.Thread(target=write)
    writer.start()
    ring.synchronize(3, timeout_s=30)
    assert ring.row("token", 3)[0] == 33
    writer.join()
