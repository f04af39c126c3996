// Loops that know channels: numbers mapped with their channel's constants, and sums over a channel of a batch.

// y[n, c, i] = f(in[0][n, c, i], ...) for images of `inner` = C * hw numbers; f.enter(c) comes before the first number
// of a channel. y may be the bytes of any input.
template <bool INSIDE, int WIDTH, int COUNT, class F>
__device__ __forceinline__ void map_channels_share(
    const Share<WIDTH>& share, const Source (&in)[COUNT], float* y, i64 y_stride, u32 hw, u32 inner, F f) {
    float value[COUNT][UNROLL][WIDTH];
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            load<INSIDE>(in[j].data + share.row * in[j].stride, share.index(k), inner, value[j][k]);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        if (!INSIDE && share.index(k) >= inner) return;
        const u32 i = u32(share.index(k));
        u32 channel = i / hw;
        u32 left = hw - (i - channel * hw);  // numbers of the channel from i on
        f.enter(channel);
        float result[WIDTH];
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            if (!INSIDE && i + w >= inner) break;
            if (left == 0) f.enter(++channel), left = hw;
            float operand[COUNT];
#pragma unroll
            for (int j = 0; j < COUNT; ++j) operand[j] = value[j][k][w];
            result[w] = f(operand);
            --left;
        }
        store<INSIDE>(y + share.row * y_stride, i, inner, result);
    }
}

template <int WIDTH, int COUNT, class F>
__device__ __forceinline__ void map_channels_by(
    const Source (&in)[COUNT], float* y, i64 y_stride, u32 hw, u32 inner, u32 chunks, F f) {
    const Share<WIDTH> share(chunks);
    if (share.inside(inner))
        map_channels_share<true>(share, in, y, y_stride, hw, inner, f);
    else
        map_channels_share<false>(share, in, y, y_stride, hw, inner, f);
}

template <int COUNT, class F>
__device__ __forceinline__ void map_channels(
    const Source (&in)[COUNT], float* y, i64 y_stride, u32 hw, u32 inner, u32 chunks, int width, F f) {
    if (width == 4)
        map_channels_by<4>(in, y, y_stride, hw, inner, chunks, f);
    else if (width == 1)
        map_channels_by<1>(in, y, y_stride, hw, inner, chunks, f);
    else if (width == -4)  // short rows: every column is a channel
        map_short<4>(in, y, y_stride, inner, chunks, f);
    else
        map_short<1>(in, y, y_stride, inner, chunks, f);
}

// How the N * hw numbers of each channel are shared out: block c * splits + s sums numbers s * share to
// (s + 1) * share of channel c, counted image by image. With width 4, hw and share are multiples of 4.
struct Split {
    u32 hw, count, splits, share;
};

// The terms of UNROLL * WIDTH numbers of a channel that begins at `plane` of each image, the first of them number
// `start`; those from `end` on are left out.
template <bool INSIDE, int WIDTH, int COUNT, class F>
__device__ __forceinline__ void channel_terms(
    const Source (&in)[COUNT], i64 plane, u32 hw, u32 start, u32 end, float& a, float& b, F f) {
    float value[COUNT][UNROLL][WIDTH];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const u32 i = start + k * THREADS * WIDTH;
        const u32 n = INSIDE || i < end ? i / hw : 0;
        const i64 pixel = plane + (i - n * hw);
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            load<INSIDE>(in[j].data + n * in[j].stride, pixel, i < end ? pixel + WIDTH : 0, value[j][k]);
    }
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        if (!INSIDE && start + k * THREADS * WIDTH >= end) break;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            float operand[COUNT];
#pragma unroll
            for (int j = 0; j < COUNT; ++j) operand[j] = value[j][k][w];
            f(operand, a, b);
        }
    }
}

// Two sums over this block's share of its channel: f(operands, a, b) adds one number's terms to a and b, after
// f.enter(channel). Terms that a thread loads together are added in float32, the rest in float64.
// partials: [C][splits][2].
template <int WIDTH, int COUNT, class F>
__device__ __forceinline__ void channel_sums_by(const Source (&in)[COUNT], Split split, double* partials, F f) {
    constexpr u32 STEP = THREADS * UNROLL * WIDTH;
    const u32 channel = blockIdx.x / split.splits, part = blockIdx.x - channel * split.splits;
    const u32 end = min((part + 1) * split.share, split.count);
    const i64 plane = i64(channel) * split.hw;
    f.enter(channel);
    double first = 0, second = 0;
    for (u32 start = part * split.share; start < end; start += STEP) {
        float a = 0, b = 0;
        if (start + STEP <= end)
            channel_terms<true, WIDTH>(in, plane, split.hw, start + threadIdx.x * WIDTH, end, a, b, f);
        else
            channel_terms<false, WIDTH>(in, plane, split.hw, start + threadIdx.x * WIDTH, end, a, b, f);
        first += a, second += b;
    }
    block_sums(first, second);
    if (threadIdx.x == 0) {
        partials[2 * i64(blockIdx.x)] = first;
        partials[2 * i64(blockIdx.x) + 1] = second;
    }
}

