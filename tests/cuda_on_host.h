// CUDA as host C++: a grid runs block by block, the threads of a block as fibres that give way at __syncthreads.
// Threads run in rising order from one barrier to the next, or in falling order: code that lacks a barrier differs.

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(threads)

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx;

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class T>
T min(T a, T b) { return a < b ? a : b; }
template <class T>
T max(T a, T b) { return a < b ? b : a; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __int_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline void atomicMin(unsigned long long* place, unsigned long long value) { *place = min(*place, value); }

namespace host {

constexpr std::size_t STACK_BYTES = 65536;
constexpr int OK = 0, BARRIER_MISSED = 1;

struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    bool done = false;
};
static std::vector<Fibre> fibres;
static ucontext_t scheduler;
static unsigned current;
static std::function<void()> body;

inline void enter() {
    body();
    fibres[current].done = true;
    swapcontext(&fibres[current].context, &scheduler);
}

// Runs blocks `first` to `end` of `threads` threads; BARRIER_MISSED if some threads of a block end while others wait.
inline int run(unsigned first, unsigned end, unsigned threads, bool falling, std::function<void()> kernel) {
    body = kernel;
    if (fibres.size() < threads) fibres = std::vector<Fibre>(threads);
    for (unsigned b = first; b < end; ++b) {
        blockIdx = {falling ? first + (end - 1 - b) : b, 0, 0};
        for (unsigned t = 0; t < threads; ++t) {
            Fibre& fibre = fibres[t];
            fibre.done = false;
            getcontext(&fibre.context);
            fibre.context.uc_stack.ss_sp = fibre.stack.get();
            fibre.context.uc_stack.ss_size = STACK_BYTES;
            fibre.context.uc_link = nullptr;
            makecontext(&fibre.context, enter, 0);
        }
        for (unsigned done = 0; done < threads;) {
            if (done != 0) return BARRIER_MISSED;
            for (unsigned i = 0; i < threads; ++i) {
                current = falling ? threads - 1 - i : i;
                threadIdx = {current, 0, 0};
                swapcontext(&scheduler, &fibres[current].context);
                done += fibres[current].done;
            }
        }
    }
    return OK;
}

}  // namespace host

inline void __syncthreads() {
    const unsigned me = host::current;
    swapcontext(&host::fibres[me].context, &host::scheduler);
}
