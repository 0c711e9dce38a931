// Ways to store a task's sums from room.y (rows, ranges * pitch), and the addition of the parts of K.
#pragma once
#include "umbra_product.h"

namespace umbra {

// Stores the sums, rounded to T, in y (pairs, N).
template <typename T> struct Rounded {
    Room& room;
    const GlobalTensor<T>& y;
    uint32_t n;

    __aicore__ inline void Store(const Done& d) const {
        LocalTensor<T> out = room.out.template AllocTensor<T>();
        AscendC::Cast(out, room.y, RoundMode::CAST_RINT, d.unit.rows * d.pitch);
        AscendC::PipeBarrier<PIPE_V>();
        room.Store(out, d.unit, d.pitch, d.width, y[d.column], n);
    }
};

// Stores the first `width` values of room.y, rounded to T, in `to`.
template <typename T> __aicore__ inline void StoreRounded(Room& room, const GlobalTensor<T>& to, uint32_t width) {
    LocalTensor<T> out = room.out.template AllocTensor<T>();
    AscendC::Cast(out, room.y, RoundMode::CAST_RINT, width);
    AscendC::PipeBarrier<PIPE_V>();
    room.Store(out, Unit{0, 1, {0}}, 0, width, to, 0);
}

// Stores the sums as float in one of `parts` (parts, pairs, N).
struct Partial {
    Room& room;
    const GlobalTensor<float>& parts;
    uint32_t pairs, n, ranges;

    __aicore__ inline void Store(const Done& d) const {
        const uint32_t wide = ranges * d.pitch;
        for (uint32_t i = 0; i < ranges; ++i) {
            LocalTensor<float> out = room.out.AllocTensor<float>();
            for (uint32_t r = 0; r < d.unit.rows; ++r)
                AscendC::Adds(out[r * d.pitch], room.y[r * wide + i * d.pitch], 0.0f, d.pitch);
            AscendC::PipeBarrier<PIPE_V>();
            const uint64_t at = static_cast<uint64_t>(d.part) * pairs * n + i * (n / ranges) + d.column;
            room.Store(out, d.unit, d.pitch, d.width, parts[at], n);
        }
    }
};

// out = gate / (1 + exp(-gate)) * up
__aicore__ inline void SwiGlu(const LocalTensor<float>& out, const LocalTensor<float>& gate,
                              const LocalTensor<float>& up, uint32_t count) {
    AscendC::Muls(out, gate, -1.0f, count);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Exp(out, out, count);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(out, out, 1.0f, count);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Div(out, gate, out, count);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Mul(out, out, up, count);
    AscendC::PipeBarrier<PIPE_V>();
}

// Applies SwiGLU to the two ranges, gate and up, and stores h (pairs, I) as half. In each row, the `width` values of a
// tile are divided by a power of two.
struct Gated {
    Room& room;
    const Powered& h;
    uint32_t inner;

    __aicore__ inline void Store(const Done& d) const {
        constexpr uint32_t kPowers = kMostRows * kWidest / 2;  // floats before the powers in `out`
        for (uint32_t r = 0; r < d.unit.rows; ++r) {
            const LocalTensor<float> gate = room.y[2 * r * d.pitch];
            SwiGlu(room.x[r * d.pitch], gate, gate[d.pitch], d.pitch);
        }
        room.Normalise(d.unit.rows, d.pitch, d.width);
        LocalTensor<float> out = room.out.AllocTensor<float>();
        AscendC::Cast(out.ReinterpretCast<half>(), room.x, RoundMode::CAST_RINT, d.unit.rows * d.pitch);
        AscendC::Adds(out[kPowers], room.power, 0.0f, d.unit.rows * 8);
        AscendC::PipeBarrier<PIPE_V>();
        room.out.EnQue(out);
        out = room.out.DeQue<float>();
        const LocalTensor<half> rows = out.ReinterpretCast<half>();
        for (uint32_t r = 0; r < d.unit.rows; ++r) {
            const uint64_t pair = d.unit.pair[r], run = pair * Ceil(inner, h.run) + d.column / h.run;
            AscendC::DataCopyPad(h.rows[pair * inner + d.column], rows[r * d.pitch],
                                 {1, static_cast<uint32_t>(d.width * sizeof(half)), 0, 0, 0});
            AscendC::DataCopyPad(h.powers[run * 8], out[kPowers + r * 8], {1, 32, 0, 0, 0});
        }
        room.out.FreeTensor(out);
    }
};

// Stores the sums, multiplied by the pair's weight, in `shares` (pairs, N).
struct Weighted {
    Room& room;
    const GlobalTensor<float>& shares;
    const float* weights;  // weight of each pair
    uint32_t n;

    __aicore__ inline void Store(const Done& d) const {
        LocalTensor<float> out = room.out.AllocTensor<float>();
        for (uint32_t r = 0; r < d.unit.rows; ++r)
            AscendC::Muls(out[r * d.pitch], room.y[r * d.pitch], weights[d.unit.pair[r]], d.pitch);
        AscendC::PipeBarrier<PIPE_V>();
        room.Store(out, d.unit, d.pitch, d.width, shares[d.column], n);
    }
};

// sum (width) = the sum of `rows` rows of `from`, which are `stride` apart.
__aicore__ inline void SumRows(Room& room, const LocalTensor<float>& sum, const GlobalTensor<float>& from,
                               uint32_t rows, uint64_t stride, uint32_t width) {
    LocalTensor<float> in = room.stream.AllocTensor<float>();
    const uint32_t pitch = Up(width, 8);
    for (uint32_t r = 0; r < rows; ++r) room.Fetch(in[r * pitch], from[r * stride], width);
    room.stream.EnQue(in);
    in = room.stream.DeQue<float>();
    room.AddUp(in, rows, pitch);
    AscendC::Adds(sum, in, 0.0f, width);
    AscendC::PipeBarrier<PIPE_V>();
    room.stream.FreeTensor(in);
}

}  // namespace umbra
