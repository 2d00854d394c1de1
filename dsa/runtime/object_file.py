"""A kernel's object file: host code with a TVM-FFI interface, and a cubin (GPU machine code) in the data section."""

import struct
from pathlib import Path
from typing import Any

_EM_CUDA = (190).to_bytes(2, "little")
_SHT_NOBITS = 8  # type of sections without bytes in the file, such as .bss


def write_object_file(kernel: Any, path: Path, entry: str) -> None:
    """Write a compiled kernel under the name `entry`, with host code for every CPU of this architecture.

    By default the DSL exports code for the CPU that compiles it. So this function first gives the host functions
    attributes with the target "generic". Generic code costs nothing, because wider vector instructions would not make a
    launch faster.
    """
    from cutlass._mlir import ir  # a private module of the DSL: if it is missing, only this function fails

    def for_any_cpu(op: ir.Operation) -> ir.WalkResult:
        if op.name == "llvm.func" and len(op.regions[0].blocks):
            before = op.attributes["passthrough"] if "passthrough" in op.attributes else ()
            named = ('["target-cpu", "generic"]', '["target-features", ""]')
            op.attributes["passthrough"] = ir.ArrayAttr.get(
                [*before, *(ir.Attribute.parse(text, op.context) for text in named)], op.context
            )
        return ir.WalkResult.ADVANCE

    kernel.ir_module.operation.walk(for_any_cpu)
    kernel.export_to_c(object_file_path=str(path), function_name=entry)


def cubin_in(object_file: bytes) -> bytes:
    found = []
    at = object_file.find(b"\x7fELF", 1)
    while at != -1:
        if object_file[at + 18 : at + 20] == _EM_CUDA:
            found.append(object_file[at : at + _elf_size(object_file, at)])
        at = object_file.find(b"\x7fELF", at + 1)
    if len(found) != 1:
        raise ValueError(f"object_file: must have one cubin in it, got {len(found)}")
    return found[0]


def _elf_size(data: bytes, at: int) -> int:
    """Return the size of a 64-bit little-endian ELF file."""
    segments_at, sections_at = struct.unpack_from("<QQ", data, at + 32)
    segment_size, segments, section_size, sections = struct.unpack_from("<HHHH", data, at + 54)
    ends = [segments_at + segment_size * segments, sections_at + section_size * sections]
    for i in range(sections):
        kind, _, _, offset, size = struct.unpack_from("<IQQQQ", data, at + sections_at + i * section_size + 4)
        ends.append(offset + (0 if kind == _SHT_NOBITS else size))
    return max(ends)
