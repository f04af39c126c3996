// Filters as products read them, and filter gradients as products write them; see prepare.py.
//
// Both are rows: x has rows of `from` numbers, y rows of `to`, one row after the other. With `from` and `to` equal they
// are one long row, of `size` numbers, taken by chunks of THREADS * UNROLL * WIDE.

// y = x, or added to y. Four numbers of float32 are 16 bytes, and so are WIDE of Real.
template <bool INSIDE, int WIDTH, class T, class U>
__device__ __forceinline__ void convert_share(
    const Share<WIDTH>& share, const T* x, U* y, i64 size, int accumulate) {
    float value[UNROLL][WIDTH];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) load<INSIDE>(x, share.index(k), size, value[k]);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        float held[WIDTH] = {};
        if (accumulate) load<INSIDE>(y, share.index(k), size, held);
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) value[k][w] = accumulate ? held[w] + value[k][w] : value[k][w];
        store<INSIDE>(y, share.index(k), size, value[k]);
    }
}

template <class T, class U>
__device__ __forceinline__ void convert(const T* x, U* y, i64 size, u32 chunks, int accumulate) {
    const Share<WIDE> share(chunks);
    if (share.inside(size))
        convert_share<true>(share, x, y, size, accumulate);
    else
        convert_share<false>(share, x, y, size, accumulate);
}

// y[row, i] = x[row, i], or added to it, for i below `from` and `to`, 0 for the others. A number of y a thread.
template <class T, class U>
__device__ __forceinline__ void convert_rows(const T* x, U* y, u32 size, u32 from, u32 to, int accumulate) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    const u32 row = i / to, column = i - row * to;
    const float value = column < from ? float(x[i64(row) * from + column]) : 0.0f;
    y[i] = accumulate ? float(y[i]) + value : value;
}

// The filters w as activations are stored.
extern "C" __global__ void __launch_bounds__(THREADS) filter_prepare(const float* w, Real* y, i64 size, u32 chunks) {
    convert(w, y, size, chunks, 0);
}

// The same with more channels a row, which are 0; `size` numbers of y.
extern "C" __global__ void __launch_bounds__(THREADS) filter_prepare_rows(
    const float* w, Real* y, u32 size, u32 from, u32 to) {
    convert_rows(w, y, size, from, to, 0);
}

// dw = scratch, or dw += scratch
extern "C" __global__ void __launch_bounds__(THREADS) filter_gradient_store(
    const Real* scratch, float* dw, i64 size, u32 chunks, int accumulate) {
    convert(scratch, dw, size, chunks, accumulate);
}

// The same without the last channels of each row of the scratch; `size` numbers of dw.
extern "C" __global__ void __launch_bounds__(THREADS) filter_gradient_store_rows(
    const Real* scratch, float* dw, u32 size, u32 from, u32 to, int accumulate) {
    convert_rows(scratch, dw, size, from, to, accumulate);
}
