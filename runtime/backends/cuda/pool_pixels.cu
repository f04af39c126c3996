// Pooling in NHWC, over windows of any size; see pool.py and pool.cu. A thread has WIDTH channels of one output or pixel;
// neighbours have the channels beside these. The pixels of a tensor are `*_stride` elements apart, all images counted.

template <int WIDTH>
struct Channel {
    u32 image, row, column, first;  // of rows x columns pixels an image
    bool exists;

    __device__ Channel(u32 images, u32 rows, u32 columns, u32 channels) {
        const u32 groups = channels / WIDTH, unit = blockIdx.x * THREADS + threadIdx.x, pixel = unit / groups;
        first = (unit - pixel * groups) * WIDTH;
        image = pixel / (rows * columns);
        const u32 rest = pixel - image * (rows * columns);
        row = rest / columns, column = rest - row * columns;
        exists = image < images;
    }
    // Where pixel (row, column) of this image begins.
    __device__ i64 at(u32 rows, u32 columns, u32 row, u32 column, i64 stride) const {
        return ((i64(image) * rows + row) * columns + column) * stride + first;
    }
};

template <int WIDTH>
__device__ __forceinline__ void load_bytes(const u8* at, u32 (&out)[WIDTH]) {
    if constexpr (WIDTH == 1)
        out[0] = at[0];
    else
        load_all(at, out);
}

template <int WIDTH, bool MAX>
__device__ __forceinline__ void pool_pixel(
    const Windows& g, const Channel<WIDTH>& of, const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices,
    i64 indices_stride, int mode) {
    const int row = int(of.row * g.down) - int(g.top), column = int(of.column * g.right) - int(g.left);
    const int top = max(row, 0), bottom = min(row + int(g.r), int(g.h));
    const int left = max(column, 0), right = min(column + int(g.s), int(g.w));
    float total[WIDTH];
    u32 winner[WIDTH];
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
        total[w] = MAX ? __int_as_float(0xff800000) : 0.0f;
        winner[w] = u32(top - row) * g.s + u32(left - column);
    }
    for (int i = top; i < bottom; ++i)
#pragma unroll 4
        for (int j = left; j < right; ++j) {
            float value[WIDTH];
            load<true>(x + of.at(g.h, g.w, i, j, x_stride), 0, WIDTH, value);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                if (!MAX)
                    total[w] += value[w];
                else if (wins(total[w], value[w]))
                    total[w] = value[w], winner[w] = u32(i - row) * g.s + u32(j - column);
            }
        }
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
        if (!MAX) total[w] *= average_weight(g, row, column, mode);
        if (MAX && total[w] != total[w]) winner[w] = NO_WINNER;
    }
    store<true>(y + of.at(g.p, g.q, of.row, of.column, y_stride), 0, WIDTH, total);
    if (!indices) return;
    indices += of.at(g.p, g.q, of.row, of.column, indices_stride);
    if constexpr (WIDTH == 1)
        *indices = u8(winner[0]);
    else
        store_all(indices, winner);
}

template <int WIDTH>
__device__ __forceinline__ void pool_pixels_by(
    const Windows& g, const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 images,
    u32 channels, int mode) {
    const Channel<WIDTH> of(images, g.p, g.q, channels);
    if (!of.exists) return;
    if (mode == MAXIMUM)
        pool_pixel<WIDTH, true>(g, of, x, x_stride, y, y_stride, indices, indices_stride, mode);
    else
        pool_pixel<WIDTH, false>(g, of, x, x_stride, y, y_stride, indices, indices_stride, mode);
}

// One output a thread, and WIDTH channels. `indices` may be null.
extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_forward(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 r, u32 s, u32 down, u32 right, u32 top, u32 left, u32 images, u32 channels, int width, int mode) {
    const Windows g{h, w, p, q, r, s, down, right, top, left};
    if (width == WIDE)
        pool_pixels_by<WIDE>(g, x, x_stride, y, y_stride, indices, indices_stride, images, channels, mode);
    else
        pool_pixels_by<1>(g, x, x_stride, y, y_stride, indices, indices_stride, images, channels, mode);
}

// A tensor whose pixels are `stride` elements apart; null where the op has it not.
template <class T>
struct Pixels {
    const T* data;
    i64 stride;
};

