"""The CUDA sources and the constants that they are compiled with."""

from importlib.resources import files

#: Warps of a CTA of the copies, and bytes of payload that one warp moves. Why so many: copy.cu.
COPY_WARPS = 8
COPY_WARP_TILE_BYTES = 2048
COPY_TILE_BYTES = COPY_WARPS * COPY_WARP_TILE_BYTES
COPY_THREADS = COPY_WARPS * 32

#: Threads of a CTA of the checksum, and 16-byte words that each takes. Why so many: crc32c.cu.
CRC_THREADS = 256
CRC_ROWS = 8
CRC_WORD_BYTES = 16
CRC_ROW_BYTES = CRC_THREADS * CRC_WORD_BYTES
CRC_PIECE_BYTES = CRC_ROWS * CRC_ROW_BYTES
#: Bytes behind a payload in its last word: at most 15 behind the fourth, and 4 more when the payload is empty.
CRC_PADS = 20

#: For the kernels with one thread per payload.
FLAT_THREADS = 256

#: Kernels by source file.
KERNELS = {"copy.cu": ("gather", "scatter"), "crc32c.cu": ("crc32c_begin", "crc32c_pieces", "crc32c_verify")}

#: Options that NVRTC, nvcc and a C++ compiler understand alike.
OPTIONS = (
    "-std=c++17",
    f"-DCOPY_WARPS={COPY_WARPS}",
    f"-DCOPY_TILE_BYTES={COPY_WARP_TILE_BYTES}",
    f"-DCRC_THREADS={CRC_THREADS}",
    f"-DCRC_ROWS={CRC_ROWS}",
    f"-DCRC_PADS={CRC_PADS}",
)


def source(name: str) -> str:
    """The text of a source file beside this module."""
    return (files("offloadd.transfer.kernels") / name).read_text(encoding="utf-8")
