// Kernels as a library: launch(name, grid, threads, arguments of 8 bytes each) for ctypes and for the stand-in driver.
//
// Whoever compiles it puts cuda_on_cpu.hpp and the CUDA sources in front with -include, and names their kernels: -D'KERNELS=KERNEL(gather) KERNEL(scatter)'.

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

template <typename... Parameters>
const char* parameters_if(bool chosen, void (*)(Parameters...)) {
    static const char kinds[] = {(std::is_pointer_v<Parameters> ? 'p' : 'v')..., 0};
    return chosen ? kinds : nullptr;
}

}  // namespace

// 1 if a kernel of this name with this number of parameters was run.
extern "C" int launch(const char* name, unsigned grid_x, unsigned grid_y, unsigned threads, const u64* arguments, unsigned count) {
    int launched = 0;
#define KERNEL(kernel) launched += launch_if(std::strcmp(name, #kernel) == 0, kernel, grid_x, grid_y, threads, arguments, count);
    KERNELS
#undef KERNEL
    return launched;
}

// A letter for each parameter of a kernel, p for a pointer and v for a value; null if there is no kernel of this name.
extern "C" const char* parameters(const char* name) {
    const char* found = nullptr;
#define KERNEL(kernel) \
    if (!found) found = parameters_if(std::strcmp(name, #kernel) == 0, kernel);
    KERNELS
#undef KERNEL
    return found;
}
