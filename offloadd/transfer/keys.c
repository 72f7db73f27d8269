/*
 * SHA-256 of many short messages that begin alike: the keys of a request's block hashes, in one call.
 *
 * `offloadd.transfer.native` loads it, and compares it with hashlib at each start. One call a message from Python costs more than the two blocks that it
 * hashes. Only where the CPU has instructions for it; `offloadd.model.namespace` does the same by hashlib elsewhere.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* Whole messages are padded here: more than any block hash (64 bytes) behind its prefix needs. */
#define MESSAGE_MAX 183

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint32_t constants[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

#define SHA_NI "sha,sse4.1,ssse3"

/* The instruction keeps the state as the words a b e f and c d g h. */
typedef struct {
    __m128i abef, cdgh;
} State;

__attribute__((target(SHA_NI))) static inline State begin(void) {
    const __m128i abcd = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)initial), 0xB1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(initial + 4)), 0x1B);
    return (State){_mm_alignr_epi8(abcd, efgh, 8), _mm_blend_epi16(efgh, abcd, 0xF0)};
}

__attribute__((target(SHA_NI))) static inline State compress(State state, const uint8_t *block) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    State now = state;
    __m128i words[4];
    for (int i = 0; i < 4; i++) words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(block + 16 * i)), big_endian);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        const __m128i w0 = words[i & 3], w1 = words[(i + 1) & 3], w2 = words[(i + 2) & 3], w3 = words[(i + 3) & 3];
        const __m128i added = _mm_add_epi32(w0, _mm_load_si128((const __m128i *)(constants + 4 * i)));
        now.cdgh = _mm_sha256rnds2_epu32(now.cdgh, now.abef, added);
        now.abef = _mm_sha256rnds2_epu32(now.abef, now.cdgh, _mm_shuffle_epi32(added, 0x0E));
        words[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4)), w3);
    }
    return (State){_mm_add_epi32(state.abef, now.abef), _mm_add_epi32(state.cdgh, now.cdgh)};
}

__attribute__((target(SHA_NI))) static inline void end(State state, uint8_t *digest) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    const __m128i feba = _mm_shuffle_epi32(state.abef, 0x1B), dchg = _mm_shuffle_epi32(state.cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)digest, _mm_shuffle_epi8(_mm_blend_epi16(feba, dchg, 0xF0), big_endian));
    _mm_storeu_si128((__m128i *)(digest + 16), _mm_shuffle_epi8(_mm_alignr_epi8(dchg, feba, 8), big_endian));
}

__attribute__((target(SHA_NI))) static void digest_all(
    uint8_t *message, size_t prefix_size, const uint8_t *items, size_t item_size, size_t count, uint8_t *digests) {
    const size_t size = prefix_size + item_size, padded = (size + 9 + 63) / 64 * 64;
    message[size] = 0x80;
    memset(message + size + 1, 0, padded - size - 1);
    for (int i = 0; i < 8; i++) message[padded - 1 - i] = (uint8_t)((uint64_t)size * 8 >> 8 * i);
    for (size_t i = 0; i < count; i++) {
        memcpy(message + prefix_size, items + i * item_size, item_size);
        State state = begin();
        for (size_t at = 0; at < padded; at += 64) state = compress(state, message + at);
        end(state, digests + 32 * i);
    }
}

static int has_sha(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & 1u << 29 && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

#endif

/* SHA-256 of `prefix` with each of `count` items behind it, 32 bytes each. -1: not on this CPU, or messages are too long; nothing was written. */
EXPORT int offloadd_sha256_each(const uint8_t *prefix, size_t prefix_size, const uint8_t *items, size_t item_size, size_t count, uint8_t *digests) {
#if defined(__x86_64__)
    uint8_t message[MESSAGE_MAX + 9];
    if (prefix_size > MESSAGE_MAX || item_size > MESSAGE_MAX - prefix_size || !has_sha()) return -1;
    memcpy(message, prefix, prefix_size);
    digest_all(message, prefix_size, items, item_size, count, digests);
    return 0;
#else
    (void)prefix, (void)prefix_size, (void)items, (void)item_size, (void)count, (void)digests;
    return -1;
#endif
}
