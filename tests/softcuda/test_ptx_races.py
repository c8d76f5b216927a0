"""Race detection in global memory and programmatic edges, on hand-written PTX."""

from __future__ import annotations

import pytest
import softcuda_util as util
from ptx_util import module
from test_ptx import outcome

pytestmark = pytest.mark.ptx

#: Thread 0 of each block writes a part, and the last block to arrive at the counter %rd1 adds the
#: parts up. {release}, {atomic}, {acquire} and {barrier} order the parts before the sum.
LAST_BLOCK = """
    .shared .align 4 .b8 last[4];
    setp.ne.u32 %p1, %r0, 32;
    mad.wide.u32 %rd4, %r1, 4, %rd0;  add.u32 %r5, %r1, 100;
    @!%p1 st.global.u32 [%rd4], %r5;
    {barrier}
    setp.ne.u32 %p2, %r0, 0;  @%p2 bra MEET;
    {release}
    {atomic} %r6, [%rd1], 3;
    {acquire}
    mov.u32 %r7, last;  st.shared.u32 [%r7], %r6;
MEET:
    bar.sync 0;
    mov.u32 %r7, last;  ld.shared.u32 %r6, [%r7];
    setp.ne.u32 %p3, %r6, 3;  @%p3 bra DONE;
    @%p2 bra DONE;
    ld.global.v4.u32 {{%r8, %r9, %r10, %r11}}, [%rd0];
    add.u32 %r8, %r8, %r9;  add.u32 %r8, %r8, %r10;  add.u32 %r8, %r8, %r11;
    st.global.u32 [%rd1+4], %r8;
DONE:
"""
FENCE = "membar.gl;"
INC = "atom.global.inc.u32"
BARRIER = "bar.sync 0;"

ORDERED = {
    "fences": LAST_BLOCK.format(release=FENCE, atomic=INC, acquire=FENCE, barrier=BARRIER),
    "acq_rel": LAST_BLOCK.format(
        release="", atomic="atom.acq_rel.gpu.global.inc.u32", acquire="", barrier=BARRIER
    ),
    "fence before barrier": LAST_BLOCK.format(
        release="", atomic=INC, acquire=FENCE, barrier="fence.acq_rel.gpu; bar.sync 0;"
    ),
}
RACES = {
    "no release": (FENCE, "", INC, BARRIER),
    "no acquire": ("", FENCE, INC, BARRIER),
    "no barrier": (FENCE, FENCE, INC, ""),
    "scope of a block": ("membar.cta;", "membar.cta;", INC, BARRIER),
    "atomic of a block": (FENCE, FENCE, "atom.relaxed.cta.global.inc.u32", BARRIER),
    "release only": ("", "", "atom.release.gpu.global.inc.u32", BARRIER),
}


@pytest.mark.parametrize("body", ORDERED.values(), ids=ORDERED)
def test_racecheck_accepts_ticket_counter(body):
    text = outcome(body, block=64, grid=4, SOFTCUDA_RACECHECK="1")
    assert text.startswith("SUCCESS"), text
    assert "[0, 406," in text  # 100 + 101 + 102 + 103


@pytest.mark.parametrize("case", RACES.values(), ids=RACES)
def test_racecheck_reports_unordered_blocks(case):
    acquire, release, atomic, barrier = case
    body = LAST_BLOCK.format(release=release, atomic=atomic, acquire=acquire, barrier=barrier)
    text = outcome(body, block=64, grid=4, SOFTCUDA_RACECHECK="1")
    assert "race in global memory" in text
    # Both accesses are named, with their lines.
    assert text.count("PTX line") == 2


CONFLICTS = {
    "two writes": ("st.global.u32 [%rd1], %r1;", "st.global.u32"),
    "atomic and write": (
        """
        setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE; setp.eq.u32 %p2, %r1, 0;
        @%p2 st.global.u32 [%rd1], 1; @!%p2 red.global.add.u32 [%rd1], 1;
    DONE:
        """,
        "red.global.add",
    ),
    "warps of one block": (
        """
        shr.u32 %r5, %r0, 5; setp.eq.u32 %p1, %r5, %r1;
        @%p1 st.global.u32 [%rd1], %r1; @!%p1 ld.global.u32 %r6, [%rd1];
        """,
        "ld.global.u32",
    ),
}


