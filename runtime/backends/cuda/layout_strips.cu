// Transpositions with a short side, such as 3 channels or 13 x 13 pixels, through shared memory; see layout.py.
//
// What is contiguous in memory, at any address, is read and written by 16 bytes. Shared memory has a gap after each 32
// words, so that numbers a power of two apart lie in several banks.

constexpr int STRIP_WORDS = 4096;        // of a block of transform_strips and transform_images
constexpr int WIDE_STRIP_WORDS = 11904;  // of a block of transform_wide_strips: all of 48 KiB, with the gaps

__device__ __forceinline__ Real* cell(u32* held, u32 i) {
    return reinterpret_cast<Real*>(held) + i + i / (32 * PACKED) * PACKED;
}

__device__ __forceinline__ u32* word_cell(u32* held, u32 i) { return held + i + i / 32; }

// Numbers from the last multiple of 16 bytes to `at`.
__device__ __forceinline__ u32 numbers_before(const Real* at) {
    return u32(reinterpret_cast<u64>(at) / sizeof(Real)) % WIDE;
}

// Which numbers of `count` that begin `before` numbers after a multiple of 16 bytes are whole pieces, counted from there.
struct Pieces {
    u32 before, first, last, end;

    __device__ Pieces(u32 before, u32 count)
        : before(before), first((before + WIDE - 1) / WIDE), last((before + count) / WIDE), end(before + count) {}
    // The number, one a thread, before the pieces or behind them, that this thread has; `end` if none.
    __device__ u32 edge(bool behind) const {
        const u32 i = threadIdx.x + (behind ? max(first, last) * WIDE : before);
        return behind || i < min(first * WIDE, end) ? min(i, end) : end;
    }
};

// Numbers `x` to their cells: number i to cell pieces.before + i.
__device__ __forceinline__ void fill_cells(u32* held, const Real* x, const Pieces& pieces) {
    x -= pieces.before;
#pragma unroll 1
    for (u32 start = pieces.first + threadIdx.x; start < pieces.last; start += UNROLL * THREADS) {
        Piece piece[UNROLL] = {};
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k)
            if (start + k * THREADS < pieces.last) piece[k] = load_piece(x + i64(start + k * THREADS) * WIDE);
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k)
#pragma unroll
            for (u32 w = 0; w < 4; ++w)
                if (start + k * THREADS < pieces.last)
                    *word_cell(held, 4 * (start + k * THREADS) + w) = piece[k].word[w];
    }
    for (int behind = 0; behind < 2; ++behind) {
        const u32 i = pieces.edge(behind);
        if (i < pieces.end) *cell(held, i) = x[i];
    }
}

// Cells to numbers y, the other way.
__device__ __forceinline__ void empty_cells(u32* held, Real* y, const Pieces& pieces, int accumulate) {
    y -= pieces.before;
    if (accumulate) {
        for (u32 i = pieces.before + threadIdx.x; i < pieces.end; i += THREADS) put(y + i, *cell(held, i), true);
        return;
    }
#pragma unroll 4
    for (u32 p = pieces.first + threadIdx.x; p < pieces.last; p += THREADS) {
        Piece piece;
#pragma unroll
        for (u32 w = 0; w < 4; ++w) piece.word[w] = *word_cell(held, 4 * p + w);
        store_piece(y + i64(p) * WIDE, piece);
    }
    for (int behind = 0; behind < 2; ++behind) {
        const u32 i = pieces.edge(behind);
        if (i < pieces.end) y[i] = *cell(held, i);
    }
}

// The strip of a block: `count` of 2^log_span numbers in each of `width` rows. On one side, the line, they lie beside
// each other, width apart; its number i has cell before + i. On the other side rows are contiguous.
struct Band {
    u32 before, width, count;
    int log_span;

    __device__ u32 turns(u32 amount) const { return (width << log_span) / amount; }
    // AMOUNT neighbours in a row: the cell of the first, their row, and their place in it; false if they do not exist.
    template <u32 AMOUNT>
    __device__ bool turn(u32 k, u32& at, u32& row, u32& i) const {
        row = k * AMOUNT >> log_span;
        i = k * AMOUNT & ((1u << log_span) - 1);
        at = before + i * width + row;
        return row < width && i < count;
    }
};

template <u32 AMOUNT>
__device__ __forceinline__ void rows_from_cells(u32* held, const Band& band, Real* y, i64 y_row, int accumulate) {
#pragma unroll 8
    for (u32 k = threadIdx.x; k < band.turns(AMOUNT); k += THREADS) {
        u32 at, row, i;
        if (!band.turn<AMOUNT>(k, at, row, i)) continue;
        Real* target = y + row * y_row + i;
        if constexpr (AMOUNT == 1) {
            put(target, *cell(held, at), accumulate);
        } else {
            const u32 low = *reinterpret_cast<const u16*>(cell(held, at));
            const u32 high = *reinterpret_cast<const u16*>(cell(held, at + band.width));
            *reinterpret_cast<u32*>(target) = low | high << 16;
        }
    }
}

