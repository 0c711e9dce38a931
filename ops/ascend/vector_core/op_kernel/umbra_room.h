// The unified buffer of one vector core (192 KB, all but 256 bytes of it), and operations that all ops share.
//
//   stream   2 or 3 x 16.5 KB  a block of weights: planes of a tile of columns; also rows of x and h, ids, places
//   scales   1 to 4            of a tile, for one section; zero points after them
//   words        66 KB  half: a block of weights, then its products and their sums
//   last         8.3 KB half: the last sums of a block's products, one plane
//   sums        16.5 KB float: the sums over all blocks of a section, one plane
//   scaled   up to 16 KB  float: scales, then scaled sums (columns, groups)
//   groups       2.8 KB float: sums of lanes (columns, groups), or of groups (columns, 8)
//   values      16 KB   half: rows of x or h, as they are multiplied
//   task                float: what a phase keeps: sums of tiles, of tokens; powers of two of h
//   out          2.3 KB on its way to global memory
//   small               float: powers of two of x, constants
#pragma once
#include <type_traits>

#include "kernel_operator.h"

namespace umbra {

using AscendC::BinaryRepeatParams;
using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::RoundMode;
using AscendC::TPosition;

constexpr uint32_t kLanes = 64;                    // floats in a vector
constexpr uint32_t kUnifiedBuffer = 196608 - 256;  // bytes that the platform gives a kernel of a 910B's 192 KB
constexpr uint32_t kMoved = 16896;                 // most bytes of weights in a move
constexpr uint32_t kWords = 2 * kMoved;            // most halves of a block
constexpr uint32_t kPlane = 4224;                  // most halves or floats in `last`, `sums`
constexpr uint32_t kGroups = 704;                  // most floats in `groups`
constexpr uint32_t kKept = 4096;                   // most scales of a tile
constexpr uint32_t kValues = 8192;                 // halves in `values`, unless one row has more
constexpr uint32_t kTask = 1024;                   // floats: sums of phase 1, or of a tile of y
constexpr uint32_t kWindow = 32;                   // most rows of h in `values`
constexpr uint32_t kLeastScaled = 512;             // floats in `scaled`
constexpr uint32_t kOut = 2304;                    // bytes
constexpr uint32_t kScalars = kMoved / 4;          // most scalars of four bytes that are read at once

__aicore__ inline uint32_t Ceil(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
__aicore__ inline uint32_t Up(uint32_t a, uint32_t b) { return Ceil(a, b) * b; }
__aicore__ inline uint32_t Least(uint32_t a, uint32_t b) { return a < b ? a : b; }
__aicore__ inline uint32_t Most(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Makes the second pipe of `event` wait until the first pipe has finished its instructions so far.
template <HardEvent event> __aicore__ inline void Hand(AscendC::TPipe& pipe) {
    const event_t id = static_cast<event_t>(pipe.FetchEventID(event));
    AscendC::SetFlag<event>(id);
    AscendC::WaitFlag<event>(id);
}

__aicore__ inline void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }

struct Room {
    AscendC::TPipe pipe;
    AscendC::TQue<TPosition::VECIN, 3> stream;
    AscendC::TQue<TPosition::VECIN, 4> scales;
    AscendC::TQue<TPosition::VECOUT, 1> out;
    AscendC::TBuf<TPosition::VECCALC> wordsBuf, lastBuf, sumsBuf, scaledBuf, groupsBuf, valuesBuf, taskBuf, smallBuf;
    LocalTensor<half> words, last, values;
    LocalTensor<float> sums, scaled, groups, columns, task, sumsOfX;
    LocalTensor<float> powers, inverses, rowPowers, ones;  // (8, 8) each; rowPowers: of the rows in `values`
    LocalTensor<float> largest;                            // (8)
    LocalTensor<float> sorting;                            // in `words`, from a multiple of 256 bytes on
    LocalTensor<uint16_t> exponent;                        // a mask of a float's exponent bits, over one vector
    uint32_t depth, depthOfScales, scalesInUse = 0;        // numbers of buffers
    uint32_t scalesBytes;                                  // of one buffer, without zero points

    // kept: most scales of a tile, whose columns are a multiple of 8. valueBytes: bytes of `values`, sumsOfXBytes of the sums of x that zero points need (0:
    // there are none). pairs: most rows of h.
    __aicore__ inline void Init(uint32_t kept, uint32_t valueBytes, uint32_t sumsOfXBytes, uint32_t pairs) {
        const bool zeros = sumsOfXBytes > 0;
        scalesBytes = kept * sizeof(half);
        const uint32_t eachOfScales = zeros ? 2 * scalesBytes : scalesBytes;
        const uint32_t taskBytes = (kTask + 2 * Up(pairs, 8) + 2 * (kWindow + 8) * 8) * sizeof(float);
        const uint32_t smallBytes = (5 * kLanes + 32 + 2 * kLanes) * sizeof(float);
        const uint32_t scaledBytes = Most(kept, kLeastScaled) * sizeof(float);
        const uint32_t taken = 2 * kWords + 6 * kPlane + scaledBytes + kGroups * 4 + valueBytes + sumsOfXBytes +
                               taskBytes + kOut + smallBytes;
        depth = kUnifiedBuffer - taken >= 3 * kMoved + 4 * eachOfScales ? 3 : 2;
        depthOfScales = Least(4, (kUnifiedBuffer - taken - depth * kMoved) / eachOfScales);
        pipe.InitBuffer(stream, depth, kMoved);
        pipe.InitBuffer(scales, depthOfScales, eachOfScales);
        pipe.InitBuffer(out, 1, kOut);
        pipe.InitBuffer(wordsBuf, 2 * kWords);
        pipe.InitBuffer(lastBuf, 2 * kPlane);
        pipe.InitBuffer(sumsBuf, 4 * kPlane);
        pipe.InitBuffer(scaledBuf, scaledBytes);
        pipe.InitBuffer(groupsBuf, kGroups * 4);
        pipe.InitBuffer(valuesBuf, valueBytes + sumsOfXBytes);
        pipe.InitBuffer(taskBuf, taskBytes);
        pipe.InitBuffer(smallBuf, smallBytes);
        words = wordsBuf.Get<half>();
        const uint32_t before = depth * kMoved + depthOfScales * eachOfScales + kOut;
        sorting = words[(Up(before, 256) - before) / 2].ReinterpretCast<float>();
        last = lastBuf.Get<half>();
        sums = sumsBuf.Get<float>();
        scaled = scaledBuf.Get<float>();
        groups = groupsBuf.Get<float>();
        values = valuesBuf.Get<half>();
        if (zeros) sumsOfX = values[valueBytes / 2].ReinterpretCast<float>();
        task = taskBuf.Get<float>();
        LocalTensor<float> small = smallBuf.Get<float>();
        powers = small;
        inverses = small[64];
        rowPowers = small[128];
        ones = small[192];
        exponent = small[256].ReinterpretCast<uint16_t>();
        largest = small[320];
        columns = small[352];
        AscendC::Duplicate(small, 1.0f, 256);
        AscendC::Duplicate(small[256].ReinterpretCast<uint32_t>(), 0x7f800000u, kLanes);
        AscendC::Duplicate(largest, 1.0f, 32);  // Brcb always reads eight values, even if fewer are used
        // Gaps between planes, and columns beyond a tile, are computed and never used; they must be numbers, not NaN.
        AscendC::Duplicate(scaled, 0.0f, scaledBytes / sizeof(float));
        for (uint32_t i = 0; i < depth; ++i) {
            LocalTensor<float> in = stream.AllocTensor<float>();
            AscendC::Duplicate(in, 0.0f, kMoved / sizeof(float));
            stream.FreeTensor(in);
        }
        Barrier();
    }

    // Copies `count` contiguous values.
    template <typename T>
    __aicore__ inline void Fetch(const LocalTensor<T>& to, const GlobalTensor<T>& from, uint32_t count) {
        AscendC::DataCopyPad(to, from, {1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0},
                             AscendC::DataCopyPadExtParams<T>());
    }

    // Calls taker.Take(i, value) for `count` values of global memory.
    template <typename T, typename Taker>
    __aicore__ inline void ReadScalars(const GlobalTensor<T>& from, uint32_t count, Taker& taker) {
        LocalTensor<T> in = stream.AllocTensor<T>();
        Fetch(in, from, count);
        Hand<HardEvent::MTE2_S>(pipe);
        for (uint32_t i = 0; i < count; ++i) taker.Take(i, in.GetValue(i));
        Hand<HardEvent::S_MTE2>(pipe);
        stream.FreeTensor(in);
    }

    // powers = the powers of two of `of` (8), and inverses theirs, each eight times.
    __aicore__ inline void PowersOf(const LocalTensor<float>& of) {
        AscendC::Maxs(of, of, 1e-30f, 8);
        Barrier();
        AscendC::Brcb(powers, of, 1, {1, 8});
        Barrier();
        AscendC::And(powers.ReinterpretCast<uint16_t>(), powers.ReinterpretCast<uint16_t>(), exponent, 128);
        Barrier();
        AscendC::Div(inverses, ones, powers, 64);
        Barrier();
    }
};

// Multiplies a row of `count` floats by the value that fills the block `by`.
__aicore__ inline void Scale(const LocalTensor<float>& to, const LocalTensor<float>& from, const LocalTensor<float>& by,
                             uint32_t count) {
    const uint32_t whole = count / kLanes, rest = count % kLanes;
    if (whole) AscendC::Mul(to, from, by, kLanes, static_cast<uint8_t>(whole), {1, 1, 0, 8, 8, 0});
    if (rest) AscendC::Mul(to[whole * kLanes], from[whole * kLanes], by, rest, 1, {1, 1, 0, 8, 8, 0});
}

// to (Ceil(count, 8)) = the largest, or the sum, of each eight of `count` values.
template <bool kSum>
__aicore__ inline void Eighth(const LocalTensor<float>& to, const LocalTensor<float>& from, uint32_t count) {
    const int32_t whole = count / kLanes, rest = count % kLanes;
    if constexpr (kSum) {
        if (whole) AscendC::BlockReduceSum(to, from, whole, static_cast<int32_t>(kLanes), 1, 1, 8);
        if (rest) AscendC::BlockReduceSum(to[whole * 8], from[whole * kLanes], 1, rest, 1, 1, 8);
    } else {
        if (whole) AscendC::BlockReduceMax(to, from, whole, static_cast<int32_t>(kLanes), 1, 1, 8);
        if (rest) AscendC::BlockReduceMax(to[whole * 8], from[whole * kLanes], 1, rest, 1, 1, 8);
    }
}

}  // namespace umbra