@pytest.mark.parametrize("case", CONFLICTS.values(), ids=CONFLICTS)
def test_racecheck_reports_conflicting_accesses(case):
    body, words = case
    text = outcome(body, block=64, grid=2, SOFTCUDA_RACECHECK="1")
    assert "race in global memory" in text and words in text
    assert outcome(body, block=64, grid=2).startswith("SUCCESS")


NO_CONFLICT = {
    "atomics": "red.global.add.u32 [%rd1], 1; atom.global.max.u32 %r5, [%rd1], %r0;",
    "bytes of a word": (
        "cvt.u64.u32 %rd5, %r1; add.u64 %rd5, %rd5, %rd1; setp.eq.u32 %p1, %r0, 0;"
        "cvt.u16.u32 %h1, %r1; @%p1 st.global.u8 [%rd5], %h1; @%p1 ld.global.u8 %h2, [%rd5];"
    ),
    "volatile flag": """
        setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE;
        setp.ne.u32 %p2, %r1, 0; @%p2 bra WAIT;
        st.global.u32 [%rd1+8], 77; membar.gl; st.volatile.global.u32 [%rd1], 1; bra DONE;
    WAIT: ld.volatile.global.u32 %r5, [%rd1]; setp.eq.u32 %p3, %r5, 0; @%p3 bra WAIT;
        membar.gl; ld.global.u32 %r6, [%rd1+8]; st.global.u32 [%rd1+12], %r6;
    DONE:
    """,
    "release and acquire": """
        setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE;
        setp.ne.u32 %p2, %r1, 0; @%p2 bra WAIT;
        st.global.u32 [%rd1+8], 77; st.release.gpu.global.u32 [%rd1], 1; bra DONE;
    WAIT: ld.acquire.gpu.global.u32 %r5, [%rd1]; setp.eq.u32 %p3, %r5, 0; @%p3 bra WAIT;
        ld.global.u32 %r6, [%rd1+8]; st.global.u32 [%rd1+12], %r6;
    DONE:
    """,
}


@pytest.mark.parametrize("body", NO_CONFLICT.values(), ids=NO_CONFLICT)
def test_racecheck_accepts_ordered_and_atomic_accesses(body):
    text = outcome(body, block=64, grid=2, SOFTCUDA_RACECHECK="1")
    assert text.startswith("SUCCESS"), text


#: Thread 0 of each block publishes with a counter, and then reads what another block published.
COUNTER = """
    setp.ne.u32 %p1, %r0, 0;  @%p1 bra DONE;
    membar.gl;
    atom.global.add.u32 %r5, [%rd1], 1;
    membar.gl;
DONE:
"""
ORDERED_BLOCKS = """
    setp.ne.u32 %p1, %r0, 0;  @%p1 bra DONE;
WAIT:
    ld.acquire.gpu.global.u32 %r6, [%rd1];  setp.lt.u32 %p2, %r6, %r1;  @%p2 bra WAIT;
    st.global.u32 [%rd1+4], %r5;
    membar.gl;
    atom.global.add.u32 %r5, [%rd1], 1;
DONE:
"""
#: Reads words of 1 KiB pages: more memory than race detection tracks.
PAGES = "mul.wide.u32 %rd5, %r1, 1024; add.u64 %rd5, %rd5, %rd0; ld.global.u32 %r5, [%rd5];"
LARGE = """
text = {text!r}
k = s.cuModuleGetFunction(s.cuModuleLoadData(text.encode() + b"\\0"), b"k")
s.launch(k, {grid}, 32, s.alloc({nbytes}), s.put(np.zeros(64, np.uint32)))
print(code(d.cuCtxSynchronize()))
"""


