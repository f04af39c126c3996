// Rectified linear unit; see relu.py. Rows of `inner` numbers, `chunks` blocks a row.

// A NaN stays a NaN.
__device__ __forceinline__ float rectified(float x) { return x < 0 ? 0.0f : x; }

extern "C" __global__ void __launch_bounds__(THREADS) relu_forward(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, i64 inner, u32 chunks, int width) {
    const Source in[] = {{x, x_stride}};
    map(in, y, y_stride, inner, chunks, width, [](const float (&v)[1]) { return rectified(v[0]); });
}

extern "C" __global__ void __launch_bounds__(THREADS) relu_backward(
    const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx, i64 dx_stride, i64 inner, u32 chunks,
    int width, int accumulate) {
    if (accumulate) {
        const Source in[] = {{y, y_stride}, {dy, dy_stride}, {dx, dx_stride}};
        map(in, dx, dx_stride, inner, chunks, width,
            [](const float (&v)[3]) { return v[2] + (v[0] > 0 ? v[1] : 0.0f); });
    } else {
        const Source in[] = {{y, y_stride}, {dy, dy_stride}};
        map(in, dx, dx_stride, inner, chunks, width, [](const float (&v)[2]) { return v[0] > 0 ? v[1] : 0.0f; });
    }
}
