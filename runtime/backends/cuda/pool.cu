// Pooling by maximum or average over windows; see pool.py. An image has C planes of h x w pixels and of p x q outputs.

enum Mode { MAXIMUM = 0, AVERAGE = 1, AVERAGE_INSIDE = 2 };  // AVERAGE_INSIDE leaves padding out of the divisor

// Window sizes and strides, vertical and horizontal. Those known at compile time are template arguments, 0 otherwise.
struct Windows {
    u32 h, w, p, q, r, s, down, right, top, left;
};

template <int R, int S, int DOWN, int RIGHT>
__device__ __forceinline__ Windows fixed(Windows g) {
    if constexpr (R > 0) g.r = R, g.s = S, g.down = DOWN, g.right = RIGHT;
    return g;
}

// 1 / the pixels that count in a window that begins at row `first` (of pixels, may be negative) along each side
__device__ __forceinline__ float average_weight(const Windows& g, int row, int column, int mode) {
    const int top = mode == AVERAGE ? int(g.top) : 0, left = mode == AVERAGE ? int(g.left) : 0;
    const int rows = min(row + int(g.r), int(g.h) + top) - max(row, -top);
    const int columns = min(column + int(g.s), int(g.w) + left) - max(column, -left);
    return 1.0f / float(rows * columns);
}

// The first NaN wins over everything.
__device__ __forceinline__ float larger(float best, float value) {
    return value > best || value != value ? value : best;
}

template <bool MAX>
__device__ __forceinline__ float combine(float total, float value) {
    return MAX ? larger(total, value) : total + value;
}

// The window whose first pixel is (row, column) of `plane`, combined in row order.
template <bool MAX, int R, int S>
__device__ __forceinline__ float window(const Windows& g, const float* plane, int row, int column) {
    float total = MAX ? __int_as_float(0xff800000) : 0.0f;
    if (R > 0 && row >= 0 && column >= 0 && row + R <= int(g.h) && column + S <= int(g.w)) {
        const float* first = plane + u32(row) * g.w + u32(column);
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int j = 0; j < S; ++j) total = combine<MAX>(total, first[i * g.w + j]);
        return total;
    }
    const u32 rows = u32(min(row + int(g.r), int(g.h))), columns = u32(min(column + int(g.s), int(g.w)));
    for (u32 i = u32(max(row, 0)); i < rows; ++i)
        for (u32 j = u32(max(column, 0)); j < columns; ++j) total = combine<MAX>(total, plane[i * g.w + j]);
    return total;
}

