// What convolutions in CHWN share: a tile of sums in registers, and an axis of a window; see chwn_conv.py.
//
// A block has ROWS x COLUMNS sums, a thread DOWN x ACROSS of them. Both operands of a few products in a row lie in
// shared memory, those of one product side by side. The 32 threads of a warp are 8 x 4, each with groups of four
// neighbours, so that no two of them wait for one bank.

constexpr int min_of(int a, int b) { return a < b ? a : b; }

template <int ROWS_, int COLUMNS_, int DOWN_, int ACROSS_>
struct Tile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DOWN = DOWN_, ACROSS = ACROSS_;
    static constexpr int WARPS_DOWN = ROWS / (8 * DOWN);
    static_assert(WARPS_DOWN * 8 * DOWN == ROWS && DOWN % 4 == 0, "rows are shared out whole");
    static_assert(THREADS / 32 / WARPS_DOWN * 4 * ACROSS == COLUMNS, "so are columns");
    static_assert(ACROSS == 2 || ACROSS % 4 == 0, "by 8 or 16 bytes");
    static constexpr int PAIR = ACROSS == 2 ? 2 : 4;  // neighbouring columns of a thread
    static constexpr int STEP = 1;                    // products that `add` takes
    static constexpr int GAP = 0;                     // groups of four that are left free behind those of a product

    u32 row, column;  // this thread's first ones
    float sum[DOWN][ACROSS];

    __device__ Tile() {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        row = warp % WARPS_DOWN * (8 * DOWN) + lane % 8 * 4;
        column = warp / WARPS_DOWN * (4 * ACROSS) + lane / 8 * PAIR;
#pragma unroll
        for (int i = 0; i < DOWN; ++i)
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) sum[i][j] = 0;
    }
    // Where sum[i] and sum[.][j] lie in the tile.
    __device__ u32 row_of(int i) const { return row + i / 4 * 32 + i % 4; }
    __device__ u32 column_of(int j) const { return column + j / PAIR * (4 * PAIR) + j % PAIR; }

    // A number as it is multiplied.
    static __device__ __forceinline__ float operand(float value) { return value; }
    // sum += a b^T for one product: a has ROWS numbers, b COLUMNS.
    __device__ __forceinline__ void add(const float* a, int, const float* b, int) {
        float left[DOWN], right[ACROSS];
#pragma unroll
        for (int i = 0; i < DOWN; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(a + row + i / 4 * 32);
            left[i] = four.x, left[i + 1] = four.y, left[i + 2] = four.z, left[i + 3] = four.w;
        }
#pragma unroll
        for (int j = 0; j < ACROSS; j += PAIR) {
            if constexpr (PAIR == 4) {
                const float4 four = *reinterpret_cast<const float4*>(b + column + j / 4 * 16);
                right[j] = four.x, right[j + 1] = four.y, right[j + 2] = four.z, right[j + 3] = four.w;
            } else {
                const uint2 two = *reinterpret_cast<const uint2*>(b + column);
                right[0] = __int_as_float(two.x), right[1] = __int_as_float(two.y);
            }
        }
#pragma unroll
        for (int i = 0; i < DOWN; ++i)
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) sum[i][j] = fmaf(left[i], right[j], sum[i][j]);
    }
};

#if __CUDA_ARCH__ > 0
// What the threads of a warp hold.
template <int COUNT>
struct Lanes {
    float own[COUNT];
    __device__ explicit Lanes(const float (&values)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) own[i] = values[i];
    }
    __device__ float get(int i, u32 lane) const { return __shfl_sync(0xffffffffu, own[i], int(lane)); }
};
#endif

// c += a b for 16 x 8 numbers a and 8 x 8 numbers b, of which each thread of a warp has some: with g = lane / 4 and
// t = lane % 4, a[0] and a[2] are of row g and columns t and t + 4, a[1] and a[3] of row g + 8; b[0] and b[1] of rows t
// and t + 4 and column g; c[0] and c[1] of row g and columns 2 t and 2 t + 1, c[2] and c[3] of row g + 8.
__device__ __forceinline__ void multiply(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
#else
    const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Lanes<4> as(a);
    const Lanes<2> bs(b);
#pragma unroll
    for (u32 k = 0; k < 8; ++k) {
        const u32 at = k / 4, from = k % 4;
        const float upper = as.get(2 * at, 4 * g + from), lower = as.get(2 * at + 1, 4 * g + from);
        const float left = bs.get(at, 8 * t + from), right = bs.get(at, 8 * t + 4 + from);
        c[0] = fmaf(upper, left, c[0]), c[1] = fmaf(upper, right, c[1]);
        c[2] = fmaf(lower, left, c[2]), c[3] = fmaf(lower, right, c[3]);
    }
#endif
}

