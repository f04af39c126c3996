// Maxima in NHWC over square windows whose size R, step and padding are known when this is compiled; see pool.py.
//
// A thread has the channels of 16 bytes, in four words, and ROWS outputs one below the other, or by indices as many rows
// of STEP pixels: what lies in two windows is loaded once. A maximum over a window is the maximum of its rows' maxima,
// and the first of equal ones in both; so a row serves all windows of a thread. Names of kernels end in R, step, padding.

constexpr int WORDS = 4;
constexpr u32 NUMBERS_OF_WORD = WIDE / WORDS;  // that two are side by side in a word, or one

struct Pack {
    u32 word[WORDS];
};

// The same small number in place of every number of a word.
__device__ __forceinline__ constexpr u32 spread(u32 value) { return NUMBERS_OF_WORD == 2 ? value * 0x00010001u : value; }

template <class T>
struct Word;

// Replaces `best` by `value` where that wins; ones there, else zeros. NaN wins, and stays.
template <>
struct Word<float> {
    static constexpr u32 LOWEST = 0xff800000u;
    static __device__ __forceinline__ u32 take(u32& best, u32 value) {
        const bool better = wins(__int_as_float(best), __int_as_float(value));
        best = better ? value : best;
        return better ? 0xffffffffu : 0;
    }
    static __device__ __forceinline__ u32 is_nan(u32 word) {
        const float value = __int_as_float(word);
        return value != value ? 0xffffffffu : 0;
    }
};

template <class T>
__device__ __forceinline__ u32 take_halves(u32& best, u32 value) {
    float first, second, new_first, new_second;
    T::unpack(best, first, second);
    T::unpack(value, new_first, new_second);
    const u32 mask = (wins(first, new_first) ? 0xffffu : 0) | (wins(second, new_second) ? 0xffff0000u : 0);
    best = (value & mask) | (best & ~mask);
    return mask;
}

template <class T>
__device__ __forceinline__ u32 nan_halves(u32 word) {
    float first, second;
    T::unpack(word, first, second);
    return (first != first ? 0xffffu : 0) | (second != second ? 0xffff0000u : 0);
}

// PTX compares two numbers of 16 bits at once. Of 0 and -0 it takes 0, but the place of the first.
template <>
struct Word<bfloat16> {
    static constexpr u32 LOWEST = 0xff80ff80u;
    static __device__ __forceinline__ u32 take(u32& best, u32 value) {
#if __CUDA_ARCH__ >= 900
        u32 larger, mask;
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(best), "r"(value));
        asm("set.neu.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(larger), "r"(best));
        best = larger;
        return mask;
#else
        return take_halves<bfloat16>(best, value);
#endif
    }
    static __device__ __forceinline__ u32 is_nan(u32 word) { return nan_halves<bfloat16>(word); }
};

template <>
struct Word<float16> {
    static constexpr u32 LOWEST = 0xfc00fc00u;
    static __device__ __forceinline__ u32 take(u32& best, u32 value) {
#if __CUDA_ARCH__ >= 800
        u32 larger, mask;
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(best), "r"(value));
        asm("set.neu.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(larger), "r"(best));
        best = larger;
        return mask;
#else
        return take_halves<float16>(best, value);
#endif
    }
    static __device__ __forceinline__ u32 is_nan(u32 word) { return nan_halves<float16>(word); }
};

using RealWord = Word<Real>;

__device__ __forceinline__ Pack load_pack(const Real* at, bool there) {
    if (!there) return {{RealWord::LOWEST, RealWord::LOWEST, RealWord::LOWEST, RealWord::LOWEST}};
    const uint4 four = *reinterpret_cast<const uint4*>(at);
    return {{four.x, four.y, four.z, four.w}};
}

// `best` and `winner` take over where `value` wins, whose places are `place` + offset.
template <bool INDEXED>
__device__ __forceinline__ void take_over(Pack& best, Pack& winner, const Pack& value, const Pack& place, u32 offset) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        const u32 mask = RealWord::take(best.word[w], value.word[w]);
        if (INDEXED) winner.word[w] = ((place.word[w] + offset) & mask) | (winner.word[w] & ~mask);
    }
}

// The lowest bytes of the numbers of a pack.
__device__ __forceinline__ void store_places(u8* at, const Pack& place) {
    u32 byte[WIDE];
#pragma unroll
    for (int i = 0; i < WIDE; ++i)
        byte[i] = place.word[i / NUMBERS_OF_WORD] >> (16 * (i % NUMBERS_OF_WORD)) & 0xff;
    store_all(at, byte);
}

// This thread's channels, `first` on, and its block of pixels or outputs: blocks of ROWS x COLUMNS in images of
// rows x columns.
template <int ROWS, int COLUMNS>
struct Strip {
    u32 image, row, column, first;

