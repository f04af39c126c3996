// Maxima in NHWC: one kernel for each window and tile, over the templates of pool_pixels_fixed.cu; see pool.py. Names
// end in the size of windows, their step, and a tile's rows and columns.

template <int R, int STEP, int ROWS, int COLUMNS>
__device__ __forceinline__ void pool_tiles(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, const Tiling& g) {
    if (indices)
        pool_tile<R, STEP, ROWS, COLUMNS, true>(x, x_stride, y, y_stride, indices, indices_stride, g);
    else
        pool_tile<R, STEP, ROWS, COLUMNS, false>(x, x_stride, y, y_stride, indices, indices_stride, g);
}

template <int R, int STEP, int ROWS, int COLUMNS>
__device__ __forceinline__ void gather_tiles(
    Pixels<u8> indices, Pixels<Real> y, Pixels<Real> dy, Real* dx, i64 dx_stride, const Tiling& g, int accumulate) {
    if (y.data)
        gather_tile<R, STEP, ROWS, COLUMNS, true>(indices, y, dy, dx, dx_stride, g, accumulate);
    else
        gather_tile<R, STEP, ROWS, COLUMNS, false>(indices, y, dy, dx, dx_stride, g, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_2_2_1x1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across, u64 by_along) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    pool_tiles<2, 2, 1, 1>(x, x_stride, y, y_stride, indices, indices_stride, g);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_2_2_2x1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across, u64 by_along) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    pool_tiles<2, 2, 2, 1>(x, x_stride, y, y_stride, indices, indices_stride, g);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_3_2_1x1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across, u64 by_along) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    pool_tiles<3, 2, 1, 1>(x, x_stride, y, y_stride, indices, indices_stride, g);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_3_2_2x1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across, u64 by_along) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    pool_tiles<3, 2, 2, 1>(x, x_stride, y, y_stride, indices, indices_stride, g);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_3_2_4x1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across, u64 by_along) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    pool_tiles<3, 2, 4, 1>(x, x_stride, y, y_stride, indices, indices_stride, g);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_3_2_2x2(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across, u64 by_along) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    pool_tiles<3, 2, 2, 2>(x, x_stride, y, y_stride, indices, indices_stride, g);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_3_1_2x1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across, u64 by_along) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    pool_tiles<3, 1, 2, 1>(x, x_stride, y, y_stride, indices, indices_stride, g);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_3_1_2x2(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across, u64 by_along) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    pool_tiles<3, 1, 2, 2>(x, x_stride, y, y_stride, indices, indices_stride, g);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_gradient_2_2_1x1(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across,
    u64 by_along, int accumulate) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    gather_tiles<2, 2, 1, 1>(
        {indices, indices_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_gradient_2_2_2x1(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across,
    u64 by_along, int accumulate) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    gather_tiles<2, 2, 2, 1>(
        {indices, indices_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_gradient_3_2_1x1(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across,
    u64 by_along, int accumulate) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    gather_tiles<3, 2, 1, 1>(
        {indices, indices_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_gradient_3_2_2x1(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across,
    u64 by_along, int accumulate) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    gather_tiles<3, 2, 2, 1>(
        {indices, indices_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_gradient_3_1_2x1(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across,
    u64 by_along, int accumulate) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    gather_tiles<3, 1, 2, 1>(
        {indices, indices_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_tile_gradient_3_1_2x2(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 images, u32 groups, u64 by_groups, u64 by_across,
    u64 by_along, int accumulate) {
    const Tiling g{h, w, p, q, pad, images, groups, by_groups, by_across, by_along};
    gather_tiles<3, 1, 2, 2>(
        {indices, indices_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}
