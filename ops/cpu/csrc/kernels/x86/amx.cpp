// AMX: quantised products of many activation rows, with tiles of int8, and attention, with tiles of bfloat16. Products
// of fewer rows, and of floats, are as in avx512.cpp.
//
// Products. Eight vectors of 64 bytes, which are a block of 32 columns of 16 weight rows (matrix.h), are a second operand
// as they are. So one tile product gives the integer sums of 16 activation rows by 16 weight rows over the 32 columns
// that share a scale; they are stored, scaled and added in float in the same order as in avx512.cpp: results have the
// same bits.
//
// Weights are unpacked, less their zero points, which leaves signed bytes: -15 .. 15 of q4, -12 .. 12 of mxfp4, -128 .. 127
// of q8 and w8a8 (q8 with zero points of its own can be more, and stays with avx512.cpp). Of GGUF's formats, minimums are
// added to the scaled sums; formats with scales for 16 columns stay with avx512.cpp.
//
// A pass goes over the columns of one row block and one tile of activation rows; its sums stay in registers. In step i
// the tiles of columns i are multiplied, the sums of step i - 2 are stored, those of step i - 4 are scaled and added, and
// the weights of step i + 4 are unpacked, which the next tiles of activation rows use too. So nothing waits for what the
// step before began: beside a tile product the vector units have half of their multiplications, and a tile's store stops
// them altogether.
//
// Attention. Pieces of the cache (attention.h) are second operands as they are. A tile's sums start at zero and are added
// to what is there, so a row's bits depend on where its keys are cut: values are taken 16 at a time, counted from a
// multiple of 16, whatever the pages and however many keys its neighbours see. What they see beyond it adds zeros.

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/x86/bf16.h"
#include "kernels/x86/tiles.h"
#include "kernels/x86/unpack.h"

