// From one layout to another: pixels to numbers, and images to vectors; see layout.py.

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

struct Scaling {
    float mean[4], std[4];
};

// Up to four channels of all images, for y in NHWC: x begins at the first of them, y too, one pixel a thread. Images of
// x are x_stride apart and have planes of hw pixels, of all images there are `pixels`; pixels of y are y_stride apart.
extern "C" __global__ void __launch_bounds__(THREADS) normalize_pixels(
    const u8* x, i64 x_stride, float* y, i64 y_stride, u32 hw, u32 pixels, u32 channels, float mean0, float mean1,
    float mean2, float mean3, float std0, float std1, float std2, float std3) {
    const Scaling scaling{{mean0, mean1, mean2, mean3}, {std0, std1, std2, std3}};
    const u32 pixel = blockIdx.x * THREADS + threadIdx.x;
    if (pixel >= pixels) return;
    const u32 image = pixel / hw;
    x += i64(image) * x_stride + (pixel - image * hw);
    y += i64(pixel) * y_stride;
#pragma unroll
    for (u32 c = 0; c < 4; ++c)
        if (c < channels) y[c] = (float(x[i64(c) * hw]) / 255.0f - scaling.mean[c]) / scaling.std[c];
}

constexpr int TILE = 32;  // a block moves a square of TILE rows and columns of one image

// y[image][j][i] = x[image][i][j], or added to it, for `rows` i and `columns` j. Rows of x are x_row elements apart,
// those of y y_row. A tile passes through shared memory, with one column more so that its columns fall into all banks.
extern "C" __global__ void __launch_bounds__(THREADS) transpose_images(
    const float* x, i64 x_stride, i64 x_row, float* y, i64 y_stride, i64 y_row, u32 rows, u32 columns, int accumulate) {
    __shared__ float held[TILE][TILE + 1];
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
            float* target = y + i64(left + j) * y_row + top + lane;
            *target = accumulate ? *target + held[lane][j] : held[lane][j];
        }
}
