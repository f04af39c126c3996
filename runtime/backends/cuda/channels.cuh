// Loops that know channels: numbers mapped with their channel's constants, and sums over a channel of a batch.
//
// A function f of these loops reads one number of each input. f.enter(c) comes before the first number of a channel. Of
// sums, f(v, a, b) adds one number's terms to a and b. In columns.cuh f.enter sets f.k, of f.CONSTANTS numbers.

struct Target {
    Real* data;
    i64 stride;
};

// Numbers of one input on their way, WIDE or one of them: as they are stored, so that they take few registers.
template <int WIDTH, class T = Real>
struct Loaded {
    static_assert(WIDTH == WIDE, "16 bytes");
    uint4 bits;

    // From row[i] on; those from `end` on are 0. INSIDE says that there are none.
    template <bool INSIDE>
    __device__ __forceinline__ void load(const T* row, i64 i, i64 end) {
        if (INSIDE || i + WIDTH <= end) {
            bits = *reinterpret_cast<const uint4*>(row + i);
            return;
        }
        float value[WIDTH];
        load_each<false>(row, i, end, value);
        u32 word[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if constexpr (WIDTH == 4)
                word[k] = __float_as_uint(value[k]);
            else
                word[k] = T::pack(value[2 * k], value[2 * k + 1]);
        bits = make_uint4(word[0], word[1], word[2], word[3]);
    }
    __device__ __forceinline__ void get(float (&out)[WIDTH]) const {
        const u32 word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if constexpr (WIDTH == 4)
                out[k] = __int_as_float(word[k]);
            else
                T::unpack(word[k], out[2 * k], out[2 * k + 1]);
    }
};

template <class T>
struct Loaded<1, T> {
    float value;

    template <bool INSIDE>
    __device__ __forceinline__ void load(const T* row, i64 i, i64 end) {
        value = INSIDE || i < end ? float(row[i]) : 0.0f;
    }
    __device__ __forceinline__ void get(float (&out)[1]) const { out[0] = value; }
};

// How many of UNROLL loads of each of `count` inputs are started before the first is waited for.
constexpr int at_once(int count) { return count > 2 ? UNROLL / 2 : UNROLL; }

// y[n, c, i] = f(in[0][n, c, i], ...) for images of `inner` = C * hw numbers. y may be the bytes of any input.
template <bool INSIDE, int WIDTH, int COUNT, class F>
__device__ __forceinline__ void map_channels_share(
    const Share<WIDTH>& share, const Source (&in)[COUNT], Real* y, i64 y_stride, u32 hw, u32 inner, F f) {
    constexpr int AT_ONCE = at_once(COUNT);
#pragma unroll
    for (int turn = 0; turn < UNROLL; turn += AT_ONCE) {
        Loaded<WIDTH> loaded[AT_ONCE][COUNT];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
            for (int j = 0; j < COUNT; ++j)
                loaded[k][j].template load<INSIDE>(in[j].data + share.row * in[j].stride, share.index(turn + k), inner);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            if (!INSIDE && share.index(turn + k) >= inner) return;
            const u32 i = u32(share.index(turn + k));
            u32 channel = i / hw;
            u32 left = hw - (i - channel * hw);  // numbers of the channel from i on
            f.enter(channel);
            float value[COUNT][WIDTH], result[WIDTH];
#pragma unroll
            for (int j = 0; j < COUNT; ++j) loaded[k][j].get(value[j]);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                if (!INSIDE && i + w >= inner) break;
                if (left == 0) f.enter(++channel), left = hw;
                float operand[COUNT];
#pragma unroll
                for (int j = 0; j < COUNT; ++j) operand[j] = value[j][w];
                result[w] = f(operand);
                --left;
            }
            store<INSIDE>(y + share.row * y_stride, i, inner, result);
        }
    }
}

template <int WIDTH, int COUNT, class F>
__device__ __forceinline__ void map_channels_by(
    const Source (&in)[COUNT], Real* y, i64 y_stride, u32 hw, u32 inner, u32 chunks, F f) {
    const Share<WIDTH> share(chunks);
    if (share.inside(inner))
        map_channels_share<true>(share, in, y, y_stride, hw, inner, f);
    else
        map_channels_share<false>(share, in, y, y_stride, hw, inner, f);
}

