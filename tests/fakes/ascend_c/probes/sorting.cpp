// One probe for each documented limit of the instructions that sort and gather.
#include "probe.h"

template <bool broken> void merge(Probe& p, uint32_t to, uint16_t valid) {
    const uint16_t lengths[4] = {8, 8, 0, 0};
    MrgSort(p.f[to], MrgSortSrcList<float>(p.f, p.f[16], p.f, p.f), MrgSort4Info(lengths, false, valid, 1));
}

PROBE(sort_to) {
    p.ones();
    Sort32(p.f[broken ? 32 : 64], p.f[1024], p.a.ReinterpretCast<uint32_t>(), 1);
}
PROBE(sort_from) {
    p.ones();
    Sort32(p.f, p.f[broken ? 1032 : 1056], p.a.ReinterpretCast<uint32_t>(), 1);
}
PROBE(sort_payloads) {
    p.ones();
    Sort32(p.f, p.f[1024], p.a[broken ? 16 : 64].ReinterpretCast<uint32_t>(), 1);
}
PROBE(sort_repeats) {
    p.ones();
    Sort32(p.f, p.f[1024], p.a.ReinterpretCast<uint32_t>(), broken ? -1 : 1);
}
PROBE(sort_in_place) {
    p.ones();
    Sort32(p.f, p.f[broken ? 32 : 64], p.a.ReinterpretCast<uint32_t>(), 1);
}
PROBE(merge_one_list) {
    p.ones();
    merge<broken>(p, 1024, broken ? 1 : 3);
}
PROBE(merge_in_place) {
    p.ones();
    merge<broken>(p, broken ? 24 : 32, 3);
}
PROBE(merge_unsorted) {
    p.ones();
    Muls(p.f[8], p.f[8], broken ? 2.0f : 0.5f, 8);  // the second half of the first list
    PipeBarrier<PIPE_V>();
    merge<broken>(p, 1024, 3);
}
PROBE(gather_pattern) {
    uint64_t count;
    p.ones();
    GatherMask(p.f[1024], p.f, broken ? 3 : 2, true, 16, {1, 2, 8, 0}, count);
}
PROBE(gather_in_place) {
    uint64_t count;
    p.ones();
    GatherMask(p.f[broken ? 72 : 80], p.f, 2, true, 16, {1, 2, 8, 0}, count);
}
PROBE(gather_unaligned) {
    p.ones();
    const LocalTensor<uint32_t> offsets = p.f[1024].ReinterpretCast<uint32_t>();
    Duplicate(offsets, uint32_t(broken ? 6 : 8), 16);
    PipeBarrier<PIPE_V>();
    Gather(p.f[512], p.f, offsets, 4, 16);
}
PROBE(gather_base) {
    p.ones();
    const LocalTensor<uint32_t> offsets = p.f[1024].ReinterpretCast<uint32_t>();
    Duplicate(offsets, 0u, 16);
    PipeBarrier<PIPE_V>();
    Gather(p.f[512], p.f, offsets, broken ? 8192 : 8188, 16);
}
PROBE(gather_outside) {
    p.ones();
    const LocalTensor<uint32_t> offsets = p.f[1024].ReinterpretCast<uint32_t>();
    Duplicate(offsets, uint32_t(broken ? 8192 : 8188), 16);
    PipeBarrier<PIPE_V>();
    Gather(p.f[512], p.f, offsets, 0, 16);
}
