// Products of experts in slots (slots.h), in vectors. A file includes this once, after defining TARGET and, in namespace
// umbra: kBytes, the bytes of a vector (16, 32 or 64); kSigned, kSignedBytes, kNibbleUnit and `levels_of`, how dots take levels; `dot`;
// `load_lanes`, 16 bytes from each of kBytes / 16 places; `to_halves` and `from_halves`. Shuffles stay within 16 bytes, which
// is what x86 has and what a vector of NEON is. Everything here is internal to that file, so code compiled for one set is
// never linked into the other.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/passes.h"
#include "kernels/slots.h"

#define INLINE TARGET inline __attribute__((always_inline))
#define LAMBDA TARGET __attribute__((always_inline))  // between a lambda's parameters and its body

namespace umbra {
namespace {

constexpr int kFloats = kBytes / 4;
typedef uint8_t Bytes __attribute__((vector_size(kBytes)));
typedef uint16_t Shorts __attribute__((vector_size(kBytes)));
typedef uint32_t Words __attribute__((vector_size(kBytes)));
typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef float Floats __attribute__((vector_size(kBytes)));

// The elements of `a` and `b` in turns, of the lower or upper halves of each 16 bytes.
template <int High, class V, int... I>
INLINE void zip(const V& a, const V& b, V& to, std::integer_sequence<int, I...>) {
    constexpr int kAll = sizeof...(I), kLane = kAll / (kBytes / 16);
    to = __builtin_shuffle(a, b, V{(I / kLane * kLane + I % kLane / 2 + High * kLane / 2 + I % 2 * kAll)...});
}
template <int High, class V>
INLINE void zip(const V& a, const V& b, V& to) {
    zip<High>(a, b, to, std::make_integer_sequence<int, kBytes / sizeof(a[0])>{});
}
// Both halves, of elements of type E.
template <class E>
INLINE void zip_both(const Bytes& a, const Bytes& b, Bytes& low, Bytes& high) {
    E l, h;
    zip<0>(reinterpret_cast<E>(a), reinterpret_cast<E>(b), l);
    zip<1>(reinterpret_cast<E>(a), reinterpret_cast<E>(b), h);
    low = reinterpret_cast<Bytes>(l), high = reinterpret_cast<Bytes>(h);
}
// Of four vectors, in each 16 bytes: Small of the first, second, third, fourth, side by side.
template <class Small, class Wide>
INLINE void transpose(Bytes (&v)[4]) {
    Bytes low[2], high[2];
    if constexpr (sizeof(Small{}[0]) == 4) {  // then Wide are 8 bytes
        zip_both<Small>(v[0], v[2], low[0], high[0]);
        zip_both<Small>(v[1], v[3], low[1], high[1]);
        zip_both<Small>(low[0], low[1], v[0], v[1]);
        zip_both<Small>(high[0], high[1], v[2], v[3]);
    } else {
        zip_both<Small>(v[0], v[1], low[0], high[0]);
        zip_both<Small>(v[2], v[3], low[1], high[1]);
        zip_both<Wide>(low[0], low[1], v[0], v[1]);
        zip_both<Wide>(high[0], high[1], v[2], v[3]);
    }
}

INLINE void load(const uint8_t* at, Bytes& v) { std::memcpy(&v, at, sizeof v); }
INLINE void store(uint8_t* at, const Bytes& v) { std::memcpy(at, &v, sizeof v); }

// The lower and upper nibbles of two vectors of bytes: those of `low` to the lower halves, those of `high` to the upper.
INLINE void pair(const Bytes& low, const Bytes& high, const Bytes& flip, Bytes& even, Bytes& odd) {
    const Bytes below = Bytes{} + 15;
    const Bytes up = reinterpret_cast<Bytes>(reinterpret_cast<Shorts>(high) << 4);
    const Bytes down = reinterpret_cast<Bytes>(reinterpret_cast<Shorts>(low) >> 4);
    even = ((low & below) | (up & ~below)) ^ flip;
    odd = ((down & below) | (high & ~below)) ^ flip;
}

// Vectors of four columns side by side, two after two, to vectors of eight, which only sets of ARM read.
INLINE void to_eights(uint8_t* blocks, int64_t bytes) {
    if (kBytes > 16) return;
    for (uint8_t* at = blocks; at < blocks + bytes; at += 128) {
        uint8_t fours[128];
        std::memcpy(fours, at, 128);
        for (int i = 0; i < 64; i += kBytes) {
            Bytes a, b, low, high;
            load(fours + i, a), load(fours + 64 + i, b);
            zip_both<Words>(a, b, low, high);
            store(at + 2 * i, low), store(at + 2 * i + 16, high);
        }
    }
}

INLINE void fetch(const uint8_t* next) { __builtin_prefetch(next, 0, 2); }

// Four lines, unpacked as dots take them: of nibbles even and odd outputs in turns.
struct Nibbles {
    static constexpr int kVectors = 8, kOutputs = 2 * kBytes;  // of a strip, kBytes of a line
    static constexpr float kZero = kSigned ? 0 : 8, kUnit = kNibbleUnit;

