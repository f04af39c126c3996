// Pooling in NCHW through shared memory, for planes of any width, over square windows whose size R and step are known
// when this is compiled; see pool.py.
//
// A block has a few whole planes, or a band of rows of one. What it reads lies side by side in memory, and so does what
// it writes: both go by 16 bytes, also where rows begin anywhere. Rows that two bands need are loaded twice.

constexpr int PLANES_BYTES = 16896;            // of a block's shared memory in forward
constexpr int PLANES_GRADIENT_BYTES = 33280;   // and in backward: a multiprocessor of sm_90 holds 6 such blocks
constexpr int PLANES_STRIP = 4;                // outputs of a thread in forward, one below the other

// `count` numbers from `from` on in shared memory from `room` on, where they lie relative to multiples of 16 bytes as
// they do outside. The 16 bytes at both ends are read whole. They are there after `arrive` and a barrier: what several
// calls ask for is on its way at the same time.
template <class T>
__device__ __forceinline__ T* stage(u8* room, const T* from, u32 count) {
    const u32 lead = u32(reinterpret_cast<u64>(from) % 16);
    const uint4* source = reinterpret_cast<const uint4*>(reinterpret_cast<const u8*>(from) - lead);
    uint4* target = reinterpret_cast<uint4*>(room);
    const u32 chunks = count == 0 ? 0 : (lead + count * u32(sizeof(T)) + 15) / 16;
#if __CUDA_ARCH__ >= 800
#pragma unroll 1
    for (u32 i = threadIdx.x; i < chunks; i += THREADS)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :
                     : "r"(u32(__cvta_generic_to_shared(target + i))), "l"(source + i)
                     : "memory");
#else
    for (u32 i = threadIdx.x; i < chunks; i += UNROLL * THREADS) {
        uint4 four[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (i + k * THREADS < chunks) four[k] = source[i + k * THREADS];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k)
            if (i + k * THREADS < chunks) target[i + k * THREADS] = four[k];
    }
#endif
    return reinterpret_cast<T*>(room + lead);
}

// Waits for what this thread has asked for.
__device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}

// Bytes of shared memory that `stage` may take.
template <class T>
__device__ __forceinline__ u32 staged_bytes(u32 count) { return (count * u32(sizeof(T)) + 15 + 15) / 16 * 16; }

// The reverse: `count` numbers at `staged`, which lies relative to multiples of 16 bytes as `to` does.
__device__ __forceinline__ void unstage(const Real* staged, Real* to, u32 count) {
    const u32 lead = u32(reinterpret_cast<u64>(to) % 16) / u32(sizeof(Real));
    const u32 head = min((WIDE - lead) % WIDE, count), chunks = (count - head) / WIDE, rest = head + chunks * WIDE;
    const uint4* source = reinterpret_cast<const uint4*>(staged + head);
    uint4* target = reinterpret_cast<uint4*>(to + head);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < chunks; i += THREADS) target[i] = source[i];
    if (threadIdx.x < head) to[threadIdx.x] = staged[threadIdx.x];
    if (rest + threadIdx.x < count) to[rest + threadIdx.x] = staged[rest + threadIdx.x];
}

// How planes are shared out: `group` planes a block, `groups` such an image, or `band` rows of outputs (in backward of
// blocks of STEP x STEP pixels) of one plane, `bands` such a plane, which has `rows` x `columns`. A thread has `strip`
// rows of a column, a band `strips` such. by_*: see quotient.
struct Planes {
    u32 h, w, p, q, pad, planes, group, groups, band, bands, rows, columns, strip, strips;
    u64 by_columns, by_strips, by_bands, by_groups;
};

// This block's planes and rows.
struct PlaneBlock {
    u32 image, plane, count, first, end;  // `count` planes from `plane` on; rows first to end
    bool whole;

    __device__ explicit PlaneBlock(const Planes& g) {
        const u32 part = quotient(blockIdx.x, g.by_bands);
        first = (blockIdx.x - part * g.bands) * g.band, end = min(first + g.band, g.rows);
        whole = g.group > 1;  // one plane is a band, of all its rows or of a few: no more of it may fit
        image = quotient(part, g.by_groups);
        plane = (part - image * g.groups) * g.group;
        count = min(g.group, g.planes - plane);
    }
    // Strips, which threads share out; the last of the last band may have no rows.
    __device__ u32 units(const Planes& g) const { return count * g.strips * g.columns; }
};

// Strip `unit` of a block: a plane of it, a column, and its first row.
struct PlaneStrip {
    u32 plane;
    int row, column;

