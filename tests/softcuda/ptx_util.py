"""PTX texts for the tests of the soft device's PTX front end."""

from __future__ import annotations

HEADER = ".version 8.7\n.target sm_90\n.address_size 64\n"

#: Registers of all hand-written kernels.
REGISTERS = """
    .reg .pred %p<8>;
    .reg .b16 %h<16>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<32>;
    .reg .f32 %f<16>;
    .reg .f64 %fd<16>;
"""


def module(body: str, parameters: int = 4, declarations: str = "") -> str:
    """Return a module with the kernel ``k``, whose parameters are pointers ``k_0``, ``k_1``, ...

    Register %rd0 is loaded with k_0, %rd1 with k_1 and so on, %r0 with the thread's index in the
    block and %r1 with the block's index.
    """
    names = ", ".join(f".param .u64 k_{i}" for i in range(parameters))
    loads = "\n".join(f"    ld.param.u64 %rd{i}, [k_{i}];" for i in range(parameters))
    return (
        f"{HEADER}{declarations}\n.visible .entry k({names})\n{{{REGISTERS}{loads}\n"
        f"    mov.u32 %r0, %tid.x;\n    mov.u32 %r1, %ctaid.x;\n{body}\n    ret;\n}}\n"
    )


def elementwise(instruction: str, inputs: tuple[str, ...], output: str) -> str:
    """Return a module whose kernel applies an instruction to elements of up to three arrays.

    Parameters
    ----------
    instruction
        Uses the registers {a}, {b} and {c} and writes {d}.
    inputs
        PTX types of the arrays, such as "u32".
    output
        PTX type of the result.
    """
    register = {"8": "%h", "16": "%h", "32": "%r", "64": "%rd"}
    names = {}
    lines = []
    for i, (letter, kind) in enumerate(zip("abcd", (*inputs, output), strict=False)):
        bits = kind.strip("usbf")
        is_last = i == len(inputs)
        prefix = {"f32": "%f", "f64": "%fd"}.get(kind, register[bits])
        letter = "d" if is_last else letter
        names[letter] = f"{prefix}{10 + i}"
        pointer = f"%rd{20 + i}"
        base = "%rd3" if is_last else f"%rd{i}"
        lines.append(f"    mad.wide.u32 {pointer}, %r0, {max(1, int(bits) // 8)}, {base};")
        if not is_last:
            lines.append(f"    ld.global.{kind} {names[letter]}, [{pointer}];")
    lines.append("    " + instruction.format(**names))
    lines.append(f"    st.global.{output} [%rd{20 + len(inputs)}], {names['d']};")
    return module("\n".join(lines))
