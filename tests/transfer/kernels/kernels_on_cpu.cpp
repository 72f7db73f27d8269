// The kernels as a library for ctypes: launch(name, grid, threads, arguments of 8 bytes each).

#include "cuda_on_cpu.hpp"

#include "copy.cu"
#include "crc32c.cu"

#include <cstring>
#include <type_traits>

namespace {

template <typename T>
T from_argument(u64 argument) {
    static_assert(sizeof(T) == sizeof(u64), "every argument is passed as 8 bytes");
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(argument);
    } else {
        return static_cast<T>(argument);
    }
}

template <typename... Parameters>
struct Call {
    void (*kernel)(Parameters...);
    const u64* arguments;

    template <size_t... Places>
    void run(std::index_sequence<Places...>) const {
        kernel(from_argument<Parameters>(arguments[Places])...);
    }

    static void body(void* self) { static_cast<const Call*>(self)->run(std::index_sequence_for<Parameters...>{}); }
};

template <typename... Parameters>
int launch_if(bool chosen, void (*kernel)(Parameters...), unsigned grid_x, unsigned grid_y, unsigned threads, const u64* arguments, unsigned count) {
    if (!chosen) return 0;
    if (count != sizeof...(Parameters)) return 0;
    Call<Parameters...> call{kernel, arguments};
    cpu::run_grid(grid_x, grid_y, threads, Call<Parameters...>::body, &call);
    return 1;
}

}  // namespace

// 1 if a kernel of this name with this number of parameters was run.
extern "C" int launch(const char* name, unsigned grid_x, unsigned grid_y, unsigned threads, const u64* arguments, unsigned count) {
    int launched = 0;
#define KERNEL(kernel) launched += launch_if(std::strcmp(name, #kernel) == 0, kernel, grid_x, grid_y, threads, arguments, count)
    KERNEL(gather);
    KERNEL(scatter);
    KERNEL(crc32c_begin);
    KERNEL(crc32c_pieces);
    KERNEL(crc32c_verify);
#undef KERNEL
    return launched;
}
