// Filter gradients in CHWN; see chwn_conv.py.
//
// A product of matrices: rows are (c, r, s) as dw holds them, columns are filters, and what is summed over are the
// outputs, pixel by pixel and within a pixel image by image, as they lie in memory. The sum is cut into shares, each of
// other blocks, whose sums are added up in order by a second kernel.

// vdnn.runtime.backends.cuda.source.STRUCTS
struct ChwnGradient {
    const Real* x;
    const Real* dy;
    float* dw;  // or, if there are several shares, one after the other of as many numbers
    int images;
    int x_pixel, y_pixel;             // elements from a pixel to the next
    int channels, x_rows, x_columns;  // of a group
    int filters, y_rows, y_columns;
    int groups;
    int taps_down, taps_across, stride_down, stride_across, pad_down, pad_across, dilation_down, dilation_across;
    int filter_tiles, row_tiles, shares;
    int share;  // outputs of a share, a multiple of DEPTH
    int accumulate;
};

struct ChwnGradients {
    ChwnGradient of[SINGLE];
};
static_assert(sizeof(ChwnGradients) == 120, "as in STRUCTS");

// Outputs at a time.
constexpr int DEPTH = 16;

// WIDTH: images that are loaded at once, 4 or 1.
template <class T, int WIDTH>
__device__ __forceinline__ void chwn_wgrad(const ChwnGradient& conv) {
    constexpr int FOURS = DEPTH / 4, LINES_AT_ONCE = THREADS / FOURS, PIECES = 4 / WIDTH;
    constexpr int X_EACH = (T::ROWS + LINES_AT_ONCE - 1) / LINES_AT_ONCE;
    constexpr int DY_EACH = (T::COLUMNS + LINES_AT_ONCE - 1) / LINES_AT_ONCE;
    // more than they need, or the numbers of a thread would all lie in one bank
    constexpr int GAP = T::GAP ? T::GAP : 1, X_FOURS = T::ROWS / 4 + GAP, DY_FOURS = T::COLUMNS / 4 + GAP;
    __shared__ float4 xs[2][DEPTH][X_FOURS], dys[2][DEPTH][DY_FOURS];

    const int thread = int(threadIdx.x);
    u32 block = blockIdx.x;
    const int first_filter = int(block % conv.filter_tiles) * T::COLUMNS;
    block /= conv.filter_tiles;
    const int first_row = int(block % conv.row_tiles) * T::ROWS;
    block /= conv.row_tiles;
    const u32 group = block % conv.groups, share = block / conv.groups;
    const int taps = conv.taps_down * conv.taps_across, rows = conv.channels * taps;
    const int count = conv.y_rows * conv.y_columns * conv.images;
    const i64 begin = i64(share) * conv.share, end = begin + conv.share < count ? begin + conv.share : count;

    // the outputs that this thread loads next: image, row and column
    const int piece = thread % FOURS * 4, line = thread / FOURS;
    int image[PIECES], row[PIECES], column[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const i64 output = begin + piece + p * WIDTH;
        const int pixel = int(output / conv.images);
        image[p] = int(output - i64(pixel) * conv.images);
        row[p] = pixel / conv.y_columns, column[p] = pixel - row[p] * conv.y_columns;
    }
    const int whole = DEPTH / conv.images, images_on = DEPTH - whole * conv.images;
    const int rows_on = whole / conv.y_columns, columns_on = whole - rows_on * conv.y_columns;

    // the rows that it loads: where the window of output 0 meets x
    const Real* const x = conv.x + i64(group) * conv.channels * conv.x_rows * conv.x_columns * conv.x_pixel;
    int top[X_EACH], left[X_EACH], plane[X_EACH];
#pragma unroll
    for (int k = 0; k < X_EACH; ++k) {
        const int at = line + k * LINES_AT_ONCE, number = first_row + at;
        const int c = number / taps, tap = number - c * taps, r = tap / conv.taps_across;
        constexpr int NOWHERE = -(1 << 30);
        top[k] = at < T::ROWS && number < rows ? r * conv.dilation_down - conv.pad_down : NOWHERE;
        left[k] = (tap - r * conv.taps_across) * conv.dilation_across - conv.pad_across;
        plane[k] = c * conv.x_rows;
    }
    const int y_plane = conv.y_rows * conv.y_columns;
    const Real* const dy = conv.dy + (i64(group) * conv.filters + first_filter) * y_plane * conv.y_pixel;

    float x_next[X_EACH][4], dy_next[DY_EACH][4];
    const auto load_next = [&](i64 at) {
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            const bool there = at + piece + p * WIDTH < end;
            const int h = row[p] * conv.stride_down, q = column[p] * conv.stride_across;
#pragma unroll
            for (int k = 0; k < X_EACH; ++k) {
                const int down = h + top[k], across = q + left[k];
                float value[WIDTH] = {};
                if (there && u32(down) < u32(conv.x_rows) && u32(across) < u32(conv.x_columns)) {
                    const int pixel = (plane[k] + down) * conv.x_columns + across;
                    load<true>(x + i64(pixel) * conv.x_pixel, image[p], 0, value);
                }
#pragma unroll
                for (int v = 0; v < WIDTH; ++v) x_next[k][p * WIDTH + v] = value[v];
            }
            const int pixel = row[p] * conv.y_columns + column[p];
#pragma unroll
            for (int k = 0; k < DY_EACH; ++k) {
                const int filter = line + k * LINES_AT_ONCE;
                float value[WIDTH] = {};
                if (there && filter < T::COLUMNS && first_filter + filter < conv.filters)
                    load<true>(dy + (i64(filter) * y_plane + pixel) * conv.y_pixel, image[p], 0, value);
#pragma unroll
                for (int v = 0; v < WIDTH; ++v) dy_next[k][p * WIDTH + v] = value[v];
            }
            image[p] += images_on, column[p] += columns_on, row[p] += rows_on;
            if (image[p] >= conv.images) image[p] -= conv.images, ++column[p];
            if (column[p] >= conv.y_columns) column[p] -= conv.y_columns, ++row[p];
        }
    };
    const auto keep = [&](int stage) {
#pragma unroll
        for (int k = 0; k < X_EACH; ++k)
            if (line + k * LINES_AT_ONCE < T::ROWS)
#pragma unroll
                for (int v = 0; v < 4; ++v)
                    reinterpret_cast<float*>(xs[stage][piece + v])[line + k * LINES_AT_ONCE] =
                        T::operand(x_next[k][v]);
#pragma unroll
        for (int k = 0; k < DY_EACH; ++k)
            if (line + k * LINES_AT_ONCE < T::COLUMNS)
#pragma unroll
                for (int v = 0; v < 4; ++v)
                    reinterpret_cast<float*>(dys[stage][piece + v])[line + k * LINES_AT_ONCE] =
                        T::operand(dy_next[k][v]);
    };

    T tile;
    load_next(begin);
    keep(0);
    __syncthreads();
    int stage = 0;
    for (i64 at = begin + DEPTH;; at += DEPTH, stage ^= 1) {
        const bool more = at < end;
        if (more) load_next(at);
#pragma unroll
        for (int k = 0; k < DEPTH; k += T::STEP)
            tile.add(
                reinterpret_cast<const float*>(xs[stage][k]), 4 * X_FOURS,
                reinterpret_cast<const float*>(dys[stage][k]), 4 * DY_FOURS);
        if (!more) break;
        keep(stage ^ 1);
        __syncthreads();
    }

    const i64 width = i64(conv.groups) * conv.filters;
    float* const dw = conv.dw + share * rows * width + group * i64(conv.filters) + first_filter;
