// Pooling over square windows whose size R, step and padding are known when this is compiled; see pool.py and pool.cu.
//
// A thread of forward has GROUP outputs side by side, where rows of pixels can be loaded by fours; pool_planes.cu has
// others. One of backward has ROWS rows of the STEP * GROUP pixels beside them, and every window that holds one of these;
// by x and y, or of an average, GROUP is 1 where rows cannot be loaded by fours. ROWS is POOL_ROWS, or twice that by
// indices at a step of 1, where blocks share most windows with their neighbours. All places within windows are then
// constants. Names of kernels end in R, step, padding.

constexpr int POOL_GROUP = 4;
constexpr int POOL_ROWS = 2;
enum Aligned { PIXELS = 1, OUTPUTS = 2 };  // bits of `aligned`: rows of which four numbers can be loaded at once
enum Teller { BY_PIXELS, BY_INDICES, BY_SHARES };  // what tells backward where dy goes: x and y, indices, an average

template <int R_, int STEP_, int PAD_, int GROUP_, int ROWS_ = POOL_ROWS>
struct Fixed {
    static constexpr int R = R_, STEP = STEP_, PAD = PAD_, GROUP = GROUP_, COLUMNS = STEP * GROUP, ROWS = ROWS_;
    // Windows that hold a pixel of a thread's block, counted from that at the block's first pixel on.
    static constexpr int FIRST = -((R - 1 - PAD) / STEP);
    static constexpr int LAST_ROW = (ROWS - 1 + PAD) / STEP, LAST_COLUMN = (COLUMNS - 1 + PAD) / STEP;
    static constexpr int BEFORE = -FIRST, AFTER = LAST_COLUMN - (GROUP - 1), SPAN = LAST_COLUMN - FIRST + 1;
    static_assert(ROWS % STEP == 0 && 2 * PAD <= R && STEP <= R, "blocks begin with windows, without gaps");
};

struct Sizes {
    u32 h, w, p, q;
};

// What lies at one plane of an image; null where an op has it not.
struct Plane {
    const Real *x, *y, *dy;
    const u8* indices;
    Real* dx;
};

// out = numbers at - BEFORE to at + MIDDLE + AFTER - 1 of a row of `end`; `fill` where there is none, or no row. `at`
// is a multiple of MIDDLE, at most `end`.
template <int BEFORE, int MIDDLE, int AFTER, class T, class N>
__device__ __forceinline__ void load_row(
    const T* row, bool there, int at, int end, bool by_fours, N fill, N (&out)[BEFORE + MIDDLE + AFTER]) {
    if (MIDDLE % 4 == 0 && by_fours) {
#pragma unroll
        for (int k = 0; k < MIDDLE / 4; ++k) {
            N four[4] = {fill, fill, fill, fill};
            if (there && at + 4 * k < end) load_all(row + at + 4 * k, four);
#pragma unroll
            for (int j = 0; j < 4; ++j) out[BEFORE + 4 * k + j] = four[j];
        }
    } else {
#pragma unroll
        for (int k = 0; k < MIDDLE; ++k) out[BEFORE + k] = there && at + k < end ? N(row[at + k]) : fill;
    }
#pragma unroll
    for (int k = 0; k < BEFORE; ++k) out[k] = there && at - BEFORE + k >= 0 ? N(row[at - BEFORE + k]) : fill;
#pragma unroll
    for (int k = MIDDLE; k < MIDDLE + AFTER; ++k) out[BEFORE + k] = there && at + k < end ? N(row[at + k]) : fill;
}

template <int COUNT>
__device__ __forceinline__ void store_row(Real* row, int at, int end, bool by_fours, const float (&value)[COUNT]) {
    if (COUNT % 4 == 0 && by_fours) {
#pragma unroll
        for (int k = 0; k < COUNT; k += 4) {
            const float four[4] = {value[k], value[(k + 1) % COUNT], value[(k + 2) % COUNT], value[(k + 3) % COUNT]};
            if (at + k < end) store_all(row + at + k, four);
        }
    } else {
        store_each<false>(row, at, end, value);
    }
}

// ---- forward

