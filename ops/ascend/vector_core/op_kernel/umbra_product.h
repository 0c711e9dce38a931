// Multiplies rows of values by 4-bit matrices in planes, one matrix for each unit:
//   y[n] = power * sum over g of scale[g, n] * (sum over k in g of q[k, n] x[k] + zero[g, n] * sum over k in g of x[k])
//
//   global memory --up to 16.5 KB--> nibbles --Cast--> half --Mul by x--> products --Add--> one plane, of sums of 8
//                 --Cast, Axpy--> float: one plane, of sums of all planes of a section
//                 --Add, Mul by scales, BlockReduceSum--> one value for each column
//
// A row of x is half, divided by the power of two of its largest value, so products are below 16, and sums of eight below
// 128. Sums of eight products are half, all others are float. With kFloatSums all are float: a product of a bfloat16
// value and a nibble is exact in half, so Mul makes it in half and Axpy adds it to float; h has three bits more, and its
// products are rounded to half as h itself is. Values of half activations are multiplied by MulAddDst, which is exact,
// at 4 to 5 cycles for 64 weights in place of 1.5. The order of all sums depends on shapes and on the number of rows
// alone.
//
// Every step needs the result of the one before, and the pipe is drained between two steps. So the instructions between
// two barriers belong to three blocks: the sums of one block are added in float while the next is converted, and the
// scaling of a tile's sums (Reduction) takes its steps beside those of the next tile.
#pragma once
#include "umbra_matrix.h"

namespace umbra {

// Turns the sums of lanes of a tile (columns, folded) into one value for each column, and adds that times a power to `to`.
class Reduction {
public:
    __aicore__ inline explicit Reduction(Room& room) : room(room) {}

    struct Task {
        const Matrix* matrix;
        uint32_t columns;
        LocalTensor<int8_t> scales;  // of the tile, for the section
        bool zeros;                  // whether the zero points are to be added, which a section does once
        bool last;                   // whether nothing else needs these scales
        LocalTensor<float> to, power, sumsOfX;
    };

    __aicore__ inline void Begin(const Task& given) {
        task = given;
        span = task.matrix->folded / task.matrix->wide / 2;
        stage = Stage::kSums;
        converted = false;
        zeros = task.zeros;
        active = true;
    }

    // Whether room.sums must be kept.
    __aicore__ inline bool NeedsSums() const { return active && stage == Stage::kSums; }
    // Whether no other task can begin.
    __aicore__ inline bool Busy() const { return active; }
    __aicore__ inline bool Ended() const { return !active && !adds; }

    // Issues the next instructions; a barrier must follow.
    __aicore__ inline void Step() {
        if (adds) AddResult();
        if (!active) return;
        const Matrix& m = *task.matrix;
        const bool ready = converted;
        if (!converted) Convert(zeros ? task.scales[room.scalesBytes] : task.scales);
        if (stage == Stage::kSums && (span || m.unit > 1)) {
            span ? Fold() : AddBlocks();
            return;
        }
        if (!ready) return;
        if (stage == Stage::kSums || stage == Stage::kGroups) {
            const bool inSums = stage == Stage::kSums;
            const LocalTensor<float> from = inSums ? room.sums : room.groups;
            const uint32_t pitch = inSums ? m.folded : m.kept;
            if (zeros) {
                AddZeros(from, pitch);
            } else {
                MultiplyByScales(from, pitch);
                stage = m.kept > kLanes ? Stage::kUpper : m.kept > 8 ? Stage::kEights : Stage::kColumns;
                inGroups = m.kept > 8;
            }
        } else if (stage == Stage::kUpper) {
            const uint8_t columns = task.columns, row = m.kept / 8;  // at most 128 groups
            AscendC::Add(room.scaled, room.scaled, room.scaled[kLanes], m.kept - kLanes, columns,
                         {1, 1, 1, row, row, row});
            stage = Stage::kEights;
        } else if (stage == Stage::kEights) {
            AddEights();
            stage = Stage::kColumns;
        } else {
            AscendC::BlockReduceSum(room.columns, inGroups ? room.groups : room.scaled,
                                    static_cast<int32_t>(Ceil(task.columns, 8)), static_cast<int32_t>(kLanes), 1, 1, 8);
            active = false;
            adds = true;
            to = task.to;
            power = task.power;
            width = task.columns;
        }
    }

private:
    enum class Stage { kSums, kGroups, kUpper, kEights, kColumns };

