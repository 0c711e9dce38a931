// Weight matrices and activations as the kernels read them.
//
// A matrix W (n rows, k columns; y = W x) is stored by blocks of 16 rows, "x16": lane r of a vector is row r of the
// block, so a dot product needs no horizontal sum, 16 scales are one load, and an activation is one broadcast.
// n is padded to a multiple of 16 with zero rows; quantised formats need k to be a multiple of 32 and of the group.
//
//   format     quants, for each row block and each 32 columns                         scales, zeros (own planes)
//   f32, bf16, f16   [columns][16 rows]                                                -
//   f8         [columns][16 rows], each byte an e4m3 float                              f32 [k/group][16]
//   q8         8 vectors of 64 bytes: vector i = columns 4i .. 4i+3 of row 0, row 1,    fp16 [k/group][16]
//              ... row 15, each byte value + 128
//   w8a8       as q8                                                                    f32 [k/group][16]
//   q4         4 vectors of 64 bytes: the low nibbles of vector i hold columns          fp16 [k/group][16];
//              4i .. 4i+3, the high nibbles columns 16+4i .. 16+4i+3                    zeros u8 [k/group][16], or none:
//                                                                                       the zero point is 8
//   mxfp4      as q4; a nibble is the code of an e2m1 float                             e8m0 u8 [k/32][16]
//   nvfp4      as mxfp4                                                                f32 [16] of rows, then
//                                                                                      [k/32] of two scales e4m3 [16]
//   q4_k       as q4                                                                   [k/group] of d, dmin fp16 [16] and
//                                                                                      [group/32] of scale, minimum u8 [16]
//   q5_k       as q4, then a vector whose byte 4r + c % 4 has the fifth bit of row r,   the same
//              column c as its bit c / 4
//   q6_k       as q4, then two vectors, of 16 columns each, whose byte 4r + c % 4 has   [k/group] of d fp16 [16] and
//              bits 4 and 5 of row r, column c, the lower as its bit 2(c / 4 % 4)       [group/32] of two scales i8 [16]
//   iq4        as q4; a nibble is the code of one of 16 levels                          the same with one scale
//   w = (quant - zero) * scale; in f8 and mxfp4, w = value * scale, in nvfp4 value * scale * that of the row. Activations
//   of f8 stay floats, as those of float formats; sets with products of bfloat16 round those of bf16 to it.
//   In the last four, GGUF's, whose `group` are the columns that share d: w = d * scale * quant - dmin * minimum in q4_k
//   and q5_k, d * scale * (quant - 32) with a scale for each 16 columns in q6_k, d * scale * level in iq4.
//   Any matrix may have a bias, float [n] in a plane of its own, which mixtures of experts add to their products.
//
// This is the order of q8 and q4 for x86; ARM's sets have their own (Order): signed quants, with the top bit of each
// flipped, and for i8mm eight columns of a row side by side: vectors of 128 bytes with columns 8i .. 8i+7.
//
// An activation row is quantised to int8 for every 32 columns: x = q * scale, scale = max|x| / 127.
// With sums of q kept, sum((quant - zero) * q) = sum(quant * q) - zero * sum(q), all exact in int32:
// |quant * q| <= 255 * 127, 32 products stay far below 2^31. So every instruction set gives the same integers, and
// results differ only in the order of float additions.
//
// Error bound of one product sum: the activation's rounding is at most scale / 2 for each element, so
// |error| <= sum over blocks of max|x_block| / 254 * sum|w_block|, beside the weight's own quantisation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/formats.h"

namespace umbra {

// The order of q8's bytes and of nibbles in memory. A matrix has that of the kernels it was packed for, and only they can read it; the
// generic kernels read all.
enum class Order : int32_t { fours = 0, signed_fours = 1, signed_eights = 2 };

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

struct Matrix {
    Format format{};
    Order order = Order::fours;
    int32_t n = 0;  // rows, padded to a multiple of 16
    int32_t k = 0;
    int32_t group = 0;                 // columns that share a scale; formats with scales only
    const uint8_t* quants = nullptr;   // 64-byte aligned
    const uint16_t* scales = nullptr;  // halves; floats, bytes, or halves and bytes, as the format's traits say
    const uint8_t* zeros = nullptr;
    const float* bias = nullptr;  // (n), or null

