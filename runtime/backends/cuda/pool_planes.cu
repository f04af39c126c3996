// Pooling in NCHW through shared memory, for planes of any width, over square windows whose size R and step are known
// when this is compiled; see pool.py.
//
// A block has a few whole planes, or a band of rows of one. What it reads lies side by side in memory, and so does what
// it writes: both go by 16 bytes, also where rows begin anywhere. Rows that two bands need are loaded twice.

constexpr int PLANES_BYTES = 16896;  // of a block's shared memory
constexpr int PLANES_STRIP = 4;      // outputs of a thread, or blocks of STEP x STEP pixels, one below the other

// `count` numbers from `from` on in shared memory from `room` on, where they lie relative to multiples of 16 bytes as
// they do outside. The 16 bytes at both ends are read whole.
template <class T>
__device__ __forceinline__ T* stage(u8* room, const T* from, u32 count) {
    const u32 lead = u32(reinterpret_cast<u64>(from) % 16);
    const uint4* source = reinterpret_cast<const uint4*>(reinterpret_cast<const u8*>(from) - lead);
    uint4* target = reinterpret_cast<uint4*>(room);
    const u32 chunks = count == 0 ? 0 : (lead + count * u32(sizeof(T)) + 15) / 16;
    for (u32 i = threadIdx.x; i < chunks; i += UNROLL * THREADS) {
        uint4 four[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (i + k * THREADS < chunks) four[k] = source[i + k * THREADS];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (i + k * THREADS < chunks) target[i + k * THREADS] = four[k];
    }
    return reinterpret_cast<T*>(room + lead);
}

// Bytes of shared memory that `stage` may take.
template <class T>
__device__ __forceinline__ u32 staged_bytes(u32 count) { return (count * u32(sizeof(T)) + 15 + 15) / 16 * 16; }

// The reverse: `count` numbers at `staged`, which lies relative to multiples of 16 bytes as `to` does.
__device__ __forceinline__ void unstage(const Real* staged, Real* to, u32 count) {
    const u32 lead = u32(reinterpret_cast<u64>(to) % 16) / u32(sizeof(Real));
    const u32 chunks = (lead + count + WIDE - 1) / WIDE;
    for (u32 i = threadIdx.x; i < chunks; i += THREADS) {
        const int at = int(i * WIDE) - int(lead);
        if (at >= 0 && at + WIDE <= int(count)) {
            *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(staged + at);
        } else {
            for (int w = max(at, 0); w < min(at + WIDE, int(count)); ++w) to[w] = staged[w];
        }
    }
}

// How planes are shared out: `group` planes a block, or `band` rows of outputs (of blocks of STEP x STEP pixels in
// backward) of one, of `rows` x `columns` a plane. by_*: see quotient.
struct Planes {
    u32 h, w, p, q, pad, planes, group, band, rows, columns;
    u64 by_columns, by_strips;
};

// This block's planes and rows.
struct PlaneBlock {
    u32 image, plane, count, first, end;  // `count` planes from `plane` on; rows first to end
    bool whole;

    __device__ explicit PlaneBlock(const Planes& g) {
        const u32 bands = (g.rows + g.band - 1) / g.band, groups = (g.planes + g.group - 1) / g.group;
        const u32 part = blockIdx.x / bands;
        first = (blockIdx.x - part * bands) * g.band, end = min(first + g.band, g.rows);
        whole = g.group > 1;  // one plane is a band, of all its rows or of a few: no more of it may fit
        image = part / groups;
        plane = (part - image * groups) * g.group;
        count = min(g.group, g.planes - plane);
    }
    // Strips of PLANES_STRIP rows, which threads share out.
    __device__ u32 units(const Planes& g) const {
        return count * ((end - first + PLANES_STRIP - 1) / PLANES_STRIP) * g.columns;
    }
};

// Strip `unit` of a block: a plane of it, a column, and its first row.
struct PlaneStrip {
    u32 plane;
    int row, column;

    __device__ PlaneStrip(const Planes& g, const PlaneBlock& of, u32 unit) {
        const u32 strip = quotient(unit, g.by_columns), strips = (g.band + PLANES_STRIP - 1) / PLANES_STRIP;
        column = int(unit - strip * g.columns);
        plane = quotient(strip, g.by_strips);
        row = int(of.first) + int(strip - plane * strips) * PLANES_STRIP;
    }
};

template <int R, int STEP, bool MAX, bool INDEXED>
__device__ __forceinline__ void pool_planes(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, const Planes& g, int mode,
    u8* room) {
    constexpr int HEIGHT = (PLANES_STRIP - 1) * STEP + R;
    const PlaneBlock of(g);
    const int pad = int(g.pad), h_end = of.whole ? int(g.h) : min(int(of.end - 1) * STEP - pad + R, int(g.h));
    const int h_first = of.whole ? 0 : max(int(of.first) * STEP - pad, 0);
    x += i64(of.image) * x_stride + of.plane * (g.h * g.w) + u32(h_first) * g.w;
    const Real* staged = stage(room, x, (of.count - 1) * (g.h * g.w) + u32(h_end - h_first) * g.w);
    __syncthreads();
    y += i64(of.image) * y_stride + of.plane * (g.p * g.q);
    if (INDEXED) indices += i64(of.image) * indices_stride + of.plane * (g.p * g.q);
    const Windows sizes{g.h, g.w, g.p, g.q, R, R, STEP, STEP, g.pad, g.pad};
    const u32 units = of.units(g);
#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < units; unit += THREADS) {
        const PlaneStrip at(g, of, unit);
        const int top = at.row * STEP - pad, left = at.column * STEP - pad;
        const Real* column[R];
        float total[PLANES_STRIP];
        u32 winner[PLANES_STRIP] = {};
        bool there[R];
#pragma unroll
        for (int k = 0; k < PLANES_STRIP; ++k) total[k] = MAX ? __int_as_float(0xff800000) : 0.0f;
#pragma unroll
        for (int s = 0; s < R; ++s) {
            const int w = within(left + s, int(g.w));
            column[s] = staged + (int(at.plane * (g.h * g.w)) - h_first * int(g.w) + w);
            there[s] = MAX || w == left + s;
        }
#pragma unroll
        for (int i = 0; i < HEIGHT; ++i) {
            // a pixel that is not there is replaced by its neighbour in the same windows
            const int h = max(min(top + i, h_end - 1), h_first);
            const bool inside = MAX || h == top + i;
            const int row = h * int(g.w);
            float of_row = column[0][row];
            if (!MAX) of_row = inside && there[0] ? of_row : 0.0f;
            u32 place = 0;
#pragma unroll
            for (int s = 1; s < R; ++s) {
                const float value = column[s][row];
                if (!MAX) {
                    of_row += inside && there[s] ? value : 0.0f;
                } else {
                    const bool better = take(of_row, value);
                    if (INDEXED) place = better ? u32(s) : place;
                }
            }
#pragma unroll
            for (int k = 0; k < PLANES_STRIP; ++k) {
                const int r = i - k * STEP;
                if (r < 0 || r >= R) continue;
                if (!MAX) {
                    total[k] += of_row;
                } else {
                    const bool better = take(total[k], of_row);
                    if (INDEXED) winner[k] = better ? place + u32(r * R) : winner[k];
                }
            }
        }
        u32 output = (at.plane * g.p + u32(at.row)) * g.q + u32(at.column);
#pragma unroll
        for (int k = 0; k < PLANES_STRIP; ++k) {
            if (at.row + k >= int(of.end)) break;
            if (!MAX) total[k] *= average_weight(sizes, top + k * STEP, left, mode);
            y[output] = total[k];
            if (INDEXED) {  // its first places may be those of neighbours before which there is none
                u32 r = winner[k] / R, s = winner[k] - r * R;
                r = u32(max(int(r), -(top + k * STEP))), s = u32(max(int(s), -left));
                indices[output] = u8(total[k] != total[k] ? NO_WINNER : r * R + s);
            }
            output += g.q;
        }
    }
}