    __device__ PlaneStrip(const Planes& g, const PlaneBlock& of, u32 unit) {
        const u32 strip = quotient(unit, g.by_columns);
        column = int(unit - strip * g.columns);
        plane = quotient(strip, g.by_strips);
        row = int(of.first + (strip - plane * g.strips) * g.strip);
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
    arrive();
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

// A block's part in backward: pixels of rows h_first to h_end of planes, and the windows, of rows p_first to p_end, that
// hold any of these; `inputs` and `outputs`: where both begin in an image.
template <int R, int STEP>
struct GradientBlock : PlaneBlock {
    static constexpr int BEFORE = (R - 1) / STEP;  // windows that hold pixels of a block of pixels before it
    int h_first, h_end, p_first, p_end;
    u32 outputs, windows, inputs, pixels;

    __device__ explicit GradientBlock(const Planes& g) : PlaneBlock(g) {
        const int pad = int(g.pad);
        h_first = whole ? 0 : max(int(first) * STEP - pad, 0);
        h_end = whole ? int(g.h) : min(int(end) * STEP - pad, int(g.h));
        p_first = whole ? 0 : min(max(int(first) - BEFORE, 0), int(g.p) - 1);
        p_end = min(int(end), int(g.p));
        outputs = plane * (g.p * g.q) + u32(p_first) * g.q;
        windows = (count - 1) * (g.p * g.q) + u32(p_end - p_first) * g.q;
        inputs = plane * (g.h * g.w) + u32(h_first) * g.w;
        pixels = (count - 1) * (g.h * g.w) + u32(h_end - h_first) * g.w;
    }
};

// What a block has staged of its windows, and its pixels. What lies before the first window can be read too.
struct StagedGradient {
    u8* places;
    const Real* passed;
    Real* made;
};

// One row of windows, its last first: what each passes on, and to which of its places. From `nowhere` on there is none.
template <int COUNT>
__device__ __forceinline__ void windows_of_row(
    const Real* passed, const u8* places, bool there, const u32 (&nowhere)[COUNT], float (&value)[COUNT],
    u32 (&place)[COUNT]) {
#pragma unroll
    for (int v = 0; v < COUNT; ++v) place[v] = NO_WINNER;
    if (!there) return;
#pragma unroll
    for (int v = 0; v < COUNT; ++v) value[v] = passed[-v], place[v] = places[-v] | nowhere[v];
}

// Blocks of STEP x STEP pixels begin where windows do, `pad` pixels before the plane. A thread goes down `rows` of a
// column of them, and keeps the rows of windows that hold the next block's pixels too: each is read once a strip.
// Windows are taken from the last to the first, as in pool.cu.
template <int R, int STEP, bool ADDS>
__device__ __forceinline__ void gather_strip(
    const StagedGradient& held, const GradientBlock<R, STEP>& of, const Planes& g, const PlaneStrip& strip, int rows) {
    constexpr int KEPT = (R - 1) / STEP + 1;  // rows, and columns, of windows that hold a pixel of a block
    const int left = strip.column * STEP - int(g.pad), top = strip.row * STEP - int(g.pad) - of.h_first;
    const int first = int(strip.plane * (g.p * g.q)) + (strip.row - KEPT + 1 - of.p_first) * int(g.q) + strip.column;
    const u8* places = held.places + first;
    const Real* passed = held.passed + first;
    Real* pixel = held.made + (int(strip.plane * (g.h * g.w)) + top * int(g.w) + left);
    float value[KEPT][KEPT];  // of window row p in [p mod KEPT], counted from the strip's first
    u32 place[KEPT][KEPT], nowhere[KEPT], limit[STEP];
#pragma unroll
    for (int v = 0; v < KEPT; ++v)  // what makes all of a window's places NO_WINNER
        nowhere[v] = strip.column >= v && strip.column - v < int(g.q) ? 0 : NO_WINNER;
#pragma unroll
    for (int j = 0; j < STEP; ++j)  // where rows of pixels end for this thread; those above the first are beyond it
        limit[j] = left + j >= 0 && left + j < int(g.w) ? u32(min(of.h_end - of.h_first, top + rows * STEP)) : 0;
#pragma unroll
    for (int k = 1; k < KEPT; ++k) {
        const int p = strip.row - KEPT + k;
        windows_of_row(passed, places, p >= of.p_first && p < of.p_end, nowhere, value[k], place[k]);
        passed += g.q, places += g.q;
    }
    u32 h = u32(top);
    const int p_end = of.p_end - strip.row;
#pragma unroll 1
    for (int row = 0; row < rows; row += KEPT) {
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            windows_of_row(passed, places, row + k < p_end, nowhere, value[k], place[k]);
            passed += g.q, places += g.q;
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                float total[STEP] = {};
#pragma unroll
                for (int j = 0; j < STEP; ++j)
                    if (ADDS && h < limit[j]) total[j] = pixel[j];
#pragma unroll
                for (int u = 0; u < KEPT; ++u)
#pragma unroll
                    for (int v = 0; v < KEPT; ++v)
#pragma unroll
                        for (int j = 0; j < STEP; ++j) {
                            const int r = i + u * STEP, s = j + v * STEP, kept = (k + KEPT - u) % KEPT;
                            if (r < R && s < R && place[kept][v] == u32(r * R + s)) total[j] += value[kept][v];
                        }
#pragma unroll
                for (int j = 0; j < STEP; ++j)
                    if (h < limit[j]) pixel[j] = total[j];
                pixel += g.w, ++h;
            }
        }
    }
}

