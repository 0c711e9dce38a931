// DataCopy and DataCopyPad between global memory and the UB.
//
// Bytes that DataCopyPad adds without paddingValue are undefined: they are treated as never written. Not modelled:
// copies from UB to UB, slices, formats, atomic adds, SetPadValue.
#pragma once
#include "sync.h"

namespace twin {

struct Piece {  // geometry of one side of a copy, all in bytes
    uint32_t count, length, global_step, ub_step;
};

template <class T> void check_copy(Core& core, const AscendC::LocalTensor<T>& local, bool in) {
    static_assert(!std::is_same_v<T, int4b_t>, "DataCopy does not know int4b_t");
    local.valid();
    if (local.begin % kBlock)
        core.fail(text("a UB address must be a multiple of 32 bytes: byte %u of %s", local.begin - local.slot->begin,
                       local.slot->name.c_str()));
    if (in && local.slot->position == AscendC::TPosition::VECCALC)
        core.fail("moves from global memory go to VECIN or VECOUT, not to VECCALC: " + local.slot->name);
    if (!in && local.slot->position == AscendC::TPosition::VECCALC)
        core.fail("moves to global memory come from VECIN or VECOUT, not from VECCALC: " + local.slot->name);
}

// Moves pieces. `left` is the number of bytes before each piece in the UB, `padded` the number of all bytes that it
// takes there.
template <bool in> void move(Core& core, uint16_t op, Slot* slot, uint32_t begin, uint8_t* global, Piece piece,
                             uint32_t left = 0, uint32_t padded = 0) {
    const int pipe = in ? PIPE_MTE2 : PIPE_MTE3;
    core.begin(pipe, op);
    GlobalMemory& memory = run()->memory;
    const uint32_t spare = padded ? padded : piece.length;
    for (uint32_t at = 0; at < piece.count; ++at) {
        uint8_t* pointer = global + uint64_t(at) * piece.global_step;
        const uint32_t ub = begin + at * piece.ub_step;
        Buffer& buffer = memory.find(core, global ? pointer : nullptr, piece.length, in ? "a read" : "a write");
        if constexpr (in) {
            core.write(pipe, {slot, ub, spare}, "the destination");
            memory.check_read(core, buffer, pointer, piece.length);
            core.forget(ub, ub + left), core.forget(ub + left + piece.length, ub + spare);
            std::memcpy(core.ub + ub + left, pointer, piece.length);
            buffer.read += piece.length;
        } else {
            core.read(pipe, {slot, ub, piece.length}, "the source");
            memory.check_write(core, buffer, pointer, piece.length);
            std::memcpy(pointer, core.ub + ub, piece.length);
            buffer.written += piece.length;
        }
    }
    // adjacent pieces are one burst
    const bool dense = piece.global_step == piece.length;
    (in ? core.counts().in : core.counts().out)
        .add(dense ? 1 : piece.count, dense ? piece.count * piece.length : piece.length);
}

template <bool in, class T>
void move_blocks(const AscendC::LocalTensor<T>& local, const AscendC::GlobalTensor<T>& global, uint32_t count,
                 uint32_t length, uint32_t global_gap, uint32_t ub_gap) {
    static const uint16_t op = Shadow::op_id(in ? "DataCopy in" : "DataCopy out");
    Core& core = twin::core();
    core.op = op;
    check_copy(core, local, in);
    if ((uintptr_t)global.pointer % sizeof(T)) core.fail("a global address must be a multiple of the element's bytes");
    if (count > 4095) core.fail(text("blockCount %u is above 4095", count));
    if (!count || !length) core.fail("DataCopy of no bytes does nothing");
    move<in>(core, op, local.slot, local.begin, (uint8_t*)global.pointer,
             {count, length, length + global_gap, length + ub_gap});
}

template <class T> void check_extended(Core& core, const AscendC::DataCopyExtParams& params) {
    if (params.blockCount < 1 || params.blockCount > 4095)
        core.fail(text("blockCount %u is not in 1..4095", params.blockCount));
    if (params.blockLen < 1 || params.blockLen > 2097151 || params.blockLen % sizeof(T))
        core.fail(text("blockLen %u must be a multiple of the element's bytes in 1..2097151", params.blockLen));
}

}  // namespace twin

namespace AscendC {

template <class T> void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params) {
    twin::move_blocks<true>(dst, src, params.blockCount, params.blockLen * 32u, params.srcGap * 32u,
                            params.dstGap * 32u);
}
template <class T> void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params) {
    twin::move_blocks<false>(src, dst, params.blockCount, params.blockLen * 32u, params.dstGap * 32u,
                             params.srcGap * 32u);
}
template <class T> void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count) {
    if (count * sizeof(T) % 32)
        twin::core().fail(twin::text("DataCopy of %u elements: the bytes must be a multiple of 32", count));
    twin::move_blocks<true>(dst, src, 1, count * sizeof(T), 0, 0);
}
template <class T> void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count) {
    if (count * sizeof(T) % 32)
        twin::core().fail(twin::text("DataCopy of %u elements: the bytes must be a multiple of 32", count));
    twin::move_blocks<false>(src, dst, 1, count * sizeof(T), 0, 0);
}

template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& pad) {
    static const uint16_t op = twin::Shadow::op_id("DataCopyPad in");
    twin::Core& core = twin::core();
    core.op = op;
    twin::check_copy(core, dst, true);
    twin::check_extended<T>(core, params);
    const uint32_t left = pad.leftPadding * sizeof(T), right = pad.rightPadding * sizeof(T);
    if (left > 32 || right > 32)
        core.fail(twin::text("paddings of %u and %u bytes: each may be 32 at most", left, right));
    const uint32_t padded = (left + params.blockLen + right + 31) / 32 * 32, step = padded + params.dstStride * 32u;
    twin::move<true>(core, op, dst.slot, dst.begin, (uint8_t*)src.pointer,
                     {params.blockCount, params.blockLen, params.blockLen + params.srcStride, step}, left, padded);
    if (!pad.isPad || !(left || right)) return;
    for (uint32_t piece = 0; piece < params.blockCount; ++piece) {
        const uint32_t begin = dst.begin + piece * step;
        auto fill = [&](uint32_t from, uint32_t to) {
            for (; from < to; from += sizeof(T)) std::memcpy(core.ub + begin + from, &pad.paddingValue, sizeof(T));
        };
        fill(0, left), fill(left + params.blockLen, padded);
        core.write(PIPE_MTE2, {dst.slot, begin, padded}, "the padding");
    }
}
template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params) {
    static const uint16_t op = twin::Shadow::op_id("DataCopyPad out");
    twin::Core& core = twin::core();
    core.op = op;
    twin::check_copy(core, src, false);
    twin::check_extended<T>(core, params);
    const uint32_t step = (params.blockLen + 31) / 32 * 32 + params.srcStride * 32u;
    twin::move<false>(core, op, src.slot, src.begin, (uint8_t*)dst.pointer,
                      {params.blockCount, params.blockLen, params.blockLen + params.dstStride, step});
}

}  // namespace AscendC
