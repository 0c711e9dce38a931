// Products of experts in slots (slots.h), in vectors. A file includes this once, after defining TARGET and, in namespace
// umbra: kBytes, the bytes of a vector (16, 32 or 64); kSigned, kSignedBytes, kNibbleUnit and `levels_of`, how dots take levels; `dot`;
// `load_lanes`, 16 bytes from each of kBytes / 16 places; `from_halves`. Shuffles stay within 16 bytes, which
// is what x86 has and what a vector of NEON is. Everything here is internal to that file, so code compiled for one set is
// never linked into the other.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/passes.h"
#include "kernels/slots.h"
#include "kernels/vector.h"

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

// The lower and upper halves of words, which are of a type.
INLINE void widen(const Words& pairs, Type type, Floats& low, Floats& high) {
    if (type == Type::bf16)
        low = reinterpret_cast<Floats>(pairs << 16), high = reinterpret_cast<Floats>(pairs & 0xffff0000);
    else
        from_halves(pairs & 0xffff, low), from_halves(pairs >> 16, high);
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
        load_lanes([&](int i) LAMBDA { return row + 2 * output + 16 * v + 64 * i; }, bytes);
        widen(reinterpret_cast<Words>(bytes), type, to[2 * v], to[2 * v + 1]);
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
        } else {
            widen(words, T, v[0], v[1]);
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

// In planes, `One` says that units are of 1. Sums of a column are in vectors; all weights of a lane of one belong to a group.
//
// Units of 8: 32 bits of a line are eight inputs of a group, so a line is what dots take: a vector of sums a vector of it.
// Units of 1: neighbouring bytes belong to different groups, so lines of four planes are shuffled: eight vectors of sums.
constexpr int kColumns = 8;     // whose products are computed at a time
constexpr int kMostSums = 256;  // of a section of 4096 inputs, of all runs: planes that share an activation's scale
template <bool One>
struct InPlanes {
    static constexpr int kStep = One ? 4 : 1, kOperands = One ? 8 : 2, kSums = One ? 8 : 1;
    const SlotMatrix& w;
    const int64_t line = w.lanes / 2, vectors = (line + kBytes - 1) / kBytes, planes = w.planes();
    const int64_t run = std::min<int64_t>(planes, One ? kBlock : kBlock / 8), runs = planes / run;
    int32_t numbers[16];  // of units of 1: where the numbers of each eight lanes are
    explicit InPlanes(const SlotMatrix& w) : w(w) {
        for (int i = 0; i < 16; i++) numbers[i] = i * 8 % w.groups * 2;
    }
    // What is prefetched when a plane is read: one that comes later, of these columns or of the `next`.
    const uint8_t* ahead(int64_t p, const uint8_t* at, const uint8_t* next, int64_t plane) const {
        const int64_t later = std::min<int64_t>(planes, One ? 8 : 12);
        return p + later < planes ? at + later * plane : next + (p + later - planes) * plane;
    }
    // Where operands and sums of a vector of a line begin, from a plane on.
    int64_t operands(int64_t v, int64_t p) const { return (v * planes + p) * (kOperands / kStep) * kBytes; }
    int64_t sums(int64_t v, int64_t p) const { return (v * runs + p / run) * kSums * kFloats; }
};

// A row's activations of a section as dots take them, and what their sums start at and are multiplied by.
struct PlanesRow {
    alignas(64) int8_t x[8192];
    alignas(64) int32_t start[kMostSums];
    alignas(64) float scale[kMostSums], all[kMostSums];  // all: the sum of the activations of all runs
};

template <bool One>
INLINE void arrange(const InPlanes<One>& of, const Block* blocks, PlanesRow& to) {
    using Kind = InPlanes<One>;
    const SlotMatrix& w = of.w;
    const int64_t numbers = of.sums(of.vectors, 0) * sizeof(float);
    std::memset(to.x, 0, of.operands(of.vectors, 0));
    std::memset(to.start, 0, numbers), std::memset(to.scale, 0, numbers);
    std::memset(to.all, 0, of.vectors * Kind::kSums * kFloats * sizeof(float));
    for (int64_t id = 0; id < w.lanes / w.unit; id++) {
        const int64_t byte = One ? id / 2 : id * 4, v = byte / kBytes, within = byte % kBytes;
        const int64_t sum = One ? within % 16 / 4 * 2 + id % 2 : 0;
        const int64_t lane = One ? within / 16 * 4 + within % 4 : within / 4;
        for (int64_t p = 0; p < of.planes; p += of.run) {
            const int64_t c = id % w.groups * w.group + (id / w.groups * of.planes + p) * w.unit;
            const Block& block = blocks[c / kBlock];
            const int8_t* const q = block.q + c % kBlock;
            const int64_t at = of.sums(v, p) + sum * kFloats + lane;
            int32_t all = 0;
            for (int64_t i = 0; i < of.run * w.unit; i++) all += q[i];
            to.start[at] = kSigned ? 0 : -8 * all;
            to.scale[at] = block.scale * kNibbleUnit;
            to.all[(v * Kind::kSums + sum) * kFloats + lane] += block.scale * static_cast<float>(all);
            int8_t* x = to.x + of.operands(v, p) + sum * kBytes + lane * 4;
            for (int64_t i = 0; i < of.run / Kind::kStep; i++, x += Kind::kOperands * kBytes)
                if (One)
                    std::memcpy(x, q + 4 * i, 4);
                else
                    for (int j = 0; j < 4; j++) x[j] = q[8 * i + 2 * j], x[kBytes + j] = q[8 * i + 2 * j + 1];
        }
    }
}

// Of a column, from its first number of a section on: those of a vector of a line, in the order of its sums.
INLINE void numbers_of(const InPlanes<true>& of, const uint8_t* at, int64_t v, Floats* to) {
    for (int j = 0; j < 4; j++) {
        Bytes bytes;
        load_lanes([&](int i) LAMBDA { return at + of.numbers[(v * kBytes / 16 + i) * 4 + j]; }, bytes);
        widen(reinterpret_cast<Words>(bytes), of.w.type, to[2 * j], to[2 * j + 1]);
    }
}
// The same for all lanes, one group after another, in memory.
INLINE void numbers_of(const SlotMatrix& w, const uint8_t* at, float* to) {
    uint16_t few[16] = {};
    std::memcpy(few, at, 16);
    if (w.kept() == 16) std::memcpy(few + 8, at + 16, 16);
    Lanes wide;
    w.type == Type::bf16 ? load(reinterpret_cast<const Bf16*>(few), wide)
                         : load(reinterpret_cast<const F16*>(few), wide);
    for (int64_t id = 0; id < w.lanes / 8; id += w.groups) std::memcpy(to + id, &wide, sizeof wide);
}

// Shuffles kColumns columns of a section, four planes at a time: all their lines may be in one set of a cache.
INLINE void stage(const InPlanes<true>& of, const uint8_t* from, const uint8_t* next, Bytes* to) {
    const int64_t plane = of.w.n * of.line;
    for (int64_t p = 0; p < of.planes; p += 4) {
        const uint8_t* const ahead = of.ahead(p, from + p * plane, next, plane);
        for (int c = 0; c < kColumns; c++) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) fetch(ahead + j * plane + c * of.line);
            for (int64_t v = 0; v < of.vectors; v++) {
                Bytes t[4];
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) load(from + (p + j) * plane + c * of.line + v * kBytes, t[j]);
                transpose<Bytes, Shorts>(t);
                std::memcpy(to + (c * of.vectors + v) * of.planes + p, t, sizeof t);
            }
        }
    }
}

