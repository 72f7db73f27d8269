// Gather and scatter: pieces of engine memory to and from payloads that lie in slots.
//
// One warp moves one tile of COPY_TILE_BYTES of one payload; a CTA has COPY_WARPS of them; grid.x counts a payload's tiles, grid.y payloads. A tile is a
// range of the payload, so it takes the same time whether it lies in one plane of 640 KiB or in half a plane of 4 KiB.
//
// Why 2 KiB a tile: a lane then has four loads of 16 bytes in flight before its first store. Estimate, not measured, for an H200: 12 payloads of 640 KiB are
// 480 CTAs, 3.6 an SM, or 58 KiB in flight an SM; 4.8 TB/s at 0.8 us of latency need 29 KiB. With tiles of 4 KiB half of it would be queued behind the rest.
//
// Compiled by NVRTC and nvcc: no header. COPY_WARPS and COPY_TILE_BYTES come from offloadd/transfer/kernels/source.py.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP_LANES 32u
// At least so many must fit into an SM: holds the compiler to 64 registers.
#define CTAS_PER_SM 4

// PLANE_DTYPE of offloadd/transfer/kernels/base.py.
struct Plane {
    u64 base;
    u64 block_stride;
    u64 block_bytes;
    u64 payload_begin;
};

// Whole words of one size by one warp; bytes before the first and behind the last aligned word one by one.
// `target` and `source` are equally far from a multiple of sizeof(Word).
template <typename Word>
__device__ __forceinline__ void copy_as(u8* target, const u8* source, u32 bytes, u32 lane) {
    const u32 before = static_cast<u32>(0 - reinterpret_cast<u64>(target)) & (sizeof(Word) - 1);
    const u32 head = before < bytes ? before : bytes;
    if (lane < head) target[lane] = source[lane];
    const u32 words = (bytes - head) / static_cast<u32>(sizeof(Word));
    Word* to = reinterpret_cast<Word*>(target + head);
    const Word* from = reinterpret_cast<const Word*>(source + head);
    u32 at = lane;
    // Loads first: the compiler may not move a load before a store that could touch the same bytes.
    for (; at + 3 * WARP_LANES < words; at += 4 * WARP_LANES) {
        const Word first = from[at];
        const Word second = from[at + WARP_LANES];
        const Word third = from[at + 2 * WARP_LANES];
        const Word fourth = from[at + 3 * WARP_LANES];
        to[at] = first;
        to[at + WARP_LANES] = second;
        to[at + 2 * WARP_LANES] = third;
        to[at + 3 * WARP_LANES] = fourth;
    }
    for (; at < words; at += WARP_LANES) to[at] = from[at];
    const u32 done = head + words * static_cast<u32>(sizeof(Word));
    if (lane < bytes - done) target[done + lane] = source[done + lane];
}

// The widest words that both addresses allow: a word that is aligned in one of them must be so in the other.
__device__ __forceinline__ void copy_piece(u8* target, const u8* source, u32 bytes, u32 lane) {
    const u32 apart = static_cast<u32>(reinterpret_cast<u64>(target) ^ reinterpret_cast<u64>(source));
    if ((apart & 15u) == 0) {
        copy_as<uint4>(target, source, bytes, lane);
    } else if ((apart & 7u) == 0) {
        copy_as<uint2>(target, source, bytes, lane);
    } else if ((apart & 3u) == 0) {
        copy_as<u32>(target, source, bytes, lane);
    } else {
        copy_as<u8>(target, source, bytes, lane);
    }
}

// The plane that holds this byte of the payload: the last one that begins at or before it.
__device__ __forceinline__ u64 plane_of(const Plane* planes, u64 plane_count, u64 payload_byte) {
    u64 low = 0;
    u64 high = plane_count;
    while (high - low > 1) {
        const u64 middle = (low + high) / 2;
        if (planes[middle].payload_begin <= payload_byte) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

template <bool TO_SLOTS>
__device__ __forceinline__ void move_tile(const Plane* planes, u64 plane_count, u64 block_count, const u32* indices, u8* good, u8* slots, u64 slot_stride,
                                          u64 offsets, u64 first, u64 last, u64 first_payload, u64 first_tile) {
    const u32 lane = threadIdx.x % WARP_LANES;
    const u64 payload = first_payload + blockIdx.y;
    const u64 tile = (first_tile + blockIdx.x) * COPY_WARPS + threadIdx.x / WARP_LANES;
    const u64 block = indices[payload];
    if (block >= block_count) {
        // Nobody on this path reads the flag, so the one store needs no order.
        if (tile == 0 && lane == 0) good[payload] = 0;
        return;
    }
    if (!good[payload]) return;
    u64 at = first + tile * COPY_TILE_BYTES;
    if (at >= last) return;
    const u64 end = last - at < COPY_TILE_BYTES ? last : at + COPY_TILE_BYTES;
    u8* slot = slots + (offsets ? reinterpret_cast<const u64*>(offsets)[payload] : payload * slot_stride);
    for (u64 number = plane_of(planes, plane_count, at); at < end; ++number) {
        const Plane plane = planes[number];
        const u64 inside = at - plane.payload_begin;
        const u64 left = plane.block_bytes - inside;
        const u32 bytes = static_cast<u32>(left < end - at ? left : end - at);
        u8* engine = reinterpret_cast<u8*>(plane.base + block * plane.block_stride + inside);
        u8* ours = slot + (at - first);
        // An address that was a number is "generic" to the compiler; loads and stores of global memory take one step less.
        __builtin_assume(__isGlobal(engine));
        __builtin_assume(__isGlobal(ours));
        if (TO_SLOTS) {
            copy_piece(ours, engine, bytes, lane);
        } else {
            copy_piece(engine, ours, bytes, lane);
        }
        at += bytes;
    }
}

// Payload bytes [first, last) of block indices[i] to slots + i * slot_stride, if good[i]. An index outside the region clears good[i] and moves nothing.
// offsets: address of u64 distances from `slots` instead of the stride; a value, since 0 stands for none.
extern "C" __global__ void __launch_bounds__(COPY_WARPS * WARP_LANES, CTAS_PER_SM)
    gather(const Plane* planes, u64 plane_count, u64 block_count, const u32* indices, u8* good, u8* slots, u64 slot_stride, u64 offsets, u64 first,
           u64 last, u64 first_payload, u64 first_tile) {
    move_tile<true>(planes, plane_count, block_count, indices, good, slots, slot_stride, offsets, first, last, first_payload, first_tile);
}

// The way back. A payload whose flag is 0 is not scattered: the flags may have been written by crc32c_verify just before, on the same stream.
extern "C" __global__ void __launch_bounds__(COPY_WARPS * WARP_LANES, CTAS_PER_SM)
    scatter(const Plane* planes, u64 plane_count, u64 block_count, const u32* indices, u8* good, u8* slots, u64 slot_stride, u64 offsets, u64 first,
            u64 last, u64 first_payload, u64 first_tile) {
    move_tile<false>(planes, plane_count, block_count, indices, good, slots, slot_stride, offsets, first, last, first_payload, first_tile);
}
