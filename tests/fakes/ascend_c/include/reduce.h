// Duplicate, Brcb, TransDataTo5HD and the reductions: instructions with different shapes of source and destination.
//
// Sums are binary trees over neighbours, as documented, and every addition is rounded to the type. Not modelled: masks
// bit by bit, ORDER_ONLY_INDEX and ORDER_INDEX_VALUE, reductions that take a number of elements.
#pragma once
#include "vector.h"

namespace twin {

template <class T> T tree_sum(const T* values, uint32_t count, uint32_t lanes) {  // values[count..lanes): absent
    T level[256 / sizeof(T)];
    for (uint32_t i = 0; i < lanes; ++i) level[i] = i < count ? values[i] : T(0);
    for (; lanes > 1; lanes /= 2)
        for (uint32_t i = 0; i < lanes / 2; ++i) level[i] = rounded(level[2 * i], level[2 * i + 1], Plus{});
    return level[0];
}

// The checks of a reduction. Lanes are those of the source. Each repeat writes `written` bytes of the destination,
// `step` bytes after those of the repeat before.
template <class T>
bool begin_reduction(uint16_t op, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, int64_t mask,
                     int64_t repeats, uint32_t block_stride, uint32_t repeat_stride, uint32_t aligned, uint32_t written,
                     uint32_t step) {
    static_assert(one_of<T, half, float>, "reductions take half and float on Atlas A2/A3");
    Core& core = twin::core();
    core.op = op;
    src.valid(), dst.valid();
    if (mask < 1 || mask > int64_t(256 / sizeof(T)))
        core.fail(text("mask %lld is not in 1..%zu", (long long)mask, 256 / sizeof(T)));
    if (repeats < 1 || repeats > 255) core.fail(text("repeatTime %lld is not in 1..255", (long long)repeats));
    if (src.begin % kBlock) core.fail("a UB address must be a multiple of 32 bytes: the source");
    if (dst.begin % aligned) core.fail(text("the destination must be a multiple of %u bytes", aligned));
    core.begin(PIPE_V, op);
    core.read(PIPE_V, {src.slot, src.begin, uint32_t(mask * sizeof(T)), block_stride, repeat_stride, uint32_t(repeats)},
              "the source");
    const uint32_t source_end = src.begin + uint32_t(repeats - 1) * repeat_stride * kBlock + 8 * block_stride * kBlock;
    const uint32_t dst_end = dst.begin + uint32_t(repeats - 1) * step + written;
    if (dst.slot == src.slot && repeats > 1 && dst.begin < source_end && src.begin < dst_end)
        core.fail("a reduction of several repeats over its own source");
    for (uint32_t repeat = 0; repeat < repeats; ++repeat)
        core.write(PIPE_V, {dst.slot, dst.begin + repeat * step, written}, "the destination");
    Instructions& done = core.counts().vector[Shadow::op_names()[op]];
    done.count += 1, done.repeats += repeats;
    return true;
}

// Copies the lanes of one repeat of a strided source to contiguous memory.
template <class T> void gather(const Walk& src, uint32_t repeat, uint32_t lanes, T* to) {
    for (uint32_t lane = 0; lane < lanes; lane += 32 / sizeof(T))
        std::memcpy(to + lane, src.at(core(), repeat, lane), std::min<size_t>(32, (lanes - lane) * sizeof(T)));
}

}  // namespace twin

namespace AscendC {

template <class T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const T& scalar, uint64_t mask, uint32_t repeatTime, uint16_t dstBlockStride,
               uint8_t dstRepeatStride) {
    static_assert(isSetMask && twin::one_of<T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float>,
                  "Duplicate does not support this type on Atlas A2/A3");
    static const uint16_t op = twin::name_op<T>("Duplicate");
    const auto walk = twin::walk(dst, "the destination", dstBlockStride, dstRepeatStride);
    twin::fill<T>(op, {uint32_t(mask), repeatTime, false}, walk, scalar);
}
template <class T> void Duplicate(const LocalTensor<T>& dst, const T& scalar, const int32_t& count) {
    static_assert(twin::one_of<T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float>,
                  "Duplicate does not support this type on Atlas A2/A3");
    static const uint16_t op = twin::name_op<T>("Duplicate");
    twin::fill<T>(op, twin::by_count(count), twin::walk(dst, "the destination"), scalar);
}

