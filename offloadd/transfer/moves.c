/*
 * Copies between the pieces of KV blocks and slots of ours, with the CRC32C of each payload taken on the way.
 *
 * `offloadd.transfer.native` loads it and says what each function does; `offloadd.transfer.gather` is the same in NumPy. What this adds:
 *
 *   - One call moves a whole slice. NumPy needs one a run of blocks, and threads that leave and enter the interpreter every 50 µs wait for each other.
 *   - A payload is checked and copied while it is in the core's own cache, so memory is read once.
 *   - Long copies store past the caches (non-temporal) where memory is what bounds them: an ordinary store first reads the line that it is about to
 *     overwrite, a third of all traffic. The C library does so too, but only for single copies far longer than the 4 to 64 KiB pieces that engines have.
 *
 * Nothing here allocates, locks, or knows Python. Every address is checked against its memory's bounds before the first byte moves.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

/* The oldest caller and the newest library must notice each other: raised with every change of a structure or a meaning. */
#define INTERFACE 3

typedef struct {
    uint8_t *base;        /* piece p of block b begins at base + p * plane_step + b * block_stride */
    int64_t planes;
    int64_t plane_step;
    int64_t block_stride;
    int64_t piece;        /* bytes */
    int64_t block_count;
} Group;

typedef struct {
    const Group *groups;  /* in payload order */
    int64_t group_count;
    const int64_t *blocks;
    int64_t count;
    uint8_t *ours;
    int64_t ours_bytes;
    const int64_t *offsets;  /* payload byte `first` of block i lies at ours[offsets[i]] */
    int64_t first;
    int64_t last;
    uint32_t *checksums;       /* out, one a block; NULL: none are computed */
    const uint32_t *expected;  /* scatter: blocks that have another checksum are left alone; NULL: all are scattered */
    int64_t past_caches;       /* whether long moves store past the caches */
    int64_t checksum_ns;       /* out */
    int64_t copy_ns;           /* out */
} Move;

enum { MOVED = 0, BLOCK_OUTSIDE = -1, SLOT_OUTSIDE = -2, WINDOW_OUTSIDE = -3 };

/* --- CRC32C ------------------------------------------------------------------------------------------------------------------------------------------ */

#define POLYNOMIAL 0x82F63B78u /* Castagnoli, bits reflected (RFC 3720) */
/* Three independent chains of the CPU's instruction hide its latency. Three lanes of this length are 16 bytes short of a 4 KiB piece. */
#define LANE 1360

static uint32_t byte_table[256];
static uint32_t lane_table[4][256];  /* the product of a byte at each of the four places with x^(8 * LANE) */

/* x^n modulo the polynomial; bit 31 is the constant term. */
static uint32_t power_of_x(unsigned n) {
    uint32_t value = 1u << 31;
    while (n--) value = value & 1 ? value >> 1 ^ POLYNOMIAL : value >> 1;
    return value;
}

static uint32_t product(uint32_t a, uint32_t b) {
    uint32_t sum = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit) sum ^= b;
        b = b & 1 ? b >> 1 ^ POLYNOMIAL : b >> 1;
    }
    return sum;
}

/* All of them take and return the register's state, which is the CRC with its bits inverted. */
typedef uint32_t (*Crc)(uint32_t state, const uint8_t *data, size_t size);
typedef void (*Copy)(uint8_t *restrict to, const uint8_t *restrict from, size_t size);

static uint32_t crc_by_bytes(uint32_t state, const uint8_t *data, size_t size) {
    for (size_t i = 0; i < size; i++) state = state >> 8 ^ byte_table[(state ^ data[i]) & 255];
    return state;
}

static void copy_plain(uint8_t *restrict to, const uint8_t *restrict from, size_t size) { memcpy(to, from, size); }

static Crc crc_of = crc_by_bytes;
static Copy copy_past_caches = copy_plain;
static const char *ways = "portable C";

/* Tests build it for less than the CPU has: vectors of 128, 256 or 512 bits, 0 for portable C. */
#ifndef WIDEST
#define WIDEST 512
#endif

