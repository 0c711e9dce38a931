// y (rows, N) = x (rows, K) times w (K, N) in 4 bits: all rows use the same matrix. Each core has its own columns of y.
#include "umbra_columns.h"
#include "umbra_rows.h"

namespace umbra {

// Stores the sums of a tile, room.task (rows of a unit, kTilePitch), as soon as they are complete.
template <typename T> struct TileSums {
    Room& room;
    const Units& units;
    const GlobalTensor<T>& y;
    uint32_t n;

    __aicore__ inline LocalTensor<float> To(const Unit&, uint32_t r) const { return room.task[r * kTilePitch]; }

    template <typename Source> __aicore__ inline void Done(Source& product, const Block& block) {
        const Unit& unit = units.At(block.unit);
        product.Finish();
        StoreTile<T>(room, y[static_cast<uint64_t>(unit.pair[0]) * n + block.column], unit.rows, block.width, n);
    }
};

template <typename T, bool kFloatSums>
__aicore__ inline void Gemv(const Bank& bank, GM_ADDR xAt, GM_ADDR yAt, const UmbraGemvTiling& t) {
    const Matrix matrix(bank, t.n, t.zeros, std::is_same<T, bfloat16_t>::value, kFloatSums, t.sections, t.groups,
                        t.planes, t.lanes, t.unit);
    GlobalTensor<T> x, y;
    x.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(xAt));
    y.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(yAt));
    const uint32_t values = Most(kValues, t.k), slots = Least(kMostRows, values / t.k);
    Room room;
    room.Init(Up(matrix.Widest(), 8) * matrix.kept, 2 * values, t.zeros ? 4 * slots * matrix.sections * matrix.kept : 0,
              0);
    Units units;
    units.most = slots;
    for (uint32_t row = 0; row < t.tokens; ++row) units.Add(row, 0, row > 0);
    units.Order();
    InputRows<T> rows(room, matrix, x, t.tokens, 1, slots);
    Product<kFloatSums, InputRows<T>> product(room, units, matrix, rows);
    product.Start(OwnColumns(matrix, units, false));
    AscendC::Duplicate(room.task, 0.0f, kTask);
    Barrier();
    TileSums<T> sums{room, units, y, t.n};
    product.Run(sums);
}

}  // namespace umbra

extern "C" __global__ __aicore__ void umbra_gemv_w4a16(GM_ADDR x, GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, GM_ADDR y,
                                                       GM_ADDR workspace, GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    GET_TILING_DATA(t, tiling);
    const umbra::Bank bank{w, scales, zeros, 0};
    if (TILING_KEY_IS(1))
        umbra::Gemv<half, false>(bank, x, y, t);
    else if (TILING_KEY_IS(2))
        umbra::Gemv<bfloat16_t, false>(bank, x, y, t);
    else if (TILING_KEY_IS(3))
        umbra::Gemv<half, true>(bank, x, y, t);
    else if (TILING_KEY_IS(4))
        umbra::Gemv<bfloat16_t, true>(bank, x, y, t);
}