    INLINE static void unpack(const uint8_t* at, int64_t stride, Bytes (&v)[kVectors]) {
        Bytes t[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) load(at + j * stride, t[j]);
        transpose<Bytes, Shorts>(t);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) levels_of(t[j], v[2 * j], v[2 * j + 1]);
    }
    static int output(int vector, int lane) { return lane / 4 * 32 + vector / 2 * 8 + lane % 4 * 2 + vector % 2; }
};
struct Levels {
    static constexpr int kVectors = 4, kOutputs = kBytes;
    static constexpr float kZero = kSignedBytes ? 0 : 128, kUnit = 1;

    INLINE static void unpack(const uint8_t* at, int64_t stride, Bytes (&v)[kVectors]) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) load(at + j * stride, v[j]);
        transpose<Bytes, Shorts>(v);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) v[j] = v[j] ^ (Bytes{} + static_cast<uint8_t>(kSignedBytes ? 0 : 0x80));
    }
    static int output(int vector, int lane) { return lane / 4 * 16 + vector * 4 + lane % 4; }
};

// The sums of 32 inputs for one strip and M rows.
template <class Kind, int M, class Unpack>
INLINE void add_dots(const Block* const* x, Unpack&& unpack, const Floats* scales, const Floats* offsets,
                     float* const* sums) {
    Ints dots[M][Kind::kVectors];
#pragma GCC unroll 2
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int j = 0; j < Kind::kVectors; j++) dots[m][j] = Ints{};
#pragma GCC unroll 1
    for (int i = 0; i < kBlock / 4; i++) {
        Bytes v[Kind::kVectors];
        unpack(i, v);
#pragma GCC unroll 2
        for (int m = 0; m < M; m++) {
            const Bytes of_x = reinterpret_cast<Bytes>(Ints{} + four(*x[m], i));
#pragma GCC unroll 8
            for (int j = 0; j < Kind::kVectors; j++) dot<Kind::kVectors == 4>(dots[m][j], v[j], of_x);
        }
    }
    // Zero points are subtracted in floats, where these whole numbers are exact.
#pragma GCC unroll 2
    for (int m = 0; m < M; m++) {
        const float sum = static_cast<float>(x[m]->sum()) / Kind::kUnit;
        const Floats scale = Floats{} + x[m]->scale * Kind::kUnit, less = Floats{} + Kind::kZero * sum;
#pragma GCC unroll 8
        for (int j = 0; j < Kind::kVectors; j++) {
            Floats to, whole = __builtin_convertvector(dots[m][j], Floats) - less;
            if (offsets) whole += offsets[j] * sum;
            std::memcpy(&to, sums[m] + j * kFloats, sizeof to);
            to += (scales ? scales[j] * scale : scale) * whole;
            std::memcpy(sums[m] + j * kFloats, &to, sizeof to);
        }
    }
}