static inline uint64_t word_at(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

static inline uint32_t past_lane(uint32_t state) {
    return lane_table[0][state & 255] ^ lane_table[1][state >> 8 & 255] ^ lane_table[2][state >> 16 & 255] ^ lane_table[3][state >> 24];
}

/* By the CPU's instruction for 8 bytes and that for one. */
#define CRC_BY_WORDS(TARGET, OF_WORD, OF_BYTE)                                                                       \
    __attribute__((target(TARGET))) static uint32_t crc_by_words(uint32_t state, const uint8_t *data, size_t size) { \
        while (size >= 3 * LANE) {                                                                                   \
            uint32_t a = state, b = 0, c = 0;                                                                        \
            for (size_t i = 0; i < LANE; i += 8) {                                                                   \
                a = (uint32_t)OF_WORD(a, word_at(data + i));                                                         \
                b = (uint32_t)OF_WORD(b, word_at(data + LANE + i));                                                  \
                c = (uint32_t)OF_WORD(c, word_at(data + 2 * LANE + i));                                              \
            }                                                                                                        \
            state = past_lane(past_lane(a) ^ b) ^ c;                                                                 \
            data += 3 * LANE;                                                                                        \
            size -= 3 * LANE;                                                                                        \
        }                                                                                                            \
        for (; size >= 8; data += 8, size -= 8) state = (uint32_t)OF_WORD(state, word_at(data));                     \
        for (; size; data++, size--) state = OF_BYTE(state, *data);                                                  \
        return state;                                                                                                \
    }

#if defined(__x86_64__)
#include <immintrin.h>

CRC_BY_WORDS("sse4.2", _mm_crc32_u64, _mm_crc32_u8)

/*
 * Folding by carry-less multiplication: a 128-bit lane that is moved over D bits of message is multiplied by x^D, its low half by x^(D+32) and its high half
 * by x^(D-32), since a product of reflected operands comes out shifted. Keys are computed at start.
 */
static uint64_t fold_keys[2][2];  /* over 2048 bits, over 512 bits */

static uint64_t fold_key(unsigned bits) { return (uint64_t)power_of_x(bits) << 1; }

#define WIDE "avx512f,avx512bw,avx512vl,vpclmulqdq,pclmul,sse4.2"

__attribute__((target(WIDE))) static inline __m512i folded(__m512i value, __m512i key, __m512i next) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, key, 0x00), _mm512_clmulepi64_epi128(value, key, 0x11), next, 0x96);
}

