// Softmax of rows of K scores, and of a training step its loss and gradient too; see softmax.py and softmax_loss.py.
//
// A row is held in registers between its one read and its one write: by 8 or 32 threads if it is short, by a block, or
// by several blocks. These tell each other what they found and wait a while for it. Nothing depends on whether all of
// them run at once: a block that has waited in vain ends, and a second launch does what it has left undone, in equal
// bits. Sums are taken in an order that K alone decides.

constexpr int WARP = 32;
constexpr int SHORT_LANES = 8;
constexpr int SHORT_HELD = 4;  // numbers of a thread, where SHORT_LANES have a row, a warp, a block, or several blocks
constexpr int WARP_HELD = 8;
constexpr int BLOCK_HELD = 8;
constexpr int PART_HELD = 32;
constexpr int POLLS = 4096;  // before a block gives up waiting for the others of its row: about 2 ms

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

// What some threads know of a row beside its largest score: sums of exp(score - largest) and of scores, and how many
// scores come before that of the label.
struct Found {
    double total, sum;
    u32 beaten;

    __device__ void add(double more_total, double more_sum, u32 more_beaten) {
        total += more_total, sum += more_sum, beaten += more_beaten;
    }
};

// The same of one block among those of a row.
struct Partial {
    double total, sum;
    float largest;
    u32 beaten;
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

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
        __syncthreads();
    }
    return value;
}

template <int GROUP>
__device__ __forceinline__ Found sum_of(Found own) {
#pragma unroll
    for (int other = (GROUP < WARP ? GROUP : WARP) / 2; other > 0; other /= 2) {
        const double total = __shfl_xor_sync(0xffffffffu, own.total, other);
        const double sum = __shfl_xor_sync(0xffffffffu, own.sum, other);
        own.add(total, sum, __shfl_xor_sync(0xffffffffu, own.beaten, other));
    }
    if constexpr (GROUP > WARP) {
        __shared__ Found held[GROUP / WARP];
        if (threadIdx.x % WARP == 0) held[threadIdx.x / WARP] = own;
        __syncthreads();
        own = held[0];
#pragma unroll
        for (int w = 1; w < GROUP / WARP; ++w) own.add(held[w].total, held[w].sum, held[w].beaten);
        __syncthreads();
    }
    return own;
}

// The scores of a row from `start` to `end` in the registers of GROUP threads, HELD a thread, loaded WIDTH at once.
// With WIDTH above 1 the host has found rows and parts of whole groups.
template <int GROUP, int HELD, int WIDTH>
struct Row {
    static constexpr int LOADS = HELD / WIDTH;
    float value[LOADS][WIDTH];
    int start, end, lane;

    __device__ int index(int j) const { return start + (j * GROUP + lane) * WIDTH; }

    __device__ __forceinline__ Row(const Real* row, int start, int end, int lane) : start(start), end(end), lane(lane) {
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            if (index(j) < end) {
                load<true>(row, index(j), end, value[j]);
            } else {
#pragma unroll
                for (int w = 0; w < WIDTH; ++w) value[j][w] = minus_infinity();
            }
    }

    __device__ __forceinline__ float largest() const {
        float found = minus_infinity();  // a NaN is passed over: it makes the sum one
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) found = fmaxf(found, value[j][w]);
        return largest_of<GROUP>(found);
    }

    // How many scores come before that of the label: larger ones, equal ones with a smaller index, and NaN.
    __device__ __forceinline__ u32 before(float of_label, int label) const {
        u32 count = 0;
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                const float v = value[j][w];
                const bool first = index(j) + w < label;
                const bool larger = of_label == of_label && !(v <= of_label);
                const bool equal = v == of_label || (v != v && of_label != of_label);
                count += larger || (equal && first);
            }
        return count;
    }

    __device__ __forceinline__ double sum() const {
        double found = 0;
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            if (index(j) < end)
#pragma unroll
                for (int w = 0; w < WIDTH; ++w) found += value[j][w];
        return found;
    }

    // Replaces every score by exp(score - largest); their sum over this thread.
    __device__ __forceinline__ double to_exponentials(float largest) {
        const float base = largest == minus_infinity() ? 0.0f : largest;
        double total = 0;
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            float few = 0;
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                value[j][w] = expf(value[j][w] - base);
                few += value[j][w];
            }
            total += few;
        }
        return total;
    }

    template <class T>
    __device__ __forceinline__ void store_probs(T* probs, float factor) const {
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (index(j) >= end) continue;
            float out[WIDTH];
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) out[w] = value[j][w] * factor;
            store<true>(probs, index(j), end, out);
        }
    }

    __device__ __forceinline__ void store_gradient(
        Real* y, float factor, int label, float share, float at_label, float scale, bool accumulate) const {
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (index(j) >= end) continue;
            float out[WIDTH], old[WIDTH] = {};
            if (accumulate) load<true>(y, index(j), end, old);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                const float probability = value[j][w] * factor;
                const float gradient = (probability - share - (index(j) + w == label ? at_label : 0.0f)) * scale;
                out[w] = accumulate ? old[w] + gradient : gradient;
            }
            store<true>(y, index(j), end, out);
        }
    }
};

