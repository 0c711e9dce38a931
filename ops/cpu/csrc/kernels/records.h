// Formats of two to three and a half bits, of which 32 columns of a row are a record of words and bytes (formats.h). What
// these hold is in GGUF's types: numbers of entries of a grid, which are 4 or 8 columns each, with signs; or levels; and
// scales. Products expand a row block's records to bytes with a float for every 16 columns, the format "expanded", for
// all activation rows at once, and multiply those. So no set of kernels knows these formats.
//
// Records of the sixteen rows of a block lie side by side: words [16], one after another, then bytes [16]. Their halves
// have a plane of their own, as other nested scales.
#pragma once

#include "kernels/matrix.h"

namespace umbra {

// What records become; any format, where there are none.
constexpr Format expanded_format() {
    int at = kFormats - 1;
    while (at && !kFormatTraits[at].expanded()) at--;
    return static_cast<Format>(at);
}
constexpr Format kExpanded = expanded_format();

// Sets the grid that records of this kind refer to: entries of 4 or 8 signed bytes, as many as their numbers have.
void set_grid(Record kind, const int8_t* entries, int64_t count);

// Where `columns` columns of a row block go, all multiples of 32.
struct Expansion {
    uint8_t* bytes;  // in the layout of "expanded" for an order; 64-byte aligned
    float* scales;   // [columns / 16][16]
    float* lowest;   // likewise, of formats with minimums
};

// Expands columns first .. first + columns - 1 of the row block with these quants and scales.
void expand(const Matrix& like, const uint8_t* quants, const uint16_t* scales, int64_t first, int64_t columns,
            Order order, const Expansion& to);

// As a Product, with a set's product of "expanded".
void multiply_records(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                      size_t stride, Product product);

template <Product OfExpanded>
void product_of_records(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                        size_t stride) {
    multiply_records(w, block, rows, index, count, y, stride, OfExpanded);
}

}  // namespace umbra
