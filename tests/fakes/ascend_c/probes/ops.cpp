// One kernel for each instruction whose results are tested. The inputs are a, b and the initial contents of d, the
// output is d, each of 4096 bytes.
#include "kernel_operator.h"

using namespace AscendC;

#define OP(name, D, A, B)                                                                                          \
    static void name##_body(LocalTensor<D>& d, LocalTensor<A>& a, LocalTensor<B>& b);                              \
    extern "C" __global__ __aicore__ void name(GM_ADDR a_, GM_ADDR b_, GM_ADDR d_, GM_ADDR y_, GM_ADDR, GM_ADDR) { \
        frame<D, A, B>(a_, b_, d_, y_, name##_body);                                                               \
    }                                                                                                              \
    static void name##_body([[maybe_unused]] LocalTensor<D>& d, [[maybe_unused]] LocalTensor<A>& a,                \
                            [[maybe_unused]] LocalTensor<B>& b)

template <class D, class A, class B, class Body> void frame(GM_ADDR a_, GM_ADDR b_, GM_ADDR d_, GM_ADDR y_, Body body) {
    TPipe pipe;
    TBuf<TPosition::VECIN> buffers[3];
    LocalTensor<int8_t> bytes[3];
    GM_ADDR sources[] = {a_, b_, d_};
    for (int at = 0; at < 3; ++at) {
        pipe.InitBuffer(buffers[at], 4096);
        bytes[at] = buffers[at].Get<int8_t>();
        GlobalTensor<int8_t> source;
        source.SetGlobalBuffer((__gm__ int8_t*)sources[at]);
        DataCopy(bytes[at], source, 4096);
    }
    PipeBarrier<PIPE_ALL>();
    auto a = bytes[0].ReinterpretCast<A>();
    auto b = bytes[1].ReinterpretCast<B>();
    auto d = bytes[2].ReinterpretCast<D>();
    body(d, a, b);
    PipeBarrier<PIPE_ALL>();
    GlobalTensor<int8_t> y;
    y.SetGlobalBuffer((__gm__ int8_t*)y_);
    DataCopy(y, bytes[2], 4096);
}