// By indices, and by y as a mask if it is given. Blocks of STEP x STEP pixels begin where windows do, `pad` pixels
// before the plane. Windows are taken from the last to the first, as in pool.cu.
template <int R, int STEP>
__device__ __forceinline__ void gather_planes(
    const u8* indices, i64 indices_stride, Source y, Source dy, Real* dx, i64 dx_stride, const Planes& g,
    int accumulate) {
    constexpr int BEFORE = (R - 1) / STEP, ROWS = PLANES_STRIP;  // windows that hold pixels of a block before it
    __shared__ uint4 shared[PLANES_BYTES / 16];
    const PlaneBlock of(g);
    const int pad = int(g.pad), w_end = int(g.w);
    const int h_first = of.whole ? 0 : max(int(of.first) * STEP - pad, 0);
    const int h_end = of.whole ? int(g.h) : min(int(of.end) * STEP - pad, int(g.h));
    const int p_first = of.whole ? 0 : min(max(int(of.first) - BEFORE, 0), int(g.p) - 1);
    const int p_end = min(int(of.end), int(g.p));
    const u32 outputs = of.plane * (g.p * g.q) + u32(p_first) * g.q;
    const u32 windows = (of.count - 1) * (g.p * g.q) + u32(p_end - p_first) * g.q;
    const u32 pixels = (of.count - 1) * (g.h * g.w) + u32(h_end - h_first) * g.w;
    dx += i64(of.image) * dx_stride + of.plane * (g.h * g.w) + u32(h_first) * g.w;
    u8* room = reinterpret_cast<u8*>(shared);
    const Real* passed = stage(room, dy.data + i64(of.image) * dy.stride + outputs, windows);
    room += staged_bytes<Real>(windows);
    const u8* places = stage(room, indices + i64(of.image) * indices_stride + outputs, windows);
    room += staged_bytes<u8>(windows);
    const Real* mask = passed;
    if (y.data) {
        mask = stage(room, y.data + i64(of.image) * y.stride + outputs, windows);
        room += staged_bytes<Real>(windows);
    }
    Real* made = stage(room, dx, accumulate ? pixels : 0);
    __syncthreads();
    const bool masked = y.data != nullptr;
    const u32 units = of.units(g);
#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < units; unit += THREADS) {
        const PlaneStrip at(g, of, unit);
        const int top = at.row * STEP - pad, left = at.column * STEP - pad;
        const u32 window = at.plane * (g.p * g.q);
        Real* plane = made + at.plane * (g.h * g.w) + (top - h_first) * w_end + left;
        float total[ROWS * STEP][STEP] = {};
        if (accumulate) {
#pragma unroll
            for (int i = 0; i < ROWS * STEP; ++i)
#pragma unroll
                for (int j = 0; j < STEP; ++j)
                    if (top + i >= h_first && top + i < h_end && left + j >= 0 && left + j < w_end)
                        total[i][j] = plane[i * w_end + j];
        }
        u32 column[BEFORE + 1];
        bool there[BEFORE + 1];
#pragma unroll
        for (int v = 0; v <= BEFORE; ++v) {
            column[v] = u32(within(at.column - v, int(g.q)));
            there[v] = int(column[v]) == at.column - v;
        }
#pragma unroll
        for (int u = ROWS - 1; u >= -BEFORE; --u) {
            const int p = max(min(at.row + u, p_end - 1), p_first);
            const u32 row = window + u32(p - p_first) * g.q;
#pragma unroll
            for (int v = 0; v <= BEFORE; ++v) {
                const u32 place = p == at.row + u && there[v] ? places[row + column[v]] : NO_WINNER;
                float value = passed[row + column[v]];
                if (masked) value = float(mask[row + column[v]]) > 0 ? value : 0.0f;
#pragma unroll
                for (int i = 0; i < ROWS * STEP; ++i)
#pragma unroll
                    for (int j = 0; j < STEP; ++j) {
                        const int r = i - u * STEP, s = j + v * STEP;
                        if (r >= 0 && r < R && s < R && place == u32(r * R + s)) total[i][j] += value;
                    }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS * STEP; ++i) {
            if (top + i >= h_first && top + i < h_end) {
#pragma unroll
                for (int j = 0; j < STEP; ++j)
                    if (left + j >= 0 && left + j < w_end) plane[j] = total[i][j];
            }
            plane += w_end;
        }
    }
    __syncthreads();
    unstage(made, dx, pixels);
}

