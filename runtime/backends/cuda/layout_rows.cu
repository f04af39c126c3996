// Transpositions between rows at any address, such as the planes of 55 x 55 pixels of NCHW, and rows that go by pieces,
// such as the pixels of NHWC; see layout.py.
//
// Rows at any address are read by the pieces that hold some of their numbers, and written by whole ones and what is left
// at both ends. In shared memory there is a slot for a span of each row: an odd number of words, so that neighbouring
// slots lie in several banks. Slots are ordered so that neighbours hold rows WIDE apart.

constexpr int ROW_WORDS = 12288;  // of a block: all of 48 KiB

struct Slots {
    u32* held;
    u32 squares, words;  // rows by WIDE, words of a slot

    __device__ u32* of(u32 row) const { return held + (row % WIDE * squares + row / WIDE) * words; }
};

// The words of a piece from word `by` on, around to the one before it. Threads with neighbouring pieces take their words
// in turns of their own, which turn_of says: then the 4 of them that share a bank do not want it at the same time.
__device__ __forceinline__ Piece turned(const Piece& piece, u32 by) {
    const u32(&word)[4] = piece.word;
    const Piece one = by & 1 ? Piece{{word[1], word[2], word[3], word[0]}} : piece;
    return by & 2 ? Piece{{one.word[2], one.word[3], one.word[0], one.word[1]}} : one;
}

__device__ __forceinline__ u32 turn_of(u32 piece) { return piece / 8 % 4; }

// The piece of numbers `first` and on of a slot, `first` counted in numbers, its words from word `by` on.
__device__ __forceinline__ Piece piece_from(const u32* slot, u32 first, u32 by) {
    slot += first / PACKED;
    Piece piece;
#pragma unroll
    for (u32 w = 0; w < 4; ++w) piece.word[w] = slot[(w + by) % 4];
    piece = turned(piece, 4 - by);
    if constexpr (PACKED == 2) {
        const u32 shift = 16 * (first % PACKED), next = slot[4];
#pragma unroll
        for (u32 w = 0; w < 4; ++w)
            piece.word[w] = u32((u64(w < 3 ? piece.word[w + 1] : next) << 32 | piece.word[w]) >> shift);
    }
    return piece;
}

// `count` numbers of each of `rows` rows to their slots, which begin as the piece does that holds the first number.
__device__ __forceinline__ void slots_from_rows(const Slots& slots, const Real* x, i64 x_row, u32 rows, u32 count) {
    Turn load((count + 2 * WIDE - 2) / WIDE, rows), keep = load;
#pragma unroll 1
    while (load.outer == 0) {
        Piece piece[UNROLL] = {};
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k, load.next()) {
            const Real* row = x + load.middle * x_row;
            const u32 before = numbers_before(row);
            if (load.outer == 0 && load.inner * WIDE < before + count)
                piece[k] = load_piece(row - before + load.inner * WIDE);
        }
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k, keep.next()) {
            if (keep.outer > 0) continue;
            const u32 by = turn_of(keep.inner);
            const Piece words = turned(piece[k], by);
            u32* slot = slots.of(keep.middle) + 4 * keep.inner;
#pragma unroll
            for (u32 w = 0; w < 4; ++w) slot[(w + by) % 4] = words.word[w];
        }
    }
}

// The other way, from slots that begin with the first number.
__device__ __forceinline__ void rows_from_slots(
    const Slots& slots, Real* y, i64 y_row, u32 rows, u32 count, int accumulate) {
    Turn turn(max(count / WIDE, 1u), rows);
#pragma unroll 2
    for (; turn.outer == 0; turn.next()) {
        Real* row = y + turn.middle * y_row;
        const Pieces pieces(numbers_before(row), count);
        const u32 p = pieces.first + turn.inner, i = p * WIDE - pieces.before;
        if (p < pieces.last)
            put_piece<false>(row + i, piece_from(slots.of(turn.middle), i, turn_of(turn.inner)), accumulate);
    }
    constexpr u32 ENDS = WIDE - 1;  // numbers at most that are left at one end
    Turn end(2 * ENDS, rows);
#pragma unroll 2
    for (; end.outer == 0; end.next()) {
        Real* row = y + end.middle * y_row;
        const Pieces pieces(numbers_before(row), count);
        const u32 head = min(pieces.first * WIDE - pieces.before, count);
        const u32 tail = max(pieces.first, pieces.last) * WIDE - pieces.before;
        const bool behind = end.inner >= ENDS;
        const u32 i = behind ? tail + end.inner - ENDS : end.inner;
        if (i < (behind ? count : head))
            put(row + i, reinterpret_cast<const Real*>(slots.of(end.middle))[i], accumulate);
    }
}

