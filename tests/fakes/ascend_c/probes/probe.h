// Shared by the test kernels of the twin. Each probe is compiled twice: probe_broken breaks one rule, and probe_kept
// does the same without breaking it. x is an input of 4096 bytes, y an output of 4096 bytes, and the workspace has 4096
// bytes. A probe runs on two cores.
#pragma once
#include "kernel_operator.h"

using namespace AscendC;

#define PROBE(name)                                                                                         \
    template <bool broken> void name(Probe& p);                                                             \
    extern "C" __global__ __aicore__ void name##_broken(GM_ADDR x, GM_ADDR y, GM_ADDR workspace, GM_ADDR) { \
        Probe probe(x, y, workspace);                                                                       \
        name<true>(probe);                                                                                  \
    }                                                                                                       \
    extern "C" __global__ __aicore__ void name##_kept(GM_ADDR x, GM_ADDR y, GM_ADDR workspace, GM_ADDR) {   \
        Probe probe(x, y, workspace);                                                                       \
        name<false>(probe);                                                                                 \
    }                                                                                                       \
    template <bool broken> void name([[maybe_unused]] Probe& p)

constexpr uint32_t kHalves = 2048;  // number of halves in each of the buffers

template <HardEvent event> void pass() {
    const int32_t id = GetTPipePtr()->FetchEventID(event);
    SetFlag<event>(id);
    WaitFlag<event>(id);
}

struct Probe {
    Probe(GM_ADDR x_, GM_ADDR y_, GM_ADDR workspace) {
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
        x.SetGlobalBuffer((__gm__ half*)x_);
        y.SetGlobalBuffer((__gm__ half*)y_);
        own.SetGlobalBuffer((__gm__ half*)GetUserWorkspace(workspace));
        pipe.InitBuffer(a_buffer, 2 * kHalves), pipe.InitBuffer(b_buffer, 2 * kHalves);
        pipe.InitBuffer(f_buffer, 4 * kHalves);
        a = a_buffer.Get<half>(), b = b_buffer.Get<half>(), f = f_buffer.Get<float>();
    }
    void load() {  // copies x into a
        DataCopy(a, x, kHalves);
        pass<HardEvent::MTE2_V>();
    }
    void ones() {  // fills a and b with ones
        Duplicate(a, half(1), kHalves), Duplicate(b, half(1), kHalves), Duplicate(f, 1.0f, kHalves);
        PipeBarrier<PIPE_V>();
    }
    TPipe pipe;
    GlobalTensor<half> x, y, own;
    TBuf<TPosition::VECIN> a_buffer;
    TBuf<TPosition::VECOUT> b_buffer;
    TBuf<TPosition::VECCALC> f_buffer;
    LocalTensor<half> a, b;
    LocalTensor<float> f;
};
