// What a decode step does to a GPU's memory: every weight is read once and multiplied with a few vectors, and the KV of the batch is read once.
//
// A warp takes ROWS rows of a matrix, so that a vector's values, which come from the caches, serve several weights: 16 bytes of weights a row and lane are then
// joined by BATCH * 32 / ROWS = 32 bytes of vectors. Not tuned further: a load of copies and kernels beside it is measured, not this kernel.
//
// Compiled by NVRTC and nvcc: no header.

typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP_LANES 32u
#define BATCH 4
#define ROWS 4
#define WORD_VALUES 8

union Bits {
    u32 bits;
    float value;
};

__device__ __forceinline__ float as_float(u32 bits) {
    Bits one;
    one.bits = bits;
    return one.value;
}

// The product of two bfloat16 weights, one in each half of `pair`, with two values.
__device__ __forceinline__ float two(u32 pair, const float* values) { return as_float(pair << 16) * values[0] + as_float(pair & 0xFFFF0000u) * values[1]; }

__device__ __forceinline__ float sum_of_warp(float value) {
    for (u32 distance = WARP_LANES / 2; distance; distance /= 2) {
        Bits one;
        one.value = value;
        value += as_float(__shfl_xor_sync(0xFFFFFFFFu, one.bits, distance));
    }
    return value;
}

// outputs[b * rows + r] = sum over c of weights[r][c] * inputs[b][c], for BATCH vectors; a row has `words` words of WORD_VALUES bfloat16 weights. `rows` is a
// multiple of ROWS; warps behind the last row do nothing.
extern "C" __global__ void multiply(const uint4* weights, const float* inputs, float* outputs, u64 rows, u64 words) {
    const u32 lane = threadIdx.x % WARP_LANES;
    const u64 first = (static_cast<u64>(blockIdx.x) * (blockDim.x / WARP_LANES) + threadIdx.x / WARP_LANES) * ROWS;
    if (first >= rows) return;
    float sums[ROWS][BATCH] = {};
    for (u64 word = lane; word < words; word += WARP_LANES) {
        uint4 mine[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) mine[row] = weights[(first + row) * words + word];
#pragma unroll
        for (int vector = 0; vector < BATCH; ++vector) {
            const float* values = inputs + (vector * words + word) * WORD_VALUES;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                sums[row][vector] += two(mine[row].x, values) + two(mine[row].y, values + 2) + two(mine[row].z, values + 4) + two(mine[row].w, values + 6);
            }
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int vector = 0; vector < BATCH; ++vector) {
            const float sum = sum_of_warp(sums[row][vector]);
            if (lane == 0) outputs[vector * rows + first + row] = sum;
        }
    }
}

// Reads `words` words of KV once. sums[t] is the exclusive or of what thread t read: without a result the compiler would leave the reads out.
extern "C" __global__ void read_through(const uint4* kv, u32* sums, u64 words, u64 thread_count) {
    const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread >= thread_count) return;
    u32 sum = 0;
    for (u64 word = thread; word < words; word += thread_count) {
        const uint4 one = kv[word];
        sum ^= one.x ^ one.y ^ one.z ^ one.w;
    }
    sums[thread] = sum;
}
