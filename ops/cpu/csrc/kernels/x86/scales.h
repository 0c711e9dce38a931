// Shared by dot.h and avx512.cpp: the scales of the rows that one vector of sums has, and what products need with them,
// from the first column to the last. A file includes this once, after defining INLINE and, in namespace umbra, `Vector`:
// `Floats` and `Ints` of kLanes 32-bit lanes, and the functions on them. Everything here is internal to that file.
#pragma once

#include <immintrin.h>

#include "kernels/matrix.h"

namespace umbra {
namespace {

// `Middle` times the sum of activations of which `start` is -8 times, less than nothing: what a zero point takes off.
template <int Middle>
INLINE typename Vector::Ints middle_times(typename Vector::Ints start) {
    if (Middle == 0) return Vector::none();
    if (Middle == 8) return start;
    if (Middle == 12) return Vector::add(start, Vector::template shift_right<1>(start));
    if (Middle > 8 && (Middle & (Middle - 1)) == 0)
        return Vector::template shift_left<__builtin_ctz(Middle | 1 << 30) - 3>(start);
    return Vector::template shift_right<3>(Vector::times(Vector::all(Middle), start));
}

// The first rows of the vector is `first` of the block's sixteen. Bytes that are multiplied are `Less` smaller than those
// of formats.h.
template <Format F, bool Zeros, int Less>
struct RowScales {
    using Floats = typename Vector::Floats;
    using Ints = typename Vector::Ints;
    static constexpr FormatTraits kOf = kTraits<F>;
    static constexpr bool kTwo = kOf.scale_bytes() == 2;  // factors
    static constexpr int kMiddle = kOf.middle - Less;

    const uint8_t* at;
    const uint8_t* zeros;
    int first_row;
    Floats of_rows;      // of e4m3 scales
    Floats of_group[2];  // of nested scales
    Floats factor[2];
    Ints zero;

    INLINE RowScales(const Matrix& w, int block, int first_row = 0)
        : at(reinterpret_cast<const uint8_t*>(w.scales + block * w.scale_count())),
          zeros(Zeros ? w.zeros + block * w.scale_count() + first_row : nullptr), first_row(first_row),
          of_rows(Vector::all(kOf.unit)), zero(Vector::none()) {
        of_group[0] = of_group[1] = factor[0] = factor[1] = Vector::nothing();
        if (kOf.f8_scales()) of_rows = Vector::times(floats(), Vector::all(kF8Unit * kOf.unit));
    }

    INLINE Ints bytes() {
        const uint8_t* from = at + first_row;
        at += kRows;
        return kOf.minimums() || kOf.scales == Scales::exponents ? Vector::unsigned_bytes(from) : Vector::bytes(from);
    }
    INLINE Floats halves() {
        const uint8_t* from = at + 2 * first_row;
        at += 2 * kRows;
        return Vector::halves(from);
    }
    INLINE Floats e4m3() {
        const uint8_t* from = at + first_row;
        at += kRows;
        return Vector::e4m3(from);
    }
    INLINE Floats floats() {
        const uint8_t* from = at + 4 * first_row;
        at += 4 * kRows;
        return Vector::floats(from);
    }

    // Where a group begins.
    INLINE void enter() {
        if (kOf.f8_scales() || kOf.expanded()) return;
        if (kOf.scales == Scales::exponents) {  // e8m0_to_float
            factor[0] =
                Vector::as_floats(Vector::larger(Vector::template shift_left<23>(bytes()), Vector::all(1 << 22)));
        } else if (kOf.nested()) {
            of_group[0] = halves();
            if (kOf.minimums()) of_group[1] = Vector::times(halves(), Vector::all(0.125f));  // of Block::start
        } else {
            factor[0] = kOf.scales == Scales::floats ? floats() : halves();
        }
        if (Zeros) {
            zero = Vector::unsigned_bytes(zeros);
            if (Less) zero = Vector::subtract(zero, Vector::all(Less));
            zeros += kRows;
        }
    }
    // At each block.
    INLINE void next() {
        if (kOf.f8_scales()) factor[0] = e4m3(), factor[1] = e4m3();
        if (kOf.expanded()) factor[0] = floats(), factor[1] = floats();
        if (!kOf.nested()) return;
        factor[0] = Vector::times(of_group[0], Vector::to_floats(bytes()));
        if (kTwo) factor[1] = Vector::times(of_group[kOf.minimums()], Vector::to_floats(bytes()));
    }

    // What sums of products start at: all of them, or of the first and the last 16 columns.
    INLINE void start(const Block& x, Ints& first, Ints& second) const {
        const Ints all = Vector::all(x.start);
        second = Vector::none();
        if (kOf.sixteens())
            first = middle_times<kMiddle>(Vector::all(x.first)),
            second = Vector::subtract(middle_times<kMiddle>(all), first);
        else if (Zeros)
            first = Vector::template shift_right<3>(Vector::times(zero, all));
        else
            first = middle_times<kMiddle>(all);
    }
    // Adds those sums, as they are or scaled.
    INLINE Floats add(Ints first, Ints second, const Block& x, Floats to) const {
        const Floats scale = Vector::all(x.scale);
        if (!kTwo) return Vector::multiply_add(Vector::times(factor[0], scale), Vector::to_floats(first), to);
        const Floats other = Vector::to_floats(kOf.minimums() ? Vector::all(x.start) : second);
        const Floats scaled = Vector::times(factor[0], Vector::to_floats(first));
        return Vector::multiply_add(Vector::multiply_add(factor[1], other, scaled), scale, to);
    }
    // The last thing that is done to sums.
    INLINE Floats result(Floats sum) const { return kOf.unit == 1 ? sum : Vector::times(sum, of_rows); }
};

}  // namespace
}  // namespace umbra
