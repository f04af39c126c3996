// Convolutions in CHWN, and their gradients by images; see chwn_conv.py.
//
// A product of matrices: rows are outputs, pixel by pixel and within a pixel image by image, so that neighbours are
// neighbours in memory, whatever the number of images; columns are filters; what is summed over are taps (r, s), and
// within a tap channels. A block leaves out the taps that meet none of its pixels.

// vdnn.runtime.backends.cuda.source.STRUCTS
struct ChwnConv {
    const Real* x;
    const Real* w;
    const float* b;
    Real* y;
    i64 w_group;  // elements from the filters of a group to those of the next
    int images;
    int x_pixel, y_pixel;             // elements from a pixel to the next
    int channels, x_rows, x_columns;  // of a group
    int filters, y_rows, y_columns;
    int w_row;  // elements from a (c, r, s) to the next
    int taps_down, taps_across, stride_down, stride_across, pad_down, pad_across, dilation_down, dilation_across;
    int filter_tiles, pixel_tiles;
    int wide_filters, transposed, relu, accumulate;
};

struct ChwnConvs {
    ChwnConv of[SINGLE];
};
static_assert(sizeof(ChwnConvs) == 136, "as in STRUCTS");

// Which channel and tap a row of products is of. Rows are counted from tap to tap, and within a tap by channels.
struct Place {
    int c, t, u;

    __device__ Place(int row, int channels, int across) {
        t = row / channels, c = row - t * channels;
        u = t % across, t /= across;
    }
    // On by so many rows, as taps and channels; whether that is another tap.
    __device__ bool move(const Place& by, int channels, int across) {
        c += by.c;
        const bool wraps = c >= channels;
        if (!wraps && by.t == 0 && by.u == 0) return false;
        if (wraps) c -= channels;
        u += by.u + wraps, t += by.t;
        if (u >= across) u -= across, ++t;
        return true;
    }
};

