// Sort32, MrgSort, GatherMask and Gather: sorting of scores with a payload of 32 bits, and what selects from the result.
//
// A sorted list has pairs of 8 bytes: the score, then its payload. Larger scores come first; of equal ones the first of
// the source, and of several lists that of the first list. The documents do not say where NaN comes; here it comes last.
// Not modelled: half, MrgSort with several repeats or until a list is exhausted, GatherMask in normal mode, with a
// pattern from a tensor or other patterns than 1 and 2, Gather with a mask.
#pragma once
#include "reduce.h"

namespace twin {

struct Scored {
    float score;
    uint32_t payload;
};
inline bool comes_first(const Scored& a, const Scored& b) {
    return a.score > b.score || (b.score != b.score && a.score == a.score);
}

inline void aligned_to(Core& core, uint32_t address, uint32_t bytes, const char* operand) {
    if (address % bytes) core.fail(text("a UB address must be a multiple of %u bytes: %s", bytes, operand));
}
inline void disjoint(Core& core, const Slot* to, uint32_t to_begin, uint32_t to_bytes, const Slot* from,
                     uint32_t from_begin, uint32_t from_bytes) {
    if (to == from && to_begin < from_begin + from_bytes && from_begin < to_begin + to_bytes)
        core.fail("the source and the destination overlap");
}
inline void done(Core& core, uint16_t op, uint32_t repeats) {
    Instructions& counted = core.counts().vector[Shadow::op_names()[op]];
    counted.count += 1, counted.repeats += repeats;
}

}  // namespace twin

namespace AscendC {

// A repeat sorts 32 scores.
template <class T>
void Sort32(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<uint32_t>& src1,
            const int32_t repeatTime) {
    static_assert(std::is_same_v<T, float>, "the twin sorts floats only");
    static const uint16_t op = twin::name_op<T>("Sort32");
    twin::Core& core = twin::core();
    core.op = op;
    dst.valid(), src0.valid(), src1.valid();
    twin::aligned_to(core, dst.begin, 256, "the destination");
    twin::aligned_to(core, src0.begin, 128, "src0");
    twin::aligned_to(core, src1.begin, 128, "src1");
    if (repeatTime < 0 || repeatTime > 255) core.fail(twin::text("repeatTime %d is not in 0..255", repeatTime));
    if (!repeatTime) return;
    const uint32_t count = 32 * repeatTime;
    twin::disjoint(core, dst.slot, dst.begin, 8 * count, src0.slot, src0.begin, 4 * count);
    twin::disjoint(core, dst.slot, dst.begin, 8 * count, src1.slot, src1.begin, 4 * count);
    core.begin(PIPE_V, op);
    core.read(PIPE_V, {src0.slot, src0.begin, 4 * count}, "src0");
    core.read(PIPE_V, {src1.slot, src1.begin, 4 * count}, "src1");
    core.write(PIPE_V, {dst.slot, dst.begin, 8 * count}, "the destination");
    std::vector<twin::Scored> list(count);
    for (uint32_t i = 0; i < count; ++i) {
        std::memcpy(&list[i].score, core.ub + src0.begin + 4 * i, 4);
        std::memcpy(&list[i].payload, core.ub + src1.begin + 4 * i, 4);
    }
    for (uint32_t i = 0; i < count; i += 32)
        std::stable_sort(list.begin() + i, list.begin() + i + 32, twin::comes_first);
    std::memcpy(core.ub + dst.begin, list.data(), 8 * count);
    twin::done(core, op, repeatTime);
}

template <class T> struct MrgSortSrcList {
    MrgSortSrcList() = default;
    MrgSortSrcList(const LocalTensor<T>& first, const LocalTensor<T>& second, const LocalTensor<T>& third,
                   const LocalTensor<T>& fourth)
        : src1(first), src2(second), src3(third), src4(fourth) {}
    LocalTensor<T> src1, src2, src3, src4;
};
struct MrgSort4Info {  // lengths in pairs
    MrgSort4Info() = default;
    MrgSort4Info(const uint16_t lengths[4], bool exhausted, uint16_t valid, uint16_t repeats)
        : ifExhaustedSuspension(exhausted), validBit(valid), repeatTimes(repeats) {
        std::copy(lengths, lengths + 4, elementLengths);
    }
    uint16_t elementLengths[4] = {};
    bool ifExhaustedSuspension = false;
    uint16_t validBit = 0;
    uint8_t repeatTimes = 1;
};

// Merges two to four lists; counted as a repeat for every 32 pairs.
template <class T>
void MrgSort(const LocalTensor<T>& dst, const MrgSortSrcList<T>& src, const MrgSort4Info& params) {
    static_assert(std::is_same_v<T, float>, "the twin sorts floats only");
    static const uint16_t op = twin::name_op<T>("MrgSort");
    twin::Core& core = twin::core();
    core.op = op;
    if (params.validBit != 3 && params.validBit != 7 && params.validBit != 15)
        core.fail(twin::text("validBit %u is not 3, 7 or 15", params.validBit));
    if (params.ifExhaustedSuspension || params.repeatTimes != 1) core.fail("the twin merges lists once, to their end");
    dst.valid();
    twin::aligned_to(core, dst.begin, 32, "the destination");
    const LocalTensor<T>* lists[] = {&src.src1, &src.src2, &src.src3, &src.src4};
    const uint32_t count = params.validBit == 15 ? 4 : params.validBit == 7 ? 3 : 2;
    uint32_t all = 0;
    for (uint32_t i = 0; i < count; ++i) {
        if (params.elementLengths[i] > 4095) core.fail("a list has more than 4095 elements");
        all += params.elementLengths[i];
    }
    core.begin(PIPE_V, op);
    std::vector<twin::Scored> merged;
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t length = params.elementLengths[i], bytes = 8 * length;
        lists[i]->valid();
        twin::aligned_to(core, lists[i]->begin, 8, "a list");
        twin::disjoint(core, dst.slot, dst.begin, 8 * all, lists[i]->slot, lists[i]->begin, bytes);
        core.read(PIPE_V, {lists[i]->slot, lists[i]->begin, bytes}, "a list");
        std::vector<twin::Scored> list(length);
        std::memcpy(list.data(), core.ub + lists[i]->begin, bytes);
        for (uint32_t at = 1; at < length; ++at)
            if (twin::comes_first(list[at], list[at - 1])) core.fail("a list that is not sorted");
        const auto middle = merged.insert(merged.end(), list.begin(), list.end());
        std::inplace_merge(merged.begin(), middle, merged.end(), twin::comes_first);
    }
    core.write(PIPE_V, {dst.slot, dst.begin, 8 * all}, "the destination");
    std::memcpy(core.ub + dst.begin, merged.data(), 8 * all);
    twin::done(core, op, (all + 31) / 32);
}

