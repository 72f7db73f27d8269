// CRC32C (Castagnoli, RFC 3720) of many payloads at once, and the comparison with what it should be.
//
// A CRC without its two inversions is linear: zero bytes in front of a message change nothing, the CRC of a whole is the XOR of its parts' CRCs, each multiplied
// by x^(8 * bytes behind the part) modulo the polynomial, and x has an inverse, so bytes that were appended can be taken back. Hence
//
//   payload   aligned words of 16 bytes; what does not belong to it counts as zero in front, and is taken back behind (`pad`)
//   piece     CRC_ROWS rows of CRC_THREADS words, one CTA each. Pieces are counted from the end, so that only a payload's first one is not full
//   thread    one word of each row. Loads are coalesced. The step from row to row multiplies by x^(8 * row bytes) rather than x^(8 * 16): the same 16
//             look-ups as slicing by 16, other tables. Last, the state is multiplied by x^(-8 * 16 * thread), as it ran that much too far
//   CTA       XOR over the threads, times x^(8 * bytes behind the piece), XORed into the payload's CRC in global memory
//
// The inversion of the start is 0xff XORed into payload bytes 0 to 3, of which a shorter payload has some behind its end; that of the end is what
// crc32c_begin writes.
//
// Speed: 200 GB/s on an H200 (132 SMs, 1.75 GHz) are 0.87 bytes per clock and SM. Estimated, not measured: a warp's look-up at 32 random places of
// 32 banks takes 3.5 clocks on average, so an SM does 9 bytes a clock (2.1 TB/s in all); the 3.8 instructions a byte (counted in code for sm_90) allow 34.
// Lanes with equal bytes read one place, without conflict; the worst data has 8 entries of a table in one bank: 4 bytes a clock, 0.9 TB/s. All eight loads
// of a thread are in flight before the first look-up, while the tables are copied, so one latency of memory (0.8 us) is paid a piece. 12 payloads of 640 KiB
// are 240 pieces of 32 KiB, 1.8 an SM: about 7 us with tables (16 KiB of L2 a piece, 1 us), look-ups (4 us) and the ends (1 us), plus two launches. Larger
// pieces would leave SMs idle, smaller ones copy as many bytes of tables as of payload.
//
// Compiled by NVRTC and nvcc: no header. CRC_THREADS, CRC_ROWS and the table sizes come from offloadd/transfer/kernels/source.py.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define WARP_LANES 32u
// At least so many must fit into an SM: holds the compiler to 64 registers.
#define CTAS_PER_SM 4
#define WORD_BYTES 16
#define PIECE_WORDS (CRC_ROWS * CRC_THREADS)
#define STEP_ENTRIES (WORD_BYTES * 256)
#define REFLECTED_POLYNOMIAL 0x82F63B78u

// Made by offloadd/transfer/kernels/crc_tables.py. Bit 31 of an entry is the constant term.
struct Tables {
    u32 step[STEP_ENTRIES];        // [place in word][byte]: the byte, carried on to the same place of the next row
    u32 thread[CRC_THREADS];       // x^(-8 * 16 * thread)
    u32 piece[256];                // x^(8 * piece bytes * number)
    u32 pieces[256];               // x^(8 * piece bytes * 256 * number)
    u32 pad[CRC_PADS];             // x^(-8 * number)
};

// Product of two polynomials modulo the CRC's.
__device__ __forceinline__ u32 multiply(u32 first, u32 second) {
    u32 product = 0;
#pragma unroll
    for (int bit = 31; bit >= 0; --bit) {
        product ^= (0u - (first >> bit & 1u)) & second;
        second = (second >> 1) ^ ((0u - (second & 1u)) & REFLECTED_POLYNOMIAL);
    }
    return product;
}

__device__ __forceinline__ u32 four_bytes(const u32* step, u32 word) {
    return step[word & 255u] ^ step[256 + (word >> 8 & 255u)] ^ step[512 + (word >> 16 & 255u)] ^ step[768 + (word >> 24)];
}

// A word that is not the payload's alone, byte by byte: nothing outside the payload is read.
__device__ __forceinline__ uint4 edge_word(const u8* payload, i64 payload_bytes, i64 first_byte) {
    u64 low = 0;
    u64 high = 0;
#pragma unroll 1
    for (int byte = 0; byte < WORD_BYTES; ++byte) {
        const i64 at = first_byte + byte;
        u64 value = at >= 0 && at < payload_bytes ? payload[at] : 0u;
        if (at >= 0 && at < 4) value ^= 255u;
        if (byte < 8) {
            low |= value << (8 * byte);
        } else {
            high |= value << (8 * (byte - 8));
        }
    }
    uint4 word;
    word.x = static_cast<u32>(low);
    word.y = static_cast<u32>(low >> 32);
    word.z = static_cast<u32>(high);
    word.w = static_cast<u32>(high >> 32);
    return word;
}

