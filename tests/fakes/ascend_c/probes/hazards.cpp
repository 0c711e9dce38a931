// One probe for each way in which two pipes, or two instructions of one pipe, can access the same bytes.
#include "probe.h"

PROBE(load_then_compute) {
    DataCopy(p.a, p.x, kHalves);
    if (!broken) pass<HardEvent::MTE2_V>();
    Muls(p.b, p.a, half(1), kHalves);
}
PROBE(compute_then_store) {
    Duplicate(p.b, half(1), 16);
    if (!broken) pass<HardEvent::V_MTE3>();
    DataCopy(p.y[16 * GetBlockIdx()], p.b, 16);
}
PROBE(load_over_operand) {
    p.load();
    Muls(p.b, p.a, half(1), kHalves);
    if (!broken) pass<HardEvent::V_MTE2>();
    DataCopy(p.a, p.x, kHalves);
}
PROBE(compute_over_store) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    DataCopy(p.y[16 * GetBlockIdx()], p.b, 16);
    if (!broken) pass<HardEvent::MTE3_V>();
    Duplicate(p.b, half(2), 16);
}
PROBE(vector_raw) {
    p.ones();
    Muls(p.a, p.b, half(1), 128);
    if (!broken) PipeBarrier<PIPE_V>();
    Muls(p.f.template ReinterpretCast<half>(), p.a, half(1), 128);
}
PROBE(vector_war) {
    p.ones();
    Muls(p.a, p.b, half(1), 128);
    if (!broken) PipeBarrier<PIPE_V>();
    Duplicate(p.b, half(1), 128);
}
PROBE(vector_waw) {
    Duplicate(p.b, half(1), 128);
    if (!broken) PipeBarrier<PIPE_V>();
    Duplicate(p.b, half(2), 128);
}
PROBE(sum_raw) {  // the destination of MulAddDst is an operand, too
    p.ones();
    MulAddDst(p.a, p.b, p.b, 128);
    if (!broken) PipeBarrier<PIPE_V>();
    MulAddDst(p.a, p.b, p.b, 128);
}
PROBE(reduction_raw) {
    p.ones();
    Muls(p.a, p.b, half(1), 128);
    if (!broken) PipeBarrier<PIPE_V>();
    WholeReduceSum(p.b[1024], p.a, 128, 1, 1, 1, 8);
}
PROBE(brcb_raw) {
    p.ones();
    Muls(p.a, p.b, half(1), 128);
    if (!broken) PipeBarrier<PIPE_V>();
    Brcb(p.b[1024], p.a, 1, {1, 8});
}
PROBE(load_twice) {
    DataCopy(p.a, p.x, 16);
    if (!broken) PipeBarrier<PIPE_MTE2>();
    DataCopy(p.a, p.x[16], 16);
}
PROBE(scalar_read) {
    DataCopy(p.a, p.x, 16);
    if (!broken) pass<HardEvent::MTE2_S>();
    p.a.GetValue(3);
}
PROBE(scalar_read_of_sum) {
    p.ones();
    if (!broken) pass<HardEvent::V_S>();
    p.a.GetValue(3);
}
PROBE(scalar_write) {
    for (int i = 0; i < 16; ++i) p.a.SetValue(i, half(i));
    if (!broken) pass<HardEvent::S_V>();
    Muls(p.b, p.a, half(1), 16);
}
PROBE(scalar_over_operand) {
    p.ones();
    pass<HardEvent::V_S>();
    Muls(p.a, p.b, half(1), 16);
    if (!broken) pass<HardEvent::V_S>();
    p.b.SetValue(0, half(1));
}
PROBE(store_twice) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    DataCopy(p.y[16 * GetBlockIdx()], p.b, 16);
    if (!broken) PipeBarrier<PIPE_MTE3>();
    DataCopy(p.y[16 * GetBlockIdx()], p.b, 16);
}
PROBE(store_then_load) {
    p.ones();
    pass<HardEvent::V_MTE3>();
    pass<HardEvent::V_MTE2>();
    DataCopy(p.own[16 * GetBlockIdx()], p.b, 16);
    if (!broken) pass<HardEvent::MTE3_MTE2>();
    DataCopy(p.a, p.own[16 * GetBlockIdx()], 16);
}
PROBE(load_then_store) {
    p.ones();
    PipeBarrier<PIPE_ALL>();
    DataCopy(p.own[16 * GetBlockIdx()], p.b, 16);
    pass<HardEvent::MTE3_MTE2>();
    DataCopy(p.a, p.own[16 * GetBlockIdx()], 16);
    if (!broken) pass<HardEvent::MTE2_MTE3>();
    DataCopy(p.own[16 * GetBlockIdx()], p.b, 16);
}
PROBE(wrong_flag) {  // V waits for stores, not for the load
    DataCopy(p.a, p.x, 16);
    broken ? pass<HardEvent::MTE3_V>() : pass<HardEvent::MTE2_V>();
    Muls(p.b, p.a, half(1), 16);
}
PROBE(wrong_barrier) {
    DataCopy(p.a, p.x, 16);
    if (broken)
        PipeBarrier<PIPE_V>();
    else
        PipeBarrier<PIPE_ALL>();
    Muls(p.b, p.a, half(1), 16);
}
PROBE(flag_too_early) {
    SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    DataCopy(p.a, p.x, 16);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    if (!broken) pass<HardEvent::MTE2_V>();
    Muls(p.b, p.a, half(1), 16);
}
PROBE(flag_through_two) {  // MTE3 waits for V, so it also waits for everything that V has waited for
    DataCopy(p.b, p.x, 16);
    if (!broken) pass<HardEvent::MTE2_V>();
    pass<HardEvent::V_MTE3>();
    DataCopy(p.y[16 * GetBlockIdx()], p.b, 16);
}
PROBE(queue_guards_only_its_pipes) {  // EnQue and DeQue order MTE2 and V, not the scalar unit
    TQue<QuePosition::VECIN, 1> q;
    p.pipe.InitBuffer(q, 1, 256);
    auto tensor = q.template AllocTensor<half>();
    DataCopy(tensor, p.x, 16);
    q.EnQue(tensor), tensor = q.template DeQue<half>();
    if (broken)
        tensor.GetValue(0);
    else
        Muls(p.b, tensor, half(1), 16);
    q.FreeTensor(tensor);
}
PROBE(flag_left) {
    SetFlag<HardEvent::V_S>(EVENT_ID0);
    if (!broken) WaitFlag<HardEvent::V_S>(EVENT_ID0);
}
PROBE(wait_without_set) {
    if (!broken) SetFlag<HardEvent::V_S>(EVENT_ID0);
    WaitFlag<HardEvent::V_S>(EVENT_ID0);
}
PROBE(set_twice) {
    SetFlag<HardEvent::V_S>(EVENT_ID0);
    SetFlag<HardEvent::V_S>(broken ? EVENT_ID0 : EVENT_ID1);
    WaitFlag<HardEvent::V_S>(EVENT_ID0);
    WaitFlag<HardEvent::V_S>(EVENT_ID1);
}
PROBE(event_id) {
    SetFlag<HardEvent::V_S>(broken ? 8 : 7);
    WaitFlag<HardEvent::V_S>(7);
}
PROBE(events_run_out) {
    for (int i = 0; i < (broken ? 9 : 8); ++i) p.pipe.template AllocEventID<HardEvent::V_S>();
}
