// Pooling by maximum or average over windows of any size; see pool.py. An image has C planes of h x w pixels and of
// p x q outputs. Windows of the usual sizes have kernels of their own in pool_fixed.cu.

enum Mode { MAXIMUM = 0, AVERAGE = 1, AVERAGE_INSIDE = 2 };  // AVERAGE_INSIDE leaves padding out of the divisor
constexpr u32 NO_WINNER = 255;                               // vdnn.layers.pool.NO_WINNER

// n / d for n up to 2^31, by what `inverse` of pool.py gives for d: ceil(2^(31 + l) / d) and, in the upper half, 31 + l,
// where 2^l is the first power of two that is not below d.
__device__ __forceinline__ u32 quotient(u32 n, u64 by) { return u32(u64(n) * u32(by) >> u32(by >> 32)); }

// Window sizes and strides, vertical and horizontal.
struct Windows {
    u32 h, w, p, q, r, s, down, right, top, left;
};

// 1 / the pixels that count in a window that begins at row `first` (of pixels, may be negative) along each side
__device__ __forceinline__ float average_weight(const Windows& g, int row, int column, int mode) {
    const int top = mode == AVERAGE ? int(g.top) : 0, left = mode == AVERAGE ? int(g.left) : 0;
    const int rows = min(row + int(g.r), int(g.h) + top) - max(row, -top);
    const int columns = min(column + int(g.s), int(g.w) + left) - max(column, -left);
    return 1.0f / float(rows * columns);
}

// Whether a maximum passes on to `value`. The first NaN wins over everything.
__device__ __forceinline__ bool wins(float best, float value) { return value > best || value != value; }

// Replaces `best` by `value` where that wins, and says whether it did; of 0 and -0 it may take 0, but says no.
__device__ __forceinline__ bool take(float& best, float value) {
#if __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(best), "f"(value));
    const bool better = larger != best;
    best = larger;
#else
    const bool better = wins(best, value);
    best = better ? value : best;
#endif
    return better;
}

// The window whose first pixel is (row, column) of `plane`, combined in row order; `winner` is the place of a maximum.
template <bool MAX>
__device__ __forceinline__ float window(const Windows& g, const Real* plane, int row, int column, u32& winner) {
    const int rows = min(row + int(g.r), int(g.h)), columns = min(column + int(g.s), int(g.w));
    const int first = max(row, 0), left = max(column, 0);
    float total = MAX ? __int_as_float(0xff800000) : 0.0f;
    winner = u32(first - row) * g.s + u32(left - column);
    for (int i = first; i < rows; ++i)
        for (int j = left; j < columns; ++j) {
            const float value = plane[u32(i) * g.w + u32(j)];
            if (!MAX)
                total += value;
            else if (wins(total, value))
                total = value, winner = u32(i - row) * g.s + u32(j - column);
        }
    if (MAX && total != total) winner = NO_WINNER;
    return total;
}

// One output a thread, THREADS outputs of one image a block. `indices` may be null.
extern "C" __global__ void __launch_bounds__(THREADS) pool_forward(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 r, u32 s, u32 down, u32 right, u32 top, u32 left, u32 outputs, u32 chunks, int mode) {
    const Windows g{h, w, p, q, r, s, down, right, top, left};
    const u32 image = blockIdx.x / chunks;
    const u32 output = (blockIdx.x - image * chunks) * THREADS + threadIdx.x;
    if (output >= outputs) return;
    const u32 plane = output / (g.p * g.q), place = output - plane * (g.p * g.q);
    const u32 at_row = place / g.q, at_column = place - at_row * g.q;
    const int row = int(at_row * g.down) - int(g.top), column = int(at_column * g.right) - int(g.left);
    const Real* pixels = x + i64(image) * x_stride + plane * (g.h * g.w);
    u32 winner;
    const float total = mode == MAXIMUM ? window<true>(g, pixels, row, column, winner)
                                        : window<false>(g, pixels, row, column, winner) *
                                              average_weight(g, row, column, mode);
    y[i64(image) * y_stride + output] = total;
    if (indices) indices[i64(image) * indices_stride + output] = u8(winner);
}