def large_launch(body: str, grid: int, nbytes: int = 4096) -> tuple[str, str]:
    """Return the error code and the standard error output of a launch with race detection."""
    text = LARGE.format(text=module(body, 2), grid=grid, nbytes=nbytes)
    done = util.run_child(text, SOFTCUDA_RACECHECK="1")
    return done.stdout.strip(), done.stderr


def test_racecheck_bounds_memory_of_published_words():
    """If too many blocks publish, the rest of the launch is not checked, and a message says so."""
    assert large_launch(COUNTER, 200) == ("SUCCESS", "")
    result, text = large_launch(COUNTER, 2100)
    assert result == "SUCCESS" and "more than 2048 blocks published in a word" in text
    assert "kernel 'k'" in text and "did not check" in text
    # Each block waits for its predecessor before it stores. No block is reported, before or after
    # the limit is reached.
    result, text = large_launch(ORDERED_BLOCKS, 2100)
    assert result == "SUCCESS" and "did not check" in text


def test_racecheck_prints_number_of_accesses_beyond_its_memory():
    result, text = large_launch(PAGES, 66000, 66000 * 1024)
    assert result == "SUCCESS" and "accesses more than 64 MB" in text
    assert f"did not check {(66000 - 65536) * 32} accesses" in text


# ---- programmatic edges ------------------------------------------------------------------------

PRODUCER = "mad.wide.u32 %rd5, %r0, 4, %rd1; st.global.u32 [%rd5], %r0;"
CONSUMER = """
    {first}
    mad.wide.u32 %rd5, %r0, 4, %rd1; ld.global.u32 %r5, [%rd5];
    {second}
    mad.wide.u32 %rd6, %r0, 4, %rd0; st.global.u32 [%rd6], %r5;
"""

EDGE = """
def kernel(text):
    return s.cuModuleGetFunction(s.cuModuleLoadData(text.encode() + b"\\0"), b"k")
a = s.put(np.zeros(1024, np.uint32))
out = s.put(np.zeros(64, np.uint32))
graph = s.cuGraphCreate(0)
edges = []
previous = None
for text in ({producer!r}, {consumer!r}):
    params, keep = s.kernel_params(kernel(text), 1, 32, a, out)
    node = s.cuGraphAddKernelNode(graph, [], 0, params)
    if previous is not None:
        edge = d.CUgraphEdgeData()
        edge.from_port = {port}
        edge.type = d.CUgraphDependencyType({port})
        s.cuGraphAddDependencies(graph, [previous], [node], [edge], 1)
    previous = node
executable = s.cuGraphInstantiate(graph, 0)
stream = s.stream()
s.cuGraphLaunch(executable, stream)
result = code(d.cuStreamSynchronize(stream))
from graft.cudagraph.driver import softstats
print(result, softstats.error_detail(True))
"""


def edge_outcome(consumer: str, port: int = 1, producer: str = PRODUCER, **env: str) -> str:
    """Run two kernels with an edge between them and return the error code and the fault."""
    text = EDGE.format(producer=module(producer, 2), consumer=module(consumer, 2), port=port)
    done = util.run_child(text, **env)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


WAIT = "griddepcontrol.wait;"


def test_read_before_griddepcontrol_wait_is_a_fault():
    late = CONSUMER.format(first="", second=WAIT)
    text = edge_outcome(late, SOFTCUDA_PTX_SEED="1")
    assert "before griddepcontrol.wait" in text and "preceding kernel 'k'" in text
    assert "ld.global.u32" in text
    # Without the adversarial setting, and over a full edge, kernels are ordered.
    assert edge_outcome(late).startswith("SUCCESS")
    assert edge_outcome(late, port=0, SOFTCUDA_PTX_SEED="1").startswith("SUCCESS")


