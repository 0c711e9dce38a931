// A mixture of experts in one launch: y[t] = sum over j of weights[t, j] W2 (silu(gate) * up), [gate | up] = W13 x[t].
//
//   1  W13: tiles of 16 columns of gate and the same of up; SwiGLU on the sums, times the pair's weight
//                                         -> h (rows, I) float, and the largest value of each tile (I / 16, rows)
//      all cores wait until all of h is stored; the first blocks of W2 are loaded meanwhile
//   2  W2 times h: each core has its own columns of y, for all units, and adds up their rows -> y
//
// A row is a pair that is in some unit, in the order of units. The columns of W13 are stored in the order in which W2 has
// its K, so h needs no other order. The workspace holds h and the largest values.
#pragma once
#include "umbra_choice.h"
#include "umbra_columns.h"
#include "umbra_rows.h"

namespace umbra {

constexpr uint32_t kPairs = 16;                           // columns of gate, and of up, in a tile
constexpr uint32_t kTile = 2 * kPairs;                    // columns of W13
constexpr uint32_t kEntries = kOut / (4 * (kPairs + 8));  // rows of tiles that SwiGLU takes at once

// The cross-core flag by which each core reports that its part of h is in memory. SyncAll would do the same after a
// PipeBarrier<PIPE_ALL>, which ends the loads of W2 first.
//
// Order: a core's stores of h and the report go through MTE3 in the order of issue, so the report follows the stores. The
// wait holds back all that a core issues later, so each load of h follows all reports; what was issued before, the
// loads of W2, goes on. Reuse: in a launch each core sets the flag once and waits once, which leaves its counter as it
// was, 0; launches of a stream follow each other. 11 to 14 are SyncAll's, 0 to 7 those of CANN's Matmul.
constexpr uint16_t kStored = 8;

// h, and the largest value of each tile of each row.
struct Hidden {
    GlobalTensor<float> rows, largest;
    uint32_t inner, pitch;  // pitch: of largest
};

// Collects the sums of W13's tiles in room.task (entries, 2, 16), and makes h of them.
class Gate {
public:
    __aicore__ inline Gate(Room& room, const Units& units, const Weights& weights, const Hidden& hidden)
        : room(room), units(units), weights(weights), hidden(hidden) {
        AscendC::Duplicate(room.task, 0.0f, kTask);
        Barrier();
    }

    __aicore__ inline LocalTensor<float> To(const Unit&, uint32_t r) const { return room.task[(count + r) * kTile]; }

    template <typename Source> __aicore__ inline void Done(Source& product, const Block& block) {
        const Unit& unit = units.At(block.unit);
        for (uint32_t r = 0; r < unit.rows; ++r) {
            pair[count] = unit.pair[r];
            row[count] = unit.first + r;
            tile[count++] = block.column / kTile;
        }
        if (count + units.most <= kEntries) return;
        product.Finish();
        Flush();
    }

