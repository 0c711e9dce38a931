// Fills the layouts of matrix.h from ordinary rows.
#pragma once

#include "matrix.h"

namespace umbra {

// Put rows `first` .. `first + count - 1` of a matrix of float32 rows (each `k` long, `from` row-major) into the planes
// of `w`, quantising where its format says so. Symmetric: scale = max|w| / 127 (q8) or, for q4, the scale that maps the
// element of largest magnitude to -8, which uses all sixteen values.
void pack_rows(const Matrix& w, int64_t first, int64_t count, int64_t k, const float* from);

// The inverse, dequantised.
void unpack_rows(const Matrix& w, int64_t first, int64_t count, int64_t k, float* to);

}  // namespace umbra
