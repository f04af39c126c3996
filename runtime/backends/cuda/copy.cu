// Copies and sums of two tensors; see copy.py. Rows of `inner` numbers, `chunks` blocks a row.

extern "C" __global__ void __launch_bounds__(THREADS) copy_rows(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, i64 inner, u32 chunks, int width, int accumulate) {
    if (accumulate) {
        const Source in[] = {{x, x_stride}, {y, y_stride}};
        map(in, y, y_stride, inner, chunks, width, [](const float (&v)[2]) { return v[1] + v[0]; });
    } else {
        const Source in[] = {{x, x_stride}};
        map(in, y, y_stride, inner, chunks, width, [](const float (&v)[1]) { return v[0]; });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) add_rows(
    const Real* a, i64 a_stride, const Real* b, i64 b_stride, Real* y, i64 y_stride, i64 inner, u32 chunks,
    int width) {
    const Source in[] = {{a, a_stride}, {b, b_stride}};
    map(in, y, y_stride, inner, chunks, width, [](const float (&v)[2]) { return v[0] + v[1]; });
}