// Whether no pixel before (h, w) in the window from (row, column) on is `value` too.
__device__ __forceinline__ bool is_first(
    const Windows& g, const Real* plane, int row, int column, u32 h, u32 w, float value) {
    const u32 start = u32(max(column, 0)), end = u32(min(column + int(g.s), int(g.w)));
    for (u32 i = u32(max(row, 0)); i <= h; ++i)
        for (u32 j = start; j < end; ++j) {
            if (i == h && j == w) return true;
            if (plane[i * g.w + j] == value) return false;
        }
    return true;
}

// What backward reads of one plane besides dy: for a maximum x and y, or indices and perhaps y as a mask.
struct Known {
    const Real *x, *y;
    const u8* indices;
};

// `total` and the gradient of pixel (h, w) of a plane: its terms from every window that holds it. Windows are taken
// from the last to the first, so that the pixel is in turn each window's first, second, ... place: the CPU's order.
__device__ __forceinline__ float pixel_gradient(
    const Windows& g, const Known& known, const Real* dy, u32 h, u32 w, int mode, float total) {
    const u32 from_top = h + g.top, from_left = w + g.left;
    const u32 p_end = min(from_top / g.down + 1, g.p), q_end = min(from_left / g.right + 1, g.q);
    const u32 p_first = from_top < g.r ? 0 : (from_top - g.r) / g.down + 1;
    const u32 q_first = from_left < g.s ? 0 : (from_left - g.s) / g.right + 1;
    const float value = known.x ? known.x[h * g.w + w] : 0.0f;
    for (u32 p = p_end; p-- > p_first;)
        for (u32 q = q_end; q-- > q_first;) {
            const u32 output = p * g.q + q, r = from_top - p * g.down, s = from_left - q * g.right;
            const int row = int(p * g.down) - int(g.top), column = int(q * g.right) - int(g.left);
            if (mode != MAXIMUM) {
                total += dy[output] * average_weight(g, row, column, mode);
                continue;
            }
            const bool takes =
                known.indices ? known.indices[output] == r * g.s + s && !(known.y && !(known.y[output] > 0))
                              : value == known.y[output] && is_first(g, known.x, row, column, h, w, value);
            total += takes ? dy[output] : 0.0f;
        }
    return total;
}

// One pixel a thread, THREADS pixels of one image a block. x, y and indices may be null, see Known.
extern "C" __global__ void __launch_bounds__(THREADS) pool_backward(
    const Real* x, i64 x_stride, const Real* y, i64 y_stride, const u8* indices, i64 indices_stride, const Real* dy,
    i64 dy_stride, Real* dx, i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 r, u32 s, u32 down, u32 right, u32 top,
    u32 left, u32 pixels, u32 chunks, int mode, int accumulate) {
    const Windows g{h, w, p, q, r, s, down, right, top, left};
    const u32 image = blockIdx.x / chunks;
    const u32 pixel = (blockIdx.x - image * chunks) * THREADS + threadIdx.x;
    if (pixel >= pixels) return;
    const u32 plane = pixel / (g.h * g.w), place = pixel - plane * (g.h * g.w);
    const u32 row = place / g.w, column = place - row * g.w;
    const u32 inputs = plane * (g.h * g.w), outputs = plane * (g.p * g.q);
    const Known known{x ? x + i64(image) * x_stride + inputs : x, y ? y + i64(image) * y_stride + outputs : y,
                      indices ? indices + i64(image) * indices_stride + outputs : indices};
    Real* target = dx + i64(image) * dx_stride + pixel;
    const float total = accumulate ? *target : 0.0f;
    *target = pixel_gradient(g, known, dy + i64(image) * dy_stride + outputs, row, column, mode, total);
}
