#include "kernels/panel.h"

#include <cmath>

#include "kernels/vector.h"

namespace umbra {
namespace {

constexpr int kNibbles = 8;
constexpr int kOrder[kNibbles] = {0, 4, 1, 5, 2, 6, 3, 7};  // AWQ: row j of eight is the nibble kOrder[j]

uint32_t word_at(const uint8_t* at) {
    uint32_t word;
    std::memcpy(&word, at, 4);
    return word;
}

ALWAYS_INLINE void load(const uint32_t* at, Bits& v) { std::memcpy(&v, at, sizeof v); }
ALWAYS_INLINE void store(const Bits& v, void* at) { std::memcpy(at, &v, sizeof v); }
ALWAYS_INLINE void store(const Lanes& v, void* at) { std::memcpy(at, &v, sizeof v); }

int columns_in_word(Kind kind) {
    switch (kind) {
        case Kind::f32: return 1;
        case Kind::bf16:
        case Kind::f16: return 2;
        case Kind::u4: return 8;
        default: return 4;
    }
}

// `count` columns from `start` as words of 32 bits, a lane for each row; bits beyond the last column are 0.
ALWAYS_INLINE void gather(const Table& t, const LaneRows& rows, int64_t start, int count, uint32_t (*to)[kRows]) {
    const int each = columns_in_word(t.kind), words = count / each, rest = count % each;
    const uint8_t* at = t.at + start / each * t.step;
    if (t.row == 4 && rest == 0 && rows.whole()) {  // the rows' words are neighbours
        for (int w = 0; w < words; w++) std::memcpy(to[w], at + rows.first * 4 + w * t.step, sizeof to[w]);
        return;
    }
    for (int l = 0; l < kRows; l++) {
        const uint8_t* row = at + rows.row(l) * t.row;
        for (int w = 0; w < words; w++) to[w][l] = word_at(row + w * t.step);
        if (rest) {
            uint32_t last = 0;
            std::memcpy(&last, row + words * t.step, static_cast<size_t>(rest) * 4 / each);
            to[words][l] = last;
        }
    }
}

ALWAYS_INLINE void read_awq(const Table& t, const LaneRows& rows, int64_t start, int count, Panel& to) {
    uint32_t shifts[kRows];
    for (int l = 0; l < kRows; l++) shifts[l] = 4 * kOrder[rows.row(l) % kNibbles];
    Bits shift;
    load(shifts, shift);
    const uint8_t* at = t.at + start * t.step;
    if (rows.whole() && rows.first % kNibbles == 0) {  // two words hold all lanes
        const uint8_t *low = at + rows.first / kNibbles * t.row, *high = low + t.row;
        const Bits ones = ~Bits{}, lower = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u}, upper = ones ^ lower;
        for (int c = 0; c < count; c++) {
            const Bits words = (lower & word_at(low + c * t.step)) | (upper & word_at(high + c * t.step));
            store(words >> shift & 15, to.levels[c]);
        }
        return;
    }
    for (int c = 0; c < count; c++) {
        uint32_t words[kRows];
        for (int l = 0; l < kRows; l++) words[l] = word_at(at + rows.row(l) / kNibbles * t.row + c * t.step);
        Bits v;
        load(words, v);
        store(v >> shift & 15, to.levels[c]);
    }
}

ALWAYS_INLINE void widen_half(const Bits& bits, Lanes& v) {  // as half_to_float
    const Bits sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
    const Bits finite = reinterpret_cast<Bits>(reinterpret_cast<Lanes>(rest << 13) * 5.192296858534828e+33f);
    v = reinterpret_cast<Lanes>(sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : finite));
}

ALWAYS_INLINE void widen_f8(const Bits& bits, Lanes& v) {  // exponent re-biased by one exact multiplication: 2^120
    const Bits sign = (bits & 0x80) << 24, rest = bits & 0x7f;
    const Bits finite = reinterpret_cast<Bits>(reinterpret_cast<Lanes>(rest << 20) * 1.329227995784916e+36f);
    v = reinterpret_cast<Lanes>(sign | (rest == 0x7f ? Bits{} + 0x7fc00000 : finite));
}

