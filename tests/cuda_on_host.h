// CUDA as host C++: a grid runs block by block, the threads of a block as fibres that give way at __syncthreads, and
// where a warp exchanges numbers. Where blocks wait for each other, by __nanosleep, some run in turns. Threads run in rising order from one barrier to the next, or in falling order: code
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
constexpr int OK = 0, BARRIER_MISSED = 1, SHARED_OVERRUN = 2, BAD_ADDRESS = 3, WAITS_FOR_EVER = 4;
constexpr std::size_t GUARD_BYTES = 4096;
constexpr unsigned char GUARD = 0xff;  // NaN, and no winner, to whoever reads it
constexpr unsigned WARP = 32;
enum Wait { NOTHING, ITS_WARP, ITS_BLOCK, OTHER_BLOCKS };

struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    bool done = false;
    Wait wait = NOTHING;
    unsigned char given[8];  // to the others of its warp
};
// A block that has begun, and what its __shared__ variables hold while another runs.
struct Block {
    std::vector<Fibre> own;
    unsigned index = 0, done = 0;
    std::vector<std::vector<unsigned char>> shared;
};
static std::vector<Fibre> none, *of_block = &none;
inline std::vector<Fibre>& fibres() { return *of_block; }
static ucontext_t scheduler;
static unsigned current;
static std::function<void()> body;
static volatile sig_atomic_t faulted;

struct Guards {
    unsigned char *before, *after, *value;
    std::size_t size;

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
        const Guards mine{before, after, reinterpret_cast<unsigned char*>(&value), sizeof value};
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
    fibres()[current].done = true;
    swapcontext(&fibres()[current].context, &scheduler);
}

inline void give_way(Wait wait) {
    const unsigned me = current;
    fibres()[me].wait = wait;
    swapcontext(&fibres()[me].context, &scheduler);
}

// Lets the threads go on whose warps have all arrived, or if there are none, all; false if some can never go on.
inline bool release(unsigned threads) {
    bool some = false, whole = true;
    for (unsigned first = 0; first < threads; first += WARP) {
        bool all = true;
        for (unsigned t = first; t < min(first + WARP, threads); ++t) all = all && fibres()[t].wait == ITS_WARP;
        for (unsigned t = first; all && t < min(first + WARP, threads); ++t) fibres()[t].wait = NOTHING;
        some = some || all;
    }
    if (some) return true;
    for (unsigned t = 0; t < threads; ++t) whole = whole && fibres()[t].wait == ITS_BLOCK;
    for (unsigned t = 0; whole && t < threads; ++t) fibres()[t].wait = NOTHING;
    return whole;
}

inline void begin(Block& block, unsigned index, unsigned threads) {
    block.index = index, block.done = 0;
    if (block.own.size() < threads) block.own = std::vector<Fibre>(threads);
    for (unsigned t = 0; t < threads; ++t) {
        Fibre& fibre = block.own[t];
        fibre.done = false, fibre.wait = NOTHING;
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.get();
        fibre.context.uc_stack.ss_size = STACK_BYTES;
        fibre.context.uc_link = nullptr;
        makecontext(&fibre.context, enter, 0);
    }
}

// Takes `block` in turn: its threads run until all have ended, or all that can go on wait for other blocks. `went_on`
// says whether one did anything but look whether it must still wait.
inline int take_turn(Block& block, unsigned threads, bool falling, bool& went_on) {
    of_block = &block.own, blockIdx = {block.index, 0, 0};
    for (Fibre& fibre : block.own)
        if (fibre.wait == OTHER_BLOCKS) fibre.wait = NOTHING;
    while (block.done < threads) {
        bool waits = false;
        for (unsigned i = 0; i < threads; ++i) {
            current = falling ? threads - 1 - i : i;
            if (fibres()[current].done || fibres()[current].wait != NOTHING) continue;
            threadIdx = {current, 0, 0};
            swapcontext(&scheduler, &fibres()[current].context);
            if (faulted) return BAD_ADDRESS;
            block.done += fibres()[current].done;
            went_on = went_on || fibres()[current].wait != OTHER_BLOCKS;
        }
        for (unsigned t = 0; t < threads; ++t) waits = waits || (!fibres()[t].done && fibres()[t].wait == OTHER_BLOCKS);
        if (block.done < threads && !release(threads)) return waits ? OK : BARRIER_MISSED;
    }
    return OK;
}

inline void keep_shared(Block& block) {
    block.shared.clear();
    for (const Guards& each : guards()) block.shared.emplace_back(each.value, each.value + each.size);
}
inline void restore_shared(const Block& block) {
    for (std::size_t i = 0; i < block.shared.size(); ++i)
        std::memcpy(guards()[i].value, block.shared[i].data(), block.shared[i].size());
}

// Runs blocks `first` to `end` of `threads` threads, `together` of them in turns; BARRIER_MISSED if some threads of a
// block end while others wait, SHARED_OVERRUN if one writes beside a __shared__ variable, BAD_ADDRESS if one touches
// memory that is not there, WAITS_FOR_EVER if all wait for blocks that have not begun or never tell.
inline int run(
    unsigned first, unsigned end, unsigned threads, bool falling, unsigned together, std::function<void()> kernel) {
    static std::vector<Block> blocks;
    const FaultWatch watch;
    body = kernel;
    if (blocks.size() < together) blocks = std::vector<Block>(together);
    std::vector<Block*> free, busy;
    for (Block& block : blocks) free.push_back(&block);
    for (unsigned b = first; b < end || !busy.empty();) {
        for (; b < end && !free.empty(); ++b) {
            begin(*free.back(), falling ? first + (end - 1 - b) : b, threads);
            busy.push_back(free.back()), free.back()->shared.clear(), free.pop_back();
        }
        bool went_on = false;
        for (std::size_t i = 0; i < busy.size();) {
            Block& block = *busy[i];
            restore_shared(block);
            if (const int error = take_turn(block, threads, falling, went_on)) return error;
            if (!guards_are_whole()) return SHARED_OVERRUN;
            if (block.done == threads) {
                free.push_back(&block), busy.erase(busy.begin() + i);
            } else {
                keep_shared(block), ++i;
            }
        }
        if (!went_on) return WAITS_FOR_EVER;
    }
    return OK;
}

}  // namespace host

inline void __nanosleep(unsigned) { host::give_way(host::OTHER_BLOCKS); }
inline void __syncthreads() { host::give_way(host::ITS_BLOCK); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
    const unsigned me = host::current;
    std::memcpy(host::fibres()[me].given, &value, sizeof value);
    host::give_way(host::ITS_WARP);
    T other;
    std::memcpy(&other, host::fibres()[me ^ lanes].given, sizeof other);
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