    const FormatTraits& traits() const { return traits_of(format); }
    bool quantised() const { return traits().quantised(); }
    size_t block_bytes() const { return traits().block_bytes(); }

    // Bytes of one row block in each plane.
    size_t quant_stride() const {
        const size_t weights = static_cast<size_t>(k) * kRows;
        if (!quantised()) return weights * traits().bits / 8;
        return weights / (kRows * kBlock) * block_bytes();
    }
    // Of one row block, in units of two bytes.
    size_t scale_count() const {
        const size_t scales_of_block = group ? static_cast<size_t>(k) / group * kRows : 0;
        const size_t bytes = static_cast<size_t>(k) / kBlock * traits().scale_bytes() * kRows;
        if (traits().nested()) return scales_of_block * traits().scale_halves() + bytes / 2;
        if (traits().f8_scales()) return 2 * kRows + bytes / 2;
        if (traits().expanded()) return bytes * 2;
        if (traits().scales == Scales::floats) return scales_of_block * 2;
        return traits().scales == Scales::exponents ? scales_of_block / 2 : scales_of_block;
    }
    // Of a row block's nested scales: the 16 halves of number `which` of the group that column c is in, and the bytes
    // of its 32 columns, which e4m3 floats of 16 columns are too.
    const uint16_t* nested_halves(const uint16_t* of_block, int64_t c, int which) const {
        const int of_group = traits().scale_halves() * kRows + group / kBlock * traits().scale_bytes() * kRows / 2;
        return of_block + c / group * of_group + which * kRows;
    }
    const uint8_t* nested_bytes(const uint16_t* of_block, int64_t c, int which) const {
        if (traits().f8_scales()) return f8_scales(of_block) + (2 * (c / kBlock) + which) * kRows;
        const uint8_t* first = reinterpret_cast<const uint8_t*>(nested_halves(of_block, c, traits().scale_halves()));
        return first + (c % group / kBlock * traits().scale_bytes() + which) * kRows;
    }
    static const uint8_t* f8_scales(const uint16_t* of_block) {  // behind the rows' floats
        return reinterpret_cast<const uint8_t*>(of_block + 2 * kRows);
    }
    const float* float_scales(int64_t block) const {
        return reinterpret_cast<const float*>(scales + block * scale_count());
    }
    const uint8_t* exponents(int64_t block) const {
        return reinterpret_cast<const uint8_t*>(scales + block * scale_count());
    }

    // Matrix `index` of those that follow this one in each plane.
    Matrix at(int64_t index) const {
        Matrix one = *this;
        const int64_t block = index * (n / kRows);
        one.quants += block * quant_stride();
        if (scales) one.scales += block * scale_count();
        if (zeros) one.zeros += block * scale_count();
        if (bias) one.bias += index * n;
        return one;
    }

    // This matrix at `address`, its planes' pointers being offsets.
    Matrix moved(int64_t address) const {
        const auto move = [&](auto*& plane) {
            const uintptr_t at = reinterpret_cast<uintptr_t>(plane) + static_cast<uintptr_t>(address);
            plane = reinterpret_cast<std::remove_reference_t<decltype(plane)>>(at);
        };
        Matrix one = *this;
        move(one.quants);
        if (scales) move(one.scales);
        if (zeros) move(one.zeros);
        if (bias) move(one.bias);
        return one;
    }
};

// A matrix whose row blocks are divided over the NUMA nodes of the pool: parts[i], a complete matrix, lies on node i
// and is read by that node's threads only. Every expert is divided this way. Rejected: whole experts per node. The 8 of
// 128 experts that a token hits would fall unevenly, and every node would wait for the fullest one, whose load is on
// average 1.26, 1.74 and 2.53 times the mean on 2, 4 and 8 nodes. The price: activations cross between nodes, which are
// kilobytes beside megabytes of weights.
struct SplitMatrix {
    std::vector<Matrix> parts;
    std::vector<int32_t> first{0};  // first row block of each part, and the end of the last one

