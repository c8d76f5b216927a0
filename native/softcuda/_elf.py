"""Find the variables of kernel images (64-bit little-endian ELF files) for checks in `compile`."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

_SHT_SYMTAB = 2
_STT_OBJECT = 1
_STT_TLS = 6
_WRITABLE_SECTIONS = (".data", ".bss", ".tdata", ".tbss")
_READ_ONLY_AFTER_RELOCATION = ".data.rel.ro"

#: Mangled names of the writable objects that an image may contain: function-local statics (these
#: are ``__shared__`` variables) with their guards, and variables of the shim and the C runtime.
_ALLOWED = re.compile(r"_ZZ|_ZGVZZ|_ZL\d+softcuda_|softcuda_|completed\.")
#: Start of the mangled name of a static in an extern "C" function: length of the function's name,
#: then the name.
_FUNCTION_STATIC = re.compile(r"_ZZ(\d+)(\w+)")


class _Section(NamedTuple):
    """An ELF section header. The attributes are in the order of the fields in the file."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    """An ELF symbol. The attributes are in the order of the fields in the file."""

    name: int
    info: int
    other: int
    section: int
    value: int
    size: int

    @property
    def is_object(self) -> bool:
        """Return whether the symbol is a variable. Thread-local variables are included."""
        symbol_type = self.info & 15
        return symbol_type in (_STT_OBJECT, _STT_TLS)


def _sections(image: bytes) -> tuple[list[_Section], list[str]]:
    """Return the section headers and their names."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    sections = []
    for index in range(count):
        offset = table + index * entry_size
        fields = struct.unpack_from("<IIQQQQIIQQ", image, offset)
        sections.append(_Section(*fields))
    strings = sections[names_index].offset
    names = [_string(image, strings + section.name) for section in sections]
    return sections, names


def _is_writable(section_name: str) -> bool:
    """Return whether a section can be written after relocation."""
    if section_name.startswith(_READ_ONLY_AFTER_RELOCATION):
        return False
    return section_name.startswith(_WRITABLE_SECTIONS)


def _writable_objects(image: bytes) -> list[tuple[str, int]]:
    """Return the symbol name and size in bytes of every object in a writable section."""
    sections, names = _sections(image)
    writable = {index for index, name in enumerate(names) if _is_writable(name)}
    objects: list[tuple[str, int]] = []
    for section in sections:
        if section.type != _SHT_SYMTAB:
            continue
        strings = sections[section.link].offset
        end = section.offset + section.size
        for offset in range(section.offset, end, section.entry_size):
            fields = struct.unpack_from("<IBBHQQ", image, offset)
            symbol = _Symbol(*fields)
            if not symbol.is_object or symbol.size == 0:
                continue
            if symbol.section in writable:
                name = _string(image, strings + symbol.name)
                objects.append((name, symbol.size))
    return objects


def writable_globals(image: bytes) -> list[str]:
    """Return the names of writable global variables in an image, which kernels must not have.

    ``__shared__`` variables are writable but allowed. They are static variables of functions, so
    their mangled names start with ``_ZZ``. The variables of the shim headers in ``include/`` and of
    the C runtime are allowed too.
    """
    names = [name for name, _size in _writable_objects(image)]
    return sorted(name for name in names if not _ALLOWED.match(name))


def shared_bytes(image: bytes) -> dict[str, int]:
    """Return the size in bytes of all ``__shared__`` variables of each ``extern "C"`` function."""
    total: dict[str, int] = {}
    for name, size in _writable_objects(image):
        match = _FUNCTION_STATIC.match(name)
        if match is None:
            continue
        length = int(match[1])
        function = match[2][:length]
        total[function] = total.get(function, 0) + size
    return total


def _string(image: bytes, offset: int) -> str:
    """Return the null-terminated string at an offset."""
    end = image.index(b"\0", offset)
    return image[offset:end].decode()
