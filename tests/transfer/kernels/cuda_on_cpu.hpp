// The CUDA built-ins that the kernels use, for a C++ compiler: one CTA after the other, each of its threads a fiber on a stack of its own.
//
// A fiber runs until a barrier. Which of those that may run comes first is drawn anew each time, from the CTA's place in the grid: a missing barrier shows as
// a wrong result, and the same one in every run. Shared memory is filled with garbage before each CTA, as on a GPU that ran something else before.
// A barrier that not all threads reach ends the process.
//
// Fibers are switched by _setjmp and _longjmp, ten times as fast as swapcontext, which asks the kernel for the signal mask each time. Under the address
// sanitizer, which takes a longjmp for the end of the frames in between, by swapcontext. One grid at a time: all of this is global.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("cta_shared")))
#define __builtin_assume(condition) static_cast<void>(condition)
#define threadIdx (cpu::thread_index)
#define blockIdx (cpu::block_index)
#define blockDim (cpu::block_size)

// Aligned as in CUDA, so that the sanitizer sees an access that a GPU would refuse.
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};

// Made by the linker; null if no kernel has shared memory.
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_cta_shared[];
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __stop_cta_shared[];

namespace cpu {

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
inline Index thread_index, block_index, block_size;

constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 128 * 1024;

enum class State { READY, AT_CTA_BARRIER, AT_WARP_BARRIER, DONE };

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    State state = State::READY;
#if !defined(__SANITIZE_ADDRESS__)
    jmp_buf place;
    bool begun = false;
#endif
};

using Body = void (*)(void*);

inline std::vector<Fiber> fibers;
inline unsigned fiber_count;
inline unsigned current;
inline Body body;
inline void* body_argument;
inline std::vector<unsigned> exchanged;
#if defined(__SANITIZE_ADDRESS__)
inline ucontext_t scheduler;
inline const void* scheduler_stack;
inline size_t scheduler_stack_bytes;
#else
inline jmp_buf scheduler;
#endif

[[noreturn]] inline void fail(const char* reason) {
    std::fprintf(stderr, "cuda_on_cpu: %s in CTA (%u, %u), thread %u\n", reason, block_index.x, block_index.y, current);
    std::abort();
}

#if defined(__SANITIZE_ADDRESS__)

// Back to the scheduler, to be gone on with when the barrier has been reached by all.
inline void leave(State state) {
    Fiber& self = fibers[current];
    self.state = state;
    void* frames = nullptr;
    __sanitizer_start_switch_fiber(state == State::DONE ? nullptr : &frames, scheduler_stack, scheduler_stack_bytes);
    swapcontext(&self.context, &scheduler);
    __sanitizer_finish_switch_fiber(frames, &scheduler_stack, &scheduler_stack_bytes);
}

inline void fiber_main() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
    body(body_argument);
    leave(State::DONE);
}

inline void go_on(unsigned number) {
    current = number;
    thread_index.x = number;
    Fiber& fiber = fibers[number];
    void* frames = nullptr;
    __sanitizer_start_switch_fiber(&frames, fiber.stack.get(), STACK_BYTES);
    swapcontext(&scheduler, &fiber.context);
    __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
}

#else

inline void leave(State state) {
    Fiber& self = fibers[current];
    self.state = state;
    if (!_setjmp(self.place)) _longjmp(scheduler, 1);
}

// For ever: the fiber of a thread that has ended becomes the same thread of the next CTA.
inline void fiber_main() {
    for (;;) {
        body(body_argument);
        leave(State::DONE);
    }
}

inline void go_on(unsigned number) {
    current = number;
    thread_index.x = number;
    Fiber& fiber = fibers[number];
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

#endif

// Lets threads [begin, end) pass their barrier if all of them wait at it; whoever has ended counts as there, if `ended_count_as_there`.
inline bool release(unsigned begin, unsigned end, State barrier, bool ended_count_as_there) {
    bool any = false;
    for (unsigned number = begin; number < end; ++number) {
        const State state = fibers[number].state;
        if (state == barrier) {
            any = true;
        } else if (state != State::DONE || !ended_count_as_there) {
            return false;
        }
    }
    for (unsigned number = begin; number < end; ++number) {
        if (fibers[number].state == barrier) fibers[number].state = State::READY;
    }
    return any;
}

__attribute__((no_sanitize("address", "undefined"))) inline void spoil_shared_memory() {
    for (volatile unsigned char* byte = __start_cta_shared; byte < __stop_cta_shared; ++byte) *byte = 0xA5;
}

inline void start(Fiber& fiber) {
    fiber.state = State::READY;
#if defined(__SANITIZE_ADDRESS__)
    // What the fiber that ended on this stack left marked.
    __asan_unpoison_memory_region(fiber.stack.get(), STACK_BYTES);
#else
    if (fiber.begun) return;
#endif
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
}

inline void run_cta(uint64_t seed) {
    spoil_shared_memory();
    for (unsigned number = 0; number < fiber_count; ++number) start(fibers[number]);
    std::vector<unsigned> order(fiber_count);
    for (unsigned number = 0; number < fiber_count; ++number) order[number] = number;
    for (bool all_done = false; !all_done;) {
        for (unsigned left = fiber_count; left > 1; --left) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            std::swap(order[left - 1], order[(seed >> 33) % left]);
        }
        bool moved = false;
        for (const unsigned number : order) {
            if (fibers[number].state != State::READY) continue;
            go_on(number);
            moved = true;
        }
        all_done = true;
        for (unsigned number = 0; number < fiber_count; ++number) all_done = all_done && fibers[number].state == State::DONE;
        moved = release(0, fiber_count, State::AT_CTA_BARRIER, true) || moved;
        for (unsigned warp = 0; warp < fiber_count; warp += WARP) moved = release(warp, warp + WARP, State::AT_WARP_BARRIER, false) || moved;
        if (!moved && !all_done) fail("a barrier is not reached by all threads");
    }
}

inline void run_grid(unsigned grid_x, unsigned grid_y, unsigned threads, Body work, void* argument) {
    if (threads == 0 || threads % WARP) fail("threads are no multiple of a warp");
    fiber_count = threads;
    if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
    exchanged.assign(threads, 0);
    body = work;
    body_argument = argument;
    block_size = Index{threads, 1, 1};
    for (unsigned y = 0; y < grid_y; ++y) {
        for (unsigned x = 0; x < grid_x; ++x) {
            block_index = Index{x, y, 0};
            run_cta((static_cast<uint64_t>(y) << 32) + x);
        }
    }
}

}  // namespace cpu

inline void __syncthreads() { cpu::leave(cpu::State::AT_CTA_BARRIER); }

inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, unsigned distance) {
    if (mask != 0xFFFFFFFFu || distance >= cpu::WARP) cpu::fail("a shuffle of this mask or distance is not built");
    const unsigned self = cpu::current;
    cpu::exchanged[self] = value;
    cpu::leave(cpu::State::AT_WARP_BARRIER);
    const unsigned other = cpu::exchanged[self ^ distance];
    cpu::leave(cpu::State::AT_WARP_BARRIER);
    return other;
}

inline unsigned atomicXor(unsigned* address, unsigned value) {
    const unsigned before = *address;
    *address = before ^ value;
    return before;
}

inline bool __isGlobal(const void*) { return true; }