template <class G, bool MAX, bool INDEXED>
__device__ __forceinline__ void pool_block(
    const Real* x, Real* y, u8* indices, const Sizes& g, int p, int q, int aligned, int mode) {
    constexpr int BEFORE = G::PAD, AFTER = G::R - G::STEP - G::PAD, CELLS = BEFORE + G::COLUMNS + AFTER;
    const int row = p * G::STEP - G::PAD, column = q * G::STEP;
    const float start = MAX ? __int_as_float(0xff800000) : 0.0f;
    float total[G::GROUP];
    u32 winner[G::GROUP];
#pragma unroll
    for (int k = 0; k < G::GROUP; ++k) {
        total[k] = start;
        winner[k] = u32(max(-row, 0) * G::R + max(G::PAD - column - k * G::STEP, 0));
    }
#pragma unroll
    for (int r = 0; r < G::R; ++r) {
        const bool there = row + r >= 0 && row + r < int(g.h);
        float cell[CELLS];
        load_row<BEFORE, G::COLUMNS, AFTER>(
            x + (there ? u32(row + r) * g.w : 0), there, column, int(g.w), aligned & PIXELS, start, cell);
#pragma unroll
        for (int k = 0; k < G::GROUP; ++k)
#pragma unroll
            for (int s = 0; s < G::R; ++s) {
                const float value = cell[k * G::STEP + s];
                if (!MAX) {
                    total[k] += value;
                } else {
                    const bool better = wins(total[k], value);
                    total[k] = better ? value : total[k];
                    if (INDEXED) winner[k] = better ? u32(r * G::R + s) : winner[k];
                }
            }
    }
    const Windows sizes{g.h, g.w, g.p, g.q, G::R, G::R, G::STEP, G::STEP, G::PAD, G::PAD};
#pragma unroll
    for (int k = 0; k < G::GROUP; ++k) {
        if (!MAX) total[k] *= average_weight(sizes, row, column + k * G::STEP - G::PAD, mode);
        if (INDEXED && total[k] != total[k]) winner[k] = NO_WINNER;
    }
    store_row(y + u32(p) * g.q, q, int(g.q), aligned & OUTPUTS, total);
    if (!INDEXED) return;
    indices += u32(p) * g.q + u32(q);
    if (aligned & OUTPUTS) {
        u32 packed = 0;
#pragma unroll
        for (int k = 0; k < G::GROUP; ++k) packed |= winner[k] << (8 * k);
        *reinterpret_cast<u32*>(indices) = packed;
        return;
    }
#pragma unroll
    for (int k = 0; k < G::GROUP; ++k)
        if (q + k < int(g.q)) indices[k] = u8(winner[k]);
}

// `block` of an image: its plane, its row and its column of `along` x `across` blocks a plane.
struct BlockPlace {
    u32 plane, row, column;
    __device__ BlockPlace(u32 block, u32 along, u32 across) {
        plane = block / (along * across);
        const u32 rest = block - plane * (along * across);
        row = rest / across, column = rest - row * across;
    }
};

template <class G>
__device__ __forceinline__ void forward_group(
    const Real* x, Real* y, u8* indices, const Sizes& g, u32 block, int aligned, int mode) {
    const BlockPlace place(block, g.p, (g.q + G::GROUP - 1) / G::GROUP);
    const int p = int(place.row), q = int(place.column) * G::GROUP;
    const u32 outputs = place.plane * (g.p * g.q);
    x += place.plane * (g.h * g.w);
    if (mode != MAXIMUM)
        pool_block<G, false, false>(x, y + outputs, indices, g, p, q, aligned, mode);
    else if (indices)
        pool_block<G, true, true>(x, y + outputs, indices + outputs, g, p, q, aligned, mode);
    else
        pool_block<G, true, false>(x, y + outputs, indices, g, p, q, aligned, mode);
}

template <int R, int STEP, int PAD>
__device__ __forceinline__ void forward_fixed(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, Sizes g, u32 blocks,
    u32 chunks, int aligned, int mode) {
    const u32 image = blockIdx.x / chunks, block = (blockIdx.x - image * chunks) * THREADS + threadIdx.x;
    if (block >= blocks) return;
    x += i64(image) * x_stride;
    y += i64(image) * y_stride;
    if (indices) indices += i64(image) * indices_stride;
    forward_group<Fixed<R, STEP, PAD, POOL_GROUP>>(x, y, indices, g, block, aligned, mode);
}

// ---- backward