// DEPTH products at a time. WIDTH: images that are loaded at once, 4 or 1.
template <class T, int DEPTH, int WIDTH>
__device__ __forceinline__ void chwn_conv(const ChwnConv& conv) {
    constexpr int FOURS = T::ROWS / 4, ROWS_AT_ONCE = THREADS / FOURS, ROWS_EACH = DEPTH / ROWS_AT_ONCE;
    static_assert(FOURS <= THREADS && ROWS_EACH * ROWS_AT_ONCE == DEPTH, "every thread loads as much");
    constexpr int W_FOURS = T::COLUMNS / 4, W_AT_ONCE = min_of(THREADS / W_FOURS, DEPTH), W_EACH = DEPTH / W_AT_ONCE;
    constexpr int PIECES = 4 / WIDTH;
    static_assert(DEPTH % T::STEP == 0, "whole steps");
    __shared__ float4 xs[2][DEPTH][FOURS + T::GAP], ws[2][DEPTH][W_FOURS + T::GAP];

    const int thread = int(threadIdx.x);
    u32 block = blockIdx.x;
    const u32 filter_tile = block % conv.filter_tiles;
    block /= conv.filter_tiles;
    const u32 pixel_tile = block % conv.pixel_tiles;
    block /= conv.pixel_tiles;
    int residue_down = 0, residue_across = 0;
    if (conv.transposed) {
        residue_across = int(block % conv.stride_across), block /= conv.stride_across;
        residue_down = int(block % conv.stride_down), block /= conv.stride_down;
    }
    const u32 group = block;

    Axis down(conv.transposed, residue_down, conv.stride_down, conv.pad_down, conv.dilation_down, conv.taps_down,
              conv.y_rows);
    Axis across(conv.transposed, residue_across, conv.stride_across, conv.pad_across, conv.dilation_across,
                conv.taps_across, conv.y_columns);
    const int count = down.size > 0 && across.size > 0 ? down.size * across.size * conv.images : 0;
    const i64 begin = i64(pixel_tile) * T::ROWS;
    if (begin >= count) return;
    {
        const int first = int(begin) / conv.images;
        const int last = int(begin + T::ROWS < count ? begin + T::ROWS - 1 : count - 1) / conv.images;
        const int low = first / across.size, high = last / across.size;
        down.trim(low, high, conv.x_rows);
        if (low == high)
            across.trim(first - low * across.size, last - low * across.size, conv.x_columns);
        else
            across.trim(0, across.size - 1, conv.x_columns);
    }
    const int depth = down.count * across.count * conv.channels;

    // this thread's outputs on the way from memory: where their windows begin
    constexpr int NOWHERE = -(1 << 30);
    int row[PIECES], column[PIECES], image[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const i64 output = begin + thread % FOURS * 4 + p * WIDTH;
        const int pixel = int(output < count ? output : 0) / conv.images, i = pixel / across.size;
        row[p] = output < count ? i * down.step : NOWHERE;
        column[p] = (pixel - i * across.size) * across.step;
        image[p] = int(output) - pixel * conv.images;
    }
    const Real* const x = conv.x + i64(group) * conv.channels * conv.x_rows * conv.x_columns * conv.x_pixel;
    const int filter = int(filter_tile) * T::COLUMNS + thread % W_FOURS * 4, filters_left = conv.filters - filter;
    const Real* const w = conv.w + group * conv.w_group + filter;
    const bool loads_filters = thread / W_FOURS < W_AT_ONCE;

    float x_next[ROWS_EACH][4], w_next[W_EACH][4];
    // where the next row begins; within a tap the next channel lies a plane further
    const Real *x_at[PIECES], *w_at;
    bool x_inside[PIECES];
    const i64 x_plane = i64(conv.x_rows) * conv.x_columns * conv.x_pixel;
    const i64 w_plane = i64(conv.taps_down) * conv.taps_across * conv.w_row;
    const auto seek_x = [&](const Place& place) {
        const int first_row = down.first + place.t * down.by, first_column = across.first + place.u * across.by;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            const int h = row[p] + first_row, q = column[p] + first_column;
            x_inside[p] = u32(h) < u32(conv.x_rows) && u32(q) < u32(conv.x_columns);
            x_at[p] = x + i64((place.c * conv.x_rows + h) * conv.x_columns + q) * conv.x_pixel + image[p];
        }
    };
    const auto seek_w = [&](const Place& place) {
        const int r = down.tap + place.t * down.tap_by, s = across.tap + place.u * across.tap_by;
        w_at = w + i64((place.c * conv.taps_down + r) * conv.taps_across + s) * conv.w_row;
    };
    const auto load_x = [&](int at, Place& place, const Place& one, const Place& rest) {
#pragma unroll
        for (int k = 0; k < ROWS_EACH; ++k) {
            const bool there = at + k < depth;
#pragma unroll
            for (int p = 0; p < PIECES; ++p) {
                float value[WIDTH] = {};
                if (there && x_inside[p]) load<true>(x_at[p], 0, 0, value);
#pragma unroll
                for (int v = 0; v < WIDTH; ++v) x_next[k][p * WIDTH + v] = value[v];
            }
            const bool last = k + 1 == ROWS_EACH;
            if (place.move(last ? rest : one, conv.channels, across.count))
                seek_x(place);
            else
#pragma unroll
                for (int p = 0; p < PIECES; ++p) x_at[p] += last ? (DEPTH - ROWS_EACH + 1) * x_plane : x_plane;
        }
    };
    const auto load_w = [&](int at, Place& place, const Place& one, const Place& rest) {
#pragma unroll
        for (int k = 0; k < W_EACH; ++k) {
            load_some(w_at, at + k < depth ? filters_left : 0, conv.wide_filters, w_next[k]);
            const bool last = k + 1 == W_EACH;
            if (place.move(last ? rest : one, conv.channels, across.count))
                seek_w(place);
            else
                w_at += last ? (DEPTH - W_EACH + 1) * w_plane : w_plane;
        }
    };
    const auto keep = [&](int stage) {
#pragma unroll
        for (int k = 0; k < ROWS_EACH; ++k)
            xs[stage][thread / FOURS * ROWS_EACH + k][thread % FOURS] = four_operands<T>(x_next[k]);
        if (loads_filters)
#pragma unroll
            for (int k = 0; k < W_EACH; ++k)
                ws[stage][thread / W_FOURS * W_EACH + k][thread % W_FOURS] = four_operands<T>(w_next[k]);
    };

    T tile;
    if (depth > 0) {
        const int x_row = thread / FOURS * ROWS_EACH, w_row = thread / W_FOURS * W_EACH;
        Place x_place(x_row, conv.channels, across.count), w_place(w_row, conv.channels, across.count);
        const Place one(1, conv.channels, across.count);
        const Place x_rest(DEPTH - ROWS_EACH + 1, conv.channels, across.count);
        const Place w_rest(DEPTH - W_EACH + 1, conv.channels, across.count);
        seek_x(x_place), seek_w(w_place);
        load_x(x_row, x_place, one, x_rest);
        if (loads_filters) load_w(w_row, w_place, one, w_rest);
        keep(0);
        __syncthreads();
        int stage = 0;
        for (int done = DEPTH;; done += DEPTH, stage ^= 1) {
            const bool more = done < depth;
            if (more) {
                load_x(done + x_row, x_place, one, x_rest);
                if (loads_filters) load_w(done + w_row, w_place, one, w_rest);
            }
#pragma unroll
            for (int k = 0; k < DEPTH; k += T::STEP) {
                if (k > 0 && k % 4 == 0 && done - DEPTH + k >= depth) break;  // of few channels that is much
                tile.add(
                    reinterpret_cast<const float*>(xs[stage][k]), 4 * (FOURS + T::GAP),
                    reinterpret_cast<const float*>(ws[stage][k]), 4 * (W_FOURS + T::GAP));
            }
            if (!more) break;
            keep(stage ^ 1);
            __syncthreads();
        }
    }

    const i64 plane = i64(conv.y_rows) * conv.y_columns;
    const int first_filter = int(filter_tile) * T::COLUMNS;
    Real* const y = conv.y + (i64(group) * conv.filters + first_filter) * plane * conv.y_pixel;
    const float* const b = conv.b ? conv.b + i64(group) * conv.filters + first_filter : nullptr;