    __aicore__ inline void Flush() {
        if (!count) return;
        const LocalTensor<float> sums = room.task, e = room.words.ReinterpretCast<float>(), scratch = e[kLanes * 8];
        const uint8_t n = count, one = kPairs / 8, two = kTile / 8;
        const uint32_t all = count * kPairs;
        AscendC::Muls(e, sums, -1.0f, kPairs, n, {1, 1, one, two});
        Barrier();
        AscendC::Exp(e, e, all);
        Barrier();
        AscendC::Adds(e, e, 1.0f, all);
        Barrier();
        AscendC::Div(e, sums, e, kPairs, n, {1, 1, 1, one, two, one});
        Barrier();
        AscendC::Mul(e, e, sums[kPairs], kPairs, n, {1, 1, 1, one, one, two});
        Barrier();
        LocalTensor<float> out = room.out.AllocTensor<float>();
        for (uint32_t i = 0; i < count; ++i) AscendC::Muls(out[i * kPairs], e[i * kPairs], weights.of[pair[i]], kPairs);
        AscendC::Duplicate(room.task, 0.0f, kTask);
        Barrier();
        AscendC::Abs(scratch, out, all);
        Barrier();
        AscendC::Duplicate(e, 0.0f, Up(count, 8));
        Barrier();
        AscendC::WholeReduceMax<float>(e, scratch, kPairs, n, 1, 1, one, AscendC::ReduceOrder::ORDER_ONLY_VALUE);
        Barrier();
        const LocalTensor<float> largest = out[kEntries * kPairs];
        AscendC::Brcb(largest, e, Ceil(count, 8), {1, 8});
        room.out.EnQue(out);
        out = room.out.DeQue<float>();
        for (uint32_t i = 0; i < count;) {  // rows of one tile that follow each other go together
            uint32_t run = 1;
            while (i + run < count && tile[i + run] == tile[i] && row[i + run] == row[i] + run) ++run;
            const uint32_t gap = (hidden.inner - kPairs) * sizeof(float);
            AscendC::DataCopyPad(hidden.rows[static_cast<uint64_t>(row[i]) * hidden.inner + tile[i] * kPairs],
                                 out[i * kPairs], {static_cast<uint16_t>(run), kPairs * sizeof(float), 0, gap, 0});
            AscendC::DataCopyPad(hidden.largest[tile[i] * hidden.pitch + row[i]], out[kEntries * kPairs + i * 8],
                                 {static_cast<uint16_t>(run), sizeof(float), 0, 0, 0});
            i += run;
        }
        room.out.FreeTensor(out);
        Barrier();
        count = 0;
    }

private:
    Room& room;
    const Units& units;
    const Weights& weights;
    const Hidden& hidden;
    uint32_t count = 0;
    uint16_t pair[kEntries], row[kEntries], tile[kEntries];
};

// Adds up the rows of each token, room.task (tokens, kTilePitch), and stores a tile once all units have added to it.
template <typename T> class TokenSums {
public:
    __aicore__ inline TokenSums(Room& room, const Units& units, const GlobalTensor<T>& y, const UmbraGemvTiling& t)
        : room(room), units(units), y(y), t(t) {}

    __aicore__ inline LocalTensor<float> To(const Unit& unit, uint32_t r) const {
        return room.task[unit.pair[r] / t.topK * kTilePitch];
    }

    template <typename Source> __aicore__ inline void Done(Source& product, const Block& block) {
        if (block.unit + 1 < units.count) return;
        product.Finish();
        Store(block.column, block.width);
    }

    __aicore__ inline void Store(uint32_t column, uint32_t width) {
        StoreTile<T>(room, y[column], t.tokens, width, t.k);
    }

private:
    Room& room;
    const Units& units;
    const GlobalTensor<T>& y;
    const UmbraGemvTiling& t;
};

// powers (rows) = the powers of two of the largest values of all rows of h, and their inverses.
__aicore__ inline void FindPowers(Room& room, const Hidden& hidden, uint32_t rows, const LocalTensor<float>& powers,
                                  const LocalTensor<float>& inverses) {
    const uint32_t pitch = Up(rows, 8), tiles = hidden.inner / kPairs, some = kMoved / sizeof(float) / pitch;
    AscendC::Duplicate(powers, 1e-30f, pitch);
    AscendC::Duplicate(inverses, 1.0f, pitch);
    for (uint32_t tile = 0; tile < tiles; tile += some) {
        uint32_t left = Least(some, tiles - tile);
        LocalTensor<float> in = room.stream.AllocTensor<float>();
        AscendC::DataCopyPad(in, hidden.largest[tile * hidden.pitch],
                             {static_cast<uint16_t>(left), rows * 4, (hidden.pitch - rows) * 4, 0, 0},
                             {pitch > rows, 0, static_cast<uint8_t>(pitch - rows), 0.0f});
        Hand<HardEvent::MTE2_V>(room.pipe);
        while (left > 1) {
            const uint32_t upper = left / 2;
            left -= upper;
            AscendC::Max(in, in, in[left * pitch], upper * pitch);
            Barrier();
        }
        AscendC::Max(powers, powers, in, pitch);
        Barrier();
        room.stream.FreeTensor(in);
    }
    const LocalTensor<uint16_t> bits = powers.ReinterpretCast<uint16_t>();
    for (uint32_t at = 0; at < 2 * pitch; at += 128)
        AscendC::And(bits[at], bits[at], room.exponent, Least(128, 2 * pitch - at));
    Barrier();
    AscendC::Div(inverses, inverses, powers, pitch);
    Barrier();
}

// Where a kernel finds its experts.
struct Experts {
    Bank up, down;
    GM_ADDR places;  // null: expert e is at place e
};

// Pairs: where pairs of a token and an expert and their weights come from. FromMemory: `from` and `with` are ids and
// weights; FromScores: scores and bias.
template <typename T, bool kFloatSums, typename Pairs>
__aicore__ inline void FusedMoe(const Experts& experts, GM_ADDR xAt, GM_ADDR from, GM_ADDR with, GM_ADDR yAt,
                                GM_ADDR workspace, const UmbraGemvTiling& t) {
    constexpr bool kBfloat16 = std::is_same<T, bfloat16_t>::value;
    const uint32_t pairs = t.tokens * t.topK, hidden = t.k, inner = t.n;
    const Matrix up(experts.up, 2 * inner, t.zeros, kBfloat16, kFloatSums, t.sections, t.groups, t.planes, t.lanes,
                    t.unit);
    const Matrix down(experts.down, hidden, t.zeros, kBfloat16, kFloatSums, t.sections2, t.groups2, t.planes2, t.lanes2,
                      t.unit2);
    GlobalTensor<T> x, y;
    x.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(xAt));
    y.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(yAt));
    Hidden h{{}, {}, inner, Up(pairs, 8)};
    h.rows.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(workspace));
    h.largest = h.rows[static_cast<uint64_t>(pairs) * inner];

    const uint32_t values = Most(kValues, Most(hidden, inner));
    const uint32_t slots = Least(kMostRows, values / hidden), window = Least(kWindow, values / inner);
    const uint32_t sums = Most(slots * up.sections * up.kept, window * down.sections * down.kept);
    Room room;
    room.Init(Most(kTile * up.kept, Up(down.Widest(), 8) * down.kept), 2 * values, t.zeros ? 4 * sums : 0, pairs);
    Pairs chooser(room, from, with, t);
    Chosen chosen{t.experts, experts.places != nullptr, {}, {}};
    chooser.Find(chosen);
    if (chosen.placed) chosen.Place(room, experts.places, pairs);
    Units units;
    units.most = Least(slots, window);
    units.Group(chosen, pairs);

    const uint32_t tiles = up.n / kTile;
    InputRows<T> inputs(room, up, x, t.tokens, t.topK, slots);
    Product<kFloatSums, InputRows<T>> first(room, units, up, inputs);
    first.Start({static_cast<uint32_t>(AscendC::GetBlockIdx()), units.count * tiles,
                 static_cast<uint32_t>(AscendC::GetBlockNum()), tiles, 0, up.n, kTile, false});
    Weights weights;
    chooser.Weigh(weights);
    Gate gate(room, units, weights, h);
    first.Run(gate);
    gate.Flush();

    const LocalTensor<float> powers = room.task[kTask], inverses = powers[Up(pairs, 8)];
    HiddenRows rows(room, down, h.rows, units.rows, window, powers, inverses, inverses[Up(pairs, 8)]);
    Product<kFloatSums, HiddenRows> second(room, units, down, rows);
    const Route own = OwnColumns(down, units, true);
    AscendC::CrossCoreSetFlag<0, PIPE_MTE3>(kStored);
    second.Start(own);
    AscendC::CrossCoreWaitFlag(kStored);
    TokenSums<T> tokens(room, units, y, t);
    if (units.rows) FindPowers(room, h, units.rows, powers, inverses);
    second.Run(tokens);
    for (uint32_t column = own.begin; !units.rows && column < own.end; column += own.width)
        tokens.Store(column, Least(own.width, own.end - column));
}

// What the tiling key of a mixture asks for: 1 half, 2 bfloat16; 3, 4 the same with float sums.
template <template <typename> class Pairs>
__aicore__ inline void FusedMoeByKey(const Experts& experts, GM_ADDR x, GM_ADDR from, GM_ADDR with, GM_ADDR y,
                                     GM_ADDR workspace, const UmbraGemvTiling& t) {
    GM_ADDR ours = AscendC::GetUserWorkspace(workspace);
    if (TILING_KEY_IS(1))
        FusedMoe<half, false, Pairs<half>>(experts, x, from, with, y, ours, t);
    else if (TILING_KEY_IS(2))
        FusedMoe<bfloat16_t, false, Pairs<bfloat16_t>>(experts, x, from, with, y, ours, t);
    else if (TILING_KEY_IS(3))
        FusedMoe<half, true, Pairs<half>>(experts, x, from, with, y, ours, t);
    else if (TILING_KEY_IS(4))
        FusedMoe<bfloat16_t, true, Pairs<bfloat16_t>>(experts, x, from, with, y, ours, t);
}

}  // namespace umbra