// One row of windows, those FIRST to LAST_COLUMN from (p, q) on: what each passes on, and to which of its places.
template <class G, Teller BY>
__device__ __forceinline__ void read_windows(
    const Plane& of, const Sizes& g, int p, int q, int aligned, int mode, float (&value)[G::SPAN],
    u32 (&winner)[G::SPAN]) {
    const bool there = p >= 0 && p < int(g.p), by_fours = aligned & OUTPUTS;
    const u32 start = there ? u32(p) * g.q : 0;
    const int end = int(g.q), row = p * G::STEP - G::PAD, column = (q + G::FIRST) * G::STEP - G::PAD;
    load_row<G::BEFORE, G::GROUP, G::AFTER>(of.dy + start, there, q, end, by_fours, 0.0f, value);
    if constexpr (BY == BY_INDICES) {
        load_row<G::BEFORE, G::GROUP, G::AFTER>(of.indices + start, there, q, end, by_fours, NO_WINNER, winner);
        if (!of.y) return;
        float y[G::SPAN];
        load_row<G::BEFORE, G::GROUP, G::AFTER>(of.y + start, there, q, end, by_fours, 0.0f, y);
#pragma unroll
        for (int v = 0; v < G::SPAN; ++v) value[v] = y[v] > 0 ? value[v] : 0.0f;
    } else if constexpr (BY == BY_SHARES) {
        const Windows sizes{g.h, g.w, g.p, g.q, G::R, G::R, G::STEP, G::STEP, G::PAD, G::PAD};
#pragma unroll
        for (int v = 0; v < G::SPAN; ++v) value[v] *= average_weight(sizes, row, column + v * G::STEP, mode);
    } else {
        constexpr int BEFORE = G::PAD - G::FIRST * G::STEP, CELLS = (G::SPAN - 1) * G::STEP + G::R;
        float y[G::SPAN];
        load_row<G::BEFORE, G::GROUP, G::AFTER>(of.y + start, there, q, end, by_fours, not_a_number(), y);
#pragma unroll
        for (int v = 0; v < G::SPAN; ++v) winner[v] = NO_WINNER;
#pragma unroll
        for (int r = G::R - 1; r >= 0; --r) {  // the first of equal places is written last
            const bool inside = there && row + r >= 0 && row + r < int(g.h);
            float cell[CELLS];
            load_row<BEFORE, G::COLUMNS, CELLS - BEFORE - G::COLUMNS>(
                of.x + (inside ? u32(row + r) * g.w : 0), inside, q * G::STEP, int(g.w), aligned & PIXELS,
                not_a_number(), cell);
#pragma unroll
            for (int v = 0; v < G::SPAN; ++v)
#pragma unroll
                for (int s = G::R - 1; s >= 0; --s)
                    winner[v] = cell[v * G::STEP + s] == y[v] ? u32(r * G::R + s) : winner[v];
        }
    }
}

// Windows are taken from the last to the first, as in pool.cu.
template <class G, Teller BY>
__device__ __forceinline__ void gather_block(
    const Plane& of, const Sizes& g, int h, int w, int aligned, int mode, int accumulate) {
    const bool by_fours = aligned & PIXELS;
    float total[G::ROWS][G::COLUMNS] = {};
    if (accumulate) {
#pragma unroll
        for (int i = 0; i < G::ROWS; ++i)
            load_row<0, G::COLUMNS, 0>(
                of.dx + u32(h + i) * g.w, h + i < int(g.h), w, int(g.w), by_fours, 0.0f, total[i]);
    }
#pragma unroll
    for (int u = G::LAST_ROW; u >= G::FIRST; --u) {
        float value[G::SPAN];
        u32 winner[G::SPAN];
        read_windows<G, BY>(of, g, h / G::STEP + u, w / G::STEP, aligned, mode, value, winner);
#pragma unroll
        for (int i = 0; i < G::ROWS; ++i) {
            const int r = i + G::PAD - u * G::STEP;
            if (r < 0 || r >= G::R) continue;
#pragma unroll
            for (int v = G::SPAN - 1; v >= 0; --v)
#pragma unroll
                for (int j = 0; j < G::COLUMNS; ++j) {
                    const int s = j + G::PAD - (v + G::FIRST) * G::STEP;
                    if (s < 0 || s >= G::R) continue;
                    if (BY == BY_SHARES || winner[v] == u32(r * G::R + s)) total[i][j] += value[v];
                }
        }
    }
#pragma unroll
    for (int i = 0; i < G::ROWS; ++i)
        if (h + i < int(g.h)) store_row(of.dx + u32(h + i) * g.w, w, int(g.w), by_fours, total[i]);
}

template <class G, Teller BY>
__device__ __forceinline__ void backward_group(
    Plane of, const Sizes& g, u32 block, int aligned, int mode, int accumulate) {
    const BlockPlace place(block, (g.h + G::ROWS - 1) / G::ROWS, (g.w + G::COLUMNS - 1) / G::COLUMNS);
    const u32 pixels = place.plane * (g.h * g.w), outputs = place.plane * (g.p * g.q);
    of.dy += outputs, of.dx += pixels;
    if (BY == BY_PIXELS) of.x += pixels;
    if (of.y) of.y += outputs;
    if (BY == BY_INDICES) of.indices += outputs;
    const int h = int(place.row) * G::ROWS, w = int(place.column) * G::COLUMNS;
    gather_block<G, BY>(of, g, h, w, aligned, mode, accumulate);
}

template <int R, int STEP, int PAD, Teller BY>
__device__ __forceinline__ void backward_fixed(
    const Plane& of, const Sizes& g, u32 block, int aligned, int mode, int accumulate) {
    if (aligned & PIXELS)
        backward_group<Fixed<R, STEP, PAD, POOL_GROUP>, BY>(of, g, block, aligned, mode, accumulate);
    else
        backward_group<Fixed<R, STEP, PAD, 1>, BY>(of, g, block, 0, mode, accumulate);
}

