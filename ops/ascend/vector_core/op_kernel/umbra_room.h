// The unified buffer of one vector core (192 KB), and the operations on it that all ops share.
//
//   stream   2 x 42 KB   from global memory: 32 KB of weights, their scales and zero points, the rows of x for them
//   weights      64 KB   half: up to half of a move, later its products; the second half of the buffer then holds sums of 8
//                        rows in float (float sums take only a quarter of a move at a time, so that both have room)
//   y             8 KB   float: the sums of the task so far, (rows, columns)
//   out           8 KB   on its way to global memory
//   spread        8 KB   each value of a row of x sixteen times (a 32-byte block); later sums of 8 rows in half, scaled sums
//   x, xHalf      6 KB   the rows of x in float, and in half as they are multiplied
//   scales, zeros 8 KB   in float
#pragma once
#include "kernel_operator.h"
#include "umbra_plan.h"

namespace umbra {

using AscendC::BinaryRepeatParams;
using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::RoundMode;
using AscendC::TPosition;

constexpr uint32_t kLanes = 64, kHalfLanes = 128;  // floats, halves in a vector
constexpr uint32_t kMoved = 65536;                 // most nibbles in a move: 32 KB
constexpr uint32_t kBlock = kMoved / 2;            // most nibbles that are converted to half at a time
constexpr uint32_t kSummed = 8;                    // rows that are added up first
constexpr uint32_t kMostStep = 256;                // most rows in a move
constexpr uint32_t kMostRepeats = 128;             // most repeats of an instruction here; the device's limit is 255
constexpr uint32_t kMostX = 1024;                  // most values of x for one move
constexpr uint32_t kWidest = 256;                  // most columns of a tile
constexpr uint32_t kScalesAt = kMoved / 2, kZerosAt = kScalesAt + 4096, kXAt = kZerosAt + 4096;
constexpr uint32_t kPowersAt = kXAt + 2 * kMostX, kStream = kPowersAt + kMostX / kLanes * 32;
constexpr uint32_t kDepth = 2;

// Makes the second pipe of `event` wait until the first pipe has finished its instructions so far.
template <HardEvent event> __aicore__ inline void Hand(AscendC::TPipe& pipe) {
    const event_t id = static_cast<event_t>(pipe.FetchEventID(event));
    AscendC::SetFlag<event>(id);
    AscendC::WaitFlag<event>(id);
}

struct Room {
    AscendC::TPipe pipe;
    AscendC::TQue<TPosition::VECIN, kDepth> stream;
    AscendC::TQue<TPosition::VECOUT, 1> out;
    AscendC::TBuf<TPosition::VECCALC> weightsBuf, yBuf, spreadBuf, xBuf, xHalfBuf, scalesBuf, zerosBuf, smallBuf;
    LocalTensor<half> weights, spread, xHalf;
    LocalTensor<float> sums, y, scaled, x, scales, zeros;
    LocalTensor<float> largest, power, sumsOfX, spreadSums;  // (8, 8) each, the last but one (8)
    LocalTensor<uint16_t> exponent;                          // a mask of a float's exponent bits, over one vector

