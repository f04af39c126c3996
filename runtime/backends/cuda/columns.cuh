// The loops of channels.cuh where channels are columns, as in rows of pixels of NHWC, and those for any layout.

constexpr int COLUMNS = 32;  // threads side by side in a row, at most

// A thread's place among rows of `channels` numbers: WIDTH columns of every down-th row of a chunk of UNROLL * down
// rows. Neighbours read neighbours. Block `part` takes chunks part, part + splits, ..., so that what all blocks read at
// a time lies together.
template <int WIDTH>
struct Place {
    u32 across, down, part, row, slot, begin;  // begin: the block's first column

    __device__ Place(u32 channels, u32 splits) {
        const u32 groups = channels / WIDTH, blocks = (groups + COLUMNS - 1) / COLUMNS;
        across = (groups + blocks - 1) / blocks, down = THREADS / across;
        part = blockIdx.x / blocks;
        begin = (blockIdx.x - part * blocks) * across * WIDTH;
        row = threadIdx.x / across, slot = threadIdx.x - row * across;
    }
};

// The numbers of rows first, first + down, ... before `end`, UNROLL of them, of WIDTH columns. The order of a sum does
// not depend on COUNT.
template <bool SUMS, bool STORES, bool INSIDE, int WIDTH, int COUNT, class F>
__device__ __forceinline__ void column_terms(
    const Source (&in)[COUNT], Target out, u32 first, u32 down, u32 end, u32 column, const F (&own)[WIDTH],
    float (&a)[WIDTH], float (&b)[WIDTH]) {
    constexpr int AT_ONCE = at_once(COUNT);
#pragma unroll
    for (int turn = 0; turn < UNROLL; turn += AT_ONCE) {
        Loaded<WIDTH> loaded[AT_ONCE][COUNT];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const u32 row = first + (turn + k) * down;
#pragma unroll
            for (int j = 0; j < COUNT; ++j)
                if (INSIDE || row < end) loaded[k][j].template load<true>(in[j].data + row * in[j].stride, column, 0);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const u32 row = first + (turn + k) * down;
            if (!INSIDE && row >= end) return;
            float value[COUNT][WIDTH], result[WIDTH];
#pragma unroll
            for (int j = 0; j < COUNT; ++j) loaded[k][j].get(value[j]);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                float operand[COUNT];
#pragma unroll
                for (int j = 0; j < COUNT; ++j) operand[j] = value[j][w];
                result[w] = apply<SUMS, STORES>(own[w], operand, a[w], b[w]);
            }
            if constexpr (STORES) store<true>(out.data + row * out.stride, column, 0, result);
        }
    }
}

// A loop over all rows of this block. A pass that maps goes from the last row to the first, as the pass of sums before
// it has left the last ones in the cache. A thread's numbers are added in float32, a few hundred of each column at most
// (see Channels.split), and those of different threads in float64.
template <bool SUMS, bool STORES, int WIDTH, int COUNT, class F>
__device__ __forceinline__ void columns(
    const Source (&in)[COUNT], Target out, u32 count, u32 splits, u32 channels, double* partials, F f) {
    const u32 t = threadIdx.x;
    const Place<WIDTH> at(channels, splits);
    const bool leads = t < at.across * WIDTH && at.begin + t < channels;  // one thread a column
    F own[WIDTH];
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) own[w] = f;
    if constexpr (F::CONSTANTS > 0) {
        __shared__ float constants[F::CONSTANTS][WIDTH][COLUMNS];
        if (leads) {
            f.enter(at.begin + t);
#pragma unroll
            for (int i = 0; i < F::CONSTANTS; ++i) constants[i][t % WIDTH][t / WIDTH] = f.k[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < F::CONSTANTS; ++i)
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) own[w].k[i] = constants[i][w][at.slot];
    }
    float a[WIDTH] = {}, b[WIDTH] = {};
    const u32 column = at.begin + at.slot * WIDTH;
    if (at.row < at.down && column < channels) {
        const u32 each = at.down * UNROLL, whole = count / each, chunks = (count + each - 1) / each;
        for (u32 turn = at.part; turn < chunks; turn += splits) {
            const u32 chunk = SUMS ? turn : chunks - 1 - turn, first = chunk * each + at.row;
            if (chunk < whole)
                column_terms<SUMS, STORES, true>(in, out, first, at.down, count, column, own, a, b);
            else
                column_terms<SUMS, STORES, false>(in, out, first, at.down, count, column, own, a, b);
        }
    }
    if constexpr (SUMS) {
        __shared__ float held[2][WIDTH][THREADS + 4];  // 4 more, or the columns of a warp would lie in one bank
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) held[0][w][t] = a[w], held[1][w][t] = b[w];
        __syncthreads();
        if (!leads) return;
        double first = 0, second = 0;
        for (u32 row = 0; row < at.down; ++row) {
            const u32 place = row * at.across + t / WIDTH;
            first += held[0][t % WIDTH][place], second += held[1][t % WIDTH][place];
        }
        const i64 place = 2 * (i64(at.part) * channels + at.begin + t);
        partials[place] = first, partials[place + 1] = second;
    }
}

