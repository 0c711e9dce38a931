// Converts ordinary rows to the layouts of matrix.h and back.
#pragma once

#include "kernels/ops.h"
#include "kernels/panel.h"

namespace umbra {

// Where rows go: matrix `index` of those that follow each other, from row `first` on. With `step` 2 each 16 rows are
// followed by a gap of 16 rows (`first` is then a multiple of 16), which is how gate and up share a matrix.
struct RowRange {
    int64_t index, first, step;
};

constexpr int kStrange = 1;     // some values are no finite numbers
constexpr int kLargeScale = 2;  // a scale is beyond the range of halves

// Writes the first `columns` columns of `count` rows; columns beyond are left as they are. Returns a sum of the flags
// above. With `keep` levels, codes and e4m3 floats are written unchanged into a matrix of their format, whose groups are parts
// of theirs; if the matrix has zero points but the rows have none, every zero point is the middle of the levels. Without
// `keep` the values are written, rounded to the nearest level in quantised formats (not f8, nor with nested scales). With zero points, scale and
// zero point cover the range from the group's least to its largest value, 0 included. Without, the scale is max|w| / 127
// for q8; for q4 it maps the element of largest magnitude to -8, which uses all sixteen levels. In mxfp4 it is a power of
// two that the largest is 4 to 8 times.
int pack_rows(Context& context, const SplitMatrix& w, const RowRange& where, int64_t count, int64_t columns,
              const Given& from, bool keep);

// Writes a row-major table (rows, columns) of `type`. Returns whether all values are finite numbers.
bool fill_table(Context& context, void* to, Type type, int64_t rows, int64_t columns, const Given& from);

// Row `row` of matrix `index`, dequantised to float32.
void unpack_row(const SplitMatrix& w, int64_t index, int64_t row, float* to);
// Reads `count` rows and writes them dequantised to float32.
void unpack_rows(Context& context, const SplitMatrix& w, const RowRange& where, int64_t count, float* to);

}  // namespace umbra
