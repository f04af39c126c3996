// What filter gradients by products of rows need beside cuBLAS; see taps.py. All numbers are float32.

constexpr int TAP_SHARES = 16;  // numbers of partial sums that a thread loads before it waits for the first

template <int WIDTH>
__device__ __forceinline__ void move_rows(
    const float* x, i64 x_block, i64 x_row, float* y, i64 y_block, i64 y_row, u32 rows, u32 length, u32 size) {
    const u32 i = (blockIdx.x * THREADS + threadIdx.x) * WIDTH;
    if (i >= size) return;
    const u32 line = i / length, column = i - line * length, block = line / rows, row = line - block * rows;
    float value[WIDTH] = {};
    if (x) load<true>(x + block * x_block + row * x_row, column, length, value);
    store<true>(y + block * y_block + row * y_row, column, length, value);
}

// y = x, or 0 without x: blocks of `rows` rows of `length` numbers, `size` in all, fewer than 2^31. `wide`: whether they
// go by four, as every row is so long and begins on 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS) tap_rows(
    const float* x, i64 x_block, i64 x_row, float* y, i64 y_block, i64 y_row, u32 rows, u32 length, u32 size,
    int wide) {
    if (wide)
        move_rows<4>(x, x_block, x_row, y, y_block, y_row, rows, length, size);
    else
        move_rows<1>(x, x_block, x_row, y, y_block, y_row, rows, length, size);
}

template <int WIDTH>
__device__ __forceinline__ void sum_shares(
    const float* partial, float* dw, u32 shares, u32 filters, u32 channels, u32 size, i64 dw_filter, i64 dw_tap,
    int accumulate) {
    const u32 i = (blockIdx.x * THREADS + threadIdx.x) * WIDTH;
    if (i >= size) return;
    float sum[WIDTH] = {};
    u32 share = 0;
    for (; share + TAP_SHARES <= shares; share += TAP_SHARES) {
        float value[TAP_SHARES][WIDTH];
#pragma unroll
        for (int j = 0; j < TAP_SHARES; ++j) load<true>(partial + i64(share + j) * size, i, size, value[j]);
#pragma unroll
        for (int j = 0; j < TAP_SHARES; ++j)
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) sum[w] += value[j][w];
    }
#pragma unroll 4
    for (; share < shares; ++share) {
        float value[WIDTH];
        load<true>(partial + i64(share) * size, i, size, value);
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) sum[w] += value[w];
    }
    const u32 line = i / channels, channel = i - line * channels, tap = line / filters, filter = line - tap * filters;
    float* at = dw + filter * dw_filter + tap * dw_tap + channel;
    if (accumulate) {
        float held[WIDTH];
        load<true>(at, 0, WIDTH, held);
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) sum[w] += held[w];
    }
    store<true>(at, 0, WIDTH, sum);
}

// dw[filter][tap][channel] = sum over shares of partial[share][tap][filter][channel], or added to it; `size` numbers a
// share. Shares are added in their order.
extern "C" __global__ void __launch_bounds__(THREADS) tap_sums(
    const float* partial, float* dw, u32 shares, u32 filters, u32 channels, u32 size, i64 dw_filter, i64 dw_tap,
    int wide, int accumulate) {
    if (wide)
        sum_shares<4>(partial, dw, shares, filters, channels, size, dw_filter, dw_tap, accumulate);
    else
        sum_shares<1>(partial, dw, shares, filters, channels, size, dw_filter, dw_tap, accumulate);
}
