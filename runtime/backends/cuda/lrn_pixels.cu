// Local response normalisation in NHWC; see lrn.py and lrn.cu. A thread has one channel of one pixel, or four for the
// usual window of 5, which reach no further than the four before and the four after them.

// values[0 .. 12) = those of channels c - 4 to c + 7 of a pixel; 0 outside of the tensor, whose channels go by fours.
__device__ __forceinline__ void load_twelve(const Real* pixel, int c, int channels, float (&values)[12]) {
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        float four[4] = {};
        const int first = c + 4 * (k - 1);
        if (first >= 0 && first < channels) load_all(pixel + first, four);
#pragma unroll
        for (int w = 0; w < 4; ++w) values[4 * k + w] = four[w];
    }
}

// The scale of the channel whose number is values[at].
__device__ __forceinline__ float scale_of_five(const Formula& f, const float (&values)[12], int at) {
    float squares = 0;
#pragma unroll
    for (int j = -2; j <= 2; ++j) squares += values[at + j] * values[at + j];
    return f.scale(squares);
}

extern "C" __global__ void __launch_bounds__(THREADS) lrn_pixels_forward(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, int channels, u32 pixels, int width, int size,
    float alpha_over_size, float beta, float k) {
    const u32 groups = u32(channels / width), unit = blockIdx.x * THREADS + threadIdx.x, pixel = unit / groups;
    if (pixel >= pixels) return;
    const int c = int(unit - pixel * groups) * width;
    const Formula f{size, alpha_over_size, beta, k};
    x += i64(pixel) * x_stride;
    y += i64(pixel) * y_stride;
    if (width == 1) return forward_column<0>(f, Reader{x, 1, channels}, y, c, c + 1);
    float value[12], result[4];
    load_twelve(x, c, channels, value);
#pragma unroll
    for (int w = 0; w < 4; ++w) result[w] = value[4 + w] * f.power(scale_of_five(f, value, 4 + w));
    store_all(y + c, result);
}

extern "C" __global__ void __launch_bounds__(THREADS) lrn_pixels_backward(
    const Real* x, i64 x_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, int channels, u32 pixels, int width, int size, float alpha_over_size, float beta, float k,
    float slope, int accumulate) {
    const u32 groups = u32(channels / width), unit = blockIdx.x * THREADS + threadIdx.x, pixel = unit / groups;
    if (pixel >= pixels) return;
    const int c = int(unit - pixel * groups) * width;
    const Formula f{size, alpha_over_size, beta, k};
    x += i64(pixel) * x_stride;
    y += i64(pixel) * y_stride;
    dy += i64(pixel) * dy_stride;
    dx += i64(pixel) * dx_stride;
    if (width == 1) {
        const Reader xs{x, 1, channels}, ys{y, 1, channels}, dys{dy, 1, channels};
        return backward_column<0>(f, xs, ys, dys, dx, c, c + 1, slope, accumulate);
    }
    float value[12], ratio[12], gradient[12], own[4], held[4] = {};
    load_twelve(x, c, channels, value);
    load_twelve(y, c, channels, ratio);
    load_twelve(dy, c, channels, gradient);
    if (accumulate) load_all(dx + c, held);
#pragma unroll
    for (int j = 2; j < 10; ++j) {
        const float scale = scale_of_five(f, value, j);
        ratio[j] = gradient[j] * ratio[j] / scale;
        if (j >= 4 && j < 8) own[j - 4] = gradient[j] * f.power(scale);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float across = 0;
#pragma unroll
        for (int j = -2; j <= 2; ++j) across += ratio[4 + w + j];
        held[w] += own[w] - slope * value[4 + w] * across;
    }
    store_all(dx + c, held);
}
