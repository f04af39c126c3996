// Filters as products read them, and filter gradients as products write them, in other storage; see prepare.py. Those of
// other channels are in images.cu.
//
// Both are rows of `size` numbers, taken by chunks of THREADS * UNROLL * WIDE.

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
__device__ __forceinline__ void convert(const Share<WIDE>& share, const T* x, U* y, i64 size, int accumulate) {
    if (share.inside(size))
        convert_share<true>(share, x, y, size, accumulate);
    else
        convert_share<false>(share, x, y, size, accumulate);
}

// The filters w as activations are stored.
extern "C" __global__ void __launch_bounds__(THREADS) filter_prepare(const float* w, Real* y, i64 size, u32 chunks) {
    convert(Share<WIDE>(chunks), w, y, size, 0);
}

constexpr int FILTERS = 120;  // filters in a table, see UPDATES in sgd.cu

// vdnn.runtime.backends.cuda.source.STRUCTS
struct Filter {
    const float* w;
    Real* y;
    i64 size;
    u32 first;
};

struct Filters {
    Filter of[FILTERS];
};
static_assert(sizeof(Filters) == 32 * FILTERS, "a filter has 32 bytes");

// The same of `count` filters.
extern "C" __global__ void __launch_bounds__(THREADS) filter_prepare_all(
    const __grid_constant__ Filters table, u32 count) {
    const Filter& one = row_of_block(table, count);
    convert(Share<WIDE>(0, blockIdx.x - one.first), one.w, one.y, one.size, 0);
}

// dw = scratch, or dw += scratch
extern "C" __global__ void __launch_bounds__(THREADS) filter_gradient_store(
    const Real* scratch, float* dw, i64 size, u32 chunks, int accumulate) {
    convert(Share<WIDE>(chunks), scratch, dw, size, accumulate);
}
