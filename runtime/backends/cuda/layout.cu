// From one layout to another: images to vectors and back; see layout.py.

constexpr int TILE = 32;  // a block moves a square of TILE rows and columns of one image

// y[image][j][i] = x[image][i][j], or added to it, for `rows` i and `columns` j. Rows of x are x_row elements apart,
// those of y y_row. A tile passes through shared memory, with one column more so that its columns fall into all banks.
extern "C" __global__ void __launch_bounds__(THREADS) transpose_images(
    const Real* x, i64 x_stride, i64 x_row, Real* y, i64 y_stride, i64 y_row, u32 rows, u32 columns, int accumulate) {
    __shared__ Real held[TILE][TILE + 1];
    const u32 across = (columns + TILE - 1) / TILE, tiles = across * ((rows + TILE - 1) / TILE);
    const u32 image = blockIdx.x / tiles, tile = blockIdx.x - image * tiles;
    const u32 top = tile / across * TILE, left = tile % across * TILE;
    const u32 lane = threadIdx.x % TILE, first = threadIdx.x / TILE;
    x += i64(image) * x_stride;
    y += i64(image) * y_stride;
#pragma unroll
    for (u32 i = first; i < TILE; i += THREADS / TILE)
        if (top + i < rows && left + lane < columns) held[i][lane] = x[i64(top + i) * x_row + left + lane];
    __syncthreads();
#pragma unroll
    for (u32 j = first; j < TILE; j += THREADS / TILE)
        if (left + j < columns && top + lane < rows) {
            Real* target = y + i64(left + j) * y_row + top + lane;
            *target = accumulate ? *target + held[lane][j] : held[lane][j];
        }
}
