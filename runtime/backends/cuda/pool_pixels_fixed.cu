// Maxima in NHWC over square windows whose size R and step are known when this is compiled; see pool.py.
//
// A thread has the channels of 16 bytes, in four words, and a tile of ROWS x COLUMNS outputs, or by indices as many
// blocks of STEP x STEP pixels: what lies in several windows is loaded once. A maximum over a window is the maximum of
// its rows' maxima, and the first of equal ones in both; so a row serves all windows of a thread. The kernels, one for
// each tile, are in pool_tiles.cu.

constexpr int WORDS = 4;
constexpr u32 NUMBERS_OF_WORD = WIDE / WORDS;  // that two are side by side in a word, or one

struct Pack {
    u32 word[WORDS];
};

// The same small number in place of every number of a word.
__device__ __forceinline__ constexpr u32 spread(u32 value) { return NUMBERS_OF_WORD == 2 ? value * 0x00010001u : value; }

template <class T>
struct Word;

// `take` replaces `best` by `value` where that wins. All give ones where the answer is yes, else zeros. NaN wins, and
// stays.
template <>
struct Word<float> {
    static constexpr u32 LOWEST = 0xff800000u;
    static __device__ __forceinline__ u32 take(u32& best, u32 value) {
        float number = __int_as_float(best);
        const bool better = ::take(number, __int_as_float(value));
        best = __float_as_uint(number);
        return better ? 0xffffffffu : 0;
    }
    static __device__ __forceinline__ u32 is_nan(u32 word) {
        const float value = __int_as_float(word);
        return value != value ? 0xffffffffu : 0;
    }
    static __device__ __forceinline__ u32 is_positive(u32 word) { return __int_as_float(word) > 0 ? 0xffffffffu : 0; }
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

template <class T>
__device__ __forceinline__ u32 positive_halves(u32 word) {
    float first, second;
    T::unpack(word, first, second);
    return (first > 0 ? 0xffffu : 0) | (second > 0 ? 0xffff0000u : 0);
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
    static __device__ __forceinline__ u32 is_positive(u32 word) {
#if __CUDA_ARCH__ >= 900
        u32 mask;
        asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(word), "r"(0));
        return mask;
#else
        return positive_halves<bfloat16>(word);
#endif
    }
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
    static __device__ __forceinline__ u32 is_positive(u32 word) {
#if __CUDA_ARCH__ >= 800
        u32 mask;
        asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(word), "r"(0));
        return mask;
#else
        return positive_halves<float16>(word);
#endif
    }
};

using RealWord = Word<Real>;