    __device__ Strip(u32 rows, u32 columns, u32 groups) {
        const u32 along = (rows + ROWS - 1) / ROWS, across = (columns + COLUMNS - 1) / COLUMNS;
        const u32 unit = blockIdx.x * THREADS + threadIdx.x, block = unit / groups;
        first = (unit - block * groups) * WIDE;
        const u32 strip = block / across;
        column = (block - strip * across) * COLUMNS;
        image = strip / along;
        row = (strip - image * along) * ROWS;
    }
};

template <int R, int STEP, int PAD, bool INDEXED>
__device__ __forceinline__ void pool_strip(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, const Sizes& g, u32 images,
    u32 groups) {
    constexpr int ROWS = STEP == 1 ? 2 * POOL_ROWS : POOL_ROWS, HEIGHT = (ROWS - 1) * STEP + R;
    const Strip<ROWS, 1> at(g.p, g.q, groups);
    if (at.image >= images) return;
    const int top = int(at.row) * STEP - PAD, left = int(at.column) * STEP - PAD;
    const i64 row_stride = i64(g.w) * x_stride;
    const Real* row = x + (i64(at.image) * g.h + top) * row_stride + left * x_stride + at.first;
    Pack best[ROWS], winner[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; ++k)
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            best[k].word[w] = RealWord::LOWEST;
            winner[k].word[w] = spread(u32(max(-top - k * STEP, 0) * R + max(-left, 0)));
        }
#pragma unroll
    for (int i = 0; i < HEIGHT; ++i) {
        const int h = top + i;
        const bool inside = h >= 0 && h < int(g.h);
        Pack cell[R], place = {};
#pragma unroll
        for (int s = 0; s < R; ++s)
            cell[s] = load_pack(row + s * x_stride, inside && left + s >= 0 && left + s < int(g.w));
        row += row_stride;
#pragma unroll
        for (int s = 1; s < R; ++s) take_over<INDEXED>(cell[0], place, cell[s], Pack{}, spread(s));
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int r = i - k * STEP;
            if (r >= 0 && r < R) take_over<INDEXED>(best[k], winner[k], cell[0], place, spread(r * R));
        }
    }
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        if (at.row + k >= g.p) return;
        const i64 output = (i64(at.image) * g.p + at.row + k) * g.q + at.column;
        const u32* word = best[k].word;
        *reinterpret_cast<uint4*>(y + output * y_stride + at.first) = make_uint4(word[0], word[1], word[2], word[3]);
        if constexpr (INDEXED) {
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                const u32 mask = RealWord::is_nan(word[w]);
                winner[k].word[w] = (spread(NO_WINNER) & mask) | (winner[k].word[w] & ~mask);
            }
            store_places(indices + output * indices_stride + at.first, winner[k]);
        }
    }
}

// What WIDE channels of a window pass on, and to which of its places, as they lie in memory.
struct Passing {
    uint4 dy, y;
    u32 place[WIDE / 4];
};

// Of the window at `output`, or of none, whose places are NO_WINNER: a load and a choice, so that a thread can start
// many loads at once.
template <bool MASKED>
__device__ __forceinline__ Passing load_passing(
    Pixels<u8> indices, Pixels<Real> y, Pixels<Real> dy, i64 output, u32 first, bool there) {
    Passing of;
    const u32* places = reinterpret_cast<const u32*>(indices.data + output * indices.stride + first);
    if constexpr (WIDE == 8) {
        const uint2 two = *reinterpret_cast<const uint2*>(places);
        of.place[0] = two.x, of.place[WIDE / 4 - 1] = two.y;
    } else {
        of.place[0] = *places;
    }
    of.dy = *reinterpret_cast<const uint4*>(dy.data + output * dy.stride + first);
    if (MASKED) of.y = *reinterpret_cast<const uint4*>(y.data + output * y.stride + first);
#pragma unroll
    for (int k = 0; k < WIDE / 4; ++k) of.place[k] = there ? of.place[k] : 0xffffffffu;
    return of;
}

template <class T>
__device__ __forceinline__ void numbers_of(const uint4& words, float (&out)[16 / sizeof(T)]) {
    const u32 word[WORDS] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        if constexpr (sizeof(T) == 2)
            T::unpack(word[w], out[2 * w], out[2 * w + 1]);
        else
            out[w] = __int_as_float(word[w]);
    }
}