extern "C" __global__ void crc32c_begin(u32* crcs, u64 count) {
    const u64 number = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (number < count) crcs[number] = 0xFFFFFFFFu;
}

// XORs every piece's share into crcs[i]; when all pieces of payload i are done, that is its CRC32C. `crcs` is GPU memory: atomics don't reach over PCIe.
extern "C" __global__ void __launch_bounds__(CRC_THREADS, CTAS_PER_SM)
    crc32c_pieces(const u8* slots, u64 slot_stride, const u64* payload_bytes, const Tables* tables, u32* crcs, u64 first_payload, u64 first_piece) {
    __shared__ uint4 step_words[STEP_ENTRIES / 4];
    __shared__ u32 sums[CRC_THREADS / WARP_LANES];

    const u64 number = first_payload + blockIdx.y;
    const u8* payload = slots + number * slot_stride;
    const i64 size = static_cast<i64>(payload_bytes[number]);
    const i64 head = static_cast<i64>(reinterpret_cast<u64>(payload) % WORD_BYTES);
    // A payload of less than 4 bytes still takes the 4 inverted ones.
    const i64 words = (head + (size < 4 ? 4 : size) + WORD_BYTES - 1) / WORD_BYTES;
    const u64 piece = first_piece + blockIdx.x;
    const i64 end = words - static_cast<i64>(piece) * PIECE_WORDS;
    if (end <= 0) return;

    // Words [whole_first, whole_last) lie inside the payload and behind the inverted bytes.
    const i64 whole_first = (head + 4 + WORD_BYTES - 1) / WORD_BYTES;
    const i64 whole_last = (head + size) / WORD_BYTES;
    const i64 mine = end - PIECE_WORDS + threadIdx.x;
    uint4 row[CRC_ROWS];
#pragma unroll
    for (int number_of_row = 0; number_of_row < CRC_ROWS; ++number_of_row) {
        const i64 word = mine + number_of_row * CRC_THREADS;
        row[number_of_row] = uint4{0u, 0u, 0u, 0u};
        if (word >= whole_first && word < whole_last) row[number_of_row] = *reinterpret_cast<const uint4*>(payload + (word * WORD_BYTES - head));
    }
    // In a loop of its own, so that the loads above are issued without a branch between them.
    if (end == words || end - PIECE_WORDS < whole_first) {
#pragma unroll
        for (int number_of_row = 0; number_of_row < CRC_ROWS; ++number_of_row) {
            const i64 word = mine + number_of_row * CRC_THREADS;
            if (word >= 0 && (word < whole_first || word >= whole_last)) row[number_of_row] = edge_word(payload, size, word * WORD_BYTES - head);
        }
    }

    const uint4* table_words = reinterpret_cast<const uint4*>(tables->step);
    for (u32 entry = threadIdx.x; entry < STEP_ENTRIES / 4; entry += CRC_THREADS) step_words[entry] = table_words[entry];
    __syncthreads();

    const u32* step = reinterpret_cast<const u32*>(step_words);
    u32 state = 0;
#pragma unroll
    for (int number_of_row = 0; number_of_row < CRC_ROWS; ++number_of_row) {
        const uint4 word = row[number_of_row];
        state = four_bytes(step, state ^ word.x) ^ four_bytes(step + 1024, word.y) ^ four_bytes(step + 2048, word.z) ^ four_bytes(step + 3072, word.w);
    }

    state = multiply(state, tables->thread[threadIdx.x]);
    for (u32 distance = WARP_LANES / 2; distance; distance /= 2) state ^= __shfl_xor_sync(0xFFFFFFFFu, state, distance);
    if (threadIdx.x % WARP_LANES == 0) sums[threadIdx.x / WARP_LANES] = state;
    __syncthreads();
    if (threadIdx.x) return;

    u32 sum = 0;
    for (u32 warp = 0; warp < CRC_THREADS / WARP_LANES; ++warp) sum ^= sums[warp];
    sum = multiply(sum, tables->piece[piece % 256]);
    if (piece >= 256) sum = multiply(sum, tables->pieces[piece / 256]);
    sum = multiply(sum, tables->pad[words * WORD_BYTES - head - size]);
    atomicXor(&crcs[number], sum);
}

// Clears the flag of every payload whose CRC is not the expected one.
extern "C" __global__ void crc32c_verify(const u32* crcs, const u32* expected, u8* good, u64 count) {
    const u64 number = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (number < count && crcs[number] != expected[number]) good[number] = 0;
}
