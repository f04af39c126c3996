// What every kernel shares: the record of the step, loads of one number or of 16 bytes, and loops over rows.
//
// A tensor is an address and a stride: image n begins n * stride elements after the address, and its C*H*W numbers lie
// close together in NCHW order, whether it is a whole tensor or some channels of a larger one. In NHWC a pixel is what
// an image is in NCHW: C numbers, `stride` elements from those of the next pixel, and H * W counts as 1. In CHWN the batch
// is one image of C planes of H * W * N numbers. Offsets of images are 64 bits wide; an index within one image, or within
// one channel of a batch, is below 2^31 (the host checks that).
// All blocks are one-dimensional, of THREADS threads.

constexpr int THREADS = 256;
constexpr int UNROLL = 4;  // loads that a thread starts before it waits for the first
constexpr int SINGLE = 1;  // rows of a table that is one call's many arguments

// vdnn.runtime.step.STEP_DTYPE
struct StepRecord {
    float lr;
    float gradient_scale;
    u64 step;
    u64 seed;
    u32 sample;
    u32 not_finite;
    float unscale;
    u32 reserved[7];
};
static_assert(sizeof(StepRecord) == 64, "the step record has 64 bytes");

struct Source {
    const Real* data;
    i64 stride;
};

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// WIDTH numbers at once, from an address that is a multiple of their bytes, or of 16.
template <int WIDTH>
__device__ __forceinline__ void load_all(const float* at, float (&out)[WIDTH]) {
    static_assert(WIDTH % 4 == 0, "by 16 bytes");
#pragma unroll
    for (int w = 0; w < WIDTH; w += 4) {
        const float4 four = *reinterpret_cast<const float4*>(at + w);
        out[w] = four.x, out[w + 1] = four.y, out[w + 2] = four.z, out[w + 3] = four.w;
    }
}

template <int WIDTH>
__device__ __forceinline__ void load_all(const u8* at, u32 (&out)[WIDTH]) {
    static_assert(WIDTH % 4 == 0, "by 4 bytes");
    u32 word[WIDTH / 4];
    if constexpr (WIDTH == 8) {
        const uint2 two = *reinterpret_cast<const uint2*>(at);
        word[0] = two.x, word[1] = two.y;
    } else {
#pragma unroll
        for (int w = 0; w < WIDTH / 4; ++w) word[w] = reinterpret_cast<const u32*>(at)[w];
    }
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) out[w] = word[w / 4] >> (8 * (w % 4)) & 0xff;
}

template <int WIDTH>
__device__ __forceinline__ void load_all(const u8* at, float (&out)[WIDTH]) {
    u32 whole[WIDTH];
    load_all(at, whole);
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) out[w] = float(whole[w]);
}

// Of 16 bits each.
template <int WIDTH, class T>
__device__ __forceinline__ void load_all(const T* at, float (&out)[WIDTH]) {
    static_assert(WIDTH == 2 || WIDTH == 4 || WIDTH % 8 == 0, "by 16 bytes, 8 or 4");
    if constexpr (WIDTH == 2) {
        T::unpack(*reinterpret_cast<const u32*>(at), out[0], out[1]);
    } else if constexpr (WIDTH == 4) {
        const uint2 two = *reinterpret_cast<const uint2*>(at);
        T::unpack(two.x, out[0], out[1]), T::unpack(two.y, out[2], out[3]);
    } else {
#pragma unroll
        for (int w = 0; w < WIDTH; w += 8) {
            const uint4 four = *reinterpret_cast<const uint4*>(at + w);
            T::unpack(four.x, out[w], out[w + 1]), T::unpack(four.y, out[w + 2], out[w + 3]);
            T::unpack(four.z, out[w + 4], out[w + 5]), T::unpack(four.w, out[w + 6], out[w + 7]);
        }
    }
}

template <bool INSIDE, int WIDTH, class T>
__device__ __forceinline__ void load_each(const T* row, i64 i, i64 end, float (&out)[WIDTH]) {
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) out[w] = INSIDE || i + w < end ? float(row[i + w]) : 0.0f;
}

// WIDTH numbers from row[i] on; those from `end` on are 0. INSIDE says that there are none. One by one for WIDTH 1.
template <bool INSIDE, int WIDTH, class T>
__device__ __forceinline__ void load(const T* row, i64 i, i64 end, float (&out)[WIDTH]) {
    if constexpr (WIDTH == 1)
        load_each<INSIDE>(row, i, end, out);
    else if constexpr (INSIDE)
        load_all(row + i, out);
    else if (i + WIDTH <= end)
        load_all(row + i, out);
    else
        load_each<false>(row, i, end, out);
}

