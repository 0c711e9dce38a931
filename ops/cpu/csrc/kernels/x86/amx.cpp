// AMX: quantised products of many activation rows, with tiles of int8, and attention, with tiles of bfloat16. Products
// of fewer rows, and of floats, are as in avx512.cpp.
//
// Products. Eight vectors of 64 bytes, which are a block of 32 columns of 16 weight rows (matrix.h), are a second operand
// as they are. So one tile product gives the integer sums of 16 activation rows by 16 weight rows over the 32 columns
// that share a scale; they are stored, scaled and added in float in the same order as in avx512.cpp: results have the
// same bits.
//
// Weights are unpacked, less their zero points, which leaves signed bytes: -15 .. 15 of q4, -12 .. 12 of mxfp4, -128 .. 127 of q8 and w8a8 (q8 with
// zero points of its own can be more, and stays with avx512.cpp). Of GGUF's formats, minimums are added to the scaled
// sums; formats with scales for 16 columns stay with avx512.cpp. One chunk of columns of some row blocks is unpacked,
// then meets all activation rows: 9 KB of weights, 5 of activations and 8 of sums stay in the first cache. The tiles of
// one 16 x 16 unit of results are multiplied while the vector units scale those of the unit before.
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

constexpr int kSteps = 4;    // blocks of 32 columns in a chunk
constexpr int kTokens = 16;  // activation rows of a tile: fewer are faster in avx512.cpp
constexpr int kBlocks = 4;   // row blocks at once

// Of products. Tiles 0 .. 3: activations of each step. 4, 5: sums. 6, 7: weights.
constexpr TileShapes kProducts{1,
                               0,
                               {},
                               {kBlock, kBlock, kBlock, kBlock, 64, 64, 64, 64},
                               {kTokens, kTokens, kTokens, kTokens, kTokens, kTokens, 8, 8}};

struct alignas(64) Weights {  // a chunk of one row block
    int8_t q[kSteps][kBlock / 4][kRows][4];
    float scales[kSteps][kRows];
    float lowest[kSteps][kRows];  // of q4_k and q5_k: an eighth of minimums
};

struct alignas(64) Activations {  // a chunk of kTokens rows
    int8_t q[kSteps][kTokens][kBlock];
    float scales[kSteps][kTokens];
    float starts[kSteps][kTokens];
};

struct alignas(64) Sums {
    int32_t of[kSteps][kTokens][kRows];
};

INLINE __m512 halves(const uint16_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
INLINE __m512i bytes(const uint8_t* at) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

// Whether bytes less any zero points have a sign and 7 bits.
constexpr bool any_zeros(Format f) { return traits_of(f).zeros() && traits_of(f).most() < 128; }

template <Format F>
__attribute__((noinline)) TARGET void unpack(const Matrix& w, int block, int first, int steps, Weights& to) {
    constexpr FormatTraits kOf = kTraits<F>;
    constexpr int kBytes = kOf.block_bytes();
    const uint8_t* plane = w.quants + block * w.quant_stride() + static_cast<size_t>(first) * kBytes;
    const int per_group = w.group / kBlock;
    size_t group = (static_cast<size_t>(block) * (w.k / w.group) + first / per_group) * kRows;
    int left = per_group - first % per_group;
    for (int s = 0; s < steps; s++, plane += kBytes) {
        if (left == 0) left = per_group, group += kRows;
        left--;
        if (kOf.nested()) {
            const uint16_t* of_block = w.scales + block * w.scale_count();
            const int64_t c = static_cast<int64_t>(first + s) * kBlock;
            for (int which = 0; which < kOf.scale_bytes(); which++) {
                __m512i scale = bytes(w.nested_bytes(of_block, c, which));
                if (!kOf.minimums()) scale = _mm512_srai_epi32(_mm512_slli_epi32(scale, 24), 24);
                __m512 own = halves(w.nested_halves(of_block, c, which));
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
            }
            if (kOf.unit != 1) scale = _mm512_mul_ps(scale, _mm512_set1_ps(kOf.unit));
            _mm512_store_ps(to.scales[s], scale);
        }
        constexpr int8_t kZero = static_cast<int8_t>(kOf.middle);
        __m512i zero = _mm512_set1_epi8(kZero);
        if (any_zeros(F) && w.zeros) zero = _mm512_mullo_epi32(bytes(w.zeros + group), _mm512_set1_epi32(0x01010101));
        for (int i = 0; i < kBytes; i += 64)
            _mm_prefetch(reinterpret_cast<const char*>(plane + kSteps * kBytes + i), _MM_HINT_T0);
        __m512i v[8];
        unpack<F>(plane, v);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) _mm512_store_si512(to.q[s][i], kZero ? _mm512_sub_epi8(v[i], zero) : v[i]);
    }
    std::memset(to.q + steps, 0, (kSteps - steps) * sizeof *to.q);  // what a last chunk lacks adds nothing
    std::memset(to.scales + steps, 0, (kSteps - steps) * sizeof *to.scales);
    std::memset(to.lowest + steps, 0, (kSteps - steps) * sizeof *to.lowest);
}

__attribute__((noinline)) TARGET void gather(const Block* const* rows, int steps, Activations& to) {
    for (int s = 0; s < steps; s++)
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; t++) {
            const Block* from = rows[t] + s;
            std::memcpy(to.q[s][t], from->q, kBlock);
            to.scales[s][t] = from->scale;
            to.starts[s][t] = static_cast<float>(from->start);
        }
    std::memset(to.q + steps, 0, (kSteps - steps) * sizeof *to.q);
    std::memset(to.scales + steps, 0, (kSteps - steps) * sizeof *to.scales);
    std::memset(to.starts + steps, 0, (kSteps - steps) * sizeof *to.starts);
}