// Where a tile of `squares` of WIDE numbers along one side and `span` numbers along the other is. Tiles follow each
// other along the side of squares, so that those at work share lines of memory on both sides.
struct SpanAt {
    u32 image, piece, begin, squares, count;

    __device__ SpanAt(u32 pieces, u32 length, u32 squares, u32 span) {
        const u32 tiles = (pieces + squares - 1) / squares, spans = (length + span - 1) / span;
        image = blockIdx.x / (tiles * spans);
        const u32 rest = blockIdx.x - image * tiles * spans, along = rest / tiles;
        piece = (rest - along * tiles) * squares, begin = along * span;
        this->squares = min(squares, pieces - piece), count = min(span, length - begin);
    }
};

// x has rows at any address, y has pieces of `squares` of them.
extern "C" __global__ void __launch_bounds__(THREADS) transform_from_rows(
    const Real* x, i64 x_stride, i64 x_row, Real* y, i64 y_stride, i64 y_row, u32 rows, u32 columns, u32 squares,
    u32 span, u32 words, int accumulate) {
    __shared__ u32 held[ROW_WORDS];
    const SpanAt at(rows / WIDE, columns, squares, span);
    const Slots slots{held, squares, words};
    x += at.image * x_stride + at.piece * WIDE * x_row + at.begin;
    y += at.image * y_stride + at.begin * y_row + at.piece * WIDE;
    slots_from_rows(slots, x, x_row, at.squares * WIDE, at.count);
    __syncthreads();
    const u32 before = numbers_before(x), step = u32(x_row);  // a row WIDE on begins as far from a piece
#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < at.squares * ((at.count + WIDE - 1) / WIDE); unit += THREADS) {
        const u32 j = unit / at.squares, i = unit - j * at.squares;
        Piece in[WIDE], out[WIDE];
#pragma unroll
        for (u32 r = 0; r < WIDE; ++r)
            in[r] = piece_from(slots.of(i * WIDE + r), (before + r * step) % WIDE + j * WIDE, 0);
        flip(in, out);
        Real* target = y + j * WIDE * y_row + i * WIDE;
#pragma unroll
        for (u32 c = 0; c < WIDE; ++c)
            if (j * WIDE + c < at.count) put_piece<false>(target + c * y_row, out[c], accumulate);
    }
}

// x has pieces of `squares` of the rows of y, which are at any address.
extern "C" __global__ void __launch_bounds__(THREADS) transform_to_rows(
    const Real* x, i64 x_stride, i64 x_row, Real* y, i64 y_stride, i64 y_row, u32 rows, u32 columns, u32 squares,
    u32 span, u32 words, int accumulate) {
    __shared__ u32 held[ROW_WORDS];
    const SpanAt at(columns / WIDE, rows, squares, span);
    const Slots slots{held, squares, words};
    x += at.image * x_stride + at.begin * x_row + at.piece * WIDE;
    y += at.image * y_stride + at.piece * WIDE * y_row + at.begin;
#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < at.squares * ((at.count + WIDE - 1) / WIDE); unit += THREADS) {
        const u32 i = unit / at.squares, j = unit - i * at.squares;
        const Real* source = x + i * WIDE * x_row + j * WIDE;
        Piece in[WIDE] = {}, out[WIDE];
#pragma unroll
        for (u32 r = 0; r < WIDE; ++r)
            if (i * WIDE + r < at.count) in[r] = load_piece(source + r * x_row);
        flip(in, out);
#pragma unroll
        for (u32 c = 0; c < WIDE; ++c)
#pragma unroll
            for (u32 w = 0; w < 4; ++w) slots.of(j * WIDE + c)[4 * i + w] = out[c].word[w];
    }
    __syncthreads();
    rows_from_slots(slots, y, y_row, at.squares * WIDE, at.count, accumulate);
}