// The same by tensor cores, which round operands to TF32: 10 bits, all that numbers of 16 bits have. Which rows and
// columns of a warp's share are which of an instruction's is free: so that a thread loads neighbours.
template <int ROWS_, int COLUMNS_, int DOWN_, int ACROSS_>
struct TensorTile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DOWN = DOWN_, ACROSS = ACROSS_;
    static constexpr int WARPS_DOWN = ROWS / (8 * DOWN), HALF = ACROSS / 2;
    static_assert(WARPS_DOWN * 8 * DOWN == ROWS && DOWN % 4 == 0, "rows are shared out whole");
    static_assert(THREADS / 32 / WARPS_DOWN * 4 * ACROSS == COLUMNS, "so are columns");
    static_assert(HALF == 2 || HALF == 4, "by 8 or 16 bytes");
    static constexpr int STEP = 8;
    static constexpr int GAP = 2;  // so that products 0 to 3 lie in banks of their own

    u32 row, column;
    float sum[DOWN][ACROSS];

    __device__ TensorTile() {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        row = warp % WARPS_DOWN * (8 * DOWN) + lane / 4 * 4;
        column = warp / WARPS_DOWN * (4 * ACROSS) + lane % 4 * ACROSS;
#pragma unroll
        for (int i = 0; i < DOWN; ++i)
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) sum[i][j] = 0;
    }
    __device__ u32 row_of(int i) const { return row + i / 4 * 32 + i % 4; }
    __device__ u32 column_of(int j) const { return column + j; }

    static __device__ __forceinline__ float operand(float value) {
        if constexpr (sizeof(Real) == 2) return value;
#if __CUDA_ARCH__ >= 800
        u32 out;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(value));
        return __int_as_float(out);
#else
        const u32 bits = __float_as_uint(value);
        return (bits & 0x7f800000) == 0x7f800000 ? value : __int_as_float(bits + 0x1000 & 0xffffe000);
#endif
    }
    // sum += a b^T for 8 products, `a_step` and `b_step` numbers apart.
    __device__ __forceinline__ void add(const float* a, int a_step, const float* b, int b_step) {
        const u32 lane = threadIdx.x % 32, warp_column = column - lane % 4 * ACROSS;
        float left[2][DOWN], right[2][HALF];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float* const a_row = a + (lane % 4 + 4 * k) * a_step + row;
#pragma unroll
            for (int i = 0; i < DOWN; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(a_row + i / 4 * 32);
                left[k][i] = four.x, left[k][i + 1] = four.y, left[k][i + 2] = four.z, left[k][i + 3] = four.w;
            }
            const float* const b_row = b + (lane % 4 + 4 * k) * b_step + warp_column + lane / 4 * HALF;
            if constexpr (HALF == 4) {
                const float4 four = *reinterpret_cast<const float4*>(b_row);
                right[k][0] = four.x, right[k][1] = four.y, right[k][2] = four.z, right[k][3] = four.w;
            } else {
                const uint2 two = *reinterpret_cast<const uint2*>(b_row);
                right[k][0] = __int_as_float(two.x), right[k][1] = __int_as_float(two.y);
            }
        }
#pragma unroll
        for (int i = 0; i < DOWN; i += 2)
#pragma unroll
            for (int j = 0; j < HALF; ++j) {
                const float x[4] = {left[0][i], left[0][i + 1], left[1][i], left[1][i + 1]};
                const float y[2] = {right[0][j], right[1][j]};
                float c[4] = {sum[i][j], sum[i][HALF + j], sum[i + 1][j], sum[i + 1][HALF + j]};
                multiply(c, x, y);
                sum[i][j] = c[0], sum[i][HALF + j] = c[1], sum[i + 1][j] = c[2], sum[i + 1][HALF + j] = c[3];
            }
    }
};

// One axis of a window: output i meets input i * step + first + t * by through tap `tap` + t * tap_by, t < count.
// Outputs are those from `place` on, by `place_by`; there are `size`.
struct Axis {
    int step, first, by, tap, tap_by, count, place, place_by, size;

    // Of a convolution; or, `transposed`, of its gradient, whose outputs are the images: those that leave `residue`
    // when divided by the stride, as all of them meet the same taps.
    __device__ Axis(bool transposed, int residue, int stride, int pad, int dilation, int taps, int outputs) {
        step = stride, first = -pad, by = dilation, tap = 0, tap_by = 1, count = taps;
        place = 0, place_by = 1, size = outputs;
        if (!transposed) return;
        step = 1, place = residue, place_by = stride, size = (outputs - residue + stride - 1) / stride;
        while (tap < stride && tap < taps && (residue + pad - tap * dilation) % stride != 0) ++tap;
        while (tap_by * dilation % stride != 0) ++tap_by;
        const bool meets = tap < taps && (residue + pad - tap * dilation) % stride == 0;
        first = (residue + pad - tap * dilation) / stride, by = -(tap_by * dilation / stride);
        count = meets ? (taps - tap + tap_by - 1) / tap_by : 0;
    }
    // Leaves out the taps at both ends through which none of outputs `low` to `high` meets one of `inputs` inputs.
    __device__ void trim(int low, int high, int inputs) {
        for (; count > 0 && !meets(low, high, first, inputs); --count) first += by, tap += tap_by;
        while (count > 0 && !meets(low, high, first + (count - 1) * by, inputs)) --count;
    }
    __device__ bool meets(int low, int high, int at, int inputs) const {
        return high * step + at >= 0 && low * step + at < inputs;
    }
};

template <class T>
__device__ __forceinline__ float4 four_operands(const float (&v)[4]) {
    return make_float4(T::operand(v[0]), T::operand(v[1]), T::operand(v[2]), T::operand(v[3]));
}

// Four numbers, some of which may not be there.
template <class T>
__device__ __forceinline__ void load_some(const T* at, int count, bool wide, float (&out)[4]) {
    if (wide && count >= 4) {
        load_all(at, out);
        return;
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) out[w] = w < count ? float(at[w]) : 0.0f;
}