template <int WIDTH>
__device__ __forceinline__ void store_all(float* at, const float (&value)[WIDTH]) {
    static_assert(WIDTH % 4 == 0, "by 16 bytes");
#pragma unroll
    for (int w = 0; w < WIDTH; w += 4)
        *reinterpret_cast<float4*>(at + w) = make_float4(value[w], value[w + 1], value[w + 2], value[w + 3]);
}

template <int WIDTH, class T>
__device__ __forceinline__ void store_all(T* at, const float (&value)[WIDTH]) {
    static_assert(WIDTH == 2 || WIDTH == 4 || WIDTH % 8 == 0, "by 16 bytes, 8 or 4");
    u32 word[WIDTH / 2];
#pragma unroll
    for (int w = 0; w < WIDTH / 2; ++w) word[w] = T::pack(value[2 * w], value[2 * w + 1]);
    if constexpr (WIDTH == 2) {
        *reinterpret_cast<u32*>(at) = word[0];
    } else if constexpr (WIDTH == 4) {
        *reinterpret_cast<uint2*>(at) = make_uint2(word[0], word[1]);
    } else {
#pragma unroll
        for (int w = 0; w < WIDTH / 2; w += 4)
            *reinterpret_cast<uint4*>(at + 2 * w) = make_uint4(word[w], word[w + 1], word[w + 2], word[w + 3]);
    }
}

// Of 8 bits each.
template <int WIDTH>
__device__ __forceinline__ void store_all(u8* at, const u32 (&value)[WIDTH]) {
    static_assert(WIDTH % 4 == 0, "by 4 bytes");
    u32 word[WIDTH / 4];
#pragma unroll
    for (int k = 0; k < WIDTH / 4; ++k)
        word[k] = value[4 * k] | value[4 * k + 1] << 8 | value[4 * k + 2] << 16 | value[4 * k + 3] << 24;
    if constexpr (WIDTH == 8) {
        *reinterpret_cast<uint2*>(at) = make_uint2(word[0], word[1]);
    } else {
#pragma unroll
        for (int k = 0; k < WIDTH / 4; ++k) reinterpret_cast<u32*>(at)[k] = word[k];
    }
}

template <bool INSIDE, int WIDTH, class T>
__device__ __forceinline__ void store_each(T* row, i64 i, i64 end, const float (&value)[WIDTH]) {
#pragma unroll
    for (int w = 0; w < WIDTH; ++w)
        if (INSIDE || i + w < end) row[i + w] = value[w];
}

// WIDTH numbers to row[i] and on, as far as they lie before `end`.
template <bool INSIDE, int WIDTH, class T>
__device__ __forceinline__ void store(T* row, i64 i, i64 end, const float (&value)[WIDTH]) {
    if constexpr (WIDTH == 1)
        store_each<INSIDE>(row, i, end, value);
    else if constexpr (INSIDE)
        store_all(row + i, value);
    else if (i + WIDTH <= end)
        store_all(row + i, value);
    else
        store_each<false>(row, i, end, value);
}

// This block's part of a grid of rows x chunks: a row, and the first of this thread's numbers in it.
template <int WIDTH>
struct Share {
    static constexpr i64 SIZE = i64(THREADS) * UNROLL * WIDTH;  // numbers of a chunk
    i64 row, start, first;

    __device__ Share(i64 row, u32 chunk)
        : row(row), start(i64(chunk) * SIZE), first(start + i64(threadIdx.x) * WIDTH) {}
    __device__ explicit Share(u32 chunks) {
        const u32 quotient = blockIdx.x / chunks;
        row = quotient;
        start = i64(blockIdx.x - quotient * chunks) * SIZE;
        first = start + i64(threadIdx.x) * WIDTH;
    }
    __device__ i64 index(int k) const { return first + i64(k) * THREADS * WIDTH; }
    // Whether the whole block stays within rows of `inner` numbers: then no load needs a branch of its own.
    __device__ bool inside(i64 inner) const { return start + SIZE <= inner; }
};