    Room& room;
    Task task;
    Stage stage;
    uint32_t span;  // half of the number of lanes that a group still has
    bool converted, zeros, inGroups, active = false;
    bool adds = false;  // `width` results in room.columns wait to be multiplied by `power` and added to `to`
    LocalTensor<float> to, power;
    uint32_t width;

    __aicore__ inline void Convert(const LocalTensor<int8_t>& from) {
        const Matrix& m = *task.matrix;
        if (m.bfloat16)
            AscendC::Cast(room.scaled, from.ReinterpretCast<bfloat16_t>(), RoundMode::CAST_NONE, task.columns * m.kept);
        else
            AscendC::Cast(room.scaled, from.ReinterpretCast<half>(), RoundMode::CAST_NONE, task.columns * m.kept);
        converted = true;
        if (!zeros && task.last) {
            room.scales.FreeTensor(task.scales);
            --room.scalesInUse;
        }
    }

    // Adds the upper half of each column's lanes to the lower half.
    __aicore__ inline void Fold() {
        const Matrix& m = *task.matrix;
        const uint8_t row = m.folded / 8;
        AscendC::Add(room.sums, room.sums, room.sums[span * m.wide], span * m.wide, static_cast<uint8_t>(task.columns),
                     {1, 1, 1, row, row, row});
        span /= 2;
    }

    // Adds the eight lanes of each group: room.groups (columns, kept).
    __aicore__ inline void AddBlocks() {
        const Matrix& m = *task.matrix;
        const int32_t columns = task.columns, lanes = Least(m.wide, kLanes), row = m.folded / 8, eights = m.kept / 8;
        AscendC::BlockReduceSum(room.groups, room.sums, columns, lanes, eights, 1, row);
        if (m.wide > kLanes)
            AscendC::BlockReduceSum(room.groups[8], room.sums[kLanes], columns, static_cast<int32_t>(m.wide - kLanes),
                                    eights, 1, row);
        stage = Stage::kGroups;
    }

    __aicore__ inline void AddZeros(const LocalTensor<float>& from, uint32_t pitch) {
        const uint32_t kept = task.matrix->kept;
        for (uint32_t at = 0; at < kept; at += kLanes)
            AscendC::MulAddDst(from[at], room.scaled[at], task.sumsOfX[at], Least(kept - at, kLanes),
                               static_cast<uint8_t>(task.columns),
                               {1, 1, 1, static_cast<uint8_t>(pitch / 8), static_cast<uint8_t>(kept / 8), 0});
        zeros = converted = false;  // the scales come next
    }

    __aicore__ inline void MultiplyByScales(const LocalTensor<float>& from, uint32_t pitch) {
        const uint32_t kept = task.matrix->kept;
        const uint8_t row = kept / 8;
        for (uint32_t at = 0; at < kept; at += kLanes)
            AscendC::Mul(room.scaled[at], from[at], room.scaled[at], Least(kept - at, kLanes),
                         static_cast<uint8_t>(task.columns), {1, 1, 1, row, static_cast<uint8_t>(pitch / 8), row});
    }