#pragma unroll
    for (int i = 0; i < T::DOWN; ++i) {
        const int number = first_row + int(tile.row_of(i));
        if (number >= rows) continue;
#pragma unroll
        for (int j = 0; j < T::ACROSS; ++j) {
            const int k = int(tile.column_of(j));
            if (first_filter + k >= conv.filters) continue;
            float* const at = dw + number * width + k;
            *at = conv.accumulate ? *at + tile.sum[i][j] : tile.sum[i][j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_wgrad_128x128(
    const __grid_constant__ ChwnGradients conv) {
    chwn_wgrad<Tile<128, 128, 8, 8>, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_wgrad_128x64(const __grid_constant__ ChwnGradients conv) {
    chwn_wgrad<Tile<128, 64, 8, 4>, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) chwn_wgrad_64x64(const __grid_constant__ ChwnGradients conv) {
    chwn_wgrad<Tile<64, 64, 4, 4>, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) chwn_wgrad_32x64(const __grid_constant__ ChwnGradients conv) {
    chwn_wgrad<Tile<32, 64, 4, 2>, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) chwn_wgrad_128x16(const __grid_constant__ ChwnGradients conv) {
    chwn_wgrad<Tile<128, 16, 4, 2>, 4>(conv.of[0]);
}

// By tensor cores.
extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_wgrad_tensor_128x128(
    const __grid_constant__ ChwnGradients conv) {
    chwn_wgrad<TensorTile<128, 128, 8, 8>, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_wgrad_tensor_64x64(
    const __grid_constant__ ChwnGradients conv) {
    chwn_wgrad<TensorTile<64, 64, 4, 4>, 4>(conv.of[0]);
}

// Any number of images.
extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_wgrad_any_64x64(
    const __grid_constant__ ChwnGradients conv) {
    chwn_wgrad<Tile<64, 64, 4, 4>, 1>(conv.of[0]);
}

// dw = the sum of `shares` gradients of `size` numbers, or dw += it. `lanes` threads of a block share out those of one
// number, neighbours having neighbouring numbers.
extern "C" __global__ void __launch_bounds__(THREADS) chwn_wgrad_sum(
    const float* partials, float* dw, i64 size, int shares, int lanes, int accumulate) {
    __shared__ double held[THREADS];
    const int each = THREADS / lanes, own = int(threadIdx.x) % each, lane = int(threadIdx.x) / each;
    const i64 number = i64(blockIdx.x) * each + own;
    double sum = 0;
    if (number < size)
#pragma unroll 8
        for (int i = lane; i < shares; i += lanes) sum += partials[i * size + number];
    held[threadIdx.x] = sum;
    __syncthreads();
    if (lane > 0 || number >= size) return;
    for (int other = 1; other < lanes; ++other) sum += held[other * each + own];
    dw[number] = accumulate ? float(dw[number] + sum) : float(sum);
}