    SplitMatrix(const Matrix& whole) : SplitMatrix(std::vector<Matrix>{whole}) {}
    explicit SplitMatrix(std::vector<Matrix> of) : parts(std::move(of)) {
        for (const Matrix& part : parts) first.push_back(first.back() + part.n / kRows);
    }
    const Matrix& like() const { return parts[0]; }  // any part, for format, columns and group, which are equal in all
    int blocks() const { return first.back(); }
    // The part of matrix `index` that has row block `block`, and its number in the part.
    std::pair<Matrix, int64_t> at(int64_t index, int64_t block) const {
        size_t node = 0;
        while (block >= first[node + 1]) node++;
        return {parts[node].at(index), block - first[node]};
    }
    int blocks(int node) const { return first[node + 1] - first[node]; }
};

// 32 quantised activations with their scale and sum, so that a row is one stream with one address register.
struct Block {
    int8_t q[kBlock];
    float scale;
    int32_t start;  // -8 * sum of q: the start of q4 sums, whose zero point is 8 unless the matrix has zero points
    int32_t first;  // the same of the first 16

    int32_t sum() const { return -(start >> 3); }
};

// Activation rows of k columns. `x` is read by float formats, `blocks` by quantised ones.
struct Rows {
    const float* x = nullptr;       // (rows, k)
    const Block* blocks = nullptr;  // (rows, k / 32)

    Rows from(int64_t row, int64_t k) const { return {x + row * k, blocks + row * (k / kBlock)}; }
};

// Writes y[t * stride + r] for the 16 rows of block `block` and `count` activation rows. `index` holds their numbers in
// `rows`; null means 0, 1, 2 ... A row's results do not depend on the other rows.
using Product = void (*)(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                         size_t stride);
// The same for `blocks` neighbouring row blocks, the results of each after those of the one before; the same bits.
using Products = void (*)(const Matrix& w, int block, int blocks, const Rows& rows, const int32_t* index, int count,
                          float* y, size_t stride);
// Quantises `count` blocks of 32 floats.
using Quantise = void (*)(const float* x, int count, Block* to);

// Attention of some tokens over one KV head (attention.h); in floats, for each type of cache.
struct Attention;
struct Span;
using Attend = void (*)(const Attention&, const Span&);
void attend_f32(const Attention&, const Span&);
void attend_bf16(const Attention&, const Span&);
void attend_f16(const Attention&, const Span&);
void attend_i8(const Attention&, const Span&);
// The same over latents.
void attend_latents_f32(const Attention&, const Span&);
void attend_latents_bf16(const Attention&, const Span&);
void attend_latents_f16(const Attention&, const Span&);
void attend_latents_i8(const Attention&, const Span&);

// Attention over latents in its expanded form (expanded.h).
struct ExpandedSteps;
extern const ExpandedSteps expanded_f32, expanded_bf16, expanded_f16, expanded_i8;

// What products of matrices in slots need besides (slots.h).
struct SlotKernels;
extern const SlotKernels slots_generic, slots_avx2, slots_avx512, slots_neon;

// The gated delta rule of one sequence and value head, in a slab of columns from `column` on (delta.h).
struct GatedDelta;
using Delta = void (*)(const GatedDelta&, int64_t sequence, int64_t head, int64_t column);
void delta_of_four(const GatedDelta&, int64_t sequence, int64_t head, int64_t column);

struct Kernels {
    const char* name;
    Quantise quantise;
    Product product[kFormats] = {};
    Products several[kFormats] = {};                                      // or null: one row block after the other
    Attend attend[4] = {attend_f32, attend_bf16, attend_f16, attend_i8};  // by Type
    Attend latents[4] = {attend_latents_f32, attend_latents_bf16, attend_latents_f16, attend_latents_i8};
    const ExpandedSteps* expanded[4] = {&expanded_f32, &expanded_bf16, &expanded_f16, &expanded_i8};
    Delta delta = delta_of_four;
    const SlotKernels* slots = &slots_generic;
    Order order = Order::fours;  // of the matrices that `product` reads