template <int R, int STEP>
__device__ __forceinline__ void planes_forward(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, const Planes& g, int mode) {
    __shared__ uint4 shared[PLANES_BYTES / 16];
    u8* room = reinterpret_cast<u8*>(shared);
    if (mode != MAXIMUM)
        pool_planes<R, STEP, false, false>(x, x_stride, y, y_stride, indices, indices_stride, g, mode, room);
    else if (indices)
        pool_planes<R, STEP, true, true>(x, x_stride, y, y_stride, indices, indices_stride, g, mode, room);
    else
        pool_planes<R, STEP, true, false>(x, x_stride, y, y_stride, indices, indices_stride, g, mode, room);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_forward_2_2(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 planes, u32 group, u32 band, u32 rows, u32 columns, u64 by_columns, u64 by_strips, int mode) {
    const Planes g{h, w, p, q, pad, planes, group, band, rows, columns, by_columns, by_strips};
    planes_forward<2, 2>(x, x_stride, y, y_stride, indices, indices_stride, g, mode);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_gradient_2_2(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 planes, u32 group, u32 band, u32 rows, u32 columns,
    u64 by_columns, u64 by_strips, int accumulate) {
    const Planes g{h, w, p, q, pad, planes, group, band, rows, columns, by_columns, by_strips};
    gather_planes<2, 2>(
        indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_forward_3_2(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 planes, u32 group, u32 band, u32 rows, u32 columns, u64 by_columns, u64 by_strips, int mode) {
    const Planes g{h, w, p, q, pad, planes, group, band, rows, columns, by_columns, by_strips};
    planes_forward<3, 2>(x, x_stride, y, y_stride, indices, indices_stride, g, mode);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_gradient_3_2(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 planes, u32 group, u32 band, u32 rows, u32 columns,
    u64 by_columns, u64 by_strips, int accumulate) {
    const Planes g{h, w, p, q, pad, planes, group, band, rows, columns, by_columns, by_strips};
    gather_planes<3, 2>(
        indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_forward_3_1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 planes, u32 group, u32 band, u32 rows, u32 columns, u64 by_columns, u64 by_strips, int mode) {
    const Planes g{h, w, p, q, pad, planes, group, band, rows, columns, by_columns, by_strips};
    planes_forward<3, 1>(x, x_stride, y, y_stride, indices, indices_stride, g, mode);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_gradient_3_1(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 planes, u32 group, u32 band, u32 rows, u32 columns,
    u64 by_columns, u64 by_strips, int accumulate) {
    const Planes g{h, w, p, q, pad, planes, group, band, rows, columns, by_columns, by_strips};
    gather_planes<3, 1>(
        indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}