template <int R, int STEP, bool ADDS>
__device__ __forceinline__ void gather_strips(
    const StagedGradient& held, const GradientBlock<R, STEP>& of, const Planes& g) {
    const u32 units = of.units(g);
#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < units; unit += THREADS) {
        const PlaneStrip strip(g, of, unit);
        gather_strip<R, STEP, ADDS>(held, of, g, strip, min(int(g.strip), int(of.end) - strip.row));
    }
}

// By indices, and by y as a mask if it is given.
template <int R, int STEP>
__device__ __forceinline__ void gather_planes(
    const u8* indices, i64 indices_stride, Source y, Source dy, Real* dx, i64 dx_stride, const Planes& g,
    int accumulate) {
    __shared__ uint4 shared[PLANES_GRADIENT_BYTES / 16];
    const GradientBlock<R, STEP> of(g);
    dx += i64(of.image) * dx_stride + of.inputs;
    StagedGradient held;
    u8* room = reinterpret_cast<u8*>(shared + 1);
    held.places = const_cast<u8*>(stage(room, indices + i64(of.image) * indices_stride + of.outputs, of.windows));
    room += staged_bytes<u8>(of.windows);
    held.passed = stage(room, dy.data + i64(of.image) * dy.stride + of.outputs, of.windows);
    room += staged_bytes<Real>(of.windows);
    const Real* mask = nullptr;
    if (y.data) {
        mask = stage(room, y.data + i64(of.image) * y.stride + of.outputs, of.windows);
        room += staged_bytes<Real>(of.windows);
    }
    held.made = stage(room, dx, accumulate ? of.pixels : 0);
    arrive();
    __syncthreads();
    if (mask) {
        for (u32 i = threadIdx.x; i < of.windows; i += THREADS)
            if (!(float(mask[i]) > 0)) held.places[i] = NO_WINNER;
        __syncthreads();
    }
    if (accumulate)
        gather_strips<R, STEP, true>(held, of, g);
    else
        gather_strips<R, STEP, false>(held, of, g);
    __syncthreads();
    unstage(held.made, dx, of.pixels);
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
    u32 pad, u32 planes, u32 group, u32 groups, u32 band, u32 bands, u32 rows, u32 columns, u32 strip, u32 strips,
    u64 by_columns, u64 by_strips, u64 by_bands, u64 by_groups, int mode) {
    const Planes g{h,    w,       p,     q,      pad,        planes,    group,    groups,   band, bands,
                   rows, columns, strip, strips, by_columns, by_strips, by_bands, by_groups};
    planes_forward<2, 2>(x, x_stride, y, y_stride, indices, indices_stride, g, mode);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_gradient_2_2(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 planes, u32 group, u32 groups, u32 band, u32 bands,
    u32 rows, u32 columns, u32 strip, u32 strips, u64 by_columns, u64 by_strips, u64 by_bands, u64 by_groups,
    int accumulate) {
    const Planes g{h,    w,       p,     q,      pad,        planes,    group,    groups,   band, bands,
                   rows, columns, strip, strips, by_columns, by_strips, by_bands, by_groups};
    gather_planes<2, 2>(
        indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_forward_3_2(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 planes, u32 group, u32 groups, u32 band, u32 bands, u32 rows, u32 columns, u32 strip, u32 strips,
    u64 by_columns, u64 by_strips, u64 by_bands, u64 by_groups, int mode) {
    const Planes g{h,    w,       p,     q,      pad,        planes,    group,    groups,   band, bands,
                   rows, columns, strip, strips, by_columns, by_strips, by_bands, by_groups};
    planes_forward<3, 2>(x, x_stride, y, y_stride, indices, indices_stride, g, mode);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_gradient_3_2(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 planes, u32 group, u32 groups, u32 band, u32 bands,
    u32 rows, u32 columns, u32 strip, u32 strips, u64 by_columns, u64 by_strips, u64 by_bands, u64 by_groups,
    int accumulate) {
    const Planes g{h,    w,       p,     q,      pad,        planes,    group,    groups,   band, bands,
                   rows, columns, strip, strips, by_columns, by_strips, by_bands, by_groups};
    gather_planes<3, 2>(
        indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_forward_3_1(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u8* indices, i64 indices_stride, u32 h, u32 w, u32 p, u32 q,
    u32 pad, u32 planes, u32 group, u32 groups, u32 band, u32 bands, u32 rows, u32 columns, u32 strip, u32 strips,
    u64 by_columns, u64 by_strips, u64 by_bands, u64 by_groups, int mode) {
    const Planes g{h,    w,       p,     q,      pad,        planes,    group,    groups,   band, bands,
                   rows, columns, strip, strips, by_columns, by_strips, by_bands, by_groups};
    planes_forward<3, 1>(x, x_stride, y, y_stride, indices, indices_stride, g, mode);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_gradient_3_1(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 planes, u32 group, u32 groups, u32 band, u32 bands,
    u32 rows, u32 columns, u32 strip, u32 strips, u64 by_columns, u64 by_strips, u64 by_bands, u64 by_groups,
    int accumulate) {
    const Planes g{h,    w,       p,     q,      pad,        planes,    group,    groups,   band, bands,
                   rows, columns, strip, strips, by_columns, by_strips, by_bands, by_groups};
    gather_planes<3, 1>(
        indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}