    __aicore__ inline void Init() {
        pipe.InitBuffer(stream, kDepth, kStream);
        pipe.InitBuffer(out, 1, kMostRows * kWidest * sizeof(float));
        pipe.InitBuffer(weightsBuf, kBlock * sizeof(half));
        pipe.InitBuffer(yBuf, kMostRows * kWidest * sizeof(float));
        pipe.InitBuffer(spreadBuf, kMostStep * 32);
        pipe.InitBuffer(xBuf, kMostX * sizeof(float));
        pipe.InitBuffer(xHalfBuf, kMostX * sizeof(half));
        pipe.InitBuffer(scalesBuf, kBlock / 32 * sizeof(float));
        pipe.InitBuffer(zerosBuf, kBlock / 32 * sizeof(float));
        pipe.InitBuffer(smallBuf, 1152);
        weights = weightsBuf.Get<half>();
        sums = weights[kBlock / 2].ReinterpretCast<float>();
        y = yBuf.Get<float>();
        spread = spreadBuf.Get<half>();
        scaled = spread.ReinterpretCast<float>();
        x = xBuf.Get<float>();
        xHalf = xHalfBuf.Get<half>();
        scales = scalesBuf.Get<float>();
        zeros = zerosBuf.Get<float>();
        LocalTensor<float> small = smallBuf.Get<float>();
        largest = small;
        power = small[64];
        spreadSums = small[128];
        sumsOfX = small[192];
        exponent = small[224].ReinterpretCast<uint16_t>();
        AscendC::Duplicate(small, 1.0f, 224);  // Brcb always reads eight values, even if fewer are used
        AscendC::Duplicate(small[224].ReinterpretCast<uint32_t>(), 0x7f800000u, kLanes);
        // Columns beyond a narrow tile are computed and never stored; they must be numbers, not NaN.
        for (uint32_t i = 0; i < kDepth; ++i) {
            LocalTensor<float> in = stream.AllocTensor<float>();
            AscendC::Duplicate(in, 0.0f, kStream / sizeof(float));
            stream.FreeTensor(in);
        }
        AscendC::PipeBarrier<PIPE_V>();
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

    // Adds rows 1 .. count - 1 of `rows` (count, pitch) to row 0, `values` of each, in a fixed order.
    __aicore__ inline void AddUp(const LocalTensor<float>& rows, uint32_t count, uint32_t pitch) {
        for (uint32_t left = count; left > 1;) {
            const uint32_t pairs = left / 2;
            left -= pairs;
            AscendC::Add(rows, rows, rows[left * pitch], pairs * pitch);
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    // Divides each row of x (rows, pitch) by the power of two of the largest of its first `count` values, which goes to
    // room.power.
    __aicore__ inline void Normalise(uint32_t rows, uint32_t pitch, uint32_t count) {
        // Computes the largest magnitudes of 32 values each, then of each row, and spreads those over a block for each
        // row.
        AscendC::Abs(sums, x, rows * pitch);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t r = 0; r < rows; ++r)
            AscendC::WholeReduceMax<float>(largest[r * 8], sums[r * pitch], 32, count / 32, 1, 1, 4,
                                           AscendC::ReduceOrder::ORDER_ONLY_VALUE);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::WholeReduceMax<float>(sumsOfX, largest, count / 32, rows, 1, 1, 1,
                                       AscendC::ReduceOrder::ORDER_ONLY_VALUE);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Maxs(sumsOfX, sumsOfX, 1e-30f, rows);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Brcb(power, sumsOfX, 1, {1, 8});
        AscendC::PipeBarrier<PIPE_V>();
        const LocalTensor<uint16_t> bits = power.ReinterpretCast<uint16_t>();
        AscendC::And(bits, bits, exponent, 2 * 8 * rows);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t r = 0; r < rows; ++r)
            AscendC::Div(x[r * pitch], x[r * pitch], power[r * 8], 32, count / 32, {1, 1, 0, 4, 4, 0});
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Stores the first `width` values of row r of `rows` (unit.rows, pitch) in row unit.pair[r] of `to` (pairs, stride).
    template <typename T>
    __aicore__ inline void Store(LocalTensor<T>& rows, const Unit& unit, uint32_t pitch, uint32_t width,
                                 const GlobalTensor<T>& to, uint32_t stride) {
        out.EnQue(rows);
        rows = out.DeQue<T>();
        for (uint32_t r = 0; r < unit.rows; ++r)
            AscendC::DataCopyPad(to[static_cast<uint64_t>(unit.pair[r]) * stride], rows[r * pitch],
                                 {1, static_cast<uint32_t>(width * sizeof(T)), 0, 0, 0});
        out.FreeTensor(rows);
    }
};

// Waits until every core has written the values that other cores read next.
__aicore__ inline void Meet() {
    AscendC::PipeBarrier<PIPE_ALL>();
    AscendC::SyncAll<true>();
}

}  // namespace umbra