constexpr int COLUMNS = 32;  // channels of a block of column_sums

// The same where a channel has one number a row, as in NHWC: COLUMNS channels a block, and `share` rows a split.
// Threads side by side read neighbours; the rows of threads take turns at the rows of numbers.
template <int WIDTH, int COUNT, class F>
__device__ __forceinline__ void column_sums(
    const Source (&in)[COUNT], Split split, u32 channels, double* partials, F f) {
    constexpr u32 ACROSS = COLUMNS / WIDTH, DOWN = THREADS / ACROSS;
    __shared__ double held[2][WIDTH][THREADS];
    const u32 block = blockIdx.x / split.splits, part = blockIdx.x - block * split.splits, t = threadIdx.x;
    const u32 channel = block * COLUMNS + t % ACROSS * WIDTH, end = min((part + 1) * split.share, split.count);
    double first[WIDTH] = {}, second[WIDTH] = {};
    if (channel < channels) {
        F own[4] = {f, f, f, f};
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) own[w].enter(channel + w);
        for (u32 start = part * split.share + t / ACROSS; start < end; start += DOWN * UNROLL) {
            float value[COUNT][UNROLL][WIDTH] = {};
#pragma unroll
            for (int j = 0; j < COUNT; ++j)
#pragma unroll
                for (int k = 0; k < UNROLL; ++k)
                    if (start + k * DOWN < end)
                        load<true>(in[j].data + i64(start + k * DOWN) * in[j].stride, channel, channels, value[j][k]);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                float a = 0, b = 0;
#pragma unroll
                for (int k = 0; k < UNROLL; ++k) {
                    float operand[COUNT];
#pragma unroll
                    for (int j = 0; j < COUNT; ++j) operand[j] = value[j][k][w];
                    if (start + k * DOWN < end) own[w](operand, a, b);
                }
                first[w] += a, second[w] += b;
            }
        }
    }
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) held[0][w][t] = first[w], held[1][w][t] = second[w];
    __syncthreads();
    for (u32 half = THREADS / 2; half >= ACROSS; half /= 2) {
        if (t < half)
#pragma unroll
            for (int w = 0; w < WIDTH; ++w)
                held[0][w][t] += held[0][w][t + half], held[1][w][t] += held[1][w][t + half];
        __syncthreads();
    }
    if (t >= ACROSS || channel >= channels) return;
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
        const i64 place = 2 * (i64(channel + w) * split.splits + part);
        partials[place] = held[0][w][t], partials[place + 1] = held[1][w][t];
    }
}

// A negative width says that channels are columns.
template <int COUNT, class F>
__device__ __forceinline__ void channel_sums(
    const Source (&in)[COUNT], Split split, u32 channels, double* partials, int width, F f) {
    if (width == 4)
        channel_sums_by<4>(in, split, partials, f);
    else if (width == 1)
        channel_sums_by<1>(in, split, partials, f);
    else if (width == -4)
        column_sums<4>(in, split, channels, partials, f);
    else
        column_sums<1>(in, split, channels, partials, f);
}

constexpr int LANES = 32;  // threads that join the shares of one channel; THREADS / LANES channels a block

// The sums of all shares of this thread's channel; true for the one thread of the channel that gets them.
__device__ __forceinline__ bool join_sums(
    const double* partials, u32 splits, u32 channels, u32& channel, double& first, double& second) {
    __shared__ double held[2][THREADS];
    const u32 t = threadIdx.x, lane = t % LANES;
    channel = blockIdx.x * (THREADS / LANES) + t / LANES;
    first = 0, second = 0;
    if (channel < channels)
        for (u32 s = lane; s < splits; s += LANES) {
            const i64 place = 2 * (i64(channel) * splits + s);
            first += partials[place], second += partials[place + 1];
        }
    held[0][t] = first, held[1][t] = second;
    __syncthreads();
    for (u32 half = LANES / 2; half > 0; half /= 2) {
        if (lane < half) held[0][t] += held[0][t + half], held[1][t] += held[1][t + half];
        __syncthreads();
    }
    first = held[0][t], second = held[1][t];
    return lane == 0 && channel < channels;
}
