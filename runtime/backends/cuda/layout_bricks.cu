// Transpositions in bricks: y[b][p][a] = x[a][p][b], or added to it; see layout.py.
//
// Between NHWC and CHWN `p` is a pixel, else an image. A brick is a range of each of the three. Where it has all of `a`,
// and p follows p in y, what it writes for one b is contiguous over its p: short rows, such as those of 32 images, become
// long ones. The same holds for what it reads of one a. Both sides go by pieces.

constexpr int BRICK_PIECES = 2048;  // of 16 bytes

// One thread's share of units counted by `inner` first, then by `middle`: every THREADS-th, without dividing for each.
struct Turn {
    u32 inner, middle, outer, inners, middles, inner_step, middle_step, outer_step;

    __device__ Turn(u32 inners, u32 middles) : inners(inners), middles(middles) {
        split(threadIdx.x, inner, middle, outer);
        split(THREADS, inner_step, middle_step, outer_step);
    }
    __device__ void split(u32 unit, u32& in, u32& mid, u32& out) const {
        const u32 rest = unit / inners;
        in = unit - rest * inners, out = rest / middles, mid = rest - out * middles;
    }
    __device__ void next() {
        inner += inner_step, middle += middle_step, outer += outer_step;
        if (inner >= inners) inner -= inners, ++middle;
        if (middle >= middles) middle -= middles, ++outer;
    }
};

// Both sides leave the cache first: a line that two bricks share is read by both at about the same time.
__device__ __forceinline__ Piece load_once(const Real* at) {
    const uint4 words = __ldcs(reinterpret_cast<const uint4*>(at));
    return {{words.x, words.y, words.z, words.w}};
}

// The piece to `at`, or its sum with what is there.
template <bool ONCE>
__device__ __forceinline__ void put_piece(Real* at, const Piece& piece, int accumulate) {
    const uint4 words = make_uint4(piece.word[0], piece.word[1], piece.word[2], piece.word[3]);
    if (accumulate) {
        alignas(16) Real added[WIDE];
        *reinterpret_cast<uint4*>(added) = words;
        float sum[WIDE];
        load_all(at, sum);
#pragma unroll
        for (int w = 0; w < WIDE; ++w) sum[w] += float(added[w]);
        store_all(at, sum);
    } else if constexpr (ONCE) {
        __stcs(reinterpret_cast<uint4*>(at), words);
    } else {
        *reinterpret_cast<uint4*>(at) = words;
    }
}

// A brick has a_tile x p_tile x b_tile pieces of a, numbers of p, pieces of b. Bricks follow each other along a and b
// first, the shorter of them before the other, so that those at work share lines of memory on both sides.
extern "C" __global__ void __launch_bounds__(THREADS) transform_bricks(
    const Real* x, i64 x_a, i64 x_p, Real* y, i64 y_b, i64 y_p, u32 a_size, u32 p_size, u32 b_size,
    u32 a_tile, u32 p_tile, u32 b_tile, int accumulate) {
    __shared__ uint4 held[BRICK_PIECES];
    const u32 a_tiles = (a_size + a_tile * WIDE - 1) / (a_tile * WIDE);
    const u32 b_tiles = (b_size + b_tile * WIDE - 1) / (b_tile * WIDE);
    const u32 layer = blockIdx.x / (a_tiles * b_tiles), rest = blockIdx.x - layer * a_tiles * b_tiles;
    const u32 fewer = min(a_tiles, b_tiles), slow = rest / fewer, fast = rest - slow * fewer;
    const u32 a_first = (a_tiles <= b_tiles ? fast : slow) * a_tile * WIDE;
    const u32 b_first = (a_tiles <= b_tiles ? slow : fast) * b_tile * WIDE, p_first = layer * p_tile;
    const u32 a_here = min(a_tile, (a_size - a_first) / WIDE), b_here = min(b_tile, (b_size - b_first) / WIDE);
    const u32 p_here = min(p_tile, p_size - p_first), run = (a_tile * p_tile + 7) / 8 * 8;
    x += a_first * x_a + p_first * x_p + b_first;
    y += b_first * y_b + p_first * y_p + a_first;

#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < a_here * p_here * b_here; unit += THREADS) {
        const u32 line = unit / b_here, j = unit - line * b_here, i = line / p_here, p = line - i * p_here;
        const Real* source = x + i64(i * WIDE) * x_a + p * x_p + j * WIDE;
        Piece rows[WIDE], columns[WIDE];
#pragma unroll
        for (u32 r = 0; r < WIDE; ++r) rows[r] = load_once(source + r * x_a);
        flip(rows, columns);
#pragma unroll
        for (u32 c = 0; c < WIDE; ++c)
            store_piece(held + unit_of(j * WIDE + c, p * a_tile + i, run), columns[c]);
    }
    __syncthreads();
    Turn out(a_here, p_here);
#pragma unroll 2
    for (; out.outer < b_here * WIDE; out.next()) {
        const Piece piece = load_piece(held + unit_of(out.outer, out.middle * a_tile + out.inner, run));
        put_piece<true>(y + out.outer * y_b + out.middle * y_p + out.inner * WIDE, piece, accumulate);
    }
}
