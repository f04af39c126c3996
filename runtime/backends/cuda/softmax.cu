// Softmax of rows of K scores, and of a training step its loss and gradient too; see softmax.py and softmax_loss.py.
//
// A row is held in registers between its one read and its one write: by 8 or 32 threads if it is short, else by a block.
// Kernels of rows of more than a few thousand scores are in softmax_parts.cu. Sums are float in trees of a few numbers a branch, in an order that
// K and the width of loads alone decide.

constexpr int WARP = 32;
constexpr int SHORT_LANES = 8;
constexpr int SHORT_HELD = 4;  // numbers of a thread, where SHORT_LANES have a row, a warp, or a block
constexpr int WARP_HELD = 8;
constexpr int BLOCK_HELD = 8;
constexpr int PART_LOADS = 8;  // of 16 bytes a thread, by a block that has a long row or a part of one
constexpr int LONG_LOADS = 16;  // the same of a plain softmax whose row is one block's, and longer
constexpr int PART_HELD = 32;  // numbers of a thread where loads are of one number

struct Scores {
    const Real* x;
    i64 stride;
    u32 n;
    int k;
    const int* labels;  // null for a plain softmax
};

// Where results go; null where one is not wanted. Of a plain softmax y is the probabilities, else their gradient.
struct Results {
    float* probs;
    float* loss;
    u8* correct;
    Real* y;
    i64 y_stride;
    const StepRecord* step;
    float smoothing, share, at_label;
    double weight;
    bool accumulate;
};

// What some threads know of a row: the largest score, sums of exp(score - largest) and of scores, and whether a score
// comes before that of the label. Without labels the last two are 0.
struct Found {
    float largest, total, sum;
    u32 beaten;
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// e^x. Where results are rounded to 16 bits, two instructions are exact enough.
__device__ __forceinline__ float exponential(float x) {
    if constexpr (sizeof(Real) == sizeof(float))
        return expf(x);
    else
        return exp2f(x * 1.44269504f);
}

// What is subtracted from scores: 0 in place of minus infinity, so that a row without a finite score gives no NaN early.
__device__ __forceinline__ float base_of(float largest) { return largest == minus_infinity() ? 0.0f : largest; }

// By what exponentials relative to `own` are multiplied where they are to be relative to `largest`.
__device__ __forceinline__ float relative(float own, float largest) { return expf(own - base_of(largest)); }

// Of a block, largest_of and sum_of must take turns: the barrier of each is what lets the other be called again.
template <int GROUP>
__device__ __forceinline__ float largest_of(float value) {
#pragma unroll
    for (int other = (GROUP < WARP ? GROUP : WARP) / 2; other > 0; other /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, other));
    if constexpr (GROUP > WARP) {
        __shared__ float held[GROUP / WARP];
        if (threadIdx.x % WARP == 0) held[threadIdx.x / WARP] = value;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < GROUP / WARP; ++w) value = fmaxf(value, held[w]);
    }
    return value;
}

struct Sums {
    float total, sum;
    u32 beaten;
    __device__ __forceinline__ Sums operator+(const Sums& more) const {
        return {total + more.total, sum + more.sum, beaten | more.beaten};
    }
};

template <int GROUP>
__device__ __forceinline__ Sums sum_of(Sums own, bool labelled) {
#pragma unroll
    for (int other = (GROUP < WARP ? GROUP : WARP) / 2; other > 0; other /= 2) {
        Sums more{__shfl_xor_sync(0xffffffffu, own.total, other), 0, 0};
        if (labelled) {
            more.sum = __shfl_xor_sync(0xffffffffu, own.sum, other);
            more.beaten = __shfl_xor_sync(0xffffffffu, own.beaten, other);
        }
        own = own + more;
    }
    if constexpr (GROUP > WARP) {
        static_assert(GROUP / WARP == 8, "a tree of 8 warps");
        __shared__ Sums held[GROUP / WARP];
        if (threadIdx.x % WARP == 0) held[threadIdx.x / WARP] = own;
        __syncthreads();
        own = ((held[0] + held[1]) + (held[2] + held[3])) + ((held[4] + held[5]) + (held[6] + held[7]));
    }
    return own;
}

// WIDTH numbers in registers as they lie in memory: 16 bytes, or one number.
template <int WIDTH>
struct Packed {
    uint4 bits;

    // LAST says that they are not read again soon, so that the cache may drop them first.
    template <bool LAST>
    __device__ __forceinline__ void read(const Real* at) {
        const uint4* from = reinterpret_cast<const uint4*>(at);
        bits = LAST ? __ldcs(from) : *from;
    }
    __device__ __forceinline__ void pack(const float (&value)[WIDTH]) {
        store_all(reinterpret_cast<Real*>(&bits), value);
    }
    __device__ __forceinline__ void unpack(float (&out)[WIDTH]) const {
        load_all(reinterpret_cast<const Real*>(&bits), out);
    }
    // Lets the compiler not keep what was unpacked for the next pass, for which registers of 16-bit numbers are too few.
    __device__ __forceinline__ void forget() {
#if __CUDA_ARCH__ > 0
        asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
#endif
    }
};

