// Experts as an NPU's slots hold them (ops/ascend/vector_core/blocks.py), multiplied by few rows on the CPU: so the host
// keeps one copy, which it computes from and which goes to the device as plain bytes.
//
// w is (k inputs, n outputs), an output's weights a column, where blocks of matrix.h have them in rows:
//
//   floats     [k][n]                                      a line of 64 bytes is 16 to 32 outputs of one input
//   w8a8       [k][n] int8                                 64 outputs;      scales [n], floats or bfloat16
//   q4         [k][n / 2], two signed nibbles a byte,      128 outputs;     scales, offsets [k / group][n]
//              the even output in the lower half
//   q4 in      [section][plane][n][lanes / 2]: the input   128 inputs of    scales, offsets [section][n][kept]
//   planes     of each lane as planes.py has it            one output
//              w = (nibble + offset) * scale; offset = 8 - zero point, a whole number
//
// Lines of one input each are read by four, which is what a dot of int8 adds up. 32 inputs of a line:
//
//   lines     k0: o0 o1 | o2 o3 | ..     byte b: outputs 2b, 2b + 1
//             k1: o0 o1 | o2 o3 | ..
//   4 lines -> 8 byte shuffles -> 4 vectors, in which lane r (32 bits) has byte b of the four inputs
//           -> 4 vectors of even outputs, 4 of odd ones -> dots with four activations, the same in all lanes
//
// Counted with vectors of 64 bytes and one row, for 2 KB: 32 loads, 64 shuffles, 96 logical operations, 64 dots, 56 loads
// and 56 stores of sums and 24 operations to scale; blocks of matrix.h take 32 loads, 96 logical operations, 64 dots and
// 24. More rows share what a line was unpacked to.
//
// Memory is fast only where it is read from one end to the other: two cores of Zen 5 read 52 GB/s so, but 35 in runs of
// 256 to 1024 bytes, however early they are prefetched. So a task of few rows has a slab of inputs and all outputs: it
// reads four whole lines at a time, whose sums wait in the first cache for the other lines of 32 inputs. A second pass
// adds up the slabs.
//
// In planes, activations are put in the order of lanes, once for a window. Sums of a column stay in lanes until its
// section ends, when they are multiplied by the lanes' scales and added up. They are as large as 1 to 8 lines, so only
// few columns are read at a time: mere reads in that order reach 33 to 40 GB/s.
//
// A row's results do not depend on the other rows, nor on how outputs are divided into windows.
#pragma once

#include "kernels/ops.h"

namespace umbra {

// A matrix. That of any expert has the offsets of its planes in a block for pointers, and is `moved` to one.
struct SlotMatrix {
    Format format{};
    Type type = Type::f32;  // of scales and offsets, and of floats
    Type of_bias = Type::f32;
    int32_t group = 0;
    int64_t n = 0, k = 0;
    int32_t groups = 0, lanes = 0, unit = 0;  // in planes, else 0
    const uint8_t *data = nullptr, *scales = nullptr, *offsets = nullptr, *bias = nullptr;

    const FormatTraits& traits() const { return traits_of(format); }
    bool quantised() const { return traits().quantised(); }
    bool in_planes() const { return lanes != 0; }
    int64_t sections() const { return k / group / groups; }
    int64_t planes() const { return static_cast<int64_t>(group) * groups / lanes; }  // of a section
    int64_t kept() const { return unit == 1 ? groups : (groups + 7) / 8 * 8; }
    int64_t line_bytes() const { return n * traits().bits / 8; }  // of one input
    SlotMatrix moved(int64_t address) const;
    int64_t slab() const;  // inputs of a slab
    int64_t slabs() const { return (k + slab() - 1) / slab(); }
    int64_t lane(int64_t input, int64_t output) const;  // in planes, the number of a weight's nibble
};

constexpr int64_t kSlotTile = 128, kSlotWindow = 512;  // outputs of a task, and the most that a window has
constexpr int64_t kSlotWide = 8192;                    // the same of up to kSlotFew rows of a slab
constexpr int kSlotRows = 16, kSlotFew = 2;            // rows of a window

// The products of outputs first .. end - 1 and slabs begin .. stop - 1 with `count` rows, whose numbers in `rows` are in
// `index`; null means 0, 1, 2 ... They go to y[t * stride + output - first]. `next`, or null, is read after it.
struct SlotWindow {
    const Kernels& kernels;
    const SlotMatrix& w;
    int64_t first, end, begin, stop;
    const Rows& rows;
    const int32_t* index;
    int count;
    float* y;
    int64_t stride;
    const uint8_t* next;
};
void slot_products(const SlotWindow& window);

struct SlotKernels {
    void (*nibbles)(const SlotWindow&);  // of q4 that is not in planes, and of w8a8
    void (*levels)(const SlotWindow&);
    void (*floats)(const SlotWindow&);
    void (*planes)(const SlotWindow&);
};

// Multiplies the products of outputs `first` .. `first` + count - 1 by w8a8's scales and adds the bias.
void finish_slots(const SlotMatrix& w, int64_t first, int64_t count, float* y);

// A mixture's experts. In planes, w13 has 16 columns of gate and 16 of up in turns, in the order in which w2 has its
// inputs; else all columns of gate, then all of up.
struct SlotExperts {
    SlotMatrix w13, w2;
    std::vector<int32_t> order;  // in planes: the input of w2 that each pair of columns makes
};

}  // namespace umbra