OP(cast_int4, half, int4b_t, half) { Cast(d, a, RoundMode::CAST_NONE, 2048); }
OP(cast_int4_strides, half, int4b_t, half) { Cast(d, a, RoundMode::CAST_NONE, 128, 4, {2, 1, 16, 4}); }
#define NARROW(type, mode, MODE) \
    OP(cast_to_##type##_##mode, type, float, half) { Cast(d, a, RoundMode::CAST_##MODE, 1024); }
#define EVERY_MODE(type)     \
    NARROW(type, rint, RINT) \
    NARROW(type, floor, FLOOR) NARROW(type, ceil, CEIL) NARROW(type, round, ROUND) NARROW(type, trunc, TRUNC)
EVERY_MODE(half)
EVERY_MODE(bfloat16_t)
EVERY_MODE(int32_t)
EVERY_MODE(int16_t)
EVERY_MODE(float)

OP(mul_strides, float, float, float) { Mul(d, a, b, 40, 3, {2, 0, 1, 16, 8, 5}); }

OP(sum_half, half, half, half) { MulAddDst(d, a, b, 2048); }
OP(sum_float, float, float, float) { MulAddDst(d, a, b, 1024); }
OP(sum_mixed, float, half, half) { MulAddDst(d, a, b, 1024); }
OP(sum_chained, float, half, half) { MulAddDst(d, a, b, 64, 20, {1, 1, 0, 0, 4, 1}); }
OP(axpy, float, half, half) { Axpy(d, a, half(0.3f), 1024); }
OP(axpy_half, half, half, half) { Axpy(d, a, half(0.3f), 128, 4, {1, 1, 0, 8}); }

OP(duplicate, bfloat16_t, half, half) { Duplicate(d, ToBfloat16(1.5f), 16, 3, 1, 4); }
OP(brcb_half, half, half, half) { Brcb(d, a, 3, {2, 20}); }
OP(brcb_float, float, float, half) { Brcb(d, a, 2, {1, 8}); }
OP(whole_sum, float, float, half) { WholeReduceSum(d[3], a, 60, 4, 2, 1, 9); }
OP(whole_sum_half, half, half, half) { WholeReduceSum(d, a, 128, 16, 1, 1, 8); }
OP(whole_max, float, float, half) { WholeReduceMax(d, a, 50, 4, 3, 1, 8); }
OP(whole_max_only, half, half, half) { WholeReduceMax(d, a, 128, 4, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE); }
OP(block_sum, float, float, half) { BlockReduceSum(d, a, 4, 44, 2, 1, 8); }
OP(block_max, float, float, half) { BlockReduceMax(d, a, 4, 44, 2, 1, 8); }
OP(squares, half, half, half) {
    LocalTensor<half> to[16], from[16];
    for (uint32_t i = 0; i < 16; ++i) to[i] = d[48 * i], from[i] = a[16 * (15 - i)];
    TransDataTo5HD<half>(to, from, {false, false, 2, 1, 32});
}
OP(block_sum_half, half, half, half) { BlockReduceSum(d, a, 16, 128, 1, 1, 8); }

// Kernels of moves: x is the input a (4096 bytes); y has 4096 bytes, which are first filled with -1.
#define MOVE(name)                                                                                  \
    static void name##_body(LocalTensor<int16_t>&, GlobalTensor<int16_t>&, GlobalTensor<int16_t>&); \
    extern "C" __global__ __aicore__ void name(GM_ADDR x_, GM_ADDR y_, GM_ADDR, GM_ADDR) {          \
        TPipe pipe;                                                                                 \
        TBuf<TPosition::VECIN> buffer;                                                              \
        pipe.InitBuffer(buffer, 4096);                                                              \
        auto ub = buffer.Get<int16_t>();                                                            \
        GlobalTensor<int16_t> x, y;                                                                 \
        x.SetGlobalBuffer((__gm__ int16_t*)x_), y.SetGlobalBuffer((__gm__ int16_t*)y_);             \
        Duplicate(ub, int16_t(-1), 2048);                                                           \
        PipeBarrier<PIPE_ALL>();                                                                    \
        name##_body(ub, x, y);                                                                      \
    }                                                                                               \
    static void name##_body(LocalTensor<int16_t>& ub, GlobalTensor<int16_t>& x, GlobalTensor<int16_t>& y)
MOVE(pad_in) {  // rows of 10 elements, 22 apart, to rows of 2 + 10 + 3, filled up to 16, with 16 between
    DataCopyPad(ub, x[1], {5, 20, 24, 1, 0}, {true, 2, 3, int16_t(77)});
    PipeBarrier<PIPE_ALL>();
    DataCopy(y, ub, 2048);
}
MOVE(pad_out) {  // rows of 10 elements out of rows of 16 with 16 between, to rows 13 apart
    DataCopy(ub, x, 2048);
    PipeBarrier<PIPE_ALL>();
    DataCopyPad(y[1], ub, {5, 20, 1, 6, 0});
}
MOVE(blocks) {  // 3 times 2 blocks, 1 and 3 blocks between
    DataCopy(ub, x, {3, 2, 1, 3});
    PipeBarrier<PIPE_ALL>();
    DataCopy(y, ub, 2048);
}
MOVE(blocks_out) {
    DataCopy(ub, x, 2048);
    PipeBarrier<PIPE_ALL>();
    DataCopy(y, ub, {3, 2, 1, 3});
}

extern "C" __global__ __aicore__ void tiling_and_ids(GM_ADDR absent, GM_ADDR y_, GM_ADDR, GM_ADDR tiling) {
    GET_TILING_DATA(data, tiling);
    TPipe pipe;
    TQue<QuePosition::VECOUT, 1> out;
    pipe.InitBuffer(out, 1, 32);
    auto values = out.AllocTensor<int32_t>();
    const int32_t found[8] = {
        int32_t(data.first),    int32_t(data.wide >> 32), int32_t(data.last), int32_t(GetBlockIdx()),
        int32_t(GetBlockNum()), TILING_KEY_IS(2),         absent == nullptr,  0};
    for (int at = 0; at < 8; ++at) values.SetValue(at, found[at]);
    const auto event = static_cast<event_t>(GetTPipePtr()->FetchEventID(HardEvent::S_MTE3));
    SetFlag<HardEvent::S_MTE3>(event);
    WaitFlag<HardEvent::S_MTE3>(event);
    out.EnQue(values);
    values = out.DeQue<int32_t>();
    GlobalTensor<int32_t> y;
    y.SetGlobalBuffer((__gm__ int32_t*)y_);
    DataCopy(y[8 * GetBlockIdx()], values, 8);
    out.FreeTensor(values);
}

OP(sort32, float, float, uint32_t) { Sort32(d, a, b, 16); }
OP(merge3, float, float, half) {
    const uint16_t lengths[4] = {8, 32, 5, 0};
    MrgSort(d, MrgSortSrcList<float>(a, a[64], a[128], a), MrgSort4Info(lengths, false, 7, 1));
}
OP(gather_odd, uint32_t, uint32_t, half) {
    uint64_t count;
    GatherMask(d, a, 2, true, 16, {1, 3, 8, 0}, count);
}
OP(gather_even, float, float, half) {
    uint64_t count;
    GatherMask(d, a, 1, true, 10, {1, 2, 2, 0}, count);
}
OP(gather, float, float, uint32_t) { Gather(d, a, b, 8, 70); }

extern "C" __global__ __aicore__ void counted(GM_ADDR x_, GM_ADDR y_, GM_ADDR, GM_ADDR) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    TPipe pipe;
    TQue<QuePosition::VECIN, 1> in;
    TBuf<TPosition::VECOUT> out;
    pipe.InitBuffer(in, 2, 1024), pipe.InitBuffer(out, 1024);
    GlobalTensor<half> x, y;
    x.SetGlobalBuffer((__gm__ half*)x_), y.SetGlobalBuffer((__gm__ half*)y_);
    auto sum = out.Get<half>();
    Duplicate(sum, half(0), 512);
    for (int64_t tile = 0; tile <= GetBlockIdx(); ++tile) {
        auto part = in.AllocTensor<half>();
        DataCopyPad(part, x[512 * tile], {4, 64, 32, 0, 0}, {false, 0, 0, half(0)});
        in.EnQue(part), part = in.DeQue<half>();
        PipeBarrier<PIPE_V>();
        Add(sum, sum, part, 128);
        in.FreeTensor(part);
    }
    x.GetValue(7);
    SyncAll<true>();
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    DataCopy(y[512 * GetBlockIdx()], sum, 512);
}

// The second phase's input is loaded before the SyncAll, which waits for it.
extern "C" __global__ __aicore__ void loaded_ahead(GM_ADDR x_, GM_ADDR y_, GM_ADDR, GM_ADDR) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    TPipe pipe;
    TQue<QuePosition::VECIN, 2> in;
    pipe.InitBuffer(in, 2, 1024);
    GlobalTensor<half> x, y;
    x.SetGlobalBuffer((__gm__ half*)x_), y.SetGlobalBuffer((__gm__ half*)y_);
    auto part = in.AllocTensor<half>();
    DataCopy(part, x, 512);
    in.EnQue(part);
    SyncAll<true>();
    auto other = in.AllocTensor<half>();
    CrossCoreSetFlag<0, PIPE_MTE3>(0);
    DataCopy(other, x, 512);
    in.EnQue(other);
    CrossCoreWaitFlag(0);
    part = in.DeQue<half>(), other = in.DeQue<half>();
    in.FreeTensor(part), in.FreeTensor(other);
    SyncAll<true>();
}
