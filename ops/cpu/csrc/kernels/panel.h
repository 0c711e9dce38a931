// Rows of a checkpoint, as its files store them, sixteen at a time: a panel holds 32 columns of them, in each column a
// lane for every row. All that is done to a panel is then done to sixteen rows at once, and lanes are already in the
// order of matrix.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/blocks.h"
#include "kernels/matrix.h"

namespace umbra {

// Floats; bytes that are levels, unsigned or with 128 taken off; words of eight levels of four bits, which are
// neighbours of a row with the first in the lowest bits (u4), or neighbours of a column in AWQ's order (awq).
enum class Kind : int32_t { f32 = 0, bf16 = 1, f16 = 2, f8 = 3, u8 = 4, i8 = 5, u4 = 6, awq = 7 };

// A two-dimensional array in the memory of a file, at any alignment.
struct Table {
    const uint8_t* at = nullptr;
    Kind kind = Kind::f32;
    int64_t row = 0;  // bytes from a row to the next; awq: from eight rows to the next eight
    int64_t step =
        0;  // bytes from 32 bits of a row to the next; awq, scales and zero points: from a column to the next
};

// Rows as they are given: values, or levels with scales and zero points for every `group` columns of a row.
struct Given {
    Table values, scales, zeros;
    int64_t group = 0;  // a multiple of 32; 0: values are not scaled
    int middle = 0;     // every zero point, if there are none
    // Of nested scales: `scales` and `zeros` (minimums) are bytes, and these halves for every `group` columns.
    Table of_scales{}, of_zeros{};
    Blocks blocks{};  // in place of all others
};

// Lanes lane .. lane + count - 1 are the given rows from `first` on. The other lanes repeat the nearest of these.
struct LaneRows {
    int64_t first;
    int lane, count;

    int64_t row(int l) const { return first + std::clamp(l - lane, 0, count - 1); }
    bool whole() const { return count == kRows; }
};

struct alignas(64) Panel {
    union {
        uint32_t levels[kBlock][kRows];
        float floats[kBlock][kRows];
    };
};

float scale_at(const Table& scales, int64_t row, int64_t group);
uint8_t zero_at(const Table& zeros, int64_t row, int64_t group);
uint8_t byte_at(const Table& bytes, int64_t row, int64_t group);

// Reads `count` (at most 32) columns from `start`, a multiple of 32, as levels, or as the bytes of e4m3 floats. Returns
// whether all are finite numbers; the lowest level of e4m3 that is none is 0x7f.
bool read_levels(const Table& values, const LaneRows& rows, int64_t start, int count, Panel& to);
// The same as floats: value, (level - zero) * scale, or e4m3 float * scale.
bool read_floats(const Given& given, const LaneRows& rows, int64_t start, int count, Panel& to);

// Quantises the columns of `count` panels as one group, in place, to 8 or 4 bits; without zero points `zeros` is null.
// pack.h has the formulas.
void quantise_group(int bits, Panel* panels, int count, uint16_t* scales, uint8_t* zeros);

// The same of one panel to e2m1 floats, whose codes its levels become.
void quantise_e2m1(Panel& panel, uint8_t* scales);

// The half at an element.
uint16_t half_at(const Table& halves, int64_t row, int64_t group);

// Write a panel to the 32 columns at `to`, in the layout of matrix.h, only the lanes of `rows`.
void write_levels(const FormatTraits& of, Order order, const Panel& from, const LaneRows& rows, uint8_t* to);
void write_levels(const FormatTraits& of, Order order, const Words& from, const LaneRows& rows, uint8_t* to);
void write_floats(Storage storage, const Panel& from, const LaneRows& rows, int count, uint8_t* to);
void write_f8(const Panel& from, const LaneRows& rows, uint8_t* to);

}  // namespace umbra