// The label of a row, and its score. A label outside of 0 .. K - 1 gives a loss and a gradient that are not numbers: no
// host waits here to raise an error.
struct Label {
    int index;
    float score;
    bool known;

    __device__ Label(const Scores& in, u32 row) : index(-1), score(not_a_number()), known(false) {
        if (in.labels == nullptr || row >= in.n) return;
        index = in.labels[row];
        known = index >= 0 && index < in.k;
        if (known) score = in.x[i64(row) * in.stride + index];
    }
};

template <class R>
__device__ __forceinline__ void store_row(
    const R& held, const Scores& in, const Results& out, u32 row, const Label& label, float factor) {
    if (out.probs != nullptr) held.store_probs(out.probs + i64(row) * in.k, factor);
    if (out.y == nullptr) return;
    Real* y = out.y + i64(row) * out.y_stride;
    if (in.labels == nullptr) {
        held.store_probs(y, factor);
    } else {
        const float scale = label.known ? float(out.weight * out.step->gradient_scale) : not_a_number();
        held.store_gradient(y, factor, label.index, out.share, out.at_label, scale, out.accumulate);
    }
}

__device__ __forceinline__ void store_loss(
    const Scores& in, const Results& out, u32 row, const Label& label, float largest, const Found& whole) {
    if (out.loss == nullptr) return;
    const float of_label = label.score - largest, mean = float(whole.sum / in.k - largest);
    out.loss[row] = logf(float(whole.total)) - (1 - out.smoothing) * of_label - out.smoothing * mean;
    out.correct[row] = label.known && whole.beaten == 0;
}

// A row by GROUP threads; nothing is stored for rows from in.n on.
template <int GROUP, int HELD, int WIDTH>
__device__ __forceinline__ void softmax_row(const Scores& in, const Results& out) {
    const u32 row = blockIdx.x * (THREADS / GROUP) + threadIdx.x / GROUP;
    const int lane = threadIdx.x % GROUP;
    Row<GROUP, HELD, WIDTH> held(in.x + i64(row) * in.stride, 0, row < in.n ? in.k : 0, lane);
    const Label label(in, row);  // after the loads of the row, as its second load waits for the first
    Found own{0, 0, 0};
    if (in.labels != nullptr) own.sum = held.sum(), own.beaten = held.before(label.score, label.index);
    const float largest = held.largest();
    own.total = held.to_exponentials(largest);
    const Found whole = sum_of<GROUP>(own);
    if (row >= in.n) return;
    store_row(held, in, out, row, label, 1 / float(whole.total));
    if (lane == 0) store_loss(in, out, row, label, largest, whole);
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
    else if (width == WIDE)
        softmax_row<THREADS, BLOCK_HELD, WIDE>(in, out);
    else
        softmax_row<THREADS, BLOCK_HELD, 1>(in, out);
}

// What the blocks of a row tell each other. All of `arrived` and `done` is 0 before the first launch.
struct Meeting {
    u32 splits;
    Partial* partials;  // [row][split]
    u32* arrived;       // [row]: blocks that have told
    u32* done;          // [row][split]: whether the first launch has stored the part

