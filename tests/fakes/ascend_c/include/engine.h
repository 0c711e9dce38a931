// The way in which a vector instruction steps through its operands: repeats of up to 256 bytes of the widest type, in
// blocks of 32 bytes.
//
// Lane i of an operand is in block i / (32 bytes / width of the type). Strides are in blocks: block stride 0 broadcasts
// one block, repeat stride 0 uses the same blocks in each repeat. Repeats run in order. The overlap rules are the
// documented ones. Within a repeat, a source and the destination are either the same or disjoint. A repeat may not read
// what an earlier one wrote, with two exceptions: the second source of Add, Sub, Mul, Max with a repeat stride of 0
// (half, int32, float), and the destination that MulAddDst and Axpy add to, for which the documentation has no rule
// (these are counted separately, see README.md). Not modelled: masks bit by bit, masks set outside of the call.
#pragma once
#include "banks.h"
#include "copies.h"

namespace twin {

struct Shape {  // lanes of one repeat; `count`: the form of the call that takes a number of elements
    uint32_t lanes, repeats;
    bool count;
};

inline void check_overlap(Core& core, const Walk& dst, const Walk& src, Shape shape) {
    const bool same = dst.begin == src.begin && dst.bits == src.bits && dst.block_stride == src.block_stride;
    if (same && shape.repeats == 1) return;
    static std::vector<int> written(kUbBytes / kBlock, -1);  // for each block, the repeat that wrote it
    std::vector<uint32_t> touched;
    auto blocks = [&](const Walk& walk, uint32_t repeat, auto each) {
        const uint32_t rows = (shape.lanes + walk.block_lanes() - 1) / walk.block_lanes();
        for (uint32_t row = 0; row < rows; ++row)
            each(walk.begin / kBlock + repeat * walk.repeat_stride + row * walk.block_stride);
    };
    std::string broken;
    for (uint32_t repeat = 0; repeat < shape.repeats && broken.empty(); ++repeat) {
        if (!src.chains)
            blocks(src, repeat, [&](uint32_t block) {
                if (written[block] >= 0)
                    broken = text("repeat %u reads %s where repeat %d wrote", repeat, src.name, written[block]);
            });
        blocks(dst, repeat, [&](uint32_t block) { touched.push_back(block), written[block] = repeat; });
        if (!(same && src.repeat_stride * repeat == dst.repeat_stride * repeat))
            blocks(src, repeat, [&](uint32_t block) {
                if (written[block] == int(repeat) && !(src.chains && same))
                    broken = text("%s and the destination overlap in part", src.name);
            });
    }
    for (uint32_t block : touched) written[block] = -1;
    if (!broken.empty()) core.fail(broken);
}

// Does all checks and records before the lanes are computed. Returns false if there is nothing to compute.
inline bool begin_vector(Core& core, uint16_t op, Shape shape, const Walk& dst, const Walk* first, size_t sources,
                         uint32_t widest, bool reads_dst) {
    core.op = op;
    const uint32_t most = 2048 / widest;
    if (!shape.count && (shape.lanes < 1 || shape.lanes > most))
        core.fail(text("mask %u is not in 1..%u", shape.lanes, most));
    if (!shape.count && shape.repeats > 255) core.fail(text("repeatTime %u is above 255", shape.repeats));
    auto aligned = [&](const Walk& walk) {
        if (walk.begin % kBlock)
            core.fail(text("a UB address must be a multiple of 32 bytes: %s, byte %u of %s", walk.name,
                           walk.begin - walk.slot->begin, walk.slot->name.c_str()));
    };
    aligned(dst);
    std::for_each(first, first + sources, aligned);
    if (!shape.repeats) core.fail("repeatTime 0: the call does nothing");
    if (!shape.lanes) return false;
    core.begin(PIPE_V, op);
    const Region out = dst.region(shape.lanes, shape.repeats);
    for (size_t source = 0; source < sources; ++source) {
        const Walk& walk = first[source];
        const Region in = walk.region(shape.lanes, shape.repeats);
        core.read(PIPE_V, in, walk.name);
        if (walk.slot == dst.slot && !shape.count) check_overlap(core, dst, walk, shape);
        if (walk.slot == dst.slot && shape.count && walk.begin < dst.begin + out.bytes &&
            dst.begin < walk.begin + in.bytes && (walk.begin != dst.begin || walk.bits < dst.bits))
            core.fail(text("%s and the destination overlap in part", walk.name));
    }
    if (reads_dst) core.read(PIPE_V, out, "the destination that is added to");
    core.write(PIPE_V, out, "the destination");
    Instructions& done = core.counts().vector[Shadow::op_names()[op]];
    done.count += 1;
    const uint32_t repeats = shape.count ? (shape.lanes + most - 1) / most : shape.repeats;
    done.repeats += repeats;
    std::vector<Walk> read(first, first + sources);
    if (reads_dst) read.push_back(dst);
    const auto step = [&](Walk walk) {
        if (shape.count) walk.repeat_stride = most * walk.bits / 256;
        return walk;
    };
    std::transform(read.begin(), read.end(), read.begin(), step);
    done.conflicts += bank_conflicts(step(dst), read, std::min(shape.lanes, most), repeats);
    return true;
}

// Calls each(lane, repeat, lanes) for stretches whose lanes are contiguous in every operand.
template <size_t operands, class Each>
void stretches(Shape shape, const Walk (&walks)[operands], uint32_t widest, Each each) {
    bool dense = true;
    for (const Walk& walk : walks) dense = dense && walk.block_stride == 1;
    const uint32_t step = dense ? shape.lanes : 256 / widest;
    for (uint32_t repeat = 0; repeat < shape.repeats; ++repeat)
        for (uint32_t lane = 0; lane < shape.lanes; lane += step)
            each(repeat, lane, std::min(step, shape.lanes - lane));
}

template <bool reads_dst = false, class D, class A, class B, class F>
void binary(uint16_t op, Shape shape, const Walk& dst, const Walk& a, const Walk& b, F f) {
    Core& core = twin::core();
    const uint32_t widest = std::max({dst.bits, a.bits, b.bits});
    const Walk sources[] = {a, b};
    if (!begin_vector(core, op, shape, dst, sources, 2, widest, reads_dst)) return;
    stretches(shape, {dst, a, b}, widest, [&](uint32_t repeat, uint32_t lane, uint32_t lanes) {
        D* to = reinterpret_cast<D*>(dst.at(core, repeat, lane));
        const A* left = reinterpret_cast<const A*>(a.at(core, repeat, lane));
        const B* right = reinterpret_cast<const B*>(b.at(core, repeat, lane));
        for (uint32_t i = 0; i < lanes; ++i) to[i] = f(left[i], right[i], to[i]);
    });
}

template <bool reads_dst = false, class D, class A, class F>
void unary(uint16_t op, Shape shape, const Walk& dst, const Walk& a, F f) {
    Core& core = twin::core();
    const uint32_t widest = std::max(dst.bits, a.bits);
    if (!begin_vector(core, op, shape, dst, &a, 1, widest, reads_dst)) return;
    stretches(shape, {dst, a}, widest, [&](uint32_t repeat, uint32_t lane, uint32_t lanes) {
        D* to = reinterpret_cast<D*>(dst.at(core, repeat, lane));
        if constexpr (std::is_same_v<A, int4b_t>) {  // the number of lanes is even, and so is that of every stretch
            const uint8_t* from = a.at(core, repeat, lane);
            for (uint32_t i = 0; i < lanes; i += 2)
                to[i] = f(int8_t(from[i / 2] << 4) >> 4), to[i + 1] = f(int8_t(from[i / 2]) >> 4);
        } else {
            const A* from = reinterpret_cast<const A*>(a.at(core, repeat, lane));
            for (uint32_t i = 0; i < lanes; ++i)
                if constexpr (reads_dst)
                    to[i] = f(from[i], to[i]);
                else
                    to[i] = f(from[i]);
        }
    });
}

template <class D> void fill(uint16_t op, Shape shape, const Walk& dst, D value) {
    Core& core = twin::core();
    if (!begin_vector(core, op, shape, dst, nullptr, 0, dst.bits, false)) return;
    stretches(shape, {dst}, dst.bits, [&](uint32_t repeat, uint32_t lane, uint32_t lanes) {
        D* to = reinterpret_cast<D*>(dst.at(core, repeat, lane));
        std::fill(to, to + lanes, value);
    });
}

template <class... T> uint16_t name_op(const char* name) {
    std::string types;
    ((types += types.empty() ? name_of<T> : std::string(",") + name_of<T>), ...);
    return Shadow::op_id(std::string(name) + "<" + types + ">");
}

inline Shape by_count(int64_t count) {
    if (count < 0 || count > kUbBytes * 2) core().fail(text("%lld elements", (long long)count));
    return {uint32_t(count), 1, true};
}

}  // namespace twin
