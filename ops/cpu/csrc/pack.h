// Fills the layouts of matrix.h from ordinary rows.
#pragma once

#include <algorithm>

#include "matrix.h"

namespace umbra {

// Put rows `first` .. `first + count - 1` of a matrix of float32 rows (each `k` long, `from` row-major) into the planes
// of `w`, quantising where its format says so. Symmetric: scale = max|w| / 127 (q8) or, for q4, the scale that maps the
// element of largest magnitude to -8, which uses all sixteen values.
void pack_rows(const Matrix& w, int64_t first, int64_t count, int64_t k, const float* from);

// The inverse, dequantised.
void unpack_rows(const Matrix& w, int64_t first, int64_t count, int64_t k, float* to);

// f(part, row in it, rows, rows before) for each part that holds some of rows `first` .. `first + count - 1` of matrix
// `index`, of those that follow each other in `w`.
template <class F>
void for_parts(const SplitMatrix& w, int64_t index, int64_t first, int64_t count, F&& f) {
    for (size_t i = 0; i < w.parts.size(); i++) {
        const int64_t start = int64_t{w.first[i]} * kRows, end = int64_t{w.first[i + 1]} * kRows;
        const int64_t from = std::max(first, start), to = std::min(first + count, end);
        if (from < to) f(w.parts[i].at(index), from - start, to - from, from - first);
    }
}

}  // namespace umbra