namespace umbra {
namespace {

constexpr int kSteps = 64;   // blocks of 32 columns at once: their weights and one tile's activations take 72 KB
constexpr int kTokens = 16;  // activation rows of a tile
constexpr int kFew = 8;      // of a smaller one
constexpr int kTiles = 4;    // tiles of activation rows that meet the same unpacked weights
constexpr int kTurns = 4;    // tiles of sums that take turns; weights are unpacked so many steps ahead
constexpr int kFar = 6144;   // bytes of weights that are fetched ahead

// Of products. Tiles 0 .. 3: sums. 4, 5: activations. 6, 7: weights.
constexpr TileShapes products_of(uint8_t tokens) {
    return {1, 0, {}, {64, 64, 64, 64, kBlock, kBlock, 64, 64}, {tokens, tokens, tokens, tokens, tokens, tokens, 8, 8}};
}

struct alignas(64) Weights {  // columns of one row block, unpacked
    int8_t q[kSteps][kBlock / 4][kRows][4];
    float scales[kSteps][kRows];
    float lowest[kSteps][kRows];  // of q4_k and q5_k: an eighth of minimums
};

struct alignas(64) Activations {  // the same columns of kTokens rows
    int8_t q[kSteps][kTokens][kBlock];
    float scales[kSteps][kTokens];
    float starts[kSteps][kTokens];
};

using Dots = int32_t[kTokens][kRows];

INLINE __m512 halves(const uint16_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
INLINE __m512i bytes(const uint8_t* at) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

// Whether bytes less any zero points have a sign and 7 bits.
constexpr bool any_zeros(Format f) { return traits_of(f).zeros() && traits_of(f).most() < 128; }

// Unpacks the weights of one row block, 32 columns at a time.
template <Format F>
struct Unpacking {
    const Matrix& w;
    const uint8_t* plane;
    const uint16_t* of_block;
    int64_t column;
    size_t group;  // of 16 scales
    int left, per_group;

    INLINE Unpacking(const Matrix& w, int block, int first)
        : w(w), plane(w.quants + block * w.quant_stride() + static_cast<size_t>(first) * kTraits<F>.block_bytes()),
          of_block(w.scales + block * w.scale_count()), column(static_cast<int64_t>(first) * kBlock),
          group((static_cast<size_t>(block) * (w.k / w.group) + first / (w.group / kBlock)) * kRows),
          left(w.group / kBlock - first % (w.group / kBlock)), per_group(w.group / kBlock) {}

    INLINE void step(Weights& to, int s) {
        constexpr FormatTraits kOf = kTraits<F>;
        constexpr int kBytes = kOf.block_bytes();
        if (left == 0) left = per_group, group += kRows;
        left--;
        if (kOf.nested()) {
            for (int which = 0; which < kOf.scale_bytes(); which++) {
                __m512i scale = bytes(w.nested_bytes(of_block, column, which));
                if (!kOf.minimums()) scale = _mm512_srai_epi32(_mm512_slli_epi32(scale, 24), 24);
                __m512 own = halves(w.nested_halves(of_block, column, which));
                if (which) own = _mm512_mul_ps(own, _mm512_set1_ps(0.125f));
                _mm512_store_ps(which ? to.lowest[s] : to.scales[s], _mm512_mul_ps(own, _mm512_cvtepi32_ps(scale)));
            }
        } else {
            __m512 scale;
            if (kOf.scales == Scales::exponents) {  // e8m0_to_float
                const __m512i e = bytes(w.exponents(0) + group);
                const __m512i bits = _mm512_max_epu32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(1 << 22));
                scale = _mm512_castsi512_ps(bits);
            } else if (kOf.scales == Scales::floats) {
                scale = _mm512_loadu_ps(w.float_scales(0) + group);
            } else {
                scale = halves(w.scales + group);
                _mm_prefetch(reinterpret_cast<const char*>(w.scales + group) + kFar / 8, _MM_HINT_T0);
            }
            if (kOf.unit != 1) scale = _mm512_mul_ps(scale, _mm512_set1_ps(kOf.unit));
            _mm512_store_ps(to.scales[s], scale);
        }
        constexpr int8_t kZero = static_cast<int8_t>(kOf.middle);
        __m512i zero = _mm512_set1_epi8(kZero);
        if (any_zeros(F) && w.zeros) zero = _mm512_mullo_epi32(bytes(w.zeros + group), _mm512_set1_epi32(0x01010101));
#pragma GCC unroll 8
        for (int i = 0; i < kBytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(plane + kFar + i), _MM_HINT_T0);
        __m512i v[8];
        unpack<F>(plane, v);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) _mm512_store_si512(to.q[s][i], kZero ? _mm512_sub_epi8(v[i], zero) : v[i]);
        plane += kBytes;
        column += kBlock;
    }
};

// What steps `from` .. `end` - 1 lack of weights or activations adds nothing.
template <class Part>
void clear(Part& of, int from, int end) {
    for (int s = from; s < end; s++) {
        std::memset(of.q[s], 0, sizeof of.q[s]);
        if constexpr (std::is_same_v<Part, Weights>) {
            std::memset(of.scales[s], 0, sizeof of.scales[s]);
            std::memset(of.lowest[s], 0, sizeof of.lowest[s]);
        } else {
            std::memset(of.scales[s], 0, sizeof of.scales[s]);
            std::memset(of.starts[s], 0, sizeof of.starts[s]);
        }
    }
}

// `count` activation rows. The others of a tile are whatever was there, times zero.
__attribute__((noinline)) TARGET void gather(const Block* const* rows, int count, int steps, Activations& to) {
    for (int t = 0; t < count; t++)
        for (int s = 0; s < steps; s++) {
            const Block* from = rows[t] + s;
            std::memcpy(to.q[s][t], from->q, kBlock);
            to.scales[s][t] = from->scale;
            to.starts[s][t] = static_cast<float>(from->start);
        }
    for (int s = 0; count < kTokens && s < steps; s++)
        for (int t = count; t < kTokens; t++) to.scales[s][t] = to.starts[s][t] = 0;
}

template <Format F>
INLINE __m512 added(__m512 scale, __m512 lowest, float factor, float start, const int32_t* dots, __m512 sum) {
    const __m512 of_row = _mm512_set1_ps(factor), dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots));
    if (!kTraits<F>.minimums()) return _mm512_fmadd_ps(_mm512_mul_ps(scale, of_row), dot, sum);
    return _mm512_fmadd_ps(_mm512_fmadd_ps(lowest, _mm512_set1_ps(start), _mm512_mul_ps(scale, dot)), of_row, sum);
}