// The numbers of a group for the outputs of a strip, in the order of its sums.
INLINE void numbers_of(const uint8_t* row, Type type, int64_t output, Floats* to) {
    for (int v = 0; v < 4; v++) {
        if (type == Type::f32) {
            for (int h = 0; h < 2; h++)
                for (int lane = 0; lane < kFloats; lane++)
                    to[2 * v + h][lane] =
                        reinterpret_cast<const float*>(row)[output + Nibbles::output(2 * v + h, lane)];
            continue;
        }
        Bytes bytes;
        load_lanes(row + 2 * output + 16 * v, 64, bytes);
        const Words pairs = reinterpret_cast<Words>(bytes);
        if (type == Type::bf16)
            to[2 * v] = reinterpret_cast<Floats>(pairs << 16),
                   to[2 * v + 1] = reinterpret_cast<Floats>(pairs & 0xffff0000);
        else
            from_halves(pairs & 0xffff, to[2 * v]), from_halves(pairs >> 16, to[2 * v + 1]);
    }
}

// The strips of a window are taken in turn at each 32 inputs, so that lines are read in runs.
template <class Kind>
INLINE void lines_of(const SlotWindow& window) {
    constexpr int kStrips = kSlotWindow / Kind::kOutputs;
    const SlotMatrix& w = window.w;
    const int64_t line = w.line_bytes(), blocks = w.k / kBlock, width = window.end - window.first;
    const int strips = static_cast<int>((width + Kind::kOutputs - 1) / Kind::kOutputs);
    alignas(64) float sums[kSlotRows * kSlotWindow];
    Floats scales[kStrips * 8], offsets[kStrips * 8];
    Bytes staged[kBlock / 4][Kind::kVectors];
    int64_t outputs[kStrips];  // the first of each strip; the last may overlap the one before
    const Block* rows[kSlotRows];
    for (int s = 0; s < strips; s++) outputs[s] = std::min(window.first + s * Kind::kOutputs, w.n - Kind::kOutputs);
    for (int t = 0; t < window.count; t++) rows[t] = window.rows.blocks + (window.index ? window.index[t] : t) * blocks;
    std::memset(sums, 0, sizeof(float) * window.count * kSlotWindow);
    const int64_t bits = w.bits(), bytes = w.type == Type::f32 ? 4 : 2;  // of a weight, and of a scale
    for (int64_t b = 0; b < blocks; b++) {
        const bool scaled = w.format == Format::q4;
        const int64_t group = scaled ? b * kBlock / w.group : 0, wide = group * w.n * bytes;
        for (int s = 0; s < strips; s++) {
            const uint8_t* const at = w.data + b * kBlock * line + outputs[s] * bits / 8;
            const uint8_t* const ahead = b + 1 < blocks ? at + kBlock * line
                                         : window.next  ? window.next + s * kBytes
                                                        : nullptr;
            if (ahead && s * kBytes % 64 == 0)
                for (int i = 0; i < kBlock; i++) fetch(ahead + i * line);
            if (scaled && b * kBlock % w.group == 0) {
                const int64_t later = wide + (w.n + outputs[s]) * bytes;
                numbers_of(w.scales + wide, w.type, outputs[s], scales + s * 8);
                for (int i = 0; i < Kind::kOutputs * bytes; i += 64) fetch(w.scales + later + i);
                if (w.offsets) numbers_of(w.offsets + wide, w.type, outputs[s], offsets + s * 8);
                for (int i = 0; i < Kind::kOutputs * bytes && w.offsets; i += 64) fetch(w.offsets + later + i);
            }
            const Floats* const by = scaled ? scales + s * 8 : nullptr;
            const Floats* const off = w.offsets ? offsets + s * 8 : nullptr;
            const auto add = [&](auto many, int t, auto&& unpack) LAMBDA {
                constexpr int M = many;
                const Block* x[M];
                float* to[M];
                for (int m = 0; m < M; m++)
                    x[m] = rows[t + m] + b, to[m] = sums + (t + m) * kSlotWindow + s * Kind::kOutputs;
                add_dots<Kind, M>(x, unpack, by, off, to);
            };
            const auto read = [&](int i, Bytes(&v)[Kind::kVectors])
                                  LAMBDA { Kind::unpack(at + 4 * i * line, line, v); };
            const auto again = [&](int i, Bytes(&v)[Kind::kVectors]) LAMBDA {
#pragma GCC unroll 8
                for (int j = 0; j < Kind::kVectors; j++) v[j] = staged[i][j];
            };
            if (window.count == 1) {
                add(std::integral_constant<int, 1>{}, 0, read);
                continue;
            }
            if (window.count == kPass) {
                add(std::integral_constant<int, kPass>{}, 0, read);
                continue;
            }
            for (int i = 0; i < kBlock / 4; i++) read(i, staged[i]);
            int t = 0;
            for (; t + kPass <= window.count; t += kPass) add(std::integral_constant<int, kPass>{}, t, again);
            for (; t < window.count; t++) add(std::integral_constant<int, 1>{}, t, again);
        }
    }
    for (int s = 0; s < strips; s++)
        for (int i = 0; i < Kind::kOutputs; i++) {
            const int64_t output = outputs[s] + Kind::output(i / kFloats, i % kFloats) - window.first;
            const float scale = w.format == Format::q4 ? 1 : w.scale(output + window.first);
            for (int t = 0; t < window.count && output >= 0; t++)
                window.y[t * kSlotWindow + output] = scale * sums[t * kSlotWindow + s * Kind::kOutputs + i];
        }
}

