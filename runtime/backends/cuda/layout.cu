// From one layout to another; see layout.py. All are transpositions of one or more matrices, "images":
//
//     y[image][j][i] = x[image][i][j], or added to it, for `rows` i and `columns` j.
//
// Images of x are x_stride elements apart, its rows x_row; those of y y_stride and y_row. Between NHWC and CHWN rows are
// counted in the order of NHWC: then x_channels or y_channels tells which side's rows lie in the order of CHWN.

constexpr int TILE = 32;        // rows, and columns, of a tile of transform_tiles
constexpr int SQUARES = 16;     // in a row and in a column of the usual tile of squares of WIDE rows and columns
constexpr u32 EDGE = SQUARES * WIDE;
constexpr u32 AT_ONCE = 16;     // numbers that a thread loads before it waits for the first
constexpr u32 PACKED = 4 / sizeof(Real);  // numbers of a word

// Where row `i`, counted with channels fastest, lies in the order of CHWN; `channels` 0: that is its place.
__device__ __forceinline__ i64 place_of(u32 i, u32 channels, u32 pixels) {
    if (channels == 0) return i;
    const u32 pixel = i / channels;
    return i64(i - pixel * channels) * pixels + pixel;
}

// The bits of `value`, or its sum with what is there.
__device__ __forceinline__ void put(Real* at, Real value, int accumulate) {
    if (accumulate)
        *at = float(*at) + float(value);
    else
        *at = value;
}

// One thread a number: neighbours read neighbours, and write far from each other. An image has fewer than 2^31 numbers.
extern "C" __global__ void __launch_bounds__(THREADS) transform_naive(
    const Real* x, i64 x_stride, i64 x_row, Real* y, i64 y_stride, i64 y_row, u32 rows, u32 columns, u32 x_channels,
    u32 y_channels, u32 pixels, int accumulate) {
    const u32 size = rows * columns, chunks = (size + THREADS - 1) / THREADS;
    const u32 image = blockIdx.x / chunks, number = (blockIdx.x - image * chunks) * THREADS + threadIdx.x;
    if (number >= size) return;
    const u32 i = number / columns, j = number - i * columns;
    const Real value = x[image * x_stride + place_of(i, x_channels, pixels) * x_row + j];
    put(y + image * y_stride + place_of(j, y_channels, pixels) * y_row + i, value, accumulate);
}

// A tile passes through shared memory, with one column more so that its columns fall into all banks.
extern "C" __global__ void __launch_bounds__(THREADS) transform_tiles(
    const Real* x, i64 x_stride, i64 x_row, Real* y, i64 y_stride, i64 y_row, u32 rows, u32 columns, u32 x_channels,
    u32 y_channels, u32 pixels, int accumulate) {
    __shared__ Real held[TILE][TILE + 1];
    const u32 across = (columns + TILE - 1) / TILE, tiles = across * ((rows + TILE - 1) / TILE);
    const u32 image = blockIdx.x / tiles, tile = blockIdx.x - image * tiles;
    const u32 top = tile / across * TILE, left = tile % across * TILE;
    const u32 lane = threadIdx.x % TILE, first = threadIdx.x / TILE;
    x += image * x_stride;
    y += image * y_stride;
#pragma unroll
    for (u32 i = first; i < TILE; i += THREADS / TILE)
        if (top + i < rows && left + lane < columns)
            held[i][lane] = x[place_of(top + i, x_channels, pixels) * x_row + left + lane];
    __syncthreads();
#pragma unroll
    for (u32 j = first; j < TILE; j += THREADS / TILE)
        if (left + j < columns && top + lane < rows)
            put(y + place_of(left + j, y_channels, pixels) * y_row + top + lane, held[lane][j], accumulate);
}

// ---- by 16 bytes

// 16 bytes: WIDE numbers.
struct Piece {
    u32 word[4];
};

__device__ __forceinline__ Piece load_piece(const void* at) {
    const uint4 words = *reinterpret_cast<const uint4*>(at);
    return {{words.x, words.y, words.z, words.w}};
}

__device__ __forceinline__ void store_piece(void* at, const Piece& piece) {
    *reinterpret_cast<uint4*>(at) = make_uint4(piece.word[0], piece.word[1], piece.word[2], piece.word[3]);
}

// The pieces of the columns of a square whose rows are the pieces `in`.
template <int WIDTH>
__device__ __forceinline__ void flip(const Piece (&in)[WIDTH], Piece (&out)[WIDTH]) {
#pragma unroll
    for (int c = 0; c < WIDTH; ++c)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if constexpr (WIDTH == 4) {
                out[c].word[w] = in[w].word[c];
            } else {
                const u32 upper = in[2 * w].word[c / 2], lower = in[2 * w + 1].word[c / 2];
                out[c].word[w] = c % 2 ? upper >> 16 | (lower & 0xffff0000u) : (upper & 0xffffu) | lower << 16;
            }
        }
}

// Where in shared memory the piece of rows i * WIDE and on of column j of a tile lies, `tall` pieces a column, which is
// a multiple of 8. Pieces are swapped within groups of 8 so that a quarter of a warp finds all banks both when it
// writes the columns of neighbouring squares and when it reads along a column.
__device__ __forceinline__ u32 unit_of(u32 j, u32 i, u32 tall) { return j * tall + (i ^ ((j / WIDE ^ j % WIDE) & 7)); }

// Where a tile of high x broad numbers is. Tiles follow each other along the shorter side of a matrix, so that those at
// work share lines of memory on both sides.
struct TileAt {
    u32 image, top, left;

