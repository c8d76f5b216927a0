"""Pinned slots and rings."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from graft.cudagraph.device import Device
from graft.cudagraph.errors import DeadlineError, OptionError, ShapeError
from graft.cudagraph.pinned import PinnedSlots, Ring

FIELDS = {"mask": ("int32", (3, 5)), "count": ("int32", ()), "wide": ("uint64", (9,))}


def test_rows_start_on_cache_lines(device: Device) -> None:
    """Every slot's row of every field is 64-byte aligned and a multiple of 64 bytes apart."""
    slots = PinnedSlots(device, 4, FIELDS)
    for name, (dtype, shape) in FIELDS.items():
        field = slots.field(name)
        assert field.array.shape == (4, *shape) and field.dtype == dtype
        step = field.stride * np.dtype(dtype).itemsize
        assert step % 64 == 0 and step >= field.array[0].nbytes
        assert field.ptr % 64 == 0 and field.host_ptr % 64 == 0
        assert field.array.ctypes.data == field.host_ptr
        assert field.array.strides[0] == step


def test_slots_do_not_overlap(device: Device) -> None:
    """Writing one slot of one field changes nothing else."""
    slots = PinnedSlots(device, 4, FIELDS)
    slots.field("mask").array[2] = -1
    for name in FIELDS:
        array = slots.field(name).array
        for slot in range(4):
            expected = -1 if (name, slot) == ("mask", 2) else 0
            assert (array[slot].astype(np.int64) == expected).all()


def test_wrong_fields_are_named(device: Device) -> None:
    """Unknown names, dtypes and shapes are refused."""
    slots = PinnedSlots(device, 1, FIELDS)
    with pytest.raises(OptionError, match="'masks'"):
        slots.field("masks")
    with pytest.raises(ShapeError, match="'bad'"):
        PinnedSlots(device, 1, {"bad": ("int32", (0,))})
    with pytest.raises(OptionError, match="slots"):
        PinnedSlots(device, 0, FIELDS)
    with pytest.raises(OptionError, match="stamp"):
        Ring(device, 2, {"stamp": ("int32", (1,))})


def test_ring_never_laps(device: Device) -> None:
    """An entry that was published and not consumed is protected from a later replay."""
    ring = Ring(device, 3, {"token": ("int32", (4,))})
    for replay in (1, 2, 3):
        ring.row("token", replay)[:] = replay
        ring.publish(replay)
    with pytest.raises(OptionError, match="replay 1 "):
        ring.publish(4)
    assert ring.row("token", 1).tolist() == [1] * 4
    ring.poll(1, timeout_s=1)
    ring.consumed(1)
    ring.publish(4)
    ring.poll(4, timeout_s=1)
    with pytest.raises(OptionError, match="replay 4"):
        ring.consumed(1)
    with pytest.raises(OptionError, match="2\\*\\*31"):
        ring.publish(0)


def test_poll_waits_for_the_stamp(device: Device) -> None:
    """poll() returns once another thread stamps the entry, and not by an older stamp."""
    ring = Ring(device, 2, {"token": ("int32", (1,))})
    ring.publish(1)
    ring.consumed(1)
    with pytest.raises(DeadlineError, match="entry has 1"):
        ring.poll(3, timeout_s=0.02)

    def write() -> None:
        time.sleep(0.05)
        ring.row("token", 3)[:] = 33
        ring.publish(3)

    writer = threading.Thread(target=write)
    writer.start()
    ring.poll(3, timeout_s=30)
    assert ring.row("token", 3)[0] == 33
    writer.join()


def test_device_stamps_are_polled(device: Device, stream) -> None:
    """A stamp that a kernel writes after its data, with release order, ends a poll."""
    from graft.cudagraph.kernels import load_text
    from graft.cudagraph.lanes import StreamLane

    text = """
extern "C" __global__ void publish(int* data, int data_stride, int* stamp, int stamp_stride,
                                   int entries, int replay) {
  int entry = replay % entries;
  data[entry * data_stride] = replay * 10;
  __threadfence_system();
  *(volatile int*)(stamp + entry * stamp_stride) = replay;
}
"""
    kernel = load_text(device, text, "publish.cu")["publish"]
    ring = Ring(device, 4, {"data": ("int32", (1,))})
    lane = StreamLane(stream)
    for replay in range(1, 11):
        ring.reserve(replay)
        data, stamp = ring.field("data"), ring.stamp
        lane.kernel(kernel, 1, 1, [data, data.stride, stamp, stamp.stride, ring.entries, replay])
        ring.poll(replay, timeout_s=30)
        assert ring.row("data", replay)[0] == replay * 10
        ring.consumed(replay)
    stream.synchronize()