struct GatherMaskParams {  // strides in blocks
    GatherMaskParams() = default;
    GatherMaskParams(uint8_t block_stride, uint16_t repeats, uint16_t repeat_stride, uint8_t pattern_stride)
        : src0BlockStride(block_stride), repeatTimes(repeats), src0RepeatStride(repeat_stride),
          src1RepeatStride(pattern_stride) {}
    uint8_t src0BlockStride = 1;
    uint16_t repeatTimes = 0, src0RepeatStride = 0;
    uint8_t src1RepeatStride = 0;
};

// Copies the elements with an even (pattern 1) or an odd number (2) of `mask` elements of each repeat, side by side.
template <class T>
void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const uint8_t src1Pattern, const bool reduceMode,
                const uint32_t mask, const GatherMaskParams& p, uint64_t& rsvdCnt) {
    static_assert(twin::one_of<T, int32_t, uint32_t, float>, "the twin gathers elements of 32 bits");
    static const uint16_t op = twin::name_op<T>("GatherMask");
    twin::Core& core = twin::core();
    core.op = op;
    if (!reduceMode || (src1Pattern != 1 && src1Pattern != 2) || p.src0BlockStride != 1)
        core.fail("the twin knows counter mode with pattern 1 or 2 of contiguous elements");
    dst.valid(), src0.valid();
    twin::aligned_to(core, dst.begin, 32, "the destination");
    twin::aligned_to(core, src0.begin, 32, "the source");
    if (!mask || !p.repeatTimes) core.fail("no elements");
    const uint32_t each = src1Pattern == 1 ? (mask + 1) / 2 : mask / 2, all = each * p.repeatTimes;
    const uint32_t span = (p.repeatTimes - 1) * p.src0RepeatStride * 32 + 4 * mask;
    twin::disjoint(core, dst.slot, dst.begin, 4 * all, src0.slot, src0.begin, span);
    core.begin(PIPE_V, op);
    core.read(PIPE_V, {src0.slot, src0.begin, 4 * mask, 1, p.src0RepeatStride, p.repeatTimes}, "the source");
    core.write(PIPE_V, {dst.slot, dst.begin, 4 * all}, "the destination");
    for (uint32_t i = 0; i < all; ++i) {
        const uint32_t from = i / each * p.src0RepeatStride * 32 + (i % each * 2 + src1Pattern - 1) * 4;
        std::memcpy(core.ub + dst.begin + 4 * i, core.ub + src0.begin + from, 4);
    }
    rsvdCnt = all;
    twin::done(core, op, (mask + 63) / 64 * p.repeatTimes);
}

// dst[i] = the element of src at byte srcBaseAddr + srcOffset[i].
template <class T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
            const uint32_t srcBaseAddr, const uint32_t count) {
    static_assert(twin::one_of<T, int32_t, uint32_t, float>, "the twin gathers elements of 32 bits");
    static const uint16_t op = twin::name_op<T>("Gather");
    twin::Core& core = twin::core();
    core.op = op;
    dst.valid(), src.valid(), srcOffset.valid();
    twin::aligned_to(core, dst.begin, 32, "the destination");
    twin::aligned_to(core, src.begin, 32, "the source");
    twin::aligned_to(core, srcOffset.begin, 32, "the offsets");
    if (srcBaseAddr % sizeof(T) || srcBaseAddr >= src.size * sizeof(T))
        core.fail(twin::text("srcBaseAddr %u is not that of an element of the source, which has %u bytes", srcBaseAddr,
                             uint32_t(src.size * sizeof(T))));
    if (!count) return;
    twin::disjoint(core, dst.slot, dst.begin, 4 * count, srcOffset.slot, srcOffset.begin, 4 * count);
    core.begin(PIPE_V, op);
    core.read(PIPE_V, {srcOffset.slot, srcOffset.begin, 4 * count}, "the offsets");
    std::vector<T> found(count);
    for (uint32_t i = 0; i < count; ++i) {
        uint32_t offset;
        std::memcpy(&offset, core.ub + srcOffset.begin + 4 * i, 4);
        const uint32_t from = src.begin + srcBaseAddr + offset;
        twin::aligned_to(core, from, 4, "an element");
        twin::disjoint(core, dst.slot, dst.begin, 4 * count, src.slot, from, 4);
        core.read(PIPE_V, {src.slot, from, 4}, "an element");
        std::memcpy(&found[i], core.ub + from, 4);
    }
    core.write(PIPE_V, {dst.slot, dst.begin, 4 * count}, "the destination");
    std::memcpy(core.ub + dst.begin, found.data(), 4 * count);
    twin::done(core, op, (count + 63) / 64);
}

}  // namespace AscendC
