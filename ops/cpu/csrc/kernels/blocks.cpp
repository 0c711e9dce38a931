#include "kernels/blocks.h"

#include "kernels/panel.h"
#include "kernels/records.h"
#include "kernels/vector.h"

namespace umbra {
namespace {

constexpr uint32_t kEach = 0x01010101;  // times a byte: that byte four times

struct Lanes16 {  // the block of each lane
    const uint8_t* at[kRows];
};

// A type's blocks. A weight is (byte - middle) * unit * scale, where the byte is a level or its code's.
struct Layout {
    Ggml type;
    int columns, bytes, middle;
    const uint8_t* codes = nullptr;
    float unit = 1;
    const char* kept = nullptr;  // the format of records that has them
};
constexpr Layout kLayouts[] = {
    {Ggml::q4_0, 32, 18, 8},
    {Ggml::q4_1, 32, 20, 0},
    {Ggml::q5_0, 32, 22, 0},
    {Ggml::q5_1, 32, 24, 0},
    {Ggml::q8_0, 32, 34, 128},
    {Ggml::q2_k, 256, 84, 0},
    {Ggml::q3_k, 256, 110, 4},
    {Ggml::iq2_xxs, 256, 66, 0, nullptr, 1, "iq2_xxs"},
    {Ggml::iq2_xs, 256, 74, 0, nullptr, 1, "iq2_xs"},
    {Ggml::iq2_s, 256, 82, 0, nullptr, 1, "iq2_s"},
    {Ggml::iq3_xxs, 256, 98, 0, nullptr, 1, "iq3_xxs"},
    {Ggml::iq3_s, 256, 110, 0, nullptr, 1, "iq3_s"},
    {Ggml::iq1_s, 256, 50, 0, nullptr, 1, "iq1_s"},
    {Ggml::iq1_m, 256, 56, 0, nullptr, 1, "iq1_m"},
    {Ggml::tq1_0, 256, 54, 1},
    {Ggml::tq2_0, 256, 66, 1},
    {Ggml::q4_k, 256, 144, 0},
    {Ggml::q5_k, 256, 176, 0},
    {Ggml::q6_k, 256, 210, 32},
    {Ggml::iq4_nl, 32, 18, 128, kIq4},
    {Ggml::iq4_xs, 256, 136, 128, kIq4},
    {Ggml::mxfp4, 32, 17, 12, kE2m1, 0.5f},
    {Ggml::nvfp4, 64, 36, 12, kE2m1, 0.5f},
};
const Layout& layout_of(Ggml type) {
    const Layout* at = kLayouts;
    while (at->type != type) at++;
    return *at;
}

ALWAYS_INLINE uint32_t word(const uint8_t* at) {
    uint32_t bits;
    std::memcpy(&bits, at, 4);
    return bits;
}
ALWAYS_INLINE uint16_t half(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return bits;
}

ALWAYS_INLINE void gather(const Lanes16& from, int offset, Bits& to) {
    alignas(64) uint32_t words[kRows];
    for (int l = 0; l < kRows; l++) words[l] = word(from.at[l] + offset);
    std::memcpy(&to, words, sizeof to);
}
ALWAYS_INLINE void store(const Bits& v, uint32_t (&to)[kRows]) { std::memcpy(to, &v, sizeof v); }

// Sixteen bytes at `offset`: their low nibbles, then their high ones.
ALWAYS_INLINE void nibbles(const Lanes16& from, int offset, Words& to) {
    for (int i = 0; i < 4; i++) {
        Bits v;
        gather(from, offset + 4 * i, v);
        store(v & 15 * kEach, to.of[i]);
        store(v >> 4 & 15 * kEach, to.of[4 + i]);
    }
}

// Adds the fifth bits, bit c of the 32 at `offset` to the level of column c.
ALWAYS_INLINE void fifths(const Lanes16& from, int offset, Words& to) {
    Bits all;
    gather(from, offset, all);
    for (int i = 0; i < 8; i++) {
        Bits v;
        std::memcpy(&v, to.of[i], sizeof v);
        store(v | ((all >> 4 * i & 15) * 0x00204081 & kEach) << 4, to.of[i]);
    }
}

// Thirty-two bytes at `offset`, of each byte so many bits from `shift` on, and of those at `more` others above them.
ALWAYS_INLINE void pieces(const Lanes16& from, int offset, int shift, int bits, int more, int more_shift, int more_bits,
                          Words& to) {
    const uint32_t mask = ((1u << bits) - 1) * kEach, more_mask = ((1u << more_bits) - 1) * kEach;
    for (int i = 0; i < 8; i++) {
        Bits v, w;
        gather(from, offset + 4 * i, v);
        v = v >> shift & mask;
        if (more_bits) {
            gather(from, more + 4 * i, w);
            v |= (w >> more_shift & more_mask) << bits;
        }
        store(v, to.of[i]);
    }
}

// Five levels of three to a byte: those of 32 bytes, then those of 16, and four to a byte of four more.
ALWAYS_INLINE void threes(const Lanes16& from, int first, Words& to) {
    constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
    for (int i = 0; i < kBlock; i++) {
        const int c = first + i, run = c < 160 ? 32 : c < 240 ? 16 : 4, begin = c < 160 ? 0 : c < 240 ? 160 : 240;
        const int at = begin / 5 + (c - begin) % run;
        for (int l = 0; l < kRows; l++) {
            const uint8_t left = static_cast<uint8_t>(from.at[l][at] * kPowers[(c - begin) / run]);
            if (i % 4 == 0) to.of[i / 4][l] = 0;
            to.of[i / 4][l] |= static_cast<uint32_t>(left * 3 >> 8) << 8 * (i % 4);
        }
    }
}

// The levels of block part `s`: 32 columns from 32 s on.
ALWAYS_INLINE void levels_of(Ggml type, const Lanes16& from, int s, Words& to) {
    const int h = s / 4, j = s % 4;
    switch (type) {
        case Ggml::q4_0:
        case Ggml::iq4_nl: return nibbles(from, 2, to);
        case Ggml::q4_1: return nibbles(from, 4, to);
        case Ggml::mxfp4: return nibbles(from, 1, to);
        case Ggml::iq4_xs: return nibbles(from, 8 + 16 * s, to);
        case Ggml::q5_0: nibbles(from, 6, to); return fifths(from, 2, to);
        case Ggml::q5_1: nibbles(from, 8, to); return fifths(from, 4, to);
        case Ggml::q4_k: return pieces(from, 16 + s / 2 * 32, s % 2 * 4, 4, 0, 0, 0, to);
        case Ggml::q5_k: return pieces(from, 48 + s / 2 * 32, s % 2 * 4, 4, 16, s, 1, to);
        case Ggml::q6_k: return pieces(from, 64 * h + j % 2 * 32, j / 2 * 4, 4, 128 + 32 * h, 2 * j, 2, to);
        case Ggml::q3_k: return pieces(from, 32 + 32 * h, 2 * j, 2, 0, s, 1, to);
        case Ggml::q2_k: return pieces(from, 16 + 32 * h, 2 * j, 2, 0, 0, 0, to);
        case Ggml::tq2_0: return pieces(from, 32 * h, 2 * j, 2, 0, 0, 0, to);
        case Ggml::tq1_0: return threes(from, 32 * s, to);
        case Ggml::nvfp4:  // eight bytes are sixteen columns
            for (int i = 0; i < 4; i++) {
                Bits v;
                gather(from, 4 + 16 * s + 4 * i, v);
                store(v & 15 * kEach, to.of[i / 2 * 4 + i % 2]);
                store(v >> 4 & 15 * kEach, to.of[i / 2 * 4 + 2 + i % 2]);
            }
            return;
        case Ggml::q8_0:
            for (int i = 0; i < 8; i++) {
                Bits v;
                gather(from, 2 + 4 * i, v);
                store(v ^ 128 * kEach, to.of[i]);
            }
            return;
        default: return;  // in records
    }
}

// Those of one row, whose block is at `b`.
ALWAYS_INLINE void scales_of(Ggml type, const uint8_t* b, int s, int l, BlockScales& to) {
    uint16_t d = half(b), dmin = 0;
    uint8_t scale[2] = {1, 1}, minimum[2] = {1, 1};
    switch (type) {
        case Ggml::q4_1:
        case Ggml::q5_1: dmin = half(b + 2) ^ 0x8000; break;
        case Ggml::q5_0:
            dmin = d;
            minimum[0] = minimum[1] = 16;
            break;
        case Ggml::q4_k:
        case Ggml::q5_k: {
            dmin = half(b + 2);
            const uint8_t* p = b + 4;
            scale[0] = s < 4 ? p[s] & 63 : (p[s + 4] & 15) | p[s - 4] >> 6 << 4;
            minimum[0] = s < 4 ? p[s + 4] & 63 : p[s + 4] >> 4 | p[s] >> 6 << 4;
            scale[1] = scale[0];
            minimum[1] = minimum[0];
            break;
        }
        case Ggml::q6_k:
            d = half(b + 208);
            scale[0] = b[192 + 2 * s];
            scale[1] = b[193 + 2 * s];
            break;
        case Ggml::q3_k: {
            d = half(b + 108);
            const uint8_t* p = b + 96;
            for (int i = 0; i < 2; i++) {
                const int j = 2 * s + i;
                scale[i] =
                    static_cast<uint8_t>((p[j % 8] >> j / 8 * 4 & 15) + ((p[8 + j % 4] >> j / 4 * 2 & 3) << 4) - 32);
            }
            break;
        }
        case Ggml::q2_k:
            d = half(b + 80);
            dmin = half(b + 82);
            for (int i = 0; i < 2; i++) {
                scale[i] = b[2 * s + i] & 15;
                minimum[i] = b[2 * s + i] >> 4;
            }
            break;
        case Ggml::tq1_0: d = half(b + 52); break;
        case Ggml::tq2_0: d = half(b + 64); break;
        case Ggml::iq1_m:  // four bits in each of four numbers
            d = 0;
            for (int i = 0; i < 4; i++) d |= (half(b + 48 + 2 * i) >> 12) << 4 * i;
            break;
        case Ggml::iq4_xs:
            scale[0] = static_cast<uint8_t>((b[4 + s / 2] >> s % 2 * 4 & 15) + ((half(b + 2) >> 2 * s & 3) << 4) - 32);
            scale[1] = scale[0];
            break;
        case Ggml::mxfp4:
            d = 0;
            scale[0] = scale[1] = b[0];
            to.finite &= b[0] != 255;
            break;
        case Ggml::nvfp4:
            d = 0;
            for (int i = 0; i < 2; i++) scale[i] = b[2 * s + i] == 0x7f ? 0 : b[2 * s + i] & 0x7f;
            break;
        default: break;
    }
    to.finite &= (d & 0x7c00) != 0x7c00 && (dmin & 0x7c00) != 0x7c00;
    to.d[l] = d;
    to.dmin[l] = dmin;
    for (int i = 0; i < 2; i++) {
        to.scale[i][l] = scale[i];
        to.minimum[i][l] = minimum[i];
    }
}

// The record of one row in its lane, of a type of grids.
ALWAYS_INLINE void record_of(Ggml type, const uint8_t* b, int s, uint32_t (&words)[3], uint8_t (&bytes)[3]) {
    const auto pair = [&](int at) { words[0] = word(b + at + 8 * s), words[1] = word(b + at + 8 * s + 4); };
    switch (type) {
        case Ggml::iq2_xxs: return pair(2);
        case Ggml::iq2_xs:
            pair(2);
            bytes[0] = b[66 + s];
            return;
        case Ggml::iq2_s:
            words[0] = word(b + 2 + 4 * s), words[1] = word(b + 34 + 4 * s);
            bytes[0] = b[66 + s], bytes[1] = b[74 + s];
            return;
        case Ggml::iq3_xxs:
            pair(2);
            words[2] = word(b + 66 + 4 * s);
            return;
        case Ggml::iq3_s:
            pair(2);
            words[2] = word(b + 74 + 4 * s);
            bytes[0] = b[66 + s], bytes[1] = b[106 + s / 2] >> 4 * (s % 2) & 15;
            return;
        case Ggml::iq1_s:
            words[0] = word(b + 2 + 4 * s);
            bytes[0] = b[34 + 2 * s], bytes[1] = b[35 + 2 * s];
            return;
        case Ggml::iq1_m:
            words[0] = word(b + 4 * s);
            bytes[0] = b[32 + 2 * s], bytes[1] = b[33 + 2 * s];
            bytes[2] = static_cast<uint8_t>(half(b + 48 + s / 2 * 2) >> 6 * (s % 2) & 63);
            return;
        default: return;
    }
}

// The same of levels, in all lanes.
ALWAYS_INLINE void record_of(const Words& levels, const BlockScales& scales, const FormatTraits& format, uint8_t* to) {
    for (int k = 0; k < format.words; k++) {
        Bits out{};
        for (int i = 0; i < (k < 2 ? 4 : 8); i++) {
            Bits level;
            std::memcpy(&level, levels.of[k < 2 ? 4 * k + i : i], sizeof level);
            out |= k < 2 ? (level & 3 * kEach) << 2 * i : (level >> 2 & kEach) << i;
        }
        std::memcpy(to + 64 * k, &out, sizeof out);
    }
    for (int k = 0; k < format.bytes_more; k++)
        for (int l = 0; l < kRows; l++)
            to[64 * format.words + kRows * k + l] =
                format.minimums() ? static_cast<uint8_t>(scales.scale[k][l] | scales.minimum[k][l] << 4)
                                  : scales.scale[k][l];
}

ALWAYS_INLINE void read(const Blocks& from, const LaneRows& rows, int64_t start, Words& levels, BlockScales& scales) {
    const int64_t c = start + from.skipped;
    const Layout& of = layout_of(from.type);
    const int part = static_cast<int>(c % of.columns / kBlock);
    Lanes16 lanes;
    for (int l = 0; l < kRows; l++) lanes.at[l] = from.at + rows.row(l) * from.row + c / of.columns * of.bytes;
    levels_of(from.type, lanes, part, levels);
    scales.finite = true;
    for (int l = 0; l < kRows; l++) scales_of(from.type, lanes.at[l], part, l, scales);
}

}  // namespace

CLONES void read_blocks(const Blocks& from, const LaneRows& rows, int64_t start, Words& levels, BlockScales& scales) {
    read(from, rows, start, levels, scales);
}

CLONES void read_records(const Blocks& from, const FormatTraits& format, const LaneRows& rows, int64_t start,
                         RecordRows& to) {
    const Layout& of = layout_of(from.type);
    BlockScales scales;
    if (of.kept) {
        const int64_t c = start + from.skipped;
        const int part = static_cast<int>(c % of.columns / kBlock);
        scales.finite = true;
        for (int l = 0; l < kRows; l++) {
            const uint8_t* b = from.at + rows.row(l) * from.row + c / of.columns * of.bytes;
            uint32_t words[3];
            uint8_t bytes[3];
            record_of(from.type, b, part, words, bytes);
            for (int k = 0; k < format.words; k++) std::memcpy(to.record + 64 * k + 4 * l, &words[k], 4);
            for (int k = 0; k < format.bytes_more; k++) to.record[64 * format.words + kRows * k + l] = bytes[k];
            scales_of(from.type, b, part, l, scales);
        }
    } else {
        Words levels;
        read(from, rows, start, levels, scales);
        record_of(levels, scales, format, to.record);
    }
    std::memcpy(to.halves[0], scales.d, sizeof scales.d);
    std::memcpy(to.halves[1], scales.dmin, sizeof scales.dmin);
    to.finite = scales.finite;
}

// Those that only records hold.
bool dequantise_records(const Blocks& from, const LaneRows& rows, int64_t start, float (*to)[kRows]) {
    RecordRows records;
    Matrix one;
    one.format = format_named(layout_of(from.type).kept), one.group = kBlock;
    read_records(from, one.traits(), rows, start, records);
    alignas(64) uint8_t bytes[kBlock * kRows];
    alignas(64) float scales[2 * kRows], lowest[2 * kRows];
    expand(one, records.record, records.halves[0], 0, kBlock, Order::fours, {bytes, scales, lowest});
    for (int c = 0; c < kBlock; c++)
        for (int l = 0; l < kRows; l++)
            to[c][l] = static_cast<float>(byte_at(traits_of(kExpanded), Order::fours, bytes, l, c) -
                                          traits_of(kExpanded).middle) *
                       scales[c / 16 * kRows + l];
    return records.finite;
}

CLONES bool dequantise_blocks(const Blocks& from, const LaneRows& rows, int64_t start, float (*to)[kRows]) {
    if (layout_of(from.type).kept) return dequantise_records(from, rows, start, to);
    Words levels;
    BlockScales scales;
    read(from, rows, start, levels, scales);
    const bool unsigned_scales = from.type == Ggml::q4_k || from.type == Ggml::q5_k;
    const bool exponents = from.type == Ggml::mxfp4;
    const Layout& of = layout_of(from.type);
    alignas(64) float scale[2][kRows], lowest[2][kRows];
    for (int i = 0; i < 2; i++)
        for (int l = 0; l < kRows; l++) {
            const uint8_t byte = scales.scale[i][l];
            const float wide = static_cast<float>(unsigned_scales ? byte : static_cast<int8_t>(byte));
            scale[i][l] = exponents                  ? of.unit * e8m0_to_float(byte)
                          : from.type == Ggml::nvfp4 ? of.unit * (from.factor * f8_to_float(byte))
                                                     : half_to_float(scales.d[l]) * wide;
            lowest[i][l] = half_to_float(scales.dmin[l]) * static_cast<float>(scales.minimum[i][l]);
        }
    for (int c = 0; c < kBlock; c++) {
        typedef int32_t Ints __attribute__((vector_size(64)));
        Bits level;
        Lanes times, less;
        std::memcpy(&level, levels.of[c / 4], sizeof level);
        level = level >> c % 4 * 8 & 255;
        if (of.codes)
            for (int l = 0; l < kRows; l++) level[l] = of.codes[level[l]];
        load(scale[c / 16], times);
        load(lowest[c / 16], less);
        const Lanes value = __builtin_convertvector(reinterpret_cast<Ints>(level) - of.middle, Lanes);
        const Lanes v = value * times - less;
        std::memcpy(to[c], &v, sizeof v);
    }
    return scales.finite;
}

}  // namespace umbra