// A repeat reads 8 elements and fills a block with each; the source is contiguous.
template <class T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint32_t repeatTime, const BrcbRepeatParams& p) {
    static_assert(twin::one_of<T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float>,
                  "Brcb does not support this type on Atlas A2/A3");
    static const uint16_t op = twin::name_op<T>("Brcb");
    twin::Core& core = twin::core();
    core.op = op;
    src.valid(), dst.valid();
    if (src.begin % 32 || dst.begin % 32) core.fail("a UB address must be a multiple of 32 bytes");
    if (repeatTime < 1 || repeatTime > 255) core.fail(twin::text("repeatTime %u is not in 1..255", repeatTime));
    if (src.size < 8 * repeatTime)
        core.fail(twin::text("the source has %u elements, fewer than 8 for each of %u repeats", src.size, repeatTime));
    if (!p.dstBlkStride) core.fail("dstBlkStride 0 is undefined");
    const uint32_t bytes = 8 * sizeof(T) * repeatTime;
    const uint32_t end = dst.begin + ((repeatTime - 1) * p.dstRepStride + 7 * p.dstBlkStride + 1) * 32;
    if (dst.slot == src.slot && src.begin < end && dst.begin < src.begin + bytes)
        core.fail("the source and the destination overlap");
    core.begin(PIPE_V, op);
    core.read(PIPE_V, {src.slot, src.begin, bytes}, "the source");
    core.write(PIPE_V, {dst.slot, dst.begin, 256, p.dstBlkStride, p.dstRepStride, repeatTime}, "the destination");
    for (uint32_t element = 0; element < 8 * repeatTime; ++element) {
        T value;
        std::memcpy(&value, core.ub + src.begin + element * sizeof(T), sizeof(T));
        T* to = reinterpret_cast<T*>(core.ub + dst.begin +
                                     (element / 8 * p.dstRepStride + element % 8 * p.dstBlkStride) * 32);
        std::fill(to, to + 32 / sizeof(T), value);
    }
    twin::Instructions& done = core.counts().vector[twin::Shadow::op_names()[op]];
    done.count += 1, done.repeats += repeatTime;
}

// Writes one value in each repeat; dstRepStride is in elements.
template <class T, bool isSetMask = true>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int32_t repeatTime,
                    int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride) {
    static const uint16_t op = twin::name_op<T>("WholeReduceSum");
    if (!twin::begin_reduction(op, dst, src, mask, repeatTime, srcBlkStride, srcRepStride, sizeof(T), sizeof(T),
                               dstRepStride * sizeof(T)))
        return;
    for (int32_t repeat = 0; repeat < repeatTime; ++repeat) {
        T lanes[256 / sizeof(T)];
        twin::gather(twin::walk(src, "the source", srcBlkStride, srcRepStride), repeat, mask, lanes);
        const T sum = twin::tree_sum(lanes, mask, 256 / sizeof(T));
        std::memcpy(twin::core().ub + dst.begin + repeat * dstRepStride * sizeof(T), &sum, sizeof(T));
    }
}

// Writes the largest value and, unless ORDER_ONLY_VALUE, its first lane as an integer of the same width; dstRepStride
// counts such results.
template <class T, bool isSetMask = true>
void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int32_t repeatTime,
                    int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride,
                    ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX) {
    static const uint16_t op = twin::name_op<T>("WholeReduceMax");
    twin::core().op = op;
    if (order != ReduceOrder::ORDER_VALUE_INDEX && order != ReduceOrder::ORDER_ONLY_VALUE)
        twin::core().fail("the twin knows ORDER_VALUE_INDEX and ORDER_ONLY_VALUE");
    const bool index = order == ReduceOrder::ORDER_VALUE_INDEX;
    const uint32_t bytes = (1 + index) * sizeof(T), aligned = 2 * sizeof(T);  // also where only the value is written
    if (!twin::begin_reduction(op, dst, src, mask, repeatTime, srcBlkStride, srcRepStride, aligned, bytes,
                               dstRepStride * bytes))
        return;
    using Index = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    for (int32_t repeat = 0; repeat < repeatTime; ++repeat) {
        T lanes[256 / sizeof(T)];
        twin::gather(twin::walk(src, "the source", srcBlkStride, srcRepStride), repeat, mask, lanes);
        const T* largest = std::max_element(lanes, lanes + mask);
        const Index at = largest - lanes;
        uint8_t* to = twin::core().ub + dst.begin + repeat * dstRepStride * bytes;
        std::memcpy(to, largest, sizeof(T));
        if (index) std::memcpy(to + sizeof(T), &at, sizeof(T));
    }
}