template <int COUNT, class F>
__device__ __forceinline__ void map_channels(
    const Source (&in)[COUNT], Real* y, i64 y_stride, u32 hw, u32 inner, u32 chunks, int width, F f) {
    if (width == WIDE)
        map_channels_by<WIDE>(in, y, y_stride, hw, inner, chunks, f);
    else if (width == 1)
        map_channels_by<1>(in, y, y_stride, hw, inner, chunks, f);
    else if (width == -WIDE)  // short rows: every column is a channel
        map_short<WIDE>(in, y, y_stride, inner, chunks, f);
    else
        map_short<1>(in, y, y_stride, inner, chunks, f);
}

// How the N * hw numbers of each channel are shared out. Where hw > 1, block c * splits + s sums numbers s * share to
// (s + 1) * share of channel c, counted image by image; with width WIDE, hw and share are multiples of it.
struct Split {
    u32 hw, count, splits, share;
};

// f of one number, whose terms are added to a and b if SUMS, and whose result is to be stored if STORES.
template <bool SUMS, bool STORES, int COUNT, class F>
__device__ __forceinline__ float apply(const F& f, const float (&v)[COUNT], float& a, float& b) {
    if constexpr (!SUMS)
        return f(v);
    else if constexpr (STORES)
        return f(v, a, b);
    else
        return f(v, a, b), 0.0f;
}

// The terms of UNROLL * WIDTH numbers of a channel that begins at `plane` of each image, the first of them number
// `start`; those from `end` on are left out.
template <bool STORES, bool INSIDE, int WIDTH, int COUNT, class F>
__device__ __forceinline__ void channel_terms(
    const Source (&in)[COUNT], Target out, i64 plane, u32 hw, u32 start, u32 end, float& a, float& b, const F& f) {
    constexpr int AT_ONCE = at_once(COUNT);
#pragma unroll
    for (int turn = 0; turn < UNROLL; turn += AT_ONCE) {
        Loaded<WIDTH> loaded[AT_ONCE][COUNT];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const u32 i = start + (turn + k) * THREADS * WIDTH, n = INSIDE || i < end ? i / hw : 0;
#pragma unroll
            for (int j = 0; j < COUNT; ++j)
                if (INSIDE || i < end)
                    loaded[k][j].template load<true>(in[j].data + n * in[j].stride, plane + (i - n * hw), 0);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const u32 i = start + (turn + k) * THREADS * WIDTH;
            if (!INSIDE && i >= end) return;
            float value[COUNT][WIDTH], result[WIDTH];
#pragma unroll
            for (int j = 0; j < COUNT; ++j) loaded[k][j].get(value[j]);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                float operand[COUNT];
#pragma unroll
                for (int j = 0; j < COUNT; ++j) operand[j] = value[j][w];
                result[w] = apply<true, STORES>(f, operand, a, b);
            }
            if constexpr (STORES) {
                const u32 n = i / hw;
                store<true>(out.data + n * out.stride, plane + (i - n * hw), 0, result);
            }
        }
    }
}

// The sums over this block's share of its channel. Terms that a thread loads together are added in float32, the rest
// in float64.
template <bool STORES, int WIDTH, int COUNT, class F>
__device__ __forceinline__ void plane_sums(
    const Source (&in)[COUNT], Target out, Split split, u32 channels, double* partials, F f) {
    constexpr u32 STEP = THREADS * UNROLL * WIDTH;
    const u32 channel = blockIdx.x / split.splits, part = blockIdx.x - channel * split.splits;
    const u32 end = min((part + 1) * split.share, split.count);
    const i64 plane = i64(channel) * split.hw;
    f.enter(channel);
    double first = 0, second = 0;
    for (u32 start = part * split.share; start < end; start += STEP) {
        const u32 mine = start + threadIdx.x * WIDTH;
        float a = 0, b = 0;
        if (start + STEP <= end)
            channel_terms<STORES, true, WIDTH>(in, out, plane, split.hw, mine, end, a, b, f);
        else
            channel_terms<STORES, false, WIDTH>(in, out, plane, split.hw, mine, end, a, b, f);
        first += a, second += b;
    }
    block_sums(first, second);
    if (threadIdx.x == 0) {
        const i64 place = 2 * (i64(part) * channels + channel);
        partials[place] = first, partials[place + 1] = second;
    }
}