// The products of kColumns columns of a section, which are staged if units are of 1, with M rows.
template <bool One, int M>
INLINE void add_planes(const InPlanes<One>& of, const uint8_t* from, const uint8_t* next, int64_t section,
                       int64_t column, const PlanesRow* x, Floats (&total)[M][kColumns]) {
    using Kind = InPlanes<One>;
    constexpr int kAtOnce = One ? 1 : kColumns, kLoaded = One ? 4 : 8;
    const SlotMatrix& w = of.w;
    const int64_t bytes = w.kept() * 2, number = (section * w.n + column) * bytes;
    const int64_t plane = One ? 4 * kBytes : w.n * of.line, step = One ? kBytes : of.line;
    for (int m = 0; m < M; m++)
        for (Floats& one : total[m]) one = Floats{};
    float wide[2][kColumns][32];  // of units of 8
    for (int c = 0; c < kColumns && !One; c++) {
        numbers_of(w, w.scales + number + c * bytes, wide[0][c]);
        if (w.offsets) numbers_of(w, w.offsets + number + c * bytes, wide[1][c]);
    }
    for (int64_t v = 0; v < of.vectors; v++)
        for (int c = 0; c < kColumns; c += kAtOnce) {
            const uint8_t* at = One ? from + (c * of.vectors + v) * of.planes * kBytes : from + v * kBytes;
            Floats sums[M][8];
            for (int m = 0; m < M; m++)
                for (Floats& one : sums[m]) one = Floats{};
            int64_t place = of.sums(v, 0);
            for (int64_t first = 0; first < of.planes; first += of.run, place += Kind::kSums * kFloats) {
                Ints dots[M][8];
#pragma GCC unroll 2
                for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                    for (int i = 0; i < 8; i++)
                        std::memcpy(&dots[m][i], x[m].start + place + i % Kind::kSums * kFloats, sizeof dots[m][i]);
                for (int64_t p = first; p < first + of.run; p += Kind::kStep, at += plane) {
                    const int64_t operands = of.operands(v, p);
                    if (!One && v * kBytes % 64 == 0) {
                        const uint8_t* const ahead = of.ahead(p, at, next + v * kBytes, plane);
#pragma GCC unroll 8
                        for (int i = 0; i < kColumns; i++) fetch(ahead + i * step);
                    }
#pragma GCC unroll 8
                    for (int i = 0; i < kLoaded; i++) {
                        Bytes t, levels[2], q;
                        load(at + i * step, t);
                        levels_of(t, levels[0], levels[1]);
#pragma GCC unroll 2
                        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                            for (int h = 0; h < 2; h++) {
                                std::memcpy(&q, x[m].x + operands + (One ? 2 * i + h : h) * kBytes, sizeof q);
                                dot<false>(dots[m][One ? 2 * i + h : i], levels[h], q);
                            }
                    }
                }
#pragma GCC unroll 2
                for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                    for (int i = 0; i < 8; i++) {
                        Floats scale;
                        std::memcpy(&scale, x[m].scale + place + i % Kind::kSums * kFloats, sizeof scale);
                        sums[m][i] += __builtin_convertvector(dots[m][i], Floats) * scale;
                    }
            }
            Floats scales[8], offsets[8] = {};
            if constexpr (One) {
                numbers_of(of, w.scales + number + c * bytes, v, scales);
                if (w.offsets) numbers_of(of, w.offsets + number + c * bytes, v, offsets);
            } else {
#pragma GCC unroll 8
                for (int i = 0; i < kColumns; i++) {
                    std::memcpy(&scales[i], wide[0][i] + v * kFloats, sizeof scales[i]);
                    if (w.offsets) std::memcpy(&offsets[i], wide[1][i] + v * kFloats, sizeof offsets[i]);
                }
            }
#pragma GCC unroll 2
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    Floats all;
                    std::memcpy(&all, x[m].all + (v * Kind::kSums + i % Kind::kSums) * kFloats, sizeof all);
                    if (w.offsets) sums[m][i] += offsets[i] * all;
                    total[m][One ? c : i] += sums[m][i] * scales[i];
                }
        }
}

