// One probe for each rule about queues, global memory, memory that was never written, and synchronisation of cores.
#include "probe.h"

using In = TQue<QuePosition::VECIN, 1>;

PROBE(alloc_too_many) {
    In q;
    p.pipe.InitBuffer(q, broken ? 1 : 2, 256);
    auto first = q.template AllocTensor<half>(), second = q.template AllocTensor<half>();
    q.FreeTensor(first), q.FreeTensor(second);
}
PROBE(nine_out) {
    In q;
    p.pipe.InitBuffer(q, 9, 32);
    LocalTensor<half> out[9];
    for (int i = 0; i < (broken ? 9 : 8); ++i) out[i] = q.template AllocTensor<half>();
    for (int i = 0; i < 8; ++i) q.FreeTensor(out[i]);
}
PROBE(enqueue_unallocated) {
    In q;
    p.pipe.InitBuffer(q, 1, 256);
    auto tensor = q.template AllocTensor<half>();
    q.EnQue(tensor), tensor = q.template DeQue<half>();
    if (broken) q.EnQue(tensor), q.template DeQue<half>();
    q.FreeTensor(tensor);
}
PROBE(enqueue_foreign) {
    In q;
    p.pipe.InitBuffer(q, 1, 256);
    auto tensor = q.template AllocTensor<half>();
    q.EnQue(broken ? p.a : tensor);
    tensor = q.template DeQue<half>();
    q.FreeTensor(tensor);
}
PROBE(depth) {
    In shallow;
    TQue<QuePosition::VECIN, 2> deep;
    p.pipe.InitBuffer(shallow, 2, 256), p.pipe.InitBuffer(deep, 2, 256);
    auto twice = [](auto& q) {
        auto first = q.template AllocTensor<half>(), second = q.template AllocTensor<half>();
        q.EnQue(first), q.EnQue(second);
        first = q.template DeQue<half>(), second = q.template DeQue<half>();
        q.FreeTensor(first), q.FreeTensor(second);
    };
    broken ? twice(shallow) : twice(deep);
}
PROBE(dequeue_empty) {
    In q;
    p.pipe.InitBuffer(q, 1, 256);
    auto tensor = q.template AllocTensor<half>();
    if (!broken) q.EnQue(tensor);
    tensor = q.template DeQue<half>();
    q.FreeTensor(tensor);
}
PROBE(used_after_free) {
    In q;
    p.pipe.InitBuffer(q, 1, 256);
    auto tensor = q.template AllocTensor<half>();
    if (broken) q.FreeTensor(tensor);
    Duplicate(tensor, half(1), 128);
    if (!broken) q.FreeTensor(tensor);
}
PROBE(used_in_queue) {
    In q;
    p.pipe.InitBuffer(q, 1, 256);
    auto tensor = q.template AllocTensor<half>();
    DataCopy(tensor, p.x, 128);
    q.EnQue(tensor);
    if (!broken) tensor = q.template DeQue<half>();
    Muls(p.a, tensor, half(1), 128);
    q.FreeTensor(tensor);
}
PROBE(freed_twice) {
    In q;
    p.pipe.InitBuffer(q, 1, 256);
    auto tensor = q.template AllocTensor<half>();
    q.FreeTensor(tensor);
    if (broken) q.FreeTensor(tensor);
}
PROBE(not_freed) {
    In q;
    p.pipe.InitBuffer(q, 1, 256);
    auto tensor = q.template AllocTensor<half>();
    if (!broken) q.FreeTensor(tensor);
}
PROBE(used_after_reset) {
    p.ones();
    p.pipe.Reset();
    p.pipe.InitBuffer(p.a_buffer, 256);
    PipeBarrier<PIPE_ALL>();
    Duplicate(broken ? p.b : p.a_buffer.template Get<half>(), half(1), 16);
}
PROBE(unwritten_ub) {
    if (!broken) p.ones();
    Muls(p.a, p.b, half(1), 128);
}
PROBE(unwritten_ub_in_part) {
    Duplicate(p.b, half(1), broken ? 127 : 128);
    PipeBarrier<PIPE_V>();
    Muls(p.a, p.b, half(1), 128);
}
PROBE(unwritten_padding) {
    DataCopyPad(p.a, p.x, {1, 20, 0, 0, 0}, {!broken, 0, 6, half(0)});
    pass<HardEvent::MTE2_V>();
    Muls(p.b, p.a, half(1), 16);
}
PROBE(unwritten_output) { DataCopy(p.a, broken ? p.y : p.x, 16); }
PROBE(unwritten_workspace) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    const uint64_t mine = GetBlockIdx() * 16;
    if (!broken) DataCopy(p.own[mine], p.b, 16);
    pass<HardEvent::MTE3_MTE2>();
    DataCopy(p.a, p.own[mine], 16);
}
PROBE(read_outside) { DataCopy(p.a, p.x[broken ? kHalves - 8 : kHalves - 16], 16); }
PROBE(write_outside) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    DataCopyPad(p.y[(kHalves - 16) * GetBlockIdx()], p.b, {1, broken ? 34u : 32u, 0, 0, 0});
}
PROBE(library_workspace) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    if (GetBlockIdx() == 0) DataCopy(broken ? p.own[-16] : p.own, p.b, 16);
}
PROBE(absent_input) {
    GlobalTensor<half> absent;
    DataCopy(p.a, broken ? absent : p.x, 16);
}
PROBE(write_input) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    if (GetBlockIdx() == 0) DataCopy(broken ? p.x : p.y, p.b, 16);
}
PROBE(same_output) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    DataCopy(p.y[broken ? 0 : 16 * GetBlockIdx()], p.b, 16);
}
PROBE(scalar_output) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    if (GetBlockIdx() == 0) DataCopy(p.y, p.b, 16);
    SyncAll();
    if (broken) p.y.GetValue(0);
    p.x.GetValue(0);
}
PROBE(other_cores_bytes) {
    p.ones();
    pass<HardEvent::V_MTE2>();
    pass<HardEvent::V_MTE3>();
    DataCopy(p.own[16 * GetBlockIdx()], p.b, 16);
    if (!broken) SyncAll<true>();
    if (GetBlockIdx() == 1) DataCopy(p.a, p.own, 16);
}
PROBE(overwritten_while_read) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    if (GetBlockIdx() == 0) DataCopy(p.own, p.b, 16);
    SyncAll();
    if (GetBlockIdx() == 0) DataCopy(p.a, p.own, 16);
    if (!broken) SyncAll();
    if (GetBlockIdx() == 1) DataCopy(p.own, p.b, 16);
}
PROBE(missed_sync) {
    if (!broken || GetBlockIdx() == 0) SyncAll<true>();
}
PROBE(sync_kernel_type) {
    if (broken) KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    SyncAll<true>();
}
PROBE(cross_unwaited) {
    p.ones();
    pass<HardEvent::V_MTE3>(), pass<HardEvent::V_MTE2>();
    DataCopy(p.own[16 * GetBlockIdx()], p.b, 16);
    CrossCoreSetFlag<0, PIPE_MTE3>(0);
    if (!broken) CrossCoreWaitFlag(0);
    DataCopy(p.a, p.own[16 * (1 - GetBlockIdx())], 16);
    if (broken) CrossCoreWaitFlag(0);
}
PROBE(cross_set_before_the_store) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    if (broken) CrossCoreSetFlag<0, PIPE_MTE3>(0);
    DataCopy(p.own[16 * GetBlockIdx()], p.b, 16);
    if (!broken) CrossCoreSetFlag<0, PIPE_MTE3>(0);
    CrossCoreWaitFlag(0);
    DataCopy(p.a, p.own[16 * (1 - GetBlockIdx())], 16);
}
PROBE(cross_set_by_another_pipe) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    DataCopy(p.own[16 * GetBlockIdx()], p.b, 16);
    if (broken)
        CrossCoreSetFlag<0, PIPE_V>(0);
    else
        CrossCoreSetFlag<0, PIPE_MTE3>(0);
    CrossCoreWaitFlag(0);
    DataCopy(p.a, p.own[16 * (1 - GetBlockIdx())], 16);
}
PROBE(cross_reported_load) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    if (GetBlockIdx() == 0) DataCopy(p.own, p.b, 16);
    SyncAll();
    if (GetBlockIdx() == 0) DataCopy(p.a, p.own, 16);
    if (!broken) pass<HardEvent::MTE2_MTE3>();
    CrossCoreSetFlag<0, PIPE_MTE3>(0);
    CrossCoreWaitFlag(0);
    if (GetBlockIdx() == 1) DataCopy(p.own, p.b, 16);
}
PROBE(cross_missing) {
    if (!broken || GetBlockIdx() == 0) CrossCoreSetFlag<0, PIPE_MTE3>(0);
    CrossCoreWaitFlag(0);
}
PROBE(cross_doubled) {
    CrossCoreSetFlag<0, PIPE_MTE3>(0);
    if (broken && GetBlockIdx() == 1) CrossCoreSetFlag<0, PIPE_MTE3>(0);
    CrossCoreWaitFlag(0);
}
PROBE(cross_left) {
    CrossCoreSetFlag<0, PIPE_MTE3>(0);
    if (!broken || GetBlockIdx() == 1) CrossCoreWaitFlag(0);
}
PROBE(cross_counter) {
    for (int i = 0; i < (broken ? 16 : 15); ++i) CrossCoreSetFlag<0, PIPE_MTE3>(0);
    for (int i = 0; i < (broken ? 16 : 15); ++i) CrossCoreWaitFlag(0);
}
PROBE(cross_id) {
    CrossCoreSetFlag<0, PIPE_MTE3>(broken ? 11 : 10);
    CrossCoreWaitFlag(broken ? 11 : 10);
}
PROBE(cross_kernel_type) {
    if (broken) KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    CrossCoreSetFlag<0, PIPE_MTE3>(0);
    CrossCoreWaitFlag(0);
}