def test_read_after_griddepcontrol_wait_is_accepted():
    good = CONSUMER.format(first=WAIT, second="")
    assert edge_outcome(good, SOFTCUDA_PTX_SEED="1").startswith("SUCCESS")
    # One thread waits, and the others pass a barrier after it.
    one = "setp.ne.u32 %p1, %r0, 0; @%p1 bra J; griddepcontrol.wait; J: bar.sync 0;"
    text = edge_outcome(CONSUMER.format(first=one, second=""), SOFTCUDA_PTX_SEED="1")
    assert text.startswith("SUCCESS")


def test_write_before_griddepcontrol_wait_to_memory_that_is_read_is_a_fault():
    """The preceding kernel may read the memory until griddepcontrol.wait returns."""
    consumer = "{} mad.wide.u32 %rd5, %r0, 4, %rd0; st.global.u32 [%rd5], %r0; {}"
    reader = CONSUMER.format(first="", second="").replace("%rd0", "%rd2").replace("%rd1", "%rd0")
    reader = reader.replace("%rd2", "%rd1")
    early, late = consumer.format("", WAIT), consumer.format(WAIT, "")
    text = edge_outcome(early, producer=reader, SOFTCUDA_PTX_SEED="1")
    assert "write to" in text and "preceding kernel 'k'" in text and "reads there" in text
    assert edge_outcome(late, producer=reader, SOFTCUDA_PTX_SEED="1").startswith("SUCCESS")


def test_non_coherent_load_after_griddepcontrol_wait_is_a_fault():
    """The read-only cache may contain the value before the preceding kernel's write."""
    load = CONSUMER.format(first=WAIT, second="").replace("ld.global", "ld.global.nc")
    text = edge_outcome(load, SOFTCUDA_PTX_SEED="1")
    assert "ld.nc of" in text and "preceding kernel 'k'" in text
    assert edge_outcome(load, port=0, SOFTCUDA_PTX_SEED="1").startswith("SUCCESS")


NON_COHERENT = """
    mad.wide.u32 %rd5, %r0, 4, %rd0;  mad.wide.u32 %rd6, %r0, 4, %rd1;
    {first}
    {second}
"""
LOAD = "ld.global.nc.u32 %r5, [%rd5];"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("st.global.u32 [%rd5], %r0;", LOAD, "ld.nc of a word that this launch has written"),
        (LOAD, "st.global.u32 [%rd5], %r0;", "this launch has read the word with ld.nc"),
        (LOAD, "st.global.u32 [%rd6], %r5;", "SUCCESS"),
        ("st.global.u32 [%rd5], %r0;", LOAD.replace(".nc", ""), "SUCCESS"),
    ],
)
def test_racecheck_finds_non_coherent_load_of_written_word(first, second, words):
    body = NON_COHERENT.format(first=first, second=second)
    assert words in outcome(body, SOFTCUDA_RACECHECK="1")


STREAM = """
def kernel(text):
    return s.cuModuleGetFunction(s.cuModuleLoadData(text.encode() + b"\\0"), b"k")
producer, consumer = kernel({producer!r}), kernel({consumer!r})
a, out = s.put(np.zeros(1024, np.uint32)), s.put(np.zeros(64, np.uint32))
ids = d.CUlaunchAttributeID
DISABLE_TIMING = 2
def launch(function, stream, serialization=False, event=None):
    config = d.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.hStream = stream
    attributes = []
    if serialization:
        attribute = d.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if event is not None:
        attribute = d.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT
        attribute.value.programmaticEvent.event = event
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    table, keep = s.pack(a, out)
    return d.cuLaunchKernelEx(config, function, table.ctypes.data, 0)
stream, other = s.stream(), s.stream()
{launches}
result = code(d.cuCtxSynchronize())
from graft.cudagraph.driver import softstats
print(result, softstats.error_detail(True))
if result == "SUCCESS": print(s.get(out, 32, np.uint32).tolist() == list(range(32)))
"""
SERIAL = "launch(producer, stream)\nlaunch(consumer, stream, True)"
BY_EVENT = """
event = s.cuEventCreate(DISABLE_TIMING)
s.ok(launch(producer, stream, event=event))
s.cuStreamWaitEvent(other, event, 0)
launch(consumer, other)
"""
CAPTURED = f"""
s.begin(stream)
{SERIAL}
graph = s.cuStreamEndCapture(stream)
nodes, count = s.cuGraphGetNodes(graph, 2)
*_, edges, count = s.cuGraphGetEdges(graph, 1)
print([(edge.from_port, int(edge.type)) for edge in edges])
s.cuGraphLaunch(s.cuGraphInstantiate(graph, 0), stream)
"""