#define TWIN_BLOCK_REDUCTION(NAME, REDUCED)                                                                   \
    template <class T, bool isSetMask = true>                                                                 \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t repeatTime, int32_t mask,         \
              int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride) {                             \
        static const uint16_t op = twin::name_op<T>(#NAME);                                                   \
        constexpr int32_t in_block = 32 / sizeof(T);                                                          \
        const uint32_t blocks = (std::max(mask, 0) + in_block - 1) / in_block;                                \
        if (!twin::begin_reduction(op, dst, src, mask, repeatTime, srcBlkStride, srcRepStride, 8 * sizeof(T), \
                                   blocks * sizeof(T), dstRepStride * 8 * sizeof(T)))                         \
            return;                                                                                           \
        for (int32_t repeat = 0; repeat < repeatTime; ++repeat) {                                             \
            T lanes[256 / sizeof(T)], found[8];                                                               \
            twin::gather(twin::walk(src, "the source", srcBlkStride, srcRepStride), repeat, mask, lanes);     \
            for (uint32_t block = 0; block < blocks; ++block) {                                               \
                const T* first = lanes + block * in_block;                                                    \
                const int32_t count = std::min<int32_t>(in_block, mask - block * in_block);                   \
                found[block] = REDUCED;                                                                       \
            }                                                                                                 \
            std::memcpy(twin::core().ub + dst.begin + repeat * dstRepStride * 8 * sizeof(T), found,           \
                        blocks * sizeof(T));                                                                  \
        }                                                                                                     \
    }
// Writes one value for each block, eight in a repeat. Blocks without a lane in the mask leave the destination as it is.
// dstRepStride counts eights of values.
TWIN_BLOCK_REDUCTION(BlockReduceSum, twin::tree_sum(first, count, in_block))
TWIN_BLOCK_REDUCTION(BlockReduceMax, *std::max_element(first, first + count))
#undef TWIN_BLOCK_REDUCTION

// Each repeat transposes 16 blocks of 16 values. A repeat's blocks begin at the addresses of the lists plus `repeat`
// strides, in blocks; if there is one repeat only, the hardware adds the strides to it as well, which is refused here.
template <class T>
void TransDataTo5HD(const LocalTensor<T> (&dst)[16], const LocalTensor<T> (&src)[16], const TransDataTo5HDParams& p) {
    static_assert(twin::one_of<T, half, int16_t, uint16_t>, "the twin transposes 16-bit values only");
    static const uint16_t op = twin::name_op<T>("TransDataTo5HD");
    twin::Core& core = twin::core();
    core.op = op;
    if (p.repeatTimes == 1 && (p.dstRepStride || p.srcRepStride)) core.fail("one repeat with strides other than 0");
    if (!p.repeatTimes) core.fail("repeatTimes 0: the call does nothing");
    for (uint32_t i = 0; i < 16; ++i) {
        dst[i].valid(), src[i].valid();
        if (dst[i].begin % 32 || src[i].begin % 32) core.fail("a UB address must be a multiple of 32 bytes");
    }
    auto end = [&](uint32_t begin, uint32_t stride) { return begin + (p.repeatTimes - 1) * stride * 32 + 32; };
    for (uint32_t i = 0; i < 256; ++i) {
        const auto &to = dst[i / 16], &from = src[i % 16];
        if (to.slot == from.slot && to.begin < end(from.begin, p.srcRepStride) &&
            from.begin < end(to.begin, p.dstRepStride))
            core.fail("the source and the destination overlap");
    }
    core.begin(PIPE_V, op);
    for (uint32_t i = 0; i < 16; ++i)
        core.read(PIPE_V, {src[i].slot, src[i].begin, 32, 1, p.srcRepStride, p.repeatTimes}, "the source");
    for (uint32_t i = 0; i < 16; ++i)
        core.write(PIPE_V, {dst[i].slot, dst[i].begin, 32, 1, p.dstRepStride, p.repeatTimes}, "the destination");
    for (uint32_t repeat = 0; repeat < p.repeatTimes; ++repeat) {
        T square[16][16];
        for (uint32_t i = 0; i < 16; ++i)
            std::memcpy(square[i], core.ub + src[i].begin + repeat * p.srcRepStride * 32, 32);
        for (uint32_t i = 0; i < 16; ++i) {
            T row[16];
            for (uint32_t j = 0; j < 16; ++j) row[j] = square[j][i];
            std::memcpy(core.ub + dst[i].begin + repeat * p.dstRepStride * 32, row, 32);
        }
    }
    twin::Instructions& done = core.counts().vector[twin::Shadow::op_names()[op]];
    done.count += 1, done.repeats += p.repeatTimes;
}

}  // namespace AscendC
