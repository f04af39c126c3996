// From one layout to another: pixels to numbers, and images to vectors; see layout.py.

template <bool INSIDE, int WIDTH>
__device__ __forceinline__ void normalize_share(
    const Share<WIDTH>& share, const u8* x, Real* y, i64 inner, float mean, float std) {
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
    const u8* x, i64 x_stride, Real* y, i64 y_stride, i64 inner, u32 chunks, float mean, float std) {
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
    const u8* x, i64 x_stride, Real* y, i64 y_stride, i64 inner, u32 chunks, int width, float mean, float std) {
    if (width == WIDE)
        normalize_by<WIDE>(x, x_stride, y, y_stride, inner, chunks, mean, std);
    else
        normalize_by<1>(x, x_stride, y, y_stride, inner, chunks, mean, std);
}

struct Scaling {
    float mean[4], std[4];
};

// `channels`, four at most, of one pixel, and 0 in those that follow.
__device__ __forceinline__ void normalize_pixel(
    const u8 (&byte)[4], u32 channels, const Scaling& scaling, float (&out)[WIDE]) {
#pragma unroll
    for (u32 c = 0; c < WIDE; ++c)
        out[c] = c < 4 && c < channels ? (float(byte[c % 4]) / 255.0f - scaling.mean[c % 4]) / scaling.std[c % 4] : 0;
}

// The first `filled` channels of a pixel; 0 in those beyond WIDE.
__device__ __forceinline__ void fill_pixel(Real* pixel, const float (&value)[WIDE], u32 filled) {
#pragma unroll
    for (u32 c = 0; c < WIDE; ++c)
        if (c < filled) pixel[c] = value[c];
    for (u32 c = WIDE; c < filled; ++c) pixel[c] = 0.0f;
}

// Up to four channels of all images, for y in NHWC, and zeros up to channel `filled` of y: x begins at the first of them,
// y too. Images of x are x_stride apart and have planes of hw pixels, of all images there are `pixels`; pixels of y are
// y_stride apart. UNROLL pixels a thread; width WIDE says that a pixel is 16 bytes on 16.
extern "C" __global__ void __launch_bounds__(THREADS) normalize_pixels(
    const u8* x, i64 x_stride, Real* y, i64 y_stride, u32 hw, u32 pixels, u32 channels, u32 filled, int width,
    float mean0, float mean1, float mean2, float mean3, float std0, float std1, float std2, float std3) {
    const Scaling scaling{{mean0, mean1, mean2, mean3}, {std0, std1, std2, std3}};
    u8 byte[UNROLL][4] = {};
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const u32 pixel = (blockIdx.x * UNROLL + k) * THREADS + threadIdx.x, image = pixel / hw;
        const u8* source = x + i64(image) * x_stride + (pixel - image * hw);
#pragma unroll
        for (u32 c = 0; c < 4; ++c)
            if (c < channels && pixel < pixels) byte[k][c] = source[i64(c) * hw];
    }
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const u32 pixel = (blockIdx.x * UNROLL + k) * THREADS + threadIdx.x;
        if (pixel >= pixels) return;
        float value[WIDE];
        normalize_pixel(byte[k], channels, scaling, value);
        Real* target = y + i64(pixel) * y_stride;
        if (width == WIDE)
            store_all(target, value);
        else
            fill_pixel(target, value, filled);
    }
}

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