template <Format F, int... T>
INLINE void add(const Dots& dots, const Weights& weights, const Activations& x, int step, __m512 (&sums)[sizeof...(T)],
                std::integer_sequence<int, T...>) {
    const __m512 scale = _mm512_load_ps(weights.scales[step]);
    const __m512 lowest = kTraits<F>.minimums() ? _mm512_load_ps(weights.lowest[step]) : scale;
    ((sums[T] = added<F>(scale, lowest, x.scales[step][T], x.starts[step][T], dots[T], sums[T])), ...);
}

// Step `i` + Turn, of `steps`. The first kTurns steps have no sums to add yet.
template <Format F, bool Fresh, bool First, int Turn, int Tokens>
INLINE void step(Unpacking<F>& from, int i, int steps, Weights& weights, const Activations& x, Dots* dots,
                 __m512 (&sums)[Tokens]) {
    constexpr int kSum = Turn, kX = 4 + Turn % 2, kW = 6 + Turn % 2, kStored = (Turn + 2) % kTurns;
    if (Fresh && i + Turn + kTurns < steps) from.step(weights, i + Turn + kTurns);
    tile_load<kW>(weights.q[i + Turn], 64);
    tile_load<kX>(x.q[i + Turn], kBlock);
    tile_zero<kSum>();
    tile_dot_int8<kSum, kX, kW>();
    if (!First || Turn >= 2) tile_store<kStored>(dots[kStored], 64);
    if (!First) add<F>(dots[Turn], weights, x, i + Turn - kTurns, sums, std::make_integer_sequence<int, Tokens>{});
}

template <Format F, bool Fresh, bool First, int Tokens>
INLINE void turn(Unpacking<F>& from, int i, int steps, Weights& weights, const Activations& x, Dots* dots,
                 __m512 (&sums)[Tokens]) {
    step<F, Fresh, First, 0>(from, i, steps, weights, x, dots, sums);
    step<F, Fresh, First, 1>(from, i, steps, weights, x, dots, sums);
    step<F, Fresh, First, 2>(from, i, steps, weights, x, dots, sums);
    step<F, Fresh, First, 3>(from, i, steps, weights, x, dots, sums);
}

template <int... T>
INLINE void begin(bool more, int count, const float* y, size_t stride, __m512 (&sums)[sizeof...(T)],
                  std::integer_sequence<int, T...>) {
    ((sums[T] = more && T < count ? _mm512_loadu_ps(y + T * stride) : _mm512_setzero_ps()), ...);
}

template <int... T>
INLINE void put(int count, float* y, size_t stride, const __m512 (&sums)[sizeof...(T)],
                std::integer_sequence<int, T...>) {
    ((T < count ? _mm512_storeu_ps(y + T * stride, sums[T]) : void()), ...);
}

// One row block and `count` activation rows of a tile of `Tokens` over `steps` blocks of columns, a multiple of kTurns
// after clear(). Fresh: the first `unpacked` of them are unpacked on the way. The sums are added to y if there are `more`
// columns before.
template <Format F, bool Fresh, int Tokens>
__attribute__((noinline)) TARGET void pass(Unpacking<F>& from, int unpacked, int steps, Weights& weights,
                                           const Activations& x, bool more, int count, float* y, size_t stride) {
    constexpr auto rows = std::make_integer_sequence<int, Tokens>{};
    alignas(64) Dots dots[kTurns];
    __m512 sums[Tokens];
    begin(more, count, y, stride, sums, rows);
    if (Fresh)
        for (int s = 0; s < std::min(kTurns, unpacked); s++) from.step(weights, s);
    turn<F, Fresh, true>(from, 0, unpacked, weights, x, dots, sums);
    for (int i = kTurns; i < steps; i += kTurns) turn<F, Fresh, false>(from, i, unpacked, weights, x, dots, sums);
    tile_store<2>(dots[2], 64);
    tile_store<3>(dots[3], 64);
    add<F>(dots[0], weights, x, steps - 4, sums, rows);
    add<F>(dots[1], weights, x, steps - 3, sums, rows);
    add<F>(dots[2], weights, x, steps - 2, sums, rows);
    add<F>(dots[3], weights, x, steps - 1, sums, rows);
    put(count, y, stride, sums, rows);
}

