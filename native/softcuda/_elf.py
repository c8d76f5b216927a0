"""The few facts of a 64-bit little-endian ELF file that the build step checks."""

from __future__ import annotations

import re
import struct

_SHT_SYMTAB = 2
_STT_OBJECT = 1
_STT_TLS = 6
_ALLOWED = re.compile(r"_ZZ|_ZGVZZ|_ZL\d+softcuda_|softcuda_|completed\.")


_SHARED = re.compile(r"_ZZ(\d+)(\w+)")


def _writable_objects(image: bytes) -> list[tuple[str, int]]:
    """Return (symbol name, size in bytes) of every object in a writable section."""
    (section_offset,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, _ = struct.unpack_from("<HHH", image, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", image, section_offset + index * entry_size)
        for index in range(count)
    ]
    names_at = sections[struct.unpack_from("<H", image, 0x3E)[0]][4]
    titles = [_text(image, names_at + section[0]) for section in sections]
    writable = {
        index
        for index, title in enumerate(titles)
        if title.startswith((".data", ".bss", ".tdata", ".tbss"))
        and not title.startswith(".data.rel.ro")
    }
    found = []
    for section in sections:
        if section[1] != _SHT_SYMTAB:
            continue
        strings = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], section[9]):
            name_at, info, _, index, _, size = struct.unpack_from("<IBBHQQ", image, at)
            if index in writable and size > 0 and info & 15 in (_STT_OBJECT, _STT_TLS):
                found.append((_text(image, strings + name_at), size))
    return found


def writable_globals(image: bytes) -> list[str]:
    """Return the names of writable objects that are neither block-shared nor the shim's own.

    Block-shared variables are function-local statics, whose mangled names start with ``_ZZ``.
    """
    return sorted(name for name, _ in _writable_objects(image) if not _ALLOWED.match(name))


def shared_bytes(image: bytes) -> dict[str, int]:
    """Return the bytes of block-shared variables each ``extern "C"`` function declares itself."""
    total: dict[str, int] = {}
    for name, size in _writable_objects(image):
        if found := _SHARED.match(name):
            function = found[2][: int(found[1])]
            total[function] = total.get(function, 0) + size
    return total


def _text(image: bytes, at: int) -> str:
    return image[at : image.index(b"\0", at)].decode()