    void put(Format format, Product one, Products more = nullptr) {
        product[static_cast<int>(format)] = one;
        several[static_cast<int>(format)] = more;
    }
};

// What each byte is changed by where quants are signed.
inline uint8_t sign_bits(const FormatTraits& traits, Order order) {
    if (order == Order::fours) return 0;
    return traits.bytes() ? 0x80 : traits.plain_nibbles() ? 0x88 : 0;
}

// The quant of row r, column c in a block of 32 columns, as x86 has it: a code in formats of codes.
inline int quant_at(const FormatTraits& traits, Order order, const uint8_t* block, int r, int c) {
    const int shift = order == Order::signed_eights ? 3 : 2;  // 8 or 4 columns side by side
    const int column = traits.bytes() ? c : c % 16, within = column & ((1 << shift) - 1);
    const int byte = block[(column - within) * kRows + (r << shift) + within] ^ sign_bits(traits, order);
    if (traits.bytes()) return byte;
    const int low = c < 16 ? byte & 15 : byte >> 4, bits = traits.high_bits();
    if (!bits) return low;
    const int four = c / 4, each = 8 / bits;  // columns of a byte
    const int high = block[256 + four / each * 64 + 4 * r + c % 4] >> four % each * bits & ((1 << bits) - 1);
    return high << 4 | low;
}
// The byte that it stands for.
inline int byte_at(const FormatTraits& traits, Order order, const uint8_t* block, int r, int c) {
    return traits.byte_of(quant_at(traits, order, block, r, c));
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
    union {
        uint32_t u;
        float f;
    } v;
    if (rest >= 0x7c00) {
        v.u = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else {
        v.u = rest << 13;               // exponent re-biased by one exact multiplication; subnormals come out right
        v.f *= 5.192296858534828e+33f;  // 2^112
        v.u |= sign;
    }
    return v.f;
}

inline float bf16_to_float(uint16_t b) {
    union {
        uint32_t u;
        float f;
    } v{static_cast<uint32_t>(b) << 16};
    return v.f;
}

// The bits of an e4m3 float stand in those of a half with the bias 15 in place of 7: the half is 2^-8 of the value.
constexpr float kF8Unit = 256.0f;
inline float f8_to_float(uint8_t b) {
    return half_to_float(static_cast<uint16_t>((b & 0x80) << 8 | (b & 0x7f) << 7)) * kF8Unit;
}

// The type of a float format's weights.
template <Format F>
using Stored = std::conditional_t<kTraits<F>.storage == Storage::f32, float,
                                  std::conditional_t<kTraits<F>.storage == Storage::bf16, Bf16, F16>>;

inline float widen(float v) { return v; }
inline float widen(int8_t v) { return v; }
inline float widen(Bf16 v) { return bf16_to_float(v.bits); }
inline float widen(F16 v) { return half_to_float(v.bits); }

// To nearest even, overflow to infinity.
inline uint16_t float_to_half(float f) {
    union {
        float f;
        uint32_t u;
    } v{f};
    const uint32_t sign = v.u >> 16 & 0x8000;
    v.u &= 0x7fffffff;
    if (v.u > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (v.u >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (v.u < 0x38800000) {  // subnormal: let the adder round at the right place
        v.f += 0.5f;
        return static_cast<uint16_t>(sign | (v.u - 0x3f000000));
    }
    return static_cast<uint16_t>(sign | (v.u - 0x38000000 + 0xfff + (v.u >> 13 & 1)) >> 13);
}

const Kernels& kernels_generic();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx_vnni();
const Kernels& kernels_avx512();
const Kernels& kernels_avx512_bf16();
const Kernels& kernels_amx();
#elif defined(__aarch64__)
const Kernels& kernels_neon();
const Kernels& kernels_i8mm();
#endif

}  // namespace umbra