def stream_outcome(launches: str, waits: bool, **env: str) -> str:
    """Return the output of launches whose consumer waits before or after it reads."""
    consumer = CONSUMER.format(**{"first": "", "second": "", "first" if waits else "second": WAIT})
    text = STREAM.format(
        producer=module(PRODUCER, 2), consumer=module(consumer, 2), launches=launches
    )
    done = util.run_child(text, **env)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


#: The legacy copy precedes the producer, and does not wait for the non-blocking streams.
EARLIER_COPY = f"stream = s.cuStreamCreate(0)\ns.get(out, 1, np.uint32)\n{SERIAL}"
UNRELATED_COPY = SERIAL.replace("\n", "\ns.get(out, 1, np.uint32)\n")
PROGRAMMATIC_LAUNCHES = {
    "serialization": SERIAL,
    "event": BY_EVENT,
    "captured": CAPTURED,
    "legacy copy before": EARLIER_COPY,
    "legacy copy between, non-blocking": UNRELATED_COPY,
}


@pytest.mark.parametrize("launches", PROGRAMMATIC_LAUNCHES.values(), ids=PROGRAMMATIC_LAUNCHES)
def test_programmatic_launch_reads_before_griddepcontrol_wait(launches):
    text = stream_outcome(launches, waits=False, SOFTCUDA_PTX_SEED="1")
    assert "before griddepcontrol.wait" in text and "preceding kernel 'k'" in text
    if launches == CAPTURED:
        assert text.startswith("[(1, 1)]")
    assert "True" in stream_outcome(launches, waits=True, SOFTCUDA_PTX_SEED="1")
    assert "True" in stream_outcome(launches, waits=False)


FULL_ORDER = {
    "attribute is 0": "launch(producer, stream)\nlaunch(consumer, stream)",
    "host waits": "launch(producer, stream)\ns.cuStreamSynchronize(stream)\n"
    "launch(consumer, stream, True)",
    "event between": "launch(producer, stream)\ns.cuEventRecord(s.cuEventCreate(0), stream)\n"
    "launch(consumer, stream, True)",
    "host waits for event": BY_EVENT.replace(
        "s.cuStreamWait", "s.cuEventSynchronize(event)\ns.cuStreamWait"
    ),
    "legacy copy between": "stream = s.cuStreamCreate(0)\nlaunch(producer, stream)\n"
    "s.get(out, 1, np.uint32)\nlaunch(consumer, stream, True)",
    "copy between launches of the legacy stream": "launch(producer, 0)\n"
    "s.cuMemsetD8Async(out, 0, 1, s.cuStreamCreate(0))\nlaunch(consumer, 0, True)",
    "legacy copy after event": "stream = s.cuStreamCreate(0)\nother = s.cuStreamCreate(0)\n"
    + BY_EVENT.replace("launch(consumer", "s.get(out, 1, np.uint32)\nlaunch(consumer"),
}


@pytest.mark.parametrize("launches", FULL_ORDER.values(), ids=FULL_ORDER)
def test_launch_after_complete_kernel_may_read_without_wait(launches):
    text = stream_outcome(launches, waits=False, SOFTCUDA_PTX_SEED="1")
    assert "True" in text, text


def test_programmatic_event_must_disable_timing():
    text = stream_outcome(
        "print(code(launch(producer, stream, event=s.cuEventCreate(0))), s.refusal())", True
    )
    assert text.startswith("INVALID_VALUE") and "CU_EVENT_DISABLE_TIMING" in text