    // True once all blocks of the row have told; thread 0 alone waits, and not for ever.
    __device__ __forceinline__ bool tell(u32 row, u32 split, float largest, const Found& own) const {
        __shared__ u32 ready;
        if (threadIdx.x == 0) {
            Partial& place = partials[i64(row) * splits + split];
            place.total = own.total, place.sum = own.sum, place.largest = largest, place.beaten = own.beaten;
            __threadfence();
            atomicAdd(arrived + row, 1u);
            const volatile u32* count = arrived + row;
            u32 seen = *count;
            for (int poll = 0; seen != splits && poll < POLLS; ++poll) seen = *count;
            __threadfence();
            ready = seen == splits;
            if (ready) done[i64(row) * splits + split] = 1;
        }
        __syncthreads();
        return ready;
    }

    // The whole row, by all threads of a block; never by way of the L1 cache, which may hold what was there before.
    __device__ __forceinline__ Found whole(u32 row, float& largest) const {
        const volatile Partial* told = partials + i64(row) * splits;
        float most = minus_infinity();
        for (u32 s = threadIdx.x; s < splits; s += THREADS) most = fmaxf(most, told[s].largest);
        largest = largest_of<THREADS>(most);
        Found own{0, 0, 0};
        for (u32 s = threadIdx.x; s < splits; s += THREADS)
            own.add(told[s].total * relative(told[s].largest, largest), told[s].sum, told[s].beaten);
        return sum_of<THREADS>(own);
    }

    // By what exponentials relative to `own` are multiplied where they are to be relative to `largest`.
    static __device__ __forceinline__ float relative(float own, float largest) {
        return expf(own - (largest == minus_infinity() ? 0.0f : largest));
    }
};

// LABELLED says that there are labels; a plain softmax then takes fewer registers, and has more blocks at once.
template <bool LABELLED, int WIDTH>
__device__ __forceinline__ void softmax_part(
    const Scores& in, const Results& out, const Meeting& meeting, int part, bool again) {
    const u32 row = blockIdx.x / meeting.splits, split = blockIdx.x - row * meeting.splits;
    if (again && meeting.done[blockIdx.x]) return;
    const int start = int(split) * part, end = min(start + part, in.k);
    Row<THREADS, PART_HELD, WIDTH> held(in.x + i64(row) * in.stride, start, end, threadIdx.x);
    const Label label(in, row);
    Found own{0, 0, 0};
    if (LABELLED) own.sum = held.sum(), own.beaten = held.before(label.score, label.index);
    const float own_largest = held.largest();
    own.total = held.to_exponentials(own_largest);
    Found whole = sum_of<THREADS>(own);
    float largest = own_largest, factor = 1 / float(whole.total);
    if (meeting.splits > 1) {
        if (!again && !meeting.tell(row, split, own_largest, whole)) return;
        whole = meeting.whole(row, largest);
        factor = Meeting::relative(own_largest, largest) / float(whole.total);
    }
    store_row(held, in, out, row, label, factor);
    if (LABELLED && split == 0 && threadIdx.x == 0) store_loss(in, out, row, label, largest, whole);
}

// A row by `splits` blocks, of `part` scores each; `again` in the second launch, where there are several.
extern "C" __global__ void __launch_bounds__(THREADS, 3) softmax_parts(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u32 n, int k, u32 splits, int part, Partial* partials,
    u32* arrived, u32* done, int again, int width) {
    const Scores in{x, x_stride, n, k, nullptr};
    const Results out{nullptr, nullptr, nullptr, y, y_stride};
    const Meeting meeting{splits, partials, arrived, done};
    if (width == WIDE)
        softmax_part<false, WIDE>(in, out, meeting, part, again != 0);
    else
        softmax_part<false, 1>(in, out, meeting, part, again != 0);
}

// The same with loss, and probabilities or gradient.
extern "C" __global__ void __launch_bounds__(THREADS, 2) softmax_loss_parts(
    const Real* x, i64 x_stride, const int* labels, const StepRecord* step, float* probs, float* loss, u8* correct,
    Real* y, i64 y_stride, u32 n, int k, float smoothing, float share, float at_label, double weight, int accumulate,
    u32 splits, int part, Partial* partials, u32* arrived, u32* done, int again, int width) {
    const Scores in{x, x_stride, n, k, labels};
    const Results out{
        probs, loss, correct, y, y_stride, step, smoothing, share, at_label, weight, accumulate != 0};
    const Meeting meeting{splits, partials, arrived, done};
    if (width == WIDE)
        softmax_part<true, WIDE>(in, out, meeting, part, again != 0);
    else
        softmax_part<true, 1>(in, out, meeting, part, again != 0);
}