// One output a thread, THREADS outputs of one image a block.
template <int R, int S, int DOWN, int RIGHT>
__device__ __forceinline__ void forward_by(
    const float* x, i64 x_stride, float* y, i64 y_stride, Windows g, u32 outputs, u32 chunks, int mode) {
    g = fixed<R, S, DOWN, RIGHT>(g);
    const u32 image = blockIdx.x / chunks;
    const u32 output = (blockIdx.x - image * chunks) * THREADS + threadIdx.x;
    if (output >= outputs) return;
    const u32 plane = output / (g.p * g.q), place = output - plane * (g.p * g.q);
    const u32 p = place / g.q, q = place - p * g.q;
    const int row = int(p * g.down) - int(g.top), column = int(q * g.right) - int(g.left);
    const float* pixels = x + i64(image) * x_stride + plane * (g.h * g.w);
    const float total = mode == MAXIMUM ? window<true, R, S>(g, pixels, row, column)
                                        : window<false, R, S>(g, pixels, row, column) *
                                              average_weight(g, row, column, mode);
    y[i64(image) * y_stride + output] = total;
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_forward(
    const float* x, i64 x_stride, float* y, i64 y_stride, u32 h, u32 w, u32 p, u32 q, u32 r, u32 s, u32 down,
    u32 right, u32 top, u32 left, u32 outputs, u32 chunks, int mode) {
    const Windows g{h, w, p, q, r, s, down, right, top, left};
    const bool square = r == s && down == right;
    if (square && r == 3 && down == 2)
        forward_by<3, 3, 2, 2>(x, x_stride, y, y_stride, g, outputs, chunks, mode);
    else if (square && r == 2 && down == 2)
        forward_by<2, 2, 2, 2>(x, x_stride, y, y_stride, g, outputs, chunks, mode);
    else if (square && r == 3 && down == 1)
        forward_by<3, 3, 1, 1>(x, x_stride, y, y_stride, g, outputs, chunks, mode);
    else
        forward_by<0, 0, 0, 0>(x, x_stride, y, y_stride, g, outputs, chunks, mode);
}

// Whether no pixel before (h, w) in the window from (row, column) on is `value` too.
__device__ __forceinline__ bool is_first(
    const Windows& g, const float* plane, int row, int column, u32 h, u32 w, float value) {
    const u32 start = u32(max(column, 0)), end = u32(min(column + int(g.s), int(g.w)));
    for (u32 i = u32(max(row, 0)); i <= h; ++i)
        for (u32 j = start; j < end; ++j) {
            if (i == h && j == w) return true;
            if (plane[i * g.w + j] == value) return false;
        }
    return true;
}

// `total` and the gradient of pixel (h, w) of a plane: its terms from every window that holds it. Windows are taken
// from the last to the first, so that the pixel is in turn each window's first, second, ... place: the CPU's order.
__device__ __forceinline__ float pixel_gradient(
    const Windows& g, const float* x, const float* y, const float* dy, u32 h, u32 w, float value, int mode,
    float total) {
    const u32 from_top = h + g.top, from_left = w + g.left;
    const u32 p_end = min(from_top / g.down + 1, g.p), q_end = min(from_left / g.right + 1, g.q);
    const u32 p_first = from_top < g.r ? 0 : (from_top - g.r) / g.down + 1;
    const u32 q_first = from_left < g.s ? 0 : (from_left - g.s) / g.right + 1;
    for (u32 p = p_end; p-- > p_first;)
        for (u32 q = q_end; q-- > q_first;) {
            const u32 output = p * g.q + q;
            const int row = int(p * g.down) - int(g.top), column = int(q * g.right) - int(g.left);
            if (mode == MAXIMUM) {
                const bool takes = value == y[output] && is_first(g, x, row, column, h, w, value);
                total += takes ? dy[output] : 0.0f;
            } else {
                total += dy[output] * average_weight(g, row, column, mode);
            }
        }
    return total;
}

// WIDTH neighbouring pixels a thread, THREADS * WIDTH pixels of one image a block. x and y are read for MAXIMUM only.
template <int WIDTH, int R, int S, int DOWN, int RIGHT>
__device__ __forceinline__ void backward_by(
    const float* x, i64 x_stride, const float* y, i64 y_stride, const float* dy, i64 dy_stride, float* dx,
    i64 dx_stride, Windows g, u32 pixels, u32 chunks, int mode, int accumulate) {
    g = fixed<R, S, DOWN, RIGHT>(g);
    const u32 image = blockIdx.x / chunks;
    const u32 first = ((blockIdx.x - image * chunks) * THREADS + threadIdx.x) * WIDTH;
    if (first >= pixels) return;
    x += i64(image) * x_stride;
    y += i64(image) * y_stride;
    dy += i64(image) * dy_stride;
    dx += i64(image) * dx_stride;
    u32 plane = first / (g.h * g.w);
    u32 h = (first - plane * (g.h * g.w)) / g.w, w = first - plane * (g.h * g.w) - h * g.w;
    float value[WIDTH] = {}, total[WIDTH] = {};
    if (mode == MAXIMUM) load<false>(x, first, pixels, value);
    if (accumulate) load<false>(dx, first, pixels, total);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        if (first + k >= pixels) break;
        const u32 inputs = plane * (g.h * g.w), outputs = plane * (g.p * g.q);
        total[k] = pixel_gradient(g, x + inputs, y + outputs, dy + outputs, h, w, value[k], mode, total[k]);
        if (++w == g.w) w = 0, ++h;
        if (h == g.h) h = 0, ++plane;
    }
    store<false>(dx, first, pixels, total);
}

template <int WIDTH>
__device__ __forceinline__ void backward(
    const float* x, i64 x_stride, const float* y, i64 y_stride, const float* dy, i64 dy_stride, float* dx,
    i64 dx_stride, Windows g, u32 pixels, u32 chunks, int mode, int accumulate) {
    const bool square = g.r == g.s && g.down == g.right;
    if (square && g.r == 3 && g.down == 2)
        backward_by<WIDTH, 3, 3, 2, 2>(
            x, x_stride, y, y_stride, dy, dy_stride, dx, dx_stride, g, pixels, chunks, mode, accumulate);
    else if (square && g.r == 2 && g.down == 2)
        backward_by<WIDTH, 2, 2, 2, 2>(
            x, x_stride, y, y_stride, dy, dy_stride, dx, dx_stride, g, pixels, chunks, mode, accumulate);
    else if (square && g.r == 3 && g.down == 1)
        backward_by<WIDTH, 3, 3, 1, 1>(
            x, x_stride, y, y_stride, dy, dy_stride, dx, dx_stride, g, pixels, chunks, mode, accumulate);
    else
        backward_by<WIDTH, 0, 0, 0, 0>(
            x, x_stride, y, y_stride, dy, dy_stride, dx, dx_stride, g, pixels, chunks, mode, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_backward(
    const float* x, i64 x_stride, const float* y, i64 y_stride, const float* dy, i64 dy_stride, float* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 r, u32 s, u32 down, u32 right, u32 top, u32 left, u32 pixels,
    u32 chunks, int width, int mode, int accumulate) {
    const Windows g{h, w, p, q, r, s, down, right, top, left};
    if (width == 4)
        backward<4>(x, x_stride, y, y_stride, dy, dy_stride, dx, dx_stride, g, pixels, chunks, mode, accumulate);
    else
        backward<1>(x, x_stride, y, y_stride, dy, dy_stride, dx, dx_stride, g, pixels, chunks, mode, accumulate);
}
