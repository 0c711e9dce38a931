// The formats of weights: one row each, which is all that kernels know of a format. A new one is a row here and a file
// in ops/formats. If its bits lie in memory as no other's do, it also needs a Storage, which matrix.h draws, and the
// unpacking of that: x86/dot.h, x86/unpack.h, arm/stream.h, and `quant_at` and `write_levels` for the generic kernels.
//
// Kernels multiply bytes: a quant is one, or its code's. w = (byte - middle) * unit * scale, less a minimum where the
// scales have these. Scales that are `nested` are bytes times halves of their group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

namespace umbra {

constexpr int kRows = 16;   // rows of a block
constexpr int kBlock = 32;  // columns of an activation block

// The first three are the types of floats, in the order of `Type`. Bits beyond a nibble's four lie in planes of their own.
enum class Storage : int32_t { f32, bf16, f16, e4m3, bytes, nibbles, records };

enum class Scales : int32_t {
    none,
    halves,               // of groups; these formats may have zero points too
    floats,               // of groups
    exponents,            // powers of two, of groups of 32
    f8_sixteens,          // e4m3 floats of 16 columns, times a float of the row
    float_sixteens,       // of 16 columns
    nested,               // signed bytes of 32 columns
    nested_sixteens,      // signed bytes of 16 columns
    nested_with_minimums  // unsigned bytes of 32 columns, and minimums likewise
};

// What records hold (records.h), named as GGUF's types. Those from q2_k on have levels, the others numbers of a grid.
enum class Record : int32_t { none, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, iq1_s, iq1_m, q2_k, q3_k, tq2_0 };

struct FormatTraits {
    const char* name;  // as ops/formats spells it
    int bits;          // of a weight
    Storage storage;
    int middle = 0;  // the zero point of all bytes, unless a matrix has zero points of its own
    Scales scales = Scales::none;
    const uint8_t* codes = nullptr;  // the byte of each nibble; null: itself
    float unit = 1;
    Record record = Record::none;
    int words = 0, bytes_more = 0;  // of the record of 32 columns of a row

    constexpr bool quantised() const { return storage >= Storage::bytes; }  // activations become int8
    constexpr bool bytes() const { return storage == Storage::bytes; }
    constexpr bool nibbles() const { return storage == Storage::nibbles; }
    constexpr int high_bits() const { return nibbles() ? bits - 4 : 0; }
    constexpr bool coded() const { return codes != nullptr; }
    constexpr bool records() const { return storage == Storage::records; }
    constexpr bool plain_nibbles() const { return nibbles() && !coded() && bits == 4; }
    constexpr int block_bytes() const {  // of 32 columns; quantised formats
        return bytes() ? 512 : records() ? 64 * words + 16 * bytes_more : 256 + 64 * high_bits();
    }

    constexpr bool zeros() const { return scales == Scales::halves; }
    constexpr bool nested() const { return scales >= Scales::nested; }
    constexpr bool minimums() const { return scales == Scales::nested_with_minimums; }
    constexpr bool f8_scales() const { return scales == Scales::f8_sixteens; }
    constexpr bool expanded() const { return scales == Scales::float_sixteens; }
    constexpr bool sixteens() const { return scales == Scales::nested_sixteens || f8_scales() || expanded(); }
    // Vectors of 16 halves for each group, and of 16 bytes for each 32 columns, where blocks of these have scales.
    constexpr int scale_halves() const { return minimums() ? 2 : nested() ? 1 : 0; }
    constexpr int scale_bytes() const { return records() ? 0 : minimums() || sixteens() ? 2 : nested() ? 1 : 0; }