template <int Step>
inline void multiply(const Weights& weights, Sums& to) {
    constexpr int kSum = 4 + Step % 2, kWeights = 6 + Step % 2;
    tile_load<kWeights>(weights.q[Step], 64);
    tile_zero<kSum>();
    tile_dot_int8<kSum, Step, kWeights>();
    tile_store<kSum>(to.of[Step], 64);
}

template <Format F>
INLINE void add(const int32_t (&dots)[kTokens][kRows], const Weights& weights, const Activations& activations, int step,
                __m512* sums) {
    const __m512 scale = _mm512_load_ps(weights.scales[step]);
    const __m512 lowest = kTraits<F>.minimums() ? _mm512_load_ps(weights.lowest[step]) : scale;
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; t++) {
        const __m512 factor = _mm512_set1_ps(activations.scales[step][t]);
        const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots[t]));
        if (kTraits<F>.minimums()) {
            const __m512 start = _mm512_set1_ps(activations.starts[step][t]);
            sums[t] = _mm512_fmadd_ps(_mm512_fmadd_ps(lowest, start, _mm512_mul_ps(scale, dot)), factor, sums[t]);
        } else {
            sums[t] = _mm512_fmadd_ps(_mm512_mul_ps(scale, factor), dot, sums[t]);
        }
    }
}

template <int... Step>
inline void load_activations(std::integer_sequence<int, Step...>, const Activations& from) {
    (tile_load<Step>(from.q[Step], kBlock), ...);
}

template <int... Step>
inline void multiply(std::integer_sequence<int, Step...>, const Weights& weights, Sums& to) {
    (multiply<Step>(weights, to), ...);
}

// Adds a unit's products, in turn with the multiplication of the next unit's, if there is one.
template <Format F, int... Step>
INLINE void add(std::integer_sequence<int, Step...>, const Sums& dots, const Weights& weights,
                const Activations& activations, const Weights* next, Sums& next_dots, __m512* sums) {
    ((next ? multiply<Step>(*next, next_dots) : void(), add<F>(dots.of[Step], weights, activations, Step, sums)), ...);
}

// Up to kBlocks row blocks, `count` activation rows, which fill whole tiles.
template <Format F>
TARGET void tiles_pass(const Matrix& w, int block, int blocks, const Rows& rows, const int32_t* index, int count,
                       float* y, size_t stride) {
    constexpr auto steps = std::make_integer_sequence<int, kSteps>{};
    const Tiles configured(kProducts);
    const int columns = w.k / kBlock, tiles = count / kTokens;
    Weights weights[kBlocks];
    Activations activations[2];
    Sums dots[2];
    for (int first = 0; first < columns; first += kSteps) {
        const int filled = std::min(kSteps, columns - first);
        const auto take = [&](int tile) {
            const Block* from[kTokens];
            for (int t = 0; t < kTokens; t++) {
                const int at = tile * kTokens + t;
                from[t] = rows.blocks + static_cast<size_t>(index ? index[at] : at) * columns + first;
            }
            gather(from, filled, activations[tile % 2]);
        };
        for (int b = 0; b < blocks; b++) unpack<F>(w, block + b, first, filled, weights[b]);
        take(0);
        load_activations(steps, activations[0]);
        multiply(steps, weights[0], dots[0]);
        for (int tile = 0, unit = 0; tile < tiles; tile++) {
            if (tile + 1 < tiles) take(tile + 1);
            float* out = y + tile * kTokens * stride;
            for (int b = 0; b < blocks; b++, unit++) {
                const Weights* next = weights + b + 1;
                if (b + 1 == blocks) {
                    next = tile + 1 < tiles ? weights : nullptr;
                    if (next) load_activations(steps, activations[(tile + 1) % 2]);
                }
                __m512 sums[kTokens];
#pragma GCC unroll 16
                for (int t = 0; t < kTokens; t++)
                    sums[t] = first ? _mm512_loadu_ps(out + t * stride + b * kRows) : _mm512_setzero_ps();
                add<F>(steps, dots[unit % 2], weights[b], activations[tile % 2], next, dots[(unit + 1) % 2], sums);
#pragma GCC unroll 16
                for (int t = 0; t < kTokens; t++) _mm512_storeu_ps(out + t * stride + b * kRows, sums[t]);
            }
        }
    }
}

template <Format F>
void several(const Matrix& w, int block, int blocks, const Rows& rows, const int32_t* index, int count, float* y,
             size_t stride) {
    const int rest = !any_zeros(F) && w.zeros ? count : count % kTokens;
    const int tiled = count - rest;
    for (int b = 0; tiled && b < blocks; b += kBlocks)
        tiles_pass<F>(w, block + b, std::min(kBlocks, blocks - b), rows, index, tiled, y + b * kRows, stride);
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
            if constexpr (kTraits<F>.quantised() && !kTraits<F>.sixteens()) all.put(F, product<F>, several<F>);
        });
        all.attend[static_cast<int>(Type::bf16)] = attend_tiles<Bf16>;
        all.attend[static_cast<int>(Type::i8)] = attend_tiles<int8_t>;
        return all;
    }();
    return kernels;
}

}  // namespace umbra