// Up to kTiles * kTokens activation rows.
template <Format F>
TARGET void tiles_pass(const Matrix& w, int block, int blocks, const Rows& rows, const int32_t* index, int count,
                       float* y, size_t stride) {
    const bool few = count <= kFew;
    const Tiles configured(few ? products_of(kFew) : products_of(kTokens));
    const int columns = w.k / kBlock, tiles = (count + kTokens - 1) / kTokens;
    Weights weights;
    Activations x[kTiles];
    for (int first = 0; first < columns; first += kSteps) {
        const int filled = std::min(kSteps, columns - first), steps = (filled + kTurns - 1) / kTurns * kTurns;
        clear(weights, filled, steps);
        for (int tile = 0; tile < tiles; tile++) {
            const Block* from[kTokens];
            const int of_tile = std::min(kTokens, count - tile * kTokens);
            for (int t = 0; t < of_tile; t++) {
                const int at = tile * kTokens + t;
                from[t] = rows.blocks + static_cast<size_t>(index ? index[at] : at) * columns + first;
            }
            clear(x[tile], filled, steps);
            gather(from, of_tile, filled, x[tile]);
        }
        for (int b = 0; b < blocks; b++) {
            Unpacking<F> from(w, block + b, first);
            for (int tile = 0; tile < tiles; tile++) {
                const auto run = few ? pass<F, true, kFew> : tile ? pass<F, false, kTokens> : pass<F, true, kTokens>;
                const int of_tile = std::min(kTokens, count - tile * kTokens);
                run(from, filled, steps, weights, x[tile], first, of_tile, y + tile * kTokens * stride + b * kRows,
                    stride);
            }
        }
    }
}

// Fewer rows than this, beyond whole tiles, are faster in avx512.cpp.
template <Format F>
constexpr int kLeast = kTraits<F>.bytes() ? 9 : 7;

template <Format F>
void several(const Matrix& w, int block, int blocks, const Rows& rows, const int32_t* index, int count, float* y,
             size_t stride) {
    int rest = count % kTokens < kLeast<F> ? count % kTokens : 0;
    if (!any_zeros(F) && w.zeros) rest = count;
    const int tiled = count - rest;
    for (int at = 0; at < tiled; at += kTiles * kTokens)
        tiles_pass<F>(w, block, blocks, index ? rows : rows.from(at, w.k), index ? index + at : nullptr,
                      std::min(kTiles * kTokens, tiled - at), y + at * stride, stride);
    if (rest)
        kernels_avx512().several[static_cast<int>(F)](w, block, blocks, index ? rows : rows.from(tiled, w.k),
                                                      index ? index + tiled : nullptr, rest, y + tiled * stride,
                                                      stride);
}

template <Format F>
void product(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y, size_t stride) {
    several<F>(w, block, 1, rows, index, count, y, stride);
}

// Of attention. Tiles 0 .. 3: sums of two times 16 rows by two times 16 columns. 4, 5: a first and a second operand of
// 16 pairs, for scores. 6, 7: of 8 pairs, for values.
constexpr TileShapes kAttention{1, 0, {}, {64, 64, 64, 64, 64, 64, 32, 64}, {16, 16, 16, 16, 16, 16, 16, 8}};

struct TileDot : Bf16Dot {
    static constexpr int kKeysAtOnce = 16;
    template <class T>
    static constexpr bool takes() {
        return std::is_same_v<T, Bf16>;
    }