// What the windows of a block of pixels pass on to them, by indices, and by y as a mask if MASKED. Windows are taken
// from the last to the first, as in pool.cu.
template <int R, int STEP, int PAD, bool MASKED>
__device__ __forceinline__ void gather_strip(
    Pixels<u8> indices, Pixels<Real> y, Pixels<Real> dy, Real* dx, i64 dx_stride, const Sizes& g, u32 images,
    u32 groups, int accumulate) {
    using G = Fixed<R, STEP, PAD, 1, STEP == 1 ? 2 * POOL_ROWS : POOL_ROWS>;
    constexpr int ACROSS = G::LAST_COLUMN - G::FIRST + 1;
    const Strip<G::ROWS, G::COLUMNS> at(g.h, g.w, groups);
    if (at.image >= images) return;
    const i64 first_output = i64(at.image) * (g.p * g.q);
    dx += i64(at.image) * (g.h * g.w) * dx_stride + at.first;
    float total[G::ROWS][G::COLUMNS][WIDE] = {};
    if (accumulate) {
#pragma unroll
        for (int i = 0; i < G::ROWS; ++i)
#pragma unroll
            for (int j = 0; j < G::COLUMNS; ++j)
                if (at.row + i < g.h && at.column + j < g.w)
                    load_all(dx + i64((at.row + i) * g.w + at.column + j) * dx_stride, total[i][j]);
    }
#pragma unroll
    for (int u = G::LAST_ROW; u >= G::FIRST; --u) {
        Passing passing[ACROSS];
        const int p = int(at.row / STEP) + u;
#pragma unroll
        for (int k = 0; k < ACROSS; ++k) {
            const int q = int(at.column / STEP) + G::LAST_COLUMN - k;
            const bool there = p >= 0 && p < int(g.p) && q >= 0 && q < int(g.q);
            const i64 output = first_output + (there ? u32(p) * g.q + u32(q) : 0);
            passing[k] = load_passing<MASKED>(indices, y, dy, output, at.first, there);
        }
#pragma unroll
        for (int k = 0; k < ACROSS; ++k) {
            float value[WIDE], mask[WIDE];
            numbers_of<Real>(passing[k].dy, value);
            if (MASKED) numbers_of<Real>(passing[k].y, mask);
#pragma unroll
            for (int w = 0; w < WIDE; ++w) {
                const u32 place = passing[k].place[w / 4] >> (8 * (w % 4)) & 0xff;
                if (MASKED) value[w] = mask[w] > 0 ? value[w] : 0.0f;
#pragma unroll
                for (int i = 0; i < G::ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < G::COLUMNS; ++j) {
                        const int r = i + PAD - u * STEP, s = j + PAD - (G::LAST_COLUMN - k) * STEP;
                        if (r >= 0 && r < R && s >= 0 && s < R && place == u32(r * R + s)) total[i][j][w] += value[w];
                    }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < G::ROWS; ++i)
#pragma unroll
        for (int j = 0; j < G::COLUMNS; ++j)
            if (at.row + i < g.h && at.column + j < g.w)
                store_all(dx + i64((at.row + i) * g.w + at.column + j) * dx_stride, total[i][j]);
}

template <int R, int STEP, int PAD>
__device__ __forceinline__ void gather_strips(
    Pixels<u8> indices, Pixels<Real> y, Pixels<Real> dy, Real* dx, i64 dx_stride, const Sizes& g, u32 images,
    u32 groups, int accumulate) {
    if (y.data)
        gather_strip<R, STEP, PAD, true>(indices, y, dy, dx, dx_stride, g, images, groups, accumulate);
    else
        gather_strip<R, STEP, PAD, false>(indices, y, dy, dx, dx_stride, g, images, groups, accumulate);
}

template <int R, int STEP, int PAD>
__device__ __forceinline__ void pool_strips(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, const Sizes& g, u32 images,
    u32 groups) {
    if (indices)
        pool_strip<R, STEP, PAD, true>(x, x_stride, y, y_stride, indices, indices_stride, g, images, groups);
    else
        pool_strip<R, STEP, PAD, false>(x, x_stride, y, y_stride, indices, indices_stride, g, images, groups);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_forward_2_2_0(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 images, u32 groups) {
    pool_strips<2, 2, 0>(x, x_stride, y, y_stride, indices, indices_stride, {h, w, p, q}, images, groups);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_indexed_2_2_0(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 images, u32 groups, int accumulate) {
    gather_strips<2, 2, 0>(
        {indices, indices_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, images, groups,
        accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_forward_3_2_0(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 images, u32 groups) {
    pool_strips<3, 2, 0>(x, x_stride, y, y_stride, indices, indices_stride, {h, w, p, q}, images, groups);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_indexed_3_2_0(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 images, u32 groups, int accumulate) {
    gather_strips<3, 2, 0>(
        {indices, indices_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, images, groups,
        accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_forward_3_2_1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 images, u32 groups) {
    pool_strips<3, 2, 1>(x, x_stride, y, y_stride, indices, indices_stride, {h, w, p, q}, images, groups);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_indexed_3_2_1(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 images, u32 groups, int accumulate) {
    gather_strips<3, 2, 1>(
        {indices, indices_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, images, groups,
        accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_forward_3_1_1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 images, u32 groups) {
    pool_strips<3, 1, 1>(x, x_stride, y, y_stride, indices, indices_stride, {h, w, p, q}, images, groups);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_indexed_3_1_1(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 images, u32 groups, int accumulate) {
    gather_strips<3, 1, 1>(
        {indices, indices_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, images, groups,
        accumulate);
}