    // room.groups (columns, 8): sums of up to 64 groups of each column. Values of it that are not written stay 0.
    __aicore__ inline void AddEights() {
        const Matrix& m = *task.matrix;
        const int32_t columns = task.columns, row = m.kept / 8;
        if (m.unit > 1)  // two blocks; room.groups has other values beyond those of these columns
            AscendC::Add(room.groups, room.scaled, room.scaled[8], kLanes, static_cast<uint8_t>(Ceil(columns, 8)),
                         {1, 2, 2, 8, 16, 16});
        else
            AscendC::BlockReduceSum(room.groups, room.scaled, columns, static_cast<int32_t>(Least(m.kept, kLanes)), 1,
                                    1, row);
    }

    __aicore__ inline void AddResult() {
        for (uint32_t at = 0; at < width; at += kLanes)
            AscendC::MulAddDst(to[at], room.columns[at], power, Least(width - at, kLanes), 1, {1, 1, 0, 8, 8, 0});
        adds = false;
    }
};

// One block of a task: planes of a tile of columns, for all rows of a unit.
struct Block {
    uint32_t task, unit, column, width;
    uint32_t section, plane, planes;  // planes: their number in a block
};

// How a core goes through the tiles of all units.
struct Route {
    uint32_t first, tasks, stride;      // tasks first, first + stride, ... below `tasks`
    uint32_t tiles, begin, end, width;  // a unit's tiles: columns begin .. end, `width` each
    bool unitsFirst;                    // whether a core takes all units of a tile before the next tile
};

// `Rows` gives a row of a unit as half, its power of two, and the sums of its groups:
// Values(unit, row), Power(unit, row), SumsOfX(unit, row, section). Prepare(unit) makes them if the buffer Lacks(unit).
template <bool kFloatSums, typename Rows> class Product {
public:
    __aicore__ inline Product(Room& room, const Units& units, const Matrix& matrix, Rows& rows)
        : room(room), units(units), matrix(matrix), rows(rows), reduction(room) {}

    // Sets the way, and starts to load.
    __aicore__ inline void Start(const Route& given) {
        route = given;
        load = work = Block{};
        Set(load, route.first);
        Set(work, route.first);
        LoadAhead();
    }

    // Calls sink.To(unit, row) for the place of a tile's sums, which must be 0 or sums to add to, and sink.Done(block)
    // after each task. Its results are complete only after Finish.
    template <typename Sink> __aicore__ inline void Run(Sink& sink) {
        AscendC::Duplicate(room.groups, 0.0f, kGroups);
        Barrier();
        while (work.task < route.tasks) {
            const Unit& unit = units.At(work.unit);
            if (rows.Lacks(unit)) {
                Finish();
                rows.Prepare(unit);
            }
            LoadAhead();
            if (!loaded) {  // all buffers of scales are in use
                Finish();
                LoadAhead();
            }
            LocalTensor<int8_t> in = room.stream.template DeQue<int8_t>();
            --loaded;
            if (work.plane == 0) scales = room.scales.template DeQue<int8_t>();
            const bool first = work.plane == 0, last = work.plane + work.planes == matrix.planes;
            const bool alone = unit.rows == 1;  // otherwise each block is reduced by itself
            const bool complete = work.plane + work.planes == matrix.planes;
            for (uint32_t r = 0; r < unit.rows; ++r) {
                const bool final = r + 1 == unit.rows;
                const Sums next{true,
                                work.plane == 0 || !alone,
                                complete || !alone,
                                {&matrix, work.width, scales, complete && matrix.hasZeros, complete && final,
                                 sink.To(unit, r), rows.Power(unit, r), rows.SumsOfX(unit, r, work.section)}};
                const uint32_t from = (work.section * matrix.planes + work.plane) * matrix.lanes;
                if constexpr (kFloatSums)
                    MultiplyInFloat(in, rows.Values(unit, r)[from], final, next);
                else
                    Multiply(in, rows.Values(unit, r)[from], final, next);
            }
            const Block done = work;
            Next(work);
            if (work.task != done.task) sink.Done(*this, done);
        }
        Finish();
    }

    // Waits for all sums.
    __aicore__ inline void Finish() {
        if (pending.any) {
            Settle();
            AddPending();
            Pass();
            Reduce();
        }
        while (!reduction.Ended()) Pass();
    }

private:
    // Sums of a block that are in room.last, and not yet in room.sums.
    struct Sums {
        bool any, fresh, ends;  // fresh: they are the first of a section; ends: they are the last
        Reduction::Task task;
    };

    Room& room;
    const Units& units;
    const Matrix& matrix;
    Rows& rows;
    Reduction reduction;
    Route route;
    Block load, work;
    uint32_t loaded = 0;
    LocalTensor<int8_t> scales;
    Sums pending{};

    __aicore__ inline void Set(Block& b, uint32_t task) const {
        b.task = task;
        b.section = b.plane = 0;
        if (task >= route.tasks) return;
        b.unit = route.unitsFirst ? task % units.count : task / route.tiles;
        const uint32_t tile = route.unitsFirst ? task / units.count : task % route.tiles;
        b.column = route.begin + tile * route.width;
        b.width = Least(route.width, route.end - b.column);
        b.planes = matrix.step;
    }

    __aicore__ inline void Next(Block& b) const {
        b.plane += b.planes;
        if (b.plane < matrix.planes) return;
        b.plane = 0;
        if (++b.section < matrix.sections) return;
        Set(b, b.task + route.stride);
    }

    // Keeps one buffer free, in which rows are prepared.
    __aicore__ inline void LoadAhead() {
        while (load.task < route.tasks && loaded + 1 < room.depth &&
               (load.plane || room.scalesInUse < room.depthOfScales))
            Load();
    }

    __aicore__ inline void Load() {
        const Matrix& m = matrix;
        const uint64_t place = units.At(load.unit).place, column = m.lanes / 2;
        const uint32_t bytes = load.width * column, gap = m.Pitch(load.width) - bytes;
        const uint64_t plane = load.section * m.planes + load.plane;
        LocalTensor<int8_t> in = room.stream.AllocTensor<int8_t>();
        AscendC::DataCopyPad(
            in, m.w[place * m.apart + (plane * m.n + load.column) * column],
            {static_cast<uint16_t>(load.planes), bytes, static_cast<uint32_t>(m.n * column - bytes), gap / 32, 0},
            AscendC::DataCopyPadExtParams<int8_t>());
        room.stream.EnQue(in);
        ++loaded;
        if (load.plane == 0) {
            const uint32_t each = m.kept * sizeof(half), size = load.width * each;
            const uint64_t at =
                place * m.scalesApart + (static_cast<uint64_t>(load.section) * m.n + load.column) * each;
            LocalTensor<int8_t> kept = room.scales.AllocTensor<int8_t>();
            room.Fetch(kept, m.scales[at], size);
            if (m.hasZeros) room.Fetch(kept[room.scalesBytes], m.zeros[at], size);
            room.scales.EnQue(kept);
            ++room.scalesInUse;
        }
        Next(load);
    }

    // A barrier, beside whose instructions the reduction goes on.
    __aicore__ inline void Pass() {
        reduction.Step();
        Barrier();
    }

    // Makes room.sums free for the sums of another section.
    __aicore__ inline void Settle() {
        while (pending.fresh && reduction.NeedsSums()) Pass();
    }

    __aicore__ inline void AddPending() {
        const uint32_t count = pending.task.columns * matrix.folded;
        if (pending.fresh)
            AscendC::Cast(room.sums, room.last, RoundMode::CAST_NONE, count);
        else
            AscendC::Axpy(room.sums, room.last, static_cast<half>(1.0f), count);
    }

    // Begins to reduce room.sums if they are complete.
    __aicore__ inline void Reduce() {
        pending.any = false;
        if (!pending.ends) return;
        while (reduction.Busy()) Pass();
        reduction.Begin(pending.task);
    }

    // Converts a block to half: plane p begins at p * Pitch.
    __aicore__ inline void Convert(const LocalTensor<int8_t>& in) {
        AscendC::Cast(room.words, in.ReinterpretCast<AscendC::int4b_t>(), RoundMode::CAST_NONE,
                      matrix.step * 2 * matrix.Pitch(work.width));
    }

    // room.last (columns, folded) = sums of the products of a block with x (planes, lanes). `final`: the block is not
    // needed any more.
    __aicore__ inline void Multiply(LocalTensor<int8_t>& in, const LocalTensor<half>& x, bool final, const Sums& next) {
        const uint32_t lanes = matrix.lanes, pitch = 2 * matrix.Pitch(work.width), plane = work.width * lanes;
        const uint32_t count = matrix.step;
        const uint8_t row = lanes / 16, width = work.width;
        const bool folds = matrix.folded < lanes;
        const LocalTensor<half> w = room.words;
        if (pending.any) Settle();
        Convert(in);
        if (pending.any) AddPending();
        Pass();
        if (final) room.stream.FreeTensor(in);
        if (pending.any) Reduce();
        for (uint32_t p = 0; p < count; ++p)
            AscendC::Mul(count > 1 || folds ? w[p * pitch] : room.last, w[p * pitch], x[p * lanes], lanes, width,
                         {1, 1, 1, row, row, 0});
        Pass();
        if (count == 8) {
            AscendC::Add(w, w, w[5 * pitch], 2 * pitch + plane);
            AscendC::Add(w[3 * pitch], w[3 * pitch], w[4 * pitch], plane);
            Pass();
        }
        if (count >= 4) {
            AscendC::Add(w, w, w[pitch], plane);
            AscendC::Add(w[3 * pitch], w[3 * pitch], w[2 * pitch], plane);
            Pass();
        }
        if (count >= 2) {
            AscendC::Add(folds ? w : room.last, w, w[count >= 4 ? 3 * pitch : pitch], plane);
            Pass();
        }
        for (uint32_t f = lanes, from = 0; f > matrix.folded; f /= 2, from = pitch - from) {
            const uint8_t wide = f / 16, half = f / 32;
            AscendC::Add(f / 2 == matrix.folded ? room.last : w[pitch - from], w[from], w[from + f / 2], f / 2, width,
                         {1, 1, 1, half, wide, wide});
            Pass();
        }
        pending = next;
    }

    // room.sums (columns, lanes) = or += sums of the products of a block with x.
    __aicore__ inline void MultiplyInFloat(LocalTensor<int8_t>& in, const LocalTensor<half>& x, bool final,
                                           const Sums& next) {
        const uint32_t lanes = matrix.lanes, pitch = 2 * matrix.Pitch(work.width);
        const uint8_t row = lanes / 16, width = work.width;
        pending = next;
        Settle();
        Convert(in);
        if (next.fresh) AscendC::Duplicate(room.sums, 0.0f, work.width * lanes);
        Pass();
        if (final) room.stream.FreeTensor(in);
        if (matrix.bfloat16) {
            for (uint32_t p = 0; p < matrix.step; ++p)
                AscendC::Mul(room.words[p * pitch], room.words[p * pitch], x[p * lanes], lanes, width,
                             {1, 1, 1, row, row, 0});
            Pass();
        }
        for (uint32_t p = 0; p < matrix.step; ++p) {
            if (matrix.bfloat16) {
                AscendC::Axpy(room.sums, room.words[p * pitch], static_cast<half>(1.0f), work.width * lanes);
            } else {
                for (uint32_t at = 0; at < lanes; at += kLanes)
                    AscendC::MulAddDst(room.sums[at], room.words[p * pitch + at], x[p * lanes + at],
                                       Least(lanes - at, kLanes), width,
                                       {1, 1, 1, static_cast<uint8_t>(2 * row), row, 0});
            }
            Pass();
        }
        Reduce();
    }
};

}  // namespace umbra