// Whether no pixel before (h, w) in the window from (row, column) on has `value` too in this channel.
template <int WIDTH>
__device__ __forceinline__ bool is_first_pixel(
    const Windows& g, const Channel<WIDTH>& of, Pixels<Real> x, int row, int column, int channel, float value) {
    const u32 start = u32(max(column, 0)), end = u32(min(column + int(g.s), int(g.w)));
    for (u32 i = u32(max(row, 0)); i <= of.row; ++i)
        for (u32 j = start; j < end; ++j) {
            if (i == of.row && j == of.column) return true;
            if (x.data[of.at(g.h, g.w, i, j, x.stride) + channel] == value) return false;
        }
    return true;
}

// Windows are taken from the last to the first, as in pool.cu.
template <int WIDTH>
__device__ __forceinline__ void gather_pixel(
    const Windows& g, u32 images, u32 channels, Pixels<Real> x, Pixels<Real> y, Pixels<u8> indices, Pixels<Real> dy,
    Real* dx, i64 dx_stride, int mode, int accumulate) {
    const Channel<WIDTH> of(images, g.h, g.w, channels);
    if (!of.exists) return;
    const u32 from_top = of.row + g.top, from_left = of.column + g.left;
    const u32 p_end = min(from_top / g.down + 1, g.p), q_end = min(from_left / g.right + 1, g.q);
    const u32 p_first = from_top < g.r ? 0 : (from_top - g.r) / g.down + 1;
    const u32 q_first = from_left < g.s ? 0 : (from_left - g.s) / g.right + 1;
    Real* target = dx + of.at(g.h, g.w, of.row, of.column, dx_stride);
    float total[WIDTH] = {}, own[WIDTH] = {};
    if (accumulate) load<true>(target, 0, WIDTH, total);
    if (x.data) load<true>(x.data + of.at(g.h, g.w, of.row, of.column, x.stride), 0, WIDTH, own);
    for (u32 p = p_end; p-- > p_first;)
        for (u32 q = q_end; q-- > q_first;) {
            const int row = int(p * g.down) - int(g.top), column = int(q * g.right) - int(g.left);
            float gradient[WIDTH], passed[WIDTH] = {};
            load<true>(dy.data + of.at(g.p, g.q, p, q, dy.stride), 0, WIDTH, gradient);
            if (mode != MAXIMUM) {
                const float weight = average_weight(g, row, column, mode);
#pragma unroll
                for (int w = 0; w < WIDTH; ++w) total[w] += gradient[w] * weight;
                continue;
            }
            if (y.data) load<true>(y.data + of.at(g.p, g.q, p, q, y.stride), 0, WIDTH, passed);
            if (indices.data) {
                u32 winner[WIDTH];
                load_bytes(indices.data + of.at(g.p, g.q, p, q, indices.stride), winner);
                const u32 place = (from_top - p * g.down) * g.s + (from_left - q * g.right);
#pragma unroll
                for (int w = 0; w < WIDTH; ++w)
                    total[w] += winner[w] == place && !(y.data && !(passed[w] > 0)) ? gradient[w] : 0.0f;
            } else {
#pragma unroll
                for (int w = 0; w < WIDTH; ++w)
                    if (own[w] == passed[w] && is_first_pixel(g, of, x, row, column, w, own[w])) total[w] += gradient[w];
            }
        }
    store<true>(target, 0, WIDTH, total);
}

// One pixel a thread, and WIDTH channels. x, y and indices may be null, as in pool_backward.
extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_backward(
    const Real* x, i64 x_stride, const Real* y, i64 y_stride, const u8* indices, i64 indices_stride, const Real* dy,
    i64 dy_stride, Real* dx, i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 r, u32 s, u32 down, u32 right, u32 top,
    u32 left, u32 images, u32 channels, int width, int mode, int accumulate) {
    const Windows g{h, w, p, q, r, s, down, right, top, left};
    const Pixels<Real> xs{x, x_stride}, ys{y, y_stride}, dys{dy, dy_stride};
    const Pixels<u8> places{indices, indices_stride};
    if (width == WIDE)
        gather_pixel<WIDE>(g, images, channels, xs, ys, places, dys, dx, dx_stride, mode, accumulate);
    else
        gather_pixel<1>(g, images, channels, xs, ys, places, dys, dx, dx_stride, mode, accumulate);
}
