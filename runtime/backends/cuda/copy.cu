// Copies, sums of two tensors, and pixels to numbers; see copy.py. Rows of `inner` numbers, `chunks` blocks a row.

extern "C" __global__ void __launch_bounds__(THREADS) copy_rows(
    const float* x, i64 x_stride, float* y, i64 y_stride, i64 inner, u32 chunks, int width, int accumulate) {
    if (accumulate) {
        const Source in[] = {{x, x_stride}, {y, y_stride}};
        map(in, y, y_stride, inner, chunks, width, [](const float (&v)[2]) { return v[1] + v[0]; });
    } else {
        const Source in[] = {{x, x_stride}};
        map(in, y, y_stride, inner, chunks, width, [](const float (&v)[1]) { return v[0]; });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) add_rows(
    const float* a, i64 a_stride, const float* b, i64 b_stride, float* y, i64 y_stride, i64 inner, u32 chunks,
    int width) {
    const Source in[] = {{a, a_stride}, {b, b_stride}};
    map(in, y, y_stride, inner, chunks, width, [](const float (&v)[2]) { return v[0] + v[1]; });
}

template <bool INSIDE, int WIDTH>
__device__ __forceinline__ void normalize_share(
    const Share<WIDTH>& share, const u8* x, float* y, i64 inner, float mean, float std) {
    float value[UNROLL][WIDTH];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) load<INSIDE>(x, share.index(k), inner, value[k]);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) value[k][w] = (value[k][w] / 255.0f - mean) / std;
        store<INSIDE>(y, share.index(k), inner, value[k]);
    }
}

template <int WIDTH>
__device__ __forceinline__ void normalize_by(
    const u8* x, i64 x_stride, float* y, i64 y_stride, i64 inner, u32 chunks, float mean, float std) {
    const Share<WIDTH> share(chunks);
    x += share.row * x_stride;
    y += share.row * y_stride;
    if (share.inside(inner))
        normalize_share<true>(share, x, y, inner, mean, std);
    else
        normalize_share<false>(share, x, y, inner, mean, std);
}

// One channel of all images: x and y begin at that channel, inner = H * W.
extern "C" __global__ void __launch_bounds__(THREADS) normalize_channel(
    const u8* x, i64 x_stride, float* y, i64 y_stride, i64 inner, u32 chunks, int width, float mean, float std) {
    if (width == 4)
        normalize_by<4>(x, x_stride, y, y_stride, inner, chunks, mean, std);
    else
        normalize_by<1>(x, x_stride, y, y_stride, inner, chunks, mean, std);
}
