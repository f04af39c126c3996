// Softmax of long rows, by a block or in parts; see softmax.cu and softmax.py.

// A long row by a block, up to PART_LOADS a thread.
extern "C" __global__ void __launch_bounds__(THREADS, 3) softmax_block(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u32 n, int k, int width) {
    const Scores in{x, x_stride, n, k, nullptr};
    const Results out{nullptr, nullptr, nullptr, y, y_stride};
    if (width == WIDE)
        softmax_row<THREADS, PART_LOADS, WIDE>(in, out);
    else
        softmax_row<THREADS, PART_HELD, 1>(in, out);
}

// The same of twice the scores, whose rows all begin at multiples of 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 2) softmax_long_block(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u32 n, int k) {
    softmax_row<THREADS, LONG_LOADS, WIDE>({x, x_stride, n, k, nullptr}, {nullptr, nullptr, nullptr, y, y_stride});
}

// As softmax_block, with loss, and probabilities or gradient.
extern "C" __global__ void __launch_bounds__(THREADS, 2) softmax_loss_block(
    const Real* x, i64 x_stride, const int* labels, const StepRecord* step, float* probs, float* loss, u8* correct,
    Real* y, i64 y_stride, u32 n, int k, float smoothing, float share, float at_label, double weight, int accumulate,
    int width) {
    const Scores in{x, x_stride, n, k, labels};
    const Results out{
        probs, loss, correct, y, y_stride, step, smoothing, share, at_label, weight, accumulate != 0};
    if (width == WIDE)
        softmax_row<THREADS, PART_LOADS, WIDE>(in, out);
    else
        softmax_row<THREADS, PART_HELD, 1>(in, out);
}

// What follows is for rows that are too long for the registers of a block, in one launch.
//
// A row is cut into parts. Blocks take numbers, 0, 1, 2 ..., in the order in which they start. Block t first finds the
// largest score and the sum of part t of all rows, and the last block to have told of a row joins what was found, in a
// fixed order. Then block t stores part t - ahead, which it has read once more: part t - ahead was first read a few MiB
// earlier, and is still in the cache. So memory sees every score once, and reads and writes at the same time.
//
// No block waits for ever: `ahead` is at least the parts of a row, so that block t waits for blocks of smaller numbers
// alone, all of which have started and tell what they found before they wait themselves. It seldom waits at all: `ahead`
// is so much more that they have told long since.

// What a block found of a part.
struct Partial {
    float largest, total, sum;
    u32 beaten;
};

// What the blocks of all rows tell each other. All but the partials is 0 before the launch.
struct Meeting {
    u32 splits, ahead;
    int part;       // scores of a part but maybe the last of a row
    u64* whole;     // [row]: the largest score of a row and what exponentials are multiplied by, 0 until they are known
    u32* arrived;   // [row]: blocks that have told
    u32* started;   // blocks that have a number
    Partial* partials;  // [row][split]

    // True for the last block of a row to tell.
    __device__ __forceinline__ bool tell(u32 row, u32 place, const Found& found) const {
        __shared__ u32 before;
        if (threadIdx.x == 0) {
            partials[place] = {found.largest, found.total, found.sum, found.beaten};
            __threadfence();
            before = atomicAdd(arrived + row, 1u);
            __threadfence();
        }
        __syncthreads();
        return before == splits - 1;
    }

    // Joins the parts of a row, by all threads of a block; `total` and `sum` are thread 0's. Never by way of the L1
    // cache, which may hold what was there before.
    __device__ __forceinline__ void join(
        u32 row, bool labelled, float& largest, double& total, double& sum, bool& beaten) const {
        const volatile Partial* told = partials + i64(row) * splits;
        __shared__ u32 some;
        if (threadIdx.x == 0) some = 0;
        float most = minus_infinity();
        for (u32 s = threadIdx.x; s < splits; s += THREADS) most = fmaxf(most, told[s].largest);
        largest = largest_of<THREADS>(most);
        total = 0, sum = 0;
        for (u32 s = threadIdx.x; s < splits; s += THREADS) {
            total += double(told[s].total) * relative(told[s].largest, largest);
            if (!labelled) continue;
            sum += told[s].sum;
            if (told[s].beaten != 0) some = 1;
        }
        block_sums(total, sum);
        beaten = some != 0;
    }

