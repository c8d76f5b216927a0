"""PTX modules for fuzzing: valid kernels, and mutants of them that differ in a few places."""

from __future__ import annotations

import random
import re

import test_ptx
import test_ptx_barriers
import test_ptx_modules
import test_ptx_races
from ptx_util import module

MMA = """
    mad.wide.u32 %rd4, %r0, 16, %rd0;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd4];
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r20, %r21, %r22, %r23},
        {%r10, %r11, %r12, %r13}, {%r10, %r11}, {%r10, %r11, %r12, %r13};
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r20, %r21, %r22, %r23},
        {%r10, %r11, %r12, %r13}, {%r10, %r11}, {%r20, %r21, %r22, %r23};
    st.global.v4.b32 [%rd4], {%r20, %r21, %r22, %r23};
"""
MATRICES = """
    .shared .align 16 .b8 tile[512];
    mov.u32 %r5, tile;  and.b32 %r6, %r0, 31;  mad.lo.u32 %r6, %r6, 16, %r5;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r6];
    movmatrix.sync.aligned.m8n8.trans.b16 %r10, %r10;
    stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%r6], {%r10, %r11};
    ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r14}, [%r6+16];
"""
WARPS = """
    and.b32 %r5, %r0, 31;  setp.lt.u32 %p1, %r5, 20;
    shfl.sync.idx.b32 %r6, %r0, 3, 31, -1;  shfl.sync.up.b32 %r7|%p2, %r6, %r5, 0, -1;
    vote.sync.ballot.b32 %r8, %p1, -1;  match.any.sync.b32 %r9, %r7, -1;
    redux.sync.max.u32 %r10, %r9, -1;  @%p1 bra LOW;
    bar.warp.sync 0xfff00000;  activemask.b32 %r11;  bra HIGH;
LOW:
    elect.sync %r12|%p3, 0xfffff;
HIGH:
    and.b32 %r13, %r5, 3;  brx.idx %r13, LIST;
A:  add.u32 %r10, %r10, 1;  bra END;
B:  cvt.rn.f32.u32 %f1, %r10;  div.rn.f32 %f2, %f1, %f1;  bra END;
C:  div.u32 %r10, %r10, %r13;  bfe.u32 %r10, %r10, 3, 9;
END:
    atom.global.add.u32 %r14, [%rd1+8], %r10;  red.global.max.s32 [%rd1+16], %r10;
    atom.global.cas.b64 %rd6, [%rd1+24], %rd0, %rd1;  bar.red.popc.u32 %r15, 0, %p1;
    LIST: .branchtargets A, B, C, A;
"""
STORE = "\nmad.wide.u32 %rd9, %r0, 4, %rd1;\nst.global.u32 [%rd9], %r8;"

#: Valid modules. Their kernel k may read and write its parameters, which are pointers.
MODULES = [
    module(test_ptx.EXCHANGE.format(barrier="bar.sync 0;")),
    module(
        test_ptx.COPY.format(wait="cp.async.wait_group 0;", barrier="bar.sync 0;", other=1) + STORE
    ),
    module(MMA + STORE),
    module(MATRICES + STORE),
    module(WARPS + STORE),
    module(
        test_ptx_barriers.EXCHANGE.format(
            arrive=test_ptx_barriers.ARRIVE, wait=test_ptx_barriers.WAITS["parity"]
        )
    ),
    module(test_ptx_races.ORDERED["fences"].replace(" 3;", " 1;")),
    *(
        module(body, declarations=test_ptx_modules.FUNCTIONS)
        for body in test_ptx_modules.INDIRECT.values()
    ),
]

VALUES = [str(n) for n in (0, 1, -1, 2, 3, 4, 7, 8, 15, 31, 32, 33, 64, 255, 1023, 4096)]
VALUES += [str(2**n - m) for n in (31, 32, 33, 63) for m in (0, 1)]
REGISTER = re.compile(r"%(?:rd|r|p|f|h)\d+")
NUMBER = re.compile(r"(?<![%\w.$])-?\d+(?![\w.])")


def _replace_match(pattern: re.Pattern[str], line: str, rng: random.Random, new: str) -> str:
    found = list(pattern.finditer(line))
    if not found:
        return line
    match = rng.choice(found)
    return line[: match.start()] + new + line[match.end() :]


def _swap_register(lines: list[str], at: int, rng: random.Random) -> None:
    found = REGISTER.findall(lines[at])
    if not found:
        return
    old = rng.choice(found)
    kind = old.rstrip("0123456789")
    others = [name for name in REGISTER.findall("\n".join(lines)) if name.startswith(kind)]
    pattern = re.compile(re.escape(old) + r"(?!\d)")
    lines[at] = _replace_match(pattern, lines[at], rng, rng.choice(others))


def _change_number(lines: list[str], at: int, rng: random.Random) -> None:
    lines[at] = _replace_match(NUMBER, lines[at], rng, rng.choice(VALUES))


def _change_offset(lines: list[str], at: int, rng: random.Random) -> None:
    lines[at] = re.sub(
        r"\[(%\w+)(?:\+\d+)?\]", lambda m: f"[{m[1]}+{rng.choice(VALUES)}]", lines[at], count=1
    )


def _delete_line(lines: list[str], at: int, rng: random.Random) -> None:
    del lines[at]


def _repeat_line(lines: list[str], at: int, rng: random.Random) -> None:
    lines.insert(rng.randrange(at, len(lines)), lines[at])


def _swap_lines(lines: list[str], at: int, rng: random.Random) -> None:
    other = rng.randrange(at, len(lines))
    lines[at], lines[other] = lines[other], lines[at]


MUTATIONS = [
    _swap_register,
    _change_number,
    _change_offset,
    _delete_line,
    _repeat_line,
    _swap_lines,
]


def mutants(count: int, seed: int) -> list[str]:
    """Return mutants of the modules, most of which are valid PTX."""
    rng = random.Random(seed)
    result = []
    for i in range(count):
        # One instruction per line, so that a mutation changes one of them.
        text = MODULES[i % len(MODULES)].replace(";", ";\n")
        lines = [line for line in text.splitlines() if line.strip()]
        # After the declarations of registers and the loads of parameters.
        body = max(k for k, line in enumerate(lines) if ".visible .entry" in line) + 14
        for _ in range(rng.randrange(1, 4)):
            rng.choice(MUTATIONS)(lines, rng.randrange(body, len(lines) - 2), rng)
        result.append("\n".join(lines) + "\n")
    return result
