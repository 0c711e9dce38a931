// Cuts a product's activation rows into passes of at most `Most`, whose sums fit the registers.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/matrix.h"

namespace umbra {

// Calls f with m, 1 <= m <= Most, as a compile-time constant.
template <int Most, class F>
void with_count(int m, F&& f) {
    if constexpr (Most > 1) {
        if (m < Most) return with_count<Most - 1>(m, f);
    }
    f(std::integral_constant<int, Most>{});
}

// Calls f(count as a constant, operands, outputs) for each pass: `row(number)` is the operand of a row, and each row's
// 16 results go to its output.
template <int Most, class Row, class F>
void for_passes(const int32_t* index, int count, float* y, size_t stride, Row&& row, F&& f) {
    for (int start = 0; start < count; start += Most) {
        const int m = std::min(Most, count - start);
        decltype(row(0)) rows[Most];
        float* out[Most];
        for (int t = 0; t < m; t++) {
            rows[t] = row(index ? index[start + t] : start + t);
            out[t] = y + (start + t) * stride;
        }
        with_count<Most>(m, [&](auto constant) { f(constant, rows, out); });
    }
}

// The same for quantised rows of a product with w; f's first argument says, as a constant, whether w has zero points.
template <Format Of, int Most, class F>
void for_quantised_passes(const Matrix& w, const Rows& rows, const int32_t* index, int count, float* y, size_t stride,
                          F&& f) {
    const auto passes = [&](auto zeros) {
        for_passes<Most>(
            index, count, y, stride, [&](size_t row) { return rows.blocks + row * (w.k / kBlock); },
            [&](auto m, const Block* const* operands, float* const* out) { f(zeros, m, operands, out); });
    };
    if constexpr (kTraits<Of>.zeros()) {
        if (w.zeros) return passes(std::true_type{});
    }
    passes(std::false_type{});
}

// Activations 4i .. 4i+3 of a block as one word, i = 0 .. 7.
inline int32_t four(const Block& block, int i) {
    int32_t word;
    __builtin_memcpy(&word, block.q + 4 * i, 4);
    return word;
}

}  // namespace umbra
