"""The few facts of a 64-bit little-endian ELF file that the build step checks."""

from __future__ import annotations

import re
import struct

_SHT_SYMTAB = 2
_STT_OBJECT = 1
_STT_TLS = 6
_ALLOWED = re.compile(r"_ZZ|_ZGVZZ|_ZL\d+softcuda_|softcuda_|completed\.")


def writable_globals(image: bytes) -> list[str]:
    """Return the names of writable objects that are neither block-shared nor the shim's own.

    Block-shared variables are function-local statics, whose mangled names start with ``_ZZ``.
    """
    (section_offset,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, _ = struct.unpack_from("<HHH", image, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", image, section_offset + index * entry_size)
        for index in range(count)
    ]
    names_at = sections[struct.unpack_from("<H", image, 0x3E)[0]][4]
    writable = {
        index
        for index, section in enumerate(sections)
        if _text(image, names_at + section[0]).startswith((".data", ".bss", ".tdata", ".tbss"))
        and not _text(image, names_at + section[0]).startswith(".data.rel.ro")
    }
    found: list[str] = []
    for section in sections:
        if section[1] != _SHT_SYMTAB:
            continue
        strings = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], section[9]):
            name_at, info, _, index, _, size = struct.unpack_from("<IBBHQQ", image, at)
            if index not in writable or size == 0 or info & 15 not in (_STT_OBJECT, _STT_TLS):
                continue
            name = _text(image, strings + name_at)
            if not _ALLOWED.match(name):
                found.append(name)
    return sorted(found)


def _text(image: bytes, at: int) -> str:
    return image[at : image.index(b"\0", at)].decode()