// Of a pixel that is not there what nothing is lower than. A load and a choice, so that a thread can start many loads at
// once.
__device__ __forceinline__ Pack load_pack(const Real* at, bool there) {
    const uint4 four = *reinterpret_cast<const uint4*>(at);
    return {{there ? four.x : RealWord::LOWEST, there ? four.y : RealWord::LOWEST, there ? four.z : RealWord::LOWEST,
             there ? four.w : RealWord::LOWEST}};
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

// How threads are shared out over the batch, and what to multiply by to divide; see quotient.
struct Tiling {
    u32 h, w, p, q, pad, images, groups;
    u64 by_groups, by_across, by_along;
};

// This thread's channels, `first` on, and the first of its ROWS x COLUMNS outputs or blocks of pixels: an image has
// `along` tiles in a column, and `across` in a row.
template <int ROWS, int COLUMNS>
struct Tile {
    u32 image, first;
    int row, column;

    __device__ Tile(const Tiling& g, u32 rows, u32 columns) {
        const u32 along = (rows + ROWS - 1) / ROWS, across = (columns + COLUMNS - 1) / COLUMNS;
        const u32 unit = blockIdx.x * THREADS + threadIdx.x, tile = quotient(unit, g.by_groups);
        first = (unit - tile * g.groups) * WIDE;
        const u32 strip = quotient(tile, g.by_across);
        column = int(tile - strip * across) * COLUMNS;
        image = quotient(strip, g.by_along);
        row = int(strip - image * along) * ROWS;
    }
};

__device__ __forceinline__ int within(int at, int end) { return min(max(at, 0), end - 1); }

template <int R, int STEP, int ROWS, int COLUMNS, bool INDEXED>
__device__ __forceinline__ void pool_tile(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, const Tiling& g) {
    constexpr int HEIGHT = (ROWS - 1) * STEP + R, WIDTH = (COLUMNS - 1) * STEP + R;
    const Tile<ROWS, COLUMNS> at(g, g.p, g.q);
    if (at.image >= g.images) return;
    const int h_end = int(g.h), w_end = int(g.w);
    const int top = at.row * STEP - int(g.pad), left = at.column * STEP - int(g.pad);
    x += i64(at.image) * (g.h * g.w) * x_stride + at.first;
    Pack best[ROWS][COLUMNS], winner[ROWS][COLUMNS];
#pragma unroll
    for (int k = 0; k < ROWS; ++k)
#pragma unroll
        for (int l = 0; l < COLUMNS; ++l)
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                best[k][l].word[w] = RealWord::LOWEST;
                winner[k][l].word[w] = spread(u32(max(-top - k * STEP, 0) * R + max(-left - l * STEP, 0)));
            }
#pragma unroll
    for (int i = 0; i < HEIGHT; ++i) {
        const bool inside = top + i >= 0 && top + i < h_end;
        const u32 row = u32(within(top + i, h_end)) * g.w;
        Pack cell[WIDTH];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            const bool there = inside && left + j >= 0 && left + j < w_end;
            cell[j] = load_pack(x + (row + u32(within(left + j, w_end))) * u32(x_stride), there);
        }
#pragma unroll
        for (int l = 0; l < COLUMNS; ++l) {
            Pack largest = cell[l * STEP], place = {};
#pragma unroll
            for (int s = 1; s < R; ++s) take_over<INDEXED>(largest, place, cell[l * STEP + s], Pack{}, spread(s));
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                const int r = i - k * STEP;
                if (r >= 0 && r < R) take_over<INDEXED>(best[k][l], winner[k][l], largest, place, spread(r * R));
            }
        }
    }
#pragma unroll
    for (int k = 0; k < ROWS; ++k)
#pragma unroll
        for (int l = 0; l < COLUMNS; ++l) {
            if (at.row + k >= int(g.p) || at.column + l >= int(g.q)) continue;
            const i64 output = i64(at.image) * (g.p * g.q) + u32(at.row + k) * g.q + u32(at.column + l);
            const u32* word = best[k][l].word;
            *reinterpret_cast<uint4*>(y + output * y_stride + at.first) =
                make_uint4(word[0], word[1], word[2], word[3]);
            if constexpr (INDEXED) {
#pragma unroll
                for (int w = 0; w < WORDS; ++w) {
                    const u32 mask = RealWord::is_nan(word[w]);
                    winner[k][l].word[w] = (spread(NO_WINNER) & mask) | (winner[k][l].word[w] & ~mask);
                }
                store_places(indices + output * indices_stride + at.first, winner[k][l]);
            }
        }
}

// What WIDE channels of a window pass on, and to which of its places, as they lie in memory.
struct Passing {
    Pack dy;
    u32 place[WIDE / 4];
};

__device__ __forceinline__ Pack load_words(const Real* at) {
    const uint4 four = *reinterpret_cast<const uint4*>(at);
    return {{four.x, four.y, four.z, four.w}};
}

// Of the window at `output`, or of none, whose places are NO_WINNER.
template <bool MASKED>
__device__ __forceinline__ Passing load_passing(
    Pixels<u8> indices, Pixels<Real> y, Pixels<Real> dy, u32 output, bool there) {
    Passing of;
    const u32* places = reinterpret_cast<const u32*>(indices.data + output * u32(indices.stride));
    if constexpr (WIDE == 8) {
        const uint2 two = *reinterpret_cast<const uint2*>(places);
        of.place[0] = two.x, of.place[WIDE / 4 - 1] = two.y;
    } else {
        of.place[0] = *places;
    }
    of.dy = load_words(dy.data + output * u32(dy.stride));
    if (MASKED) {
        const Pack mask = load_words(y.data + output * u32(y.stride));
#pragma unroll
        for (int w = 0; w < WORDS; ++w) of.dy.word[w] &= RealWord::is_positive(mask.word[w]);
    }
#pragma unroll
    for (int k = 0; k < WIDE / 4; ++k) of.place[k] = there ? of.place[k] : 0xffffffffu;
    return of;
}