template <>
struct Packed<1> {
    float value;

    template <bool LAST>
    __device__ __forceinline__ void read(const Real* at) {
        value = float(*at);
    }
    __device__ __forceinline__ void pack(const float (&in)[1]) { value = in[0]; }
    __device__ __forceinline__ void unpack(float (&out)[1]) const { out[0] = value; }
    __device__ __forceinline__ void forget() {}
};

// WIDTH results; LAST as of Packed.
template <bool LAST, int WIDTH, class T>
__device__ __forceinline__ void store_results(T* row, i64 i, i64 end, const float (&value)[WIDTH]) {
    if constexpr (LAST && sizeof(T) == sizeof(Real) && WIDTH > 1) {
        Packed<WIDTH> packed;
        packed.pack(value);
        __stcs(reinterpret_cast<uint4*>(row + i), packed.bits);
    } else {
        store<true>(row, i, end, value);
    }
}

// The label of a row, what its gradient is multiplied by, and its score. A label outside of 0 .. K - 1 gives a loss and
// a gradient that are not numbers: no host waits here to raise an error. Made before the row is loaded, so that these
// loads are under way with those of the row; the score, which waits for the label, comes after.
struct Label {
    int index;
    float scale, score;
    bool known;

    __device__ __forceinline__ Label(const Scores& in, const Results& out, u32 row)
        : index(-1), scale(0), score(not_a_number()), known(false) {
        if (in.labels == nullptr || row >= in.n) return;
        index = in.labels[row];
        if (out.step != nullptr) scale = float(out.weight * out.step->gradient_scale);
    }
    __device__ __forceinline__ void judge(int k) {
        known = index >= 0 && index < k;
        if (!known) scale = not_a_number();
    }
    __device__ __forceinline__ void read(const Scores& in, u32 row) {
        if (in.labels == nullptr || row >= in.n) return;
        judge(in.k);
        if (known) score = in.x[i64(row) * in.stride + index];
    }
};

// The scores of a row from `start` to `end` in the registers of GROUP threads, LOADS times WIDTH a thread. With WIDTH
// above 1 the host has found rows and parts of whole groups.
template <int GROUP, int LOADS, int WIDTH>
struct Row {
    static constexpr int SPREAD = LOADS < 4 ? LOADS : 4;  // sums that a thread makes side by side
    Packed<WIDTH> held[LOADS];
    int start, end, lane;

    __device__ __forceinline__ int index(int j) const { return start + (j * GROUP + lane) * WIDTH; }

    template <bool LAST>
    __device__ __forceinline__ void read(const Real* row, int from, int to, int of_group) {
        start = from, end = to, lane = of_group;
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            if (index(j) < end) {
                held[j].template read<LAST>(row + index(j));
            } else {
                float none[WIDTH];
#pragma unroll
                for (int w = 0; w < WIDTH; ++w) none[w] = minus_infinity();
                held[j].pack(none);
            }
    }

    __device__ __forceinline__ void forget() {
        if constexpr (sizeof(Real) != sizeof(float))
#pragma unroll
            for (int j = 0; j < LOADS; ++j) held[j].forget();
    }

    __device__ __forceinline__ float largest() const {
        float found = minus_infinity();  // a NaN is passed over: it makes the sum one
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            float value[WIDTH];
            held[j].unpack(value);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) found = fmaxf(found, value[w]);
        }
        return largest_of<GROUP>(found);
    }

    // The sum of scores, and whether one comes before that of the label: a larger one, an equal one with a smaller
    // index, or NaN.
    __device__ __forceinline__ Sums against(const Label& label) const {
        Sums own{0, 0, 0};
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (index(j) >= end) continue;
            float value[WIDTH], few = 0;
            held[j].unpack(value);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                const float v = value[w];
                const bool first = index(j) + w < label.index;
                const bool larger = label.score == label.score && !(v <= label.score);
                const bool equal = v == label.score || (v != v && label.score != label.score);
                own.beaten |= larger || (equal && first);
                few += v;
            }
            own.sum += few;
        }
        return own;
    }

    // The sum over this thread of exp(score - largest). Of 32 bits they replace the scores; of 16 bits there is no room
    // for them, and they are computed twice.
    __device__ __forceinline__ float to_exponentials(float largest) {
        const float base = base_of(largest);
        float total[SPREAD] = {};
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            float value[WIDTH], few = 0;
            held[j].unpack(value);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                value[w] = exponential(value[w] - base);
                few += value[w];
            }
            if constexpr (sizeof(Real) == sizeof(float)) held[j].pack(value);
            total[j % SPREAD] += few;
        }
#pragma unroll
        for (int s = 1; s < SPREAD; s *= 2)