ALWAYS_INLINE bool any(const Bits& v) {
    uint32_t lanes[kRows], all = 0;
    store(v, lanes);
    for (uint32_t lane : lanes) all |= lane;
    return all != 0;
}

// The lanes of `rows` of v take the place of those at `to`.
ALWAYS_INLINE void put(const Bits& v, const LaneRows& rows, uint8_t* to) {
    if (rows.whole()) return store(v, to);
    uint32_t lanes[kRows];
    store(v, lanes);
    std::memcpy(to + rows.lane * 4, lanes + rows.lane, static_cast<size_t>(rows.count) * 4);
}

// Each lane with a gap of four bytes behind it.
ALWAYS_INLINE void put_apart(const Bits& v, const LaneRows& rows, uint8_t* to) {
    uint32_t lanes[kRows];
    store(v, lanes);
    for (int l = rows.lane; l < rows.lane + rows.count; l++) std::memcpy(to + 8 * l, lanes + l, 4);
}

template <class T>
ALWAYS_INLINE void put_narrow(const T (&lanes)[kRows], const LaneRows& rows, uint8_t* to) {
    if (rows.whole())
        std::memcpy(to, lanes, sizeof lanes);
    else
        std::memcpy(to + rows.lane * sizeof(T), lanes + rows.lane, rows.count * sizeof(T));
}

}  // namespace

float scale_at(const Table& scales, int64_t row, int64_t group) {
    const uint8_t* at = scales.at + row * scales.row + group * scales.step;
    uint16_t half;
    float wide;
    std::memcpy(&half, at, 2);
    switch (scales.kind) {
        case Kind::bf16: return bf16_to_float(half);
        case Kind::f16: return half_to_float(half);
        default: std::memcpy(&wide, at, 4); return wide;
    }
}

uint8_t byte_at(const Table& bytes, int64_t row, int64_t group) {
    return bytes.at[row * bytes.row + group * bytes.step];
}

uint16_t half_at(const Table& halves, int64_t row, int64_t group) {
    uint16_t half;
    std::memcpy(&half, halves.at + row * halves.row + group * halves.step, 2);
    return half;
}

uint8_t zero_at(const Table& zeros, int64_t row, int64_t group) {
    if (zeros.kind != Kind::awq) return byte_at(zeros, row, group);
    return word_at(zeros.at + row / kNibbles * zeros.row + group * zeros.step) >> 4 * kOrder[row % kNibbles] & 15;
}

CLONES bool read_levels(const Table& values, const LaneRows& rows, int64_t start, int count, Panel& to) {
    if (values.kind == Kind::awq) {
        read_awq(values, rows, start, count, to);
        return true;
    }
    alignas(64) uint32_t words[kBlock][kRows];
    gather(values, rows, start, count, words);
    const int bits = values.kind == Kind::u4 ? 4 : 8, each = 32 / bits;
    const uint32_t mask = (1u << bits) - 1, flip = values.kind == Kind::i8 ? 0x80808080 : 0;
    Bits strange{};
    for (int c = 0; c < count; c += each) {
        Bits v;
        load(words[c / each], v);
        v ^= flip;
        for (int j = 0; j < each; j++, v >>= bits) {
            const Bits level = v & mask;
            store(level, to.levels[c + j]);
            strange |= reinterpret_cast<Bits>((level & 0x7f) == 0x7f);
        }
    }
    return values.kind != Kind::f8 || !any(strange);
}