    __device__ TileAt(u32 rows, u32 columns, u32 high, u32 broad) {
        const u32 down = (rows + high - 1) / high, beside = (columns + broad - 1) / broad, tiles = down * beside;
        image = blockIdx.x / tiles;
        const u32 tile = blockIdx.x - image * tiles, slow = tile / min(down, beside);
        const u32 fast = tile - slow * min(down, beside);
        top = (down <= beside ? fast : slow) * high, left = (down <= beside ? slow : fast) * broad;
    }
};

// One side of a transform: its rows, of which `rows` exist, and which place they have.
template <class T>
struct Lines {
    T* data;
    i64 row;
    u32 rows, channels, pixels;

    __device__ T* at(u32 i) const { return data + place_of(i, channels, pixels) * row; }
};

// A tile of tall x across squares, from rows `top` and columns `left` on, to shared memory by pieces of rows.
__device__ __forceinline__ void squares_from(
    const Lines<const Real>& x, u32 columns, u32 top, u32 left, u32 tall, u32 across, uint4* held) {
    const u32 i = threadIdx.x / across, j = threadIdx.x - i * across, row = top + i * WIDE, column = left + j * WIDE;
    if (i >= tall || row >= x.rows || column >= columns) return;
    Piece in[WIDE] = {}, out[WIDE];
#pragma unroll
    for (u32 r = 0; r < WIDE; ++r)
        if (row + r < x.rows) in[r] = load_piece(x.at(row + r) + column);
    flip(in, out);
#pragma unroll
    for (u32 c = 0; c < WIDE; ++c) store_piece(held + unit_of(j * WIDE + c, i, tall), out[c]);
}

// The tile to rows of y by pieces; `left` and `top` are its first row and column there.
__device__ __forceinline__ void squares_to(
    const Lines<Real>& y, u32 columns, u32 top, u32 left, u32 tall, u32 across, const uint4* held, int accumulate) {
    const u32 at_once = THREADS / tall, first = threadIdx.x / tall, i = threadIdx.x - first * tall;
    const u32 column = top + i * WIDE, end = min(across * WIDE, y.rows - left);
    if (first >= at_once || column >= columns) return;
#pragma unroll 4
    for (u32 j = first; j < end; j += at_once) {
        const uint4* piece = held + unit_of(j, i, tall);
        Real* target = y.at(left + j) + column;
        if (accumulate) {
            float value[WIDE], sum[WIDE];
            load_all(target, sum);
            load_all(reinterpret_cast<const Real*>(piece), value);
#pragma unroll
            for (int w = 0; w < WIDE; ++w) sum[w] += value[w];
            store_all(target, sum);
        } else {
            store_piece(target, load_piece(piece));
        }
    }
}

// Tiles of tall x across squares; x can be read, and y be written, by pieces.
extern "C" __global__ void __launch_bounds__(THREADS) transform_blocks(
    const Real* x, i64 x_stride, i64 x_row, Real* y, i64 y_stride, i64 y_row, u32 rows, u32 columns, u32 x_channels,
    u32 y_channels, u32 pixels, int accumulate, u32 tall, u32 across) {
    __shared__ uint4 held[THREADS * WIDE];
    const TileAt tile(rows, columns, tall * WIDE, across * WIDE);
    const Lines<const Real> from{x + tile.image * x_stride, x_row, rows, x_channels, pixels};
    squares_from(from, columns, tile.top, tile.left, tall, across, held);
    __syncthreads();
    const Lines<Real> to{y + tile.image * y_stride, y_row, columns, y_channels, pixels};
    squares_to(to, rows, tile.top, tile.left, tall, across, held, accumulate);
}

// The same where x, or y, or both go number by number, in tiles of SQUARES x SQUARES squares.
extern "C" __global__ void __launch_bounds__(THREADS) transform_ragged(
    const Real* x, i64 x_stride, i64 x_row, Real* y, i64 y_stride, i64 y_row, u32 rows, u32 columns, u32 x_channels,
    u32 y_channels, u32 pixels, int accumulate, int x_wide, int y_wide) {
    __shared__ uint4 held[THREADS * WIDE];
    Real* numbers = reinterpret_cast<Real*>(held);
    const TileAt tile(rows, columns, EDGE, EDGE);
    const Lines<const Real> from{x + tile.image * x_stride, x_row, rows, x_channels, pixels};
    const Lines<Real> to{y + tile.image * y_stride, y_row, columns, y_channels, pixels};
    const u32 high = min(rows - tile.top, EDGE), broad = min(columns - tile.left, EDGE);
    if (x_wide) {
        squares_from(from, columns, tile.top, tile.left, SQUARES, SQUARES, held);
    } else {
        const u32 j = threadIdx.x % EDGE;
#pragma unroll 1
        for (u32 start = threadIdx.x / EDGE; start < high; start += AT_ONCE * THREADS / EDGE) {
            Real value[AT_ONCE];
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k) {
                const u32 i = start + k * THREADS / EDGE;
                if (i < high && j < broad) value[k] = from.at(tile.top + i)[tile.left + j];
            }
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; ++k) {
                const u32 i = start + k * THREADS / EDGE;
                if (i < high && j < broad) numbers[unit_of(j, i / WIDE, SQUARES) * WIDE + i % WIDE] = value[k];
            }
        }
    }
    __syncthreads();
    if (y_wide) {
        squares_to(to, rows, tile.top, tile.left, SQUARES, SQUARES, held, accumulate);
    } else {
        const u32 i = threadIdx.x % EDGE;
        if (i >= high) return;
#pragma unroll 8
        for (u32 j = threadIdx.x / EDGE; j < broad; j += THREADS / EDGE) {
            const Real value = numbers[unit_of(j, i / WIDE, SQUARES) * WIDE + i % WIDE];
            put(to.at(tile.left + j) + tile.top + i, value, accumulate);
        }
    }
}