template <bool STORES, int COUNT, class F>
__device__ __forceinline__ void channel_sums_by(
    const Source (&in)[COUNT], Target out, Split split, u32 channels, double* partials, int width, F f) {
    if (width == WIDE)
        plane_sums<STORES, WIDE>(in, out, split, channels, partials, f);
    else if (width == 1)
        plane_sums<STORES, 1>(in, out, split, channels, partials, f);
    else if (width == -WIDE)
        columns<true, STORES, WIDE>(in, out, split.count, split.splits, channels, partials, f);
    else
        columns<true, STORES, 1>(in, out, split.count, split.splits, channels, partials, f);
}

// Two sums over each block's share of its channel or channels. A negative width says that channels are columns.
// partials: [splits][C][2].
template <int COUNT, class F>
__device__ __forceinline__ void channel_sums(
    const Source (&in)[COUNT], Split split, u32 channels, double* partials, int width, F f) {
    channel_sums_by<false>(in, Target{nullptr, 0}, split, channels, partials, width, f);
}

// The same, and what f returns is stored in `out`, which may be the bytes of any input.
template <int COUNT, class F>
__device__ __forceinline__ void map_and_sum_channels(
    const Source (&in)[COUNT], Target out, Split split, u32 channels, double* partials, int width, F f) {
    channel_sums_by<true>(in, out, split, channels, partials, width, f);
}

// map_channels for any batch. Where channels are columns, `width` is negative: then hw is 1, inner C, and `count` rows
// are cut into `chunks` parts.
template <int COUNT, class F>
__device__ __forceinline__ void map_batch(
    const Source (&in)[COUNT], Target out, u32 hw, u32 inner, u32 chunks, u32 count, int width, F f) {
    if (width > 0)
        map_channels(in, out.data, out.stride, hw, inner, chunks, width, f);
    else if (width == -WIDE)
        columns<false, true, WIDE>(in, out, count, chunks, inner, nullptr, f);
    else
        columns<false, true, 1>(in, out, count, chunks, inner, nullptr, f);
}

constexpr int LANES = 64;  // threads that join the shares of one channel; THREADS / LANES channels a block

// The sums of all shares of this thread's channel; true for the one thread of the channel that gets them.
__device__ __forceinline__ bool join_sums(
    const double* partials, u32 splits, u32 channels, u32& channel, double& first, double& second) {
    constexpr u32 EACH = THREADS / LANES;
    __shared__ double held[2][THREADS];
    const u32 t = threadIdx.x, lane = t / EACH;  // neighbours have neighbouring channels
    channel = blockIdx.x * EACH + t % EACH;
    first = 0, second = 0;
    if (channel < channels)
#pragma unroll 8
        for (u32 s = lane; s < splits; s += LANES) {
            const i64 place = 2 * (i64(s) * channels + channel);
            first += partials[place], second += partials[place + 1];
        }
    held[0][t] = first, held[1][t] = second;
    __syncthreads();
    constexpr u32 FEW = 8;  // lanes that go on, each with LANES / FEW sums, of which the first adds up the last FEW
    if (lane < FEW)
        for (u32 other = lane + FEW; other < LANES; other += FEW) {
            const u32 place = other * EACH + t % EACH;
            first += held[0][place], second += held[1][place];
        }
    __syncthreads();
    held[0][t] = first, held[1][t] = second;
    __syncthreads();
    if (lane != 0 || channel >= channels) return false;
#pragma unroll
    for (u32 other = 1; other < FEW; ++other)
        first += held[0][other * EACH + t], second += held[1][other * EACH + t];
    return true;
}