CLONES bool read_floats(const Given& given, const LaneRows& rows, int64_t start, int count, Panel& to) {
    if (given.blocks.at) return dequantise_blocks(given.blocks, rows, start, to.floats);
    const Kind kind = given.values.kind;
    if (given.group) {
        const bool finite = read_levels(given.values, rows, start, count, to);
        Lanes scale, zero{};
        for (int l = 0; l < kRows; l++) {
            scale[l] = scale_at(given.scales, rows.row(l), start / given.group);
            zero[l] = given.zeros.at ? zero_at(given.zeros, rows.row(l), start / given.group) : given.middle;
        }
        for (int c = 0; c < count; c++) {
            Bits level;
            Lanes v;
            load(to.levels[c], level);
            if (kind == Kind::f8)
                widen_f8(level, v);
            else
                v = __builtin_convertvector(level, Lanes);
            store((v - zero) * scale, to.floats[c]);
        }
        return finite;
    }
    alignas(64) uint32_t words[kBlock + 1][kRows];  // an odd number of halves ends with half a word
    gather(given.values, rows, start, count, words);
    Bits strange{};
    for (int c = 0; c < count; c++) {
        Bits bits;
        Lanes v;
        if (kind == Kind::f32) {
            load(words[c], bits);
            v = reinterpret_cast<Lanes>(bits);
        } else {
            load(words[c / 2], bits);
            const Bits half = c % 2 ? bits >> 16 : bits & 0xffff;
            if (kind == Kind::bf16)
                v = reinterpret_cast<Lanes>(half << 16);
            else
                widen_half(half, v);
        }
        store(v, to.floats[c]);
        strange |= reinterpret_cast<Bits>((reinterpret_cast<Bits>(v) & 0x7fffffff) >= 0x7f800000);
    }
    return !any(strange);
}