#pragma unroll
    for (int i = 0; i < T::DOWN; i += WIDTH) {
        const i64 output = begin + tile.row_of(i);
        if (output >= count) continue;
        const int pixel = int(output) / conv.images, n = int(output) - pixel * conv.images, h = pixel / across.size;
        const int target_row = down.place + h * down.place_by;
        const int target_column = across.place + (pixel - h * across.size) * across.place_by;
        const i64 target = i64(target_row) * conv.y_columns + target_column;
#pragma unroll
        for (int j = 0; j < T::ACROSS; ++j) {
            const int k = int(tile.column_of(j));
            if (first_filter + k >= conv.filters) continue;
            Real* const at = y + (k * plane + target) * conv.y_pixel + n;
            float value[WIDTH], before[WIDTH] = {};
            if (conv.accumulate) load<true>(static_cast<const Real*>(at), 0, 0, before);
            const float bias = b ? b[k] : 0.0f;
#pragma unroll
            for (int v = 0; v < WIDTH; ++v) {
                value[v] = tile.sum[i + v][j] + bias + before[v];
                if (conv.relu && value[v] < 0) value[v] = 0;  // a NaN stays a NaN
            }
            store<true>(at, 0, 0, value);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_conv_128x128(const __grid_constant__ ChwnConvs conv) {
    chwn_conv<Tile<128, 128, 8, 8>, 8, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_conv_256x64(const __grid_constant__ ChwnConvs conv) {
    chwn_conv<Tile<256, 64, 8, 8>, 8, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_conv_128x64(const __grid_constant__ ChwnConvs conv) {
    chwn_conv<Tile<128, 64, 8, 4>, 16, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) chwn_conv_64x64(const __grid_constant__ ChwnConvs conv) {
    chwn_conv<Tile<64, 64, 4, 4>, 16, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_conv_256x32(const __grid_constant__ ChwnConvs conv) {
    chwn_conv<Tile<256, 32, 8, 4>, 16, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) chwn_conv_128x32(const __grid_constant__ ChwnConvs conv) {
    chwn_conv<Tile<128, 32, 4, 4>, 16, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) chwn_conv_256x16(const __grid_constant__ ChwnConvs conv) {
    chwn_conv<Tile<256, 16, 4, 4>, 16, 4>(conv.of[0]);
}

// By tensor cores.
extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_conv_tensor_128x128(
    const __grid_constant__ ChwnConvs conv) {
    chwn_conv<TensorTile<128, 128, 8, 8>, 16, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_conv_tensor_128x64(
    const __grid_constant__ ChwnConvs conv) {
    chwn_conv<TensorTile<128, 64, 8, 4>, 16, 4>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_conv_tensor_256x32(
    const __grid_constant__ ChwnConvs conv) {
    chwn_conv<TensorTile<256, 32, 4, 8>, 16, 4>(conv.of[0]);
}

// Any number of images.
extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_conv_any_128x64(const __grid_constant__ ChwnConvs conv) {
    chwn_conv<Tile<128, 64, 8, 4>, 8, 1>(conv.of[0]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) chwn_conv_any_128x32(const __grid_constant__ ChwnConvs conv) {
    chwn_conv<Tile<128, 32, 4, 4>, 8, 1>(conv.of[0]);
}

// y[k, r, s, c] = w[c, r, s, k], with c up to `channels`, a multiple of 4; channels that w has not are 0. A block has
// 32 filters and 32 channels of a tap.
extern "C" __global__ void __launch_bounds__(THREADS) chwn_filters(
    const Real* w, Real* y, int own, int channels, int taps, int filters, int filter_tiles, int channel_tiles) {
    constexpr int SIDE = 32;
    __shared__ float held[SIDE][SIDE + 1];
    u32 block = blockIdx.x;
    const int first_filter = int(block % filter_tiles) * SIDE;
    block /= filter_tiles;
    const int first_channel = int(block % channel_tiles) * SIDE, tap = int(block / channel_tiles);
    const int lane = int(threadIdx.x % SIDE);
    for (int i = int(threadIdx.x / SIDE); i < SIDE; i += THREADS / SIDE) {
        const int c = first_channel + i, k = first_filter + lane;
        held[i][lane] = c < own && k < filters ? float(w[(i64(c) * taps + tap) * filters + k]) : 0.0f;
    }
    __syncthreads();
    for (int i = int(threadIdx.x / SIDE); i < SIDE; i += THREADS / SIDE) {
        const int k = first_filter + i, c = first_channel + lane;
        if (k < filters && c < channels) y[(i64(k) * taps + tap) * channels + c] = held[lane][i];
    }
}