// By indices, where rows of pixels can be loaded by fours.
template <int R, int STEP, int PAD>
__device__ __forceinline__ void indexed(
    const u8* indices, i64 indices_stride, Source y, Source dy, Real* dx, i64 dx_stride, const Sizes& g, u32 blocks,
    u32 chunks, int aligned, int accumulate) {
    const u32 image = blockIdx.x / chunks, block = (blockIdx.x - image * chunks) * THREADS + threadIdx.x;
    if (block >= blocks) return;
    const Plane of{nullptr, y.data ? y.data + i64(image) * y.stride : nullptr, dy.data + i64(image) * dy.stride,
                   indices + i64(image) * indices_stride, dx + i64(image) * dx_stride};
    constexpr int ROWS = STEP == 1 ? 2 * POOL_ROWS : POOL_ROWS;
    backward_group<Fixed<R, STEP, PAD, POOL_GROUP, ROWS>, BY_INDICES>(of, g, block, aligned, MAXIMUM, accumulate);
}

template <int R, int STEP, int PAD>
__device__ __forceinline__ void unindexed(
    Source x, Source y, Source dy, Real* dx, i64 dx_stride, const Sizes& g, u32 blocks, u32 chunks, int aligned,
    int mode, int accumulate) {
    const u32 image = blockIdx.x / chunks, block = (blockIdx.x - image * chunks) * THREADS + threadIdx.x;
    if (block >= blocks) return;
    Plane of{nullptr, nullptr, dy.data + i64(image) * dy.stride, nullptr, dx + i64(image) * dx_stride};
    if (mode != MAXIMUM) return backward_fixed<R, STEP, PAD, BY_SHARES>(of, g, block, aligned, mode, accumulate);
    of.x = x.data + i64(image) * x.stride;
    of.y = y.data + i64(image) * y.stride;
    backward_fixed<R, STEP, PAD, BY_PIXELS>(of, g, block, aligned, mode, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_forward_2_2_0(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 blocks, u32 chunks, int aligned, int mode) {
    forward_fixed<2, 2, 0>(
        x, x_stride, y, y_stride, indices, indices_stride, {h, w, p, q}, blocks, chunks, aligned, mode);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_indexed_2_2_0(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 blocks, u32 chunks, int aligned, int accumulate) {
    indexed<2, 2, 0>(
        indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, blocks, chunks,
        aligned, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_backward_2_2_0(
    const Real* x, i64 x_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 blocks, u32 chunks, int aligned, int mode, int accumulate) {
    unindexed<2, 2, 0>(
        {x, x_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, blocks, chunks, aligned, mode,
        accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_forward_3_2_0(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 blocks, u32 chunks, int aligned, int mode) {
    forward_fixed<3, 2, 0>(
        x, x_stride, y, y_stride, indices, indices_stride, {h, w, p, q}, blocks, chunks, aligned, mode);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_indexed_3_2_0(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 blocks, u32 chunks, int aligned, int accumulate) {
    indexed<3, 2, 0>(
        indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, blocks, chunks,
        aligned, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_backward_3_2_0(
    const Real* x, i64 x_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 blocks, u32 chunks, int aligned, int mode, int accumulate) {
    unindexed<3, 2, 0>(
        {x, x_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, blocks, chunks, aligned, mode,
        accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_forward_3_2_1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 blocks, u32 chunks, int aligned, int mode) {
    forward_fixed<3, 2, 1>(
        x, x_stride, y, y_stride, indices, indices_stride, {h, w, p, q}, blocks, chunks, aligned, mode);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_indexed_3_2_1(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 blocks, u32 chunks, int aligned, int accumulate) {
    indexed<3, 2, 1>(
        indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, blocks, chunks,
        aligned, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_backward_3_2_1(
    const Real* x, i64 x_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 blocks, u32 chunks, int aligned, int mode, int accumulate) {
    unindexed<3, 2, 1>(
        {x, x_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, blocks, chunks, aligned, mode,
        accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_forward_3_1_1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 blocks, u32 chunks, int aligned, int mode) {
    forward_fixed<3, 1, 1>(
        x, x_stride, y, y_stride, indices, indices_stride, {h, w, p, q}, blocks, chunks, aligned, mode);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_indexed_3_1_1(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 blocks, u32 chunks, int aligned, int accumulate) {
    indexed<3, 1, 1>(
        indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, blocks, chunks,
        aligned, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_backward_3_1_1(
    const Real* x, i64 x_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 blocks, u32 chunks, int aligned, int mode, int accumulate) {
    unindexed<3, 1, 1>(
        {x, x_stride}, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, {h, w, p, q}, blocks, chunks, aligned, mode,
        accumulate);
}