    __device__ __forceinline__ void publish(u32 row, float largest, float factor) const {
        volatile u64* place = whole + row;
        *place = u64(__float_as_uint(factor)) << 32 | __float_as_uint(largest);
    }

    // What was published of a row, to all threads of a block.
    __device__ __forceinline__ void await(u32 row, float& largest, float& factor) const {
        __shared__ u64 known;
        if (threadIdx.x == 0) {
            const volatile u64* place = whole + row;
            u64 seen = *place;
            while (seen == 0) seen = *place;
            known = seen;
        }
        __syncthreads();
        largest = __int_as_float(u32(known)), factor = __int_as_float(u32(known >> 32));
    }
};

// LABELLED says that there are labels; a plain softmax takes fewer registers, and has more blocks at once.
template <bool LABELLED, int LOADS, int WIDTH>
__device__ __forceinline__ void softmax_part(const Scores& in, const Results& out, const Meeting& meeting) {
    __shared__ u32 number;
    if (threadIdx.x == 0) number = atomicAdd(meeting.started, 1u);
    __syncthreads();
    const u32 finds = number, stores = finds - meeting.ahead;
    const bool has_found = finds < in.n * meeting.splits, has_stored = finds >= meeting.ahead;
    const u32 row = finds / meeting.splits, earlier = stores / meeting.splits;
    const Real* x = in.x;
    Row<THREADS, LOADS, WIDTH> held;
    Found found;
    Label label(in, out, has_found ? row : in.n);
    if (has_found) {
        const int start = int(finds - row * meeting.splits) * meeting.part;
        held.template read<false>(x + i64(row) * in.stride, start, min(start + meeting.part, in.k), threadIdx.x);
        label.read(in, row);
        found = held.find(label, LABELLED);
    }
    // under way while this block tells what it found
    Label own(in, out, has_stored ? earlier : in.n);
    if (has_stored) {
        const int start = int(stores - earlier * meeting.splits) * meeting.part;
        held.template read<true>(x + i64(earlier) * in.stride, start, min(start + meeting.part, in.k), threadIdx.x);
    }
    if (has_found && meeting.tell(row, finds, found)) {
        float largest;
        double total, sum;
        bool beaten;
        meeting.join(row, LABELLED, largest, total, sum, beaten);
        if (threadIdx.x == 0) {
            meeting.publish(row, largest, 1 / float(total));
            if (LABELLED) store_loss(in, out, row, label, largest, float(total), sum, beaten);
        }
    }
    if (!has_stored) return;
    own.judge(in.k);
    float largest, factor;
    meeting.await(earlier, largest, factor);
    held.to_exponentials(largest);
    held.template store<true>(in, out, earlier, own, largest, factor);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) softmax_parts(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u32 n, int k, u32 splits, u32 ahead, int part, u64* whole,
    u32* arrived, u32* started, Partial* partials, int width) {
    const Scores in{x, x_stride, n, k, nullptr};
    const Results out{nullptr, nullptr, nullptr, y, y_stride};
    const Meeting meeting{splits, ahead, part, whole, arrived, started, partials};
    if (width == WIDE)
        softmax_part<false, PART_LOADS, WIDE>(in, out, meeting);
    else
        softmax_part<false, PART_HELD, 1>(in, out, meeting);
}

// The same with loss, and probabilities or gradient.
extern "C" __global__ void __launch_bounds__(THREADS, 2) softmax_loss_parts(
    const Real* x, i64 x_stride, const int* labels, const StepRecord* step, float* probs, float* loss, u8* correct,
    Real* y, i64 y_stride, u32 n, int k, float smoothing, float share, float at_label, double weight, int accumulate,
    u32 splits, u32 ahead, int part, u64* whole, u32* arrived, u32* started, Partial* partials, int width) {
    const Scores in{x, x_stride, n, k, labels};
    const Results out{
        probs, loss, correct, y, y_stride, step, smoothing, share, at_label, weight, accumulate != 0};
    const Meeting meeting{splits, ahead, part, whole, arrived, started, partials};
    if (width == WIDE)
        softmax_part<true, PART_LOADS, WIDE>(in, out, meeting);
    else
        softmax_part<true, PART_HELD, 1>(in, out, meeting);
}
