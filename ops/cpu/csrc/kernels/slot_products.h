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

// Four lines, shuffled, as dots take them: of nibbles even and odd outputs in turns.
struct Nibbles {
    static constexpr int kVectors = 8, kOutputs = 2 * kBytes;  // of a strip, kBytes of a line
    static constexpr float kZero = kSigned ? 0 : 8, kUnit = kNibbleUnit;

    INLINE static void unpack(const Bytes (&t)[4], Bytes (&v)[kVectors]) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) levels_of(t[j], v[2 * j], v[2 * j + 1]);
    }
    static int output(int vector, int lane) { return lane / 4 * 32 + vector / 2 * 8 + lane % 4 * 2 + vector % 2; }
};
struct Levels {
    static constexpr int kVectors = 4, kOutputs = kBytes;
    static constexpr float kZero = kSignedBytes ? 0 : 128, kUnit = 1;

    INLINE static void unpack(const Bytes (&t)[4], Bytes (&v)[kVectors]) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) v[j] = t[j] ^ (Bytes{} + static_cast<uint8_t>(kSignedBytes ? 0 : 0x80));
    }
};

// Adds the dots of 32 inputs of M rows to a strip's sums, scaled.
template <class Kind, int M>
INLINE void add_scaled(const Block* const* x, const Ints (*dots)[Kind::kVectors], const Floats* scales,
                       const Floats* offsets, float* sums, int64_t step) {
    // Zero points are subtracted in floats, where these whole numbers are exact.
#pragma GCC unroll 2
    for (int m = 0; m < M; m++) {
        const float sum = static_cast<float>(x[m]->sum()) / Kind::kUnit;
        const Floats scale = Floats{} + x[m]->scale * Kind::kUnit, less = Floats{} + Kind::kZero * sum;
#pragma GCC unroll 8
        for (int j = 0; j < Kind::kVectors; j++) {
            Floats to, whole = __builtin_convertvector(dots[m][j], Floats) - less;
            if (offsets) whole += offsets[j] * sum;
            std::memcpy(&to, sums + m * step + j * kFloats, sizeof to);
            to += (scales ? scales[j] * scale : scale) * whole;
            std::memcpy(sums + m * step + j * kFloats, &to, sizeof to);
        }
    }
}

