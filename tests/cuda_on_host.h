// CUDA as host C++: a grid runs block by block, the threads of a block as fibres that give way at __syncthreads, and
// where a warp exchanges numbers. Threads run in rising order from one barrier to the next, or in falling order: code
// that lacks a barrier differs. What lies around every __shared__ array is looked at after each block, and a kernel ends
// where it touches memory that is not there: cuda_on_host.py puts such pages around the operands.

#include <signal.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

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
inline unsigned atomicAdd(unsigned* place, unsigned value) {
    const unsigned before = *place;
    *place = before + value;
    return before;
}
inline void __threadfence() {}
template <class T>
T __ldcs(const T* place) {
    return *place;
}
template <class T>
void __stcs(T* place, T value) {
    *place = value;
}
inline void atomicMin(unsigned long long* place, unsigned long long value) { *place = min(*place, value); }

namespace host {

constexpr std::size_t STACK_BYTES = 65536;
constexpr int OK = 0, BARRIER_MISSED = 1, SHARED_OVERRUN = 2, BAD_ADDRESS = 3;
constexpr std::size_t GUARD_BYTES = 4096;
constexpr unsigned char GUARD = 0xff;  // NaN, and no winner, to whoever reads it
constexpr unsigned WARP = 32;
enum Wait { NOTHING, ITS_WARP, ITS_BLOCK };

struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    bool done = false;
    Wait wait = NOTHING;
    unsigned char given[8];  // to the others of its warp
};
static std::vector<Fibre> fibres;
static ucontext_t scheduler;
static unsigned current;
static std::function<void()> body;
static volatile sig_atomic_t faulted;

struct Guards {
    unsigned char *before, *after;

    bool whole() const { return is_whole(before) && is_whole(after); }
    void fill() const { std::memset(before, GUARD, GUARD_BYTES), std::memset(after, GUARD, GUARD_BYTES); }
    static bool is_whole(const unsigned char* bytes) {
        return bytes[0] == GUARD && std::memcmp(bytes, bytes + 1, GUARD_BYTES - 1) == 0;
    }
};
inline std::vector<Guards>& guards() {
    static std::vector<Guards> all;
    return all;
}

// A __shared__ variable between guards.
template <class T>
struct Shared {
    unsigned char before[GUARD_BYTES];
    alignas(16) T value;
    unsigned char after[GUARD_BYTES];

    Shared() {
        const Guards mine{before, after};
        mine.fill();
        guards().push_back(mine);
    }
};

inline bool guards_are_whole() {
    bool whole = true;
    for (const Guards& each : guards())
        if (!each.whole()) whole = false, each.fill();
    return whole;
}

// While it lives, a thread that touches memory that is not there gives way for good.
class FaultWatch {
    struct sigaction before;

    static void on_fault(int) {
        faulted = 1;
        setcontext(&scheduler);
    }

public:
    FaultWatch() {
        faulted = 0;
        struct sigaction action {};
        action.sa_handler = on_fault;
        sigaction(SIGSEGV, &action, &before);
    }
    ~FaultWatch() { sigaction(SIGSEGV, &before, nullptr); }
};

inline void enter() {
    body();
    fibres[current].done = true;
    swapcontext(&fibres[current].context, &scheduler);
}

inline void give_way(Wait wait) {
    const unsigned me = current;
    fibres[me].wait = wait;
    swapcontext(&fibres[me].context, &scheduler);
}

// Lets the threads go on whose warps have all arrived, or if there are none, all; false if some can never go on.
inline bool release(unsigned threads) {
    bool some = false, whole = true;
    for (unsigned first = 0; first < threads; first += WARP) {
        bool all = true;
        for (unsigned t = first; t < min(first + WARP, threads); ++t) all = all && fibres[t].wait == ITS_WARP;
        for (unsigned t = first; all && t < min(first + WARP, threads); ++t) fibres[t].wait = NOTHING;
        some = some || all;
    }
    if (some) return true;
    for (unsigned t = 0; t < threads; ++t) whole = whole && fibres[t].wait == ITS_BLOCK;
    for (unsigned t = 0; whole && t < threads; ++t) fibres[t].wait = NOTHING;
    return whole;
}

// Runs blocks `first` to `end` of `threads` threads; BARRIER_MISSED if some threads of a block end while others wait,
// SHARED_OVERRUN if one writes beside a __shared__ variable, BAD_ADDRESS if one touches memory that is not there.
inline int run(unsigned first, unsigned end, unsigned threads, bool falling, std::function<void()> kernel) {
    const FaultWatch watch;
    body = kernel;
    if (fibres.size() < threads) fibres = std::vector<Fibre>(threads);
    for (unsigned b = first; b < end; ++b) {
        blockIdx = {falling ? first + (end - 1 - b) : b, 0, 0};
        for (unsigned t = 0; t < threads; ++t) {
            Fibre& fibre = fibres[t];
            fibre.done = false, fibre.wait = NOTHING;
            getcontext(&fibre.context);
            fibre.context.uc_stack.ss_sp = fibre.stack.get();
            fibre.context.uc_stack.ss_size = STACK_BYTES;
            fibre.context.uc_link = nullptr;
            makecontext(&fibre.context, enter, 0);
        }
        for (unsigned done = 0; done < threads;) {
            for (unsigned i = 0; i < threads; ++i) {
                current = falling ? threads - 1 - i : i;
                if (fibres[current].done || fibres[current].wait != NOTHING) continue;
                threadIdx = {current, 0, 0};
                swapcontext(&scheduler, &fibres[current].context);
                if (faulted) return BAD_ADDRESS;
                done += fibres[current].done;
            }
            if (done < threads && !release(threads)) return BARRIER_MISSED;
        }
        if (!guards_are_whole()) return SHARED_OVERRUN;
    }
    return OK;
}

}  // namespace host

inline void __syncthreads() { host::give_way(host::ITS_BLOCK); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
    const unsigned me = host::current;
    std::memcpy(host::fibres[me].given, &value, sizeof value);
    host::give_way(host::ITS_WARP);
    T other;
    std::memcpy(&other, host::fibres[me ^ lanes].given, sizeof other);
    host::give_way(host::ITS_WARP);
    return other;
}

// What the threads of a warp hold; all of them make one at the same time.
template <int COUNT>
struct Lanes {
    static inline float held[1024][COUNT];
    explicit Lanes(const float (&values)[COUNT]) {
        std::memcpy(held[host::current], values, sizeof values);
        host::give_way(host::ITS_WARP);
    }
    ~Lanes() { host::give_way(host::ITS_WARP); }
    float get(int i, unsigned lane) const { return held[host::current / host::WARP * host::WARP + lane][i]; }
};