TARGET void nibbles(const SlotWindow& window) { lines_of<Nibbles>(window); }
TARGET void levels(const SlotWindow& window) { lines_of<Levels>(window); }

// Floats: lines are widened to two vectors of a strip, or are one.
template <Type T>
struct Numbers {
    static constexpr int kVectors = T == Type::f32 ? 1 : 2, kOutputs = kVectors * kFloats;

    INLINE static void widened(const uint8_t* at, Floats (&v)[kVectors]) {
        Bytes bytes;
        load(at, bytes);
        const Words words = reinterpret_cast<Words>(bytes);
        if constexpr (T == Type::f32) {
            v[0] = reinterpret_cast<Floats>(words);
        } else if constexpr (T == Type::bf16) {
            v[0] = reinterpret_cast<Floats>(words << 16), v[1] = reinterpret_cast<Floats>(words & 0xffff0000);
        } else {
            from_halves(words & 0xffff, v[0]), from_halves(words >> 16, v[1]);
        }
    }
};

template <Type T>
INLINE void float_lines(const SlotWindow& window) {
    using Kind = Numbers<T>;
    constexpr int kSide = 4, kStep = kSide * Kind::kOutputs, kSteps = kSlotWindow / kStep;  // strips side by side
    const SlotMatrix& w = window.w;
    const int64_t line = w.line_bytes(), width = window.end - window.first;
    const int steps = static_cast<int>((width + kStep - 1) / kStep);
    alignas(64) float sums[kSlotRows * kSlotWindow];
    int64_t outputs[kSteps];
    for (int s = 0; s < steps; s++) outputs[s] = std::min(window.first + s * kStep, w.n - kStep);
    std::memset(sums, 0, sizeof(float) * window.count * kSlotWindow);
    for (int64_t b = 0; b < w.k; b += kBlock) {
        const int inputs = static_cast<int>(std::min<int64_t>(kBlock, w.k - b));
        for (int s = 0; s < steps; s++) {
            const uint8_t* const at = w.data + b * line + outputs[s] * w.bits() / 8;
            if (b + 2 * kBlock <= w.k)
                for (int i = 0; i < kBlock; i++)
                    for (int j = 0; j < kSide * kBytes; j += 64) fetch(at + (kBlock + i) * line + j);
            for (int t = 0; t < window.count; t++) {
                const float* const x = window.rows.x + (window.index ? window.index[t] : t) * w.k + b;
                float* const to = sums + t * kSlotWindow + s * kStep;
                Floats all[kSide * Kind::kVectors];
                std::memcpy(all, to, sizeof all);
                for (int i = 0; i < inputs; i++)
#pragma GCC unroll 4
                    for (int j = 0; j < kSide; j++) {
                        Floats v[Kind::kVectors];
                        Kind::widened(at + i * line + j * kBytes, v);
#pragma GCC unroll 2
                        for (int h = 0; h < Kind::kVectors; h++) all[j * Kind::kVectors + h] += v[h] * x[i];
                    }
                std::memcpy(to, all, sizeof all);
            }
        }
    }
    for (int s = 0; s < steps; s++)
        for (int i = 0; i < kStep; i++) {
            const int within = i % Kind::kOutputs, lane = within % kFloats * Kind::kVectors + within / kFloats;
            const int64_t output = outputs[s] + i - within + lane - window.first;
            for (int t = 0; t < window.count && output >= 0; t++)
                window.y[t * kSlotWindow + output] = sums[t * kSlotWindow + s * kStep + i];
        }
}