// One panel, whose 32 columns share a power of two: the largest lies between 4 and 8 times it, and becomes at most 6.
CLONES void quantise_e2m1(Panel& panel, uint8_t* scales) {
    Bits most{};
    for (const float* column : panel.floats) {
        Bits x;
        load(reinterpret_cast<const uint32_t*>(column), x);
        x &= 0x7fffffff;
        most = x > most ? x : most;
    }
    Lanes inverse;
    for (int l = 0; l < kRows; l++) {
        const int exponent = static_cast<int>(most[l] >> 23);  // 127 more than that of the largest
        scales[l] = static_cast<uint8_t>(std::min(std::max(exponent - 2, 0), 254));
        inverse[l] = 1.0f / e8m0_to_float(scales[l]);
    }
    for (float* column : panel.floats) {
        Lanes x;
        load(column, x);
        const Bits bits = reinterpret_cast<Bits>(x);
        const Lanes size = reinterpret_cast<Lanes>(bits & 0x7fffffff) * inverse;
        // Each comparison that holds is -1. Ties go to the even code.
        const auto code = -((size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                            (size >= 3.5f) + (size > 5.0f));
        store(reinterpret_cast<Bits>(code) | (bits >> 28 & 8), column);
    }
}

CLONES void quantise_group(int bits, Panel* panels, int count, uint16_t* scales, uint8_t* zeros) {
    const int largest = bits == 8 ? 255 : 15, middle = (largest + 1) / 2;
    Lanes least{}, most{};
    for (int p = 0; p < count; p++)
        for (const float* column : panels[p].floats) {
            Lanes x;
            load(column, x);
            least = x < least ? x : least;
            most = x > most ? x : most;
        }
    Lanes inverse;
    Bits zero = Bits{} + static_cast<uint32_t>(middle);
    for (int l = 0; l < kRows; l++) {
        float exact;
        if (zeros)
            exact = (most[l] - least[l]) / static_cast<float>(largest);
        else if (bits == 8)
            exact = std::max(most[l], -least[l]) / 127.0f;
        else
            exact = (most[l] > -least[l] ? most[l] : least[l]) / -8.0f;
        scales[l] = float_to_half(exact);
        const float scale = half_to_float(scales[l]);
        inverse[l] = scale != 0 ? 1.0f / scale : 0.0f;
        if (!zeros) continue;
        const float exact_point = std::nearbyint(-least[l] * inverse[l]);  // NaN if the least value is -infinity
        const int point = static_cast<int>(std::min(std::max(0.0f, exact_point), static_cast<float>(largest)));
        zeros[l] = static_cast<uint8_t>(point);
        zero[l] = static_cast<uint32_t>(point);
    }
    typedef int32_t Ints __attribute__((vector_size(64)));
    const Ints offset = reinterpret_cast<Ints>(zero) - 0x4b400000, top = Ints{} + largest;
    for (int p = 0; p < count; p++)
        for (float* column : panels[p].floats) {
            Lanes x;
            load(column, x);
            // q = round(x * inverse) + zero, clamped; rounded as by `nearest`.
            Ints q = reinterpret_cast<Ints>(x * inverse + 12582912.0f) + offset;
            q = q < 0 ? Ints{} : q;
            q = q > top ? top : q;
            store(reinterpret_cast<Bits>(q), column);
        }
}

CLONES void write_levels(const FormatTraits& of, Order order, const Words& from, const LaneRows& rows, uint8_t* to) {
    const uint32_t flip = 0x01010101u * sign_bits(of, order);
    for (int i = 0; i < (of.bytes() ? 8 : 4); i++) {
        Bits out, upper;
        load(from.of[i], out);
        if (!of.bytes()) {
            load(from.of[4 + i], upper);
            out = (out & 0x0f0f0f0f) | (upper & 0x0f0f0f0f) << 4;
        }
        out ^= flip;
        if (order == Order::signed_eights)
            put_apart(out, rows, to + i / 2 * 128 + i % 2 * 4);
        else
            put(out, rows, to + i * 64);
    }
    const int bits = of.high_bits(), each = bits ? 8 / bits : 0;
    for (int vector = 0; vector < bits; vector++) {
        Bits out{};
        for (int i = 0; i < each; i++) {
            Bits levels;
            load(from.of[each * vector + i], levels);
            out |= (levels >> 4 & ((1u << bits) - 1) * 0x01010101u) << i * bits;
        }
        put(out, rows, to + 256 + 64 * vector);
    }
}

CLONES void write_levels(const FormatTraits& of, Order order, const Panel& from, const LaneRows& rows, uint8_t* to) {
    Words words;
    for (int i = 0; i < kBlock / 4; i++) {
        Bits out{};
        for (int j = 0; j < 4; j++) {
            Bits level;
            load(from.levels[4 * i + j], level);
            out |= level << 8 * j;
        }
        store(out, words.of[i]);
    }
    write_levels(of, order, words, rows, to);
}

CLONES void write_floats(Storage storage, const Panel& from, const LaneRows& rows, int count, uint8_t* to) {
    for (int c = 0; c < count; c++) {
        Bits u;
        load(from.levels[c], u);
        if (storage == Storage::f32) {
            put(u, rows, to + c * kRows * 4);
            continue;
        }
        alignas(32) uint16_t halves[kRows];
        if (storage == Storage::f16) {
            for (int l = 0; l < kRows; l++) halves[l] = float_to_half(from.floats[c][l]);
        } else {  // as narrow<Bf16>
            const Bits rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
            u = (u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : rounded;
            typedef uint16_t Halves __attribute__((vector_size(32)));
            const Halves h = __builtin_convertvector(u, Halves);
            std::memcpy(halves, &h, sizeof h);
        }
        put_narrow(halves, rows, to + c * kRows * 2);
    }
}

CLONES void write_f8(const Panel& from, const LaneRows& rows, uint8_t* to) {
    for (int c = 0; c < kBlock; c++) {
        uint8_t bytes[kRows];
        for (int l = 0; l < kRows; l++) bytes[l] = static_cast<uint8_t>(from.levels[c][l]);
        put_narrow(bytes, rows, to + c * kRows);
    }
}

}  // namespace umbra
