// y (rows, N) = x (rows, K) times w (K, N / 8) in 4 bits: all rows use the same matrix.
#include "umbra_finish.h"

namespace umbra {

constexpr uint32_t kSlice = 256;  // columns that are summed up together

// `parts` (t.parts, rows, N): workspace for the sums of parts of K.
template <typename T, bool kHalfSums>
__aicore__ inline void Gemv(Room& room, const Bank& bank, GM_ADDR xAt, GM_ADDR yAt, GM_ADDR partsAt,
                            const UmbraGemvTiling& t) {
    GlobalTensor<T> x, y;
    GlobalTensor<float> parts;
    x.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(xAt));
    y.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(yAt));
    parts.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(partsAt));
    const uint32_t rows = t.tokens, n = t.n, slices = Ceil(n, kSlice);
    Units units;
    for (uint32_t row = 0; row < rows; ++row) units.Add(row, 0, row > 0);

    Product<T, T, kHalfSums> product(room, units, bank, x, 1, 1);
    product.Cut(t.parts, kLanes, true);
    const uint32_t cut = product.split.parts;
    if (cut == 1) {
        product.Run(Rounded<T>{room, y, n});
        return;
    }
    product.Run(Partial{room, parts, rows, n, 1});
    Meet();
    for (uint32_t i = AscendC::GetBlockIdx(); i < rows * slices; i += AscendC::GetBlockNum()) {
        const uint32_t row = i / slices, column = i % slices * kSlice, width = Least(kSlice, n - column);
        const uint64_t at = static_cast<uint64_t>(row) * n + column;
        SumRows(room, room.y, parts[at], cut, static_cast<uint64_t>(rows) * n, width);
        StoreRounded<T>(room, y[at], width);
    }
}

}  // namespace umbra

template <typename T, bool kHalfSums>
__aicore__ inline void Run(GM_ADDR x, GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, GM_ADDR y, GM_ADDR parts,
                           const UmbraGemvTiling& t) {
    umbra::Room room;
    room.Init();
    const umbra::Bank bank(w, scales, zeros, t.zeros, t.k, t.n, t.group);
    umbra::Gemv<T, kHalfSums>(room, bank, x, y, parts, t);
}

extern "C" __global__ __aicore__ void umbra_gemv_w4a16(GM_ADDR x, GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, GM_ADDR y,
                                                       GM_ADDR workspace, GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    GET_TILING_DATA(t, tiling);
    GM_ADDR parts = AscendC::GetUserWorkspace(workspace);
    if (TILING_KEY_IS(1))
        Run<half, false>(x, w, scales, zeros, y, parts, t);
    else if (TILING_KEY_IS(2))
        Run<bfloat16_t, false>(x, w, scales, zeros, y, parts, t);
    else if (TILING_KEY_IS(3))
        Run<half, true>(x, w, scales, zeros, y, parts, t);
    else if (TILING_KEY_IS(4))
        Run<bfloat16_t, true>(x, w, scales, zeros, y, parts, t);
}