#pragma unroll
            for (int first = 0; first + s < SPREAD; first += 2 * s) total[first] += total[first + s];
        return total[0];
    }

    // Of this thread's scores number j; to_exponentials has been called.
    __device__ __forceinline__ void probabilities(int j, float largest, float factor, float (&out)[WIDTH]) const {
        held[j].unpack(out);
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            if constexpr (sizeof(Real) != sizeof(float)) out[w] = exponential(out[w] - base_of(largest));
            out[w] *= factor;
        }
    }

    template <bool LAST, class T>
    __device__ __forceinline__ void store_probs(T* probs, float largest, float factor) const {
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (index(j) >= end) continue;
            float out[WIDTH];
            probabilities(j, largest, factor, out);
            store_results<LAST>(probs, index(j), end, out);
        }
    }

    template <bool LAST>
    __device__ __forceinline__ void store_gradient(
        const Results& to, Real* y, float largest, float factor, const Label& label) const {
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (index(j) >= end) continue;
            float out[WIDTH], old[WIDTH] = {};
            if (to.accumulate) load<true>(y, index(j), end, old);
            probabilities(j, largest, factor, out);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                const float at_label = index(j) + w == label.index ? to.at_label : 0.0f;
                const float gradient = (out[w] - to.share - at_label) * label.scale;
                out[w] = to.accumulate ? old[w] + gradient : gradient;
            }
            store_results<LAST>(y, index(j), end, out);
        }
    }

    // What is wanted of a row, or a part of one.
    template <bool LAST>
    __device__ __forceinline__ void store(
        const Scores& in, const Results& out, u32 row, const Label& label, float largest, float factor) const {
        if (out.probs != nullptr) store_probs<LAST>(out.probs + i64(row) * in.k, largest, factor);
        if (out.y == nullptr) return;
        Real* y = out.y + i64(row) * out.y_stride;
        if (in.labels == nullptr)
            store_probs<LAST>(y, largest, factor);
        else
            store_gradient<LAST>(out, y, largest, factor, label);
    }

    // What the group finds, each of its threads knowing all of it; the scores become exponentials.
    __device__ __forceinline__ Found find(const Label& label, bool labelled) {
        const float most = largest();
        Sums own{0, 0, 0};
        forget();
        if (labelled) own = against(label);
        forget();
        own.total = to_exponentials(most);
        forget();
        own = sum_of<GROUP>(own, labelled);
        return {most, own.total, own.sum, own.beaten};
    }
};

__device__ __forceinline__ void store_loss(
    const Scores& in, const Results& out, u32 row, const Label& label, float largest, float total, double sum,
    bool beaten) {
    if (out.loss == nullptr) return;
    const float of_label = label.score - largest, mean = float(sum / in.k - largest);
    out.loss[row] = logf(total) - (1 - out.smoothing) * of_label - out.smoothing * mean;
    out.correct[row] = label.known && !beaten;
}

// A row by GROUP threads; nothing is stored for rows from in.n on.
template <int GROUP, int LOADS, int WIDTH>
__device__ __forceinline__ void softmax_row(const Scores& in, const Results& out) {
    const u32 row = blockIdx.x * (THREADS / GROUP) + threadIdx.x / GROUP;
    const int lane = threadIdx.x % GROUP;
    Label label(in, out, row);
    Row<GROUP, LOADS, WIDTH> held;
    held.template read<false>(in.x + i64(row) * in.stride, 0, row < in.n ? in.k : 0, lane);
    label.read(in, row);
    const Found found = held.find(label, in.labels != nullptr);
    if (row >= in.n) return;
    held.template store<false>(in, out, row, label, found.largest, 1 / found.total);
    if (lane == 0) store_loss(in, out, row, label, found.largest, found.total, found.sum, found.beaten != 0);
}

// `lanes` threads a row: SHORT_LANES, WARP, or THREADS. `width` is WIDE where every row begins at a multiple of 16
// bytes and has whole groups, else 1.
extern "C" __global__ void __launch_bounds__(THREADS) softmax_rows(
    const Real* x, i64 x_stride, const int* labels, const StepRecord* step, float* probs, float* loss, u8* correct,
    Real* y, i64 y_stride, u32 n, int k, float smoothing, float share, float at_label, double weight, int accumulate,
    int lanes, int width) {
    const Scores in{x, x_stride, n, k, labels};
    const Results out{
        probs, loss, correct, y, y_stride, step, smoothing, share, at_label, weight, accumulate != 0};
    if (lanes == SHORT_LANES)
        softmax_row<SHORT_LANES, SHORT_HELD, 1>(in, out);
    else if (lanes == WARP)
        softmax_row<WARP, WARP_HELD, 1>(in, out);
    else if (width == 1)
        softmax_row<THREADS, BLOCK_HELD, 1>(in, out);
    else if (k <= THREADS * WIDE)
        softmax_row<THREADS, 1, WIDE>(in, out);
    else
        softmax_row<THREADS, BLOCK_HELD / WIDE, WIDE>(in, out);
}