TARGET void floats(const SlotWindow& window) {
    const Type type = window.w.type;
    if (type == Type::f32) float_lines<Type::f32>(window);
    if (type == Type::bf16) float_lines<Type::bf16>(window);
    if (type == Type::f16) float_lines<Type::f16>(window);
}

// In planes with units of 8: four bytes of a lane are eight inputs, two of which share a byte.
INLINE void planes_of_eight(const SlotSection& t, const Bytes& flip) {
    const SlotMatrix& w = t.w;
    const int64_t planes = w.planes(), line = w.lanes / 2, of_lanes = w.lanes / 8;
    for (int64_t p = 0; p < planes; p++) {
        const uint8_t* const plane = t.at + p * w.n * line;
        if (t.next)
            for (int64_t i = 0; i < kRows * line; i += 64) fetch(t.next + p * w.n * line + i);
        for (int64_t d = 0; d < of_lanes; d += 4)
            for (int at = 0; at < 64; at += kBytes) {
                Bytes v[4];
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) load_lanes(plane + (at / 4 + j) * line + 4 * d, 4 * line, v[j]);
                transpose<Words, Words>(v);
                for (int j = 0; j < 4 && d + j < of_lanes; j++) {
                    const int64_t g = (d + j) % w.groups, e = (d + j) / w.groups * planes + p;  // of its eights
                    store(t.block + (g * w.group / kBlock + e / 4) * 256 + e % 4 * 64 + at, v[j] ^ flip);
                }
            }
    }
}