    static void product(bool fresh, int64_t rows, const Bf16* a, int64_t a_stride, const Run<Bf16>* runs, int count,
                        int64_t shift, int64_t step, int64_t second, float* c, int64_t c_stride, const Ahead& ahead) {
        const auto pass = fresh ? multiply_rows<true, 16, 4, 5> : multiply_rows<false, 8, 6, 7>;
        for (int64_t r = 0; r < rows; r += 2 * kTokens)
            pass(rows - r > kTokens, a + r * a_stride, a_stride, runs, count, shift, step, second, c + r * c_stride,
                 c_stride, r ? nullptr : &ahead);
    }

private:
    // 16 rows of c, or `both` 16, in tiles of `Steps` pairs. What lies beyond the last row is computed too: operands have
    // memory for kMostRows.
    template <bool Fresh, int Steps, int A, int B>
    static void multiply_rows(bool both, const Bf16* a, int64_t a_stride, const Run<Bf16>* runs, int count,
                              int64_t shift, int64_t step, int64_t second, float* c, int64_t c_stride,
                              const Ahead* ahead) {
        const size_t a_bytes = a_stride * sizeof(Bf16), b_bytes = step * sizeof(Bf16),
                     c_bytes = c_stride * sizeof(float);
        const Bf16* next_a = a + kTokens * a_stride;
        float* next_c = c + kTokens * c_stride;
        start<Fresh, 0>(c, c_bytes);
        start<Fresh, 1>(c + kLanes, c_bytes);
        if (both) {
            start<Fresh, 2>(next_c, c_bytes);
            start<Fresh, 3>(next_c + kLanes, c_bytes);
        }
        int64_t line = 0;
        for (const Run<Bf16>* run = runs; run < runs + count; run++) {
            const Bf16* at = run->at + shift;
            for (int64_t s = 0; s < run->steps; s += Steps, at += Steps * step, a += 2 * Steps, next_a += 2 * Steps) {
                for (const int64_t end = line + Steps; ahead && line < end; line++) {
                    __builtin_prefetch(ahead->first + line * ahead->stride);
                    __builtin_prefetch(ahead->second + line * ahead->stride);
                }
                tile_load<A>(a, a_bytes);
                tile_load<B>(at, b_bytes);
                tile_dot_bf16<0, A, B>();
                if (both) {
                    tile_load<A>(next_a, a_bytes);
                    tile_dot_bf16<2, A, B>();
                    tile_load<B>(at + second, b_bytes);
                    tile_dot_bf16<3, A, B>();
                    tile_load<A>(a, a_bytes);
                } else {
                    tile_load<B>(at + second, b_bytes);
                }
                tile_dot_bf16<1, A, B>();
            }
        }
        tile_store<0>(c, c_bytes);
        tile_store<1>(c + kLanes, c_bytes);
        if (both) {
            tile_store<2>(next_c, c_bytes);
            tile_store<3>(next_c + kLanes, c_bytes);
        }
    }

    template <bool Fresh, int Tile>
    static void start(const float* c, size_t stride) {
        Fresh ? tile_zero<Tile>() : tile_load<Tile>(c, stride);
    }
};

template <class T>
void attend_tiles(const Attention& a, const Span& span) {
    if (a.width % kColumns) return attend<Bf16Dot, T>(a, span);
    const Tiles configured(kAttention);
    attend<TileDot, T>(a, span);
}

}  // namespace

const Kernels& kernels_amx() {
    static const Kernels kernels = [] {
        Kernels all = kernels_avx512_bf16();
        all.name = "amx";
        each_format([&](auto format) {
            constexpr Format F = decltype(format)::value;
            if constexpr (kTraits<F>.quantised() && !kTraits<F>.sixteens() && !kTraits<F>.records())
                all.put(F, product<F>, several<F>);
        });
        all.attend[static_cast<int>(Type::bf16)] = attend_tiles<Bf16>;
        all.attend[static_cast<int>(Type::i8)] = attend_tiles<int8_t>;
        return all;
    }();
    return kernels;
}

}  // namespace umbra