// y[row, i] = f(in[0][row, i], in[1][row, i], ...) for rows of `inner` numbers. y may be the bytes of any input.
template <bool INSIDE, int WIDTH, int COUNT, class F>
__device__ __forceinline__ void map_share(
    const Share<WIDTH>& share, const Source (&in)[COUNT], Real* y, i64 y_stride, i64 inner, F f) {
    float value[COUNT][UNROLL][WIDTH];
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            load<INSIDE>(in[j].data + share.row * in[j].stride, share.index(k), inner, value[j][k]);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        float result[WIDTH];
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            float operand[COUNT];
#pragma unroll
            for (int j = 0; j < COUNT; ++j) operand[j] = value[j][k][w];
            result[w] = f(operand);
        }
        store<INSIDE>(y + share.row * y_stride, share.index(k), inner, result);
    }
}

template <int WIDTH, int COUNT, class F>
__device__ __forceinline__ void map_rows(
    const Source (&in)[COUNT], Real* y, i64 y_stride, i64 inner, u32 chunks, F f) {
    const Share<WIDTH> share(chunks);
    if (share.inside(inner))
        map_share<true>(share, in, y, y_stride, inner, f);
    else
        map_share<false>(share, in, y, y_stride, inner, f);
}

// COUNT copies of a function, which need not have a state of its own to begin with.
template <int COUNT, class F>
struct Copies {
    Copies<COUNT / 2, F> low, high;
    __device__ explicit Copies(F f) : low(f), high(f) {}
    __device__ F& operator[](int i) { return i < COUNT / 2 ? low[i] : high[i - COUNT / 2]; }
};

template <class F>
struct Copies<1, F> {
    F own;
    __device__ explicit Copies(F f) : own(f) {}
    __device__ F& operator[](int) { return own; }
};

// The same for many short rows, such as the pixels of NHWC. A thread has WIDTH columns, of UNROLL rows far from each
// other, so that neighbours read neighbours; f.enter(column) comes before the first number of a column.
template <int WIDTH, int COUNT, class F>
__device__ __forceinline__ void map_short(
    const Source (&in)[COUNT], Real* y, i64 y_stride, u32 inner, u32 rows, F f) {
    const u32 groups = inner / WIDTH, turns = (rows + UNROLL - 1) / UNROLL;
    const u32 unit = blockIdx.x * THREADS + threadIdx.x, first = unit / groups, column = (unit - first * groups) * WIDTH;
    if (first >= turns) return;
    Copies<WIDTH, F> own(f);
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) own[w].enter(column + w);
    float value[COUNT][UNROLL][WIDTH] = {};
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (first + k * turns < rows)
                load<true>(in[j].data + i64(first + k * turns) * in[j].stride, column, inner, value[j][k]);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        if (first + k * turns >= rows) return;
        float result[WIDTH];
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            float operand[COUNT];
#pragma unroll
            for (int j = 0; j < COUNT; ++j) operand[j] = value[j][k][w];
            result[w] = own[w](operand);
        }
        store<true>(y + i64(first + k * turns) * y_stride, column, inner, result);
    }
}

// A function that is the same for every column.
template <class F>
struct Plain {
    F f;
    __device__ void enter(u32) {}
    template <int COUNT>
    __device__ float operator()(const float (&v)[COUNT]) const { return f(v); }
};

// By 16 bytes where the host found every row aligned (`width` WIDE), else one by one (`width` 1). A negative width says
// that rows are short; then `chunks` is how many there are.
template <int COUNT, class F>
__device__ __forceinline__ void map(
    const Source (&in)[COUNT], Real* y, i64 y_stride, i64 inner, u32 chunks, int width, F f) {
    if (width == WIDE)
        map_rows<WIDE>(in, y, y_stride, inner, chunks, f);
    else if (width == 1)
        map_rows<1>(in, y, y_stride, inner, chunks, f);
    else if (width == -WIDE)
        map_short<WIDE>(in, y, y_stride, u32(inner), chunks, Plain<F>{f});
    else
        map_short<1>(in, y, y_stride, u32(inner), chunks, Plain<F>{f});
}

// The last of `count` rows of a table that begins at this block or before it: row.first is the number of its first
// block. vdnn.runtime.backends.cuda.tables
template <class Table>
__device__ __forceinline__ const auto& row_of_block(const Table& table, u32 count) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (table.of[middle].first <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    return table.of[low];
}

// Sums of two numbers over the threads of a block, in an order that never changes; thread 0 gets them.
__device__ __forceinline__ void block_sums(double& first, double& second) {
    __shared__ double held[2][THREADS];
    const int t = threadIdx.x;
    held[0][t] = first, held[1][t] = second;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (t < half) held[0][t] += held[0][t + half], held[1][t] += held[1][t + half];
        __syncthreads();
    }
    first = held[0][0], second = held[1][0];
    __syncthreads();
}