// Adds the dots of four lines of a strip with activations 4i .. 4i+3 of M rows.
template <class Kind, int M>
INLINE void add_dots(const Bytes (&v)[Kind::kVectors], const Block* const* x, int i, Ints (*dots)[Kind::kVectors]) {
#pragma GCC unroll 2
    for (int m = 0; m < M; m++) {
        const Bytes of_x = reinterpret_cast<Bytes>(Ints{} + four(*x[m], i));
#pragma GCC unroll 8
        for (int j = 0; j < Kind::kVectors; j++) dot<Kind::kVectors == 4>(dots[m][j], v[j], of_x);
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
#pragma GCC unroll 4
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

// Writes a strip's sums from number `skipped` on.
template <class Kind>
INLINE void put_strip(const float* sums, int64_t skipped, float* y) {
    Bytes v[Kind::kVectors];
    std::memcpy(v, sums, sizeof v);
    for (int j = 0; j < 8 && Kind::kVectors == 8; j += 2) zip_both<Words>(v[j], v[j + 1], v[j], v[j + 1]);
    for (int j = 0; j < Kind::kVectors; j++)
        for (int i = 0; i < kBytes / 16; i++) {
            const int64_t output = (i * Kind::kVectors + j) * 4 - skipped;
            if (output >= 0) std::memcpy(y + output, reinterpret_cast<const uint8_t*>(&v[j]) + 16 * i, 16);
        }
}

// What few rows need of whole lines is added up in memory, four lines at a time. Otherwise each strip of 32 inputs is
// unpacked once and meets row after row.
template <class Kind>
INLINE void lines_of(const SlotWindow& window) {
    constexpr int kStrips = kSlotWide / Kind::kOutputs, kFours = kBlock / 4, kAhead = 16384, kVectors = Kind::kVectors;
    const SlotMatrix& w = window.w;
    const int64_t line = w.line_bytes(), blocks = w.k / kBlock, of_slab = w.slab() / kBlock;
    const int64_t width = window.end - window.first, bytes = w.type == Type::f32 ? 4 : 2;  // of a scale
    const int strips = static_cast<int>((width + Kind::kOutputs - 1) / Kind::kOutputs);
    const bool scaled = w.traits().nibbles(), whole = width == w.n && window.count <= kSlotFew;
    alignas(64) float sums[kSlotFew * kSlotWide], all[kSlotFew * kSlotWide];  // of a slab, and of all
    Ints kept[kSlotFew * kStrips][kVectors];                                  // of few rows, a strip's side by side
    Bytes unpacked[kFours][kVectors];
    const Block* x[kSlotRows];
    const auto first_of = [&](int s) LAMBDA {  // the last strip may overlap the one before
        return std::min(window.first + s * Kind::kOutputs, w.n - Kind::kOutputs);
    };
    const auto unpack = [&](const uint8_t* at, Bytes(&v)[kVectors]) LAMBDA {
        Bytes t[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) load(at + j * line, t[j]);
        transpose<Bytes, Shorts>(t);
        Kind::unpack(t, v);
    };
    std::memset(sums, 0, sizeof(float) * window.count * strips * Kind::kOutputs);
    std::memset(all, 0, sizeof(float) * window.count * strips * Kind::kOutputs);
    for (int64_t slab = window.begin; slab < window.stop; slab++) {
        for (int64_t b = slab * of_slab; b < std::min(blocks, (slab + 1) * of_slab); b++) {
            const uint8_t* const lines = w.data + b * kBlock * line;
            for (int t = 0; t < window.count; t++)
                x[t] = window.rows.blocks + (window.index ? window.index[t] : t) * blocks + b;
            const int64_t row_bytes = w.n * bytes, of_group = scaled ? b * kBlock / w.group * row_bytes : 0;
            Floats scales[8], offsets[8];
            const auto read_numbers = [&](int s) LAMBDA {
                const auto read = [&](const uint8_t* plane, Floats* to) LAMBDA {
                    numbers_of(plane + of_group, w.type, first_of(s), to);
                    for (int i = 0; i < Kind::kOutputs * bytes; i += 64)
                        __builtin_prefetch(plane + of_group + row_bytes + first_of(s) * bytes + i, 0, 3);
                };
                if (scaled) read(w.scales, scales);
                if (w.offsets) read(w.offsets, offsets);
            };
            const auto add = [&](auto many, int t, int s, const Ints(*dots)[kVectors]) LAMBDA {
                add_scaled<Kind, many()>(x + t, dots, scaled ? scales : nullptr, w.offsets ? offsets : nullptr,
                                         sums + (t * strips + s) * Kind::kOutputs, strips * Kind::kOutputs);
            };
            const auto few = [&](auto many) LAMBDA {
                const uint8_t* ahead = lines + kAhead;
                for (int i = 0; i < kFours; i++)
                    for (int s = 0; s < strips; s++) {
                        Bytes v[kVectors];
                        Ints dots[many()][kVectors] = {};
                        if (i) std::memcpy(dots, kept[s * many()], sizeof dots);
                        unpack(lines + 4 * i * line + first_of(s) * w.traits().bits / 8, v);
#pragma GCC unroll 4
                        for (int j = 0; j < kBytes; j += 16, ahead += 64) __builtin_prefetch(ahead, 0, 3);
                        add_dots<Kind, many()>(v, x, i, dots);
                        if (i < kFours - 1) {
                            std::memcpy(kept[s * many()], dots, sizeof dots);
                        } else {
                            read_numbers(s);
                            add(many, 0, s, dots);
                        }
                    }
            };
            if (whole) {
                window.count == 1 ? few(std::integral_constant<int, 1>{})
                                  : few(std::integral_constant<int, kSlotFew>{});
                continue;
            }
            for (int s = 0; s < strips; s++) {
                for (int i = 0; i < kFours; i++) {
                    const uint8_t* const at = lines + 4 * i * line + first_of(s) * w.traits().bits / 8;
                    unpack(at, unpacked[i]);
                    for (int j = 0; j < 4 && b + 1 < blocks; j++) fetch(at + (kBlock + j) * line);
                }
                read_numbers(s);
                const auto pass = [&](auto many, int t) LAMBDA {
                    Ints dots[many()][kVectors] = {};
#pragma GCC unroll 1
                    for (int i = 0; i < kFours; i++) {
                        Bytes v[kVectors];
                        std::memcpy(v, unpacked[i], sizeof v);
                        add_dots<Kind, many()>(v, x + t, i, dots);
                    }
                    add(many, t, s, dots);
                };
                int t = 0;
                for (; t + kPass <= window.count; t += kPass) pass(std::integral_constant<int, kPass>{}, t);
                for (; t < window.count; t++) pass(std::integral_constant<int, 1>{}, t);
            }
        }
        for (int64_t i = 0; i < window.count * strips * Kind::kOutputs; i += kFloats) {
            Floats sum, before;
            std::memcpy(&sum, sums + i, sizeof sum);
            std::memcpy(&before, all + i, sizeof before);
            sum += before;
            std::memcpy(all + i, &sum, sizeof sum);
            std::memset(sums + i, 0, sizeof sum);
        }
    }
    for (int t = 0; t < window.count; t++)
        for (int s = 0; s < strips; s++) {
            const int64_t output = first_of(s) - window.first;
            put_strip<Kind>(all + (t * strips + s) * Kind::kOutputs, std::max<int64_t>(0, -output),
                            window.y + t * window.stride + std::max<int64_t>(0, output));
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
            const uint8_t* const at = w.data + b * line + outputs[s] * w.traits().bits / 8;
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
                window.y[t * window.stride + output] = sums[t * kSlotWindow + s * kStep + i];
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
    for (int t = 0; t < window.count; t++) std::fill_n(window.y + t * window.stride, window.end - window.first, 0.0f);
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
                        add_up(total[m] + c, window.y + (t + m) * window.stride + column - window.first + c);
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
