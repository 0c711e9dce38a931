// A mixture of experts in one launch: y[t] = sum over j of weights[t, j] W2 (silu(gate) * up), [gate | up] = W13 x[t].
//
//   1  W13: tiles of gate and the same of up, together; SwiGLU on the sums      -> h (pairs, I) half, with powers of two
//   2  W2 times h, times the pair's weight                                      -> shares (pairs, H) float
//   3  the shares of a token's experts, added up in the order of ids, rounded   -> y
//
// All cores synchronise between these steps. If there are too few tiles for the cores, step 1 is split along K, and an
// additional step adds its parts up and applies SwiGLU. The workspace holds, in floats: parts (parts, pairs, 2 I) if
// there is more than one, pairs * I for h and its powers of two, and shares (pairs, H).
#pragma once
#include "umbra_finish.h"

namespace umbra {

struct Weights {
    float of[kMostPairs];

    // Reads the weights (pairs), of type T, from global memory.
    template <typename T> __aicore__ inline void Read(Room& room, GM_ADDR weights, uint32_t pairs) {
        GlobalTensor<T> from;
        from.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(weights));
        LocalTensor<T> in = room.stream.template AllocTensor<T>();
        room.Fetch(in, from, pairs);
        room.stream.EnQue(in);
        in = room.stream.template DeQue<T>();
        AscendC::Cast(room.x, in, RoundMode::CAST_NONE, pairs);
        room.stream.FreeTensor(in);
        Hand<HardEvent::V_S>(room.pipe);
        for (uint32_t i = 0; i < pairs; ++i) of[i] = room.x.GetValue(i);
        Hand<HardEvent::S_V>(room.pipe);
    }
};

// h = SwiGLU of the sums over parts (parts, pairs, 2 I), computed one tile of a pair at a time.
__aicore__ inline void JoinParts(Room& room, const Units& units, const GlobalTensor<float>& parts, const Powered& h,
                                 uint32_t pairs, uint32_t inner, uint32_t cut) {
    const uint32_t tiles = Ceil(inner, h.run);
    const uint64_t stride = static_cast<uint64_t>(pairs) * 2 * inner;
    for (uint32_t i = AscendC::GetBlockIdx(); i < pairs * tiles; i += AscendC::GetBlockNum()) {
        const uint32_t pair = i / tiles, column = i % tiles * h.run, width = Least(h.run, inner - column);
        if (!units.here[pair]) continue;
        const uint64_t at = static_cast<uint64_t>(pair) * 2 * inner + column;
        SumRows(room, room.y, parts[at], cut, stride, width);
        SumRows(room, room.y[width], parts[at + inner], cut, stride, width);
        Gated{room, h, inner}.Store({Unit{0, 1, {static_cast<uint16_t>(pair)}}, 0, column, width, width});
    }
}

// y = for each token the sum of the shares of its pairs that are in some unit.
template <typename T>
__aicore__ inline void JoinShares(Room& room, const Units& units, const GlobalTensor<float>& shares,
                                  const GlobalTensor<T>& y, uint32_t tokens, uint32_t topK, uint32_t hidden) {
    const uint32_t slice = Least(Up(Ceil(tokens * hidden, AscendC::GetBlockNum()), kLanes), kWidest);
    const uint32_t slices = Ceil(hidden, slice), most = kStream / sizeof(float) / slice;  // rows that fit in a buffer
    for (uint32_t i = AscendC::GetBlockIdx(); i < tokens * slices; i += AscendC::GetBlockNum()) {
        const uint32_t token = i / slices, column = i % slices * slice, width = Least(slice, hidden - column);
        AscendC::Duplicate(room.y, 0.0f, slice);
        for (uint32_t j = 0; j < topK;) {
            LocalTensor<float> in = room.stream.AllocTensor<float>();
            uint32_t rows = 0;
            for (; j < topK && rows < most; ++j) {
                const uint32_t pair = token * topK + j;
                if (units.here[pair])
                    room.Fetch(in[rows++ * slice], shares[static_cast<uint64_t>(pair) * hidden + column], width);
            }
            room.stream.EnQue(in);
            in = room.stream.DeQue<float>();
            AscendC::PipeBarrier<PIPE_V>();
            for (uint32_t r = 0; r < rows; ++r) {
                AscendC::Add(room.y, room.y, in[r * slice], width);
                AscendC::PipeBarrier<PIPE_V>();
            }
            room.stream.FreeTensor(in);
        }
        StoreRounded<T>(room, y[static_cast<uint64_t>(token) * hidden + column], width);
    }
}

// `up` is W13, `down` is W2.
template <typename T, bool kHalfSums>
__aicore__ inline void FusedMoe(Room& room, const Units& units, const Weights& weights, const Bank& up,
                                const Bank& down, GM_ADDR xAt, GM_ADDR yAt, GM_ADDR workspace,
                                const UmbraGemvTiling& t) {
    const uint32_t pairs = t.tokens * t.topK, hidden = t.k, inner = t.n;
    GlobalTensor<T> x, y;
    GlobalTensor<float> parts, shares;
    x.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(xAt));
    y.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(yAt));
    __gm__ float* free = reinterpret_cast<__gm__ float*>(workspace);
    parts.SetGlobalBuffer(free);
    free += t.parts > 1 ? static_cast<uint64_t>(t.parts) * pairs * 2 * inner : 0;
    Powered h;
    h.rows.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(free));
    h.powers.SetGlobalBuffer(free + pairs * inner / 2);
    shares.SetGlobalBuffer(free + pairs * inner);

    Product<T, T, kHalfSums> first(room, units, up, x, t.topK, 2);
    // All values for one group of W2 must have the same power.
    first.Cut(t.parts, t.group2 > kLanes ? t.group2 : kLanes, false);
    h.run = first.split.width;
    if (first.split.parts == 1) {
        first.Run(Gated{room, h, inner});
    } else {
        first.Run(Partial{room, parts, pairs, 2 * inner, 2});
        Meet();
        JoinParts(room, units, parts, h, pairs, inner, first.split.parts);
    }
    Meet();
    Product<T, Powered, kHalfSums> second(room, units, down, h, 1, 1);
    second.Cut(1, kLanes, false);
    second.Run(Weighted{room, shares, weights.of, hidden});
    Meet();
    JoinShares(room, units, shares, y, t.tokens, t.topK, hidden);
}

}  // namespace umbra
