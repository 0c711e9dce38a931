// The grouped product of one launch: each unit's rows with its expert's matrix, rows of ids that are nobody's zero.
#pragma once
#include "umbra_finish.h"

namespace umbra {

constexpr uint32_t kSlice = 256; // columns that are summed up together

// y (pairs, N) from x (pairs / sharing, K); `parts`: room for the sums of parts of K, (mostParts, pairs, N).
template <typename T, bool kHalfSums>
__aicore__ inline void Grouped(
    Room& room, const Units& units, const Bank& bank, GM_ADDR xAt, GM_ADDR yAt, GM_ADDR partsAt, uint32_t pairs,
    uint32_t sharing, uint32_t mostParts) {
    GlobalTensor<T> x, y;
    GlobalTensor<float> parts;
    x.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(xAt));
    y.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(yAt));
    parts.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(partsAt));
    const uint32_t n = bank.n, slices = Ceil(n, kSlice);

    Product<T, T, kHalfSums> product(room, units, bank, x, sharing, 1);
    product.Cut(mostParts, kLanes, true);
    const uint32_t cut = product.split.parts;
    if (cut == 1) {
        product.Run(Rounded<T>{room, y, n});
    } else {
        product.Run(Partial{room, parts, pairs, n, 1});
        Meet();
    }
    for (uint32_t i = AscendC::GetBlockIdx(); i < pairs * slices; i += AscendC::GetBlockNum()) {
        const uint32_t pair = i / slices, column = i % slices * kSlice, width = Least(kSlice, n - column);
        if (cut == 1 && units.here[pair])
            continue; // written already
        const uint64_t at = static_cast<uint64_t>(pair) * n + column;
        if (units.here[pair])
            SumRows(room, room.y, parts[at], cut, static_cast<uint64_t>(pairs) * n, width);
        else
            AscendC::Duplicate(room.y, 0.0f, width);
        AscendC::PipeBarrier<PIPE_V>();
        StoreRounded<T>(room, y[at], width);
    }
}

} // namespace umbra