template <class T>
__device__ __forceinline__ void numbers_of(const Pack& pack, float (&out)[16 / sizeof(T)]) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        if constexpr (sizeof(T) == 2)
            T::unpack(pack.word[w], out[2 * w], out[2 * w + 1]);
        else
            out[w] = __int_as_float(pack.word[w]);
    }
}

// What windows pass on to the pixels of a tile, by indices, and by y as a mask if MASKED. Blocks of STEP x STEP pixels
// begin where windows do, `pad` pixels before the image. Windows are taken from the last to the first, as in pool.cu.
template <int R, int STEP, int ROWS, int COLUMNS, bool MASKED>
__device__ __forceinline__ void gather_tile(
    Pixels<u8> indices, Pixels<Real> y, Pixels<Real> dy, Real* dx, i64 dx_stride, const Tiling& g, int accumulate) {
    constexpr int BEFORE = (R - 1) / STEP, ACROSS = COLUMNS + BEFORE;  // windows that hold pixels of a block before it
    const Tile<ROWS, COLUMNS> at(g, (g.h + g.pad + STEP - 1) / STEP, (g.w + g.pad + STEP - 1) / STEP);
    if (at.image >= g.images) return;
    const i64 first_output = i64(at.image) * (g.p * g.q);
    indices.data += first_output * indices.stride + at.first;
    dy.data += first_output * dy.stride + at.first;
    if (MASKED) y.data += first_output * y.stride + at.first;
    dx += i64(at.image) * (g.h * g.w) * dx_stride + at.first;
    const int top = at.row * STEP - int(g.pad), left = at.column * STEP - int(g.pad);
    float total[ROWS * STEP][COLUMNS * STEP][WIDE] = {};
    if (accumulate) {
#pragma unroll
        for (int i = 0; i < ROWS * STEP; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS * STEP; ++j) {
                const int h = top + i, w = left + j;
                if (h >= 0 && h < int(g.h) && w >= 0 && w < int(g.w))
                    load_all(dx + (u32(h) * g.w + u32(w)) * u32(dx_stride), total[i][j]);
            }
    }
#pragma unroll
    for (int u = ROWS - 1; u >= -BEFORE; --u) {
        Passing passing[ACROSS];
        const int p = at.row + u;
#pragma unroll
        for (int k = 0; k < ACROSS; ++k) {
            const int q = at.column + COLUMNS - 1 - k;
            const bool there = p >= 0 && p < int(g.p) && q >= 0 && q < int(g.q);
            passing[k] = load_passing<MASKED>(indices, y, dy, there ? u32(p) * g.q + u32(q) : 0, there);
        }
#pragma unroll
        for (int k = 0; k < ACROSS; ++k) {
            float value[WIDE];
            numbers_of<Real>(passing[k].dy, value);
#pragma unroll
            for (int i = 0; i < ROWS * STEP; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS * STEP; ++j) {
                    const int r = i - u * STEP, s = j - (COLUMNS - 1 - k) * STEP;
                    if (r < 0 || r >= R || s < 0 || s >= R) continue;
#pragma unroll
                    for (int w = 0; w < WIDE; ++w) {
                        const u32 other = passing[k].place[w / 4] ^ (u32(r * R + s) * 0x01010101u);
                        if ((other & (0xffu << (8 * (w % 4)))) == 0) total[i][j][w] += value[w];
                    }
                }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS * STEP; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS * STEP; ++j) {
            const int h = top + i, w = left + j;
            if (h >= 0 && h < int(g.h) && w >= 0 && w < int(g.w))
                store_all(dx + (u32(h) * g.w + u32(w)) * u32(dx_stride), total[i][j]);
        }
}