    constexpr int most() const {  // the largest byte; quantised formats
        if (!coded()) return (1 << bits) - 1;
        int largest = 0;
        for (int i = 0; i < 16; i++) largest = codes[i] > largest ? codes[i] : largest;
        return largest;
    }
    constexpr int byte_of(int quant) const { return coded() ? codes[quant] : quant; }
};

// Twice the value of each e2m1 code, and the levels of iq4, each plus the middle.
constexpr uint8_t kE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr uint8_t kIq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

constexpr FormatTraits kFormatTraits[] = {
    {"float32", 32, Storage::f32},
    {"bfloat16", 16, Storage::bf16},
    {"float16", 16, Storage::f16},
    {"q8", 8, Storage::bytes, 128, Scales::halves},
    {"q4", 4, Storage::nibbles, 8, Scales::halves},
    {"f8", 8, Storage::e4m3, 0, Scales::floats},
    {"mxfp4", 4, Storage::nibbles, 12, Scales::exponents, kE2m1, 0.5f},
    {"q4_k", 4, Storage::nibbles, 0, Scales::nested_with_minimums},
    {"q5_k", 5, Storage::nibbles, 0, Scales::nested_with_minimums},
    {"q6_k", 6, Storage::nibbles, 32, Scales::nested_sixteens},
    {"iq4", 4, Storage::nibbles, 128, Scales::nested, kIq4},
    {"w8a8", 8, Storage::bytes, 128, Scales::floats},
    {"nvfp4", 4, Storage::nibbles, 12, Scales::f8_sixteens, kE2m1, 0.5f},
    // No matrix has this one: records become it, before they are multiplied.
    {"expanded", 7, Storage::bytes, 64, Scales::float_sixteens},
    {"iq2_xxs", 2, Storage::records, 0, Scales::nested, nullptr, 0.125f, Record::iq2_xxs, 2},
    {"iq2_xs", 2, Storage::records, 0, Scales::nested, nullptr, 0.125f, Record::iq2_xs, 2, 1},
    {"iq2_s", 2, Storage::records, 0, Scales::nested, nullptr, 0.125f, Record::iq2_s, 2, 2},
    {"iq3_xxs", 3, Storage::records, 0, Scales::nested, nullptr, 0.25f, Record::iq3_xxs, 3},
    {"iq3_s", 3, Storage::records, 0, Scales::nested, nullptr, 1, Record::iq3_s, 3, 2},
    {"iq1_s", 1, Storage::records, 0, Scales::nested, nullptr, 0.125f, Record::iq1_s, 1, 2},
    {"iq1_m", 1, Storage::records, 0, Scales::nested, nullptr, 0.125f, Record::iq1_m, 1, 3},
    {"q2_k", 2, Storage::records, 0, Scales::nested_with_minimums, nullptr, 1, Record::q2_k, 2, 2},
    {"q3_k", 3, Storage::records, 0, Scales::nested, nullptr, 1, Record::q3_k, 3, 2},
    {"tq2_0", 2, Storage::records, 0, Scales::nested, nullptr, 1, Record::tq2_0, 2},
};
constexpr int kFormats = sizeof kFormatTraits / sizeof *kFormatTraits;

enum class Format : int32_t {};  // the number of a row

constexpr const FormatTraits& traits_of(Format format) { return kFormatTraits[static_cast<int>(format)]; }
template <Format F>
constexpr FormatTraits kTraits = traits_of(F);

// No row has another name than those above: the caller's mistake does not compile.
constexpr Format format_named(std::string_view name) {
    int at = 0;
    while (name != kFormatTraits[at].name) at++;
    return static_cast<Format>(at);
}

// Calls f with each format, as a constant.
template <class F, int... I>
void each_format(F&& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<Format, Format{I}>{}), ...);
}
template <class F>
void each_format(F&& f) {
    each_format(f, std::make_integer_sequence<int, kFormats>{});
}

// 2^(e - 127) for an e8m0 scale; 255 is NaN and never stored. The smallest is a subnormal float.
inline float e8m0_to_float(uint8_t e) {
    const uint32_t bits = e ? static_cast<uint32_t>(e) << 23 : 1u << 22;
    float scale;
    __builtin_memcpy(&scale, &bits, 4);
    return scale;
}

}  // namespace umbra