template <u32 AMOUNT>
__device__ __forceinline__ void cells_from_rows(u32* held, const Band& band, const Real* x, i64 x_row) {
    constexpr u32 LOADS = AMOUNT == 1 ? 16 : 8;
    u32 at, row, i;
#pragma unroll 1
    for (u32 start = threadIdx.x; start < band.turns(AMOUNT); start += LOADS * THREADS) {
        u32 word[LOADS] = {};
        Real value[LOADS];
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            if (!band.turn<AMOUNT>(start + k * THREADS, at, row, i)) continue;
            const Real* source = x + row * x_row + i;
            if constexpr (AMOUNT == 1)
                value[k] = *source;
            else
                word[k] = *reinterpret_cast<const u32*>(source);
        }
#pragma unroll
        for (u32 k = 0; k < LOADS; ++k) {
            if (!band.turn<AMOUNT>(start + k * THREADS, at, row, i)) continue;
            if constexpr (AMOUNT == 1) {
                *cell(held, at) = value[k];
            } else {
                *reinterpret_cast<u16*>(cell(held, at)) = u16(word[k]);
                *reinterpret_cast<u16*>(cell(held, at + band.width)) = u16(word[k] >> 16);
            }
        }
    }
}

// paired: rows can be read or written by words, of PACKED numbers.
__device__ __forceinline__ void transpose_strip(
    u32* held, const Real* x, i64 x_stride, Real* y, i64 y_stride, i64 row, u32 length, u32 width, int log_span,
    int from_line, int paired, int accumulate) {
    const u32 chunks = (length + (1u << log_span) - 1) >> log_span, image = blockIdx.x / chunks;
    const u32 begin = (blockIdx.x - image * chunks) << log_span, count = min(length - begin, 1u << log_span);
    x += image * x_stride + i64(begin) * (from_line ? width : 1);
    y += image * y_stride + i64(begin) * (from_line ? 1 : width);
    const Pieces pieces(numbers_before(from_line ? x : y), count * width);
    const Band band{pieces.before, width, count, log_span};
    if (from_line) {
        fill_cells(held, x, pieces);
        __syncthreads();
        if (paired)
            rows_from_cells<PACKED>(held, band, y, row, accumulate);
        else
            rows_from_cells<1>(held, band, y, row, accumulate);
    } else {
        if (paired)
            cells_from_rows<PACKED>(held, band, x, row);
        else
            cells_from_rows<1>(held, band, x, row);
        __syncthreads();
        empty_cells(held, y, pieces, accumulate);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) transform_strips(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, i64 row, u32 length, u32 width, int log_span, int from_line,
    int paired, int accumulate) {
    __shared__ u32 held[STRIP_WORDS + STRIP_WORDS / 32];
    transpose_strip(held, x, x_stride, y, y_stride, row, length, width, log_span, from_line, paired, accumulate);
}

// The same with more shared memory, for a width of more than about 100.
extern "C" __global__ void __launch_bounds__(THREADS) transform_wide_strips(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, i64 row, u32 length, u32 width, int log_span, int from_line,
    int paired, int accumulate) {
    __shared__ u32 held[WIDE_STRIP_WORDS + WIDE_STRIP_WORDS / 32];
    transpose_strip(held, x, x_stride, y, y_stride, row, length, width, log_span, from_line, paired, accumulate);
}

// ---- whole images

// y[j][i] of `rows` i and `columns` j in the order of memory: which number of x it is.
struct Walk {
    u32 rows, columns, place, i, j;

    __device__ Walk(u32 rows, u32 columns, u32 number) : rows(rows), columns(columns) {
        const u32 size = rows * columns, image = number / size, rest = number - image * size;
        j = rest / rows, i = rest - j * rows;
        place = image * size + i * columns + j;
    }
    __device__ void next() {
        place += columns;
        if (++i < rows) return;
        i = 0;
        place -= rows * columns - 1;  // the next column begins a number further
        if (++j < columns) return;
        j = 0;
        place += (rows - 1) * columns;  // and behind the last one is the next image
    }
};

// `group` images a block, which follow each other without gaps on both sides.
extern "C" __global__ void __launch_bounds__(THREADS) transform_images(
    const Real* x, Real* y, u32 images, u32 group, u32 rows, u32 columns, int accumulate) {
    __shared__ u32 held[STRIP_WORDS + STRIP_WORDS / 32];
    const u32 first = blockIdx.x * group, count = min(group, images - first) * rows * columns;
    x += i64(first) * rows * columns;
    y += i64(first) * rows * columns;
    const Pieces in(numbers_before(x), count), out(numbers_before(y), count);
    fill_cells(held, x, in);
    __syncthreads();
    if (accumulate) {
        for (u32 k = threadIdx.x; k < count; k += THREADS)
            put(y + k, *cell(held, in.before + Walk(rows, columns, k).place), true);
        return;
    }
#pragma unroll 2
    for (u32 p = out.first + threadIdx.x; p < out.last; p += THREADS) {
        const u32 number = p * WIDE - out.before;
        Walk walk(rows, columns, number);
        Piece piece = {};
#pragma unroll
        for (u32 w = 0; w < WIDE; ++w, walk.next()) {
            const Real* value = cell(held, in.before + walk.place);
            if constexpr (PACKED == 1)
                piece.word[w] = *reinterpret_cast<const u32*>(value);
            else
                piece.word[w / 2] |= u32(*reinterpret_cast<const u16*>(value)) << (16 * (w % 2));
        }
        store_piece(y + number, piece);
    }
    for (int behind = 0; behind < 2; ++behind) {
        const u32 k = out.edge(behind);
        if (k < out.end) y[k - out.before] = *cell(held, in.before + Walk(rows, columns, k - out.before).place);
    }
}