__attribute__((target(WIDE))) static uint32_t crc_by_folding(uint32_t state, const uint8_t *data, size_t size) {
    if (size >= 256) {
        const __m512i far_key = _mm512_broadcast_i32x4(_mm_set_epi64x((long long)fold_keys[0][1], (long long)fold_keys[0][0]));
        const __m512i near_key = _mm512_broadcast_i32x4(_mm_set_epi64x((long long)fold_keys[1][1], (long long)fold_keys[1][0]));
        __m512i a = _mm512_xor_si512(_mm512_loadu_si512(data), _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
        __m512i b = _mm512_loadu_si512(data + 64), c = _mm512_loadu_si512(data + 128), d = _mm512_loadu_si512(data + 192);
        for (data += 256, size -= 256; size >= 256; data += 256, size -= 256) {
            a = folded(a, far_key, _mm512_loadu_si512(data));
            b = folded(b, far_key, _mm512_loadu_si512(data + 64));
            c = folded(c, far_key, _mm512_loadu_si512(data + 128));
            d = folded(d, far_key, _mm512_loadu_si512(data + 192));
        }
        d = folded(folded(folded(a, near_key, b), near_key, c), near_key, d);
        for (; size >= 64; data += 64, size -= 64) d = folded(d, near_key, _mm512_loadu_si512(data));
        uint8_t rest[64];
        _mm512_storeu_si512(rest, d);
        uint64_t wide = 0;
        for (size_t i = 0; i < sizeof rest; i += 8) wide = _mm_crc32_u64(wide, word_at(rest + i));
        state = (uint32_t)wide;
    }
    return crc_by_words(state, data, size);
}

/* The parts before and behind whole aligned lines are ordinary copies. */
#define COPY_LINES(NAME, TARGET, VECTOR, LOAD, STORE)                                                                         \
    __attribute__((target(TARGET))) static void NAME(uint8_t *restrict to, const uint8_t *restrict from, size_t size) {       \
        size_t head = -(uintptr_t)to & 63;                                                                                    \
        if (head > size) head = size;                                                                                         \
        memcpy(to, from, head);                                                                                               \
        to += head, from += head, size -= head;                                                                               \
        for (; size >= 64; to += 64, from += 64, size -= 64)                                                                  \
            for (size_t i = 0; i < 64; i += sizeof(VECTOR)) STORE((VECTOR *)(to + i), LOAD((const VECTOR *)(from + i)));      \
        memcpy(to, from, size);                                                                                               \
    }

COPY_LINES(copy_lines_128, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)
COPY_LINES(copy_lines_256, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
COPY_LINES(copy_lines_512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)

static void choose(void) {
    __builtin_cpu_init();
    if (WIDEST < 128) return;
    copy_past_caches = copy_lines_128;
    ways = "SSE2";
    if (__builtin_cpu_supports("sse4.2")) crc_of = crc_by_words, ways = "SSE4.2";
    if (WIDEST >= 256 && __builtin_cpu_supports("avx2")) copy_past_caches = copy_lines_256, ways = "AVX2";
    if (WIDEST >= 512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2")) {
        crc_of = crc_by_folding;
        copy_past_caches = copy_lines_512;
        ways = "AVX-512";
    }
}

/* Non-temporal stores may become visible late: whoever is told that the copy has ended must see its bytes. */
static inline void settle(void) { _mm_sfence(); }

#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>

CRC_BY_WORDS("+crc", __crc32cd, __crc32cb)

#define HAS_CRC32 (1ul << 7) /* HWCAP_CRC32 */

static void choose(void) {
    if (WIDEST >= 128 && getauxval(AT_HWCAP) & HAS_CRC32) crc_of = crc_by_words, ways = "ARMv8 CRC32";
}

static inline void settle(void) {}

#else

static void choose(void) {}
static inline void settle(void) {}

#endif

__attribute__((constructor)) static void prepare(void) {
    for (unsigned byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++) value = value & 1 ? value >> 1 ^ POLYNOMIAL : value >> 1;
        byte_table[byte] = value;
    }
    const uint32_t lane = power_of_x(8 * LANE);
    for (unsigned place = 0; place < 4; place++)
        for (unsigned byte = 0; byte < 256; byte++) lane_table[place][byte] = product(lane, (uint32_t)byte << 8 * place);
#if defined(__x86_64__)
    fold_keys[0][0] = fold_key(2048 + 32), fold_keys[0][1] = fold_key(2048 - 32);
    fold_keys[1][0] = fold_key(512 + 32), fold_keys[1][1] = fold_key(512 - 32);
#endif
    choose();
}

EXPORT int offloadd_interface(void) { return INTERFACE; }

EXPORT const char *offloadd_ways(void) { return ways; }

EXPORT uint32_t offloadd_crc32c(const uint8_t *data, size_t size, uint32_t value) { return ~crc_of(~value, data, size); }

/* --- Moves -------------------------------------------------------------------------------------------------------------------------------------------- */

/* What is checked and then copied must still be in the core's own cache: half of the smallest one in use (512 KiB). */
#define PORTION (256 << 10)
/* Calls that move less leave their bytes in the caches, where the next reader finds them. */
#define PAST_CACHES_MIN (256 << 10)

/* Walks through the pieces that hold payload bytes `at` to `end` of one block. */
typedef struct {
    const Group *group;
    int64_t block;
    int64_t plane;
    int64_t inside;  /* bytes of the piece that lie before `at` */
    int64_t left;
} Walk;

static Walk walk(const Move *move, int64_t block, int64_t at, int64_t end) {
    const Group *group = move->groups;
    for (int64_t size; at >= (size = group->planes * group->piece) && end > at; group++) at -= size, end -= size;
    return (Walk){group, block, at / group->piece, at % group->piece, end - at};
}

/* The next stretch of bytes; NULL behind the last one. */
static inline uint8_t *next(Walk *w, size_t *size) {
    if (w->left <= 0) return NULL;
    if (w->plane == w->group->planes) w->group++, w->plane = 0;
    const Group *group = w->group;
    uint8_t *begin = group->base + w->plane * group->plane_step + w->block * group->block_stride + w->inside;
    int64_t length = group->piece - w->inside;
    if (length > w->left) length = w->left;
    w->plane++, w->inside = 0, w->left -= length;
    *size = (size_t)length;
    return begin;
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static int check(const Move *move) {
    int64_t payload = 0;
    for (int64_t g = 0; g < move->group_count; g++) payload += move->groups[g].planes * move->groups[g].piece;
    if (move->first < 0 || move->last > payload || move->first > move->last) return WINDOW_OUTSIDE;
    for (int64_t i = 0; i < move->count; i++) {
        for (int64_t g = 0; g < move->group_count; g++)
            if (move->blocks[i] < 0 || move->blocks[i] >= move->groups[g].block_count) return BLOCK_OUTSIDE;
        if (move->offsets[i] < 0 || move->offsets[i] > move->ours_bytes - (move->last - move->first)) return SLOT_OUTSIDE;
    }
    return MOVED;
}

static Copy copy_for(const Move *move) { 
    return move->past_caches && move->count * (move->last - move->first) >= PAST_CACHES_MIN ? copy_past_caches : copy_plain;
}

EXPORT int offloadd_gather(Move *move) {
    const int problem = check(move);
    if (problem) return problem;
    const Copy copy = copy_for(move);
    int64_t time = now_ns();
    for (int64_t i = 0; i < move->count; i++) {
        uint32_t state = ~0u;
        uint8_t *to = move->ours + move->offsets[i];
        for (int64_t at = move->first; at < move->last; at += PORTION) {
            const int64_t end = move->last - at > PORTION ? at + PORTION : move->last;
            uint8_t *from;
            size_t size;
            /* Of what the engine has, not of our copy: a copy that went wrong is found when it is restored. */
            if (move->checksums) {
                for (Walk w = walk(move, move->blocks[i], at, end); (from = next(&w, &size));) state = crc_of(state, from, size);
                const int64_t later = now_ns();
                move->checksum_ns += later - time, time = later;
            }
            for (Walk w = walk(move, move->blocks[i], at, end); (from = next(&w, &size)); to += size) copy(to, from, size);
            const int64_t later = now_ns();
            move->copy_ns += later - time, time = later;
        }
        if (move->checksums) move->checksums[i] = ~state;
    }
    settle();
    return MOVED;
}

EXPORT int offloadd_scatter(Move *move) {
    const int problem = check(move);
    if (problem) return problem;
    const Copy copy = copy_for(move);
    int64_t time = now_ns();
    for (int64_t i = 0; i < move->count; i++) {
        const uint8_t *from = move->ours + move->offsets[i];
        /* All of a payload before the first byte of it is handed over. */
        if (move->checksums) {
            move->checksums[i] = ~crc_of(~0u, from, (size_t)(move->last - move->first));
            const int64_t later = now_ns();
            move->checksum_ns += later - time, time = later;
            if (move->expected && move->checksums[i] != move->expected[i]) continue;
        }
        uint8_t *to;
        size_t size;
        for (Walk w = walk(move, move->blocks[i], move->first, move->last); (to = next(&w, &size)); from += size) copy(to, from, size);
        const int64_t later = now_ns();
        move->copy_ns += later - time, time = later;
    }
    settle();
    return MOVED;
}
