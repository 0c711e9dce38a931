// One probe for each documented limit of an instruction: alignment, masks, repeats, strides, modes, overlap.
#include "probe.h"

PROBE(alignment) {
    p.ones();
    Muls(p.b, p.a[broken ? 8 : 16], half(2), 128);
}
PROBE(alignment_copy) { DataCopy(p.a[broken ? 8 : 16], p.x, 128); }
PROBE(alignment_brcb) {
    p.ones();
    Brcb(p.b, p.a[broken ? 8 : 16], 1, {1, 8});
}
PROBE(alignment_reduction) {
    p.ones();
    BlockReduceSum(p.b[broken ? 4 : 8], p.a, 1, 128, 1, 1, 8);
}
PROBE(mask) {
    p.ones();
    Cast(p.f, p.a, RoundMode::CAST_NONE, broken ? 128 : 64, 1, {1, 1, 8, 4});
}
PROBE(mask_reduction) {
    p.ones();
    WholeReduceSum(p.f[1024], p.f, broken ? 65 : 64, 1, 1, 1, 8);
}
PROBE(no_mask_reduction) {
    p.ones();
    WholeReduceSum(p.f[1024], p.f, broken ? 0 : 64, 1, 1, 1, 8);
}
PROBE(alignment_value) {
    p.ones();
    WholeReduceMax(p.f[broken ? 1025 : 1026], p.f, 64, 1, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
}
PROBE(repeats) {
    p.ones();
    Muls(p.a, p.b, half(1), 16, broken ? 256 : 255, {1, 1, 0, 0});
}
PROBE(repeats_reduction) {
    p.ones();
    WholeReduceSum(p.f, p.f[1024], 8, broken ? 256 : 255, 1, 1, 0);
}
PROBE(no_repeats) {
    p.ones();
    Muls(p.a, p.b, half(1), 16, broken ? 0 : 1, {1, 1, 8, 8});
}
PROBE(no_repeats_reduction) {
    p.ones();
    WholeReduceSum(p.f, p.f[1024], 8, broken ? 0 : 1, 1, 1, 0);
}
PROBE(no_repeats_brcb) {
    p.ones();
    Brcb(p.b, p.a, broken ? 0 : 1, {1, 8});
}
PROBE(no_blocks) { DataCopy(p.a, p.x, DataCopyParams{uint16_t(broken ? 0 : 1), 1, 0, 0}); }
PROBE(brcb_short) {
    p.ones();
    LocalTensor<half> few = p.a;
    few.SetSize(broken ? 15 : 16);
    Brcb(p.b, few, 2, {1, 8});
}
PROBE(block_count) {
    DataCopyParams params{uint16_t(broken ? 4096 : 128), 1, 0, 0};
    DataCopy(p.a, p.x, params);
}
PROBE(block_count_pad) {
    DataCopyExtParams params{uint16_t(broken ? 4096 : 128), 32, 0, 0, 0};
    DataCopyPad(p.a, p.x, params, {false, 0, 0, half(0)});
}
PROBE(no_block_pad) {
    DataCopyExtParams params{uint16_t(broken ? 0 : 1), 32, 0, 0, 0};
    DataCopyPad(p.a, p.x, params, {false, 0, 0, half(0)});
}
PROBE(no_length_pad) {
    DataCopyExtParams params{1, broken ? 0u : 32u, 0, 0, 0};
    DataCopyPad(p.a, p.x, params, {false, 0, 0, half(0)});
}
PROBE(block_length) {
    DataCopyExtParams params{1, broken ? 31u : 30u, 0, 0, 0};
    DataCopyPad(p.a, p.x, params, {false, 0, 0, half(0)});
}
PROBE(copy_length) { DataCopy(p.a, p.x, broken ? 8 : 16); }
PROBE(padding) {
    DataCopyExtParams params{1, 32, 0, 0, 0};
    DataCopyPad(p.a, p.x, params, {true, 0, uint8_t(broken ? 17 : 16), half(0)});
}
PROBE(global_alignment) {
    GlobalTensor<half> odd;
    odd.SetGlobalBuffer((__gm__ half*)((__gm__ uint8_t*)p.x.GetPhyAddr() + (broken ? 1 : 2)));
    DataCopy(p.a, odd, 16);
}
PROBE(int4_count) {
    p.ones();
    Cast(p.a, p.b.template ReinterpretCast<int4b_t>(), RoundMode::CAST_NONE, broken ? 15 : 16);
}
PROBE(rounding_mode) {
    p.ones();
    Cast(p.a.template ReinterpretCast<bfloat16_t>(), p.f, broken ? RoundMode::CAST_NONE : RoundMode::CAST_RINT, 64);
}
PROBE(brcb_stride) {
    p.ones();
    Brcb(p.b, p.a, 1, {uint16_t(broken ? 0 : 1), 8});
}
PROBE(brcb_in_place) {
    p.ones();
    Brcb(p.b, p.b[broken ? 0 : 1024], 1, {1, 8});
}
PROBE(overlap_in_part) {
    p.ones();
    Muls(p.a[broken ? 16 : 0], p.a, half(2), 128, 1, {1, 1, 8, 8});
}
PROBE(overlap_in_part_count) {
    p.ones();
    Muls(p.a[broken ? 16 : 0], p.a, half(2), 128);
}
PROBE(overlap_of_repeats) {  // the second repeat reads what the first one wrote
    p.ones();
    Muls(p.a[broken ? 128 : 256], p.a, half(2), 128, 2, {1, 1, 8, 8});
}
PROBE(chain) {  // only the second source may be the sum so far
    p.ones();
    if (broken)
        Add(p.a, p.a, p.b, 128, 4, {1, 1, 1, 0, 0, 8});
    else
        Add(p.a, p.b, p.a, 128, 4, {1, 1, 1, 0, 8, 0});
}
PROBE(chain_type) {  // and only in some types
    p.ones();
    const auto a = p.a.template ReinterpretCast<int16_t>(), b = p.b.template ReinterpretCast<int16_t>();
    if (broken)
        Add(a, b, a, 128, 4, {1, 1, 1, 0, 8, 0});
    else
        Add(p.a, p.b, p.a, 128, 4, {1, 1, 1, 0, 8, 0});
}
PROBE(widened_in_place) {
    p.ones();
    MulAddDst(p.f, p.f[broken ? 0 : 1024].template ReinterpretCast<half>(), p.a, 64);
}
PROBE(cast_in_place) {
    p.ones();
    Cast(p.f, p.f[broken ? 0 : 1024].template ReinterpretCast<half>(), RoundMode::CAST_NONE, 64);
}
PROBE(reduction_in_place) {
    p.ones();
    WholeReduceSum(p.f, p.f[broken ? 0 : 1024], 64, 2, 1, 1, 8);
}
template <class P> void transpose(P& p, uint32_t to, uint16_t stride) {
    LocalTensor<half> rows[16], columns[16];
    for (uint32_t i = 0; i < 16; ++i) rows[i] = p.a[16 * i], columns[i] = p.a[to + 16 * i];
    TransDataTo5HD<half>(columns, rows, {false, false, 1, stride, stride});
}
PROBE(transpose_stride) {
    p.ones();
    transpose(p, 256, broken ? 16 : 0);
}
PROBE(transpose_in_place) {
    p.ones();
    transpose(p, broken ? 240 : 256, 0);
}
PROBE(capacity) {
    TBuf<TPosition::VECCALC> rest;
    p.pipe.InitBuffer(rest, 192 * 1024 - 256 - 16 * 1024 + (broken ? 1 : 0));
}
PROBE(no_bytes) {
    TBuf<TPosition::VECCALC> none;
    p.pipe.InitBuffer(none, broken ? 0 : 32);
}
PROBE(buffers) {
    TQue<QuePosition::VECIN, 1> many;
    p.pipe.InitBuffer(many, broken ? 62 : 61, 32);
}
PROBE(beyond_buffer) {
    p.ones();
    Duplicate(p.a[broken ? kHalves - 112 : kHalves - 128], half(0), 128);
}
PROBE(beyond_buffer_repeats) {
    p.ones();
    Muls(p.a, p.b, half(1), 128, 4, {1, 1, 8, uint8_t(broken ? 41 : 40)});
}
PROBE(beyond_buffer_copy) { DataCopy(p.a[broken ? 16 : 0], p.x, kHalves); }
PROBE(offset_outside) { p.a[broken ? kHalves : kHalves - 16]; }
PROBE(get_too_much) { p.a_buffer.template Get<half>(broken ? kHalves + 1 : kHalves); }
PROBE(to_veccalc) {
    auto f = p.f.template ReinterpretCast<half>();
    if (broken)
        DataCopy(f, p.x, 16);
    else
        DataCopy(p.a, p.x, 16);
}
PROBE(from_veccalc) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    auto f = p.f.template ReinterpretCast<half>();
    if (GetBlockIdx() == 0) DataCopy(p.y, broken ? f : p.b, 16);
}
PROBE(no_buffer) {
    LocalTensor<half> nothing;
    Duplicate(broken ? nothing : p.a, half(1), 16);
}
PROBE(second_pipe) {
    if (broken) TPipe second;
}