// In planes with units of 1: lanes of neighbouring groups share a byte. First [four planes][byte of the lanes], 16
// outputs of four inputs each; then pairs of these.
INLINE void planes_of_one(const SlotSection& t, const Bytes& flip) {
    alignas(64) uint8_t fours[32768];
    const SlotMatrix& w = t.w;
    const int64_t planes = w.planes(), line = w.lanes / 2, plane = w.n * line;
    for (int64_t p = 0; p < planes; p += 4) {
        if (t.next)
            for (int64_t j = p; j < p + 4; j++)
                for (int64_t i = 0; i < kRows * line; i += 64) fetch(t.next + j * plane + i);
        for (int64_t b = 0; b < line; b += 16)
            for (int at = 0; at < 64; at += kBytes) {
                Bytes of[4][4];
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    const uint8_t* const from = t.at + p * plane + (at / 4 + j) * line + b;
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) load_lanes(from + i * plane, 4 * line, of[j][i]);
                    transpose<Bytes, Shorts>(of[j]);
                }
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    Bytes v[4] = {of[0][i], of[1][i], of[2][i], of[3][i]};
                    transpose<Words, Words>(v);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++)
                        if (b + 4 * i + j < line) store(fours + (p / 4 * line + b + 4 * i + j) * 64 + at, v[j]);
                }
            }
    }
    const auto four = [&](int64_t c, int64_t g) {
        return fours + (c % planes / 4 * line + (c / planes * w.groups + g) / 2) * 64;
    };
    for (int64_t g = 0; g < w.groups; g += 2)
        for (int64_t c = 0; c < w.group; c += c % 16 == 12 ? 20 : 4) {
            uint8_t* const to = t.block + (g * w.group / kBlock + c / kBlock) * 256 + c % kBlock * 16;
            for (int at = 0; at < 64; at += kBytes) {
                Bytes low, high, even, odd;
                load(four(c, g) + at, low), load(four(c + 16, g) + at, high);
                pair(low, high, flip, even, odd);
                store(to + at, even), store(to + w.group / kBlock * 256 + at, odd);
            }
        }
}

TARGET void regroup(const SlotSection& t) {
    const Bytes flip = Bytes{} + static_cast<uint8_t>(0x88 ^ sign_bits(Format::q4, t.order));
    t.w.unit == 8 ? planes_of_eight(t, flip) : planes_of_one(t, flip);
    if (t.order == Order::signed_eights) to_eights(t.block, int64_t{t.w.group} * t.w.groups * kRows / 2);
}

// Halves, or zero points, of kFloats bfloat16 or half numbers in the lower or upper half of each word.
template <bool Upper>
INLINE void put(const Words& words, Type type, uint16_t* scales, uint8_t* zeros) {
    const Words number = Upper ? words >> 16 : words & 0xffff;
    if (zeros || type == Type::bf16) {
        const Words wide = number << 16;
        const Floats floats = reinterpret_cast<Floats>(wide);
        if (!zeros) return to_halves(floats, scales);
        for (int i = 0; i < kFloats; i++) {
            const float offset = type == Type::bf16 ? floats[i] : half_to_float(static_cast<uint16_t>(number[i]));
            zeros[i] = static_cast<uint8_t>(8 - static_cast<int>(offset));
        }
        return;
    }
    for (int i = 0; i < kFloats; i++) scales[i] = static_cast<uint16_t>(number[i]);
}

INLINE void section_numbers(const SlotMatrix& w, const uint8_t* from, int64_t output, int64_t input, uint16_t* scales,
                            uint8_t* zeros) {
    const int64_t groups = w.groups;
    const int64_t line = w.kept() * 2;
    const uint8_t* const first = from + (input / w.group / w.groups * w.n + output) * line;
    for (int64_t g = 0; g < groups; g += 8)  // kept() is a multiple of 8
        for (int at = 0; at < 64; at += kBytes) {
            Bytes v[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) load_lanes(first + (at / 4 + j) * line + 2 * g, 4 * line, v[j]);
            transpose<Words, Words>(v);
            for (int j = 0; j < 4; j++) {
                const Words words = reinterpret_cast<Words>(v[j]);
                const int64_t even = (g + 2 * j) * kRows + at / 4, odd = even + kRows;
                if (g + 2 * j < groups) put<false>(words, w.type, scales + even, zeros ? zeros + even : nullptr);
                if (g + 2 * j + 1 < groups) put<true>(words, w.type, scales + odd, zeros ? zeros + odd : nullptr);
            }
        }
}

TARGET void regroup_scales(const SlotMatrix& w, int64_t output, int64_t input, uint16_t* to, uint8_t* zeros) {
    section_numbers(w, w.scales, output, input, to, nullptr);
    if (zeros) section_numbers(w, w.offsets, output, input, nullptr, zeros);
}

}  // namespace
}  // namespace umbra