// Adds up each of four vectors.
INLINE void add_up(const Floats* v, float* to) {
    Bytes t[4];
    std::memcpy(t, v, sizeof t);
    transpose<Words, Words>(t);
    const Floats sum = (reinterpret_cast<Floats>(t[0]) + reinterpret_cast<Floats>(t[1])) +
                       (reinterpret_cast<Floats>(t[2]) + reinterpret_cast<Floats>(t[3]));
    for (int i = 0; i < kFloats; i++) to[i % 4] += sum[i];
}

template <bool One>
INLINE void planes_of(const SlotWindow& window) {
    const SlotMatrix& w = window.w;
    const InPlanes<One> of(w);
    PlanesRow rows[kSlotRows];
    Bytes staged[kColumns * 4096 / kBytes];
    const int64_t blocks = w.k / kBlock;
    for (int t = 0; t < window.count; t++) std::fill_n(window.y + t * kSlotWindow, window.end - window.first, 0.0f);
    for (int64_t section = 0; section < w.sections(); section++) {
        for (int t = 0; t < window.count; t++)
            arrange(of,
                    window.rows.blocks + (window.index ? window.index[t] : t) * blocks +
                        section * w.groups * w.group / kBlock,
                    rows[t]);
        for (int64_t column = window.first; column < window.end; column += kColumns) {
            const uint8_t* from = w.data + (section * of.planes * w.n + column) * of.line;
            const uint8_t* const next =
                column + kColumns < window.end || !window.next ? from + kColumns * of.line : window.next;
            if constexpr (One) {
                stage(of, from, next, staged);
                from = reinterpret_cast<const uint8_t*>(staged);
            }
            const auto add = [&](auto many, int t) LAMBDA {
                Floats total[many()][kColumns];
                add_planes<One, many()>(of, from, next, section, column, rows + t, total);
                for (int m = 0; m < many(); m++)
                    for (int c = 0; c < kColumns; c += 4)
                        add_up(total[m] + c, window.y + (t + m) * kSlotWindow + column - window.first + c);
            };
            int t = 0;
            for (; t + kPass <= window.count; t += kPass) add(std::integral_constant<int, kPass>{}, t);
            for (; t < window.count; t++) add(std::integral_constant<int, 1>{}, t);
        }
    }
}

TARGET void planes(const SlotWindow& window) {
    window.w.unit == 1 ? planes_of<true>(window) : planes_of<false>(window);
}

}  // namespace
}  // namespace umbra
